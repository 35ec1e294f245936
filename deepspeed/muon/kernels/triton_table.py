# SPDX-License-Identifier: Apache-2.0
"""The table of operations on CUDA, in Triton. The module imports without Triton; :func:`operations` then raises."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deepspeed.muon.kernels.table import Operations, RunOperations, Symmetric

#: The smaller dimension from which symmetric products are computed as one triangle. Below it there are too few tiles to
#: fill the chip, and a library's plain product is faster. ``python -m benchmarks gpu`` measures it.
SYMMETRIC_FROM = 2048
#: Loads move sixteen bytes, Triton's and quack's, so sizes must be multiples of this many 16-bit numbers.
MULTIPLE = 8
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
HALVES = (torch.bfloat16, torch.float16)


def why_not() -> str | None:
    """Why Triton's kernels cannot run on this process's accelerator; ``None`` if they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if torch.version.hip or not torch.cuda.is_available():
        return "no NVIDIA GPU"
    if torch.cuda.get_device_capability() < (8, 0):
        return "the GPU is older than Ampere"
    return _why_not_compiled()


def _why_not_compiled() -> str | None:
    """Launch one small kernel, since Triton also needs a C compiler and a driver that it knows."""
    from deepspeed.muon.kernels import triton_elementwise as elementwise

    try:
        one = torch.zeros(1, device="cuda")
        elementwise.apply_(one, one.clone(), 0.0, 1.0, 0.0)
        torch.cuda.synchronize()
    except Exception as error:
        line = str(error).strip().partition("\n")[0] or type(error).__name__
        return f"Triton's kernels do not run: {line}"
    return None


def operations(other: Operations) -> Operations:
    """Triton's table. Tensors that are not on a GPU, or of an unusual dtype or layout, go to ``other``.

    Raises:
        ImportError: Triton is not installed; see :func:`why_not`.
    """
    from deepspeed.muon.kernels import triton_diagonals as diagonals
    from deepspeed.muon.kernels import triton_elementwise as passes
    from deepspeed.muon.kernels import triton_multi as multi
    from deepspeed.muon.kernels import triton_products as products

    def without_workspace(ours: Callable[..., None]) -> Callable[..., None]:
        return lambda *args: ours(*args[:-1])

    advance, advance_rounded = without_workspace(passes.advance), without_workspace(passes.advance_rounded)
    plain = _either(lambda a, b, out, *_: _is_plain(*a, *b, *out), diagonals.product, other.product)
    return Operations(
        name=f"triton + {other.name}",
        advance=_either(_are_plain(3, (torch.float32,)), advance, other.advance),
        advance_rounded=_either(_are_plain(3, (torch.bfloat16,)), advance_rounded, other.advance_rounded),
        apply_=_either(_are_plain(2), without_workspace(passes.apply_), other.apply_),
        normalize_=_either(_are_plain(1), passes.normalize_, other.normalize_),
        square=_either(lambda x, out, *_: _is_symmetric_faster(x, out), products.square, other.square),
        product=_either(lambda a, b, out, *_: _is_symmetric_faster(a.rest, out), products.product, plain),
        multiply=_either(lambda p, x, out, *_: _is_plain(*p, x, out), diagonals.multiply, other.multiply),
        runs=RunOperations(
            fits=_are_plain(1, (torch.float32,)), tiles=multi.tiles, advance=multi.advance, apply_=multi.apply_
        ),
    )


def _either(fits: Callable[..., bool], ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Ours if it fits the arguments, on the device of the first one; else theirs."""

    @functools.wraps(theirs)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not fits(*args):
            return theirs(*args, **kwargs)
        with torch.cuda.device_of(args[0].rest if isinstance(args[0], Symmetric) else args[0]):
            return ours(*args, **kwargs)

    return call


def _are_plain(count: int, dtypes: tuple[torch.dtype, ...] = FLOATS) -> Callable[..., bool]:
    """Whether one kernel can process the first arguments, the very first of them of one of these dtypes."""
    return lambda *args: args[0].dtype in dtypes and _is_plain(*args[:count])


def is_on_gpu(tensor: Tensor) -> bool:
    """Whether Triton's kernels can access it."""
    return tensor.is_cuda


def _is_plain(*tensors: Tensor) -> bool:
    """Whether one kernel can process all of them together."""
    first = tensors[0]
    return all(is_on_gpu(t) and t.device == first.device and t.dtype in FLOATS and t.is_contiguous() for t in tensors)


def is_half_and_aligned(x: Tensor) -> bool:
    """Whether the matrices have 16-bit numbers, and sizes that loads of sixteen bytes divide."""
    return x.dtype in HALVES and all(size % MULTIPLE == 0 for size in x.shape[-2:])


def _is_symmetric_faster(x: Tensor, out: Symmetric) -> bool:
    return _is_plain(x, *out) and is_half_and_aligned(x) and out.rest.size(-1) >= SYMMETRIC_FROM
