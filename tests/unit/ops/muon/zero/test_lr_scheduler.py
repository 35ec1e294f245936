# SPDX-License-Identifier: Apache-2.0
"""Every learning-rate schedule of DeepSpeed, torch and Hugging Face keeps the ratio of the two halves' rates."""

from importlib import import_module

import pytest
from torch.optim import lr_scheduler as torch_schedules

from helpers.distributed import run
from helpers.schedules import (
    DEEPSPEED,
    RATIO,
    STEPS,
    TORCH,
    check_ratio,
    engine_of,
    hugging_face,
    rates_of,
    run_client,
    run_deepspeed,
)


@pytest.mark.sample(5)
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("name", DEEPSPEED)
def test_deepspeeds_schedules_keep_the_ratio(name: str, stage: int) -> None:
    lrs = check_ratio(run(run_deepspeed, 1, name=name, values=DEEPSPEED[name], stage=stage)[0])
    assert len(set(lrs)) > 4 and min(lrs[1:]) > 0


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", TORCH)
def test_torchs_schedules_keep_the_ratio(name: str) -> None:
    lrs = check_ratio(run(run_client, 1, kind="torch", name=name, stage=2)[0])
    assert len(set(lrs)) > 1


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["CosineAnnealingLR", "OneCycleLR", "SequentialLR"])
@pytest.mark.parametrize("stage", [0, 3])
def test_torchs_schedules_at_other_stages(name: str, stage: int) -> None:
    check_ratio(run(run_client, 2, kind="torch", name=name, stage=stage)[0])


@pytest.mark.parametrize("name", ["linear", "cosine", "polynomial", "constant", "inverse_sqrt", "cosine_with_min_lr"])
def test_a_name_of_hugging_face_is_known(name: str) -> None:
    assert name in hugging_face()


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", list(hugging_face()))
def test_hugging_faces_schedules_keep_the_ratio(name: str) -> None:
    lrs = check_ratio(run(run_client, 1, kind="hugging_face", name=name, stage=2)[0])
    assert len(set(lrs)) > 1 or name == "constant"


def by_metric(kind: str) -> list[dict[str, float]]:
    """A schedule that is stepped by the user with a metric that does not improve."""
    engine = engine_of(stage=2)
    given = engine.basic_optimizer.given
    if kind == "ReduceLROnPlateau":
        schedule = torch_schedules.ReduceLROnPlateau(given, factor=0.2, patience=1, min_lr=1e-4)
    else:
        from transformers.optimization import GreedyLR

        schedule = GreedyLR(given, factor=0.2, patience=1, min_lr=1e-4, max_lr=0.05)
    record = []
    for _ in range(STEPS):
        schedule.step(1.0)
        record.append(rates_of(engine))
    engine.destroy()
    return record


@pytest.mark.parametrize("kind", ["ReduceLROnPlateau", "GreedyLR"])
def test_schedules_by_metric_keep_the_ratio(kind: str) -> None:
    if kind == "GreedyLR" and not hasattr(import_module("transformers.optimization"), kind):
        pytest.skip("this transformers has no GreedyLR")
    record = run(by_metric, 1, kind=kind)[0]
    for rates in record:
        assert rates["muon"] == pytest.approx(RATIO * rates["adam"], rel=1e-6)
    assert record[-1]["muon"] == pytest.approx(1e-4) and record[0]["muon"] == pytest.approx(0.02)
