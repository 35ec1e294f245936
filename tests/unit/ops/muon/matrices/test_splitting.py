# SPDX-License-Identifier: Apache-2.0
"""What is split, and into what: the user's sizes, heads by a model's config, stacks, convolutions, low-rank factors."""

from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.muon import MuonConfigError, MuonWithAuxAdam, route
from deepspeed.muon.config.schema import MuonConfig, parse
from deepspeed.muon.config.types import Cut
from deepspeed.muon.matrices.block import Block
from deepspeed.muon.matrices.tp_sharding import AUTOTP
from deepspeed.muon.saved_state import fused_names
from helpers.foreign_models import Adapted, linear, module
from helpers.models import Fused, TinyGpt
from helpers.transformers_models import MODELS, hybrid, needs_stacks


def splits(model: nn.Module, **options: Any) -> dict[str, str]:
    """By the last words of its name, how each parameter of the Muon half was split."""
    specs = route(model, MuonConfig(**options)).values()
    return {".".join(spec.name.split(".")[-3:]): spec.split for spec in specs if spec.use_muon and spec.split}


# ---- heads ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "llama",
            {
                "self_attn.q_proj.weight": "4 x 8 rows, one matrix per head",
                "self_attn.k_proj.weight": "2 x 8 rows, one matrix per head",
                "self_attn.v_proj.weight": "2 x 8 rows, one matrix per head",
            },
        ),
        (
            "qwen3",
            {
                "self_attn.q_proj.weight": "4 x 8 rows, one matrix per head",
                "self_attn.k_proj.weight": "2 x 8 rows, one matrix per head",
                "self_attn.v_proj.weight": "2 x 8 rows, one matrix per head",
            },
        ),
        ("gpt2", {"attn.c_attn.weight": "12 x 8 columns, one matrix per head"}),
        ("gpt_neox", {"attention.query_key_value.weight": "12 x 8 rows, one matrix per head"}),
        (
            "phi3",
            {
                "self_attn.qkv_proj.weight": "8 x 8 rows, one matrix per head",
                "mlp.gate_up_proj.weight": "2 x 48 rows, gate and up by muon_fused",
            },
        ),
        (
            "deepseek_v3",
            {
                "self_attn.q_b_proj.weight": "4 x 12 rows, one matrix per head",
                "self_attn.kv_b_proj.weight": "4 x 8 + 6 rows, one matrix per head",
            },
        ),
    ],
)
def test_heads_of_known_models(name: str, expected: dict[str, str]) -> None:
    model = MODELS[name]()
    assert splits(model, per_head_muon=True) == expected
    for spec in route(model, MuonConfig(per_head_muon=True)).values():
        assert sum(block.numel for block in spec.blocks) == (spec.numel if spec.use_muon else 0)


def heads(model: nn.Module) -> dict[str, str]:
    """By the last words of a projection's name, how ``per_head_muon`` cuts it."""
    found, end = splits(model, per_head_muon=True).items(), ", one matrix per head"
    return {name.removesuffix(".weight"): text.removesuffix(end) for name, text in found if text.endswith(end)}


KIMI = {"linear_num_heads": 2, "linear_head_dim": 16}
LATENT_LAST = {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
SLIDING = {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "swa_v_head_dim": 6,
    "v_head_dim": 6,
}


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (
            lambda: hybrid("OlmoHybridConfig", "linear", "full"),
            {
                "linear_attn.q_proj": "2 x 8 rows",
                "linear_attn.k_proj": "2 x 8 rows",
                "linear_attn.v_proj": "4 x 6 rows",
                "self_attn.q_proj": "4 x 8 rows",
                "self_attn.k_proj": "2 x 8 rows",
                "self_attn.v_proj": "2 x 8 rows",
            },
        ),
        (
            lambda: hybrid("KimiLinearConfig", "linear", **KIMI, **LATENT_LAST),
            {"self_attn.q_proj": "2 x 16 rows", "self_attn.k_proj": "2 x 16 rows", "self_attn.v_proj": "2 x 16 rows"},
        ),
        (
            lambda: hybrid("Qwen3_5TextConfig", "linear", "full"),
            {
                "linear_attn.in_proj_qkv": "8 + 8 + 8 + 8 + 6 + 6 + 6 + 6 rows",
                "self_attn.q_proj": "8 x 8 rows",
                "self_attn.k_proj": "2 x 8 rows",
                "self_attn.v_proj": "2 x 8 rows",
            },
        ),
        (
            lambda: hybrid("Qwen3NextConfig", "linear"),
            {"linear_attn.in_proj_qkvz": "2 x 8 + 8 + 6 + 6 + 6 + 6 rows"},
        ),
        (
            lambda: hybrid("Gemma4TextConfig", "full", global_head_dim=16, hidden_size_per_layer_input=0),
            {"self_attn.q_proj": "4 x 16 rows", "self_attn.k_proj": "2 x 16 rows", "self_attn.v_proj": "2 x 16 rows"},
        ),
        (
            lambda: hybrid("MiMoV2FlashConfig", "full", **SLIDING),
            {"self_attn.q_proj": "4 x 8 rows", "self_attn.k_proj": "2 x 8 rows", "self_attn.v_proj": "2 x 6 rows"},
        ),
    ],
)
def test_heads_by_the_layer(make: Any, expected: dict[str, str]) -> None:
    """Models whose layers differ: their config has one number for all."""
    assert heads(make()) == expected


class Layer(nn.Module):
    """Attention in a model for text with 4 query and 2 key-value heads of width 8."""

    def __init__(self, **numbers: Any) -> None:
        super().__init__()
        self.q_proj, self.k_proj = linear(8, 32), linear(8, 16)
        for name, value in numbers.items():
            setattr(self, name, value)


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ({}, {"attention.q_proj": "4 x 8 rows", "attention.k_proj": "2 x 8 rows"}),
        (
            {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16},
            {"attention.q_proj": "2 x 16 rows", "attention.k_proj": "16 rows"},
        ),
        ({"num_heads": 2, "num_kv_heads": 1}, {"attention.q_proj": "2 x 16 rows", "attention.k_proj": "16 rows"}),
        (
            {"num_heads": 4, "num_key_value_groups": 2},
            {"attention.q_proj": "4 x 8 rows", "attention.k_proj": "2 x 8 rows"},
        ),
        (
            {"num_heads": 2, "head_dim": 16, "conv1d": 1},
            {"attention.q_proj": "2 x 16 rows", "attention.k_proj": "16 rows"},
        ),
    ],
)
def test_the_numbers_of_a_layer_come_before_those_of_its_model(numbers: Any, expected: dict[str, str]) -> None:
    """By the model's config, all of these shapes would be whole heads."""
    model = module(attention=Layer(**numbers), config=module())
    model.config.num_attention_heads, model.config.num_key_value_heads, model.config.head_dim = 4, 2, 8
    assert heads(model) == expected


@pytest.mark.parametrize("mark", ["A_log", "dt_bias", "conv1d", "q_conv1d"])
def test_the_config_does_not_speak_for_linear_attention(mark: str) -> None:
    """Its shapes may be whole heads of the config's width by chance."""
    model = module(attention=Layer(**{mark: 1}), config=module())
    model.config.num_attention_heads, model.config.num_key_value_heads, model.config.head_dim = 4, 2, 8
    with pytest.raises(MuonConfigError, match="neither its attention module nor a config has the number of heads"):
        route(model, MuonConfig(per_head_muon=True))


def test_nothing_is_split_unless_asked_for() -> None:
    assert splits(MODELS["llama"]()) == {}
    assert splits(MODELS["gpt2"](), muon_fused="whole") == {}


def test_the_width_of_a_head_by_its_module() -> None:
    """Models without a config: the module of the attention knows."""
    heads = {f"{i}.qkv.weight": "6 x 6 rows, one matrix per head" for i in range(2)}
    assert splits(TinyGpt(), per_head_muon=True) == heads
    attention = module(attention=nn.MultiheadAttention(32, 4))
    assert splits(attention, per_head_muon=True) == {"attention.in_proj_weight": "12 x 8 rows, one matrix per head"}


def test_a_split_of_the_user_wins_over_heads() -> None:
    model = MODELS["llama"]()
    found = splits(model, per_head_muon=True, muon_split={"q_proj": Cut((16, 16)), "[kv]_proj": Cut(())})
    assert found == {
        "self_attn.q_proj.weight": "2 x 16 rows, by muon_split 'q_proj'",
        "self_attn.k_proj.weight": "left whole, by muon_split '[kv]_proj'",
        "self_attn.v_proj.weight": "left whole, by muon_split '[kv]_proj'",
    }


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: module(q_proj=linear()),
            "q_proj.weight of shape [16, 8] has the name of an attention projection, but neither",
        ),
        (lambda: module(fc=linear()), "no parameter that goes to Muon has the name of an attention"),
        (
            lambda: odd_heads(),
            "its 32 outputs are not whole heads; the model has 4 query and 2 key-value heads of width 5",
        ),
    ],
)
def test_heads_that_are_not_known_are_refused(make: Any, text: str) -> None:
    """Never silently inactive."""
    with pytest.raises(ValueError) as error:
        MuonWithAuxAdam((net := make()).parameters(), model=net, per_head_muon=True)
    assert text in str(error.value)
    assert str(error.value).startswith("optimizer.params.per_head_muon: ")


def odd_heads() -> nn.Module:
    model = MODELS["llama"]()
    model.model.layers[0].self_attn.head_dim = 5
    return model


# ---- sizes ----------------------------------------------------------------------------------------------


def message(net: nn.Module, **params: Any) -> str:
    with pytest.raises(MuonConfigError) as error:
        MuonWithAuxAdam(net.parameters(), model=net, **params)
    return str(error.value)


def test_sizes_that_do_not_fit_are_refused_with_the_shape() -> None:
    text = message(Fused(), muon_split={"qkv": [7, 5, 5]})
    why = "7 + 5 + 5 rows add up to 17, not 16"
    assert text == f"optimizer.params.muon_split: 'qkv' matches qkv.weight of shape [16, 80], but {why}"
    text = message(Fused(), muon_split={"c_attn": {"sizes": [12, 4], "axis": 1}})
    assert "c_attn.weight of shape [16, 12], but 12 + 4 columns add up to 16, not 12" in text
    with pytest.raises(
        ValueError,
        match=r"muon_split: 'conv' matches conv.weight of shape \[5, 2, 3, 3\], but 4 rows add up to 4, not 5",
    ):
        route(Fused(), MuonConfig(muon_split={"conv": Cut((4,))}, muon_conv="flatten"))


def test_sizes_of_a_parameter_that_goes_to_adamw_do_not_matter() -> None:
    """A pattern may find a head too."""
    net = Fused()
    specs = MuonWithAuxAdam(net.parameters(), model=net, muon_split={"qkv|lm_head": [7, 5, 4]}).specs
    assert {spec.name for spec in specs.values() if len(spec.blocks) == 3} == {"qkv.weight", "experts.down"}


def test_a_pattern_that_cuts_nothing_is_refused() -> None:
    assert "muon_split: 'w_qkv' matches none" in message(Fused(), muon_split={"w_qkv": [1]})
    assert "'lm_head' has no effect, because what it matches" in message(Fused(), muon_split={"lm_head": [2, 3]})
    shadowed = {"qkv": [7, 5, 4], "^qkv": [8, 8]}
    assert "'^qkv' has no effect, because what it matches" in message(Fused(), muon_split=shadowed)


def test_a_pattern_may_find_the_alias_of_a_tied_parameter() -> None:
    net = TinyGpt()
    net.blocks[1].up.weight = net.blocks[0].up.weight
    optimizer = MuonWithAuxAdam(net.parameters(), model=net, muon_split={r"blocks\.1\.up": [14, 15]})
    spec = optimizer.specs[net.blocks[0].up.weight]
    assert (spec.name, spec.split_by, spec.split_pattern) == ("blocks.0.up.weight", "muon_split", r"blocks\.1\.up")
    assert [block.rows for block in spec.blocks] == [14, 15]


def test_what_cut_a_parameter_is_a_field_and_not_a_text() -> None:
    options = MuonConfig(muon_split={"experts": Cut((8, 16)), "conv": Cut(())}, muon_conv="flatten")
    specs = {spec.name: spec for spec in route(Fused(), options).values()}
    assert (specs["experts.down"].split_by, specs["experts.down"].split_pattern) == ("muon_split", "experts")
    assert specs["qkv.weight"].split_by is None and specs["qkv.weight"].left_whole
    assert specs["conv.weight"].split_by == "muon_split" and not specs["conv.weight"].left_whole, "it is flattened"
    specs = {spec.name: spec for spec in route(TinyGpt()).values()}
    assert specs["blocks.0.qkv.weight"].split_by == "muon_fused"
    specs = {spec.name: spec for spec in route(TinyGpt(), MuonConfig(muon_split={"qkv": Cut(())})).values()}
    assert specs["blocks.0.qkv.weight"].left_whole
    specs = {spec.name: spec for spec in route(TinyGpt(), MuonConfig(per_head_muon=True)).values()}
    assert specs["blocks.0.qkv.weight"].split_by == "per_head_muon"


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


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ([1], "expected an object: regular expression -> sizes"),
        ({"(": [1]}, "is not a regular expression"),
        ({"a": 3}, "'a': expected \"whole\" or a list of whole numbers above 0, the sizes, not 3"),
        ({"a": []}, "'a': expected \"whole\" or a list of whole numbers above 0, the sizes, not []"),
        ({"a": [3, -1]}, "not [3, -1]"),
        ({"a": [True]}, "not [True]"),
        ({"a": {"size": [1]}}, "'a': unknown key 'size', did you mean sizes?"),
        ({"a": {"sizes": [1], "axis": 2}}, "'a': expected as axis 0 (rows) or 1 (columns), not 2"),
        ({"a": {"sizes": [1], "groups": 0}}, "'a': expected as groups a whole number above 0, not 0"),
        ({"a": {"sizes": [1], "groups": 2, "axis": 1}}, "'a': groups above 1 need axis 0"),
    ],
)
def test_wrong_values_are_explained(given: Any, text: str) -> None:
    with pytest.raises(MuonConfigError) as error:
        parse({"muon_split": given})
    assert str(error.value).startswith("optimizer.params.muon_split: ")
    assert text in str(error.value)


def test_the_digest_tells_splits_apart() -> None:
    first, second = (parse({"muon_split": {"a": sizes}}).digest() for sizes in ([1, 2], [2, 1]))
    assert first != second
    assert first == parse({"muon_split": {"a": {"sizes": (1, 2), "axis": 0}}}).digest()


# ---- stacks, convolutions, low-rank factors -------------------------------------------------------------


@needs_stacks
def test_experts_are_stacks() -> None:
    specs = {spec.name: spec for spec in route(MODELS["mixtral"](), MuonConfig(muon_fused="whole")).values()}
    stacks = {name: spec for name, spec in specs.items() if "experts" in name}
    assert len(stacks) == 2
    for spec in stacks.values():
        assert spec.use_muon
        assert spec.reason == "stack of 4 matrices of MixtralExperts"
        assert [block.offset for block in spec.blocks] == [i * spec.numel // 4 for i in range(4)]
    assert not specs["model.layers.0.mlp.gate.weight"].use_muon, "the router"


@needs_stacks
def test_a_split_cuts_every_matrix_of_a_stack() -> None:
    model = MODELS["mixtral"]()
    spec = next(
        s for s in route(model, MuonConfig(muon_split={"gate_up": Cut((48, 48))})).values() if "gate_up" in s.name
    )
    assert spec.split == "4 of 96 x 32, 2 x 48 rows, by muon_split 'gate_up'"
    assert len(spec.blocks) == 8


def test_convolutions_go_to_muon_when_asked_for() -> None:
    net = module(
        one=nn.Conv2d(4, 8, 3),
        line=nn.Conv1d(4, 8, 3),
        deep=nn.Conv2d(4, 4, 3, groups=4),
        up=nn.ConvTranspose2d(4, 8, 3),
    )
    specs = {spec.name: spec for spec in route(net, MuonConfig(muon_conv="flatten")).values()}
    assert specs["one.weight"].blocks == (Block(0, 8, 36, 36),)
    assert specs["line.weight"].blocks == (Block(0, 8, 12, 12),)
    assert specs["one.weight"].split == "flattened to 8 x 36"
    assert not specs["deep.weight"].use_muon and specs["deep.weight"].reason == "grouped Conv2d"
    assert not specs["up.weight"].use_muon
    assert not any(spec.use_muon for spec in route(net).values())


def test_a_convolution_in_channels_last_is_refused_without_zero() -> None:
    net = module(one=nn.Conv2d(4, 8, 3)).to(memory_format=torch.channels_last)
    optimizer = MuonWithAuxAdam(net.parameters(), model=net, muon_conv="flatten")
    net.one.weight.grad = torch.ones_like(net.one.weight)
    with pytest.raises(ValueError, match=r"one\.weight: Muon needs a contiguous parameter"):
        optimizer.step()


@pytest.mark.parametrize(("asked", "expected"), [("none", set()), ("B", {"up"}), ("both", {"up", "down"})])
@pytest.mark.parametrize(("down", "up"), [("lora_A", "lora_B"), ("lora_weight_1", "lora_weight_2")])
def test_low_rank_factors(asked: str, expected: set[str], down: str, up: str) -> None:
    names = {"down": down, "up": up}
    specs = route(Adapted(down, up), MuonConfig(muon_lora=asked)).values()
    assert {key for key, name in names.items() for s in specs if name in s.name and s.use_muon} == expected
    assert all("by muon_lora" in s.reason for s in specs if s.use_muon and "LoRA" in s.reason)


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
