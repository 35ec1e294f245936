# SPDX-License-Identifier: Apache-2.0
"""Stage 0, where every rank holds everything: the work is shared where that is faster, and nobody sees it."""

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from deepspeed.muon.exchange import plan as planning
from deepspeed.muon.exchange.placed_params import Shard
from deepspeed.muon.exchange.plan import plan_shards
from deepspeed.muon.layout import Placement
from deepspeed.muon.math.newton_schulz import schedule
from deepspeed.muon.zero.read_config import Layout
from helpers.distributed import run
from helpers.forecasts import check_against_the_engine, forecast
from helpers.logs import logged_at_start
from helpers.models import MODELS, train_engine
from helpers.plans import COST, counted_cost, make_plan, specs
from helpers.training import ds_config, fp32_weights, make_engine


def replicas(shapes: list[tuple[int, int]], copies: int, split: bool = False) -> list[Shard]:
    """Parameters that so many ranks hold whole, each in a tensor of its own."""
    return [Shard(spec, i, Placement(0, spec.numel, 0, copies)) for i, spec in enumerate(specs(shapes, split))]


# ---- the plan -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copies", [2, 4])
def test_the_buckets_of_all_owners_together_are_bounded(copies: int) -> None:
    plans = [make_plan(replicas([(16, 16)] * 40, copies), r, copies, COST, bucket_bytes=4096) for r in range(copies)]
    for plan in plans:
        assert all(bucket.matrix_elements * COST.bytes_per_element <= 4096 for bucket in plan.buckets)
    assert sum(plan.sent_elements for plan in plans) == 40 * 256 * (copies - 1), "equal parts without padding"


def test_parts_of_owners_with_less_are_padded() -> None:
    """An all-gather needs parts of one size: three ranks own two, one and one of four equal matrices."""
    plans = [make_plan(replicas([(16, 16)] * 4, 3), rank, 3, COST) for rank in range(3)]
    assert [[bucket.gathered_part for bucket in plan.buckets] for plan in plans] == [[2 * 256]] * 3
    assert sorted(batch.count for plan in plans for batch in plan.buckets[0].batches) == [1, 1, 2]
    assert [plan.sent_elements for plan in plans] == [2 * 256 * 2] * 3


def test_work_is_shared_where_it_outweighs_the_bytes() -> None:
    def decision(shape: tuple[int, int], count: int = 4, copies: int = 2, **changes: Any) -> bool:
        cost = replace(counted_cost("standard", schedule("simple"), "bf16", 2, "cpu"), **changes)
        plan = plan_shards(replicas([shape] * count, copies), copies, cost)
        return planning.is_worth_sharing(plan, cost)

    # One rank does 30 m^3 per matrix, two do half of it, receive half of 2 m^2 bytes at 200 operations each, and wait
    # for one all-gather of 5e7 operations.
    assert [m for m in (16, 64, 98, 99, 192) if decision((m, m))] == [99, 192]
    assert decision((98, 98), flops_per_byte=0.0) and not decision((192, 192), flops_per_byte=1e6)
    assert not decision((192, 192), count=1), "one owner does all of it"
    assert not decision((192, 192), copies=1)
    assert [m for m in (48, 64, 65, 96) if decision((m, m), count=16)] == [65, 96]


# ---- training -----------------------------------------------------------------------------------------------


def trained(share: bool, model: str = "broad", steps: int = 4, **config: Any) -> dict[str, Any]:
    """Weights and momentum of this rank, matrices that it orthogonalized, bytes that its plans send."""
    from deepspeed.muon import step as module

    done, originals = [], (module.orthogonalize, planning.is_worth_sharing)

    def counted(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        done.append(x.size(0))
        return originals[0](x, *args, **kwargs)

    module.orthogonalize = counted
    planning.is_worth_sharing = lambda *args: share
    try:
        engine = make_engine(MODELS[model](), ds_config(stage=0, **config))
        optimizer = engine.basic_optimizer
        train_engine(engine, steps)
    finally:
        module.orthogonalize, planning.is_worth_sharing = originals
    buffers = [s["momentum_buffer"] for s in optimizer.state.values() if "momentum_buffer" in s]
    sent = sum(plan.sent_elements for plan in optimizer.plans)
    result = {"weights": fp32_weights(engine), "momentum": buffers, "done": sum(done), "sent": sent}
    engine.destroy()
    return result


@pytest.mark.parametrize(("world", "dtype", "clip"), [(2, "fp32", 1.0), (3, "fp32", 0.0), (2, "bf16", 0.01)])
def test_shared_work_gives_the_same_bits(world: int, dtype: str, clip: float) -> None:
    shared = run(trained, world, share=True, dtype=dtype, clip=clip)
    repeated = run(trained, world, share=False, dtype=dtype, clip=clip)
    matrices, steps = 5, 4
    assert [rank["done"] for rank in repeated] == [matrices * steps] * world
    assert sum(rank["done"] for rank in shared) == matrices * steps
    assert all(rank["sent"] > 0 for rank in shared) and not any(rank["sent"] for rank in repeated)
    for rank in shared:
        torch.testing.assert_close(rank["weights"], repeated[0]["weights"], rtol=0, atol=0)
        torch.testing.assert_close(rank["momentum"], repeated[0]["momentum"], rtol=0, atol=0)


# ---- what is said about it ----------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 3])
def test_the_forecast_is_what_the_engine_binds(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "CPU_CALL", 0.0)  # as in the ranks
    check_against_the_engine("broad", Layout(0, world))
    _, (cost,) = forecast("broad", Layout(0, world))
    assert sum(cost.sent_bytes) == world * cost.least_bytes > 0
    assert cost.collectives == len(cost.plan.buckets) == 1


def test_the_log_says_who_does_the_work() -> None:
    for widths, who in (
        ((96, 96, 96, 96), "the ranks share Newton-Schulz"),
        ((7, 9, 5, 8), "each rank orthogonalizes everything itself, which takes less time than to share it"),
    ):
        lines = run(logged_at_start, 2, stage=0, widths=widths, level=logging.DEBUG)[0]
        assert any(who in text for _, text in lines) and not any(level == "WARNING" for level, _ in lines)
