# SPDX-License-Identifier: Apache-2.0
"""Megatron's tensor parallelism: QK-clip of each rank's heads, marks that say too little, and what is refused."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from deepspeed.muon import MuonWithAuxAdam
from helpers.distributed import run, run_each
from helpers.megatron import Mpu, Stack, build
from helpers.models import train_engine
from helpers.oracles import change_error
from helpers.parity import FP16_AUTOCAST
from helpers.refusals import Refusal, attempt
from helpers.tensor_parallel import whole_weights
from helpers.training import ds_config, with_params


def train(**config: Any) -> dict[str, Tensor]:
    """Train three steps; return the whole weights."""
    engine = build(**config)
    train_engine(engine, 3)
    weights = whole_weights(engine)
    engine.destroy()
    return weights


@pytest.mark.full
@pytest.mark.parametrize("params", [{}, {"per_head_muon": True}], ids=["whole", "heads"])
@pytest.mark.parametrize(
    ("world", "config"), [(2, {"stage": 0}), (4, {"stage": 2}), (4, {"stage": 3}), (4, {"stages": 2})], ids=str
)
def test_qk_clip_acts_on_the_heads_of_each_rank(world: int, config: dict[str, Any], params: dict[str, Any]) -> None:
    clipped = with_params(**params, qk_clip={"tau": 0.5})
    alone, plain = (
        run(train, 1, size=1, stage=0, optimizer=optimizer)[0] for optimizer in (clipped, with_params(**params))
    )
    start = dict(Stack().named_parameters())
    for weights in run(train, world, size=2, optimizer=clipped, **config):
        errors = {name: change_error(start[name].detach(), weight, alone[name]) for name, weight in weights.items()}
        assert max(errors.values()) <= 1e-3, errors
    assert all(change_error(start[n].detach(), plain[n], alone[n]) > 0.01 for n in alone if "q_proj" in n)


def save_or_load(folder: str, size: int, load: bool) -> Refusal | None:
    """Save an untrained engine, or return what its load says."""
    engine = build(size, stage=1)
    return attempt(lambda: engine.load_checkpoint(folder) if load else engine.save_checkpoint(folder))


@pytest.mark.full
def test_a_checkpoint_of_another_size_is_refused(tmp_path: Path) -> None:
    run(save_or_load, 2, folder=str(tmp_path), size=2, load=False)
    for _, text, _ in run(save_or_load, 2, folder=str(tmp_path), size=1, load=True):
        assert "tensor-parallel ranks" in text and "this run has 1" in text


# ---- marks --------------------------------------------------------------------------------------------------------


def train_with_given(kind: str) -> list[str] | Refusal:
    """Which matrices, and of which shapes, an optimizer of the script's has; or what is refused."""
    import deepspeed

    mpu = Mpu(1 if kind == "one rank" else 2)
    net, config = Stack(mpu.groups["model"]), ds_config(stage=1) | {"train_micro_batch_size_per_gpu": 48}
    params = config.pop("optimizer")["params"]
    if kind == "stride":
        net[1].gate_up_proj.weight.partition_stride = 3
    if kind == "axis":
        net[1].q_proj.weight.partition_dim = 2

    if kind == "other axes":  # the model-parallel ranks are the stages of a pipeline
        mpu.get_tensor_model_parallel_rank, mpu.get_tensor_model_parallel_world_size = int, lambda: 1
    if kind == "fp16 autocast":
        config |= FP16_AUTOCAST | {"zero_optimization": {"stage": 0}}
    build = partial(MuonWithAuxAdam, model=net, **params)
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


UNCLEAR = "cannot tell how tensor parallelism split this parameter: the parameter"
REFUSED = {
    "built before": f"1.q_proj.weight: {UNCLEAR} has the attribute tensor_model_parallel",
    "stride": f"1.gate_up_proj.weight: {UNCLEAR}'s size 10",
    "axis": f"1.q_proj.weight: {UNCLEAR}'s shape on this rank is [6, 12]",
    "other axes": "other axes than tensor and data parallelism",
    # torch's scaler asks each rank by itself whether it steps
    "fp16 autocast": "tensor parallelism or a pipeline under fp16 autocast at stage 0",
}


def test_marks_that_say_too_little_are_refused() -> None:
    """So is what is not supported."""
    cases = [{"kind": kind} for kind in REFUSED]
    for words, results in zip(REFUSED.values(), run_each(train_with_given, 2, cases), strict=True):
        for name, text, _ in results:
            assert name == ("MuonConfigError" if UNCLEAR in words else "UnsupportedError")
            assert words in text
