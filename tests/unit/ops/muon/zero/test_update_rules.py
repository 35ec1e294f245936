# SPDX-License-Identifier: Apache-2.0
"""Rules and dtypes under ZeRO: the same bits however sharded, and stacks of matrices under rules."""

from typing import Any

import pytest
import torch

from deepspeed.muon import MuonConfigError, MuonWithAuxAdam
from helpers.distributed import run
from helpers.engine_state import differing
from helpers.models import MODELS
from helpers.parity import SHAPES
from helpers.rules import RULES
from helpers.training import BF16_MASTERS, train_on_gradients, with_params

SETTINGS: dict[str, dict[str, Any]] = {
    "masters in bf16": {"muon_exclude": r"layers\.[34]"},
    "plain": {},
    "momentum in bf16": {"momentum_dtype": "bf16"},
    "momentum in bf16 of blocks": {"momentum_dtype": "bf16", "muon_split": {"layers.0": [10, 14]}},
    "fp16, bf16 on the wire": {"ns_dtype": "fp16", "wire_dtype": "bf16"},
    "normuon": RULES["normuon"][0],
    "fp32, bf16 on the wire": {"ns_dtype": "fp32", "wire_dtype": "bf16"},
    **{rule: keys for rule, (keys, _) in RULES.items()},
}
PLACES: list[dict[str, Any]] = [
    {"stage": 3, "zero": {"sub_group_size": 100}},
    {"stage": 2, "zero": {"round_robin_gradients": True}},
    *({"stage": stage} for stage in (1, 0, 2, 3)),
]


#: By default each place once, in another setting.
CASES = [
    pytest.param(name, place, marks=[pytest.mark.full] * ((row + column) % len(PLACES) != 0 or row >= len(PLACES)))
    for row, name in enumerate(SETTINGS)
    for column, place in enumerate(PLACES)
    if name != "masters in bf16" or place["stage"] > 0
]


@pytest.mark.parametrize(("name", "place"), CASES, ids=str)
def test_the_same_bits_whatever_the_sharding(name: str, place: dict[str, Any]) -> None:
    """One rank rounds to the dtype of the wire too. Without clipping, whose norm is summed in another order."""
    is_half = name == "masters in bf16"

    def change(world: int, **config: Any) -> dict[str, torch.Tensor]:
        config |= {"clip": 0.0, "optimizer": with_params(**SETTINGS[name])} | (BF16_MASTERS if is_half else {})
        return run(train_on_gradients, world, shapes=SHAPES, steps=3, **config)[0]

    base = change(1, stage=2 if is_half else 0)
    assert all(each.any() for each in base.values())
    assert {world: differing(change(world, **place), base) for world in (1, 2, 4)} == {1: [], 2: [], 4: []}


@pytest.mark.parametrize("key", [{"normuon": True}, {"muon_eq": "columns"}], ids=str)
def test_a_stack_whose_outputs_are_unknown_is_refused(key: dict[str, Any]) -> None:
    net = MODELS["fused"]()
    with pytest.raises(
        MuonConfigError, match=r"are the outputs in 1 stacks of matrices \(first: experts\.down\); list them"
    ):
        MuonWithAuxAdam(net.parameters(), model=net, lr=1e-3, **key)
    optimizer = MuonWithAuxAdam(net.parameters(), model=net, lr=1e-3, muon_exclude="experts", **key)
    assert optimizer.config.rules
    for allowed in ({}, {"muon_plus": True}):  # these do not depend on the axis
        optimizer = MuonWithAuxAdam(net.parameters(), model=net, lr=1e-3, **allowed)
        before = net.experts.down.detach().clone()
        net(*net.batch(0)).backward()
        optimizer.step()
        assert net.experts.down.isfinite().all() and not net.experts.down.equal(before)
