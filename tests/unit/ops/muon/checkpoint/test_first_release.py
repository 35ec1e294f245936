# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of 0.1.0 go on as 0.1.0 did; how they were made: helpers/first_release.py."""

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.distributed import run
from helpers.first_release import AFTER, BEFORE, STAGES, engine_of, train, weights

SAVED = Path(__file__).parent / "saved_by_0_1_0"


def go_on(stage: int, folder: str) -> dict[str, Any]:
    engine = engine_of(stage)
    assert engine.load_checkpoint(folder, tag="saved")[0] is not None
    found: dict[str, Any] = {"saved": weights(engine), "steps": engine.global_steps, "lr": engine.get_lr()}
    found["losses"] = train(engine, BEFORE, AFTER)
    found["later"] = weights(engine)
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_its_checkpoints_resume(stage: int) -> None:
    """Weights bit for bit; the steps after it differ in rounding at most."""
    expected = torch.load(SAVED / f"stage{stage}" / "expected.pt")
    found = run(go_on, 2, stage=stage, folder=str(SAVED / f"stage{stage}"))[0]
    assert found["steps"] == BEFORE and 0 < found["lr"][0] < 0.02
    for name, weight in expected["saved"].items():
        assert torch.equal(found["saved"][name], weight), name
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    for name, weight in expected["later"].items():
        change = (weight - expected["saved"][name]).norm()
        assert (found["later"][name] - weight).norm() <= 1e-4 * change, name
