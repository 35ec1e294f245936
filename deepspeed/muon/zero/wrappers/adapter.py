# SPDX-License-Identifier: Apache-2.0
"""The interface to DeepSpeed's optimizer wrappers."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import deepspeed.comm as comm
from torch import Tensor

from deepspeed.muon.exchange.consensus import Agreed
from deepspeed.muon.exchange.placed_params import Partition, Shard
from deepspeed.muon.layout import Placement
from deepspeed.muon.model.fused_weights import stages_of
from deepspeed.muon.optimizer import MuonWithAuxAdam
from deepspeed.muon.zero.wrappers.gradient_norms import watch_norms
from deepspeed.muon.zero.wrappers.grids import tp_rank


class Adapter:
    """The interface between this package and the optimizer wrapper of one engine, such as ``DeepSpeedZeroOptimizer``.

    Each subclass serves one class of wrapper. The subclass knows where the wrapper keeps weights and gradients, and
    replaces the wrapper's methods that do not work with Muon.

    Attributes:
        MODULE, CLASS: module and name of the wrapper's class. A checkpoint records the name.
        PATCHED: names of the wrapper's methods that the adapter may replace.
        MORE_SEAMS: methods of other DeepSpeed classes that the adapter may replace.
    """

    MODULE: ClassVar[str]
    CLASS: ClassVar[str]
    PATCHED: ClassVar[tuple[str, ...]] = ()
    MORE_SEAMS: ClassVar[tuple[Seam, ...]] = ()

    def __init__(self, engine: Any, optimizer: MuonWithAuxAdam) -> None:
        self.engine, self.wrapper, self.optimizer = engine, engine.optimizer, optimizer
        #: Whether states are swapped to NVMe. Small sub-groups then bound the memory, so nothing warns of them.
        self.is_swapped = bool(getattr(self.wrapper, "swap_optimizer", False))
        #: Whether the optimizer's states, or parameters, lie on NVMe.
        self.uses_nvme = self.is_swapped or bool(getattr(self.wrapper, "params_in_nvme_and_cpu", False))
        #: During a load of only the weights, with NVMe: the saved ZeRO state from which to take the fp32 weights.
        self.weights_from: Mapping[str, Any] | None = None
        #: Whether a backward has run since the engine's last ``step()``.
        self.has_backward = False
        self.has_warned_of_frozen = False

    @cached_property
    def model_parts(self) -> int:
        """Return into how many parts a checkpoint splits the model: pipeline stages x tensor-parallel ranks."""
        return stages_of(self.engine.module) * tp_rank(self.engine)[1]

    @property
    def moved_states(self) -> list[str]:
        """Return the kinds of state, such as ``"optim_states"``, which ``offload_states()`` has moved to the CPU."""
        return sorted(kind.value for kind in getattr(self.wrapper, "offloaded_states", ()))

    @classmethod
    def seams(cls) -> list[Seam]:
        """Return a :class:`Seam` (its module and path) for each attribute of DeepSpeed that the adapter may replace."""
        return [*(Seam(cls.MODULE, f"{cls.CLASS}.{name}") for name in cls.PATCHED), *cls.MORE_SEAMS]

    def patch(self, name: str, function: Callable, owner: Any = None) -> None:
        """Make ``owner.name(...)`` call ``function(original, ...)``, where ``original`` is the method that is replaced.

        ``owner``: the object whose method is replaced; ``None``: the wrapper. The method must be listed in
        :meth:`seams`.
        """
        owner = self.wrapper if owner is None else owner
        declared = [seam.path for seam in self.seams()]
        paths = [f"{kind.__name__}.{name}" for kind in type(owner).__mro__]  # PipelineEngine is a DeepSpeedEngine
        assert any(path in declared for path in paths), f"{type(self).__name__} does not declare {name}"
        patch(owner, name, function)

    def wrap_method(self, name: str, context: Callable[[], AbstractContextManager[Any]]) -> None:
        """Make every call of the wrapper's method ``name`` run inside ``with context():``."""

        def call(original: Callable, *args: Any, **kwargs: Any) -> Any:
            with context():
                return original(*args, **kwargs)

        self.patch(name, call)

    def partitions(self) -> list[Partition]:
        """Return a new :class:`Partition` for each parameter group, or at stage 3 for each of ZeRO's sub-groups.

        It lists the parameters, this rank's tensors with their fp32 weights, and where each rank stores its elements.
        """
        raise NotImplementedError

    def sharded_partition(
        self, index: int, tensor: Tensor, placements: Mapping[Any, Placement], group: Any
    ) -> Partition:
        """Return a :class:`Partition`, which says where ranks store parameters that ZeRO shards over ``group``.

        ``group``: a process group. ``index``: index of the parameter group in the optimizer. ``tensor``: this rank's
        flat fp32 shard of the parameters. ``placements``: {parameter: where its elements lie in the flat shards of all
        ranks}.
        """
        shards = tuple(Shard(self.optimizer.specs[param], 0, placement) for param, placement in placements.items())
        return Partition(index, (tensor,), shards, group, comm.get_rank(group), comm.get_world_size(group))

    def prepare(self, group_count: int) -> None:
        """Patch the wrapper's methods that would make a step of Muon wrong. Call this once, before the first step.

        ``group_count``: the largest number of parameter groups in a pipeline stage. The number of collectives for
        gradient norms depends on it, and must be the same in all pipeline stages.
        """

    def watch_gradients(self) -> Callable[[], Agreed]:
        """Return a function that returns, when called during a step, whether the gradients are finite on all ranks.

        Call this method once, before :meth:`prepare`.
        """
        return watch_norms(self.patch)

    def gradients(self, partition: Partition) -> Sequence[Tensor] | None:
        """Return this rank's flat gradient of a partition, as tensors to concatenate.

        DeepSpeed may call the optimizer's ``step`` once for each partition. In the first of these calls the optimizer
        looks at the gradients of all partitions, and calls this method for those that it does not update yet. Return
        ``None`` if the gradient is not in memory, or if one call of ``step`` updates all partitions.
        """
        return None

    def patch_state_access(self) -> None:
        """Make DeepSpeed's ``safe_get_*``, ``safe_set_*`` and ``engine.offload_states()`` work with Muon's state."""
        raise NotImplementedError

    def drop_gradients(self) -> None:
        """Discard what has accumulated since the last step: gradients, and QK-clip's attention logits."""
        self.has_backward = False
        self.engine.zero_grad()
        self.wrapper.zero_grad(set_to_none=True)
        for name in ("averaged_gradients", "all_grad_tensors"):  # of stages 1 to 3
            getattr(self.wrapper, name, {}).clear()
        if self.optimizer.qk_clip:
            self.optimizer.qk_clip.watch.clear()

    def publish_weights(self) -> None:
        """Copy the optimizer's fp32 weights into the model's parameters. Call this after loading fp32 weights."""
        raise NotImplementedError

    def release(self) -> None:
        """Release what the model or DeepSpeed would keep of a destroyed engine: QK-clip's hooks and scratch memory."""
        self.optimizer.workspace.clear()
        if self.optimizer.qk_clip:
            self.optimizer.qk_clip.close()

    def resident_partitions(self) -> Iterator[Partition]:
        """Yield each :class:`Partition` of the optimizer, with weights and states in memory even if NVMe holds them.

        The caller may change these tensors. The changes are written back to NVMe.
        """
        return iter(self.optimizer.all_partitions)


class Seam(NamedTuple):
    """A DeepSpeed attribute that deepspeed-muon replaces: ``path`` in a module, such as ``DeepSpeedEngine.step``."""

    module_name: str
    path: str

    def __str__(self) -> str:
        return f"{self.module_name}.{self.path}"

    def find(self) -> tuple[Any, str]:
        """Return (class or module, name of its attribute). Raise ImportError or AttributeError if it does not exist."""
        *parts, name = self.path.split(".")
        owner = functools.reduce(getattr, parts, importlib.import_module(self.module_name))
        getattr(owner, name)
        return owner, name

    def exists(self) -> bool:
        """Return whether the installed DeepSpeed has the attribute."""
        try:
            return bool(self.find())
        except (ImportError, AttributeError):
            return False


def patch(owner: Any, name: str, function: Callable, when: Callable[[Any], bool] | None = None) -> Callable[[], None]:
    """Make ``owner.name(...)`` call ``function(original, ...)``, and return a function that undoes the replacement.

    ``owner`` is a class, an instance or a module. If it inherited the attribute, it inherits it again after the undo.
    ``when``: where it returns False for the first argument, such as ``self``, only the original is called.
    """
    before = vars(owner).get(name)  # None if the attribute is inherited
    original = getattr(owner, name)

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        if when is not None and not when(args[0]):
            return original(*args, **kwargs)
        return function(original, *args, **kwargs)

    setattr(owner, name, replacement)
    return (
        functools.partial(delattr, owner, name) if before is None else functools.partial(setattr, owner, name, before)
    )


def has_muon(engine: Any) -> bool:
    """Return whether an engine's optimizer is a MuonWithAuxAdam."""
    return isinstance(getattr(engine, "basic_optimizer", None), MuonWithAuxAdam)


@contextmanager
def patched(owner: Any, **functions: Callable) -> Iterator[None]:
    """Replace functions of ``owner`` in the ``with`` block: ``patched(owner, name=function)``. See :func:`patch`."""
    with ExitStack() as undo:
        for name, function in functions.items():
            undo.callback(patch(owner, name, function))
        yield
