# SPDX-License-Identifier: Apache-2.0
"""The optimizer, ``MuonWithAuxAdam``: parameter groups, state, the plans of its steps, and ``step``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.muon.config.schema import MuonConfig, naming_preset_keys, parse
from deepspeed.muon.describe import Description, describe, groups_of
from deepspeed.muon.errors import UnsupportedError, logger
from deepspeed.muon.exchange.consensus import Agreed, same_on_all_ranks, short_hash
from deepspeed.muon.exchange.placed_params import Partition, whole_partition
from deepspeed.muon.exchange.plan import Plan
from deepspeed.muon.exchange.run import Exchange, Staging
from deepspeed.muon.kernels.kernel_set import Workspace, fixed_numerics
from deepspeed.muon.layout import MatrixSpec
from deepspeed.muon.math import adamw
from deepspeed.muon.math.momentum_storage import ABSMAX, CODES, MOMENTUM, Fragment, QuantizationBlocks
from deepspeed.muon.math.newton_schulz import DTYPES
from deepspeed.muon.math.rules import Schedules
from deepspeed.muon.model.fused_weights import stage_of
from deepspeed.muon.model.param_groups import (
    UserGroups,
    check_betas,
    check_options,
    split_groups,
    warn_of_late_parameters,
    warn_of_odd_settings,
)
from deepspeed.muon.model.routing import route, tag_parameters, unwrapped
from deepspeed.muon.monitor import Phase, StepStats
from deepspeed.muon.qk_clip.clip import QKClip
from deepspeed.muon.qk_clip.query_keys import attention_layers
from deepspeed.muon.replicas import bind_without_sharding, check_replicas_agree
from deepspeed.muon.saved_state import OwnerState, SavedForm, adamw_state, muon_state
from deepspeed.muon.step import (
    Gradients,
    PartitionStep,
    StepContext,
    StepValues,
    are_finite,
    bind_partition,
    pieces_of,
    with_settings,
    without_gradient,
)


class MuonWithAuxAdam(torch.optim.Optimizer):
    """An optimizer that updates hidden matrices with Muon and all other parameters with AdamW.

    Under DeepSpeed, ``"type": "Muon"`` in ds_config.json builds it. By hand, for plain PyTorch or
    ``deepspeed.initialize(optimizer=...)``::

        optimizer = MuonWithAuxAdam(model.parameters(), model=model, lr=1e-3, weight_decay=0.1)

    If ``model`` is wrapped in ``DistributedDataParallel``, each rank orthogonalizes a part of the matrices.

    Args:
        params: parameters, ``(name, parameter)`` pairs, or parameter groups, which may have settings of their own
            (:data:`deepspeed.muon.config.schema.GROUP_KEYS`). The optimizer splits each group into two, its
            "halves": a Muon group and an AdamW group. A group's settings apply to both.
        model: the model that has the parameters. Its modules decide which parameters go to Muon, see
            :func:`deepspeed.muon.model.routing.route`. A user may decide for a parameter by setting
            ``param.use_muon``; the constructor sets it for all others.
        config: fields of :class:`deepspeed.muon.config.schema.MuonConfig`.
        settings: a :class:`MuonConfig` to use instead of ``config``.

    The tensors in ``param_groups`` are parameters or, under ZeRO, this rank's flat shards of several parameters. Each
    has the state ``step`` and ``momentum_buffer`` (Muon), or ``step``, ``exp_avg`` and ``exp_avg_sq`` (AdamW). All but
    ``step`` have the tensor's shape and dtype (fp32 under ZeRO); ``momentum_dtype`` may set bf16 or int8 for the
    momentum. int8 is stored as ``momentum_codes`` and ``momentum_absmax``. Update rules such as NorMuon keep more state
    of each matrix, on the rank that orthogonalizes it; :meth:`whole_state` collects it for ``state_dict``.

    Raises:
        MuonConfigError: a wrong key or value, an option without effect, or no matrix of the model goes to Muon.
        TypeError, ValueError: torch's optimizers would refuse ``params``, a parameter is not in ``model``, or the user
            sends a parameter to Muon that it cannot update.
        UnsupportedError: FSDP has sharded the model.
    """

    def __init__(
        self, params: Iterable[Any], *, model: nn.Module, settings: MuonConfig | None = None, **config: Any
    ) -> None:
        if settings is not None and config:
            raise TypeError(f"pass settings or its fields, not both; got settings and {', '.join(config)}")
        self.config: MuonConfig = settings or parse(config)
        #: Where Newton-Schulz runs; ``None`` until :meth:`bind`.
        self._device: torch.device | None = None
        #: Whether the constructor has ended.
        self._is_built = False
        #: The arguments of :meth:`observed`, within its ``with`` block.
        self._phase: Phase = nullcontext
        self._stats: StepStats | None = None
        self._is_skip_logged = False
        #: Whether this step has searched for matrices without gradient.
        self._has_looked = False
        #: How momentum and weight decay change with the step.
        self._schedules = self.config.schedules
        model, self._replicas = unwrapped(model)
        specs = route(model, self.config)
        #: The pipeline stage that ``model`` is; 0 outside pipelines.
        self.stage = stage_of(model)
        split = split_groups(params, specs, self.config)
        #: Trained parameter -> its route (Muon or AdamW) and matrices, in the order of the parameter groups.
        self.specs: dict[nn.Parameter, MatrixSpec] = {p: specs[p] for half in split.halves for p in half["params"]}
        with naming_preset_keys(self.config.preset, self.config.preset_values):
            attentions = attention_layers(model, {*self.specs}) if self.config.qk_clip else None
            #: Option without effect here -> the error to raise if it has none in any pipeline stage.
            self.unused_options = check_options(model, self.specs.values(), self.config, attentions)
        #: The parameters that were frozen when the optimizer was built, by name; weak, so that a model can drop them.
        self._frozen = weakref.WeakValueDictionary({n: p for n, p in model.named_parameters() if not p.requires_grad})
        #: First tensor of a partition of Muon parameters -> the step of that partition. The tensor is the key because
        #: ZeRO calls ``step`` with one sub-group's tensors at a time.
        self._partition_steps: dict[Tensor, PartitionStep] = {}
        #: First tensor of a partition -> names of its matrices without a gradient. :meth:`_look` adds an entry, and the
        #: update of the partition removes it.
        self._without_gradient: dict[Tensor, frozenset[str]] = {}
        self._adam_partitions: list[Partition] = []
        self._momentum_blocks: dict[Tensor, QuantizationBlocks] = {}
        #: Tensor that AdamW updates -> the parts of parameters that are stored in it.
        self._fragments: dict[Tensor, list[Fragment]] = {}
        self.workspace = Workspace()
        #: Facts that the ranks have agreed on; set before :meth:`bind`.
        self.context = StepContext()
        self.owner_state = OwnerState(self.config.rules)
        self.qk_clip: QKClip | None = None
        if self.config.qk_clip and attentions is not None:
            name_of = {param: spec.name for param, spec in self.specs.items()}
            living = weakref.ref(self)  # the model's hooks keep the function; they must not keep the optimizer

            def steps_done() -> int:
                optimizer = living()
                return optimizer.steps_done if optimizer is not None else 0

            self.qk_clip = QKClip(self.config.qk_clip, attentions, name_of, steps_done=steps_done)
        #: For each of the user's groups, the indices of its halves in ``param_groups``, and its learning rate.
        self._origins, self._given_lrs = split.origins, split.given_lrs
        #: For each parameter group, the specs of its parameters.
        self._specs_of_groups = [[specs[p] for p in half["params"]] for half in split.halves]
        #: Whether the config or a parameter group sets a learning rate; otherwise stock DeepSpeed's defaults apply.
        self.sets_learning_rate = split.sets_learning_rate
        # No defaults: each half has all of its settings, those of Muon or those of AdamW.
        super().__init__(split.halves, defaults={})
        # torch's schedulers require ``betas`` in the defaults before they cycle those of every group.
        self.defaults |= {"lr": split.reference_lr, "betas": self.config.betas}
        self.saved_form = SavedForm(self)
        tag_parameters(model, self.specs)
        self._is_built = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise UnsupportedError, except while the constructor runs: groups cannot be added later."""
        if self._is_built:
            raise UnsupportedError(
                "MuonWithAuxAdam cannot take a parameter group after it was built, because it routes and plans all "
                "parameters together; build a new optimizer with all parameters that now train"
            )
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        """Raise UnsupportedError, because an optimizer that is pickled or deep-copied loses its model."""
        raise UnsupportedError(
            "MuonWithAuxAdam cannot be copied or pickled, because its plan belongs to the parameters of one model; "
            "build a new optimizer for the copied model, then call new.load_state_dict(old.state_dict())"
        )

    @cached_property
    def given(self) -> UserGroups:
        """Return a view of the parameter groups that the user passed, before their split into Muon and AdamW halves.

        Pass it to a learning-rate scheduler in place of the optimizer.
        """
        return UserGroups(self, self._origins, self._given_lrs)

    # ---- binding ----------------------------------------------------------------------------------

    @fixed_numerics()
    @torch.no_grad()
    def bind(self, partitions: Sequence[Partition], device: torch.device) -> None:
        """Plan which rank orthogonalizes which matrix, and create optimizer state that was not loaded.

        A DeepSpeed engine calls this before the first step; in plain PyTorch, the first step does. Later changes of a
        group's ``ns_method`` and ``adjust_lr_fn`` have no effect until a state is loaded (:meth:`after_load`).

        Args:
            partitions: a :class:`Partition` for each parameter group, or at stage 3 for each of ZeRO's sub-groups.
            device: where Newton-Schulz runs.
        """
        if self.context.is_logging and not self.is_bound:
            warn_of_odd_settings(self.param_groups)
        self._partition_steps.clear()
        self._adam_partitions.clear()
        self._fragments.clear()
        # Under CPU offload the shards are on the host, and Newton-Schulz runs on the accelerator.
        staging = Staging() if device.type != partitions[0].tensors[0].device.type else None
        for partition in partitions:
            group = self.param_groups[partition.index]
            self.create_states(partition)
            if not group["use_muon"]:
                self._adam_partitions.append(partition)
                continue
            self._partition_steps[partition.tensors[0]] = bind_partition(
                partition,
                group,
                config=self.config,
                dtype=self.ns_dtype,
                context=self.context,
                exchange=Exchange(
                    group=partition.group,  # a process group; ``group`` above is a parameter group
                    dtype=DTYPES[self.config.wire],
                    device=device,
                    work=self.workspace,
                    staging=staging,
                ),
                momentum_blocks=self._momentum_blocks,
                owner_state=self.owner_state,
            )
        self._device = device
        self.owner_state.bind(self._partition_steps.values())
        if self.qk_clip:
            self.qk_clip.bind(partitions, self.context.peers, device)

    def after_load(self) -> None:
        """Apply what ``load_state_dict`` has loaded to the planned steps; called at its end.

        The steps get the loaded settings of the parameter groups. Of the loaded state of update rules, such as
        NorMuon's, keep that of the matrices that this rank orthogonalizes. Which rank orthogonalizes which matrix does
        not change, because that follows from shapes, ranks and config only. Do nothing before :meth:`bind`.
        """
        if not self.is_bound:
            return
        for tensor, step in self._partition_steps.items():
            self._partition_steps[tensor] = with_settings(step, self.param_groups[step.partition.index])
        self.owner_state.bind(self._partition_steps.values())

    def connect(self) -> None:
        """Open the connections for the all-to-all of each process group that a step uses; a collective.

        Otherwise NCCL would allocate their memory, which may be gigabytes, within the first step.
        """
        # One all-to-all per process group makes its connections, and several partitions may share a group.
        exchanges = {id(s.exchange.group): s.exchange for s in self._partition_steps.values() if s.uses_all_to_all}
        for exchange in exchanges.values():
            exchange.connect()

    def whole_state(self) -> AbstractContextManager[None]:
        """Return a context in which ``state_dict`` works on every rank with update rules that keep state of matrices.

        Outside of it, a rank has this state, such as NorMuon's second moments, only of the matrices that it
        orthogonalizes. Entering the context gathers the state of all matrices on all ranks; a collective.
        """
        return self.owner_state.whole()

    @property
    def ns_dtype(self) -> str:
        """Return the dtype of Newton-Schulz's matrix products, a key of :data:`DTYPES`."""
        return self.context.dtype if self.config.ns_dtype == "auto" else self.config.ns_dtype

    @property
    def ns_methods(self) -> set[str]:
        """Return the different values of ``ns_method`` in the Muon groups."""
        return {group["ns_method"] for group in self.param_groups if group["use_muon"]}

    @property
    def partitions(self) -> list[Partition]:
        """Return the :class:`Partition` of each Muon group, or at ZeRO stage 3 of each of its sub-groups.

        ``Partition.group`` is ``None`` if each rank orthogonalizes all matrices itself. Empty before :meth:`bind`.
        """
        return [step.partition for step in self._partition_steps.values()]

    @property
    def all_partitions(self) -> list[Partition]:
        """Return first :attr:`partitions`, then the :class:`Partition` objects whose parameters AdamW updates."""
        return [*self.partitions, *self._adam_partitions]

    @property
    def plans(self) -> list[Plan]:
        """Return for each entry of :attr:`partitions` the :class:`Plan` of what this rank sends and computes."""
        return [step.plan for step in self._partition_steps.values()]

    @property
    def is_bound(self) -> bool:
        """Return whether :meth:`bind` has planned the steps."""
        return self._device is not None

    @property
    def compute_device(self) -> torch.device:
        """Return the device on which Newton-Schulz and collectives run. Valid after :meth:`bind`."""
        assert self._device is not None
        return self._device

    def digest(self) -> str:
        """Return a hash of everything that a step's collectives and the bits of its results depend on.

        Ranks that train the same parameters must have equal hashes. Valid after :meth:`bind`.
        """
        return short_hash("".join(step.digest for step in self._partition_steps.values()))

    @property
    def exchange(self) -> Exchange:
        """Return the :class:`Exchange` that moves matrices between ranks for the first entry of :attr:`partitions`.

        The exchanges of the other entries have the same dtype, device and workspace.
        """
        return next(iter(self._partition_steps.values())).exchange

    @property
    def steps_done(self) -> int:
        """Return the number of steps taken, including those of the run that saved a loaded checkpoint."""
        # The first state is a Muon tensor's, unless the first group has no matrix. Muon counts every step, AdamW only
        # those in which the tensor has a gradient.
        return int(next(iter(self.state.values()))["step"]) if self.state else 0

    def begin_step(self) -> None:
        """Reset the flags of the previous training step, and warn of parameters that have become trainable.

        Called once before each training step, in which ZeRO may call :meth:`step` several times. With QK-clip, a
        collective: exchange the largest attention logits with the ranks that train the same layers.
        """
        self._is_skip_logged = self._has_looked = False
        if self.context.is_logging or self.stage:  # the parameters of other pipeline stages are unknown to rank 0
            warn_of_late_parameters(self._frozen)
        if self.qk_clip:
            self.qk_clip.begin_step(is_logging=self.context.is_logging)

    @contextmanager
    def observed(self, phase: Phase | None = None, stats: StepStats | None = None) -> Iterator[None]:
        """Measure the steps within a ``with`` block: run each phase in the context ``phase(name)``, and fill ``stats``.

        Names of phases: prepare, exchange, newton_schulz, apply, adamw. ``None`` keeps what an enclosing block has set.
        """
        outer = self._phase, self._stats
        self._phase, self._stats = phase or self._phase, stats or self._stats
        try:
            yield
        finally:
            self._phase, self._stats = outer

    def describe(self) -> Description:
        """Return a table of how each parameter is updated: by Muon or AdamW, why, with which rate, on which ranks.

        ``print(engine.basic_optimizer.describe())`` prints it; ``describe().rows`` are its rows.
        """
        return describe(groups_of(self.param_groups, self._specs_of_groups, [*self._partition_steps.values()]))

    def warn_of_no_matrix(self) -> None:
        """Log a warning that AdamW updates all parameters, and why no matrix goes to Muon."""
        reasons = sorted({spec.reason for spec in self.specs.values()})
        logger.warning(
            "deepspeed-muon: AdamW updates all parameters; no matrix goes to Muon: %s; ignore this if you intend it, "
            "otherwise change muon_exclude or param.use_muon, or train matrices",
            "; ".join(reasons),
        )

    # ---- state ------------------------------------------------------------------------------------

    def create_states(self, partition: Partition) -> None:
        """Create missing optimizer states of a :class:`Partition`'s tensors, which must be in memory (not on NVMe)."""
        use_muon = self.param_groups[partition.index]["use_muon"]
        if not use_muon:
            self._fragments |= zip(partition.tensors, partition.fragments(), strict=True)
        elif self.config.momentum_dtype == "int8":
            self._momentum_blocks |= zip(
                partition.tensors, map(QuantizationBlocks, partition.matrix_pieces()), strict=True
            )
        for tensor in partition.tensors:
            self.state_of(tensor, use_muon)

    def state_of(self, tensor: Tensor, use_muon: bool) -> dict[str, Any]:
        """Return a tensor's state {key: tensor} for Muon (``use_muon``) or AdamW; create missing state as zeros."""
        state = self.state[tensor]
        if use_muon and MOMENTUM not in state and CODES not in state:
            state |= muon_state(tensor, self.config.momentum_dtype, self.blocks_of)
        elif not use_muon and "exp_avg" not in state:
            # In bf16 each step reads the count for its random numbers, and would wait for a device.
            state |= adamw_state(tensor, counts_on_cpu=_is_contiguous_bf16(tensor))
        return state

    def blocks_of(self, tensor: Tensor) -> QuantizationBlocks:
        """Return the quantization blocks of a tensor's int8 momentum: which elements share a scale."""
        if tensor not in self._momentum_blocks:  # before bind, a tensor is a whole parameter
            whole = whole_partition(0, [tensor], [self.specs[tensor]])  # type: ignore[index]
            self._momentum_blocks[tensor] = QuantizationBlocks(whole.matrix_pieces()[0])
        return self._momentum_blocks[tensor]

    def state_keys(self, tensor: Tensor) -> list[str]:
        """Return the keys of a tensor's state for :meth:`read_state`, such as ``["exp_avg", "exp_avg_sq", "step"]``.

        The momentum has the key ``momentum_buffer`` in every dtype, including int8.
        """
        keys = self.state.get(tensor, {}).keys()
        return sorted({MOMENTUM if key in (CODES, ABSMAX) else key for key in keys})

    def read_state(self, tensor: Tensor, key: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Return a 1-D fp32 copy of elements ``start`` to ``stop - 1`` of a tensor's state ``key``.

        ``key``: one of :meth:`state_keys`, such as ``momentum_buffer``. ``stop``: ``None`` for all elements to the end.
        """
        state = self.state[tensor]
        if key == MOMENTUM and CODES in state:
            stop = tensor.numel() if stop is None else stop
            return self.blocks_of(tensor).read(state, start, stop, tensor.device)
        return state[key].reshape(-1)[start:stop].to(torch.float32, copy=True)

    def write_state(self, tensor: Tensor, key: str, values: Tensor, start: int = 0) -> None:
        """Write ``values``, of any shape and floating dtype, to a tensor's state ``key`` from element ``start`` on.

        Values are rounded to nearest. With an int8 momentum, ``values`` must contain all or none of the elements that
        ``tensor`` holds of each parameter. Under ZeRO, a tensor holds several parameters.
        """
        state, values = self.state[tensor], values.reshape(-1)
        if key == MOMENTUM and CODES in state:
            self.blocks_of(tensor).write(state, start, values)
            return
        buffer = state[key]
        flat = buffer.reshape(-1)  # a copy if the buffer is not contiguous
        flat[start : start + values.numel()] = values
        if not buffer.is_contiguous():
            buffer.copy_(flat.view(buffer.shape))

    # ---- the step -------------------------------------------------------------------------------------

    @torch._disable_dynamo  # a script may compile the function that calls step; compiling step gains nothing
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all tensors that are in ``param_groups`` now, and return what ``closure`` returns.

        ZeRO calls this once for each parameter group or sub-group, in the same order on all ranks. For the call, it
        puts only that group's or sub-group's tensors into ``param_groups``. Settings such as autocast apply to
        ``closure``, but not to the update.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with fixed_numerics(), torch.no_grad():
            self._step()
        return loss

    def _step(self) -> None:
        if not self.is_bound and not self._bind_on_first_use():
            return
        if not self.context.is_stepped_in_parts:
            # In every step, because a rank cannot know whether another rank has loaded a state.
            if self._replicas is not None:
                check_replicas_agree(self, self._replicas)
            self.begin_step()
        groups = [group for group in self.param_groups if group["params"]]
        steps = [self._step_of(group) if group["use_muon"] else None for group in groups]
        without_gradient = iter(self._find_without_gradient([step for step in steps if step is not None]))
        # One answer for all ranks and groups, before the first group is updated: either all are updated or none.
        if not self._is_finite():
            self.report_skip()
            return
        # In every step, because a schedule may change these coefficients.
        for group in self.param_groups:
            check_betas(group)
        for group, step in zip(groups, steps, strict=True):
            left_alone: frozenset[str] = frozenset()
            if step is None:
                self._adam_step(group)
            else:
                self._muon_step(group, step, left_alone := next(without_gradient))
            if self.qk_clip:
                plan = None if step is None else step.plan
                self.qk_clip.apply(group["params"], plan, left_alone, kernels=self.context.kernels, work=self.workspace)
        if not self.context.is_stepped_in_parts:
            self.workspace.release()

    def _bind_on_first_use(self) -> bool:
        """Call :meth:`bind` before the first step in plain PyTorch, and return True.

        Return False if a wrapper has replaced the parameters and all gradients are zero, as in the step that
        DeepSpeed's fp16 wrapper makes while it is being built. The step must then do nothing. Raise RuntimeError if the
        parameters were replaced and a gradient is not zero.
        """
        tensors = [p for group in self.param_groups for p in group["params"]]
        if all(p in self.specs for p in tensors):
            bind_without_sharding(self, self._replicas)
            return True
        if all(p.grad is None or not p.grad.any() for p in tensors):
            return False  # DeepSpeed's fp16 wrapper calls step once with zero gradients while it is being built
        raise RuntimeError(
            "MuonWithAuxAdam holds tensors that are not parameters of its model; an unknown wrapper has probably "
            "flattened the parameters. Under DeepSpeed, pass the optimizer to deepspeed.initialize, or set "
            '"type": "Muon" in ds_config.json'
        )

    def _is_finite(self) -> Agreed:
        """Return whether all gradients on all ranks are finite; all ranks get the same answer. May be a collective."""
        if self.context.is_finite is not None:
            return self.context.is_finite()
        # No communication: in plain PyTorch, DDP has averaged the gradients, so all ranks test the same numbers.
        return same_on_all_ranks(self.has_finite_gradients())

    def has_finite_gradients(self) -> bool:
        """Return whether all gradients on this rank are finite."""
        return are_finite([p.grad for group in self.param_groups for p in group["params"] if p.grad is not None])

    def report_skip(self) -> None:
        """Log on one rank, once per step, that the step is skipped because a gradient is not finite."""
        if self.context.is_logging and not self._is_skip_logged:
            self._is_skip_logged = True
            logger.warning("deepspeed-muon: the gradient is not finite; this step is skipped on all ranks")

    def _step_of(self, group: dict[str, Any]) -> PartitionStep:
        """Return the planned step of a Muon group's tensors; raise RuntimeError if they were replaced."""
        step = self._partition_steps.get(group["params"][0])
        if step is None:
            raise RuntimeError(
                f"the tensors of parameter group {group['name']!r} were replaced after the optimizer had "
                "planned its steps; build a new optimizer after replacing parameters"
            )
        return step

    def _find_without_gradient(self, steps: Sequence[PartitionStep]) -> list[frozenset[str]]:
        """Return for each of ``steps`` the names of its matrices whose gradient is zero on all ranks.

        A collective, unless an earlier call in this training step has tested the partitions of ``steps``. A call tests
        all partitions whose gradients are in memory, so that the host waits for the device once.
        """
        firsts = [step.partition.tensors[0] for step in steps]
        # An update removes its entry. So if a script calls the wrapper's ``step`` without the engine's ``begin_step``,
        # which resets ``_has_looked``, an entry is missing, and the gradients are tested again.
        if not self._has_looked or not all(first in self._without_gradient for first in firsts):
            looks: list[tuple[PartitionStep, Gradients]]
            looks = [(step, [pieces_of(tensor) for tensor in step.partition.tensors]) for step in steps]
            others = (
                step for tensor, step in self._partition_steps.items() if all(tensor is not first for first in firsts)
            )
            gradients_of_others = [(step, self.context.gradients_of(step.partition)) for step in others]
            looks += [(step, [pieces]) for step, pieces in gradients_of_others if pieces is not None]
            self._look(looks)
        return [self._without_gradient.pop(first) for first in firsts]

    def _look(self, looks: Sequence[tuple[PartitionStep, Gradients]]) -> None:
        """Find the matrices whose gradient is zero on all ranks, and store their names for the updates; a collective.

        ``looks``: for each :class:`Partition` to search, its planned step and its gradients.
        """
        with self._phase("prepare"):
            names = without_gradient(
                [step.gradient_probe for step, _ in looks], [g for _, g in looks], self.context.read_flags
            )
        self._without_gradient, self._has_looked = {}, True
        for (step, _), of_step in zip(looks, names, strict=True):
            self._without_gradient[step.partition.tensors[0]] = of_step
            if self._stats is not None:
                # All ranks that share the plan count the same matrices, and their counts are added up.
                self._stats.without_gradient += len(of_step) / step.sharers

    def _muon_step(self, group: dict[str, Any], step: PartitionStep, without_gradient: frozenset[str]) -> None:
        states = [self.state_of(tensor, use_muon=True) for tensor in group["params"]]
        if self._schedules != Schedules():
            group = self._schedules.settings_at(group, done=int(states[0]["step"]))
        torch._foreach_add_([state["step"] for state in states], 1)
        step.run(
            StepValues(
                group=group,
                state_of=self.state,
                without_gradient=without_gradient,
                phase=self._phase,
                stats=self._stats,
            )
        )

    def _adam_step(self, group: dict[str, Any]) -> None:
        tensors = [p for p in group["params"] if p.grad is not None]
        with self._phase("adamw"):
            states = [self.state_of(p, use_muon=False) for p in tensors]
            decoupled, others = self.config.adam_w_mode, []
            for tensor, state in zip(tensors, states, strict=True):
                fragments = self._fragments.get(tensor, [])
                if _is_contiguous_bf16(tensor):
                    adamw.step_in_bf16(tensor, state, group, decoupled, fragments, self.context.kernels, self.workspace)
                elif any(adamw.steps_before_start(group, fragment) for fragment in fragments):
                    adamw.step_by_parameter(tensor, state, group, decoupled, fragments)
                else:
                    others.append((tensor, state))
            adamw.step([tensor for tensor, _ in others], [state for _, state in others], group, decoupled)


def _is_contiguous_bf16(tensor: Tensor) -> bool:
    """Return whether a tensor is bf16 and contiguous, so that AdamW rounds its new values stochastically."""
    return tensor.dtype == torch.bfloat16 and tensor.is_contiguous()
