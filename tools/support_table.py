# SPDX-License-Identifier: Apache-2.0
"""Writes the tests' table of settings and contracts into docs/evidence/support.md, between its two marks."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "evidence" / "support.md"
MARKS = re.compile(r"(<!-- settings -->\n).*(<!-- end of settings -->\n)", re.DOTALL)


def table() -> str:
    """Return a row for each setting: its cases under each contract, or a number that refers to a reason below."""
    sys.path.insert(0, str(ROOT / "tests" / "unit" / "ops" / "muon"))
    from helpers.settings import CONTRACTS, SETTINGS, possible

    reasons: list[str] = []
    lines = [f"| setting | {' | '.join(CONTRACTS)} |", "|---" * (1 + len(CONTRACTS)) + "|"]
    total = 0
    for name, setting in SETTINGS.items():
        cells = []
        for contract in CONTRACTS:
            if reason := setting.without.get(contract):
                reasons += [] if reason in reasons else [reason]
                cells.append(f"none ({reasons.index(reason) + 1})")
            else:
                cells.append(str(len(possible(contract, setting))))
                total += len(possible(contract, setting))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    notes = [f"{number}. {reason}" for number, reason in enumerate(reasons, 1)]
    return "\n".join([*lines, "", f"{total} cells. None:", "", *notes, ""])


def page() -> str:
    """Return the page with the table of now."""
    return MARKS.sub(lambda marks: f"{marks[1]}{table()}{marks[2]}", PAGE.read_text())


if __name__ == "__main__":
    PAGE.write_text(page())
