# SPDX-License-Identifier: Apache-2.0
"""Everything that depends on which optimizer wrapper an engine has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import deepspeed.comm as comm
from torch import Tensor

from deepspeed.muon.exchange.groups import Agreed
from deepspeed.muon.exchange.partition import Partition
from deepspeed.muon.optimizer import MuonWithAuxAdam
from deepspeed.muon.patch import Seam, replace
from deepspeed.muon.plan.placement import Placement, Shard
from deepspeed.muon.zero.wrappers.grad_norm import NormWatch


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

    def gradient_buffers(self) -> Iterator[Tensor]:
        """Yield the buffers of gradients that the wrapper keeps from step to step."""
        return iter(())

    def keep_gradients_of_each_step_apart(self) -> None:
        """Let each step have the gradients of all its micro-batches and none of an earlier step.

        DeepSpeed writes into :meth:`gradient_buffers` only what a backward computes.
        """
        self.around("step", self._with_own_gradients)

    @contextmanager
    def _with_own_gradients(self) -> Iterator[None]:
        self.complete_gradients()
        yield
        self.clear_gradients()

    def complete_gradients(self) -> None:
        """Hand over, under offload, the gradients that micro-batches before the last have left.

        DeepSpeed hands over those of parameters that take part in the last one.
        """

    def clear_gradients(self) -> None:
        """Forget the gradients of a step that the wrapper would use again for parameters without one in the next."""
        for buffer in self.gradient_buffers():
            buffer.zero_()

    def watch_gradients(self) -> Callable[[], Agreed]:
        """Return what tells whether the gradients of a step are finite; called once, before :meth:`prepare`."""
        return NormWatch(self.replace)

    def open_states(self) -> None:
        """Let DeepSpeed's functions that read, set and move optimizer state by name do so with Muon's.

        ``safe_get_full_fp32_param``, ``safe_set_full_optimizer_state`` and their like ask the wrapper, or methods that
        the wrapper put on the parameter; ``engine.offload_states()`` asks the wrapper.
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

    def read_universal(self, load: Callable[..., None]) -> None:
        """Let ``load(folder, load_optimizer_states, load_from_fp32_weights)`` take the place of DeepSpeed's loader of
        universal checkpoints, which knows one kind of group.
        """
        self.replace("_load_universal_checkpoint", lambda _, folder, states, weights: load(folder, states, weights))

    def resident_partitions(self) -> Iterator[Partition]:
        """Yield each partition while its tensors are in memory; what is written to them stays."""
        return iter(self.optimizer.all_partitions)

    def loading(self, folder: Path, tag: str | None, arguments: dict[str, Any]) -> AbstractContextManager[None]:
        """Return what is entered around DeepSpeed's ``load_checkpoint(**arguments)``, with checks of this wrapper.

        Raises:
            CheckpointError: on all ranks, before anything is changed.
        """
        return nullcontext()

    def refresh_masters(self) -> None:
        """Make the fp32 weights those of the model after a load of weights only, as the engine does under ZeRO.

        Else the next step would put back the weights from before.
        """
        if self.engine.zero_optimization_stage() == 0:
            self.wrapper.refresh_fp32_params()
