# SPDX-License-Identifier: Apache-2.0
"""Every operation in plain PyTorch, for all devices and dtypes: the reference that faster kernels are tested against.

Common arguments: ``work`` allocates temporaries. ``key``, from :func:`deepspeed.muon.kernels.rounding.key_of`, selects
a sequence of random numbers for stochastic rounding, and ``first`` is the index in it of the first element. Elementwise
functions take 1-D tensors of equal length; gradients and results may have any floating dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from deepspeed.muon.kernels.codes import BLOCK, block_count, decode, encode
from deepspeed.muon.kernels.rounding import Key, noise, round_
from deepspeed.muon.kernels.table import Operations, RunOperations, Tiles, base_of
from deepspeed.muon.kernels.workspace import Workspace

#: Number of elements that are processed at a time if temporaries are needed: on a CPU they fit in its cache, elsewhere
#: they are so many that launches cost little.
CPU_CHUNK, CHUNK = 2**17, 2**21
#: The bits of an fp32 number that are its exponent.
EXPONENT = 0x7F800000


def advance(buffer: Tensor, grad: Tensor, out: Tensor, momentum: float, nesterov: bool, work: Workspace) -> None:
    """Update the momentum ``buffer``, and write the input of Newton-Schulz to ``out``.

    ``buffer <- momentum buffer + (1 - momentum) grad``, an average and not a sum. ``out`` is the new buffer or, with
    ``nesterov``, ``momentum buffer + (1 - momentum) grad`` computed from the new buffer (Nesterov's look-ahead).

    Args:
        buffer: fp32: the optimizer state ``momentum_buffer``.
        grad: same shape, any floating dtype; averaged over the ranks, unscaled and clipped.
        out: same shape, any floating dtype; must not share memory with ``buffer``.
    """
    buffer.lerp_(grad.to(buffer.dtype), 1.0 - momentum)
    if nesterov:
        ahead = work.get("shard", tuple(buffer.shape), buffer.dtype, buffer.device)
        out.copy_(torch.lerp(grad.to(buffer.dtype), buffer, momentum, out=ahead))
    else:
        out.copy_(buffer)


def advance_rounded(
    buffer: Tensor, grad: Tensor, out: Tensor, momentum: float, nesterov: bool, key: Key, first: int, work: Workspace
) -> None:
    """Do the same as :func:`advance` for a bf16 momentum: compute in fp32, and round ``buffer`` stochastically.

    ``key`` and ``first`` select the random numbers; see :func:`deepspeed.muon.kernels.rounding.noise`. Temporaries take
    up to 2.5 MiB on a CPU, 40 MiB elsewhere.
    """
    for part in chunks(buffer):
        wide = work.get("wide", (part.stop - part.start,), torch.float32, buffer.device)
        wide.copy_(buffer[part])
        advance(wide, grad[part], out[part], momentum, nesterov, work)
        copy_rounded(buffer[part], wide, key, first + part.start, work)


def advance_codes(
    codes: Tensor,
    absmax: Tensor,
    grad: Tensor,
    out: Tensor,
    momentum: float,
    nesterov: bool,
    key: Key,
    first: int,
    work: Workspace,
) -> None:
    """Do the same as :func:`advance` for an int8 momentum: compute in fp32, and round ``codes`` stochastically.

    ``codes`` begins at the start of a block. ``absmax`` is fp32, the largest magnitude of each block. Both are updated.
    ``key`` and ``first`` select the random numbers; see :func:`deepspeed.muon.kernels.rounding.noise`. Temporaries take
    up to 2.5 MiB on a CPU, 40 MiB elsewhere.
    """
    for part in chunks(codes):
        numel, magnitudes = part.stop - part.start, absmax[part.start // BLOCK : block_count(part.stop)]
        shape, device = (magnitudes.numel() * BLOCK,), codes.device
        wide = work.get("wide", shape, torch.float32, device)
        bits, spare = (work.get(name, shape, torch.int32, device) for name in ("bits", "spare_bits"))
        values = decode(codes[part], magnitudes, wide)
        advance(values, grad[part], out[part], momentum, nesterov, work)
        wide[numel:].zero_()
        uniform = spare.view(torch.float32)
        uniform.copy_(noise(bits, spare, key, first + part.start).bitwise_or_(1)).mul_(2.0**-16)
        encode(wide, codes[part], magnitudes, uniform)


def chunks(x: Tensor) -> Iterator[slice]:
    """Yield slices of ``CHUNK`` elements (``CPU_CHUNK`` on a CPU) that cover a 1-D tensor, to limit temporaries."""
    size = CPU_CHUNK if x.device.type == "cpu" else CHUNK
    return (slice(start, min(start + size, x.numel())) for start in range(0, x.numel(), size))


def apply_(
    param: Tensor, update: Tensor, lr: float, scale: float, weight_decay: float, cautious: bool, work: Workspace
) -> None:
    """Set ``param <- param (1 - lr weight_decay) - lr scale update``.

    Weight decay is decoupled as in AdamW (Loshchilov and Hutter, arXiv 1711.05101); ``scale`` does not change it. If
    ``cautious``, elements whose update and parameter have opposite signs do not decay (Chen et al., arXiv 2510.12402);
    temporaries then take 0.6 MiB on a CPU, 10 MiB elsewhere.

    Args:
        param: any shape, contiguous, fp32 under ZeRO.
        update: same shape: elements of the orthogonalized matrix.
        scale: :func:`deepspeed.muon.math.scale.scale_factor` for the shape of the whole matrix.
    """
    if update.dtype != param.dtype or update.device != param.device:
        update = work.get("shard", tuple(param.shape), param.dtype, param.device).copy_(update)
    keep = 1.0 - lr * weight_decay
    if weight_decay and cautious:
        _decay_cautiously_(param.view(-1), update.view(-1), keep, work)
    elif weight_decay:
        param.mul_(keep)
    param.add_(update, alpha=-lr * scale)


def _decay_cautiously_(param: Tensor, update: Tensor, keep: float, work: Workspace) -> None:
    for part in chunks(param):
        shape, device = (part.stop - part.start,), param.device
        factors = work.get("wide", shape, torch.float32, device)
        are_opposed = work.get("are_opposed", shape, torch.bool, device)
        # A sign times the update has the sign of the product of both, which itself could underflow to zero.
        torch.lt(torch.sign(param[part], out=factors).mul_(update[part]), 0, out=are_opposed)
        param[part].mul_(factors.fill_(keep).masked_fill_(are_opposed, 1.0))


def copy_rounded(target: Tensor, source: Tensor, key: Key, first: int, work: Workspace) -> None:
    """Round ``source``, fp32, stochastically to ``target``, bf16; ``source`` is overwritten.

    ``key`` and ``first`` select the random numbers; see :func:`deepspeed.muon.kernels.rounding.noise`. Temporaries take
    1 MiB on a CPU, 16 MiB elsewhere.
    """
    for part in chunks(target):
        shape, device = (part.stop - part.start,), target.device
        bits, spare = (work.get(name, shape, torch.int32, device) for name in ("bits", "spare_bits"))
        round_(target[part], source[part], noise(bits, spare, key, first + part.start), spare)


def tiles(runs: Sequence[tuple[int, int, int]], device: torch.device) -> Tiles:
    """Return :class:`Tiles` with one tile for each run, a contiguous piece of a flat shard.

    ``runs``: for each run, (start in the shard, start in ``out`` or ``update``, length), in elements. ``out`` is an
    argument of :func:`advance_runs`, ``update`` of :func:`apply_runs_`.
    """
    return Tiles(torch.tensor(runs, dtype=torch.int64, device=device), are_aligned=False)


def advance_runs(buffer: Tensor, grad: Tensor, out: Tensor, tiles: Tiles, momentum: float, nesterov: bool) -> None:
    """Call :func:`advance` on each tile of the shards ``buffer`` and ``grad``, and on its place in ``out``."""
    for shard, other, length in tiles.table.tolist():
        part = slice(shard, shard + length)
        advance(buffer[part], grad[part], out[other : other + length], momentum, nesterov, Workspace())


def apply_runs_(
    param: Tensor, update: Tensor, tiles: Tiles, lr: float, scale: float, weight_decay: float, cautious: bool
) -> None:
    """Call :func:`apply_` on each tile of the shard ``param``; ``tiles`` says which part of ``update`` to apply."""
    for shard, other, length in tiles.table.tolist():
        part, result = param[shard : shard + length], update[other : other + length]
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
    """Divide a 2-D matrix, bf16 or fp32, in place by powers of two that bring its largest entries near one.

    ``dim``: 1 for one power for each row, 0 for one for each column.
    """
    largest = torch.linalg.vector_norm(matrix, torch.inf, dim=dim, keepdim=True).float()
    # The power of two at or below it, from the bits of fp32, because not every backend has frexp.
    power = largest.view(torch.int32).bitwise_and_(EXPONENT).view(torch.float32)
    # Within these bounds it is a normal number, also for zero; subnormal inputs end near 2^-23, which is safe.
    matrix.div_(power.clamp_(2.0**-126, 2.0**126).to(matrix.dtype))


def symmetric(name: str, x: Tensor, work: Workspace) -> Tensor:
    """Return room for ``X X^T`` of each matrix X in ``x``: ``[batch, rows, rows]`` for ``[batch, rows, cols]``.

    It is not initialized. ``work`` owns the memory, which another call with the same ``name`` may reuse.
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


OPERATIONS = Operations(
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

#: The reference against which other tables' ``runs`` are tested. It calls a kernel for each run, so no table uses it.
RUNS = RunOperations(fits=lambda tensor: True, tiles=tiles, advance=advance_runs, apply_=apply_runs_)
