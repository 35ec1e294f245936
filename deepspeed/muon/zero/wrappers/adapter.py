# SPDX-License-Identifier: Apache-2.0
"""Everything that depends on which optimizer wrapper an engine has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

from deepspeed.muon.exchange.partition import Partition
from deepspeed.muon.optimizer import MuonWithAuxAdam
from deepspeed.muon.zero import seams
from deepspeed.muon.zero.seams import Seam


class Adapter:
    """What the rest of ``zero/`` asks of a wrapper; each subclass knows one.

    Attributes:
        MODULE, CLASS: where the wrapper is defined.
        REPLACED: its methods that are replaced for as long as the engine lives.
        REPLACED_IN_LOADS: its methods that are replaced while a checkpoint is loaded.
        ELSEWHERE: methods of objects that the wrapper holds, replaced for as long as the engine lives.
    """

    MODULE: ClassVar[str]
    CLASS: ClassVar[str]
    REPLACED: ClassVar[tuple[str, ...]] = ()
    REPLACED_IN_LOADS: ClassVar[tuple[str, ...]] = ()
    ELSEWHERE: ClassVar[tuple[Seam, ...]] = ()

    def __init__(self, engine: Any, optimizer: MuonWithAuxAdam) -> None:
        self.engine, self.wrapper, self.optimizer = engine, engine.optimizer, optimizer
        self._undo: list[Callable[[], None]] = []

    @classmethod
    def seams(cls) -> list[Seam]:
        """Every method that this adapter replaces."""
        scopes = {"engine": cls.REPLACED, "call": cls.REPLACED_IN_LOADS}
        own = [Seam(cls.MODULE, f"{cls.CLASS}.{name}", scope) for scope, names in scopes.items() for name in names]
        return [*own, *cls.ELSEWHERE]

    def replace(self, name: str, function: Callable, owner: Any = None) -> None:
        """Make ``owner.name(...)`` call ``function(original, ...)`` until :meth:`release`; declared methods only.

        Args:
            owner: by default the wrapper.
        """
        declared = [*self.REPLACED] if owner is None else [seam.path.rpartition(".")[2] for seam in self.ELSEWHERE]
        if name not in declared:
            raise AssertionError(f"{type(self).__name__} does not declare that it replaces {name}")
        self._undo.append(seams.replace(self.wrapper if owner is None else owner, name, function))

    def release(self) -> None:
        """Give the wrapper its own methods back."""
        while self._undo:
            self._undo.pop()()

    # ---- binding ------------------------------------------------------------------------------------------------

    def partitions(self) -> list[Partition]:
        """Where the parameters of each step lie."""
        raise NotImplementedError

    def watch_gradients(self) -> None:
        """Set ``optimizer.is_finite``; it must give the same answer on all ranks."""
        raise NotImplementedError

    def stay_clear_of_stock(self) -> None:
        """Keep the wrapper from running stock DeepSpeed's own Muon on parameters that are tagged ``use_muon``."""

    def join_pipeline(self, group_count: int) -> None:
        """Take part in the collectives of pipeline stages that have up to ``group_count`` parameter groups."""

    def create_states(self) -> None:
        """Create optimizer state that :meth:`MuonWithAuxAdam.bind` cannot, because it is not in memory."""

    def open_states(self) -> None:
        """Let DeepSpeed's functions that read, set and move optimizer state by name do so with Muon's."""
        raise NotImplementedError

    @property
    def bounds_memory_by_sub_groups(self) -> bool:
        """Whether small sub-groups are wanted, because what is not being stepped is swapped out."""
        return False

    # ---- checkpoints --------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """What a checkpoint calls the wrapper."""
        return self.CLASS

    def drop_gradients(self) -> None:
        """Forget what has been accumulated since the last step."""
        self.engine.zero_grad()

    def read_universal(self, load: Callable[..., None]) -> None:
        """Let ``load(checkpoint_folder, load_optimizer_states, load_from_fp32_weights)`` take the place of DeepSpeed's
        loader of universal checkpoints.
        """

    def resident_partitions(self) -> Iterator[Partition]:
        """Each partition while its tensors are in memory; what is written to them stays."""
        return iter(self.optimizer.all_partitions)

    def loading(self, folder: Path, tag: str | None, arguments: dict[str, Any]) -> AbstractContextManager[None]:
        """Entered around DeepSpeed's ``load_checkpoint(**arguments)``; checks what only this wrapper knows.

        Raises:
            CheckpointError: on all ranks, before anything is changed.
        """
        return nullcontext()

    def refresh_masters(self) -> None:
        """After a load of weights alone: make the fp32 weights those of the model, where DeepSpeed does not."""
