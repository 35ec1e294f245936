# SPDX-License-Identifier: Apache-2.0
"""Stages of a pipeline whose optimizers have different numbers of parameter groups.

A stage without matrices has no Muon half. Stages 1 and 2 of ZeRO sum each group's gradient norm over the pipeline in a
collective of its own, so each stage has to take part as often as the one with most groups.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor


def sum_as_many_norms(wrapper: Any, groups: int) -> None:
    """Let ``scaled_global_norm`` sum as many norms as a stage with ``groups`` groups, those it lacks as zero."""
    missing = groups - len(wrapper.optimizer.param_groups)
    if missing <= 0:
        return
    scaled_global_norm = wrapper.scaled_global_norm

    @functools.wraps(scaled_global_norm)
    def of_all_stages(*args: Any, **kwargs: Any) -> Tensor:
        norms = [scaled_global_norm(*args, **kwargs)]
        for _ in range(missing):
            if wrapper.cpu_offload:
                norms.append(wrapper.complete_grad_norm_calculation_for_cpu_offload([]))
            else:
                norms.append(wrapper.get_grad_norm_direct([], []))
        return _combined([torch.as_tensor(norm, dtype=torch.float32).to(wrapper.device) for norm in norms])

    wrapper.scaled_global_norm = of_all_stages


def _combined(norms: list[Tensor]) -> Tensor:
    """As the installed DeepSpeed combines the norms of groups."""
    from deepspeed.runtime import utils

    combine = getattr(utils, "combine_grad_norm_groups", None)
    return combine(norms) if combine else torch.linalg.vector_norm(torch.stack(norms))
