# SPDX-License-Identifier: Apache-2.0
"""Accelerators that lack what CPUs and NVIDIA's GPUs have: fp64, frexp, generators, streams, pinned memory.

The CPU plays one: whatever such an accelerator would refuse raises.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed.muon import MuonWithAuxAdam
from deepspeed.muon.kernels.workspace import Workspace
from deepspeed.muon.math import rules
from deepspeed.muon.math.rules import Rules
from deepspeed.muon.replicas import check_agreement
from helpers.distributed import run
from helpers.models import MODELS, train_engine
from helpers.records import monitored, records
from helpers.training import PARAMS, make_engine

CPU = torch.device("cpu")


class Poor(TorchDispatchMode):
    """An accelerator without fp64 and frexp."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "frexp" in str(func):
            raise NotImplementedError(f"{func} has no kernel")
        result = func(*args, **(kwargs or {}))
        if any(isinstance(x, Tensor) and x.dtype == torch.float64 for x in pytree.tree_leaves(result)):
            raise TypeError(f"{func}: this accelerator does not support float64")
        return result


@contextmanager
def a_poor_accelerator() -> Iterator[None]:
    def refuse(*_: Any) -> None:
        raise RuntimeError("this accelerator has no generator")

    with pytest.MonkeyPatch.context() as patch, Poor():
        patch.setattr(rules, "has_fp64", lambda device: False, raising=False)
        patch.setattr(torch, "Generator", refuse)
        yield


STEPS: dict[str, dict[str, Any]] = {
    "standard": {"ns_dtype": "bf16", "ns_method": "standard", "momentum_dtype": "bf16", "cautious_weight_decay": True},
    "gram": {"ns_dtype": "bf16", "ns_method": "gram", "momentum_dtype": "int8"},
    "fp16": {"ns_dtype": "fp16", "normuon": True},
    "qk_clip": {"qk_clip": {"tau": 0.01}},
}


def trained(params: dict[str, Any], dtype: torch.dtype, accelerator: Any) -> list[Tensor]:
    """Weights after two steps in plain PyTorch; only the steps run on the accelerator."""
    net: Any = MODELS["gpt"]().to(dtype)
    optimizer = MuonWithAuxAdam(net.parameters(), model=net, **PARAMS | {"kernels": "torch"} | params)
    for number in range(2):
        net(*net.batch(number)).backward()
        with accelerator():
            optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in net.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rule", STEPS)
def test_a_step_needs_nothing_of_it_and_gives_the_same_bits(rule: str, dtype: torch.dtype) -> None:
    got, expected = (trained(STEPS[rule], dtype, how) for how in (a_poor_accelerator, nullcontext))
    assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("side", ["rows", "columns"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_muon_eq_without_fp64_takes_rows_of_any_magnitude(side: str, dtype: torch.dtype) -> None:
    """In fp32 the squares of most of these entries would be zero or infinite."""
    magnitudes = torch.tensor([1e-44, 1e-38, 1e-25, 1.0, 1e25, 1e37, 0.0], dtype=torch.float32)
    matrix = torch.randn(7, 300, generator=torch.Generator().manual_seed(0)).clamp(-3, 3) * magnitudes[:, None]
    matrix = (matrix if side == "rows" else matrix.T.contiguous()).to(dtype)
    dim = 1 if side == "rows" else 0
    norms = torch.linalg.vector_norm(matrix.double(), dim=dim, keepdim=True)
    expected = torch.where(norms == 0, 0.0, matrix.double() / norms)
    with a_poor_accelerator():
        Rules(muon_eq=side).apply_before(matrix[None], 0, Workspace())
    error = (matrix.double() - expected).abs().amax(dim)
    assert error.max() <= {torch.float32: 1e-6, torch.bfloat16: 2.0**-9}[dtype]


def test_ranks_are_compared() -> None:
    with a_poor_accelerator():
        check_agreement(["a", "b"], None, CPU)


def recorded(folder: Path, has_fp64: bool) -> set[str]:
    """Dtypes of what the ranks sum in a step that is recorded."""
    from deepspeed.muon.exchange import groups

    summed: set[str] = set()

    def all_reduce(tensor: Tensor, *args: Any, original: Any = torch.distributed.all_reduce, **kwargs: Any) -> Any:
        summed.add(str(tensor.dtype))
        return original(tensor, *args, **kwargs)

    engine = make_engine(MODELS["mlp"](), monitored(str(folder), 1, stage=1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "has_fp64", lambda device: has_fp64)
        patch.setattr(torch.distributed, "all_reduce", all_reduce)
        train_engine(engine, 1)
    engine.destroy()
    return summed


def test_records_are_summed_in_what_it_has(tmp_path: Path) -> None:
    with_fp64, without = (run(recorded, 2, folder=tmp_path / str(has), has_fp64=has) for has in (True, False))
    assert all("torch.float64" in dtypes for dtypes in with_fp64)
    assert not any("torch.float64" in dtypes for dtypes in without)
    expected, got = records(tmp_path / "True"), records(tmp_path / "False")
    assert got.keys() == expected.keys()
    values = [(got[name][0][1], rows[0][1]) for name, rows in expected.items() if name != "newton_schulz_seconds"]
    assert len(values) == 5 and all(one == pytest.approx(other, rel=1e-5) for one, other in values)
