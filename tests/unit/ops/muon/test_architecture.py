# SPDX-License-Identifier: Apache-2.0
"""Rules of the source tree: direction of imports, who communicates, lengths of files and functions."""

import ast
import graphlib
import statistics
import sys
from pathlib import Path

import pytest

from import_rules import ALLOWED, EXTERNAL
from source_tree import (
    MODULES,
    PACKAGE,
    ROOT,
    SHIM,
    SOURCES,
    TESTS,
    external_imports,
    functions,
    imported,
    internal_imports,
    lines,
    module_level,
    tree,
    uses,
)

COLLECTIVES = ("torch.distributed", "deepspeed.comm")
CORE = ("orthogonalize", "update", "partition", "owners", "plan", "exchange", "optimizer")

# ---- imports --------------------------------------------------------------------------------------------


def test_the_table_lists_every_module() -> None:
    assert {name for name in MODULES if name.split(".")[0] != "zero"} == ALLOWED.keys()


@pytest.mark.parametrize("name", ALLOWED, ids=lambda name: name or "package")
def test_imports_point_one_way(name: str) -> None:
    """Equality, so that the table allows nothing that is not used."""
    assert internal_imports(tree(MODULES[name])) == ALLOWED[name]


@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith("zero")])
def test_zero_does_not_import_the_package_itself(name: str) -> None:
    assert "" not in internal_imports(tree(MODULES[name]))


def test_imports_form_no_cycle() -> None:
    graph = {name: internal_imports(tree(path)) for name, path in MODULES.items()}
    list(graphlib.TopologicalSorter(graph).static_order())


@pytest.mark.parametrize("name", EXTERNAL)
def test_external_imports(name: str) -> None:
    assert external_imports(tree(MODULES[name])) <= EXTERNAL[name]


@pytest.mark.parametrize("name", [name for name in MODULES if name != "exchange" and not name.startswith("zero")])
def test_only_the_exchange_and_zero_communicate(name: str) -> None:
    assert not uses(tree(MODULES[name]), *COLLECTIVES)


@pytest.mark.parametrize("name", [name for name in MODULES if not name.startswith("zero")])
def test_only_zero_touches_deepspeeds_runtime(name: str) -> None:
    assert not uses(tree(MODULES[name]), "deepspeed.runtime", "deepspeed.accelerator", "deepspeed.utils")


def test_the_tests_of_uses_can_fail() -> None:
    """The rules above look at what these forms give, and the source has users of each kind."""
    for text in (
        "import torch.distributed as dist",
        "from torch import distributed",
        "from torch.distributed import all_reduce",
        "import torch\ndef f():\n    torch.distributed.barrier()",
        "import importlib\nimportlib.import_module('torch.distributed.nn')",
        "from deepspeed import comm",
        "from deepspeed.comm import all_to_all_single",
    ):
        assert uses(ast.parse(text), *COLLECTIVES), text
    assert not uses(
        ast.parse('"""torch.distributed is not used."""\nimport torch\nx.torch.distributions'), *COLLECTIVES
    )
    assert uses(tree(MODULES["exchange"]), *COLLECTIVES)
    assert uses(tree(MODULES["zero.install"]), "deepspeed.runtime")


def test_the_folder_is_laid_beside_deepspeeds_own_files() -> None:
    """An `__init__.py` there would hide the installed DeepSpeed."""
    assert not (ROOT / "deepspeed" / "__init__.py").exists()
    assert (PACKAGE / "__init__.py").exists()


def test_the_hook_imports_neither_torch_nor_deepspeed_on_import() -> None:
    names = {name.partition(".")[0] for name in imported(module_level(tree(SHIM)))}
    assert names <= sys.stdlib_module_names
    inside = {name.partition(".")[0] for name in imported(ast.walk(tree(SHIM)))}
    assert inside - names == {"deepspeed"}, "imported when it is called"


# ---- size, docstrings, names ----------------------------------------------------------------------------


def test_sources_are_found() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in SOURCES} == {"deepspeed", "benchmarks", "examples"}


def test_files_are_short() -> None:
    sizes = {str(path.relative_to(ROOT)): lines(path) for path in (*SOURCES, SHIM)}
    assert {name: size for name, size in sizes.items() if size > 300} == {}
    assert statistics.median(sizes.values()) <= 180
    assert {path.name: lines(path) for path in TESTS if lines(path) > 300} == {}


def test_functions_are_short() -> None:
    assert [found for path in (*SOURCES, SHIM) for found in functions(path) if found[1] > 40] == []


def test_the_core_is_small() -> None:
    assert sum(lines(MODULES[name]) for name in CORE) < 1200


def undocumented(module: ast.Module) -> list[str]:
    """Public classes, functions and methods of public classes without a docstring, and the module if it has none."""
    found = [] if ast.get_docstring(module) else ["module"]
    pending: list[tuple[str, ast.AST]] = [("", module)]
    while pending:
        path, holder = pending.pop()
        for node in ast.iter_child_nodes(holder):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.name[0] != "_":
                if not ast.get_docstring(node):
                    found.append(path + node.name)
                if isinstance(node, ast.ClassDef):
                    pending.append((f"{path}{node.name}.", node))
    return found


@pytest.mark.parametrize("name", MODULES, ids=lambda name: name or "package")
def test_everything_public_has_a_docstring(name: str) -> None:
    assert undocumented(tree(MODULES[name])) == []


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
