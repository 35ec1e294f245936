# SPDX-License-Identifier: Apache-2.0
"""The state of a whole run: by name, moved off the accelerator and back, and resumed within a step."""

import pickle
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed.muon.errors import CallOrderError
from helpers.distributed import run
from helpers.engine_state import differing, master_weights, named_states, snapshot
from helpers.logs import logged
from helpers.models import MODELS, make_batch, train_engine
from helpers.training import BF16_OPTIMIZER, ds_config, fresh_engine, make_engine

STAGES: list[dict[str, Any]] = [
    {"stage": 0},
    {"stage": 0, "dtype": "bf16"},
    {"stage": 1},
    {"stage": 2, "dtype": "bf16"},
    {"stage": 2, "zero": {"round_robin_gradients": True}},
    {"stage": 3},
    {"stage": 3, "zero": {"sub_group_size": 100}},
    BF16_OPTIMIZER,
    *({"stage": stage, "offload": True} for stage in (1, 2, 3)),
]
KEPT = {"momentum_buffer": 0.9, "exp_avg": 0.9, "exp_avg_sq": 0.95, "None": 1.0}
"""The share of a state, or of the weight, that is left after a step."""


# ---- by name ----------------------------------------------------------------------------------------------


def states_and_weights(engine: Any) -> dict[str, Tensor]:
    return named_states(engine) | {f"{name}.None": value for name, value in master_weights(engine).items()}


def set_and_step(cases: list[dict[str, Any]]) -> None:
    from deepspeed.utils import (
        safe_get_full_optimizer_state,
        safe_set_full_fp32_param,
        safe_set_full_optimizer_state,
    )

    for case in cases:
        engine = fresh_engine(0, case)
        assert not any(state.any() for state in named_states(engine).values()), "at first they are zero"
        train_engine(engine, 1)
        wanted = {}
        generator = torch.Generator().manual_seed(1)
        for param, spec in engine.basic_optimizer.specs.items():
            for key in (None, *(("momentum_buffer",) if spec.use_muon else ("exp_avg", "exp_avg_sq"))):
                # Weights that saturate every unit leave no gradient, and a matrix without one is left alone.
                value = torch.rand(spec.shape, generator=generator)
                value = 4.0 * (value - 0.5) if key is None else (100.0 if key == "exp_avg" else 1e4) * value
                wanted[f"{spec.name}.{key}"] = value
                if key is None:
                    safe_set_full_fp32_param(param, value)
                else:
                    safe_set_full_optimizer_state(param, value, key)
        assert differing(states_and_weights(engine), wanted) == [], case
        keys = [(param, "momentum_buffer") for param, spec in engine.basic_optimizer.specs.items() if spec.use_muon]
        read = [safe_get_full_optimizer_state(*key) for key in keys]
        before = [state.clone() for state in read]
        train_engine(engine, 1, first_step=1)
        assert all(map(torch.equal, read, before)), "what is read is a copy"
        for name, left in states_and_weights(engine).items():
            kept = KEPT[name.rpartition(".")[2]] * wanted[name]
            assert (left - kept).norm() <= 0.01 * wanted[name].norm(), (case, name)
        engine.destroy()


@pytest.mark.parametrize("stages", [[*STAGES[:8], STAGES[-1]], pytest.param(STAGES, marks=pytest.mark.full)], ids=len)
def test_states_are_set_by_name_and_the_next_step_uses_them(stages: list[dict[str, Any]]) -> None:
    run(set_and_step, 3, cases=stages)


def pickle_layers() -> None:
    """What the copies answer."""
    from deepspeed.utils import safe_get_full_fp32_param

    engine = fresh_engine(0, {"stage": 0})
    copy = pickle.loads(pickle.dumps(engine.module.layers))
    theirs, ours = next(copy.parameters()), next(engine.module.layers.parameters())
    safe_get_full_fp32_param(ours).zero_()  # a copy
    assert theirs.equal(ours) and safe_get_full_fp32_param(theirs) is None
    assert safe_get_full_fp32_param(ours).equal(ours)


def test_pickled_layers_leave_the_optimizer_behind() -> None:
    run(pickle_layers, 1)


# ---- moved --------------------------------------------------------------------------------------------------


def addresses(engine: Any) -> list[int]:
    return [value.data_ptr() for entry in engine.basic_optimizer.state.values() for value in entry.values()]


def move_and_go_on(case: dict[str, Any], folder: str) -> list[str]:
    """What differs between an engine whose states were moved away, saved, read and moved back, and one that stayed."""
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

    optim, masters_of = OffloadStateTypeEnum.optim_states, OffloadStateTypeEnum.hp_params
    # A frozen layer: the order of the parameters is not that of their groups.
    moved, still = engines = [make_engine(MODELS["frozen"](), ds_config(**case)) for _ in range(2)]
    results, kinds = [], [None, *([kind] for kind in OffloadStateTypeEnum), [optim, masters_of]]
    for engine in engines:
        train_engine(engine, 2)
    for step, (include, pin_memory) in enumerate(product(kinds, (True, False)), start=2):
        before = addresses(moved)
        moved.offload_states(include=include, pin_memory=pin_memory, non_blocking=not pin_memory)
        # Stages 1 and 2 leave alone what is on the CPU already.
        is_moved = case["stage"] == 3 and (include is None or optim in include)
        assert not pin_memory or (before != addresses(moved)) == is_moved, include
        moved.offload_states(include=include, pin_memory=pin_memory)  # a second time: nothing to do
        moved.save_checkpoint(folder, tag="away")
        wrong = differing(states_and_weights(moved), states_and_weights(still))
        moved.reload_states()
        wrong += differing(*(snapshot(engine) | named_states(engine) for engine in engines))
        for engine in engines:
            train_engine(engine, 1, first_step=step)
        wrong += differing(snapshot(moved), snapshot(still))
        results += [f"{include} {pin_memory}: {name}" for name in wrong]
    for engine in engines:
        engine.destroy()
    return results


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [3, 1, 2])
def test_moved_states_come_back_and_training_goes_on(stage: int, dtype: str, tmp_path: Path) -> None:
    """While they are away they are saved, and read by name."""
    assert run(move_and_go_on, 2, case={"stage": stage, "dtype": dtype}, folder=str(tmp_path)) == [[], []]


def refuse(error: Any, words: str, call: Callable[..., Any], *args: Any) -> None:
    with pytest.raises(error, match=re.escape(words)):
        call(*args)


def call_in_a_wrong_order(cases: list[dict[str, Any]], folder: str) -> None:
    for index, case in enumerate(cases):
        engine = fresh_engine(0, case)
        accumulation = engine.gradient_accumulation_steps()
        refuse(CallOrderError, "step() without", engine.step)  # before any backward
        train_engine(engine, 1)
        refuse(CallOrderError, "step() without", engine.step)  # a second time
        engine.save_checkpoint(f"{folder}/{index}")
        if case["stage"] > 0 and "data_types" not in case:  # DeepSpeed moves the states of these wrappers
            engine.offload_states()
            loss = engine(*make_batch(engine.module, 1, 0, engine.global_rank, engine.world_size, accumulation))
            before = snapshot(engine)
            refuse((RuntimeError, ValueError), "reload_states() first", engine.load_checkpoint, f"{folder}/{index}")
            refuse(CallOrderError, "backward()", engine.backward, loss)
            refuse(CallOrderError, "step()", engine.step)
            assert differing(before, snapshot(engine)) == [], case
        engine.destroy()


@pytest.mark.parametrize("accumulation", [2, pytest.param(1, marks=pytest.mark.full)])
def test_calls_in_a_wrong_order_are_refused_in_words(accumulation: int, tmp_path: Path) -> None:
    cases = [case | {"accumulation": accumulation} for case in STAGES if "offload" not in case][:: 3 - accumulation]
    run(call_in_a_wrong_order, 2, cases=cases, folder=str(tmp_path))


# ---- resumed within a step ----------------------------------------------------------------------------------


def micro_steps(engine: Any, step: int, micros: range) -> None:
    """Some of the micro-batches of a step."""
    rank, world, accumulation = engine.global_rank, engine.world_size, engine.gradient_accumulation_steps()
    for micro in micros:
        engine.backward(engine(*make_batch(engine.module, step, micro, rank, world, accumulation)))
        engine.step()


def resume_within_a_step(cases: list[dict[str, Any]], folder: str) -> list[str]:
    """Save, and load, within a step; return what is logged, by case."""
    results = []
    for index, case in enumerate(cases):
        with logged() as said:
            engine = fresh_engine(0, case)
            train_engine(engine, 2)
            micro_steps(engine, 2, range(3))
            engine.save_checkpoint(f"{folder}/{index}")
            micro_steps(engine, 2, range(3, 4))
            train_engine(engine, 1, first_step=3)
            wanted = snapshot(engine)
            engine.destroy()
            engine = fresh_engine(7, case)
            micro_steps(engine, 9, range(2))
            engine.load_checkpoint(f"{folder}/{index}")
            train_engine(engine, 2, first_step=2)
        assert differing(wanted, snapshot(engine)) == [], case
        results.append("\n".join(said))
        engine.set_gradient_accumulation_boundary(True)  # by the script, as accelerate does: each is a step
        micro_steps(engine, 4, range(2))
        with logged() as said:
            engine.save_checkpoint(f"{folder}/{index}", tag="whole steps")
        assert not any("micro-batch" in text for text in said), case
        engine.destroy()
    return results


@pytest.mark.parametrize("stages", [STAGES[1::4], pytest.param(STAGES, marks=pytest.mark.full)], ids=len)
def test_a_step_under_way_begins_again(stages: list[dict[str, Any]], tmp_path: Path) -> None:
    cases = [case | {"accumulation": 4} for case in stages]
    first, second = run(resume_within_a_step, 2, cases=cases, folder=str(tmp_path))
    assert all("micro-batch 3 of 4" in text for text in first) and "micro-batch" not in "".join(second)
