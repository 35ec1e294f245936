# SPDX-License-Identifier: Apache-2.0
"""Which table of operations a run has: the best that every rank has for its devices, and the reasons in the log."""

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed.muon import MuonWithAuxAdam
from deepspeed.muon.kernels import cpp_kernels, kernel_set, selection, triton_kernels
from deepspeed.muon.kernels.builder import MuonBuilder
from deepspeed.muon.kernels.kernel_set import KernelSet
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

    def over(name: str) -> Callable[[KernelSet], KernelSet]:
        return lambda other: dataclasses.replace(other, name=f"{name} + {other.name}")

    def install(cpu: str | None = None, cuda: str | None = None) -> None:
        monkeypatch.setattr(cpp_kernels, "unavailable", lambda: cpu)
        monkeypatch.setattr(cpp_kernels, "operations", lambda: dataclasses.replace(kernel_set.TORCH, name="C++"))
        monkeypatch.setattr(triton_kernels, "unavailable", lambda: cuda)
        monkeypatch.setattr(triton_kernels, "operations", over("triton"))

    return install


CHOICES = [
    (["cuda"], {}, "triton + torch"),
    (["cpu", "cuda"], {}, "triton + C++"),
    (["cpu", "cuda"], {"cpu": "no compiler"}, "triton + torch"),
    (["cpu", "cuda"], {"cuda": "no NVIDIA GPU"}, "C++"),
    (["cuda"], {"cuda": "triton is not installed"}, "torch"),
    (["cpu"], {}, "C++"),
    (["cpu", "xpu"], {}, "C++"),
]


@pytest.mark.parametrize(("kinds", "missing", "name"), CHOICES, ids=str)
def test_the_best_table_for_the_devices(fakes: Fakes, kinds: list[str], missing: dict[str, str], name: str) -> None:
    """The log has the reasons."""
    fakes(**missing)
    found = selection.unavailable_kernels("auto", kinds)
    table = selection.choose(found)
    assert table.name == name
    assert all(reason in selection.summary(table, found) for reason in missing.values())
    assert selection.choose(selection.unavailable_kernels("torch", kinds)) is kernel_set.TORCH


@pytest.mark.parametrize(
    ("ranks", "dtype"), [(["bf16", "bf16"], "bf16"), (["fp16", "fp32"], "fp32"), (["bf16", "fp16"], "fp16")]
)
def test_unlike_ranks_take_the_most_exact_dtype(ranks: list[str], dtype: str) -> None:
    assert _judge_kernels([{"unavailable": {}, "dtype": one} for one in ranks])["dtype"] == dtype


@pytest.mark.parametrize("supports_fp16", [True, False])
def test_an_accelerator_takes_fp16_if_it_has_it(supports_fp16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(device_name=lambda: "cuda", is_fp16_supported=lambda: supports_fp16)
    monkeypatch.setattr(selection, "get_accelerator", lambda: device)
    assert selection.fast_dtype("cuda", {}) == ("fp16" if supports_fp16 else "fp32")
    assert selection.fast_dtype("mps", {}) == "fp16", "of which DeepSpeed knows nothing here"


def chosen(without: int | None) -> tuple[str, list[str]]:
    """The table of an engine's optimizer after a step, and the lines of log that name it; a rank may lack C++."""
    with pytest.MonkeyPatch.context() as patch, logged() as lines:
        if torch.distributed.get_rank() == without:
            patch.setattr(cpp_kernels, "unavailable", lambda: "no compiler")
        engine = make_engine(MODELS["mlp"](), ds_config(stage=2, optimizer={"type": "Muon", "params": PARAMS}))
        train_engine(engine, 1)
        name = engine.basic_optimizer.context.kernels.name
        engine.destroy()
    return name, [line.partition("kernels: ")[2] for line in lines if "slower" in line]


@needs_compiler
def test_all_ranks_of_an_engine_have_one_table() -> None:
    for without, name in ((None, "C++"), (0, "torch"), (1, "torch")):
        (first, lines), (second, _) = run(chosen, 2, without=without)
        assert first == second and first.startswith(name)
        assert [f"rank {without}: no compiler" in line for line in lines] == [True] * (without is not None)


@needs_compiler
@pytest.mark.parametrize(("asked", "name"), [("auto", "C++"), ("torch", "torch")])
def test_the_choice_without_an_engine(asked: str, name: str) -> None:
    net: Any = MODELS["mlp"]()
    optimizer = MuonWithAuxAdam(net.parameters(), model=net, **PARAMS, kernels=asked)
    assert optimizer.context.kernels is kernel_set.TORCH, "nothing is built before the first step"
    net(*net.batch(0)).backward()
    optimizer.step()
    assert optimizer.context.kernels.name.startswith(name)
