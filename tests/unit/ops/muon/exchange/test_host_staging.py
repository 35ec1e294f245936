# SPDX-License-Identifier: Apache-2.0
"""Shards on the host for an accelerator: the CPU plays one without streams and pinned memory, or one whose copies
happen as late as they may.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed.muon.exchange.host_staging import Staging
from helpers.distributed import run
from helpers.training import train_on_gradients, with_params

SHAPES = [(24, 40), (40, 24), (32, 32), (33, 65), (24, 40), (8, 8)]


class Late:
    """An event whose work is done when somebody waits for it, like a copy that takes that long."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work: Callable[[], Any] | None = work

    def wait(self) -> None:
        """Both kinds of waiting do the work, once."""
        if self._work is not None:
            self._work()
            self._work = None

    synchronize = wait


class LateStaging(Staging):
    """Copies on one rank, where no collective needs them at once."""

    def copy(self, sources: list[Tensor], targets: list[Tensor]) -> Any:
        return Late(partial(super().copy, sources, targets))


def staged(kind: type[Staging] | None, bucket_bytes: int, **config: Any) -> tuple[dict[str, Tensor], int]:
    """Changes of the weights where shards lie elsewhere than what orthogonalizes, and the number of buckets."""
    from deepspeed.muon import optimizer as module
    from deepspeed.muon.step import binding

    originals, counts = (binding.plan_partition, module.Exchange), []

    def plan_partition(*args: Any) -> Any:
        plan = originals[0](*args)
        counts.append(len(plan.buckets))
        return plan

    def exchange(**fields: Any) -> Any:
        assert fields["staging"] is None, "one device, no staging"
        return originals[1](**fields | {"staging": None if kind is None else kind()})

    binding.plan_partition, module.Exchange = plan_partition, exchange
    try:
        section = with_params(bucket_bytes=bucket_bytes)
        return train_on_gradients(SHAPES * 2, 3, optimizer=section, **config), max(counts)
    finally:
        binding.plan_partition, module.Exchange = originals


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_copies_that_come_late_change_nothing(stage: int) -> None:
    """One rank, more buckets than are in collective: waiting and the reuse of buffers are all that keeps it right."""
    plain, _ = run(staged, 1, kind=None, bucket_bytes=4096, stage=stage)[0]
    late, buckets = run(staged, 1, kind=LateStaging, bucket_bytes=4096, stage=stage)[0]
    assert buckets > 3
    torch.testing.assert_close(late, plain, rtol=0, atol=0)


@pytest.mark.sample(2)
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
def test_staged_shards_travel_as_others_do(stage: int, offload: bool) -> None:
    plain = run(staged, 2, kind=None, bucket_bytes=1024, stage=stage, offload=offload)
    through = run(staged, 2, kind=Staging, bucket_bytes=1024, stage=stage, offload=offload)
    for (expected, _), (got, buckets) in zip(plain, through, strict=True):
        assert buckets > 3
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def counted(**config: Any) -> tuple[int, int]:
    """Matrices that this rank orthogonalizes in three steps, and how many the model has."""
    from deepspeed.muon.step import partition_step as module

    original, done = module.orthogonalize, []

    def orthogonalize(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        done.append(x.size(0))
        return original(x, *args, **kwargs)

    module.orthogonalize = orthogonalize
    try:
        train_on_gradients(SHAPES, 3, **config)
    finally:
        module.orthogonalize = original
    return sum(done), len(SHAPES)


@pytest.mark.parametrize(("stage", "offload"), [(1, False), (2, True), (3, False), (3, True)])
def test_every_matrix_is_orthogonalized_once_in_the_whole_job(stage: int, offload: bool) -> None:
    results = run(counted, 2, stage=stage, offload=offload)
    assert sum(done for done, _ in results) == 3 * results[0][1]
