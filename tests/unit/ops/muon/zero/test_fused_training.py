# SPDX-License-Identifier: Apache-2.0
"""What the package cuts by itself trains as its matrices would as parameters of their own.

The oracle's matrices come from plain indexing, by what the models' own forward takes.
"""

import functools
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.distributed import run
from helpers.language_models import WIDTH, train
from helpers.models import MODELS
from helpers.oracles import OracleResult, Part, change_error, route, train_oracle
from helpers.rules import RULES
from helpers.training import ORACLE, PARAMS, ds_config, fp32_weights, make_engine, train_around_a_checkpoint

STEPS = 5
STAGES_AND_WORLDS = [(stage, world) for stage in (1, 2, 3) for world in (1, 2, 3)]
#: Of Layouts, which takes longest, each stage and each number of ranks at least twice; all pairs in the longer loop.
QUICK = [(0, 2), (0, 3), (1, 1), (1, 3), (2, 2), (2, 3), (3, 1), (3, 2), (3, 3)]
#: Of resume, each stage and each number of ranks once.
RESUMED = [(1, 3), (2, 1), (3, 2)]


def pairs(stages: tuple[int, ...], quick: list[tuple[int, int]]) -> list[Any]:
    """Stages with 1 to 3 ranks; what is not `quick` in the longer loop alone."""
    every = itertools.product(stages, (1, 2, 3))
    return [pair if pair in quick else pytest.param(*pair, marks=pytest.mark.full) for pair in every]


def index_of(model: nn.Module) -> dict[str, Tensor]:
    """By name, the number of each element of a parameter in its shape."""
    return {name: torch.arange(param.numel()).view(param.shape) for name, param in model.named_parameters()}


def fused_parts(model: nn.Module) -> dict[str, list[Part]]:
    """Of Layouts: queries, keys, values; gates, ups; of each expert."""
    parts: dict[str, list[Part]] = {}
    for name, index in index_of(model).items():
        if "c_attn.weight" in name:
            parts[name] = list(index.chunk(3, dim=1))
        elif "query_key_value.weight" in name:
            parts[name] = [heads.reshape(-1, WIDTH) for heads in index.view(3, 3, 4, WIDTH).unbind(1)]
        elif "qkv_proj" in name:
            parts[name] = list(index.split([12, 4, 4]))
        elif "gate_up_proj.weight" in name:
            parts[name] = list(index.chunk(2))
        elif "in_proj_weight" in name:
            parts[name] = list(index.chunk(3))
        elif "experts" in name:
            halves = index.chunk(2, dim=1 if "first" in name else 2) if "gate_up" in name else (index,)
            parts[name] = [matrix for half in halves for matrix in half]
    return parts


def head_parts(model: nn.Module) -> dict[str, list[Part]]:
    """Of latent attention: queries of each head (4 + 2 rows), keys (4) and values (3) of each head apart."""
    named = {name.split(".")[-2]: (name, index) for name, index in index_of(model).items()}
    queries, both = named["q_b_proj"], named["kv_b_proj"]
    return {queries[0]: list(queries[1].split(6)), both[0]: list(both[1].split([4, 3] * 3))}


def no_parts(model: nn.Module) -> dict[str, list[Part]]:
    """Every parameter is one matrix."""
    return {}


@functools.cache
def reference(model: str, parts: Any, lora: str = "none", rule: str = "") -> OracleResult:
    """The oracle's training, with one of RULES."""
    net = MODELS[model]()
    names = [name for name, _ in net.named_parameters()]
    adam = [name for name in names if any(word in name for word in ("embed", "wte", "wpe", "head"))]
    adam += [name for name in names if "lora" in name and lora != "both" and not (lora == "B" and "lora_B" in name)]
    config = replace(ORACLE, **RULES[rule][1]) if rule else ORACLE
    turned = [name for name in names if "c_" in name or "second_experts" in name]
    special = {name: replace(config, output_axis=1) for name in turned} if model == "layouts" else {}
    return train_oracle(net, net.batch, STEPS, route(net, adam), config, special=special, parts=parts(net))


def differing(weights: dict[str, Tensor], expected: OracleResult) -> set[str]:
    """What differs by more than 1e-3 of its change. The keys' share of a bias has no gradient but rounding."""
    return {
        name
        for name, weight in expected.weights.items()
        if name in weights and "c_attn.bias" not in name
        if change_error(expected.initial[name], weights[name], weight) > 1e-3 and not weight.equal(weights[name])
    }


def optimizer(**params: Any) -> dict[str, Any]:
    return {"type": "Muon", "params": PARAMS | params}


@pytest.mark.sample(1)
@pytest.mark.parametrize(("stage", "world"), pairs((0, 1, 2, 3), QUICK))
def test_fused_projections(stage: int, world: int) -> None:
    expected = reference("layouts", fused_parts)
    for weights in run(train, world, model="layouts", steps=STEPS, stage=stage, optimizer=optimizer()):
        assert differing(weights, expected) == set()


@pytest.mark.parametrize(
    ("rule", "stage"),
    [
        ("normuon", 2),
        ("muon_eq, rows", 3),
        *(
            pytest.param(rule, stage, marks=pytest.mark.full)
            for rule in ("normuon", "muon_eq, rows", "muon_plus, columns, rows")
            for stage in (0, 1, 2, 3)
        ),
    ],
)
def test_rules_know_where_outputs_lie(rule: str, stage: int) -> None:
    """In columns of Conv1D and of some stacks of experts. With rows everywhere, those train to something else."""
    expected = reference("layouts", fused_parts, rule=rule)
    case = {"stage": stage, "optimizer": optimizer(**RULES[rule][0])}
    for weights in run(train, 2, model="layouts", steps=STEPS, **case):
        assert differing(weights, expected) == set()


def test_whole_fused_projections_are_something_else() -> None:
    """So the test above can fail; what is no stack trains whole as the oracle does without parts."""
    whole = run(train, 1, model="layouts", steps=STEPS, stage=1, optimizer=optimizer(muon_fused="whole"))[0]
    names = fused_parts(MODELS["layouts"]()).keys()
    assert {name for name in names if "experts.down" not in name} <= differing(whole, reference("layouts", fused_parts))

    def experts(model: nn.Module) -> dict[str, list[Part]]:
        return {name: list(index) for name, index in index_of(model).items() if "experts" in name}

    assert differing(whole, reference("layouts", experts)) == set()


@pytest.mark.sample(3)
@pytest.mark.parametrize(("stage", "world"), STAGES_AND_WORLDS)
def test_latent_attention_per_head(stage: int, world: int) -> None:
    expected = reference("deepseek_v3", head_parts)
    settings = {"stage": stage, "optimizer": optimizer(per_head_muon=True)}
    for weights in run(train, world, model="deepseek_v3", steps=STEPS, **settings):
        assert differing(weights, expected) == set()


@pytest.mark.sample(4)
@pytest.mark.parametrize("lora", ["B", "both"])
@pytest.mark.parametrize(("stage", "world"), STAGES_AND_WORLDS)
def test_low_rank_factors(stage: int, world: int, lora: str) -> None:
    expected = reference("adapters", no_parts, lora)
    settings = {"stage": stage, "optimizer": optimizer(muon_lora=lora)}
    for weights in run(train, world, model="adapters", steps=STEPS, **settings):
        assert expected.weights.keys() <= weights.keys()
        assert differing(weights, expected) == set()


#: Of each kind of block that the model above lacks: the model, and how it is asked for.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "heads": ("gpt", {"per_head_muon": True}),
    "heads of latent attention": ("deepseek_v3", {"per_head_muon": True}),
    "fused projections": ("layouts", {}),
    "low-rank factors": ("adapters", {"muon_lora": "both"}),
}


def go_on(kind: str, stage: int, folder: str, load: bool) -> dict[str, Tensor]:
    """Three steps, saved after the first; or loaded from there, by a run that began with other weights."""
    model, params = KINDS[kind]
    net = MODELS[model]()
    if load:
        for param in net.parameters():
            param.data.mul_(0.5)
    engine = make_engine(net, ds_config(stage=stage, optimizer=optimizer(**params)))
    train_around_a_checkpoint(engine, folder, load)
    weights = fp32_weights(engine)
    engine.destroy()
    return weights


@pytest.mark.sample(4)
@pytest.mark.parametrize(("stage", "world"), pairs((1, 2, 3), RESUMED))
@pytest.mark.parametrize("kind", KINDS)
def test_resume_is_exact(kind: str, stage: int, world: int, tmp_path: Path) -> None:
    settings = {"kind": kind, "stage": stage, "folder": str(tmp_path)}
    expected, found = (run(go_on, world, **settings, load=load)[0] for load in (False, True))
    assert {name for name, weight in expected.items() if not found[name].equal(weight)} == set()
