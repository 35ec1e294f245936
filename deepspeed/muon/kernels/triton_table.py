# SPDX-License-Identifier: Apache-2.0
"""The table of operations on CUDA, in Triton. Importable without Triton; :func:`operations` then says so."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from deepspeed.muon.kernels.table import Operations
from deepspeed.muon.rounding import Key
from deepspeed.muon.workspace import Workspace

#: From this smaller dimension on, products whose result is symmetric are computed as one triangle. Below it there are
#: too few tiles to fill the chip, and a library's plain product is faster. `benchmarks/gpu.sh` measures it.
SYMMETRIC_FROM = 2048
#: Sixteen bytes are loaded at a time where sizes are multiples of so many 16-bit numbers; else products stay plain.
MULTIPLE = 8
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
HALVES = (torch.bfloat16, torch.float16)


def why_not() -> str | None:
    """What keeps Triton's kernels from this process's accelerator, in words; ``None`` where nothing does."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if torch.version.hip or not torch.cuda.is_available():
        return "no NVIDIA GPU"
    if torch.cuda.get_device_capability() < (8, 0):
        return "the GPU is older than Ampere"
    return _why_not_compiled()


def _why_not_compiled() -> str | None:
    """One launch of a small kernel, as Triton also needs a C compiler and a driver that it knows."""
    from deepspeed.muon.kernels import triton_elementwise as elementwise

    try:
        one = torch.zeros(1, device="cuda")
        elementwise.apply_(one, one.clone(), 0.0, 1.0, 0.0)
        torch.cuda.synchronize()
    except Exception as error:
        return f"Triton's kernels do not run: {error}"
    return None


def operations(other: Operations) -> Operations:
    """Triton's table. What is not on a GPU, or of an unusual dtype or layout, goes to ``other``.

    Raises:
        ImportError: Triton is not installed; see :func:`why_not`.
    """
    from deepspeed.muon.kernels import triton_elementwise as elementwise
    from deepspeed.muon.kernels import triton_products as products

    def advance(buffer: Tensor, grad: Tensor, out: Tensor, momentum: float, nesterov: bool, work: Workspace) -> None:
        if buffer.dtype == torch.float32 and _is_plain(buffer, grad, out):
            with torch.cuda.device_of(buffer):
                elementwise.advance(buffer, grad, out, momentum, nesterov)
        else:
            other.advance(buffer, grad, out, momentum, nesterov, work)

    def advance_rounded(
        buffer: Tensor,
        grad: Tensor,
        out: Tensor,
        momentum: float,
        nesterov: bool,
        key: Key,
        first: int,
        work: Workspace,
    ) -> None:
        if buffer.dtype == torch.bfloat16 and _is_plain(buffer, grad, out):
            with torch.cuda.device_of(buffer):
                elementwise.advance_rounded(buffer, grad, out, momentum, nesterov, key, first)
        else:
            other.advance_rounded(buffer, grad, out, momentum, nesterov, key, first, work)

    def apply_(param: Tensor, update: Tensor, lr: float, scale: float, weight_decay: float, work: Workspace) -> None:
        if _is_plain(param, update):
            with torch.cuda.device_of(param):
                elementwise.apply_(param, update, lr, scale, weight_decay)
        else:
            other.apply_(param, update, lr, scale, weight_decay, work)

    def normalize_(x: Tensor) -> Tensor:
        if not _is_plain(x):
            return other.normalize_(x)
        with torch.cuda.device_of(x):
            return elementwise.normalize_(x)

    def square(x: Tensor, out: Tensor) -> Tensor:
        if not _is_symmetric_faster(x, out):
            return other.square(x, out)
        with torch.cuda.device_of(x):
            return products.square(x, out)

    def product(a: Tensor, b: Tensor, add: Tensor, out: Tensor, beta: float, alpha: float = 1.0) -> Tensor:
        if not _is_symmetric_faster(a, out):
            return other.product(a, b, add, out, beta, alpha)
        with torch.cuda.device_of(a):
            return products.product(a, b, add, out, beta, alpha)

    return Operations("triton", advance, advance_rounded, apply_, normalize_, square, product)


def is_on_gpu(tensor: Tensor) -> bool:
    """Whether a kernel of Triton may touch it."""
    return tensor.is_cuda


def _is_plain(*tensors: Tensor) -> bool:
    """Whether one kernel can walk through all of them together."""
    first = tensors[0]
    return all(is_on_gpu(t) and t.device == first.device and t.dtype in FLOATS and t.is_contiguous() for t in tensors)


def _is_symmetric_faster(x: Tensor, out: Tensor) -> bool:
    is_aligned = all(size % MULTIPLE == 0 for size in x.shape[-2:])
    return is_on_gpu(x) and x.dtype in HALVES and is_aligned and out.size(-1) >= SYMMETRIC_FROM
