# SPDX-License-Identifier: Apache-2.0
"""Every refusal of the section ``optimizer.params``: the key, the value, what is allowed, the nearest spelling."""

import difflib
import re
from typing import Any

import pytest

from deepspeed.muon.config.schema import MuonConfig, parse
from deepspeed.muon.errors import MuonConfigError
from test_config import message

WRONG: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    # Misspelt keys: the nearest valid one.
    ({"mometum": 0.9}, ("optimizer.params.mometum", "did you mean momentum?")),
    ({"beta": [0.9, 0.95]}, ("optimizer.params.beta", "did you mean betas?")),
    ({"weigth_decay": 0.1}, ("optimizer.params.weigth_decay", "did you mean weight_decay?")),
    ({"muon-lr": 0.1}, ("optimizer.params.muon-lr", "did you mean muon_lr?")),
    ({"ns_step": 5}, ("optimizer.params.ns_step", "did you mean ns_steps?")),
    ({"newton_schulz_steps": 5}, ("optimizer.params.newton_schulz_steps", "ns_steps")),
    ({"nestrov": True}, ("optimizer.params.nestrov", "did you mean nesterov?")),
    ({"adjust_lr": "original"}, ("optimizer.params.adjust_lr", "did you mean adjust_lr_fn?")),
    ({"adam_weight_decy": 0.1}, ("optimizer.params.adam_weight_decy", "did you mean adam_weight_decay?")),
    # Unknown keys without a neighbour: what there is.
    ({"amsgrad": True}, ("optimizer.params.amsgrad", "not supported")),
    ({"bias_correction": False}, ("optimizer.params.bias_correction", "known keys: lr")),
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
    ({"ns_dtype": "bfloat16"}, ("optimizer.params.ns_dtype", "'bfloat16'", "did you mean 'bf16'?")),
    ({"ns_dtype": "fp64"}, ("optimizer.params.ns_dtype", "'fp64'", "auto, bf16 or fp32")),
    ({"ns_dtype": "fp16"}, ("optimizer.params.ns_dtype", "fp16 is refused", "use bf16 or fp32")),
    ({"ns_dtype": "Half"}, ("optimizer.params.ns_dtype", "fp16 is refused")),
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
    text = message({"lr": -1, "momentun": 0.9, "ns_dtype": "fp16", "per_head_muon": 2, "betas": [2, 3], "eps": 1e-8})
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
