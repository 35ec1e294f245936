# SPDX-License-Identifier: Apache-2.0
"""What `ds_muon try` does inside a run: the optimizer, its rate, the record, and the end."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deepspeed.muon.cli.init import to_muon
from deepspeed.muon.cli.try_ import multiplied
from deepspeed.muon.zero.tried_run import VARIABLE, replacements
from helpers import tried
from helpers.distributed import run
from helpers.ports import free_port
from helpers.tried import ADAMW, CONFIGS, RATE


def of_rank_0(script: str, world_size: int, stage: int, folder: Path, **variant: Any) -> tuple[list[Any], Any]:
    """The exit codes of all ranks, and the records."""
    results = run(tried.train_as_tried, world_size, script=script, stage=stage, folder=folder, **variant)
    codes, records = zip(*results, strict=True)
    return list(codes), records[0]


@pytest.mark.sample(4)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("script", CONFIGS)
def test_muon_trains_as_with_its_config_at_a_multiple_of_the_rate(
    script: str, stage: int, world_size: int, tmp_path: Path
) -> None:
    """Also where the script builds AdamW and its schedule."""
    section = to_muon("", {"optimizer": ADAMW})[0]["optimizer"]
    sections = multiplied({"optimizer": section} | CONFIGS[script] | {"optimizer": section}, 4.0)
    same = "function that builds the schedule" if "scheduler" not in sections else script
    expected = run(tried.train_plainly, world_size, script=same, stage=stage, steps=5, sections=sections)[0]
    changes = {"optimizer": section} if CONFIGS[script] else {}
    codes, records = of_rank_0(script, world_size, stage, tmp_path, muon=True, factor=4.0, changes=changes)
    assert codes == [0] * world_size
    first, *steps, last = records
    assert [step["loss"] for step in steps] == pytest.approx(expected, rel=1e-6)
    factors = (1, 1, 1.75, 2.5, 3.25) if script.startswith("schedule in") else (1, 2, 3, 4, 4)
    assert [step["lr"] for step in steps] == [factor * RATE for factor in factors]
    assert all(step["peak"] > 2**20 for step in steps) and last == {"end": "done"}
    assert first["built_by_script"] is not bool(CONFIGS[script])


@pytest.mark.sample(1)
@pytest.mark.parametrize("script", list(CONFIGS)[1:])
def test_adamw_trains_as_it_is(script: str, tmp_path: Path) -> None:
    expected = run(tried.train_plainly, 2, script=script, stage=2, steps=5, sections=CONFIGS[script])[0]
    codes, records = of_rank_0(script, 2, 2, tmp_path)
    assert codes == [0, 0]
    assert [step["loss"] for step in records[1:-1]] == pytest.approx(expected, rel=1e-6)
    params = records[0]["config"]["optimizer"]["params"]
    assert (params["lr"], params["weight_decay"], list(params["betas"])) == (RATE, 0.5, [0.9, 0.95])


SCRIPT = """
import torch, deepspeed
net = torch.nn.Linear(8, 8)
config = {"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}}}
engine = deepspeed.initialize(model=net, config=config, model_parameters=net.parameters())[0]
for _ in range(20):
    engine.backward(engine(torch.ones(1, 8, device=engine.device)).square().sum())
    engine.step()
"""


@pytest.mark.parametrize("is_muon", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_script_without_a_word_of_muon_is_recorded(is_muon: bool, tmp_path: Path) -> None:
    """By the entry point alone, for both optimizers."""
    changes = {"optimizer": {"type": "Muon", "params": {"lr": 0.1, "muon_include": ["weight"]}}} if is_muon else {}
    variant = {"muon": is_muon, "factor": 1.0, "changes": changes, "seed": 0, "steps": 3}
    (tmp_path / "variant.json").write_text(json.dumps(variant | {"records": str(tmp_path / "records.jsonl")}))
    env = {name: value for name, value in os.environ.items() if "AUTOLOAD" not in name}
    env |= {VARIABLE: str(tmp_path / "variant.json"), "DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0"}
    env |= {"WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    _, *steps, last = map(json.loads, (tmp_path / "records.jsonl").read_text().splitlines())
    assert [step["step"] for step in steps] == [1, 2, 3] and last == {"end": "done"}
    assert ("deepspeed-muon" in done.stderr and "Muon updates 1 matrices" in done.stderr) is is_muon


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    codes, records = of_rank_0("function that builds the schedule", 2, 2, tmp_path, factor=1e30)
    assert codes == [0, 0] and records[-1] == {"end": "diverged"} and len(records) < 6


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    found = run(tried.problems, 1, folder=tmp_path)[0]
    assert "has loaded a checkpoint of step 7" in found["a loaded checkpoint"]
    assert "loss of a step is unknown" in found["loss.backward"]
    assert "the run has Muon already" in found["Muon already"]
    assert "the script passes SGD" in found["another optimizer"]


def test_a_repeat_moves_the_seed(tmp_path: Path) -> None:
    """Also of a script that seeds before it imports DeepSpeed."""
    (tmp_path / "variant.json").write_text(json.dumps({"seed": 5}))
    env = {name: value for name, value in os.environ.items() if "AUTOLOAD" not in name}
    command = [sys.executable, "-c", "import torch; print(torch.manual_seed(1).initial_seed())"]
    env |= {VARIABLE: str(tmp_path / "variant.json")}
    assert subprocess.run(command, env=env, capture_output=True, text=True, timeout=200).stdout == "6\n"


def test_a_node_without_the_file_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert replacements() == {}
    monkeypatch.setenv(VARIABLE, str(tmp_path / "none.json"))
    with pytest.raises(SystemExit, match="all nodes must share --out"):
        replacements()
