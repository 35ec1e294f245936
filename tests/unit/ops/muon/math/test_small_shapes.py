# SPDX-License-Identifier: Apache-2.0
"""Matrices with a side of one, two, or a few elements more or less than kernels like."""

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed.muon import MuonWithAuxAdam
from deepspeed.muon.config.schema import parse
from deepspeed.muon.kernels import native, reference
from deepspeed.muon.math.newton_schulz import DTYPES, orthogonalize
from helpers.oracles import newton_schulz_fp64
from helpers.rules import almost_orthogonal

SIDES = (1, 2, 3, 7, 8, 9, 16, 17, 33, 64, 65)
#: Of the norm of the result. Singular values near zero move most in 16 bits.
BOUNDS = {"fp32": 1e-4, "fp16": 0.03, "bf16": 0.2}


@pytest.mark.parametrize("kernels", ["torch", "c++"])
@pytest.mark.parametrize("method", ["standard", "gram"])
def test_newton_schulz_takes_every_shape(method: str, kernels: str) -> None:
    if kernels == "c++" and (reason := native.unavailable()):
        pytest.skip(reason)
    table = native.operations() if kernels == "c++" else reference.OPERATIONS
    schedule = parse({"lr": 1e-3}).schedule
    for rows, cols, wire, normalization in itertools.product(
        SIDES, SIDES, (torch.bfloat16, torch.float32), ("frobenius", "aol")
    ):
        x, expected = with_result(rows, cols, wire, normalization)
        for dtype in DTYPES:
            got = orthogonalize(x.clone(), schedule, method, DTYPES[dtype], None, table, normalization)
            error = (got.double() - expected).norm() / expected.norm()
            bound = BOUNDS[dtype] + (0.01 if wire == torch.bfloat16 else 0.0)
            assert error <= bound, (rows, cols, wire, dtype, normalization, float(error))


@functools.cache
def with_result(rows: int, cols: int, wire: torch.dtype, normalization: str) -> tuple[Tensor, Tensor]:
    """Two random matrices, and what the oracle makes of them."""
    x = torch.randn(2, rows, cols, generator=torch.Generator().manual_seed(rows * 100 + cols)).to(wire)
    starts: dict[str, Any] = {"start": almost_orthogonal} if normalization == "aol" else {}
    return x, torch.stack([newton_schulz_fp64(matrix, parse({"lr": 1e-3}).schedule, **starts) for matrix in x])


@pytest.mark.parametrize("momentum_dtype", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_rule_takes_every_shape(dtype: str, momentum_dtype: str) -> None:
    rules: list[dict[str, Any]] = [
        {},
        {"normuon": True, "cautious_weight_decay": True},
        {"muon_eq": "rows", "muon_plus": "columns_rows"},
        {"muon_eq": "columns", "normuon": True, "ns_normalization": "aol", "ns_method": "gram"},
    ]
    for params in rules[: 3 if dtype == "fp16" else 4]:  # AOL is refused in fp16
        shapes = list(itertools.product((1, 2, 7, 9, 17), repeat=2))
        net = nn.ParameterList(nn.Parameter(torch.ones(shape)) for shape in shapes)
        for param in net:
            param.use_muon = True  # type: ignore[attr-defined]
        section = {"lr": 0.1, "weight_decay": 0.1, "ns_dtype": dtype, "momentum_dtype": momentum_dtype} | params
        optimizer = MuonWithAuxAdam(net.parameters(), model=net, **section)
        for step in range(2):
            for param in net:
                generator = torch.Generator().manual_seed(step)
                param.grad = torch.randn(param.shape, generator=generator)
            optimizer.step()
        for param in net:
            assert param.isfinite().all() and not torch.equal(param, torch.ones_like(param)), (params, param.shape)
