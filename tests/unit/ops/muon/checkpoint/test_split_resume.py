# SPDX-License-Identifier: Apache-2.0
"""Blocks are no state: a run resumes with other blocks, and is told so."""

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed.muon import MuonWithAuxAdam, import_state
from helpers.distributed import run
from helpers.logs import logged
from helpers.models import TinyGpt, train_engine
from helpers.training import PARAMS, ds_config, make_engine
from helpers.universal import convert

WHOLE, SPLIT, HEADS = {"muon_fused": "whole"}, {"muon_fused": "split"}, {"per_head_muon": True}
OTHER = "2 parameters (first: blocks.0.qkv.weight) are split into other matrices than in the run that saved"


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    with logged(logging.WARNING) as said:
        yield said


def trained(**params: Any) -> MuonWithAuxAdam:
    """An optimizer that saves as it does under DeepSpeed, after one step."""
    net = TinyGpt()
    optimizer = MuonWithAuxAdam(net.parameters(), model=net, adjust_lr_fn="original", **params)
    optimizer.saved_form.is_convertible = True
    net(*net.batch(0)).backward()
    optimizer.step()
    return optimizer


@pytest.mark.sample(4)
@pytest.mark.parametrize("here", [WHOLE, SPLIT, HEADS])
@pytest.mark.parametrize("there", [WHOLE, SPLIT, HEADS])
def test_other_blocks_than_were_saved_are_told(there: Any, here: Any, warnings: list[str]) -> None:
    optimizer = trained(**here)
    optimizer.load_state_dict(trained(**there).state_dict())
    assert len(warnings) == (there != here)
    assert all(OTHER in line and '"muon_fused": "whole"' in line for line in warnings)
    assert all("blocks" not in group for group in optimizer.param_groups)


@pytest.mark.parametrize(("here", "count"), [(WHOLE, 0), (SPLIT, 1), (HEADS, 0)])
def test_a_version_that_saved_no_blocks_and_no_betas_did_not_split(here: Any, count: int, warnings: list[str]) -> None:
    """By a version that cut heads and sizes only; which, it did not say."""
    saved = trained(**here).state_dict()
    for group in saved["param_groups"]:
        group.pop("blocks", None)
        if group["use_muon"]:
            del group["betas"]
    optimizer = trained(**here)
    optimizer.load_state_dict(saved)
    assert len(warnings) == count and all(group["betas"] for group in optimizer.param_groups)


def test_the_momentum_of_another_muon_goes_on_cut(warnings: list[str]) -> None:
    optimizer = trained()
    names = [spec.name for spec in optimizer.specs.values() if spec.use_muon]
    shapes = {spec.name: spec.shape for spec in optimizer.specs.values()}
    state = {index: {"momentum_buffer": torch.zeros(shapes[name])} for index, name in enumerate(names)}
    groups = [{"params": list(range(len(names))), "momentum": 0.95}]
    engine = SimpleNamespace(basic_optimizer=optimizer, optimizer=optimizer, global_rank=0)
    import_state(engine, {"state": state, "param_groups": groups}, "ema", names)
    (line,) = warnings
    assert "2 fused parameters (first: blocks.0.qkv.weight) are now updated as several matrices" in line
    assert "if a state_dict updated each as one" in line


def go_on(folder: str, load: bool, params: dict[str, Any], universal: bool = False) -> list[str]:
    """Save after a step, or load and make one; the warnings of loading."""
    extra = {"checkpoint": {"load_universal": True}} if universal else {}
    engine = make_engine(TinyGpt(), ds_config(stage=2, optimizer={"type": "Muon", "params": PARAMS | params}, **extra))
    with logged(logging.WARNING) as said:
        if load:
            engine.load_checkpoint(folder, tag="universal" if universal else "saved")
        train_engine(engine, 1)
        if not load:
            engine.save_checkpoint(folder, tag="saved")
    engine.destroy()
    return [line for line in said if "matrices" in line]


def test_checkpoints_of_an_engine(tmp_path: Path) -> None:
    """Ordinary and universal ones."""
    run(go_on, 2, folder=str(tmp_path), load=False, params=WHOLE)
    convert(tmp_path)
    for universal in (False, True):
        for params, count in ((WHOLE, 0), (SPLIT, 1)):
            lines = run(go_on, 2, folder=str(tmp_path), load=True, params=params, universal=universal)[0]
            assert len(lines) == count and all(OTHER in line for line in lines), (universal, params)
