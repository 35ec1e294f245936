# SPDX-License-Identifier: Apache-2.0
"""The experiments of the example: statistics and protocol on made-up losses, and short real runs."""

import csv
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from deepspeed.muon.config.schema import parse
from helpers.paths import DOCS, ROOT

EXAMPLE = ROOT / "examples/pretrain_gpt"
sys.path.insert(0, str(EXAMPLE))

import experiments  # noqa: E402
import judge  # noqa: E402
import runs as runs_module  # noqa: E402
from losslog import LossLog, Row, evaluations  # noqa: E402
from runs import Run, Runs, search, tune  # noqa: E402
from variants import VARIANTS, WATCH  # noqa: E402


def test_the_interval_is_that_of_students_t_on_pairs() -> None:
    """Five differences of mean -0.03 and standard deviation 0.01: half a width of 2.776 x 0.01 / sqrt(5)."""
    baseline = [1.0, 2.0, 3.0, 4.0, 5.0]
    spread = [-1.0, 1.0, 0.0, -1.0, 1.0]
    losses = [base - 0.03 + 0.01 * away for base, away in zip(baseline, spread, strict=True)]
    difference = judge.paired(losses, baseline)
    assert difference.mean == pytest.approx(-0.03)
    assert difference.high - difference.mean == pytest.approx(2.776 * 0.01 / 5**0.5, rel=1e-3)
    assert difference.mean - difference.low == pytest.approx(difference.high - difference.mean)


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
    baseline = [1.7 + 0.1 * seed for seed in range(len(differences))]
    losses = [base + away for base, away in zip(baseline, differences, strict=True)]
    assert judge.paired(losses, baseline).verdict == verdict


def test_seeds_that_do_not_match_are_no_pairs() -> None:
    with pytest.raises(ValueError, match="zip"):
        judge.paired([1.0, 2.0], [1.0])


def test_steps_to_a_loss_lie_between_the_evaluations_around_it() -> None:
    rows = [Row(step, 0.0, 0.0, 0.0, loss) for step, loss in ((20, 3.0), (40, 2.0), (60, 2.5), (80, 1.0))]
    assert judge.steps_to(rows, 2.25) == pytest.approx(35)
    assert judge.steps_to(rows, 3.5) == 20
    assert judge.steps_to(rows, 1.5) == pytest.approx(60 + 20 * 1.0 / 1.5)
    assert math.isnan(judge.steps_to(rows, 0.5))


class MadeUp:
    """Stands in for training: the loss of a run is a parabola in the logarithms of rate and decay."""

    def __init__(self, best: dict[str, float], bonus: dict[str, float] | None = None) -> None:
        self.best, self.bonus, self.trained = best, bonus or {}, []

    def __call__(self, runs: Runs, run: Run, folder: Path) -> None:
        self.trained.append(run)
        away = sum(math.log2(getattr(run, key) / value) ** 2 for key, value in self.best.items() if getattr(run, key))
        loss = 2.0 + 0.01 * away + 0.1 * run.seed - self.bonus.get(run.variant, 0.0) - 0.001 * (run.seed % 2)
        log = LossLog(folder / "loss.csv")
        for step in range(1, runs.steps + 1):
            log.write(Row(step, 0.0, loss, run.lr, loss + 0.1 * (runs.steps - step)))
        if run.tau:
            (folder / "monitor").mkdir()
            logits = "step,layer\n16,0.5\n32,700.0\n48,90.0\n" if run.tau == WATCH else "step,layer\n16,0.5\n"
            (folder / "monitor/Train_Muon_max_logit_blocks.0.attn.csv").write_text(logits)
        (folder / "run.json").write_text(json.dumps({"run": asdict(run), "cpu_seconds": 1.5}))


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> MadeUp:
    training = MadeUp({"lr": 0.064}, {"Muon": 0.4, "NorMuon": 0.5, "cubic5": 0.3})
    monkeypatch.setattr(Runs, "_train", lambda runs, run, folder: training(runs, run, folder))
    return training


def test_the_grid_is_widened_until_the_best_rate_is_inside(made_up: MadeUp, tmp_path: Path) -> None:
    best, inside = search(Runs(tmp_path, 3), Run("Muon", 0.008), "lr")
    assert (best.lr, inside) == (0.064, True)
    assert sorted(run.lr for run in made_up.trained) == [0.008, 0.016, 0.032, 0.064, 0.128]


def test_a_variant_whose_rate_is_not_tuned_takes_that_of_its_base(made_up: MadeUp, tmp_path: Path) -> None:
    made_up.best = {"lr": 0.064, "weight_decay": 0.2}
    tuned = experiments.best_of(Runs(tmp_path, 3), "Muon, decay", 128)
    assert (tuned.run.lr, tuned.run.weight_decay) == (0.064, 0.2)
    assert {run.lr for run in made_up.trained if run.variant == "Muon, decay"} == {0.064}


@pytest.mark.parametrize(("peak", "best"), [(0.064, 0.064), (0.048, 0.0453), (0.09, 0.0905)])
def test_a_rate_between_the_best_two_is_tried_at_last(
    made_up: MadeUp, tmp_path: Path, peak: float, best: float
) -> None:
    made_up.best = {"lr": peak}
    assert tune(Runs(tmp_path, 3), Run("Muon", 0.032)).run.lr == pytest.approx(best)


def test_a_best_rate_at_the_edge_is_said_to_be(made_up: MadeUp, tmp_path: Path) -> None:
    made_up.best = {"lr": 1e6}
    tuned = tune(Runs(tmp_path, 3), Run("Muon", 0.008))
    assert tuned.at_the_edge == ("lr",)
    assert len(made_up.trained) == 2 + runs_module.MAX_EXTENSIONS


def test_rate_and_decay_are_tuned_in_turns(made_up: MadeUp, tmp_path: Path) -> None:
    made_up.best = {"lr": 0.032, "weight_decay": 0.4}
    tuned = tune(Runs(tmp_path, 3), Run("Muon", 0.016, 0.1), ("lr", "weight_decay"))
    assert (tuned.run.lr, tuned.run.weight_decay, tuned.at_the_edge) == (0.032, 0.4, ())


def test_finalists_are_judged_by_fresh_seeds_and_no_run_is_repeated(
    made_up: MadeUp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With jobs in parallel, tables, chart and CSV."""
    words = ["--steps", "3", "--seeds", "3", "--finalists", "1", "--studies", "--variants", "NorMuon", "cubic5"]
    monkeypatch.setattr(sys, "argv", ["experiments.py", "--out", str(tmp_path), *words])
    experiments.main()
    first = list(made_up.trained)
    assert {run.seed for run in first if run.variant == "NorMuon"} == {0, 1, 2, 3}
    assert {run.seed for run in first if run.variant == "cubic5"} == {0}
    text = (tmp_path / "experiments.md").read_text()
    assert "| NorMuon | 0.064 | 0 | 3 |" in text
    assert "| -0.1000 (-0.1000 to -0.1000) | better |" in text
    assert "| +0.1000 | one seed only |" in text
    with (tmp_path / "experiments.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(first) == len(set(first))
    assert {line["cpu_seconds"] for line in lines} == {"1.5"}
    assert (tmp_path / "experiments.png").stat().st_size > 5000
    experiments.main()
    assert made_up.trained == first


def test_the_page_shows_the_results() -> None:
    """The tables of docs/evidence/experiments.md are those of the last run, and so are its charts."""
    results, page = EXAMPLE / "results", (DOCS / "evidence" / "experiments.md").read_text().splitlines()
    lines = (results / "experiments.md").read_text().splitlines()
    assert [line for line in lines if line.startswith("|") and line not in page] == []
    for chart in ("experiments.png", "qk_clip.png"):
        assert (results / chart).read_bytes() == (DOCS / "assets" / chart).read_bytes()
        assert f"(../assets/{chart})" in "\n".join(page)


def test_widths_and_clip_have_tables_and_charts(
    made_up: MadeUp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a variant of `--also` runs all seeds though it is not among the best."""
    words = ["--steps", "3", "--seeds", "2", "--finalists", "1", "--variants", "NorMuon", "cubic5", "--also", "cubic5"]
    monkeypatch.setattr(sys, "argv", ["experiments.py", "--out", str(tmp_path), *words, "--widths", "64", "128"])
    experiments.main()
    text = (tmp_path / "experiments.md").read_text()
    assert "| cubic5 | 0.064 | 0 | 2 |" in text
    assert "| 64 | 0.064* | 0.064 | 2.0000 | 1.6000 | -0.4000 | 33% |" in text
    assert "| 0.256 (4 x) | not clipped | 700.0 |" in text
    assert "| 0.256 (4 x) | 30 | 0.5 |" in text
    assert min((tmp_path / name).stat().st_size for name in ("width.png", "qk_clip.png")) > 5000


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_config_of_each_variant_is_accepted(variant: str) -> None:
    definition = VARIANTS[variant]
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
