# SPDX-License-Identifier: Apache-2.0
"""Memory of the step: nothing is allocated once the first steps are done, and the buckets bound what is held."""

import gc
import os
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed.muon.kernels import workspace
from deepspeed.muon.kernels.workspace import Workspace
from deepspeed.muon.optimizer import MuonWithAuxAdam
from helpers.distributed import run
from helpers.models import MODELS
from helpers.training import BF16_OPTIMIZER, FixedGradients, ds_config, make_engine, with_params

#: Bytes up to which a tensor is not counted: norms, step counts, scalars.
SMALL = 1024
ROUNDED = [with_params(ns_dtype="bf16", momentum_dtype=dtype) for dtype in ("bf16", "int8")]


class Allocations(TorchDispatchMode):
    """Operators that return memory which was in none of their arguments, with its bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in (t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in given and storage.nbytes() > SMALL:
                self.seen.append((str(func), storage.nbytes()))
        return result


def engine_on(shapes: list[tuple[int, int]], **config: Any) -> Any:
    """An engine over matrices with gradients of their own, and a step of it."""
    net = FixedGradients(shapes)
    engine, gradients = make_engine(net, ds_config(**config)), net.gradients(0)

    def step() -> None:
        engine.backward(engine(gradients))
        engine.step()

    return engine, step


def allocated(warm: int, cases: list[dict[str, Any]]) -> list[list[tuple[str, int]]]:
    """What the optimizer's own step allocates after so many others."""
    results = []
    for case in cases:
        engine, step = engine_on([(64, 64), (128, 64), (64, 128), (64, 64), (300, 1)], **case)
        for _ in range(warm):
            step()
        optimizer, mode = engine.basic_optimizer, Allocations()
        original = optimizer.step

        def watched(*args: Any, original: Any = original, mode: Any = mode, **kwargs: Any) -> Any:
            with mode:
                return original(*args, **kwargs)

        optimizer.step = watched
        step()
        results.append(mode.seen)
        engine.destroy()
    return results


CASES = [
    {"stage": stage, "dtype": dtype, "offload": offload, "optimizer": optimizer}
    for stage in (0, 1, 2, 3)
    for dtype in ("fp32", "bf16")
    for offload in ((False, True) if stage else (False,))
    for optimizer in ((None, *ROUNDED) if dtype == "bf16" else (None,))
]


@pytest.mark.parametrize("world", [2, pytest.param(1, marks=pytest.mark.full)])
def test_a_step_allocates_nothing(world: int) -> None:
    for seen in run(allocated, world, warm=2, cases=CASES):
        assert [found for found in zip(CASES, seen, strict=True) if found[1]] == []


def test_the_first_step_takes_what_the_others_use() -> None:
    """The watch sees what is allocated."""
    (seen,) = run(allocated, 1, warm=0, cases=CASES[:1])[0]
    assert max(size for _, size in seen) >= 64 * 128 * 4


# ---- bounds ---------------------------------------------------------------------------------------------------


def held(counts: list[int], bucket_bytes: int, **config: Any) -> list[tuple[int, int]]:
    """Buckets, and bytes of temporaries after two steps, of models with so many equal matrices."""
    results = []
    for count in counts:
        engine, step = engine_on([(64, 64)] * count, optimizer=with_params(bucket_bytes=bucket_bytes), **config)
        step()
        step()
        optimizer = engine.basic_optimizer
        results.append((len(optimizer.plans[0].buckets), optimizer.workspace.nbytes()))
        engine.destroy()
    return results


@pytest.mark.sample(2)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_buckets_bound_the_memory_whatever_the_model(stage: int) -> None:
    """At most three buckets of matrices, of what is sent and of what is received, and temporaries of one."""
    bucket = 2**16
    for (few, small), (many, large) in run(held, 2, stage=stage, counts=[25, 101], bucket_bytes=bucket):
        assert many > 3 * few >= 9
        assert large == small <= (3 * 3 + 6) * bucket


def released(cases: list[dict[str, Any]], accelerator: bool) -> list[list[tuple[int, int, int]]]:
    """Bytes held in the steps, at most, and after each of them, and how often any were given back in it.

    The CPU plays an accelerator or itself.
    """
    original, results = workspace.is_accelerator, []
    workspace.is_accelerator = lambda device: accelerator
    try:
        for case in cases:
            engine, step = engine_on([(64, 64), (128, 64), (64, 128)], **case)
            work = engine.basic_optimizer.workspace = Watched()
            engine.basic_optimizer.bind_again()
            results.append([])
            for _ in range(3):
                work.peak = work.releases = 0
                step()
                results[-1].append((work.peak, work.nbytes(), work.releases))
            engine.destroy()
    finally:
        workspace.is_accelerator = original
    return results


class Watched(Workspace):
    """Remembers the most bytes that it held, and how often it gave any back."""

    peak = releases = 0

    def release(self) -> None:
        held = self.nbytes()
        super().release()
        self.releases += self.nbytes() < held

    def get(self, *args: Any, **kwargs: Any) -> Tensor:
        found = super().get(*args, **kwargs)
        self.peak = max(self.peak, self.nbytes())
        return found


RELEASED = [
    *({"stage": stage, "dtype": "bf16"} for stage in (0, 1, 2, 3)),
    {"stage": 3, "zero": {"sub_group_size": 5000}},  # the engine's step calls the optimizer's several times
    BF16_OPTIMIZER,
]


def test_between_steps_an_accelerator_holds_no_scratch() -> None:
    """Every step takes the same again, and no part of a step gives it back before the last."""
    for found in run(released, 2, cases=RELEASED, accelerator=True):
        for case, steps in zip(RELEASED, found, strict=True):
            peak = steps[0][0]
            assert peak > 0 and steps == [(peak, 0, 1)] * 3, case


def test_between_steps_a_cpu_keeps_its_scratch() -> None:
    for found in run(released, 2, cases=RELEASED, accelerator=False):
        for case, steps in zip(RELEASED, found, strict=True):
            assert all(peak == after > 0 and not releases for peak, after, releases in steps), case


def test_plain_pytorch_holds_no_scratch_on_an_accelerator_either(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["wide"]()
    optimizer = MuonWithAuxAdam(model.parameters(), model=model, lr=0.02)
    optimizer.workspace = work = Watched()
    for accelerator in (True, False):
        monkeypatch.setattr(workspace, "is_accelerator", lambda device, answer=accelerator: answer)
        model(*model.batch(0)).backward()
        optimizer.step()
        assert (work.nbytes() == 0) is accelerator
        assert work.peak > 0


def resident(steps: int, every: int, **config: Any) -> list[int]:
    """Resident bytes of this process after each so many steps."""
    _, step = engine_on([(128, 128)] * 6, **config)
    pages = []
    for done in range(1, steps + 1):
        step()
        if done % every == 0:
            gc.collect()
            pages.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    return pages


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
@pytest.mark.parametrize("stage", [0, 3])
def test_memory_does_not_grow_over_200_steps(stage: int) -> None:
    """One matrix that is kept per step would be 64 KiB each, 12.5 MiB in all."""
    for pages in run(resident, 2, stage=stage, steps=250, every=50):
        print([f"{(p - pages[0]) / 2**20:.2f} MiB" for p in pages])
        assert max(pages) - pages[0] <= 3 * 2**20
