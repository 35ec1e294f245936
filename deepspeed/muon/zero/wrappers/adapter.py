# SPDX-License-Identifier: Apache-2.0
"""The interface to DeepSpeed's optimizer wrappers: methods, gradient norms, loss scales.

Norms are equal on all ranks, and right for Muon's groups.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import deepspeed.comm as comm
import torch
from torch import Tensor

from deepspeed.muon.exchange.consensus import Agreed, agreed
from deepspeed.muon.exchange.partition import Partition, Shard
from deepspeed.muon.layout import Placement
from deepspeed.muon.model.param_groups import expert_group
from deepspeed.muon.model.projections import stages_of
from deepspeed.muon.optimizer import MuonWithAuxAdam
from deepspeed.muon.zero.wrappers.grids import tp_rank


class Adapter:
    """The interface between this package and the optimizer wrapper of one engine, such as ``DeepSpeedZeroOptimizer``.

    Each subclass serves one class of wrapper. The subclass knows where the wrapper keeps weights and gradients, and
    replaces the wrapper's methods that do not work with Muon.

    Attributes:
        MODULE, CLASS: module and name of the wrapper's class. A checkpoint records the name.
        REPLACED: names of the wrapper's methods that an adapter may replace.
        MORE_SEAMS: methods of other classes that an adapter may replace.
    """

    MODULE: ClassVar[str]
    CLASS: ClassVar[str]
    REPLACED: ClassVar[tuple[str, ...]] = ()
    MORE_SEAMS: ClassVar[tuple[Seam, ...]] = ()

    def __init__(self, engine: Any, optimizer: MuonWithAuxAdam) -> None:
        self.engine, self.wrapper, self.optimizer = engine, engine.optimizer, optimizer
        #: Whether states are swapped to NVMe. Small sub-groups then bound the memory, so nothing warns of them.
        self.is_swapped = bool(getattr(self.wrapper, "swap_optimizer", False))
        #: Whether the optimizer's states, or parameters, lie on NVMe.
        self.uses_nvme = self.is_swapped or bool(getattr(self.wrapper, "params_in_nvme_and_cpu", False))
        #: The saved ZeRO state whose fp32 weights a load under way takes without its optimizer states; on NVMe only.
        self.weights_from: Mapping[str, Any] | None = None
        #: Whether a backward has run since the engine's last ``step()``.
        self.has_backward = False
        self.has_warned_of_frozen = False

    @cached_property
    def model_parts(self) -> int:
        """Return into how many files a checkpoint splits the model: pipeline stages x tensor-parallel ranks."""
        return stages_of(self.engine.module) * tp_rank(self.engine)[1]

    @property
    def moved_states(self) -> list[str]:
        """Return the kinds of state, such as ``"optim_states"``, which ``offload_states()`` has moved to the CPU."""
        return sorted(kind.value for kind in getattr(self.wrapper, "offloaded_states", ()))

    @classmethod
    def seams(cls) -> list[Seam]:
        """Return a :class:`Seam` for each attribute of DeepSpeed that this adapter may replace."""
        return [*(Seam(cls.MODULE, f"{cls.CLASS}.{name}") for name in cls.REPLACED), *cls.MORE_SEAMS]

    def replace(self, name: str, function: Callable, owner: Any = None) -> None:
        """Make ``owner.name(...)`` call ``function(original, ...)``, where ``original`` is the method that is replaced.

        ``owner``: the object whose method is replaced; ``None``: the wrapper. The method must be listed in
        :meth:`seams`.
        """
        owner = self.wrapper if owner is None else owner
        declared = [seam.path for seam in self.seams()]
        paths = [f"{kind.__name__}.{name}" for kind in type(owner).__mro__]  # PipelineEngine is a DeepSpeedEngine
        assert any(path in declared for path in paths), f"{type(self).__name__} does not declare {name}"
        replace(owner, name, function)

    def wrap_method(self, name: str, context: Callable[[], AbstractContextManager[Any]]) -> None:
        """Make every call of the wrapper's method ``name`` run inside ``with context():``."""

        def call(original: Callable, *args: Any, **kwargs: Any) -> Any:
            with context():
                return original(*args, **kwargs)

        self.replace(name, call)

    def partitions(self) -> list[Partition]:
        """Return a new :class:`Partition` for each parameter group, or at stage 3 for each of ZeRO's sub-groups."""
        raise NotImplementedError

    def sharded_partition(
        self, index: int, tensor: Tensor, placements: Mapping[Any, Placement], group: Any
    ) -> Partition:
        """Return a :class:`Partition` for parameters that ZeRO shards over a process group, ``group``.

        ``index``: index of their parameter group in the optimizer. ``tensor``: this rank's flat fp32 shard of the
        parameters. ``placements``: {parameter: where its elements lie in the flat shards of all ranks}.
        """
        shards = tuple(Shard(self.optimizer.specs[param], 0, placement) for param, placement in placements.items())
        return Partition(index, (tensor,), shards, group, comm.get_rank(group), comm.get_world_size(group))

    def prepare(self, group_count: int) -> None:
        """Replace the wrapper's methods that would go wrong in a step with Muon. Call this once, before the first step.

        ``group_count``: the largest number of parameter groups in a pipeline stage. The number of collectives for
        gradient norms depends on it, and must be the same in all stages.
        """

    def watch_gradients(self) -> Callable[[], Agreed]:
        """Return a function that returns, when called during a step, whether the gradients are finite on all ranks.

        Call this method once, before :meth:`prepare`.
        """
        return watch_norms(self.replace)

    def gradients(self, partition: Partition) -> Sequence[Tensor] | None:
        """Return the consecutive pieces of a partition's flat gradient, before DeepSpeed calls ``step`` for it.

        ``None`` if they are not in memory, or if one call of ``step`` updates all partitions.
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
        """Yield each :class:`Partition` of the optimizer, with its tensors in memory even if NVMe holds them.

        The caller may change the tensors. The changes are written back to NVMe.
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


def replace(owner: Any, name: str, function: Callable, when: Callable[[Any], bool] | None = None) -> Callable[[], None]:
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
def replaced(owner: Any, **functions: Callable) -> Iterator[None]:
    """Replace functions of ``owner`` in the ``with`` block: ``replaced(owner, name=function)``. See :func:`replace`."""
    with ExitStack() as undo:
        for name, function in functions.items():
            undo.callback(replace(owner, name, function))
        yield


# ---- gradient norms and loss scales ------------------------------------------------------------------------------

#: Methods of ZeRO's wrappers that return the norm of a group's gradient, reduced over all ranks.
NORM_METHODS = ("get_grad_norm_direct", "complete_grad_norm_calculation_for_cpu_offload")


class NormWatch:
    """The gradient norm of each parameter group, as ZeRO computes them in the current step."""

    def __init__(self) -> None:
        # Not the combined norm: a bad group has norm -1, which DeepSpeed before 0.19.8 squares into a harmless 1.
        self._norms: list[Any] = []

    def start(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        """Replace the wrapper's ``step``: forget the norms of the step before."""
        self._norms.clear()
        return original(*args, **kwargs)

    def listen(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        """Replace a method of :data:`NORM_METHODS`: remember what it returns."""
        self._norms.append(original(*args, **kwargs))
        return self._norms[-1]

    def read(self, flags: Tensor) -> list[int]:
        """Return the elements of ``flags``, int32. The norms are read with them: the host waits for the device once."""
        late = [norm for norm in self._norms if isinstance(norm, Tensor) and norm.device == flags.device]
        if not late:
            return flags.tolist()
        norms = torch.cat([norm.reshape(1) for norm in late])
        are_valid = torch.logical_and(norms >= 0, norms < math.inf).to(torch.int32)
        *elements, of_norms = torch.cat([flags, are_valid.min().view(1)]).tolist()
        others = [norm for norm in self._norms if not any(norm is one for one in late)]
        self._norms[:] = [*others, 0.0 if of_norms else -1.0]
        return elements

    def __call__(self) -> Agreed:
        """Return whether all norms of this step are finite, with the same result on all ranks.

        Raise RuntimeError, on all ranks, if ZeRO computed no norm.
        """
        if not self._norms:
            raise RuntimeError(
                "deepspeed-muon cannot tell whether the gradient is finite: this version of DeepSpeed called none of "
                f"{', '.join(NORM_METHODS)} in this step. Nothing was updated; run ds_muon report, and install a "
                "tested version of DeepSpeed"
            )
        self._norms[:] = map(float, self._norms)  # waits for the accelerator, if read() has not
        return agreed(all(map(is_valid, self._norms)), is_same_on_all_ranks=True)


def watch_norms(replace: Callable[[str, Callable], None]) -> NormWatch:
    """Record the gradient norm of each parameter group during every step at stages 1 to 3.

    Return a function to call during a step, before any weight is updated. ``replace``: :meth:`Adapter.replace` of the
    engine's adapter.
    """
    watch = NormWatch()
    replace("step", watch.start)
    for name in NORM_METHODS:
        replace(name, watch.listen)
    return watch


def is_valid(norm: Any) -> bool:
    """Return whether a gradient norm, a number or 0-D tensor, is that of a finite gradient.

    For other gradients ZeRO reports a norm of -1.
    """
    return 0 <= float(norm) < math.inf  # ZeRO reports -1; comparisons with NaN are false


def with_all_experts(wrapper: Any, original: Callable, *args: Any) -> Any:
    """Replace a method of :data:`NORM_METHODS` at stages 1 and 2: count all experts.

    The original counts experts on tensor-parallel rank 0 only, as if other ranks had copies of them. ``args``: the
    arguments of the method, of which the last is the list of the group's parameters.
    """
    rank = wrapper.model_parallel_rank
    try:
        wrapper.model_parallel_rank = 0 if any(map(expert_group, args[-1])) else rank
        return original(*args)
    finally:
        wrapper.model_parallel_rank = rank


def with_norms_of_all_stages(wrapper: Any, missing: int, original: Callable, *args: Any, **kwargs: Any) -> Tensor:
    """Replace ``scaled_global_norm`` of the wrapper in a pipeline stage that has fewer parameter groups than others.

    The norm of each group is a collective over all stages. For the ``missing`` groups, which only other stages have,
    this stage joins the collectives with norms of zero.
    """
    from deepspeed.runtime import utils

    if wrapper.cpu_offload:
        none = partial(wrapper.complete_grad_norm_calculation_for_cpu_offload, [])
    else:
        none = partial(wrapper.get_grad_norm_direct, [], [])
    norms = [original(*args, **kwargs), *(none() for _ in range(missing))]
    tensors = [torch.as_tensor(norm, dtype=torch.float32).to(wrapper.device) for norm in norms]
    combine = getattr(utils, "combine_grad_norm_groups", None)  # combine them as the installed DeepSpeed does
    return combine(tensors) if combine else torch.linalg.vector_norm(torch.stack(tensors))


def mark_gradients(params: Iterable[Tensor]) -> None:
    """Copy two attributes of parameters to their gradients, so that a norm over all ranks counts each element once.

    ``model_parallel`` is true for a tensor-parallel shard, ``ds_pipe_replicated`` for the copies of a tied weight,
    except on its first pipeline stage.
    """
    from deepspeed.runtime.utils import is_model_parallel_parameter

    for param in params:
        if param.grad is not None:
            param.grad.model_parallel = is_model_parallel_parameter(param)  # type: ignore[attr-defined]
            param.grad.ds_pipe_replicated = getattr(param, "ds_pipe_replicated", False)  # type: ignore[attr-defined]


#: Defaults of ``torch.amp.GradScaler``: the first scale, and the number of steps after which it doubles.
FIRST_SCALE, GROWTH_INTERVAL = 2.0**16, 2000


def is_fp16_autocast(engine: Any) -> bool:
    """Return whether the engine runs the model under torch's autocast with fp16."""
    return engine.torch_autocast_enabled() and engine.torch_autocast_dtype() == torch.float16


def unfused_scaler(wrapper: Any, replace: Callable[[str, Callable], None]) -> SimpleNamespace:
    """Return a loss scaler for an fp16 model at stage 0, to be stored in ``engine.torch_autocast_z0_gradscaler``.

    Without it the engine would not scale the loss, although ``FP16_UnfusedOptimizer`` divides gradients by the scale.
    ``wrapper``: this optimizer wrapper. ``replace``: :meth:`Adapter.replace` of the engine's adapter.
    """
    config = wrapper.loss_scale_config
    updates: list[Callable[[], None]] = []

    def take_step(original: Callable, *args: Any, **kwargs: Any) -> Any:
        # The wrapper would grow the scale before it divides by it, and report the norm of the scaled gradient.
        updates.clear()  # of a step that raised
        result = original(*args, **kwargs)
        wrapper._global_grad_norm /= config.cur_scale
        for update in updates:
            update()
        return result

    replace("step", take_step)
    replace("_update_scale", lambda update, skip: updates.append(partial(update, skip)))
    return SimpleNamespace(
        scale=lambda loss: loss.float() * config.cur_scale,
        step=lambda optimizer: optimizer.step(),
        unscale_=lambda optimizer: None,  # left to the wrapper, as is the update
        update=lambda: None,
    )


def share_autocast_scale(engine: Any) -> None:
    """Replace torch's ``GradScaler`` by ZeRO's dynamic loss scaler, under fp16 autocast at stages 1 to 3.

    A ``GradScaler`` may skip a step on some ranks only, clips gradients before it unscales them, and is not saved in
    checkpoints. The new scaler has the same first scale and growth as torch's. It is not used for a model that is
    itself fp16, because ZeRO already scales its loss.
    """
    wrapper = engine.optimizer
    # In every engine: DeepSpeed's autocast flag is global, so engines after one with autocast get a GradScaler as well.
    wrapper.torch_autocast_gradscaler = None
    if not is_fp16_autocast(engine) or engine.fp16_enabled():
        return
    wrapper.check_grad_overflow = True  # without it stages 1 and 2 would never report an overflow
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    wrapper.dynamic_loss_scale = True
    wrapper.loss_scaler = DynamicLossScaler(
        init_scale=FIRST_SCALE,
        scale_window=GROWTH_INTERVAL,
        min_scale=2.0**-14,
        delayed_shift=1,
        consecutive_hysteresis=False,
        raise_error_at_min_scale=False,
    )
