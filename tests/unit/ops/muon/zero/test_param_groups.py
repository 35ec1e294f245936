# SPDX-License-Identifier: Apache-2.0
"""Parameter groups of the user's: each keeps its own settings after the split, at every stage."""

import logging
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.muon import MuonWithAuxAdam
from helpers.logs import logged
from helpers.ways import UserGroups


def halves_of(params: dict[str, Any], *groups: dict[str, Any]) -> list[dict[str, Any]]:
    """The optimizer's groups where each of the user's has one layer."""
    net = nn.ModuleList(nn.Linear(4, 4) for _ in groups)
    given = [{"params": list(layer.parameters()), **own} for layer, own in zip(net, groups, strict=True)]
    return MuonWithAuxAdam(given, model=net, **params).param_groups


RATES = {"muon_lr": 0.05, "adam_lr": 1e-3, "muon_weight_decay": 0.3}
#: Settings of all, those of each group, and what the halves of all groups then have.
SETTINGS: dict[str, tuple[dict[str, Any], list[dict[str, Any]], dict[str, list[Any]]]] = {
    "a group's lr wins over both of the config's": (
        {"lr": 1.0, "muon_lr": 0.5, "adam_lr": 0.25},
        [{"lr": 0.125}, {}],
        {"lr": [0.125, 0.125, 0.5, 0.25], "lr_ratio": [1.0, 1.0, 0.5, 0.25]},
    ),
    "a group's weight decay wins over both of the config's": (
        {"muon_weight_decay": 0.5, "adam_weight_decay": 0.25},
        [{"weight_decay": 0.0}, {}],
        {"weight_decay": [0.0, 0.0, 0.5, 0.25]},
    ),
    "a group may set one half": (
        {"lr": 1.0},
        [{"adam_lr": 0.5, "muon_weight_decay": 0.1}],
        {"lr": [1.0, 0.5], "weight_decay": [0.1, 0.0]},
    ),
    "null replaces nothing": (
        RATES,
        [{"lr": None}, {"weight_decay": None, "momentum": None}],
        {"lr": [0.05, 1e-3] * 2, "weight_decay": [0.3, 0.0] * 2, "momentum": [0.95] * 2},
    ),
    "null beside a group's lr is none given": (
        {"muon_lr": 0.05, "momentum": 0.5},
        [{"lr": 0.01, "muon_lr": None, "momentum": None}],
        {"lr": [0.01, 0.01], "momentum": [0.5]},
    ),
    "a reference of zero divides nothing": ({"lr": 0}, [{}], {"lr_ratio": [1.0, 1.0]}),
    "a reference of one half": ({"lr": 0, "muon_lr": 0.1}, [{}], {"lr_ratio": [1.0, 0.0]}),
    # The scale follows where the learning rate comes from.
    "the scale of a group's lr": ({}, [{"lr": 1e-3}, {}], {"adjust_lr_fn": ["match_rms_adamw", "original"]}),
    "the scale of the config's lr": (
        {"lr": 1e-3},
        [{"lr": 1e-4}, {"momentum": 0.9}],
        {"adjust_lr_fn": ["match_rms_adamw"] * 2},
    ),
    "the scale of the config's muon_lr": ({"muon_lr": 0.02}, [{"lr": 1e-3}, {}], {"adjust_lr_fn": ["original"] * 2}),
    "the scale of each group's rate": (
        {"nesterov": False},
        [{"lr": 1e-3}, {"muon_lr": 0.02}],
        {"adjust_lr_fn": ["match_rms_adamw", "original"]},
    ),
    "the scale that is set": (
        {"lr": 1e-3, "adjust_lr_fn": "none"},
        [{"adjust_lr_fn": "original"}, {}],
        {"adjust_lr_fn": ["original", "none"]},
    ),
}


@pytest.mark.parametrize(("params", "groups", "expected"), SETTINGS.values(), ids=SETTINGS)
def test_settings_of_groups(
    params: dict[str, Any], groups: list[dict[str, Any]], expected: dict[str, list[Any]]
) -> None:
    halves = halves_of(params, *groups)
    assert {key: [half[key] for half in halves if key in half] for key in expected} == expected


def test_keys_of_the_users_stay_in_both_halves_and_in_the_group_as_given() -> None:
    net = nn.Sequential(nn.Linear(4, 4))
    names = ["0.weight", "0.bias"]
    own = {
        "params": list(net.parameters()),
        "param_names": names,
        "initial_lr": 0.5,
        **UserGroups.KEYS,
        **UserGroups.ADAMWS,
    }
    optimizer = MuonWithAuxAdam([own], model=net, lr=1.0, adam_lr=0.5)
    plain = MuonWithAuxAdam(net.parameters(), model=net, lr=1.0, adam_lr=0.5)
    for group, expected in zip(optimizer.param_groups, plain.param_groups, strict=True):
        assert {key: group[key] for key in UserGroups.KEYS} == UserGroups.KEYS
        assert {key: group[key] for key in expected if key != "params"} == {
            k: v for k, v in expected.items() if k != "params"
        }
    assert [group["param_names"] for group in optimizer.param_groups] == [["0.weight"], ["0.bias"]]
    assert [group["initial_lr"] for group in optimizer.param_groups] == [0.5, 0.25]
    (given,) = optimizer.given.param_groups
    assert given["lr_scale"] == 0.65 and given["initial_lr"] == 0.5 and "layer_id" in given
    given["lr_scale"] = 0.5
    assert given["lr_scale"] == 0.5


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"lr": 1e-3, "eps": 0.1}, ("eps 0.1", "hardly move")),
        ({"lr": 1e-3, "betas": (0.999, 0.9)}, ("betas [0.999, 0.9]", "swapped")),
        ({"lr": 20.0}, ("lr 20",)),
        ({"lr": 1.0, "weight_decay": 1.5}, ("lr 1 x weight_decay 1.5", "sign")),
        ({"lr": 1.0, "weight_decay": 1.0, "eps": 1e-2, "betas": (0.9, 0.9)}, ()),
    ],
    ids=str,
)
def test_absurd_values_get_one_warning(settings: dict[str, Any], parts: tuple[str, ...]) -> None:
    net = nn.Sequential(nn.Linear(4, 4))
    with logged(logging.WARNING) as said:
        optimizer = MuonWithAuxAdam(net.parameters(), model=net, **settings)
        for _ in range(2):
            net(torch.ones(1, 4)).sum().backward()
            optimizer.step()
    found = [text for text in said if "unusual settings" in text]
    assert len(found) == bool(parts) and all(part in found[0] for part in parts), said
