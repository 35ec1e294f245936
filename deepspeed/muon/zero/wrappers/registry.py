# SPDX-License-Identifier: Apache-2.0
"""The list of adapters. A new wrapper of DeepSpeed needs a class in this folder, and an entry in this file."""

from __future__ import annotations

from typing import Any

from deepspeed.muon.errors import UnsupportedError
from deepspeed.muon.optimizer import MuonWithAuxAdam
from deepspeed.muon.zero.wrappers.adapter import Adapter
from deepspeed.muon.zero.wrappers.stage0 import Plain, Stage0
from deepspeed.muon.zero.wrappers.stage3 import Stage3
from deepspeed.muon.zero.wrappers.stage12 import Bf16, Stage12

ADAPTERS: dict[str, type[Adapter]] = {adapter.CLASS: adapter for adapter in (Stage0, Stage12, Bf16, Stage3)}


def adapter_for(engine: Any, optimizer: MuonWithAuxAdam) -> Adapter:
    """Return a new adapter for the wrapper that DeepSpeed put around ``optimizer``; :class:`Plain` if there is none.

    Raise UnsupportedError if no adapter serves this class of wrapper.
    """
    if engine.optimizer is optimizer:
        return Plain(engine, optimizer)
    name = type(engine.optimizer).__name__
    if name in ADAPTERS:
        return ADAPTERS[name](engine, optimizer)
    raise UnsupportedError(
        f"deepspeed-muon does not support DeepSpeed's optimizer wrapper {name}; choose a ZeRO stage and precision with "
        f"which DeepSpeed uses one of {', '.join(ADAPTERS)}, such as zero_optimization.stage 1"
    )
