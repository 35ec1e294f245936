# SPDX-License-Identifier: Apache-2.0
"""A run continues from what stock's converter makes of its checkpoint, at another stage and on other ranks."""

from pathlib import Path

import pytest
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from helpers import nvme
from helpers.contracts import around_a_move, lost_moments, merged
from helpers.engine_state import differing
from helpers.oracles import change_error
from helpers.settings import SETTINGS, cells
from helpers.universal import convert

TO_FP32 = ("ZeRO", "precision and offload", "BF16_Optimizer", "NVMe")
"""Rows whose checkpoints DeepSpeed's zero_to_fp32 is made for."""


@pytest.mark.time_limit(1200)
@pytest.mark.parametrize(("name", "index"), cells("universal"))
def test_a_universal_checkpoint_continues_elsewhere(name: str, index: int, tmp_path: Path) -> None:
    """With the same weights and states, bit for bit; in fp32 the weights of later steps are those of the other run."""
    setting, case = SETTINGS[name], SETTINGS[name].case(index)
    job = {"name": name, "index": index, "folder": str(tmp_path)}
    weights, states, later = merged(nvme.run(around_a_move, case["world"], loads=False, **job))
    if name in TO_FP32:
        assert differing(weights, get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), tag="saved")) == []
    convert(tmp_path)
    loaded, found, last = merged(nvme.run(around_a_move, setting.elsewhere(case)["world"], loads=True, **job))
    assert differing(weights, loaded) == []
    if "int8" not in str(case):  # its blocks follow the ranks, so that a move rounds it once more
        assert differing(states, found) == []
    if case.get("dtype", "fp32") == "fp32" and "torch_autocast" not in case:
        errors = {each: change_error(weights[each], last[each], later[each]) for each in later}
        assert {each: error for each, error in errors.items() if error > max(1e-3, setting.bounds[0])} == {}


LOST = {"AutoTP, normuon of shards": (14, 0), "pipeline, normuon": (6, 6), "AutoEP, normuon": (12, 8)}
"""Row -> (matrices of a share whose second moments the converter drops or mixes up, moments that all ranks still have).
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", LOST)
def test_second_moments_that_the_converter_drops_start_at_zero_with_a_warning(name: str, tmp_path: Path) -> None:
    job = {"name": name, "index": 0, "folder": str(tmp_path)}
    setting, case = SETTINGS[name], SETTINGS[name].case(0)
    nvme.run(around_a_move, case["world"], loads=False, **job)
    convert(tmp_path)
    found = nvme.run(lost_moments, setting.elsewhere(case)["world"], **job)
    texts, (lost, kept) = [text for said, _ in found for text in said], LOST[name]
    assert any(f"lacks the second moments of {lost} matrices (first: " in text for text in texts), texts
    assert sum(count for _, count in found) == kept
