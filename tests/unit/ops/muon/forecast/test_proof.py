# SPDX-License-Identifier: Apache-2.0
"""The collectives of published models' steps, on as many ranks as they are trained on, break no rule."""

from typing import Any

import pytest

from benchmarks.scaling import GPU, MODELS, PLAIN
from deepspeed.muon.cli.model import build
from deepspeed.muon.forecast.estimate import estimate, prove
from deepspeed.muon.forecast.layout import Layout, halves_of

#: By model, the most ranks at stages 0, 1 and 3: what the plans of all ranks take to list.
JOBS = {
    "llama3-8b": {0: 64, 1: 4096, 3: 512},
    "llama3-70b": {0: 8, 1: 4096, 3: 256},
    "moe-1t": {1: 256, 3: 16},
}


@pytest.mark.full
@pytest.mark.time_limit(900)
@pytest.mark.parametrize("model", JOBS)
def test_published_models_break_no_rule(model: str, record_property: Any) -> None:
    halves = halves_of(build(MODELS[model].source), PLAIN)
    for stage, world in JOBS[model].items():
        proof = prove(estimate(halves, Layout(stage, world), PLAIN, GPU), PLAIN, GPU)
        assert proof["fault"] is None and proof["ranks"] == world
        told = f"{proof['operations']:,} operations on {world:,} ranks, in {proof['seconds']:.1f} s"
        record_property("summary", f"{model}, stage {stage}: {told}")
