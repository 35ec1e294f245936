# SPDX-License-Identifier: Apache-2.0
"""Calls that gloo forgives, and NCCL does not."""


def inverted() -> None:
    """Two groups, called in another order by each rank, and waited for at the end."""
    import torch
    import torch.distributed as dist

    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    order = groups if dist.get_rank() == 0 else groups[::-1]
    handles = [dist.all_reduce(torch.ones(3), group=group, async_op=True) for group in order]
    for handle in handles:
        handle.wait()
