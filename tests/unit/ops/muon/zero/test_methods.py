# SPDX-License-Identifier: Apache-2.0
"""One choice of methods for all ranks, and for a run from its first checkpoint on."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed.muon import MuonWithAuxAdam
from deepspeed.muon.math.choice import pins
from deepspeed.muon.math.newton_schulz import METHODS
from deepspeed.muon.zero import bind
from helpers import universal
from helpers.distributed import run
from helpers.engine_state import differing, snapshot
from helpers.models import Mlp, initialize_, train_engine
from helpers.training import BF16_OPTIMIZER, PARAMS, ds_config, make_engine

MEASURED = {"type": "Muon", "params": PARAMS | {"ns_tuning": "measured"}}
#: Gram's time over standard's, by rank.
OPINIONS = (0.5, 2.0, 2.0)
#: A small model whose matrices get other owners at stage 3 where another method makes them cost otherwise.
WIDTHS = (64, 16, 48, 24, 16, 16, 16)
KEYS = ("16x16", "16x24", "16x48", "16x64", "24x48")


@contextmanager
def faster(ratio: float) -> Iterator[None]:
    """On this rank, gram takes this many times standard's time, whatever the shape; nothing is timed."""

    def measure(shapes: Any, *args: Any) -> dict[tuple[int, int], dict[str, float]]:
        return {shape: {"standard": 1.0, "gram": ratio} for shape in shapes}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deepspeed.muon.zero.methods.measure", measure)
        yield


@contextmanager
def log() -> Iterator[list[str]]:
    """What the package logs meanwhile, on this rank."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("deepspeed.muon")
    level = logger.level
    logger.setLevel("INFO")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def methods_of(engine: Any) -> dict[str, str]:
    """The methods of all Muon groups, by shape."""
    tables = [group["ns_methods"] for group in engine.basic_optimizer.param_groups if group["use_muon"]]
    assert all(table == tables[0] for table in tables)
    return tables[0]


@contextmanager
def calls() -> Iterator[list[tuple[str, str]]]:
    """Shape and method of every call of Newton-Schulz in a step."""
    from deepspeed.muon import optimizer

    found: list[tuple[str, str]] = []
    original = optimizer.orthogonalize

    def noting(x: Tensor, schedule: Any, method: str, **rest: Any) -> Tensor:
        found.append(("x".join(map(str, sorted(x.shape[1:]))), method))
        return original(x, schedule, method, **rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer, "orthogonalize", noting)
        yield found


def build(case: dict[str, Any], seed: int = 0, widths: tuple[int, ...] = WIDTHS) -> Any:
    net = Mlp(widths)
    initialize_(net, seed)
    return make_engine(net, ds_config(**case))


# ---- ranks ----------------------------------------------------------------------------------------------


def bind_with_opinions(case: dict[str, Any]) -> tuple[dict[str, str], list[str], list[tuple[str, str]], list[int]]:
    """Methods, log, calls of a step and owners on this rank, which would measure its own opinion."""
    with faster(OPINIONS[torch.distributed.get_rank()]), log() as said, calls() as made:
        engine = build(case | {"optimizer": MEASURED})
        train_engine(engine, 1)
        owners = [owner for plan in engine.basic_optimizer.plans for owner in plan.owners]
        result = dict(methods_of(engine)), [text for text in said if "measured the methods" in text], made, owners
        engine.destroy()
    return result


@pytest.mark.parametrize("stage", [0, 3])
def test_every_rank_takes_what_rank_0_measures(stage: int) -> None:
    results = run(bind_with_opinions, 3, case={"stage": stage})
    assert [methods for methods, *_ in results] == [dict.fromkeys(KEYS, "gram")] * 3
    assert {method for _, _, made, _ in results for _, method in made} == {"gram"}
    assert [len(said) for _, said, *_ in results] == [1, 0, 0], "one line, of the rank that measured"
    assert "of 5 of 5 shapes" in results[0][1][0] and "16x64 gram (2.00)" in results[0][1][0]
    assert all(owners == results[0][3] for *_, owners in results)


def test_bf16_is_taken_where_every_rank_is_fast_in_it() -> None:
    facts = bind._facts(MuonWithAuxAdam((net := Mlp()).parameters(), model=net, lr=0.1))
    answers = [[True, True], [True, False], [False, True]]
    verdicts = [bind._judge_settings([facts | {"bf16": fast} for fast in answer]) for answer in answers]
    assert [verdict["bf16"] for verdict in verdicts] == [True, False, False]


def measure_for_real(case: dict[str, Any]) -> tuple[dict[str, str], bool]:
    engine = build(case | {"optimizer": MEASURED})
    result = dict(methods_of(engine)), engine.basic_optimizer.exchange.dtype == torch.float32
    engine.destroy()
    return result


def test_a_real_measurement_answers_for_every_shape() -> None:
    (methods, _), (others, is_fp32) = run(measure_for_real, 2, case={"stage": 2})
    assert methods == others and list(methods) == list(KEYS) and is_fp32
    assert set(methods.values()) <= set(METHODS)


def fail_to_measure() -> str:
    def broken(*args: Any) -> None:
        raise MemoryError("no room")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deepspeed.muon.zero.methods.measure", broken)
        with pytest.raises(RuntimeError) as error:
            build({"optimizer": MEASURED})
    return f"{type(error.value).__name__}: {error.value}"


def test_a_rank_0_that_cannot_measure_is_heard_everywhere() -> None:
    for text in run(fail_to_measure, 2):
        assert text.startswith("DisagreementError: optimizer.params.ns_tuning: rank 0 cannot measure the methods")
        assert text.endswith("MemoryError: no room")


def disagree() -> str:
    """A rank whose rule is another one, as a file that differs would make it."""
    rank = torch.distributed.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "deepspeed.muon.optimizer.pins",
            lambda shapes, kind: dict.fromkeys(pins(shapes, kind), METHODS[rank]),
        )
        with pytest.raises(RuntimeError) as error:
            build({})
    return str(error.value)


def test_ranks_whose_rules_differ_are_refused() -> None:
    for text in run(disagree, 2):
        assert text.startswith("the choice of Newton-Schulz methods differs: rank 0 has [{'16x16': 'standard'")


def explicit(groups: bool) -> tuple[set[tuple[str, str]], int]:
    """What is called where the config, or a parameter group, names a method; and how often anything is measured."""
    measured = []
    with calls() as made, pytest.MonkeyPatch.context() as patch:
        patch.setattr("deepspeed.muon.zero.methods.measure", lambda *args: measured.append(args) or {})
        net = Mlp(WIDTHS)
        first, *rest = net.parameters()
        optimizer = {"type": "Muon", "params": MEASURED["params"] | ({} if groups else {"ns_method": "gram"})}
        given = [{"params": [first], "ns_method": "gram"}, {"params": rest}] if groups else list(net.parameters())
        engine = make_engine(net, ds_config(optimizer=optimizer), model_parameters=given)
        train_engine(engine, 1)
        engine.destroy()
    return set(made), len(measured)


def test_a_method_by_name_wins() -> None:
    (made, measured), (others, _) = run(explicit, 2, groups=False)
    assert {method for _, method in made | others} == {"gram"} and measured == 0
    (made, measured), (others, _) = run(explicit, 2, groups=True)
    assert ("16x64", "gram") in made | others and ("16x16", "standard") in made | others
    assert measured == 1


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
    result = snapshot(engine), dict(methods_of(engine)), [p.owners for p in engine.basic_optimizer.plans], losses
    engine.destroy()
    return result


def save_all(cases: list[dict[str, Any]], folder: str) -> list[Result]:
    """By case: two steps by methods that are none of the shipped rule's, a checkpoint, two steps."""
    results = []
    for index, case in enumerate(cases):
        with faster(0.5):
            engine = build(case | {"optimizer": MEASURED})
        train_engine(engine, 2)
        engine.save_checkpoint(f"{folder}/{index}", tag="saved")
        results.append(report(engine, train_engine(engine, 2, first_step=2)))
    return results


def resume_all(cases: list[dict[str, Any]], folder: str) -> list[tuple[Result, list[str]]]:
    """The same two last steps by an engine whose own rule, shipped and measured by turns, says otherwise."""
    results = []
    for index, case in enumerate(cases):
        optimizer = {"type": "Muon", "params": PARAMS | {"ns_tuning": ("shipped", "measured")[index % 2]}}
        with faster(2.0):
            engine = build(case | {"optimizer": optimizer}, seed=7)
        assert set(methods_of(engine).values()) == {"standard"}
        with log() as said:
            engine.load_checkpoint(f"{folder}/{index}")
        results.append((report(engine, train_engine(engine, 2, first_step=2)), said))
    return results


def test_a_resumed_run_keeps_its_methods(tmp_path: Path) -> None:
    """And with them owners, losses, weights and states, bit for bit."""
    expected = run(save_all, 2, cases=CASES, folder=str(tmp_path))
    for rank, results in enumerate(run(resume_all, 2, cases=CASES, folder=str(tmp_path))):
        for case, wanted, (got, said) in zip(CASES, expected[rank], results, strict=True):
            assert set(got[1].values()) == {"gram"}, case
            assert got[1:] == wanted[1:], case
            assert differing(wanted[0], got[0]) == [], case
            (line,) = [text for text in said if "ns_methods" in text]
            assert f"goes on with ns_methods = {dict.fromkeys(KEYS, 'gram')} from" in line


def train_by(rules: list[float]) -> list[Result]:
    results = []
    for ratio in rules:
        with faster(ratio):
            engine = build({"stage": 3, "optimizer": MEASURED})
        results.append(report(engine, train_engine(engine, 2)))
    return results


def test_methods_change_owners_and_weights_here() -> None:
    """Else the test above would show nothing."""
    for by_gram, by_standard in run(train_by, 2, rules=[0.5, 2.0]):
        assert by_gram[2] != by_standard[2]
        assert differing(by_gram[0], by_standard[0]) != []


def methods_after_loading(folder: str) -> tuple[dict[str, str], list[tuple[int, ...]], list[float]]:
    engine = build({"stage": 3, "checkpoint": {"load_universal": True}}, seed=7)
    engine.load_checkpoint(folder, tag="universal")
    result = dict(methods_of(engine)), [plan.owners for plan in engine.basic_optimizer.plans]
    losses = train_engine(engine, 2, first_step=2)
    engine.destroy()
    return (*result, losses)


def test_universal_checkpoints_carry_the_methods(tmp_path: Path) -> None:
    case = {"stage": 3}
    wanted = run(save_all, 2, cases=[case], folder=str(tmp_path))
    universal.convert(tmp_path / "0")
    for rank, (methods, owners, losses) in enumerate(run(methods_after_loading, 2, folder=str(tmp_path / "0"))):
        assert (methods, owners, losses) == wanted[rank][0][1:]


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
    (header,) = tmp_path.glob("0/*/muon_save.json")
    header.write_text(header.read_text().replace('"16x64": "gram"', '"16x64": "quintic"'))
    assert "quintic" in json.loads(header.read_text())["structures"][0]["groups"][0]["ns_methods"].values()
    for text, is_unchanged in run(load_what_was_edited, 2, folder=str(tmp_path / "0")):
        assert "it was saved with methods that this deepspeed-muon lacks: 'quintic' for 16x64" in text
        assert is_unchanged
