# SPDX-License-Identifier: Apache-2.0
"""Loading at stage 3, where tensors of the engine or of the checkpoint lie in files on NVMe.

DeepSpeed looks for copies of the swapped files and skips the rest, so settings, step counts, the loss scale and every
tensor that was not swapped are lost. Here ``zero_pp_rank_*`` holds all of a rank, and is mapped into memory. In older
checkpoints it has empty tensors in place of those that ``offloaded_tensors/rank*`` holds.
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
from deepspeed.muon.patch import Seam, replaced
from deepspeed.muon.zero.checkpoint.compatibility import loads_states
from deepspeed.muon.zero.checkpoint.safe_load import read_model, read_states
from deepspeed.muon.zero.consensus import raise_on_all_ranks
from deepspeed.muon.zero.nvme import each_sub_group, saved_files, swapped_in

_STAGE3 = "deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3"
#: Replaced for the time of a load.
SEAMS = tuple(
    Seam(_STAGE3[0], f"{_STAGE3[1]}.{name}") for name in ("_rigid_load_state_dict", "_restore_from_bit16_weights")
)


class NvmeLoad:
    """One ``load_checkpoint`` of one engine."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.wrapper = engine, engine.optimizer
        self.optimizer: MuonWithAuxAdam = engine.basic_optimizer
        self.uses_nvme = self.wrapper.swap_optimizer or self.wrapper.params_in_nvme_and_cpu
        #: This rank's zero file, where it has all weights for NVMe or was completed by files of an older checkpoint.
        self._saved: dict[str, Any] | None = None
        self._files = Path()
        self._has_weights = False

    @contextmanager
    def around(self, arguments: Mapping[str, Any]) -> Iterator[None]:
        """Check this rank's files; then let DeepSpeed load as without NVMe, with some of its functions replaced.

        Raises CheckpointError on every rank, before anything is changed, if one of them lacks anything.

        Args:
            arguments: of ``load_checkpoint``.
        """
        load_dir, tag = arguments["load_dir"], arguments["tag"]
        if tag is not None and not self.engine.load_universal_checkpoint():
            folder = Path(load_dir, tag)
            self._files = saved_files(self.engine, folder)
            refusal = f"the checkpoint {folder} cannot be loaded: "
            check = partial(self._check, load_dir, tag, loads_states(arguments))
            raise_on_all_ranks(check, lambda reasons: CheckpointError(refusal + reasons))
        load, rigid, weights = self._load_checkpoint, self._load_zero_file, self._load_weights
        with (
            replaced(self.engine, _load_checkpoint=load, zero_nvme_offload_optimizer=lambda original: False),
            replaced(self.wrapper, _rigid_load_state_dict=rigid, _restore_from_bit16_weights=weights),
        ):
            yield

    # ---- in place of DeepSpeed's functions -------------------------------------------------------------------

    def _load_checkpoint(self, original: Callable, load_dir: str, tag: str, **options: Any) -> Any:
        """``DeepSpeedEngine._load_checkpoint``, which would gather weights from empty zero files."""
        if self._saved is not None or self.engine.load_universal_checkpoint():
            options["load_optimizer_states"] = True
        return original(load_dir, tag, **options)

    def _load_zero_file(self, original: Callable, saved: dict[str, Any], load_optimizer_states: bool = True) -> None:
        """``_rigid_load_state_dict``."""
        is_swapped = not all(flat.numel() for flat in saved["fp32_flat_groups"])
        if self.uses_nvme or is_swapped:
            self._restore(self._saved or saved, load_optimizer_states)
        else:
            original(saved, load_optimizer_states=load_optimizer_states)

    def _load_weights(self, original: Callable) -> None:
        """``_restore_from_bit16_weights``; in a load of weights alone they come from the checkpoint."""
        if self._saved is not None:
            if not self._has_weights:
                self._restore(self._saved, load_optimizer_states=False)
        elif self.uses_nvme:
            self._refresh()
        else:
            original()

    # ---- before anything changes ---------------------------------------------------------------------------

    def _check(self, load_dir: str, tag: str, with_states: bool) -> None:
        """Open this rank's zero file; raise CheckpointError if what will be loaded of it does not fit."""
        file = Path(self.engine._get_zero_ckpt_name(load_dir, tag))
        if not file.is_file():
            return
        saved = read_states(file)["optimizer_state_dict"]
        flats = saved.get("fp32_flat_groups") or []
        is_swapped = not all(flat.numel() for flat in flats)
        misfit = self._layout_difference(read_model(Path(self.engine._get_ckpt_name(load_dir, tag)))) if flats else None
        # DeepSpeed loads weights from the zero files where there are experts, whatever is asked for.
        if misfit and (is_swapped or with_states or self.engine.has_moe_layers):
            raise CheckpointError(misfit)
        if not is_swapped:
            self._saved = saved if flats and self.uses_nvme and not misfit else None
            return
        for index, numel in enumerate(self.wrapper.fp16_partitioned_groups_flat_numel):
            number = flats[index].ds_id
            flats[index] = self._whole(flats[index], f"{number}", numel)
            state = saved["optimizer_state_dict"]["state"].get(index, {})
            for name in self.optimizer.state_keys(self.wrapper.fp32_partitioned_groups_flat[index]):
                key = "exp_avg" if name == "momentum_buffer" else name
                if key not in state:
                    raise CheckpointError(f"it has no {name}: it was saved with another optimizer or another routing")
                state[key] = self._whole(state[key], f"{name}-{number}", numel)
        self._saved = saved

    def _whole(self, tensor: Tensor, name: str, numel: int) -> Tensor:
        """Return a tensor of the zero file; one without elements is mapped from a file of its own."""
        if tensor.numel():
            return tensor
        path = self._files / f"{name}.tensor.swp"
        if not path.is_file():
            raise CheckpointError(f"there is no {path}, which holds what offload_optimizer had on NVMe")
        if (size := path.stat().st_size) < 4 * numel:
            raise CheckpointError(f"{path} has {size} bytes, expected at least {4 * numel}; it is not complete")
        return torch.from_file(str(path), shared=False, size=numel, dtype=torch.float32)

    def _layout_difference(self, model: Mapping[str, Any]) -> str | None:
        saved, saved_ranks = model["param_shapes"], model["dp_world_size"]
        current, current_ranks = self.engine._get_zero_param_shapes(), self.engine.seq_dp_world_size
        if (saved, saved_ranks) == (current, current_ranks):
            return None
        return (
            f"its {len(saved)} sub-groups on {saved_ranks} ranks are not this engine's {len(current)} on "
            f"{current_ranks}; use the ranks, zero_optimization.sub_group_size, parameters and routing with which it "
            "was saved"
        )

    # ---- loading -------------------------------------------------------------------------------------------

    def _restore(self, saved: dict[str, Any], load_optimizer_states: bool) -> None:
        """Load weights, states, settings and the loss scale, every tensor in place."""
        wrapper, optimizer = self.wrapper, self.optimizer
        loaded: dict[Tensor, dict[str, Any]] = {}
        if load_optimizer_states:
            for name in ("loss_scaler", "dynamic_loss_scale", "overflow"):
                setattr(wrapper, name, saved[name])
            loaded = self._load_settings(saved["optimizer_state_dict"])
        for index, flat in each_sub_group(wrapper):
            flat.data.copy_(saved["fp32_flat_groups"][index])
            for name, value in loaded.get(flat, {}).items():
                optimizer.write_state(flat, name, value)
        self._has_weights = True

    def _load_settings(self, saved: dict[str, Any]) -> dict[Tensor, dict[str, Any]]:
        """Load the groups' settings with torch's loader; the loaded states are returned, not bound to the tensors."""
        wrapper, optimizer = self.wrapper, self.optimizer
        bound = {flat: optimizer.state[flat] for flat in wrapper.fp32_partitioned_groups_flat}
        wrapper._set_fp32_optimizer_param_groups()
        try:
            optimizer.load_state_dict(saved)
            return {flat: optimizer.state[flat] for flat in bound}
        finally:
            wrapper._clear_fp32_optimizer_param_groups()
            optimizer.state.update(bound)

    def _refresh(self) -> None:
        """Make the fp32 weights those of the model."""
        wrapper = self.wrapper
        for index, half in enumerate(wrapper.fp16_partitioned_groups_flat):
            with swapped_in(wrapper, index) as flat:
                if half is None:
                    buffer = torch.empty_like(flat)
                    wrapper._swap_in_sub_group_to_flat_buffer(buffer, index)
                flat.data.copy_(buffer if half is None else half.data)
