# SPDX-License-Identifier: Apache-2.0
"""The method of Newton-Schulz for each shape where ``ns_method`` is ``auto``.

The rule is data shipped with the package, ``choice.json``, which ``python -m benchmarks choose --write`` measures.
Its choices for a model's shapes are pinned in the parameter groups, key ``ns_methods``, and saved with them in every
checkpoint, so a resumed run keeps its methods even if a newer rule differs.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed.muon.errors import RuleError
from deepspeed.muon.math.newton_schulz import METHODS

#: The shipped rule, by kind; see :func:`kind_of`.
FILE = Path(__file__).with_name("choice.json")
KINDS = ("cpu bf16", "cpu fp32", "cuda bf16", "cuda fp32")


@dataclass(frozen=True)
class Rule:
    """The aspect ratio from which ``gram`` is chosen.

    ``bands``: the smaller dimension at which a band starts, ascending from 1, and the least aspect ratio for ``gram``
    in it; ``None`` means never. ``basis``: where and when it was measured.
    """

    bands: tuple[tuple[int, float | None], ...]
    basis: str

    def method(self, rows: int, cols: int) -> str:
        """``standard`` or ``gram``; the same for a matrix and its transpose."""
        small, large = sorted((rows, cols))
        aspect = next((aspect for size, aspect in reversed(self.bands) if size <= small), None)
        return "gram" if aspect is not None and large >= aspect * small else "standard"


def kind_of(device_type: str, itemsize: int) -> str:
    """The key of a rule: ``cpu``, or ``cuda`` for any accelerator, with the dtype of Newton-Schulz by its bytes."""
    return f"{'cpu' if device_type == 'cpu' else 'cuda'} {'bf16' if itemsize == 2 else 'fp32'}"


@functools.cache
def shipped() -> dict[str, Rule]:
    """The rules by kind.

    Raises:
        RuleError: :func:`parse` refuses the file.
    """
    try:
        return parse(json.loads(FILE.read_text()))
    except (OSError, ValueError) as error:
        message = f"{FILE.name}: {error}; install deepspeed-muon again, or run python -m benchmarks choose --write"
        raise RuleError(message) from None


def parse(data: Any) -> dict[str, Rule]:
    """The rules in a file: ``{kind: {"basis": text, "bands": [[size, aspect or null], ...]}}``.

    Raises:
        ValueError: names the kind and what is expected there.
    """
    if not isinstance(data, dict) or set(data) != set(KINDS):
        raise ValueError(f"expected one rule for each of {', '.join(KINDS)}")
    return {kind: _rule(kind, entry) for kind, entry in data.items()}


def _rule(kind: str, entry: Any) -> Rule:
    with suppress(KeyError, IndexError, TypeError, ValueError):
        bands = tuple((size, aspect) for size, aspect in entry["bands"])
        sizes = [size for size, _ in bands]
        if sizes[0] == 1 and sizes == sorted(set(sizes)) and all(a is None or a >= 1 for _, a in bands):
            return Rule(bands, str(entry["basis"]))
    raise ValueError(f"{kind}: expected a basis, and bands [smaller dimension, least aspect ratio or null] from 1 on")


def shape_key(rows: int, cols: int) -> str:
    """The name of a shape, and of its transpose, in ``ns_methods``."""
    return "x".join(map(str, sorted((rows, cols))))


def pins(shapes: Iterable[tuple[int, int]], kind: str) -> dict[str, str]:
    """The shipped rule's methods for these shapes, by :func:`shape_key`, small shapes first."""
    rule = shipped()[kind]
    return {shape_key(*shape): rule.method(*shape) for shape in sorted(shapes)}


def choose_method(rows: int, cols: int, ns_method: str, kind: str, pinned: Mapping[str, str] | None = None) -> str:
    """The method for one shape: the user's; for ``auto`` the pinned one, else the shipped rule's."""
    if ns_method != "auto":
        return ns_method
    return (pinned or {}).get(shape_key(rows, cols)) or shipped()[kind].method(rows, cols)


def unknown_methods(pinned: Any) -> list[str]:
    """The entries of a saved ``ns_methods`` that this version does not know, as texts."""
    if not isinstance(pinned, Mapping):
        return [repr(pinned)]
    return [f"{method!r} for {shape}" for shape, method in pinned.items() if method not in METHODS]
