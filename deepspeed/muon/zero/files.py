# SPDX-License-Identifier: Apache-2.0
"""Files of checkpoints that hold optimizer state, read without running code of theirs."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch


def read_states(file: Path) -> Any:
    """An optimizer's file, whose tensors stay on disk where its format permits.

    Raises:
        pickle.UnpicklingError: it holds other things than tensors and what ZeRO puts beside them.
    """
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    with torch.serialization.safe_globals([DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]):
        return torch.load(file, map_location="cpu", mmap=zipfile.is_zipfile(file), weights_only=True)
