# SPDX-License-Identifier: Apache-2.0
"""Loads map files of optimizer state, read the model's file once, and keep nothing in a mapped file."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed.muon.math.momentum import Blocks
from deepspeed.muon.patch import replaced
from helpers.distributed import run
from helpers.models import train_engine
from helpers.training import BF16_OPTIMIZER, MOMENTA, fresh_engine

CASES: list[dict[str, Any]] = [
    {"stage": 1},
    {"stage": 2, "dtype": "bf16"},
    {"stage": 2, "offload": True},
    {"stage": 3},
    BF16_OPTIMIZER,
    *({"stage": stage, "optimizer": MOMENTA["int8"]} for stage in (2, 3)),
]


def mapped_file(tensor: Tensor) -> str:
    """Return the name of the checkpoint file that a tensor's memory maps, or nothing."""
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, name = line.split()
        start, end = (int(bound, 16) for bound in span.split("-"))
        if address and start <= address < end:
            return Path(name).name if name.endswith(".pt") else ""
    return ""


def load_each(cases: list[dict[str, Any]], folder: str) -> list[dict[str, Any]]:
    """Return what each load read, which files it rounded an int8 momentum from, and those that state lies in."""
    found = []
    for index, case in enumerate(cases):
        engine = fresh_engine(0, case)
        train_engine(engine, 1)
        engine.save_checkpoint(f"{folder}/{index}")
        read, rounded = [], []

        def load(original: Any, file: Any, *args: Any, read: list = read, **options: Any) -> Any:
            if not options.get("mmap"):
                read.append(Path(file).name)
            return original(file, *args, **options)

        def write(original: Any, *args: Any, rounded: list = rounded) -> None:
            rounded.append(mapped_file(args[-1]))
            original(*args)

        with replaced(torch, load=load), replaced(Blocks, write=write):
            engine.load_checkpoint(f"{folder}/{index}")
        optimizer = engine.basic_optimizer
        tensors = [tensor for partition in optimizer.all_partitions for tensor in partition.tensors]
        tensors += [value for state in optimizer.state.values() for value in state.values()]
        kept = {name for tensor in tensors if (name := mapped_file(tensor))}
        found.append({"read": read, "rounded": rounded, "kept": kept, "tensors": len(tensors)})
        engine.destroy()
    return found


def test_loads_map_and_keep_nothing_mapped(tmp_path: Path) -> None:
    for found in run(load_each, 2, cases=CASES, folder=str(tmp_path)):
        for case, of in zip(CASES, found, strict=True):
            assert len(of["read"]) == 1 and of["read"][0].endswith("model_states.pt"), (case, of)
            assert of["kept"] == set() and of["tensors"] > 4, (case, of)
            assert bool(of["rounded"]) == ("optimizer" in case), case
            assert all(name.endswith("optim_states.pt") for name in of["rounded"]), (case, of)
