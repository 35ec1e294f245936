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

from deepspeed.muon.zero.wrappers.adapter import patched

PASSING_ON = ("/torch/", "/typing_extensions.py", "/deepspeed/comm/", "/deepspeed/utils/nvtx.py")
"""Parts of the paths of files that only pass calls on to torch."""
Reader = Callable[..., dict[str, Any]]


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
        elements = sum(self.sent or self.sizes)
        return f"{self.kind} of {elements:,} {self.dtype} elements among {list(self.ranks)} ({self.caller})"


def first_fault(logs: Sequence[Sequence[Call]]) -> str | None:
    """Return what is wrong first with the calls of all ranks, or None. `logs`: by rank, in order."""
    left = [list(reversed(log)) for log in logs]
    while any(left):
        nexts = {rank: calls[-1] for rank, calls in enumerate(left) if calls}
        come = dict[Any, list[int]]()
        for rank, call in nexts.items():
            come.setdefault((call.group, call.ranks), []).append(rank)
        ranks = next((ranks for (_, wanted), ranks in come.items() if {*ranks} >= {*wanted}), None)
        if ranks is None:
            return "; ".join(f"rank {rank} waits in {nexts.get(rank, 'no further call')}" for rank in range(len(logs)))
        calls = [left[rank].pop() for rank in ranks]
        if tuple(ranks) != calls[0].ranks or not _do_match(calls):
            return "; ".join(f"rank {rank} calls {call}" for rank, call in zip(ranks, calls, strict=True))
    return None


def _do_match(calls: Sequence[Call]) -> bool:
    if len({(call.kind, call.dtype, call.sizes) for call in calls}) > 1:
        return False
    sent, received = [call.sent for call in calls], [call.received for call in calls]
    return not any(sent + received) or sent == [*zip(*received, strict=False)]


@contextmanager
def recorded() -> Iterator[list[Call]]:
    from torch.distributed import device_mesh, distributed_c10d

    log, kind = list[Call](), distributed_c10d.ProcessGroup
    methods = {name: partial(_record, log, read) for name, read in READERS.items() if hasattr(kind, name)}
    with ExitStack() as stack:
        stack.enter_context(patched(kind, **methods))
        for module in (torch.distributed, distributed_c10d, device_mesh):
            if hasattr(module, "new_group"):
                stack.enter_context(patched(module, new_group=partial(_record_new_group, log)))
        yield log


def _record(log: list[Call], read: Reader, original: Callable, group: Any, *args: Any, **kw: Any) -> Any:
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
        frame.f_code.co_name == "replacement"  # of a method of DeepSpeed
        or any(part in frame.f_code.co_filename for part in (__file__, *PASSING_ON))
    ):
        frame = frame.f_back
    return f"{'/'.join(frame.f_code.co_filename.split('/')[-3:])}:{frame.f_lineno} in {frame.f_code.co_name}"


def _flat(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else [one for part in tensors for one in _flat(part)]


def _dtype(tensors: list[Tensor]) -> str:
    return str(tensors[0].dtype).removeprefix("torch.") if tensors else ""


def _alike(kind: str, index: int, *args: Any, **_: Any) -> dict[str, Any]:
    """Read a call to which each rank contributes `args[index]`, equally many elements."""
    tensors, root = _flat(args[index]), (one.rootRank for one in args if hasattr(one, "rootRank"))
    return {"kind": kind, "dtype": _dtype(tensors), "sizes": (sum(map(Tensor.numel, tensors)), *root)}


def _lists(kind: str, outputs: Any, inputs: Any, *_: Any, **__: Any) -> dict[str, Any]:
    received, sent = (tuple(map(Tensor.numel, _flat(tensors))) for tensors in (outputs, inputs))
    count = max(len(received), len(sent))  # a list with a single tensor: all ranks have this size
    counts = {"sent": sent * (count // len(sent)), "received": received * (count // len(received))}
    return {"kind": kind, "dtype": _dtype(_flat(inputs))} | counts


def _split(out: Tensor, source: Tensor, out_splits: Any = (), in_splits: Any = (), *_: Any) -> dict[str, Any]:
    kind = {"kind": "all_to_all", "dtype": _dtype([source])}
    if not in_splits and not out_splits:
        return kind | {"sizes": (source.numel(),)}
    pairs = ((source, in_splits), (out, out_splits))
    sent, received = (tuple(n * (t.numel() // max(1, t.size(0))) for n in splits) for t, splits in pairs)
    return kind | {"sent": sent, "received": received}


#: Methods of ``ProcessGroup`` -> the reader of their arguments.
READERS: dict[str, Reader] = {
    "allgather": partial(_lists, "all_gather"),
    "reduce_scatter": partial(_lists, "reduce_scatter"),
    "alltoall": partial(_lists, "all_to_all"),
    **dict.fromkeys(("alltoall_base", "all_to_all_single"), _split),
    **dict.fromkeys(("barrier", "monitored_barrier"), lambda *_, **__: {"kind": "barrier"}),
}
for _kind, _index, *_names in (
    ("all_reduce", 0, "allreduce", "allreduce_coalesced"),
    *((name, 0, name) for name in ("broadcast", "reduce", "scatter")),
    ("gather", 1, "gather"),
    ("all_gather", 1, "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced"),
    ("all_gather of one", 1, "all_gather_single", "all_gather_single_coalesced"),
    ("reduce_scatter", 0, "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "reduce_scatter_single"),
):
    READERS |= dict.fromkeys(_names, partial(_alike, _kind, _index))
