# SPDX-License-Identifier: Apache-2.0
"""An accelerator without hardware, on which a missing wait gives wrong results: the device ``late``.

- The host cannot touch its memory: reading it at a tensor's address ends the process.
- An operation is queued on a stream and computed later, by torch's CPU kernels, so with the bits of a CPU.
- Freed memory serves the next request on its stream at once, and is first overwritten with NaN on that stream.
- Copies from and to pinned memory are queued, too, if they are ``non_blocking``; then the host reads old values.
- Collectives are queued on a stream of their process group. It waits for the stream on which they were called.
- It has no generator, and within :func:`poor` neither float64 nor ``frexp``.

:func:`paces` says when streams run: at random, at once, or only when the host waits for them. A stream that is at once
or held makes a race that depends on luck certain. The device serves one thread that trains, and a process that has
begun to use it cannot fork.
"""

import ctypes
import itertools
import sys
import traceback
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from torch import Tensor
from torch import distributed as dist
from torch.utils import _pytree as pytree

from helpers.extensions import LATE_FOLDER, LATE_SOURCE

NAME = "late"
RANDOM, HELD, PROMPT = range(3)
"""When a stream runs: after pauses of random length; when the host waits for it; at once."""
PAUSE = 300
"""Microseconds that a stream pauses at most before a task."""


def build() -> Path:
    """Compile the device if it is not, which takes some 15 seconds, and return the library."""
    found = LATE_FOLDER / "late_device.so"
    if not found.exists():
        from torch.utils import cpp_extension

        LATE_FOLDER.mkdir(parents=True, exist_ok=True)
        options: dict[str, Any] = {"is_python_module": False, "build_directory": str(LATE_FOLDER)}
        cpp_extension.load("late_device", [str(LATE_SOURCE)], extra_cflags=["-O1"], **options)
    return found


@cache
def use() -> Any:
    """Give this process the device, and DeepSpeed its accelerator; return torch's namespace of its operations."""
    from deepspeed.accelerator import set_accelerator

    path = str(build())
    torch.ops.load_library(path)
    torch.utils.rename_privateuse1_backend(NAME)
    torch.ops.late.start()
    module: Any = types.ModuleType(f"torch.{NAME}")
    module.is_available, module.device_count, module.current_device = lambda: True, lambda: 1, lambda: 0
    module._is_in_bad_fork, module.manual_seed_all = lambda: False, lambda seed: None
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    torch._register_device_module(NAME, module)
    dist.Backend.register_backend(NAME, make_group, devices=["cpu", NAME])
    set_accelerator(LateAccelerator())
    return torch.ops.late


def make_stream(*_: Any, **__: Any) -> torch.Stream:
    return torch.Stream(device=NAME)


def make_event(*_: Any, **__: Any) -> torch.Event:
    return torch.Event(NAME)


def current_stream() -> torch.Stream:
    return torch.accelerator.current_stream()


@contextmanager
def on(stream: torch.Stream) -> Iterator[None]:
    outer = current_stream()
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(outer)


def streams() -> range:
    """Return the numbers of the streams that there are; 0 is the one on which a thread begins."""
    return range(torch.ops.late.count_streams())


def set_paces(default: int, own: dict[int, int] | None = None) -> None:
    """Set when streams run: those in ``own``, by number, and all others, of now and to come."""
    torch.accelerator.synchronize()
    torch.ops.late.set_default_pace(default, PAUSE)
    torch.ops.late.set_pace(list(streams()), default)
    for number, pace in (own or {}).items():
        torch.ops.late.set_pace([number], pace)


@contextmanager
def paces(default: int, own: dict[int, int] | None = None) -> Iterator[None]:
    """Set when streams run within the context, see :func:`set_paces`; all they were given ends with it."""
    set_paces(default, own)
    try:
        yield
    finally:
        set_paces(RANDOM)


@contextmanager
def poor() -> Iterator[None]:
    """Take float64 and ``frexp`` from the device within the context."""
    torch.ops.late.set_poor(True)
    try:
        yield
    finally:
        torch.ops.late.set_poor(False)


class LateAccelerator(CPU_Accelerator):
    def __init__(self) -> None:
        super().__init__()
        self._name = self._communication_backend_name = NAME

    def is_synchronized_device(self) -> bool:
        return False

    def device_name(self, device_index: int | None = None) -> str:
        return NAME if device_index is None else f"{NAME}:{device_index}"

    def device(self, device_index: int | None = None) -> AbstractContextManager[None]:
        return nullcontext()

    def current_device(self) -> int:
        return 0

    def current_device_name(self) -> str:
        return f"{NAME}:0"

    def device_count(self) -> int:
        return 1

    def synchronize(self, device_index: int | None = None) -> None:
        torch.accelerator.synchronize()

    @property
    def Stream(self) -> Callable[..., torch.Stream]:
        return make_stream

    @property
    def Event(self) -> Callable[..., torch.Event]:
        return make_event

    def stream(self, stream: torch.Stream | None) -> AbstractContextManager[None]:
        return nullcontext() if stream is None else on(stream)

    def current_stream(self, device_index: int | None = None) -> torch.Stream:
        return current_stream()

    def default_stream(self, device_index: int | None = None) -> torch.Stream:
        return torch.Stream(stream_id=0, device_index=0, device_type=int(current_stream().device_type))

    def memory_allocated(self, device_index: int | None = None) -> int:
        return torch.ops.late.memory()[0]

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return torch.ops.late.memory()[1]

    def is_fp16_supported(self) -> bool:
        return True

    def pin_memory(self, tensor: Tensor, make_copy: bool = True, match_shape: bool = True, **_: Any) -> Tensor:
        return tensor.pin_memory()

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.is_pinned()

    def _torch_pin_memory(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory()

    def _torch_empty_pinned(self, tensor: Tensor, shape: Any) -> Tensor:
        return torch.empty(shape, dtype=tensor.dtype).pin_memory()

    def on_accelerator(self, tensor: Tensor) -> bool:
        return tensor.device.type == NAME

    def _tensor_of(dtype: torch.dtype) -> Any:  # type: ignore[misc]
        return property(lambda self: lambda *values: torch.tensor(*values, dtype=dtype, device=NAME))

    ByteTensor, IntTensor, LongTensor = map(_tensor_of, (torch.uint8, torch.int32, torch.int64))
    FloatTensor, HalfTensor, BFloat16Tensor = map(_tensor_of, (torch.float32, torch.float16, torch.bfloat16))


# ---- collectives --------------------------------------------------------------------------------------------------

_calls: dict[int, Callable[[], None]] = {}
_numbers = itertools.count()
_failures: list[Exception] = []


@ctypes.CFUNCTYPE(None, ctypes.c_int64)
def _run_call(number: int) -> None:
    try:
        _calls.pop(number)()
    except Exception as error:
        _failures.append(error)


@cache
def _library() -> Any:
    return ctypes.CDLL(str(build()))


def call_on(stream: torch.Stream, function: Callable[[], None]) -> None:
    _calls[number := next(_numbers)] = function
    _library().late_call(ctypes.c_int64(stream.stream_id), _run_call, ctypes.c_int64(number))


class Handle(dist.Work):
    """A collective's handle. To wait for it makes the current stream wait, not the host."""

    def __init__(self, stream: torch.Stream) -> None:
        super().__init__()
        self._event = stream.record_event()

    def wait(self, timeout: Any = None) -> bool:
        if _failures:
            raise _failures.pop()
        current_stream().wait_event(self._event)
        return True

    def is_completed(self) -> bool:
        return self._event.query()


class Group(dist.ProcessGroup):
    """A process group whose collectives run on a stream of its own, by gloo. On tensors of the host they run at once.

    ``near``, ``far``: gloo's groups for the host and the device, as their calls may come in any order.
    """

    def __init__(self, near: dist.ProcessGroup, far: dist.ProcessGroup, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._near, self._far, self.stream = near, far, make_stream()

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        tensors = [x for x in pytree.tree_leaves(args) if isinstance(x, Tensor) and x.device.type == NAME]
        if not tensors:
            return _BY_TORCH[name](self._near, *args, **kwargs)
        self.stream.wait_stream(current_stream())
        for tensor in tensors:
            tensor.record_stream(self.stream)
        on_host = pytree.tree_map_only(Tensor, torch.ops.late.host_alias, args)
        call_on(self.stream, lambda: _BY_TORCH[name](self._far, *on_host, **kwargs).wait())
        return Handle(self.stream)

    def _get_backend(self, device: torch.device) -> Any:
        return self._near._get_backend(torch.device("cpu"))

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), torch.device(NAME)]


_COLLECTIVES = (
    *("broadcast", "allreduce", "allreduce_coalesced", "reduce", "allgather", "_allgather_base", "all_gather_single"),
    *("allgather_coalesced", "allgather_into_tensor_coalesced", "all_gather_single_coalesced", "gather", "scatter"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_tensor_coalesced"),
    *("alltoall", "alltoall_base", "all_to_all_single", "send", "recv", "barrier", "monitored_barrier"),
)
#: Taken now: the recorder of collectives, which replaces them for a job, must not see those of the streams' threads.
_BY_TORCH = {name: getattr(dist.ProcessGroup, name) for name in _COLLECTIVES if hasattr(dist.ProcessGroup, name)}


def _collective(name: str) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: self._call(name, *args, **kwargs)


for _name in _BY_TORCH:
    setattr(Group, _name, _collective(_name))


def make_group(store: Any, rank: int, size: int, timeout: Any) -> Group:
    def gloo(name: str) -> dist.ProcessGroup:
        prefixed = dist.PrefixStore(name, store)
        group = dist.ProcessGroup(prefixed, rank, size)
        backend = dist.ProcessGroupGloo(prefixed, rank, size, timeout=timeout)
        backend._set_sequence_number_for_group()
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        return group

    return Group(gloo("near"), gloo("far"), rank, size)


def taken_log() -> list[tuple[int, str]]:
    """Return (stream, name) of the tasks that have run since the last call, in order; ``late.set_logging(True)``."""
    pairs: Iterable[list[str]] = (line.split(" ", 1) for line in torch.ops.late.log())
    return [(int(stream), name) for stream, name in pairs]


@contextmanager
def watched_waits() -> Iterator[list[list[traceback.FrameSummary]]]:
    """Yield a list that gets, for each wait of the host for the device, the stack of the wait, the last call first.

    The host waits where it reads an element, copies to or from memory that is not pinned, needs values to know a shape,
    or synchronizes.
    """
    found: list[list[traceback.FrameSummary]] = []

    @ctypes.CFUNCTYPE(None)
    def see() -> None:
        frames = traceback.walk_stack(sys._getframe(1))
        found.append(traceback.StackSummary.extract(frames, lookup_lines=False))

    _library().late_watch(see)
    try:
        yield found
    finally:
        _library().late_watch(None)
