# SPDX-License-Identifier: Apache-2.0
"""What a process holds: tensors, hooks, threads, files."""

import atexit
import gc
import logging
import threading
from collections import Counter
from pathlib import Path

import torch
from torch import nn


def holdings(models: list[nn.Module]) -> dict[str, int]:
    """Return counts of what this process holds; hooks are those of all modules and of `models`."""
    for _ in range(3):
        gc.collect()
    objects = gc.get_objects()
    tensors = [one for one in objects if issubclass(type(one), torch.Tensor)]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    kinds = Counter(type(one).__name__ for one in objects)
    loggers = [one for one in logging.Logger.manager.loggerDict.values() if isinstance(one, logging.Logger)]
    module_wide = [value for name, value in vars(nn.modules.module).items() if name.startswith("_global_")]
    return {
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
    registries = [
        value for module in model.modules() for name, value in vars(module).items() if name.endswith("_hooks")
    ]
    return sum(map(len, registries))
