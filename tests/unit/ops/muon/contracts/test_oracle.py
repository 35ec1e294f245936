# SPDX-License-Identifier: Apache-2.0
"""Training equals the whole-matrix oracle, which computes its own gradients from the raw data, in every setting."""

from dataclasses import replace
from pathlib import Path

import pytest

from helpers import nvme
from helpers.contracts import compare, train
from helpers.oracles import change_error
from helpers.settings import SETTINGS, cells

#: Rows whose oracle differs from the usual one in its rules, or in the matrices that a parameter is.
KNOWN = [name for name, row in SETTINGS.items() if row.oracle or row.way.parts(row.case(0)).keys()]


@pytest.mark.time_limit(1200)
@pytest.mark.parametrize(("name", "index"), cells("oracle"))
def test_training_equals_the_oracle(name: str, index: int, tmp_path: Path) -> None:
    """So do the norms of the gradients, where DeepSpeed reports any."""
    setting, case = SETTINGS[name], SETTINGS[name].case(index)
    expected = setting.reference(case)
    weights, norms = zip(*nvme.run(train, case["world"], name=name, index=index, folder=str(tmp_path)), strict=True)
    assert compare(list(weights), expected, setting, case) == []
    is_half = case.get("dtype", "fp32") != "fp32" or "torch_autocast" in case
    for of_rank in norms:
        assert not any(of_rank) or of_rank == pytest.approx(expected.norms, rel=0.1 if is_half else 1e-3)


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", KNOWN)
def test_the_oracle_knows_the_setting(name: str) -> None:
    """Without its rules, or with each parameter as one matrix, another training comes out: the test above can fail."""
    setting, case = SETTINGS[name], SETTINGS[name].case(0)
    expected = setting.reference(case)
    plain = replace(setting, oracle={}).reference(case, parts=None if setting.oracle else {})
    triples = [(plain.initial[each], plain.weights[each], expected.weights[each]) for each in plain.weights]
    assert max(change_error(*triple) for triple in triples) > 0.05
