# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz as a call: where it writes, how many matrices it takes at a time, its cost."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed.muon.kernels import kernel_set
from deepspeed.muon.kernels.kernel_set import Workspace
from deepspeed.muon.math.newton_schulz import METHODS, SIMPLE, SYMMETRIC, Schedule, flops, orthogonalize, schedule
from helpers.kernels import relative
from helpers.singular_values import VARIED, generator, reference

#: Without c.
CUBIC = (1.5, -0.5, 0.0)

# ---- out, work ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", range(1, 8))
@pytest.mark.parametrize("method", METHODS)
def test_the_result_is_where_the_matrix_was(method: str, steps: int) -> None:
    """In a slice of a buffer; an odd and an even number of products end in different buffers."""
    for shape in ((2, 10, 20), (2, 20, 10)):
        flat = torch.randn(600, generator=generator(0))
        kept, x = flat.clone(), flat[100:500].view(shape)
        assert orthogonalize(x, VARIED[:steps], method) is x
        assert relative(flat[100:500].view(shape), reference(kept[100:500].view(shape), VARIED[:steps])) < 1e-4
        assert flat[:100].equal(kept[:100]) and flat[500:].equal(kept[500:])


@pytest.mark.parametrize("method", METHODS)
def test_an_accelerator_works_on_as_many_matrices_as_their_temporaries_allow(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """The CPU plays one: the same bits, and temporaries of so many matrices."""
    x, held = torch.randn(7, 16, 24, generator=generator(0)), {}
    alone = torch.cat([orthogonalize(one.clone(), VARIED, method) for one in x.split(1)])
    smalls = len(SYMMETRIC[method])
    one = 4 * (16 * 24 + smalls * 16 * 16)
    monkeypatch.setattr(kernel_set, "is_accelerator", lambda device: True)
    for allowed, together in {1: 1, 2 * one + 1: 2, 3 * one: 3, 99 * one: 99}.items():
        monkeypatch.setattr(kernel_set, "BATCH_BYTES", allowed)
        assert kernel_set.matrices_together(x, torch.float32, smalls) == together
        work = Workspace()
        assert torch.equal(orthogonalize(x.clone(), VARIED, method, work=work), alone)
        held[together] = work.nbytes()
    assert held[2] == 2 * held[1] and held[3] == 3 * held[1] and held[99] == 7 * held[1]


def test_a_workspace_reuses_and_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller storage is let go before a larger one is allocated. On release that of the host stays."""
    work, cpu, empty, held = Workspace(), torch.device("cpu"), torch.empty, []
    first = work.get("a", (4, 6), torch.float32, cpu)
    assert (first.shape, first.dtype, first.is_contiguous()) == ((4, 6), torch.float32, True)
    for shape in ((3, 8), (2, 1, 3)):
        assert work.get("a", shape, torch.float32, cpu).data_ptr() == first.data_ptr()
    assert work.get("b", (4, 6), torch.float32, cpu).data_ptr() != first.data_ptr()
    assert work.get("a", (4, 6), torch.bfloat16, cpu).data_ptr() != first.data_ptr()
    assert work.nbytes() == 24 * (4 + 4 + 2)
    monkeypatch.setattr(torch, "empty", lambda *args, **kw: (held.append(work.nbytes()), empty(*args, **kw))[1])
    grown = work.get("a", (5, 6), torch.float32, cpu)
    assert held == [24 * (4 + 2)] and work.nbytes() == (30 + 24) * 4 + 24 * 2
    assert work.get("a", (30,), torch.float32, cpu).data_ptr() == grown.data_ptr()
    assert work.get("empty", (0, 7), torch.float32, cpu).shape == (0, 7)
    work.get("a", (4,), torch.float32, torch.device("meta"))
    kept = work.nbytes()
    work.release()
    assert work.nbytes() == kept - 16 and {device.type for *_, device in work._storage} == {"cpu"}


# ---- flops ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "triples", [*(schedule("simple", n) for n in (1, 2, 3, 4, 5, 6, 7, 8, 13)), (SIMPLE, CUBIC), (CUBIC,) * 5], ids=str
)
@pytest.mark.parametrize("shape", [(8, 20), (20, 8), (9, 9)])
@pytest.mark.parametrize("method", METHODS)
def test_flops_is_the_count_of_the_products(
    monkeypatch: pytest.MonkeyPatch, method: str, shape: tuple[int, int], triples: Schedule
) -> None:
    """A step without c takes one less."""
    counted: Counter[str] = Counter()

    def counting(name: str, original: Callable[..., Tensor], skip: int) -> Callable[..., Tensor]:
        def product(*args: Tensor, **kwargs: Any) -> Tensor:
            left, right = args[skip], args[skip + 1]
            counted[name] += 2 * left.size(0) * left.size(1) * left.size(2) * right.size(2)
            return original(*args, **kwargs)

        return product

    monkeypatch.setattr(torch, "bmm", counting("bmm", torch.bmm, 0))
    monkeypatch.setattr(torch, "baddbmm", counting("baddbmm", torch.baddbmm, 1))
    for other in ("mm", "addmm", "matmul", "einsum"):
        monkeypatch.delattr(torch, other)
    orthogonalize(torch.randn(3, *shape), triples, method)
    assert counted["bmm"] and (counted["baddbmm"] or triples[0] == CUBIC)
    assert counted.total() == 3 * flops(*shape, triples, method, "fp32")
