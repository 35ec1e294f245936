# SPDX-License-Identifier: Apache-2.0
"""The predicted peak of a step's scratch memory, held against what a step really allocates."""

import dataclasses
from typing import Any

import pytest
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed.muon.kernels import workspace
from deepspeed.muon.plan import memory as module
from deepspeed.muon.plan.memory import Memory, peak
from helpers.distributed import run
from helpers.plans import demand_of
from helpers.training import FixedGradients, ds_config, make_engine, with_params

#: Matrices of models of hidden size 64, 192 and 512: some of one shape, tall and wide.
SIZES = {
    "small": [(64, 64)] * 9 + [(256, 64), (64, 256)] * 2,
    "medium": [(192, 192)] * 9 + [(768, 192), (192, 768)] * 2,
    "large": [(512, 512)] * 4 + [(2048, 512), (512, 2048)],
}


class LiveBytes(TorchDispatchMode):
    """The most bytes of storages that operators inside have returned and that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.peak, self._alive = 0, dict[int, tuple[StorageWeakRef, int]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in (t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)):
            storage = tensor.untyped_storage()
            if storage._cdata not in given:
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {key: value for key, value in self._alive.items() if not value[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._alive.values()))
        return result


def measured(shapes: list[tuple[int, int]], params: dict[str, Any], device_type: str, **config: Any) -> tuple[int, ...]:
    """Of this rank's first step, where the CPU plays a device: predicted bytes, those held at most, slots."""
    from deepspeed.muon import binding

    originals = binding.cost_model, workspace.is_accelerator

    def cost_model(*args: Any) -> Any:
        return dataclasses.replace(originals[0](*args), device_type=device_type)

    binding.cost_model = cost_model
    workspace.is_accelerator = lambda device: device_type != "cpu"
    try:
        net = FixedGradients(shapes)
        engine, gradients = make_engine(net, ds_config(optimizer=with_params(**params), **config)), net.gradients(0)
        optimizer, mode = engine.basic_optimizer, LiveBytes()
        original = optimizer.step

        def step(*args: Any, **kwargs: Any) -> Any:
            with mode:
                return original(*args, **kwargs)

        optimizer.step = step
        engine.backward(engine(gradients))
        engine.step()
    finally:
        binding.cost_model, workspace.is_accelerator = originals
    wire, is_plain = optimizer.config.wire, optimizer.context.kernels.name == "torch"
    expected = Memory(wire=wire, dtype=optimizer.choice.dtype, device_type="cpu", plain=is_plain)
    if device_type != "cpu":  # the kernels are those of a CPU, the number of matrices is not
        module.batch_limit = lambda numel, small, itemsize, accelerator: workspace.batch_limit(
            numel, small, itemsize, True
        )
    try:
        found = peak(
            (demand_of(bound.plan, bound.newton_schulz.method) for bound in optimizer._steps.values()), expected
        )
    finally:
        module.batch_limit = workspace.batch_limit
    plan = optimizer.plans[0]
    engine.destroy()
    return found.total, mode.peak, plan.of_all.slots(plan.travels(staged=False)), found.exchange


@pytest.mark.sample(3)
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("size", SIZES)
def test_a_step_takes_the_predicted_memory(size: str, stage: int, device_type: str) -> None:
    """All that torch allocates in it, not only what the workspace holds. One matrix to a bucket, and all in one."""
    largest = max(rows * cols for rows, cols in SIZES[size])
    for bucket_bytes in (2 * largest, 2**30):
        params = {"bucket_bytes": bucket_bytes}
        found = run(measured, 2, shapes=SIZES[size], params=params, device_type=device_type, stage=stage, dtype="bf16")
        for predicted, held, slots, exchange in found:
            assert 0.9 * held <= predicted <= 1.1 * held
            assert slots == (2 if stage == 0 or (device_type == "cuda" and bucket_bytes < 2**30) else 3)
            assert 0 < exchange < predicted


# The C++ kernels multiply bf16 only on CPUs with units for it.
@pytest.mark.sample(3)
@pytest.mark.parametrize(("kernels", "ns_dtype"), [("torch", "bf16"), ("torch", "fp32"), ("auto", "fp32")])
@pytest.mark.parametrize("method", ["standard", "gram"])
def test_the_prediction_knows_methods_kernels_and_dtypes(method: str, kernels: str, ns_dtype: str) -> None:
    params = {"ns_method": method, "kernels": kernels, "ns_dtype": ns_dtype}
    found = run(measured, 2, shapes=SIZES["medium"], params=params, device_type="cpu", stage=2, dtype="bf16")
    for predicted, held, *_ in found:
        assert 0.9 * held <= predicted <= 1.1 * held


def test_a_copy_is_counted_where_the_dtypes_differ() -> None:
    """One more matrix, in the dtype of Newton-Schulz; buffers stay those of the wire."""
    from deepspeed.muon.plan.memory import BatchSize, Demand, PartDemand

    part = PartDemand([Demand(3000, 100, 0, (BatchSize(20, 50, (20, 50), 1, 1),))], [0], lambda rows, cols: "standard")
    same, wider = (peak([part], Memory(wire="bf16", dtype=dtype, device_type="cuda")) for dtype in ("bf16", "fp32"))
    assert same == (6000, 2 * 1000 + 2 * 2 * 400 + 2 * 4 * 20)  # two matrices and their diagonals
    assert wider == (6000, 2 * 4 * 1000 + 2 * 4 * 400)


@pytest.mark.sample(3)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(("kernels", "ns_dtype"), [("torch", "bf16"), ("auto", "fp32")])
@pytest.mark.parametrize("method", ["standard", "gram"])
def test_the_prediction_knows_several_owners(method: str, kernels: str, ns_dtype: str, world: int) -> None:
    params = {"ns_method": method, "kernels": kernels, "ns_dtype": ns_dtype, "owners_per_matrix": world}
    found = run(measured, world, shapes=[(512, 2048)] * 2, params=params, device_type="cpu", stage=3, dtype="bf16")
    for predicted, held, *_ in found:
        assert 0.9 * held <= predicted <= 1.1 * held
