# SPDX-License-Identifier: Apache-2.0
"""Fused weights are recognized, and each block is what the model's own forward takes for one projection."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from deepspeed.muon import route
from deepspeed.muon.matrices.options import MatrixOptions
from deepspeed.muon.matrices.routing import MatrixSpec
from helpers.foreign_models import linear, module
from helpers.models import Conv1D, TinyGpt
from helpers.transformers_models import EXPERTS, GQA, LATENT, MODELS, SIZES, from_config

OLD = {"vocab_size": 32, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 16}
FALCON = {key: SIZES[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers")} | {"num_attention_heads": 4}
SPARSE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 24}
MODERN_BERT = SIZES | {"num_attention_heads": 4, "pad_token_id": 0, "attn_implementation": "sdpa"}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
QKV, PER_HEAD = "queries, keys and values by muon_fused", "3 x 8 rows in 4 groups"
#: Model -> how its fused attention weight is split, which `test_attention` holds to the model's forward.
ATTENTION: dict[str, tuple[Any, str]] = {
    "gpt2": (MODELS["gpt2"], f"3 x 32 columns, {QKV}"),
    "openai": (lambda: from_config("OpenAIGPTConfig", **OLD), f"3 x 32 columns, {QKV}"),
    "phi3": (MODELS["phi3"], f"32 + 16 + 16 rows, {QKV}"),
    "mpt": (lambda: from_config("MptConfig", vocab_size=32, d_model=32, n_layers=1, n_heads=4), f"3 x 32 rows, {QKV}"),
    "modernbert": (
        lambda: transformers.AutoModelForMaskedLM.from_config(transformers.ModernBertConfig(**MODERN_BERT)),
        f"3 x 32 rows, {QKV}",
    ),
    "gpt_neox": (MODELS["gpt_neox"], f"{PER_HEAD}, {QKV}"),
    "gpt_neox_japanese": (lambda: from_config("GPTNeoXJapaneseConfig", **FALCON), f"{PER_HEAD}, {QKV}"),
    "bloom": (
        lambda: from_config("BloomConfig", vocab_size=32, hidden_size=32, n_layer=1, n_head=4),
        f"{PER_HEAD}, {QKV}",
    ),
    "persimmon": (lambda: from_config("PersimmonConfig", **SIZES, num_attention_heads=4), f"{PER_HEAD}, {QKV}"),
    "falcon": (
        lambda: from_config("FalconConfig", **FALCON, num_kv_heads=2, new_decoder_architecture=True),
        f"16 + 8 + 8 rows in 2 groups, {QKV}",
    ),
    "falcon, multi_query": (
        lambda: from_config("FalconConfig", **FALCON, multi_query=True, new_decoder_architecture=False),
        f"32 + 8 + 8 rows, {QKV}",
    ),
    "falcon, all heads": (
        lambda: from_config("FalconConfig", **FALCON, multi_query=False, new_decoder_architecture=False),
        f"{PER_HEAD}, {QKV}",
    ),
    "gpt_bigcode": (lambda: from_config("GPTBigCodeConfig", **OLD), f"32 + 8 + 8 rows, {QKV}"),
    "gpt_bigcode, all heads": (
        lambda: from_config("GPTBigCodeConfig", **OLD, multi_query=False),
        f"{PER_HEAD}, {QKV}",
    ),
    "codegen": (lambda: from_config("CodeGenConfig", **OLD, rotary_dim=4), f"{PER_HEAD}, {QKV}"),
    "deepseek_v3": (MODELS["deepseek_v3"], "8 + 6 rows in 4 groups, keys and values by muon_fused"),
}
GATED: dict[str, tuple[Any, str]] = {
    "phi3": (MODELS["phi3"], "2 x 48 rows"),
    "glm": (lambda: from_config("GlmConfig", **SIZES, **GQA, head_dim=8, pad_token_id=0), "2 x 48 rows"),
    "mixtral": (MODELS["mixtral"], "4 of 96 x 32, 2 x 48 rows"),
    "qwen3_moe": (
        lambda: from_config("Qwen3MoeConfig", **SIZES, **GQA, **MOE),
        "4 of 48 x 32, 2 x 24 rows",
    ),
    "deepseek_v2": (
        lambda: from_config("DeepseekV2Config", **SIZES, **LATENT, **SPARSE, first_k_dense_replace=0),
        "4 of 48 x 32, 2 x 24 rows",
    ),
    "llama4": (lambda: llama4(), "4 of 32 x 96, 2 x 48 columns"),
}


def llama4() -> nn.Module:
    """As wide as its experts' two halves together, so that the shape alone tells no axis."""
    config = transformers.Llama4TextConfig(**SIZES, **GQA, **EXPERTS, intermediate_size_mlp=40, head_dim=8)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for param in model.parameters():  # the experts are left at zero
        nn.init.normal_(param, std=0.15)
    return model


def fused(model: nn.Module) -> MatrixSpec:
    """The one parameter that is split."""
    (spec,) = (s for s in route(model).values() if s.split.endswith("by muon_fused") and "gate" not in s.split)
    return spec


def elements(spec: MatrixSpec) -> list[set[int]]:
    """By block, which elements of the parameter it is."""
    return [{block.element(at) for at in range(block.numel)} for block in spec.blocks]


def outputs(spec: MatrixSpec, model: nn.Module, name: str) -> list[frozenset[int]]:
    """By block, which outputs of the weight's module it makes."""
    cols, axis = spec.shape[1], int(type(model.get_submodule(name)).__name__ == "Conv1D")
    return [frozenset(divmod(element, cols)[axis] for element in block) for block in elements(spec)]


def reached(model: nn.Module, name: str, tokens: int) -> frozenset[int]:
    """The outputs of a module at the first of some tokens that the logits of the last token depend on."""
    kept: list[Tensor] = []

    def keep(owner: nn.Module, inputs: Any, output: Tensor) -> None:
        output.retain_grad()
        kept.append(output)

    hook = model.get_submodule(name).register_forward_hook(keep)
    generator = torch.Generator().manual_seed(0)
    logits = model(input_ids=torch.randint(3, 32, (1, tokens), generator=generator)).logits
    logits[0, -1].square().sum().backward()
    hook.remove()
    size = kept[0].grad.reshape(tokens, -1)[0].abs()
    return frozenset((size > 1e-6 * size.max()).nonzero().flatten().tolist())


@pytest.mark.parametrize("kind", ATTENTION)
def test_attention(kind: str) -> None:
    """One layer. Of one token only the values count; of two, the last does not depend on the query of the first."""
    torch.manual_seed(0)
    make, split = ATTENTION[kind]
    model = make().eval()
    for param in model.parameters():
        if param.ndim == 2:
            nn.init.normal_(param, std=0.15)
    spec = fused(model)
    assert spec.split == split
    name = spec.name.removesuffix(".weight")
    values, keys_and_values = reached(model, name, 1), reached(model, name, 2)
    rest = frozenset(range(max(map(max, outputs(spec, model, name))) + 1)) - keys_and_values
    expected = {part for part in (rest, keys_and_values - values, values) if part}
    assert set(outputs(spec, model, name)) == expected


@pytest.mark.parametrize("kind", GATED)
def test_gate_and_up(kind: str) -> None:
    """The gate passes through an activation, what comes up is linear: doubled, and halved on its way down."""
    torch.manual_seed(0)
    make, split = GATED[kind]
    model = make().eval()
    params = dict(model.named_parameters())
    (spec,) = (s for s in route(model).values() if "gate_up" in s.name)
    assert spec.split == f"{split}, gate and up by muon_fused"
    tokens = torch.arange(3, 11)[None]
    down, gate_up = params[spec.name.replace("gate_up", "down")], params[spec.name]
    with torch.no_grad():
        before = model(input_ids=tokens).logits
        down.mul_(0.5)
        for blocks, is_linear in ((spec.blocks[::2], False), (spec.blocks[1::2], True)):
            indices = torch.tensor([block.element(at) for block in blocks for at in range(block.numel)])
            gate_up.view(-1)[indices] *= 2
            assert torch.equal(model(input_ids=tokens).logits, before) == is_linear
            gate_up.view(-1)[indices] /= 2


# ---- whole ----------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """What only a name and two numbers tell of."""

    def __init__(self, num_heads: int = 0, num_query_groups: int = 0, head_dim: int = 8, **layers: nn.Module) -> None:
        super().__init__()
        self.num_attention_heads, self.num_query_groups, self.head_dim = num_heads, num_query_groups, head_dim
        for name, layer in layers.items():
            setattr(self, name, layer)


class InternLM2Attention(Attention):
    """The layout is that of its class."""


class Halves(nn.Module):
    """Experts whose gate and up lie in one weight, in an order that the shape does not tell."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = (nn.Parameter(torch.empty(2, *shape)) for shape in ((8, 32), (16, 8)))


class GptOssExperts(Halves):
    """Of a transformers that does not say how they lie."""


class Alternating(Halves):
    """Of a transformers that says how they lie."""

    is_concatenated = False


def split(**children: nn.Module) -> str:
    """How the one parameter that says anything was split."""
    (found,) = (spec.split for spec in route(module(**children)).values() if spec.split and "down" not in spec.name)
    return found


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: {"attn": Attention(query_key_value=linear(8, 24))}, "left whole: in which order query_key_value of"),
        (lambda: {"attn": Attention(wqkv=linear(8, 24))}, "left whole: in which order wqkv of Attention holds its"),
        (lambda: {"attn": Attention(c_attn=linear(8, 16))}, "the 16 outputs of c_attn are not the queries, keys and"),
        (lambda: {"attn": Attention(4, 2, 8, qkv=linear(8, 72))}, "left whole: the 72 outputs of qkv are not"),
        (lambda: {"attn": Attention(4, 3, 8, linear_qkv=linear(8, 80))}, "the 80 outputs of linear_qkv are not"),
        (lambda: {"attn": InternLM2Attention(4, 2, 2, c_attn=Conv1D(8, 16))}, "only rows, axis 0, can have groups"),
        (lambda: {"attn": Attention(kv_b_proj=linear(8, 24))}, "the 24 outputs of kv_b_proj are not the keys and"),
        (lambda: {"mlp": module(gate_up_proj=linear(8, 24))}, "no projection down beside gate_up_proj confirms its"),
        (
            lambda: {"mlp": module(gate_up_proj=linear(8, 24), down_proj=linear(24, 8))},
            "no projection down beside gate_up_proj confirms its",
        ),
        (lambda: {"experts": GptOssExperts()}, "2 of 8 x 32, left whole: gate and up of gate_up_proj alternate"),
        (lambda: {"experts": Alternating()}, "2 of 8 x 32, left whole: gate and up of gate_up_proj alternate"),
    ],
)
def test_what_is_not_certain_stays_whole_with_a_reason(make: Any, text: str) -> None:
    assert text in split(**make())


def test_gpt_oss_stays_whole() -> None:
    model = from_config("GptOssConfig", **SIZES, **GQA, **EXPERTS, head_dim=8)
    (spec,) = (s for s in route(model).values() if "gate_up_proj" in s.name and s.use_muon)
    assert spec.split == "4 of 32 x 96, left whole: gate and up of gate_up_proj alternate one by one"
    assert len(spec.blocks) == 4


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: {"attn": nn.MultiheadAttention(32, 4)}, f"3 x 32 rows, {QKV}"),
        (lambda: {"attn": Attention(qkv=linear(8, 24))}, f"3 x 8 rows, {QKV}"),
        (lambda: {"attn": Attention(4, 2, 4, qkv=linear(8, 32))}, f"16 + 8 + 8 rows, {QKV}"),
        (lambda: {"attn": Attention(6, 2, 4, linear_qkv=linear(8, 40))}, f"12 + 4 + 4 rows in 2 groups, {QKV}"),
        (lambda: {"attn": InternLM2Attention(6, 2, 4, wqkv=linear(8, 40))}, f"12 + 4 + 4 rows in 2 groups, {QKV}"),
    ],
)
def test_layouts_by_name_and_by_class(make: Any, text: str) -> None:
    assert split(**make()) == text


def test_the_attention_knows_better_than_the_models_config() -> None:
    """A tower for images beside a model for text, whose heads would make up as many outputs."""
    model = module(tower=Attention(4, 4, 8, qkv=linear(32, 96)), config=module())
    model.config.num_attention_heads, model.config.num_key_value_heads, model.config.head_dim = 8, 2, 8
    (spec,) = route(model).values()
    assert spec.split == f"3 x 32 rows, {QKV}"


def test_what_wins() -> None:
    """muon_split, then per_head_muon, then muon_fused."""
    from deepspeed.muon.matrices.block import Cut

    def found(**options: Any) -> set[str]:
        return {spec.split for spec in route(TinyGpt(), MatrixOptions(**options)).values() if spec.split}

    assert found() == {f"3 x 12 rows, {QKV}"}
    assert found(per_head_muon=True) == {"6 x 6 rows, one matrix per head"}
    assert found(per_head_muon=True, muon_split={"qkv": Cut((18, 18))}) == {"2 x 18 rows, by muon_split 'qkv'"}
    assert found(muon_split={"qkv": Cut(())}) == {"left whole, by muon_split 'qkv'"}
    assert found(muon_fused="whole") == set()
