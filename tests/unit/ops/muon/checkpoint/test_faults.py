# SPDX-License-Identifier: Apache-2.0
"""Killed ranks: a job that is started again goes on exactly, and nobody waits for ever."""

from pathlib import Path
from typing import Any

import pytest

from helpers.faults import CELLS, torment


def check(root: Path, case: dict[str, Any], phase: str, kills: int, seed: int) -> None:
    tally = torment(root, case, phase, kills, seed)
    print(phase, case, "seed", seed, tally)
    assert tally.problems == []
    assert tally.kills >= kills and tally.completed >= 1


@pytest.mark.sample(1)
@pytest.mark.parametrize(("stage", "phase", "kills"), [(2, "save", 1), (3, "exchange", 2), (3, "training", 1)])
def test_a_killed_job_goes_on_exactly(tmp_path: Path, stage: int, phase: str, kills: int) -> None:
    check(tmp_path, {"stage": stage}, phase, kills, seed=0)


@pytest.mark.full
@pytest.mark.time_limit(1800)
@pytest.mark.parametrize(("case", "phase"), [(c, p) for c, phases in CELLS for p in phases], ids=str)
def test_many_kills(tmp_path: Path, case: dict[str, Any], phase: str) -> None:
    check(tmp_path, case, phase, kills=20 if phase == "save" and "model" not in case else 10, seed=1)
