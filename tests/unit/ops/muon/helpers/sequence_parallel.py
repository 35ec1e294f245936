# SPDX-License-Identifier: Apache-2.0
"""Models under Ulysses: ranks of a group have parts of the time, and attention runs on parts of the heads."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from helpers.models import GLOBAL_BATCH, Block, TinyGpt, cross_entropy, initialize_
from helpers.tensor_parallel import SIZES, Language, LlamaConfig, TinyLlama
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


class Llama(TinyLlama):
    """A Llama of transformers, of whose time this rank may have a part; its loss is summed over the time."""

    def __init__(self) -> None:
        super().__init__(LlamaConfig(**SIZES | {"num_key_value_heads": 2, "attn_implementation": "sdpa"}))
        initialize_(self, 0)

    def forward(self, inputs: Tensor, targets: Tensor, first: int = 0) -> Tensor:
        positions = torch.arange(first, first + inputs.shape[1]).expand(len(inputs), -1)
        found = super(Language, self).forward(input_ids=inputs, position_ids=positions, use_cache=False)
        return cross_entropy(found.logits, targets)


def build(net: Any, **config: Any) -> Any:
    """Return an engine on ranks of which each two share a sequence, rank by rank."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    import deepspeed

    names = [name for name in vars(parallel_state_sp) if name.startswith("_SEQUENCE")]
    vars(parallel_state_sp).update(dict.fromkeys(names))  # those of an earlier engine
    rows = GLOBAL_BATCH * RANKS // dist.get_world_size()
    settings = ds_config(**config) | {"sequence_parallel_size": RANKS, "train_micro_batch_size_per_gpu": rows}
    if isinstance(net, Llama):
        mpu = UlyssesSPAttentionHF.register_with_transformers(net, "sdpa", RANKS, micro_batch_size=rows)
    else:
        mpu = parallel_state_sp
        mpu.initialize_sequence_parallel(RANKS)
    return deepspeed.initialize(model=net, config=settings, mpu=mpu)[0]


def train_step(engine: Any, number: int) -> None:
    """Train on this rank's rows and times of a global batch."""
    rank, (inputs, targets) = dist.get_rank(), engine.module.batch(number)
    rows, time = GLOBAL_BATCH * RANKS // dist.get_world_size(), inputs.shape[1] // RANKS
    top, first = rank // RANKS * rows, rank % RANKS * time
    engine.backward(engine(*(part[top : top + rows, first : first + time] for part in (inputs, targets)), first))
    engine.step()
