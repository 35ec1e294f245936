# SPDX-License-Identifier: Apache-2.0
"""Options of load_checkpoint: weights alone, an explicit tag, a function of the script's; damage seen by one rank."""

import pickle
import re
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed.muon.math.momentum_storage import Blocks
from deepspeed.muon.saved_state import settings_of
from deepspeed.muon.seam import replaced
from deepspeed.muon.zero.checkpoint.safe_load import read_states
from deepspeed.muon.zero.checkpoint.save_load import _position
from helpers.checkpoints import error_of, remove_manifests
from helpers.damaged_checkpoints import attempt_all, save_alone, table, train_undisturbed
from helpers.distributed import run
from helpers.engine_state import differing, snapshot
from helpers.logs import logged
from helpers.models import MODELS, full_weights, initialize_, train_engine
from helpers.paths import ROOT
from helpers.training import BF16_OPTIMIZER, MOMENTA, ds_config, fresh_engine, make_engine, with_params
from helpers.universal import build, convert, facts

CASES: list[dict[str, Any]] = [
    {"stage": 0},
    {"stage": 0, "dtype": "bf16"},
    {"stage": 2},
    {"stage": 3},
    {"stage": 3, "dtype": "bf16"},
    BF16_OPTIMIZER,
]


def save_two(case: dict[str, Any], folder: str) -> dict[str, Tensor]:
    """The model's weights at the tag `one`; a later tag `two` is the latest."""
    engine = fresh_engine(0, case)
    train_engine(engine, 2)
    engine.save_checkpoint(folder, tag="one")
    weights = full_weights(engine.module)
    train_engine(engine, 2, first_step=2)
    engine.save_checkpoint(folder, tag="two")
    engine.destroy()
    return weights


FLAGS: list[dict[str, bool]] = [
    {"load_module_only": True},
    {"load_module_only": True, "load_optimizer_states": False},
    {"load_optimizer_states": False},
    {"load_lr_scheduler_states": False},
    {"load_optimizer_states": False, "load_lr_scheduler_states": False},
    {"load_module_strict": False},
    {},
]


def load_by_flags(case: dict[str, Any], folder: str) -> list[tuple[str, list[str], float]]:
    """By flags: the error, the names of weights that are not those of the tag `one`, how far a step from there goes."""
    results = []
    wanted = torch.load(f"{folder}/weights.pt")
    for flags in FLAGS:
        engine = fresh_engine(7, case)
        error, changed, moved = error_of(engine.load_checkpoint, folder, tag="one", **flags), [], 0.0
        if not error:
            changed = differing(full_weights(engine.module), wanted)
            train_engine(engine, 1, first_step=2)
            stepped = full_weights(engine.module)
            moved = sum(float((stepped[name] - wanted[name]).float().norm()) ** 2 for name in wanted) ** 0.5
        results.append((error, changed, moved))
        engine.destroy()
    return results


@pytest.mark.sample(2)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("case", [CASES[3], CASES[0], CASES[2], CASES[4], CASES[5], CASES[1]], ids=str)
def test_every_flag_on_other_numbers_of_ranks(case: dict[str, Any], ranks: int, tmp_path: Path) -> None:
    """Weights alone load wherever DeepSpeed can find them; the rest is refused on all ranks alike.

    At stages 0 and 3 DeepSpeed alone loads nothing, the latest tag's weights, or what the next step undoes.
    """
    torch.save(run(save_two, 2, case=case, folder=str(tmp_path))[0], tmp_path / "weights.pt")
    first, *others = run(load_by_flags, ranks, case=case, folder=str(tmp_path))
    assert all(other == first for other in others)
    for flags, (error, changed, moved) in zip(FLAGS, first, strict=True):
        weights_alone = flags.get("load_module_only") or not flags.get("load_optimizer_states", True)
        if case["stage"] == 0 or ranks == 2 or (weights_alone and (case["stage"] < 3 or ranks == 1)):
            assert (error, changed) == ("", []) and 0 < moved < 0.5, flags
        else:
            assert "saved on 2 ranks" in error, flags


def load_by_tag_and_function(folder: str) -> tuple[int, bool]:
    """Steps of the checkpoint that a tag names, and whether the script's function gets one of another shape."""
    engine = fresh_engine(7, {"stage": 2})
    engine.load_checkpoint(folder, tag="one")
    steps, called = engine.global_steps, []
    engine.module.layers[0].weight.data = torch.zeros(1, 1)
    engine.load_checkpoint(folder, tag="one", load_module_only=True, custom_load_fn=lambda src, dst: called.append(src))
    engine.destroy()
    return steps, bool(called)


def test_a_tag_needs_no_latest_and_a_function_may_change_shapes(tmp_path: Path) -> None:
    run(save_two, 2, case={"stage": 2}, folder=str(tmp_path))
    (tmp_path / "latest").write_text("")
    assert run(load_by_tag_and_function, 2, folder=str(tmp_path)) == [(2, True)] * 2


# ---- without a manifest, in another order; with other settings ------------------------------------------------


#: Saved as, loaded as.
UNVERIFIED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"stage": 0}, {"stage": 0}),
    ({"stage": 1}, {"stage": 2}),
    ({"stage": 3, "dtype": "bf16"}, {"stage": 3, "dtype": "bf16"}),
    (
        {"stage": 2, "dtype": "fp16", "fp16": {"enabled": True}},
        {"stage": 2, "dtype": "fp16", "fp16": {"enabled": True}},
    ),
    *((case, case) for case in (*CASES[1:4], CASES[5], {"stage": 1})),
]


def ordered_engine(case: dict[str, Any], seed: int, is_reversed: bool = False) -> Any:
    """An engine whose parameters come in the model's order or in reverse."""
    net = MODELS["mlp"]()
    initialize_(net, seed)
    params = list(net.parameters())
    return make_engine(net, ds_config(**case), model_parameters=params[::-1] if is_reversed else params)


def load_without_manifest(saved: dict[str, Any], loaded: dict[str, Any], folder: str) -> dict[str, Any]:
    """What a load in reverse order says and changes, and what one in the saved order does not restore and logs."""
    engine = ordered_engine(saved, 0)
    train_engine(engine, 2)
    engine.save_checkpoint(folder)
    expected = snapshot(engine)
    engine.destroy()
    dist.barrier()
    if dist.get_rank() == 0:
        remove_manifests(Path(folder))
    dist.barrier()
    engine = ordered_engine(loaded, 7, is_reversed=True)
    before = snapshot(engine)
    found: dict[str, Any] = {"error": error_of(engine.load_checkpoint, folder)}
    found["changed"] = differing(before, snapshot(engine))
    engine.destroy()
    engine = ordered_engine(loaded, 7)
    with logged() as said:
        engine.load_checkpoint(folder)
    found["said"] = [text for text in said if "manifest" in text]
    found["lost"] = differing(expected, snapshot(engine))
    engine.destroy()
    return found


@pytest.mark.sample(4)
@pytest.mark.parametrize(("saved", "loaded"), UNVERIFIED, ids=str)
def test_another_order_is_found_without_a_manifest(
    saved: dict[str, Any], loaded: dict[str, Any], tmp_path: Path
) -> None:
    """In the saved order it loads exactly, with a word that damage is not detected."""
    first, second = run(load_without_manifest, 2, saved=saved, loaded=loaded, folder=str(tmp_path))
    (line,) = first.pop("said")
    assert "damage is not detected" in line and second.pop("said") == []
    assert first == second and "the order of the parameters differs" in first["error"]
    assert first["changed"] == first["lost"] == []


def resume_with_other_rates(folder: str) -> str:
    """What is logged at a save with a frozen layer at stage 1, and at a load with other learning rates."""
    texts: list[str] = []
    for params in ({}, {"lr": 0.01, "adam_lr": 0.002, "weight_decay": 0.2, "momentum": 0.8}):
        net = MODELS["mlp"]()
        next(net.parameters()).requires_grad_(False)
        engine = make_engine(net, ds_config(stage=1, optimizer=with_params(**params)))
        with logged() as said:
            if params:
                engine.load_checkpoint(folder)
            else:
                train_engine(engine, 1)
                engine.save_checkpoint(folder)
        texts += said
        engine.destroy()
    return "\n".join(texts)


def test_what_a_load_keeps_and_what_a_tool_leaves_out_is_logged(tmp_path: Path) -> None:
    text = run(resume_with_other_rates, 2, folder=str(tmp_path))[0]
    assert "zero_to_fp32 leaves out frozen parameters, here 1" in text
    assert "0.02 instead of 0.01" in text and "0.001 instead of 0.002" in text
    for line in ("momentum = 0.9 from the checkpoint", "weight_decay = 0.1 from the checkpoint", "from the config"):
        assert line in text


# ---- a universal checkpoint, damaged for one rank ----------------------------------------------------------


def save_one(folder: str) -> dict[str, Any]:
    engine = build({"stage": 2}, 0)
    train_engine(engine, 1)
    engine.basic_optimizer.param_groups[0]["lr"] = numpy.float64(0.01)
    engine.save_checkpoint(folder, tag="saved")
    result = facts(engine)
    engine.destroy()
    return result


def damage_universal(file: Path, damage: str) -> None:
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-200])
    elif damage == "longer":
        torch.save({"param": torch.zeros(1000)}, file)
    else:
        file.unlink()


def load_damaged_and_whole(folder: str) -> tuple[list[str], list[str], dict[str, Any]]:
    """The errors of loads of damaged files, what they change, and what a load of the whole checkpoint gives."""
    file = Path(folder, "universal", "zero", "layers.3.weight", "exp_avg.pt")
    whole, errors, changed = file.read_bytes(), [], []
    engine = build({"stage": 3}, 7, checkpoint={"load_universal": True})
    train_engine(engine, 1)
    before = snapshot(engine)
    for damage in ("cut", "longer", "gone"):
        dist.barrier()
        if dist.get_rank() == 0:
            damage_universal(file, damage)
        dist.barrier()
        with pytest.raises(ValueError) as error:
            engine.load_checkpoint(folder, tag="universal")
        errors.append(str(error.value))
        changed += differing(before, snapshot(engine))
        dist.barrier()
        if dist.get_rank() == 0:
            file.write_bytes(whole)
    dist.barrier()
    engine.load_checkpoint(folder, tag="universal", load_optimizer_states=False)
    engine.load_checkpoint(folder, tag="universal")
    result = errors, changed, facts(engine)
    engine.destroy()
    return result


def test_a_damaged_universal_checkpoint_is_refused_on_all_ranks(tmp_path: Path) -> None:
    """Whole, it loads exactly: a rate of numpy's too, and without a file `latest`."""
    saved = run(save_one, 2, folder=str(tmp_path))[0]
    convert(tmp_path)
    (tmp_path / "latest").unlink()
    for errors, changed, loaded in run(load_damaged_and_whole, 2, folder=str(tmp_path)):
        assert all("layers.3.weight/exp_avg.pt" in text for text in errors) and changed == []
        assert differing(loaded["weights"], saved["weights"]) == []
        assert differing(loaded["states"], saved["states"]) == []
        assert loaded["settings"][0]["lr"] == 0.01


# ---- files and counts ---------------------------------------------------------------------------------------


class Pickled:
    """What some versions of Python write for a member of an enumeration: getattr of its class."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name

    def __reduce__(self) -> tuple:
        return getattr, (self.owner, self.name)


def test_members_of_enumerations_and_nothing_else_of_classes(tmp_path: Path) -> None:
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    torch.save({"stage": Pickled(ZeroStageEnum, "weights")}, tmp_path / "good.pt")
    assert read_states(tmp_path / "good.pt") == {"stage": ZeroStageEnum.weights}
    torch.save({"stage": Pickled(fragment_address, "__init__")}, tmp_path / "bad.pt")
    with pytest.raises(pickle.UnpicklingError):
        read_states(tmp_path / "bad.pt")


def positions() -> list[int]:
    """Within a step of 4 micro-batches; where the script names the boundary, as accelerate does."""
    engine = fresh_engine(0, {"stage": 2, "accumulation": 4})
    engine.micro_steps = 6
    found = [_position(engine)]
    engine.set_gradient_accumulation_boundary(True)
    found.append(_position(engine))
    engine.destroy()
    return found


def test_who_names_the_boundary_is_not_in_the_midst_of_a_step() -> None:
    assert run(positions, 1) == [[2, 0]]


def test_the_ratio_to_the_schedule_is_that_of_the_config() -> None:
    """A schedule is built from the config too; what a group had reached, and its settings, go on."""
    here = {"name": "muon", "lr": 0.1, "lr_ratio": 0.5, "momentum": 0.9, "params": [1]}
    saved = {"name": "other", "lr": 0.2, "lr_ratio": 0.25, "momentum": 0.8, "params": [0], "matrices": ["a"]}
    assert settings_of(here, saved) == {"name": "muon", "lr": 0.2, "lr_ratio": 0.5, "momentum": 0.8}


# ---- loads map files, read the model's file once, and keep nothing in a mapped file ------------------------------

MAPPED: list[dict[str, Any]] = [
    {"stage": 1},
    {"stage": 2, "dtype": "bf16"},
    {"stage": 2, "offload": True},
    {"stage": 3},
    BF16_OPTIMIZER,
    *({"stage": stage, "optimizer": MOMENTA["int8"]} for stage in (2, 3)),
]


def mapped_file(tensor: Tensor) -> str:
    """Return the name of the checkpoint file that a tensor's memory maps, or nothing."""
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, name = line.split()
        start, end = (int(bound, 16) for bound in span.split("-"))
        if address and start <= address < end:
            return Path(name).name if name.endswith(".pt") else ""
    return ""


def load_each(cases: list[dict[str, Any]], folder: str) -> list[dict[str, Any]]:
    """Return what each load read, which files it rounded an int8 momentum from, and those that state lies in."""
    found = []
    for index, case in enumerate(cases):
        engine = fresh_engine(0, case)
        train_engine(engine, 1)
        engine.save_checkpoint(f"{folder}/{index}")
        read, rounded = [], []

        def load(original: Any, file: Any, *args: Any, read: list = read, **options: Any) -> Any:
            if not options.get("mmap"):
                read.append(Path(file).name)
            return original(file, *args, **options)

        def write(original: Any, *args: Any, rounded: list = rounded) -> None:
            rounded.append(mapped_file(args[-1]))
            original(*args)

        with replaced(torch, load=load), replaced(Blocks, write=write):
            engine.load_checkpoint(f"{folder}/{index}")
        optimizer = engine.basic_optimizer
        tensors = [tensor for partition in optimizer.all_partitions for tensor in partition.tensors]
        tensors += [value for state in optimizer.state.values() for value in state.values()]
        kept = {name for tensor in tensors if (name := mapped_file(tensor))}
        found.append({"read": read, "rounded": rounded, "kept": kept, "tensors": len(tensors)})
        engine.destroy()
    return found


def test_loads_map_and_keep_nothing_mapped(tmp_path: Path) -> None:
    for found in run(load_each, 2, cases=MAPPED, folder=str(tmp_path)):
        for case, of in zip(MAPPED, found, strict=True):
            assert len(of["read"]) == 1 and of["read"][0].endswith("model_states.pt"), (case, of)
            assert of["kept"] == set() and of["tensors"] > 4, (case, of)
            assert bool(of["rounded"]) == ("optimizer" in case), case
            assert all(name.endswith("optim_states.pt") for name in of["rounded"]), (case, of)


# ---- damage ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [3, *(pytest.param(stage, marks=pytest.mark.full) for stage in (1, 2))])
def test_damaged_checkpoints(stage: int, tmp_path: Path) -> None:
    run(save_alone, 1, stage=stage, folder=str(tmp_path))
    ranks = run(attempt_all, 2, timeout=240, stage=stage, folder=str(tmp_path))
    assert [one[:2] for one in ranks[0]] == [one[:2] for one in ranks[1]], "the ranks raise different errors"
    assert len(ranks[0]) >= 25
    for title, message, *_ in ranks[0]:
        start = r"CheckpointError: the checkpoint checkpoints(/two|/three)? cannot be loaded, and nothing was changed: "
        assert re.match(start, message), (title, message)
        assert len(message) < 700, (title, message)
    undisturbed = run(train_undisturbed, 2, stage=stage, steps=len(ranks[0]))
    for results, losses in zip(ranks, undisturbed, strict=True):
        assert [(title, changed) for title, _, changed, _ in results if changed] == []
        assert [loss for *_, loss in results] == losses
    if stage == 2:
        page = (ROOT / "docs" / "evidence" / "damaged-checkpoints.md").read_text()
        assert table(ranks[0]) in page, "run python docs/generate.py"
