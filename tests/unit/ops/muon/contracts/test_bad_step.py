# SPDX-License-Identifier: Apache-2.0
"""A gradient that is not finite on one rank leaves no trace in weights and state on any rank, in every setting."""

from pathlib import Path

import pytest

from helpers import nvme
from helpers.contracts import train_through_bad_steps
from helpers.settings import SETTINGS, cells


@pytest.mark.time_limit(1200)
@pytest.mark.parametrize(("name", "index"), cells("bad step"))
def test_a_bad_step_leaves_no_trace(name: str, index: int, tmp_path: Path) -> None:
    world = SETTINGS[name].case(index)["world"]
    assert nvme.run(train_through_bad_steps, world, name=name, index=index, folder=str(tmp_path)) == [[]] * world
