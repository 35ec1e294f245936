# SPDX-License-Identifier: Apache-2.0
"""Models, of transformers and others, whose weights are several matrices."""

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from helpers.models import MODELS, cross_entropy, initialize_, text, vectors

VOCAB, TIME, WIDTH = 19, 6, 12
SMALL = {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": 1, "intermediate_size": 10}
IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
DRY = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
CONFIGS: dict[str, Any] = {
    "gpt2": transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=WIDTH, n_layer=1, n_head=3, n_positions=TIME, **IDS, **DRY
    ),
    "gpt_neox": transformers.GPTNeoXConfig(**SMALL, num_attention_heads=3, attention_bias=False, **IDS),
    "phi3": transformers.Phi3Config(**SMALL, num_attention_heads=3, num_key_value_heads=1, **IDS),
    "qwen2": transformers.Qwen2Config(**SMALL, num_attention_heads=6, num_key_value_heads=2, **IDS),
    "deepseek_v3": transformers.DeepseekV3Config(
        **SMALL,
        q_lora_rank=7,
        kv_lora_rank=5,
        qk_nope_head_dim=4,
        qk_rope_head_dim=2,
        v_head_dim=3,
        num_attention_heads=3,
        num_key_value_heads=3,
        first_k_dense_replace=1,
        **IDS,
    ),
}


class Language(nn.Module):
    """Several models of transformers side by side; the loss is the sum of theirs."""

    def __init__(self, *kinds: str) -> None:
        super().__init__()
        made = {kind: transformers.AutoModelForCausalLM.from_config(CONFIGS[kind]) for kind in kinds}
        self.models = nn.ModuleDict(made)
        initialize_(self, 0)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        logits = [model(input_ids=inputs, use_cache=False).logits for model in self.models.values()]
        return torch.stack([cross_entropy(each, targets) for each in logits]).sum()

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        return text(step, VOCAB, TIME)


class GatedExperts(nn.Module):
    """Apply all experts to every input; `is_transposed`: their weights are (experts, inputs, outputs)."""

    def __init__(self, is_transposed: bool) -> None:
        super().__init__()
        shapes = (3, WIDTH, 10), (3, 5, WIDTH)
        weights = [nn.Parameter(torch.empty(shape)) for shape in shapes]
        if not is_transposed:
            weights = [nn.Parameter(weight.detach().transpose(1, 2).contiguous()) for weight in weights]
        self.gate_up_proj, self.down_proj = weights
        self.equations = ("bi,eio->beo", "beo,eoi->bi") if is_transposed else ("bi,eoi->beo", "beo,eio->bi")

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = torch.einsum(self.equations[0], hidden, self.gate_up_proj).chunk(2, dim=-1)
        return torch.einsum(self.equations[1], F.silu(gate) * up, self.down_proj)


class Layouts(Language):
    """A model with every layout of fused weights."""

    def __init__(self) -> None:
        super().__init__("gpt2", "gpt_neox", "phi3")
        self.first_experts, self.second_experts = GatedExperts(False), GatedExperts(True)
        self.attention = nn.MultiheadAttention(WIDTH, 3, bias=False)
        initialize_(self, 0)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss plus the squares of what experts and attention make of one-hot inputs, per sample."""
        hidden = F.one_hot(inputs[:, 0] % WIDTH, WIDTH).to(self.first_experts.down_proj.dtype)
        hidden = self.second_experts(hidden + self.first_experts(hidden))
        steps = F.one_hot(inputs % WIDTH, WIDTH).to(hidden.dtype).transpose(0, 1)
        mixed = self.attention(steps, steps, steps, need_weights=False)[0][-1]
        return super().forward(inputs, targets) + (hidden.square().sum() + mixed.square().sum()) / len(inputs)


class Adapters(nn.Module):
    """Frozen layers with low-rank adapters of rank 3, and 4 frozen experts whose adapters of rank 2 PEFT would pack."""

    def __init__(self) -> None:
        super().__init__()
        for index, (inputs, outputs) in enumerate(((7, 11), (11, 13))):
            adapted = nn.Module()
            adapted.base = nn.Linear(inputs, outputs)
            adapted.lora_A, adapted.lora_B = nn.Linear(inputs, 3, bias=False), nn.Linear(3, outputs, bias=False)
            self.add_module(f"layer{index}", adapted)
        self.experts = nn.Module()
        self.experts.num_experts = 4
        self.experts.lora_A, self.experts.lora_B = nn.Linear(13, 4 * 2, bias=False), nn.Linear(4 * 2, 13, bias=False)
        self.head = nn.Linear(13, 5)
        initialize_(self, 0)
        for layer in (self.layer0, self.layer1):
            layer.base.requires_grad_(False)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        hidden = inputs.to(self.head.weight.dtype)
        for layer in (self.layer0, self.layer1):
            hidden = torch.tanh(layer.base(hidden) + layer.lora_B(layer.lora_A(hidden)))
        low = self.experts.lora_A(hidden).view(-1, 4, 2)  # of each expert its rows of A, and columns of B
        each = torch.einsum("ber,ore->beo", low, self.experts.lora_B.weight.view(13, 2, 4))
        return F.mse_loss(self.head(hidden + each.tanh().sum(1)), targets.to(hidden.dtype))

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        return vectors(step, (7,), (5,))


MODELS.update(layouts=Layouts, deepseek_v3=lambda: Language("deepseek_v3"), adapters=Adapters)
