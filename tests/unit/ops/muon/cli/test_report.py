# SPDX-License-Identifier: Apache-2.0
"""ds_muon report: what it finds in use, what it says is missing, and which switches it sees."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from deepspeed.muon.cli import report
from deepspeed.muon.seam import Seam
from deepspeed.muon.zero import patches

Command = Callable[..., Any]


def test_report(ds_muon: Command) -> None:
    status, out, err = ds_muon("report", "--json")
    facts = json.loads(out)
    assert (status, err, facts["ok"], facts["problems"]) == (0, "", True, [])
    assert len(facts["seams"]) == len(patches.SEAMS) and set(facts["seams"].values()) == {"in use", "ready"}
    assert facts["versions"]["deepspeed-muon"] and facts["tested_deepspeed"]["includes_installed"] is True
    assert facts["backends"]["gloo"] is True and facts["activation"]["entry_point_registered"] is True
    status, out, _ = ds_muon("report")
    assert status == 0 and out.startswith("nothing essential is missing\n")
    (line,) = [line for line in out.splitlines() if line.startswith("replaced in DeepSpeed ")]
    assert line.endswith("; --all lists them") and " in use" in line and "DeepSpeedEngine" not in out
    status, out, _ = ds_muon("report", "--all")
    (line,) = [line for line in out.splitlines() if line.strip().startswith("engine.DeepSpeedEngine ")]
    assert "in use: _configure_basic_optimizer, " in line and "_load_checkpoint, " in line.partition("; ")[2], (
        "ready is the usual state"
    )


def test_report_fails_where_something_is_missing(ds_muon: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    seam = Seam("deepspeed.runtime.engine", "DeepSpeedEngine._nowhere")
    monkeypatch.setattr(patches, "SEAMS", (*patches.SEAMS, seam))
    monkeypatch.setattr(report, "ENTRY_NAME", "nobody")
    status, out, _ = ds_muon("report", "--json")
    facts = json.loads(out)
    assert status == 1 and not facts["ok"]
    assert (
        facts["problems"][0]
        == "DeepSpeed lacks deepspeed.runtime.engine.DeepSpeedEngine._nowhere, which deepspeed-muon replaces"
    )
    assert "entry point nobody" in facts["problems"][1]
    assert set(facts["seams"].values()) == {"present", "missing"}
    assert "missing: _nowhere\n" in ds_muon("report", "--all").out
    assert ds_muon("report").out.startswith("problem: DeepSpeed lacks ")


@pytest.mark.parametrize(("name", "value"), [("DS_MUON_AUTOLOAD", "0"), ("TORCH_DEVICE_BACKEND_AUTOLOAD", "off")])
def test_report_sees_the_switches(name: str, value: str, ds_muon: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    facts = ds_muon("report", "--json").facts
    assert facts["activation"]["automatic"] is False and facts["activation"]["switches"][name] == value
