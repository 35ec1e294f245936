# SPDX-License-Identifier: Apache-2.0
"""The operations of an optimizer step in plain PyTorch, a class for other implementations, and scratch memory.

:class:`KernelSet` is one implementation of every operation. The functions in this file are the plain PyTorch one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepspeed.muon.kernels.rounding import BLOCK, Key, block_count, decode, encode, noise, round_

#: Maximum bytes of the matrices, with temporaries, that a CPU orthogonalizes at a time, so that they stay in its caches
#: from one product to the next: Newton-Schulz on matrices of 512 x 512 and more takes 5 to 10 % less time.
CACHED_BYTES = 8 << 20
#: Maximum bytes of the temporaries of the matrices that an accelerator orthogonalizes at a time, unless a single matrix
#: needs more. Four matrices of 2048 x 8192 in bf16 need so much, and are enough work to keep it busy.
BATCH_BYTES = 256 << 20


def is_accelerator(device: torch.device) -> bool:
    """Return whether a device is not the CPU."""
    return device.type != "cpu"


def has_fp64(device: torch.device) -> bool:
    """Return whether every device of this type supports fp64: True for the CPU and for NVIDIA and AMD GPUs only."""
    return device.type in ("cpu", "cuda")


class Workspace:
    """Scratch tensors, cached by name, dtype and device, and grown on demand.

    On a CPU they stay until :meth:`clear`, because page faults are slow. On an accelerator :meth:`release` frees them
    after each step.
    """

    def __init__(self) -> None:
        self._storage: dict[tuple, Tensor] = {}

    def get(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        pin: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Return an uninitialized contiguous tensor, valid until the next request for this name, dtype and device.

        ``pin``: function that returns a copy of a CPU tensor in page-locked memory; ``None`` for pageable memory.
        """
        numel, key = math.prod(shape), (name, dtype, device)
        if key not in self._storage or self._storage[key].numel() < numel:
            self._storage.pop(key, None)  # first, so that the two never exist at the same time
            storage = torch.empty(numel, dtype=dtype, device=device)
            self._storage[key] = storage if pin is None else pin(storage)
        return self._storage[key][:numel].view(shape)

    def release(self) -> None:
        """Free the tensors on accelerators, so that the next forward and backward can use their memory."""
        # Host memory stays: page faults and pinning are slow.
        self._storage = {key: buffer for key, buffer in self._storage.items() if not is_accelerator(buffer.device)}

    def clear(self) -> None:
        """Free all tensors of the workspace."""
        self._storage.clear()

    def nbytes(self) -> int:
        """Return how many bytes the tensors of the workspace take."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._storage.values())


def matrices_together(x: Tensor, dtype: torch.dtype, smalls: int = 4) -> int:
    """Return how many matrices of ``x``, ``[batch, rows, cols]``, Newton-Schulz should process at a time.

    ``dtype``: dtype of the matrix products. ``smalls``: as for :func:`batch_limit`.
    """
    rows, cols = x.shape[-2:]
    return batch_limit(rows * cols, min(rows, cols), smalls, dtype.itemsize, is_accelerator(x.device))


def batch_limit(numel: int, small: int, smalls: int, itemsize: int, accelerator: bool) -> int:
    """Return how many matrices of ``numel`` elements Newton-Schulz should process at a time, at least one.

    On an accelerator, :data:`BATCH_BYTES` limits the bytes of their temporaries. On a CPU, :data:`CACHED_BYTES` limits
    the bytes of the matrices with their temporaries, but there are at least as many matrices as torch has threads.

    ``small``: the number of rows of a Gram matrix. ``smalls``: the number of temporaries of the size of a Gram matrix;
    on a CPU, four are assumed instead. ``itemsize``: bytes of an element in the products. ``accelerator``: whether the
    device is not a CPU.
    """
    if accelerator:
        return max(1, BATCH_BYTES // max(1, itemsize * (numel + smalls * small * small)))  # with a second X
    nbytes = max(1, itemsize * (numel + 4 * small * small))  # the limit for CPUs was measured with four, by any method
    return max(torch.get_num_threads(), CACHED_BYTES // (nbytes + itemsize * numel))


def base_of(x: Tensor) -> tuple[Tensor, bool]:
    """Return (contiguous view of ``x`` or of its transpose, whether it is of the transpose).

    ``x``: a batch of matrices, contiguous or the ``mT`` of a contiguous tensor.
    """
    return (x, False) if x.is_contiguous() else (x.mT, True)


class Tiles(NamedTuple):
    """Runs split into tiles. A run is a contiguous piece of a rank's flat ZeRO shard; one GPU program updates one tile.

    ``table``: int64, ``[tiles, 3]``, on the kernel's device: (start in the shard, start in the other tensor, length) of
    each tile, in elements. The other tensor is the ``out`` of ``advance`` or the ``update`` of ``apply_``.
    ``are_aligned``: whether all starts and lengths of runs are multiples of 16.
    """

    table: Tensor
    are_aligned: bool


@dataclass(frozen=True)
class RunKernels:
    """The kernels that do ``advance`` and ``apply_`` for many runs (see :class:`Tiles`) of a flat shard in one launch.

    ``fits(tensor)`` returns whether they support the tensor's device, dtype and layout. The other fields are functions
    like ``tiles``, ``advance_runs`` and ``apply_runs_`` in this file. Results have the same bits as with one launch for
    each run.
    """

    fits: Callable[[Tensor], bool]
    tiles: Callable[[Sequence[tuple[int, int, int]], torch.device], Tiles]
    advance: Callable[..., None]
    apply_: Callable[..., None]


@dataclass(frozen=True)
class KernelSet:
    """A kernel set: one implementation, such as Triton's, of every operation in which a step spends its time.

    The functions of the same names in this file describe the operations. An elementwise result depends only on
    the element's inputs, and not on where a slice begins, how long it is or how many threads there are. So bits do not
    depend on how a matrix is distributed over ranks.
    """

    name: str
    advance: Callable[..., None]
    advance_rounded: Callable[..., None]
    advance_codes: Callable[..., None]
    apply_: Callable[..., None]
    copy_rounded: Callable[..., None]
    normalize: Callable[..., Tensor]
    #: Returns memory for symmetric matrices, in the form that ``square``, ``product`` and ``multiply`` take.
    symmetric: Callable[[str, Tensor, Workspace], Any]
    diagonal: Callable[[Any], Tensor]
    square: Callable[..., None]
    product: Callable[..., None]
    multiply: Callable[..., Tensor]
    #: The dtype of the fastest products on this CPU.
    fast_dtype: str = "fp32"
    #: Whether products on a CPU keep the diagonals of symmetric bf16 matrices in fp32.
    keeps_diagonals: bool = False
    #: ``None`` on devices where launches are cheap; each run then has its own launch.
    runs: RunKernels | None = None


#: Number of elements that are processed at a time if temporaries are needed: on a CPU they fit in its cache, elsewhere
#: they are so many that launches cost little.
CPU_CHUNK, CHUNK = 2**17, 2**21
#: The bits of an fp32 number that are its exponent.
EXPONENT = 0x7F800000


def advance(buffer: Tensor, grad: Tensor, out: Tensor, beta: float, nesterov: bool, work: Workspace) -> None:
    """Update the momentum ``buffer``, and write the input of Newton-Schulz to ``out``.

    ``buffer <- beta buffer + (1 - beta) grad``, an average and not a sum. ``out`` is the new buffer or, with
    ``nesterov``, ``beta buffer + (1 - beta) grad`` computed from the new buffer (Nesterov's look-ahead).

    Args:
        buffer: fp32: the optimizer state ``momentum_buffer``.
        grad: same shape, any floating dtype; averaged over the ranks, unscaled and clipped.
        out: same shape, any floating dtype; must not share memory with ``buffer``.
    """
    buffer.lerp_(grad.to(buffer.dtype), 1.0 - beta)
    if nesterov:
        ahead = work.get("shard", tuple(buffer.shape), buffer.dtype, buffer.device)
        out.copy_(torch.lerp(grad.to(buffer.dtype), buffer, beta, out=ahead))
    else:
        out.copy_(buffer)


def advance_rounded(
    buffer: Tensor,
    grad: Tensor,
    out: Tensor,
    beta: float,
    nesterov: bool,
    random_key: Key,
    first: int,
    work: Workspace,
) -> None:
    """Do the same as :func:`advance` for a bf16 momentum: compute in fp32, and round ``buffer`` stochastically.

    ``random_key`` and ``first`` select the random numbers; see :func:`deepspeed.muon.kernels.rounding.noise`.
    Temporaries take up to 2.5 MiB on a CPU, 40 MiB elsewhere.
    """
    for part in chunks(buffer):
        wide = work.get("wide", (part.stop - part.start,), torch.float32, buffer.device)
        wide.copy_(buffer[part])
        advance(wide, grad[part], out[part], beta, nesterov, work)
        copy_rounded(buffer[part], wide, random_key, first + part.start, work)


def advance_codes(
    codes: Tensor,
    absmax: Tensor,
    grad: Tensor,
    out: Tensor,
    beta: float,
    nesterov: bool,
    random_key: Key,
    first: int,
    work: Workspace,
) -> None:
    """Do the same as :func:`advance` for an int8 momentum: compute in fp32, and round ``codes`` stochastically.

    ``codes``: int8, from the start of a quantization block on. ``absmax``: fp32, the largest magnitude of each block.
    Both are updated. ``random_key`` and ``first`` select the random numbers; see
    :func:`deepspeed.muon.kernels.rounding.noise`. Temporaries take up to 2.5 MiB on a CPU, 40 MiB elsewhere.
    """
    for part in chunks(codes):
        numel, magnitudes = part.stop - part.start, absmax[part.start // BLOCK : block_count(part.stop)]
        shape, device = (magnitudes.numel() * BLOCK,), codes.device
        wide = work.get("wide", shape, torch.float32, device)
        bits, spare = (work.get(name, shape, torch.int32, device) for name in ("bits", "spare_bits"))
        values = decode(codes[part], magnitudes, wide)
        advance(values, grad[part], out[part], beta, nesterov, work)
        wide[numel:].zero_()
        uniform = spare.view(torch.float32)
        uniform.copy_(noise(bits, spare, random_key, first + part.start).bitwise_or_(1)).mul_(2.0**-16)
        encode(wide, codes[part], magnitudes, uniform)


def chunks(x: Tensor) -> Iterator[slice]:
    """Yield slices of ``CHUNK`` elements (``CPU_CHUNK`` on a CPU) that cover a 1-D tensor, to limit temporaries."""
    size = CPU_CHUNK if x.device.type == "cpu" else CHUNK
    return (slice(start, min(start + size, x.numel())) for start in range(0, x.numel(), size))


def apply_(
    weights: Tensor, update: Tensor, lr: float, scale: float, weight_decay: float, cautious: bool, work: Workspace
) -> None:
    """Set ``weights <- weights (1 - lr weight_decay) - lr scale update``.

    Weight decay is decoupled as in AdamW (Loshchilov and Hutter, arXiv 1711.05101); ``scale`` does not change it. If
    ``cautious``, weights whose update has the opposite sign do not decay (Chen et al., arXiv 2510.12402);
    temporaries then take 0.6 MiB on a CPU, 10 MiB elsewhere.

    Args:
        weights: any shape, contiguous, fp32 under ZeRO.
        update: same shape: elements of the orthogonalized matrix.
        scale: :func:`deepspeed.muon.math.rules.scale_factor` for the shape of the whole matrix.
    """
    if update.dtype != weights.dtype or update.device != weights.device:
        update = work.get("shard", tuple(weights.shape), weights.dtype, weights.device).copy_(update)
    keep = 1.0 - lr * weight_decay
    if weight_decay and cautious:
        _decay_cautiously_(weights.view(-1), update.view(-1), keep, work)
    elif weight_decay:
        weights.mul_(keep)
    weights.add_(update, alpha=-lr * scale)


def _decay_cautiously_(weights: Tensor, update: Tensor, keep: float, work: Workspace) -> None:
    for part in chunks(weights):
        shape, device = (part.stop - part.start,), weights.device
        factors = work.get("wide", shape, torch.float32, device)
        are_opposed = work.get("are_opposed", shape, torch.bool, device)
        # A sign times the update has the sign of the product of both, which itself could underflow to zero.
        torch.lt(torch.sign(weights[part], out=factors).mul_(update[part]), 0, out=are_opposed)
        weights[part].mul_(factors.fill_(keep).masked_fill_(are_opposed, 1.0))


def copy_rounded(target: Tensor, source: Tensor, random_key: Key, first: int, work: Workspace) -> None:
    """Round ``source``, fp32, stochastically to ``target``, bf16; ``source`` is overwritten.

    ``random_key`` and ``first`` select the random numbers; see :func:`deepspeed.muon.kernels.rounding.noise`.
    Temporaries take 1 MiB on a CPU, 16 MiB elsewhere.
    """
    for part in chunks(target):
        shape, device = (part.stop - part.start,), target.device
        bits, spare = (work.get(name, shape, torch.int32, device) for name in ("bits", "spare_bits"))
        round_(target[part], source[part], noise(bits, spare, random_key, first + part.start), spare)


def tiles(spans: Sequence[tuple[int, int, int]], device: torch.device) -> Tiles:
    """Return :class:`Tiles` with one tile for each span, a contiguous piece of a flat shard.

    ``spans``: for each span (start in the shard, start in ``out`` or ``update``, length), in elements. ``out`` is an
    argument of :func:`advance_runs`, ``update`` of :func:`apply_runs_`.
    """
    return Tiles(torch.tensor(spans, dtype=torch.int64, device=device), are_aligned=False)


def advance_runs(buffer: Tensor, grad: Tensor, out: Tensor, tiles: Tiles, beta: float, nesterov: bool) -> None:
    """Call :func:`advance` for each tile: on its part of ``buffer`` and ``grad``, flat shards, and its part of ``out``.

    :class:`Tiles` says where these parts begin.
    """
    for shard, other, length in tiles.table.tolist():
        part = slice(shard, shard + length)
        advance(buffer[part], grad[part], out[other : other + length], beta, nesterov, Workspace())


def apply_runs_(
    weights: Tensor, update: Tensor, tiles: Tiles, lr: float, scale: float, weight_decay: float, cautious: bool
) -> None:
    """Call :func:`apply_` for each tile: on its part of ``weights``, a flat shard, with its part of ``update``.

    :class:`Tiles` says where these parts begin.
    """
    for shard, other, length in tiles.table.tolist():
        part, result = weights[shard : shard + length], update[other : other + length]
        apply_(part, result, lr, scale, weight_decay, cautious, Workspace())


def normalize(x: Tensor, out: Tensor, norm: float = 1.0) -> Tensor:
    """Scale each matrix of ``x`` to the Frobenius norm ``norm``, and return ``out``. A zero matrix stays zero.

    The norm does not overflow or underflow and needs no epsilon, because a power of two first brings the largest entry
    of each matrix near one.

    Args:
        x: ``[batch, rows, cols]``, contiguous, bf16 or fp32; overwritten.
        out: same shape, any floating dtype; receives the result, which is rounded once; may be ``x``.
        norm: a power of two.
    """
    near_one_(x.view(x.size(0), -1), dim=1)
    # By rows: a single sum of 10^8 squares in fp32 is off by a thousandth on a CPU.
    by_rows = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32)
    length = torch.linalg.vector_norm(by_rows, dim=-1).view(-1, 1, 1).div_(norm)
    return torch.div(x, length.clamp_min_(torch.finfo(torch.float32).tiny), out=out)  # zero stays zero


def near_one_(matrix: Tensor, dim: int) -> None:
    """Divide each row or column of a bf16 or fp32 matrix by a power of two that brings its largest entry near one.

    ``dim``: 1 for rows, 0 for columns. ``matrix``: ``[rows, cols]``; changed in place.
    """
    largest = torch.linalg.vector_norm(matrix, torch.inf, dim=dim, keepdim=True).float()
    # The power of two at or below it, from the bits of fp32, because not every backend has frexp.
    power = largest.view(torch.int32).bitwise_and_(EXPONENT).view(torch.float32)
    # Within these bounds it is a normal number, also for zero; subnormal inputs end near 2^-23, which is safe.
    matrix.div_(power.clamp_(2.0**-126, 2.0**126).to(matrix.dtype))


def symmetric(name: str, x: Tensor, work: Workspace) -> Tensor:
    """Return an uninitialized tensor for ``X X^T``, or another symmetric matrix of its size, for each X in ``x``.

    Its shape is ``[batch, rows, rows]`` if that of ``x`` is ``[batch, rows, cols]``. ``work`` owns the memory, which
    the next call with the same ``name`` uses again.
    """
    return work.get(name, (x.size(0), x.size(-2), x.size(-2)), x.dtype, x.device)


def square(x: Tensor, out: Tensor, work: Workspace) -> None:
    """Set ``out = X X^T`` for each matrix X in ``x``.

    ``x``: ``[batch, rows, cols]``, bf16, fp16 or fp32, contiguous or a transposed view of a contiguous tensor. ``out``:
    ``[batch, rows, rows]``, in the same dtype.
    """
    torch.bmm(x, x.mT, out=out)


def diagonal(matrix: Tensor) -> Tensor:
    """Return a view, ``[batch, k]``, of the diagonals of matrices ``[batch, k, k]``."""
    return matrix.diagonal(dim1=-2, dim2=-1)


def product(a: Tensor, b: Tensor, out: Tensor, work: Workspace, alpha: float = 1.0, beta: float = 0.0) -> None:
    """Set ``out = alpha A B + beta A`` for symmetric A and B that commute, so that the result is symmetric.

    All have the same shape and dtype. ``a`` may be ``b``; ``out`` may be neither.
    """
    torch.baddbmm(a, a, b, beta=beta, alpha=alpha, out=out)


def multiply(p: Tensor, x: Tensor, out: Tensor, work: Workspace, shift: float = 0.0) -> Tensor:
    """Set ``out = P X + shift X`` for each matrix of a batch, and return ``out``.

    ``p``: ``[batch, rows, rows]``, symmetric. ``x``: ``[batch, rows, cols]``, contiguous or a transposed view of a
    contiguous tensor, in the same dtype. ``out``: equal to ``x`` in shape, strides and dtype, but not ``x``.
    """
    # The shift is not added to P's diagonal: 16 bits would round all entries of the sum alike, and so shift every
    # eigenvalue.
    (base, is_transposed), (result, _) = base_of(x), base_of(out)
    left, right = (base, p) if is_transposed else (p, base)
    if shift:
        torch.baddbmm(base, left, right, beta=shift, out=result)
    else:  # baddbmm would copy X first
        torch.bmm(left, right, out=result)
    return out


TORCH = KernelSet(
    name="torch",
    advance=advance,
    advance_rounded=advance_rounded,
    advance_codes=advance_codes,
    apply_=apply_,
    copy_rounded=copy_rounded,
    normalize=normalize,
    symmetric=symmetric,
    diagonal=diagonal,
    square=square,
    product=product,
    multiply=multiply,
)

#: The reference with which the ``runs`` of other kernel sets are compared. It calls a kernel for each run.
RUNS = RunKernels(fits=lambda tensor: True, tiles=tiles, advance=advance_runs, apply_=apply_runs_)


class _Setting(NamedTuple):
    """A global setting of torch that changes results, and the ``value`` that :func:`fixed_numerics` gives to it."""

    read: Callable[[], Any]
    write: Callable[[Any], Any]
    value: Any


def _attribute(owner: Any, name: str, value: Any) -> _Setting:
    return _Setting(partial(getattr, owner, name), partial(setattr, owner, name), value)


def _fp32_precision() -> list[_Setting]:
    """Return torch's settings for the precision of fp32 matrix products, with values that forbid TF32 and bf16."""
    owners = torch.backends.cuda.matmul, torch.backends.mkldnn
    if hasattr(torch.backends, "fp32_precision"):  # torch 2.9: reads and writes may not mix with the older functions
        return [_attribute(getattr(owner, "matmul", owner), "fp32_precision", "ieee") for owner in owners]
    return [_Setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest")]


def _reductions() -> list[_Setting]:
    """Return the settings that decide how 16-bit matrix products are summed, each with torch's default as its value."""
    matmul = torch.backends.cuda.matmul
    found = []
    for dtype in ("bf16", "fp16"):
        name = f"allow_{dtype}_reduced_precision_reduction"
        split_k = f"{name}_split_k"
        if hasattr(matmul, split_k):  # one write sets both, so one read must return both
            read = partial(attrgetter(name, split_k), matmul)
            found.append(_Setting(read, partial(setattr, matmul, name), (True, True)))
        else:
            found.append(_attribute(matmul, name, True))
    if hasattr(matmul, "allow_fp16_accumulation"):
        found.append(_attribute(matmul, "allow_fp16_accumulation", False))
    return found


# Not the default device, because this package names the device of every new tensor.
_SETTINGS = [
    _Setting(torch.get_default_dtype, torch.set_default_dtype, torch.float32),
    *_fp32_precision(),
    *_reductions(),
]


@contextmanager
def fixed_numerics() -> Iterator[None]:
    """Run the ``with`` block under fixed global settings of torch, and restore the script's settings at its end.

    In the block, the default dtype is fp32, fp32 matrix products use neither TF32 nor bf16, 16-bit products are summed
    as torch does by default, and autocast and inference mode are off. Enter ``torch.no_grad`` inside of the block, not
    around it: the block enables gradients if it leaves inference mode.
    """
    with ExitStack() as stack:
        for setting in _SETTINGS:
            if (before := setting.read()) != setting.value:
                setting.write(setting.value)
                stack.callback(setting.write, before)
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))  # this enables gradients
        # torch.accelerator is new in torch 2.6.
        accelerator = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else torch.device("cuda")
        for kind in {"cpu", accelerator.type if accelerator else "cpu"}:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield
