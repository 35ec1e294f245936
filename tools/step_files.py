# SPDX-License-Identifier: Apache-2.0
"""Follows what an engine does, and counts the files of the package that it goes through.

python tools/step_files.py step|save|load|initialize

On rank 0 of two, at stage 3.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import deepspeed
import deepspeed.muon  # its import is not counted

PACKAGE = Path(__file__).resolve().parents[1] / "deepspeed" / "muon"
PORT = 29511


@contextmanager
def followed(files: list[str]) -> Iterator[None]:
    """Append the file of each call of the package's functions in this context."""

    def follow(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            files.append(str(path.relative_to(PACKAGE)))

    sys.setprofile(follow)
    try:
        yield
    finally:
        sys.setprofile(None)


def initialize(stage: int) -> Any:
    """Return an engine for a small model."""
    params = {"lr": 1e-3, "ns_dtype": "fp32", "ns_method": "standard", "kernels": "torch"}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Muon", "params": params},
        "zero_optimization": {"stage": stage},
    }
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    return deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())[0]


def on_two_ranks(rank: int, what: str, folder: str) -> None:
    """Follow ``what`` on one of two ranks, and print what rank 0 went through."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": PORT}
    os.environ |= {"MASTER_ADDR": "localhost", **{name: str(value) for name, value in places.items()}}
    files: list[str] = []
    if what == "initialize":
        with followed(files):
            initialize(3)
    else:
        engine = initialize(3)
        acts = {
            "step": engine.step,
            "save": lambda: engine.save_checkpoint(folder),
            "load": lambda: engine.load_checkpoint(folder),
        }
        for _ in range(3):  # the first ones set up what later ones reuse
            for name in ("step",) if what == "step" else acts:
                if name == "step":
                    engine.backward(engine(torch.ones(2, 32, device=engine.device)).sum())
                files.clear()
                with followed(files):
                    acts[name]()
                if name == what:
                    break
    if rank == 0:
        report(files)
    torch.distributed.destroy_process_group()


def report(files: list[str]) -> None:
    """Print the calls by file, the number of files and of moves between them."""
    for file, calls in Counter(files).most_common():
        print(f"{calls:5} {file}")
    moves = sum(a != b for a, b in pairwise(files))
    print(f"{len(files)} calls in {len(set(files))} files, {moves} moves between them")


def main() -> None:
    """Follow what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("step", "save", "load", "initialize"))
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(on_two_ranks, (parser.parse_args().what, folder), nprocs=2)


if __name__ == "__main__":
    main()
