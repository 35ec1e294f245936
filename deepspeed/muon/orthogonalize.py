# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz iteration towards the orthogonal factor of a matrix.

Pure math over batches ``[batch, rows, cols]``. Nothing here knows of ranks, shards or optimizers.

``standard`` iterates on the matrix X itself: with rows <= cols, A = X X^T, X <- a X + (b A + c A^2) X.
``gram`` (Zhang, Amsel, Chen and Dao, "Gram Newton-Schulz", 2026) iterates on the small Gram matrix
instead, R = X X^T, and forms it from X anew only at restarts: the same map in exact arithmetic, in fewer
operations when cols > rows. It restarts every two steps, because in bf16 the error of R grows with the
steps since R was last formed from X.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepspeed.muon.coefficients import Schedule

METHODS = ("standard", "gram")
#: Steps of ``gram`` between two restarts.
RESTART_EVERY = 2
#: ``auto`` takes ``gram`` from this aspect ratio and this smaller dimension on.
GRAM_MIN_ASPECT = 2
GRAM_MIN_SIZE = 128


class Workspace:
    """Scratch tensors that live as long as the optimizer: the steady state allocates nothing.

    Fresh pages cost as much as the arithmetic of a small product, so every temporary is asked for
    here by name. Two requests of one name share storage; a larger one replaces it.
    """

    def __init__(self) -> None:
        self._storage: dict[tuple, Tensor] = {}

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialized contiguous tensor of this shape, valid until the next request of this name."""
        numel = 1
        for size in shape:
            numel *= size
        key = (name, dtype, device)
        held = self._storage.get(key)
        if held is None or held.numel() < numel:
            held = self._storage[key] = torch.empty(numel, dtype=dtype, device=device)
        return held[:numel].view(shape)

    def clear(self) -> None:
        """Give back all storage."""
        self._storage.clear()

    def nbytes(self) -> int:
        """Bytes held at present."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._storage.values())


def bf16_is_fast() -> bool:
    """Whether this rank multiplies bf16 matrices in hardware."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    cpu = torch.backends.cpu.get_cpu_capability() if hasattr(torch.backends, "cpu") else ""
    return cpu.startswith("AVX512") and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def resolve_dtype(ns_dtype: str, bf16_everywhere: bool) -> torch.dtype:
    """``auto`` is bf16 where every rank is fast in it, else fp32."""
    return torch.bfloat16 if ns_dtype == "bf16" or (ns_dtype == "auto" and bf16_everywhere) else torch.float32


def choose_method(rows: int, cols: int, ns_method: str = "auto") -> str:
    """The method for one shape: the user's, or where it is ``auto`` the one with fewer operations.

    See :func:`flops`: ``gram`` wins from cols = 1.7 rows on. Below ``GRAM_MIN_SIZE`` its small products
    are too small to be fast. A rule of the shape alone, hence the same on every rank.
    """
    if ns_method != "auto":
        return ns_method
    small, large = sorted((rows, cols))
    return "gram" if small >= GRAM_MIN_SIZE and large >= GRAM_MIN_ASPECT * small else "standard"


def flops(rows: int, cols: int, steps: int, method: str) -> int:
    """Floating-point operations to orthogonalize one m x n matrix, m <= n, every product counted in full.

    Five steps: ``standard`` 20 m^2 n + 10 m^3, ``gram`` 14 m^2 n + 20 m^3.
    """
    m, n = sorted((rows, cols))
    if method == "standard":
        return steps * (4 * m * m * n + 2 * m**3)
    segments = _segments(steps)
    saved_products = segments[0] - 1
    large = len(segments) + steps - saved_products
    small = steps + saved_products + 2 * (steps - len(segments))
    return 2 * m * m * n * large + 2 * m**3 * small


def orthogonalize(
    x: Tensor, schedule: Schedule, method: str = "standard", out: Tensor | None = None, work: Workspace | None = None
) -> Tensor:
    """Replace every singular value of each matrix by about one.

    Args:
        x: ``[batch, rows, cols]``, contiguous, bf16 or fp32; **overwritten**.
        schedule: one (a, b, c) triple per step.
        method: ``standard`` or ``gram``.
        out: receives the result, same shape and dtype as ``x``; by default ``x`` itself.
        work: where temporaries come from.

    Returns:
        ``out``. A zero matrix gives zero; a non-finite one gives non-finite values.
    """
    work = Workspace() if work is None else work
    spare = work.get("spare", tuple(x.shape), x.dtype, x.device) if out is None else out
    normalize_(x)
    iterate = {"standard": _standard, "gram": _gram}[method]
    result = iterate(x, spare, schedule, work)
    target = x if out is None else out
    return result if result is target else target.copy_(result)


def normalize_(x: Tensor) -> Tensor:
    """Divide each matrix of ``[batch, rows, cols]`` by its Frobenius norm, in place, whatever its magnitude.

    Squares of tiny or huge entries leave fp32's range, so the largest entry is first brought near one
    by a power of two, which rounds nothing; the norm of that is taken in fp32 and needs no epsilon.
    """
    for matrix in x.unbind(0):
        low, high = torch.aminmax(matrix)
        _, exponent = torch.frexp(torch.maximum(high, -low).float())
        # Within +-126 the power is a normal fp32 number; subnormal inputs end near 2^-23, which is safe.
        matrix.mul_(torch.exp2(-exponent.clamp(-126, 126).float()))
        norm = torch.linalg.vector_norm(matrix, dtype=torch.float32)
        matrix.div_(torch.where(norm == 0, 1.0, norm))
    return x


def _square(x: Tensor, out: Tensor) -> Tensor:
    """The smaller of X X^T and X^T X."""
    left, right = (x, x.mT) if x.size(-2) <= x.size(-1) else (x.mT, x)
    return torch.bmm(left, right, out=out)


def _multiply(poly: Tensor, x: Tensor, beta: float, out: Tensor) -> Tensor:
    """Return ``beta X + P X``, or ``beta X + X P`` for a tall X; P is symmetric."""
    left, right = (poly, x) if x.size(-2) <= x.size(-1) else (x, poly)
    return torch.baddbmm(x, left, right, beta=beta, out=out)


def _standard(x: Tensor, spare: Tensor, schedule: Schedule, work: Workspace) -> Tensor:
    size = min(x.shape[-2:])
    shape = (x.size(0), size, size)
    gram = work.get("gram", shape, x.dtype, x.device)
    poly = work.get("poly", shape, x.dtype, x.device)
    for a, b, c in schedule:
        _square(x, gram)
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=poly)
        _multiply(poly, x, a, spare)
        x, spare = spare, x
    return x


def _segments(steps: int) -> list[int]:
    """Numbers of steps between two restarts of ``gram``."""
    return [min(RESTART_EVERY, steps - done) for done in range(0, steps, RESTART_EVERY)]


def _gram(x: Tensor, spare: Tensor, schedule: Schedule, work: Workspace) -> Tensor:
    size = min(x.shape[-2:])
    shape = (x.size(0), size, size)
    r, z, p, t = (work.get(name, shape, x.dtype, x.device) for name in ("gram", "poly", "p", "t"))
    step = 0
    for segment in _segments(len(schedule)):
        _square(x, r)
        # Singular values are small at first, so the product of the first factors is alpha I plus a small P,
        # and holding P alone rounds little. Later the product is near I: there each factor is applied alone.
        accumulate, alpha = step == 0, 1.0
        for i, (a, b, c) in enumerate(schedule[step : step + segment]):
            torch.baddbmm(r, r, r, beta=b, alpha=c, out=z)
            if not accumulate:
                x, spare = _multiply(z, x, a, spare), x
            elif i == 0:
                p.copy_(z)
            else:
                torch.add(z, p, alpha=a / alpha, out=t)
                p, t = torch.baddbmm(t, z, p, beta=alpha, out=t), p
            alpha *= a
            if i + 1 < segment:
                torch.baddbmm(r, z, r, beta=a, out=t)
                torch.baddbmm(t, z, t, beta=a, out=r)
        if accumulate:
            x, spare = _multiply(p, x, alpha, spare), x
        step += segment
    return x
