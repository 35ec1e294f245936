# SPDX-License-Identifier: Apache-2.0
"""Triton's kernels compile for an H100 or H200 on any machine: registers, spills, and the instructions that count.

The elementwise ones for AMD's GPUs, too.
"""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="triton is not installed")
from deepspeed.muon.kernels import triton_elementwise as elementwise  # noqa: E402
from deepspeed.muon.kernels import triton_products as products  # noqa: E402
from deepspeed.muon.kernels import triton_table  # noqa: E402

HOPPER = ("cuda", 90, 32)
AMD = {"gfx90a": 64, "gfx942": 64, "gfx1100": 32}
"""Threads of a wave of an MI200, an MI300 and a Radeon."""
SHARED_BYTES = 227 * 1024
"""Shared memory that a block may have on Hopper."""
UNKNOWN = {"skipped", "first_key", "second_key", "matrices"}
"""Numbers that kernels are not specialized on."""
BLOCK = {"BLOCK": elementwise.BLOCK}
ONE_RUN = BLOCK | {"tiles_ptr": None, "ALIGNED": False}
NUMBERS = {
    **dict.fromkeys(("numel", "parts", "size", "depth", "across", "along", "matrices"), "i32"),
    **dict.fromkeys(("rows", "cols", "pitch", "skipped", "first_key", "second_key"), "i32"),
    **dict.fromkeys(("momentum", "rate", "keep", "step", "scale", "alpha", "beta", "shift"), "fp32"),
    **{"exponent_ptr": "*i32", "sum_ptr": "*fp32", "norm_ptr": "*fp32"},
    **{f"{name}diagonal_ptr": "*fp32" for name in ("", "a_", "b_", "out_")},
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
    multiple: int = triton_table.MULTIPLE,
    **options: Any,
) -> Any:
    """For pointers and sizes that are multiples of a number; Triton knows of 16 only."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name) or NUMBERS[name] for name in names}
    aligned = [n for n, kind in signature.items() if kind not in ("constexpr", "fp32") and n not in UNKNOWN]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned if multiple % 16 == 0}
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
BF16 = dict.fromkeys(("a_ptr", "b_ptr", "x_ptr", "out_ptr"), "*bf16")
PASSES: list[tuple[str, dict[str, str], dict[str, Any]]] = [
    ("complete_kernel", BF16, {"BLOCK": products.PASS_BLOCK}),
    ("scale_kernel", BF16, {"BLOCK": products.PASS_BLOCK, "TALL": True}),
    ("scale_kernel", BF16, {"BLOCK": products.PASS_BLOCK, "TALL": False}),
]
QUICK = [ELEMENTWISE[1], ELEMENTWISE[6], ELEMENTWISE[8], RUNS[0], RUNS[5], PASSES[0]]


@pytest.mark.parametrize(
    ("name", "types", "constants"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.full) for case in (*ELEMENTWISE, *RUNS, *PASSES)],
    ids=str,
)
def test_passes_over_elements(name: str, types: dict[str, str], constants: dict[str, Any]) -> None:
    """Sixteen bytes at a time where runs are aligned, and nothing spilled."""
    _, used, code = compiled(getattr(elementwise, name, None) or getattr(products, name), types, constants)
    assert used["STACK"] == 0 and used["REG"] <= 128
    is_wide = "tiles_ptr" not in types or constants["ALIGNED"]
    if name != "norm_kernel":
        assert bool(re.search(r"LDG\S*\.128", code)) == is_wide
        assert not is_wide or not re.search(r"LDG\S*\.(U16|U8)", code)
    assert types is not BF16 or re.search(r"STG\S*\.128", code)


@pytest.mark.parametrize(
    "arch", [arch if arch == "gfx942" else pytest.param(arch, marks=pytest.mark.full) for arch in AMD]
)
def test_elementwise_on_amd(arch: str) -> None:
    """Every kernel compiles; an element is loaded and stored together with its neighbours."""
    for name, types, constants in {case[0]: case for case in reversed(ELEMENTWISE)}.values():
        code = build(getattr(elementwise, name), types, constants, ("hip", arch, AMD[arch])).asm["amdgcn"]
        assert name == "norm_kernel" or re.search(r"global_load_(dwordx[24]|b(64|128))", code)


SYMMETRIC = {
    f"{kind}-{index}-{'tall' if tall else 'wide'}-{'product' if product else 'square'}": (kind, config, tall, product)
    for index, config in enumerate(products.CONFIGS)
    for kind, tall, product in (
        ("bf16", False, True),
        ("bf16", True, False),
        ("bf16", False, False),
        ("fp16", False, True),
    )
}
QUICK_ONES = ("bf16-2-wide-product", "bf16-0-tall-square")


@pytest.mark.parametrize(
    ("kind", "config", "tall", "product"),
    [
        pytest.param(*case, id=name, marks=() if name in QUICK_ONES else pytest.mark.full)
        for name, case in SYMMETRIC.items()
    ],
)
def test_symmetric_products(kind: str, config: Any, tall: bool, product: bool, record_property: Any) -> None:
    """On Hopper's matrix units, fed by asynchronous copies of sixteen bytes, within a block's memory.

    Beside the widest tiles of a product its diagonals' part does not fit the registers: spilled once, after the sum.
    """
    constants = {"DIAGONALS": product, "GROUP": products.GROUP, **config.kwargs, "across" if tall else "along": 1}
    types = dict.fromkeys(("a_ptr", "b_ptr", "out_ptr"), f"*{kind}")
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    found, used, code = compiled(products.symmetric_kernel, types, constants, **options)
    assert used["STACK"] <= (384 if product else 0) and found.metadata.shared <= SHARED_BYTES
    sums = [i for i, line in enumerate(code.splitlines()) if "HGMMA" in line]
    assert sums and not re.search(r"STL|LDL", "\n".join(code.splitlines()[sums[0] : sums[-1]]))
    assert re.search(r"LDGSTS\S*\.128", code) and re.search(r"STG\S*\.128", code)
    memory = f"{used['STACK']} bytes spilled, {found.metadata.shared} bytes of shared memory"
    record_property("summary", f"{config}: {used['REG']} registers, {memory}")


@pytest.mark.full
def test_without_alignment_nothing_is_copied_asynchronously() -> None:
    """Hence the table gives products of such matrices to a library."""
    config = products.CONFIGS[-1]
    constants = {"DIAGONALS": False, "GROUP": products.GROUP, **config.kwargs, "along": 1}
    types = dict.fromkeys(("a_ptr", "b_ptr", "out_ptr"), "*bf16")
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    codes = [
        build(products.symmetric_kernel, types, constants, HOPPER, multiple, **options).asm["ptx"]
        for multiple in (8, triton_table.MULTIPLE)
    ]
    copies = [len(re.findall(r"cp\.async\.cg\S* \[.*0x10", code)) for code in codes]
    assert copies[0] == 0 < copies[1]
