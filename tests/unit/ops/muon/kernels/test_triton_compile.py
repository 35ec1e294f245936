# SPDX-License-Identifier: Apache-2.0
"""Triton's kernels compile for NVIDIA's and AMD's GPUs on any machine: registers, spills, instructions."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="triton is not installed")
from deepspeed.muon.kernels import triton_elementwise as elementwise  # noqa: E402

HOPPER = ("cuda", 90, 32)
AMD = {"gfx90a": 64, "gfx942": 64, "gfx1100": 32}
"""Threads of a wave of an MI200, an MI300 and a Radeon."""
UNKNOWN = {"first_key", "second_key"}
"""Numbers that kernels are not specialized on."""
BLOCK = {"BLOCK": elementwise.BLOCK}
ONE_RUN = BLOCK | {"tiles_ptr": None, "ALIGNED": False}
NUMBERS = {
    **dict.fromkeys(("numel", "parts", "first_key", "second_key"), "i32"),
    **dict.fromkeys(("beta", "rate", "keep", "step", "scale"), "fp32"),
    **{"exponent_ptr": "*i32", "sum_ptr": "*fp32", "norm_ptr": "*fp32"},
}
"""Types of what is not of a dtype of its own."""


@pytest.fixture(autouse=True)
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Triton's own compiler; what it compiles is kept for this test alone."""
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    if not all((folder / name).exists() for name in ("ptxas", "cuobjdump")):
        pytest.skip("Triton's ptxas is missing")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    yield


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any], **options: Any) -> tuple[Any, Any, str]:
    """A kernel for Hopper as production has it: itself, its registers and bytes of stack, and its code."""
    found = build(kernel, types, constants, HOPPER, **options)
    report, code = (dump(found.asm["cubin"], option) for option in ("-res-usage", "-sass"))
    return found, {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", report)}, code


def build(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    target: tuple[str, Any, int],
    **options: Any,
) -> Any:
    """For pointers and sizes that are multiples of 16."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name) or NUMBERS[name] for name in names}
    aligned = [n for n, kind in signature.items() if kind not in ("constexpr", "fp32") and n not in UNKNOWN]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget(*target), options=options | elementwise.OPTIONS)


def dump(cubin: bytes, option: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    file = Path(triton.knobs.cache.dir) / "kernel.cubin"
    file.write_bytes(cubin)
    done = subprocess.run([str(tool), option, str(file)], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


ELEMENTWISE: list[tuple[str, dict[str, str], dict[str, Any]]] = [
    *(
        ("advance_kernel", {"buffer_ptr": kept, "grad_ptr": grad, "out_ptr": out}, {"NESTEROV": nesterov} | ONE_RUN)
        for kept in ("*fp32", "*bf16")
        for grad, out, nesterov in (("*fp32", "*bf16", True), ("*bf16", "*fp32", False), ("*fp16", "*fp16", True))
    ),
    (
        "advance_codes_kernel",
        {"codes_ptr": "*i8", "absmax_ptr": "*fp32", "grad_ptr": "*bf16", "out_ptr": "*bf16"},
        {"NESTEROV": True, "ROWS": 16},
    ),
    ("apply_kernel", {"param_ptr": "*fp32", "update_ptr": "*bf16"}, ONE_RUN | {"CAUTIOUS": False}),
    ("apply_kernel", {"param_ptr": "*fp32", "update_ptr": "*bf16"}, ONE_RUN | {"CAUTIOUS": True}),
    ("apply_kernel", {"param_ptr": "*bf16", "update_ptr": "*fp16"}, ONE_RUN | {"CAUTIOUS": False}),
    *(("sum_kernel", {"x_ptr": kind}, {"BLOCK": elementwise.SUM_BLOCK}) for kind in ("*bf16", "*fp32")),
    ("norm_kernel", {}, {"BLOCK": 1024}),
    *(
        ("divide_kernel", {"x_ptr": kind, "out_ptr": out}, BLOCK)
        for kind, out in (("*bf16", "*bf16"), ("*fp32", "*fp32"), ("*bf16", "*fp32"), ("*bf16", "*fp16"))
    ),
]


RUNS: list[tuple[str, dict[str, str], dict[str, Any]]] = [
    (name, types | {"tiles_ptr": "*i64"}, {choice: value, "ALIGNED": aligned} | BLOCK)
    for aligned in (True, False)
    for name, types, choice, value in (
        ("advance_kernel", {"buffer_ptr": "*fp32", "grad_ptr": "*fp32", "out_ptr": "*bf16"}, "NESTEROV", True),
        ("advance_kernel", {"buffer_ptr": "*fp32", "grad_ptr": "*bf16", "out_ptr": "*fp32"}, "NESTEROV", False),
        ("apply_kernel", {"param_ptr": "*fp32", "update_ptr": "*bf16"}, "CAUTIOUS", False),
        ("apply_kernel", {"param_ptr": "*fp32", "update_ptr": "*bf16"}, "CAUTIOUS", True),
    )
]
QUICK = [ELEMENTWISE[1], ELEMENTWISE[6], ELEMENTWISE[8], RUNS[0], RUNS[5]]


@pytest.mark.parametrize(
    ("name", "types", "constants"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.full) for case in (*ELEMENTWISE, *RUNS)],
    ids=str,
)
def test_passes_over_elements(name: str, types: dict[str, str], constants: dict[str, Any]) -> None:
    """Sixteen bytes at a time where runs are aligned, and nothing spilled."""
    _, used, code = compiled(getattr(elementwise, name), types, constants)
    assert used["STACK"] == 0 and used["REG"] <= 128
    is_wide = "tiles_ptr" not in types or constants["ALIGNED"]
    if name != "norm_kernel":
        assert bool(re.search(r"LDG\S*\.128", code)) == is_wide
        assert not is_wide or not re.search(r"LDG\S*\.(U16|U8)", code)


@pytest.mark.full
@pytest.mark.parametrize("arch", AMD)
def test_elementwise_on_amd(arch: str) -> None:
    """Every kernel compiles; an element is loaded and stored together with its neighbours."""
    for name, types, constants in {case[0]: case for case in reversed(ELEMENTWISE)}.values():
        code = build(getattr(elementwise, name), types, constants, ("hip", arch, AMD[arch])).asm["amdgcn"]
        assert name == "norm_kernel" or re.search(r"global_load_(dwordx[24]|b(64|128))", code)
