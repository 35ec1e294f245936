# SPDX-License-Identifier: Apache-2.0
"""Everything that depends on which optimizer wrapper an engine has, and the norms by which most of them know whether
a gradient is finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import deepspeed.comm as comm
from torch import Tensor

from deepspeed.muon.exchange.groups import Agreed, agreed
from deepspeed.muon.exchange.partition import Partition
from deepspeed.muon.optimizer import MuonWithAuxAdam
from deepspeed.muon.patch import Seam, replace
from deepspeed.muon.plan.placement import Placement, Shard

#: Methods of ZeRO's wrappers that return the norm of a group's gradient, reduced over all ranks.
NORM_METHODS = ("get_grad_norm_direct", "complete_grad_norm_calculation_for_cpu_offload")


class Adapter:
    """What the rest of ``zero/`` asks of a wrapper; each subclass knows one.

    Attributes:
        MODULE, CLASS: where the wrapper is defined. A checkpoint names it by its class.
        REPLACED: its methods that are replaced for as long as the engine lives.
        MORE_SEAMS: what else is replaced: during loads, or of objects that the wrapper holds.
    """

    MODULE: ClassVar[str]
    CLASS: ClassVar[str]
    REPLACED: ClassVar[tuple[str, ...]] = ()
    MORE_SEAMS: ClassVar[tuple[Seam, ...]] = ()

    def __init__(self, engine: Any, optimizer: MuonWithAuxAdam) -> None:
        self.engine, self.wrapper, self.optimizer = engine, engine.optimizer, optimizer
        #: Whether states are swapped to NVMe; then small sub-groups are wanted, which bound the memory.
        self.is_swapped = bool(getattr(self.wrapper, "swap_optimizer", False))
        #: Whether a backward has run since the engine's last ``step()``.
        self.has_backward = False
        self.has_warned_of_frozen = False

    @property
    def moved_states(self) -> list[str]:
        """Return the states, by name, that ``engine.offload_states()`` has moved and nothing has moved back."""
        return sorted(kind.value for kind in getattr(self.wrapper, "offloaded_states", ()))

    @classmethod
    def seams(cls) -> list[Seam]:
        """Return every method that this adapter replaces."""
        return [*(Seam(cls.MODULE, f"{cls.CLASS}.{name}") for name in cls.REPLACED), *cls.MORE_SEAMS]

    def replace(self, name: str, function: Callable, owner: Any = None) -> None:
        """Make ``owner.name(...)``, by default the wrapper's, call ``function(original, ...)``, if it is declared."""
        owner = self.wrapper if owner is None else owner
        declared = [seam.path for seam in self.seams()]
        paths = [f"{kind.__name__}.{name}" for kind in type(owner).__mro__]  # PipelineEngine is a DeepSpeedEngine
        assert any(path in declared for path in paths), f"{type(self).__name__} does not declare {name}"
        replace(owner, name, function)

    def around(self, name: str, context: Callable[[], AbstractContextManager[Any]]) -> None:
        """Enter ``context()`` around the wrapper's method of this name."""

        def call(original: Callable, *args: Any, **kwargs: Any) -> Any:
            with context():
                return original(*args, **kwargs)

        self.replace(name, call)

    def partitions(self) -> list[Partition]:
        """Return where the parameters of each step lie."""
        raise NotImplementedError

    def sharded(self, index: int, tensor: Tensor, placements: Mapping[Any, Placement], ranks: Any) -> Partition:
        """Return the partition of a group whose parameters these ranks share, placed by parameter in flat tensors."""
        shards = tuple(Shard(self.optimizer.specs[param], 0, placement) for param, placement in placements.items())
        return Partition(index, (tensor,), shards, ranks, comm.get_rank(ranks), comm.get_world_size(ranks))

    def prepare(self, group_count: int) -> None:
        """Set up one loss scale for all ranks, and what the wrapper needs to not run stock's Muon, to take part in the
        collectives of pipeline stages with up to ``group_count`` parameter groups, and to have all state on NVMe.
        """

    def watch_gradients(self) -> Callable[[], Agreed]:
        """Return what tells whether the gradients of a step are finite; called once, before :meth:`prepare`."""
        return watch_norms(self.replace)

    def patch_state_access(self) -> None:
        """Make ``safe_get_*``, ``safe_set_*`` and ``engine.offload_states()`` work with Muon's state.

        They ask the wrapper, or methods that the wrapper put on the parameter.
        """
        raise NotImplementedError

    def drop_gradients(self) -> None:
        """Forget what micro-batches since the last step have left: in the model, in the wrapper, logits for QK-clip."""
        self.has_backward = False
        self.engine.zero_grad()
        self.wrapper.zero_grad(set_to_none=True)
        for name in ("averaged_gradients", "all_grad_tensors"):  # of stages 1 to 3
            getattr(self.wrapper, name, {}).clear()
        if self.optimizer.qk_clip:
            self.optimizer.qk_clip.watch.clear()

    def resident_partitions(self) -> Iterator[Partition]:
        """Yield each partition while its tensors are in memory; what is written to them stays."""
        return iter(self.optimizer.all_partitions)


def watch_norms(replace: Callable[[str, Callable], None]) -> Callable[[], Agreed]:
    """Return what tells whether the norms that stages 1 to 3 reduce, before they update the first group, are finite.

    A group's norm is -1 where a gradient is not finite. Several versions of DeepSpeed square that into a harmless 1
    when they combine the groups, so the combined norm does not tell. ``replace`` is :meth:`Adapter.replace`.

    The result is the same on all ranks. It raises RuntimeError on all of them if ZeRO has computed no norm in this
    step, so that nothing is known.
    """
    norms: list[Any] = []

    def start(step: Callable, *args: Any, **kwargs: Any) -> Any:
        norms.clear()
        return step(*args, **kwargs)

    def listen(method: Callable, *args: Any, **kwargs: Any) -> Any:
        norms.append(method(*args, **kwargs))
        return norms[-1]

    def are_finite() -> Agreed:
        if not norms:
            raise RuntimeError(
                f"deepspeed-muon heard no gradient norm in this step: this DeepSpeed calls none of "
                f"{', '.join(NORM_METHODS)}, which tell whether the gradient is finite. Nothing was updated; run "
                "ds_muon report, and install a tested version of DeepSpeed"
            )
        norms[:] = map(float, norms)  # waits for the accelerator: once per step, whatever the number of calls
        return agreed(all(map(is_valid, norms)), is_common=True)

    replace("step", start)
    for name in NORM_METHODS:
        replace(name, listen)
    return are_finite


def is_valid(norm: Any) -> bool:
    """Return whether a gradient norm, a number or a 0-D tensor, is that of a finite gradient."""
    return 0 <= float(norm) < math.inf  # false of NaN, too
