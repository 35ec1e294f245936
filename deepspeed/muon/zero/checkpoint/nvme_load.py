# SPDX-License-Identifier: Apache-2.0
"""Load a checkpoint at stage 3 if the engine keeps tensors on NVMe, or the run that saved it did.

With NVMe, DeepSpeed loads only copies of swap files: settings, step counts, the loss scale and every tensor that was
not swapped are lost. Our ``zero_pp_rank_*`` file holds everything of a rank and is memory-mapped. In older checkpoints
it has empty tensors in place of those in ``offloaded_tensors/rank*``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed.muon.errors import CheckpointError
from deepspeed.muon.optimizer import MuonWithAuxAdam
from deepspeed.muon.seam import Seam, replaced
from deepspeed.muon.zero.checkpoint.compatibility import loads_states
from deepspeed.muon.zero.checkpoint.safe_load import read_model, read_states
from deepspeed.muon.zero.consensus import raise_on_all_ranks
from deepspeed.muon.zero.nvme import each_sub_group, saved_swap_folder, swapped_in

_STAGE3 = "deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3"
#: Methods that are replaced during a load.
SEAMS = tuple(
    Seam(_STAGE3[0], f"{_STAGE3[1]}.{name}") for name in ("_rigid_load_state_dict", "_restore_from_bit16_weights")
)


@contextmanager
def loading_with_nvme(engine: Any, arguments: Mapping[str, Any]) -> Iterator[None]:
    """Make ``load_checkpoint`` at stage 3 also load weights and states that are offloaded to NVMe, in this context.

    ``arguments``: {name of an argument of ``load_checkpoint``: value}; ``tag`` is ``None`` if there is no checkpoint.

    Raises:
        CheckpointError: on all ranks, before anything changes, if the files of one rank do not fit the engine.
    """
    wrapper, optimizer, is_universal = engine.optimizer, engine.basic_optimizer, engine.load_universal_checkpoint()
    uses_nvme = wrapper.swap_optimizer or wrapper.params_in_nvme_and_cpu
    saved, has_weights = None, False
    if arguments["tag"] is not None and not is_universal:
        refusal = f"the checkpoint {Path(arguments['load_dir'], arguments['tag'])} cannot be loaded: "
        check = partial(_complete_state, engine, arguments, uses_nvme)
        saved = raise_on_all_ranks(check, lambda reasons: CheckpointError(refusal + reasons))

    def load_checkpoint(original: Callable, load_dir: str, tag: str, **options: Any) -> Any:
        # Without optimizer states, DeepSpeed would gather 16-bit weights instead.
        if saved is not None or is_universal:
            options["load_optimizer_states"] = True
        return original(load_dir, tag, **options)

    def load_zero_file(original: Callable, state: dict[str, Any], load_optimizer_states: bool = True) -> None:
        # ``saved`` was checked before. DeepSpeed passes ``state``, the contents of the rank's ZeRO file.
        nonlocal has_weights
        if saved is None and not uses_nvme:
            original(state, load_optimizer_states=load_optimizer_states)
        else:
            _restore(wrapper, optimizer, saved or state, load_optimizer_states)
            has_weights = True

    def load_weights(original: Callable) -> None:
        # The fp32 weights come from ``saved``, without it from the model's weights.
        nonlocal has_weights
        if saved is None and uses_nvme:
            _refresh(wrapper)
        elif saved is None:
            original()
        elif not has_weights:
            _restore(wrapper, optimizer, saved, load_optimizer_states=False)
            has_weights = True

    # zero_nvme_offload_optimizer: DeepSpeed would load copies of swap files, and nothing else.
    with (
        replaced(engine, _load_checkpoint=load_checkpoint, zero_nvme_offload_optimizer=lambda original: False),
        replaced(wrapper, _rigid_load_state_dict=load_zero_file, _restore_from_bit16_weights=load_weights),
    ):
        yield


# ---- before anything changes -------------------------------------------------------------------------------


def _complete_state(engine: Any, arguments: Mapping[str, Any], uses_nvme: bool) -> dict[str, Any] | None:
    """Return this rank's saved ZeRO state; ``None`` if DeepSpeed can load it by itself.

    Tensors that older versions saved as NVMe swap files are mapped from these files. Raise CheckpointError if the state
    does not fit the engine. ``uses_nvme``: whether the engine offloads to NVMe.
    """
    load_dir, tag = arguments["load_dir"], arguments["tag"]
    file = Path(engine._get_zero_ckpt_name(load_dir, tag))
    # Without NVMe DeepSpeed reads the same file a moment later, with any object that the user has put into a group.
    read_file = read_states if uses_nvme else read_model
    saved = read_file(file)["optimizer_state_dict"] if file.is_file() else {}
    flats = saved.get("fp32_flat_groups") or []
    if not flats:
        return None
    is_swapped = not all(flat.numel() for flat in flats)
    misfit = _layout_difference(engine, read_model(Path(engine._get_ckpt_name(load_dir, tag))))
    # With experts, DeepSpeed loads weights from the zero files, whatever the arguments ask for.
    if misfit and (is_swapped or loads_states(arguments) or engine.has_moe_layers):
        raise CheckpointError(misfit)
    if not is_swapped:
        return saved if uses_nvme and not misfit else None
    wrapper, optimizer = engine.optimizer, engine.basic_optimizer
    read = partial(_whole, saved_swap_folder(engine, Path(load_dir, tag)))
    for index, numel in enumerate(wrapper.fp16_partitioned_groups_flat_numel):
        number = flats[index].ds_id
        flats[index] = read(flats[index], f"{number}", numel)
        state = saved["optimizer_state_dict"]["state"].get(index, {})
        for name in optimizer.state_keys(wrapper.fp32_partitioned_groups_flat[index]):
            key = "exp_avg" if name == "momentum_buffer" else name
            if key not in state:
                raise CheckpointError(
                    f"the optimizer states lack {name}: another optimizer saved them, or Muon updated other parameters "
                    "in that run; start from weights saved with engine.save_16bit_model"
                )
            state[key] = read(state[key], f"{name}-{number}", numel)
    return saved


def _whole(folder: Path, tensor: Tensor, name: str, numel: int) -> Tensor:
    """Return ``tensor``, or if it is empty, ``numel`` fp32 values that are mapped from the swap file ``name``."""
    if tensor.numel():
        return tensor
    path = folder / f"{name}.tensor.swp"
    if not path.is_file():
        raise CheckpointError(
            f"{path} is missing: it is the copy of a weight or optimizer state that offload_optimizer kept on NVMe; "
            "copy it from the machine that saved the checkpoint, or load another tag"
        )
    if (size := path.stat().st_size) < 4 * numel:
        raise CheckpointError(
            f"{path} has {size} bytes, expected at least {4 * numel}: the save that wrote it was interrupted; load "
            "another tag"
        )
    return torch.from_file(str(path), shared=False, size=numel, dtype=torch.float32)


def _layout_difference(engine: Any, model: Mapping[str, Any]) -> str | None:
    saved, saved_ranks = model["param_shapes"], model["dp_world_size"]
    current, current_ranks = engine._get_zero_param_shapes(), engine.seq_dp_world_size
    if (saved, saved_ranks) == (current, current_ranks):
        return None
    return (
        f"it was saved with {len(saved)} sub-groups on {saved_ranks} ranks, and this run has {len(current)} on "
        f"{current_ranks}, or other parameters in them; use the number of ranks, zero_optimization.sub_group_size, "
        "parameters and routing of the run that saved it"
    )


# ---- loading -----------------------------------------------------------------------------------------------


def _restore(wrapper: Any, optimizer: MuonWithAuxAdam, saved: dict[str, Any], load_optimizer_states: bool) -> None:
    """Copy the fp32 weights of ``saved``, a rank's ZeRO state, into the tensors of the engine.

    ``load_optimizer_states``: whether to load optimizer states, settings of groups and the loss scale too.
    """
    loaded: dict[Tensor, dict[str, Any]] = {}
    if load_optimizer_states:
        for name in ("loss_scaler", "dynamic_loss_scale", "overflow"):
            setattr(wrapper, name, saved[name])
        loaded = _load_settings(wrapper, optimizer, saved["optimizer_state_dict"])
    for index, flat in each_sub_group(wrapper):
        flat.data.copy_(saved["fp32_flat_groups"][index])
        for name, value in loaded.get(flat, {}).items():
            optimizer.write_state(flat, name, value)


def _load_settings(wrapper: Any, optimizer: MuonWithAuxAdam, saved: dict[str, Any]) -> dict[Tensor, dict[str, Any]]:
    """Load the settings of parameter groups; return {flat weights: {state key: saved state}} for the caller to copy."""
    bound = {flat: optimizer.state[flat] for flat in wrapper.fp32_partitioned_groups_flat}
    wrapper._set_fp32_optimizer_param_groups()
    try:
        optimizer.load_state_dict(saved)
        return {flat: optimizer.state[flat] for flat in bound}
    finally:
        wrapper._clear_fp32_optimizer_param_groups()
        optimizer.state.update(bound)


def _refresh(wrapper: Any) -> None:
    """Copy the model's 16-bit weights to the optimizer's fp32 weights, also to those on NVMe."""
    for index, bit16 in enumerate(wrapper.fp16_partitioned_groups_flat):
        with swapped_in(wrapper, index) as flat:
            if bit16 is None:
                bit16 = torch.empty_like(flat)
                wrapper._swap_in_sub_group_to_flat_buffer(bit16, index)
            flat.data.copy_(bit16.data)
