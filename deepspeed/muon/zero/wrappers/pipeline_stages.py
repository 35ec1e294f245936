# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages whose optimizers have different numbers of parameter groups.

A stage without matrices has no Muon group. Stages 1 and 2 of ZeRO sum each group's gradient norm over the pipeline in a
collective of its own, so each pipeline stage has to take part as often as the one with most groups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def with_norms_of_all_stages(wrapper: Any, missing: int) -> Callable[..., Tensor]:
    """A replacement of ``scaled_global_norm`` that also sums the norms of ``missing`` more groups, here zero."""

    def scaled_global_norm(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
        norms = [original(*args, **kwargs)]
        for _ in range(missing):
            if wrapper.cpu_offload:
                norms.append(wrapper.complete_grad_norm_calculation_for_cpu_offload([]))
            else:
                norms.append(wrapper.get_grad_norm_direct([], []))
        return _combined([torch.as_tensor(norm, dtype=torch.float32).to(wrapper.device) for norm in norms])

    return scaled_global_norm


def _combined(norms: list[Tensor]) -> Tensor:
    """As the installed DeepSpeed combines the norms of groups."""
    from deepspeed.runtime import utils

    combine = getattr(utils, "combine_grad_norm_groups", None)
    return combine(norms) if combine else torch.linalg.vector_norm(torch.stack(norms))
