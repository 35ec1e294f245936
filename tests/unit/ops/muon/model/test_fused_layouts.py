# SPDX-License-Identifier: Apache-2.0
"""Fused weights are recognized, and each block is what the model's own forward takes for one projection."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed.muon.layout import MatrixSpec
from helpers.foreign_models import linear, module, routes, splits
from helpers.models import Conv1D
from helpers.transformers_models import EXPERTS, GQA, LATENT, MODELS, SIZES, from_config, hybrid

OLD = {"vocab_size": 32, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 16}
FALCON = {key: SIZES[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers")} | {"num_attention_heads": 4}
SPARSE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 24}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
QKV, PER_HEAD = "queries, keys and values by muon_fused", "3 x 8 rows in 4 groups"
GATED_QKV = "queries, keys, values and gates by muon_fused"
Make = Callable[[], nn.Module]


def of(kind: str, **settings: Any) -> Make:
    return lambda: from_config(kind, **settings)


def llama4() -> nn.Module:
    """As wide as its experts' two halves side by side, so that the shape tells no axis."""
    sizes = SIZES | GQA | EXPERTS
    model = from_config("Llama4TextConfig", **sizes, intermediate_size_mlp=40, head_dim=8, use_cache=False)
    for param in model.parameters():  # the experts are left at zero
        nn.init.normal_(param, std=0.15)
    return model


#: Model -> how its fused attention weight is split, which `test_attention` holds to the model's forward.
ATTENTION: dict[str, tuple[Make, str]] = {
    "gpt2": (MODELS["gpt2"], f"3 x 32 columns, {QKV}"),
    "phi3": (MODELS["phi3"], f"32 + 16 + 16 rows, {QKV}"),
    "mpt": (of("MptConfig", vocab_size=32, d_model=32, n_layers=1, n_heads=4), f"3 x 32 rows, {QKV}"),
    "gpt_neox": (MODELS["gpt_neox"], f"{PER_HEAD}, {QKV}"),
    "bloom": (of("BloomConfig", vocab_size=32, hidden_size=32, n_layer=1, n_head=4), f"{PER_HEAD}, {QKV}"),
    "persimmon": (of("PersimmonConfig", **SIZES, num_attention_heads=4), f"{PER_HEAD}, {QKV}"),
    "falcon": (
        of("FalconConfig", **FALCON, num_kv_heads=2, new_decoder_architecture=True),
        f"16 + 8 + 8 rows in 2 groups, {QKV}",
    ),
    "falcon, multi_query": (
        of("FalconConfig", **FALCON, multi_query=True, new_decoder_architecture=False),
        f"32 + 8 + 8 rows, {QKV}",
    ),
    "falcon, all heads": (
        of("FalconConfig", **FALCON, multi_query=False, new_decoder_architecture=False),
        f"{PER_HEAD}, {QKV}",
    ),
    "gpt_bigcode": (of("GPTBigCodeConfig", **OLD), f"32 + 8 + 8 rows, {QKV}"),
    "gpt_bigcode, all heads": (of("GPTBigCodeConfig", **OLD, multi_query=False), f"{PER_HEAD}, {QKV}"),
    "codegen": (of("CodeGenConfig", **OLD, rotary_dim=4), f"{PER_HEAD}, {QKV}"),
    "deepseek_v3": (MODELS["deepseek_v3"], "8 + 6 rows in 4 groups, keys and values by muon_fused"),
}
#: Model -> how its fused gate and up are split.
GATED: dict[str, tuple[Make, str]] = {
    "phi3": (MODELS["phi3"], "2 x 48 rows"),
    "glm": (of("GlmConfig", **SIZES, **GQA, head_dim=8, pad_token_id=0), "2 x 48 rows"),
    "mixtral": (MODELS["mixtral"], "4 of 96 x 32, 2 x 48 rows"),
    "qwen3_moe": (of("Qwen3MoeConfig", **SIZES, **GQA, **MOE), "4 of 48 x 32, 2 x 24 rows"),
    "deepseek_v2": (
        of("DeepseekV2Config", **SIZES, **LATENT, **SPARSE, first_k_dense_replace=0),
        "4 of 48 x 32, 2 x 24 rows",
    ),
    "llama4": (llama4, "4 of 32 x 96, 2 x 48 columns"),
}


def filled(make: Make) -> nn.Module:
    """A model whose matrices are large enough that every part of it has an influence."""
    torch.manual_seed(0)
    model = make()
    for name, param in model.named_parameters():
        if param.ndim == 2:
            nn.init.normal_(param, std=0.15)
        elif name.endswith("A_log"):
            nn.init.constant_(param, -3.0)  # remembers
    return model.eval()


def spec_of(model: nn.Module, word: str) -> tuple[MatrixSpec, str]:
    """The one weight with this word in its name, and the path of its module."""
    (spec,) = (spec for name, spec in routes(model).items() if word in name and spec.use_muon)
    return spec, spec.name.removesuffix(".weight")


def outputs(spec: MatrixSpec) -> list[frozenset[int]]:
    """By block, which outputs of the weight's module it makes."""
    cols, axis = spec.shape[1], spec.output_axis
    return [frozenset(divmod(block.element(at), cols)[axis] for at in range(block.numel)) for block in spec.blocks]


def reached(model: nn.Module, path: str, tokens: int) -> frozenset[int]:
    """The outputs of a module at the first of some tokens that the logits of the last token depend on."""
    kept: list[Tensor] = []

    def keep(owner: nn.Module, inputs: Any, output: Tensor) -> None:
        output.retain_grad()
        kept.append(output)

    hook = model.get_submodule(path).register_forward_hook(keep)
    generator = torch.Generator().manual_seed(0)
    logits = model(input_ids=torch.randint(3, 32, (1, tokens), generator=generator)).logits
    logits[0, -1].square().sum().backward()
    hook.remove()
    size = kept[0].grad.reshape(tokens, -1)[0].abs()
    return frozenset((size > 1e-6 * size.max()).nonzero().flatten().tolist())


def silencing(model: nn.Module, path: str) -> frozenset[int]:
    """The outputs of a module without which a channel is silent before the layer's own output projection."""
    seen: list[Tensor] = []
    module, out = model.get_submodule(path), model.get_submodule(path.rpartition(".")[0] + ".out_proj")
    hooks = [out.register_forward_pre_hook(lambda owner, inputs: seen.append(inputs[0]))]
    silent = torch.zeros(1, dtype=torch.int64)
    hooks.append(module.register_forward_hook(lambda owner, inputs, output: output.index_fill(-1, silent, 0.0)))
    found = frozenset[int]()
    for silent[0] in range(module.out_features):
        with torch.no_grad():
            model(input_ids=torch.tensor([[3]]))
        found |= {int(silent)} if (seen.pop() == 0).any() else set()
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("kind", ATTENTION)
def test_attention(kind: str) -> None:
    """One layer. Of one token only the values count; of two, the last does not depend on the query of the first."""
    make, split = ATTENTION[kind]
    model = filled(make)
    (spec,) = (s for s in routes(model).values() if s.split_by == "muon_fused" and "gate" not in s.split)
    assert spec.split == split
    path, found = spec.name.removesuffix(".weight"), outputs(spec)
    values, keys_and_values = reached(model, path, 1), reached(model, path, 2)
    rest = frozenset(range(max(map(max, found)) + 1)) - keys_and_values
    assert set(found) == {part for part in (rest, keys_and_values - values, values) if part}


@pytest.mark.parametrize(
    ("kind", "name", "split"),
    [
        ("Qwen3NextConfig", "in_proj_qkvz", f"8 + 8 + 12 + 12 rows in 2 groups, {GATED_QKV}"),
        ("Qwen3_5TextConfig", "in_proj_qkv", f"16 + 16 + 24 rows, {QKV}"),
    ],
)
def test_linear_attention(kind: str, name: str, split: str) -> None:
    """The second token does not depend on query and gate of the first; without value or gate a channel is silent."""
    model = filled(lambda: hybrid(kind, "linear"))
    spec, path = spec_of(model, f"{name}.")
    assert spec.split == split
    kept, silent = reached(model, path, 2), silencing(model, path)
    rest = frozenset(range(spec.shape[0])) - kept
    parts = (rest - silent, kept - silent, kept & silent, rest & silent)
    assert outputs(spec) == [part for part in parts if part]


GATES = "2 x 8 rows in 4 groups, queries and gates by muon_fused"
STEPS = "2 x 2 rows in 2 groups, step sizes and decays by muon_fused"
BY_HEAD = [
    ("Qwen3NextConfig", "linear", "in_proj_ba", STEPS, 2),
    ("Qwen3NextConfig", "full", "q_proj", GATES, 1),
    ("Qwen3_5TextConfig", "full", "q_proj", GATES, 1),
]


@pytest.mark.parametrize(("kind", "layer", "name", "split", "tokens"), BY_HEAD)
def test_step_sizes_and_decays_queries_and_gates(kind: str, layer: str, name: str, split: str, tokens: int) -> None:
    """The first token writes what comes after it, and decays nothing. Of one token only the gate matters."""
    model = filled(lambda: hybrid(kind, layer))
    spec, path = spec_of(model, name)
    assert spec.split == split
    found = reached(model, path, tokens)
    rest = frozenset(range(spec.shape[0])) - found
    assert outputs(spec) == ([found, rest] if name == "in_proj_ba" else [rest, found])


@pytest.mark.parametrize("kind", GATED)
def test_gate_and_up(kind: str) -> None:
    """The gate passes through an activation, what comes up is linear: doubled, and halved on its way down."""
    torch.manual_seed(0)
    make, split = GATED[kind]
    model = make().eval()
    params = dict(model.named_parameters())
    if not any("gate_up" in name for name in params):
        pytest.skip(f"this transformers does not fuse gate and up of {kind}")
    spec, _ = spec_of(model, "gate_up")
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


# ---- by names, classes and numbers --------------------------------------------------------------------------


class Attention(nn.Module):
    """What only a name and some numbers tell of."""

    def __init__(self, num_heads: int = 0, num_query_groups: int = 0, head_dim: int = 8, **layers: nn.Module) -> None:
        super().__init__()
        self.num_attention_heads, self.num_query_groups, self.head_dim = num_heads, num_query_groups, head_dim
        for name, layer in layers.items():
            setattr(self, name, layer)


class InternLM2Attention(Attention):
    """The layout is that of its class."""


class Gated(Attention):
    """As in Megatron-core, whose config tells of the gates."""

    def __init__(self, **layers: nn.Module) -> None:
        super().__init__(4, 2, 8, **layers)
        self.config = module()
        self.config.attention_output_gate = True


class DeltaNet(Attention):
    """Linear attention: 2 key heads of width 8, 4 value heads of width 6."""

    def __init__(self, **layers: nn.Module) -> None:
        super().__init__(**layers)
        self.num_k_heads, self.num_v_heads, self.head_k_dim, self.head_v_dim = 2, 4, 8, 6
        self.A_log = nn.Parameter(torch.empty(4))


class Experts(nn.Module):
    """Their gate and up lie in one weight, in an order that the shape does not tell."""

    def __init__(self, **attributes: bool) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = (nn.Parameter(torch.empty(2, *shape)) for shape in ((8, 32), (16, 8)))
        vars(self).update(attributes)


class GptOssExperts(Experts):
    """Of a transformers that does not say how they lie."""


def split(owner: nn.Module) -> str:
    """How the one parameter that says anything was split."""
    (found,) = (text for name, text in splits(module(owner=owner)).items() if "down" not in name)
    return found


@pytest.mark.parametrize(
    ("owner", "text"),
    [
        (nn.MultiheadAttention(32, 4), f"3 x 32 rows, {QKV}"),
        (Attention(qkv=linear(8, 24)), f"3 x 8 rows, {QKV}"),
        (Attention(4, 2, 4, qkv=linear(8, 32)), f"16 + 8 + 8 rows, {QKV}"),
        (Attention(6, 2, 4, linear_qkv=linear(8, 40)), f"12 + 4 + 4 rows in 2 groups, {QKV}"),
        (InternLM2Attention(6, 2, 4, wqkv=linear(8, 40)), f"12 + 4 + 4 rows in 2 groups, {QKV}"),
        (Gated(linear_qkv=linear(8, 96)), f"16 + 16 + 8 + 8 rows in 2 groups, {GATED_QKV}"),
        (DeltaNet(in_proj_qkv=linear(8, 56)), f"16 + 16 + 24 rows, {QKV}"),
    ],
)
def test_layouts_by_name_and_by_class(owner: nn.Module, text: str) -> None:
    assert split(owner) == text


ALTERNATE = "left whole: gate and up are interleaved output by output in gate_up_proj, so they cannot be split"
NO_DOWN = "the weight gate_up_proj looks like a fused gate and up projection, but no down projection of a fitting shape"


@pytest.mark.parametrize(
    ("owner", "text"),
    [
        (
            Attention(query_key_value=linear(8, 24)),
            "left whole: the order of queries, keys and values in query_key_value",
        ),
        (Attention(c_attn=linear(8, 16)), "c_attn has 16 outputs, but queries, keys and"),
        (Attention(4, 2, 8, qkv=linear(8, 72)), "left whole: qkv has 72 outputs, but"),
        (Attention(4, 3, 8, linear_qkv=linear(8, 80)), "linear_qkv has 80 outputs, but"),
        (Attention(4, 2, 8, linear_qkv=linear(8, 96)), "linear_qkv has 96 outputs, but queries"),
        (Attention(kv_b_proj=linear(8, 24)), "kv_b_proj has 24 outputs, but keys and"),
        (InternLM2Attention(4, 2, 2, c_attn=Conv1D(8, 16)), "groups above 1 need axis 0"),
        (DeltaNet(in_proj_qkv=linear(12, 36)), "in_proj_qkv has 36 outputs, but queries"),
        (DeltaNet(in_proj_ba=linear(8, 6)), "in_proj_ba has 6 outputs, but step sizes"),
        (module(gate_up_proj=linear(8, 24)), NO_DOWN),
        (module(gate_up_proj=linear(8, 24), down_proj=linear(24, 8)), NO_DOWN),
        (GptOssExperts(), f"2 of 8 x 32, {ALTERNATE}"),
        (Experts(is_concatenated=False), f"2 of 8 x 32, {ALTERNATE}"),
    ],
)
def test_what_is_not_certain_stays_whole_with_a_reason(owner: nn.Module, text: str) -> None:
    assert text in split(owner)


@pytest.mark.parametrize(("numbers", "inputs"), [((4, 4, 8), 32), ((4, 0, 8), 8)])
def test_the_attention_knows_better_than_the_models_config(numbers: tuple[int, int, int], inputs: int) -> None:
    """A tower for images beside a model for text; without a number of key heads it has as many as query heads."""
    model = module(tower=Attention(*numbers, qkv=linear(inputs, 96)), config=module())
    vars(model.config).update(num_attention_heads=8 if inputs == 32 else 4, num_key_value_heads=2, head_dim=8)
    assert list(splits(model).values()) == [f"3 x 32 rows, {QKV}"]
