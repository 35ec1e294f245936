# SPDX-License-Identifier: Apache-2.0
"""The section ``optimizer.params``: defaults, precedence, the rule of ``adjust_lr_fn``, the digest, and refusals.

More refusals, with their whole messages, are those of docs/reference/wrong-configurations.md.
"""

import difflib
import re
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.muon.original_muon import MuonWithAuxAdam as Stock

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
    assert (config.adam_w_mode, config.ns_dtype, config.schedule) == (True, "auto", (coefficients.SIMPLE,) * 5)


def test_every_key_arrives() -> None:
    section = dict(EVERY_KEY)
    config = parse(section)
    assert section == EVERY_KEY, "parsing leaves the section as it is"
    muon, adam = halves(section)
    rates = {"lr": 0.2, "momentum": 0.9, "weight_decay": 0.02}
    assert muon == rates | {"nesterov": False, "ns_method": "gram", "adjust_lr_fn": "none"}
    assert (adam["lr"], adam["betas"], adam["eps"], adam["weight_decay"]) == (0.3, (0.8, 0.9), 1e-6, 0.03)
    assert (config.adam_w_mode, config.torch_adam, config.ns_dtype, config.bucket_bytes) == (False, True, "fp32", 2**20)
    assert config.schedule == ((1.5, -0.5, 0.0),) * 3


@pytest.mark.parametrize(
    ("section", "key", "muon", "adam"),
    [
        ({"lr": 0.1}, "lr", 0.1, 0.1),
        ({"muon_lr": 0.1}, "lr", 0.1, 3e-4),
        ({"adam_lr": 0.1}, "lr", 0.02, 0.1),
        ({"lr": 0.1, "muon_lr": 0.2}, "lr", 0.2, 0.1),
        ({"lr": 0.1, "adam_lr": 0.2}, "lr", 0.1, 0.2),
        ({"lr": 0.1, "muon_lr": 0, "adam_lr": 0}, "lr", 0.0, 0.0),
        ({"lr": 0}, "lr", 0.0, 0.0),
        ({"lr": 0.1, "muon_lr": None, "adam_lr": None}, "lr", 0.1, 0.1),
        ({"weight_decay": 0.1}, "weight_decay", 0.1, 0.1),
        ({"muon_weight_decay": 0.1}, "weight_decay", 0.1, 0.0),
        ({"adam_weight_decay": 0.1}, "weight_decay", 0.0, 0.1),
        ({"weight_decay": 0.1, "adam_weight_decay": 0}, "weight_decay", 0.1, 0.0),
        ({"weight_decay": 0.1, "muon_weight_decay": 0}, "weight_decay", 0.0, 0.1),
    ],
    ids=str,
)
def test_a_key_of_one_half_wins_over_that_of_both(section: dict[str, Any], key: str, muon: float, adam: float) -> None:
    assert tuple(half[key] for half in halves(section)) == (muon, adam)


@pytest.mark.parametrize("dtype", ["auto", "bf16", "fp16", "fp32"])
def test_what_is_sent_is_fp32_where_newton_schulz_is_or_the_key_says_so(dtype: str) -> None:
    assert parse({"ns_dtype": dtype}).wire == ("fp32" if dtype == "fp32" else "bf16")
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
        ({"muon_split": {"a": {"sizes": (1, 2), "axis": 0}}}, {"a": Cut((1, 2))}),
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
    assert halves(section) == halves(ADAMW_SECTION)


@pytest.mark.parametrize("name", coefficients.NAMED)
def test_named_schedules(name: str) -> None:
    assert parse({"ns_coefficients": name}).schedule == coefficients.schedule(name)


def test_one_triple_needs_no_outer_list() -> None:
    """As in ``torch.optim.Muon``."""
    assert parse({"ns_coefficients": [3.4445, -4.775, 2.0315]}).schedule == parse({}).schedule


def test_every_field_is_described_and_the_config_is_frozen() -> None:
    assert all(field.description for field in MuonConfig.model_fields.values())
    with pytest.raises(ValueError, match="frozen"):
        parse({}).lr = 1.0


# ---- adjust_lr_fn: auto ---------------------------------------------------------------------------------

NO_RATE, BY_RATE = "stock Muon's, because lr is not set", "AdamW's size, because lr is set and none of muon_lr, "


@pytest.mark.parametrize(
    ("section", "scale", "reason"),
    [
        ({}, "original", NO_RATE),
        ({"lr": None, "adjust_lr_fn": "auto", "nesterov": False}, "original", NO_RATE),
        ({"weight_decay": 0.1, "betas": [0.9, 0.95]}, "original", NO_RATE),  # stock's 0.02 acts
        ({"muon_lr": 0.02}, "original", "stock Muon's, because of muon_lr"),
        ({"adam_lr": 3e-4}, "original", "stock Muon's, because of adam_lr"),
        ({"lr": 1e-3, "muon_lr": 0.02, "momentum": 0.95}, "original", "stock Muon's, because of muon_lr, momentum"),
        ({"lr": 1e-3, "nesterov": False}, "match_rms_adamw", BY_RATE),
        (ADAMW_SECTION | {"adjust_lr_fn": "auto"}, "match_rms_adamw", BY_RATE),
        (
            ADAMW_SECTION | {"adam_w_mode": True, "torch_adam": True, "fp32_optimizer_states": True},
            "match_rms_adamw",
            BY_RATE,
        ),
        ({"rms_scale": 0.3}, "match_rms_adamw", "because rms_scale is set"),
        ({"rms_scale": 0.3, "muon_lr": 0.02}, "match_rms_adamw", "because rms_scale is set"),
        (ADAMW_SECTION | {"rms_scale": 0.3}, "match_rms_adamw", "because rms_scale is set"),
        ({"lr": 1e-3, "adjust_lr_fn": "original"}, "original", "set by adjust_lr_fn"),
        ({"lr": 1e-3, "adjust_lr_fn": "none"}, "none", "set by adjust_lr_fn"),
        ({"muon_lr": 1e-3, "adjust_lr_fn": "match_rms_adamw"}, "match_rms_adamw", "set by adjust_lr_fn"),
        ({"adjust_lr_fn": "spectral_unclamped"}, "spectral_unclamped", "set by adjust_lr_fn"),
    ],
    ids=str,
)
def test_auto_scale(section: dict[str, Any], scale: str, reason: str) -> None:
    config = parse(section)
    assert config.scale == scale and config.scale_reason.startswith(reason)


@pytest.mark.parametrize("key", STOCK_TUNING_KEYS)
def test_a_value_tuned_for_stocks_muon_means_its_scale(key: str) -> None:
    """Also at the value that is the default."""
    for value in (EVERY_KEY[key], MuonConfig.model_fields[key].default):
        assert value is None or parse(ADAMW_SECTION | {key: value}).scale == "original"


OTHERS = sorted(MuonConfig.model_fields.keys() - {*STOCK_TUNING_KEYS, "lr", "adjust_lr_fn", "rms_scale"})
VALUES = EVERY_KEY | {"qk_clip": {"tau": 50, "alpha": 0.5}, "per_head_muon": True, "tp_mode": "shard"}


@pytest.mark.parametrize("key", OTHERS)
def test_no_other_key_decides_by_being_there(key: str) -> None:
    """Whoever goes from AdamW to Muon with AdamW's learning rate may add any key, those to come included."""
    values = [VALUES.get(key), MuonConfig.model_fields[key].default]
    needed = {"normuon_beta2": {"normuon": True}, "momentum_warmup_steps": {"momentum_start": 0.5}}.get(key, {})
    for value in [value for value in values if value is not None]:
        assert parse(ADAMW_SECTION | needed | {key: value}).scale == "match_rms_adamw"
        assert parse({"muon_lr": 0.02, **needed, key: value}).scale == "original"


def test_a_group_may_have_another_scale_than_the_one_that_rms_scale_asks_for() -> None:
    config = parse({"lr": 1e-3, "rms_scale": 0.3})
    assert config.for_group({"adjust_lr_fn": "original"}, "group 0: ").scale == "original"
    assert config.for_group({"momentum": 0.9}, "group 0: ").scale == "match_rms_adamw"


# ---- digest ---------------------------------------------------------------------------------------------


def test_digest_of_equal_configs_is_equal() -> None:
    assert parse(EVERY_KEY).digest() == parse(dict(reversed(EVERY_KEY.items()))).digest()
    assert parse({"lr": 1, "betas": [0.9, 0.95]}).digest() == parse({"lr": 1.0, "betas": (0.9, 0.95)}).digest()
    assert re.fullmatch(r"[0-9a-f]{16}", parse({}).digest())


@pytest.mark.parametrize("key", EVERY_KEY)
def test_digest_differs_with_every_key(key: str) -> None:
    section = dict.fromkeys(("lr", "momentum"), 0.5)
    assert parse(section | {key: EVERY_KEY[key]}).digest() != parse(section).digest()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"lr": 0.1}, {"lr": 0.1 + 2**-55}),
        ({"muon_split": {"a": [1, 2]}}, {"muon_split": {"a": [2, 1]}}),
        ({"lr": 1e-3}, {"lr": 1e-3, "momentum": 0.95}),  # the same values, and another scale
    ],
    ids=["the last bit", "the order of sizes", "the scale"],
)
def test_digest_differs_with(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert parse(first).digest() != parse(second).digest()


# ---- what is refused ------------------------------------------------------------------------------------

SIZES = 'expected "whole" or a list of whole numbers above 0, the sizes, not'
#: A section, and what its message says after the name of the first key.
WRONG: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    # Keys.
    ({"learning_rate_muon": 0.1}, ("did you mean muon_lr?",)),
    ({"learning_rate_adam": 0.1}, ("did you mean adam_lr?",)),
    ({"newton_schulz_steps": 5}, ("did you mean ns_steps?",)),
    ({"adam_weight_decy": 0.1}, ("did you mean adam_weight_decay?",)),
    ({5: 1}, ("got 1; unknown key", "known keys: preset, lr")),
    ({"amsgrad": 0}, ("not supported",)),
    ({"decoupled_weight_decay": False}, ('"adam_w_mode": false',)),
    ({"max_grad_norm": 1.0}, ("gradient_clipping",)),
    # Strings that Python reads as a number, and JSON's reader would not.
    ({"eps": "1.0e_8"}, ("'1.0e_8'", "a number, 0 or more", "written like 1e-5")),
    ({"lr": "\u0661"}, ("expected a number, 0 or more",)),
    ({"lr": "nan"}, ("'nan'", "a number")),
    ({"lr": "1e999"}, ("'1e999'", "a number")),
    ({"lr": ""}, ("''", "a number")),
    ({"lr": b"1"}, ("b'1'", "a number")),
    ({"lr": float("inf")}, ("inf", "a number")),
    ({"ns_steps": float("inf")}, ("inf", "whole number")),
    ({"ns_steps": True}, ("not true or false",)),
    ({"ns_steps": "five"}, ("'five'", "whole number")),
    ({"ns_steps": 51}, ("51", "from 1 to 50")),
    ({"bucket_bytes": "200_000"}, ("'200_000'", "whole number")),
    ({"betas": ["0.9", "0.95_"]}, ("'0.95_'", "two numbers")),
    ({"qk_clip": {"tau": "1_00"}}, ("tau: ", "not '1_00'")),
    ({"qk_clip": {True: 5}}, ("unknown key", "known keys: tau")),  # YAML's `on: 5`
    # What pydantic takes for a flag or a list.
    ({"nesterov": "yes"}, ("'yes'", "true or false")),
    ({"normuon": 0.0}, ("0.0", "true or false")),
    ({"fp32_optimizer_states": 1}, ("only true",)),
    ({"betas": {0.9}}, ("two numbers",)),
    ({"muon_include": {"a"}}, ("a list",)),
    # Choices.
    ({"ns_method": "Standard"}, ("auto, standard or gram; did you mean 'standard'?",)),
    ({"ns_dtype": "fp64"}, ("'fp64'", "auto, bf16, fp16 or fp32")),
    ({"wire_dtype": "Half"}, ("fp16 is not supported",)),
    ({"adjust_lr_fn": "rms"}, ("'rms'", "match_rms_adamw", "none")),
    # Schedules.
    ({"ns_coefficients": 3}, ("got 3",)),
    ({"ns_coefficients": []}, ("got []",)),
    ({"ns_coefficients": [[1, 2, "x"]]}, ("'x'", "numbers")),
    ({"ns_coefficients": [[float("nan"), 1, 1]]}, ("finite numbers",)),
    ({"ns_steps": 3, "ns_coefficients": [[1, 0, 0]] * 2}, ("ns_steps is 3", "2 steps")),
    # Sizes of matrices.
    ({"muon_split": [1]}, ("expected an object: regular expression -> sizes",)),
    ({"muon_split": {1: "rows"}}, ("'1'", "not 'rows'")),
    ({"muon_split": {"(": [1]}}, ("is not a regular expression",)),
    ({"muon_split": {"a": 3}}, (f"'a': {SIZES} 3",)),
    ({"muon_split": {"a": []}}, (f"'a': {SIZES} []",)),
    ({"muon_split": {"a": [3, -1]}}, ("not [3, -1]",)),
    ({"muon_split": {"a": [True]}}, ("not [True]",)),
    ({"muon_split": {"a": {"size": [1]}}}, ("'a': unknown key 'size', did you mean sizes?",)),
    ({"muon_split": {"a": {"sizes": [1], "axis": 2}}}, ("'a': expected as axis 0 (rows) or 1 (columns), not 2",)),
    ({"muon_split": {"a": {"sizes": [1], "groups": 0}}}, ("'a': expected as groups a whole number above 0, not 0",)),
    ({"muon_split": {"a": {"sizes": [1], "groups": 2, "axis": 1}}}, ("'a': groups above 1 need axis 0",)),
    # Pairs.
    ({"rms_scale": 0.3, "adjust_lr_fn": "none"}, ("acts with",)),
]


@pytest.mark.parametrize(("section", "parts"), WRONG, ids=[str(section) for section, _ in WRONG])
def test_a_wrong_section_is_refused(section: dict[str, Any], parts: tuple[str, ...]) -> None:
    text, key = message(section), next(iter(section))
    assert text.startswith(f"optimizer.params.{key}: ")
    assert all(part in text for part in parts), text
    assert "pydantic" not in text


def test_every_wrong_key_is_named_once_in_an_error_without_a_chain() -> None:
    wrong = {"lr": -1, "momentun": 0.9, "ns_dtype": "fp8", "per_head_muon": 2, "betas": [2, 3], "max_grad_norm": 1.0}
    with pytest.raises(ValueError) as error:
        parse(wrong | {"ns_coefficients": "simpel", "eps": 1e-8})
    assert type(error.value) is MuonConfigError
    assert error.value.__cause__ is None and error.value.__suppress_context__
    found = [line.partition(": ")[0] for line in str(error.value).splitlines()]
    assert sorted(found) == sorted(f"optimizer.params.{key}" for key in [*wrong, "ns_coefficients"])


@pytest.mark.parametrize("key", MuonConfig.model_fields)
def test_every_key_with_a_letter_missing_gets_a_suggestion(key: str) -> None:
    wrong = key[: len(key) // 2] + key[len(key) // 2 + 1 :]
    if wrong in MuonConfig.model_fields or len(wrong) < 2:
        pytest.skip("too short to misspell")
    suggested = re.search(r"did you mean (\w+)\?", message({wrong: 1}))
    assert suggested
    ratio = {name: difflib.SequenceMatcher(None, name, wrong).ratio() for name in MuonConfig.model_fields}
    assert ratio[suggested[1]] == max(ratio.values())
