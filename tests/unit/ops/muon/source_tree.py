# SPDX-License-Identifier: Apache-2.0
"""The sources of the project, read and not run: what they import and mention, and how long they are."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[4]
PACKAGE = ROOT / "deepspeed" / "muon"
SHIM = ROOT / "deepspeed_muon.py"
PREFIX = "deepspeed.muon"

MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").rstrip("."): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
TESTS = sorted(Path(__file__).parent.glob("*.py"))
SOURCES = [path for folder in ("deepspeed", "benchmarks", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imported(nodes: Iterator[ast.AST]) -> Iterator[str]:
    """Dotted names of what import statements bring in; `from a import b` gives a.b."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not used"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def dotted(node: ast.AST) -> str:
    """The text of `a.b.c`, empty for anything else."""
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return node.id if isinstance(node, ast.Name) else ""


def docstrings(module: ast.Module) -> set[int]:
    """Ids of the nodes that are docstrings."""
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    bodies = [node.body for node in ast.walk(module) if isinstance(node, holders)]
    return {id(body[0].value) for body in bodies if body and isinstance(body[0], ast.Expr)}


def mentions(module: ast.Module) -> set[str]:
    """Everything that code can reach a module by: imports, attributes, and strings that are no docstrings."""
    names = {*imported(ast.walk(module)), *(dotted(node) for node in ast.walk(module))}
    texts = docstrings(module)
    for node in ast.walk(module):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            names.update(re.findall(r"\w+(?:\.\w+)+", node.value))
    return names


def uses(module: ast.Module, *prefixes: str) -> set[str]:
    return {name for name in mentions(module) for prefix in prefixes if f"{name}.".startswith(f"{prefix}.")}


def internal_imports(module: ast.Module) -> set[str]:
    """Modules of the package that this one imports, by the names of MODULES."""
    found = set()
    for name in imported(ast.walk(module)):
        if f"{name}.".startswith(f"{PREFIX}."):
            path = name.removeprefix(PREFIX).lstrip(".")
            found.add(path if path in MODULES else path.rpartition(".")[0])
    return found


def external_imports(module: ast.Module) -> set[str]:
    names = {name for name in imported(ast.walk(module)) if not f"{name}.".startswith(f"{PREFIX}.")}
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"__future__"}


def module_level(module: ast.Module) -> Iterator[ast.AST]:
    """Nodes that run on import: all but the insides of functions."""
    pending: list[ast.AST] = [module]
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            pending.extend(ast.iter_child_nodes(node))


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """(place and name, lines from `def` to the end) of every function."""
    for node in ast.walk(tree(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", node.end_lineno - node.lineno + 1


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())
