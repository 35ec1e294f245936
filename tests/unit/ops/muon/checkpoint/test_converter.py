# SPDX-License-Identifier: Apache-2.0
"""Stock's universal converter, unmodified, and what is loaded from it: other ranks, other stages, other precisions."""

from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed.muon import CheckpointError
from helpers.distributed import run
from helpers.engine_state import differing
from helpers.logs import logged
from helpers.models import MODELS, Mlp, train_engine
from helpers.oracles import change_error
from helpers.training import BF16_OPTIMIZER
from helpers.universal import ADAMW, WARMUP, Case, build, convert, convert_by_command, load_all, peak_of, save_all

STAGES: list[Case] = [{"stage": stage, "offload": offload} for stage in (1, 2, 3) for offload in (False, True)]
VARIANTS: list[Case] = [
    {"stage": 2, "groups": True, "scheduler": WARMUP},
    {"stage": 3, "groups": True, "scheduler": WARMUP},
    {"stage": 3, "zero": {"sub_group_size": 100}},
    {"stage": 1, "zero": {"round_robin_gradients": True}},
    {"stage": 2, "zero": {"round_robin_gradients": True}, "offload": True},
    *({"stage": stage, "model": model} for stage in (2, 3) for model in ("tied", "frozen", "gpt_tied")),
    *({"stage": stage, "model": "few", "groups": True} for stage in (1, 2, 3)),
    {**BF16_OPTIMIZER, "model": "few", "groups": True},
]
PAIRED: list[Case] = [
    *STAGES,
    *({"stage": stage, "dtype": "bf16"} for stage in (1, 2, 3)),
    BF16_OPTIMIZER,
    {"stage": 2, "dtype": "fp16"},
]


def restored(saved: dict[str, Any], loaded: dict[str, Any], settings: bool = True) -> list[str]:
    """What a load did not bring back bit for bit."""
    wrong = differing(saved["states"], loaded["states"]) + differing(saved["weights"], loaded["weights"])
    keys = ("keys", "steps", "schedule", "count", *(["settings"] if settings else []))
    return wrong + [key for key in keys if saved[key] != loaded[key]]


# ---- the same run on other ranks --------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("worlds", [[3], [1, 4]], ids=str)
def test_the_run_goes_on_at_any_number_of_ranks(worlds: list[int], tmp_path: Path) -> None:
    """fp32, stages 1 to 3, saved at 2 ranks: exact through the normal loader, through the converter within 2e-5."""
    saved = run(save_all, 2, cases=STAGES, folder=str(tmp_path))[0]
    jobs = [(str(tmp_path / str(index)), case) for index, case in enumerate(STAGES)]
    for case, before, after in zip(STAGES, saved, run(load_all, 2, jobs=jobs, universal=False)[0], strict=True):
        assert after["losses"] == before["losses"], case
    for folder, _ in jobs:
        convert(Path(folder))
    for world in worlds:
        for case, before, after in zip(STAGES, saved, run(load_all, world, jobs=jobs)[0], strict=True):
            assert restored(before, after) == [], (world, case)
            errors = [abs(a - b) for a, b in zip(before["losses"], after["losses"], strict=True)]
            print(world, case, "largest difference of a loss", max(errors), before["losses"])
            assert max(errors) <= 2e-5, (world, case)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.full), 3])
def test_the_converter_needs_no_flag(stage: int, tmp_path: Path) -> None:
    cases: list[Case] = [{"stage": stage}]
    saved = run(save_all, 2, cases=cases, folder=str(tmp_path))[0]
    jobs = [(str(tmp_path / str(index)), case) for index, case in enumerate(cases)]
    for folder, _ in jobs:
        convert_by_command(Path(folder))
    for case, before, after in zip(cases, saved, run(load_all, 3, jobs=jobs)[0], strict=True):
        assert restored(before, after) == [], case
        for name, weight in before["after"].items():
            error = change_error(before["initial"][name], after["after"][name], weight)
            assert error <= 1e-5, (case, name)


@pytest.mark.full
def test_models_groups_and_layouts(tmp_path: Path) -> None:
    """Stages 1 to 3: tied and frozen parameters, groups of different settings, ranks with only padding of a group."""
    saved = run(save_all, 2, cases=VARIANTS, folder=str(tmp_path))[0]
    jobs = [(str(tmp_path / str(index)), case) for index, case in enumerate(VARIANTS)]
    for folder, _ in jobs:
        convert(Path(folder))
    for case, before, after in zip(VARIANTS, saved, run(load_all, 4, jobs=jobs)[0], strict=True):
        is_frozen = case.get("model") == "frozen"
        other = [name for name in differing(before["weights"], after["weights"]) if "layers.1." not in name]
        assert other == [] and (is_frozen or differing(before["weights"], after["weights"]) == []), case
        empty: dict[str, Any] = {"weights": {}}
        assert restored(before | empty, after | empty) == [], case
        for a, b in zip(before["losses"], after["losses"], strict=True):
            assert "dtype" in case or is_frozen or abs(a - b) <= 2e-5, case


def test_a_checkpoint_with_padding_only_ranks_converts(tmp_path: Path) -> None:
    cases: list[Case] = [{"stage": stage, "model": "few", "groups": True} for stage in (1, 2, 3)]
    saved = run(save_all, 4, cases=cases, folder=str(tmp_path))[0]
    for index in range(len(cases)):
        convert(tmp_path / str(index))
    jobs = [(str(tmp_path / str(index)), case) for index, case in enumerate(cases)]
    for case, before, after in zip(cases, saved, run(load_all, 2, jobs=jobs)[0], strict=True):
        assert restored(before, after) == [], case


# ---- every pair -------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.time_limit(1800)
def test_every_pair_of_stages_and_precisions(tmp_path: Path) -> None:
    """Stages 1 to 3, from 2 ranks to 3: momentum, moments and fp32 weights bit for bit, counts and settings."""
    saved = run(save_all, 2, timeout=300, cases=PAIRED, folder=str(tmp_path))[0]
    for index in range(len(PAIRED)):
        convert(tmp_path / str(index))
    for index, (before, source) in enumerate(zip(saved, PAIRED, strict=True)):
        jobs = [(str(tmp_path / str(index)), case) for case in PAIRED]
        for case, after in zip(PAIRED, run(load_all, 3, timeout=300, jobs=jobs, steps=1)[0], strict=True):
            assert restored(before, after) == [], (source, case)
            assert all(torch.tensor(after["losses"]).isfinite())


# ---- without a universal checkpoint, and what is said of one ------------------------------------------------


def load_before_and_after_conversion(folder: str) -> tuple[list[str], list[str]]:
    """The errors of a load from an empty folder and after a save, and what is logged of the checkpoint's files."""
    import torch.distributed as dist

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
    with logged() as said:
        for tag in (None, "universal"):
            assert engine.load_checkpoint(folder, tag=tag)[0] is not None
    engine.destroy()
    return errors, [line for line in said if "manifest" in line]


def test_a_load_without_a_universal_checkpoint_says_what_is_there(tmp_path: Path) -> None:
    (errors, said), (others, silent) = run(load_before_and_after_conversion, 2, folder=str(tmp_path))
    lacks = f"checkpoint.load_universal is true, but {tmp_path} has no universal checkpoint "
    lacks += "(no file latest_universal); "
    assert errors == others
    removed = "remove that key to load the checkpoint saved"
    assert errors == [f"{lacks}it has no other checkpoint either", lacks + removed]
    assert all("the checkpoint universal has no manifest" in line for line in said) and len(said) == 2 and silent == []


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
@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.full), 3])
def test_loading_takes_no_more_memory_than_adamw(stage: int, tmp_path: Path) -> None:
    (adamw, adamw_state), (muon, muon_state) = run(peaks, 1, stage=stage, folder=str(tmp_path))[0]
    print(f"stage {stage}: AdamW {adamw:.0f} MB, state {adamw_state:.0f}; Muon {muon:.0f} MB, state {muon_state:.0f}")
    assert muon <= adamw
    assert muon_state < 0.51 * adamw_state
