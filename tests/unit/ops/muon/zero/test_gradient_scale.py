# SPDX-License-Identifier: Apache-2.0
"""Loss scales: a skipped step leaves no trace, checkpoints keep them, growing ones change no bit."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed.muon.zero.wrappers.gradient_norms import unfused_scaler
from helpers.distributed import run
from helpers.engine_state import differing, snapshot
from helpers.models import MODELS, make_batch, train_engine
from helpers.parity import FP16_AUTOCAST
from helpers.settings import DYNAMIC, EPS
from helpers.training import ds_config, make_engine, train_through_skips, train_with_norms, with_params


@pytest.mark.parametrize("clip", [8.0, pytest.param(0.0, marks=pytest.mark.full)])
def test_a_growing_loss_scale_changes_no_bit(clip: float) -> None:
    """A power of two rounds nothing here."""
    growing = {"enabled": True, "loss_scale": 0, "initial_scale_power": 3, "loss_scale_window": 1}
    settings = {"model": "mlp", "stage": 0, "dtype": "fp16", "clip": clip, "optimizer": with_params(eps=EPS)}
    by_scale = [run(train_with_norms, 2, fp16=fp16, **settings) for fp16 in (growing, {"enabled": True})]
    for (weights, norms), (expected, others) in zip(*by_scale, strict=True):
        assert differing(weights, expected) == []
        assert norms == pytest.approx(others, rel=1e-6)


# ---- the scale in a checkpoint ----------------------------------------------------------------------------------


def scale_of(engine: Any) -> float:
    """By which the engine multiplies the loss."""
    scaler = engine.torch_autocast_z0_gradscaler
    return float(scaler.scale(torch.ones(())) if scaler else getattr(engine.optimizer, "loss_scale", 1.0))


def skip_a_step(engine: Any) -> None:
    """One rank's gradients are not finite: all skip, and halve the scale."""
    factor = float("nan") if engine.global_rank == 1 else 1.0
    loss = engine(*make_batch(engine.module, 0, 0, engine.global_rank, engine.world_size))
    engine.backward(loss * factor)
    engine.step()


def around_a_skip(case: dict[str, Any], folder: str, loads: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The scale at a checkpoint after a skipped step and at the end, and what a run that saves or loads it comes to."""
    engine = make_engine(MODELS["mlp"](), ds_config(**case))
    if loads:
        train_engine(engine, 1, first_step=9)
        engine.load_checkpoint(folder)
    else:
        assert train_through_skips(engine, 1) == 0
        first, before = scale_of(engine), snapshot(engine)
        skip_a_step(engine)
        assert differing(before, snapshot(engine)) == [] and scale_of(engine) == first / 2
        assert train_through_skips(engine, 1, first_step=1) == 0
        engine.save_checkpoint(folder)
    scales = [scale_of(engine)]
    assert train_through_skips(engine, 2, first_step=2) == 0
    result = [*scales, scale_of(engine)], snapshot(engine)
    engine.destroy()
    return result


#: The last two: DeepSpeed reports no overflow by itself.
DROPPING = [
    *({"stage": s, "offload": o, "dtype": "fp16", **DYNAMIC} for s in (1, 2, 3) for o in (True, False)),
    {"stage": 0, "dtype": "fp16", **DYNAMIC},
    *({"stage": stage, **FP16_AUTOCAST} for stage in (0, 1, 2, 3)),
    {"stage": 1, "clip": 0.0, "zero": {"compute_grad_norm": False}, **FP16_AUTOCAST},
    {"stage": 2, "dtype": "bf16", "bf16": {"enabled": True, "check_grad_overflow": False}, **FP16_AUTOCAST},
]


@pytest.mark.sample(5)
@pytest.mark.parametrize("case", DROPPING, ids=str)
def test_a_skipped_step_leaves_no_trace_and_the_scale_resumes_exactly(case: dict[str, Any], tmp_path: Any) -> None:
    ends = [run(around_a_skip, 2, case=case, folder=str(tmp_path), loads=loads) for loads in (False, True)]
    for (wanted, end), (got, resumed) in zip(*ends, strict=True):
        assert got == wanted
        assert differing(end, resumed) == []


# ---- scales of other precisions ---------------------------------------------------------------------------------

BF16_AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}


def scale_after_a_load(stage: int, folder: str, saved: dict[str, Any], loaded: dict[str, Any]) -> tuple[float, ...]:
    """Of an engine before and after it loads a checkpoint of another precision; keys of a group that are not ours."""
    engine = make_engine(MODELS["mlp"](), ds_config(stage=stage, **saved))
    train_through_skips(engine, 1)
    engine.save_checkpoint(folder)
    engine.destroy()
    engine = make_engine(MODELS["mlp"](), ds_config(stage=stage, **loaded))
    before = scale_of(engine)
    engine.load_checkpoint(folder)
    train_through_skips(engine, 1, first_step=1)
    result = before, scale_of(engine), float("grad_scaler" in engine.basic_optimizer.param_groups[0])
    engine.destroy()
    return result


@pytest.mark.sample(2)
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("first", ["fp16", "bf16"])
def test_a_load_keeps_the_runs_own_kind_of_scale(first: str, stage: int, tmp_path: Any) -> None:
    kinds = [FP16_AUTOCAST, BF16_AUTOCAST] if first == "fp16" else [BF16_AUTOCAST, FP16_AUTOCAST]
    expected = 1.0 if first == "fp16" else 2.0**16
    case = {"stage": stage, "folder": str(tmp_path), "saved": kinds[0], "loaded": kinds[1]}
    for before, after, kept in run(scale_after_a_load, 2, **case):
        assert (before, kept) == (expected, 0.0)
        assert after == expected, "one good step does not change it"


def scale_at_start(case: dict[str, Any]) -> float:
    engine = make_engine(MODELS["mlp"](), ds_config(**case))
    scale = scale_of(engine)
    engine.destroy()
    return scale


@pytest.mark.parametrize("stage", [1, pytest.param(0, marks=pytest.mark.full), pytest.param(3, marks=pytest.mark.full)])
def test_a_scale_of_the_config_stays(stage: int) -> None:
    """Of an fp16 model, also under fp16 autocast."""
    case = {"stage": stage, "dtype": "fp16", "fp16": {"enabled": True, "loss_scale": 128}, **FP16_AUTOCAST}
    assert run(scale_at_start, 1, case=case) == [128.0]


def test_a_step_that_raised_leaves_no_update_of_the_scale() -> None:
    wrapper = SimpleNamespace(loss_scale_config=SimpleNamespace(cur_scale=4.0), _global_grad_norm=8.0)
    replacements: dict[str, Any] = {}
    unfused_scaler(wrapper, replacements.__setitem__)
    updates: list[bool] = []

    def step(raises: bool) -> None:
        replacements["_update_scale"](updates.append, raises)
        if raises:
            raise MemoryError

    with pytest.raises(MemoryError):
        replacements["step"](step, True)
    replacements["step"](step, False)
    assert updates == [False] and wrapper._global_grad_norm == 2.0
