# SPDX-License-Identifier: Apache-2.0
"""The exchange over several buckets, also of shards on the host; agreement of the ranks."""

import dataclasses
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor

from deepspeed.muon.errors import DisagreementError, ExchangeError
from deepspeed.muon.exchange.consensus import agree, differences
from deepspeed.muon.exchange.run import Exchange, Staging
from deepspeed.muon.kernels.kernel_set import Workspace
from helpers.collectives import recorded
from helpers.distributed import RankError, run
from helpers.models import MODELS, train_engine
from helpers.training import PARAMS, ds_config, make_engine, train_on_gradients, with_params

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


def in_small_buckets(
    bucket_bytes: int, device_type: str = "cpu", staging: type[Staging] | None = None, **config: Any
) -> tuple[dict[str, Tensor], int, int]:
    """`train_on_gradients`, the number of buckets of the plan and how many are in flight.

    The CPU plays `device_type`, and with `staging` shards that lie elsewhere than what orthogonalizes.
    """
    from deepspeed.muon import optimizer
    from deepspeed.muon.exchange import plan as module

    plans, original, make = [], module.plan_shards, optimizer.Exchange

    def planned(shards: Any, world_size: int, cost: Any, *more: Any) -> Any:
        plans.append(original(shards, world_size, dataclasses.replace(cost, device_type=device_type), *more))
        return plans[-1]

    def exchange(**fields: Any) -> Any:
        assert fields["staging"] is None, "one device, no staging"
        return make(**fields | {"staging": staging and staging()})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "plan_shards", planned)
        patch.setattr(module, "is_worth_sharing", lambda *args: True)
        patch.setattr(optimizer, "Exchange", exchange)
        trained = train_on_gradients(SHAPES * 2, 3, optimizer=with_params(bucket_bytes=bucket_bytes), **config)
    return trained, len(plans[-1].buckets), plans[-1].slots(travels=plans[-1].world_size > 1)


@pytest.mark.skipif(
    Version(torch.__version__) < Version("2.6"), reason="the bits of torch 2.5's bf16 products depend on their number"
)
@pytest.mark.sample(3)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_bits_depend_neither_on_buckets_nor_on_how_many_are_in_flight(stage: int, world: int) -> None:
    """One bucket; several matrices in each; one matrix in each, and that with fewer in flight."""
    middle = 9000 * (world if stage == 0 else 1)  # at stage 0 a bucket is that of all owners
    cases = [(2**20, "cuda"), (middle, "cpu"), (512, "cpu"), (512, "cuda")]
    found = [run(in_small_buckets, world, stage=stage, bucket_bytes=b, device_type=d, dtype="bf16") for b, d in cases]
    for one, *others in zip(*found, strict=True):
        assert one[1] == 1 and others[0][1] > 1 and others[1][1] > others[0][1]
        assert [slots for *_, slots in (one, *others)] == [3, 3, 3, 2]
        for update, *_ in others:
            torch.testing.assert_close(update, one[0], rtol=0, atol=0)


STAGED = [
    *((stage, 1, LateStaging, False) for stage in (0, 1, 3)),
    *((stage, 2, Staging, offload) for stage in (2, 3) for offload in (False, True)),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("stage", "world", "kind", "offload"), STAGED)
def test_staged_shards_travel_as_others_do(stage: int, world: int, kind: type[Staging], offload: bool) -> None:
    """Also where copies come late: waiting and the reuse of buffers are all that keeps it right."""
    config = {"bucket_bytes": 1024, "stage": stage, "offload": offload}
    plain, staged = (run(in_small_buckets, world, staging=staging, **config) for staging in (None, kind))
    for (expected, *_), (found, buckets, _) in zip(plain, staged, strict=True):
        assert buckets > 3
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


# ---- the agreement of the ranks -----------------------------------------------------------------------------


def state(facts: dict[str, Any]) -> str:
    facts = {
        key: value[torch.distributed.get_rank()] if isinstance(value, list) else value for key, value in facts.items()
    }
    try:
        return str(agree(lambda: prepared(facts), judge))
    except DisagreementError as error:
        return str(error)


def prepared(facts: dict[str, Any]) -> dict[str, Any]:
    """The facts, after the time that it takes to have them; `raise` is an error instead."""
    time.sleep(facts.get("seconds", 0))
    if facts.get("raise"):
        raise OSError("no compiler")
    return facts


def judge(stated: list[dict[str, Any]]) -> dict[str, Any]:
    return differences(stated, {"x": "x"}) or {"ok": 1}


@pytest.mark.parametrize(
    ("facts", "texts"),
    [
        ({"x": 1}, ["{'ok': 1}"]),
        ({"x": [1, 2, 1]}, ["x differs", "ranks [1]"]),
        ({"x": 1, "raise": [False, True, False]}, ["rank 1: OSError: no compiler"]),
    ],
    ids=["ranks that agree get the verdict", "those that differ are named", "one that is not ready is heard by all"],
)
def test_all_ranks_get_one_answer(facts: dict[str, Any], texts: list[str]) -> None:
    first, *others = run(state, 3, facts=facts)
    assert all(text in first for text in texts) and others == [first] * 2


def test_a_rank_that_takes_long_to_get_ready_is_not_silent() -> None:
    """As a slow node that compiles the kernels."""
    results = run(state, 2, fresh=True, env={"DS_MUON_BIND_TIMEOUT": "1"}, facts={"x": 1, "seconds": [0, 4]})
    assert results == ["{'ok': 1}"] * 2


def start_over(late: int) -> list[str]:
    """Three attempts at a comparison: rank `late` raises before the first, and after that starts over too."""
    texts, began = [], time.monotonic()
    for attempt in range(3):
        if attempt or torch.distributed.get_rank() != late:
            texts.append(state({"x": 1}))
        if attempt == 0:  # all others have given up by then
            time.sleep(began + 3.5 - time.monotonic())
    return texts


@pytest.mark.parametrize("late", [0, 1])
def test_a_failed_construction_that_is_retried_leaves_nothing_behind(late: int) -> None:
    """The retry of a rank must not meet the verdict on an attempt that it missed."""
    found = run(start_over, 2, fresh=True, env={"DS_MUON_BIND_TIMEOUT": "1"}, late=late)
    assert found[late] == ["{'ok': 1}"] * 2
    assert f"ranks [{late}] did not answer" in found[1 - late][0] and found[1 - late][1:] == ["{'ok': 1}"] * 2


def start_over_within() -> list[str]:
    """Rank 1 fails between two comparisons and starts over, while rank 0 is in the second one."""

    def other(stated: list[dict[str, Any]]) -> dict[str, Any]:
        return {"sum": sum(one["y"] for one in stated)}

    texts = [state({"x": 1})]
    with pytest.raises(DisagreementError) as error:
        agree(
            lambda: {"x": 1} if torch.distributed.get_rank() else {"y": 1},
            judge if torch.distributed.get_rank() else other,
        )
    return [*texts, str(error.value), state({"x": 1})]


def test_a_rank_that_starts_over_alone_is_named() -> None:
    for first, second, third in run(start_over_within, 2):
        assert first == third == "{'ok': 1}"
        assert "ranks [1] are at another step of building the optimizer" in second


def fail_inside_the_exchange(stage: int) -> None:
    """Rank 1 dies before its first collective; the others must not hang."""
    import os

    from deepspeed.muon.exchange.run import Exchange

    if torch.distributed.get_rank() == 1:
        Exchange._start = lambda *args, **kwargs: os._exit(3)
    train_on_gradients(SHAPES, 1, stage=stage)


def test_a_rank_that_dies_in_the_exchange_ends_the_others() -> None:
    with pytest.raises(RankError, match="ended with code 3"):
        run(fail_inside_the_exchange, 2, fresh=True, stage=3)


# ---- connections ----------------------------------------------------------------------------------------------


def start_and_step(stage: int) -> list[list[str]]:
    """The groups of the all-to-alls of `initialize` and of the first step."""
    net = MODELS["mlp"]()
    found = []
    with recorded() as calls:
        engine = make_engine(net, ds_config(stage=stage, optimizer={"type": "Muon", "params": PARAMS}))
        found.append([call.group for call in calls if call.kind == "all_to_all"])
        calls.clear()
        train_engine(engine, 1)
        found.append([call.group for call in calls if call.kind == "all_to_all"])
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_every_group_is_connected_before_the_first_step(stage: int) -> None:
    """NCCL takes gigabytes in a group's first all-to-all, and in a step torch's cache may hold them."""
    for at_start, in_step in run(start_and_step, 2, stage=stage):
        assert bool(in_step) == (stage > 0) and set(at_start) == set(in_step)


@pytest.mark.parametrize("reason", ["CUDA error: out of memory", "Connection reset by peer"])
def test_a_connection_that_fails_says_why_and_what_helps(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError(reason)

    monkeypatch.setattr(torch.distributed, "all_to_all_single", fail)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 8)
    exchange = Exchange(group=object(), dtype=torch.bfloat16, device=torch.device("cpu"), work=Workspace())
    with pytest.raises(ExchangeError, match=f"the first all-to-all among 8 ranks failed.*{reason}") as error:
        exchange.connect()
    assert ("NCCL_MAX_P2P_NCHANNELS" in str(error.value)) == ("memory" in reason)
