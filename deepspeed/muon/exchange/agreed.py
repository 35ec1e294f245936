# SPDX-License-Identifier: Apache-2.0
"""Answers that all ranks have alike, so that they step, or skip a step, as one."""

from __future__ import annotations

from typing import Any, NewType

import torch
from deepspeed.accelerator import get_accelerator

from deepspeed.muon.exchange.groups import all_maxima

#: What is equal on all ranks. Made by :func:`agreed` only.
Agreed = NewType("Agreed", bool)


def agreed(has_passed: bool, *, group: Any = None, is_common: bool = False) -> Agreed:
    """Return whether a check has passed on all ranks of a group, by default all; a collective unless ``is_common``.

    Args:
        has_passed: on this rank.
        is_common: the ranks checked the same numbers, such as a norm that ZeRO has reduced over them.
    """
    if is_common:
        return Agreed(has_passed)
    has_failed = torch.tensor(
        float(not has_passed), dtype=torch.float32, device=get_accelerator().current_device_name()
    )
    return Agreed(not all_maxima(has_failed, group).item())
