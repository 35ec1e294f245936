# SPDX-License-Identifier: Apache-2.0
"""What checkpoint folders hold, and whether two of them hold the same."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from deepspeed.muon import CheckpointError, ImportStateError
from deepspeed.muon.zero.checkpoint import manifest


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


def remove_manifests(folder: Path) -> None:
    """Make the checkpoints below a folder those that stock DeepSpeed would have saved."""
    for file in folder.rglob("muon_save*.json"):
        file.unlink()


def optimizer_states(folder: Path, ranks: int) -> list[Any]:
    """Return the fp32 weights and the optimizer state in a checkpoint, one entry per rank."""
    files = sorted(folder.glob("*/*optim_states.pt"))
    assert len(files) == ranks
    return [torch.load(file, weights_only=False)["optimizer_state_dict"] for file in files]


def same(left: Any, right: Any) -> bool:
    """Return whether two nested containers hold bitwise equal values."""
    if torch.is_tensor(left):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right or (hasattr(left, "__dict__") and same(vars(left), vars(right)))


def verify_save(folder: Path, world: int) -> None:
    """Assert that every file of a save is intact and listed by exactly one rank, and that it has no other files."""
    header = manifest.read_header(folder)
    assert header is not None
    listed: list[str] = []
    for rank in range(world):
        assert manifest.damages(folder, header["save_id"], rank) == []
        listed += json.loads((folder / manifest.manifest_name(rank)).read_text())["files"]
    assert sorted(listed) == sorted(file.name for file in folder.glob("*states.pt"))
    for name in listed:
        torch.load(folder / name, weights_only=False)
    assert list(folder.glob("*tmp")) == []
