# SPDX-License-Identifier: Apache-2.0
"""The benchmarks: the command, launches, tables, floors, the rule of `choose`, the parts of `gpu` on a CPU."""

import argparse
import csv
import importlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.paths import BENCHMARKS, ROOT
from helpers.plans import spread

sys.path[1:1] = [str(ROOT), str(ROOT / "examples/pretrain_gpt")]

from benchmarks import __main__ as command  # noqa: E402
from benchmarks import gpu, learning, ns, quality, ranks, report, roofline, step, training  # noqa: E402
from benchmarks.rates import Rates  # noqa: E402
from deepspeed.muon.kernels import reference  # noqa: E402
from deepspeed.muon.plan.bucket import Batch, Bucket  # noqa: E402
from losslog import Row  # noqa: E402

#: Round numbers: one operation and one byte a unit.
RATES = Rates(bf16=1e9, fp32=1e8, fp16=1e7, copy=1e6, network=1e3)


# ---- the command ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", command.BENCHMARKS)
def test_every_benchmark_has_a_command_line(name: str) -> None:
    """Its options are documented, and given their defaults as text they mean the defaults."""
    benchmark = getattr(importlib.import_module(f"benchmarks.{command.BENCHMARKS[name][0]}"), name)
    parser = command.parser_of(benchmark)
    defaults, words = vars(parser.parse_args([])), []
    for option, value in defaults.items():
        if not isinstance(value, bool) and value not in ("", ()):
            words += [f"--{option.replace('_', '-')}", *map(str, value if isinstance(value, tuple) else [value])]
    found = vars(parser.parse_args(words))
    assert {key: tuple(v) if isinstance(v, list) else v for key, v in found.items()} == defaults
    assert all(action.help for action in parser._actions)


def test_without_a_name_all_are_listed(capsys: pytest.CaptureFixture) -> None:
    assert (command.main(), command.main("--help"), command.main("nothing")) == (0, 0, 2)
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in command.BENCHMARKS)


def test_wrong_options_are_refused(capsys: pytest.CaptureFixture) -> None:
    for words in (["--cases", "4"], ["--worlds", "two"], ["--nothing"]):
        with pytest.raises(SystemExit):
            command.parser_of(step.step).parse_args(words)
    parsed = command.parser_of(step.step).parse_args(["--worlds", "2", "4", "--cases", "3", "--buckets", "0.5"])
    assert isinstance(parsed, argparse.Namespace)
    assert (parsed.worlds, parsed.cases, parsed.buckets) == ([2, 4], ["3"], [0.5])


def test_the_repository_names_no_benchmark_that_is_gone() -> None:
    """In documentation, sources and the Makefile."""
    texts = [path for folder in ("docs", "deepspeed", "examples") for path in (ROOT / folder).rglob("*.[mp][dy]")]
    for path in (*texts, ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "Makefile"):
        for words in path.read_text().split("-m benchmarks ")[1:]:
            name = words.split()[0].strip("`.,;:)")
            assert name in command.BENCHMARKS or not name.islower(), f"{path}: {name}"
        assert "benchmarks/gpu.sh" not in path.read_text(), path


# ---- launches -------------------------------------------------------------------------------------------


def echo(text: str) -> dict[str, str]:
    """In a rank."""
    import os

    return {"text": text, "rank": os.environ["RANK"], "active": os.environ.get("DS_MUON_AUTOLOAD", "1")}


def some_rows(count: int) -> Iterator[int]:
    """In a rank: fails after some rows."""
    yield from range(count)
    raise RuntimeError("no more rows")


def asleep() -> None:
    """In a rank: rank 1 fails, rank 0 would sleep for long."""
    import os
    import time

    if os.environ["RANK"] == "1":
        raise RuntimeError("rank 1 has enough")
    time.sleep(300)


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The functions above, as a module that ranks can import."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


@pytest.mark.full
@pytest.mark.usefixtures("jobs")
def test_ranks_return_what_the_function_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_MUON_AUTOLOAD", "0")
    assert ranks.run(echo, {"text": "x"}, world=2) == [{"text": "x", "rank": r, "active": "1"} for r in ("0", "1")]
    (off,) = ranks.run(echo, {"text": "x"}, environment={"DS_MUON_AUTOLOAD": "0"})
    assert off["active"] == "0"


@pytest.mark.full
@pytest.mark.usefixtures("jobs")
def test_a_failure_ends_all_ranks_shows_their_output_and_keeps_rows() -> None:
    with pytest.raises(ranks.RanksFailed, match=r"(?s)asleep: ranks ended with \[None, 1\].*rank 1 has enough"):
        ranks.run(asleep, {}, world=2, timeout=60)
    with pytest.raises(ranks.RanksFailed, match="no more rows") as failure:
        ranks.run(some_rows, {"count": 3})
    assert failure.value.results == [0, 1, 2]


# ---- floors ---------------------------------------------------------------------------------------------


def test_a_rank_does_an_equal_share_or_the_heaviest_matrix() -> None:
    small, large = roofline.least_flops(4, 4), roofline.least_flops(64, 64)
    (even,) = roofline.demands([(4, 4)] * 6, 2, 3)
    (heavy,) = roofline.demands([(4, 4), (64, 64)], 2, 2)
    assert (even.flops, heavy.flops) == (2 * small, large)
    assert heavy.bytes == (16 + 64 * 64) / 2 * 24
    assert roofline.least_flops(8, 16, "standard", symmetric=True) < roofline.least_flops(8, 16, "standard")


def test_bytes_touch_every_tensor_once() -> None:
    """Gradient 4, momentum 4 + 4, parameter 4 + 4, input and result of Newton-Schulz 2 + 2, or 4 + 4."""
    assert [roofline.demands([(8, 8)], 1, 1, wire=wire)[0].bytes / 64 for wire in ("bf16", "fp32")] == [24, 28]
    assert roofline.demands([(8, 8)], 1, 1, "fp32")[0].bytes / 64 == 24


def test_stage_3_sends_all_but_an_owners_part_there_and_back() -> None:
    """Of N elements on W ranks each sends 2 N (W - 1) / W^2 of 2 bytes."""
    (demand,) = roofline.demands([(8, 8)] * 4, 3, 4)
    assert demand.sent == 2 * 256 * 3 / 16 * 2


def test_stages_1_and_2_send_what_straddles_a_border() -> None:
    (whole,) = roofline.demands([(8, 8), (8, 8)], 1, 2)
    (cut,) = roofline.demands([(8, 8), (8, 8), (8, 8)], 2, 2)
    assert (whole.sent, cut.sent) == (0, 2 * 32 * 2 / 2)


def test_stage_0_repeats_or_shares() -> None:
    """Sharing saves half of the operations and sends half of the results; the floor is the cheaper way."""
    matrices = [(32, 32)] * 2
    repeated, shared = roofline.demands(matrices, 0, 2)
    assert (repeated.flops, repeated.sent) == (2 * shared.flops, 0)
    assert shared.sent == 2 * 32 * 32 * 2 / 2
    assert repeated.bytes == shared.bytes == 2 * 32 * 32 * 24
    slow, fast = (replace(RATES, copy=1e12, network=rate) for rate in (1.0, 1e12))
    assert roofline.floor(matrices, 0, 2, slow)[1] == repeated
    assert roofline.floor(matrices, 0, 2, fast)[0].newton_schulz == pytest.approx(shared.flops / 1e9)


def test_a_floor_is_work_over_rates() -> None:
    least, demand = roofline.floor([(8, 8)] * 4, 3, 4, RATES)
    assert least == (demand.flops / 1e9, 64 * 24 / 1e6, 2 * 256 * 3 / 16 * 2 / 1e3)
    operations = roofline.least_flops(8, 8, dtype="fp32")
    assert roofline.floor([(8, 8)], 1, 1, RATES, "fp32")[0].newton_schulz == operations / 1e8
    best = roofline.floor([(8, 8)], 1, 1, replace(RATES, fp32=1e10))[0].newton_schulz
    assert best == operations / 1e10, "in the dtype that is fastest here"
    assert RATES.best(Rates(2e9, 1e7, 1e6, 1e6)) == Rates(2e9, 1e8, 1e7, 1e6, float("inf"))
    assert not roofline.has_symmetric(reference.OPERATIONS)


# ---- tables of step -------------------------------------------------------------------------------------


def record(case: str, variant: str, value: float, **more: Any) -> dict[str, Any]:
    """A launch of one step."""
    job = training.Job(case, variant, layers=1, hidden=8, steps=1, bucket=more.pop("bucket", 0.0))
    times = {"forward": 0.1, "backward": 0.1, "step": value - 0.1, "optimizer": 0.3}
    sent = {"backward MB": 0.1, "step MB": 0.1, "link backward MB": 0.0, "link step MB": 0.0}
    largest = {f"{phase} MB, largest rank": 0.1 for phase in training.PHASES}
    largest |= dict.fromkeys(("first step s", "peak MB", "peak MB above start", "GPU peak MB"), 1.0)
    first = {"resident MB": [9.0, 9.0, 1.0, 2.0], "state keys": "momentum_buffer"}
    if variant == "ours":
        largest |= {"exchange MB": 4.0, "alone s": 0.4, "scratch MB": 7.0}
        first |= {"kernels": "torch", "symmetric": False, "exchange rounds": 3}
        sent |= {f"{phase} s": 0.1 for phase in training.OUR_PHASES}
    rank = {"times": [times], "max": largest, "mean": sent | {"state bytes/parameter": 4.0}, "first": first}
    return training.merge(job, [rank, rank])


def found(*more: dict[str, Any]) -> step.Found:
    """Three rounds of ours, AdamW, AdamW again and stock's at stage 3, one of stock's standard."""
    records = [record("3", "ours", s) for s in (0.5, 0.6, 0.55)]
    records += [record("3", variant, s) for variant in ("adamw", "adamw-again") for s in (0.2, 0.25, 0.3)]
    records += [record("3", "stock", s) for s in (1.2, 1.25, 1.3)] + [record("3", "stock-standard", 0.4), *more]
    return {row["variant"]: row for row in report.summarize(records, "variant", "bucket")}


def test_a_launch_is_as_slow_as_its_slowest_rank() -> None:
    job = training.Job("1", "adamw", steps=3)
    same = {"forward": 0.0, "optimizer": 0.0}
    steps = [
        [same | {"backward": b, "step": s} for b, s in pairs]
        for pairs in (((1, 5), (2, 2), (9, 9)), ((3, 2), (2, 4), (9, 8)))
    ]
    both = [
        {"times": times, "max": {"peak MB": n}, "mean": {"backward MB": n, "step MB": 1.0}, "first": {"n": n}}
        for n, times in enumerate(steps)
    ]
    merged = training.merge(job, both)
    assert merged["seconds"] == 6, "6, 6 and 18: each step by its slowest rank, then the median"
    assert (merged["backward s"], merged["peak MB"], merged["backward MB"], merged["MB"], merged["n"]) == (
        3,
        1,
        0.5,
        1.5,
        0,
    )


def test_ours_against_stock_and_what_each_adds_to_adamw() -> None:
    """Ours 0.55 - 0.25, stock's 1.25 - 0.25; at most (0.6 - 0.2) / (1.2 - 0.3)."""
    standard, stock = step.against(found())
    assert (standard["against"], stock["against"]) == ("stock Muon, standard", "stock Muon"), "the fastest first"
    assert stock["ratio of medians"] == pytest.approx(0.55 / 1.25)
    assert (stock["verdict"], standard["verdict"]) == ("faster, beyond the spread", "one round, spread unknown")
    assert (stock["ours adds s"], stock["it adds s"]) == pytest.approx((0.3, 1.0))
    assert (stock["ours adds / it adds"], stock["at most"]) == pytest.approx((0.3, 0.4 / 0.9))
    (row,) = step.overview(found())
    assert row["ours / stock's best"] == f"{0.55 / 0.4:.2f}" and "AdamW again" not in row


def test_noise_is_a_variant_over_itself() -> None:
    (row,) = step.noise(found())
    assert (row["variant"], row["ratio of medians"]) == ("AdamW", 1.0)
    assert row["slowest / fastest round of both"] == pytest.approx(1.5)


def test_distance_from_the_floor_what_is_hidden_and_memory() -> None:
    job = training.Job("3", "ours", layers=1, hidden=8)
    (row,) = step.floors(found(), job, {2: RATES})
    assert row["optimizer / floor"] == pytest.approx(0.3 / sum(roofline.floor(job.matrices, 3, 2, RATES)[0]))
    (row,) = step.exchanges(found())
    assert (row["rounds"], row["MB sent"], row["waiting s"], row["hidden"]) == (3, 4.0, 0.1, "75%")
    row = next(row for row in step.memory(found()) if row["variant"] == "deepspeed-muon")
    assert (row["scratch MB"], row["MB per 100 steps in it"]) == (7.0, 100.0)


def test_the_report_of_a_step(results: Path) -> None:
    job, several = (
        training.Job("3", "ours", layers=1, hidden=8),
        [record("1", "ours", 0.5), record("3", "ours", 0.6, bucket=4.0)],
    )
    text = step.write([*several, record("3", "stock", 0.9), record("3", "adamw", 0.3)], job, "test", {2: RATES})
    for part in ("Ours against stock", "Distance from the floor", "The exchange of ours", "Details", "First step"):
        assert f"## {part}" in text or part == "Ours against stock", part
    assert "deepspeed-muon, 4 MiB" in text and "stage 1" in text
    with (results / "test.csv").open(newline="") as file:
        assert {row["case"] for row in csv.DictReader(file)} == {"1", "3"}
    assert (results / "test.png").stat().st_size > 1000


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of result files."""
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    return tmp_path / "results"


def test_files_of_a_result(results: Path) -> None:
    rows = [{"a": 1, "b": 2.0 / 3}, {"a": 2, "c": "x"}]
    chart = report.lines(rows, lambda row: "line", "a", "b")
    text = report.write("r", "Title", rows, report.table(rows), "", draw=chart)
    title, _, machine, _, *table = text.splitlines()
    assert title == "# Title" and "torch" in machine
    assert [cell.strip() for cell in table[-1].strip("|").split("|")] == ["2", "-", "x"] and "0.667" in table[2]
    with (results / "r.csv").open(newline="") as file:
        cells = list(csv.DictReader(file))
    assert [(row["a"], row["b"], row["c"]) for row in cells] == [("1", "0.6666667", ""), ("2", "", "x")]
    assert all(row["torch"] and row["date"] for row in cells)
    assert (results / "r.png").stat().st_size > 1000


# ---- Newton-Schulz --------------------------------------------------------------------------------------


def test_shapes_fill_a_bucket() -> None:
    usual, full = ns.shapes_of(False), ns.shapes_of(True)
    assert (4, 512, 2048) in usual and {(1, 8192, 65536), (1, 8192, 2048)} <= set(full)
    assert all(batch * rows * cols <= ns.BUCKET for batch, rows, cols in usual)


def test_rows_of_newton_schulz() -> None:
    """Every candidate, its error and its distance from the floor."""
    candidates, _ = ns.candidates("cpu")
    rows = list(ns.rows_of((2, 16, 48), candidates, RATES, "cpu", 0.05))
    assert {row["implementation"] for row in rows} == set(candidates) >= {"ours, gram, fp32, torch", "torch.optim.Muon"}
    for row in rows:
        assert row["time / floor"] > 0 and row["error, Gaussian"] < (1e-4 if "fp32" in row["implementation"] else 0.2)


def test_quality_sees_what_a_matrix_has_and_not_its_noise() -> None:
    """Of rank 2 beside noise: 0.9 and 1.2 in its directions, or turned round; half of everything."""
    u, v = (torch.linalg.qr(torch.rand(n, n).double())[0][:, :4] for n in (6, 9))
    matrix = u @ torch.diag(torch.tensor([2.0, 1.0, 1e-3, 1e-3]).double()) @ v.T
    result = u @ torch.diag(torch.tensor([0.9, 1.2, 0.1, 0.1]).double()) @ v.T
    found = quality.measures(matrix, result)
    expected = ((0.1**2 + 0.2**2) / 2) ** 0.5
    assert found["rms of s - 1"] == pytest.approx(expected) and found["distance to U V'"] == pytest.approx(expected)
    assert found["largest s"] == pytest.approx(1.2)
    assert quality.measures(matrix, -u @ v.T)["distance to U V'"] == pytest.approx(2.0)


# ---- learning -------------------------------------------------------------------------------------------


def curve(losses: list[float], pace: float) -> list[Row]:
    return [Row(10 * i, pace * i, loss, 0.1, loss) for i, loss in enumerate(losses, 1)]


def test_losses_relative_to_the_first_run() -> None:
    runs = {"adamw": [curve([4.0, 3.0, 2.0], 10.0)], "ours": [curve([3.0, 2.0, 1.0], 12.0)]}
    adamw, ours = learning.compared(runs)
    assert [row["seconds to adamw's final loss"] for row in (adamw, ours)] == [30.0, 24.0]
    assert (ours["of adamw's seconds"], ours["loss at 100% of adamw's seconds"]) == ("80%", pytest.approx(1.5))
    assert (ours["first step s"], ours["ms per later step"]) == (12.0, 1200.0)
    row = learning.compared({name: [*logs, curve([4.0, 3.0, 3.0], 1.0)] for name, logs in runs.items()})[1]
    assert (row["of each seed"], row["final loss"]) == ("1.0000, 3.0000", "2.0000")
    assert row["less adamw's"] == "-0.5000 (-6.8530 to +5.8530)", "of -1 and 0, whose standard deviation is 0.7071"


def test_stocks_rates_give_square_matrices_the_updates_of_ours() -> None:
    """RMS of the update: muon_lr / sqrt(width) of an orthogonal matrix, 0.2 lr of ours."""
    from model import GPTConfig

    params = learning.STOCK
    assert params["muon_lr"] / GPTConfig().width ** 0.5 == pytest.approx(0.2 * params["adam_lr"], rel=1e-3)


# ---- one GPU --------------------------------------------------------------------------------------------


@pytest.mark.full
def test_the_exchange_on_one_rank(results: Path) -> None:
    """Every matrix goes from the rank to itself through the process group, and the weights get the same bits."""
    text = gpu.gpu(parts=("exchange",), device="cpu", quick=True, output="test")
    assert text.count("| True ") == 2 and "Nothing failed." in text
    with (results / "test.csv").open() as lines:
        assert [(row["way"], float(row["median ms"]) > 0) for row in csv.DictReader(lines)] == [
            ("in place", True),
            ("to itself", True),
        ]


def test_what_a_rank_sends_to_itself_is_all_of_a_bucket() -> None:
    """Runs in place are sent; columns, which were sent already, keep where they belong."""
    from deepspeed.muon.matrices.block import Block
    from deepspeed.muon.matrices.splitting import MatrixSpec
    from deepspeed.muon.plan.placement import Placement, Shard
    from helpers.plans import counted_cost, make_plan

    blocks = (Block(0, 4, 3, 6), Block(3, 4, 3, 6))
    whole = MatrixSpec("w", (2, 8), True, "", (Block(0, 2, 8, 8),))
    specs = MatrixSpec("c", (4, 6), True, "", blocks), whole
    shards = [Shard(spec, i, Placement(0, spec.numel, 0)) for i, spec in enumerate(specs)]
    (bucket,) = make_plan(shards, 0, 1, counted_cost("auto", ns.SIMPLE, "bf16", 2, "cpu")).buckets
    sent = gpu.sent_to_itself(bucket)
    assert isinstance(sent, Bucket) and sent.travels and isinstance(sent.batches[0], Batch)
    assert sum(sent.send_counts) == sum(sent.receive_counts) == 40 == sum(run.copy.numel for run in sent.runs)
    covered = sorted(place for copy in sent.received for place, _ in spread(copy))
    assert covered == list(range(40)), "each element of the matrices once"


def test_launches_of_a_small_model_at_stage_3() -> None:
    """A quarter of what they were, at most; the command itself compares the trace with the plan."""
    pytest.importorskip("transformers")
    from benchmarks import launches

    found = launches.row("llama3-1b", 3)
    assert found["one by one"] == 420
    assert found["traced one by one"] == 416, "of its smaller matrices some are neighbours in one span"
    assert found["traced together"] == found["together"] <= 420 / 4


def test_a_part_that_fails_is_told_and_the_others_go_on(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(function: Any, setting: dict[str, Any], *rest: Any) -> list[Any]:
        if setting["name"] == "symmetric":
            raise ranks.RanksFailed("out of luck", [{"shape": "1 x 2 x 3"}])
        return [[{"way": "in place"}]]

    monkeypatch.setattr(ranks, "run", run)
    monkeypatch.setattr(gpu, "measure", lambda *rest: RATES)
    with pytest.raises(SystemExit, match=r"(?s)1 x 2 x 3.*in place.*FAILED: symmetric"):
        gpu.gpu(parts=("symmetric", "exchange"), device="cpu", output="test")


@pytest.mark.full
@pytest.mark.time_limit(900)
@pytest.mark.parametrize("call", [1, 2])
def test_every_part_runs_on_a_cpu(call: int) -> None:
    """All but the tests themselves."""
    name = f"gpu-of-a-test-{call}"
    line = [
        sys.executable,
        "-m",
        "benchmarks",
        "gpu",
        "--device",
        "cpu",
        "--quick",
        "--call",
        str(call),
        "--output",
        name,
    ]
    try:
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=880)
        assert done.returncode == 0, done.stdout + done.stderr
        with (BENCHMARKS / "results" / f"{name}.csv").open() as lines:
            parts = {row["part"] for row in csv.DictReader(lines)}
        assert parts == {of for of, (number, _, files) in gpu.PARTS.items() if number == call and not files}
    finally:
        for suffix in (".csv", ".md"):
            (BENCHMARKS / "results" / f"{name}{suffix}").unlink(missing_ok=True)
