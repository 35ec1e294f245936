# SPDX-License-Identifier: Apache-2.0
"""Presets: the published values, which any key of the section overrides."""

from typing import Any, get_args

import pytest
import torch

from deepspeed.muon import MuonConfigError, MuonWithAuxAdam
from deepspeed.muon.config.presets import PRESETS
from deepspeed.muon.config.schema import MuonConfig, parse
from deepspeed.muon.config.types import ClipOptions
from helpers.distributed import run
from helpers.logs import logged_at_start


def test_every_preset_may_be_named() -> None:
    assert get_args(MuonConfig.model_fields["preset"].annotation) == ("none", *PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_its_values_and_nothing_else(name: str) -> None:
    config, values = parse({"preset": name}), PRESETS[name].values
    assert config.model_fields_set == {"preset", *values} and config.of_preset == values
    assert {key: getattr(config, key) for key in values} == {key: getattr(parse(values), key) for key in values}
    assert config.scale == values["adjust_lr_fn"] and PRESETS[name].source
    assert config.sets_a_rate, "one line is enough"


def test_no_preset_is_plain_muon() -> None:
    assert parse({"preset": "none"}) == parse({"preset": None}).model_copy(update={"preset": "none"})
    assert parse({}).of_preset == {}


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"preset": "kimi_k2", "lr": 1e-3}, {"lr": 1e-3, "qk_clip": ClipOptions(tau=100), "weight_decay": 0.1}),
        ({"preset": "kimi_k2", "qk_clip": None}, {"qk_clip": None, "lr": 2e-4}),
        ({"preset": "kimi_k2", "qk_clip": {"tau": 30}}, {"qk_clip": ClipOptions(tau=30)}),
        ({"preset": "moonlight", "ns_coefficients": "polar_express"}, {"ns_steps": None}),
        ({"preset": "deepseek_v4", "adjust_lr_fn": "original"}, {"scale": "original"}),
        ({"preset": "kimi_k2", "adjust_lr_fn": None}, {"scale": "match_rms_adamw"}),
        ({"preset": "kimi_k2", "adjust_lr_fn": "auto", "momentum": 0.9}, {"scale": "original"}),
        ({"preset": "nanochat", "lr": 1e-3}, {"muon_lr": None, "adam_lr": None}),
        ({"preset": "nanochat", "weight_decay": 0.1}, {"muon_weight_decay": None, "adam_weight_decay": None}),
        ({"preset": "nanochat", "muon_lr": 0.01}, {"muon_lr": 0.01, "adam_lr": 0.004}),
        ({"preset": "nanochat", "normuon": False}, {"normuon": False, "momentum_start": 0.85}),
        ({"preset": "nanochat", "normuon": False, "muon_plus": "rows"}, {"muon_plus": "rows"}),
    ],
    ids=str,
)
def test_any_key_overrides(section: dict[str, Any], expected: dict[str, Any]) -> None:
    config = parse(section)
    assert {key: getattr(config, key) for key in expected} == expected
    assert not config.of_preset.keys() & (section.keys() - {"preset"})


@pytest.mark.parametrize("name", PRESETS)
def test_any_key_may_be_taken_out(name: str) -> None:
    for key in PRESETS[name].values:
        config = parse({"preset": name, key: None})
        assert getattr(config, key) == MuonConfig.model_fields[key].default, key


def test_a_group_overrides_too() -> None:
    config = parse({"preset": "deepseek_v4"}).for_group({"lr": 1e-3, "adjust_lr_fn": "original"}, "group 0: ")
    assert (config.lr, config.scale, config.momentum, config.weight_decay) == (1e-3, "original", 0.95, 0.1)


def test_an_error_about_a_key_of_the_preset_names_the_preset() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))
    hint = r"\(preset {} has set .*{}.*; set a key to null to remove it\)"
    for name, key in (("kimi_k2", "qk_clip"), ("glm5", "per_head_muon")):
        with pytest.raises(MuonConfigError, match=hint.format(name, key)):
            MuonWithAuxAdam(net.parameters(), model=net, preset=name)
        assert MuonWithAuxAdam(net.parameters(), model=net, preset=name, **{key: None})
    with pytest.raises(MuonConfigError, match=hint.format("nanochat", "adjust_lr_fn")):
        parse({"preset": "nanochat", "rms_scale": 0.2})
    with pytest.raises(MuonConfigError) as error:
        parse({"preset": "nanochat", "lr": -1})
    assert "preset" not in str(error.value)


def test_the_log_says_what_a_preset_set() -> None:
    log = run(logged_at_start, 1, optimizer={"type": "Muon", "params": {"preset": "deepseek_v4", "lr": 1e-3}})[0]
    assert any(
        text == "deepspeed-muon: preset deepseek_v4 sets weight_decay 0.1, momentum 0.95, nesterov true, adjust_lr_fn "
        '"match_rms_adamw", rms_scale 0.18, ns_coefficients "deepseek_v4", betas [0.9, 0.95], eps 1e-20'
        for _, text in log
    )
