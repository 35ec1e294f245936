# SPDX-License-Identifier: Apache-2.0
"""What overrules the routing's rules: muon_include, muon_exclude and tags; and the rule of low-rank adapters."""

from typing import Any

import pytest
import transformers
from torch import nn

from deepspeed.muon import MuonConfigError, MuonWithAuxAdam
from helpers.foreign_models import Adapted, linear, module, nested, of_class, routes
from helpers.models import TinyGpt


def optimizer_of(net: nn.Module, **params: Any) -> MuonWithAuxAdam:
    return MuonWithAuxAdam(net.parameters(), model=net, **params)


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
    net = nn.ModuleList(Adapted("lora_A", "lora_B") for _ in range(3))
    net.append(nn.Embedding(4, 8))
    text = refusal(net)
    assert "all 7 matrices go to AdamW: 6 x LoRA factor of rank 2 (0.lora_A.weight, 0.lora_B.weight); 1 x emb" in text
    assert '"muon_lora": "both"' in text and optimizer_of(net, muon_lora="both").shapes
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
    assert not optimizer.shapes and optimizer.unused_options == {}


# ---- low-rank adapters --------------------------------------------------------------------------------------

FACTORS = [("lora_A", "lora_B"), ("lora_a", "lora_b"), ("lora_down", "lora_up"), ("lora_weight_1", "lora_weight_2")]


@pytest.mark.parametrize(
    ("asked", "expected"), [("none", (False, False)), ("B", (False, True)), ("both", (True, True))]
)
@pytest.mark.parametrize(("down", "up"), FACTORS)
def test_low_rank_factors(asked: str, expected: tuple[bool, bool], down: str, up: str) -> None:
    specs = routes(Adapted(down, up), muon_lora=asked)
    for name, use_muon in zip((down, up), expected, strict=True):
        spec = specs[f"{name}.weight"]
        reason = "LoRA factor of rank 2" + (f", by muon_lora {asked}" if use_muon else "")
        assert (spec.use_muon, spec.reason, spec.is_lora) == (use_muon, reason, True)
    specs = routes(Adapted(down, up), muon_include=[up])
    assert [spec.use_muon for spec in specs.values()] == [False, True]


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
