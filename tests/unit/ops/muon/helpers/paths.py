# SPDX-License-Identifier: Apache-2.0
"""Paths of the project."""

from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
"""The folder of these tests, from which `helpers` is imported."""
ROOT = TESTS.parents[3]
PACKAGE, DOCS, EXAMPLES, BENCHMARKS = (ROOT / name for name in ("deepspeed/muon", "docs", "examples", "benchmarks"))
