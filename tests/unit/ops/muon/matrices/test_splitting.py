# SPDX-License-Identifier: Apache-2.0
"""What is split, and into what: the user's sizes, heads by a model's config, stacks, convolutions."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.muon import MuonConfigError, MuonWithAuxAdam
from deepspeed.muon.config.types import Cut
from deepspeed.muon.matrices.block import Block
from deepspeed.muon.matrices.tp_sharding import AUTOTP
from deepspeed.muon.saved_state import fused_names
from helpers.foreign_models import linear, module, routes, splits
from helpers.models import Fused, TinyGpt
from helpers.transformers_models import MODELS, hybrid, needs_stacks

# ---- heads ----------------------------------------------------------------------------------------------


def heads(model: nn.Module) -> dict[str, str]:
    """By the last words of a projection's name, how ``per_head_muon`` cuts it."""
    found, end = splits(model, per_head_muon=True).items(), ", one matrix per head"
    return {name: text.removesuffix(end) for name, text in found if text.endswith(end)}


def three(owner: str, queries: str, keys: str, values: str) -> dict[str, str]:
    """How the projections of an attention module are cut into heads, by their names."""
    return {f"{owner}.{part}_proj": f"{rows} rows" for part, rows in zip("qkv", (queries, keys, values), strict=True)}


GQA = three("self_attn", "4 x 8", "2 x 8", "2 x 8")
KIMI = {"linear_num_heads": 2, "linear_head_dim": 16}
LATENT_LAST = {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
SLIDING = {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8, "swa_v_head_dim": 6}
#: Model, and how its projections are cut; below, models whose layers differ while their config has one number for all.
HEADS: dict[str, tuple[Callable[[], nn.Module], dict[str, str]]] = {
    "llama": (MODELS["llama"], GQA),
    "qwen3": (MODELS["qwen3"], GQA),
    "torch, by the module": (
        lambda: module(attention=nn.MultiheadAttention(32, 4)),
        {"attention.in_proj_weight": "12 x 8 rows"},
    ),
    "gpt2": (MODELS["gpt2"], {"attn.c_attn": "12 x 8 columns"}),
    "gpt_neox": (MODELS["gpt_neox"], {"attention.query_key_value": "12 x 8 rows"}),
    "phi3": (MODELS["phi3"], {"self_attn.qkv_proj": "8 x 8 rows"}),
    "deepseek_v3": (
        MODELS["deepseek_v3"],
        {"self_attn.q_b_proj": "4 x 12 rows", "self_attn.kv_b_proj": "4 x 8 + 6 rows"},
    ),
    "olmo_hybrid": (
        lambda: hybrid("OlmoHybridConfig", "linear", "full"),
        three("linear_attn", "2 x 8", "2 x 8", "4 x 6") | GQA,
    ),
    "kimi_linear": (
        lambda: hybrid("KimiLinearConfig", "linear", **KIMI, **LATENT_LAST),
        three("self_attn", "2 x 16", "2 x 16", "2 x 16"),
    ),
    "qwen3_5": (
        lambda: hybrid("Qwen3_5TextConfig", "linear", "full"),
        {"linear_attn.in_proj_qkv": "8 + 8 + 8 + 8 + 6 + 6 + 6 + 6 rows"}
        | three("self_attn", "8 x 8", "2 x 8", "2 x 8"),
    ),
    "qwen3_next": (
        lambda: hybrid("Qwen3NextConfig", "linear"),
        {"linear_attn.in_proj_qkvz": "2 x 8 + 8 + 6 + 6 + 6 + 6 rows"},
    ),
    "gemma4": (
        lambda: hybrid("Gemma4TextConfig", "full", global_head_dim=16, hidden_size_per_layer_input=0),
        three("self_attn", "4 x 16", "2 x 16", "2 x 16"),
    ),
    "mimo_v2": (
        lambda: hybrid("MiMoV2FlashConfig", "full", **SLIDING, v_head_dim=6),
        three("self_attn", "4 x 8", "2 x 8", "2 x 6"),
    ),
}


@pytest.mark.parametrize("name", HEADS)
def test_heads_of_known_models(name: str) -> None:
    make, expected = HEADS[name]
    assert heads(make()) == expected


def layer(**numbers: Any) -> nn.Module:
    """Attention in a model for text with 4 query and 2 key-value heads of width 8."""
    model = module(attention=module(q_proj=linear(8, 32), k_proj=linear(8, 16)), config=module())
    vars(model.attention).update(numbers)
    vars(model.config).update(num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    return model


@pytest.mark.parametrize(
    ("numbers", "queries", "keys"),
    [
        ({}, "4 x 8 rows", "2 x 8 rows"),
        ({"num_heads": 2, "num_kv_heads": 1, "head_dim": 16}, "2 x 16 rows", "16 rows"),
        ({"num_heads": 2, "num_kv_heads": 1}, "2 x 16 rows", "16 rows"),
        ({"num_heads": 4, "num_key_value_groups": 2}, "4 x 8 rows", "2 x 8 rows"),
        ({"num_heads": 2, "head_dim": 16, "conv1d": 1}, "2 x 16 rows", "16 rows"),
    ],
)
def test_the_numbers_of_a_layer_come_before_those_of_its_model(
    numbers: dict[str, Any], queries: str, keys: str
) -> None:
    """By the model's config, all of these shapes would be whole heads."""
    assert heads(layer(**numbers)) == {"attention.q_proj": queries, "attention.k_proj": keys}


@pytest.mark.parametrize("mark", ["A_log", "dt_bias", "conv1d", "q_conv1d"])
def test_the_config_does_not_speak_for_linear_attention(mark: str) -> None:
    """Its shapes may be whole heads of the config's width by chance."""
    with pytest.raises(MuonConfigError, match="neither its attention module nor a config has the number of heads"):
        heads(layer(**{mark: 1}))


# ---- what is refused ------------------------------------------------------------------------------------


def refusal(net: nn.Module, **params: Any) -> str:
    with pytest.raises(MuonConfigError) as error:
        MuonWithAuxAdam(net.parameters(), model=net, **params)
    return str(error.value)


def odd_heads() -> nn.Module:
    model = MODELS["llama"]()
    model.model.layers[0].self_attn.head_dim = 5
    return model


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: module(q_proj=linear()),
            "q_proj.weight of shape [16, 8] has the name of an attention projection, but",
        ),
        (lambda: module(fc=linear()), "true, but no parameter that goes to Muon has the name of an attention"),
        (
            odd_heads,
            "its 32 outputs are not whole heads; the model has 4 query and 2 key-value heads of width 5",
        ),
    ],
)
def test_heads_that_are_not_known_are_refused(make: Callable[[], nn.Module], text: str) -> None:
    """Never silently inactive."""
    found = refusal(make(), per_head_muon=True)
    assert found.startswith("optimizer.params.per_head_muon: ") and text in found


@pytest.mark.parametrize(
    ("split", "text"),
    [
        ({"qkv": [7, 5, 5]}, "'qkv' matches qkv.weight of shape [16, 80], but 7 + 5 + 5 rows add up to 17, not 16"),
        (
            {"c_attn": {"sizes": [12, 4], "axis": 1}},
            "'c_attn' matches c_attn.weight of shape [16, 12], but 12 + 4 columns add up to 16, not 12",
        ),
        ({"conv": [4]}, "'conv' matches conv.weight of shape [5, 2, 3, 3], but 4 rows add up to 4, not 5"),
        ({"w_qkv": [1]}, "'w_qkv' matches none"),
        ({"lm_head": [2, 3]}, "'lm_head' has no effect, because what it matches"),
        ({"qkv": [7, 5, 4], "^qkv": [8, 8]}, "'^qkv' has no effect, because what it matches"),
    ],
    ids=str,
)
def test_a_split_that_does_not_fit_or_cuts_nothing_is_refused(split: dict[str, Any], text: str) -> None:
    assert f"optimizer.params.muon_split: {text}" in refusal(Fused(), muon_split=split, muon_conv="flatten")


def test_sizes_of_a_parameter_that_goes_to_adamw_do_not_matter() -> None:
    """A pattern may find a head too."""
    specs = routes(Fused(), muon_split={"qkv|lm_head": Cut((7, 5, 4))})
    assert {name for name, spec in specs.items() if len(spec.blocks) == 3} == {"qkv.weight", "experts.down"}


# ---- who has cut ----------------------------------------------------------------------------------------


def tied() -> nn.Module:
    net = TinyGpt()
    net.blocks[1].up.weight = net.blocks[0].up.weight
    return net


QKV = "blocks.0.qkv.weight"


@pytest.mark.parametrize(
    ("make", "options", "name", "expected"),
    [
        (Fused, {"muon_split": {"experts": Cut((8, 16))}}, "experts.down", ("muon_split", "experts", False)),
        (
            Fused,
            {"muon_split": {"conv": Cut(())}, "muon_conv": "flatten"},
            "conv.weight",
            ("muon_split", "conv", False),
        ),
        (Fused, {}, "qkv.weight", (None, "", True)),
        (tied, {"muon_split": {r"s\.1\.up": Cut((14, 15))}}, "blocks.0.up.weight", ("muon_split", r"s\.1\.up", False)),
        (TinyGpt, {}, QKV, ("muon_fused", "", False)),
        (TinyGpt, {"muon_split": {"qkv": Cut(())}}, QKV, ("muon_split", "qkv", True)),
        (TinyGpt, {"per_head_muon": True}, QKV, ("per_head_muon", "", False)),
    ],
)
def test_what_cut_a_parameter_is_a_field_and_not_a_text(
    make: Callable[[], nn.Module], options: dict[str, Any], name: str, expected: tuple[str | None, str, bool]
) -> None:
    spec = routes(make(), **options)[name]
    assert (spec.split_by, spec.split_pattern, spec.left_whole) == expected


@pytest.mark.parametrize("tp_mode", ["whole", "shard"])
def test_a_fused_matrix_is_fused_on_every_tensor_parallel_rank(tp_mode: str) -> None:
    """Warnings about checkpoints that knew it as one matrix depend on it."""
    net = TinyGpt()
    whole = net.blocks[0].qkv.weight
    shard = nn.Parameter(torch.zeros(whole.shape[0] // 2, whole.shape[1]))
    vars(shard)[AUTOTP] = {
        "replicated": False,
        "partition_dim": 0,
        "logical_shape": tuple(whole.shape),
        "sub_param_shard_widths": [[6, 6]] * 3,
    }
    net.blocks[0].qkv.weight, net.blocks[0].qkv.tp_index = shard, 1
    optimizer = MuonWithAuxAdam(net.parameters(), model=net, tp_mode=tp_mode)
    spec = optimizer.specs[shard]
    assert [block.rows for block in spec.blocks] == [12 if tp_mode == "whole" else 6] * 3
    assert spec.split_by == "muon_fused"
    assert set(fused_names(optimizer)) == {"blocks.0.qkv.weight", "blocks.1.qkv.weight"}


# ---- stacks and convolutions -------------------------------------------------------------


@needs_stacks
def test_experts_are_stacks() -> None:
    specs = routes(MODELS["mixtral"](), muon_fused="whole")
    stacks = {name: spec for name, spec in specs.items() if "experts" in name}
    assert len(stacks) == 2
    for spec in stacks.values():
        assert spec.use_muon
        assert spec.reason == "stack of 4 matrices of MixtralExperts"
        assert [block.offset for block in spec.blocks] == [i * spec.numel // 4 for i in range(4)]
    assert not specs["model.layers.0.mlp.gate.weight"].use_muon, "the router"


@needs_stacks
def test_a_split_cuts_every_matrix_of_a_stack() -> None:
    specs = routes(MODELS["mixtral"](), muon_split={"gate_up": Cut((48, 48))})
    (spec,) = (spec for name, spec in specs.items() if "gate_up" in name)
    assert spec.split == "4 of 96 x 32, 2 x 48 rows, by muon_split 'gate_up'"
    assert len(spec.blocks) == 8


def test_convolutions_go_to_muon_when_asked_for() -> None:
    net = module(
        one=nn.Conv2d(4, 8, 3),
        line=nn.Conv1d(4, 8, 3),
        deep=nn.Conv2d(4, 4, 3, groups=4),
        up=nn.ConvTranspose2d(4, 8, 3),
    )
    specs = routes(net, muon_conv="flatten")
    assert specs["one.weight"].blocks == (Block(0, 8, 36, 36),)
    assert specs["line.weight"].blocks == (Block(0, 8, 12, 12),)
    assert specs["one.weight"].split == "flattened to 8 x 36"
    assert not specs["deep.weight"].use_muon and specs["deep.weight"].reason == "grouped Conv2d"
    assert not specs["up.weight"].use_muon
    assert not any(spec.use_muon for spec in routes(net).values())


def test_a_convolution_in_channels_last_is_refused_without_zero() -> None:
    net = module(one=nn.Conv2d(4, 8, 3)).to(memory_format=torch.channels_last)
    optimizer = MuonWithAuxAdam(net.parameters(), model=net, muon_conv="flatten")
    net.one.weight.grad = torch.ones_like(net.one.weight)
    with pytest.raises(ValueError, match=r"one\.weight: Muon needs a contiguous parameter"):
        optimizer.step()


@pytest.mark.full
def test_thousands_of_equal_matrices_are_batched() -> None:
    """One call of Newton-Schulz for the matrices of a stack that a bucket holds."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2000, 4, 6))

    net = module(experts=Experts())
    optimizer = MuonWithAuxAdam(net.parameters(), model=net, lr=0.1)
    net.experts.weight.grad = torch.randn(2000, 4, 6)
    optimizer.step()
    (plan,) = optimizer.plans
    assert [batch.count for bucket in plan.buckets for batch in bucket.batches] == [2000]
