# SPDX-License-Identifier: Apache-2.0
"""Files of checkpoints that hold optimizer state, read without running code of theirs."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy
import torch


def read_states(file: Path) -> Any:
    """An optimizer's file, whose tensors stay on disk where its format permits.

    Raises:
        pickle.UnpicklingError: it holds other things than tensors, numbers and what ZeRO puts beside them.
    """
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    def stage(kind: Any, name: str) -> Any:
        """In place of ``getattr``, by which some versions of Python pickle the members of enumerations."""
        if kind is not ZeroStageEnum:
            raise pickle.UnpicklingError(f"{file.name} asks for {name} of {kind}")
        return ZeroStageEnum[name]

    scalar: Any = numpy.float64(0)  # a learning rate that was computed with numpy
    numbers = [scalar.__reduce__()[0], numpy.dtype, type(scalar.dtype)]
    zeros = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address, (stage, "builtins.getattr")]
    with torch.serialization.safe_globals([*zeros, *numbers]):  # type: ignore[list-item]
        return torch.load(file, map_location="cpu", mmap=zipfile.is_zipfile(file), weights_only=True)
