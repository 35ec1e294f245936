# SPDX-License-Identifier: Apache-2.0
"""How large a bucket may be: a rule of the device, the model and the number of ranks alone, so all ranks agree."""

from __future__ import annotations

from collections.abc import Sequence

from deepspeed.muon.owners import CostModel
from deepspeed.muon.placement import PlacedBlock

#: Bytes of matrices that one owner takes in one bucket, at most; a larger matrix makes a bucket of its own. On an
#: accelerator several large matrices at once fill the chip.
CPU_BUCKET_BYTES, BUCKET_BYTES = 8 * 2**20, 128 * 2**20
#: On CPUs buckets shrink to no less than this where there would be fewer rounds than so many: the first way there and
#: the last way back hide behind nothing.
LEAST_BUCKET_BYTES, ROUNDS = 2**20, 8


def bucket_limit(
    items: Sequence[PlacedBlock], world_size: int, copies: int, cost: CostModel, bucket_bytes: int | None = None
) -> int:
    """Elements of one owner in one bucket.

    Args:
        items: all matrices of the partition.
        copies: ranks that hold the matrices whole; there a bucket, which stays large, is that of all owners together.
        bucket_bytes: instead of the rule's.
    """
    if bucket_bytes is None:
        bucket_bytes = CPU_BUCKET_BYTES if cost.device_type == "cpu" else BUCKET_BYTES
        if cost.device_type == "cpu" and world_size > 1 and copies == 1:
            total = sum(item.block.numel for item in items) * cost.bytes_per_element
            bucket_bytes = min(bucket_bytes, max(LEAST_BUCKET_BYTES, total // (ROUNDS * world_size)))
    return max(1, bucket_bytes // copies // cost.bytes_per_element)
