# SPDX-License-Identifier: Apache-2.0
"""Rules of the source tree: what each folder may know."""

import ast
import functools
import graphlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from helpers.paths import PACKAGE, ROOT

PREFIX = "deepspeed.muon"
#: Layer (a folder or a module beside the folders) -> the layers right below; what lies below those is below it too.
#: The package itself, "", is on top of all and is imported by none of them.
LAYERS: dict[str, set[str]] = {
    "errors": set(),
    "version": set(),
    "layout": set(),
    "kernels": {"errors", "version"},
    "math": {"kernels"},
    "config": {"layout", "math"},
    "model": {"config"},
    "exchange": {"layout", "math"},
    "monitor": {"exchange"},
    "qk_clip": {"exchange", "model"},
    "step": {"config", "monitor", "saved_state"},
    "describe": {"step"},
    "replicas": {"step"},
    "saved_state": {"exchange"},
    "optimizer": {"describe", "qk_clip", "replicas", "saved_state"},
    "zero": {"optimizer"},
    "cli": {"zero"},
    "": {"cli"},
}
#: What layers may import beside the standard library, the package and DeepSpeed, if it is not torch alone.
LIBRARIES: dict[str, set[str]] = {
    **{name: set() for name in ("errors", "layout", "version")},
    "kernels": {"torch", "triton", "packaging", "psutil"},
    "config": {"pydantic"},
    "zero": {"torch", "packaging", "pydantic", "hjson", "yaml"},  # as DeepSpeed itself, and YAML
    "cli": {"torch", "transformers", "yaml", "hjson", "psutil", "matplotlib"},  # hjson and psutil as DeepSpeed itself
}
GROUP_MAKERS = re.compile(r"^(new_(sub)?groups?\w*|split_group|init_device_mesh|DeviceMesh|_?create_\w*group\w*)$")


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").rstrip(".")


#: The modules of the package by their names below it; "" is the package itself.
TREE = {name_of(path): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}

# ---- what a module mentions -------------------------------------------------------------------------------------


@functools.cache
def imported(module: ast.Module) -> list[str]:
    """Dotted names of what import statements bring in; `from a import b` gives a.b."""
    found = []
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [f"{'.' * node.level}{node.module}.{alias.name}" for alias in node.names]
    return found


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


def below(name: str, *prefixes: str) -> bool:
    return any(f"{name}.".startswith(f"{prefix}.") for prefix in prefixes)


def inside(module: ast.Module) -> set[str]:
    """The modules of the package that one imports."""
    paths = [name.removeprefix(PREFIX).lstrip(".") for name in imported(module) if below(name, PREFIX)]
    return {path if path in TREE else path.rpartition(".")[0] for path in paths}


def layer(name: str) -> str:
    return name.partition(".")[0]


def all_below(name: str) -> set[str]:
    """The layers below one, at any depth."""
    return {name for direct in LAYERS[name] for name in (direct, *all_below(direct))}


# ---- the rules: each gives what breaks it in a module -----------------------------------------------------------


def upward_imports(name: str, module: ast.Module) -> list[str]:
    """Imports of a layer that is not below, and relative ones; a layer that the list lacks is a KeyError."""
    known = {layer(name), *all_below(layer(name))}
    return [other for other in inside(module) if layer(other) not in known] + [
        one for one in imported(module) if one.startswith(".")
    ]


def collectives_elsewhere(name: str, module: ast.Module) -> list[str]:
    """Only `exchange` and `zero` communicate."""
    others = () if layer(name) in ("exchange", "zero") else mentions(module)
    return [one for one in others if below(one, "torch.distributed", "deepspeed.comm")]


def groups_elsewhere(name: str, module: ast.Module) -> list[str]:
    """Only `exchange.consensus` makes process groups, which all ranks of the world must make in one order."""
    others = () if name == "exchange.consensus" else mentions(module)
    return [one for one in others if GROUP_MAKERS.match(one.rpartition(".")[2])]


def deepspeed_elsewhere(name: str, module: ast.Module) -> list[str]:
    """Only `zero` knows DeepSpeed, except for its collectives, its accelerator and the class of builders of ops."""
    allowed = {
        "exchange": ("deepspeed.comm", "deepspeed.accelerator"),
        "kernels.builder": ("deepspeed.ops.op_builder",),
        "kernels.selection": ("deepspeed.accelerator",),
    }
    known = (PREFIX, *allowed.get(name, ()), *allowed.get(layer(name), ()))
    others = [one for one in imported(module) if below(one, "deepspeed") and not below(one, *known)]
    others += [one for one in mentions(module) if below(one, "deepspeed.runtime")]
    return [] if layer(name) == "zero" else others


def other_libraries(name: str, module: ast.Module) -> set[str]:
    tops = {layer(one) for one in imported(module)} - sys.stdlib_module_names - {"deepspeed", ""}
    return tops - LIBRARIES.get(layer(name), {"torch"})


RULES: list[Callable[[str, ast.Module], Iterable[str]]] = [
    upward_imports,
    collectives_elsewhere,
    groups_elsewhere,
    deepspeed_elsewhere,
    other_libraries,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(rule: Callable[[str, ast.Module], Iterable[str]]) -> None:
    assert len(TREE) > 60
    assert [f"{name}: {one}" for name, module in TREE.items() for one in rule(name, module)] == []


def test_no_modules_import_each_other() -> None:
    list(graphlib.TopologicalSorter({name: inside(module) for name, module in TREE.items()}).static_order())


# ---- beside the package -----------------------------------------------------------------------------------------


def test_no_test_imports_another() -> None:
    """What they share is in `helpers`."""
    files = {path.stem: path for path in (ROOT / "tests").rglob("test_*.py")}
    for path in files.values():
        words = {word for name in imported(ast.parse(path.read_text())) for word in name.split(".")}
        assert not words & files.keys(), path
    assert len(files) == len(list((ROOT / "tests").rglob("test_*.py"))), "two files have one name"


@pytest.mark.full
@pytest.mark.parametrize(("what", "limit"), [("step", 12), ("save", 5), ("load", 8), ("initialize", 30)])
def test_a_reader_of_what_an_engine_does_opens_few_files(what: str, limit: int) -> None:
    """The 30th of `initialize` is entered only if the other rank is loading an extension at that moment."""
    command = [sys.executable, str(ROOT / "tools/step_files.py"), what]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, env=os.environ | {"DS_ACCELERATOR": "cpu"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(re.search(r"calls in (\d+) files", done.stdout)[1]) <= limit, done.stdout
