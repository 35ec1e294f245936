# SPDX-License-Identifier: Apache-2.0
"""Models under Ulysses: ranks of a group have parts of the time, and attention runs on parts of the heads."""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from helpers.models import GLOBAL_BATCH, Block, TinyGpt, halve
from helpers.training import ds_config

RANKS = 2
"""Ranks that share a sequence."""


class SpreadBlock(Block):
    def attend(self, *parts: Tensor) -> Tensor:
        """Attention over the whole time, by DeepSpeed's exchange of time for heads."""
        from deepspeed.sequence.layer import DistributedAttention
        from deepspeed.utils import groups

        group = groups._get_sequence_parallel_group()
        return DistributedAttention(super().attend, group, scatter_idx=2, gather_idx=1)(*parts, 0)


class SpreadGpt(TinyGpt):
    """TinyGpt, of whose time this rank has a part."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.__class__ = SpreadBlock


def build(seed: int, **config: Any) -> Any:
    """Return an engine on ranks of which each two share a sequence, rank by rank."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp as mpu

    import deepspeed

    names = [name for name in vars(mpu) if name.startswith("_SEQUENCE")]
    vars(mpu).update(dict.fromkeys(names))  # those of an earlier engine
    mpu.initialize_sequence_parallel(RANKS)
    rows = GLOBAL_BATCH * RANKS // dist.get_world_size()
    settings = ds_config(**config) | {"sequence_parallel_size": RANKS, "train_micro_batch_size_per_gpu": rows}
    return deepspeed.initialize(model=halve(SpreadGpt(), seed), config=settings, mpu=mpu)[0]


def train_step(engine: Any, number: int) -> None:
    """Train on this rank's rows and times of a global batch."""
    rank, (inputs, targets) = dist.get_rank(), engine.module.batch(number)
    rows, time = GLOBAL_BATCH * RANKS // dist.get_world_size(), inputs.shape[1] // RANKS
    top, first = rank // RANKS * rows, rank % RANKS * time
    engine.backward(engine(*(part[top : top + rows, first : first + time] for part in (inputs, targets)), first))
    engine.step()
