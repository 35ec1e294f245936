# SPDX-License-Identifier: Apache-2.0
"""One rank of a pool of distributed.py: runs the functions it is sent until the parent goes away."""

import faulthandler
import gc
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.distributed import distributed_c10d
from torch.nn import functional
from torch.utils import _pytree as pytree


def _die_with(parent: int) -> None:
    """End the process group of this rank, which holds its compilers too, once `parent` is gone."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


def _start(collective_timeout: float) -> None:
    """Initialise torch.distributed through DeepSpeed, for training in float32, bfloat16 and float16."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils import logger

    import deepspeed

    logger.setLevel("WARNING")
    torch.set_num_threads(1)
    # torch computes float16 on every CPU; DeepSpeed refuses the CPUs without mkldnn kernels for it.
    get_accelerator().is_fp16_supported = lambda: True
    # The shared-memory op serves inference only and would cost a C++ build.
    # import_module, as the attribute deepspeed.comm.torch is torch itself.
    import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    timeout = timedelta(seconds=collective_timeout)
    # Groups made by new_group take this default and not the timeout of the world group.
    distributed_c10d.default_pg_timeout = timeout
    deepspeed.init_distributed("gloo", timeout=timeout)
    # One for all jobs: engines at stage 3 are never freed, with any optimizer, and keep the one they were made with.
    import_module("deepspeed.utils.groups")._clone_world_group()


def _portable(result: Any) -> Any:
    """`result` with every tensor copied to the CPU without its graph and the rest of its storage."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu().clone(), result)


#: Modules of DeepSpeed that remember the groups of ranks which an engine's parallelism made.
KEEPERS = (
    "deepspeed.utils.groups",
    "deepspeed.module_inject.layers",
    "deepspeed.runtime.activation_checkpointing.checkpointing",
    "deepspeed.runtime.sequence_parallel.parallel_state_sp",
)


@contextmanager
def _nothing_left() -> Iterator[None]:
    """Ends the process groups that a job made, whose threads would poll from then on; DeepSpeed remembers none.

    At stage 3 DeepSpeed replaces torch's `linear` for good, by one that rounds otherwise in bf16: it is put back.
    """
    linear = functional.linear
    keepers = [vars(import_module(name)) for name in KEEPERS if find_spec(name)]
    before = [{key: copy(value) if isinstance(value, dict) else value for key, value in k.items()} for k in keepers]
    made_before = set(distributed_c10d._world.pg_map)
    try:
        yield
    finally:
        functional.linear = linear
        for keeper, values in zip(keepers, before, strict=True):
            keeper.update(values)
        for group in set(distributed_c10d._world.pg_map) - made_before:
            distributed_c10d.destroy_process_group(group)


def _run(message: bytes) -> bytes:
    """The pickled reply, ("ok", result) or ("error", traceback), to a pickled (function, kwargs)."""
    torch.manual_seed(0)
    try:
        fn, kwargs = pickle.loads(message)
        with _nothing_left():
            return pickle.dumps(("ok", _portable(fn(**kwargs))))
    except BaseException:
        return pickle.dumps(("error", traceback.format_exc()))


def main(fd: int, collective_timeout: float) -> None:
    """Answer "ready", then every pair of messages: sys.path of the parent, (function, kwargs)."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    threading.Thread(target=_die_with, args=(os.getppid(),), daemon=True).start()
    parent = Connection(fd)
    _start(collective_timeout)
    parent.send_bytes(pickle.dumps(("ok", "ready")))
    while True:
        try:
            sys.path[:] = pickle.loads(parent.recv_bytes())
            message = parent.recv_bytes()
        except EOFError:
            return
        reply = _run(message)
        gc.collect()
        sys.stdout.flush()
        parent.send_bytes(reply)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
