# SPDX-License-Identifier: Apache-2.0
"""What engines leave behind in a process that builds and drops one after the other, as a sweep or a notebook does."""

import atexit
import gc
import logging
import os
import threading
from collections import Counter
from pathlib import Path

import torch
from torch import nn

from benchmarks import ranks, report

OPTIMIZERS = ("Muon", "AdamW")
ENDS = ("destroy", "del")


def engines(world: int = 1, stages: tuple[int, ...] = (1, 3), count: int = 50, width: int = 256) -> str:
    """What `count` more engines add to a process that has dropped two: Muon and AdamW, with `destroy()` or without.

    Args:
        world: ranks
        stages: of ZeRO
        count: engines
        width: of the matrices
    """
    rows = []
    for stage in stages:
        for end in ENDS:
            for name in OPTIMIZERS:
                setting = {"name": name, "stage": stage, "count": count, "width": width, "end": end}
                before, after = ranks.run(rank, setting, world=world)[0]
                grown = {key: after[key] - before[key] for key in after}
                rows.append({"stage": stage, "end": end, "optimizer": name, **grown})
    return report.table(rows)


def rank(name: str, stage: int, count: int, width: int, end: str) -> list[dict[str, int]]:
    """What the process holds after two engines, and after `count` more."""
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": name, "params": {"lr": 1e-3} | ({"torch_adam": True} if name == "AdamW" else {})},
        "steps_per_print": 10**9,
    }
    found = []
    with ranks.joined():
        for number in range(count + 2):
            model = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
            engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
            for _ in range(2):
                engine.backward(engine(torch.randn(1, width)).square().mean())
                engine.step()
            if end == "destroy":
                engine.destroy()
            del engine
            if number in (1, count + 1):
                found.append(holdings([model]))
    return found


def holdings(models: list[nn.Module]) -> dict[str, int]:
    """Counts of what this process holds; hooks are those of all modules and of `models`."""
    for _ in range(3):
        gc.collect()
    objects = gc.get_objects()
    tensors = [one for one in objects if issubclass(type(one), torch.Tensor)]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    kinds = Counter(type(one).__name__ for one in objects)
    loggers = [one for one in logging.Logger.manager.loggerDict.values() if isinstance(one, logging.Logger)]
    module_wide = [value for name, value in vars(nn.modules.module).items() if name.startswith("_global_")]
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "resident MB": round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6),
        "tensors": len(tensors),
        "tensor MB": round(sum(storages.values()) / 1e6),
        "engines": kinds["DeepSpeedEngine"],
        "optimizers": kinds["MuonWithAuxAdam"] + kinds["AdamW"],
        "global hooks": sum(len(value) for value in module_wide if hasattr(value, "__len__")),
        "hooks": sum(map(hooks, models)),
        "threads": threading.active_count(),
        "tasks": len(list(Path("/proc/self/task").iterdir())),
        "groups": len(torch.distributed.distributed_c10d._world.pg_map),
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "atexit": atexit._ncallbacks(),
        "handlers": sum(len(one.handlers) for one in [logging.getLogger(), *loggers]),
    }


def hooks(model: nn.Module) -> int:
    """How many hooks the modules of a model have."""
    registries = [
        value for module in model.modules() for name, value in vars(module).items() if name.endswith("_hooks")
    ]
    return sum(map(len, registries))
