# SPDX-License-Identifier: Apache-2.0
"""The :class:`KernelSet` whose operations run Triton kernels on GPUs. The module imports without Triton."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed.muon.kernels import kernel_set
from deepspeed.muon.kernels.kernel_set import KernelSet, RunKernels, Workspace, fixed_numerics
from deepspeed.muon.kernels.rounding import block_count

FP32, BF16, INT8 = (torch.float32,), (torch.bfloat16,), (torch.int8,)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
#: Device of the check: this process's GPU, NVIDIA's or AMD's.
DEVICE = "cuda"
#: Rows and columns of the random matrices of the check.
SHAPE = (64, 128)
#: A relative difference from plain PyTorch above this is an error; rounding twice to bf16 stays below it.
TOLERANCE = 0.02


def unavailable() -> str | None:
    """Return why Triton's kernels cannot run on this process's GPU; ``None`` if they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if not torch.cuda.is_available():
        return "no NVIDIA or AMD GPU"
    if not torch.version.hip and torch.cuda.get_device_capability() < (8, 0):
        return "the GPU is older than Ampere"
    reason = why_wrong(lambda: operations(kernel_set.TORCH))
    return reason and f"Triton's kernels fail: {reason}"


@fixed_numerics()
def why_wrong(build: Callable[[], KernelSet]) -> str | None:
    """Check the kernels that ``build()`` returns on this process's GPU. Return why they fail; ``None`` if they work.

    The reason is one line: an error of any type that ``build`` or a kernel raised, or the name of a kernel whose result
    differs from plain PyTorch's. This also compiles the kernels before the first step.
    """
    try:
        found, expected = _results(build()), _results(kernel_set.TORCH)
        for name, result in found.items():
            difference = float((result - expected[name]).norm() / expected[name].norm())
            if not difference <= TOLERANCE:
                return f"the result of {name} is wrong, by {difference:.2g} of its norm"
    except Exception as error:  # one that leaves the GPU unusable still ends the process, at a later call
        line = str(error).strip().partition("\n")[0]
        return f"{type(error).__name__}: {line}" if line else type(error).__name__
    return None


def _results(kernels: KernelSet) -> dict[str, Tensor]:
    """Run every operation of ``kernels`` except matrix products on random input; return {operation: result in fp32}."""
    work, results = Workspace(), {}
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, *SHAPE, generator=generator, dtype=torch.float32, device="cpu").to(DEVICE)
    param, grad = x.flatten().clone(), x.flatten().flip(0)
    out = torch.empty(x.numel(), dtype=torch.bfloat16, device=DEVICE)

    kernels.advance(param, grad, out, 0.9, True, work)
    results["advance"] = torch.cat([param, out.float()])
    kept = param.bfloat16()
    kernels.advance_rounded(kept, grad, out, 0.9, True, (1, 2), 0, work)
    results["advance_rounded"] = torch.cat([kept.float(), out.float()])
    kernels.copy_rounded(kept, param, (1, 2), 0, work)
    results["copy_rounded"] = kept.float()
    codes = torch.zeros(param.numel(), dtype=torch.int8, device=DEVICE)
    absmax = torch.zeros(block_count(param.numel()), dtype=torch.float32, device=DEVICE)
    kernels.advance_codes(codes, absmax, grad, out, 0.9, True, (1, 2), 0, work)
    results["advance_codes"] = torch.cat([codes.float(), absmax, out.float()])
    for name, cautious in (("apply_", False), ("cautious apply_", True)):
        kernels.apply_(param, out, 0.1, 0.7, 5.0, cautious, work)
        results[name] = param.clone()
    runs, half = kernels.runs or kernel_set.RUNS, param.numel() // 2
    tiles = runs.tiles([(0, half, half), (half, 0, half)], param.device)
    runs.advance(param, grad, out, tiles, 0.9, True)
    results["advance of runs"] = torch.cat([param, out.float()])
    for name, cautious in (("apply_ of runs", False), ("cautious apply_ of runs", True)):
        runs.apply_(param, out, tiles, 0.1, 0.7, 5.0, cautious)
        results[name] = param.clone()
    results["normalize"] = kernels.normalize(x.bfloat16(), torch.empty_like(x, dtype=torch.float16)).float()
    return results


def operations(other: KernelSet) -> KernelSet:
    """Return a kernel set of Triton kernels that passes calls which these do not support to the kernel set ``other``.

    Examples are calls with tensors that are not on a GPU or have other dtypes, and all matrix products.

    Raises:
        ImportError: Triton is not installed.
    """
    from deepspeed.muon.kernels import triton_elementwise as passes

    return dataclasses.replace(
        other,
        name=f"triton + {other.name}",
        advance=_either(_takes(FP32), passes.advance, other.advance),
        advance_rounded=_either(_takes(BF16), passes.advance_rounded, other.advance_rounded),
        advance_codes=_either(_takes(INT8), passes.advance_codes, other.advance_codes),
        apply_=_either(_takes(FLOATS), passes.apply_, other.apply_),
        normalize=_either(_takes(FLOATS), passes.normalize, other.normalize),
        runs=RunKernels(fits=_takes(FP32), tiles=passes.tiles, advance=passes.advance_runs, apply_=passes.apply_runs_),
    )


def _either(supports: Callable[..., bool], kernel: Callable[..., Any], fallback: Callable[..., Any]) -> Callable:
    """Return a function that calls ``kernel`` if ``supports(*arguments)`` is true, and ``fallback`` otherwise."""

    @functools.wraps(fallback)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not supports(*args):
            return fallback(*args, **kwargs)
        with torch.cuda.device_of(args[0]):
            return kernel(*args, **kwargs)

    return call


def _takes(dtypes: tuple[torch.dtype, ...]) -> Callable[..., bool]:
    """Return a function that takes a kernel's arguments and returns whether the Triton kernel supports them.

    The first tensor among them must have one of ``dtypes``, the others one of ``dtypes`` or :data:`FLOATS`. All must be
    contiguous and on one GPU. :func:`_either` needs such a function.
    """

    def supports(*args: Any) -> bool:
        first, *others = (arg for arg in args if isinstance(arg, Tensor))
        return first.dtype in dtypes and _are_plain([first, *others], dtypes + FLOATS)

    return supports


def is_on_gpu(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is on an NVIDIA or AMD GPU, where Triton's kernels can use it."""
    return tensor.is_cuda


def _are_plain(tensors: Sequence[Tensor], dtypes: tuple[torch.dtype, ...]) -> bool:
    """Return whether all tensors are contiguous, on the same GPU, and in one of ``dtypes``."""
    device = tensors[0].device
    return all(is_on_gpu(t) and t.device == device and t.dtype in dtypes and t.is_contiguous() for t in tensors)
