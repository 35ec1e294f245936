# SPDX-License-Identifier: Apache-2.0
"""The section ``optimizer.params``: defaults, precedence, the rule of ``adjust_lr_fn``, and every refusal."""

import difflib
import re
from typing import Any

import pytest

from deepspeed.muon.config.schema import MuonConfig, parse
from deepspeed.muon.config.types import STOCK_TUNING_KEYS, ClipOptions, Cut
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
    "bucket_bytes": 2**20,
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
        key: value for key, value in config.adam_group().items() if key not in ("fused", "bias_correction")
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
    assert config.bucket_bytes == 2**20
    assert config.schedule == ((1.5, -0.5, 0.0),) * 3


def test_parsing_leaves_the_section_alone() -> None:
    section = dict(EVERY_KEY)
    parse(section)
    assert section == EVERY_KEY


@pytest.mark.parametrize("method", ["auto", "standard", "gram"])
@pytest.mark.parametrize("dtype", ["auto", "bf16", "fp16", "fp32"])
def test_choices_are_accepted(method: str, dtype: str) -> None:
    config = parse({"ns_method": method, "ns_dtype": dtype})
    assert (config.ns_method, config.ns_dtype) == (method, dtype)
    assert config.wire == ("fp32" if dtype == "fp32" else "bf16")
    assert all(parse({"ns_dtype": dtype, "wire_dtype": wire}).wire == wire for wire in ("bf16", "fp32"))


@pytest.mark.parametrize(
    ("section", "value"),
    [
        ({"eps": "1e-8"}, 1e-8),  # as YAML reads 1e-8
        ({"lr": "2E-5"}, 2e-5),
        ({"lr": "+.5"}, 0.5),
        ({"betas": ["0.9", "9.99e-1"]}, (0.9, 0.999)),
        ({"ns_steps": "5"}, 5),
        ({"bucket_bytes": 2e8}, 200_000_000),
        ({"bucket_bytes": "2e8"}, 200_000_000),
        ({"qk_clip": {"tau": "5e1"}}, ClipOptions(tau=50.0)),
        ({"muon_split": {1: [4]}}, {"1": Cut((4,))}),  # a key of digits in YAML
        ({"ns_dtype": "bfloat16"}, "bf16"),
        ({"ns_dtype": "float32"}, "fp32"),
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


HARMLESS = {"amsgrad": False, "maximize": False, "fused": True, "foreach": True, "capturable": False}
HARMLESS |= {"differentiable": False, "set_grad_none": True, "decoupled_weight_decay": True, "foreach": None}


def test_keys_of_adamw_that_change_nothing_are_accepted() -> None:
    section = ADAMW_SECTION | HARMLESS | {"torch_adam": True, "adam_w_mode": True, "bias_correction": True}
    config = parse(section)
    assert (config.muon_group(), config.adam_group()) == (parse(ADAMW_SECTION).muon_group(), config.adam_group())
    assert config.adam_group() == parse(ADAMW_SECTION).adam_group()


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
VALUES = EVERY_KEY | {
    "qk_clip": {"tau": 50, "alpha": 0.5},
    "ns_coefficients": [[1.5, -0.5, 0]],
    "per_head_muon": True,
    "tp_mode": "shard",
}


@pytest.mark.parametrize("key", OTHERS)
def test_no_other_key_decides_by_being_there(key: str) -> None:
    """Whoever goes from AdamW to Muon with AdamW's learning rate may add any key, those to come included."""
    values = [VALUES.get(key), MuonConfig.model_fields[key].default]
    needed = {"normuon_beta2": {"normuon": True}, "momentum_warmup_steps": {"momentum_start": 0.5}}.get(key, {})
    for value in [value for value in values if value is not None]:
        assert parse(ADAMW_SECTION | needed | {key: value}).scale == "match_rms_adamw"
        assert parse({"muon_lr": 0.02, **needed, key: value}).scale == "original"


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
    assert "optimizer.params.rms_scale: acts with" in message({"rms_scale": 0.3, "adjust_lr_fn": "none"})


def test_a_group_may_have_another_scale_than_the_one_that_rms_scale_asks_for() -> None:
    config = parse({"lr": 1e-3, "rms_scale": 0.3})
    assert config.for_group({"adjust_lr_fn": "original"}, "group 0: ").scale == "original"
    assert config.for_group({"momentum": 0.9}, "group 0: ").scale == "match_rms_adamw"


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


WRONG: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    # Misspelt keys: the nearest valid one.
    ({"mometum": 0.9}, ("optimizer.params.mometum", "did you mean momentum?")),
    ({"beta": [0.9, 0.95]}, ("optimizer.params.beta", "did you mean betas?")),
    ({"weigth_decay": 0.1}, ("optimizer.params.weigth_decay", "did you mean weight_decay?")),
    ({"muon-lr": 0.1}, ("optimizer.params.muon-lr", "did you mean muon_lr?")),
    ({"muon_learning_rate": 0.1}, ("optimizer.params.muon_learning_rate", "did you mean muon_lr?")),
    ({"learning_rate_muon": 0.1}, ("optimizer.params.learning_rate_muon", "did you mean muon_lr?")),
    ({"adam_learning_rate": 0.1}, ("optimizer.params.adam_learning_rate", "did you mean adam_lr?")),
    ({"learning_rate_adam": 0.1}, ("optimizer.params.learning_rate_adam", "did you mean adam_lr?")),
    ({"ns_step": 5}, ("optimizer.params.ns_step", "did you mean ns_steps?")),
    ({"newton_schulz_steps": 5}, ("optimizer.params.newton_schulz_steps", "ns_steps")),
    ({"nestrov": True}, ("optimizer.params.nestrov", "did you mean nesterov?")),
    ({"adjust_lr": "original"}, ("optimizer.params.adjust_lr", "did you mean adjust_lr_fn?")),
    ({"adam_weight_decy": 0.1}, ("optimizer.params.adam_weight_decy", "did you mean adam_weight_decay?")),
    # Unknown keys without a neighbour: what there is.
    ({"amsgrad": True}, ("optimizer.params.amsgrad", "not supported")),
    ({"schedule_free": True}, ("optimizer.params.schedule_free", "known keys: preset, lr")),
    ({5: 1}, ("optimizer.params.5: got 1; unknown key", "known keys: preset, lr")),
    # Keys of AdamW with a value that changes its results, or with none that AdamW knows.
    ({"maximize": True}, ("optimizer.params.maximize", "change the sign")),
    ({"foreach": "yes"}, ("optimizer.params.foreach", "'yes'", "true or false")),
    ({"amsgrad": 0}, ("optimizer.params.amsgrad", "not supported")),
    ({"decoupled_weight_decay": False}, ("optimizer.params.decoupled_weight_decay", '"adam_w_mode": false')),
    # Other projects' names.
    ({"momentum_beta": 0.9}, ("optimizer.params.momentum_beta", "did you mean momentum?")),
    ({"muon_lr_scale": 10}, ("optimizer.params.muon_lr_scale", "set muon_lr to")),
    ({"aux_adam_lr": 1e-3}, ("optimizer.params.aux_adam_lr", "did you mean adam_lr?")),
    # Strings that Python reads as a number, and JSON's reader would not.
    ({"eps": "1.0e_8"}, ("optimizer.params.eps", "'1.0e_8'", "a number, 0 or more", "written like 1e-5")),
    ({"lr": "2e_5"}, ("optimizer.params.lr", "'2e_5'", "written like 1e-5")),
    ({"lr": "1e-3 "}, ("optimizer.params.lr", "'1e-3 '", "without spaces")),
    ({"lr": "\u0661"}, ("optimizer.params.lr", "a number")),
    ({"lr": "inf"}, ("optimizer.params.lr", "'inf'", "a number")),
    ({"lr": "nan"}, ("optimizer.params.lr", "'nan'", "a number")),
    ({"lr": "1e999"}, ("optimizer.params.lr", "'1e999'", "a number")),
    ({"lr": ""}, ("optimizer.params.lr", "''", "a number")),
    ({"lr": b"1"}, ("optimizer.params.lr", "b'1'", "a number")),
    ({"ns_steps": "1_0"}, ("optimizer.params.ns_steps", "'1_0'", "whole number")),
    ({"bucket_bytes": "200_000"}, ("optimizer.params.bucket_bytes", "'200_000'", "whole number")),
    ({"ns_steps": float("inf")}, ("optimizer.params.ns_steps", "inf", "whole number")),
    ({"betas": ["0.9", "0.95_"]}, ("optimizer.params.betas", "'0.95_'", "two numbers")),
    ({"qk_clip": {"tau": "1_00"}}, ("optimizer.params.qk_clip", "tau", "'1_00'")),
    ({"qk_clip": {"tau": "x"}}, ("optimizer.params.qk_clip", "tau", "not 'x'")),
    ({"qk_clip": {True: 5}}, ("optimizer.params.qk_clip", "unknown key", "known keys: tau")),  # YAML's `on: 5`
    ({"muon_split": {1: "rows"}}, ("optimizer.params.muon_split", "'1'", "not 'rows'")),
    # What pydantic takes for a flag or a list.
    ({"nesterov": "false"}, ("optimizer.params.nesterov", "'false'", "write false without quotes")),
    ({"nesterov": "yes"}, ("optimizer.params.nesterov", "'yes'", "true or false")),
    ({"nesterov": 1}, ("optimizer.params.nesterov", "got 1", "true or false")),
    ({"normuon": 0.0}, ("optimizer.params.normuon", "0.0", "true or false")),
    ({"fp32_optimizer_states": 1}, ("optimizer.params.fp32_optimizer_states", "only true")),
    ({"betas": {0.9}}, ("optimizer.params.betas", "two numbers")),
    ({"muon_include": {"a"}}, ("optimizer.params.muon_include", "a list")),
    # Mistyped values.
    ({"lr": "fast"}, ("optimizer.params.lr", "'fast'", "expected a number, 0 or more")),
    ({"lr": "auto"}, ("optimizer.params.lr", "'auto'", "Hugging Face")),
    ({"lr": [0.1]}, ("optimizer.params.lr", "[0.1]", "a number")),
    ({"nesterov": "maybe"}, ("optimizer.params.nesterov", "'maybe'", "true or false")),
    ({"adam_w_mode": 2}, ("optimizer.params.adam_w_mode", "2", "true or false")),
    ({"ns_steps": 2.5}, ("optimizer.params.ns_steps", "2.5", "whole number from 1 to 50")),
    ({"ns_steps": "five"}, ("optimizer.params.ns_steps", "'five'", "whole number")),
    ({"betas": 0.9}, ("optimizer.params.betas", "0.9", "two numbers")),
    ({"betas": [0.9, 0.95, 0.99]}, ("optimizer.params.betas", "[0.9, 0.95, 0.99]", "two numbers")),
    ({"ns_coefficients": 3}, ("optimizer.params.ns_coefficients", "got 3")),
    ({"ns_coefficients": [[1, 2]]}, ("optimizer.params.ns_coefficients", "[[1, 2]]")),
    ({"ns_coefficients": [[1, 2, "x"]]}, ("optimizer.params.ns_coefficients", "'x'", "numbers")),
    # Out of range.
    ({"lr": -1e-3}, ("optimizer.params.lr", "-0.001", "0 or more")),
    ({"lr": float("nan")}, ("optimizer.params.lr", "nan")),
    ({"muon_lr": -1}, ("optimizer.params.muon_lr", "-1", "0 or more")),
    ({"adam_weight_decay": -1}, ("optimizer.params.adam_weight_decay", "-1", "0 or more")),
    ({"momentum": 1.0}, ("optimizer.params.momentum", "1.0", "from 0 to below 1")),
    ({"momentum": -0.1}, ("optimizer.params.momentum", "-0.1", "from 0 to below 1")),
    ({"betas": [0.9, 1.0]}, ("optimizer.params.betas", "[0.9, 1.0]", "from 0 to below 1")),
    ({"eps": -1e-8}, ("optimizer.params.eps", "-1e-08", "0 or more")),
    ({"ns_steps": 0}, ("optimizer.params.ns_steps", "0", "from 1 to 50")),
    ({"ns_steps": 51}, ("optimizer.params.ns_steps", "51", "from 1 to 50")),
    # Choices.
    ({"ns_method": "grams"}, ("optimizer.params.ns_method", "'grams'", "auto, standard or gram", "mean 'gram'?")),
    ({"ns_method": "Standard"}, ("optimizer.params.ns_method", "did you mean 'standard'?")),
    ({"ns_dtype": "bf1"}, ("optimizer.params.ns_dtype", "'bf1'", "did you mean 'bf16'?")),
    ({"ns_dtype": "fp64"}, ("optimizer.params.ns_dtype", "'fp64'", "auto, bf16, fp16 or fp32")),
    ({"wire_dtype": "fp16"}, ("optimizer.params.wire_dtype", "fp16 is not supported", "use bf16 or fp32")),
    ({"wire_dtype": "Half"}, ("optimizer.params.wire_dtype", "fp16 is not supported")),
    ({"ns_tuning": "measure"}, ("optimizer.params.ns_tuning", "shipped or measured", "mean 'measured'?")),
    ({"adjust_lr_fn": "match_rms_adam"}, ("optimizer.params.adjust_lr_fn", "did you mean 'match_rms_adamw'?")),
    ({"adjust_lr_fn": "rms"}, ("optimizer.params.adjust_lr_fn", "'rms'", "match_rms_adamw", "none")),
    # Schedules.
    ({"ns_coefficients": "simpel"}, ("optimizer.params.ns_coefficients", "did you mean 'simple'?")),
    ({"ns_coefficients": "you", "ns_steps": 4}, ("optimizer.params", "ns_steps is 4", "5 steps")),
    ({"ns_coefficients": [[1, 0, 0]] * 2, "ns_steps": 3}, ("optimizer.params", "ns_steps is 3", "2 steps")),
    # What exists elsewhere, or not yet.
    ({"max_grad_norm": 1.0}, ("optimizer.params.max_grad_norm", "gradient_clipping")),
    ({"per_head_muon": 2}, ("optimizer.params.per_head_muon", "true or false")),
    ({"fp32_optimizer_states": False}, ("optimizer.params.fp32_optimizer_states", "only true", "remove")),
]


@pytest.mark.parametrize(("section", "parts"), WRONG, ids=[str(section) for section, _ in WRONG])
def test_a_wrong_section_is_refused(section: dict[str, Any], parts: tuple[str, ...]) -> None:
    text = message(section)
    assert all(part in text for part in parts), text
    assert "pydantic" not in text


def test_the_error_is_a_value_error_without_a_chain() -> None:
    with pytest.raises(ValueError) as error:
        parse({"lr": -1})
    assert type(error.value) is MuonConfigError
    assert error.value.__cause__ is None
    assert error.value.__suppress_context__


def test_every_wrong_key_is_named_once() -> None:
    text = message({"lr": -1, "momentun": 0.9, "ns_dtype": "fp8", "per_head_muon": 2, "betas": [2, 3], "eps": 1e-8})
    keys = ("lr", "momentun", "ns_dtype", "per_head_muon", "betas")
    assert [text.count(f"optimizer.params.{key}:") for key in keys] == [1] * len(keys), text
    assert "optimizer.params.eps" not in text
    assert len(text.splitlines()) == len(keys)


@pytest.mark.parametrize("key", MuonConfig.model_fields)
def test_every_key_with_a_letter_missing_gets_a_suggestion(key: str) -> None:
    wrong = key[: len(key) // 2] + key[len(key) // 2 + 1 :]
    if wrong in MuonConfig.model_fields or len(wrong) < 2:
        pytest.skip("too short to misspell")
    suggested = re.search(r"did you mean (\w+)\?", message({wrong: 1}))
    assert suggested
    ratio = {name: difflib.SequenceMatcher(None, name, wrong).ratio() for name in MuonConfig.model_fields}
    assert ratio[suggested[1]] == max(ratio.values())


@pytest.mark.parametrize("section", [{"ns_coefficients": "simpel"}, {"ns_coefficients": "you", "ns_steps": 4}])
def test_a_wrong_schedule_names_its_key(section: dict[str, Any]) -> None:
    assert re.search(r"optimizer\.params\.ns_(coefficients|steps):", message(section))


def test_a_misspelt_schedule_gets_a_suggestion() -> None:
    assert "did you mean 'simple'?" in message({"ns_coefficients": "simpel"})


def test_a_wrong_schedule_is_named_beside_other_errors() -> None:
    text = message({"ns_coefficients": "simpel", "lr": -1})
    assert "simpel" in text
    assert "optimizer.params.lr" in text


def test_max_grad_norm_is_named_beside_other_errors() -> None:
    text = message({"max_grad_norm": 1.0, "lr": -1})
    assert "optimizer.params.max_grad_norm" in text
    assert "optimizer.params.lr" in text


def test_a_single_triple_needs_no_outer_list() -> None:
    """As in ``torch.optim.Muon``."""
    assert parse({"ns_coefficients": [3.4445, -4.775, 2.0315]}).schedule == parse({}).schedule


def test_null_leaves_the_default() -> None:
    assert parse({"weight_decay": None, "ns_steps": None}) == parse({})


def test_a_key_in_upper_case_gets_a_suggestion() -> None:
    assert "did you mean lr?" in message({"LR": 0.1})


@pytest.mark.parametrize(
    "section",
    [
        {"ns_coefficients": []},
        {"ns_coefficients": [[float("nan"), 1, 1]]},
        {"lr": float("inf")},
        {"lr": True},
        {"ns_steps": True},
    ],
    ids=str,
)
def test_values_without_a_meaning_are_refused(section: dict[str, Any]) -> None:
    message(section)
