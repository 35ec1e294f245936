# SPDX-License-Identifier: Apache-2.0
"""Resuming at stage 3 where tensors of an engine, or of a checkpoint, lie in files on NVMe.

Stock copies the files of the checkpoint and skips the rest, so that settings, step counts, the loss scale and every
tensor that was not swapped are lost. Here both come back: ``zero_pp_rank_*`` holds what was in memory and empty
tensors for the rest, which ``offloaded_tensors/rank*`` holds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed.muon.errors import CheckpointError
from deepspeed.muon.optimizer import MuonWithAuxAdam
from deepspeed.muon.zero.checkpoint.safe_load import read_states
from deepspeed.muon.zero.consensus import gathered
from deepspeed.muon.zero.nvme import each_sub_group, saved_files, swapped_in


def keep_resumable(engine: Any, optimizer: MuonWithAuxAdam) -> None:
    """Replace stock's loading where NVMe takes part, in the engine or in the checkpoint. Stage 3 only."""
    wrapper = engine.optimizer
    if type(wrapper).__name__ != "DeepSpeedZeroOptimizer_Stage3":
        return
    loader = _Loader(engine, optimizer)
    engine._load_checkpoint = loader.checked(engine._load_checkpoint)
    engine.load_checkpoint = loader.loading(engine.load_checkpoint)
    wrapper._rigid_load_state_dict = loader.restoring(wrapper._rigid_load_state_dict)
    wrapper._restore_from_bit16_weights = loader.refreshing(wrapper._restore_from_bit16_weights)


class _Loader:
    """Loads into one engine. ``_saved`` is this rank's zero file while a checkpoint with swapped tensors is loaded."""

    def __init__(self, engine: Any, optimizer: MuonWithAuxAdam) -> None:
        self.engine, self.wrapper, self.optimizer = engine, engine.optimizer, optimizer
        self.uses_nvme = self.wrapper.swap_optimizer or self.wrapper.params_in_nvme_and_cpu
        self._saved: dict[str, Any] | None = None
        self._files = Path()
        self._has_weights = False

    # ---- around stock's functions --------------------------------------------------------------------------

    def loading(self, load: Callable) -> Callable:
        """``engine.load_checkpoint``, in which stock takes the way of an engine without NVMe."""

        @functools.wraps(load)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.engine.zero_nvme_offload_optimizer = lambda: False
            try:
                return load(*args, **kwargs)
            finally:
                del self.engine.zero_nvme_offload_optimizer
                self._saved, self._has_weights = None, False

        return wrapped

    def checked(self, load: Callable) -> Callable:
        """``engine._load_checkpoint``, the first that knows the tag, after a check of this rank's files."""

        @functools.wraps(load)
        def wrapped(load_dir: str, tag: str, **options: Any) -> Any:
            whole = options.get("load_optimizer_states", True) and not options.get("load_module_only", False)
            self._open(load_dir, tag, whole)
            if self._saved is not None or self.engine.load_universal_checkpoint():
                # Stock would gather the weights alone from the zero files, where swapped ones are empty.
                options["load_optimizer_states"] = True
            return load(load_dir, tag, **options)

        return wrapped

    def restoring(self, load: Callable) -> Callable:
        """``wrapper._rigid_load_state_dict``."""

        @functools.wraps(load)
        def wrapped(saved: dict[str, Any], load_optimizer_states: bool = True) -> None:
            is_swapped = not all(flat.numel() for flat in saved["fp32_flat_groups"])
            if is_swapped and self._saved is None:
                raise CheckpointError(f"there is no {self._files}, which holds what offload_optimizer had on NVMe")
            if self.uses_nvme or is_swapped:
                self._restore(saved, load_optimizer_states)
            else:
                load(saved, load_optimizer_states=load_optimizer_states)

        return wrapped

    def refreshing(self, refresh: Callable) -> Callable:
        """``wrapper._restore_from_bit16_weights``; in a load of weights alone they come from the checkpoint."""

        @functools.wraps(refresh)
        def wrapped() -> None:
            if self._saved is not None:
                if not self._has_weights:
                    self._restore(self._saved, load_optimizer_states=False)
            elif self.uses_nvme:
                self._refresh()
            else:
                refresh()

        return wrapped

    # ---- before anything changes ---------------------------------------------------------------------------

    def _open(self, load_dir: str, tag: str, whole: bool) -> None:
        """Read this rank's zero file and check its swapped tensors, on all ranks.

        Raises:
            CheckpointError: on every rank, what one of them lacks.
        """
        if self.engine.load_universal_checkpoint():
            return
        self._files = saved_files(self.engine, Path(load_dir, str(tag)))
        try:
            problem = self._problem(Path(self.engine._get_zero_ckpt_name(load_dir, tag)), whole)
        except Exception as error:  # the other ranks have to hear of it
            problem = f"{type(error).__name__}: {error}"
        problems = gathered(problem)
        if any(problems):
            self._saved = None
            rank, problem = next((rank, text) for rank, text in enumerate(problems) if text)
            raise CheckpointError(
                f"the checkpoint {Path(load_dir) / str(tag)} cannot be loaded: rank {rank}: {problem}"
            )

    def _problem(self, file: Path, whole: bool) -> str | None:
        """Open a zero file whose tensors are swapped; what is wrong with it, if anything."""
        if not (self.uses_nvme or self._files.parent.is_dir()):
            return None
        if not file.is_file():
            is_asked = self.uses_nvme and whole and file.parent.is_dir()
            return f"there is no {file}; use the same number of ranks as when it was saved" if is_asked else None
        saved = read_states(file)["optimizer_state_dict"]
        flats = saved.get("fp32_flat_groups") or []
        if all(flat.numel() for flat in flats):
            return None
        self._saved = saved
        if problem := self._layout_problem(saved):
            return problem
        for index, numel in enumerate(self.wrapper.fp16_partitioned_groups_flat_numel):
            for name, tensor in self._stored(saved, index):
                if tensor is None:
                    return f"it has no {name}: it was saved with another optimizer or another routing"
                path = self._path(flats[index], name)
                if tensor.numel() == 0 and not path.is_file():
                    return f"there is no {path}, which holds what offload_optimizer had on NVMe"
                if tensor.numel() == 0 and path.stat().st_size < 4 * numel:
                    return f"{path} has {path.stat().st_size} bytes, expected at least {4 * numel}; it is not complete"
        return None

    def _layout_problem(self, saved: dict[str, Any]) -> str | None:
        """Stock names a sub-group after the numbers of its first and last parameter, counted per process."""
        there, here = ([_span(flat) for flat in flats] for flats in (saved["fp32_flat_groups"], self._flats))
        same_ranks = saved["partition_count"] == self.wrapper.partition_count
        if same_ranks and len(there) == len(here) and _relative(there) == _relative(here):
            return None
        return (
            f"its {len(there)} sub-groups on {saved['partition_count']} ranks are not this engine's {len(here)} on "
            f"{self.wrapper.partition_count}; use the ranks, zero_optimization.sub_group_size, parameters and routing "
            "with which it was saved"
        )

    @property
    def _flats(self) -> list[Tensor]:
        return list(self.wrapper.fp32_partitioned_groups_flat)

    def _stored(self, saved: dict[str, Any], index: int) -> Iterator[tuple[str, Tensor | None]]:
        """What the zero file has in place of a sub-group's weights, named "", and of each of its states."""
        yield "", saved["fp32_flat_groups"][index]
        state = saved["optimizer_state_dict"]["state"].get(index, {})
        for name, value in self.optimizer.state[self._flats[index]].items():
            if value.ndim:
                yield name, state.get("exp_avg" if name == "momentum_buffer" else name)

    def _path(self, flat: Tensor, name: str) -> Path:
        return self._files / f"{name}{'-' if name else ''}{flat.ds_id}.tensor.swp"  # type: ignore[attr-defined]

    # ---- loading -------------------------------------------------------------------------------------------

    def _restore(self, saved: dict[str, Any], load_optimizer_states: bool) -> None:
        """Weights, states, settings and the loss scale, every tensor in place, from the zero file or its own file."""
        if problem := self._layout_problem(saved):
            raise CheckpointError(problem)
        wrapper, optimizer = self.wrapper, self.optimizer
        loaded: dict[Tensor, dict[str, Any]] = {}
        if load_optimizer_states:
            for name in ("loss_scaler", "dynamic_loss_scale", "overflow"):
                setattr(wrapper, name, saved[name])
            loaded = self._load_settings(saved["optimizer_state_dict"])
        for index, flat in each_sub_group(self.wrapper):
            source = saved["fp32_flat_groups"][index]
            flat.data.copy_(self._data(source, source, "", flat.numel()))
            for name, value in optimizer.state[flat].items() if load_optimizer_states else ():
                value.copy_(self._data(loaded[flat][name], source, name, value.numel()))
        self._has_weights = True

    def _data(self, stored: Tensor, flat: Tensor, name: str, numel: int) -> Tensor:
        """A tensor as it was saved: of the zero file, else of its own file, without a copy of that in memory."""
        if stored.numel():
            return stored
        return torch.from_file(str(self._path(flat, name)), shared=False, size=numel, dtype=torch.float32)

    def _load_settings(self, saved: dict[str, Any]) -> dict[Tensor, dict[str, Any]]:
        """The groups' settings, through torch's own loader; the loaded states, without binding them to the tensors."""
        wrapper, optimizer = self.wrapper, self.optimizer
        bound = {flat: optimizer.state[flat] for flat in self._flats}
        wrapper._set_fp32_optimizer_param_groups()
        try:
            optimizer.load_state_dict(saved)
            return {flat: optimizer.state[flat] for flat in bound}
        finally:
            wrapper._clear_fp32_optimizer_param_groups()
            optimizer.state.update(bound)

    def _refresh(self) -> None:
        """The fp32 weights from the model's."""
        wrapper = self.wrapper
        for index, half in enumerate(wrapper.fp16_partitioned_groups_flat):
            with swapped_in(wrapper, index) as flat:
                if half is None:
                    buffer = torch.empty_like(flat)
                    wrapper._swap_in_sub_group_to_flat_buffer(buffer, index)
                flat.data.copy_(buffer if half is None else half.data)


def _span(flat: Tensor) -> tuple[int, ...]:
    return tuple(int(number) for number in str(getattr(flat, "ds_id", "")).split("_") if number)


def _relative(spans: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    first = min((span[0] for span in spans if span), default=0)
    return [tuple(number - first for number in span) for span in spans]
