# SPDX-License-Identifier: Apache-2.0
"""A new update rule with state is one class: trained, saved, resumed and converted by what it declares."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed.muon.kernels.kernel_set import Workspace
from deepspeed.muon.math.rules import RULES, Rule
from helpers import contracts
from helpers.distributed import run
from helpers.engine_state import differing
from helpers.oracles import Memory, change_error
from helpers.settings import SETTINGS
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


def with_the_rule(act: Callable[..., Any], **job: Any) -> Any:
    """What a rank does under a contract while the rule is registered."""
    with registered():
        return act(**job)


NAME = "an optimizer of the script"
"""Of a row of the table of settings, to whose cases the rule is added."""
SETTING = replace(SETTINGS[NAME], oracle={"after": soap})
ONE, THREE = (SETTING.cases.index({"stage": stage, "world": 2}) for stage in (1, 3))
INDICES = [THREE, pytest.param(ONE, marks=pytest.mark.full)]


@pytest.mark.parametrize("index", INDICES)
def test_it_trains_as_the_oracle(index: int, tmp_path: Path) -> None:
    case = SETTING.case(index)
    ranks = run(with_the_rule, 2, act=contracts.train, name=NAME, index=index, folder=str(tmp_path))
    assert contracts.compare([weights for weights, _ in ranks], SETTING.reference(case), SETTING, case) == []


@pytest.mark.parametrize("index", INDICES)
def test_a_resume_is_exact_and_a_universal_checkpoint_moves_elsewhere(index: int, tmp_path: Path) -> None:
    job = {"name": NAME, "index": index, "folder": str(tmp_path / "exact")}
    assert run(with_the_rule, 2, act=contracts.resume, **job) == [[], []]
    job |= {"act": contracts.around_a_move, "folder": str(tmp_path)}
    weights, states, later = contracts.merged(run(with_the_rule, 2, loads=False, **job))
    convert(tmp_path)
    moved = run(with_the_rule, SETTING.elsewhere(SETTING.case(index))["world"], loads=True, **job)
    loaded, found, last = contracts.merged(moved)
    assert differing(weights, loaded) == [] and differing(states, found) == []
    assert max(change_error(weights[name], last[name], later[name]) for name in later) <= 1e-3
