# SPDX-License-Identifier: Apache-2.0
"""What a save writes: files that are replaced whole and verified, which other tools and earlier versions know."""

import json
import os
import pickle
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor

from deepspeed.muon import CheckpointError
from deepspeed.muon.seam import replaced
from deepspeed.muon.zero.checkpoint import durable, manifest, safe_load, save_load
from helpers.checkpoints import error_of
from helpers.distributed import run
from helpers.engine_state import ADAM, MUON, differing, local_states, master_weights, state_sizes
from helpers.logs import logged
from helpers.models import MODELS, train_engine
from helpers.training import BF16_OPTIMIZER, ds_config, fresh_engine, make_engine

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


class Pickled:
    """A call that a pickle makes while it is read."""

    def __init__(self, act: Any, *args: Any) -> None:
        self.call = act, args

    def __reduce__(self) -> tuple:
        return self.call


def test_an_optimizer_file_runs_no_code(tmp_path: Path) -> None:
    """Some versions of Python write a member of an enumeration as getattr of its class: that alone is read."""
    file = tmp_path / "states.pt"
    torch.save({"stage": Pickled(getattr, ZeroStageEnum, "weights")}, file)
    assert safe_load.read_states(file) == {"stage": ZeroStageEnum.weights}
    made = tmp_path / "made"
    for payload in (Pickled(os.mkdir, str(made)), Pickled(getattr, fragment_address, "__init__")):
        torch.save({"optimizer_state_dict": payload}, file)
        with pytest.raises(pickle.UnpicklingError):
            safe_load.read_states(file)
    assert not made.exists()


# ---- engines --------------------------------------------------------------------------------------------------


def loads_that_fail(folder: str) -> tuple[list[str], list[str]]:
    """Return errors of ranks that see different tags and of a scheduler without state, and what another engine says."""
    engine = fresh_engine(0, {"stage": 3})
    train_engine(engine, 1)
    engine.save_checkpoint(folder, tag="one")
    with replaced(save_load, _latest=lambda original, folder: None if dist.get_rank() else original(folder)):
        errors = [error_of(engine.load_checkpoint, folder)]
    engine.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(engine.basic_optimizer)
    errors.append(error_of(engine.load_checkpoint, folder))
    engine.lr_scheduler = None
    engine.checkpoint_engine.__class__ = type("OtherEngine", (type(engine.checkpoint_engine),), {})
    with logged() as said:
        engine.save_checkpoint(folder, tag="one")
    assert not Path(folder, "one", manifest.HEADER).exists()
    engine.destroy()
    return errors, [text for text in said if "manifest" in text]


def test_loads_that_fail_on_all_ranks_and_saves_of_another_checkpoint_engine(tmp_path: Path) -> None:
    (first, said), (second, silence) = run(loads_that_fail, 2, folder=str(tmp_path))
    assert first == second and silence == []
    assert "the ranks see different checkpoints, by (tag, id of the save): [('one', '" in first[0]
    assert "(None, None)]" in first[0] and "load_lr_scheduler_states=False" in first[1]
    (line,) = said
    assert "OtherEngine writes this checkpoint" in line


# ---- for stock's tools, and in memory -----------------------------------------------------------------------------


def save_once(case: dict[str, Any], folder: str, model: str = "mlp") -> tuple[list[list[str]], dict[str, Tensor], str]:
    """Return the keys of each state in memory after a step and a save, the weights that train, and what is logged."""
    engine = make_engine(MODELS[model](), ds_config(**case))
    train_engine(engine, 1)
    with logged() as said:
        engine.save_checkpoint(folder)
    found = [sorted(entry) for entry in local_states(engine)], master_weights(engine), "\n".join(said)
    engine.destroy()
    return found


@pytest.mark.parametrize("case", [{"stage": 2}, {"stage": 3}, {"stage": 3, "offload": True}, BF16_OPTIMIZER], ids=str)
def test_the_files_hold_adams_keys_and_no_second_moment_for_muon(case: dict[str, Any], tmp_path: Path) -> None:
    assert [keys for keys, *_ in run(save_once, 2, case=case, folder=str(tmp_path))] == [[MUON, ADAM]] * 2
    files = sorted(tmp_path.glob("*/*zero_pp_rank_*_optim_states.pt"))
    assert len(files) == 2
    for file in files:
        saved = torch.load(file, weights_only=False)["optimizer_state_dict"]
        state = saved.get("optimizer_state_dict", saved.get("base_optimizer_state"))["state"]
        assert [sorted(entry) for entry in state.values()] == [ADAM, ADAM]
        assert state[0]["exp_avg_sq"].shape == state[0]["exp_avg"].shape
        assert state[0]["exp_avg"].isfinite().all() and state[0]["exp_avg_sq"].isneginf().all()
        assert state[0]["exp_avg_sq"].untyped_storage().nbytes() == 4


def test_the_script_in_a_checkpoint_gives_the_weights_that_train(tmp_path: Path) -> None:
    """What it leaves out is logged."""
    (_, weights, said), _ = run(save_once, 2, case={"stage": 1}, folder=str(tmp_path), model="frozen")
    assert "zero_to_fp32 leaves out frozen parameters, here 2" in said
    command = [sys.executable, "zero_to_fp32.py", ".", "out", "--max_shard_size", "1GB"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (file,) = (tmp_path / "out").glob("pytorch_model*.bin")
    assert differing(weights, torch.load(file, weights_only=True)) == []


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.full)])
def test_muon_keeps_four_bytes_per_parameter(world: int) -> None:
    cases = [{"stage": stage, "dtype": dtype} for stage in (1, 2, 3) for dtype in ("fp32", "bf16")]
    matrices = [p.numel() for p in MODELS["mlp"]().parameters() if p.ndim == 2]
    for case, *ranks in zip(cases, *run(state_sizes, world, cases=cases), strict=True):
        used, flat, tensors = (sum(column) for column in zip(*ranks, strict=True))
        assert used == 4 * flat + 4 * tensors, case  # the momentum, and the step count of each tensor
        padding = flat - sum(matrices)
        assert 0 <= padding < (len(matrices) * world if case["stage"] == 3 else 2 * world), case
