# SPDX-License-Identifier: Apache-2.0
"""What checkpoint folders hold, and whether two of them hold the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from deepspeed.muon import CheckpointError, ImportStateError


def error_of(act: Callable[..., Any], *args: Any, **options: Any) -> str:
    """Return the text of the error about a checkpoint that ``act(*args, **options)`` raises; "" if it raises none."""
    try:
        act(*args, **options)
    except (CheckpointError, ImportStateError) as error:
        return str(error)
    return ""


def tree(folder: Path) -> dict[str, bytes | None]:
    """Return the files below a folder with their contents, and its folders with ``None``."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def optimizer_states(folder: Path, ranks: int) -> list[Any]:
    """Return the fp32 weights and the optimizer state in a checkpoint, one entry per rank."""
    files = sorted(folder.glob("*/*optim_states.pt"))
    assert len(files) == ranks
    return [torch.load(file, weights_only=False)["optimizer_state_dict"] for file in files]


def same(left: Any, right: Any) -> bool:
    if torch.is_tensor(left):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right or (hasattr(left, "__dict__") and same(vars(left), vars(right)))


def verify_save(folder: Path) -> None:
    """Assert that every file of a save can be read, and that none is a temporary one."""
    files = list(folder.glob("*states.pt"))
    assert files and list(folder.rglob("*tmp")) == []
    for file in files:
        torch.load(file, weights_only=False)
