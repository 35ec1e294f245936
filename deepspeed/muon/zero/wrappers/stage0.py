# SPDX-License-Identifier: Apache-2.0
"""Stage 0: every rank holds every parameter whole, and the same averaged gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepspeed.muon.exchange.partition import Partition, whole_partition
from deepspeed.muon.optimizer import MuonWithAuxAdam


def partitions(
    wrapper: Any, optimizer: MuonWithAuxAdam, process_group_of: Callable[[dict[str, Any]], Any]
) -> list[Partition]:
    """The parameters themselves, or the fp32 clones that ``FP16_UnfusedOptimizer`` makes of them.

    Clones are matched by index, since they carry no attributes.

    Args:
        process_group_of: over which the engine averages the gradients of a parameter group.
    """
    from deepspeed import comm  # type: ignore[attr-defined]

    result = []
    for index, group in enumerate(optimizer.param_groups):
        process_group = process_group_of(group)
        rank, copies = comm.get_rank(group=process_group), comm.get_world_size(group=process_group)
        params = group["params"] if wrapper is optimizer else wrapper.fp16_groups[index]
        specs = [optimizer.specs[param] for param in params]
        result.append(whole_partition(index, group["params"], specs, process_group, rank, copies))
    return result
