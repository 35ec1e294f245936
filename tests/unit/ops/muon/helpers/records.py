# SPDX-License-Identifier: Apache-2.0
"""What runs write through DeepSpeed's CSV monitor."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from helpers.training import ds_config, with_params

Records = dict[str, list[tuple[int, float]]]
"""(samples, value) of every record by name, as the names of the files have it."""


def sections(folder: str, interval: int, params: Mapping[str, Any] = {}) -> dict[str, Any]:
    """Return ds_config sections that write the optimizer's records to CSV files in the folder."""
    monitor = {"enabled": True, "output_path": folder, "job_name": "run"}
    optimizer = with_params(**{"weight_decay": 0.0, "monitor_interval": interval} | dict(params))
    return {"optimizer": optimizer, "csv_monitor": monitor}


def monitored(folder: str, interval: int, params: Mapping[str, Any] = {}, **extra: Any) -> dict[str, Any]:
    """Return a ds_config that writes the optimizer's records to CSV files in the folder."""
    return ds_config(**sections(folder, interval, params), **extra)


def records(folder: Path) -> Records:
    found = {}
    for file in sorted((folder / "run").glob("Train_Muon_*.csv")):
        with file.open() as lines:
            rows = list(csv.reader(lines))[1:]
        found[file.stem.removeprefix("Train_Muon_")] = [(int(samples), float(value)) for samples, value in rows]
    return found
