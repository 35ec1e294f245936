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
    (["cpu", "cuda"], {"cpu": "no compiler"}, "triton + torch (faster kernels are not used; cpu: no compiler)"),
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
    assert selection.choose(plain) is kernel_set.TORCH
    assert (
        selection.summary(kernel_set.TORCH, plain)
        == f"torch (faster kernels are not used; {'; '.join(f'{k}: {reason}' for k in kinds)})"
    )


RANKS = [
    ([{}, {}], "triton + torch"),
    (
        [{}, {"cuda": "triton is not installed"}],
        "torch (faster kernels are not used; cuda: rank 1: triton is not installed)",
    ),
]


@pytest.mark.parametrize(("ranks", "text"), RANKS, ids=lambda value: str(value))
def test_what_one_rank_lacks_no_rank_has(fakes: Fakes, ranks: list[dict[str, str]], text: str) -> None:
    stated = []
    for own in ranks:
        fakes(**own)
        stated.append({"unavailable": selection.unavailable_kernels("auto", ["cuda"]), "dtype": "fp32"})
    verdict = _judge_kernels(stated)["unavailable"]
    assert selection.summary(selection.choose(verdict), verdict) == text


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


@pytest.mark.parametrize("has_fast_bf16", [True, False])
def test_a_cpu_takes_bf16_if_the_cpp_kernels_are_fast_in_it(
    fakes: Fakes, has_fast_bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes()
    table = dataclasses.replace(kernel_set.TORCH, fast_dtype="bf16" if has_fast_bf16 else "fp32")
    monkeypatch.setattr(cpp_kernels, "operations", lambda: table)
    assert selection.fast_dtype("cpu", {"cpu": None}) == table.fast_dtype
    assert selection.fast_dtype("cpu", {"cpu": "no compiler"}) == "fp32"


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
    for without, name, warned in (
        (None, "C++", []),
        (1, "torch", ["torch (faster kernels are not used; cpu: rank 1: no compiler)"]),
    ):
        (first, lines), (second, _) = run(chosen, 2, without=without)
        assert first == second and first.startswith(name)
        assert lines == warned


@needs_compiler
@pytest.mark.parametrize(("asked", "name"), [("auto", "C++"), ("torch", "torch")])
def test_the_choice_without_an_engine(asked: str, name: str) -> None:
    net: Any = MODELS["mlp"]()
    optimizer = MuonWithAuxAdam(net.parameters(), model=net, **PARAMS, kernels=asked)
    assert optimizer.context.kernels is kernel_set.TORCH, "nothing is built before the first step"
    net(*net.batch(0)).backward()
    optimizer.step()
    assert optimizer.context.kernels.name.startswith(name)
