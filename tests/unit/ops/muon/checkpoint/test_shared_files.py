# SPDX-License-Identifier: Apache-2.0
"""Files and arguments that ranks, jobs and nodes have in common, and file systems that lack calls."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed.muon import CheckpointError
from deepspeed.muon.zero.checkpoint import manifest
from helpers.checkpoints import verify_save
from helpers.distributed import run
from helpers.engine_state import differing, snapshot
from helpers.logs import logged
from helpers.models import MODELS, initialize_, train_engine
from helpers.training import ds_config, make_engine


def engine_of(seed: int = 0, **case: Any) -> Any:
    net = MODELS["mlp"]()
    initialize_(net, seed)
    return make_engine(net, ds_config(**case))


def error_of(act: Any, *args: Any, **options: Any) -> str:
    try:
        act(*args, **options)
    except CheckpointError as error:
        return str(error)
    return "none"


def tree(folder: Path) -> dict[str, bytes]:
    """The files below a folder, with their contents."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


# ---- arguments that differ between ranks ------------------------------------------------------------------------


def differ_between_ranks(folder: str) -> dict[str, Any]:
    engine, rank, found = engine_of(stage=2), dist.get_rank(), {}
    train_engine(engine, 1)
    found["tag"] = error_of(engine.save_checkpoint, folder, tag=f"loss{rank}")
    found["default tag"] = error_of(engine.save_checkpoint, folder, tag="one" if rank else None)
    found["folder"] = error_of(engine.save_checkpoint, f"{folder}/{rank}", tag="one")
    found["no folder"] = error_of(engine.save_checkpoint, folder if rank else "", tag="one")
    found["latest"] = error_of(engine.save_checkpoint, folder, tag="one", save_latest=bool(rank))
    found["frozen"] = error_of(engine.save_checkpoint, folder, tag="one", exclude_frozen_parameters=bool(rank))
    dist.barrier()
    found["written"] = sorted(tree(Path(folder)))
    dist.barrier()
    with logged() as lines:
        engine.save_checkpoint(folder, tag="one", client_state={"loss": 0.5 + rank})
    found["client"] = [line for line in lines if "client_state" in line]
    engine.save_checkpoint(folder, tag="two")
    before = snapshot(engine)
    for name in ("load_optimizer_states", "load_module_only", "load_lr_scheduler_states", "load_module_strict"):
        found[f"load: {name}"] = error_of(engine.load_checkpoint, folder, **{name: bool(rank)})
    found["load: tag"] = error_of(engine.load_checkpoint, folder, tag="one" if rank else "two")
    found["load: load_dir"] = error_of(engine.load_checkpoint, f"{folder}/{rank}")
    found["changed"] = differing(before, snapshot(engine))
    engine.destroy()
    return found


def test_arguments_that_differ_between_ranks_are_one_error(tmp_path: Path) -> None:
    first, second = run(differ_between_ranks, 2, folder=str(tmp_path))
    assert len(first.pop("client")) == 1 and second.pop("client") == []
    assert first == second and first["written"] == first["changed"] == []
    assert "tag differs: rank 0 has loss0, ranks [1] have ['loss1']" in first["tag"]
    named = {"default tag": "tag", "folder": "save_dir", "no folder": "save_dir", "latest": "save_latest"}
    named |= {"frozen": "exclude_frozen_parameters"} | {key: key[6:] for key in first if key.startswith("load: ")}
    for key, argument in named.items():
        assert f"the argument {argument} differs" in first[key], key


# ---- files that several ranks name ------------------------------------------------------------------------------


def name_one_file(folder: str) -> dict[str, Any]:
    """Both ranks write a file of one name, with different contents of different lengths, as replicas of experts do."""
    engine, rank = engine_of(stage=2), dist.get_rank()
    original = engine._save_checkpoint

    def with_a_replica(*args: Any, **options: Any) -> None:
        original(*args, **options)
        path = os.path.join(folder, "one", "layer_0_expert_0_mp_rank_00_model_states.pt")
        engine.checkpoint_engine.save({"rank": rank, "data": torch.zeros(10 + 1000 * rank)}, path)

    engine._save_checkpoint = with_a_replica
    result = engine.save_checkpoint(folder, tag="one")
    engine.destroy()
    return {"result": result}


def test_a_file_that_two_ranks_name_has_one_writer(tmp_path: Path) -> None:
    assert [found["result"] for found in run(name_one_file, 2, folder=str(tmp_path))] == [True, True]
    verify_save(tmp_path / "one", 2)
    state = torch.load(tmp_path / "one" / "layer_0_expert_0_mp_rank_00_model_states.pt")
    assert state["rank"] == 0 and len(state["data"]) == 10


# ---- one tag, several jobs, nodes and numbers of ranks ----------------------------------------------------------


def save_again(folder: str, stage: int) -> None:
    engine = engine_of(stage=stage)
    engine.save_checkpoint(folder, tag="one")
    engine.destroy()


def test_a_save_from_fewer_ranks_leaves_no_older_shards(tmp_path: Path) -> None:
    run(save_again, 2, folder=str(tmp_path), stage=3)
    (tmp_path / "one" / "mine.txt").write_text("of the user")
    run(save_again, 1, folder=str(tmp_path), stage=3)
    verify_save(tmp_path / "one", 1)
    assert "mine.txt" in tree(tmp_path / "one")
    assert not [name for name in tree(tmp_path / "one") if "rank_1_" in name or "00001" in name]


def other_jobs_and_nodes(folder: str) -> dict[str, Any]:
    import fcntl

    engine, rank, found, root = engine_of(stage=2), dist.get_rank(), {}, Path(folder)
    engine.save_checkpoint(folder, tag="one")
    before = tree(root / "one")
    dist.barrier()
    if rank == 0:  # as another job that saves this tag now
        other = os.open(root / "one", os.O_RDONLY)
        fcntl.flock(other, fcntl.LOCK_EX)
    dist.barrier()
    found["locked"] = error_of(engine.save_checkpoint, folder, tag="one")
    dist.barrier()
    found["kept"] = tree(root / "one") == before
    dist.barrier()
    if rank == 0:
        os.close(other)
        (root / "latest").rename(root / "elsewhere")
        (root / "latest").symlink_to("elsewhere")
    dist.barrier()
    engine.save_checkpoint(folder, tag="two")
    found["link"] = (root / "latest").is_symlink(), (root / "elsewhere").read_text()
    # A save of an older tag that fails while it writes: the older checkpoint is as before.
    before = tree(root / "one")
    dist.barrier()
    saver = engine.checkpoint_engine.save
    if rank == 1:
        engine.checkpoint_engine.save = lambda *_, **__: 1 / 0
    found["failed"] = error_of(engine.save_checkpoint, folder, tag="one")
    engine.checkpoint_engine.save = saver
    dist.barrier()
    found["old one"] = tree(root / "one") == before
    # Two nodes with storage of their own.
    engine._config.use_node_local_storage = True
    engine.use_node_local_storage = lambda: True
    engine.local_rank = 0
    mine = root / f"node{rank}"
    engine.save_checkpoint(str(mine), tag="one")
    engine.save_checkpoint(str(mine), tag="two")
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(manifest, "finish", lambda *_: 1 / 0)
        found["node fails"] = error_of(engine.save_checkpoint, str(mine), tag="two")
    found["node latest"] = (mine / "latest").read_text() if (mine / "latest").exists() else None
    engine.destroy()
    return found


def test_other_jobs_links_and_nodes(tmp_path: Path) -> None:
    first, second = run(other_jobs_and_nodes, 2, folder=str(tmp_path))
    first_error, second_error = first.pop("node fails"), second.pop("node fails")
    assert "rank 1: ZeroDivisionError" in first_error and "rank 1: ZeroDivisionError" in second_error
    assert first == second
    assert "another job is saving" in first["locked"] and first["kept"]
    assert first["link"] == (True, "two")
    assert "ZeroDivisionError" in first["failed"] and first["old one"]
    assert first["node latest"] == "one"


# ---- file systems that lack calls -------------------------------------------------------------------------------


def save_where_calls_are_missing(folder: str) -> dict[str, Any]:
    """As on an object store that is mounted as a folder: no rename, no fsync, no lock, no second opening to write."""
    import builtins
    import fcntl

    def missing(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    def opened(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        if "+" in mode:
            missing()
        return original(file, mode, *args, **options)

    engine, found, original = engine_of(stage=2), {}, builtins.open
    train_engine(engine, 1)
    with pytest.MonkeyPatch.context() as patch, logged() as lines:
        for owner, name in ((os, "rename"), (os, "fsync"), (fcntl, "flock")):
            patch.setattr(owner, name, missing)
        patch.setattr(Path, "replace", missing)
        patch.setattr(Path, "open", lambda self, mode="r", *args, **options: opened(self, mode, *args, **options))
        found["saves"] = [error_of(engine.save_checkpoint, folder, tag=tag) for tag in ("one", "two")]
    found["lines"] = [line for line in lines if "does not support" in line]
    other = engine_of(7, stage=2)
    other.load_checkpoint(folder)
    found["loaded"] = differing(snapshot(engine), snapshot(other))
    engine.destroy()
    other.destroy()
    return found


def test_file_systems_without_rename_fsync_and_locks(tmp_path: Path) -> None:
    for found in run(save_where_calls_are_missing, 2, folder=str(tmp_path)):
        assert found["saves"] == ["none", "none"] and found["loaded"] == []
        assert sorted(line.split(" not support ")[1].split(":")[0] for line in found["lines"]) == ["fsync", "rename"]
    verify_save(tmp_path / "two", 2)


def fail_at_the_disk(folder: str) -> str:
    """The disk reports a failed write at fsync, on one rank."""
    engine = engine_of(stage=2)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:

            def failing(descriptor: int) -> None:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

            patch.setattr(os, "fsync", failing)
        found = error_of(engine.save_checkpoint, folder, tag="one")
    engine.destroy()
    return found


def test_a_failed_fsync_fails_the_save(tmp_path: Path) -> None:
    first, second = run(fail_at_the_disk, 2, folder=str(tmp_path))
    assert first == second and "rank 1: [Errno 5]" in first and "optim_states.pt" in first
    assert not [name for name in tree(tmp_path) if "one" in name or "latest" in name]
