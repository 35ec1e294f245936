# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of engines that offload to NVMe: exact resume, what is refused, and other ways to load."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from helpers.checkpoints import remove_manifests
from helpers.engine_state import differing, named_states
from helpers.models import train_engine
from helpers.nvme import Wide, nvme_engine, run, weights_of
from helpers.training import MOMENTA, ds_config, make_engine
from helpers.universal import convert

pytestmark = pytest.mark.time_limit(1200)  # with the time that building async_io may take
FP16 = {"dtype": "fp16", "fp16": {"enabled": True, "initial_scale_power": 20, "hysteresis": 1}}
PLAIN: dict[str, Any] = {"stays": True}
PIPELINED: dict[str, Any] = {"pipelined": True, "params": "nvme", "dtype": "bf16"}
CASES: list[dict[str, Any]] = [PLAIN, PIPELINED, {"pipelined": True, "stays": True}, FP16]
CASES += [{"stays": True, "optimizer": MOMENTA["int8"]}, {"stays": True, "optimizer": MOMENTA["bf16"]}]


def everything(engine: Any) -> dict[str, Any]:
    """Weights and states by name; settings, step counts and the loss scale."""
    optimizer = engine.basic_optimizer
    flats = engine.optimizer.fp32_partitioned_groups_flat
    return {
        "tensors": weights_of(engine) | named_states(engine),
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
        "steps": [float(optimizer.state[flat]["step"]) for flat in flats],
        "scale": engine.optimizer.loss_scale,
        "global steps": (engine.global_steps, engine.skipped_steps),
    }


def assert_same(got: dict[str, Any], wanted: dict[str, Any], about: Any = "") -> None:
    assert differing(got.pop("tensors"), wanted["tensors"]) == [], about
    assert got == {key: value for key, value in wanted.items() if key != "tensors"}, about


def save_and_go_on(cases: list[dict[str, Any]], folder: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Two steps, another rate for AdamW, a checkpoint twice under one tag, two more steps; before and after these."""
    results = []
    for index, case in enumerate(cases):
        engine = nvme_engine(folder=f"{folder}/nvme{index}", **case)
        train_engine(engine, 1)
        engine.save_checkpoint(f"{folder}/{index}", tag="saved")
        engine.basic_optimizer.param_groups[1]["lr"] = 5e-4
        train_engine(engine, 1, first_step=1)
        engine.save_checkpoint(f"{folder}/{index}", tag="saved")
        saved = everything(engine)
        losses = train_engine(engine, 2, first_step=2)
        results.append((saved, everything(engine) | {"losses": losses}))
        engine.destroy()
    return results


def resume(cases: list[dict[str, Any]], folder: str, trained: int = 0) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """What :func:`save_and_go_on` gives, by engines that start from other weights and may have trained."""
    results = []
    for index, case in enumerate(cases):
        engine = nvme_engine(7, folder=f"{folder}/other{index}", **case)
        train_engine(engine, trained, first_step=9)
        assert engine.load_checkpoint(f"{folder}/{index}")[0] is not None
        loaded = everything(engine)
        losses = train_engine(engine, 2, first_step=2)
        results.append((loaded, everything(engine) | {"losses": losses}))
        engine.destroy()
    return results


@pytest.mark.parametrize("cases", [CASES[3:5], pytest.param(CASES, marks=pytest.mark.full)], ids=len)
def test_resume_in_a_fresh_process_is_exact(cases: list[dict[str, Any]], tmp_path: Path) -> None:
    expected = run(save_and_go_on, 2, cases=cases, folder=str(tmp_path))
    results = run(resume, 2, fresh=True, cases=cases, folder=str(tmp_path))
    for got, wanted in zip(results, expected, strict=True):
        for case, moments, expectations in zip(cases, got, wanted, strict=True):
            for moment, expectation in zip(moments, expectations, strict=True):
                assert_same(moment, expectation, case)
    of_fp16 = expected[0][cases.index(FP16)][0]
    assert of_fp16["global steps"][1] > 0, "no step was skipped by the loss scale"


#: Saved by, loaded by, steps of the loading engine before, whether swapped tensors lie in files apart.
CROSSED: list[tuple[dict[str, Any], dict[str, Any], int, bool]] = [
    ({}, {}, 1, False),
    ({"pipelined": True}, {"pipelined": True}, 1, False),
    ({}, {"device": "cpu"}, 0, False),
    ({"device": "cpu"}, {"pipelined": True}, 0, False),
    ({"stays": True}, {"pipelined": True}, 0, False),
    ({}, {"pipelined": True}, 0, True),
    ({}, {"device": "cpu"}, 0, True),
]


@pytest.mark.full
@pytest.mark.parametrize(("saver", "loader", "trained", "is_apart"), CROSSED, ids=str)
def test_checkpoints_cross_between_nvme_and_memory(
    saver: dict[str, Any], loader: dict[str, Any], trained: int, is_apart: bool, tmp_path: Path
) -> None:
    """The momentum may stay in memory in one of them only. Parameters are numbered per process, and files named after
    the numbers: in an engine that was built later and has trained they differ.
    """
    expected = run(save_and_go_on, 2, cases=[saver], folder=str(tmp_path))[0][0]
    if is_apart:
        keep_apart(tmp_path / "0" / "saved")
    got = run(resume, 2, cases=[loader], folder=str(tmp_path), trained=trained)[0][0]
    for moment, expectation in zip(got, expected, strict=True):
        assert_same(moment, expectation)


@pytest.mark.full
def test_a_momentum_from_nvme_goes_on_in_int8(tmp_path: Path) -> None:
    """In memory, where it is rounded to nearest; from files, or from the part of a checkpoint that stayed in memory."""
    saved, loaded = [{}, {"stays": True}], [{"device": "cpu", "optimizer": MOMENTA["int8"]}] * 2
    expected = run(save_and_go_on, 2, cases=saved, folder=str(tmp_path))[0]
    for case, (got, _), (wanted, _) in zip(
        saved, run(resume, 2, cases=loaded, folder=str(tmp_path))[0], expected, strict=True
    ):
        changed = differing(got["tensors"], wanted["tensors"])
        assert changed and all(name.endswith("momentum_buffer") for name in changed), case
        for value, found in ((wanted["tensors"][name], got["tensors"][name]) for name in changed):
            assert float((found - value).abs().max()) <= 0.501 / 127 * float(value.abs().max()), case
        assert got["steps"] == wanted["steps"]


def read_what_a_load_gave(folder: str) -> list[float]:
    """Sums of a tensor that the user saved beside the model, after another save of the same tag."""
    state = {"noise": torch.arange(300_000.0)}
    engine = nvme_engine(folder=f"{folder}/files")
    train_engine(engine, 1)
    engine.save_checkpoint(folder, "tag", client_state=state)
    _, client = engine.load_checkpoint(folder, "tag")
    engine.save_checkpoint(folder, "tag")
    result = [float(state["noise"].sum()), float(client["noise"].sum())]
    engine.destroy()
    return result


def test_a_client_state_outlives_its_file(tmp_path: Path) -> None:
    for given, found in run(read_what_a_load_gave, 1, folder=str(tmp_path)):
        assert given == found


# ---- a part of a checkpoint -------------------------------------------------------------------------------


def load_weights(folder: str, case: dict[str, Any], **options: Any) -> tuple[list[str], dict[str, Any], dict[str, Any]]:
    """What is not as it was in the optimizer; everything after loading; and after a step."""
    engine = nvme_engine(7, folder=f"{folder}/other", **case)
    train_engine(engine, 1, first_step=9)
    before = named_states(engine)
    engine.load_checkpoint(f"{folder}/0", **options)
    changed, loaded = differing(before, named_states(engine)), everything(engine)
    train_engine(engine, 1)
    result = changed, loaded, everything(engine)
    engine.destroy()
    return result


BF16, ON_CPU = {"dtype": "bf16"}, {"device": "cpu"}
#: saved by, loaded by, options
ALONE: list[tuple[dict[str, Any], dict[str, Any], dict[str, bool]]] = [
    (BF16 | {"pipelined": True}, BF16 | {"params": "nvme"}, {"load_optimizer_states": False}),
    ({}, ON_CPU, {"load_module_only": True}),
    (ON_CPU, {"pipelined": True}, {"load_optimizer_states": False, "load_module_only": True}),
]


@pytest.mark.full
@pytest.mark.parametrize(("saver", "loader", "options"), ALONE, ids=str)
def test_weights_alone(saver: dict[str, Any], loader: dict[str, Any], options: dict[str, bool], tmp_path: Path) -> None:
    """On NVMe exact also in bf16, as the fp32 weights come from the checkpoint."""
    saved = run(save_and_go_on, 2, cases=[saver], folder=str(tmp_path))[0][0][0]
    changed, loaded, after = run(load_weights, 2, folder=str(tmp_path), case=loader, **options)[0]
    weights = [name for name in saved["tensors"] if not name.endswith(("_buffer", "exp_avg", "exp_avg_sq"))]
    assert differing(*({n: side["tensors"][n] for n in weights} for side in (loaded, saved))) == []
    assert changed == [] and loaded["groups"][1]["lr"] == 1e-3
    assert loaded["global steps"][0] == (1 if "load_module_only" in options else 2)
    assert set(differing(loaded["tensors"], after["tensors"])) >= set(weights)


def load_universal(folder: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """A universal checkpoint loaded into an engine on NVMe, its weights alone first, and two more steps."""
    settings = {"pipelined": True, "checkpoint": {"load_universal": True}}
    engine = nvme_engine(7, folder=f"{folder}/other", **settings)
    engine.load_checkpoint(f"{folder}/0", tag="universal", load_optimizer_states=False)
    alone = weights_of(engine)
    engine.load_checkpoint(f"{folder}/0", tag="universal")
    loaded = everything(engine)
    losses = train_engine(engine, 2, first_step=2)
    result = alone, loaded, everything(engine) | {"losses": losses}
    engine.destroy()
    return result


def test_universal_checkpoint_into_nvme(tmp_path: Path) -> None:
    expected = run(save_and_go_on, 2, cases=[{"device": "cpu"}], folder=str(tmp_path))[0][0]
    convert(tmp_path / "0")
    alone, *moments = run(load_universal, 2, folder=str(tmp_path))[0]
    assert differing(alone, {name: expected[0]["tensors"][name] for name in alone}) == []
    for moment, expectation in zip(moments, expected, strict=True):
        assert_same(moment, expectation)


def set_and_go_on(case: dict[str, Any], folder: str) -> bool:
    """Set a momentum and a weight by name, then train and save; whether they were found as set."""
    from deepspeed.utils import (
        safe_get_full_fp32_param,
        safe_get_full_optimizer_state,
        safe_set_full_fp32_param,
        safe_set_full_optimizer_state,
    )

    engine = nvme_engine(0, folder=folder, **case)
    train_engine(engine, 1)
    found = []
    for param, spec in engine.basic_optimizer.specs.items():
        if not spec.use_muon:
            continue
        value = torch.randn(spec.shape, generator=torch.Generator().manual_seed(1))
        safe_set_full_fp32_param(param, value)
        safe_set_full_optimizer_state(param, value, "momentum_buffer")
        found += [safe_get_full_fp32_param(param).equal(value)]
        found += [safe_get_full_optimizer_state(param, "momentum_buffer").equal(value)]
    train_engine(engine, 2, first_step=1)
    engine.save_checkpoint(f"{folder}/set")
    engine.destroy()
    return all(found)


@pytest.mark.parametrize("case", [pytest.param({}, marks=pytest.mark.full), {"pipelined": True}], ids=str)
def test_states_set_by_name_reach_the_files(case: dict[str, Any], tmp_path: Path) -> None:
    assert run(set_and_go_on, 2, case=case, folder=str(tmp_path)) == [True, True]


# ---- refusals ---------------------------------------------------------------------------------------------


def refused(folder: str, **case: Any) -> tuple[str, list[str]]:
    """What loading says, and what it has changed."""
    engine = nvme_engine(7, folder=f"{folder}/other", **case)
    train_engine(engine, 1)
    before = everything(engine)
    with pytest.raises(ValueError) as error:
        engine.load_checkpoint(f"{folder}/0")
    after = everything(engine)
    changed = differing(before.pop("tensors"), after.pop("tensors")) + [k for k in before if before[k] != after[k]]
    dist.barrier()
    engine.destroy()
    return str(error.value), changed


def keep_apart(folder: Path) -> None:
    """Make a checkpoint what earlier versions saved: a file for each swapped tensor, and empty ones in their places."""
    for rank in (0, 1):
        (zero,) = folder.glob(f"*zero_pp_rank_{rank}_*optim_states.pt")
        content = torch.load(zero, weights_only=False)
        saved, apart = content["optimizer_state_dict"], folder / "offloaded_tensors" / f"rank{rank:02d}"
        apart.mkdir(parents=True)
        flats, states = saved["fp32_flat_groups"], saved["optimizer_state_dict"]["state"]
        muon = [
            i for group in saved["optimizer_state_dict"]["param_groups"] if group["use_muon"] for i in group["params"]
        ]
        for index, flat in enumerate(flats):
            if flat.nbytes < 2**20:
                continue
            (apart / f"{flat.ds_id}.tensor.swp").write_bytes(flat.detach().numpy().tobytes())
            flats[index] = torch.empty(0)
            flats[index].ds_id = flat.ds_id
            for key in ("exp_avg", "exp_avg_sq"):
                name = "momentum_buffer" if index in muon else key
                if index not in muon or key == "exp_avg":
                    path = apart / f"{name}-{flat.ds_id}.tensor.swp"
                    path.write_bytes(states[index][key].numpy().tobytes())
                states[index][key] = torch.empty(0)
        torch.save(content, zero)
    remove_manifests(folder)


@pytest.mark.full
def test_a_checkpoint_that_does_not_fit_is_refused_on_all_ranks(tmp_path: Path) -> None:
    """Also where it has tensors in files of their own."""
    run(save_and_go_on, 2, cases=[{"pipelined": True}], folder=str(tmp_path))
    saved = tmp_path / "0" / "saved"
    folder = saved / "offloaded_tensors" / "rank01"

    def said(world: int = 2, **case: Any) -> str:
        results = run(refused, world, folder=str(tmp_path), **case)
        assert all(changed == [] for _, changed in results)
        assert len({text for text, _ in results}) == 1
        return results[0][0]

    assert "divide the parameters differently" in said(sub_group=10**6)
    assert "saved on 2 ranks" in said(world=1)
    keep_apart(saved)
    assert len(list(folder.iterdir())) == 7
    assert "it was saved with 5 sub-groups on 2 ranks, and this run has 2 on 2" in said(sub_group=10**6)
    assert "saved on 2 ranks" in said(world=1)
    momentum = next(folder.glob("momentum_buffer*"))
    content = momentum.read_bytes()
    momentum.write_bytes(content[:-1])
    assert "rank 1: " in said() and "1048575 bytes, expected at least 1048576" in said(device="cpu")
    shutil.rmtree(folder)
    assert "which holds what offload_optimizer had on NVMe" in said()
    shutil.rmtree(folder.parent)
    assert "which holds what offload_optimizer had on NVMe" in said()


# ---- DeepSpeed's own tools ----------------------------------------------------------------------------------


def load_in_memory(folder: str) -> dict[str, Any]:
    """The weights and states that a universal checkpoint gives to an engine without NVMe, at another stage."""
    settings = {"checkpoint": {"load_universal": True}}
    engine = make_engine(Wide(7), ds_config(stage=2, **settings))
    engine.load_checkpoint(folder, tag="universal")
    found = weights_of(engine) | named_states(engine)
    engine.destroy()
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", [{"pipelined": True}, {"stays": True, "optimizer": MOMENTA["int8"]}], ids=str)
def test_the_converter_and_zero_to_fp32_read_what_was_on_nvme(case: dict[str, Any], tmp_path: Path) -> None:
    saved = run(save_and_go_on, 2, cases=[case], folder=str(tmp_path))[0][0][0]["tensors"]
    found = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "0"), tag="saved")
    assert differing(found, {name: saved[f"{name} master"] for name in found}) == []
    convert(tmp_path / "0")
    loaded = run(load_in_memory, 3, folder=str(tmp_path / "0"))[0]
    masters = {name: value for name, value in loaded.items() if not name.endswith("weight")}
    assert differing(masters, {name: saved[name] for name in masters}) == []
