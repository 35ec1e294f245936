# SPDX-License-Identifier: Apache-2.0
"""One choice of Newton-Schulz for all ranks, and for a run from its first checkpoint on."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed.muon import MuonWithAuxAdam, tuning
from deepspeed.muon.math.choice import Choice
from deepspeed.muon.math.newton_schulz import METHODS
from deepspeed.muon.zero import bind
from helpers import universal
from helpers.distributed import run
from helpers.engine_state import differing, snapshot
from helpers.logs import logged
from helpers.models import Mlp, initialize_, train_engine
from helpers.racing import opinion, races
from helpers.training import BF16_OPTIMIZER, PARAMS, ds_config, make_engine

#: What is auto is chosen; PARAMS fixes the dtype.
OPEN = {"type": "Muon", "params": PARAMS | {"ns_dtype": "auto", "kernels": "torch"}}
#: A small model whose matrices get other owners at stage 3 where another method makes them cost otherwise.
WIDTHS = (64, 16, 48, 24, 16, 16, 16)
KEYS = ("16x16", "16x24", "16x48", "16x64", "24x48")


@contextmanager
def preferring(method: str, dtype: str = "fp32", by: float = 9.0) -> Iterator[None]:
    """On this rank this dtype is the fastest by a factor, and this method the one of fewer operations."""

    def operations(rows: int, cols: int, schedule: Any, of: str, dtype: str) -> float:
        return 1.0 if of == method else 2.0

    with opinion(lambda of, table: 1.0 if of == dtype else 1 / by), pytest.MonkeyPatch.context() as patch:
        patch.setattr("deepspeed.muon.math.choice.flops", operations)
        yield


def choice_of(engine: Any) -> Choice:
    """The choice of all Muon groups."""
    pinned = [group["ns_choice"] for group in engine.basic_optimizer.param_groups if group["use_muon"]]
    assert all(choice == pinned[0] for choice in pinned)
    return engine.basic_optimizer.choice


def methods_of(engine: Any) -> dict[str, str]:
    """The methods of all Muon groups, by shape."""
    return {key: recipe.method for key, recipe in choice_of(engine).recipes.items()}


def owners_of(engine: Any) -> list[tuple[int, ...]]:
    return [plan.of_all.owners for plan in engine.basic_optimizer.plans]


@contextmanager
def calls() -> Iterator[list[tuple[str, str, torch.dtype]]]:
    """Shape, method and dtype of every call of Newton-Schulz in a step."""
    from deepspeed.muon.step import partition_step

    found: list[tuple[str, str, torch.dtype]] = []
    original = partition_step.orthogonalize

    def noting(x: Tensor, schedule: Any, *, method: str, dtype: torch.dtype, **others: Any) -> Tensor:
        found.append(("x".join(map(str, sorted(x.shape[1:]))), method, dtype))
        return original(x, schedule, method=method, dtype=dtype, **others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition_step, "orthogonalize", noting)
        yield found


def build(case: dict[str, Any], seed: int = 0, widths: tuple[int, ...] = WIDTHS) -> Any:
    net = Mlp(widths)
    initialize_(net, seed)
    return make_engine(net, ds_config(**case))


# ---- ranks ----------------------------------------------------------------------------------------------

#: By rank, the rate in each dtype: rank 1 is slow, and slow in another dtype than the others.
SPEEDS = (
    {"fp32": 4.0, "fp16": 8.0, "bf16": 16.0},
    {"fp32": 2.0, "fp16": 3.0, "bf16": 1.0},
    {"fp32": 4.0, "fp16": 6.0, "bf16": 16.0},
)


def bind_at_unequal_speed(case: dict[str, Any]) -> tuple[Choice, list[str], list[Any], list[Any], torch.dtype]:
    """Choice, log, calls of a step, owners and dtype of the exchange of this rank, whose speed is its own."""
    mine = SPEEDS[torch.distributed.get_rank()]
    with opinion(lambda dtype, table: mine[dtype]) as held, logged() as said, calls() as made:
        engine = build(case | {"optimizer": OPEN})
        assert held == [("fp32", "fp16", "bf16")]
        train_engine(engine, 1)
        chosen = [text for text in said if "Newton-Schulz on cpu in" in text]
        result = choice_of(engine), chosen, made, owners_of(engine), engine.basic_optimizer.exchange.dtype
        engine.destroy()
    assert len(held) == 1, "no step races again"
    return result


@pytest.mark.parametrize("stage", [0, 3])
def test_all_ranks_take_what_is_fastest_at_the_slowest(stage: int) -> None:
    """fp16 with 3 on the slowest rank, where fp32 has 2 and bf16 has 1."""
    results = run(bind_at_unequal_speed, 3, case={"stage": stage})
    assert all(result[0] == results[0][0] and result[3] == results[0][3] for result in results)
    assert results[0][0].dtype == "fp16"
    assert {dtype for _, _, made, *_ in results for _, _, dtype in made} == {torch.float16}
    assert [len(said) for _, said, *_ in results] == [1, 0, 0], "one line"
    assert "the fastest of those timed at start" in results[0][1][0]
    assert {exchanged for *_, exchanged in results} == {torch.bfloat16}


def test_bf16_is_a_candidate_where_every_rank_has_it() -> None:
    optimizer = MuonWithAuxAdam((net := Mlp()).parameters(), model=net, lr=0.1)
    facts = bind._facts(SimpleNamespace(mpu=None, monitor=SimpleNamespace(enabled=False)), optimizer)
    answers = [[True, True], [True, False], [False, True]]
    verdicts = [bind._judge_settings([facts | {"bf16": has} for has in answer]) for answer in answers]
    assert [verdict["bf16"] for verdict in verdicts] == [True, False, False]


def race_for_real() -> Choice:
    with races():
        engine = build({"stage": 2, "optimizer": {"type": "Muon", "params": PARAMS | {"ns_dtype": "auto"}}})
    result = choice_of(engine)
    train_engine(engine, 1)
    engine.destroy()
    return result


def test_a_real_race_answers_for_every_shape() -> None:
    choice, other = run(race_for_real, 2)
    assert choice == other and set(choice.recipes) == set(KEYS)


def start_without_a_race(fixed_by: str) -> tuple[set[tuple[str, str, torch.dtype]], int]:
    """What is called where rank 1 is deterministic, or the config or a group names a method; and how many races."""
    with calls() as made, opinion(lambda dtype, table: {"fp32": 1.0, "fp16": 2.0, "bf16": 4.0}[dtype]) as held:
        if fixed_by == "determinism":
            torch.use_deterministic_algorithms(torch.distributed.get_rank() == 1)
        first, *rest = (net := Mlp(WIDTHS)).parameters()
        params = OPEN["params"] if fixed_by == "determinism" else PARAMS | {"kernels": "torch"}
        params |= {"ns_method": "gram"} if fixed_by == "config" else {}
        groups = [{"params": [first], "ns_method": "gram"}, {"params": rest}]
        given = groups if fixed_by == "group" else list(net.parameters())
        engine = make_engine(net, ds_config(optimizer={"type": "Muon", "params": params}), model_parameters=given)
        train_engine(engine, 1)
        engine.destroy()
    return set(made), len(held)


@pytest.mark.parametrize("fixed_by", ["determinism", "config", "group"])
def test_nothing_is_raced_for_what_is_fixed_or_where_one_rank_must_not(fixed_by: str) -> None:
    (made, held), (others, other) = run(start_without_a_race, 2, fixed_by=fixed_by)
    assert held == other == 0 and {dtype for *_, dtype in made | others} == {torch.float32}
    if fixed_by == "config":
        assert {method for _, method, _ in made | others} == {"gram"}
    if fixed_by == "group":
        assert {("16x64", "gram"), ("16x16", "standard")} <= {call[:2] for call in made | others}


def refused(fault: str) -> str:
    """The error of ranks that cannot race, or that choose by themselves, as another version might."""
    rank, count = torch.distributed.get_rank(), tuning.fewest_operations

    def race(*args: Any) -> None:
        raise MemoryError("no room")

    def fewest_operations(shapes: Any, schedule: Any, dtype: str, methods: Any, table: str) -> Choice:
        return count(shapes, schedule, dtype, [METHODS[rank]], table)

    with pytest.MonkeyPatch.context() as patch, races() if fault == "measure_rates" else nullcontext():
        patch.setattr(tuning, fault, {"measure_rates": race, "fewest_operations": fewest_operations}[fault])
        with pytest.raises(RuntimeError) as error:
            build({"optimizer": OPEN} if fault == "measure_rates" else {})
    return f"{type(error.value).__name__}: {error.value}"


def test_a_rank_that_cannot_race_is_heard_everywhere() -> None:
    for text in run(refused, 2, fault="measure_rates"):
        assert text.startswith("DisagreementError: rank 0: ") and "MemoryError: no room" in text


def test_ranks_whose_choices_differ_are_refused() -> None:
    for text in run(refused, 2, fault="fewest_operations"):
        assert "the choice of dtype, methods and kernels of Newton-Schulz differs: rank 0 has [{'dtype': 'fp32'" in text


# ---- a run and its checkpoints ------------------------------------------------------------------------------

CASES: list[dict[str, Any]] = [
    {"stage": 0},
    {"stage": 1},
    BF16_OPTIMIZER,
    {"stage": 2, "offload": True},
    {"stage": 3, "dtype": "bf16"},
    {"stage": 3, "zero": {"sub_group_size": 600}},
]
Result = tuple[dict[str, Tensor], dict[str, str], list[tuple[int, ...]], list[float]]


def report(engine: Any, losses: list[float]) -> Result:
    """The state after the steps, methods and owners."""
    result = snapshot(engine), methods_of(engine), owners_of(engine), losses
    engine.destroy()
    return result


def save_all(cases: list[dict[str, Any]], folder: str) -> list[Result]:
    """By case: two steps by other methods than a count of operations would choose, a checkpoint, two steps."""
    results = []
    for index, case in enumerate(cases):
        with preferring("gram"):
            engine = build(case | {"optimizer": OPEN})
        train_engine(engine, 2)
        engine.save_checkpoint(f"{folder}/{index}", tag="saved")
        with logged() as said:
            engine.load_checkpoint(f"{folder}/{index}", tag="saved")
        assert not any("Newton-Schulz continues" in text for text in said), "it is this run's own choice"
        results.append(report(engine, train_engine(engine, 2, first_step=2)))
    return results


def resume_all(cases: list[dict[str, Any]], folder: str, tag: str | None = None) -> list[tuple[Result, list[str]]]:
    """The same two last steps by an engine for which another choice, counted and raced by turns, is the best."""
    results = []
    for index, case in enumerate(cases):
        with preferring("standard", "bf16") if index % 2 else nullcontext():
            engine = build(case | {"optimizer": OPEN}, seed=7)
        assert choice_of(engine).recipe(16, 16).method == "standard"
        with logged() as said:
            engine.load_checkpoint(f"{folder}/{index}", tag=tag)
        results.append((report(engine, train_engine(engine, 2, first_step=2)), said))
    return results


def test_a_resumed_run_keeps_its_choice(tmp_path: Path) -> None:
    """And with it losses, weights and states, bit for bit; owners are those of its own plan."""
    expected = run(save_all, 2, cases=CASES, folder=str(tmp_path))
    for rank, results in enumerate(run(resume_all, 2, cases=CASES, folder=str(tmp_path))):
        for case, wanted, (got, said) in zip(CASES, expected[rank], results, strict=True):
            assert set(got[1].values()) == {"gram"}, case
            assert (got[1], *got[3:]) == (wanted[1], *wanted[3:]), case
            assert differing(wanted[0], got[0]) == [], case
            told = [text for text in said if "Newton-Schulz continues in fp32" in text]
            assert len(told) == (rank == 0), "once"
            if told and CASES.index(case) % 2:  # the times tell that another choice is faster
                assert "so that results stay reproducible; on this machine bf16 would be" in told[0]
            elif told:
                assert "by gram with" in told[0] and "(with the checkpoint's methods and kernels)" in told[0]


def test_universal_checkpoints_carry_the_choice(tmp_path: Path) -> None:
    case = {"stage": 3}
    wanted = run(save_all, 2, cases=[case], folder=str(tmp_path))
    universal.convert(tmp_path / "0")
    loading = [case | {"checkpoint": {"load_universal": True}}]
    for rank, ((got, _),) in enumerate(run(resume_all, 2, cases=loading, folder=str(tmp_path), tag="universal")):
        assert got[1:] == wanted[rank][0][1:]


def load_what_was_edited(folder: str) -> tuple[str, bool]:
    engine = build({"stage": 2}, seed=7)
    before = snapshot(engine)
    with pytest.raises(ValueError) as error:
        engine.load_checkpoint(folder)
    result = str(error.value), differing(before, snapshot(engine)) == []
    engine.destroy()
    return result


def test_an_unknown_method_is_refused_before_anything_changes(tmp_path: Path) -> None:
    run(save_all, 2, cases=[{"stage": 2}], folder=str(tmp_path))
    for file in tmp_path.glob("0/*/*optim_states.pt"):
        saved = torch.load(file, weights_only=False)
        group = saved["optimizer_state_dict"]["base_optimizer_state"]["param_groups"][0]
        group["ns_choice"]["shapes"]["16x64"]["method"] = "quintic"
        torch.save(saved, file)
    for text, is_unchanged in run(load_what_was_edited, 2, folder=str(tmp_path / "0")):
        assert "'quintic' for 16x64" in text and is_unchanged


def resume_elsewhere() -> tuple[list[str], list[str]]:
    """Resume with a config that sets another dtype, with kernels that this machine lacks, and where another dtype is
    faster by a factor; return what is logged.
    """
    with preferring("standard"):
        state = build({"stage": 1, "optimizer": OPEN}).basic_optimizer.state_dict()
    groups = [group for group in state["param_groups"] if group["use_muon"]]
    faster = []
    for dtype, factor in (("auto", 1.4), ("auto", 1.6), ("bf16", 9.0)):
        with preferring("standard", "bf16", factor):
            engine = build({"stage": 1, "optimizer": OPEN | {"params": OPEN["params"] | {"ns_dtype": dtype}}})
        with logged() as said:
            engine.basic_optimizer.load_state_dict(state)
        faster += [text for text in said if "times faster" in text]
    assert choice_of(engine).dtype == "bf16", "as the config says"
    for recipe in (recipe for group in groups for recipe in group["ns_choice"]["shapes"].values()):
        recipe["square"] = "triton"
    other = build({"stage": 1, "optimizer": OPEN})
    with logged() as lacking:
        other.basic_optimizer.load_state_dict(state)
    train_engine(other, 1)
    return faster, [text for text in lacking if "triton" in text]


def test_a_choice_that_cannot_be_kept_or_is_much_slower_is_told_once() -> None:
    (faster, lacking), others = run(resume_elsewhere, 2)
    assert len(lacking) == 1 and "the kernels of triton, which are unavailable on this machine" in lacking[0]
    assert faster == [
        "deepspeed-muon: Newton-Schulz continues in fp32, with the checkpoint's methods and kernels, so that results "
        'stay reproducible; on this machine bf16 would be 1.6 times faster; to use it, set "ns_dtype": "bf16" in '
        "optimizer.params"
    ]
    assert others == ([], [])
