# SPDX-License-Identifier: Apache-2.0
"""Load universal checkpoints, DeepSpeed's format with one file for each parameter's weight and for each of its states.

DeepSpeed's ``ds_to_universal`` makes them from checkpoints of deepspeed-muon and AdamW, ``ds_muon import`` from those
of stock DeepSpeed's Muon. This loader replaces DeepSpeed's, which does not support Muon and AdamW groups together. The
ranks, ZeRO stage and order of parameters may change. Files are memory-mapped; each rank reads only what it needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils import groups
from torch import Tensor

from deepspeed import comm
from deepspeed.muon.errors import ImportStateError, UnsupportedError, logger
from deepspeed.muon.exchange.consensus import raise_on_all_ranks
from deepspeed.muon.layout import MatrixSpec, Sharding, sharding_of
from deepspeed.muon.math.adamw import STARTED
from deepspeed.muon.model.param_groups import expert_group
from deepspeed.muon.optimizer import MuonWithAuxAdam
from deepspeed.muon.saved_state import (
    KEPT_AS,
    check_groups,
    fused_names,
    group_kinds,
    read_mapped,
    saved_groups,
    settings_of,
)
from deepspeed.muon.zero.checkpoint.import_states import (
    KEYS,
    MOMENTUM,
    ORIGIN,
    WEIGHT,
    Match,
    log_outcomes,
    match,
    write,
)
from deepspeed.muon.zero.scheduler import apply_schedule
from deepspeed.muon.zero.wrappers.adapter import Adapter, Seam
from deepspeed.muon.zero.wrappers.grids import tp_rank

#: Replaced if the config asks for a universal checkpoint.
SEAMS = (Seam("deepspeed.runtime.engine", "DeepSpeedEngine._get_all_ckpt_names"),)


def load(adapter: Adapter, original: Callable, path: str, load_states: bool, load_from_fp32_weights: bool) -> None:
    """Replace the wrapper's ``_load_universal_checkpoint``: load the universal checkpoint ``path``; a collective.

    Raises:
        ImportStateError: on all ranks, before anything changes, if the checkpoint does not fit.
    """
    engine, optimizer = adapter.engine, adapter.optimizer
    check = partial(_open, engine, optimizer, path, load_states)
    checkpoint, matched = raise_on_all_ranks(check, lambda reasons: ImportStateError(f"nothing was loaded: {reasons}"))
    write(adapter, checkpoint, matched.actions)
    if load_states and checkpoint.is_ours:
        _load_owner_state(engine, optimizer, checkpoint)
        _load_settings(adapter.wrapper, optimizer, checkpoint)
    else:
        apply_schedule(engine)
    if engine.global_rank == 0:
        log_outcomes(f"imported the optimizer states of {checkpoint.title}", matched.outcomes)
        if not checkpoint.is_ours:
            _warn_of_fused(optimizer, checkpoint, matched.actions)
        _warn_of_what_stays(engine, optimizer)


def either_name(original: Callable, folder: str, tag: Any) -> list[str]:
    """Replace ``_get_all_ckpt_names``: find model files under the names of other ZeRO stages too."""
    patterns = ("mp_rank_*_model_states.pt", "zero_pp_rank_0_mp_rank_*_model_states.pt")
    others = (sorted(map(str, Path(folder, str(tag)).glob(pattern))) for pattern in patterns)
    return next(filter(None, (original(folder, tag), *others)), [])


class Folder:
    """A universal checkpoint on disk, from which weights and optimizer states are read for each parameter.

    ``shards``: parameter name -> (how ranks split the parameter, index of this rank's shard). Parameters without an
    entry are read whole.
    """

    def __init__(self, folder: str, shards: Mapping[str, tuple[Sharding, int]]) -> None:
        self.zero = Path(folder, "zero")
        self.shards = shards
        self.common: dict[str, Any] = self._open("optimizer_state.pt")
        self.groups = saved_groups(self.common)
        #: Whether deepspeed-muon saved it. Only then do its groups' settings mean the same as this run's.
        self.is_ours = ORIGIN not in self.common and any("use_muon" in group for group in self.groups)
        self.title = f"a checkpoint of {self.common.get(ORIGIN, 'deepspeed-muon' if self.is_ours else 'AdamW')}"
        self.shapes: dict[str, tuple[int, ...]] = {}  # see check
        matrices = {name for group in self.groups for name in group.get("matrices", ())}
        names = (str(file.parent.relative_to(self.zero)) for file in self.zero.rglob(f"{WEIGHT}.pt"))
        self.is_muon = {name: name in matrices for name in names}
        self.missed = {name: n for group in self.groups for name, n in group.get(STARTED, {}).items()}

    def read(self, name: str, key: str) -> Tensor:
        """Return a parameter's weight (``key="fp32"``) or its state ``key``; if ranks split it, this rank's shard."""
        whole = self._whole(name, key)
        if name not in self.shards:
            return whole
        cut, rank = self.shards[name]
        return torch.cat([whole.view(cut.shape).narrow(cut.axis, *place) for place in cut.ranges[rank]], dim=cut.axis)

    def _whole(self, name: str, key: str) -> Tensor:
        value = self._open(f"{name}/{MOMENTUM if key == 'momentum_buffer' else key}.pt")
        return value["param"] if isinstance(value, dict) else value

    def step(self, name: str) -> float:
        """Return how many optimizer steps the parameter ``name`` had taken when it was saved."""
        if (self.zero / name / "step.pt").is_file():
            return float(self._open(f"{name}/step.pt")) - self.missed.get(name, 0)
        state = self.common.get("optimizer_state_dict", {}).get("state", {})
        for entry in (*state.values(), *self.groups):
            if "step" in entry:
                return float(entry["step"]) - self.missed.get(name, 0)
        raise ImportStateError(
            f"the universal checkpoint {self.zero.parent} has no step count for {name}; convert it again"
        )

    def check(self, state_keys: Mapping[MatrixSpec, Iterable[str]], rank: int, world_size: int) -> None:
        """Raise ImportStateError if a file of a parameter is missing, or has a wrong number of elements.

        ``state_keys``: parameter -> keys of the states that must exist, in addition to the weight. The ranks divide
        the work: each checks the sizes of every ``world_size``-th parameter, from number ``rank`` on.
        """
        files = [f"zero/{spec.name}/{key}.pt" for spec, keys in state_keys.items() for key in (WEIGHT, *keys)]
        if missing := [file for file in files if not (self.zero.parent / file).is_file()]:
            raise ImportStateError(
                f"the universal checkpoint {self.zero.parent} lacks {len(missing)} files of this model's parameters "
                f"(first: {', '.join(missing[:4])}): it belongs to another model, or its conversion is incomplete; "
                "load it into the model that was saved, or convert it again"
            )
        other = []
        for spec, keys in list(state_keys.items())[rank::world_size]:
            self.step(spec.name)
            current = math.prod(self.shards[spec.name][0].shape) if spec.name in self.shards else spec.numel
            for key in (WEIGHT, *keys):
                if (saved := self._whole(spec.name, key).numel()) != current:
                    other.append(f"{spec.name}/{key}.pt ({saved} elements, this model has {current})")
        if other:
            raise ImportStateError(
                "the universal checkpoint belongs to another model, whose parameters have other sizes: "
                f"{', '.join(other[:4])}; load it into the model that was saved"
            )

    def _open(self, name: str) -> Any:
        file = self.zero / name
        if not file.is_file():
            raise ImportStateError(
                f"{file} is missing: this checkpoint has not been converted to a universal one; convert it with python "
                "-m deepspeed.checkpoint.ds_to_universal, or with ds_muon import if stock DeepSpeed's Muon saved it"
            )
        try:
            return read_mapped(file)
        except Exception as error:  # a damaged file can raise anything
            raise ImportStateError(
                f"{file} cannot be read, so convert the checkpoint again: {type(error).__name__}: {error}"
            ) from error


def _shards(engine: Any, optimizer: MuonWithAuxAdam) -> dict[str, tuple[Sharding, int]]:
    """Return {parameter name: (how ranks split the parameter, index of this rank's shard)}.

    It has the parameters of experts, and those that tensor parallelism splits. Raise UnsupportedError if it is unknown
    how a parameter is split.
    """
    rank, size = tp_rank(engine)
    shards = {}
    for param, spec in optimizer.specs.items():
        if group := expert_group(param):
            (count, *rest), ranks = spec.shape, groups._get_expert_parallel_world_size(group)
            ranges = tuple(((first, count),) for first in range(0, count * ranks, count))
            cut = Sharding((count * ranks, *rest), 0, ranges)
            shards[spec.name] = cut, groups._get_expert_parallel_rank(group)
        if size > 1:
            try:
                tp_cut = sharding_of(param)
            except ValueError as error:
                raise UnsupportedError(
                    f"{spec.name}: a universal checkpoint cannot be loaded without knowing how tensor parallelism "
                    f"split this parameter: {error}"
                ) from None
            if tp_cut:
                shards[spec.name] = tp_cut, rank
    return shards


def _open(engine: Any, optimizer: MuonWithAuxAdam, path: str, load_states: bool) -> tuple[Folder, Match]:
    """Open and check a universal checkpoint. Return (the checkpoint, what happens to each parameter's state).

    The :class:`Match` is empty if ``load_states`` is False. Raise ImportStateError, UnsupportedError or ValueError if
    the checkpoint does not fit.
    """
    checkpoint, matched = Folder(path, _shards(engine, optimizer)), Match({}, {})
    if load_states:
        was_muon = any(checkpoint.is_muon.values())
        if checkpoint.is_ours and was_muon and "import_momentum" not in optimizer.config.model_fields_set:
            check_groups(optimizer, checkpoint.groups)
        matched = match(optimizer, checkpoint)
    keys_by_use = {True: (MOMENTUM,), False: KEYS[False]}
    is_read = {name: action != "zero" for name, action in matched.actions.items()}
    state_keys = {
        spec: keys_by_use[spec.use_muon] if is_read.get(spec.name) else () for spec in optimizer.specs.values()
    }
    checkpoint.check(state_keys, engine.global_rank, engine.world_size)
    return checkpoint, matched


def _load_owner_state(engine: Any, optimizer: MuonWithAuxAdam, checkpoint: Folder) -> None:
    """Load the state that belongs to whole matrices, such as NorMuon's second moments, from a universal checkpoint.

    Warn if the state of some matrices is missing. It then starts at zero.
    """
    # DeepSpeed's converter keeps the state that one rank saved: that of other stages, experts and shards is lost.
    several = {name for name, (sharding, _) in checkpoint.shards.items() if len(sharding.ranges) > 1}
    if optimizer.config.tp_mode == "whole":
        several &= {spec.name for param, spec in optimizer.specs.items() if expert_group(param)}
    blocks = [block for partition in optimizer.partitions for block in partition.blocks]
    ambiguous = {block.name for block in blocks if block.shard.spec.name in several}
    optimizer.owner_state.load(checkpoint.groups, optimizer.context.is_logging, not_saved=ambiguous)
    dropped = optimizer.owner_state.without_state(block.name for block in blocks)
    if dropped and comm.get_rank(group=engine.seq_data_parallel_group) == 0:
        logger.warning(
            f"deepspeed-muon: the universal checkpoint lacks the {optimizer.owner_state} of {len(dropped)} matrices "
            f"(first: {dropped[0]}), because DeepSpeed's converter keeps those of one pipeline stage, one rank's "
            "experts and one rank's shards. They start at zero, as in a new run"
        )


def _load_settings(wrapper: Any, optimizer: MuonWithAuxAdam, checkpoint: Folder) -> None:
    """Load settings of parameter groups, the clipping threshold and the loss scaler from a universal checkpoint."""
    # Each is loaded only if this run has the same kind of groups, or the same class of scaler.
    for group, saved in _matched(optimizer, checkpoint.groups):
        settings = settings_of(group, saved)
        group.update({key: value for key, value in settings.items() if key != STARTED})  # counted again for this layout
        group.pop(KEPT_AS, None)
    optimizer.after_load()
    common = checkpoint.common
    if hasattr(wrapper, "clip_grad") and "clip_grad" in common:
        wrapper.clip_grad = common["clip_grad"]
    scaler = common.get("loss_scaler")
    if scaler is not None and type(scaler) is type(getattr(wrapper, "loss_scaler", None)):
        wrapper.loss_scaler = scaler


def _matched(
    optimizer: MuonWithAuxAdam, groups_of_checkpoint: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[dict[str, Any], Mapping[str, Any]]]:
    """Yield (parameter group of this run, saved group whose settings it takes) for each group that has a match.

    Groups are matched by position; in a pipeline by name, because DeepSpeed's converter keeps the groups of only one
    pipeline stage.
    """
    if optimizer.context.muon_of_all_stages is None:
        if group_kinds(groups_of_checkpoint) == group_kinds(optimizer.param_groups):
            yield from zip(optimizer.param_groups, groups_of_checkpoint, strict=True)
        return
    by_name = {group.get("name"): group for group in groups_of_checkpoint}
    for group in optimizer.param_groups:
        if group["name"] in by_name:
            yield group, by_name[group["name"]]
        else:
            logger.warning(
                f"deepspeed-muon: the universal checkpoint has no settings for parameter group {group['name']}, "
                "because DeepSpeed's converter keeps those of one pipeline stage only; the group uses the config's "
                "settings, so check its learning rate"
            )


def _warn_of_fused(optimizer: MuonWithAuxAdam, checkpoint: Folder, actions: Mapping[str, str]) -> None:
    """Warn of fused weights, such as QKV, that Muon now splits and that the saved run may have updated whole.

    ``actions``: {parameter name: what happens to its state}, as in :class:`Match`. Only those that are "kept" count.
    """
    if names := [name for name in fused_names(optimizer) if actions.get(name) == "kept"]:
        logger.warning(
            f"deepspeed-muon: {len(names)} fused parameters (first: {names[0]}) are now updated as several matrices; "
            f'if the run that saved {checkpoint.title} updated each as one, set "muon_fused": "whole" in '
            "optimizer.params to keep that"
        )


def _warn_of_what_stays(engine: Any, optimizer: MuonWithAuxAdam) -> None:
    """Warn if the model has frozen parameters or buffers, because a universal checkpoint does not restore them."""
    frozen = [name for name, param in engine.module.named_parameters() if param not in optimizer.specs]
    buffers = [name for name, _ in engine.module.named_buffers()]
    if frozen or buffers:
        logger.warning(
            f"deepspeed-muon: a universal checkpoint restores only trained parameters: {len(frozen)} frozen ones and "
            f"{len(buffers)} buffers keep the values with which the model was built (first: "
            f"{', '.join([*frozen, *buffers][:3])}); build the model from the same pretrained weights as before"
        )
