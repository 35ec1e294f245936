# SPDX-License-Identifier: Apache-2.0
"""The :class:`Operations` that run Triton kernels on GPUs. The module imports without Triton."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed.muon.kernels import probe, reference
from deepspeed.muon.kernels.table import Operations, RunOperations, Symmetric, base_of

#: Symmetric products whose result has at least this many rows are computed as one triangle. Smaller results
#: have too few tiles to fill the GPU, or are smaller than one of quack's tiles. For larger results a timing at start
#: decides whether to use these kernels; ``python -m benchmarks gpu`` prints the times.
SYMMETRIC_FROM = 512
#: Triton copies 16 bytes at a time, asynchronously, only if sizes are multiples of ``MULTIPLE`` elements and addresses
#: multiples of ``ADDRESS`` bytes. Otherwise products wait for loads of single elements.
MULTIPLE, ADDRESS = 16, 16
FP32, BF16, INT8 = (torch.float32,), (torch.bfloat16,), (torch.int8,)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
HALVES = (torch.bfloat16, torch.float16)


def unavailable() -> str | None:
    """Return why Triton's kernels cannot run on this process's GPU; ``None`` if they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if not torch.cuda.is_available():
        return "no NVIDIA or AMD GPU"
    if not torch.version.hip and torch.cuda.get_device_capability() < (8, 0):
        return "the GPU is older than Ampere"
    reason = probe.why_wrong(_untuned)
    return reason and f"Triton's kernels fail: {reason}"


def _untuned() -> Operations:
    """Return the Triton kernels with one fixed configuration of the products, so that a check need not autotune."""
    table = operations(reference.OPERATIONS)
    if torch.version.hip:
        return table
    from deepspeed.muon.kernels import triton_products as products

    square, product = (
        functools.partial(f, kernel=products.untuned_kernel) for f in (products.square, products.product)
    )
    return dataclasses.replace(table, square=square, product=product)


def operations(other: Operations) -> Operations:
    """Return the Triton kernels. Calls that they do not support go to the kernels of the table ``other``.

    Examples are calls with tensors that are not on a GPU or have other dtypes, and matrix products on AMD GPUs.

    Raises:
        ImportError: Triton is not installed.
    """
    from deepspeed.muon.kernels import triton_elementwise as passes
    from deepspeed.muon.kernels import triton_products as products

    elementwise = dataclasses.replace(
        other,
        name=f"triton (elementwise) + {other.name}",
        advance=_either(_takes(FP32), passes.advance, other.advance),
        advance_rounded=_either(_takes(BF16), passes.advance_rounded, other.advance_rounded),
        advance_codes=_either(_takes(INT8), passes.advance_codes, other.advance_codes),
        apply_=_either(_takes(FLOATS), passes.apply_, other.apply_),
        normalize=_either(_takes(FLOATS), passes.normalize, other.normalize),
        runs=RunOperations(
            fits=_takes(FP32), tiles=passes.tiles, advance=passes.advance_runs, apply_=passes.apply_runs_
        ),
    )
    if torch.version.hip:
        return elementwise
    return dataclasses.replace(
        elementwise,
        name=f"triton + {other.name}",
        square=_either(takes_square, products.square, other.square),
        product=_either(
            takes_product,
            products.product,
            _either(lambda a, b, out, *_: _have_separate_diagonals(a, b, out), products.unfused_product, other.product),
        ),
        multiply=_either(
            lambda p, x, out, *_: _have_separate_diagonals(p, others=[base_of(x)[0], base_of(out)[0]]),
            products.multiply,
            other.multiply,
        ),
    )


def _either(supports: Callable[..., bool], kernel: Callable[..., Any], fallback: Callable[..., Any]) -> Callable:
    """Return a function that calls ``kernel`` if ``supports(*arguments)`` is true, and ``fallback`` otherwise."""

    @functools.wraps(fallback)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not supports(*args):
            return fallback(*args, **kwargs)
        with torch.cuda.device_of(args[0].rest if isinstance(args[0], Symmetric) else args[0]):
            return kernel(*args, **kwargs)

    return call


def _takes(dtypes: tuple[torch.dtype, ...]) -> Callable[..., bool]:
    """Return a check for :func:`_either`: the first tensor has one of ``dtypes``, all are contiguous and on one GPU."""

    def supports(*args: Any) -> bool:
        first, *others = (arg for arg in args if isinstance(arg, Tensor))
        return first.dtype in dtypes and _are_plain([first, *others], dtypes + FLOATS)

    return supports


def is_on_gpu(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is on an NVIDIA or AMD GPU, where Triton's kernels can use it."""
    return tensor.is_cuda


def _are_plain(tensors: Sequence[Tensor], dtypes: tuple[torch.dtype, ...] = FLOATS) -> bool:
    """Return whether all tensors are contiguous, on the same GPU, and in one of ``dtypes``."""
    device = tensors[0].device
    return all(is_on_gpu(t) and t.device == device and t.dtype in dtypes and t.is_contiguous() for t in tensors)


def _have_separate_diagonals(*matrices: Symmetric, others: Sequence[Tensor] = ()) -> bool:
    """Return whether all ``matrices`` have separate diagonals, and :func:`_are_plain` holds for all tensors."""
    parts = [part for matrix in matrices for part in matrix]
    return not any(matrix.is_whole for matrix in matrices) and _are_plain([*parts, *others])


def takes_square(x: Tensor, out: Symmetric, *_: Any) -> bool:
    """Return whether Triton's and quack's ``square`` support these tensors; see :func:`_are_large` for sizes."""
    return _have_separate_diagonals(out, others=[base_of(x)[0]]) and _are_large(x, out.rest)


def takes_product(a: Symmetric, b: Symmetric, out: Symmetric, *_: Any) -> bool:
    """Return whether Triton's and quack's ``product`` support these tensors; see :func:`_are_large` for sizes."""
    return _have_separate_diagonals(a, b, out) and _are_large(a.rest, b.rest, out.rest)


def _are_large(*matrices: Tensor) -> bool:
    """Return whether the last matrix has ``SYMMETRIC_FROM`` rows or more, and all are 16-bit and fit 16-byte loads."""
    return matrices[-1].size(-1) >= SYMMETRIC_FROM and all(
        x.dtype in HALVES and x.data_ptr() % ADDRESS == 0 and all(size % MULTIPLE == 0 for size in x.shape[-2:])
        for x in matrices
    )
