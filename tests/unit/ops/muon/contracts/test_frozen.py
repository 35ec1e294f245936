# SPDX-License-Identifier: Apache-2.0
"""Matrices whose `requires_grad` is switched off and on during a run stand still meanwhile, in every setting."""

from functools import partial
from pathlib import Path

import pytest

from helpers import nvme
from helpers.contracts import compare, frozen_in, train_frozen
from helpers.settings import SETTINGS, cells


@pytest.mark.time_limit(1200)
@pytest.mark.parametrize("resumes", [True, pytest.param(False, marks=pytest.mark.full)])
@pytest.mark.parametrize(("name", "index"), cells("frozen"))
def test_what_is_switched_off_stands_still(name: str, index: int, resumes: bool, tmp_path: Path) -> None:
    """Bit by bit in each step; at the end the weights are the oracle's, which froze the same."""
    setting, case = SETTINGS[name], SETTINGS[name].case(index)
    expected = setting.reference(case, frozen=partial(frozen_in, setting, case))
    arguments = {"name": name, "index": index, "folder": str(tmp_path), "resumes": resumes}
    weights, wrong = zip(*nvme.run(train_frozen, case["world"], **arguments), strict=True)
    assert list(wrong) == [[]] * case["world"]
    assert compare(list(weights), expected, setting, case) == []
