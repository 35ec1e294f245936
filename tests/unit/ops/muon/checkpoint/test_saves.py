# SPDX-License-Identifier: Apache-2.0
"""Saves that fail on one rank, that several ranks and nodes make together, and that replace an older one.

Disks are full at a file size that the system enforces, as a limit of the process, so that no test needs a disk of its
own or a privileged user, and DeepSpeed's and torch's own writing fail as they would on a real one.
"""

import errno
import os
import re
import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from deepspeed.muon.zero.wrappers.adapter import patched
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


def failing(owner: Any, name: str, *error: Any) -> AbstractContextManager[None]:
    """Make calls of ``owner.name`` raise OSError of these arguments, or ZeroDivisionError without any."""

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(*error) if error else ZeroDivisionError

    return patched(owner, **{name: fail})


class Fault(NamedTuple):
    """What happens to a save on ``ranks``, and ``words`` (a pattern) in the error; ``context``: of (engine, folder)."""

    words: str
    ranks: tuple[int, ...]
    context: Callable[[Any, Path], AbstractContextManager[None]] = lambda *_: nullcontext()
    tags: tuple[str, ...] = ("new", "good")
    options: dict[str, Any] = {}


BROKEN = (errno.EIO, "broken")
#: `good` is the tag of an older checkpoint, which a save replaces once all its data is on disk.
FAULTS = {
    "full disk, rank 0": Fault("File too large", (0,), lambda *_: full_disk(0)),
    "full disk, rank 1": Fault("rank 1: .*File too large", (1,), lambda *_: full_disk(0)),
    "full disk, later": Fault("File too large", (0, 1), lambda *_: full_disk(600)),
    "broken disk": Fault(r"rank 1: \[Errno 5\] broken", (1,), lambda *_: failing(os, "fsync", *BROKEN)),
    "serialization": Fault("ZeroDivisionError", (0, 1), lambda e, _: failing(e.checkpoint_engine.contents, "save")),
    "state": Fault("rank 1: ZeroDivisionError", (1,), lambda e, _: failing(e.optimizer, "state_dict")),
    "script": Fault("rank 0: ZeroDivisionError", (0, 1), lambda e, _: failing(e, "_copy_recovery_script")),
    "no pickle": Fault("rank 0: .*[Pp]ickl", (0,), options={"client_state": {"f": lambda: 0}}),
    "file": Fault("File exists|Not a directory", (0, 1), tags=("file",)),
    "no folder": Fault("/proc/nothing", (0, 1), tags=("new",), options={"save_dir": "/proc/nothing"}),
}


def engine_at(stage: int, seed: int = 0, origin: Any = None) -> Any:
    """An engine with a group that notes where its parameters come from, as those of some libraries do."""
    net = halve(MODELS["mlp"](), seed)
    groups = [{"params": list(net.parameters()), "origin": origin}]
    return make_engine(net, ds_config(stage), model_parameters=groups)


def checkpoints_in(folder: Path) -> dict[str, bytes | None]:
    """Return the :func:`tree` without the script that DeepSpeed copies, which a full disk may cut."""
    return {name: content for name, content in tree(folder).items() if name != "zero_to_fp32.py"}


def save_with_faults(folder: str, stage: int) -> dict[str, Any]:
    """Save with each fault, and at last a good one that loads; return the errors and what they changed."""
    root, rank, found = Path(folder), dist.get_rank(), {}
    engine = engine_at(stage, origin=Path("a/b"))
    train_engine(engine, 1)
    engine.save_checkpoint(folder, tag="good")
    (root / "file").touch()
    dist.barrier()
    before, files = snapshot(engine), checkpoints_in(root)
    for name, fault in FAULTS.items():
        for tag in fault.tags:
            if stage == 0 and (name == "script" or (0 not in fault.ranks and name != "state")):
                continue  # no script; rank 1 writes nothing
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
    engine.destroy()
    other.destroy()
    return found


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.full), 2, 3])
def test_a_save_that_fails(stage: int, tmp_path: Path) -> None:
    """The error is the same on all ranks; the engine and older checkpoints stay as they were; the next save is good."""
    first, second = run(save_with_faults, 2, folder=str(tmp_path), stage=stage)
    assert first == second
    assert len(first) >= (8 if stage == 0 else 13)
    for case, (words, error, changed, is_as_before) in first.items():
        assert re.search(words, error), (case, error)
        assert str(tmp_path / case.split(", ")[-1]) in error or "/proc" in error, (case, error)
        assert "states.pt" in error or stage == 0 or not case.startswith("broken disk"), error
        assert changed == [] and is_as_before, case
    verify_save(tmp_path / "good")


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


# ---- one tag, several numbers of ranks, and nodes -------------------------------------------------------------


def save_again(folder: str) -> None:
    engine = fresh_engine(0, {"stage": 3})
    engine.save_checkpoint(folder, tag="one")
    engine.destroy()


def test_a_save_from_fewer_ranks_leaves_no_older_shards(tmp_path: Path) -> None:
    run(save_again, 2, folder=str(tmp_path))
    (tmp_path / "one" / "mine.txt").write_text("of the user")
    run(save_again, 1, folder=str(tmp_path))
    verify_save(tmp_path / "one")
    names = tree(tmp_path / "one")
    assert "mine.txt" in names and not [name for name in names if "rank_1_" in name]


def save_on_nodes(folder: str) -> None:
    """Save as two nodes of one rank each that have folders of their own."""
    rank = dist.get_rank()
    engine = fresh_engine(0, {"stage": 2}, checkpoint={"use_node_local_storage": True})
    engine.local_rank, engine.checkpoint_engine.is_first = 0, True
    storage = Path(folder, f"node{rank}")
    for tag in ("one", "two"):
        engine.save_checkpoint(str(storage), tag=tag)
    with failing(os, "fsync", *BROKEN) if rank == 1 else nullcontext():
        assert "rank 1: [Errno 5]" in error_of(engine.save_checkpoint, str(storage), tag="three")
    assert (storage / "latest").read_text() == "two"
    engine.destroy()


def test_storage_of_each_node(tmp_path: Path) -> None:
    run(save_on_nodes, 2, folder=str(tmp_path))


def kill_while_a_tag_is_replaced(folder: str) -> tuple[str, bool]:
    """Replace a checkpoint, and stop after its older files are gone; return the load's error, and whether latest is."""
    engine = fresh_engine(0, {"stage": 2})
    for _ in range(2):
        engine.save_checkpoint(folder, tag="one")
    assert Path(folder, "latest").read_text() == "one"
    dist.barrier()
    with failing(type(engine.checkpoint_engine), "_place"):
        error_of(engine.save_checkpoint, folder, tag="one")
    dist.barrier()
    found = error_of(engine.load_checkpoint, folder, tag="one"), Path(folder, "latest").exists()
    engine.destroy()
    return found


def test_a_tag_that_is_being_replaced_is_not_the_latest(tmp_path: Path) -> None:
    """Nothing of the older checkpoint is left, so a load cannot mix two saves."""
    for error, is_latest in run(kill_while_a_tag_is_replaced, 2, folder=str(tmp_path)):
        assert not is_latest and "cannot be loaded, and nothing was changed" in error


# ---- next to checkpoints ---------------------------------------------------------------------------------------


def save_the_model_between_checkpoints(folder: str, stage: int) -> list[str]:
    """Save 16-bit weights into the folder of checkpoints, replace the checkpoint, and load it; return the files."""
    zero = {"zero": {"stage3_gather_16bit_weights_on_model_save": True}} if stage == 3 else {}
    engine = fresh_engine(0, {"stage": stage} | zero)
    engine.save_checkpoint(folder, tag="one")
    assert engine.save_16bit_model(folder)
    before = sorted(tree(Path(folder)))
    engine.save_checkpoint(folder, tag="one", save_latest=False)
    assert sorted(tree(Path(folder))) == before and Path(folder, "latest").read_text() == "one"
    assert engine.load_checkpoint(folder)[0] is not None
    engine.destroy()
    return before


@pytest.mark.parametrize("stage", [2, 3])
def test_a_model_that_is_saved_next_to_a_checkpoint_leaves_it_alone(stage: int, tmp_path: Path) -> None:
    files = run(save_the_model_between_checkpoints, 2, folder=str(tmp_path), stage=stage)[0]
    assert "pytorch_model.bin" in files and len([name for name in files if name.endswith("states.pt")]) == stage + 1
