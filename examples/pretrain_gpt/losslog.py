# SPDX-License-Identifier: Apache-2.0
"""The CSV of losses that a training run writes and the comparison reads."""

import csv
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path


@dataclass
class Row:
    """One optimizer step; `held_out` is NaN (an empty field) at steps without an evaluation."""

    step: int
    seconds: float
    train: float
    lr: float
    held_out: float = math.nan


def read_log(path: Path) -> list[Row]:
    """Return the complete rows of a run's CSV, or nothing when there is no such file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["held_out"] is not None]
    numbers = [{key: float(value or "nan") for key, value in row.items()} for row in rows]
    return [Row(**{**row, "step": int(row["step"])}) for row in numbers]


def evaluations(path: Path) -> list[Row]:
    """Return the rows of a run's CSV that hold a held-out loss."""
    return [row for row in read_log(path) if not math.isnan(row.held_out)]


def is_complete(path: Path, steps: int) -> bool:
    """Whether the run of this CSV did all its steps or diverged."""
    rows = read_log(path)
    return bool(rows) and (rows[-1].step == steps or not math.isfinite(rows[-1].train))


def final_loss(path: Path, steps: int) -> float:
    """Return the held-out loss after the last step, or infinity if the run diverged."""
    rows = read_log(path)
    finished = rows and rows[-1].step == steps and math.isfinite(rows[-1].held_out)
    return rows[-1].held_out if finished else math.inf


def first_reaching(rows: list[Row], target: float) -> Row | None:
    """Return the first row whose held-out loss is at most `target`."""
    return next((row for row in rows if row.held_out <= target), None)


class LossLog:
    """Writes a run's CSV; after a resume it keeps the rows up to `last_step` and appends."""

    def __init__(self, path: Path, last_step: int = 0) -> None:
        kept = [row for row in read_log(path) if row.step <= last_step]
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", newline="", buffering=1)
        self._writer = csv.DictWriter(self._file, [field.name for field in fields(Row)])
        self._writer.writeheader()
        for row in kept:
            self.write(row)

    def write(self, row: Row) -> None:
        """Append one row."""
        self._writer.writerow({key: "" if math.isnan(value) else value for key, value in asdict(row).items()})
