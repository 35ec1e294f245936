# SPDX-License-Identifier: Apache-2.0
"""What overrules the routing's rules: muon_include, muon_exclude and tags; and the rule of low-rank adapters."""

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from deepspeed.muon import MuonConfigError, MuonWithAuxAdam
from helpers.foreign_models import Adapted, linear, module, nested, of_class, routes
from helpers.models import TinyGpt


def optimizer_of(net: nn.Module, **params: Any) -> MuonWithAuxAdam:
    return MuonWithAuxAdam(net.parameters(), model=net, **params)


def matrices_of(optimizer: MuonWithAuxAdam) -> int:
    """The number of matrices that Muon updates."""
    return sum(len(spec.blocks) for spec in optimizer.specs.values() if spec.use_muon)


def refusal(net: nn.Module, **params: Any) -> str:
    with pytest.raises(MuonConfigError) as error:
        optimizer_of(net, **params)
    assert not any(hasattr(param, "use_muon") for param in net.parameters()), "a refused optimizer leaves no tag"
    return str(error.value)


def shared() -> nn.Module:
    """A TinyGpt of which two embeddings are one, and two hidden matrices."""
    net = TinyGpt(tied=True)
    net.blocks[1].up.weight = net.blocks[0].up.weight
    return net


# ---- patterns -----------------------------------------------------------------------------------------------

RULES, TAG = (True, "hidden matrix of Linear", None, False), "set by the user"
#: Options, tags, and of some parameters: the route, its reason, which option decided, whether against the rules.
PATTERNS: dict[str, tuple[dict[str, Any], dict[str, bool], dict[str, tuple[bool, str, str | None, bool]]]] = {
    "include brings matrices to Muon": (
        {"muon_include": ["^lm_head", "positions"]},
        {},
        {
            "lm_head.weight": (True, "muon_include '^lm_head'", "muon_include", True),
            "positions.weight": (True, "muon_include 'positions'", "muon_include", True),
            "tokens.weight": (False, "embedding (Embedding)", None, False),
            "blocks.1.up.weight": RULES,
        },
    ),
    "include leaves vectors to AdamW and says so": (
        {"muon_include": "up"},  # one pattern needs no list
        {},
        {
            "blocks.0.up.weight": (True, "muon_include 'up'", "muon_include", False),
            "blocks.0.up.bias": (False, "0-D or 1-D, although muon_include 'up' matches", "muon_include", False),
        },
    ),
    "exclude wins over include and a tag over both": (
        {"muon_include": ["up", "down"], "muon_exclude": [r"\.0\."]},
        {"blocks.0.up.weight": True, "blocks.1.up.weight": False, "lm_head.weight": False},
        {
            "blocks.0.up.weight": (True, f"use_muon = True {TAG}", "use_muon", False),
            "blocks.1.up.weight": (False, f"use_muon = False {TAG}", "use_muon", True),
            "lm_head.weight": (False, f"use_muon = False {TAG}", "use_muon", False),
            "blocks.0.down.weight": (False, r"muon_exclude '\\.0\\.'", "muon_exclude", True),
            "blocks.1.down.weight": (True, "muon_include 'down'", "muon_include", False),
        },
    ),
    "a tied parameter has all its names": (
        {"muon_exclude": ["lm_head", r"blocks\.1\.up"]},
        {},
        {
            "tokens.weight": (False, "muon_exclude 'lm_head'", "muon_exclude", False),
            "blocks.0.up.weight": (False, r"muon_exclude 'blocks\\.1\\.up'", "muon_exclude", True),
        },
    ),
}


@pytest.mark.parametrize(("options", "tags", "expected"), PATTERNS.values(), ids=PATTERNS)
def test_patterns(options: dict[str, Any], tags: dict[str, bool], expected: dict[str, Any]) -> None:
    net = shared() if "lm_head" in options.get("muon_exclude", ()) else TinyGpt()
    for name, tag in tags.items():
        net.get_parameter(name).use_muon = tag
    specs = {spec.name: spec for spec in optimizer_of(net, **options).specs.values()}
    assert {
        name: (specs[name].use_muon, specs[name].reason, specs[name].chosen_by, specs[name].overrides_rules)
        for name in expected
    } == expected


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"muon_exclude": ["qkv", "attention.query"]}, "params.muon_exclude: 'attention.query' matches none of the"),
        ({"muon_include": ["qkv", "attention.query"]}, "params.muon_include: 'attention.query' matches none of the"),
        ({"muon_include": ["bias"]}, "'bias' matches none of the 11 trainable matrices; the nearest is "),
        ({"muon_include": ["qkv", "(up"]}, "optimizer.params.muon_include: got ['qkv', '(up']; '(up' is not a regular"),
        ({"muon_exclude": 3}, "optimizer.params.muon_exclude: got 3"),
    ],
    ids=str,
)
def test_a_pattern_that_matches_nothing_or_is_none_is_an_error(params: dict[str, Any], text: str) -> None:
    assert text in refusal(TinyGpt(), **params)


# ---- tags -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tag", [True, False, 1, 0])
def test_a_tag_wins_over_the_rules_and_stays(tag: Any) -> None:
    vector = {} if tag else {"norm": nn.LayerNorm(8)}
    model = module(
        fc=linear(), tokens=nn.Embedding(9, 8), mixer=of_class("Mixer"), conv=nn.Conv1d(4, 8, 3, bias=False), **vector
    )
    for param in model.parameters():
        param.use_muon = tag
    specs = routes(model)
    assert all(spec.use_muon is bool(tag) for spec in specs.values())
    assert {spec.reason for spec in specs.values()} == {f"use_muon = {bool(tag)} set by the user"}
    assert all(vars(param) == {"use_muon": tag} for param in model.parameters())


def tags(model: nn.Module) -> dict[str, bool]:
    return {name: param.use_muon for name, param in model.named_parameters()}


def test_parameters_are_tagged_as_routed() -> None:
    """By Python's own bool, which stock compares with `is`."""
    net = TinyGpt()
    net.blocks[1].down.requires_grad_(False)
    optimizer_of(net, muon_exclude="qkv")
    muon = {f"blocks.{i}.{name}.weight" for i in (0, 1) for name in ("proj", "up", "down")} - {"blocks.1.down.weight"}
    assert {name for name, tag in tags(net).items() if tag is True} == muon
    assert {tag for tag in tags(net).values() if tag is not True} == {False}


def test_our_tags_are_not_the_users_and_theirs_stay() -> None:
    net = TinyGpt()
    net.tokens.weight.use_muon = True
    first = optimizer_of(net, muon_exclude=["qkv"])
    assert {spec.chosen_by for spec in first.specs.values()} == {None, "use_muon", "muon_exclude"}
    second = {spec.name: spec for spec in optimizer_of(net).specs.values()}
    assert second["blocks.0.qkv.weight"].use_muon and second["blocks.0.qkv.weight"].chosen_by is None
    assert second["tokens.weight"].chosen_by == "use_muon" and tags(net)["tokens.weight"]
    net.blocks[0].qkv.weight.use_muon = False
    net.lm_head.weight.use_muon = True
    third = optimizer_of(net).specs.values()
    changed = {spec.name: spec.use_muon for spec in third if spec.chosen_by == "use_muon"}
    assert changed == {"tokens.weight": True, "blocks.0.qkv.weight": False, "lm_head.weight": True}
    assert {name for name, tag in tags(net).items() if tag} == {spec.name for spec in third if spec.use_muon}


# ---- nothing for Muon -------------------------------------------------------------------------------------------


def test_a_model_that_leaves_nothing_to_muon_is_refused_with_reasons_and_the_option_that_helps() -> None:
    """Reasons are counted, the most common first. A frozen model is DPO's reference, which gets the same config."""
    net = nn.ModuleDict({"lora": Adapted("lora_A", "lora_B"), "lm_head": linear()})
    assert '"muon_lora": "both"' in refusal(net, muon_exclude="lm_head"), "an exclusion that changes nothing"
    odd = [nested("lm_head", linear()), of_class("Mixer"), nn.Conv2d(2, 3, 2), linear(8, 1)]
    text = refusal(nn.ModuleList([nn.Embedding(4, 8), nn.Embedding(4, 8), *odd]))
    assert "all 6 matrices go to AdamW: 2 x embedding" in text and "1 other reasons" in text and "lora" not in text
    assert "no parameter of the model is trained" in refusal(TinyGpt().requires_grad_(False))


@pytest.mark.parametrize("how", ["tags", "pattern", "only embeddings"])
def test_a_half_that_is_empty_on_purpose_is_not_refused(how: str) -> None:
    net = nn.ModuleDict({"tokens": nn.Embedding(4, 8)}) if how == "only embeddings" else TinyGpt()
    for param in net.parameters() if how != "pattern" else ():
        param.use_muon = False
    optimizer = optimizer_of(net, **({"muon_exclude": "blocks"} if how == "pattern" else {}))
    assert not matrices_of(optimizer) and optimizer.unused_options == {}


# ---- low-rank adapters --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sides",
    [
        ("lora_A", "lora_B"),
        ("lora_a", "lora_b"),
        ("lora_down", "lora_up"),
        ("lora_weight_1", "lora_weight_2"),
        ("to_q_lora.down", "to_q_lora.up"),
        ("lora_layer.down", "lora_layer.up"),
        ("lora_unet_up_blocks_0_q.lora_down", "lora_unet_up_blocks_0_q.lora_up"),
        ("lora_wq_l1", "lora_wq_l2"),
        ("q.lora_A.default", "q.lora_B.default"),
    ],
)
@pytest.mark.parametrize("rank", [2, 8])
def test_low_rank_factors(sides: tuple[str, str], rank: int) -> None:
    """By the names that libraries give them; also of a rank that makes A square."""
    model = nested("adapter", nn.Identity())
    for path, layer in zip(sides, (nn.Linear(8, rank, bias=False), nn.Linear(rank, 12, bias=False)), strict=True):
        *folders, leaf = path.split(".")
        owner = model.adapter
        for folder in folders:
            if folder not in dict(owner.named_children()):
                owner.add_module(folder, nn.Module())
            owner = owner.get_submodule(folder)
        owner.add_module(leaf, layer)
    for asked, expected in (("none", [False, False]), ("B", [False, True]), ("both", [True, True])):
        specs = list(routes(model, muon_lora=asked).values())
        assert [spec.use_muon for spec in specs] == expected and all(spec.is_lora for spec in specs)
    assert [spec.use_muon for spec in routes(model, muon_include=[sides[1]]).values()] == [False, True]


def test_what_looks_like_a_factor_and_is_none() -> None:
    square = routes(module(lora_A=nn.Linear(8, 8, bias=False))).values()
    assert [spec.use_muon for spec in square] == [True], "a square matrix without the other factor"
    others = {name: linear(8, 8) for name in ("lora", "flora_A", "lora_alpha", "explorable")}
    assert all(spec.use_muon for spec in routes(module(**others)).values())


def peft_model(kind: str = "CausalLM", **options: Any) -> nn.Module:
    """A tiny Llama with adapters of rank 4."""
    from peft import LoraConfig, get_peft_model

    sizes = {"hidden_size": 16, "intermediate_size": 24, "vocab_size": 32, "num_attention_heads": 2, "num_labels": 3}
    config = transformers.LlamaConfig(num_hidden_layers=1, num_key_value_heads=1, **sizes)
    model = getattr(transformers, f"LlamaFor{kind}")(config)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "up_proj"], **options))


@pytest.mark.parametrize(
    ("kind", "options", "whole"),
    [
        ("CausalLM", {"modules_to_save": ["lm_head", "k_proj"]}, {"k_proj": True, "lm_head": False}),
        ("SequenceClassification", {"task_type": "SEQ_CLS"}, {"score": False}),
        ("QuestionAnswering", {"task_type": "QUESTION_ANS"}, {"qa_outputs": False}),
    ],
)
def test_a_model_of_pefts(kind: str, options: dict[str, Any], whole: dict[str, bool]) -> None:
    """What it trains whole goes where it goes without adapters."""
    specs = [spec for name, spec in routes(peft_model(kind, **options)).items() if name.endswith("weight")]
    factors = [spec.reason for spec in specs if "lora" in spec.name and not spec.use_muon]
    assert factors == ["LoRA factor of rank 4"] * 4
    saved = {spec.name.split(".")[-4]: spec.use_muon for spec in specs if "modules_to_save" in spec.name}
    assert saved == whole


# ---- factors of several adapters in one weight -----------------------------------------------------------------


def merged(**attributes: Any) -> nn.Module:
    """A fused projection of loralib or LitGPT: two of three parts have an adapter of rank 2."""
    layer = module(lora_A=nn.Linear(8, 4, bias=False), lora_B=nn.Linear(2, 16, bias=False))
    vars(layer).update(attributes)
    return module(attn=layer)


#: What the module says, and the sizes of the matrices in A and B, or why they stay whole.
MERGED: dict[str, tuple[dict[str, Any], list[tuple[int, int]] | str]] = {
    "loralib": ({"enable_lora": [True, False, True]}, [(8, 2), (8, 2)]),
    "litgpt": ({"enable_lora": [True, False, True], "qkv_shapes": [12, 4]}, [(12, 2), (4, 2)]),
    "nothing": ({}, "left whole: it is unknown how its rows belong to 2 adapters of rank 2"),
    "sizes of another weight": (
        {"enable_lora": [True], "qkv_shapes": [12, 5]},
        "left whole: it is unknown how its rows belong to 2 adapters of rank 2",
    ),
}


@pytest.mark.parametrize(("attributes", "expected"), MERGED.values(), ids=MERGED)
def test_adapters_of_a_fused_projection(attributes: dict[str, Any], expected: Any) -> None:
    specs = routes(merged(**attributes), muon_lora="both")
    a, b = (specs[f"attn.lora_{side}.weight"] for side in "AB")
    if isinstance(expected, str):
        assert (a.split, b.split, a.left_whole) == (expected, expected, True)
    else:
        assert [(block.rows, block.cols) for block in a.blocks] == [(2, 8), (2, 8)]
        assert [(block.rows, block.cols) for block in b.blocks] == expected


def test_factors_of_pefts_experts() -> None:
    """The products of the factors' matrices are PEFT's changes of the experts."""
    from peft import LoraConfig, get_peft_model

    sizes = {"hidden_size": 16, "intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.MixtralConfig(vocab_size=16, num_hidden_layers=1, num_local_experts=4, **sizes)
    lora = LoraConfig(r=3, target_parameters=["mlp.experts.down_proj"], init_lora_weights=False)
    net = get_peft_model(transformers.MixtralForCausalLM(config), lora)
    specs = routes(net, muon_lora="both")
    a, b = (next(spec for name, spec in specs.items() if f"lora_{side}" in name) for side in "AB")
    layer = next(part for part in net.modules() if hasattr(part, "num_experts") and hasattr(part, "lora_A"))

    def matrices(spec: Any) -> list[torch.Tensor]:
        flat = net.get_parameter(spec.name).detach().view(-1)
        found = [flat[[block.element(at) for at in range(block.numel)]] for block in spec.blocks]
        return [matrix.view(block.rows, block.cols) for matrix, block in zip(found, spec.blocks, strict=True)]

    changes = torch.stack([up @ down for up, down in zip(matrices(b), matrices(a), strict=True)])
    delta = layer.get_delta_weight("default").detach() / layer.scaling["default"]
    assert (len(a.blocks), len(b.blocks)) == (4, 4)
    assert torch.allclose(changes, delta, atol=1e-6)


def test_an_adapter_of_rank_1_stays_with_adamw() -> None:
    experts = module(lora_A=nn.Linear(8, 4, bias=False), lora_B=nn.Linear(4, 6, bias=False))
    experts.num_experts = 4
    reasons = {spec.reason for spec in routes(module(experts=experts), muon_lora="both").values()}
    assert reasons == {"LoRA factor of 4 x rank 1"}


def test_experts_in_a_2d_weight_are_not_orthogonalized_in_silence() -> None:
    glu = of_class("DbrxExpertGLU", "w1", moe_num_experts=4)
    spec = routes(module(experts=glu))["experts.w1"]
    assert not spec.use_muon and "may hold several experts' matrices" in spec.reason and "muon_split" in spec.reason
    spec = routes(module(experts=glu), muon_include="w1")["experts.w1"]
    assert spec.left_whole and spec.split == "left whole: it may hold the matrices of 4 experts; see muon_split"
    spec = routes(module(experts=glu), muon_include="w1", muon_split={"w1": [3] * 4})["experts.w1"]
    assert len(spec.blocks) == 4 and not spec.left_whole
