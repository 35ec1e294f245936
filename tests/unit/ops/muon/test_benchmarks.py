# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks compute without measuring: least work, floors, tables."""

import csv
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.paths import ROOT

sys.path[1:1] = [str(ROOT / "benchmarks"), str(ROOT / "examples/pretrain_gpt")]

import loss_per_second  # noqa: E402
import margins  # noqa: E402
import ns  # noqa: E402
import output  # noqa: E402
import report  # noqa: E402
import roofline  # noqa: E402
import steady  # noqa: E402
from deepspeed.muon.kernels import reference  # noqa: E402
from losslog import Row  # noqa: E402
from rates import Rates  # noqa: E402
from roofline import Sharding  # noqa: E402
from setups import Job  # noqa: E402

SCRIPTS = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py"))

#: Round numbers: one operation and one byte a unit.
RATES = Rates(bf16=1e9, fp32=1e8, copy=1e6, host_copy=1e5, network=1e3)


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_can_be_imported(name: str) -> None:
    """What it takes from the package is there; some need a GPU to run."""
    importlib.import_module(name)


@pytest.mark.parametrize("rows, cols", [(6, 10), (10, 6), (8, 8)])
def test_products_of_the_standard_method(rows: int, cols: int) -> None:
    """Each of five steps: X X^T and a polynomial of it, symmetric, and one product with X."""
    m, n = min(rows, cols), max(rows, cols)
    square, product, multiply = 2 * m * m * n, 2 * m**3, 2 * m * m * n
    assert roofline.products(rows, cols, "standard") == (5 * (square + product), 5 * multiply)
    full, half = (roofline.least_flops(rows, cols, "standard", symmetric=flag) for flag in (False, True))
    assert (full, half) == (5 * (square + product + multiply), 5 * (square / 2 + product / 2 + multiply))


def test_products_by_steps() -> None:
    assert [sum(roofline.products(4, 8, "standard", steps)) for steps in (1, 3)] == [640, 3 * 640]


def test_bytes_touch_every_tensor_once() -> None:
    """Gradient 4, momentum 4 + 4, parameter 4 + 4, input and result of Newton-Schulz 2 + 2."""
    assert roofline.bytes_per_element() == 24
    assert roofline.bytes_per_element("fp32") == 28
    assert roofline.bytes_per_element(momentum_bytes=2) == 20


def test_a_rank_does_an_equal_share_or_the_heaviest_matrix() -> None:
    small, large = roofline.least_flops(4, 4), roofline.least_flops(64, 64)
    (even,) = roofline.demands([(4, 4)] * 6, Sharding(2, 3))
    (heavy,) = roofline.demands([(4, 4), (64, 64)], Sharding(2, 2))
    assert (even.flops, heavy.flops) == (2 * small, large)
    assert heavy.bytes == (16 + 64 * 64) / 2 * 24


def test_stage_3_sends_all_but_an_owners_part_there_and_back() -> None:
    """Of N elements on W ranks each sends 2 N (W - 1) / W^2 of 2 bytes."""
    (demand,) = roofline.demands([(8, 8)] * 4, Sharding(3, 4))
    assert demand.sent == 2 * 256 * 3 / 16 * 2


def test_stages_1_and_2_send_what_straddles_a_border() -> None:
    (whole,) = roofline.demands([(8, 8), (8, 8)], Sharding(1, 2))
    (cut,) = roofline.demands([(8, 8), (8, 8), (8, 8)], Sharding(2, 2))
    assert (whole.sent, cut.sent) == (0, 2 * 32 * 2 / 2)


def test_stage_0_repeats_or_shares() -> None:
    """Sharing saves half of the operations and sends half of the results; the floor is the cheaper way."""
    matrices = [(32, 32)] * 2
    repeated, shared = roofline.demands(matrices, Sharding(0, 2))
    assert (repeated.flops, repeated.sent) == (2 * shared.flops, 0)
    assert shared.sent == 2 * 32 * 32 * 2 / 2
    assert repeated.bytes == shared.bytes == 2 * 32 * 32 * 24
    slow, fast = (Rates(1e9, 1e9, 1e12, 1e12, network=rate) for rate in (1.0, 1e12))
    assert roofline.floor(matrices, Sharding(0, 2), slow).exchange == 0
    assert roofline.floor(matrices, Sharding(0, 2), fast).newton_schulz == pytest.approx(shared.flops / 1e9)


def test_a_floor_is_work_over_rates() -> None:
    found = roofline.floor([(8, 8)] * 4, Sharding(3, 4), RATES)
    assert found.newton_schulz == roofline.least_flops(8, 8) / 1e9
    assert found.elementwise == 64 * 24 / 1e6
    assert found.exchange == 2 * 256 * 3 / 16 * 2 / 1e3
    assert found.total == found.newton_schulz + found.elementwise + found.exchange
    assert roofline.floor([(8, 8)], Sharding(1), RATES, "fp32").newton_schulz == roofline.least_flops(8, 8) / 1e8


def test_the_better_of_two_measurements() -> None:
    assert RATES.best(Rates(2e9, 1e7, 1e6, 1e6)) == Rates(2e9, 1e8, 1e6, 1e6, network=float("inf"))


def test_offload_runs_at_the_hosts_rates() -> None:
    rates = Rates(1e9, 1e9, copy=1e6, host_copy=1e5, link=1e3)
    found = roofline.floor([(8, 8)], Sharding(2, 1, offload=True), rates)
    assert (found.elementwise, found.exchange) == (64 * 24 / 1e5, 2 * 64 * 2 / 1e3)


def test_the_plain_table_has_no_symmetric_kernel() -> None:
    assert not roofline.has_symmetric(reference.OPERATIONS)


def record(case: str, variant: str, seconds: float, **more: Any) -> dict[str, Any]:
    phases = {f"{phase} {unit}": 0.1 for phase in ("backward", "step") for unit in ("s", "MB", "MB, largest rank")}
    memory = dict.fromkeys(("peak MB", "peak MB above start", "peak MB above start, timed steps"), 1.0)
    found = {"case": case, "variant": variant, "seconds": seconds, "MB": 0.2, "state bytes/parameter": 4.0}
    return found | phases | memory | {"state keys": "momentum_buffer"} | more


def summary() -> report.Summary:
    ours = {"optimizer s": 0.3, "kernels": "torch", "symmetric": False}
    records = [record("3", "ours", s, **ours) for s in (0.5, 0.6, 0.55)]
    records += [record("3", variant, s) for variant in ("adamw", "adamw-again") for s in (0.2, 0.25, 0.3)]
    records += [record("3", "stock", s) for s in (1.2, 1.25, 1.3)]
    return report.summarize(records)


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def test_what_muon_adds() -> None:
    """Ours 0.55 - 0.25, stock's 1.25 - 0.25; at most (0.6 - 0.2) / (1.2 - 0.3)."""
    row = cells(margins.additions_table(summary()))[2]
    assert row == ["stage 3", "0.250", "0.300", "stock Muon", "1.000", "0.30", "0.44"]


def test_noise_is_a_variant_over_itself() -> None:
    assert cells(margins.noise_table(summary()))[2] == ["stage 3", "AdamW", "1.00", "1.50"]


def test_a_repeated_variant_is_no_column() -> None:
    assert "AdamW again" not in report.main_table(summary())
    assert "AdamW again" in report.detail_table(summary())


def test_distance_from_the_floor() -> None:
    job = Job("3", "ours", world=2, layers=1, hidden=8)
    floor = roofline.floor([(8, 8), (32, 8), (8, 32)], Sharding(3, 2), RATES)
    row = cells(margins.floor_table(summary(), job, RATES))[2]
    assert (row[3], row[-1]) == ("0.300", f"{0.3 / floor.total:.2f}")


def test_the_report_has_all_parts() -> None:
    text = report.markdown(summary(), Job("3", "ours", layers=1, hidden=8), RATES)
    for title in ("Noise", "Ours against stock", "What Muon adds", "Distance from the floor", "Details"):
        assert f"## {title}" in text


def test_files_of_a_result(tmp_path: Path) -> None:
    rows = [{"a": 1, "b": 2.0 / 3}, {"a": 2, "c": "x"}]
    text = output.write(tmp_path / "r", rows, f"# Title\n\n{output.table(rows)}", lambda axes: axes.plot([1, 2]))
    assert text.startswith("# Title\n\n") and "torch" in text.splitlines()[2]
    assert cells(text)[-1] == ["2", "-"] and "0.667" in text
    with (tmp_path / "r.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [(row["a"], row["b"], row["c"]) for row in found] == [("1", "0.6666667", ""), ("2", "", "x")]
    assert all(row["torch"] and row["date"] for row in found)
    assert (tmp_path / "r.png").stat().st_size > 1000


def test_shapes_that_are_not_measured_again_are_kept(tmp_path: Path) -> None:
    rows = [{"batch": 1, "rows": 8, "cols": n, "median ms": 0.5, "date": "2026-01-01"} for n in (8, 16)]
    output.write_csv(tmp_path / "ns.csv", rows)
    assert ns.kept(tmp_path / "ns", [(1, 8, 16)]) == [rows[0]]


def test_default_shapes_fill_a_bucket() -> None:
    assert (4, 512, 2048) in ns.default_shapes() and (1, 8192, 65536) in ns.full_shapes()
    assert all(batch * rows * cols <= ns.BUCKET for batch, rows, cols in ns.default_shapes())


def curve(losses: list[float], pace: float) -> list[Row]:
    return [Row(10 * i, pace * i, loss, 0.1, loss) for i, loss in enumerate(losses, 1)]


def test_loss_per_second_table() -> None:
    rows = loss_per_second.table({"adamw": curve([4.0, 3.0, 2.0], 10.0), "ours": curve([3.0, 2.0, 1.0], 12.0)})
    assert [row["seconds to AdamW's final loss"] for row in rows] == [30.0, 24.0]
    assert rows[1]["of AdamW's seconds"] == "80%"
    assert rows[1]["loss at 100% of AdamW's seconds"] == pytest.approx(1.5)
    assert [row["first step s"] for row in rows] == [10.0, 12.0]
    assert [row["ms per later step"] for row in rows] == [1000.0, 1200.0]


def test_stocks_rates_give_square_matrices_the_updates_of_ours() -> None:
    """RMS of the update: muon_lr / sqrt(width) of an orthogonal matrix, 0.2 lr of ours."""
    params = loss_per_second.stock_params()
    assert params["muon_lr"] / loss_per_second.WIDTH**0.5 == pytest.approx(0.2 * params["adam_lr"], rel=1e-3)


def test_slope_looks_at_the_second_half() -> None:
    assert steady.slope([100.0, 50.0, 0.0, 1.0, 2.0, 3.0]) == pytest.approx(100.0)
