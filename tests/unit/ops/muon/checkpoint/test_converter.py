# SPDX-License-Identifier: Apache-2.0
"""Stock's universal converter, unmodified: settings and counts, other precisions, what is missing, and memory.

The table of settings has weights and states at other stages and on other ranks.
"""

from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed.muon import CheckpointError
from helpers.distributed import run
from helpers.engine_state import differing
from helpers.models import MODELS, Mlp, train_engine
from helpers.settings import WARMUP
from helpers.training import BF16_OPTIMIZER
from helpers.universal import ADAMW, Case, build, convert, facts, peak_of

#: On some of 4 ranks nothing of a group but padding.
FEW: list[Case] = [{"stage": stage, "model": "few", "groups": True} for stage in (2, 3)]
FEW += [{"stage": 2, "groups": True, "scheduler": WARMUP}]
PAIRED: list[Case] = [
    *({"stage": stage, "offload": offload} for stage in (1, 2, 3) for offload in (False, True)),
    *({"stage": stage, "dtype": "bf16"} for stage in (1, 2, 3)),
    BF16_OPTIMIZER,
    {"stage": 2, "dtype": "fp16"},
]


def save_all(cases: list[Case], folder: str) -> list[dict[str, Any]]:
    """For each case train three steps and save; return the facts."""
    results = []
    for index, case in enumerate(cases):
        engine = build(case, 0)
        train_engine(engine, 3)
        if engine.lr_scheduler is None:
            engine.basic_optimizer.param_groups[-1]["lr"] *= 0.5
        engine.save_checkpoint(f"{folder}/{index}", tag="saved")
        results.append(facts(engine))
        engine.destroy()
    return results


def load_all(cases: list[Case], folders: list[str]) -> list[dict[str, Any]]:
    """Load each folder into an engine with other weights; return the facts, and the losses of a step."""
    results = []
    for case, folder in zip(cases, folders, strict=True):
        engine = build(case, 7, checkpoint={"load_universal": True})
        assert engine.load_checkpoint(folder, tag="universal")[0] is not None
        results.append(facts(engine) | {"losses": train_engine(engine, 1, 3)})
        engine.destroy()
    return results


def lost(saved: dict[str, Any], loaded: dict[str, Any]) -> list[str]:
    """What a load did not bring back bit for bit."""
    wrong = differing(saved["states"], loaded["states"]) + differing(saved["weights"], loaded["weights"])
    return wrong + [key for key in ("keys", "steps", "schedule", "count", "settings") if saved[key] != loaded[key]]


def test_settings_schedule_and_counts_continue(tmp_path: Path) -> None:
    saved = run(save_all, 4, cases=FEW, folder=str(tmp_path))[0]
    folders = [tmp_path / str(index) for index in range(len(FEW))]
    for folder in folders:
        convert(folder)
    results = run(load_all, 2, cases=FEW, folders=[str(folder) for folder in folders])[0]
    for case, before, after in zip(FEW, saved, results, strict=True):
        assert lost(before, after) == [], case


@pytest.mark.full
@pytest.mark.time_limit(1800)
def test_each_save_loads_at_other_stages_and_in_other_precisions(tmp_path: Path) -> None:
    """Into three of the others, from 2 ranks to 3: momentum, moments and fp32 weights bit for bit, counts, settings."""
    saved = run(save_all, 2, timeout=300, cases=PAIRED, folder=str(tmp_path))[0]
    for index, before in enumerate(saved):
        convert(tmp_path / str(index))
        folders, cases = [str(tmp_path / str(index))] * 3, [PAIRED[(index + n) % len(PAIRED)] for n in (1, 4, 7)]
        for case, after in zip(cases, run(load_all, 3, timeout=300, cases=cases, folders=folders)[0], strict=True):
            assert lost(before, after) == [], (PAIRED[index], case)
            assert all(map(isfinite, after["losses"]))


# ---- without a universal checkpoint, and what is said of one ------------------------------------------------


def load_before_and_after_conversion(folder: str) -> list[str]:
    """The errors of a load from an empty folder and after a save."""
    engine, errors = build({"stage": 2}, 0, checkpoint={"load_universal": True}), []
    for save in (False, True):
        if save:
            engine.save_checkpoint(folder, tag="saved")
        with pytest.raises(CheckpointError) as error:
            engine.load_checkpoint(folder)
        errors.append(str(error.value))
    if dist.get_rank() == 0:
        convert(Path(folder))
    dist.barrier()
    for tag in (None, "universal"):
        assert engine.load_checkpoint(folder, tag=tag)[0] is not None
    engine.destroy()
    return errors


def test_a_load_without_a_universal_checkpoint_says_what_is_there(tmp_path: Path) -> None:
    errors, others = run(load_before_and_after_conversion, 2, folder=str(tmp_path))
    assert errors == others and all("checkpoint.load_universal" in text for text in errors)
    assert "check load_dir" in errors[0] and "load the checkpoint saved" in errors[1]


# ---- memory -----------------------------------------------------------------------------------------------

MODELS["big"] = lambda: Mlp((1024,) * 5)


def peaks(stage: int, folder: str) -> list[tuple[float, float]]:
    """Of AdamW and of Muon: MB that loading takes at most, and MB of optimizer state after it."""
    found = []
    for index, extra in enumerate(({"optimizer": ADAMW}, {})):
        case: Case = {"stage": stage, "model": "big"}
        engine = build(case, 0, **extra)
        train_engine(engine, 1)
        engine.save_checkpoint(f"{folder}/{index}", tag="saved")
        engine.destroy()
        convert(Path(folder, str(index)), inject=True)
        engine = build(case, 7, **extra, checkpoint={"load_universal": True})
        peak = peak_of(lambda engine=engine, index=index: engine.load_checkpoint(f"{folder}/{index}", tag="universal"))
        values = [v for state in engine.basic_optimizer.state.values() for v in state.values() if torch.is_tensor(v)]
        found.append((peak, sum(value.untyped_storage().nbytes() for value in values) / 2**20))
        engine.destroy()
    return found


@pytest.mark.full
@pytest.mark.parametrize("stage", [2, 3])
def test_loading_takes_no_more_memory_than_adamw(stage: int, tmp_path: Path) -> None:
    (adamw, adamw_state), (muon, muon_state) = run(peaks, 1, stage=stage, folder=str(tmp_path))[0]
    print(f"stage {stage}: AdamW {adamw:.0f} MB, state {adamw_state:.0f}; Muon {muon:.0f} MB, state {muon_state:.0f}")
    assert muon <= adamw
    assert muon_state < 0.51 * adamw_state
