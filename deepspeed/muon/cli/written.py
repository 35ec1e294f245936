# SPDX-License-Identifier: Apache-2.0
"""What a run has written through DeepSpeed's monitor: CSV files, or TensorBoard's events."""

from __future__ import annotations

import csv
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from deepspeed.muon.config.messages import nearest
from deepspeed.muon.errors import RecordsError
from deepspeed.muon.step_stats import PER_LAYER
from deepspeed.muon.zero.monitor import PREFIX

#: The values of one name by the number of samples, in order.
Values = dict[int, float]
#: Names of files have no slashes.
_OURS, _LOSS = PREFIX.replace("/", "_"), re.compile(r"Train_Samples_(train_)?loss$")
_EVENTS = "events.out.tfevents.*"
#: The most folders that are searched for a run beside the one that was given.
_SEARCHED = 10_000


class Written:
    """The records of one run: ``values`` by name, and those of layers by measure and layer, in network order."""

    def __init__(self, series: Mapping[str, Values]) -> None:
        self.values: dict[str, Values] = {}
        self.layers: dict[str, dict[str, Values]] = {measure: {} for measure in PER_LAYER}
        for name in sorted(series, key=_by_number):
            known = name.removeprefix(_OURS)
            measure = next((one for one in PER_LAYER if known.startswith(f"{one}_")), "")
            if measure:
                self.layers[measure][known.removeprefix(f"{measure}_").removesuffix(".weight")] = series[name]
            elif known != name:
                self.values[known] = series[name]
            elif _LOSS.fullmatch(name):
                self.values["loss"] = series[name]

    @property
    def samples(self) -> list[int]:
        """Where there is a record of ours, in samples."""
        ours = [values for name, values in self.values.items() if name != "loss"]
        ours += [values for rows in self.layers.values() for values in rows.values()]
        return sorted({at for values in ours for at in values})


def _by_number(name: str) -> list[str | int]:
    """Sorts layer 10 behind layer 9."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def read(folder: Path) -> Written:
    """The records in a folder, in CSV files if it has some, else in TensorBoard's events.

    Raises:
        RecordsError: the folder does not exist or has no records; the message names the nearest that has some.
    """
    if not folder.is_dir():
        raise RecordsError(f"{folder} is no folder; {_suggestion(folder)}")
    if files := sorted(folder.glob("Train_*.csv")):
        found = Written({file.stem: _of_csv(file) for file in files})
    else:
        found = Written(_of_events(folder) if any(folder.glob(_EVENTS)) else {})
    if not found.samples:
        raise RecordsError(f"{folder} has no records of deepspeed-muon; {_suggestion(folder)}")
    return found


def _of_csv(file: Path) -> Values:
    """The values of one file; a run that goes on writes the head of the table once more, and steps it has redone."""
    with file.open(newline="") as lines:
        return _ordered(row for row in csv.reader(lines) if len(row) == 2 and row[0].isdecimal())


def _of_events(folder: Path) -> dict[str, Values]:
    try:
        from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator
    except ImportError:
        raise RecordsError(
            f"{folder} has TensorBoard's events, and tensorboard is not installed; install it, or let the run write "
            "csv_monitor"
        ) from None
    events = EventAccumulator(str(folder), {SCALARS: 0}).Reload()
    tags = events.Tags()[SCALARS]
    return {tag.replace("/", "_"): _ordered((e.step, e.value) for e in events.Scalars(tag)) for tag in tags}


def _ordered(rows: Iterable[Iterable]) -> Values:
    """The last value for each number of samples; without values that are no numbers."""
    found = {int(samples): float(value) for samples, value in rows}
    return {samples: found[samples] for samples in sorted(found) if math.isfinite(found[samples])}


def _suggestion(given: Path) -> str:
    """Where records are, if any are near: below what was given, or below the part of it that exists."""
    start = next(path for path in (given, *given.absolute().parents) if path.is_dir())
    runs = [str(path) for path in _runs_below(start) if path != given]
    if near := nearest(str(given), runs, cutoff=0.0):
        return f"did you mean {near}?"
    return (
        "expected the folder that DeepSpeed's csv_monitor or tensorboard writes, output_path/job_name, of a run with "
        "monitor_interval above 0"
    )


def _runs_below(start: Path) -> Iterator[Path]:
    for count, (folder, _, files) in enumerate(os.walk(start)):
        if count == _SEARCHED:
            return
        if any(name.startswith((_OURS, _EVENTS[:-1])) for name in files):
            yield Path(folder)
