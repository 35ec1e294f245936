# SPDX-License-Identifier: Apache-2.0
"""Read the files of a checkpoint through memory maps, optimizer states without running code that they may contain."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy
import torch


def read_states(file: Path) -> Any:
    """Return the contents of a ZeRO optimizer state file; its tensors are memory-mapped if the file format permits.

    Raises:
        pickle.UnpicklingError: the file contains more than tensors, numbers and the classes that ZeRO saves with them.
    """
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    def stage(kind: Any, name: str) -> Any:
        # Some Python versions pickle enumerations as calls of ``getattr``.
        if kind is not ZeroStageEnum:
            raise pickle.UnpicklingError(
                f"{file.name} calls getattr({kind}, {name!r}), which no optimizer state needs; the file may run "
                "foreign code and was not loaded: load another tag"
            )
        return ZeroStageEnum[name]

    # torch allows a function by its name; from torch 2.6 on, (function, name) would do the same.
    stage.__module__, stage.__name__, stage.__qualname__ = "builtins", "getattr", "getattr"
    scalar: Any = numpy.float64(0)  # a learning rate that was computed with numpy
    numbers = [scalar.__reduce__()[0], numpy.dtype, type(scalar.dtype)]
    zeros = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address, stage]
    with torch.serialization.safe_globals([*zeros, *numbers]):
        return torch.load(file, map_location="cpu", mmap=zipfile.is_zipfile(file), weights_only=True)


def read_model(file: Path) -> dict[str, Any]:
    """Return the contents of a model file, memory-mapped. Any Python object that the user saved in it is unpickled."""
    return torch.load(file, map_location="cpu", mmap=zipfile.is_zipfile(file), weights_only=False)
