# SPDX-License-Identifier: Apache-2.0
"""``ds_muon init --check``: whether a run with a ds_config would start, and its learning rates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed.muon.cli.init import convert, named_ds_config
from deepspeed.muon.cli.plan_tables import aligned
from deepspeed.muon.errors import MuonConfigError, SettingsError, UnsupportedError
from deepspeed.muon.zero.patches import is_muon
from deepspeed.muon.zero.rate_forecast import RateForecast, forecast_rates
from deepspeed.muon.zero.read_config import (
    PLACEHOLDER_LR,
    find_ds_config,
    is_accelerate_config,
    parse_file,
    read_settings,
)

#: Beginnings of the notes on a ds_config that are about a run, and not about a plan.
RUN_NOTE_PREFIXES = ("auto:", "not checked", "scheduler.")


def check(path: str) -> tuple[dict[str, Any], str]:
    """Return whether a run with the ds_config in the file ``path`` would start with Muon, and its learning rates.

    The file may be what :func:`convert` reads; a ds_config for AdamW is converted first.

    Returns:
        A dict with ``ok``, ``converted`` (from AdamW), ``errors``, ``rates`` (a list of dicts with ``step``, ``when``,
        ``muon`` and ``adamw``) and ``notes``; and the same as text.

    Raises:
        SettingsError: the file cannot be read, or contains no ds_config.
    """
    whole = parse_file(path)
    if file := named_ds_config(path, whole):
        return check(file)
    section: Mapping[str, Any] = whole if is_accelerate_config(whole) else find_ds_config(path, whole)
    optimizer = section.get("optimizer")
    name = optimizer.get("type") if isinstance(optimizer, Mapping) else None
    is_converted = not (isinstance(name, str) and is_muon(name))
    errors, found, notes = list[str](), RateForecast([], []), list[str]()
    try:
        config = convert(path).facts["config"] if is_converted else dict(section)
        settings = read_settings(path, config, world_size=1)
        notes = [note for note in settings.notes if note.startswith(RUN_NOTE_PREFIXES)]
        if (config["optimizer"].get("params") or {}).get("lr") == "auto":
            notes.append(f"auto in optimizer.params: the rates are those of lr {PLACEHOLDER_LR:g}")
        found = forecast_rates(settings.config, config.get("scheduler"))
    except (MuonConfigError, SettingsError, UnsupportedError) as error:
        errors = str(error).splitlines()
    facts = {
        "config": path,
        "ok": not errors,
        "converted": is_converted,
        "errors": errors,
        "rates": [rate._asdict() for rate in found.rates],
        "notes": notes + found.notes,
    }
    return facts, _as_text(facts, found)


def _as_text(facts: Mapping[str, Any], found: RateForecast) -> str:
    if facts["errors"]:
        return "\n".join((f"{facts['config']}: a run with Muon would not start:", *facts["errors"]))
    once = ", once ds_muon init has converted the file" if facts["converted"] else ""
    rows = [(f"{rate.step:,}", f"{rate.muon:.4g}", f"{rate.adamw:.4g}", rate.when) for rate in found.rates]
    table = aligned([("step", "Muon's rate", "AdamW's rate", ""), *rows])
    return "\n".join((f"{facts['config']}: a run with Muon would start{once}", "", table, "", *facts["notes"]))
