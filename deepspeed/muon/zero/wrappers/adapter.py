# SPDX-License-Identifier: Apache-2.0
"""The interface to DeepSpeed's optimizer wrappers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import deepspeed.comm as comm
from torch import Tensor

from deepspeed.muon.exchange.groups import Agreed
from deepspeed.muon.exchange.partition import Partition
from deepspeed.muon.optimizer import MuonWithAuxAdam
from deepspeed.muon.plan.placement import Placement, Shard
from deepspeed.muon.seam import Seam, replace
from deepspeed.muon.zero.wrappers.grad_norm import watch_norms


class Adapter:
    """All that ``zero/`` needs to know about the optimizer wrapper of an engine; each subclass serves one wrapper.

    Attributes:
        MODULE, CLASS: module and name of the wrapper's class. A checkpoint records the name.
        REPLACED: the wrapper's methods that are replaced for as long as the engine lives.
        MORE_SEAMS: methods of other objects that are replaced.
    """

    MODULE: ClassVar[str]
    CLASS: ClassVar[str]
    REPLACED: ClassVar[tuple[str, ...]] = ()
    MORE_SEAMS: ClassVar[tuple[Seam, ...]] = ()

    def __init__(self, engine: Any, optimizer: MuonWithAuxAdam) -> None:
        self.engine, self.wrapper, self.optimizer = engine, engine.optimizer, optimizer
        #: Whether states are swapped to NVMe. Small sub-groups then bound the memory, so nothing warns of them.
        self.is_swapped = bool(getattr(self.wrapper, "swap_optimizer", False))
        #: Whether a backward has run since the engine's last ``step()``.
        self.has_backward = False
        self.has_warned_of_frozen = False
        #: The universal checkpoint that is being loaded by names, and what to do with each parameter; mostly ``None``.
        self.opened_universal: tuple[Any, dict[str, str]] | None = None

    @property
    def moved_states(self) -> list[str]:
        """Return the names of the states that ``engine.offload_states()`` has moved and that are not back yet."""
        return sorted(kind.value for kind in getattr(self.wrapper, "offloaded_states", ()))

    @classmethod
    def seams(cls) -> list[Seam]:
        """Return every method that this adapter may replace."""
        return [*(Seam(cls.MODULE, f"{cls.CLASS}.{name}") for name in cls.REPLACED), *cls.MORE_SEAMS]

    def replace(self, name: str, function: Callable, owner: Any = None) -> None:
        """Make ``owner.name(...)`` call ``function(original, ...)``; ``owner`` is the wrapper by default.

        The method must be one of :meth:`seams`.
        """
        owner = self.wrapper if owner is None else owner
        declared = [seam.path for seam in self.seams()]
        paths = [f"{kind.__name__}.{name}" for kind in type(owner).__mro__]  # PipelineEngine is a DeepSpeedEngine
        assert any(path in declared for path in paths), f"{type(self).__name__} does not declare {name}"
        replace(owner, name, function)

    def around(self, name: str, context: Callable[[], AbstractContextManager[Any]]) -> None:
        """Enter ``context()`` around every call of the wrapper's method ``name``."""

        def call(original: Callable, *args: Any, **kwargs: Any) -> Any:
            with context():
                return original(*args, **kwargs)

        self.replace(name, call)

    def partitions(self) -> list[Partition]:
        """Return the partitions: one per parameter group, at stage 3 one per sub-group."""
        raise NotImplementedError

    def sharded(self, index: int, tensor: Tensor, placements: Mapping[Any, Placement], ranks: Any) -> Partition:
        """Return the partition of parameter group ``index``, whose parameters ZeRO shards.

        Args:
            tensor: this rank's flat fp32 tensor.
            placements: parameter -> its placement in the flat tensors of all ranks.
            ranks: the process group over which they are sharded.
        """
        shards = tuple(Shard(self.optimizer.specs[param], 0, placement) for param, placement in placements.items())
        return Partition(index, (tensor,), shards, ranks, comm.get_rank(ranks), comm.get_world_size(ranks))

    def prepare(self, group_count: int) -> None:
        """Change what this wrapper would do wrong in a step with Muon, before the first step.

        Depending on the wrapper: use one loss scale on all ranks, disable stock's Muon, create states on NVMe, and take
        part in the collectives for the norms of ``group_count`` parameter groups, the most that a pipeline stage has.
        """

    def watch_gradients(self) -> Callable[[], Agreed]:
        """Return a function that returns, when called in a step, whether that step's gradients are finite.

        The answer is equal on all ranks. Call this method before :meth:`prepare`.
        """
        return watch_norms(self.replace)

    def patch_state_access(self) -> None:
        """Make ``safe_get_*``, ``safe_set_*`` and ``engine.offload_states()`` work with Muon's state.

        They call methods of the wrapper, or methods that the wrapper put on the parameter.
        """
        raise NotImplementedError

    def drop_gradients(self) -> None:
        """Discard what micro-batches since the last step left: gradients in model and wrapper, logits for QK-clip."""
        self.has_backward = False
        self.engine.zero_grad()
        self.wrapper.zero_grad(set_to_none=True)
        for name in ("averaged_gradients", "all_grad_tensors"):  # of stages 1 to 3
            getattr(self.wrapper, name, {}).clear()
        if self.optimizer.qk_clip:
            self.optimizer.qk_clip.watch.clear()

    def resident_partitions(self) -> Iterator[Partition]:
        """Yield each partition while its tensors are in memory, not on NVMe; changes to them are kept."""
        return iter(self.optimizer.all_partitions)
