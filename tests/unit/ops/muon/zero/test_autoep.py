# SPDX-License-Identifier: Apache-2.0
"""AutoEP: the experts of a transformers model, spread over ranks, train as if they were all in one place."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed.muon import MuonWithAuxAdam
from deepspeed.muon.errors import UnsupportedError
from helpers.checkpoints import verify_save
from helpers.distributed import run
from helpers.experts import INNER, Mixtral, autoep
from helpers.megatron import around_a_bad_step, differing, everything
from helpers.models import GLOBAL_BATCH, full_weights, train_engine
from helpers.oracles import OracleResult, Part, change_cosine, change_error, train_oracle
from helpers.parity import STEPS
from helpers.rules import RULES
from helpers.tensor_parallel import train_steps, whole_weights
from helpers.training import FP32_GRADIENTS, ORACLE, PARAMS, fp32_weights, make_engine, with_params
from helpers.transformers_models import needs_stacks

pytestmark = needs_stacks  # as AutoEP's presets


def train_spread(stage: int, experts: int, ep: int, **config: Any) -> dict[str, Tensor]:
    """Master weights of this rank, under stock's names, after the steps."""
    engine = make_engine(Mixtral(experts), autoep(stage, ep, **config))
    train_engine(engine, STEPS)
    weights = fp32_weights(engine)
    engine.destroy()
    return weights


def reference(experts: int, clip: float, key_heads: int = 1, shards: int = 1, **settings: Any) -> OracleResult:
    """The oracle's training with all experts in one place; gate and up projections are two matrices.

    `shards`: into how many matrices each projection of attention is divided.
    """
    net = Mixtral(experts, key_heads=key_heads)
    parts: dict[str, list[Part]] = {}
    for name, param in net.named_parameters():
        index = torch.arange(param.numel()).view(param.shape)
        if "self_attn" in name and shards > 1:
            parts[name] = list(index.chunk(shards, dim=int("o_proj" in name)))
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


@pytest.mark.sample(2)
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
        assert text is not None and "DeepSpeed replaced parameters" in text


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


# ---- beside AutoTP ------------------------------------------------------------------------------------------------


@contextmanager
def folded_engine(stage: int, seed: int = 0, **config: Any) -> Iterator[Any]:
    """Two tensor-parallel ranks, which have the experts of a layer between them."""
    settings = autoep(stage, 2, **config) | {"tensor_parallel": {"autotp_size": 2, "preset_model": "mixtral"}}
    settings["train_micro_batch_size_per_gpu"] = GLOBAL_BATCH * 2 // dist.get_world_size()
    engine = make_engine(Mixtral(seed=seed, key_heads=2), settings)
    yield engine
    engine.destroy()


def train_folded(stage: int, **config: Any) -> tuple[dict[str, Tensor], list[float]]:
    """Master weights, those that AutoTP cut put together; the norm of each step."""
    with folded_engine(stage, **config) as engine:
        norms = []
        for step in range(STEPS):
            train_steps(engine, 1, 2, first=step)
            norms.append(float(engine.get_global_grad_norm() or 0.0))
        return whole_weights(engine), norms


@pytest.mark.sample(1)
@pytest.mark.parametrize("tp_mode", ["whole", "shard"])
@pytest.mark.parametrize("stage", [1, 0, 2, 3])
def test_beside_tensor_parallelism(stage: int, tp_mode: str) -> None:
    """DeepSpeed's norm at stages 1 and 2 leaves out the experts of all but the first tensor-parallel rank."""
    clip = 1.0 if stage else 0.0
    expected = reference(4, clip, key_heads=2, shards=2 if tp_mode == "shard" else 1)
    found = run(train_folded, 4, stage=stage, clip=clip, optimizer=with_params(tp_mode=tp_mode))
    for rank, (weights, norms) in enumerate(found):
        initial, last = (of_rank(side, rank, 2) for side in (expected.initial, expected.weights))
        assert weights.keys() == last.keys()
        errors = {name: change_error(initial[name], weights[name], weight) for name, weight in last.items()}
        assert max(errors.values()) <= 1e-3, (rank, errors)
        assert norms == pytest.approx(expected.norms if clip else [0.0] * STEPS, rel=1e-3)


@pytest.mark.full
@pytest.mark.parametrize("config", [{"stage": 2}, {"stage": 3}, {"stage": 1, **FP32_GRADIENTS}], ids=str)
def test_beside_tensor_parallelism_in_half_precision(config: dict[str, Any]) -> None:
    expected = reference(4, 0.0, key_heads=2)
    for rank, (weights, _) in enumerate(run(train_folded, 4, dtype="bf16", clip=0.0, **config)):
        initial, last = (of_rank(side, rank, 2) for side in (expected.initial, expected.weights))
        for name, weight in last.items():
            if weight.ndim > 1:
                assert change_cosine(initial[name], weights[name], weight) > 0.9, (rank, name)


def go_on_folded(stage: int, folder: str, load: bool) -> dict[str, Tensor]:
    """Everything of this rank after three steps, saved after the first or loaded from there."""
    with folded_engine(stage, seed=int(load), optimizer=with_params(normuon=True)) as engine:
        if load:
            engine.load_checkpoint(folder)
        else:
            train_steps(engine, 1, 2)
            engine.save_checkpoint(folder)
        train_steps(engine, 2, 2, first=1)
        return everything(engine)


@pytest.mark.sample(1)
@pytest.mark.parametrize("stage", [3, 0, 1, 2])
def test_resume_beside_tensor_parallelism_is_exact(stage: int, tmp_path: Path) -> None:
    case = {"stage": stage, "folder": str(tmp_path)}
    first, second = (run(go_on_folded, 4, load=load, **case) for load in (False, True))
    verify_save(tmp_path / "global_step1", 4)
    for before, after in zip(first, second, strict=True):
        assert differing(before, after) == []


def spoil_folded(stage: int, bad_rank: int) -> tuple[list[str], bool]:
    """:func:`around_a_bad_step` of the experts of a rank."""
    with folded_engine(stage, clip=0.0) as engine:

        def take(steps: range) -> None:
            train_steps(engine, len(steps), 2, first=steps.start)

        return around_a_bad_step(engine, take, "model.layers.0.mlp.experts.w1", bad_rank)


@pytest.mark.sample(1)
@pytest.mark.parametrize("bad_rank", [3, 2])
@pytest.mark.parametrize("stage", [2, 0, 1, 3])
def test_a_bad_gradient_beside_tensor_parallelism_skips_the_step_on_all(stage: int, bad_rank: int) -> None:
    assert run(spoil_folded, 4, stage=stage, bad_rank=bad_rank) == [([], True)] * 4
