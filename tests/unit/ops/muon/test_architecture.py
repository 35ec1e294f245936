# SPDX-License-Identifier: Apache-2.0
"""Rules of the source tree: what each folder may know, docstrings, licences."""

import ast
import functools
import graphlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from helpers.paths import PACKAGE, ROOT

PREFIX = "deepspeed.muon"
SHIM = ROOT / "deepspeed_muon.py"
SOURCES = [path for folder in ("deepspeed", "benchmarks", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]
#: Layer (a folder or a module beside the folders) -> the layers right below; what lies below those is below it too.
#: The package itself, "", is on top of all and is imported by none of them.
LAYERS: dict[str, set[str]] = {
    "errors": set(),
    "log": set(),
    "numerics": set(),
    "seam": set(),
    "version": set(),
    "kernels": {"errors", "log", "numerics", "seam", "version"},
    "math": {"kernels"},
    "matrices": {"config"},
    "config": {"math"},
    "plan": {"matrices"},
    "exchange": {"plan"},
    "param_groups": {"matrices"},
    "scheduler_view": {"errors", "log", "version"},
    "tuning": {"config"},
    "monitor": {"exchange"},
    "step": {"monitor", "tuning"},
    "qk_clip": {"exchange"},
    "replicas": {"step"},
    "saved_state": {"step"},
    "optimizer": {"param_groups", "qk_clip", "replicas", "saved_state", "scheduler_view"},
    "state_import": {"optimizer"},
    "forecast": {"optimizer"},
    "zero": {"forecast", "seam", "state_import"},
    "cli": {"zero"},
    "": {"cli"},
}
#: What layers may import beside the standard library, the package and DeepSpeed, if it is not torch alone.
LIBRARIES: dict[str, set[str]] = {
    **{name: set() for name in ("errors", "log", "seam", "version", "plan")},
    "kernels": {"torch", "triton", "quack", "packaging", "psutil"},
    "config": {"pydantic"},
    "zero": {
        "torch",
        "numpy",
        "packaging",
        "pydantic",
        "hjson",
        "yaml",
    },  # as DeepSpeed itself, and YAML where a user has it
    "monitor": {"torch", "tensorboard"},
    "cli": {"torch", "transformers", "matplotlib", "yaml"},
}
COLLECTIVES = ("torch.distributed", "deepspeed.comm")
#: What of DeepSpeed's `comm` sends nothing between ranks.
LOCAL = {"config", "get_global_rank", "get_rank", "get_world_size", "init_distributed", "is_initialized"}
#: The module and the function that launch collectives through it.
LAUNCH = ("exchange.exchange", "_launch")
GROUP_MAKERS = re.compile(r"^(new_(sub)?groups?\w*|split_group|init_device_mesh|DeviceMesh|_?create_\w*group\w*)$")
#: Modules that may reach one kind of accelerator through torch, and why.
OF_ONE_KIND = {
    "cli.main": "`ds_muon plan --device cuda` names it",
    "cli.report": "the version of NCCL",
    "kernels.quack": "quack runs on NVIDIA's GPUs only",
    "kernels.triton_elementwise": "Triton's tables run on NVIDIA's and AMD's GPUs only",
    "kernels.triton_products": "the same",
    "kernels.triton_table": "the same",
    "numerics": "these settings can be read and written on every machine",
    "tuning": "DeepSpeed's accelerator counts the emulation of bf16",
}
#: Modules that may compute in fp64, and why.
IN_FP64 = {
    "math.rules": "where `has_fp64`",
    "matrices.routing": "dtypes of the user's parameters",
    "exchange.groups": "where `has_fp64`",
    "monitor.step_stats": "on the CPU",
    "zero.checkpoint.safe_load": "NumPy's",
}
KINDS = ("torch.cuda", "torch.mps", "torch.npu", "torch.xpu", "torch.hpu", "torch.backends.cuda", "torch.backends.mps")
RANKS = re.compile(r"(^|_)(rank|ranks|world_size|process_group)$")
Tree = Mapping[str, ast.Module]
"""The modules of the package by their names below it; "" is the package itself."""


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").rstrip(".")


PACKAGE_TREE: Tree = {name_of(path): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}

# ---- what a module mentions -------------------------------------------------------------------------------------


def imported_by(nodes: Iterator[ast.AST]) -> Iterator[str]:
    """Dotted names of what import statements bring in; `from a import b` gives a.b."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module}.{alias.name}" for alias in node.names)


@functools.cache
def imported(module: ast.Module) -> list[str]:
    return list(imported_by(ast.walk(module)))


def dotted(node: ast.AST) -> str:
    """The text of `a.b.c`, empty for anything else."""
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return node.id if isinstance(node, ast.Name) else ""


@functools.cache
def mentions(module: ast.Module) -> set[str]:
    """Everything that code can reach a module by: imports, attributes, and strings that are no docstrings."""
    names = {*imported(module), *(dotted(node) for node in ast.walk(module))}
    texts = {id(node.value) for node in ast.walk(module) if isinstance(node, ast.Expr)}
    for node in ast.walk(module):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            names.update(re.findall(r"\w+(?:\.\w+)+", node.value))
    return names


@functools.cache
def full_names(module: ast.Module) -> dict[ast.AST, str]:
    """The dotted names in a module, with what it has imported under another or a shorter name in full."""
    starts = {}
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            starts |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom):
            starts |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    found = {}
    for node in ast.walk(module):
        start, dot, rest = dotted(node).partition(".")
        if start:
            found[node] = f"{starts.get(start, start)}{dot}{rest}"
    return found


@functools.cache
def calls_of_few(module: ast.Module) -> list[str]:
    """Calls that some accelerator refuses: pinned memory of torch's, a generator of its own, `frexp` and the like."""
    found = []
    for call in (node for node in ast.walk(module) if isinstance(node, ast.Call)):
        method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        is_pinned = (method == "pin_memory" and not call.args) or "pin_memory" in [one.arg for one in call.keywords]
        is_generator = dotted(call.func) == "torch.Generator" and (call.args or call.keywords)
        if is_pinned or is_generator or method in ("frexp", "cuda", "double"):
            found.append(ast.unparse(call))
    return found


def below(name: str, *prefixes: str) -> bool:
    return any(f"{name}.".startswith(f"{prefix}.") for prefix in prefixes)


def inside(module: ast.Module, tree: Tree) -> set[str]:
    """The modules of the package that one imports."""
    paths = [name.removeprefix(PREFIX).lstrip(".") for name in imported(module) if below(name, PREFIX)]
    return {path if path in tree else path.rpartition(".")[0] for path in paths}


def layer(name: str) -> str:
    return name.partition(".")[0]


def all_below(name: str) -> set[str]:
    """The layers below one, at any depth."""
    return {name for direct in LAYERS[name] for name in (direct, *all_below(direct))}


# ---- the rules: each gives what breaks it -----------------------------------------------------------------------


def unknown_layers(tree: Tree) -> list[str]:
    return [name for name in tree if layer(name) not in LAYERS]


def upward_imports(tree: Tree) -> list[str]:
    """Imports of a layer that is not below."""
    pairs = [(name, other) for name, module in tree.items() for other in inside(module, tree)]
    return [f"{a} imports {b}" for a, b in pairs if layer(b) not in {layer(a), *all_below(layer(a))}]


def relative_imports(tree: Tree) -> list[str]:
    return [name for name, module in tree.items() if any(one.startswith(".") for one in imported(module))]


def cycles(tree: Tree) -> list[str]:
    try:
        list(graphlib.TopologicalSorter({name: inside(module, tree) for name, module in tree.items()}).static_order())
    except graphlib.CycleError as error:
        return [" -> ".join(error.args[1])]
    return []


def imports_of_the_package(tree: Tree) -> list[str]:
    return [name for name, module in tree.items() if "" in inside(module, tree)]


def collectives_elsewhere(tree: Tree) -> list[str]:
    """Only `exchange` and `zero` communicate."""
    others = {name: module for name, module in tree.items() if layer(name) not in ("exchange", "zero")}
    return [name for name, module in others.items() if any(below(one, *COLLECTIVES) for one in mentions(module))]


def collectives_of_deepspeed(tree: Tree) -> list[str]:
    """Only the exchange's launch calls DeepSpeed's collectives: its log may end the process in each of them."""
    found = []
    for name, module in tree.items():
        functions = (
            [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)] if name == LAUNCH[0] else []
        )
        launch = {inner for node in functions if node.name == LAUNCH[1] for inner in ast.walk(node)}
        used = {text for node, text in full_names(module).items() if node not in launch}
        names = [one for one in used if below(one, "deepspeed.comm") and one != "deepspeed.comm"]
        found += [f"{name}: {one}" for one in names if one.split(".")[2] not in LOCAL]
    return found


def groups_elsewhere(tree: Tree) -> list[str]:
    """Only `exchange.groups` makes process groups, which all ranks of the world must make in one order."""
    others = {name: module for name, module in tree.items() if name != "exchange.groups"}
    pairs = [(name, one.rpartition(".")[2]) for name, module in others.items() for one in mentions(module)]
    return [f"{name}: {one}" for name, one in pairs if GROUP_MAKERS.match(one)]


def accelerators_of_one_kind(tree: Tree) -> list[str]:
    """What not every accelerator of DeepSpeed's has is reached through it, or by an operation that each has."""
    kinds = [
        f"{name}: {one}"
        for name, module in tree.items()
        if name not in OF_ONE_KIND
        for one in mentions(module)
        if below(one, *KINDS)
    ]
    wide = [
        f"{name}: {one}"
        for name, module in tree.items()
        if name not in IN_FP64
        for one in mentions(module)
        if one.endswith((".float64", ".double"))
    ]
    return kinds + wide + [f"{name}: {one}" for name, module in tree.items() for one in calls_of_few(module)]


def deepspeed_elsewhere(tree: Tree) -> list[str]:
    """Only `zero` knows DeepSpeed, except for its collectives, its accelerator and the class of builders of ops."""
    allowed = {
        "exchange": ("deepspeed.comm", "deepspeed.accelerator"),
        "kernels.builder": ("deepspeed.ops.op_builder",),
    }
    found = []
    for name, module in tree.items():
        known = (PREFIX, *allowed.get(name, ()), *allowed.get(layer(name), ()))
        others = [one for one in imported(module) if below(one, "deepspeed") and not below(one, *known)]
        others += [one for one in mentions(module) if below(one, "deepspeed.runtime")]
        if others and layer(name) != "zero":
            found.append(f"{name} mentions {sorted(set(others))}")
    return found


def other_libraries(tree: Tree) -> list[str]:
    found = []
    for name, module in tree.items():
        tops = {layer(one) for one in imported(module)} - sys.stdlib_module_names - {"deepspeed", ""}
        allowed = set() if name == "matrices.block" else LIBRARIES.get(layer(name), {"torch"})
        found += [f"{name} imports {one}" for one in sorted(tops - allowed)]
    return found


def ranks_in_math(tree: Tree) -> list[str]:
    """`math` has no argument, variable or attribute that is named after ranks."""
    found = []
    for name, module in tree.items():
        nodes = list(ast.walk(module)) if layer(name) == "math" else []
        names = [getattr(node, key, None) for node in nodes for key in ("id", "attr", "arg", "name")]
        found += [f"{name} has {one}" for one in names if isinstance(one, str) and RANKS.search(one)]
    return found


def undocumented(tree: Tree) -> list[str]:
    """Public classes and functions, and methods of public classes, without a docstring; and such modules."""
    found = []
    for name, module in tree.items():
        pending: list[tuple[str, ast.AST]] = [(name, module)]
        found += [] if ast.get_docstring(module) else [name]
        while pending:
            path, holder = pending.pop()
            for node in ast.iter_child_nodes(holder):
                if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.name[0] != "_":
                    found += [] if ast.get_docstring(node) else [f"{path}.{node.name}"]
                    pending += [(f"{path}.{node.name}", node)] if isinstance(node, ast.ClassDef) else []
    return found


RULES: list[Callable[[Tree], list[str]]] = [
    unknown_layers,
    upward_imports,
    relative_imports,
    cycles,
    imports_of_the_package,
    collectives_elsewhere,
    collectives_of_deepspeed,
    groups_elsewhere,
    accelerators_of_one_kind,
    deepspeed_elsewhere,
    other_libraries,
    ranks_in_math,
    undocumented,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(rule: Callable[[Tree], list[str]]) -> None:
    assert len(PACKAGE_TREE) > 60
    assert rule(PACKAGE_TREE) == []


# ---- beside the package -----------------------------------------------------------------------------------------


def test_the_folder_is_laid_beside_deepspeeds_own_files() -> None:
    """An `__init__.py` there would hide the installed DeepSpeed."""
    assert not (ROOT / "deepspeed" / "__init__.py").exists()
    assert (PACKAGE / "__init__.py").exists()


def module_level(module: ast.Module) -> Iterator[ast.AST]:
    """Nodes that run on import: all but the insides of functions."""
    pending: list[ast.AST] = [module]
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            pending.extend(ast.iter_child_nodes(node))


def test_the_hook_imports_neither_torch_nor_deepspeed_on_import() -> None:
    shim = ast.parse(SHIM.read_text())
    names = {layer(name) for name in imported_by(module_level(shim))}
    assert names <= sys.stdlib_module_names
    assert {layer(name) for name in imported(shim)} - names == {"deepspeed"}, "imported when it is called"


def test_what_the_package_exports_is_documented() -> None:
    import deepspeed.muon

    assert sorted(deepspeed.muon.__all__) == list(deepspeed.muon.__all__)
    exported = [getattr(deepspeed.muon, name) for name in deepspeed.muon.__all__]
    assert all(isinstance(thing, str) or thing.__doc__ for thing in exported)


@pytest.mark.parametrize("path", [*SOURCES, SHIM], ids=lambda path: str(path.relative_to(ROOT)))
def test_every_source_has_its_licence_and_leaves_stocks_update_alone(path: Path) -> None:
    text = path.read_text()
    assert text.splitlines()[0] == "# SPDX-License-Identifier: Apache-2.0"
    assert "muon_update" not in text


def test_no_test_imports_another() -> None:
    """What they share is in `helpers`."""
    files = {path.stem: path for path in (ROOT / "tests").rglob("test_*.py")}
    found = {path.name: {layer(n) for n in imported(ast.parse(path.read_text()))} for path in files.values()}
    assert {name: names & files.keys() for name, names in found.items() if names & files.keys()} == {}
    assert len(files) == len(list((ROOT / "tests").rglob("test_*.py"))), "two files have one name"
