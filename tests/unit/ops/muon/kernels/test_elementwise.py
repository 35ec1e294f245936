# SPDX-License-Identifier: Apache-2.0
"""The elementwise operations of a step, in every table: against float64, their twin in PyTorch, and each other."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed.muon.kernels import native, reference
from deepspeed.muon.kernels.builder import MuonBuilder
from deepspeed.muon.kernels.rounding import key_of, noise, round_
from deepspeed.muon.kernels.table import Operations
from deepspeed.muon.kernels.workspace import Workspace
from helpers.kernels import native_only

ULP = 2.0**-7
"""The largest distance of two neighbours in bf16, relative."""
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [1, 15, 16, 33, 1000, 2**17 + 13]
SLICES = (0, 1, 14, 77, 130, 1000, 40_001)


@pytest.fixture(params=["torch", "native"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Operations:
    if request.param == "torch":
        return reference.OPERATIONS
    return native_only(monkeypatch, "advance", "advance_rounded", "apply_", "copy_rounded", "normalize")


def randn(numel: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_equals(actual: Tensor, expected: Tensor) -> None:
    """To a few roundings of fp32, or one of bf16."""
    tolerance = 1e-6 if actual.dtype == torch.float32 else 2.0**-8
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=1e-6)


# ---- advance ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.3, 0.5, 0.95, 0.999])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grad_dtype", FLOATS)
def test_momentum_is_an_average(
    kernels: Operations, grad_dtype: torch.dtype, out_dtype: torch.dtype, nesterov: bool, momentum: float
) -> None:
    for numel in SIZES:
        buffer, grad, out = randn(numel, 0), randn(numel, 1, grad_dtype), torch.full((numel,), torch.nan).to(out_dtype)
        expected = momentum * buffer.double() + (1 - momentum) * grad.double()
        ahead = momentum * expected + (1 - momentum) * grad.double() if nesterov else expected
        place, kept = buffer.data_ptr(), grad.clone()
        kernels.advance(buffer, grad, out, momentum, nesterov, Workspace())
        assert_equals(buffer, expected)
        assert_equals(out, ahead)
        assert buffer.data_ptr() == place and grad.equal(kept)


def test_momentum_of_a_constant_gradient_converges_to_it(kernels: Operations) -> None:
    """A sum would grow to grad / (1 - momentum)."""
    buffer, grad, out = torch.zeros(6), randn(6, 0), torch.empty(6)
    for step in range(1, 201):
        kernels.advance(buffer, grad, out, 0.9, False, Workspace())
        assert_equals(buffer, (1 - 0.9**step) * grad.double())


# ---- advance_rounded --------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad_dtype", FLOATS)
def test_a_step_is_computed_in_fp32_and_kept_rounded(kernels: Operations, grad_dtype: torch.dtype) -> None:
    """Over several chunks, from an element in the middle; the look-ahead is that of the unrounded momentum."""
    numel = 2 * reference.CPU_CHUNK + 1000
    start, grad, out = randn(numel, 0), randn(numel, 1, grad_dtype), torch.empty(numel)
    whole = start.bfloat16()
    momentum = whole.float().lerp(grad.float(), 0.05)
    for nesterov, expected in ((True, torch.lerp(grad.float(), momentum, 0.95)), (False, momentum)):
        buffer = whole.clone()
        kernels.advance_rounded(buffer, grad, out, 0.95, nesterov, key_of("w", 3), 0, Workspace())
        assert out.equal(expected)
        assert ((buffer.float() - momentum).abs() <= ULP * momentum.abs()).all()
        assert (buffer != momentum.bfloat16()).float().mean() > 0.1, "some go to the farther neighbour"
        part = whole[1001:].clone()
        kernels.advance_rounded(part, grad[1001:], out[1001:], 0.95, nesterov, key_of("w", 3), 1001, Workspace())
        assert part.equal(buffer[1001:]), "where chunks begin changes nothing"


def test_a_copy_is_rounded_with_the_same_random_numbers(kernels: Operations) -> None:
    numel = 2 * reference.CPU_CHUNK + 1000
    source, key = randn(numel, 0), key_of("w", 3)
    bits, spare = torch.empty(2, numel, dtype=torch.int32)
    expected, target = torch.empty(2, numel, dtype=torch.bfloat16)
    round_(expected, source.clone(), noise(bits, spare, key, 7), spare)
    kernels.copy_rounded(target, source.clone(), key, 7, Workspace())
    assert target.equal(expected)
    kernels.copy_rounded(target[:-1001], source[1001:].clone(), key, 1008, Workspace())
    assert target[:-1001].equal(expected[1001:]), "where chunks begin changes nothing"


def test_the_workspace_of_rounding_is_bounded() -> None:
    work = Workspace()
    for numel in (3 * reference.CPU_CHUNK, 10 * reference.CPU_CHUNK):
        grad = torch.ones(numel)
        reference.advance_rounded(grad.bfloat16(), grad, torch.empty(numel), 0.9, True, (1, 2), 0, work)
        assert work.nbytes() == 16 * reference.CPU_CHUNK


# ---- apply_ -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("weight_decay", "cautious"), [(0.0, False), (0.1, False), (0.1, True), (0.0, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_apply(kernels: Operations, weight_decay: float, cautious: bool, dtype: torch.dtype) -> None:
    for numel in SIZES:
        param, update = randn(numel, 0), randn(numel, 1, dtype)
        decays = param.double() * update.double() >= 0 if cautious else torch.ones(numel)
        expected = param.double() * (1 - 0.02 * weight_decay * decays) - 0.02 * 1.7 * update.double()
        before = param.data_ptr()
        kernels.apply_(param, update, 0.02, 1.7, weight_decay, cautious, Workspace())
        assert param.data_ptr() == before
        assert_equals(param, expected)


@pytest.mark.parametrize("scale", [0.2, 1.0, 50.0])
def test_decay_is_by_the_unscaled_rate(kernels: Operations, scale: float) -> None:
    param = randn(35, 0)
    expected = param.double() * (1 - 0.5 * 0.1)
    kernels.apply_(param, torch.zeros(35), 0.5, scale, 0.1, False, Workspace())
    assert_equals(param, expected)


def test_decay_comes_before_the_update(kernels: Operations) -> None:
    param = torch.ones(1)
    kernels.apply_(param, torch.ones(1), 0.5, 1.0, 1.0, False, Workspace())
    assert param.item() == 0.0, "the update itself does not decay"


def test_cautious_decay_of_zeros_and_of_what_would_underflow(kernels: Operations) -> None:
    """An update of zero opposes nothing; 1e-30 times -1e-30 is zero in fp32, and still of two signs."""
    param, update = torch.tensor([2.0, -2.0, 0.0, 1e-30, 2.0]), torch.tensor([0.0, -0.0, 1.0, -1e-30, torch.nan])
    kernels.apply_(param, update, 0.5, 1.0, 1.0, True, Workspace())
    assert param[:4].tolist() == pytest.approx([1.0, -1.0, -0.5, 1.5e-30], rel=1e-6) and param[4].isnan()


def test_cautious_decay_takes_a_chunk_at_a_time() -> None:
    work, numel = Workspace(), 2 * reference.CPU_CHUNK + 1000
    param, update = randn(numel, 0), randn(numel, 1)
    expected = param * torch.where(param * update >= 0, 0.95, 1.0) - 0.5 * update
    reference.apply_(param, update, 0.5, 1.0, 0.1, True, work)
    torch.testing.assert_close(param, expected)
    assert work.nbytes() == 5 * reference.CPU_CHUNK


def test_a_zero_rate_changes_nothing(kernels: Operations) -> None:
    param = randn(35, 0)
    kept = param.clone()
    kernels.apply_(param, randn(35, 1), 0.0, 1.7, 0.1, False, Workspace())
    assert torch.equal(param, kept)


# ---- every operation --------------------------------------------------------------------------------------


def operands(numel: int) -> dict[str, Tensor]:
    given = {name: randn(numel, seed) for seed, name in enumerate(("buffer", "grad", "param"))}
    return given | {"rounded": given["buffer"].bfloat16(), "out": torch.zeros(numel, dtype=torch.bfloat16)}


def step(kernels: Operations, given: dict[str, Tensor], start: int = 0) -> None:
    """One step of each elementwise operation; the element of index 0 in ``given`` has index ``start``."""
    work: Any = Workspace()
    buffer, grad, param, rounded, out = given.values()
    kernels.advance(buffer, grad, out, 0.95, True, work)
    kernels.apply_(param, out, 0.1, 0.7, 0.1, False, work)
    kernels.advance_rounded(rounded, grad, out, 0.95, True, key_of("w", 7), start, work)
    kernels.apply_(param, out, 0.1, 0.7, 0.0, False, work)
    kernels.apply_(param, out, 0.1, 0.7, 0.3, True, work)


def assert_twins(kernels: Operations, given: dict[str, Tensor]) -> None:
    """Every tensor of ``given`` after a step has the bits that PyTorch gives it."""
    expected = {name: tensor.clone() for name, tensor in given.items()}
    step(kernels, given)
    step(reference.OPERATIONS, expected)
    for name, tensor in expected.items():
        assert tensor.equal(given[name]), name


def test_the_bits_are_those_of_the_twin(kernels: Operations) -> None:
    """Rounded to nearest, at random, and once at the end of a product and a sum: on every CPU with such products."""
    for numel in (*SIZES, 0):
        assert_twins(kernels, operands(numel))


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, 3.4e38, 1e-40, -1e-45, -0.0])
def test_extreme_values(kernels: Operations, value: float) -> None:
    given = operands(70)
    for tensor in given.values():
        tensor[5::7] = torch.tensor(value).to(tensor.dtype)
    expected = {name: tensor.clone() for name, tensor in given.items()}
    step(kernels, given)
    step(reference.OPERATIONS, expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(given[name], tensor, rtol=0, atol=0, equal_nan=True, msg=name)


def test_what_cpp_is_not_made_for_falls_to_the_twin() -> None:
    """Strides, dtypes, and shapes that do not match, which the twin may refuse."""
    if native.unavailable():
        pytest.skip("no C++ compiler")
    module = MuonBuilder().load()
    wide, narrow = randn(64, 0), randn(64, 1, torch.bfloat16)
    for grad, out in ((wide[::2], wide[32:]), (wide[:32].double(), wide[32:]), (wide[:31], wide[32:])):
        kept = wide.clone()
        assert not module.advance(wide[:32], grad, out, 0.9, True)
        assert wide.equal(kept)
    assert not module.advance(narrow, wide, wide, 0.9, True)
    assert not module.advance_rounded(wide, wide, wide, 0.9, True, (1, 2), 0)
    assert not module.apply_(narrow, narrow, 0.1, 1.0, 0.1, False)
    for x in (wide.view(2, 4, 8).mT, wide.double().view(2, 4, 8)):
        assert not module.normalize(x, x, 1.0)
    for name in ("buffer", "param"):
        given = operands(64)
        given[name] = torch.cat([given[name], given[name]])[::2]
        assert_twins(native.operations(), given)


def test_autograd_sees_the_update(kernels: Operations) -> None:
    weight = randn(40, 0).requires_grad_()
    loss = weight.square().sum()
    with torch.no_grad():
        kernels.apply_(weight.view(-1)[:40], randn(40, 1), 0.1, 1.0, 0.1, False, Workspace())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_neither_slices_nor_threads_change_a_bit(kernels: Operations, two_threads: None) -> None:
    whole, sliced = operands(100_003), operands(100_003)
    step(kernels, whole)
    torch.set_num_threads(1)
    for start, stop in zip(SLICES, (*SLICES[1:], None), strict=True):
        step(kernels, {name: tensor[start:stop] for name, tensor in sliced.items()}, start)
    for name, tensor in whole.items():
        assert tensor.equal(sliced[name]), name


# ---- normalize --------------------------------------------------------------------------------------------

MAGNITUDES = [(torch.float32, 10.0**e) for e in (-44, -42, -38, -30, -19, -3, 0, 8, 19, 25, 38)]
MAGNITUDES += [(torch.bfloat16, 10.0**e) for e in (-38, -30, -19, -3, 0, 8, 19, 25, 38)]


def matrices(shape: tuple[int, ...], magnitude: float, dtype: torch.dtype) -> Tensor:
    uniform = torch.rand(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (magnitude * (6 * uniform - 3)).to(dtype)


@pytest.mark.parametrize(("dtype", "magnitude"), MAGNITUDES)
@pytest.mark.parametrize("shape", [(1, 6, 10), (3, 33, 7), (2, 130, 300)])
def test_norm_is_one_whatever_the_magnitude(
    kernels: Operations, shape: tuple[int, ...], dtype: torch.dtype, magnitude: float
) -> None:
    x = matrices(shape, magnitude, dtype)
    stored = x.double()
    assert kernels.normalize(x, x) is x
    expected = stored / torch.linalg.matrix_norm(stored, keepdim=True)
    tolerance = 4e-6 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(x.double(), expected, rtol=tolerance, atol=1e-30)
    if kernels.name != "torch":
        torch.testing.assert_close(
            x, reference.normalize(stored.to(dtype), stored.to(dtype)), rtol=tolerance, atol=1e-30
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_normalized_on_one_and_two_threads(kernels: Operations, dtype: torch.dtype, two_threads: None) -> None:
    x = matrices((5, 301, 257), 1e-3, dtype)
    many, single = x.clone(), x.clone()
    kernels.normalize(many, many)
    torch.set_num_threads(1)
    alone = torch.cat([kernels.normalize(matrix.clone()[None], torch.empty_like(matrix[None])) for matrix in x])
    assert torch.equal(kernels.normalize(single, single), alone), "whatever the batch"
    if kernels.name != "torch":
        assert torch.equal(many, single), "PyTorch's own sums depend on the threads"


def test_zero_subnormal_and_non_finite_matrices(kernels: Operations) -> None:
    x = torch.zeros(6, 4, 6)
    x[1, 2, 3], x[2, 1, 1], x[2, 0, 0] = -1e-44, 3e38, 1e-44
    x[3, 0, 1], x[4, 3, 5], x[5, 3, 5] = torch.nan, torch.inf, 1.2345
    kernels.normalize(x, x)
    assert not x[0].any()
    assert x[1, 2, 3] == -1.0 and x[2, 1, 1] == 1.0 and x[2, 0, 0] == 0.0 and x[5, 3, 5] == 1.0
    assert not x[3].isfinite().all() and not x[4].isfinite().all()


@pytest.mark.parametrize("norm", [1.0, 16.0])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_normalized_into_another_dtype(
    kernels: Operations, dtype: torch.dtype, out_dtype: torch.dtype, norm: float
) -> None:
    """Rounded once, and only by the dtype of the result; a norm that is a power of two rounds nothing."""
    x = matrices((3, 33, 47), 1e-9, dtype)
    stored, out = x.double(), torch.full((3, 33, 47), torch.nan, dtype=out_dtype)
    assert kernels.normalize(x.clone(), out, norm) is out
    expected = norm * stored / torch.linalg.matrix_norm(stored, keepdim=True)
    torch.testing.assert_close(out.double(), expected, rtol=0.51 * torch.finfo(out_dtype).eps + 2e-6, atol=1e-6)
    if out_dtype != torch.float16:
        assert torch.equal(kernels.normalize(x.clone(), torch.empty_like(out), 1.0) * norm, out)
