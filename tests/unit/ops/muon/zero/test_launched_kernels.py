# SPDX-License-Identifier: Apache-2.0
"""Kernels of a step under ZeRO: the same bits however many runs each takes."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed.muon import MuonWithAuxAdam
from deepspeed.muon.kernels import kernel_set
from deepspeed.muon.replicas import bind_without_sharding
from deepspeed.muon.step import PartitionStep
from helpers.distributed import run
from helpers.training import PARAMS, FixedGradients, ds_config, fp32_weights, make_engine

SHAPES = [(24, 40), (40, 24), (24, 40), (32, 32), (40, 24), (33, 7), (24, 40), (8, 8)]


def trained(stage: int, together: bool, momentum_dtype: str) -> dict[str, Tensor]:
    """Weights after three steps."""
    from deepspeed.muon.kernels import selection as module
    from deepspeed.muon.monitor import StepStats

    choose = module.choose

    def chosen(unavailable: Any) -> Any:
        return dataclasses.replace(choose(unavailable), runs=kernel_set.RUNS if together else None)

    module.choose = chosen
    try:
        columns = {"layers.0": {"sizes": [15, 25], "axis": 1}}  # whose runs are not contiguous
        params = PARAMS | {"momentum_dtype": momentum_dtype, "adjust_lr_fn": "original", "muon_split": columns}
        net = FixedGradients(SHAPES)
        engine = make_engine(net, ds_config(stage=stage, optimizer={"type": "Muon", "params": params}))
    finally:
        module.choose = choose
    optimizer = engine.basic_optimizer
    for step in range(3):
        engine.backward(engine(net.gradients(step)))
        stats = StepStats(lambda: None)
        with optimizer.observed(stats=stats):
            engine.step()
    sizes = [value for name, value in stats.of_all_ranks().items() if name != "newton_schulz_seconds"]
    weights = fp32_weights(engine) | {"sizes": torch.tensor(sizes)}  # summed run by run, in the order of the calls
    engine.destroy()
    return weights


@pytest.mark.sample(4)
@pytest.mark.parametrize("momentum_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_runs_together_change_no_bit(stage: int, momentum_dtype: str) -> None:
    alone, together = (
        run(trained, 2, stage=stage, together=way, momentum_dtype=momentum_dtype) for way in (False, True)
    )
    for weights, same in zip(alone, together, strict=True):
        assert weights.keys() == same.keys()
        assert [name for name, weight in weights.items() if not weight.equal(same[name])] == []


def test_tensors_without_a_gradient_keep_their_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their part of what is sent is zero, in one call or in many."""
    results, prepare = [], PartitionStep._prepare

    def watched(self: PartitionStep, values: Any, buffers: Any) -> None:
        buffers.matrices.fill_(torch.nan)
        prepare(self, values, buffers)
        assert not buffers.matrices.isnan().any()

    monkeypatch.setattr(PartitionStep, "_prepare", watched)
    for runs in (None, kernel_set.RUNS):
        net = FixedGradients([(8, 16), (8, 16), (16, 8), (8, 16)])
        optimizer = MuonWithAuxAdam(net.parameters(), model=net, lr=0.1)
        net(net.gradients(0)).backward()
        initial = net.layers[1].weight.detach().clone()
        net.layers[1].weight.grad = None
        bind_without_sharding(optimizer, None)
        kernels = dataclasses.replace(kernel_set.TORCH, runs=runs)
        optimizer.context = dataclasses.replace(optimizer.context, kernels=kernels)
        optimizer.bind(optimizer.all_partitions, optimizer.compute_device)
        optimizer.step()
        assert (
            net.layers[1].weight.equal(initial) and not optimizer.state[net.layers[1].weight]["momentum_buffer"].any()
        )
        results.append([p.detach().clone() for p in net.parameters()])
    assert all(map(torch.equal, *results))
