# SPDX-License-Identifier: Apache-2.0
"""Kernels of a step under ZeRO: the same bits however many runs each takes."""

import dataclasses
from typing import Any

import pytest
from torch import Tensor

from deepspeed.muon.kernels import kernel_set, selection
from helpers.distributed import run
from helpers.training import FixedGradients, ds_config, fp32_weights, make_engine, with_params

SHAPES = [(24, 40), (40, 24), (24, 40), (32, 32), (40, 24), (33, 7), (24, 40), (8, 8)]


def trained(stage: int, together: bool, momentum_dtype: str) -> dict[str, Tensor]:
    """Weights after three steps, in the second of which a matrix has no gradient."""
    choose = selection.choose

    def chosen(unavailable: Any) -> Any:
        return dataclasses.replace(choose(unavailable), runs=kernel_set.RUNS if together else None)

    columns = {"layers.0": {"sizes": [15, 25], "axis": 1}}  # whose runs are not contiguous
    optimizer = with_params(momentum_dtype=momentum_dtype, adjust_lr_fn="original", muon_split=columns)
    net = FixedGradients(SHAPES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "choose", chosen)
        engine = make_engine(net, ds_config(stage=stage, optimizer=optimizer))
    for step in range(3):
        gradients = net.gradients(step)
        gradients[2] = gradients[2] * float(step != 1)
        engine.backward(engine(gradients))
        engine.step()
    weights = fp32_weights(engine)
    engine.destroy()
    return weights


@pytest.mark.sample(2)
@pytest.mark.parametrize("momentum_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_runs_together_change_no_bit(stage: int, momentum_dtype: str) -> None:
    alone, together = (
        run(trained, 2, stage=stage, together=way, momentum_dtype=momentum_dtype) for way in (False, True)
    )
    for weights, same in zip(alone, together, strict=True):
        assert weights.keys() == same.keys()
        assert [name for name, weight in weights.items() if not weight.equal(same[name])] == []
