# SPDX-License-Identifier: Apache-2.0
"""Read what a run has written through DeepSpeed's monitor: CSV files or TensorBoard's events."""

from __future__ import annotations

import csv
import math
import os
import re
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path

from deepspeed.muon.config.messages import nearest
from deepspeed.muon.errors import RecordsError
from deepspeed.muon.monitor.step_stats import PER_LAYER, PREFIX

#: Number of training samples -> value, in increasing order of samples.
Values = dict[int, float]
#: Names of files have underscores instead of slashes.
FILE_PREFIX, _LOSS = PREFIX.replace("/", "_"), re.compile(r"Train_Samples_(train_)?loss$")
EVENTS_PREFIX = "events.out.tfevents."
#: How many folders are searched for records if the given folder has none.
MAX_SEARCHED = 10_000


class Records:
    """The monitor's records of one training run. A series of values is {number of training samples: value}.

    Args:
        series: {name of a CSV file or a TensorBoard event: its series}.

    Attributes:
        values: {name: series}, for example of ``loss`` and ``lr_muon``.
        layers: {measure, such as ``max_logit``: {layer: series}}, with layers in the order of the network.
        samples: sorted numbers of training samples at which there are records.
    """

    def __init__(self, series: Mapping[str, Values]) -> None:
        self.values: dict[str, Values] = {}
        self.layers: dict[str, dict[str, Values]] = {measure: {} for measure in PER_LAYER}
        samples = set[int]()
        for name in sorted(series, key=_natural_sort_key):
            known = name.removeprefix(FILE_PREFIX)
            if known != name:
                samples.update(series[name])
                measure = next((one for one in PER_LAYER if known.startswith(f"{one}_")), "")
                layer = known.removeprefix(f"{measure}_").removesuffix(".weight")
                if measure:
                    self.layers[measure][layer] = series[name]
                else:
                    self.values[known] = series[name]
            elif _LOSS.fullmatch(name):
                self.values["loss"] = series[name]
        self.samples = sorted(samples)


def _natural_sort_key(name: str) -> list[str | int]:
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def read(folder: Path) -> Records:
    """Read the monitor's records in a folder, from its CSV files or, if it has none, from TensorBoard's events.

    Raise RecordsError if the folder does not exist or has no records, or if the package tensorboard is needed but not
    installed.
    """
    if not folder.is_dir():
        raise RecordsError(f"{folder} is not a folder; {_suggestion(folder)}")
    if files := sorted(folder.glob("Train_*.csv")):
        found = Records({file.stem: _read_csv(file) for file in files})
    else:
        found = Records(_read_events(folder) if any(folder.glob(f"{EVENTS_PREFIX}*")) else {})
    if not found.samples:
        raise RecordsError(f"{folder} has no records of deepspeed-muon; {_suggestion(folder)}")
    return found


def _read_csv(file: Path) -> Values:
    """Return {number of training samples: value} from one CSV file."""
    with file.open(newline="") as lines:  # a resumed run repeats the header
        return _last_values(row for row in csv.reader(lines) if len(row) == 2 and row[0].isdecimal())


def _read_events(folder: Path) -> dict[str, Values]:
    try:
        from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator
    except ImportError:
        raise RecordsError(
            f"{folder} has TensorBoard's events, but the package tensorboard is not installed; install it, or enable "
            "csv_monitor in the DeepSpeed config and train again"
        ) from None
    events = EventAccumulator(str(folder), {SCALARS: 0}).Reload()
    tags = events.Tags()[SCALARS]
    return {tag.replace("/", "_"): _last_values((e.step, e.value) for e in events.Scalars(tag)) for tag in tags}


def _last_values(rows: Iterable[Iterable]) -> Values:
    """Return {number of samples: value}, sorted, from pairs (number, value); leave out NaN and infinities.

    If several pairs have the same number, as after a resume, the last one counts.
    """
    found = {int(samples): float(value) for samples, value in rows}
    return {samples: found[samples] for samples in sorted(found) if math.isfinite(found[samples])}


def _suggestion(asked: Path) -> str:
    """Return the end of an error message: the nearest folder that has records or, without one, what to look for."""
    start = next(path for path in (asked, *asked.absolute().parents) if path.is_dir())
    folders = islice(os.walk(start), MAX_SEARCHED)
    prefixes = FILE_PREFIX, EVENTS_PREFIX
    runs = {folder for folder, _, files in folders if any(name.startswith(prefixes) for name in files)}
    if near := nearest(str(asked), runs - {str(asked)}, cutoff=0.0):
        return f"did you mean {near}?"
    return (
        "expected the folder that DeepSpeed's csv_monitor or tensorboard writes, output_path/job_name, of a run with "
        "monitor_interval above 0"
    )
