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

from helpers.distributed import run
from helpers.training import FixedGradients, ds_config, make_engine, with_params

#: Bytes up to which a tensor is not counted: norms, step counts, scalars.
SMALL = 1024
BF16_MOMENTUM = with_params(ns_dtype="bf16", momentum_dtype="bf16")


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
    for optimizer in ((None, BF16_MOMENTUM) if dtype == "bf16" else (None,))
]


@pytest.mark.parametrize("world", [1, 2])
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
        results.append((len(optimizer.plans[0].buckets), optimizer._work.nbytes()))
        engine.destroy()
    return results


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_buckets_bound_the_memory_whatever_the_model(stage: int) -> None:
    """At most three buckets of matrices, of what is sent and of what is received, and temporaries of one."""
    bucket = 2**16
    for (few, small), (many, large) in run(held, 2, stage=stage, counts=[25, 101], bucket_bytes=bucket):
        assert many > 3 * few >= 9
        assert large == small <= (3 * 3 + 6) * bucket


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


@pytest.mark.sample(1)
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
@pytest.mark.parametrize("stage", [0, 3])
def test_memory_does_not_grow_over_200_steps(stage: int) -> None:
    """One matrix that is kept per step would be 64 KiB each, 12.5 MiB in all."""
    for pages in run(resident, 2, stage=stage, steps=250, every=50):
        print([f"{(p - pages[0]) / 2**20:.2f} MiB" for p in pages])
        assert max(pages) - pages[0] <= 3 * 2**20
