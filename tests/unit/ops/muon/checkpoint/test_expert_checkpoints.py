# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of models whose experts lie on several ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from helpers.checkpoints import remove_manifests
from helpers.damaged_checkpoints import flip
from helpers.distributed import run
from helpers.experts import Mixtral, autoep, global_name, spread_model
from helpers.models import train_engine
from helpers.oracles import change_error
from helpers.training import ds_config, fp32_weights, make_engine, train_around_a_checkpoint, with_params
from helpers.universal import convert


def build(kind: str, stage: int, ep: int = 2, seed: int = 0, **config: Any) -> Any:
    """An engine, of DeepSpeed's MoE layers or with AutoEP."""
    if kind == "moe":
        return make_engine(spread_model(seed=seed), ds_config(stage=stage, **config))
    return make_engine(Mixtral(seed=seed), autoep(stage, ep, **config))


def contents(engine: Any) -> dict[str, Tensor]:
    """Weights and momenta by name, those of experts of this rank under their global names."""
    from deepspeed.utils import safe_get_full_optimizer_state

    found = fp32_weights(engine)
    for param, spec in engine.basic_optimizer.specs.items():
        if spec.use_muon:
            found[f"{spec.name} momentum"] = safe_get_full_optimizer_state(param, "momentum_buffer").clone()
    moments = engine.basic_optimizer.second_moments.by_name
    found |= {f"{name} second moment": moment.clone() for name, moment in moments.items()}
    return {global_name(name, dist.get_rank()): value for name, value in found.items()}


def go_on(kind: str, stage: int, folder: str, load: bool, **params: Any) -> dict[str, Tensor]:
    """Three steps, saved after the first or loaded from there."""
    engine = build(kind, stage, seed=int(load), optimizer=with_params(**params))
    train_around_a_checkpoint(engine, folder, load)
    found = contents(engine)
    engine.destroy()
    return found


@pytest.mark.parametrize(("kind", "stage"), [("moe", 2), pytest.param("autoep", 3, marks=pytest.mark.full)])
def test_weights_alone_of_a_checkpoint_without_manifest(kind: str, stage: int, tmp_path: Path) -> None:
    """As stock saves them, with any optimizer."""
    saved = run(save, 4, kind=kind, stage=stage, folder=str(tmp_path))
    remove_manifests(tmp_path / "saved")
    found = run(load, 4, kind=kind, stage=stage, folder=str(tmp_path), tag="saved", load_module_only=True)
    for before, after in zip(saved, found, strict=True):
        for name, weight in before["before"].items():
            assert torch.equal(after["before"][name], weight) is ("momentum" not in name), name


def load_damaged(folder: str) -> str | None:
    """What a load of a checkpoint says."""
    engine = build("moe", 2)
    try:
        engine.load_checkpoint(folder)
    except ValueError as error:
        return str(error)
    finally:
        engine.destroy()
    return None


def test_files_of_experts_are_in_the_manifests(tmp_path: Path) -> None:
    run(go_on, 4, kind="moe", stage=2, folder=str(tmp_path), load=False)
    tag = tmp_path / "global_step1"
    files = sorted(file.name for file in tag.glob("layer_0_expert_*"))
    listed = [name for file in tag.glob("muon_save.0*.json") for name in json.loads(file.read_text())["files"]]
    assert len(files) == 4 and set(files) < set(listed)
    flip(tag / files[1])
    for text in run(load_damaged, 4, folder=str(tmp_path)):
        assert text is not None and files[1] in text and "CRC-32" in text


# ---- AutoEP on other ranks ------------------------------------------------------------------------------------------


def save(stage: int, folder: str, ep: int = 2, kind: str = "autoep") -> dict[str, dict[str, Tensor]]:
    """Two steps and a checkpoint, then one more step."""
    engine = build(kind, stage, ep)
    train_engine(engine, 2)
    engine.save_checkpoint(folder, tag="saved")
    found = {"before": contents(engine)}
    train_engine(engine, 1, first_step=2)
    found["after"] = contents(engine)
    engine.destroy()
    return found


def load(
    stage: int, folder: str, ep: int = 2, kind: str = "autoep", tag: str = "universal", **options: Any
) -> dict[str, dict[str, Tensor]]:
    """What is loaded, and one step."""
    engine = build(kind, stage, ep, seed=7, checkpoint={"load_universal": tag == "universal"})
    engine.load_checkpoint(folder, tag=tag, **options)
    names = {group["name"] for group in engine.basic_optimizer.param_groups if group.get("moe")}
    assert names == {f"ep_size_{ep}"}
    found = {"before": contents(engine)}
    train_engine(engine, 1, first_step=2)
    found["after"] = contents(engine)
    engine.destroy()
    return found


def whole(results: list[dict[str, dict[str, Tensor]]], ep: int, key: str) -> dict[str, Tensor]:
    """All experts, from the ranks that have different ones."""
    first = results[0][key]
    return {
        name: torch.cat([result[key][name] for result in results[:ep]]) if ".experts." in name else value
        for name, value in first.items()
    }


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ({"stage": 2, "world": 4, "ep": 2}, {"stage": 3, "world": 2, "ep": 2}),
        ({"stage": 3, "world": 4, "ep": 2}, {"stage": 1, "world": 4, "ep": 4}),
    ],
    ids=str,
)
def test_a_run_goes_on_at_other_stages_ranks_and_sizes(
    saved: dict[str, int], loaded: dict[str, int], tmp_path: Path
) -> None:
    def job(fn: Any, world: int, **settings: int) -> list[dict[str, dict[str, Tensor]]]:
        return run(fn, world, folder=str(tmp_path), **settings)

    there = job(save, **saved)
    convert(tmp_path)
    here = job(load, **loaded)
    before, after = (whole(there, saved["ep"], key) for key in ("before", "after"))
    found, last = (whole(here, loaded["ep"], key) for key in ("before", "after"))
    assert before.keys() == found.keys()
    for name, value in before.items():
        assert torch.equal(found[name], value), name
        assert change_error(value, last[name], after[name]) <= 1e-3, name
