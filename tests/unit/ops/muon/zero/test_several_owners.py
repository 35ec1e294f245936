# SPDX-License-Identifier: Apache-2.0
"""Matrices with several owners: the update of one owner, at every stage, and with everything that surrounds it."""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.distributed import RankError, run
from helpers.engine_state import differing, snapshot
from helpers.parity import update_error
from helpers.records import of_parameters, records, sections
from helpers.training import PARAMS, FixedGradients, ds_config, fp32_weights, make_engine

#: Of matrices that two, three and four ranks can share; the last one none can.
SHAPES = [(24, 48), (48, 24), (36, 36), (60, 24), (24, 48), (25, 35)]
#: Blocks of rows and of columns, whose slices are not contiguous.
BLOCKS = {"muon_split": {"layers.0": {"sizes": [24, 24], "axis": 1}, "layers.1": [24, 24]}}


@contextmanager
def counts_by_shape(counts: dict[tuple[int, int], int] | None) -> Iterator[None]:
    """Plan with these numbers of owners; `None`: with those that the planner chooses."""
    from deepspeed.muon.plan import plan

    original = plan.choose_owner_counts
    if counts is not None:
        plan.choose_owner_counts = lambda items, *args: [counts[item.shape] for item in items]
    try:
        yield
    finally:
        plan.choose_owner_counts = original


def engine_with(
    owners: int | None, params: dict[str, Any] | None = None, seed: int = 0, shapes: Any = SHAPES, **config: Any
) -> Any:
    """An engine of given gradients whose weights depend on the seed."""
    net = FixedGradients(shapes)
    for param in net.parameters():
        param.data.add_(seed)
    section = {"type": "Muon", "params": PARAMS | {"owners_per_matrix": owners} | (params or {})}
    return make_engine(net, ds_config(optimizer=section, **config))


def step(engine: Any, number: int, change: Callable[[list[Tensor]], Any] = lambda gradients: None) -> None:
    gradients = engine.module.gradients(number)
    change(gradients)
    engine.backward(engine(gradients))
    engine.step()


def train(
    owners: int | None, steps: int = 3, counts: dict[tuple[int, int], int] | None = None, **config: Any
) -> tuple[dict[str, Tensor], list[int]]:
    """The change of the weights by given gradients, and the numbers of owners of the matrices."""
    with counts_by_shape(counts):
        engine = engine_with(owners, **config)
    initial = dict(FixedGradients(SHAPES).named_parameters())
    for number in range(steps * config.get("accumulation", 1)):
        step(engine, number)
    weights = fp32_weights(engine)
    found = [count for plan in engine.basic_optimizer.plans for count in plan.of_all.counts]
    engine.destroy()
    return {name: weights[name] - initial[name].detach() for name in initial}, found


# ---- equal to one owner ---------------------------------------------------------------------------------------


#: The smaller sets lie within the larger ones; nobody waits for a rank that waits for him.
SETS = {(24, 48): 4, (48, 24): 2, (36, 36): 2, (60, 24): 4, (25, 35): 1}
ALIKE: dict[str, dict[str, Any]] = {
    **{
        f"stage {stage}, {world} ranks{', offload' * offload}": {"world": world, "stage": stage}
        | ({"offload": True, "accumulation": 2} if offload else {})
        for world in (2, 3, 4)
        for stage, offload in [(0, False), *((stage, offload) for stage in (1, 2, 3) for offload in (False, True))]
    },
    **{f"blocks, stage {stage}": {"stage": stage, "params": BLOCKS} for stage in (0, 2, 3)},
    **{
        f"sets of four, two and one, stage {stage}": {"stage": stage, "world": 4, "params": {"bucket_bytes": 2000}}
        for stage in (1, 3)
    },
    **{f"momentum in {dtype}": {"stage": 3, "params": {"momentum_dtype": dtype}} for dtype in ("bf16", "int8")},
}
OFTEN = (
    *("stage 0, 3 ranks", "stage 1, 4 ranks, offload", "stage 2, 2 ranks", "stage 3, 2 ranks, offload"),
    *("blocks, stage 0", "blocks, stage 3", "sets of four, two and one, stage 3", "momentum in int8"),
)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.full] * (name not in OFTEN)) for name in ALIKE])
def test_equal_to_one_owner(name: str) -> None:
    """Random numbers belong to the slices, so that a momentum in bf16 or int8 is rounded otherwise."""
    case = {"world": 2, "clip": 0.0, **ALIKE[name]}
    world, counts = case.pop("world"), SETS if "sets" in name else None
    expected, found = run(train, world, owners=1, **case)[0]
    assert {*found} == {1}
    for update, found in run(train, world, owners=None if counts else world, counts=counts, **case):
        wanted = [counts[shape] for shape in SHAPES] if counts else [world] * (7 if "blocks" in name else 5) + [1]
        assert found == wanted
        assert 0 < update_error(update, expected) <= (0.05 if "momentum" in name else 1e-5)


def chosen(host: str) -> list[int]:
    """How many owners a lone matrix gets by itself; `host`: of the first rank, if it is not that of the others."""
    import socket

    import torch.distributed as dist

    original = socket.gethostname
    if dist.get_rank() == 0 and host:
        socket.gethostname = lambda: host
    try:
        engine = engine_with(None, stage=3, shapes=[(256, 8192)])
    finally:
        socket.gethostname = original
    counts = list(engine.basic_optimizer.plans[0].of_all.counts)
    engine.destroy()
    return counts


@pytest.mark.parametrize(("host", "owners"), [("", 2), ("elsewhere", 1)])
def test_a_lone_matrix_is_shared_within_a_node(host: str, owners: int) -> None:
    assert run(chosen, 2, host=host) == [[owners]] * 2


# ---- process groups ---------------------------------------------------------------------------------------------


def groups_made(stages: bool) -> dict[str, Any]:
    """The ranks of the groups made, and their time limits, until the optimizer is bound and in its steps.

    `stages`: only the first two ranks want a group, as pipeline stages with unlike matrices.
    """
    import os

    import torch.distributed as dist

    from deepspeed.muon.optimizer import MuonWithAuxAdam
    from deepspeed.muon.zero.bind import prepare_plans

    made: list[tuple[tuple[int, ...], Any, bool]] = []
    original, of_optimizer = dist.new_group, MuonWithAuxAdam.owner_sets

    def new_group(ranks: list[int], timeout: Any = None, **options: Any) -> Any:
        made.append((tuple(ranks), timeout, options.get("use_local_synchronization", False)))
        return original(ranks, timeout, **options)

    dist.new_group = new_group
    os.environ["DEEPSPEED_TIMEOUT"] = "1"
    try:
        with counts_by_shape({shape: 1 if stages or shape == (25, 35) else 2 for shape in SHAPES}):
            engine = engine_with(None, stage=3)
        if stages:
            MuonWithAuxAdam.owner_sets = {(0, 1)} if dist.get_rank() < 2 else set()
            prepare_plans(engine)
        at_bind = list(made)
        step(engine, 0)
        engine.destroy()
    finally:
        dist.new_group, MuonWithAuxAdam.owner_sets = original, of_optimizer
        del os.environ["DEEPSPEED_TIMEOUT"]
    return {"at_bind": [one for one in at_bind if len(one[0]) == 2], "in_step": made[len(at_bind) :]}


@pytest.mark.parametrize(("stages", "sets"), [(False, [(0, 1), (2, 3)]), (True, [(0, 1)])])
def test_all_ranks_make_all_groups_when_bound(stages: bool, sets: list[tuple[int, ...]]) -> None:
    """In one order, with the time limit that the user sets; a rank of none of them too."""
    for rank in run(groups_made, 4, stages=stages):
        assert rank["at_bind"] == [(ranks, timedelta(minutes=1), False) for ranks in sets]
        assert rank["in_step"] == []


def record(folder: str, owners: int) -> None:
    section = sections(folder, 1, {"owners_per_matrix": owners})
    engine = make_engine(FixedGradients(SHAPES), ds_config(stage=3, clip=0.0, **section))
    for number in range(len(SHAPES)):
        step(engine, number)
    engine.destroy()


def test_records_are_those_of_whole_matrices(tmp_path: Path) -> None:
    """Singular values are known of the one matrix that no ranks share."""
    for owners in (1, 2):
        run(record, 2, folder=str(tmp_path / str(owners)), owners=owners)
    alone, several = (of_parameters(records(tmp_path / str(owners))) for owners in (1, 2))
    measured = {name for name in several if name.startswith("orthogonality_error")}
    assert len(measured) == 1 and len([name for name in alone if name.startswith("orthogonality_error")]) == 6
    for name in several:
        assert dict(several[name]) == pytest.approx(dict(alone[name]), rel=1e-4), name


# ---- checkpoints ----------------------------------------------------------------------------------------------


def save_and_go_on(folder: str, owners: int) -> dict[str, Tensor]:
    """The weights and state after the step that follows the save."""
    engine = engine_with(owners, stage=3, clip=0.0)
    step(engine, 0)
    engine.save_checkpoint(folder, tag="saved")
    step(engine, 1)
    found = snapshot(engine)
    engine.destroy()
    return found


def load_and_go_on(folder: str, owners: int) -> tuple[dict[str, Tensor], dict[int, int]]:
    """The same of a run of other weights that loads it; how many matrices have how many owners."""
    engine = engine_with(owners, seed=1, stage=3, clip=0.0)
    assert engine.load_checkpoint(folder, tag="saved")[0] is not None
    step(engine, 1)
    found = snapshot(engine), dict(Counter(n for plan in engine.basic_optimizer.plans for n in plan.of_all.counts))
    engine.destroy()
    return found


TWO, ONE = {2: 5, 1: 1}, {1: 6}


@pytest.mark.parametrize(("saved", "loaded", "counts"), [(2, 1, ONE), (1, 2, TWO), (2, 2, TWO)])
def test_a_resumed_run_has_the_owners_of_its_config(
    saved: int, loaded: int, counts: dict[int, int], tmp_path: Path
) -> None:
    """With as many, its bits are those of the run that saved."""
    expected = run(save_and_go_on, 2, owners=saved, folder=str(tmp_path))
    for wanted, (got, found) in zip(expected, run(load_and_go_on, 2, owners=loaded, folder=str(tmp_path)), strict=True):
        assert found == counts
        assert loaded != saved or differing(wanted, got) == []
        for name in wanted:
            torch.testing.assert_close(got[name], wanted[name], rtol=1e-4, atol=1e-6)


# ---- what goes wrong ------------------------------------------------------------------------------------------


def lose_a_rank() -> None:
    """Rank 1 dies between two sums of a Gram matrix."""
    import torch.distributed as dist

    from deepspeed.muon.exchange.owner_set import OwnerSet

    if dist.get_rank() == 1:
        original, calls = OwnerSet._square, Counter[str]()

        def square(*args: Any) -> None:
            calls["n"] += 1
            if calls["n"] == 3:
                os._exit(3)
            original(*args)

        OwnerSet._square = square
    train(owners=2, stage=3)


def test_a_lost_rank_ends_the_others_which_name_the_matrix() -> None:
    with pytest.raises(RankError, match="ended with code 3") as caught:
        run(lose_a_rank, 2, fresh=True)
    assert "failed in Muon's step, in bucket" in str(caught.value)
