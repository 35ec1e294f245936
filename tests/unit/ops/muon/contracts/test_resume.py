# SPDX-License-Identifier: Apache-2.0
"""A run that loads a checkpoint continues with the bits of the run that saved it, in every setting."""

from pathlib import Path

import pytest

from helpers import nvme
from helpers.checkpoints import verify_save
from helpers.contracts import end_of, resume
from helpers.engine_state import differing
from helpers.settings import SETTINGS, cells


@pytest.mark.time_limit(1200)
@pytest.mark.parametrize(("name", "index"), cells("resume"))
def test_resume_is_exact(name: str, index: int, tmp_path: Path) -> None:
    world = SETTINGS[name].case(index)["world"]
    assert nvme.run(resume, world, name=name, index=index, folder=str(tmp_path)) == [[]] * world
    verify_save(tmp_path / (tmp_path / "latest").read_text())


@pytest.mark.time_limit(1200)
@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["ZeRO", "NVMe, dynamic loss scale", "precision and offload", "experts"])
def test_resume_in_a_fresh_process_is_exact(name: str, tmp_path: Path) -> None:
    world = SETTINGS[name].case(0)["world"]
    job = {"name": name, "index": 0, "folder": str(tmp_path)}
    saved = nvme.run(end_of, world, loads=False, **job)
    for wanted, got in zip(saved, nvme.run(end_of, world, fresh=True, loads=True, **job), strict=True):
        assert differing(wanted, got) == []
