# SPDX-License-Identifier: Apache-2.0
"""What overrules the routing's rules: muon_include, muon_exclude and tags; and the rule of low-rank adapters."""

from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.muon import MuonConfigError, MuonWithAuxAdam, route
from deepspeed.muon.config.schema import MuonConfig
from deepspeed.muon.matrices.block import Block
from deepspeed.muon.matrices.routing import is_lora
from helpers.distributed import run
from helpers.foreign_models import Adapted, Gpt, Mixer, linear, module, routes
from helpers.models import TinyGpt
from helpers.training import ds_config


def specs_of(model: nn.Module, **patterns: Any) -> dict[str, tuple[bool, str]]:
    return {s.name: (s.use_muon, s.reason) for s in route(model, MuonConfig(**patterns)).values()}


def message(**params: Any) -> str:
    net = TinyGpt()
    with pytest.raises(MuonConfigError) as error:
        MuonWithAuxAdam(net.parameters(), model=net, **params)
    return str(error.value)


def names_of(optimizer: MuonWithAuxAdam) -> set[str]:
    return {spec.name for spec in optimizer.specs.values() if spec.use_muon}


# ---- patterns -----------------------------------------------------------------------------------------------


def test_exclude_takes_matrices_from_muon() -> None:
    got = specs_of(TinyGpt(), muon_exclude=[r"blocks\.0\.", "qkv"])
    assert got["blocks.0.up.weight"] == (False, r"muon_exclude 'blocks\\.0\\.'")
    assert got["blocks.1.qkv.weight"] == (False, "muon_exclude 'qkv'")
    assert got["blocks.1.up.weight"][0]


def test_include_brings_matrices_to_muon() -> None:
    got = specs_of(TinyGpt(), muon_include=["^lm_head", "positions"])
    assert got["lm_head.weight"] == (True, "muon_include '^lm_head'")
    assert got["positions.weight"][0] and not got["tokens.weight"][0]


def test_include_leaves_vectors_to_adamw_and_says_so() -> None:
    got = specs_of(TinyGpt(), muon_include=["up"])
    assert got["blocks.0.up.weight"][0]
    assert got["blocks.0.up.bias"] == (False, "0-D or 1-D, although muon_include 'up' matches")


def test_who_decided_is_a_field_and_not_a_text() -> None:
    net = TinyGpt()
    net.lm_head.weight.use_muon = False
    specs = {s.name: s for s in route(net, MuonConfig(muon_include=["up"], muon_exclude=["qkv"])).values()}
    by = {name: (spec.chosen_by, spec.overrides_rules) for name, spec in specs.items()}
    assert by["blocks.0.qkv.weight"] == ("muon_exclude", True)
    assert by["blocks.0.up.weight"] == ("muon_include", False)
    assert by["blocks.0.up.bias"] == ("muon_include", False)
    assert by["lm_head.weight"] == ("use_muon", False)
    assert by["blocks.0.down.weight"] == (None, False)


def test_exclude_wins_over_include_and_a_tag_over_both() -> None:
    net = TinyGpt()
    net.blocks[0].up.weight.use_muon = True
    net.blocks[1].up.weight.use_muon = False
    got = specs_of(net, muon_include=["up", "down"], muon_exclude=[r"\.0\."])
    assert got["blocks.0.up.weight"] == (True, "use_muon = True set by the user")
    assert got["blocks.1.up.weight"] == (False, "use_muon = False set by the user")
    assert not got["blocks.0.down.weight"][0] and got["blocks.1.down.weight"][0]


def test_a_tied_parameter_has_all_its_names() -> None:
    net = TinyGpt(tied=True)
    net.blocks[1].up.weight = net.blocks[0].up.weight
    got = specs_of(net, muon_exclude=["lm_head", r"blocks\.1\.up"])
    assert got["tokens.weight"] == (False, "muon_exclude 'lm_head'")
    assert got["blocks.0.up.weight"] == (False, r"muon_exclude 'blocks\\.1\\.up'")
    MuonWithAuxAdam(net.parameters(), model=net, muon_exclude=["lm_head"])


def test_a_single_pattern_needs_no_list() -> None:
    net = TinyGpt()
    optimizer = MuonWithAuxAdam(net.parameters(), model=net, muon_exclude="qkv")
    assert names_of(optimizer) == {f"blocks.{i}.{name}.weight" for i in (0, 1) for name in ("proj", "up", "down")}


@pytest.mark.parametrize("key", ["muon_include", "muon_exclude"])
def test_a_pattern_that_matches_nothing_is_an_error(key: str) -> None:
    text = message(**{key: ["qkv", "attention.query"]})
    assert f"optimizer.params.{key}: 'attention.query' matches none of the" in text
    assert "'qkv'" not in text and "such as tokens.weight" in text


def test_include_must_match_a_matrix() -> None:
    assert "matches none of the 11 trainable matrices" in message(muon_include=["bias"])


def test_a_pattern_must_compile() -> None:
    text = message(muon_include=["qkv", "(up"])
    assert "optimizer.params.muon_include" in text and "'(up' is not a regular expression" in text


def test_a_pattern_must_be_text() -> None:
    assert "optimizer.params.muon_exclude: got 3" in message(muon_exclude=3)


def initialize_with(params: dict[str, Any]) -> tuple[str, bool]:
    """The error of `deepspeed.initialize`, and whether the engine's construction had begun."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    import deepspeed

    begun = []
    original = DeepSpeedEngine.__init__
    DeepSpeedEngine.__init__ = lambda self, *args, **kwargs: begun.append(1)  # type: ignore[method-assign]
    try:
        with pytest.raises(ValueError) as error:
            deepspeed.initialize(model=TinyGpt(), config=ds_config(optimizer={"type": "Muon", "params": params}))
    finally:
        DeepSpeedEngine.__init__ = original  # type: ignore[method-assign]
    return str(error.value), bool(begun)


def test_a_pattern_without_a_match_is_refused_before_the_engine_exists() -> None:
    text, begun = run(initialize_with, 1, params={"muon_exclude": "router"})[0]
    assert "'router' matches none" in text and not begun


# ---- tags -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tag", [True, False, 1, 0])
def test_a_tag_wins_over_the_rules_and_stays(tag: Any) -> None:
    model = module(fc=linear(), tokens=nn.Embedding(9, 8), mixer=Mixer())
    for param in model.parameters():
        param.use_muon = tag
    specs = routes(model)
    assert all(spec.use_muon is bool(tag) for spec in specs.values())
    assert {spec.reason for spec in specs.values()} == {f"use_muon = {bool(tag)} set by the user"}
    assert all(vars(param) == {"use_muon": tag} for param in model.parameters())


def test_looking_at_the_routes_changes_no_parameter() -> None:
    """Neither the user's tags nor any other attribute, however often."""
    model = Gpt(tied=True)
    model.wte.weight.use_muon = True
    model.wpe.use_muon = True
    model.wpe.requires_grad_(False)
    before = {name: dict(vars(param)) for name, param in model.named_parameters()}
    first = route(model)
    assert "wte.weight" in {spec.name for spec in first.values() if spec.use_muon}
    assert route(model) == first
    assert {name: vars(param) for name, param in model.named_parameters()} == before


def tags(model: nn.Module) -> dict[str, bool]:
    return {name: param.use_muon for name, param in model.named_parameters()}


def test_parameters_are_tagged_as_routed() -> None:
    """By Python's own bool, which stock compares with `is`."""
    net = TinyGpt()
    net.blocks[1].down.requires_grad_(False)
    MuonWithAuxAdam(net.parameters(), model=net, muon_exclude=["qkv"])
    muon = {f"blocks.{i}.{name}.weight" for i in (0, 1) for name in ("proj", "up", "down")} - {"blocks.1.down.weight"}
    assert {name for name, tag in tags(net).items() if tag is True} == muon
    assert {tag for tag in tags(net).values() if tag is not True} == {False}


def test_our_tags_are_not_the_users_and_theirs_stay() -> None:
    net = TinyGpt()
    net.tokens.weight.use_muon = True
    first = MuonWithAuxAdam(net.parameters(), model=net, muon_exclude=["qkv"])
    assert {spec.chosen_by for spec in first.specs.values()} == {None, "use_muon", "muon_exclude"}
    second = MuonWithAuxAdam(net.parameters(), model=net)
    specs = {spec.name: spec for spec in second.specs.values()}
    assert specs["blocks.0.qkv.weight"].use_muon and specs["blocks.0.qkv.weight"].chosen_by is None
    assert specs["tokens.weight"].chosen_by == "use_muon" and tags(net)["tokens.weight"]
    net.blocks[0].qkv.weight.use_muon = False
    net.lm_head.weight.use_muon = True
    third = MuonWithAuxAdam(net.parameters(), model=net)
    changed = {spec.name: spec.use_muon for spec in third.specs.values() if spec.chosen_by == "use_muon"}
    assert changed == {"tokens.weight": True, "blocks.0.qkv.weight": False, "lm_head.weight": True}
    assert {name for name, tag in tags(net).items() if tag} == {s.name for s in third.specs.values() if s.use_muon}


def test_a_refused_optimizer_leaves_no_tag() -> None:
    net = TinyGpt()
    with pytest.raises(MuonConfigError):
        MuonWithAuxAdam(net.parameters(), model=net, muon_exclude=["nothing"])
    assert not any(vars(param) for param in net.parameters())


def test_the_shape_before_stage_3_partitioned_counts() -> None:
    """Under `zero.Init` the data is empty and `ds_shape` holds the shape."""
    model = module(fc=linear(bias=True), head=module(lm_head=linear()), row=linear(8, 1), conv=nn.Conv2d(4, 8, 3))
    for param in model.parameters():
        param.ds_shape = param.shape
        param.data = torch.empty(0)
    specs = routes(model)
    assert {name for name, spec in specs.items() if spec.use_muon} == {"fc.weight"}
    assert specs["fc.weight"].shape == (16, 8)
    assert specs["fc.weight"].blocks == (Block(0, 16, 8, 8),)
    assert specs["fc.weight"].numel == 128
    assert specs["conv.weight"].numel == 8 * 4 * 9
    assert "convolution" in specs["conv.weight"].reason


def test_muon_is_refused_by_the_shape_before_stage_3() -> None:
    model = module(norm=nn.LayerNorm(8))
    weight: Any = model.norm.weight
    weight.ds_shape, weight.data, weight.use_muon = weight.shape, torch.empty(0), True
    with pytest.raises(ValueError, match=r"norm\.weight"):
        route(model)


# ---- nothing for Muon -------------------------------------------------------------------------------------------


def refusal(net: nn.Module, **params: Any) -> str:
    with pytest.raises(MuonConfigError) as error:
        MuonWithAuxAdam(net.parameters(), model=net, **params)
    assert not any(hasattr(param, "use_muon") for param in net.parameters())
    return str(error.value)


def test_low_rank_factors_alone_are_refused_with_the_option_that_helps() -> None:
    net = nn.ModuleList(Adapted("lora_A", "lora_B") for _ in range(3))
    net.append(nn.Embedding(4, 8))
    text = refusal(net)
    assert text == (
        "optimizer.type: Muon, but all 7 matrices go to AdamW: 6 x LoRA factor of rank 2 (0.lora_A.weight, "
        "0.lora_B.weight); 1 x embedding (Embedding) (3.weight). To change that, for low-rank adapters write "
        '"muon_lora": "both"; list matrices in muon_include; or set the type to "AdamW"'
    )
    assert MuonWithAuxAdam(net.parameters(), model=net, muon_lora="both").shapes


def test_reasons_are_counted_the_most_common_first() -> None:
    odd = [nn.Embedding(4, 8), nn.ModuleDict({"lm_head": linear()}), Mixer(), nn.Conv2d(2, 3, 2), linear(8, 1)]
    net = nn.ModuleList([nn.Embedding(4, 8), *odd])
    text = refusal(net)
    assert text.startswith("optimizer.type: Muon, but all 6 matrices go to AdamW: 2 x embedding (Embedding) (0.weight,")
    assert "1 other reasons. To change that, list matrices" in text and "lora" not in text


def test_a_frozen_model_is_refused() -> None:
    """As when a tool hands the config to DPO's reference."""
    assert "no parameter of the model is trained; for a frozen model" in refusal(TinyGpt().requires_grad_(False))


@pytest.mark.parametrize("how", ["tags", "pattern", "embeddings alone"])
def test_a_half_that_is_empty_on_purpose_is_not_refused(how: str) -> None:
    net = nn.ModuleDict({"tokens": nn.Embedding(4, 8)}) if how == "embeddings alone" else TinyGpt()
    for param in net.parameters() if how != "pattern" else ():
        param.use_muon = False
    params = {"muon_exclude": "blocks"} if how == "pattern" else {}
    optimizer = MuonWithAuxAdam(net.parameters(), model=net, **params)
    assert not optimizer.shapes and optimizer.unused_options == {}


def test_an_exclusion_that_changes_nothing_is_no_purpose() -> None:
    net = nn.ModuleDict({"lora": Adapted("lora_A", "lora_B"), "lm_head": linear()})
    assert '"muon_lora": "both"' in refusal(net, muon_exclude="lm_head")


class Stage(nn.Module):
    """One stage of a pipeline of two, as far as the routing looks at it; without matrices."""

    stage_id = 0
    tied_comms: dict[str, Any] = {}

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.tied_modules, self.forward_funcs = nn.LayerNorm(8), nn.ModuleDict(), []

    def num_pipeline_stages(self) -> int:
        return 2


def test_a_stage_without_matrices_leaves_the_verdict_to_all_stages() -> None:
    """`agree` raises where every stage says so."""
    net = Stage()
    optimizer = MuonWithAuxAdam(net.parameters(), model=net, muon_include=["fc"])
    assert list(optimizer.unused_options) == ["muon_include fc"]


# ---- low-rank adapters --------------------------------------------------------------------------------------


NAMES = [("lora_A", "lora_B"), ("lora_a", "lora_b"), ("lora_down", "lora_up"), ("lora_weight_1", "lora_weight_2")]


@pytest.mark.parametrize(("down", "up"), NAMES)
def test_factors_go_to_adamw(down: str, up: str) -> None:
    net = nn.Sequential(Adapted(down, up))
    specs = route(net).values()
    assert [(s.use_muon, s.reason) for s in specs] == [(False, "LoRA factor of rank 2")] * 2
    assert all(is_lora(spec) for spec in specs)


def test_factors_go_to_muon_where_the_user_says_so() -> None:
    got = specs_of(nn.Sequential(Adapted("lora_A", "lora_B")), muon_include=["lora_B"])
    assert [use_muon for use_muon, _ in got.values()] == [False, True]


def test_a_square_matrix_is_no_factor() -> None:
    net = nn.Sequential(Adapted("lora_A", "lora_B", rank=8))
    assert [s.use_muon for s in route(net).values()] == [True, False]


@pytest.mark.parametrize("name", ["lora", "flora_A", "lora_alpha", "explorable"])
def test_other_names_are_none(name: str) -> None:
    assert [s.use_muon for s in route(nn.ModuleDict({name: nn.Linear(8, 2, bias=False)})).values()] == [True]


def peft_model() -> nn.Module:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "vocab_size": 32, "num_attention_heads": 2}
    config = LlamaConfig(num_hidden_layers=1, num_key_value_heads=1, **sizes)
    lora = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], modules_to_save=["lm_head", "k_proj"])
    return get_peft_model(LlamaForCausalLM(config), lora)


def test_a_model_of_pefts() -> None:
    got = specs_of(peft_model())
    factors = {name: reason for name, (use_muon, reason) in got.items() if "lora" in name and not use_muon}
    assert len(factors) == 4 and set(factors.values()) == {"LoRA factor of rank 4"}
    saved = {name.split(".")[-4]: use_muon for name, (use_muon, _) in got.items() if "modules_to_save" in name}
    assert saved == {"k_proj": True, "lm_head": False}


@pytest.mark.parametrize(
    ("kind", "task", "head"),
    [("SequenceClassification", "SEQ_CLS", "score"), ("QuestionAnswering", "QUESTION_ANS", "qa_outputs")],
)
def test_heads_that_peft_trains_whole_stay_heads(kind: str, task: str, head: str) -> None:
    import transformers
    from peft import LoraConfig, get_peft_model

    sizes = {"hidden_size": 16, "intermediate_size": 24, "vocab_size": 32, "num_attention_heads": 2}
    config = transformers.LlamaConfig(num_hidden_layers=1, num_key_value_heads=1, num_labels=3, **sizes)
    net = getattr(transformers, f"LlamaFor{kind}")(config)
    got = specs_of(get_peft_model(net, LoraConfig(r=4, target_modules=["q_proj"], task_type=task)))
    heads = {name: found for name, found in got.items() if f".{head}." in name and name.endswith("weight")}
    assert list(heads.values()) == [(False, f"output head {head}")]


def test_prefixes_of_wrappers_do_not_hide_a_head() -> None:
    net = nn.ModuleDict({"_orig_mod": nn.ModuleDict({"head": nn.Linear(8, 4), "body": nn.Linear(8, 8)})})
    got = {name: use_muon for name, (use_muon, _) in specs_of(net).items() if name.endswith("weight")}
    assert got == {"_orig_mod.head.weight": False, "_orig_mod.body.weight": True}


def train_lora() -> list[float]:
    import deepspeed

    torch.manual_seed(0)
    net = peft_model()
    config = ds_config(stage=2, optimizer={"type": "Muon", "params": {"lr": 1e-2}})
    engine = deepspeed.initialize(model=net, config=config, model_parameters=net.parameters())[0]
    ids = torch.randint(32, (8, 12), generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(5):
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


def test_adapters_train_under_zero() -> None:
    losses = run(train_lora, 2)[0]
    assert losses[-1] < losses[0] - 0.1
