# SPDX-License-Identifier: Apache-2.0
"""The state of a whole run: by name, moved off the accelerator and back, and resumed with scale and accumulation."""

import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.distributed import run
from helpers.engine_state import differing, master_weights, named_states, snapshot
from helpers.logs import logged
from helpers.models import MODELS, initialize_, make_batch, train_engine
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
KEPT = {"momentum_buffer": 0.9, "exp_avg": 0.9, "exp_avg_sq": 0.95, None: 1.0}
"""The share of a state, or of the weight, that is left after a step."""


# ---- by name ----------------------------------------------------------------------------------------------


def set_and_step(cases: list[dict[str, Any]]) -> list[dict[str, tuple[Tensor, Tensor, Tensor]]]:
    """By case and state: what was set, what was found, what a step left of it."""
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

    results = []
    for case in cases:
        engine = fresh_engine(0, case)
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
        found = named_states(engine) | {f"{name}.None": value for name, value in master_weights(engine).items()}
        train_engine(engine, 1, first_step=1)
        left = named_states(engine) | {f"{name}.None": value for name, value in master_weights(engine).items()}
        results.append({name: (wanted[name], found[name].cpu(), left[name].cpu()) for name in wanted})
        engine.destroy()
    return results


def test_states_are_set_by_name_and_the_next_step_uses_them() -> None:
    results = run(set_and_step, 3, cases=STAGES)
    for rank, cases in enumerate(results):
        for case, states in zip(STAGES, cases, strict=True):
            for name, (wanted, found, left) in states.items():
                key = name.rpartition(".")[2]
                assert found.equal(wanted), (rank, case, name)
                kept = KEPT[None if key == "None" else key]
                assert (left - kept * wanted).norm() <= 0.01 * wanted.norm(), (rank, case, name)


def pickled_layers() -> list[bool]:
    """Whether layers at stage 0 survive pickling, without the optimizer; what the copies answer."""
    from deepspeed.utils import safe_get_full_fp32_param

    engine = fresh_engine(0, {"stage": 0})
    copy = pickle.loads(pickle.dumps(engine.module.layers))
    theirs, ours = next(copy.parameters()), next(engine.module.layers.parameters())
    safe_get_full_fp32_param(ours).zero_()  # a copy
    return [theirs.equal(ours), safe_get_full_fp32_param(theirs) is None, safe_get_full_fp32_param(ours).equal(ours)]


def test_pickled_layers_leave_the_optimizer_behind() -> None:
    assert run(pickled_layers, 1) == [[True, True, True]]


# ---- moved --------------------------------------------------------------------------------------------------


def frozen_engine(case: dict[str, Any]) -> Any:
    """An engine whose first layer is frozen, and whose parameters' order is not that of its groups."""
    net = MODELS["mlp"]()
    initialize_(net, 0)
    next(net.parameters()).requires_grad_(False)
    return make_engine(net, ds_config(**case))


def places(engine: Any) -> list[int]:
    """The addresses of the optimizer's state."""
    return [value.data_ptr() for entry in engine.basic_optimizer.state.values() for value in entry.values()]


def move_and_go_on(case: dict[str, Any], folder: str) -> list[str]:
    """What differs between an engine whose states were moved away, saved, read and moved back, and one that stayed."""
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

    optim, masters_of = OffloadStateTypeEnum.optim_states, OffloadStateTypeEnum.hp_params
    results = []
    for index, include in enumerate([None, *([kind] for kind in OffloadStateTypeEnum), [optim, masters_of]]):
        moved, still = engines = [frozen_engine(case) for _ in range(2)]
        for engine in engines:
            train_engine(engine, 2)
        for pin_memory in (True, False):
            before = places(moved)
            moved.offload_states(include=include, pin_memory=pin_memory, non_blocking=not pin_memory)
            # Stages 1 and 2 leave alone what is on the CPU already.
            is_moved = case["stage"] == 3 and (include is None or optim in include)
            assert not pin_memory or (before != places(moved)) == is_moved, include
            moved.offload_states(include=include, pin_memory=pin_memory)  # a second time: nothing to do
            moved.save_checkpoint(f"{folder}/{index}", tag="away")
            wrong = differing(master_weights(moved), master_weights(still)) + differing(
                named_states(moved), named_states(still)
            )
            moved.reload_states()
            wrong += differing(snapshot(moved), snapshot(still)) + differing(named_states(moved), named_states(still))
            for engine in engines:
                train_engine(engine, 1, first_step=2)
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


def has_moves(case: dict[str, Any]) -> bool:
    """Whether DeepSpeed can move the states of this wrapper."""
    return case["stage"] > 0 and "data_types" not in case


def refusal(call: Callable[[], Any]) -> str:
    """The type and text of the error that a call raises."""
    with pytest.raises((RuntimeError, ValueError)) as error:
        call()
    return f"{error.type.__name__}: {error.value}"


def refused_calls(cases: list[dict[str, Any]], folder: str) -> list[tuple[list[str], list[str]]]:
    """By case: the errors of calls in a wrong order, and what they have changed."""
    results = []
    for index, case in enumerate(cases):
        engine = fresh_engine(0, case)
        accumulation = engine.gradient_accumulation_steps()
        errors = [refusal(engine.step)]  # before any backward
        train_engine(engine, 1)
        errors.append(refusal(engine.step))  # a second time
        engine.save_checkpoint(f"{folder}/{index}")
        wrong: list[str] = []
        if has_moves(case):
            engine.offload_states()
            loss = engine(*make_batch(engine.module, 1, 0, engine.global_rank, engine.world_size, accumulation))
            before = snapshot(engine)
            errors.append(refusal(partial(engine.load_checkpoint, f"{folder}/{index}")))
            errors += [refusal(partial(engine.backward, loss)), refusal(engine.step)]
            wrong = differing(before, snapshot(engine))
        results.append((errors, wrong))
        engine.destroy()
    return results


@pytest.mark.sample(2)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_calls_in_a_wrong_order_are_refused_in_words(accumulation: int, tmp_path: Path) -> None:
    cases = [case | {"accumulation": accumulation} for case in STAGES if "offload" not in case][:: 3 - accumulation]
    for ranks in run(refused_calls, 2, cases=cases, folder=str(tmp_path)):
        for case, (errors, wrong) in zip(cases, ranks, strict=True):
            words = ["CallOrderError: step() without"] * 2
            words += ["reload_states() first", "CallOrderError: backward()", "CallOrderError: step()"] * has_moves(case)
            for text, word in zip(errors, words, strict=True):
                assert word in text, case
            assert wrong == [], case


# ---- resumed ------------------------------------------------------------------------------------------------

SCALE = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 2}


def scaled(folder: str, stage: int, resumed: bool) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Loss scales and losses of steps 5 to 9 of a run with dynamic loss scale, one overflow in each half."""
    case = {"stage": stage, "fp16": SCALE}
    engine = fresh_engine(7 if resumed else 0, case, scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 6}})

    def steps(first: int, count: int) -> tuple[list[float], list[float]]:
        scales, losses = [], []
        for step in range(first, first + count):
            hook = None
            if step in (1, 6):
                hook = next(engine.module.parameters()).register_hook(lambda grad: grad * torch.inf)
            losses += train_engine(engine, 1, first_step=step)
            scales.append(float(engine.optimizer.cur_scale if stage == 0 else engine.optimizer.loss_scale))
            if hook is not None:
                hook.remove()
        return scales, losses

    if resumed:
        engine.load_checkpoint(folder)
    else:
        before, _ = steps(0, 5)
        engine.save_checkpoint(folder)
        assert len(set(before)) > 1
    scales, losses = steps(5, 5)
    result = snapshot(engine) | {"lr": torch.tensor(engine.get_lr()), "skipped": torch.tensor(engine.skipped_steps)}
    engine.destroy()
    return scales, losses, result


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_loss_scale_and_schedule_resume_exactly(stage: int, tmp_path: Path) -> None:
    expected = run(scaled, 2, folder=str(tmp_path), stage=stage, resumed=False)
    for (scales, losses, wanted), got in zip(
        expected, run(scaled, 2, folder=str(tmp_path), stage=stage, resumed=True), strict=True
    ):
        assert len(set(scales)) > 1
        assert got[:2] == (scales, losses)
        assert differing(wanted, got[2]) == []


def micro_steps(engine: Any, step: int, micros: range) -> None:
    """Some of the micro-batches of a step."""
    rank, world, accumulation = engine.global_rank, engine.world_size, engine.gradient_accumulation_steps()
    for micro in micros:
        engine.backward(engine(*make_batch(engine.module, step, micro, rank, world, accumulation)))
        engine.step()


def resume_within_a_step(cases: list[dict[str, Any]], folder: str) -> list[tuple[list[str], str]]:
    """By case: what differs where a run is saved, and one is loaded, within a step; the warning."""
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
        results.append((differing(wanted, snapshot(engine)), "\n".join(said)))
        engine.destroy()
    return results


@pytest.mark.parametrize("stages", [STAGES[1::4], pytest.param(STAGES, marks=pytest.mark.full)], ids=len)
def test_a_step_under_way_begins_again(stages: list[dict[str, Any]], tmp_path: Path) -> None:
    cases = [case | {"accumulation": 4} for case in stages]
    first, second = run(resume_within_a_step, 2, cases=cases, folder=str(tmp_path))
    for case, (wrong, text), (other, silence) in zip(cases, first, second, strict=True):
        assert wrong == other == [], case
        assert "micro-batch 3 of 4" in text and "micro-batch" not in silence
