# SPDX-License-Identifier: Apache-2.0
"""Weights and states in bf16, with nothing in fp32: against the oracle, without bias, the same bits however sharded."""

from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.distributed import run
from helpers.engine_state import differing, flat_tensors
from helpers.models import MODELS, train_engine
from helpers.parity import SHAPES
from helpers.refusals import Refusal, attempt
from helpers.training import (
    BF16_MASTERS,
    MOMENTA,
    FixedGradients,
    ds_config,
    make_engine,
    train_on_gradients,
    with_params,
)


def test_nothing_is_kept_in_fp32() -> None:
    for stage in (1, 2, 3):
        assert run(dtypes_of_a_step, 2, stage=stage)[0] == {torch.bfloat16}


def dtypes_of_a_step(stage: int) -> set[torch.dtype]:
    """Of the flat tensors and their states, after a step; the count of steps apart."""
    engine = make_engine(MODELS["mlp"](), ds_config(stage=stage, **BF16_MASTERS))
    train_engine(engine, 1)
    tensors = flat_tensors(engine)
    states = [value for tensor in tensors for value in engine.basic_optimizer.state[tensor].values() if value.ndim]
    engine.destroy()
    return {tensor.dtype for tensor in (*tensors, *states)}


# ---- small updates ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("half", ["muon", "adamw"])
def test_updates_below_half_a_unit_are_not_lost(half: str) -> None:
    """To nearest, hardly a weight would change: an update is some 2^-13 of a weight. In all they are right to some per
    cent.
    """
    params = with_params(
        lr=2e-3, adam_lr=1e-4, weight_decay=0.0, muon_exclude="layers" if half == "adamw" else [], ns_dtype="fp32"
    )
    job: dict[str, Any] = {"shapes": [(256, 240)], "steps": 4, "stage": 2, "clip": 0.0, "optimizer": params}
    (weight,) = FixedGradients(job["shapes"]).parameters()
    first = weight.detach().bfloat16().float() - weight.detach()  # an engine's weights are rounded at its start
    got, expected = (
        next(iter(run(train_on_gradients, 1, **job, **dtypes)[0].values())) - first
        for dtypes in (BF16_MASTERS, {"dtype": "bf16"})
    )
    share = float((got.double() * expected.double()).sum() / expected.double().square().sum())
    assert share == pytest.approx(1.0, abs=0.1)
    assert 0.0 < float((got != 0).float().mean()) < 0.5, "the updates are not small"


def test_the_same_gradients_make_the_same_update_whatever_the_sharding() -> None:
    """To the bit, in both halves: random numbers belong to elements and not to places."""

    def update(world: int, stage: int) -> dict[str, Tensor]:
        params = with_params(muon_exclude=r"layers\.[34]")
        settings: dict[str, Any] = {"stage": stage, "clip": 0.0, "optimizer": params, **BF16_MASTERS}
        return run(train_on_gradients, world, shapes=SHAPES, steps=3, **settings)[0]

    base = update(1, 2)
    assert all(change.any() for change in base.values())
    assert {(w, s): differing(update(w, s), base) for w in (1, 2, 4) for s in (1, 3)} == {
        (w, s): [] for w in (1, 2, 4) for s in (1, 3)
    }


def refused(**config: Any) -> Refusal | None:
    return attempt(lambda: make_engine(MODELS["mlp"](), ds_config(**config)))


def test_a_momentum_in_fp32_contradicts_states_in_bf16() -> None:
    kind, text, entered = run(refused, 1, stage=2, optimizer=MOMENTA["fp32"], **BF16_MASTERS)[0]
    assert (kind, entered) == ("UnsupportedError", 0)
    assert "optimizer.params.momentum_dtype: bf16.bf16_optimizer_states keeps the momentum in bf16" in text


# ---- checkpoints --------------------------------------------------------------------------------------------
