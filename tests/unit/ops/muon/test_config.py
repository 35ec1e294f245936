# SPDX-License-Identifier: Apache-2.0
"""The section ``optimizer.params``: defaults, precedence, and the rule of ``adjust_lr_fn``."""

import re
from typing import Any

import pytest

from deepspeed.muon.config.fields import STOCK_TUNING_KEYS
from deepspeed.muon.config.schema import MuonConfig, parse
from deepspeed.muon.errors import MuonConfigError
from deepspeed.muon.math import coefficients

ADAMW_SECTION = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1}
EVERY_KEY = {
    "lr": 0.1,
    "muon_lr": 0.2,
    "adam_lr": 0.3,
    "momentum": 0.9,
    "nesterov": False,
    "weight_decay": 0.01,
    "muon_weight_decay": 0.02,
    "adam_weight_decay": 0.03,
    "ns_method": "gram",
    "ns_steps": 3,
    "ns_coefficients": [[1.5, -0.5, 0]],
    "ns_dtype": "fp32",
    "adjust_lr_fn": "none",
    "betas": [0.8, 0.9],
    "eps": 1e-6,
    "adam_w_mode": False,
    "torch_adam": True,
}


def message(params: dict[str, Any]) -> str:
    with pytest.raises(MuonConfigError) as error:
        parse(params)
    return str(error.value)


# ---- what is accepted -----------------------------------------------------------------------------------


@pytest.mark.parametrize("section", [None, {}])
def test_defaults_are_stocks(section: dict[str, Any] | None) -> None:
    config = parse(section)
    rates = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0}
    assert config.muon_group() == rates | {"nesterov": True, "ns_method": "auto", "adjust_lr_fn": "original"}
    adam = config.adam_group()
    assert (adam["lr"], adam["betas"], adam["eps"], adam["weight_decay"]) == (3e-4, (0.9, 0.95), 1e-10, 0.0)
    assert config.nesterov
    assert config.adam_w_mode
    assert (config.ns_method, config.ns_dtype, config.scale) == ("auto", "auto", "original")
    assert config.schedule == (coefficients.SIMPLE,) * 5


def test_defaults_equal_those_of_the_installed_stock() -> None:
    import torch
    from deepspeed.runtime.zero.muon.original_muon import MuonWithAuxAdam as Stock

    groups = [{"params": [torch.nn.Parameter(torch.zeros(2, 2))], "use_muon": flag} for flag in (True, False)]
    muon, adam = Stock(groups).param_groups
    config = parse({})
    ours = config.muon_group()
    assert {key: muon[key] for key in ("lr", "momentum", "weight_decay")}.items() <= ours.items()
    assert {key: adam[key] for key in ("lr", "betas", "eps", "weight_decay")} == {
        key: value for key, value in config.adam_group().items() if key != "fused"
    }


@pytest.mark.parametrize(
    ("section", "muon", "adam"),
    [
        ({"lr": 0.1}, 0.1, 0.1),
        ({"muon_lr": 0.1}, 0.1, 3e-4),
        ({"adam_lr": 0.1}, 0.02, 0.1),
        ({"lr": 0.1, "muon_lr": 0.2}, 0.2, 0.1),
        ({"lr": 0.1, "adam_lr": 0.2}, 0.1, 0.2),
        ({"lr": 0.1, "muon_lr": 0.2, "adam_lr": 0.3}, 0.2, 0.3),
        ({"lr": 0.1, "muon_lr": 0, "adam_lr": 0}, 0.0, 0.0),
        ({"lr": 0}, 0.0, 0.0),
        ({"lr": 0.1, "muon_lr": None, "adam_lr": None}, 0.1, 0.1),
    ],
)
def test_learning_rates(section: dict[str, Any], muon: float, adam: float) -> None:
    config = parse(section)
    assert (config.muon_group()["lr"], config.adam_group()["lr"]) == (muon, adam)


@pytest.mark.parametrize(
    ("section", "muon", "adam"),
    [
        ({"weight_decay": 0.1}, 0.1, 0.1),
        ({"muon_weight_decay": 0.1}, 0.1, 0.0),
        ({"adam_weight_decay": 0.1}, 0.0, 0.1),
        ({"weight_decay": 0.1, "adam_weight_decay": 0}, 0.1, 0.0),
        ({"weight_decay": 0.1, "muon_weight_decay": 0}, 0.0, 0.1),
        ({"weight_decay": 0.1, "muon_weight_decay": 0.2, "adam_weight_decay": 0.3}, 0.2, 0.3),
    ],
)
def test_weight_decays(section: dict[str, Any], muon: float, adam: float) -> None:
    config = parse(section)
    assert (config.muon_group()["weight_decay"], config.adam_group()["weight_decay"]) == (muon, adam)


def test_every_key_arrives() -> None:
    config = parse(EVERY_KEY)
    rates = {"lr": 0.2, "momentum": 0.9, "weight_decay": 0.02}
    assert config.muon_group() == rates | {"nesterov": False, "ns_method": "gram", "adjust_lr_fn": "none"}
    adam = config.adam_group()
    assert (adam["lr"], adam["betas"], adam["eps"], adam["weight_decay"]) == (0.3, (0.8, 0.9), 1e-6, 0.03)
    assert (config.nesterov, config.adam_w_mode, config.torch_adam) == (False, False, True)
    assert (config.ns_method, config.ns_dtype, config.scale) == ("gram", "fp32", "none")
    assert config.schedule == ((1.5, -0.5, 0.0),) * 3


def test_parsing_leaves_the_section_alone() -> None:
    section = dict(EVERY_KEY)
    parse(section)
    assert section == EVERY_KEY


@pytest.mark.parametrize("method", ["auto", "standard", "gram"])
@pytest.mark.parametrize("dtype", ["auto", "bf16", "fp32"])
def test_choices_are_accepted(method: str, dtype: str) -> None:
    config = parse({"ns_method": method, "ns_dtype": dtype})
    assert (config.ns_method, config.ns_dtype) == (method, dtype)


@pytest.mark.parametrize("name", coefficients.NAMED)
def test_named_schedules(name: str) -> None:
    assert parse({"ns_coefficients": name}).schedule == coefficients.schedule(name)


def test_config_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        parse({}).lr = 1.0


def test_every_field_is_described() -> None:
    assert all(field.description for field in MuonConfig.model_fields.values())


# ---- adjust_lr_fn: auto ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "scale"),
    [
        ({}, "original"),
        ({"lr": 1e-3}, "match_rms_adamw"),
        (ADAMW_SECTION, "match_rms_adamw"),
        (ADAMW_SECTION | {"adam_w_mode": True, "torch_adam": True, "fp32_optimizer_states": True}, "match_rms_adamw"),
        (ADAMW_SECTION | {"adjust_lr_fn": "auto"}, "match_rms_adamw"),
        ({"weight_decay": 0.1, "betas": [0.9, 0.95]}, "original"),  # no lr: stock's 0.02 acts
        ({"adjust_lr_fn": "auto"}, "original"),
        ({"muon_lr": 0.02}, "original"),
        ({"adam_lr": 3e-4}, "original"),
        ({"lr": 1e-3, "adjust_lr_fn": "original"}, "original"),
        ({"lr": 1e-3, "adjust_lr_fn": "none"}, "none"),
        ({"muon_lr": 1e-3, "adjust_lr_fn": "match_rms_adamw"}, "match_rms_adamw"),
        ({"adjust_lr_fn": "spectral_unclamped"}, "spectral_unclamped"),
    ],
)
def test_auto_scale(section: dict[str, Any], scale: str) -> None:
    assert parse(section).scale == scale


@pytest.mark.parametrize("key", ["muon_lr", "adam_lr", "momentum"])
def test_a_value_tuned_for_stocks_muon_means_its_scale(key: str) -> None:
    """Also at the value that is the default."""
    assert parse(ADAMW_SECTION | {key: EVERY_KEY[key]}).scale == "original"
    if key == "momentum":
        assert parse(ADAMW_SECTION | {key: MuonConfig.model_fields[key].default}).scale == "original"


OTHERS = sorted(MuonConfig.model_fields.keys() - {*STOCK_TUNING_KEYS, "lr", "adjust_lr_fn", "rms_scale"})
VALUES = EVERY_KEY | {"ns_coefficients": [[1.5, -0.5, 0]], "per_head_muon": True, "tp_mode": "shard"}


@pytest.mark.parametrize("key", OTHERS)
def test_no_other_key_decides_by_being_there(key: str) -> None:
    """Whoever goes from AdamW to Muon with AdamW's learning rate may add any key, those to come included."""
    values = [VALUES.get(key), MuonConfig.model_fields[key].default]
    for value in [value for value in values if value is not None]:
        assert parse(ADAMW_SECTION | {key: value}).scale == "match_rms_adamw"
        assert parse({"muon_lr": 0.02, key: value}).scale == "original"


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        ({"lr": 1e-3, "adjust_lr_fn": "none"}, "set by adjust_lr_fn"),
        ({"lr": 1e-3, "rms_scale": 0.3}, "because rms_scale is set"),
        ({"lr": 1e-3, "muon_lr": 0.02, "momentum": 0.9}, "stock Muon's, because of muon_lr, momentum"),
        ({"nesterov": False}, "stock Muon's, because lr is not set"),
        ({"lr": 1e-3, "nesterov": False}, "AdamW's size, because lr is set and none of muon_lr, adam_lr, momentum"),
    ],
)
def test_the_scale_has_a_reason(section: dict[str, Any], reason: str) -> None:
    assert parse(section).scale_reason == reason


def test_an_rms_asks_for_the_scale_that_has_one() -> None:
    for section in ({"rms_scale": 0.3}, {"rms_scale": 0.3, "muon_lr": 0.02}, ADAMW_SECTION | {"rms_scale": 0.3}):
        assert parse(section).scale == "match_rms_adamw"
    assert "optimizer.params.rms_scale: acts under" in message({"rms_scale": 0.3, "adjust_lr_fn": "none"})


def test_a_null_learning_rate_is_none_given() -> None:
    assert parse({"lr": None}).scale == parse({}).scale


# ---- digest ---------------------------------------------------------------------------------------------


def test_digest_of_equal_configs_is_equal() -> None:
    assert parse(EVERY_KEY).digest() == parse(dict(reversed(EVERY_KEY.items()))).digest()
    assert parse({"lr": 1, "betas": [0.9, 0.95]}).digest() == parse({"lr": 1.0, "betas": (0.9, 0.95)}).digest()
    assert re.fullmatch(r"[0-9a-f]{16}", parse({}).digest())


@pytest.mark.parametrize("key", EVERY_KEY)
def test_digest_differs_with_every_key(key: str) -> None:
    section = dict.fromkeys(("lr", "momentum"), 0.5)
    assert parse(section | {key: EVERY_KEY[key]}).digest() != parse(section).digest()


def test_digest_sees_the_last_bit() -> None:
    assert parse({"lr": 0.1}).digest() != parse({"lr": 0.1 + 2**-55}).digest()


def test_digest_differs_where_the_scale_differs() -> None:
    tuned_for_adamw, tuned_for_muon = parse({"lr": 1e-3}), parse({"lr": 1e-3, "momentum": 0.95})
    assert tuned_for_adamw.scale != tuned_for_muon.scale
    assert tuned_for_adamw.digest() != tuned_for_muon.digest()
