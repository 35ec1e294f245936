# SPDX-License-Identifier: Apache-2.0
"""The places where the package waits, and the package without one of them."""

import ast
import re
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

from helpers.paths import PACKAGE

IS_WAIT = re.compile(r"^_?(wait|wait_back|wait_event|wait_stream|record_stream|synchronize)$")


class Wait(NamedTuple):
    """A statement that waits. `number`: its place among all of the same text in the function."""

    module: str
    function: str
    text: str
    number: int

    def __str__(self) -> str:
        return f"{self.module}.{self.function}: {self.text}" + (f" #{self.number}" if self.number else "")


class _Waits(ast.NodeTransformer):
    """Finds the statements that wait; takes the place of one, if it is given, with `pass`."""

    def __init__(self, module: str, without: Wait | None = None) -> None:
        self._module, self._without = module, without
        self._path: list[str] = []
        self.found: list[Wait] = []

    def _visit_scope(self, node: Any) -> Any:
        self._path.append(node.name)
        self.generic_visit(node)
        self._path.pop()
        return node

    visit_ClassDef = visit_FunctionDef = _visit_scope

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        call = node.value
        method = call.func.attr if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) else ""
        if not IS_WAIT.match(method):
            return node
        function, text = ".".join(self._path), ast.unparse(call)
        number = sum(one.function == function and one.text == text for one in self.found)
        self.found.append(wait := Wait(self._module, function, text, number))
        return ast.copy_location(ast.Pass(), node) if wait == self._without else node


@cache
def all_waits() -> tuple[Wait, ...]:
    found: list[Wait] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        finder = _Waits(module)
        finder.visit(ast.parse(path.read_text()))
        found += finder.found
    return tuple(found)


@contextmanager
def without(wait: Wait) -> Iterator[None]:
    """Leave out one wait of the package within the context."""
    module: Any = import_module(f"deepspeed.muon.{wait.module}")
    with open(module.__file__) as source:
        tree = ast.parse(source.read())
    _Waits(wait.module, wait).visit(tree)
    code: Any = compile(ast.fix_missing_locations(tree), module.__file__, "exec")
    function: Any = module
    for name in wait.function.split("."):
        code = next(c for c in code.co_consts if isinstance(c, types.CodeType) and c.co_name == name)
        function = getattr(function, name)
    kept, function.__code__ = function.__code__, code
    try:
        yield
    finally:
        function.__code__ = kept
