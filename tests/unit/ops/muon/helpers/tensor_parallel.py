# SPDX-License-Identifier: Apache-2.0
"""Small language models under AutoTP, and jobs that train them with data and tensor parallelism."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from helpers.models import GLOBAL_BATCH, initialize_, text, train_engine
from helpers.training import ds_config, make_engine

VOCABULARY, LENGTH = 32, 6


class Language(nn.Module):
    """Mixin for a transformers model: adds batches, and makes the loss the output."""

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        return text(step, VOCABULARY, LENGTH)

    def forward(self, inputs: Tensor | None = None, targets: Tensor | None = None, **more: Any) -> Any:
        """The mean loss; without targets, what the model does while it generates."""
        if targets is None:
            return super().forward(**more)
        logits = super().forward(input_ids=inputs, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


#: 6 query heads and 3 key-value heads: of two ranks one holds 4 and 2, the other 2 and 1.
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 34,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}


class TinyLlama(Language, LlamaForCausalLM):
    """A Llama, with separate projections for queries, keys and values."""


class TinyNeoX(Language, GPTNeoXForCausalLM):
    """A GPT-NeoX, with queries, keys and values fused head by head."""


class TinyOpt(Language, OPTForCausalLM):
    """An OPT."""


class TinyQwen(Language, Qwen3ForCausalLM):
    """A Qwen3."""


OPT = {"ffn_dim": 34, "word_embed_proj_dim": 24, "dropout": 0.0, "enable_bias": False, "max_position_embeddings": 32}
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (TinyLlama, LlamaConfig, {}),
    "neox": (TinyNeoX, GPTNeoXConfig, {}),
    "opt": (TinyOpt, OPTConfig, OPT),
    "qwen": (TinyQwen, Qwen3Config, {"head_dim": 4}),
}
"""Name -> (class, class of its config, settings beside `SIZES`)."""


class Gated(nn.Module):
    """A matrix that is not split, then gate and up in one weight, of which a rank holds a part of each."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(12, 12, bias=False)
        self.gate_up_proj = nn.ModuleList(nn.Linear(12, 2 * 17, bias=False) for _ in range(2))
        self.down_proj = nn.ModuleList(nn.Linear(17, 12, bias=False) for _ in range(2))

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 + step)
        return tuple(torch.randn(GLOBAL_BATCH, 12, generator=generator) * 3 for _ in range(2))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        inputs = self.mix(inputs.to(self.mix.weight.dtype))
        for gate_up, down in zip(self.gate_up_proj, self.down_proj, strict=True):
            gate, up = gate_up(inputs).chunk(2, dim=-1)
            inputs = inputs + down(torch.tanh(gate) * up)
        return F.mse_loss(inputs.double(), targets.double())


HEAD = 4
"""Width of a head."""
SPLIT: dict[str, Any] = {
    "gated": {"gate_up": [17, 17]},
    "neox": {"query_key_value.weight": {"sizes": [HEAD] * 3, "groups": 6}},
}
"""muon_split of each model with fused weights."""


def model(name: str) -> nn.Module:
    """Return the model of this name; "name, sdpa" selects another implementation of its attention."""
    name, _, attention = name.partition(", ")
    if name == "gated":
        net: nn.Module = Gated()
    else:
        kind, config, more = KINDS[name]
        net = kind(config(**SIZES | more | {"attn_implementation": attention or "eager"}))
    initialize_(net, 0)
    return net


def whole_weights(engine: Any) -> dict[str, Tensor]:
    """Return name -> whole master weight of this rank's layers, joined over the tensor-parallel ranks."""
    import deepspeed.comm as dist
    from deepspeed.utils import groups, safe_get_full_fp32_param

    group = getattr(engine, "model_group", groups._TENSOR_MODEL_PARALLEL_GROUP)
    is_plain, found = engine.optimizer is engine.basic_optimizer, {}
    for name, param in engine.module.named_parameters():
        is_here = is_plain or not getattr(param, "ds_numel", param.numel())
        mine = (param if is_here else safe_get_full_fp32_param(param)).detach().clone()
        shards: list[Any] = [mine]
        if group is not None:
            shards *= dist.get_world_size(group=group)
            dist.all_gather_object(shards, mine, group=group)
        cut = None if group is None else _cut(param, mine, len(shards))
        is_expert = not getattr(param, "allreduce", True)  # each rank has its own
        assert cut or is_expert or all(torch.equal(shards[0], copy) for copy in shards), f"copies of {name} differ"
        found[name] = _put_together(shards, *cut) if cut else mine
    return found


def _cut(param: nn.Parameter, mine: Tensor, ranks: int) -> tuple[int, list[list[int]]] | None:
    """Return the axis along which a weight is split, and for each of its parts the widths that the ranks have."""
    if hasattr(param, "partition_dim"):  # Megatron's marks
        width = mine.shape[param.partition_dim] // param.partition_stride
        return param.partition_dim, [[width] * ranks] * param.partition_stride
    note = getattr(param, "ds_autotp_universal_checkpoint_meta", {"replicated": True})
    if note["replicated"]:
        return None
    return note["partition_dim"], note["sub_param_shard_widths"] or [note["partition_sizes"]]


def _put_together(shards: list[Tensor], axis: int, widths: list[list[int]]) -> Tensor:
    of_ranks = [shard.split([sizes[t] for sizes in widths], dim=axis) for t, shard in enumerate(shards)]
    return torch.cat([part[k] for k in range(len(widths)) for part in of_ranks], dim=axis)


#: Config that tells AutoTP that a weight has two parts, each to be split over the ranks.
IN_PARTS = {
    "partition_config": {
        "use_default_specs": False,
        "layer_specs": [
            {"patterns": [r".*gate_up_proj\.\d\.weight$"], "partition_type": "column", "shape": [2, -1]},
            {"patterns": [r".*down_proj\.\d\.weight$"], "partition_type": "row"},
        ],
    }
}


def build(net: nn.Module, tp: int = 2, **config: Any) -> Any:
    import torch.distributed as dist

    cut = {"autotp_size": tp, **(IN_PARTS if isinstance(net, Gated) else {})}
    settings = ds_config(**config, tensor_parallel=cut)
    settings["train_micro_batch_size_per_gpu"] = GLOBAL_BATCH // (dist.get_world_size() // tp)
    return make_engine(net, settings)


def train(name: str, tp: int, steps: int, **config: Any) -> dict[str, Tensor]:
    engine = build(model(name), tp, **config)
    train_engine(engine, steps)
    weights = whole_weights(engine)
    engine.destroy()
    return weights


def holders(name: str, tp: int, **config: Any) -> dict[str, tuple[int, list[int]]]:
    """Return matrix name -> (owner, ranks that hold a part)."""
    engine = build(model(name), tp, **config)
    optimizer = engine.basic_optimizer
    pairs = zip(optimizer.partitions, optimizer.plans, strict=True)
    placed = ((block, owner) for p, plan in pairs for block, owner in zip(p.blocks, plan.owners, strict=True))
    found = {block.name: (owner, list(block.spread.holders)) for block, owner in placed}
    engine.destroy()
    return found
