# SPDX-License-Identifier: Apache-2.0
"""Byte-level text with a held-out split by file; batches depend on the seed and the step only."""

import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

HELD_OUT_PERCENT = 5
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


@dataclass
class Corpus:
    """Training and held-out text as arrays of bytes."""

    train: np.ndarray
    held_out: np.ndarray


def is_held_out(name: str) -> bool:
    """Whether the file of this relative name belongs to the held-out split."""
    return zlib.crc32(name.encode()) % 100 < HELD_OUT_PERCENT


def standard_library() -> Iterator[tuple[str, Path]]:
    """Yield (relative name, path) of the Python standard library's sources, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in root.rglob("*.py"):
        name = path.relative_to(root)
        if not SKIPPED_FOLDERS.intersection(name.parts):
            yield name.as_posix(), path


def files_under(paths: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Yield (relative name, path) of the given files and of all files in the given folders."""
    for root in map(Path, paths):
        if not root.exists():
            raise FileNotFoundError(root)
        if root.is_file():
            yield root.name, root
        for path in root.rglob("*"):
            if path.is_file():
                yield path.relative_to(root).as_posix(), path


def load_corpus(paths: Sequence[str] = ()) -> Corpus:
    """Read the text files under `paths`, or the Python standard library when there are none."""
    train, held_out = [], []
    for name, path in sorted(files_under(paths) if paths else standard_library()):
        text = path.read_bytes()
        if b"\0" not in text:
            (held_out if is_held_out(name) else train).append(text)
    return Corpus(*(np.frombuffer(b"\n".join(part), dtype=np.uint8) for part in (train, held_out)))


def windows(text: np.ndarray, offsets: np.ndarray, context: int) -> tuple[Tensor, Tensor]:
    """Return (inputs, targets) of `context` bytes for a window of `text` at each offset."""
    tokens = torch.from_numpy(text[offsets[:, None] + np.arange(context + 1)].astype(np.int64))
    return tokens[:, :-1], tokens[:, 1:]


def train_offsets(corpus: Corpus, seed: int, step: int, batch: int, context: int) -> np.ndarray:
    """Window offsets of one global batch: the same for any number of ranks and after a resume."""
    return np.random.default_rng((seed, step)).integers(len(corpus.train) - context, size=batch)


def held_out_offsets(corpus: Corpus, count: int, context: int) -> np.ndarray:
    """Offsets of `count` windows spread evenly over the held-out text."""
    if len(corpus.held_out) <= context:
        raise ValueError("no file of the data falls into the held-out split; give more files")
    return np.linspace(0, len(corpus.held_out) - context - 1, count).astype(np.int64)
