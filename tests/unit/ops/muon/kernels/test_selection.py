# SPDX-License-Identifier: Apache-2.0
"""Which table of operations a run has: the best that every rank has for its devices, and the reasons in the log."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from deepspeed.muon import MuonWithAuxAdam
from deepspeed.muon.kernels import native, quack, reference, selection, triton_table
from deepspeed.muon.kernels.builder import MuonBuilder
from deepspeed.muon.kernels.table import Operations
from deepspeed.muon.zero.bind import _judge_kernels
from helpers.distributed import run
from helpers.logs import logged
from helpers.models import MODELS, train_engine
from helpers.training import PARAMS, ds_config, make_engine

Fakes = Callable[..., None]
needs_compiler = pytest.mark.skipif(not MuonBuilder().is_compatible(), reason="no C++ compiler, or torch before 2.6")


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    """Tables that are to be had but for a reason, and which name those below them."""

    def over(name: str) -> Callable[[Operations], Operations]:
        return lambda other: dataclasses.replace(other, name=f"{name} + {other.name}")

    def install(cpu: str | None = None, cuda: str | None = None, quack_: str | None = None) -> None:
        monkeypatch.setattr(native, "unavailable", lambda: cpu)
        monkeypatch.setattr(native, "operations", lambda: dataclasses.replace(reference.OPERATIONS, name="C++"))
        monkeypatch.setattr(triton_table, "unavailable", lambda: cuda)
        monkeypatch.setattr(triton_table, "operations", over("triton"))
        monkeypatch.setattr(quack, "unavailable", lambda: quack_)
        monkeypatch.setattr(quack, "operations", over("quack"))

    return install


ABSENT = "quack-kernels is not installed"
CHOICES = [
    (["cuda"], {}, "quack + triton + torch"),
    (["cuda"], {"quack_": ABSENT}, f"triton + torch (faster kernels are not used; quack: {ABSENT})"),
    (["cpu", "cuda"], {"quack_": ABSENT}, f"triton + C++ (faster kernels are not used; quack: {ABSENT})"),
    (["cpu", "cuda"], {"cpu": "no compiler"}, "quack + triton + torch (faster kernels are not used; cpu: no compiler)"),
    (["cpu", "cuda"], {"cuda": "no NVIDIA GPU"}, "C++ (faster kernels are not used; cuda: no NVIDIA GPU)"),
    (
        ["cuda"],
        {"cuda": "triton is not installed"},
        "torch (faster kernels are not used; cuda: triton is not installed)",
    ),
    (["cpu"], {}, "C++"),
    (["cpu", "xpu"], {}, "C++ (faster kernels are not used; xpu: only plain PyTorch supports it)"),
]


@pytest.mark.parametrize(("kinds", "missing", "text"), CHOICES, ids=lambda value: str(value))
def test_the_best_table_for_the_devices(fakes: Fakes, kinds: list[str], missing: dict[str, str], text: str) -> None:
    fakes(**missing)
    found = selection.unavailable_kernels("auto", kinds)
    assert selection.summary(selection.choose(found), found) == text
    plain = selection.unavailable_kernels("torch", kinds)
    reason = 'optimizer.params.kernels is "torch"'
    assert selection.choose(plain) is reference.OPERATIONS
    assert (
        selection.summary(reference.OPERATIONS, plain)
        == f"torch (faster kernels are not used; {'; '.join(f'{k}: {reason}' for k in kinds)})"
    )


RANKS = [
    ([{}, {}], "quack + triton + torch"),
    (
        [{}, {"cuda": "triton is not installed"}],
        "torch (faster kernels are not used; cuda: rank 1: triton is not installed)",
    ),
    ([{"quack_": ABSENT}, {}], f"triton + torch (faster kernels are not used; quack: rank 0: {ABSENT})"),
]


@pytest.mark.parametrize(("ranks", "text"), RANKS, ids=lambda value: str(value))
def test_what_one_rank_lacks_no_rank_has(fakes: Fakes, ranks: list[dict[str, str]], text: str) -> None:
    stated = []
    for own in ranks:
        fakes(**own)
        stated.append(selection.unavailable_kernels("auto", ["cuda"]))
    verdict = _judge_kernels(stated)
    assert selection.summary(selection.choose(verdict), verdict) == text


def chosen(without: int | None) -> tuple[str, list[str]]:
    """The table of an engine's optimizer after a step, and the lines of log that name it; a rank may lack C++."""
    with pytest.MonkeyPatch.context() as patch, logged() as lines:
        if torch.distributed.get_rank() == without:
            patch.setattr(native, "unavailable", lambda: "no compiler")
        engine = make_engine(MODELS["mlp"](), ds_config(stage=2, optimizer={"type": "Muon", "params": PARAMS}))
        train_engine(engine, 1)
        name = engine.basic_optimizer.context.kernels.name
        engine.destroy()
    return name, [line.partition("kernels: ")[2] for line in lines if "kernels: " in line]


@needs_compiler
def test_all_ranks_of_an_engine_have_one_table() -> None:
    for without, name, line in (
        (None, "C++", "C++"),
        (1, "torch", "torch (faster kernels are not used; cpu: rank 1: no compiler); "),
    ):
        (first, lines), (second, _) = run(chosen, 2, without=without)
        assert first == second and first.startswith(name)
        assert len(lines) == 1 and lines[0].startswith(line), lines


@needs_compiler
@pytest.mark.parametrize(("asked", "name"), [("auto", "C++"), ("torch", "torch")])
def test_the_choice_without_an_engine(asked: str, name: str) -> None:
    net: Any = MODELS["mlp"]()
    optimizer = MuonWithAuxAdam(net.parameters(), model=net, **PARAMS, kernels=asked)
    assert optimizer.context.kernels is reference.OPERATIONS, "nothing is built before the first step"
    net(*net.batch(0)).backward()
    optimizer.step()
    assert optimizer.context.kernels.name.startswith(name)
