# SPDX-License-Identifier: Apache-2.0
"""The measurements of a GPU, on the CPU in tiny sizes: every part runs and reports, and failures are told."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.paths import ROOT

PARTS = {"Newton-Schulz", "elementwise", "threshold", "step", "exchange"}


@pytest.mark.full
def test_every_part_runs(tmp_path: Path) -> None:
    """The exchange's part also checks that matrices sent from a rank to itself give the same weights."""
    command = ["bash", str(ROOT / "benchmarks" / "gpu.sh"), "--device", "cpu", "--quick", "--name", "of-a-test"]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    files = [ROOT / "benchmarks" / "results" / f"gpu-of-a-test-quick{suffix}" for suffix in (".csv", ".md")]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "failed: nothing" in done.stdout and "FAILED" not in done.stdout + done.stderr
        rows = list(csv.DictReader(files[0].open()))
        assert {row["part"] for row in rows} == PARTS
        assert all(float(row["ms"]) > 0 for row in rows)
        assert "torch.optim.Muon" in files[1].read_text()
    finally:
        for file in files:
            file.unlink(missing_ok=True)
