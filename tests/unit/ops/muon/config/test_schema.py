# SPDX-License-Identifier: Apache-2.0
"""The section ``optimizer.params``: defaults, precedence, the rule of ``adjust_lr_fn``, presets, and the digest.

What is refused, with the messages, is in docs/reference/wrong-configurations.md, which test_refusals.py compares.
"""

from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.muon.original_muon import MuonWithAuxAdam as Stock

from deepspeed.muon import MuonWithAuxAdam
from deepspeed.muon.config.schema import HARMLESS, PRESETS, STOCK_TUNING_KEYS, ClipOptions, MuonConfig, parse
from deepspeed.muon.errors import MuonConfigError
from deepspeed.muon.layout import Cut
from deepspeed.muon.math import newton_schulz

ADAMW_SECTION = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1}


def halves(section: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    config = parse(section)
    return config.muon_group(), config.adam_group()


# ---- what is accepted -----------------------------------------------------------------------------------


@pytest.mark.parametrize("section", [None, {}, {"weight_decay": None, "ns_steps": None, "lr": None}])
def test_defaults_are_those_of_the_installed_stock(section: dict[str, Any] | None) -> None:
    config = parse(section)
    assert config == parse({})
    groups = [{"params": [torch.nn.Parameter(torch.zeros(2, 2))], "use_muon": flag} for flag in (True, False)]
    muon, adam = Stock(groups).param_groups
    rates = {key: muon[key] for key in ("lr", "momentum", "weight_decay")}
    assert config.muon_group() == rates | {"nesterov": True, "ns_method": "auto", "adjust_lr_fn": "original"}
    rates = {key: adam[key] for key in ("lr", "betas", "eps", "weight_decay")}
    assert config.adam_group() == rates | {"fused": True, "bias_correction": True}
    assert (config.adam_w_mode, config.ns_dtype, config.schedule) == (True, "auto", (newton_schulz.SIMPLE,) * 5)


@pytest.mark.parametrize(
    ("section", "key", "muon", "adam"),
    [
        ({"lr": 0.1}, "lr", 0.1, 0.1),
        ({"muon_lr": 0.1}, "lr", 0.1, 3e-4),
        ({"adam_lr": 0.1}, "lr", 0.02, 0.1),
        ({"lr": 0.1, "muon_lr": 0.2}, "lr", 0.2, 0.1),
        ({"lr": 0.1, "muon_lr": 0, "adam_lr": 0}, "lr", 0.0, 0.0),
        ({"lr": 0.1, "muon_lr": None, "adam_lr": None}, "lr", 0.1, 0.1),
        ({"adam_weight_decay": 0.1}, "weight_decay", 0.0, 0.1),
        ({"weight_decay": 0.1, "adam_weight_decay": 0}, "weight_decay", 0.1, 0.0),
        ({"weight_decay": 0.1, "muon_weight_decay": 0}, "weight_decay", 0.0, 0.1),
    ],
    ids=str,
)
def test_a_key_of_one_half_wins_over_that_of_both(section: dict[str, Any], key: str, muon: float, adam: float) -> None:
    assert tuple(half[key] for half in halves(section)) == (muon, adam)


@pytest.mark.parametrize(
    ("section", "value"),
    [
        ({"eps": "1e-8"}, 1e-8),  # as YAML reads 1e-8
        ({"lr": "+.5"}, 0.5),
        ({"betas": ["0.9", "9.99e-1"]}, (0.9, 0.999)),
        ({"ns_steps": "5"}, 5),
        ({"bucket_bytes": "2e8"}, 200_000_000),
        ({"qk_clip": {"tau": "5e1"}}, ClipOptions(tau=50.0)),
        ({"muon_split": {1: [4]}}, {"1": Cut((4,))}),  # a key of digits in YAML
        ({"muon_split": {"a": {"sizes": (1, 2), "axis": 0}}}, {"a": Cut((1, 2))}),
        ({"ns_coefficients": [3, -4.5, 2.25]}, [[3, -4.5, 2.25]]),  # as in torch.optim.Muon
        ({"ns_dtype": "torch.float16"}, "fp16"),
        ({"wire_dtype": "FP32"}, "fp32"),
        ({"momentum_dtype": "bfloat16"}, "bf16"),
    ],
    ids=str,
)
def test_other_spellings(section: dict[str, Any], value: Any) -> None:
    (key,) = section
    assert getattr(parse(section), key) == value and type(getattr(parse(section), key)) is type(value)
    assert parse(section).digest() == parse({key: value}).digest()


@pytest.mark.parametrize("section", [{5: 1}, {"lr": b"1"}, {"betas": {0.9}}, {"muon_include": {"a"}}], ids=str)
def test_what_json_does_not_have_is_refused(section: dict[Any, Any]) -> None:
    with pytest.raises(MuonConfigError, match=rf"^optimizer\.params\.{next(iter(section))}: ") as error:
        parse(section)
    assert error.value.__cause__ is None and error.value.__suppress_context__, "pydantic's errors are not shown"


def test_keys_of_adamw_that_change_nothing_are_accepted() -> None:
    idle = {"torch_adam": True, "adam_w_mode": True, "bias_correction": True, "foreach": None}
    for key, value in [*idle.items(), *((key, value) for key, values in HARMLESS.items() for value in values)]:
        assert halves(ADAMW_SECTION | {key: value}) == halves(ADAMW_SECTION)


# ---- adjust_lr_fn: auto ---------------------------------------------------------------------------------

NO_RATE = "because no learning rate is set"


@pytest.mark.parametrize(
    ("section", "scale", "reason"),
    [
        ({"adjust_lr_fn": "auto", "nesterov": False}, "original", NO_RATE),
        ({"weight_decay": 0.1, "momentum": 0.9}, "original", NO_RATE),  # stock's 0.02 acts
        ({"lr": 1e-3, "muon_lr": 0.02, "momentum": 0.95}, "original", "because muon_lr is set"),
        ({"lr": 1e-3, "adam_lr": 0.02}, "original", "because adam_lr is set"),
        ({"muon_lr": 0.1, "adam_lr": 0.02}, "original", "because muon_lr and adam_lr are set"),
        (ADAMW_SECTION | {"adjust_lr_fn": "auto"}, "match_rms_adamw", "the default"),
        ({"rms_scale": 0.3, "muon_lr": 0.02}, "match_rms_adamw", "because rms_scale is set"),
        (ADAMW_SECTION | {"rms_scale": 0.3, "momentum": 0.9}, "match_rms_adamw", "because rms_scale is set"),
        ({"lr": 1e-3, "momentum": 0.9, "adjust_lr_fn": "original"}, "original", "as the config says"),
        ({"muon_lr": 1e-3, "adjust_lr_fn": "match_rms_adamw"}, "match_rms_adamw", "as the config says"),
    ],
    ids=str,
)
def test_auto_scale(section: dict[str, Any], scale: str, reason: str) -> None:
    config = parse(section)
    assert config.scale == scale and config.scale_reason.startswith(reason)


NOT_THE_SCALE = MuonConfig.model_fields.keys() - {"lr", "adjust_lr_fn", "rms_scale", "momentum", *STOCK_TUNING_KEYS}


@pytest.mark.parametrize("key", sorted(NOT_THE_SCALE))
def test_no_other_key_decides_the_scale(key: str) -> None:
    """Whoever goes from AdamW to Muon with AdamW's learning rate may add any other key, those to come included."""
    needed = {"normuon_beta2": {"normuon": True}, "momentum_warmup_steps": {"momentum_start": 0.5}}.get(key, {})
    section = needed | {key: MuonConfig.model_fields[key].default}
    assert parse(ADAMW_SECTION | section).scale == "match_rms_adamw"
    assert parse({"muon_lr": 0.02} | section).scale == "original"


def test_a_group_may_have_another_scale_than_the_one_that_rms_scale_or_a_preset_asks_for() -> None:
    for config in (parse({"lr": 1e-3, "rms_scale": 0.3}), parse({"preset": "deepseek_v4"})):
        group = config.for_group({"adjust_lr_fn": "original", "lr": 0.5}, "group 0: ")
        assert (group.scale, group.lr, group.weight_decay) == ("original", 0.5, config.weight_decay)
        assert config.for_group({"momentum": 0.9}, "group 0: ").scale == "match_rms_adamw"


# ---- digest ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"lr": 0.1}, {"lr": 0.1 + 2**-55}),
        ({"kernels": "auto"}, {"kernels": "torch"}),
        ({"muon_split": {"a": [1, 2]}}, {"muon_split": {"a": [2, 1]}}),
        ({"lr": 1e-3}, {"lr": 1e-3, "adjust_lr_fn": "original"}),
    ],
    ids=["the last bit", "a word", "the order of sizes", "only the scale"],
)
def test_digest_differs_with(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert parse(first).digest() == parse(dict(reversed(first.items()))).digest()
    assert parse(first).digest() != parse(second).digest()


# ---- presets --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_its_values_any_of_which_may_be_taken_out(name: str) -> None:
    config, values = parse({"preset": name}), PRESETS[name].settings
    assert config.model_fields_set == {"preset", *values} and config.preset_values == values
    assert {key: getattr(config, key) for key in values} == {key: getattr(parse(values), key) for key in values}
    assert config.sets_learning_rate, "one line is enough"
    for key in values:
        assert getattr(parse({"preset": name, key: None}), key) == MuonConfig.model_fields[key].default, key


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"preset": "none"}, {"preset_values": {}, "lr": None}),
        ({"preset": "kimi_k2", "lr": 1e-3}, {"lr": 1e-3, "qk_clip": ClipOptions(tau=100), "weight_decay": 0.1}),
        ({"preset": "kimi_k2", "qk_clip": {"tau": 30}}, {"qk_clip": ClipOptions(tau=30)}),
        ({"preset": "moonlight", "ns_coefficients": "polar_express"}, {"ns_steps": None}),
        ({"preset": "kimi_k2", "adjust_lr_fn": None}, {"scale": "match_rms_adamw"}),
        ({"preset": "kimi_k2", "momentum": 0.9}, {"scale": "match_rms_adamw"}),
        ({"preset": "nanochat", "lr": 1e-3}, {"muon_lr": None, "adam_lr": None}),
        ({"preset": "nanochat", "weight_decay": 0.1}, {"muon_weight_decay": None, "adam_weight_decay": None}),
        ({"preset": "nanochat", "muon_lr": 0.01}, {"muon_lr": 0.01, "adam_lr": 0.008}),
        ({"preset": "nanochat", "normuon": False}, {"normuon": False, "momentum_start": 0.85}),
    ],
    ids=str,
)
def test_any_key_overrides_a_preset(section: dict[str, Any], expected: dict[str, Any]) -> None:
    config = parse(section)
    assert {key: getattr(config, key) for key in expected} == expected
    assert not config.preset_values.keys() & (section.keys() - {"preset"})


@pytest.mark.parametrize(("name", "key"), [("kimi_k2", "qk_clip"), ("glm5", "per_head_muon")])
def test_an_error_about_a_key_of_the_preset_names_the_preset(name: str, key: str) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))
    with pytest.raises(MuonConfigError, match=rf"\(preset {name} has set .*{key}.*; set a key to null to remove it\)"):
        MuonWithAuxAdam(net.parameters(), model=net, preset=name)
    assert MuonWithAuxAdam(net.parameters(), model=net, preset=name, **{key: None})
