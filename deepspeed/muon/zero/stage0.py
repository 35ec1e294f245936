# SPDX-License-Identifier: Apache-2.0
"""Stage 0: every rank holds every parameter whole, and the same averaged gradient."""

from __future__ import annotations

from typing import Any

from deepspeed.muon.optimizer import MuonWithAuxAdam
from deepspeed.muon.partition import Partition, whole_partition


def partitions(wrapper: Any, optimizer: MuonWithAuxAdam, process_group: Any) -> list[Partition]:
    """The parameters themselves, or the fp32 clones that ``FP16_UnfusedOptimizer`` makes of them.

    Clones are matched by index, since they carry no attributes.

    Args:
        process_group: over which the engine averages gradients.
    """
    from deepspeed import comm  # type: ignore[attr-defined]

    rank, copies = comm.get_rank(group=process_group), comm.get_world_size(group=process_group)
    result = []
    for index, group in enumerate(optimizer.param_groups):
        params = group["params"] if wrapper is optimizer else wrapper.fp16_groups[index]
        specs = [optimizer.specs[param] for param in params]
        result.append(whole_partition(index, group["params"], specs, process_group, rank, copies))
    return result
