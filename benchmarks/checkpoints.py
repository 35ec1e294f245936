# SPDX-License-Identifier: Apache-2.0
"""Seconds of saves and loads beside AdamW's, and beside what the disk needs for the same bytes."""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import ranks, report
from benchmarks.rates import summary

OPTIMIZERS = ("Muon", "AdamW")
MIB = 2**20


def saves(
    world: int = 2,
    width: int = 2048,
    layers: int = 8,
    rounds: int = 5,
    stage: int = 2,
    place: str = "",
) -> str:
    """Seconds of a save and a load, in turn: Muon, AdamW, and `dd conv=fsync` of as many bytes, a process per rank.

    DeepSpeed's save with AdamW does not wait for the disk, so a round begins with a sync of the whole disk.

    Args:
        world: ranks
        width: of the square matrices
        layers: matrices
        rounds: of each
        stage: of ZeRO
        place: the folder on the disk; a temporary one
    """
    with tempfile.TemporaryDirectory(dir=place or None) as folder:
        setting = {"width": width, "layers": layers, "rounds": rounds, "stage": stage, "folder": folder}
        found = ranks.run(rank, setting, world=world)[0]
    rows = [
        {"of": what, "what": kind, "MB": found["bytes"][what] / 1e6, **summary(times)}
        for what, by in found["seconds"].items()
        for kind, times in by.items()
    ]
    return report.table(rows)


def rank(width: int, layers: int, rounds: int, stage: int, folder: str) -> dict[str, Any]:
    """Seconds and bytes by what is saved."""
    import torch.distributed as dist

    import deepspeed

    with ranks.joined():
        engines = {}
        for name in OPTIMIZERS:
            torch.manual_seed(0)
            net = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
            config = {
                "train_micro_batch_size_per_gpu": 1,
                "zero_optimization": {"stage": stage},
                "optimizer": {"type": name, "params": {"lr": 1e-3}},
                "steps_per_print": 10**9,
            }
            engines[name], *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
            engines[name].backward(engines[name](torch.randn(1, width)).square().mean())
            engines[name].step()
        seconds: dict[str, dict[str, list[float]]] = {}
        sizes: dict[str, int] = {}

        def timed(what: str, kind: str, act: Callable[[], Any]) -> None:
            if dist.get_rank() == 0:
                os.sync()
            dist.barrier()
            start = time.perf_counter()
            act()
            dist.barrier()
            seconds.setdefault(what, {}).setdefault(kind, []).append(time.perf_counter() - start)

        for number in range(rounds):
            for name, engine in engines.items():
                there, tag = f"{folder}/{name}", str(number)
                timed(name, "save", lambda engine=engine, there=there, tag=tag: engine.save_checkpoint(there, tag=tag))
                timed(name, "load", lambda engine=engine, there=there, tag=tag: engine.load_checkpoint(there, tag=tag))
                files = list(Path(there, tag).rglob("*.pt"))
                sizes[name] = sum(file.stat().st_size for file in files)
            sizes["dd"] = sizes["Muon"]
            count = round(sizes["dd"] / dist.get_world_size() / MIB)
            target = Path(folder, f"dd{dist.get_rank()}")
            command = ["dd", "if=/dev/zero", f"of={target}", "bs=1M", f"count={count}", "conv=fsync", "status=none"]
            timed("dd", "save", lambda command=command: subprocess.run(command, check=True))
            target.unlink()
            if dist.get_rank() == 0:
                for name in engines:
                    shutil.rmtree(f"{folder}/{name}/{number}")
            dist.barrier()
        return {"seconds": seconds, "bytes": sizes}
