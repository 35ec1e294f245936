# SPDX-License-Identifier: Apache-2.0
"""Follows the Muon half of an engine's step, at ZeRO stage 2 on one rank, and counts the files that it goes through.

python tools/step_files.py
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import deepspeed

PACKAGE = Path(__file__).resolve().parents[1] / "deepspeed" / "muon"
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {
        "type": "Muon",
        "params": {"lr": 1e-3, "ns_dtype": "fp32", "ns_method": "standard", "kernels": "torch"},
    },
    "zero_optimization": {"stage": 2},
}


def main() -> None:
    """Print the calls by file, the number of files and of moves between them."""
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29511",
    }
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    engine = deepspeed.initialize(model=model, config=CONFIG, model_parameters=model.parameters())[0]
    for _ in range(2):  # the first step sets up what later ones reuse
        engine.backward(engine(torch.ones(2, 32, device=engine.device)).sum())
        files: list[str] = []

        def follow(frame: FrameType, event: str, _: Any, files: list[str] = files) -> None:
            path = Path(frame.f_code.co_filename)
            if event == "call" and path.is_relative_to(PACKAGE):
                files.append(str(path.relative_to(PACKAGE)))

        optimizer = engine.basic_optimizer
        step = type(optimizer)._muon_step

        def followed(group: dict[str, Any], follow: Any = follow) -> Any:
            sys.setprofile(follow)
            try:
                return step(optimizer, group)
            finally:
                sys.setprofile(None)

        optimizer._muon_step = followed
        engine.step()
    for file, calls in Counter(files).most_common():
        print(f"{calls:5} {file}")
    moves = sum(a != b for a, b in pairwise(files))
    print(f"{len(files)} calls in {len(set(files))} files, {moves} moves between them")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
