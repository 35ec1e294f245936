# SPDX-License-Identifier: Apache-2.0
"""Which method of Newton-Schulz a matrix gets where ``ns_method`` is ``auto``.

The rule is data that travels with the package: ``choice.json``, which ``python -m benchmarks choose --write``
measures anew. What it says of a model's shapes is pinned in the parameter groups, key ``ns_methods``, and saved with them in
every checkpoint: a resumed run keeps its methods whatever a newer rule says.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed.muon.errors import RuleError
from deepspeed.muon.math.newton_schulz import METHODS

#: The rule that is shipped, by kind, see :func:`kind_of`.
FILE = Path(__file__).with_name("choice.json")
KINDS = ("cpu bf16", "cpu fp32", "cuda bf16", "cuda fp32")


@dataclass(frozen=True)
class Rule:
    """From which aspect ratio on ``gram`` is taken.

    ``bands``: the smaller dimension from which a band goes, ascending from 1, and its least aspect ratio of ``gram``;
    ``None``: never. ``basis``: what it was measured on, and when.
    """

    bands: tuple[tuple[int, float | None], ...]
    basis: str

    def method(self, rows: int, cols: int) -> str:
        """``standard`` or ``gram``, for a matrix and its transpose alike."""
        small, large = sorted((rows, cols))
        aspect = next((aspect for size, aspect in reversed(self.bands) if size <= small), None)
        return "gram" if aspect is not None and large >= aspect * small else "standard"


def kind_of(device_type: str, itemsize: int) -> str:
    """What a rule is for: ``cpu``, or ``cuda`` for every accelerator, and the dtype of Newton-Schulz by its bytes."""
    return f"{'cpu' if device_type == 'cpu' else 'cuda'} {'bf16' if itemsize == 2 else 'fp32'}"


@functools.cache
def shipped() -> dict[str, Rule]:
    """The rule of each kind.

    Raises:
        RuleError: the file is not as :func:`parse` wants it.
    """
    try:
        return parse(json.loads(FILE.read_text()))
    except (OSError, ValueError) as error:
        message = f"{FILE.name}: {error}; install deepspeed-muon again, or run python -m benchmarks choose --write"
        raise RuleError(message) from None


def parse(data: Any) -> dict[str, Rule]:
    """The rules that a file holds: ``{kind: {"basis": text, "bands": [[size, aspect or null], ...]}}``.

    Raises:
        ValueError: naming the kind and what is expected there.
    """
    if not isinstance(data, dict) or set(data) != set(KINDS):
        raise ValueError(f"expected one rule for each of {', '.join(KINDS)}")
    return {kind: _rule(kind, entry) for kind, entry in data.items()}


def _rule(kind: str, entry: Any) -> Rule:
    try:
        bands = tuple((size, aspect) for size, aspect in entry["bands"])
        sizes = [size for size, _ in bands]
        if sizes[0] == 1 and sizes == sorted(set(sizes)) and all(a is None or a >= 1 for _, a in bands):
            return Rule(bands, str(entry["basis"]))
    except (KeyError, IndexError, TypeError, ValueError):
        pass
    raise ValueError(f"{kind}: expected a basis, and bands [smaller dimension, least aspect ratio or null] from 1 on")


def shape_key(rows: int, cols: int) -> str:
    """How a shape and its transpose are named in ``ns_methods``."""
    return "x".join(map(str, sorted((rows, cols))))


def pins(shapes: Iterable[tuple[int, int]], kind: str) -> dict[str, str]:
    """What the shipped rule says of these shapes, by :func:`shape_key`, the small ones first."""
    rule = shipped()[kind]
    return {shape_key(*shape): rule.method(*shape) for shape in sorted(shapes)}


def choose_method(rows: int, cols: int, ns_method: str, kind: str, pinned: Mapping[str, str] | None = None) -> str:
    """The method for one shape: the user's; where that is ``auto`` the pinned one, else by the shipped rule."""
    if ns_method != "auto":
        return ns_method
    return (pinned or {}).get(shape_key(rows, cols)) or shipped()[kind].method(rows, cols)


def unknown_methods(pinned: Any) -> list[str]:
    """What of a saved ``ns_methods`` this version cannot follow, in words."""
    if not isinstance(pinned, Mapping):
        return [repr(pinned)]
    return [f"{method!r} for {shape}" for shape, method in pinned.items() if method not in METHODS]
