# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of engines that offload to NVMe, loaded by others: in memory, in part, or not at all.

The table of settings has exact resume, universal checkpoints and zero_to_fp32.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers.contracts import end_of
from helpers.engine_state import differing, named_states
from helpers.models import train_engine
from helpers.nvme import nvme_engine, run, weights_of
from helpers.settings import SETTINGS
from helpers.training import MOMENTA
from helpers.universal import convert

pytestmark = pytest.mark.time_limit(1200)  # with the time that building async_io may take
PIPELINED, ON_CPU, BF16 = {"pipelined": True}, {"device": "cpu"}, {"dtype": "bf16"}


#: Cases of the table's row, saved by and loaded by.
CROSSED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, ON_CPU),
    (ON_CPU, PIPELINED),
    ({"stays": True, "pipelined": False}, PIPELINED),
]


@pytest.mark.full
@pytest.mark.parametrize(("saver", "loader"), CROSSED, ids=str)
def test_checkpoints_cross_between_nvme_and_memory(
    saver: dict[str, Any], loader: dict[str, Any], tmp_path: Path
) -> None:
    """The momentum may stay in memory in one of them only."""
    cases = SETTINGS["NVMe"].cases
    job = {"name": "NVMe", "folder": str(tmp_path)}
    expected = run(end_of, 2, index=cases.index(saver), loads=False, **job)
    for wanted, got in zip(expected, run(end_of, 2, index=cases.index(loader), loads=True, **job), strict=True):
        assert differing(wanted, got) == []


def everything(engine: Any) -> dict[str, Any]:
    """Weights and states by name, settings of the groups and step counts."""
    optimizer = engine.basic_optimizer
    return {
        "weights": weights_of(engine),
        "states": named_states(engine),
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
        "steps": [float(optimizer.state[flat]["step"]) for flat in engine.optimizer.fp32_partitioned_groups_flat],
        "global steps": (engine.global_steps, engine.skipped_steps),
    }


def save(folder: str, case: dict[str, Any]) -> dict[str, Any]:
    """Everything when a checkpoint is saved for the second time under one tag."""
    engine = nvme_engine(folder=f"{folder}/nvme", **case)
    for step in range(2):
        train_engine(engine, 1, first_step=step)
        engine.save_checkpoint(folder, tag="saved")
    saved = everything(engine)
    engine.destroy()
    return saved


def load(folder: str, case: dict[str, Any], tag: str = "saved", **options: bool) -> tuple[Any, Any, Any]:
    """Everything before a load, after it, and after a step."""
    extra = {"checkpoint": {"load_universal": True}} if tag == "universal" else {}
    engine = nvme_engine(7, folder=f"{folder}/other", **case, **extra)
    train_engine(engine, 1, first_step=9)
    before = everything(engine)
    engine.load_checkpoint(folder, tag=tag, **options)
    loaded = everything(engine)
    train_engine(engine, 1)
    stepped = everything(engine)
    engine.destroy()
    return before, loaded, stepped


@pytest.mark.full
def test_a_momentum_from_nvme_goes_on_in_int8(tmp_path: Path) -> None:
    """In memory, where it is rounded to nearest; from files, or from the part of a checkpoint that stayed in memory."""
    for name, case in {"files": {}, "memory": {"stays": True}}.items():
        wanted = run(save, 2, folder=str(tmp_path / name), case=case)[0]
        loader = ON_CPU | {"optimizer": MOMENTA["int8"]}
        _, got, _ = run(load, 2, folder=str(tmp_path / name), case=loader)[0]
        changed = differing(got["states"], wanted["states"])
        assert changed and all(key.endswith("momentum_buffer") for key in changed), case
        for value, found in ((wanted["states"][key], got["states"][key]) for key in changed):
            assert float((found - value).abs().max()) <= 0.501 / 127 * float(value.abs().max()), case
        assert differing(got["weights"], wanted["weights"]) == [] and got["steps"] == wanted["steps"]


#: saved by, loaded by, options
ALONE: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    (BF16 | PIPELINED, BF16 | {"params": "nvme"}, {"load_optimizer_states": False}),
    ({}, ON_CPU, {"load_module_only": True}),
    (ON_CPU, PIPELINED, {"load_optimizer_states": False, "load_module_only": True}),
    (ON_CPU, PIPELINED, {"load_optimizer_states": False, "tag": "universal"}),
]


@pytest.mark.full
@pytest.mark.parametrize(("saver", "loader", "options"), ALONE, ids=str)
def test_weights_alone(saver: dict[str, Any], loader: dict[str, Any], options: dict[str, Any], tmp_path: Path) -> None:
    """On NVMe exact also in bf16, as the fp32 weights come from the checkpoint."""
    saved = run(save, 2, folder=str(tmp_path), case=saver)[0]
    if "tag" in options:
        convert(tmp_path)
    before, loaded, stepped = run(load, 2, folder=str(tmp_path), case=loader, **options)[0]
    assert differing(loaded["weights"], saved["weights"]) == differing(loaded["states"], before["states"]) == []
    assert loaded["groups"] == before["groups"]
    assert loaded["global steps"][0] == (1 if "load_module_only" in options else 2)
    assert set(differing(loaded["weights"], stepped["weights"])) == set(loaded["weights"])


def load_and_save_again(folder: str) -> bool:
    """Whether a tensor that the user saved beside the model is the same after another save of the tag."""
    noise = torch.arange(300_000.0)
    engine = nvme_engine(folder=f"{folder}/files")
    train_engine(engine, 1)
    engine.save_checkpoint(folder, "tag", client_state={"noise": noise})
    _, client = engine.load_checkpoint(folder, "tag")
    engine.save_checkpoint(folder, "tag")
    engine.destroy()
    return client["noise"].equal(noise)


def test_a_client_state_outlives_its_file(tmp_path: Path) -> None:
    assert run(load_and_save_again, 1, folder=str(tmp_path)) == [True]


def set_and_go_on(case: dict[str, Any], folder: str) -> list[str]:
    """Set matrices and momenta by name, then train and save; what was not found as set."""
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

    engine = nvme_engine(folder=folder, **case)
    train_engine(engine, 1)
    wanted = {}
    for param, spec in engine.basic_optimizer.specs.items():
        if spec.use_muon:
            value = torch.randn(spec.shape, generator=torch.Generator().manual_seed(1))
            safe_set_full_fp32_param(param, value)
            safe_set_full_optimizer_state(param, value, "momentum_buffer")
            wanted |= {f"{spec.name} master": value, f"{spec.name}.momentum_buffer": value}
    found = weights_of(engine) | named_states(engine)
    train_engine(engine, 2, first_step=1)
    engine.save_checkpoint(f"{folder}/set")
    engine.destroy()
    return differing(wanted, {name: found[name] for name in wanted})


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", [PIPELINED, {}], ids=str)
def test_states_set_by_name_reach_the_files(case: dict[str, Any], tmp_path: Path) -> None:
    assert run(set_and_go_on, 2, case=case, folder=str(tmp_path)) == [[], []]


# ---- refusals -------------------------------------------------------------------------------------------------


def refused(folder: str, **case: Any) -> tuple[str, list[str]]:
    """What loading says, and what it has changed."""
    engine = nvme_engine(7, folder=f"{folder}/other", **case)
    train_engine(engine, 1)
    before = everything(engine)
    with pytest.raises(ValueError) as error:
        engine.load_checkpoint(folder)
    after = everything(engine)
    changed = [name for key in ("weights", "states") for name in differing(before.pop(key), after.pop(key))]
    dist.barrier()
    engine.destroy()
    return str(error.value), changed + [key for key in before if before[key] != after[key]]


@pytest.mark.full
def test_a_checkpoint_that_does_not_fit_is_refused_on_all_ranks(tmp_path: Path) -> None:
    run(save, 2, folder=str(tmp_path), case=PIPELINED)

    def said(world: int = 2, **case: Any) -> str:
        results = run(refused, world, folder=str(tmp_path), **case)
        assert all(changed == [] for _, changed in results)
        assert len({text for text, _ in results}) == 1
        return results[0][0]

    assert "divide the parameters differently" in said(sub_group=10**6)
    assert "saved on 2 ranks" in said(world=1)
