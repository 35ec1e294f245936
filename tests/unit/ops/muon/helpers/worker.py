# SPDX-License-Identifier: Apache-2.0
"""The processes of distributed.py: a rank, which runs the functions it is sent, and the server that forks ranks.

Both live until the connection to their parent ends, a rank also until the process that started it is gone.
"""

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
from contextlib import contextmanager, nullcontext
from copy import copy
from datetime import timedelta
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

from packaging.version import Version

PRELOADED = (
    "deepspeed.muon",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # loads torch's compiler
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.stage_1_and_2",
    "deepspeed.runtime.bf16_optimizer",
    "deepspeed.runtime.pipe.engine",
    "deepspeed.runtime.swap_tensor.pipelined_optimizer_swapper",
    "helpers.engine_state",
    "hypothesis",
    "transformers",
)
"""What every rank would import by itself."""
#: Modules of DeepSpeed that store the process groups of an engine's parallelism, or that an engine used autocast: the
#: next engine of the process, of any optimizer, would divide its gradients by a scale of 2 ** 16 that its loss lacks.
KEEPERS = (
    "deepspeed.utils.groups",
    "deepspeed.module_inject.layers",
    "deepspeed.runtime.activation_checkpointing.checkpointing",
    "deepspeed.runtime.sequence_parallel.parallel_state_sp",
    "deepspeed.runtime.torch_autocast",
)

# ---- a rank -----------------------------------------------------------------------------------------------------


def _die_with(parent: int) -> None:
    """Watch `parent`; when it is gone, end the process group of this rank, which includes its compilers."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


def join(collective_timeout: float) -> None:
    """Initialise torch.distributed through DeepSpeed, for training in float32, bfloat16 and float16."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils import logger
    from torch.distributed import distributed_c10d

    import deepspeed

    logger.setLevel("WARNING")
    if "deepspeed.muon" in sys.modules:  # else the ranks are to run stock DeepSpeed
        # Without the latency of a collective, ranks share the work of small models too.
        cost = import_module("deepspeed.muon.exchange.plan")
        cost.CPU_CALL = cost.ACCELERATOR_CALL = 0.0
    # torch computes float16 on every CPU; DeepSpeed refuses the CPUs without mkldnn kernels for it.
    get_accelerator().is_fp16_supported = lambda: True
    # The shared-memory op serves inference only and would cost a C++ build.
    # import_module, as the attribute deepspeed.comm.torch is torch itself.
    import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    timeout = timedelta(seconds=collective_timeout)
    # Groups made by new_group take this default and not the timeout of the world group.
    distributed_c10d.default_pg_timeout = timeout
    if backend := os.environ.get("TEST_DEVICE"):
        import_module("helpers.late_device").use()
    # NCCL refuses two ranks on one GPU.
    is_alone_on_gpu = os.environ.get("DS_ACCELERATOR") == "cuda" and os.environ["WORLD_SIZE"] == "1"
    deepspeed.init_distributed(backend or ("nccl" if is_alone_on_gpu else "gloo"), timeout=timeout)
    _mend_gathers()
    # One for all jobs: engines of DeepSpeed's AdamW at stage 3 are never freed, and keep the one they were made with.
    import_module("deepspeed.utils.groups")._clone_world_group()


def _mend_gathers() -> None:
    """Patch DeepSpeed's gathers, which fail on gloo (not on NCCL) with any optimizer: make them block, and avoid views.

    Before 0.19.8 DeepSpeed waits only for the last of several gathers, but on gloo they end in any order. With torch
    2.5, gloo's threads have gradients enabled and may not write to views that were made without.
    """
    import deepspeed.comm as comm
    import torch

    if Version(version("deepspeed")) >= Version("0.19.8") and Version(torch.__version__) >= Version("2.6"):
        return
    gather = comm.all_gather_into_tensor

    def waiting(output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if (handle := gather(output.data, *args, **kwargs)) is not None:
            handle.wait()
        return handle

    comm.all_gather_into_tensor = waiting


def _portable(result: Any) -> Any:
    """Return `result` with every tensor copied to the CPU, without its graph and the rest of its storage."""
    import torch
    from torch.utils import _pytree as pytree

    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu().clone(), result)


@contextmanager
def _nothing_left() -> Iterator[None]:
    """After a job, destroy the process groups that it made, whose threads would keep polling, and undo global changes.

    DeepSpeed forgets its groups. Torch's `linear` is restored, which stage 3 replaces by one that rounds differently.
    """
    from torch.distributed import distributed_c10d
    from torch.nn import functional

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


@contextmanager
def _recorded() -> Iterator[Any]:
    """Record the collectives of a job, unless the ranks run stock DeepSpeed."""
    if "deepspeed.muon" not in sys.modules:
        yield None
        return
    with import_module("helpers.collectives").recorded() as calls:
        yield calls


def _run(message: bytes, cleans: bool) -> bytes:
    """Run a pickled (function, kwargs); return the pickled ("ok", (result, recorded calls)) or ("error", traceback)."""
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)  # a job before may have set more
    try:
        fn, kwargs = pickle.loads(message)
        with _nothing_left() if cleans else nullcontext(), _recorded() as recorder:
            return pickle.dumps(("ok", (_portable(fn(**kwargs)), recorder)))
    except BaseException:
        return pickle.dumps(("error", traceback.format_exc()))


def serve_jobs(parent: Connection, collective_timeout: float | None) -> None:
    """Be a rank: send "ready", then run jobs, each sent as two messages: sys.path of the parent, (function, kwargs).

    Without `collective_timeout`, the first job must initialize torch.distributed, and it is the last.
    """
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    threading.Thread(target=_die_with, args=(os.getppid(),), daemon=True).start()
    if collective_timeout is not None:
        join(collective_timeout)
    parent.send_bytes(pickle.dumps(("ok", ("ready", None))))
    while True:
        try:
            sys.path[:] = pickle.loads(parent.recv_bytes())
            message = parent.recv_bytes()
        except EOFError:
            if collective_timeout is not None:
                from torch.distributed import destroy_process_group

                destroy_process_group()
            return
        reply = _run(message, cleans=collective_timeout is not None)
        gc.collect()  # of what the job made: the rest is frozen
        sys.stdout.flush()
        parent.send_bytes(reply)


# ---- the server -------------------------------------------------------------------------------------------------


def serve_forks(parent: Connection) -> None:
    """Be the server: send "ready", then answer requests: for a new rank its process id, or a rank's exit code."""
    for name in PRELOADED:
        import_module(name)
    import_module("deepspeed.muon.kernels.cpp_kernels").unavailable()  # loads the C++ operations, if they can be built
    for thread in threading.enumerate():  # a fork would lose them
        if thread is not threading.current_thread():
            thread.join(timeout=10)
            assert not thread.is_alive(), thread
    gc.collect()
    gc.freeze()  # a collection in a rank would copy every page that it inherits
    parent.send("ready")
    while True:
        try:
            request, argument = parent.recv()
        except EOFError:
            return
        parent.send(_fork(parent, **argument) if request == "fork" else _exit_code(argument))


def _fork(server: Connection, log: str, env: dict[str, str], collective_timeout: float | None) -> int:
    """Fork a rank that writes to `log` and return its process id; its end of the connection follows the request."""
    handle = recv_handle(server)
    if pid := os.fork():
        os.close(handle)
        return pid
    try:
        os.setsid()
        server.close()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.clear()
        os.environ.update(env)
        serve_jobs(Connection(handle), collective_timeout)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _exit_code(pid: int) -> int | None:
    """Return the exit code of a rank, or None if it is still running after 5 seconds."""
    deadline = time.monotonic() + 5.0
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            return None
        time.sleep(0.005)


if __name__ == "__main__":
    connection, waits = Connection(int(sys.argv[2])), float(sys.argv[3]) if len(sys.argv) > 3 else None
    serve_forks(connection) if sys.argv[1] == "server" else serve_jobs(connection, waits)
