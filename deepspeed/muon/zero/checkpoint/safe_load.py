# SPDX-License-Identifier: Apache-2.0
"""Reads the files of a checkpoint, optimizer state without running code from them, and through memory maps."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from deepspeed.muon.optimizer import MuonWithAuxAdam
from deepspeed.muon.patch import replaced


def read_states(file: Path) -> Any:
    """The contents of an optimizer's file; tensors are memory-mapped where its format permits.

    Raises:
        pickle.UnpicklingError: it holds other things than tensors, numbers and what ZeRO puts beside them.
    """
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    def stage(kind: Any, name: str) -> Any:
        """Stands in for ``getattr``, which some versions of Python use to pickle members of enumerations."""
        if kind is not ZeroStageEnum:
            raise pickle.UnpicklingError(f"{file.name} asks for {name} of {kind}")
        return ZeroStageEnum[name]

    # Allowed by this name, as a pair of object and name is from torch 2.6 on.
    stage.__module__, stage.__name__, stage.__qualname__ = "builtins", "getattr", "getattr"
    scalar: Any = numpy.float64(0)  # a learning rate that was computed with numpy
    numbers = [scalar.__reduce__()[0], numpy.dtype, type(scalar.dtype)]
    zeros = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address, stage]
    with torch.serialization.safe_globals([*zeros, *numbers]):
        return torch.load(file, map_location="cpu", mmap=zipfile.is_zipfile(file), weights_only=True)


def read_model(file: Path) -> dict[str, Any]:
    """The contents of a model's file, as above. May unpickle objects that the user saved there, as DeepSpeed does."""
    return torch.load(file, map_location="cpu", mmap=zipfile.is_zipfile(file), weights_only=False)


@contextmanager
def loading_in_place(optimizer: MuonWithAuxAdam) -> Iterator[None]:
    """Copy what ``optimizer.load_state_dict`` takes from mapped files: a later save may overwrite these."""

    def load(original: Callable, saved: Mapping[str, Any]) -> None:
        before = {tensor: dict(state) for tensor, state in optimizer.state.items()}
        original(saved)
        for tensor, state in optimizer.state.items():
            for key, value in state.items():
                if torch.is_tensor(value) and value.device.type == "cpu":  # others are copies already
                    state[key] = _copied(value, before.get(tensor, {}).get(key))

    with replaced(optimizer, load_state_dict=load):
        yield


def _copied(value: Tensor, target: Tensor | None) -> Tensor:
    """Return the values in ``target`` where it fits, which needs no more memory; else in a new tensor."""
    if target is None or (target.shape, target.dtype, target.device) != (value.shape, value.dtype, value.device):
        return value.clone()
    return target.copy_(value)
