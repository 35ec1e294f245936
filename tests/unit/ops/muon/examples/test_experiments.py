# SPDX-License-Identifier: Apache-2.0
"""The example of pre-training and its experiments: short real runs, and the page of their results."""

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deepspeed.muon.config.schema import parse
from helpers.paths import DOCS, ROOT

EXAMPLE = ROOT / "examples/pretrain_gpt"
sys.path.insert(0, str(EXAMPLE))

import experiments  # noqa: E402
import launch  # noqa: E402
import runs as runs_module  # noqa: E402
from losslog import evaluations  # noqa: E402
from runs import Runs  # noqa: E402
from variants import VARIANTS  # noqa: E402

# ---- training ---------------------------------------------------------------------------------------------------


def losses(log: Path) -> list[tuple[str, str]]:
    with log.open() as file:
        return [(row["step"], row["train"]) for row in csv.DictReader(file)]


@pytest.mark.full
@pytest.mark.time_limit(280)
def test_a_run_resumes_where_it_stopped(tmp_path: Path) -> None:
    """With everything fixed that two runs may choose differently."""
    config = json.loads(launch.CONFIGS["Muon"].read_text())
    config["optimizer"]["params"] |= {"ns_dtype": "fp32", "ns_method": "gram", "kernels": "torch"}
    path, straight, resumed = (tmp_path / name for name in ("ds_config.json", "straight", "resumed"))
    path.write_text(json.dumps(config))
    options = ["--stage", "3", "--steps", "4", "--data", str(ROOT / "deepspeed"), "--save-every", "2"]
    launch.launch(path, straight, options)
    launch.launch(path, resumed, [*options, "--stop-at", "2"])
    launch.launch(path, resumed, [*options, "--resume"])
    assert len(losses(straight / "loss.csv")) == 4
    assert losses(resumed / "loss.csv") == losses(straight / "loss.csv")
    assert subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True).returncode != 0, "ranks were left behind"


# ---- experiments ------------------------------------------------------------------------------------------------


def test_the_page_shows_the_results() -> None:
    """The tables of docs/evidence/experiments.md are those of the last run, and so are its charts."""
    results, page = EXAMPLE / "results", (DOCS / "evidence" / "experiments.md").read_text().splitlines()
    lines = (results / "experiments.md").read_text().splitlines()
    assert [line for line in lines if line.startswith("|") and line not in page] == []
    for chart in ("experiments.png", "qk_clip.png"):
        assert (results / chart).read_bytes() == (DOCS / "assets" / chart).read_bytes()
        assert f"(../assets/{chart})" in "\n".join(page)


@pytest.mark.parametrize("definition", VARIANTS.values(), ids=VARIANTS)
def test_the_config_of_each_variant_is_accepted(definition: Any) -> None:
    assert definition.control in VARIANTS
    if definition.base == "Muon":
        parse(definition.config()["optimizer"]["params"])


@pytest.mark.full
@pytest.mark.time_limit(600)
def test_the_command_trains_tunes_and_compares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs_module, "MAX_EXTENSIONS", 1)
    words = "--steps 4 --seeds 2 --variants --studies --layers 1 --context 16 --eval-every 2 --eval-batches 1"
    words += " --precision fp32 --data"
    monkeypatch.setattr(
        sys, "argv", ["experiments.py", "--out", str(tmp_path), *words.split(), str(ROOT / "deepspeed")]
    )
    experiments.main()
    done = Runs(tmp_path, 4).done()
    for name in ("AdamW", "Muon"):
        rates = {seed: {run.lr for run in done if (run.variant, run.seed) == (name, seed)} for seed in range(3)}
        assert len(rates[0]) >= 3
        assert rates[1] == rates[2] and len(rates[1]) == 1 and rates[1] < rates[0]
    assert all(len(evaluations(log)) == 2 for log in tmp_path.glob("runs/*/*/loss.csv"))
    assert "| AdamW |" in (tmp_path / "experiments.md").read_text()
