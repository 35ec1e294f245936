# SPDX-License-Identifier: Apache-2.0
"""Saving and loading that fail closed: when `latest` is written, what is verified, what is left to DeepSpeed."""

import json
import os
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed.muon import CheckpointError
from deepspeed.muon.seam import replaced
from deepspeed.muon.zero.checkpoint import durable, manifest, safe_load, save_load
from helpers.checkpoints import error_of
from helpers.distributed import run
from helpers.logs import logged
from helpers.models import MODELS, initialize_, train_engine
from helpers.training import ds_config, fresh_engine, make_engine

# ---- files only -----------------------------------------------------------------------------------------------


def test_a_small_file_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever dies before the last moment leaves the old text."""
    file = tmp_path / "latest"
    durable.write_atomically(file, "one")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            durable.write_atomically(file, "two")
    assert file.read_text() == "one"
    durable.write_atomically(file, "three")
    assert file.read_text() == "three"


@pytest.mark.parametrize("has_advice", [True, False])
def test_a_file_is_written_with_and_without_the_systems_advice(
    has_advice: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "SYNC_BYTES", 4)
    if not has_advice:  # as on macOS
        monkeypatch.delattr(os, "posix_fadvise", raising=False)
    file = durable.SyncedFile(tmp_path / "file")
    for data in (b"12", b"345", b"6"):
        file.write(data)
    file.close()
    assert (tmp_path / "file").read_bytes() == b"123456"


def listed(file: Path) -> dict[str, int | None]:
    """What the manifest says of a file, the only one of a save."""
    manifest.finish(file.parent, 0, "id", [file])
    return json.loads((file.parent / manifest.manifest_name(0)).read_text())["files"][file.name]


def found(file: Path) -> list[str]:
    return manifest.damages(file.parent, "id", 0)


STATE = {"weights": torch.arange(3.0), "moments": torch.zeros(()).expand(5), "step": 3}


def test_a_change_of_any_byte_that_matters_is_found(tmp_path: Path) -> None:
    """The others are padding: the file loads as before."""
    file = tmp_path / "state.pt"
    torch.save(STATE, file)
    assert listed(file).keys() == {"bytes", "records"} and found(file) == []
    data, harmless = file.read_bytes(), 0
    for at in range(len(data)):
        file.write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
        if not found(file):
            harmless += 1
            assert str(torch.load(file)) == str(STATE), at
    assert harmless < len(data) / 2


def test_files_that_have_no_records_have_a_checksum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's swapped tensors, and what it writes without "checkpoint_serialization"."""
    monkeypatch.setattr(manifest, "CHUNK", 10)
    for name, data in {"swapped": os.urandom(37), "pickled.pt": pickle.dumps(STATE), "empty": b""}.items():
        file = tmp_path / name
        file.write_bytes(data)
        assert listed(file) == {"bytes": len(data), "crc32": zlib.crc32(data)} and found(file) == []
        if data:
            file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
            assert found(file) == [f"{name} has changed since it was saved (its CRC-32 differs)"]


@pytest.mark.skipif(not hasattr(torch.serialization, "set_crc32_options"), reason="this torch always computes them")
def test_who_has_torch_compute_no_checksums_gets_none(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(STATE, tmp_path / "state.pt")
        assert listed(tmp_path / "state.pt").keys() == {"bytes", "records"} and found(tmp_path / "state.pt") == []
        (tmp_path / "swapped").write_bytes(b"12345")
        assert listed(tmp_path / "swapped") == {"bytes": 5, "crc32": None} and found(tmp_path / "swapped") == []
    finally:
        torch.serialization.set_crc32_options(True)
    (tmp_path / "swapped").write_bytes(b"1234")
    assert found(tmp_path / "swapped") == ["swapped has 4 bytes, but 5 were saved"]


def test_manifests_of_earlier_versions_are_checked(tmp_path: Path) -> None:
    """They have the CRC-32 of the whole file."""
    file = tmp_path / "state.pt"
    torch.save(STATE, file)
    (tmp_path / manifest.HEADER).write_text(json.dumps({"format": 1, "save_id": "id", "world_size": 1}))
    facts = {"bytes": file.stat().st_size, "crc32": zlib.crc32(file.read_bytes())}
    text = json.dumps({"save_id": "id", "rank": 0, "files": {file.name: facts}})
    (tmp_path / manifest.manifest_name(0)).write_text(text)
    header = manifest.read_header(tmp_path)
    assert header is not None and header["save_id"] == "id" and found(file) == []
    torch.save(STATE | {"step": 4}, file)
    assert found(file) == ["state.pt has changed since it was saved (its CRC-32 differs)"]


def test_complete_tags_are_listed_latest_first(tmp_path: Path) -> None:
    for number, tag in enumerate(("old", "new", "half", "short")):
        folder = tmp_path / tag
        manifest.begin(folder, {"save_id": tag, "world_size": 2})
        os.utime(folder / manifest.HEADER, (number, number))
        for rank in range(1 if tag == "half" else 2):
            (folder / f"file{rank}").write_bytes(b"12345")
            manifest.finish(folder, rank, tag, [folder / f"file{rank}"])
    (tmp_path / "short" / "file1").write_bytes(b"1234")
    assert manifest.complete_tags(tmp_path) == ["new", "old"]


def test_a_header_of_the_future_is_refused(tmp_path: Path) -> None:
    (tmp_path / manifest.HEADER).write_text(json.dumps({"format": manifest.FORMAT + 1}))
    with pytest.raises(CheckpointError, match="newer deepspeed-muon"):
        manifest.read_header(tmp_path)


class Payload:
    """What a hostile pickle would do."""

    def __reduce__(self) -> tuple:
        return (os.mkdir, ("muon_was_here",))


def test_an_optimizer_file_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"optimizer_state_dict": Payload()}, "bad.pt")
    with pytest.raises(pickle.UnpicklingError):
        safe_load.read_states(Path("bad.pt"))
    assert not Path("muon_was_here").exists()


# ---- engines --------------------------------------------------------------------------------------------------


def said_of_manifests(act: Any) -> list[str]:
    with logged() as said:
        act()
    return [text for text in said if "manifest" in text]


def save_and_load_with_a_users_object(folder: str, stage: int) -> tuple[str, Any]:
    """A group with an object of the script's, as of a library that notes where its parameters come from."""
    for seed in (0, 7):
        net = MODELS["mlp"]()
        initialize_(net, seed)
        groups = [{"params": list(net.parameters()), "origin": Path("a/b")}]
        engine = make_engine(net, ds_config(stage), model_parameters=groups)
        found = error_of(engine.load_checkpoint if seed else engine.save_checkpoint, folder)
        origin = engine.basic_optimizer.param_groups[0]["origin"]
        engine.destroy()
    return found, origin


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_users_object_in_a_group_is_saved_and_loaded(stage: int, tmp_path: Path) -> None:
    assert run(save_and_load_with_a_users_object, 1, folder=str(tmp_path), stage=stage) == [("", Path("a/b"))]


def loads_that_fail(folder: str) -> dict[str, Any]:
    """Return the errors of ranks that see different tags, and of calls that DeepSpeed would answer wrongly."""
    import torch.distributed as dist

    engine, found = fresh_engine(0, {"stage": 3}), {}
    train_engine(engine, 1)
    engine.save_checkpoint(folder, tag="one")
    with replaced(save_load, _latest=lambda original, folder: None if dist.get_rank() else original(folder)):
        found["views"] = error_of(engine.load_checkpoint, folder)
    engine.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(engine.basic_optimizer)
    found["scheduler"] = error_of(engine.load_checkpoint, folder)
    engine.lr_scheduler = None
    engine.checkpoint_engine.__class__ = type("OtherEngine", (type(engine.checkpoint_engine),), {})
    found["other"] = said_of_manifests(lambda: engine.save_checkpoint(folder, tag="one"))
    found["header"] = Path(folder, "one", manifest.HEADER).exists()
    engine.destroy()
    return found


def test_loads_that_fail_on_all_ranks_and_saves_of_another_checkpoint_engine(tmp_path: Path) -> None:
    first, second = run(loads_that_fail, 2, folder=str(tmp_path))
    (line,) = first.pop("other")
    assert "OtherEngine writes this checkpoint" in line and second.pop("other") == []
    assert first == second and not first["header"]
    assert "the ranks see different checkpoints, by (tag, id of the save): [('one', '" in first["views"]
    assert "(None, None)]" in first["views"]
    assert "load_lr_scheduler_states=False" in first["scheduler"]
