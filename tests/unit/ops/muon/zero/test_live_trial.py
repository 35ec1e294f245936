# SPDX-License-Identifier: Apache-2.0
"""ds_muon report --live: a training on all ranks, compared with one process; what it says of ranks that go wrong."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from deepspeed.muon.cli import main, report
from deepspeed.muon.zero import live_trial
from helpers.distributed import run


def tried(stages: tuple[int, ...], wrong: str = "") -> list[dict[str, Any]]:
    """The rows for some stages. ``wrong``: rank 1 raises or has other batches."""
    import torch.distributed as dist

    batch, train = live_trial.batch, live_trial._train

    def other_batch(step: int, rank: int) -> Any:
        return batch(step + 100 * (dist.get_rank() == 1), rank)

    def broken(stage: int, *rest: Any) -> dict[str, Any]:
        if dist.get_rank() == 1 and stage == 2:
            raise ValueError("no luck")
        return train(stage, *rest) if stage != 2 else {"problem": None, "error": 0.0}

    changed: dict[str, dict[str, Any]] = {"": {}, "raises": {"_train": broken}, "batches": {"batch": other_batch}}
    with mock.patch.multiple(live_trial, STAGES=stages, WIDTH=128, **changed[wrong]):
        return live_trial.train_all_stages()


@pytest.mark.full
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_stage_trains_as_one_process(world: int) -> None:
    for rows in run(tried, world, stages=live_trial.STAGES):
        assert [row["stage"] for row in rows] == list(live_trial.STAGES)
        assert all(row["problem"] is None and row["error"] < 0.02 and row["step_ms"] > 0 for row in rows), rows


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("batches", "rank 0: weights changed differently than in one process, by "),
        ("raises", "rank 1: ValueError: no luck"),
    ],
)
def test_what_goes_wrong_is_told_and_the_others_go_on(wrong: str, words: str) -> None:
    rows = run(tried, 2, stages=(2, 3), wrong=wrong)[0]
    assert words in rows[0]["problem"], rows
    assert (rows[1]["problem"] is None) == (wrong == "raises"), rows


def reported(folder: str, version: str | None = None) -> tuple[int, str]:
    """Exit status and output of the command on this rank; rank 1 may have another version of torch."""
    import contextlib
    import io
    import os

    import torch.distributed as dist

    own = report._versions() | ({"torch": version} if version and dist.get_rank() == 1 else {})
    out = io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        mock.patch.multiple(live_trial, STAGES=() if version else (3,), WIDTH=128),
        mock.patch.object(report, "_versions", lambda: own),
        mock.patch.dict(os.environ, {"RANK": str(dist.get_rank())}),
    ):
        try:
            status = main.main([f"--local_rank={dist.get_rank()}", "report", "--live", "--out", f"{folder}/report.md"])
        except SystemExit as stop:
            status = int(stop.code or 0)
    return status, out.getvalue()


def test_rank_0_writes_one_file(tmp_path: Path) -> None:
    (status, out), (other, silence) = run(reported, 2, folder=str(tmp_path))
    text = (tmp_path / "report.md").read_text()
    assert (status, other, silence) == (0, 0, "") and text.startswith("```\n") and text.endswith("\n```\n")
    assert text[4:-5] in out and "2 ranks on 1 host, compared" in text and "nothing essential is missing" in text
    (line,) = [line for line in text.splitlines() if line.startswith("stage 3 ")]
    assert "as one process" in line


def test_ranks_that_differ_are_named(tmp_path: Path) -> None:
    (status, out), _ = run(reported, 2, folder=str(tmp_path), version="1.0")
    assert status == 1 and "problem: ranks differ in torch" in out
    assert "torch by rank: [" in out and "'1.0']" in out


def test_without_a_launcher(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main.main(["report", "--live"]) == 2
    assert (
        "--live needs a launcher, which starts the command on all ranks: deepspeed --module deepspeed.muon.cli report"
        in capsys.readouterr().err
    )
    assert main.main(["report", "--out", "x"]) == 2
    assert "--out works only with --live" in capsys.readouterr().err
