# SPDX-License-Identifier: Apache-2.0
"""Loading at stage 3, where tensors of the engine or of the checkpoint lie in files on NVMe.

DeepSpeed looks for copies of the swapped files and skips the rest, so settings, step counts, the loss scale and every
tensor that was not swapped are lost. Here ``zero_pp_rank_*`` holds all of a rank, and is mapped into memory. In older
checkpoints it has empty tensors in place of those that ``offloaded_tensors/rank*`` holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed.muon.errors import CheckpointError
from deepspeed.muon.optimizer import MuonWithAuxAdam
from deepspeed.muon.patch import replaced
from deepspeed.muon.zero.checkpoint.compatibility import loads_states
from deepspeed.muon.zero.checkpoint.safe_load import read_states
from deepspeed.muon.zero.consensus import raise_on_all_ranks
from deepspeed.muon.zero.nvme import each_sub_group, saved_files, swapped_in

Layout = tuple[int, list[list[int]]]
"""Ranks, and the parameters of each sub-group."""


class NvmeLoad:
    """One ``load_checkpoint`` of one engine."""

    def __init__(self, engine: Any, optimizer: MuonWithAuxAdam) -> None:
        self.engine, self.wrapper, self.optimizer = engine, engine.optimizer, optimizer
        self.uses_nvme = self.wrapper.swap_optimizer or self.wrapper.params_in_nvme_and_cpu
        #: This rank's zero file, where it has all weights for NVMe or was completed by files of an older checkpoint.
        self._saved: dict[str, Any] | None = None
        self._files = Path()
        self._has_weights = False

    @contextmanager
    def around(self, load_dir: Path, tag: str | None, arguments: dict[str, Any]) -> Iterator[None]:
        """Check this rank's files; then let DeepSpeed load as without NVMe, with some of its functions replaced.

        Raises CheckpointError on every rank, if one of them lacks anything.
        """
        if tag is not None and not self.engine.load_universal_checkpoint():
            self._files = saved_files(self.engine, load_dir / tag)
            file = Path(self.engine._get_zero_ckpt_name(str(load_dir), tag))
            refusal = f"the checkpoint {load_dir / tag} cannot be loaded: "
            check = partial(self._check, file, loads_states(arguments))
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
        if is_swapped:
            if self._saved is None:
                raise CheckpointError(f"there is no {self._files}, which holds what offload_optimizer had on NVMe")
            saved = self._saved
        if self.uses_nvme or is_swapped:
            self._restore(saved, load_optimizer_states)
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

    def _check(self, file: Path, whole: bool) -> None:
        """Open the zero file; raise CheckpointError if it has tensors in files of their own and these do not fit."""
        if not (self.uses_nvme or self._files.parent.is_dir()):
            return
        if not file.is_file():
            if self.uses_nvme and whole and file.parent.is_dir():
                raise CheckpointError(f"there is no {file}; use the same number of ranks as when it was saved")
            return
        saved = read_states(file)["optimizer_state_dict"]
        flats = saved.get("fp32_flat_groups") or []
        if all(flat.numel() for flat in flats):
            self._saved = saved if flats and self.uses_nvme and _layout_in(saved) == self._layout() else None
            return
        self._check_layout(saved)
        for index, numel in enumerate(self.wrapper.fp16_partitioned_groups_flat_numel):
            number = flats[index].ds_id
            flats[index] = self._whole(flats[index], f"{number}", numel)
            flats[index].ds_id = number
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

    def _check_layout(self, saved: dict[str, Any]) -> None:
        (ranks_there, there), (ranks_here, here) = _layout_in(saved), self._layout()
        if (ranks_there, there) != (ranks_here, here):
            raise CheckpointError(
                f"its {len(there)} sub-groups on {ranks_there} ranks are not this engine's {len(here)} on "
                f"{ranks_here}; use the ranks, zero_optimization.sub_group_size, parameters and routing with which it "
                "was saved"
            )

    def _layout(self) -> Layout:
        return self.wrapper.partition_count, _spans(self.wrapper.fp32_partitioned_groups_flat)

    # ---- loading -------------------------------------------------------------------------------------------

    def _restore(self, saved: dict[str, Any], load_optimizer_states: bool) -> None:
        """Load weights, states, settings and the loss scale, every tensor in place."""
        self._check_layout(saved)
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


def _layout_in(saved: dict[str, Any]) -> Layout:
    return saved["partition_count"], _spans(saved["fp32_flat_groups"])


def _spans(flats: list[Tensor]) -> list[list[int]]:
    """Return the numbers of the first and last parameter of each sub-group, counted from the first of all.

    DeepSpeed names a sub-group after them, counted per process.
    """
    spans = [[int(number) for number in str(getattr(flat, "ds_id", "")).split("_") if number] for flat in flats]
    first = min((span[0] for span in spans if span), default=0)
    return [[number - first for number in span] for span in spans]
