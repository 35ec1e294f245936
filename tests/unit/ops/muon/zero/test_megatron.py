# SPDX-License-Identifier: Apache-2.0
"""Megatron's tensor parallelism, by a model-parallel unit (mpu) and in pipelines: cut matrices train as the whole."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed.muon import MuonWithAuxAdam
from helpers.distributed import run
from helpers.megatron import HEADS, INNER, Mpu, Stack, differing, engine_of, go_on, step_badly, train
from helpers.oracles import OracleResult, Part, change_cosine, change_error, route, train_oracle
from helpers.parity import FP16_AUTOCAST
from helpers.refusals import Refusal, attempt
from helpers.training import MOMENTA, ORACLE, ds_config, with_params

STEPS = 5
OUTER = ["3.lm_head"]


def parts_of(kind: str) -> dict[str, list[Part]]:
    """The matrices of parameters that are several, by plain indexing; gate and up are two of their own accord."""
    found = {}
    for name, param in Stack().named_parameters():
        index = torch.arange(param.numel()).view(param.shape)
        count = 2 if kind == "shards" else 1
        if "gate_up_proj.weight" in name:
            found[name] = [half for part in index.split(INNER) for half in part.chunk(count)]
        elif "_proj.weight" in name and kind == "shards":
            found[name] = list(index.chunk(count, dim=int("o_proj" in name or "down_proj" in name)))
        elif any(f"{leaf}_proj" in name for leaf in "qkv") and kind == "heads":
            found[name] = list(index.chunk(HEADS))
    return found


PARAMS_OF: dict[str, dict[str, Any]] = {"whole": {}, "heads": {"per_head_muon": True}, "shards": {"tp_mode": "shard"}}


def reference(kind: str = "whole", clip: float = 1.0) -> OracleResult:
    """The oracle, which knows nothing of ranks."""
    net = Stack()
    return train_oracle(net, net.batch, STEPS, route(net, OUTER), replace(ORACLE, clip=clip), parts=parts_of(kind))


def assert_equal(found: list[tuple[dict[str, Tensor], list[float]]], expected: OracleResult, has_norms: bool) -> None:
    """On every rank, for the layers that it has."""
    assert set().union(*(weights for weights, _ in found)) == expected.weights.keys()
    for weights, norms in found:
        errors = {n: change_error(expected.initial[n], weight, expected.weights[n]) for n, weight in weights.items()}
        assert max(errors.values()) <= 1e-3, errors
        assert norms == pytest.approx(expected.norms if has_norms else [0.0] * STEPS, rel=1e-3)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", PARAMS_OF)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("stage", [3, 0, 1, 2])
def test_training_equals_the_oracle(stage: int, world: int, kind: str) -> None:
    """What is not cut is clipped and counted once; matrices without marks are copies, which stay equal bit by bit."""
    found = run(train, world, size=2, steps=STEPS, stage=stage, optimizer=with_params(**PARAMS_OF[kind]))
    assert_equal(found, reference(kind), has_norms=stage > 0)


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_data_parallel_ranks_may_be_the_neighbours(stage: int) -> None:
    assert_equal(run(train, 4, size=2, steps=STEPS, first="data", stage=stage), reference(), has_norms=stage > 0)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", PARAMS_OF)
@pytest.mark.parametrize(("world", "stages"), [(4, 2), (4, 1), pytest.param(8, 2, marks=pytest.mark.full)])
def test_pipelines_equal_the_oracle(world: int, stages: int, kind: str) -> None:
    """Two model-parallel ranks, and with the eight ranks two copies of each, of every stage."""
    optimizer = with_params(**PARAMS_OF[kind])
    assert_equal(run(train, world, size=2, steps=STEPS, stages=stages, optimizer=optimizer), reference(kind), True)


HALF: list[dict[str, Any]] = [
    {"stage": 2, "optimizer": MOMENTA["bf16"]},
    {"stage": 3, "offload": True},
    {"stage": 1, "optimizer": MOMENTA["int8"]},
    {"stage": 1, "data_types": {"grad_accum_dtype": "fp32"}},
    {"stage": 0},
    {"stages": 2},
    {"stages": 2, "offload": True},
    {"stages": 2, "data_types": {"grad_accum_dtype": "fp32"}},
    {"stages": 2, "stage": 0},
]


@pytest.mark.full
@pytest.mark.parametrize("config", HALF, ids=str)
def test_half_precision(config: dict[str, Any]) -> None:
    """The norm, by which it is clipped, is that of all ranks' parts."""
    expected = reference()
    for weights, norms in run(train, 4, size=2, steps=STEPS, dtype="bf16", **config):
        if "stages" not in config:
            assert norms == pytest.approx(expected.norms, rel=0.05)
        for name, weight in weights.items():
            if weight.ndim == 2:
                assert change_cosine(expected.initial[name], weight, expected.weights[name]) > 0.9, name


@pytest.mark.full
@pytest.mark.parametrize("kind", ["whole", "heads"])
@pytest.mark.parametrize(
    ("world", "config"), [(2, {"stage": 0}), (4, {"stage": 2}), (4, {"stage": 3}), (4, {"stages": 2})], ids=str
)
def test_qk_clip_acts_on_the_heads_of_each_rank(world: int, config: dict[str, Any], kind: str) -> None:
    params = PARAMS_OF[kind]
    clipped = with_params(**params, qk_clip={"tau": 0.5})
    alone, plain = (
        run(train, 1, size=1, stage=0, steps=3, optimizer=optimizer)[0][0]
        for optimizer in (clipped, with_params(**params))
    )
    start = dict(Stack().named_parameters())
    for weights, _ in run(train, world, size=2, steps=3, optimizer=clipped, **config):
        errors = {name: change_error(start[name].detach(), weight, alone[name]) for name, weight in weights.items()}
        assert max(errors.values()) <= 1e-3, errors
    assert all(change_error(start[n].detach(), plain[n], alone[n]) > 0.01 for n in alone if "q_proj" in n)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["whole", "shards"])
@pytest.mark.parametrize("config", [{"stages": 2}, {"stage": 0}, {"stage": 1}, {"stage": 2}, {"stage": 3}], ids=str)
def test_resume_is_exact(config: dict[str, Any], kind: str, tmp_path: Path) -> None:
    case = {"size": 2, "folder": str(tmp_path), "optimizer": with_params(**PARAMS_OF[kind], normuon=True)}
    first, second = (run(go_on, 4, load=load, **case, **config) for load in (False, True))
    for before, after in zip(first, second, strict=True):
        assert differing(before, after) == []


@pytest.mark.full
def test_a_checkpoint_of_another_size_is_refused(tmp_path: Path) -> None:
    run(go_on, 2, size=2, stage=1, folder=str(tmp_path), load=False)
    for text in run(go_on, 2, size=1, stage=1, folder=str(tmp_path), load=True):
        assert "tensor-parallel ranks" in text and "this run has 1" in text


SHARDS = {"optimizer": with_params(**PARAMS_OF["shards"])}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "config",
    [
        *({"stage": 1}, {"stage": 0, "clip": 0.0}, {"stage": 2}, {"stage": 3, "clip": 0.0}, {"stages": 2}),
        *({"stage": stage, "clip": clip} | SHARDS for stage, clip in ((0, 0.0), (0, 1.0), (2, 0.0))),
    ],
    ids=str,
)
def test_a_bad_gradient_of_one_rank_skips_the_step_on_all(config: dict[str, Any]) -> None:
    for changed, moves in run(step_badly, 4, size=2, name="2.q_proj.weight", **config):
        assert changed == [] and moves


# ---- marks --------------------------------------------------------------------------------------------------------


def train_with_given(kind: str) -> tuple[list[str], list[str]] | Refusal | None:
    """Which matrices, and of which shapes, an optimizer of the script's has; or what is refused."""
    import deepspeed

    mpu = Mpu(1 if kind == "one rank" else 2)
    net, config = Stack(mpu.groups["model"]), ds_config(stage=1) | {"train_micro_batch_size_per_gpu": 48}
    params = config.pop("optimizer")["params"]
    if kind == "stride":
        net[1].gate_up_proj.weight.partition_stride = 3
    if kind == "axis":
        net[1].q_proj.weight.partition_dim = 2

    def build(parameters: Any) -> MuonWithAuxAdam:
        return MuonWithAuxAdam(parameters, model=net, **params)

    found: list[str] = []

    def initialize() -> Any:
        given = build(net.parameters()) if kind == "built before" else build
        engine = deepspeed.initialize(model=net, config=config, mpu=mpu, optimizer=given)[0]
        specs = engine.basic_optimizer.specs.values()
        found.extend(f"{s.name} {list(s.whole)} of {list(s.shape)}" for s in specs if s.use_muon and s.sharding)
        return engine

    return attempt(initialize) or found


def test_an_optimizer_of_the_script() -> None:
    parts = [f"{n}.{leaf}_proj.weight [12, 12] of [6, 12]" for n in (1, 2) for leaf in "qkv"]
    parts += [f"{n}.o_proj.weight [12, 12] of [12, 6]" for n in (1, 2)]
    parts += [f"{n}.gate_up_proj.weight [20, 12] of [10, 12]" for n in (1, 2)]
    parts += [f"{n}.down_proj.weight [12, 10] of [12, 5]" for n in (1, 2)]
    for found in run(train_with_given, 2, kind="function"):
        assert sorted(found) == sorted(parts)


@pytest.mark.full
def test_marks_of_one_rank_say_that_nothing_is_cut() -> None:
    assert run(train_with_given, 1, kind="one rank") == [[]]


REFUSED = {
    "built before": "1.q_proj.weight: cannot tell how tensor parallelism split it: it is marked tensor_model_parallel, "
    'but the number of ranks is unknown; set "type": "Muon" in ds_config.json, or pass optimizer=lambda params',
    "stride": "1.gate_up_proj.weight: cannot tell how tensor parallelism split it: its 10 rows or columns on a rank",
    "axis": "1.q_proj.weight: cannot tell how tensor parallelism split it: its partition_dim 2 is not an axis",
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", REFUSED)
def test_marks_that_say_too_little_are_refused(kind: str) -> None:
    for name, text, _ in run(train_with_given, 2, kind=kind):
        assert name == "MuonConfigError"
        assert REFUSED[kind] in text


def other_axes() -> Refusal | None:
    """An mpu whose model-parallel ranks are the stages of a pipeline."""
    import deepspeed

    mpu = Mpu(2)
    mpu.get_tensor_model_parallel_rank, mpu.get_tensor_model_parallel_world_size = int, lambda: 1
    config = ds_config(stage=1) | {"train_micro_batch_size_per_gpu": 48}
    return attempt(lambda: deepspeed.initialize(model=Stack(), config=config, mpu=mpu)[0])


def autocast_at_stage_0() -> Refusal | None:
    def start() -> Any:
        with engine_of(2, stage=0, **FP16_AUTOCAST) as (engine, _):
            return engine

    return attempt(start)


def test_fp16_autocast_at_stage_0_is_refused() -> None:
    """Torch's scaler asks each rank alone whether it steps."""
    for kind, text, _ in run(autocast_at_stage_0, 2):
        assert kind == "UnsupportedError" and "tensor parallelism or a pipeline under fp16 autocast at stage 0" in text


def test_other_axes_of_an_mpu_are_refused() -> None:
    for name, text, _ in run(other_axes, 2):
        assert name == "UnsupportedError"
        assert "other axes than tensor and data parallelism, which are 1 x 1 of 2 ranks" in text
