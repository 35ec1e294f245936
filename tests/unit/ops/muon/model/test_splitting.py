# SPDX-License-Identifier: Apache-2.0
"""What is split, and into what: sizes of the user, heads by a config, convolutions; blocks against brute force."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from deepspeed.muon import MuonConfigError, MuonWithAuxAdam
from deepspeed.muon.layout import AUTOTP, Block, Cut, Piece
from deepspeed.muon.saved_state import fused_names
from helpers.foreign_models import linear, module, routes, splits
from helpers.models import Fused, TinyGpt
from helpers.transformers_models import MODELS, hybrid

Make = Callable[[], nn.Module]

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
HEADS: dict[str, tuple[Make, dict[str, str]]] = {
    "llama": (MODELS["llama"], GQA),
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
    with pytest.raises(MuonConfigError, match="neither the attention module nor a config states it"):
        heads(layer(**{mark: 1}))


# ---- what is refused ------------------------------------------------------------------------------------


def odd_heads() -> nn.Module:
    model = MODELS["llama"]()
    model.model.layers[0].self_attn.head_dim = 5
    return model


def projection() -> nn.Module:
    return module(q_proj=linear())


def split_by(**cuts: Any) -> dict[str, Any]:
    return {"muon_split": cuts, "muon_conv": "flatten"}


REFUSED: list[tuple[Make, dict[str, Any], str]] = [
    (projection, {"per_head_muon": True}, "q_proj.weight of shape [16, 8] has the name of an attention projection"),
    (lambda: module(fc=linear()), {"per_head_muon": True}, "no parameter that goes to Muon has the name of an"),
    (
        odd_heads,
        {"per_head_muon": True},
        "the projection's 32 outputs cannot be split into attention heads: the model has 4 query and 2",
    ),
    (Fused, split_by(qkv=[7, 5, 5]), "'qkv' matches qkv.weight of shape [16, 80], but 7 + 5 + 5 rows add up to 17"),
    (Fused, split_by(c_attn={"sizes": [12, 4], "axis": 1}), "12 + 4 columns add up to 16, not 12"),
    (Fused, split_by(grouped={"sizes": [4, 2], "groups": 3}), "4 + 2 rows in 3 groups add up to 18, not 24"),
    (Fused, split_by(c_attn={"sizes": [6], "axis": 1, "groups": 2}), "groups above 1 need axis 0"),
    (Fused, split_by(conv=[4]), "'conv' matches conv.weight of shape [5, 2, 3, 3], but 4 rows add up to 4, not 5"),
    (Fused, split_by(w_qkv=[1]), "'w_qkv' matches none"),
    (Fused, split_by(lm_head=[2, 3]), "'lm_head' has no effect, because what it matches"),
    (Fused, {"muon_split": {"qkv": [7, 5, 4], "^qkv": [8, 8]}}, "'^qkv' has no effect, because what it matches"),
]


@pytest.mark.parametrize(("make", "params", "text"), REFUSED, ids=[text[:30] for *_, text in REFUSED])
def test_a_cut_that_is_unknown_or_does_not_fit_is_refused(make: Make, params: dict[str, Any], text: str) -> None:
    """Never silently inactive."""
    net = make()
    with pytest.raises(MuonConfigError) as error:
        MuonWithAuxAdam(net.parameters(), model=net, **params)
    assert str(error.value).startswith(f"optimizer.params.{next(iter(params))}: ") and text in str(error.value)


def test_sizes_of_a_parameter_that_goes_to_adamw_do_not_matter() -> None:
    """A pattern may find a head too."""
    specs = routes(Fused(), muon_split={"qkv|lm_head": Cut((7, 5, 4))})
    assert {name for name, spec in specs.items() if len(spec.blocks) == 3} == {"qkv.weight", "experts.down"}


# ---- who has cut ----------------------------------------------------------------------------------------


def tied() -> nn.Module:
    net = TinyGpt()
    net.blocks[1].up.weight = net.blocks[0].up.weight
    return net


def cut_by(pattern: str, *sizes: int) -> dict[str, Any]:
    return {"muon_split": {pattern: Cut(sizes)}}


HEAD, FUSED = "6 x 6 rows, one matrix per head", "3 x 12 rows, queries, keys and values by muon_fused"
PER_HEAD = {"per_head_muon": True}
#: Model, options, parameter; how it is split, which option did that, by which pattern, and whether it is left whole.
CUTS: list[tuple[Make, dict[str, Any], str, tuple[str, str | None, str, bool]]] = [
    (Fused, {}, "qkv", ("left whole: qkv has 16 outputs, but queries", None, "", True)),
    (
        Fused,
        cut_by("experts", 8, 16),
        "experts.down",
        ("3 of 24 x 6, 8 + 16 rows, by muon_split", "muon_split", "experts", False),
    ),
    (Fused, cut_by("conv") | {"muon_conv": "flatten"}, "conv", ("flattened to 5 x 18", "muon_split", "conv", False)),
    (tied, cut_by(r"s\.1\.up", 14, 15), "blocks.0.up", ("14 + 15 rows, by", "muon_split", r"s\.1\.up", False)),
    (TinyGpt, {}, "blocks.0.qkv", (FUSED, "muon_fused", "", False)),
    (TinyGpt, {"muon_fused": "whole"}, "blocks.0.qkv", ("", None, "", False)),
    (TinyGpt, PER_HEAD, "blocks.0.qkv", (HEAD, "per_head_muon", "", False)),
    (TinyGpt, PER_HEAD | cut_by("qkv", 18, 18), "blocks.0.qkv", ("2 x 18 rows, by", "muon_split", "qkv", False)),
    (TinyGpt, PER_HEAD | cut_by("qkv"), "blocks.0.qkv", ("left whole, by muon_split", "muon_split", "qkv", True)),
    (
        MODELS["phi3"],
        PER_HEAD,
        "model.layers.0.mlp.gate_up_proj",
        ("2 x 48 rows, gate and up by muon_fused", "muon_fused", "", False),
    ),
]


@pytest.mark.parametrize(("make", "options", "name", "expected"), CUTS, ids=[expected[0] for *_, expected in CUTS])
def test_what_cuts_a_parameter(
    make: Make, options: dict[str, Any], name: str, expected: tuple[str, str | None, str, bool]
) -> None:
    """muon_split wins, then per_head_muon, then muon_fused."""
    specs, (split, *rest) = routes(make(), **options), expected
    spec = specs.get(f"{name}.weight") or specs[name]
    assert spec.split.startswith(split) and bool(spec.split) is bool(split)
    assert [spec.split_by, spec.split_pattern, spec.left_whole] == rest


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


# ---- convolutions -------------------------------------------------------------


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


# ---- blocks ------------------------------------------------------------------------------------------------


@st.composite
def blocks(draw: st.DrawFn) -> tuple[Block, int]:
    """A matrix inside a parameter, and the parameter's number of elements."""
    height, width = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    kind = draw(st.sampled_from(["rows", "columns", "any", "bands"]))
    top, left = (draw(st.integers(0, size - 1)) for size in (height, width))
    rows, cols = draw(st.integers(1, height - top)), draw(st.integers(1, width - left))
    if kind == "rows":
        left, cols = 0, width
    if kind == "columns":
        top, rows = 0, height
    if kind == "bands":
        bands = draw(st.integers(1, 4))
        return Block(top * width + left, rows * bands, cols, width, bands, height * width), bands * height * width
    return Block(top * width + left, rows, cols, width), height * width


def places(block: Block) -> list[int]:
    """Where the block's elements lie in the parameter, row by row, from the definition."""
    n = block.rows // block.bands
    return [
        block.offset + i // n * block.gap + i % n * block.stride + j
        for i in range(block.rows)
        for j in range(block.cols)
    ]


def elements(piece: Piece) -> list[tuple[int, int]]:
    """(place in the parameter, place in the block) of every element."""
    grid = [(r, c) for r in range(piece.rows) for c in range(piece.cols)]
    return [(piece.element + r * piece.stride + c, piece.at + r * piece.cols + c) for r, c in grid]


@settings(max_examples=500, deadline=None)
@given(blocks(), st.data())
def test_pieces_against_brute_force(case: tuple[Block, int], data: st.DataObject) -> None:
    block, numel = case
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    pieces = list(block.pieces(start, stop))
    listed = [pair for piece in pieces for pair in elements(piece)]
    expected = {element: at for at, element in enumerate(places(block)) if start <= element < stop}
    assert dict(listed) == expected
    assert len(listed) == len(dict(listed)), "no element twice"
    assert [at for _, at in listed] == sorted(at for _, at in listed)
    assert [block.element(at) for at in range(block.numel)] == places(block)
    assert block.stop == max(places(block)) + 1 <= numel
    assert block.before(start) == sum(place < start for place in places(block))


def test_pieces_are_as_few_as_can_be() -> None:
    """Whole rows are one piece, however many there are."""
    assert list(Block(7, 4, 6, 6).pieces(0, 10**6)) == [Piece(7, 0, 1, 24, 24, 24)]
    block = Block(3, 3, 2, 5)
    assert list(block.pieces(0, 15)) == [(3, 0, 3, 2, 5, 2)]
    assert list(block.pieces(4, 14)) == [(4, 1, 1, 1, 1, 1), (8, 2, 1, 2, 2, 2), (13, 4, 1, 1, 1, 1)]
    assert len(list(Block(3, 1000, 2, 5).pieces(4, 4989))) == 3
