# SPDX-License-Identifier: Apache-2.0
"""What the installed DeepSpeed and torch offer here: accelerator, backends."""

from __future__ import annotations

from typing import Any

import torch.distributed


def accelerator() -> dict[str, Any]:
    """Kind, count and name of the device that DeepSpeed has found."""
    from deepspeed.accelerator import get_accelerator

    found = get_accelerator()
    kind = found.device_name()
    is_cuda = kind == "cuda" and torch.cuda.is_available()
    name = torch.cuda.get_device_name(0) if is_cuda else kind
    backend = found.communication_backend_name()
    return {"kind": kind, "count": int(found.device_count()), "name": name, "backend": backend}


def backends() -> dict[str, bool]:
    """Whether torch was built with each communication backend."""
    distributed = torch.distributed
    if not distributed.is_available():
        return {"gloo": False, "nccl": False}
    return {"gloo": distributed.is_gloo_available(), "nccl": distributed.is_nccl_available()}
