# SPDX-License-Identifier: Apache-2.0
"""The example: its data, its two configs, and a short run through the launcher with save and resume."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from helpers.paths import ROOT

EXAMPLE = ROOT / "examples/pretrain_gpt"
sys.path.insert(0, str(EXAMPLE))

import data  # noqa: E402
import launch  # noqa: E402

OPTIONS = ["--stage", "3", "--steps", "4", "--data", str(ROOT / "deepspeed"), "--save-every", "2"]


def test_the_configs_differ_in_type_and_lr_only() -> None:
    adamw, muon = (json.loads(launch.CONFIGS[name].read_text()) for name in ("AdamW", "Muon"))
    assert (adamw["optimizer"].pop("type"), muon["optimizer"].pop("type")) == ("AdamW", "Muon")
    assert adamw["optimizer"]["params"].pop("lr") != muon["optimizer"]["params"].pop("lr")
    assert adamw == muon


def test_held_out_files_are_a_fixed_small_share() -> None:
    names = [f"package/module_{i}.py" for i in range(2000)]
    share = np.mean([data.is_held_out(name) for name in names])
    assert 0.03 <= share <= 0.07
    assert [data.is_held_out(n) for n in names] == [data.is_held_out(n) for n in names]


def test_batches_depend_on_seed_and_step_only() -> None:
    corpus = data.Corpus(np.arange(5000) % 251, np.arange(500) % 251)
    first, again = (data.train_offsets(corpus, 0, 3, 16, 8) for _ in range(2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, data.train_offsets(corpus, 0, 4, 16, 8))
    inputs, targets = data.windows(corpus.train.astype(np.uint8), first, 8)
    assert inputs.shape == targets.shape == (16, 8)
    assert (inputs[:, 1:] == targets[:, :-1]).all()


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
    launch.launch(path, straight, OPTIONS)
    launch.launch(path, resumed, [*OPTIONS, "--stop-at", "2"])
    launch.launch(path, resumed, [*OPTIONS, "--resume"])
    assert len(losses(straight / "loss.csv")) == 4
    assert losses(resumed / "loss.csv") == losses(straight / "loss.csv")
    assert subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True).returncode != 0, "ranks were left behind"
