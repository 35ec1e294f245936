# SPDX-License-Identifier: Apache-2.0
"""Create the optimizer's state, and convert it to and from the form in which ``state_dict`` and checkpoints have it.

Update rules such as NorMuon keep state of a matrix on its owner, the rank that orthogonalizes it (:class:`OwnerState`).
Ranks send this state to each other only when a checkpoint is saved.

DeepSpeed's converter to universal checkpoints knows the state keys ``exp_avg``, ``exp_avg_sq`` and ``step`` only. So an
engine's checkpoint stores Muon's momentum as ``exp_avg``, and fills ``exp_avg_sq`` with minus infinity, which takes one
element of storage. An AdamW that loads it gets NaN in its first step, which is noticed. With zeros its updates would be
too large, by up to 32 times at a beta2 of 0.999.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed.muon.errors import logger
from deepspeed.muon.exchange.consensus import short_hash
from deepspeed.muon.exchange.run import Exchange
from deepspeed.muon.math.adamw import STARTED
from deepspeed.muon.math.momentum_storage import ABSMAX, CODES, MOMENTUM, QuantizationBlocks, State
from deepspeed.muon.math.rules import RULES, Rule, state_shapes

#: Keys of a saved group: the momentum's dtype if it was int8; the state of the loss scaler of fp16 autocast at stage 0;
#: the names of the group's parameters at stage 0.
KEPT_AS, SCALE, NAMES = "momentum_dtype", "grad_scaler", "param_names"
#: Keys of a group that keep the config's values in a load: ``lr_ratio``, and the marks by which ZeRO knows experts.
KEPT_FROM_CONFIG = {"lr_ratio", "name", "moe"}
LOAD = 'load it with "checkpoint": {"load_universal": true} in ds_config.json, without a tag'
WEIGHTS_ALONE = (
    "only its weights, with load_module_only=True and load_optimizer_states=False; DeepSpeed converts at stages 1 to 3 "
    "only"
)


def muon_state(tensor: Tensor, momentum_dtype: str, blocks_of: Callable[[Tensor], QuantizationBlocks]) -> State:
    """Return a new Muon state of ``tensor``: ``step`` and a momentum of zeros.

    ``step`` is an fp32 scalar tensor on the CPU. The momentum is ``momentum_buffer``, with the tensor's shape. An int8
    momentum is ``momentum_codes``, with the tensor's shape, and ``momentum_absmax``, fp32, one element for each
    quantization block. ``momentum_dtype``: as for :func:`storage_dtype`. ``blocks_of``: function that returns the
    quantization blocks of a tensor; called only for int8.
    """
    # On the CPU, because each step reads the count, for schedules and random numbers, and would wait for a device.
    state: State = {"step": torch.zeros((), dtype=torch.float32, device="cpu")}
    dtype = storage_dtype(tensor, momentum_dtype)
    if dtype == torch.int8:
        return state | zero_codes(tensor.shape, blocks_of(tensor), tensor.device)
    return state | {MOMENTUM: torch.zeros_like(tensor, dtype=dtype, requires_grad=False)}


def adamw_state(tensor: Tensor, counts_on_cpu: bool = False) -> State:
    """Return a new AdamW state of ``tensor``: ``step``, and ``exp_avg`` and ``exp_avg_sq`` of zeros.

    Both have the tensor's shape and dtype. ``step`` is an fp32 scalar tensor on the tensor's device or, if
    ``counts_on_cpu``, on the CPU.
    """
    state: State = {"step": torch.zeros((), dtype=torch.float32, device="cpu" if counts_on_cpu else tensor.device)}
    return state | {key: torch.zeros_like(tensor, requires_grad=False) for key in ("exp_avg", "exp_avg_sq")}


def zero_codes(shape: Sequence[int], blocks: QuantizationBlocks, device: torch.device) -> State:
    """Return an int8 momentum of zeros: the entries ``momentum_codes`` and ``momentum_absmax`` of a tensor's state."""
    return {
        CODES: torch.zeros(shape, dtype=torch.int8, device=device),
        ABSMAX: torch.zeros(blocks.count, dtype=torch.float32, device=device),
    }


def storage_dtype(tensor: Tensor, momentum_dtype: str) -> torch.dtype:
    """Return the torch dtype of a tensor's stored momentum, for ``momentum_dtype`` in the config.

    ``bf16`` and ``int8`` mean themselves; ``fp32`` means the dtype of the tensor.
    """
    return {"bf16": torch.bfloat16, "int8": torch.int8}.get(momentum_dtype, tensor.dtype)


@dataclass(frozen=True)
class UncastMomentum:
    """A loaded momentum, wrapped so that ``Optimizer.load_state_dict`` does not cast it to its parameter's dtype."""

    tensor: Tensor
    #: The dtype in which the saved run kept the momentum; a saved int8 momentum is fp32 in the file.
    dtype: torch.dtype


class SavedForm:
    """The ``state_dict`` and ``load_state_dict`` hooks that convert optimizer state to and from its form in files.

    Files contain an int8 momentum as fp32, for example. :mod:`deepspeed.muon.zero` sets the attributes.
    """

    #: Whether saves rename the momentum for DeepSpeed's converter, and loads refuse a checkpoint in which Muon updated
    #: other parameters.
    is_convertible = False
    #: The loss scaler of fp16 autocast at stage 0; its scale is saved with the optimizer.
    scaler: torch.amp.GradScaler | None = None
    #: The names of each group's parameters at stage 0, where DeepSpeed's files have no names.
    names_of_groups: Sequence[Sequence[str]] = ()
    #: (a tensor that is updated, one of its state tensors) -> the values of that state, read from NVMe if necessary.
    read_swapped: Callable[[Tensor, Tensor], Tensor] | None = None

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._before: dict[Tensor, dict[str, Any]] = {}
        optimizer.register_state_dict_post_hook(self.save)
        optimizer.register_load_state_dict_pre_hook(self.before_load)
        optimizer.register_load_state_dict_post_hook(self.load)

    # ---- saving -------------------------------------------------------------------------------------------------

    def save(self, optimizer: Any, state_dict: dict[str, Any]) -> None:
        """Convert ``state_dict`` in place to its form in files; torch calls this after making it."""
        tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        state, groups = state_dict["state"], state_dict["param_groups"]
        for group in groups:
            for index in group["params"]:
                if index in state:
                    state[index] = self._saved_entry(optimizer, tensors[index], state[index])
            if group["use_muon"] and optimizer.config.momentum_dtype == "int8":
                group[KEPT_AS] = "int8"
        for group, names in zip(groups, self.names_of_groups, strict=False):
            group[NAMES] = list(names)
        optimizer.owner_state.save(groups)
        if self.scaler is not None:
            groups[0][SCALE] = self.scaler.state_dict()
        if self.is_convertible:
            hashes = split_hashes(optimizer)
            facts = {"matrices": list(hashes), "blocks": {name: cut for name, cut in hashes.items() if cut}}
            # In all groups, because the converter keeps one pipeline stage's groups, and that may have no Muon group.
            for group in groups:
                group.update(facts)

    def _saved_entry(self, optimizer: Any, tensor: Tensor, entry: dict[str, Any]) -> dict[str, Any]:
        """Return one tensor's state, ``entry``, in its form in files."""
        if (
            self.read_swapped is not None
        ):  # read states from NVMe, so that a rank's file is complete and every tool can use it
            entry = {name: self.read_swapped(tensor, value) for name, value in entry.items()}
        entry = dict(entry)
        if CODES in entry:
            # Saved as fp32, which every reader of checkpoints understands; a load computes the same codes from it.
            codes = entry[CODES]
            values = torch.zeros(codes.numel(), dtype=torch.float32, device="cpu")
            optimizer.blocks_of(tensor).read_into(values, entry)
            del entry[CODES], entry[ABSMAX]
            entry[MOMENTUM] = values.view(codes.shape)
        if self.is_convertible and MOMENTUM in entry:
            momentum = entry.pop(MOMENTUM)
            # The keys that DeepSpeed's converter knows. The expanded scalar takes one element of storage in the file.
            entry |= {"exp_avg": momentum, "exp_avg_sq": momentum.new_full((), -math.inf).expand(momentum.shape)}
        return entry

    # ---- loading ------------------------------------------------------------------------------------------------

    def before_load(self, optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of ``state_dict`` that torch can load. Torch calls this before it loads the state dict.

        Each momentum becomes an :class:`UncastMomentum` under the key ``momentum_buffer``. Checkpoints of a DeepSpeed
        engine contain it as ``exp_avg``, next to an ``exp_avg_sq`` without meaning, which is dropped. Under DeepSpeed,
        groups also get the settings that :func:`settings_of` returns.

        Raises:
            ValueError: under DeepSpeed, the saved groups do not fit this run (:func:`check_groups`).
        """
        state, groups = dict(state_dict["state"]), [dict(group) for group in state_dict["param_groups"]]
        if self.is_convertible:
            check_groups(optimizer, groups)
            pairs = zip(optimizer.param_groups, groups, strict=True)
            groups = [settings_of(current, group) | {"params": group["params"]} for current, group in pairs]
        for group in groups:
            is_int8 = group.pop(KEPT_AS, None) == "int8"
            for index in state.keys() & set(group["params"]):
                entry = state[index] = dict(state[index])
                if self.is_convertible and group.get("use_muon") and "exp_avg" in entry:
                    entry.pop("exp_avg_sq", None)
                    entry[MOMENTUM] = entry.pop("exp_avg")
                if MOMENTUM in entry:
                    tensor = entry[MOMENTUM]
                    # torch would cast a bare tensor to the parameter's dtype, which may have fewer digits.
                    entry[MOMENTUM] = UncastMomentum(tensor, torch.int8 if is_int8 else tensor.dtype)
        self._before = {tensor: dict(entry) for tensor, entry in optimizer.state.items()}
        return {**state_dict, "state": state, "param_groups": groups}

    @torch.no_grad()
    def load(self, optimizer: Any) -> None:
        """Complete a load; torch calls this at the end of ``load_state_dict``.

        Cast the loaded momentum to the config's ``momentum_dtype``. Copy loaded values into the state tensors that
        existed before the load. Pass the loaded state of the loss scaler and of update rules, such as NorMuon, to them.
        """
        for group in optimizer.param_groups:
            scale = group.pop(SCALE, None)
            if scale and self.scaler is not None:
                self.scaler.load_state_dict(scale)
        _cast_momentum(optimizer)
        for tensor, state in optimizer.state.items():
            before = self._before.get(tensor, {})
            for key, value in state.items():
                # The loaded value may be a view of a memory-mapped file, which a later save overwrites.
                if torch.is_tensor(value) and _is_alike(value, before.get(key)):
                    state[key] = before[key].copy_(value)
        self._before = {}
        optimizer.owner_state.load(optimizer.param_groups, is_logging=optimizer.context.is_logging)
        optimizer.after_load()


def _cast_momentum(optimizer: Any) -> None:
    """Cast every loaded momentum to the config's dtype and to its tensor's device; warn if the dtype changes."""
    changes = set()
    for tensor, state in optimizer.state.items():
        if MOMENTUM not in state:
            continue
        uncast: UncastMomentum = state.pop(MOMENTUM)
        dtype = storage_dtype(tensor, optimizer.config.momentum_dtype)
        if uncast.dtype != dtype:
            changes.add((uncast.dtype, dtype))
        if dtype == torch.int8:
            blocks = optimizer.blocks_of(tensor)
            state |= zero_codes(uncast.tensor.shape, blocks, tensor.device)  # tensor is empty while it is on NVMe
            blocks.write(state, 0, uncast.tensor.reshape(-1))
        else:
            state[MOMENTUM] = uncast.tensor.to(dtype=dtype, device=tensor.device)
    for was, now in changes:
        logger.warning(
            "deepspeed-muon: the checkpoint's momentum is %s; converted to %s, as optimizer.params.momentum_dtype says",
            str(was).removeprefix("torch."),
            str(now).removeprefix("torch."),
        )


def _is_alike(loaded: Tensor, existing: Any) -> bool:
    if not torch.is_tensor(existing):
        return False
    return (loaded.shape, loaded.dtype, loaded.device) == (existing.shape, existing.dtype, existing.device)


def read_mapped(file: Path) -> Any:
    """Return the contents of a checkpoint file; its tensors are memory-mapped if the file is a zip archive."""
    return torch.load(file, map_location="cpu", mmap=zipfile.is_zipfile(file), weights_only=False)


# ---- the groups of a saved optimizer: whether they match this run's, and which of their settings are used ------------


def saved_groups(optimizer_state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the parameter groups in ``optimizer_state``, as a file of a DeepSpeed or universal checkpoint has it."""
    inner = optimizer_state.get("optimizer_state_dict", optimizer_state)
    return inner["param_groups"] if "param_groups" in inner else inner["base_optimizer_state"]["param_groups"]


def group_kinds(groups: Sequence[Mapping[str, Any]]) -> list[bool | None]:
    """Return for each saved parameter group True (Muon), False (AdamW) or None (from an optimizer of another class)."""
    return [group.get("use_muon") for group in groups]


def muon_names(optimizer: Any) -> set[str]:
    """Return the names of the parameters of this pipeline stage that Muon updates."""
    return {spec.name for spec in optimizer.specs.values() if spec.use_muon}


def fused_names(optimizer: Any) -> list[str]:
    """Return the names of the fused parameters that the option ``muon_fused`` splits into several matrices."""
    return [spec.name for spec in optimizer.specs.values() if spec.split_by == "muon_fused"]


def block_hashes(optimizer: Any) -> dict[str, str]:
    """Return {parameter name: hash of how it is split into matrices}, for each parameter that is split."""
    cut = [spec for spec in optimizer.specs.values() if len(spec.blocks) > 1]
    return {s.name: short_hash(str([(b.offset, b.rows, b.cols, b.bands) for b in s.blocks]), 8) for s in cut}


def split_hashes(optimizer: Any) -> dict[str, str]:
    """Return {name: hash of how it is split, or "" if it is whole} of Muon's parameters in all pipeline stages."""
    if optimizer.context.muon_of_all_stages is not None:
        return optimizer.context.muon_of_all_stages
    return dict.fromkeys(sorted(muon_names(optimizer)), "") | block_hashes(optimizer)


def conversion(folder: Path, stages: Collection[int], option: str = "") -> str:
    """Return advice for an error message: how to load the checkpoint ``folder``, which cannot be loaded directly.

    ``stages``: the ZeRO stages of the saved run and of this run. The advice is to convert, unless one of them is 0.
    ``option``: an option to add to ``ds_to_universal``, with a space at its end, such as "--inject_missing_state ".
    """
    if 0 in stages:
        return f"load it as it was saved, or {WEIGHTS_ALONE}"
    options = f"{option}--input_folder {folder} --output_folder {folder}_universal"
    return f"convert it with python -m deepspeed.checkpoint.ds_to_universal {options}, then {LOAD}"


def check_groups(optimizer: Any, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError if the saved parameter groups do not fit this run; see :func:`routing_difference`.

    If the saved run only split a Muon parameter into other matrices than this run does, log a warning.
    """
    if text := routing_difference(optimizer, groups):
        raise ValueError(text)
    ours = block_hashes(optimizer)
    stated = [group["blocks"] for group in groups if "blocks" in group]
    theirs = stated[0] if stated else ours
    if other := sorted(name for name in muon_names(optimizer) if ours.get(name) != theirs.get(name)):
        logger.warning(
            "deepspeed-muon: Muon now splits %d parameters (first: %s) into other matrices than the run that saved "
            "this checkpoint did, so it computes other updates for them; to continue as before, set muon_fused, "
            "muon_split and per_head_muon as in that run",
            len(other),
            other[0],
        )


def routing_difference(
    optimizer: Any,
    groups: Sequence[Mapping[str, Any]],
    folder: Path = Path("CHECKPOINT/TAG"),
    stages: Collection[int] = (),
) -> str | None:
    """Return an error message if saved parameter groups do not fit this run; otherwise ``None``.

    They do not fit if another optimizer saved them, or if Muon updated other parameters or groups in the saved run.
    ``folder``, ``stages``: see :func:`conversion`.
    """
    saved, current = group_kinds(groups), group_kinds(optimizer.param_groups)
    theirs = {name for group in groups for name in group.get("matrices", ())}
    ours, of_all_stages = muon_names(optimizer), optimizer.context.muon_of_all_stages
    is_of_all_stages = of_all_stages is not None and theirs == of_all_stages.keys()
    if is_of_all_stages or (saved == current and theirs == ours):
        return None
    if None in saved:
        cure = conversion(folder, stages, "--inject_missing_state ")
        return f"another optimizer saved this checkpoint; if that was AdamW, {cure}"
    if True in saved and not theirs:
        convert = f"run ds_muon import --from {folder} --to {folder}_universal, then {LOAD}"
        cure = convert if 0 not in stages else f"load {WEIGHTS_ALONE}"
        return f"stock DeepSpeed's Muon saved this checkpoint; {cure}"
    words = {True: "Muon", False: "AdamW"}
    return (
        "Muon updated other parameters in the run that saved this checkpoint; use that run's model, parameter groups, "
        f"muon_include, muon_exclude and param.use_muon. Muon updates {sorted(theirs - ours)[:4]} only in the "
        f"checkpoint and {sorted(ours - theirs)[:4]} only in this run; the groups are "
        f"{[words[bool(kind)] for kind in saved]} in the checkpoint and {[words[bool(kind)] for kind in current]} in "
        "this run"
    )


def settings_of(current: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a parameter group after a load: those in ``saved``, as with torch's optimizers.

    ``lr_ratio``, ``name``, ``moe`` and keys that ``saved`` lacks stay as in ``current``, the group before the load. The
    key ``params`` is left out. Warn about settings that differ, except learning rates, which schedules change.
    """
    # Not the config's rates: a rate that the script has lowered by hand would jump back on every resume.
    if (ratio := saved.get("lr_ratio", current.get("lr_ratio"))) != current.get("lr_ratio"):
        change = f"lr_ratio = {current['lr_ratio']} from the config; the checkpoint has {ratio}"
        logger.warning(
            "deepspeed-muon: checkpoint and config differ in a setting of parameter group %s, which continues with %s; "
            "to use the checkpoint's value, write the learning rates of the saved run into the config",
            current.get("name"),
            change,
        )
    left_out = KEPT_FROM_CONFIG | {"params", "matrices", "blocks", "owner_counts", NAMES}
    settings = {key: value for key, value in saved.items() if key not in left_out}
    silent = {"lr", "initial_lr", STARTED}  # schedules change rates all the time
    if current.get("use_muon"):  # torch's schedulers change the betas of every group; a Muon group's have no effect
        silent.add("betas")
    for key, value in settings.items():
        if key in current and key not in silent and value != current[key]:
            change = f"{key} = {value} from the checkpoint; the config has {current[key]}"
            logger.warning(
                "deepspeed-muon: checkpoint and config differ in a setting of parameter group %s, which continues with "
                "%s; to use the config's value, set it in engine.optimizer.param_groups after load_checkpoint "
                "(ns_method and adjust_lr_fn cannot change then)",
                current.get("name"),
                change,
            )
    return {key: value for key, value in current.items() if key not in ("params", STARTED)} | settings


class OwnerState:
    """The state that update rules keep of the matrices that this rank owns, which means that it orthogonalizes them.

    ``rules``: the update rules in use, such as NorMuon, which declare their state (:attr:`Rule.STATE`).
    """

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = rules
        self._state_names = [name for rule in rules for name in rule.STATE]
        #: Name of a state -> name of a matrix -> tensor. Between a load and the next :meth:`bind`: of all matrices.
        self.tensors_by_state: dict[str, dict[str, Tensor]] = {}
        #: For each partition, its exchange and name of a state -> name of a matrix -> shape, for all its matrices.
        self._state_shapes: list[tuple[Exchange, dict[str, dict[str, tuple[int, ...]]]]] = []

    def bind(self, partition_steps: Iterable[Any]) -> None:
        """Keep only the state of matrices that this rank orthogonalizes, and create missing state as zeros.

        Call this after :meth:`load`. ``partition_steps``: the planned :class:`PartitionStep` objects, which say what
        this rank orthogonalizes.
        """
        loaded, self.tensors_by_state = self.tensors_by_state, {name: {} for name in self._state_names}
        self._state_shapes.clear()
        for step in partition_steps if self._state_names else ():
            device, shapes = step.exchange.device, dict[str, dict[str, tuple[int, ...]]]()
            for item in step.partition.blocks:
                for name, shape in state_shapes(self._rules, item.shape, item.axis).items():
                    shapes.setdefault(name, {})[item.name] = shape
            self._state_shapes.append((step.exchange, shapes))
            owned = [one for bucket in step.plan.buckets for batch in bucket.batches for one in batch.names]
            for name, shape_of in shapes.items():
                for matrix in owned:
                    tensor = loaded.get(name, {}).get(matrix)
                    if tensor is None or tensor.shape != shape_of[matrix]:
                        tensor = torch.zeros(shape_of[matrix], dtype=torch.float32, device=device)
                    self.tensors_by_state[name][matrix] = tensor.to(device)

    def of(self, matrix_name: str) -> dict[str, Tensor]:
        """Return the state of a matrix that this rank orthogonalizes, such as ``{"second_moments": tensor}``.

        Empty if no update rule has state.
        """
        return {name: self.tensors_by_state[name][matrix_name] for name in self._state_names}

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Return a context in which this rank holds the state of all matrices, which :meth:`save` needs.

        A collective: entering the context gathers the state from the ranks that orthogonalize the matrices.
        """
        owned = self.tensors_by_state
        if self._state_shapes:
            self.tensors_by_state = {name: {} for name in self._state_names}
        for exchange, shapes in self._state_shapes:
            for name, of_matrices in shapes.items():
                self.tensors_by_state[name] |= exchange.gather_state(owned[name], of_matrices)
        try:
            yield
        finally:
            self.tensors_by_state = owned

    def without_state(self, matrix_names: Iterable[str]) -> list[str]:
        """Return the names in ``matrix_names``, sorted, for which this rank lacks some state of an update rule."""
        lacking = {
            m for m in matrix_names for name in self._state_names if m not in self.tensors_by_state.get(name, {})
        }
        return sorted(lacking)

    def __str__(self) -> str:
        """Return the names of the state for messages, such as "second moments"."""
        return _in_words(self._state_names)

    def save(self, groups: Sequence[dict[str, Any]]) -> None:
        """Store the state of all matrices in the first Muon group of ``groups``; nothing if no update rule has state.

        ``groups``: the parameter groups of a state dict. Raise RuntimeError if this rank lacks the state of some
        matrices, as it does outside of :meth:`whole` if several ranks own matrices.
        """
        if missing := self.without_state(
            one for _, shapes in self._state_shapes for names in shapes.values() for one in names
        ):
            raise RuntimeError(
                f"state_dict: this rank lacks the {self} of {len(missing)} matrices, which other ranks hold; save with "
                "engine.save_checkpoint, or call optimizer.state_dict on all ranks within optimizer.whole_state()"
            )
        for name, of_matrices in self.tensors_by_state.items():
            if of_matrices:
                # Every rank's file has all of them, so that a resumed run may have other owners.
                next(group for group in groups if group["use_muon"])[name] = dict(of_matrices)

    def load(self, groups: Sequence[dict[str, Any]], is_logging: bool, not_saved: Collection[str] = ()) -> None:
        """Move the state of update rules from a loaded state dict into this object. Call :meth:`bind` afterwards.

        State of update rules that this run does not use is dropped.

        Args:
            groups: the state dict's parameter groups. The entries that hold such state are removed from them.
            is_logging: whether to warn if an update rule is on in only one of the two runs, the saved one and this one.
            not_saved: names of matrices whose saved state must not be used. Experts or tensor-parallel shards of
                several ranks have the same name, and a universal checkpoint has the state of only one of them.
        """
        self.tensors_by_state = {}
        for kind in RULES:
            saved = {name: _taken(groups, name, not_saved) for name in kind.STATE}
            is_used, was_used = any(isinstance(rule, kind) for rule in self._rules), any(saved.values())
            if is_used:
                self.tensors_by_state |= saved
            if is_logging and was_used and not is_used:
                logger.warning(
                    f"deepspeed-muon: the checkpoint was saved with {kind.KEY}, but this run's config does not set it, "
                    f"so the checkpoint's {_in_words(saved)} are ignored; set {kind.KEY} to use them"
                )
            if is_logging and is_used and saved and not was_used:
                logger.warning(
                    f"deepspeed-muon: the checkpoint has no {_in_words(saved)} for {kind.KEY}; they start at zero, as "
                    "in a new run"
                )


def _taken(groups: Iterable[dict[str, Any]], name: str, not_saved: Collection[str]) -> dict[str, Tensor]:
    """Remove the entry ``name`` from saved groups; return its {matrix name: tensor} without those in ``not_saved``."""
    pairs = (pair for group in groups for pair in group.pop(name, {}).items())
    return {matrix: tensor for matrix, tensor in pairs if matrix not in not_saved}


def _in_words(names: Iterable[str]) -> str:
    return " and ".join(names).replace("_", " ")
