# SPDX-License-Identifier: Apache-2.0
"""Records every collective that a rank calls, DeepSpeed's too, and judges whether NCCL could hang where gloo does not.

The calls of all ranks, on all process groups, must merge into one order in which each is made by all of its ranks with
kinds, dtypes and sizes that match. What C++ code calls by itself, as DistributedDataParallel does, is not recorded.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepspeed.muon.seam import replaced

PASSING_ON = ("/torch/", "/typing_extensions.py", "/deepspeed/comm/", "/deepspeed/utils/nvtx.py", "/muon/seam.py")
"""Parts of the paths of files that only pass calls on to torch."""


class Call(NamedTuple):
    """One call. `sizes` are equal on all ranks; `sent` and `received` are for each rank, where ranks may differ."""

    kind: str
    ranks: tuple[int, ...]
    group: str = ""
    dtype: str = ""
    sizes: tuple[int, ...] = ()
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()
    caller: str = ""

    def __str__(self) -> str:
        sizes = self.sent or self.sizes
        return f"{self.kind} of {sum(sizes):,} {self.dtype} elements among ranks {list(self.ranks)} ({self.caller})"


def first_fault(logs: Sequence[Sequence[Call]]) -> str | None:
    """Return what is wrong first with the calls of all ranks, or None. `logs`: by rank, in order."""
    done, waiting = [0] * len(logs), dict[tuple[str, tuple[int, ...]], list[int]]()
    arriving = list(range(len(logs)))
    while arriving:
        rank = arriving.pop()
        if done[rank] == len(logs[rank]):
            continue
        call = logs[rank][done[rank]]
        if rank not in call.ranks:
            return f"rank {rank} calls {call}, but is not one of these ranks"
        come = waiting.setdefault((call.group, call.ranks), [])
        come.append(rank)
        if len(come) == len(call.ranks):
            calls = [logs[each][done[each]] for each in call.ranks]
            if not _do_match(calls):
                return "; ".join(f"rank {each} calls {one}" for each, one in zip(call.ranks, calls, strict=True))
            del waiting[call.group, call.ranks]
            for each in call.ranks:
                done[each] += 1
            arriving += call.ranks
    if all(count == len(log) for count, log in zip(done, logs, strict=True)):
        return None
    nexts = (log[count] if count < len(log) else "no further call" for count, log in zip(done, logs, strict=True))
    return "; ".join(f"rank {rank} waits in {call}" for rank, call in enumerate(nexts))


def _do_match(calls: Sequence[Call]) -> bool:
    alike = len({(call.kind, call.dtype, call.sizes) for call in calls}) == 1
    if not alike or not any(call.sent or call.received for call in calls):
        return alike
    full = all(len(call.sent) == len(call.received) == len(calls) for call in calls)
    return full and [call.sent for call in calls] == [*zip(*(call.received for call in calls), strict=True)]


@contextmanager
def recorded() -> Iterator[list[Call]]:
    """Record the calls of this process within the context."""
    from torch.distributed import device_mesh, distributed_c10d

    log: list[Call] = []
    kind = distributed_c10d.ProcessGroup
    methods = {name: partial(_record, log, read) for name, read in READERS.items() if hasattr(kind, name)}
    with ExitStack() as stack:
        stack.enter_context(replaced(kind, **methods))
        for module in (torch.distributed, distributed_c10d, device_mesh):
            if hasattr(module, "new_group"):
                stack.enter_context(replaced(module, new_group=partial(_record_new_group, log)))
        yield log


def _record(
    log: list[Call], read: Callable[..., dict[str, Any]], original: Callable, group: Any, *args: Any, **kw: Any
):
    try:
        ranks = tuple(torch.distributed.get_process_group_ranks(group))
    except (KeyError, ValueError, RuntimeError):  # torch does not know the group
        ranks = tuple(range(group.size()))
    log.append(Call(ranks=ranks, group=group.group_name, caller=_caller(), **read(*args, **kw)))
    return original(group, *args, **kw)


def _record_new_group(log: list[Call], original: Callable, ranks: Any = None, *args: Any, **kw: Any) -> Any:
    world = tuple(range(torch.distributed.get_world_size()))
    chosen = world if ranks is None else tuple(ranks)
    who = chosen if kw.get("use_local_synchronization") else world  # all ranks must make each group
    log.append(Call("new_group", who, group="new groups", sizes=chosen, caller=_caller()))
    return original(ranks, *args, **kw)


def _caller() -> str:
    frame = sys._getframe(2)
    while frame.f_back is not None and (
        frame.f_code.co_filename == __file__ or any(part in frame.f_code.co_filename for part in PASSING_ON)
    ):
        frame = frame.f_back
    return f"{'/'.join(frame.f_code.co_filename.split('/')[-3:])}:{frame.f_lineno} in {frame.f_code.co_name}"


def _flat(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else [one for part in tensors for one in _flat(part)]


def _dtype(tensors: list[Tensor]) -> str:
    return str(tensors[0].dtype).removeprefix("torch.") if tensors else ""


def _alike(kind: str, place: int, *args: Any, **_: Any) -> dict[str, Any]:
    """Read a call to which each rank contributes `args[place]`, equally many elements."""
    tensors = _flat(args[place])
    root = tuple(one.rootRank for one in args if hasattr(one, "rootRank"))
    return {"kind": kind, "dtype": _dtype(tensors), "sizes": (sum(map(Tensor.numel, tensors)), *root)}


def _lists(kind: str, outputs: Any, inputs: Any, *_: Any, **__: Any) -> dict[str, Any]:
    received, sent = (tuple(map(Tensor.numel, _flat(tensors))) for tensors in (outputs, inputs))
    count = max(len(received), len(sent))  # a list with a single tensor: all ranks have this size
    sizes = {"sent": sent * (count // len(sent)), "received": received * (count // len(received))}
    return {"kind": kind, "dtype": _dtype(_flat(inputs)), **sizes}


def _split(
    kind: str, out: Tensor, source: Tensor, out_splits: Any = (), in_splits: Any = (), *_: Any
) -> dict[str, Any]:
    if not in_splits and not out_splits:
        return {"kind": kind, "dtype": _dtype([source]), "sizes": (source.numel(),)}
    pairs = ((source, in_splits), (out, out_splits))
    sent, received = (tuple(n * (t.numel() // max(1, t.size(0))) for n in splits) for t, splits in pairs)
    return {"kind": kind, "dtype": _dtype([source]), "sent": sent, "received": received}


ALIKE = {
    "all_reduce": (0, ("allreduce", "allreduce_coalesced")),
    **{name: (0, (name,)) for name in ("broadcast", "reduce", "scatter")},
    "all_gather": (1, ("_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced")),
    "all_gather of one": (1, ("all_gather_single", "all_gather_single_coalesced")),
    "reduce_scatter": (0, ("_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "reduce_scatter_single")),
    "gather": (1, ("gather",)),
}
"""Kind -> (index of the argument to read, methods of ``ProcessGroup``)."""
READERS: dict[str, Callable[..., dict[str, Any]]] = {
    **{name: partial(_alike, kind, place) for kind, (place, names) in ALIKE.items() for name in names},
    "allgather": partial(_lists, "all_gather"),
    "reduce_scatter": partial(_lists, "reduce_scatter"),
    "alltoall": partial(_lists, "all_to_all"),
    **{name: partial(_split, "all_to_all") for name in ("alltoall_base", "all_to_all_single")},
    **{name: lambda *_, **__: {"kind": "barrier"} for name in ("barrier", "monitored_barrier")},
}
