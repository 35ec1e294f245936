# SPDX-License-Identifier: Apache-2.0
"""A new update rule with state is one class: trained, saved, resumed, converted and forecast by what it declares."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed.muon.kernels.kernel_set import Workspace
from deepspeed.muon.math.rules import RULES, Rule
from deepspeed.muon.zero.read_config import Layout
from helpers.distributed import run
from helpers.engine_state import differing, owned_tensors, snapshot
from helpers.forecasts import forecast
from helpers.logs import logged
from helpers.models import train_engine
from helpers.oracles import Memory
from helpers.parity import STEPS, assert_parity, oracle
from helpers.training import fp32_weights, fresh_engine
from helpers.universal import convert

BETA, EPS = 0.9, 0.01


@dataclass(frozen=True)
class Soap(Rule):
    """A toy after SOAP (arXiv 2409.11321): a matrix is scaled by means of its Gram matrices, one for each side."""

    KEY = "soap"
    STATE = {
        "soap_left": lambda shape, axis: (shape[0], shape[0]),
        "soap_right": lambda shape, axis: (shape[1], shape[1]),
    }

    @classmethod
    def of(cls, config: Any) -> Rule:
        """Return the rule, which is always on; a shipped one has a field of MuonConfig instead of this method."""
        return cls()

    def after(self, x: Tensor, axis: int, state: Mapping[str, Tensor], work: Workspace) -> None:
        if x.any():
            left, right, wide = state["soap_left"], state["soap_right"], x.float()
            left.lerp_(wide @ wide.T, 1 - BETA)
            right.lerp_(wide.T @ wide, 1 - BETA)
            scaled = inverse_root(left) @ wide @ inverse_root(right)
            x.copy_(scaled * (wide.norm() / scaled.norm()))


def inverse_root(moments: Tensor) -> Tensor:
    """The inverse fourth root of a symmetric matrix."""
    values, vectors = torch.linalg.eigh(moments)
    return (vectors * (values.clamp(min=0) + EPS) ** -0.25) @ vectors.T


def soap(matrix: Tensor, memory: Memory) -> Tensor:
    """The same for the oracle."""
    left, right = memory.get("left", 0.0), memory.get("right", 0.0)
    memory["left"] = BETA * left + (1 - BETA) * matrix @ matrix.T
    memory["right"] = BETA * right + (1 - BETA) * matrix.T @ matrix
    scaled = inverse_root(memory["left"]) @ matrix @ inverse_root(memory["right"])
    return scaled * (matrix.norm() / scaled.norm())


@contextmanager
def registered() -> Iterator[None]:
    RULES.append(Soap)
    try:
        yield
    finally:
        RULES.remove(Soap)


def everything(engine: Any) -> dict[str, Tensor]:
    """Weights, states, and the rule's state of all matrices."""
    optimizer = engine.basic_optimizer
    with optimizer.whole_state():
        of_rules = {
            f"{k} {m}": t.clone()
            for k, named in optimizer.owner_state.tensors_by_state.items()
            for m, t in named.items()
        }
    return snapshot(engine) | of_rules


def trained(stage: int) -> dict[str, Tensor]:
    with registered():
        engine = fresh_engine(0, {"stage": stage})
        train_engine(engine, STEPS)
        weights = fp32_weights(engine)
        engine.destroy()
    return weights


def around_a_save(stage: int, folder: str) -> list[str]:
    """What differs at the ends of a run that saves and of one that loads."""
    ends = []
    with registered():
        for loads in (False, True):
            engine = fresh_engine(int(loads), {"stage": stage})
            train_engine(engine, 2)
            if loads:
                engine.load_checkpoint(folder)
            else:
                engine.save_checkpoint(folder, tag="saved")
            train_engine(engine, 2, first_step=2)
            ends.append(everything(engine))
            assert any(name.startswith("soap_left") for name in ends[-1])
            engine.destroy()
    return differing(*ends)


def around_a_move(stage: int, folder: str, loads: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights and the rule's state at a save, or when its universal checkpoint is loaded at another stage."""
    with registered():
        engine = fresh_engine(
            int(loads), {"stage": stage}, **({"checkpoint": {"load_universal": True}} if loads else {})
        )
        if loads:
            engine.load_checkpoint(folder, tag="universal")
        else:
            train_engine(engine, 2)
            engine.save_checkpoint(folder, tag="saved")
        found = {name: value for name, value in everything(engine).items() if name.startswith("soap")}
        weights = fp32_weights(engine)
        engine.destroy()
    return weights, found


def load_without_the_rule(stage: int, folder: str) -> list[str]:
    engine = fresh_engine(0, {"stage": stage})
    with registered(), logged() as said:
        engine.load_checkpoint(folder, tag="saved")
    assert not owned_tensors(engine.basic_optimizer)
    engine.destroy()
    return said


def bytes_of_rules(stage: int) -> int:
    with registered():
        engine = fresh_engine(0, {"stage": stage})
        found = sum(tensor.nbytes for tensor in owned_tensors(engine.basic_optimizer))
        engine.destroy()
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_it_trains_as_the_oracle(stage: int) -> None:
    reference = oracle("mlp", 1.0, after=soap)
    for weights in run(trained, 2, stage=stage):
        assert_parity(weights, reference)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_resume_is_exact_and_a_universal_checkpoint_moves_elsewhere(stage: int, tmp_path: Path) -> None:
    assert run(around_a_save, 2, stage=stage, folder=str(tmp_path)) == [[], []]
    said = run(load_without_the_rule, 2, stage=stage, folder=str(tmp_path))[0]
    assert any("was saved with soap" in text and "soap left and soap right are ignored" in text for text in said)
    (weights, state), _ = run(around_a_move, 2, stage=stage, folder=str(tmp_path), loads=False)
    convert(tmp_path)
    for loaded, found in run(around_a_move, 3, stage=4 - stage, folder=str(tmp_path), loads=True):
        assert differing(weights, loaded) == [] and differing(state, found) == [] and state


@pytest.mark.parametrize("stage", [1, 3])
def test_its_memory_is_forecast(stage: int) -> None:
    with registered():
        _, costs = forecast("mlp", Layout(stage, 2))
    wanted = [sum(cost.owner_state_bytes[rank] for cost in costs) for rank in range(2)]
    assert run(bytes_of_rules, 2, stage=stage) == wanted and all(wanted)
