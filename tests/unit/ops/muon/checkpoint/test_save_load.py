# SPDX-License-Identifier: Apache-2.0
"""What a save writes, which other tools know, and what a load takes of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed.muon.zero.checkpoint import load
from deepspeed.muon.zero.wrappers.adapter import patched
from helpers.checkpoints import error_of, tree
from helpers.distributed import run
from helpers.engine_state import ADAM, MUON, differing, local_states, snapshot
from helpers.logs import logged
from helpers.models import MODELS, train_engine
from helpers.training import BF16_OPTIMIZER, ds_config, fresh_engine, make_engine

# ---- engines --------------------------------------------------------------------------------------------------


def loads_that_fail(folder: str) -> list[str]:
    """Return errors of ranks that see different tags and of a scheduler without state."""
    engine = fresh_engine(0, {"stage": 3})
    train_engine(engine, 1)
    engine.save_checkpoint(folder, tag="one")
    with patched(load, _latest=lambda original, folder: None if dist.get_rank() else original(folder)):
        errors = [error_of(engine.load_checkpoint, folder)]
    engine.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(engine.basic_optimizer)
    errors.append(error_of(engine.load_checkpoint, folder))
    engine.destroy()
    return errors


def test_loads_that_fail_on_all_ranks(tmp_path: Path) -> None:
    first, second = run(loads_that_fail, 2, folder=str(tmp_path))
    assert first == second
    assert "the ranks see different tags: ['one', None]" in first[0] and "load_lr_scheduler_states=False" in first[1]


def save_through_another_engine(folder: str) -> tuple[list[str], list[str]]:
    """Save and load through a checkpoint engine of the script; return what it was asked to write, and what differs."""
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    class Own(TorchCheckpointEngine):
        def save(self, state_dict: Any, path: str) -> None:
            written.append(Path(path).name)
            super().save(state_dict, path)

    written: list[str] = []
    engine, other = fresh_engine(0, {"stage": 2}), fresh_engine(7, {"stage": 2})
    engine.checkpoint_engine = other.checkpoint_engine = Own(engine._config)
    train_engine(engine, 1)
    engine.save_checkpoint(folder)
    other.load_checkpoint(folder)
    changed = differing(snapshot(engine), snapshot(other))
    engine.destroy()
    other.destroy()
    return written, changed


def test_a_checkpoint_engine_of_the_script_saves_and_loads(tmp_path: Path) -> None:
    (first, changed), (second, others) = run(save_through_another_engine, 2, folder=str(tmp_path))
    assert changed == others == [] and len(first) == 2 and len(second) == 1
    assert (tmp_path / "latest").read_text() == "global_step1"
    assert {*first, *second} == {name.partition("/")[2] for name in tree(tmp_path) if name.endswith("states.pt")}


# ---- for stock's tools, and in memory -----------------------------------------------------------------------------


def save_once(case: dict[str, Any], folder: str, model: str) -> tuple[list[list[str]], str]:
    """Return the keys of each state in memory after a step and a save, and what is logged."""
    engine = make_engine(MODELS[model](), ds_config(**case))
    train_engine(engine, 1)
    with logged() as said:
        engine.save_checkpoint(folder)
    found = [sorted(entry) for entry in local_states(engine)], "\n".join(said)
    engine.destroy()
    return found


@pytest.mark.parametrize("case", [{"stage": 1}, {"stage": 3}, {"stage": 3, "offload": True}, BF16_OPTIMIZER], ids=str)
def test_the_files_hold_adams_keys_and_no_second_moment_for_muon(case: dict[str, Any], tmp_path: Path) -> None:
    """At stage 1 some parameters are frozen, which `zero_to_fp32` leaves out."""
    model = "frozen" if case == {"stage": 1} else "mlp"
    (keys, said), (others, _) = run(save_once, 2, case=case, folder=str(tmp_path), model=model)
    assert keys == others == [MUON, ADAM]
    assert ("zero_to_fp32 leaves out frozen parameters, here 2" in said) == (model == "frozen")
    assert (tmp_path / "zero_to_fp32.py").is_file()
    files = sorted(tmp_path.glob("*/*zero_pp_rank_*_optim_states.pt"))
    assert len(files) == 2
    for file in files:
        saved = torch.load(file, weights_only=False)["optimizer_state_dict"]
        state = saved.get("optimizer_state_dict", saved.get("base_optimizer_state"))["state"]
        assert [sorted(entry) for entry in state.values()] == [ADAM, ADAM]
        assert state[0]["exp_avg_sq"].shape == state[0]["exp_avg"].shape
        assert state[0]["exp_avg"].isfinite().all() and state[0]["exp_avg_sq"].isneginf().all()
        assert state[0]["exp_avg_sq"].untyped_storage().nbytes() == 4
