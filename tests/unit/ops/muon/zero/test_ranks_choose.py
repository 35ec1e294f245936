# SPDX-License-Identifier: Apache-2.0
"""One dtype and one method of Newton-Schulz on all ranks, by a rule."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed.muon import MuonWithAuxAdam
from deepspeed.muon.kernels import cpp_kernels, kernel_set
from helpers.distributed import run
from helpers.logs import logged
from helpers.models import Mlp, train_engine
from helpers.training import PARAMS, ds_config, make_engine

WIDTHS = (64, 16, 48, 24, 16, 16, 16)
#: ``ns_dtype`` is left to the rule; PARAMS fixes it.
OPEN = {"type": "Muon", "params": PARAMS | {"ns_dtype": "auto"}}


@contextmanager
def calls() -> Iterator[list[tuple[str, str, torch.dtype]]]:
    """Shape, method and dtype of every call of Newton-Schulz in a step."""
    from deepspeed.muon import step

    found: list[tuple[str, str, torch.dtype]] = []
    original = step.orthogonalize

    def noting(x: Tensor, schedule: Any, *, method: str, dtype: torch.dtype, **others: Any) -> Tensor:
        found.append(("x".join(map(str, sorted(x.shape[1:]))), method, dtype))
        return original(x, schedule, method=method, dtype=dtype, **others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "orthogonalize", noting)
        yield found


def build(case: dict[str, Any]) -> Any:
    return make_engine(Mlp(WIDTHS), ds_config(**case))


def start(stage: int, bf16_on: tuple[bool, ...]) -> tuple[set[torch.dtype], list[str], torch.dtype]:
    """What this rank, whose CPU may be fast in bf16, calls in a step, logs at start and sends."""
    has_bf16 = bf16_on[torch.distributed.get_rank()]
    with pytest.MonkeyPatch.context() as patch, logged() as lines, calls() as made:
        patch.setattr(cpp_kernels, "unavailable", lambda: None)
        table = replace(kernel_set.TORCH, fast_dtype="bf16" if has_bf16 else "fp32")
        patch.setattr(cpp_kernels, "operations", lambda: table)
        engine = build({"stage": stage, "optimizer": OPEN})
        train_engine(engine, 1)
    exchanged = engine.basic_optimizer.exchange.dtype
    engine.destroy()
    return {dtype for *_, dtype in made}, [line for line in lines if "Newton-Schulz on cpu in" in line], exchanged


@pytest.mark.parametrize("stage", [3, pytest.param(0, marks=pytest.mark.full)])
def test_all_ranks_take_the_most_exact_dtype_of_any(stage: int) -> None:
    for bf16_on, dtype, reason in (
        ((True, True), torch.bfloat16, "bf16 (this CPU multiplies it fastest)"),
        ((True, False), torch.float32, "fp32 (bf16 is not faster here)"),
    ):
        results = run(start, 2, stage=stage, bf16_on=bf16_on)
        assert all(made <= {dtype} for made, *_ in results) and any(made for made, *_ in results)
        assert [len(lines) for _, lines, _ in results] == [1, 0] and reason in results[0][1][0]
        assert {exchanged for *_, exchanged in results} == {torch.bfloat16}, "which products do not change"


@pytest.mark.parametrize("by", ["config", "group"])
def test_a_method_may_be_set(by: str) -> None:
    net, gram = Mlp(WIDTHS), {"ns_method": "gram"}
    first, *rest = net.parameters()
    given = [{"params": [first], **(gram if by == "group" else {})}, {"params": rest}]
    with calls() as made:
        optimizer = MuonWithAuxAdam(given, model=net, **PARAMS | (gram if by == "config" else {}))
        net(*net.batch(0)).backward()
        optimizer.step()
    methods = {shape: method for shape, method, _ in made}
    assert methods["16x64"] == "gram" and methods["16x16"] == ("gram" if by == "config" else "standard")


def refused() -> str:
    """The error of ranks that take other dtypes, as another version might."""
    rank = torch.distributed.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MuonWithAuxAdam, "ns_dtype", ("fp32", "bf16")[rank])
        with pytest.raises(RuntimeError) as error:
            build({})
    return f"{type(error.value).__name__}: {error.value}"


def test_ranks_whose_arithmetic_differs_are_refused() -> None:
    for text in run(refused, 2):
        assert text.startswith("DisagreementError: ") and "planned another exchange" in text
