# SPDX-License-Identifier: Apache-2.0
"""One process with many engines: what they leave behind, what they do to each other, and loops around their steps."""

import sys
from typing import Any

import pytest

import deepspeed
from deepspeed.muon.zero import patches
from helpers.distributed import run
from helpers.models import TinyGpt, train_engine
from helpers.paths import ROOT
from helpers.training import ds_config, with_params

sys.path[1:1] = [str(ROOT)]
from benchmarks.engines import holdings  # noqa: E402

ADAMW: dict[str, Any] = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}

# ---- engine after engine --------------------------------------------------------------------------------------------

COUNTED = (
    *("tensors", "tensor MB", "engines", "optimizers", "global hooks", "hooks"),
    *("threads", "tasks", "groups", "files", "atexit", "handlers"),
)
"""What must not grow with the number of engines."""
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "qk_clip": {"qk_clip": {"tau": 0.01}},
    "int8, normuon": {"momentum_dtype": "int8", "normuon": True},
    "monitor": {"monitor_interval": 1},
}


def replaced_attributes() -> list[Any]:
    """What the seams that are not in use now hold; those at activation stay replaced."""
    found = []
    for seam in patches.SEAMS:
        owner, name = seam.find()
        found.append(vars(owner).get(name))
    return found


def growth(count: int, end: str, stage: int, **config: Any) -> dict[str, int]:
    """What ``count`` engines more add to what two have left in this process."""
    found, model = [], None
    for number in range(count + 2):
        model = model if model and end == "one model" else TinyGpt()
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), config=ds_config(stage=stage, **config)
        )
        train_engine(engine, 2)  # from the second step on DeepSpeed caches what it knows of modules
        if end != "dropped":
            engine.destroy()
        del engine
        if number in (1, count + 1):
            found.append(holdings([model]))
    before, after = found
    return {key: after[key] - before[key] for key in COUNTED}


def compare_growth(end: str, params: dict[str, Any], folder: str, **case: Any) -> list[dict[str, int]]:
    """What engines with Muon add; and, if DeepSpeed does not free the engines, what engines with AdamW add."""
    before, found = replaced_attributes(), []
    if "monitor_interval" in params:
        case["csv_monitor"] = {"enabled": True, "output_path": folder}
    for optimizer in (with_params(**params), *([] if end == "destroyed" else [ADAMW])):
        found.append(growth(end=end, optimizer=optimizer, **case))
    assert all(now is then for now, then in zip(replaced_attributes(), before, strict=True))
    return found


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("stage", [3, 0, 1, 2])
@pytest.mark.parametrize("end", ["destroyed", "dropped", "one model"])
def test_engines_leave_nothing_behind_once_destroyed(
    end: str, stage: int, name: str, dtype: str, tmp_path: Any
) -> None:
    """Nor more than AdamW's without ``destroy()``, nor with one model, in which DeepSpeed leaves an engine's hooks."""
    case = {"end": end, "count": 3, "stage": stage, "dtype": dtype, "params": SETTINGS[name], "folder": str(tmp_path)}
    for muon, *adamw in run(compare_growth, 1, **case):
        assert adamw or not any(muon.values()), muon
        for key in COUNTED[2:] if adamw else ():  # an engine with Muon has more tensors
            assert muon[key] <= adamw[0][key], (key, muon, adamw)
