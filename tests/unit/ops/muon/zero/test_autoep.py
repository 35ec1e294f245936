# SPDX-License-Identifier: Apache-2.0
"""AutoEP: the experts of a transformers model, spread over ranks, train as if they were all in one place."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed.muon import MuonWithAuxAdam
from deepspeed.muon.errors import UnsupportedError
from helpers.distributed import run
from helpers.experts import INNER, Mixtral, autoep
from helpers.models import full_weights, train_engine
from helpers.oracles import OracleResult, Part, change_error, train_oracle
from helpers.parity import STEPS
from helpers.rules import RULES
from helpers.training import ORACLE, PARAMS, fp32_weights, make_engine, with_params


def train_spread(stage: int, experts: int, ep: int, **config: Any) -> dict[str, Tensor]:
    """Master weights of this rank, under stock's names, after the steps."""
    engine = make_engine(Mixtral(experts), autoep(stage, ep, **config))
    train_engine(engine, STEPS)
    weights = fp32_weights(engine)
    engine.destroy()
    return weights


def reference(experts: int, clip: float, **settings: Any) -> OracleResult:
    """The oracle's training with all experts in one place; gate and up projections are two matrices."""
    net = Mixtral(experts)
    parts: dict[str, list[Part]] = {}
    for name, param in net.named_parameters():
        index = torch.arange(param.numel()).view(param.shape)
        if name.endswith("gate_up_proj"):
            parts[name] = [half for expert in index for half in expert.split(INNER)]
        elif name.endswith("down_proj"):
            parts[name] = list(index)
    to_adam = ("embed_tokens", "norm", "mlp.gate.weight", "lm_head")
    routing = {n: "adam" if any(part in n for part in to_adam) else "muon" for n, _ in net.named_parameters()}
    return train_oracle(net, net.batch, STEPS, routing, replace(ORACLE, clip=clip, **settings), parts=parts)


def of_rank(weights: dict[str, Tensor], rank: int, ep: int) -> dict[str, Tensor]:
    """The weights of the whole model as AutoEP lays them out on a rank."""
    found = {}
    for name, weight in weights.items():
        if ".experts." in name:
            prefix, leaf = name.rsplit(".", 1)
            mine = weight.chunk(ep)[rank % ep]
            pairs = {"w2": mine} if leaf == "down_proj" else dict(zip(("w1", "w3"), mine.chunk(2, 1), strict=True))
            found |= {f"{prefix}.{key}": value for key, value in pairs.items()}
        else:
            found[name.replace("mlp.gate", "mlp.router.gate")] = weight
    return found


SIZES = [(2, 4, 2), (4, 4, 2), (4, 2, 2)]
"""Ranks, experts, and among how many ranks these are divided; the last leaves each rank a stack of one."""
CASES = [(stage, *size) for stage in (0, 1, 2, 3) for size in SIZES]


@pytest.mark.sample(3)
@pytest.mark.parametrize("rule", [None, "normuon"])
@pytest.mark.parametrize(("stage", "world", "experts", "ep"), CASES)
def test_training_equals_that_of_all_experts_in_one_place(
    stage: int, world: int, experts: int, ep: int, rule: str | None
) -> None:
    clip = 1.0 if stage else 0.0
    params, settings = RULES[rule] if rule else ({}, {})
    expected = reference(experts, clip, **settings)
    case = {"stage": stage, "experts": experts, "ep": ep, "clip": clip, "optimizer": with_params(**params)}
    for rank, weights in enumerate(run(train_spread, world, **case)):
        initial, last = (of_rank(side, rank, ep) for side in (expected.initial, expected.weights))
        assert weights.keys() == last.keys()
        for name, weight in last.items():
            assert change_error(initial[name], weights[name], weight) <= 1e-3, (rank, name)


def routes(include: list[str] | None = None) -> dict[str, tuple[bool, str, str]]:
    """Where each parameter goes, why, and how it was split."""
    optimizer = {"type": "Muon", "params": PARAMS | ({"muon_exclude": include} if include else {})}
    engine = make_engine(Mixtral(), autoep(2, 2, optimizer=optimizer))
    found = {s.name: (s.use_muon, s.reason, s.split) for s in engine.basic_optimizer.specs.values()}
    engine.destroy()
    return found


def test_the_router_goes_to_adamw_and_experts_to_muon_one_by_one() -> None:
    found = run(routes, 2)[0]
    prefix = "model.layers.1.mlp."
    assert found[f"{prefix}router.gate.weight"] == (False, "MoE router, tied", "")  # stock keeps its old name beside
    for name, size in (("w1", "10 x 12"), ("w2", "12 x 10"), ("w3", "10 x 12")):
        reason = "stack of 2 matrices of GroupedExperts"
        assert found[f"{prefix}experts.{name}"] == (True, reason, f"2 of {size}")


def test_patterns_may_name_parameters_that_stock_has_put_in() -> None:
    found = run(routes, 2, include=[r"experts\.w3$"])[0]
    assert [name for name, (use_muon, *_) in found.items() if "experts" in name and not use_muon] == [
        f"model.layers.{layer}.mlp.experts.w3" for layer in (0, 1)
    ]


def train_with_given(kind: str) -> str | None:
    """Train two steps with an optimizer of the script's; what is refused."""
    net, config = Mixtral(), autoep(2, 2)
    params = config.pop("optimizer")["params"]

    def build(parameters: Any) -> MuonWithAuxAdam:
        return MuonWithAuxAdam(parameters, model=net, **params)

    given = build(net.parameters()) if kind == "built before" else build
    try:
        engine = make_engine(net, config, optimizer=given, model_parameters=list(net.parameters()))
    except UnsupportedError as error:
        return str(error)
    train_engine(engine, 2)
    engine.destroy()
    return None


def test_an_optimizer_of_the_script() -> None:
    assert run(train_with_given, 2, kind="function") == [None, None]
    for text in run(train_with_given, 2, kind="built before"):
        assert text is not None and "DeepSpeed has replaced parameters" in text


def spoil(stage: int) -> list[dict[str, Tensor]]:
    """This rank's weights after each step; in the second, the experts of rank 0 have a gradient that is not finite."""
    net, found = Mixtral(), []
    engine = make_engine(net, autoep(stage, 2, clip=0.0))
    experts = net.model.layers[0].mlp.experts
    for step in range(3):
        is_bad = step == 1 and dist.get_rank() == 0
        handle = experts.register_forward_hook(lambda *args: args[-1] * math.nan) if is_bad else None
        train_engine(engine, 1, first_step=step)
        if handle:
            handle.remove()
        found.append(full_weights(net))
    engine.destroy()
    return found


def test_a_bad_step_of_one_ranks_experts_is_skipped_by_all_at_stage_3() -> None:
    for first, second, third in run(spoil, 4, stage=3):
        for name, weight in first.items():
            assert torch.equal(second[name], weight), name
            assert third[name].isfinite().all() and not torch.equal(third[name], weight), name
