# SPDX-License-Identifier: Apache-2.0
"""The benchmarks: every command on tiny sizes, and the arithmetic behind what they publish."""

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

from deepspeed.muon.matrices.block import Block
from deepspeed.muon.matrices.splitting import MatrixSpec
from deepspeed.muon.plan.placement import Placement, Shard
from helpers.paths import BENCHMARKS, ROOT
from helpers.plans import counted_cost, make_plan, spread

sys.path[1:1] = [str(ROOT), str(ROOT / "examples/pretrain_gpt")]

from benchmarks import __main__ as command  # noqa: E402
from benchmarks import gpu, learning, ns, quality, ranks, report, roofline, step, training  # noqa: E402
from benchmarks.rates import Rates  # noqa: E402
from losslog import Row  # noqa: E402

#: Round numbers: one operation and one byte a unit.
RATES = Rates(bf16=1e9, fp32=1e8, fp16=1e7, copy=1e6, network=1e3)


@pytest.fixture(autouse=True)
def results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of result files; and rates that nobody has to measure."""
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    for module in (gpu, ns, roofline, step):
        monkeypatch.setattr(module, "measure", lambda *_: RATES)
    return tmp_path


# ---- the commands ---------------------------------------------------------------------------------------


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


def test_without_a_name_all_are_listed_and_wrong_options_are_refused(capsys: pytest.CaptureFixture) -> None:
    assert (command.main(), command.main("--help"), command.main("nothing")) == (0, 0, 2)
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in command.BENCHMARKS)
    for words in (["--cases", "4"], ["--worlds", "two"], ["--nothing"]):
        with pytest.raises(SystemExit):
            command.main("step", *words)


def test_the_repository_names_no_benchmark_that_is_gone() -> None:
    """In documentation, sources and the Makefile."""
    texts = [path for folder in ("docs", "deepspeed", "examples") for path in (ROOT / folder).rglob("*.[mp][dy]")]
    for path in (*texts, ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "Makefile"):
        for words in path.read_text().split("-m benchmarks ")[1:]:
            name = words.split()[0].strip("`.,;:)")
            assert name in command.BENCHMARKS or not name.islower(), f"{path}: {name}"


LINES = [
    "memory --models llama3-8b --worlds 8 --stages 1",
    "ns --shapes 2x16x48 --limit 0.05",
    "roofline --matrices 2x8x8",
    "scaling --models gpt2-xl --worlds 8 --stages 3 --measured 0",
    "host --matrices 12 --ranks 2 --steps 1",
    "share --width 32 --layers 1 --windows 16 --rounds 1",
]
LONGER_LINES = [
    "clip --layers 1 --hidden 32 --heads 2 --tokens 16 --rounds 1",
    "owners --worlds 2 --repeats 1 --steps 1 --hidden 256",
    "records --layers 1 --hidden 32 --heads 2 --tokens 16 --rounds 1",
    "saves --width 32 --layers 1 --rounds 1",
    "single --layers 1 --hidden 32 --rounds 1",
    "step --cases 3 --repeats 1 --steps 1 --warmup 1 --layers 1 --hidden 32",
]


@pytest.mark.parametrize("line", [*LINES, *(pytest.param(line, marks=pytest.mark.full) for line in LONGER_LINES)])
def test_a_command_runs_on_tiny_sizes(line: str, capsys: pytest.CaptureFixture, results: Path) -> None:
    assert command.main(*line.split()) == 0
    out = capsys.readouterr().out
    assert out.count("\n|") >= 2 and "nan" not in out
    for file in results.glob("*.csv"):
        with file.open(newline="") as rows:
            assert all(row["torch"] and row["date"] for row in csv.DictReader(rows))


@pytest.mark.full
@pytest.mark.time_limit(900)
@pytest.mark.parametrize("call", [1, 2])
def test_every_part_of_gpu_runs_on_a_cpu(call: int) -> None:
    """All but the tests themselves. Its exchange compares the bits of matrices that go to the rank itself or stay."""
    name = f"gpu-of-a-test-{call}"
    line = f"-m benchmarks gpu --device cpu --quick --call {call} --output {name}"
    try:
        done = subprocess.run([sys.executable, *line.split()], cwd=ROOT, capture_output=True, text=True, timeout=880)
        assert done.returncode == 0, done.stdout + done.stderr
        with (BENCHMARKS / "results" / f"{name}.csv").open() as lines:
            parts = {row["part"] for row in csv.DictReader(lines)}
        assert parts == {of for of, (number, _, files) in gpu.PARTS.items() if number == call and not files}
    finally:
        for suffix in (".csv", ".md"):
            (BENCHMARKS / "results" / f"{name}{suffix}").unlink(missing_ok=True)


def test_a_part_of_gpu_that_fails_is_told_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(function: Any, setting: dict[str, Any], *rest: Any) -> list[Any]:
        if setting["name"] == "symmetric":
            raise ranks.RanksFailed("out of luck", [{"shape": "1 x 2 x 3"}])
        return [[{"way": "in place"}]]

    monkeypatch.setattr(ranks, "run", run)
    with pytest.raises(SystemExit, match=r"(?s)1 x 2 x 3.*in place.*FAILED: symmetric"):
        gpu.gpu(parts=("symmetric", "exchange"), device="cpu", output="test")


# ---- ranks ----------------------------------------------------------------------------------------------


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


@pytest.mark.full
def test_ranks_return_results_and_a_failure_ends_all_but_keeps_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setenv("DS_MUON_AUTOLOAD", "0")
    assert ranks.run(echo, {"text": "x"}, world=2) == [{"text": "x", "rank": r, "active": "1"} for r in ("0", "1")]
    (off,) = ranks.run(echo, {"text": "x"}, environment={"DS_MUON_AUTOLOAD": "0"})
    assert off["active"] == "0"
    with pytest.raises(ranks.RanksFailed, match=r"(?s)asleep: ranks ended with \[None, 1\].*rank 1 has enough"):
        ranks.run(asleep, {}, world=2, timeout=60)
    with pytest.raises(ranks.RanksFailed, match="no more rows") as failure:
        ranks.run(some_rows, {"count": 3})
    assert failure.value.results == [0, 1, 2]


# ---- the least work of a step ---------------------------------------------------------------------------


def test_a_rank_does_an_equal_share_or_the_heaviest_matrix_and_touches_every_tensor_once() -> None:
    """Gradient 4 bytes, momentum 4 + 4, parameter 4 + 4, input and result of Newton-Schulz 2 + 2, or 4 + 4."""
    small, large = roofline.least_flops(4, 4), roofline.least_flops(64, 64)
    (even,) = roofline.demands([(4, 4)] * 6, 2, 3)
    (heavy,) = roofline.demands([(4, 4), (64, 64)], 2, 2)
    assert (even.flops, heavy.flops) == (2 * small, large)
    assert heavy.bytes == (16 + 64 * 64) / 2 * 24
    assert roofline.demands([(8, 8)], 1, 1, wire="fp32")[0].bytes / 64 == 28
    assert roofline.least_flops(8, 16, "standard", symmetric=True) < roofline.least_flops(8, 16, "standard")


@pytest.mark.parametrize(
    ("count", "stage", "world", "sent"),
    [(4, 3, 4, 2 * 256 * 3 / 16), (2, 1, 2, 0), (3, 2, 2, 2 * 32 / 2)],
    ids=["stage 3: 2 N (W - 1) / W^2 elements", "nothing straddles a border", "half of a matrix, there and back"],
)
def test_what_a_rank_must_send(count: int, stage: int, world: int, sent: float) -> None:
    assert roofline.demands([(8, 8)] * count, stage, world)[0].sent == 2 * sent


def test_a_floor_is_work_over_rates_and_at_stage_0_the_cheaper_way() -> None:
    """Sharing saves half of the operations and sends half of the results."""
    least, demand = roofline.floor([(8, 8)] * 4, 3, 4, RATES)
    assert least == (demand.flops / 1e9, 64 * 24 / 1e6, 2 * 256 * 3 / 16 * 2 / 1e3)
    operations = roofline.least_flops(8, 8, dtype="fp32")
    assert roofline.floor([(8, 8)], 1, 1, RATES, "fp32")[0].newton_schulz == operations / 1e8
    best = roofline.floor([(8, 8)], 1, 1, replace(RATES, fp32=1e10))[0].newton_schulz
    assert best == operations / 1e10, "in the dtype that is fastest here"
    repeated, shared = roofline.demands([(32, 32)] * 2, 0, 2)
    assert (repeated.flops, repeated.sent, shared.sent) == (2 * shared.flops, 0, 2 * 32 * 32 * 2 / 2)
    slow, fast = (replace(RATES, copy=1e12, network=rate) for rate in (1.0, 1e12))
    assert [roofline.floor([(32, 32)] * 2, 0, 2, rates)[1] for rates in (slow, fast)] == [repeated, shared]


# ---- statistics -----------------------------------------------------------------------------------------


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
    rounds = {
        "ours": (0.55, 0.5, 0.6),
        "adamw": (0.25, 0.2, 0.3),
        "stock": (1.25, 1.2, 1.3),
        "stock-standard": (0.4,) * 3,
    }
    found = {
        name: {"seconds": median, "fastest s": least, "slowest s": most, "rounds": 3 - 2 * (name == "stock-standard")}
        for name, (median, least, most) in rounds.items()
    }
    standard, stock = step.against(found)
    assert (standard["against"], stock["against"]) == ("stock Muon, standard", "stock Muon"), "the fastest first"
    assert (stock["verdict"], standard["verdict"]) == ("faster, beyond the spread", "one round, spread unknown")
    shown = [stock[key] for key in ("ratio of medians", "ours adds s", "it adds s", "ours adds / it adds", "at most")]
    assert shown == pytest.approx([0.55 / 1.25, 0.3, 1.0, 0.3, 0.4 / 0.9])


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


# ---- kernels and collectives ----------------------------------------------------------------------------


def test_what_a_rank_sends_to_itself_is_all_of_a_bucket() -> None:
    """Runs in place are sent; columns, which were sent already, keep where they belong."""
    blocks = (Block(0, 4, 3, 6), Block(3, 4, 3, 6))
    whole = MatrixSpec("w", (2, 8), True, "", (Block(0, 2, 8, 8),))
    specs = MatrixSpec("c", (4, 6), True, "", blocks), whole
    shards = [Shard(spec, i, Placement(0, spec.numel, 0)) for i, spec in enumerate(specs)]
    (bucket,) = make_plan(shards, 0, 1, counted_cost("auto", ns.SIMPLE, "bf16", 2, "cpu")).buckets
    sent = gpu.sent_to_itself(bucket)
    assert sent.travels
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
