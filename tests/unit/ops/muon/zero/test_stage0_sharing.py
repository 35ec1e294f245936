# SPDX-License-Identifier: Apache-2.0
"""Stage 0, where every rank holds everything: the work is shared where that is faster, and nobody sees it."""

from typing import Any

import pytest
import torch

from deepspeed.muon.exchange import plan as planning
from deepspeed.muon.exchange.placed_params import Shard
from deepspeed.muon.layout import Placement
from deepspeed.muon.zero.read_config import Layout
from helpers.distributed import run
from helpers.engine_state import differing, snapshot
from helpers.forecasts import check_against_the_engine, forecast
from helpers.models import MODELS, train_engine
from helpers.plans import COST, make_plan, specs
from helpers.training import ds_config, make_engine


@pytest.mark.parametrize("copies", [2, 4])
def test_the_buckets_of_all_owners_together_are_bounded(copies: int) -> None:
    replicas = [Shard(spec, i, Placement(0, spec.numel, 0, copies)) for i, spec in enumerate(specs([(16, 16)] * 40))]
    plans = [make_plan(replicas, rank, copies, COST, bucket_bytes=4096) for rank in range(copies)]
    for plan in plans:
        assert all(bucket.matrix_elements * COST.bytes_per_element <= 4096 for bucket in plan.buckets)
    assert sum(plan.sent_elements for plan in plans) == 40 * 256 * (copies - 1), "equal parts without padding"


# ---- training -----------------------------------------------------------------------------------------------


def trained(share: bool, **config: Any) -> dict[str, Any]:
    """What this rank holds after four steps, matrices that it orthogonalized, elements that its plans send."""
    from deepspeed.muon import step as module

    done, original = [], module.orthogonalize

    def counted(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        done.append(x.size(0))
        return original(x, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "orthogonalize", counted)
        patch.setattr(planning, "is_worth_sharing", lambda *_: share)
        engine = make_engine(MODELS["broad"](), ds_config(stage=0, **config))
        train_engine(engine, 4)
    sent = sum(plan.sent_elements for plan in engine.basic_optimizer.plans)
    result = {"held": snapshot(engine), "done": sum(done), "sent": sent}
    engine.destroy()
    return result


@pytest.mark.parametrize(
    ("world", "dtype", "clip"),
    [(3, "fp32", 0.0), (2, "bf16", 0.01), pytest.param(2, "fp32", 1.0, marks=pytest.mark.full)],
)
def test_shared_work_gives_the_same_bits(world: int, dtype: str, clip: float) -> None:
    shared = run(trained, world, share=True, dtype=dtype, clip=clip)
    repeated = run(trained, world, share=False, dtype=dtype, clip=clip)
    matrices, steps = 5, 4
    assert [rank["done"] for rank in repeated] == [matrices * steps] * world
    assert sum(rank["done"] for rank in shared) == matrices * steps
    assert all(rank["sent"] > 0 for rank in shared) and not any(rank["sent"] for rank in repeated)
    for rank in shared:
        assert differing(rank["held"], repeated[0]["held"]) == []


# ---- forecast -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_the_forecast_is_what_the_engine_binds(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "CPU_CALL", 0.0)  # as in the ranks
    check_against_the_engine("broad", Layout(0, world))
    _, (cost,) = forecast("broad", Layout(0, world))
    assert sum(cost.sent_bytes) == world * cost.least_bytes > 0
    assert cost.collectives == len(cost.plan.buckets) == 1
