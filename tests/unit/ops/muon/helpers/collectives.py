# SPDX-License-Identifier: Apache-2.0
"""Orders of collectives that work with gloo but can hang with NCCL."""


def inverted() -> None:
    """Start collectives on two groups in a different order on each rank, and wait for them at the end."""
    import torch
    import torch.distributed as dist

    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    order = groups if dist.get_rank() == 0 else groups[::-1]
    handles = [dist.all_reduce(torch.ones(3), group=group, async_op=True) for group in order]
    for handle in handles:
        handle.wait()
