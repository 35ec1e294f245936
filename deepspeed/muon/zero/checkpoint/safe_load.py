# SPDX-License-Identifier: Apache-2.0
"""Reads the files of a checkpoint, optimizer state without running code from them, and through memory maps."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy
import torch


def read_states(file: Path) -> Any:
    """Return the contents of an optimizer's file; tensors are memory-mapped where its format permits.

    Raises:
        pickle.UnpicklingError: it holds other things than tensors, numbers and what ZeRO puts beside them.
    """
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    def stage(kind: Any, name: str) -> Any:
        """Stand in for ``getattr``, which some versions of Python use to pickle members of enumerations."""
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
    """Return the contents of a model's file, mapped too. Unpickles objects that the user saved, as DeepSpeed does."""
    return torch.load(file, map_location="cpu", mmap=zipfile.is_zipfile(file), weights_only=False)
