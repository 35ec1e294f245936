# SPDX-License-Identifier: Apache-2.0
"""What ranks do under each contract, for a case of the table of settings."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from helpers.engine_state import differing
from helpers.logs import logged
from helpers.oracles import OracleResult, change_cosine, change_error, route
from helpers.parity import STEPS
from helpers.settings import SETTINGS, Setting
from helpers.ways import Case

NOISE = ("c_attn.bias", "query_key_value.bias")
"""Ends of names of biases that contain those of keys, whose gradient is nothing but rounding."""
SAVED = 2
"""Steps before a save."""


def find(name: str, index: int, folder: str) -> tuple[Setting, Case]:
    """Return a row of the table and one of its cases; what it swaps is in a folder of this rank."""
    setting = SETTINGS[name]
    case = setting.case(index)
    return setting, case | ({"swap": f"{folder}/swap"} if name.startswith("NVMe") else {})


def train(name: str, index: int, folder: str) -> tuple[dict[str, Tensor], list[float]]:
    """Train; return the weights and the norm that the engine reports after each step."""
    (setting, case), norms = find(name, index, folder), []
    with setting.way.engine(case) as engine:
        for number in range(STEPS):
            setting.way.take(engine, number)
            norms.append(float(engine.get_global_grad_norm() or 0.0))
        return setting.way.weights(engine), norms


def end_of(name: str, index: int, folder: str, loads: bool) -> dict[str, Tensor]:
    """Save within a run, or load that into a run of other weights; return everything that either has at the end."""
    setting, case = find(name, index, folder)
    with setting.way.engine(case, seed=int(loads)) as engine:
        if loads:
            setting.way.take(engine, 9)  # so that the load has state to replace
            if getattr(engine.optimizer, "dynamic_loss_scale", False):
                engine.optimizer.cur_scale *= 0.5
            engine.load_checkpoint(folder)
        else:
            for number in range(SAVED):
                setting.way.take(engine, number)
            engine.basic_optimizer.param_groups[-1]["weight_decay"] *= 0.5  # by the script
            engine.save_checkpoint(folder)
        assert engine.global_steps - engine.skipped_steps == SAVED
        for number in range(SAVED, SAVED + 2):
            setting.way.take(engine, number)
        scale = getattr(engine.optimizer, "cur_scale", getattr(engine.optimizer, "loss_scale", 1.0))
        counts = torch.tensor([*engine.get_lr(), scale, engine.skipped_steps], dtype=torch.float64)
        return setting.way.snapshot(engine) | {"rates, loss scale, skipped steps": counts}


def resume(name: str, index: int, folder: str) -> list[str]:
    """Return what differs at the end of a run that saves and of one that loads."""
    return differing(*(end_of(name, index, folder, loads) for loads in (False, True)))


def train_through_bad_steps(name: str, index: int, folder: str) -> list[str]:
    """Train with and without bad steps between the good ones; return what they changed."""
    (setting, case), ends, traces = find(name, index, folder), [], []
    for is_clean in (True, False):
        with setting.way.engine(case) as engine:
            groups = setting.way.spoiled(engine)
            for number, value in enumerate((math.nan, math.inf, math.nan)):
                setting.way.step(engine, number)
                if is_clean:
                    continue
                before = setting.way.snapshot(engine)
                is_bad = dist.get_rank() == dist.get_world_size() - 1
                hooks = [param.register_hook(Spoil(value)) for param in groups[number % len(groups)] if is_bad]
                setting.way.step(engine, number)
                for hook in hooks:
                    hook.remove()
                traces += [f"step {number}: {key}" for key in differing(before, setting.way.snapshot(engine))]
            ends.append(setting.way.snapshot(engine))
    return traces + differing(*ends)


def around_a_move(
    name: str, index: int, folder: str, loads: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Save, or load what stock's converter made of it elsewhere; return (weights, states, weights two steps later)."""
    setting, case = find(name, index, folder)
    case, more = (setting.elsewhere(case), {"checkpoint": {"load_universal": True}}) if loads else (case, {})
    with setting.way.engine(case, **more) as engine:
        if loads:
            assert engine.load_checkpoint(folder, tag="universal")[0] is not None
        else:
            for number in range(SAVED):
                setting.way.take(engine, number)
            engine.save_checkpoint(folder, tag="saved")
        weights, states = setting.way.weights(engine), setting.way.states(engine)
        for number in range(SAVED, SAVED + 2):
            setting.way.take(engine, number)
        later, trained = setting.way.weights(engine), setting.way.names(engine)  # the converter drops frozen weights
        found = {name: weights[name] for name in trained}, states, {name: later[name] for name in trained}
        weights, states, later = (setting.way.apart(engine, values) for values in found)
        return weights, states, later


def lost_moments(name: str, index: int, folder: str) -> tuple[list[str], int]:
    """Load a universal checkpoint elsewhere; return (warnings about second moments, how many are not zero)."""
    setting, case = find(name, index, folder)
    with setting.way.engine(setting.elsewhere(case), checkpoint={"load_universal": True}) as engine, logged() as said:
        engine.load_checkpoint(folder, tag="universal")
        moments = engine.basic_optimizer.owner_state.tensors_by_state["second_moments"]
        return [text for text in said if "second moments" in text], sum(bool(m.any()) for m in moments.values())


class Spoil:
    """A hook that puts `value` into the last element of a gradient, in the first micro-step."""

    def __init__(self, value: float | None) -> None:
        self.value = value

    def __call__(self, gradient: Tensor) -> Tensor:
        if self.value is None or not gradient.numel():
            return gradient
        gradient = gradient.clone()
        gradient[(-1,) * gradient.ndim], self.value = self.value, None
        return gradient


def frozen_in(setting: Setting, case: Case, number: int) -> set[str]:
    """Return the matrices that are frozen in a step: the first, the second, the first two of them, the last two."""
    net = setting.way.whole(case)
    routing = route(net, setting.way.to_adam(case)) | dict.fromkeys(setting.way.parts(case), "muon")
    muon = [name for name, kind in routing.items() if kind == "muon" and not name.endswith(setting.way.renamed)]
    return set([muon[:1], muon[:2], muon[1:2], [], muon[-2:]][number])


def train_frozen(name: str, index: int, folder: str, resumes: bool) -> tuple[dict[str, Tensor], list[str]]:
    """Train while matrices are frozen; return the weights, and which matrices changed or did not change, wrongly.

    `resumes`: save and load in a step in which some are frozen.
    """
    (setting, case), wrong = find(name, index, folder), []
    for seed in (0, 1)[: 1 + resumes]:
        with setting.way.engine(case, seed) as engine:
            numbers = range(STEPS)
            if seed:
                engine.load_checkpoint(folder)
                numbers = range(SAVED, STEPS)
            for number in numbers:
                frozen, params = frozen_in(setting, case, number), setting.way.names(engine)
                before = local_matrices(setting, engine)
                for each, param in params.items():
                    param.requires_grad_(each not in frozen)
                is_save = resumes and not seed and number == SAVED
                if is_save:
                    engine.save_checkpoint(folder)
                else:
                    setting.way.take(engine, number)
                for param in params.values():
                    param.requires_grad_(True)
                if is_save:
                    break
                after = local_matrices(setting, engine)
                still = {each for each in before if each in frozen or setting.way.has_no_gradient(each, number)}
                wrong += [
                    f"step {number}: {each}" for each in before if before[each].equal(after[each]) != (each in still)
                ]
            weights = setting.way.weights(engine)
    return weights, wrong


def local_matrices(setting: Setting, engine: Any) -> dict[str, Tensor]:
    """Return Muon's parameter -> its master weight and, where DeepSpeed finds it, its momentum in one tensor."""
    from deepspeed.utils import safe_get_full_optimizer_state

    specs, weights, found = engine.basic_optimizer.specs, setting.way.weights(engine), {}
    for name, param in setting.way.names(engine).items():
        if specs[param].use_muon:
            state = safe_get_full_optimizer_state(param, "momentum_buffer")
            found[name] = torch.cat([weights[name].flatten(), *([] if state is None else [state.flatten()])])
    return found


def compare(ranks: list[dict[str, Tensor]], expected: OracleResult, setting: Setting, case: Case) -> list[str]:
    """Return the weights of ranks that differ too much from the oracle's, and those that no rank has."""
    is_half = case.get("dtype", "fp32") != "fp32" or "torch_autocast" in case
    seen, wanted, wrong, errors = set(), set(), [], []
    for rank, weights in enumerate(ranks):
        initial, last = (setting.way.on_rank(side, rank) for side in (expected.initial, expected.weights))
        wanted |= last.keys()
        for name in weights.keys() & last.keys():
            seen.add(name)
            if name.endswith(NOISE):
                continue
            triple = initial[name], weights[name], last[name]
            if is_half:
                change, size = (weights[name] - initial[name]).norm(), (last[name] - initial[name]).norm()
                is_near = change_cosine(*triple) >= 0.9 and 0.85 <= change / size <= 1.15 if size else not change
                wrong += [] if is_near else [f"{rank} {name}"]
            else:
                errors.append(change_error(*triple))
                wrong += [f"{rank} {name}: {errors[-1]:.1e}"] * (errors[-1] > setting.bounds[0])
    if errors and sum(errors) / len(errors) > setting.bounds[1]:
        wrong.append(f"mean error {sum(errors) / len(errors):.1e}")
    return wrong + [f"no rank has {name}" for name in wanted - seen]


def merged(ranks: list[tuple[dict[str, Tensor], ...]]) -> list[dict[str, Tensor]]:
    """Return each dict of the ranks' results with the entries of all ranks."""
    return [{name: value for part in parts for name, value in part.items()} for parts in zip(*ranks, strict=True)]
