# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages that have other parameter groups than their neighbours: one without matrices has no Muon group."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor


def with_norms_of_all_stages(wrapper: Any, missing: int, original: Callable, *args: Any, **kwargs: Any) -> Tensor:
    """``scaled_global_norm``, which also sums the norms of ``missing`` more groups over the pipeline, here zero."""
    from deepspeed.runtime import utils

    if wrapper.cpu_offload:
        none = partial(wrapper.complete_grad_norm_calculation_for_cpu_offload, [])
    else:
        none = partial(wrapper.get_grad_norm_direct, [], [])
    norms = [original(*args, **kwargs), *(none() for _ in range(missing))]
    tensors = [torch.as_tensor(norm, dtype=torch.float32).to(wrapper.device) for norm in norms]
    combine = getattr(utils, "combine_grad_norm_groups", None)  # as this DeepSpeed combines the norms of groups
    return combine(tensors) if combine else torch.linalg.vector_norm(torch.stack(tensors))
