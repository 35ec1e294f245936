# SPDX-License-Identifier: Apache-2.0
"""A damaged or foreign checkpoint gets one clear error on all ranks and leaves the engine as it was."""

import re
from pathlib import Path

import pytest

from helpers.damaged_checkpoints import attempt_all, save_alone, table, train_undisturbed
from helpers.distributed import run
from helpers.paths import ROOT


@pytest.mark.parametrize("stage", [3, *(pytest.param(stage, marks=pytest.mark.full) for stage in (1, 2))])
def test_damaged_checkpoints(stage: int, tmp_path: Path) -> None:
    run(save_alone, 1, stage=stage, folder=str(tmp_path))
    ranks = run(attempt_all, 2, timeout=240, stage=stage, folder=str(tmp_path))
    assert [one[:2] for one in ranks[0]] == [one[:2] for one in ranks[1]], "the ranks raise different errors"
    assert len(ranks[0]) >= 25
    for title, message, *_ in ranks[0]:
        start = r"CheckpointError: the checkpoint checkpoints(/two|/three)? cannot be loaded, and nothing was changed: "
        assert re.match(start, message), (title, message)
        assert len(message) < 700, (title, message)
    undisturbed = run(train_undisturbed, 2, stage=stage, steps=len(ranks[0]))
    for results, losses in zip(ranks, undisturbed, strict=True):
        assert [(title, changed) for title, _, changed, _ in results if changed] == []
        assert [loss for *_, loss in results] == losses
    if stage == 2:
        page = (ROOT / "docs" / "evidence" / "damaged-checkpoints.md").read_text()
        assert table(ranks[0]) in page, "run python docs/generate.py"
