# SPDX-License-Identifier: Apache-2.0
"""The example of pre-training and its experiments: data, protocol on made-up losses, and short real runs."""

import csv
import json
import math
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepspeed.muon.config.schema import parse
from helpers.paths import DOCS, ROOT

EXAMPLE = ROOT / "examples/pretrain_gpt"
sys.path.insert(0, str(EXAMPLE))

import data  # noqa: E402
import experiments  # noqa: E402
import judge  # noqa: E402
import launch  # noqa: E402
import runs as runs_module  # noqa: E402
from losslog import LossLog, Row, evaluations  # noqa: E402
from runs import Run, Runs  # noqa: E402
from variants import VARIANTS, WATCH  # noqa: E402

# ---- training ---------------------------------------------------------------------------------------------------


def test_batches_depend_on_seed_and_step_only() -> None:
    corpus = data.Corpus(np.arange(5000) % 251, np.arange(500) % 251)
    first, again = (data.train_offsets(corpus, 0, 3, 16, 8) for _ in range(2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, data.train_offsets(corpus, 0, 4, 16, 8))
    inputs, targets = data.windows(corpus.train.astype(np.uint8), first, 8)
    assert inputs.shape == targets.shape == (16, 8) and (inputs[:, 1:] == targets[:, :-1]).all()


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


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([-0.02, -0.03, -0.025], "better"),
        ([0.02, 0.03, 0.025], "worse"),
        ([-0.02, 0.01, -0.03], "no gain shown"),
        ([-0.02], "one seed only"),
        ([-0.02, math.inf, -0.03], "worse"),
    ],
)
def test_the_verdict_is_the_side_of_zero_on_which_the_interval_lies(differences: list[float], verdict: str) -> None:
    """Student's t on pairs: of three, 4.303 standard deviations / sqrt(3)."""
    baseline = [1.7 + 0.1 * seed for seed in range(len(differences))]
    found = judge.paired([base + away for base, away in zip(baseline, differences, strict=True)], baseline)
    assert found.verdict == verdict
    if verdict == "better":
        assert found.high - found.mean == pytest.approx(4.303 * 0.005 / 3**0.5, rel=1e-3)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """The runs of a training that is made up: the loss is a parabola in the logarithm of the rate."""
    found, bonus = [], {"Muon": 0.4, "NorMuon": 0.5, "polar_express": 0.3}

    def train(runs: Runs, run: Run, folder: Path) -> None:
        found.append(run)
        loss = 2.0 + 0.01 * math.log2(run.lr / 0.064) ** 2 + 0.1 * run.seed - bonus.get(run.variant, 0.0)
        loss -= 0.001 * (run.seed % 2)
        log = LossLog(folder / "loss.csv")
        for step in range(1, runs.steps + 1):
            log.write(Row(step, 0.0, loss, run.lr, loss + 0.1 * (runs.steps - step)))
        if run.tau:
            (folder / "monitor").mkdir()
            logits = "step,layer\n16,0.5\n32,700.0\n48,90.0\n" if run.tau == WATCH else "step,layer\n16,0.5\n"
            (folder / "monitor/Train_Samples_max_logit_blocks.0.attn.csv").write_text(logits)
        (folder / "run.json").write_text(json.dumps({"run": asdict(run), "cpu_seconds": 1.5}))

    monkeypatch.setattr(Runs, "_train", train)
    return found


def test_finalists_are_judged_by_fresh_seeds_and_no_run_is_repeated(
    trained: list[Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With jobs in parallel, tables, charts and CSV; studies of widths and of clipping, and a variant of `--also`."""
    words = "--steps 3 --seeds 3 --finalists 1 --variants NorMuon polar_express deepseek_v4 --also deepseek_v4"
    words += " --widths 64 128"
    monkeypatch.setattr(sys, "argv", ["experiments.py", "--out", str(tmp_path), *words.split()])
    experiments.main()
    first = list(trained)
    assert {run.seed for run in first if run.variant == "NorMuon"} == {0, 1, 2, 3}
    assert {run.seed for run in first if run.variant == "polar_express"} == {0}
    text = (tmp_path / "experiments.md").read_text()
    assert "| NorMuon | 0.064 | 0 | 3 |" in text
    assert "| -0.1000 (-0.1000 to -0.1000) | better |" in text
    assert "| +0.1000 | one seed only |" in text
    with (tmp_path / "experiments.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(first) == len(set(first))
    assert {line["cpu_seconds"] for line in lines} == {"1.5"}
    assert "| deepseek_v4 | 0.064 | 0 | 3 |" in text
    assert "| 64 | 0.064* | 0.064 | 2.0000 | 1.6000 | -0.4000 | 33% |" in text
    assert "| 0.256 (4 x) | not clipped | 700.0 |" in text and "| 0.256 (4 x) | 30 | 0.5 |" in text
    assert min((tmp_path / f"{name}.png").stat().st_size for name in ("experiments", "width", "qk_clip")) > 5000
    experiments.main()
    assert trained == first


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
@pytest.mark.time_limit(120)
def test_logits_are_recorded_in_every_step_of_a_real_run(tmp_path: Path) -> None:
    """On one rank, without the launcher."""
    small = ["--context", "16", "--layers", "2", "--precision", "fp32", "--data", str(ROOT / "deepspeed")]
    runs = Runs(tmp_path, 3, training=small)
    run = Run("Muon", 0.016, width=64, tau=WATCH)
    assert math.isfinite(runs.final(run))
    logits = runs.logits(run)
    assert list(logits) == ["blocks.0.attn", "blocks.1.attn"]
    assert all(steps == [1, 2, 3] and min(values) > 0 for steps, values in logits.values())
    assert runs.cpu_seconds(run) > 0


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
