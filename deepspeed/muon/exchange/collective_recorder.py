# SPDX-License-Identifier: Apache-2.0
"""Record the collectives that a process calls, DeepSpeed's and the script's as well as this package's, for the checker.

All Python code that communicates, through DeepSpeed's wrapper or not, calls torch's ``ProcessGroup``.
What C++ code calls by itself, such as the gradient averaging of DistributedDataParallel, is not recorded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import zip_longest
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor

from deepspeed.muon.math.newton_schulz import DTYPES
from deepspeed.muon.plan.checker import conflict
from deepspeed.muon.plan.program import Collective, Group
from deepspeed.muon.seam import replaced

#: Parts of the paths of files that only pass calls on to torch; they are not recorded as the caller.
BETWEEN = (
    "/torch/",
    "/typing_extensions.py",
    "/deepspeed/comm/",
    "/deepspeed/utils/nvtx.py",
    "/muon/seam.py",
    "/muon/exchange/watchdog.py",
)
#: Kinds of the two ends of a message. They are not collectives: the sender may continue before the receiver arrives.
SEND, RECEIVE = "send", "recv"
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class CollectiveRecorder:
    """A log of the collectives and messages that this process starts inside :meth:`recording`.

    :func:`first_mismatch` compares the logs of all ranks. ``calls``: the collectives, and the calls of
    ``torch.distributed.new_group``, in order. ``messages``: the sends and receives, in order.
    """

    def __init__(self) -> None:
        self.calls: list[Collective] = []
        self.messages: list[Collective] = []
        #: Equal calls share one object, so that a long log is small when it is sent to another rank.
        self._known: dict[tuple[Collective, str], Collective] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Return a context that records all calls of ``new_group`` and of the ``ProcessGroup`` methods in READERS."""
        from torch.distributed import device_mesh, distributed_c10d

        kind = distributed_c10d.ProcessGroup
        methods = {name: partial(self._record, read) for name, read in READERS.items() if hasattr(kind, name)}
        makes = {"new_group": self._record_new_group}
        with ExitStack() as stack:
            stack.enter_context(replaced(kind, **methods))
            for module in (torch.distributed, distributed_c10d, device_mesh):
                if hasattr(module, "new_group"):
                    stack.enter_context(replaced(module, **makes))
            yield

    def _record(
        self, read: Callable[..., dict[str, Any]], original: Callable, group: Any, *args: Any, **kw: Any
    ) -> Any:
        facts = read(*args, **kw)
        if facts["kind"] in (SEND, RECEIVE):
            self.messages.append(self._message(group, **facts))
        else:
            self._add(self.calls, Collective(group=_group_of(group), caller=_caller(), **facts))
        return original(group, *args, **kw)

    def _message(self, group: Any, kind: str, peer: int, dtype: str, numel: int) -> Collective:
        of_group = _group_of(group)
        own, other = of_group.ranks[group.rank()], of_group.ranks[peer]
        ends = (own, other) if kind == SEND else (other, own)
        return Collective(kind, Group(ends, of_group.name), dtype, numel, caller=_caller())

    def _record_new_group(self, original: Callable, ranks: Sequence[int] | None = None, *args: Any, **kw: Any) -> Any:
        world = range(torch.distributed.get_world_size())
        # All ranks must call `new_group`; with `use_local_synchronization` only `ranks` must.
        who = tuple(ranks) if ranks is not None and kw.get("use_local_synchronization") else tuple(world)
        chosen = tuple(world) if ranks is None else tuple(ranks)
        made = Collective(f"new_group of {Group(chosen)}", Group(who, "new groups"), caller=_caller())
        self._add(self.calls, made)
        return original(ranks, *args, **kw)

    def _add(self, log: list[Collective], call: Collective) -> None:
        log.append(self._known.setdefault((call, call.caller), call))


def first_mismatch(recorders: Sequence[CollectiveRecorder]) -> str | None:
    """Compare the calls of all ranks. Return a description of the first mismatch on which NCCL could hang, or ``None``.

    ``recorders``: the recorder of rank 0, of rank 1, and so on.
    """
    return conflict([recorder.calls for recorder in recorders]) or _unmatched([r.messages for r in recorders])


def _unmatched(logs: Sequence[Sequence[Collective]]) -> str | None:
    """Return a description of the first send without an equal receive, or the reverse; ``None`` if all match.

    Equal means the same dtype and size. ``logs``: for each rank, its sends and receives in order.
    """
    sent, received = dict[Group, list[Collective]](), dict[Group, list[Collective]]()
    for log in logs:
        for message in log:
            (sent if message.kind == SEND else received).setdefault(message.group, []).append(message)
    for channel in sent | received:
        for one, other in zip_longest(sent.get(channel, ()), received.get(channel, ())):
            if one is None or other is None or (one.dtype, one.numel) != (other.dtype, other.numel):
                source, target = channel.ranks
                return f"rank {source}: {one or 'no send'}; rank {target}: {other or 'no recv'}"
    return None


# ---- what is read from the arguments of ProcessGroup's methods ---------------------------------------------------


def _group_of(group: Any) -> Group:
    try:
        return Group(tuple(torch.distributed.get_process_group_ranks(group)), group.group_name)
    except (KeyError, ValueError, RuntimeError):
        return Group(tuple(range(group.size())), "unknown to torch")


def _caller() -> str:
    """Return the line of code that called the collective, such as ``deepspeed/runtime/engine.py:12 in step``."""
    frame = sys._getframe(2)
    while frame.f_back is not None:
        path = frame.f_code.co_filename
        is_pythons = "/lib/python" in path and "site-packages" not in path
        is_named = not frame.f_code.co_name.startswith("<") or path != frame.f_back.f_code.co_filename
        if path != __file__ and is_named and not is_pythons and not any(part in path for part in BETWEEN):
            break
        frame = frame.f_back
    parts: Sequence[str] = PurePath(frame.f_code.co_filename).parts
    parts = parts[parts.index("deepspeed") :] if "deepspeed" in parts else parts[-2:]
    return f"{'/'.join(parts)}:{frame.f_lineno} in {frame.f_code.co_name}"


def _flat(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else [one for part in tensors for one in _flat(part)]


def _alike(kind: str, place: int, *args: Any, **_: Any) -> dict[str, Any]:
    """Return {field: value} for the :class:`Collective` that records a call with equally many elements from all ranks.

    ``args``: the arguments of the call. ``args[place]`` is what this rank contributes or, in a ``scatter`` or
    ``reduce_scatter``, receives: a tensor or a list of tensors.
    """
    tensors = _flat(args[place])
    root = next((one.rootRank for one in args if hasattr(one, "rootRank")), None)
    return {"kind": kind, "dtype": _dtype(tensors), "numel": sum(t.numel() for t in tensors), "root": root}


def _lists(kind: str, outputs: Any, inputs: Any, *_: Any, **__: Any) -> dict[str, Any]:
    """Return {field: value} for the :class:`Collective` that records a call on lists of tensors (``all_gather``)."""
    received, sent = ([tensor.numel() for tensor in _flat(tensors)] for tensors in (outputs, inputs))
    count = max(len(received), len(sent))  # a list with a single tensor: all ranks have this size
    sizes = {"sent": tuple(sent * (count // len(sent))), "received": tuple(received * (count // len(received)))}
    return {"kind": kind, "dtype": _dtype(_flat(inputs)), **sizes}


def _split(kind: str, out: Tensor, sends: Tensor, out_splits: Any = (), in_splits: Any = (), *_: Any) -> dict[str, Any]:
    """Return {field: value} for the :class:`Collective` that records an all-to-all; no splits mean equal parts."""
    if not in_splits and not out_splits:
        return {"kind": kind, "dtype": _dtype([sends]), "numel": sends.numel()}
    sent, received = (
        [n * (t.numel() // max(1, t.size(0))) for n in s] for t, s in ((sends, in_splits), (out, out_splits))
    )
    return {"kind": kind, "dtype": _dtype([sends]), "sent": tuple(sent), "received": tuple(received)}


def _message(kind: str, tensors: Any, peer: int, *_: Any, **__: Any) -> dict[str, Any]:
    flat = _flat(tensors)
    return {"kind": kind, "peer": peer, "dtype": _dtype(flat), "numel": sum(tensor.numel() for tensor in flat)}


def _barrier(*_: Any, **__: Any) -> dict[str, Any]:
    return {"kind": "barrier"}


def _dtype(tensors: Sequence[Tensor]) -> str:
    return _NAMES.get(tensors[0].dtype, str(tensors[0].dtype).removeprefix("torch.")) if tensors else ""


#: Method of ``ProcessGroup`` -> function that returns the fields of a :class:`Collective` from the arguments of a call.
READERS: dict[str, Callable[..., dict[str, Any]]] = {
    "allreduce": partial(_alike, "all_reduce", 0),
    "allreduce_coalesced": partial(_alike, "all_reduce", 0),
    "broadcast": partial(_alike, "broadcast", 0),
    "reduce": partial(_alike, "reduce", 0),
    "allgather": partial(_lists, "all_gather"),
    "allgather_coalesced": partial(_alike, "all_gather", 1),
    "allgather_into_tensor_coalesced": partial(_alike, "all_gather", 1),
    "_allgather_base": partial(_alike, "all_gather", 1),
    "all_gather_single": partial(_alike, "all_gather", 1),
    "all_gather_single_coalesced": partial(_alike, "all_gather", 1),
    "gather": partial(_alike, "gather", 1),
    "scatter": partial(_alike, "scatter", 0),
    "reduce_scatter": partial(_lists, "reduce_scatter"),
    "reduce_scatter_tensor_coalesced": partial(_alike, "reduce_scatter", 0),
    "_reduce_scatter_base": partial(_alike, "reduce_scatter", 0),
    "reduce_scatter_single": partial(_alike, "reduce_scatter", 0),
    "reduce_scatter_single_coalesced": partial(_alike, "reduce_scatter", 0),
    "alltoall": partial(_lists, "all_to_all"),
    "alltoall_base": partial(_split, "all_to_all"),
    "all_to_all_single": partial(_split, "all_to_all"),
    "barrier": _barrier,
    "monitored_barrier": _barrier,
    "send": partial(_message, SEND),
    "recv": partial(_message, RECEIVE),
}
