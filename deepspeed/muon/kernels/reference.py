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
from deepspeed.muon.kernels.table import PLAIN, Operations, RunOperations, Scalars, Symmetric, Tiles, base_of
from deepspeed.muon.kernels.workspace import Workspace

#: Number of elements that are processed at a time if temporaries are needed: on a CPU they fit in its cache, elsewhere
#: they are so many that launches cost little.
CPU_CHUNK, CHUNK = 2**17, 2**21


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
        x: ``[batch, rows, cols]``, bf16 or fp32; overwritten.
        out: same shape, any floating dtype; receives the result, which is rounded once; may be ``x``.
        norm: a power of two.
    """
    for matrix, result in zip(x.unbind(0), out.unbind(0), strict=True):
        _, length = exponent_and_norm(matrix)
        divisor = torch.where(length == 0, 1.0, length / norm)
        # On CUDA torch rounds a 0-D divisor to the matrix's dtype, by up to 0.4 %, but not a divisor with dimensions.
        # On a CPU it does not round a 0-D divisor; one with dimensions costs a copy, and makes the quotient fp32.
        is_plain = divisor.device.type == "cpu" and matrix.dtype == result.dtype
        torch.div(matrix, divisor if is_plain else divisor.view(1, 1), out=result)
    return out


def exponent_and_norm(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Divide a 2-D matrix, bf16 or fp32, in place by a power of two 2^e that brings its largest entry near one.

    Return (e, Frobenius norm of the divided matrix), both 0-D and fp32.
    """
    exponent = near_one_(matrix)
    # By rows: a single sum of 10^8 squares in fp32 is off by a thousandth on a CPU.
    return exponent, torch.linalg.vector_norm(torch.linalg.vector_norm(matrix, dim=-1, dtype=torch.float32))


def near_one_(matrix: Tensor, dim: int | None = None) -> Tensor:
    """Divide a 2-D matrix, bf16 or fp32, in place by powers of two that bring its largest entries near one.

    Return the exponents, fp32: 0-D if ``dim`` is ``None`` (one power for the matrix), ``[rows, 1]`` if it is 1 (one for
    each row), ``[1, cols]`` if it is 0 (one for each column).
    """
    low, high = torch.aminmax(matrix, dim=dim, keepdim=dim is not None)
    largest = torch.maximum(high, -low).float()
    # frexp's exponent, from the bits of fp32, because not every backend has frexp; less for zero and subnormal numbers.
    exponent = largest.view(torch.int32).bitwise_right_shift(23).sub(126)
    # Within +-126 the power is a normal fp32 number; subnormal inputs end near 2^-23, which is safe.
    exponent = exponent.clamp(-126, 126).float()
    matrix.mul_(torch.exp2(-exponent))
    return exponent


def square(x: Tensor, out: Symmetric, work: Workspace) -> None:
    """Set ``out = X X^T`` for each matrix X in ``x``.

    ``x``: ``[batch, rows, cols]``, bf16, fp16 or fp32, contiguous or a transposed view of a contiguous tensor. ``out``:
    ``[batch, rows, rows]``, in the same dtype.
    """
    torch.bmm(x, x.mT, out=out.rest)
    if not out.is_whole:
        separate_diagonal(x, out)


def separate_diagonal(x: Tensor, out: Symmetric) -> None:
    """Set ``out.diagonal`` to the diagonal of X X^T in fp32, for each X in ``x``; set that of ``out.rest`` to zero."""
    torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32, out=out.diagonal).square_()
    out.rest.diagonal(dim1=-2, dim2=-1).zero_()


def product(a: Symmetric, b: Symmetric, out: Symmetric, work: Workspace, coeffs: Scalars = PLAIN) -> None:
    """Set ``out = alpha A B + beta A + shift I`` for symmetric A and B that commute, so that the result is symmetric.

    All have the same shape and dtype. ``a`` may be ``b``; ``out`` may be neither. ``coeffs``: (alpha, beta, shift).
    """
    alpha, beta, shift = coeffs
    torch.baddbmm(a.rest, a.rest, b.rest, beta=beta, alpha=alpha, out=out.rest)
    if out.is_whole:
        out.rest.diagonal(dim1=-2, dim2=-1).add_(shift)
        return
    cross, more = (work.get(f"cross{i}", tuple(a.rest.shape), torch.float32, a.rest.device) for i in range(2))
    torch.mul(a.rest, b.diagonal.unsqueeze(-2), out=cross)
    cross.add_(torch.mul(b.rest, a.diagonal.unsqueeze(-1), out=more))
    out.rest.add_(cross, alpha=alpha).diagonal(dim1=-2, dim2=-1).zero_()
    torch.sum(cross.copy_(a.rest).mul_(b.rest), dim=-1, out=out.diagonal)  # bf16 times bf16 would be rounded to bf16
    out.diagonal.addcmul_(a.diagonal, b.diagonal).mul_(alpha).add_(a.diagonal, alpha=beta).add_(shift)


def multiply(p: Symmetric, x: Tensor, out: Tensor, work: Workspace) -> Tensor:
    """Set ``out = P X`` for each matrix of a batch, and return ``out``.

    ``p``: ``[batch, rows, rows]``. ``x``: ``[batch, rows, cols]``, contiguous or a transposed view of a contiguous
    tensor, in the same dtype. ``out``: equal to ``x`` in shape, strides and dtype, but not ``x``.
    """
    (base, is_transposed), (result, _) = base_of(x), base_of(out)
    left, right = (base, p.rest) if is_transposed else (p.rest, base)
    torch.bmm(left, right, out=result)
    if not p.is_whole:
        scaled = work.get("cross0", tuple(base.shape), torch.float32, x.device)
        result.add_(torch.mul(base, p.diagonal.unsqueeze(-2 if is_transposed else -1), out=scaled))
    return out


OPERATIONS = Operations(
    name="torch",
    advance=advance,
    advance_rounded=advance_rounded,
    advance_codes=advance_codes,
    apply_=apply_,
    copy_rounded=copy_rounded,
    normalize=normalize,
    square=square,
    product=product,
    multiply=multiply,
)

#: The reference against which other tables' ``runs`` are tested. It calls a kernel for each run, so no table uses it.
RUNS = RunOperations(fits=lambda tensor: True, tiles=tiles, advance=advance_runs, apply_=apply_runs_)
