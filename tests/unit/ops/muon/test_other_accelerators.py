# SPDX-License-Identifier: Apache-2.0
"""Accelerators that lack what CPUs and NVIDIA's GPUs have: fp64, frexp, generators, streams, pinned memory.

The device of `helpers/late_device.py` plays one: whatever such an accelerator would refuse raises.
"""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from deepspeed.muon import MuonWithAuxAdam
from deepspeed.muon.kernels.kernel_set import Workspace
from deepspeed.muon.math.rules import MuonEq
from deepspeed.muon.replicas import check_agreement
from helpers import late_device
from helpers.distributed import run
from helpers.models import MODELS, train_engine
from helpers.records import monitored, records
from helpers.training import PARAMS, ds_config, fp32_weights, make_engine, with_params

Run = Callable[..., list[Any]]
STEPS: dict[str, dict[str, Any]] = {
    "standard": {
        "ns_dtype": "bf16",
        "ns_method": "standard",
        "momentum_dtype": "bf16",
        "cautious_weight_decay": True,
    },
    "gram": {"ns_dtype": "bf16", "ns_method": "gram", "momentum_dtype": "int8"},
    "fp16": {"ns_dtype": "fp16", "ns_method": "standard", "normuon": True},
    "qk_clip": {"ns_method": "standard", "qk_clip": {"tau": 0.01}},
}


def trained(params: dict[str, Any], dtype: torch.dtype, device: str) -> list[Tensor]:
    """Weights after two steps in plain PyTorch, on the gradients of a twin on the CPU."""
    net: Any = MODELS["gpt"]().to(device, dtype)
    twin: Any = MODELS["gpt"]().to(dtype)
    optimizer = MuonWithAuxAdam(net.parameters(), model=net, **PARAMS | {"kernels": "torch"} | params)
    # The device has no attention of its own, and adds up some gradients in another order.
    with sdpa_kernel(SDPBackend.MATH), late_device.poor() if device != "cpu" else nullcontext():
        for number in range(2):
            for one in (net, twin):
                on = next(one.parameters()).device
                one(*(part.to(on) for part in net.batch(number))).backward()
            for param, other in zip(net.parameters(), twin.parameters(), strict=True):
                param.grad.copy_(other.grad)
            optimizer.step()
            with torch.no_grad():
                for param, other in zip(net.parameters(), twin.parameters(), strict=True):
                    other.copy_(param)
                    param.grad = other.grad = None
    return [p.detach() for p in net.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rule", STEPS)
def test_a_step_needs_nothing_of_it_and_gives_the_same_bits(rule: str, dtype: torch.dtype, late: Run) -> None:
    got = late(trained, 1, params=STEPS[rule], dtype=dtype, device=late_device.NAME)[0]
    expected = run(trained, 1, params=STEPS[rule], dtype=dtype, device="cpu")[0]
    assert all(map(torch.equal, got, expected))


def normalized(matrix: Tensor, side: str) -> Tensor:
    """What MuonEq makes of a matrix on the device."""
    matrix = matrix.to(late_device.NAME)
    with late_device.poor():
        MuonEq(side).before(matrix, 0, {}, Workspace())  # type: ignore[arg-type]
    return matrix


@pytest.mark.parametrize("side", ["rows", "columns"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_muon_eq_without_fp64_takes_rows_of_any_magnitude(side: str, dtype: torch.dtype, late: Run) -> None:
    """In fp32 the squares of most of these entries would be zero or infinite."""
    magnitudes = torch.tensor([1e-44, 1e-38, 1e-25, 1.0, 1e25, 1e37, 0.0], dtype=torch.float32)
    matrix = torch.randn(7, 300, generator=torch.Generator().manual_seed(0)).clamp(-3, 3) * magnitudes[:, None]
    matrix = (matrix if side == "rows" else matrix.T.contiguous()).to(dtype)
    dim = 1 if side == "rows" else 0
    norms = torch.linalg.vector_norm(matrix.double(), dim=dim, keepdim=True)
    expected = torch.where(norms == 0, 0.0, matrix.double() / norms)
    got = late(normalized, 1, matrix=matrix, side=side)[0]
    error = (got.double() - expected).abs().amax(dim)
    assert error.max() <= {torch.float32: 1e-6, torch.bfloat16: 2.0**-9}[dtype]


def compared() -> None:
    with late_device.poor():
        check_agreement(["a", "b"], None, torch.device(late_device.NAME))


def test_ranks_are_compared(late: Run) -> None:
    late(compared, 2)


def offloaded(has_streams: bool) -> dict[str, Tensor]:
    """Weights after two steps with CPU offload."""
    engine_of = {"optimizer": with_params(ns_method="standard", kernels="torch", bucket_bytes=600)}
    kind, nothing = late_device.LateAccelerator, property(lambda self: None)
    with pytest.MonkeyPatch.context() as patch:
        if not has_streams:
            patch.setattr(kind, "is_synchronized_device", lambda self: True)
            patch.setattr(kind, "Stream", nothing)
            patch.setattr(kind, "Event", nothing)
            patch.setattr(kind, "current_stream", lambda self: None)
            patch.setattr(kind, "pin_memory", lambda self, tensor, **_: tensor)
        engine = make_engine(MODELS["mlp"](), ds_config(stage=2, offload=True, **engine_of))
        assert (engine.basic_optimizer.exchange.staging._up is not None) == has_streams
        train_engine(engine, 2)
        weights = fp32_weights(engine)
    engine.destroy()
    return weights


def test_offload_needs_no_streams_and_no_pinned_memory(late: Run) -> None:
    without, with_them = (late(offloaded, 1, has_streams=has)[0] for has in (False, True))
    assert all(torch.equal(weights, with_them[name]) for name, weights in without.items())


def recorded(folder: Path) -> set[str]:
    """Dtypes of what the ranks sum in a step that is recorded."""
    summed: set[str] = set()

    def all_reduce(tensor: Tensor, *args: Any, original: Any = torch.distributed.all_reduce, **kwargs: Any) -> Any:
        summed.add(str(tensor.dtype))
        return original(tensor, *args, **kwargs)

    engine = make_engine(MODELS["mlp"](), monitored(str(folder), 1, stage=1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "all_reduce", all_reduce)
        train_engine(engine, 1)
    engine.destroy()
    return summed


def test_records_are_summed_in_what_it_has(late: Run, tmp_path: Path) -> None:
    with_fp64, without = run(recorded, 2, folder=tmp_path / "cpu"), late(recorded, 2, folder=tmp_path / "late")
    assert all("torch.float64" in dtypes for dtypes in with_fp64)
    assert not any("torch.float64" in dtypes for dtypes in without)
    expected, got = records(tmp_path / "cpu"), records(tmp_path / "late")
    assert got.keys() == expected.keys()
    values = [(got[name][0][1], rows[0][1]) for name, rows in expected.items() if name != "newton_schulz_seconds"]
    assert len(values) == 5 and all(one == pytest.approx(other, rel=1e-5) for one, other in values)
