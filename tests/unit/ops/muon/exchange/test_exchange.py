# SPDX-License-Identifier: Apache-2.0
"""The exchange over several buckets; agreement of the ranks; connections."""

import time
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor

from deepspeed.muon.errors import DisagreementError
from deepspeed.muon.exchange import plan as planning
from deepspeed.muon.exchange.consensus import agree, differences
from helpers.collectives import recorded
from helpers.distributed import run
from helpers.models import MODELS, train_engine
from helpers.training import PARAMS, ds_config, make_engine, train_on_gradients, with_params

SHAPES = [(24, 40), (40, 24), (32, 32), (33, 65), (24, 40), (8, 8)]


def train_shared(**config: Any) -> dict[str, Tensor]:
    """`train_on_gradients`, where ranks share the work at stage 0 too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "is_worth_sharing", lambda *args: True)
        return train_on_gradients(SHAPES * 2, 3, **config)


@pytest.mark.skipif(
    Version(torch.__version__) < Version("2.6"), reason="the bits of torch 2.5's bf16 products depend on their number"
)
@pytest.mark.sample(2)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_bits_do_not_depend_on_the_size_of_buckets(stage: int, world: int) -> None:
    """One bucket; several matrices in each; one matrix in each. How many are in flight: test_plan, test_order."""
    sizes = [2**20, 9000 * (world if stage == 0 else 1), 512]  # at stage 0 a bucket is that of all owners
    expected, *others = [
        run(train_shared, world, stage=stage, dtype="bf16", optimizer=with_params(bucket_bytes=size)) for size in sizes
    ]
    for found in others:
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
    results = run(state, 2, fresh=True, env={"DS_MUON_BIND_TIMEOUT": "1"}, facts={"x": 1, "seconds": [0, 2.5]})
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


@pytest.mark.parametrize("late", [0, pytest.param(1, marks=pytest.mark.full)])
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
