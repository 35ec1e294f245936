# SPDX-License-Identifier: Apache-2.0
"""Saves that fail on one rank, that several ranks, jobs and nodes make together, and on file systems that lack calls.

Disks are full at a file size that the system enforces, as a limit of the process, so that no test needs a disk of its
own or a privileged user, and DeepSpeed's and torch's own writing fail as they would on a real one.
"""

import builtins
import errno
import fcntl
import inspect
import os
import re
import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from deepspeed.muon.seam import replaced
from deepspeed.muon.zero.checkpoint import manifest
from helpers.checkpoints import error_of, tree, verify_save
from helpers.distributed import run
from helpers.engine_state import differing, snapshot
from helpers.logs import logged
from helpers.models import MODELS, halve, train_engine
from helpers.training import ds_config, fresh_engine, make_engine

# ---- saves that fail ----------------------------------------------------------------------------------------


@contextmanager
def full_disk(nbytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder, as another job that saves into it."""
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(descriptor)


def failing(owner: Any, name: str, *error: Any) -> AbstractContextManager[None]:
    """Make calls of ``owner.name`` raise OSError of these arguments, or ZeroDivisionError without any."""

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(*error) if error else ZeroDivisionError

    return replaced(owner, **{name: fail})


class Fault(NamedTuple):
    """What happens to a save on ``ranks``, and ``words`` (a pattern) in the error; ``context``: of (engine, folder)."""

    words: str
    ranks: tuple[int, ...]
    context: Callable[[Any, Path], AbstractContextManager[None]] = lambda *_: nullcontext()
    tags: tuple[str, ...] = ("new", "good")
    options: dict[str, Any] = {}


BROKEN, FULL = (errno.EIO, "broken"), (errno.ENOSPC, "No space left")
#: `good` is the tag of an older checkpoint, which a save replaces once all its data is on disk.
FAULTS = {
    "full disk, rank 0": Fault("File too large", (0,), lambda *_: full_disk(0)),
    "full disk, rank 1": Fault("rank 1: .*File too large", (1,), lambda *_: full_disk(0)),
    "full disk, later": Fault("File too large", (0, 1), lambda *_: full_disk(600)),
    "full disk, at the end": Fault(
        r"rank 1: \[Errno 28\] No space left", (1,), lambda *_: failing(manifest, "finish", *FULL), ("new",)
    ),
    "broken disk": Fault(r"rank 1: \[Errno 5\] broken", (1,), lambda *_: failing(os, "fsync", *BROKEN)),
    "serialization": Fault("ZeroDivisionError", (0, 1), lambda e, _: failing(e.checkpoint_engine, "save")),
    "state": Fault("rank 1: ZeroDivisionError", (1,), lambda e, _: failing(e.optimizer, "state_dict")),
    "script": Fault("rank 0: ZeroDivisionError", (0, 1), lambda e, _: failing(e, "_copy_recovery_script")),
    "no pickle": Fault("rank 0: .*[Pp]ickl", (0,), options={"client_state": {"f": lambda: 0}}),
    "file": Fault("File exists|Not a directory", (0, 1), tags=("file",)),
    "no folder": Fault("/proc/nothing", (0, 1), tags=("new",), options={"save_dir": "/proc/nothing"}),
    "other job": Fault("another job is saving", (0,), lambda _, folder: locked(folder / "good"), ("good",)),
}


def engine_at(stage: int, seed: int = 0, origin: Any = None) -> Any:
    """An engine with a group that notes where its parameters come from, as those of some libraries do."""
    net = halve(MODELS["mlp"](), seed)
    groups = [{"params": list(net.parameters()), "origin": origin}]
    return make_engine(net, ds_config(stage), model_parameters=groups)


def functions(owner: Any) -> list[str]:
    """Return the names of functions that are attributes of an object itself."""
    return sorted(name for name, value in vars(owner).items() if inspect.isroutine(value))


def checkpoints_in(folder: Path) -> dict[str, bytes | None]:
    """Return the :func:`tree` without the script that DeepSpeed copies, which a full disk may cut."""
    return {name: content for name, content in tree(folder).items() if name != "zero_to_fp32.py"}


def save_with_faults(folder: str, stage: int) -> dict[str, Any]:
    """Save with each fault, and at last a good one that loads; return the errors and what they changed."""
    root, rank, found = Path(folder), dist.get_rank(), {}
    engine = engine_at(stage, origin=Path("a/b"))
    engine.checkpoint_engine.save = mine = type(engine.checkpoint_engine).save.__get__(engine.checkpoint_engine)
    owners = (engine, engine.checkpoint_engine, engine.optimizer)
    own = [functions(owner) for owner in owners]
    train_engine(engine, 1)
    engine.save_checkpoint(folder, tag="good")
    (root / "file").touch()
    dist.barrier()
    before, files = snapshot(engine), checkpoints_in(root)
    for name, fault in FAULTS.items():
        for tag in fault.tags:
            if stage == 0 and (name == "script" or (tag == "good" and 0 not in fault.ranks and name != "state")):
                continue  # no script; rank 1 writes only a manifest, after all data
            options = {"save_dir": folder, "tag": tag} | (fault.options if rank in fault.ranks else {})
            with fault.context(engine, root) if rank in fault.ranks else nullcontext():
                error = error_of(engine.save_checkpoint, **options)
            dist.barrier()
            changed = differing(before, snapshot(engine))
            found[f"{name}, {tag}"] = fault.words, error, changed, checkpoints_in(root) == files
            dist.barrier()
    train_engine(engine, 1, first_step=1)
    engine.save_checkpoint(folder, tag="good")
    engine.load_checkpoint(folder)
    other = engine_at(stage, seed=1)
    other.load_checkpoint(folder)
    assert differing(snapshot(engine), snapshot(other)) == []
    assert other.basic_optimizer.param_groups[0]["origin"] == Path("a/b")
    assert own == [functions(owner) for owner in owners] and engine.checkpoint_engine.save is mine
    engine.destroy()
    other.destroy()
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_save_that_fails(stage: int, tmp_path: Path) -> None:
    """The error is the same on all ranks; the engine and older checkpoints stay as they were; the next save is good."""
    first, second = run(save_with_faults, 2, folder=str(tmp_path), stage=stage)
    assert first == second
    assert len(first) >= 14
    for case, (words, error, changed, is_as_before) in first.items():
        assert re.search(words, error), (case, error)
        assert str(tmp_path / case.split(", ")[-1]) in error or "/proc" in error, (case, error)
        assert "states.pt" in error or stage == 0 or not case.startswith("broken disk"), error
        assert changed == [] and is_as_before, case
    verify_save(tmp_path / "good", 2)


# ---- what ranks do together ---------------------------------------------------------------------------------

Argument = tuple[str, Any, Any]
#: An argument of save_checkpoint, or of load_checkpoint, and its values on ranks 0 and 1.
SAVED: list[Argument] = [
    ("tag", "loss0", "loss1"),
    ("tag", None, "one"),
    ("save_dir", "{}/0", "{}/1"),
    ("save_dir", "", "{}"),
    ("save_latest", False, True),
    ("exclude_frozen_parameters", False, True),
]
REPLICA = "layer_0_expert_0_mp_rank_00_model_states.pt"
LOADED: list[Argument] = [
    *((f"load_{name}", False, True) for name in ("optimizer_states", "lr_scheduler_states")),
    *((f"load_module_{name}", False, True) for name in ("only", "strict")),
    ("tag", "two", "one"),
    ("load_dir", "{}/0", "{}/1"),
]


def differ_between_ranks(folder: str) -> tuple[list[str], list[str]]:
    """Return the errors, and what is logged of a client_state that differs."""
    engine, rank, root = fresh_engine(0, {"stage": 2}), dist.get_rank(), Path(folder)
    train_engine(engine, 1)

    def errors_of(act: Callable[..., Any], arguments: list[Argument], **common: Any) -> list[str]:
        found = []
        for name, *values in arguments:
            value = values[rank].format(folder) if isinstance(values[rank], str) else values[rank]
            found.append(error_of(act, **common | {name: value}))
        return found

    errors = errors_of(engine.save_checkpoint, SAVED, save_dir=folder, tag="one")
    dist.barrier()
    assert tree(root) == {}
    dist.barrier()
    with logged() as said:
        engine.save_checkpoint(folder, tag="one", client_state={"loss": 0.5 + rank})
    engine.save_checkpoint(folder, tag="two")
    before = snapshot(engine)
    errors += errors_of(engine.load_checkpoint, LOADED, load_dir=folder)
    assert differing(before, snapshot(engine)) == []
    engine.destroy()
    return errors, [line for line in said if "client_state" in line]


def test_arguments_that_differ_between_ranks_are_one_error(tmp_path: Path) -> None:
    (first, said), (second, silence) = run(differ_between_ranks, 2, folder=str(tmp_path))
    assert first == second and len(said) == 1 and silence == []
    assert "tag differs: rank 0 has loss0, ranks [1] have ['loss1']" in first[0]
    for (name, *_), error in zip(SAVED + LOADED, first, strict=True):
        assert f"the argument {name} differs" in error, name


def save_a_replica(folder: str) -> None:
    """Write a file of one name on both ranks, with different contents of different lengths, as replicas of experts."""
    engine, rank = fresh_engine(0, {"stage": 2}), dist.get_rank()

    def with_a_replica(original: Any, *args: Any, **options: Any) -> None:
        original(*args, **options)
        engine.checkpoint_engine.save({"rank": rank, "data": torch.zeros(10 + 1000 * rank)}, f"{folder}/one/{REPLICA}")

    with replaced(engine, _save_checkpoint=with_a_replica):
        assert engine.save_checkpoint(folder, tag="one")
    engine.destroy()


def test_a_file_that_two_ranks_name_has_one_writer(tmp_path: Path) -> None:
    run(save_a_replica, 2, folder=str(tmp_path))
    verify_save(tmp_path / "one", 2)
    state = torch.load(tmp_path / "one" / REPLICA)
    assert state["rank"] == 0 and len(state["data"]) == 10


# ---- one tag, several numbers of ranks, links and nodes -----------------------------------------------------


def save_again(folder: str) -> None:
    engine = fresh_engine(0, {"stage": 3})
    engine.save_checkpoint(folder, tag="one")
    engine.destroy()


def test_a_save_from_fewer_ranks_leaves_no_older_shards(tmp_path: Path) -> None:
    run(save_again, 2, folder=str(tmp_path))
    (tmp_path / "one" / "mine.txt").write_text("of the user")
    run(save_again, 1, folder=str(tmp_path))
    verify_save(tmp_path / "one", 1)
    names = tree(tmp_path / "one")
    assert "mine.txt" in names and not [name for name in names if "rank_1_" in name or "00001" in name]


def save_by_link_and_on_nodes(folder: str) -> None:
    engine, rank, root = fresh_engine(0, {"stage": 2}), dist.get_rank(), Path(folder)
    engine.save_checkpoint(folder, tag="one")
    dist.barrier()
    if rank == 0:
        (root / "latest").rename(root / "elsewhere")
        (root / "latest").symlink_to("elsewhere")
    dist.barrier()
    engine.save_checkpoint(folder, tag="two")
    assert (root / "latest").is_symlink() and (root / "elsewhere").read_text() == "two"
    engine._config.use_node_local_storage = True
    engine.use_node_local_storage = lambda: True
    engine.local_rank = 0
    storage = root / f"node{rank}"
    for tag in ("one", "two"):
        engine.save_checkpoint(str(storage), tag=tag)
    with failing(manifest, "finish", *FULL) if rank == 1 else nullcontext():
        assert "rank 1: [Errno 28]" in error_of(engine.save_checkpoint, str(storage), tag="two")
    assert (storage / "latest").read_text() == "one"
    engine.destroy()


def test_a_linked_latest_and_storage_of_each_node(tmp_path: Path) -> None:
    """If a save fails that replaces a checkpoint, each node's `latest` names the one before."""
    run(save_by_link_and_on_nodes, 2, folder=str(tmp_path))


# ---- file systems that lack calls ---------------------------------------------------------------------------


def save_where_calls_are_missing(folder: str) -> list[str]:
    """Save as on an object store mounted as a folder: without rename, fsync, locks and a second opening to write."""

    def missing(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    def opened(file: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
        return missing() if "+" in mode else builtins.open(file, mode, *args, **options)

    engine, other = (fresh_engine(seed, {"stage": 2}) for seed in (0, 7))
    train_engine(engine, 1)
    with pytest.MonkeyPatch.context() as patch, logged() as said:
        for owner, name in ((os, "rename"), (os, "fsync"), (fcntl, "flock"), (Path, "replace")):
            patch.setattr(owner, name, missing)
        patch.setattr(Path, "open", opened)
        for tag in ("one", "two"):
            engine.save_checkpoint(folder, tag=tag)
    other.load_checkpoint(folder)
    assert differing(snapshot(engine), snapshot(other)) == []
    engine.destroy()
    other.destroy()
    return sorted(line.split(" not support ")[1].split(":")[0] for line in said if "does not support" in line)


def test_file_systems_without_rename_fsync_and_locks(tmp_path: Path) -> None:
    assert run(save_where_calls_are_missing, 2, folder=str(tmp_path)) == [["fsync", "rename"]] * 2
    verify_save(tmp_path / "two", 2)
