# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's MoE layers beside tensor parallelism and in pipelines train as if all of the model were in one place."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.distributed import run
from helpers.experts import WithExperts
from helpers.experts_beside import Mixed, beside_autoep, cut_experts, go_on, step_badly, stock_on_sequences, train
from helpers.megatron import differing
from helpers.oracles import change_cosine, change_error, route, train_oracle
from helpers.training import ORACLE, with_params

STEPS = 5
TO_ADAM = ["3.lm_head", "1.layer.deepspeed_moe.gate", "2.layer.deepspeed_moe.gate"]
#: Ranks, model-parallel ranks and stages.
MPU, PIPELINE, BOTH = {"size": 2}, {"stages": 2}, {"size": 2, "stages": 2}


def reference(clip: float) -> Any:
    """The oracle's training of the whole model."""
    net = Mixed()
    return train_oracle(net, net.batch, STEPS, route(net, TO_ADAM), replace(ORACLE, clip=clip))


def parts_of(weights: dict[str, Any], found: dict[str, Any], rank: int, case: dict[str, Any]) -> dict[str, Any]:
    """Of whole weights what a rank has."""
    size, parts = case.get("size", 1), {}
    for name, (_, axis) in found.items():
        parts[name] = weights[name] if axis is None else weights[name].chunk(size, dim=axis)[rank % size]
    return parts


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("world", "case"),
    [
        (4, PIPELINE),
        *((4, MPU | {"stage": stage}) for stage in (2, 0, 1)),
        *((4, MPU | {"stage": stage, "offload": True}) for stage in (1, 2)),
        pytest.param(8, BOTH, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_training_equals_the_oracle(world: int, case: dict[str, Any]) -> None:
    """At stage 0 DeepSpeed clips by the mean of the ranks' norms, which no single process has."""
    clip = 0.0 if case.get("stage") == 0 else 1.0
    expected, seen = reference(clip), set()
    for rank, (found, norms) in enumerate(run(train, world, steps=STEPS, clip=clip, **case)):
        initial, last = (parts_of(side, found, rank, case) for side in (expected.initial, expected.weights))
        errors = {name: change_error(initial[name], weight, last[name]) for name, (weight, _) in found.items()}
        assert max(errors.values()) <= 1e-3, errors
        assert norms == pytest.approx(expected.norms if clip else [0.0] * STEPS, rel=1e-3)
        seen |= found.keys()
    assert seen == expected.weights.keys()


@pytest.mark.full
@pytest.mark.parametrize("case", [MPU | {"stage": 2}, PIPELINE], ids=str)
def test_in_half_precision(case: dict[str, Any]) -> None:
    expected = reference(0.0)
    for rank, (found, _) in enumerate(run(train, 4, steps=STEPS, clip=0.0, dtype="bf16", **case)):
        initial, last = (parts_of(side, found, rank, case) for side in (expected.initial, expected.weights))
        for name, (weight, _) in found.items():
            if weight.ndim == 2:
                assert change_cosine(initial[name], weight, last[name]) > 0.9, name


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", [PIPELINE, *(MPU | {"stage": stage} for stage in (0, 1, 2))], ids=str)
def test_resume_is_exact(case: dict[str, Any], tmp_path: Path) -> None:
    case = case | {"folder": str(tmp_path), "optimizer": with_params(normuon=True)}
    first, second = (run(go_on, 4, load=load, **case) for load in (False, True))
    for before, after in zip(first, second, strict=True):
        assert differing(before, after) == []


@pytest.mark.sample(2)
@pytest.mark.parametrize("rank", [3, 2])
@pytest.mark.parametrize(
    "case",
    [
        MPU | {"stage": 1},
        MPU | {"stage": 0, "clip": 0.0},
        MPU | {"stage": 2, "clip": 0.0},
        MPU | {"stage": 2, "clip": 0.0, "offload": True},
        PIPELINE,
    ],
    ids=str,
)
def test_a_bad_gradient_of_one_ranks_experts_skips_the_step_on_all(case: dict[str, Any], rank: int) -> None:
    name = "2.layer.deepspeed_moe.experts.deepspeed_experts.0.up.weight"
    for changed, moves in run(step_badly, 4, name=name, rank=rank, **case):
        assert changed == [] and moves


@pytest.mark.full
def test_experts_that_are_cut_are_refused() -> None:
    name = "1.layer.deepspeed_moe.experts.deepspeed_experts.0.up.weight"
    for kind, text, _ in run(cut_experts, 4):
        assert kind == "UnsupportedError"
        assert f"tensor parallelism splits 4 matrices of experts (first: {name})" in text


STOCK = {
    "mpu": "AutoEP does not currently support tensor model parallelism from mpu",
    "sequence": "AutoEP does not currently support tensor model parallelism from mpu",
    "pipeline": "AutoEP: no MoE layers detected",
}


@pytest.mark.full
@pytest.mark.parametrize("kind", STOCK)
def test_stock_refuses_autoep_beside_other_parallelism(kind: str) -> None:
    for name, text, _ in run(beside_autoep, 4, kind=kind):
        assert name == "ValueError" and STOCK[kind] in text


@pytest.mark.full
def test_stock_mixes_up_tokens_where_ranks_share_sequences() -> None:
    """The reason of the refusal: experts see other tokens, so that AdamW's first step has other signs."""
    net = WithExperts(spread=False)
    routing = dict.fromkeys(dict(net.named_parameters()), "adam")
    expected = train_oracle(net, net.batch, 1, routing, replace(ORACLE, clip=0.0, adam_weight_decay=0.01))
    for weights in run(stock_on_sequences, 4):
        errors = {n: change_error(expected.initial[n], w, expected.weights[n]) for n, w in weights.items()}
        assert max(error for name, error in errors.items() if "experts" in name) > 0.2, errors
