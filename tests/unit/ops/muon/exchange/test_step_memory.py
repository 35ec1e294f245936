# SPDX-License-Identifier: Apache-2.0
"""Memory of the step: the predicted peak, and nothing allocated after the first steps."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed.muon.exchange import memory as module
from deepspeed.muon.exchange.memory import Memory, peak
from deepspeed.muon.kernels import kernel_set
from deepspeed.muon.kernels.kernel_set import Workspace
from deepspeed.muon.optimizer import MuonWithAuxAdam
from helpers.distributed import run
from helpers.models import MODELS
from helpers.plans import demand_of
from helpers.training import BF16_OPTIMIZER, FixedGradients, ds_config, make_engine, with_params

#: Bytes up to which a tensor is not counted as allocated: norms, step counts, scalars.
SMALL = 1024
#: Matrices of models of hidden size 64, 192 and 512: some of one shape, tall and wide.
SIZES = {
    "small": [(64, 64)] * 9 + [(256, 64), (64, 256)] * 2,
    "medium": [(192, 192)] * 9 + [(768, 192), (192, 768)] * 2,
    "large": [(512, 512)] * 4 + [(2048, 512), (512, 2048)],
}
ROUNDED = [with_params(ns_dtype="bf16", momentum_dtype=dtype) for dtype in ("bf16", "int8")]


class Allocations(TorchDispatchMode):
    """Operators that return memory which was in none of their arguments, with its bytes; the most alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []
        self.peak, self._alive = 0, dict[int, tuple[StorageWeakRef, int]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {t.untyped_storage()._cdata for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in (t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)):
            storage = tensor.untyped_storage()
            if storage._cdata not in known:
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self.seen += [(str(func), storage.nbytes())] * (storage.nbytes() > SMALL)
        self._alive = {key: value for key, value in self._alive.items() if not value[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._alive.values()))
        return result


def engine_on(shapes: list[tuple[int, int]], **config: Any) -> tuple[Any, Callable[[], None]]:
    """An engine over matrices with gradients of their own, and a step of it."""
    net = FixedGradients(shapes)
    engine, gradients = make_engine(net, ds_config(**config)), net.gradients(0)

    def step() -> None:
        engine.backward(engine(gradients))
        engine.step()

    return engine, step


def watched_step(engine: Any, step: Callable[[], None]) -> Allocations:
    """What the optimizer's own step allocates."""
    mode, original = Allocations(), engine.basic_optimizer.step

    def watched(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return original(*args, **kwargs)

    engine.basic_optimizer.step = watched
    step()
    return mode


# ---- the prediction -----------------------------------------------------------------------------------------


def measured(shapes: list[tuple[int, int]], params: dict[str, Any], device_type: str, **config: Any) -> tuple[int, ...]:
    """Of this rank's first step, where the CPU plays a device: predicted bytes, the most alive, slots."""
    from deepspeed.muon import step

    original = step.cost_model
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "cost_model", lambda *args: replace(original(*args), device_type=device_type))
        patch.setattr(kernel_set, "is_accelerator", lambda device: device_type != "cpu")
        engine, step = engine_on(shapes, optimizer=with_params(**params), **config)
        mode, optimizer = watched_step(engine, step), engine.basic_optimizer
    wire, is_plain = optimizer.config.wire, optimizer.context.kernels.name == "torch"
    expected = Memory(wire=wire, dtype=optimizer.ns_dtype, device_type="cpu", plain=is_plain)
    demands = [demand_of(bound.plan, bound.newton_schulz.method) for bound in optimizer._partition_steps.values()]
    with pytest.MonkeyPatch.context() as patch:
        if device_type != "cpu":  # the kernels are those of a CPU, the number of matrices is not
            patch.setattr(module, "batch_limit", lambda *sizes, **kw: kernel_set.batch_limit(*sizes[:-1], True, **kw))
        found = peak(demands, expected)
    plan = optimizer.plans[0]
    engine.destroy()
    return found.total, mode.peak, plan.slots(plan.travels(staged=False)), found.exchange


#: (matrices, stage, device, optimizer.params). The C++ kernels multiply bf16 only on CPUs with units for it.
PREDICTED: list[tuple[str, int, str, dict[str, str]]] = [
    *((size, stage, device, {}) for size in SIZES for stage in (0, 1, 2, 3) for device in ("cpu", "cuda")),
    *(
        ("medium", 2, "cpu", {"ns_method": method, "kernels": kernels, "ns_dtype": ns_dtype, "wire_dtype": wire})
        for method in ("standard", "gram")
        for kernels, ns_dtype, wire in (
            *(("torch", dtype, "auto") for dtype in ("bf16", "fp32")),
            ("auto", "fp32", "auto"),
            ("torch", "fp32", "bf16"),  # where dtype and wire differ there is a copy
        )
    ),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("size", "stage", "device_type", "params"), PREDICTED)
def test_a_step_takes_the_predicted_memory(size: str, stage: int, device_type: str, params: dict[str, Any]) -> None:
    """All that torch allocates in it, not only what the workspace holds. One matrix to a bucket, and all in one."""
    job = {"shapes": SIZES[size], "device_type": device_type, "stage": stage, "dtype": "bf16"}
    for bucket_bytes in (2 * max(rows * cols for rows, cols in SIZES[size]), 2**30):
        for predicted, alive, slots, exchange in run(
            measured, 2, params=params | {"bucket_bytes": bucket_bytes}, **job
        ):
            assert 0.9 * alive <= predicted <= 1.1 * alive
            assert slots == (2 if device_type == "cuda" and bucket_bytes < 2**30 else 3)
            assert 0 < exchange < predicted


# ---- the steady state ---------------------------------------------------------------------------------------


def allocated(case: dict[str, Any]) -> list[tuple[str, int]]:
    """What the optimizer's own step allocates after two others."""
    engine, step = engine_on([(64, 64), (128, 64), (64, 128), (64, 64), (300, 1)], **case)
    step()
    step()
    seen = watched_step(engine, step).seen
    engine.destroy()
    return seen


CASES = [
    {"stage": stage, "dtype": dtype, "offload": offload, "optimizer": optimizer}
    for stage in (0, 1, 2, 3)
    for dtype in ("fp32", "bf16")
    for offload in ((False, True) if stage else (False,))
    for optimizer in ((None, *ROUNDED) if dtype == "bf16" else (None,))
]


@pytest.mark.sample(10)
@pytest.mark.parametrize("world", [2, 1])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_allocates_nothing(case: dict[str, Any], world: int) -> None:
    assert run(allocated, world, case=case) == [[]] * world


def released(cases: list[dict[str, Any]], accelerator: bool) -> list[list[tuple[int, int, int]]]:
    """Bytes held in the steps, at most, and after each of them, and how often any were given back in it.

    The CPU plays an accelerator or itself.
    """
    results: list[list[tuple[int, int, int]]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_set, "is_accelerator", lambda device: accelerator)
        for case in cases:
            engine, step = engine_on([(64, 64), (128, 64), (64, 128)], **case)
            work = engine.basic_optimizer.workspace = Watched()
            optimizer = engine.basic_optimizer
            optimizer.bind(optimizer.all_partitions, optimizer.compute_device)
            results.append([])
            for _ in range(3):
                work.peak = work.releases = 0
                step()
                results[-1].append((work.peak, work.nbytes(), work.releases))
            engine.destroy()
    return results


class Watched(Workspace):
    """Remembers the most bytes that it had, and how often it gave any back."""

    peak = releases = 0

    def release(self) -> None:
        before = self.nbytes()
        super().release()
        self.releases += self.nbytes() < before

    def get(self, *args: Any, **kwargs: Any) -> Tensor:
        found = super().get(*args, **kwargs)
        self.peak = max(self.peak, self.nbytes())
        return found


RELEASED = [
    *({"stage": stage, "dtype": "bf16"} for stage in (0, 2, 3)),
    {"stage": 3, "zero": {"sub_group_size": 5000}},  # the engine's step calls the optimizer's several times
    BF16_OPTIMIZER,
]


@pytest.mark.parametrize("accelerator", [True, False])
def test_between_steps_an_accelerator_frees_its_scratch_and_a_cpu_keeps_it(accelerator: bool) -> None:
    """Every step takes the same again, and no part of a step gives it back before the last."""
    for found in run(released, 2, cases=RELEASED, accelerator=accelerator):
        for case, steps in zip(RELEASED, found, strict=True):
            if accelerator:
                assert steps[0][0] > 0 and steps == [(steps[0][0], 0, 1)] * 3, case
            else:
                assert all(peak == after > 0 and not releases for peak, after, releases in steps), case


def test_plain_pytorch_holds_no_scratch_on_an_accelerator_either(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["wide"]()
    optimizer = MuonWithAuxAdam(model.parameters(), model=model, lr=0.02)
    optimizer.workspace = work = Watched()
    for accelerator in (True, False):
        monkeypatch.setattr(kernel_set, "is_accelerator", lambda device, answer=accelerator: answer)
        model(*model.batch(0)).backward()
        optimizer.step()
        assert (work.nbytes() == 0) is accelerator
        assert work.peak > 0
