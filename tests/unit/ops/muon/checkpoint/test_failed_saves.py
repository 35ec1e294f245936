# SPDX-License-Identifier: Apache-2.0
"""A save that fails on any rank fails on all, leaves nothing behind, and training and the next save go on.

Disks are full at a file size that the system enforces, as a limit of the process, so that no test needs a disk of its
own or a privileged user, and DeepSpeed's and torch's own writing fail as they would on a real one.
"""

import inspect
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from deepspeed.muon import CheckpointError
from helpers.checkpoints import verify_save
from helpers.distributed import run
from helpers.engine_state import differing, snapshot
from helpers.models import MODELS, initialize_, train_engine
from helpers.training import ds_config, make_engine


@contextmanager
def full_disk(nbytes: int | None) -> Iterator[None]:
    """No file of this process grows beyond so many bytes; ``None``: no limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft if nbytes is None else nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def engine_of(seed: int, **case: Any) -> Any:
    net = MODELS["mlp"]()
    initialize_(net, seed)
    return make_engine(net, ds_config(**case))


def outcome(engine: Any, folder: str, tag: str, **options: Any) -> str:
    try:
        engine.save_checkpoint(folder, tag=tag, **options)
    except CheckpointError as error:
        return str(error)
    return "saved"


def save_into_a_full_disk(folder: str, limits: dict[int, int], tag: str, **case: Any) -> dict[str, Any]:
    """A good save, one that fails on the ranks of `limits`, a step, a good save, and what a new engine loads of it."""
    engine, found = engine_of(0, **case), {}
    train_engine(engine, 1)
    engine.save_checkpoint(folder, tag="good")
    before = snapshot(engine)
    with full_disk(limits.get(dist.get_rank())):
        found["error"] = outcome(engine, folder, tag)
    dist.barrier()
    found["changed"] = differing(before, snapshot(engine))
    found["latest"] = (Path(folder) / "latest").read_text() if (Path(folder) / "latest").exists() else None
    found["left"] = sorted(file.name for file in Path(folder, tag).rglob("*"))
    dist.barrier()
    train_engine(engine, 1, first_step=1)
    found["next"] = outcome(engine, folder, "next")
    other = engine_of(7, **case)
    other.load_checkpoint(folder)
    found["loaded"] = differing(snapshot(engine), snapshot(other))
    engine.destroy()
    other.destroy()
    return found


@pytest.mark.sample(4)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("limits", [{1: 0}, {0: 600, 1: 600}, {0: 0}], ids=["rank 1", "both, later", "rank 0"])
def test_a_full_disk(stage: int, limits: dict[int, int], tmp_path: Path) -> None:
    first, second = run(
        save_into_a_full_disk, 2, timeout=60, folder=str(tmp_path), limits=limits, tag="bad", stage=stage
    )
    assert first == second
    assert str(tmp_path / "bad") in first["error"] and "File too large" in first["error"]
    assert first["changed"] == [] and first["latest"] == "good" and first["left"] == []
    assert first["next"] == "saved" and first["loaded"] == []


def test_a_failed_save_over_the_only_checkpoint_leaves_it_as_it_was(tmp_path: Path) -> None:
    found = run(save_into_a_full_disk, 2, timeout=60, folder=str(tmp_path), limits={1: 600}, tag="good", stage=2)
    for one in found:
        assert "File too large" in one["error"] and one["latest"] == "good"
        assert one["next"] == "saved" and one["loaded"] == []
    verify_save(tmp_path / "good", 2)


def fail_otherwise(folder: str, stage: int) -> dict[str, Any]:
    """Saves that fail by other things than a full disk; what is raised, and that the next one succeeds."""
    engine, root, found = engine_of(0, stage=stage), Path(folder), {}
    train_engine(engine, 1)
    if dist.get_rank() == 0:
        (root / "file").write_text("in the way")
    dist.barrier()
    found["a file"] = outcome(engine, folder, "file")
    found["no folder"] = outcome(engine, "/proc/no_checkpoint_goes_here", "tag")
    found["no pickle"] = outcome(engine, folder, "tag", client_state={"f": lambda: 0} if dist.get_rank() == 0 else {})
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(engine.optimizer, "state_dict", lambda: 1 / 0)
        found["state"] = outcome(engine, folder, "tag")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "_copy_recovery_script", lambda _: 1 / 0)
        found["script"] = outcome(engine, folder, "tag") if stage else "rank 0: ZeroDivisionError"
    found["good"] = outcome(engine, folder, "tag")
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_other_failures(stage: int, tmp_path: Path) -> None:
    first, second = run(fail_otherwise, 2, timeout=60, folder=str(tmp_path), stage=stage)
    assert first == second
    assert "File exists" in first["a file"] or "Not a directory" in first["a file"]
    assert "/proc/no_checkpoint_goes_here" in first["no folder"]
    assert "rank 0" in first["no pickle"] and "pickle" in first["no pickle"].lower()
    assert "rank 1: ZeroDivisionError" in first["state"]
    assert "rank 0: ZeroDivisionError" in first["script"]
    assert first["good"] == "saved"


def functions(owner: Any) -> list[str]:
    return sorted(name for name, value in vars(owner).items() if inspect.isroutine(value))


def replace_and_save(folder: str) -> tuple[list[str], list[str]]:
    """Functions that engine, checkpoint engine and wrapper have as attributes, before and after a save and a load."""
    engine = engine_of(0, stage=3)
    train_engine(engine, 1)
    engine.checkpoint_engine.save = mine = type(engine.checkpoint_engine).save.__get__(engine.checkpoint_engine)
    owners = (engine, engine.checkpoint_engine, engine.optimizer)
    before = [functions(owner) for owner in owners]
    engine.save_checkpoint(folder)
    engine.load_checkpoint(folder)
    after = [functions(owner) for owner in owners]
    assert engine.checkpoint_engine.save is mine
    engine.destroy()
    return before, after


def test_what_is_replaced_meanwhile_is_put_back(tmp_path: Path) -> None:
    before, after = run(replace_and_save, 1, folder=str(tmp_path))[0]
    assert before == after
