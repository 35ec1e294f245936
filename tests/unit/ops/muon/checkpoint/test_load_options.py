# SPDX-License-Identifier: Apache-2.0
"""Options of load_checkpoint: weights alone, an explicit tag, a function of the script's; damage seen by one rank."""

import pickle
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from deepspeed.muon.errors import CheckpointError
from deepspeed.muon.saved_state import settings_of
from deepspeed.muon.zero.checkpoint.safe_load import read_states
from deepspeed.muon.zero.checkpoint.save_load import _position
from helpers.distributed import run
from helpers.engine_state import differing, snapshot
from helpers.logs import logged
from helpers.models import MODELS, full_weights, initialize_, train_engine
from helpers.training import BF16_OPTIMIZER, ds_config, fresh_engine, make_engine, with_params
from helpers.universal import build, convert, facts

CASES: list[dict[str, Any]] = [
    {"stage": 0},
    {"stage": 0, "dtype": "bf16"},
    {"stage": 2},
    {"stage": 3},
    {"stage": 3, "dtype": "bf16"},
    BF16_OPTIMIZER,
]
ALONE: list[dict[str, bool]] = [{"load_module_only": True}, {"load_optimizer_states": False}]


def save_two(cases: list[dict[str, Any]], folder: str) -> list[dict[str, Tensor]]:
    """By case: the model's weights at the tag `one`; a later tag `two` is the latest."""
    results = []
    for index, case in enumerate(cases):
        engine = fresh_engine(0, case)
        train_engine(engine, 2)
        engine.save_checkpoint(f"{folder}/{index}", tag="one")
        results.append(full_weights(engine.module))
        train_engine(engine, 2, first_step=2)
        engine.save_checkpoint(f"{folder}/{index}", tag="two")
        engine.destroy()
    return results


def load_weights(cases: list[dict[str, Any]], folder: str) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """By case and way to ask for weights alone: the model's weights loaded from `one`, and after a step from there."""
    results = []
    for index, case in enumerate(cases):
        for options in ALONE:
            engine = fresh_engine(7, case)
            assert engine.load_checkpoint(f"{folder}/{index}", tag="one", **options)[0] is not None
            loaded = full_weights(engine.module)
            train_engine(engine, 1, first_step=2)
            results.append((loaded, full_weights(engine.module)))
            engine.destroy()
    return results


@pytest.mark.full
def test_weights_alone_come_from_the_tag_and_stay(tmp_path: Path) -> None:
    """At stages 0 and 3 DeepSpeed alone loads nothing, the latest tag's, or what the next step undoes."""
    saved = run(save_two, 2, cases=CASES, folder=str(tmp_path))[0]
    found = iter(run(load_weights, 2, cases=CASES, folder=str(tmp_path))[0])
    for case, wanted in zip(CASES, saved, strict=True):
        for options in ALONE:
            loaded, stepped = next(found)
            assert differing(loaded, wanted) == [], (case, options)
            moved = sum((stepped[name] - wanted[name]).float().norm() ** 2 for name in wanted) ** 0.5
            assert 0 < moved < 0.5, (case, options)


FLAGS: list[dict[str, bool]] = [
    {"load_module_only": True},
    {"load_module_only": True, "load_optimizer_states": False},
    {"load_optimizer_states": False},
    {"load_lr_scheduler_states": False},
    {"load_optimizer_states": False, "load_lr_scheduler_states": False},
    {"load_module_strict": False},
    {},
]


def load_by_flags(cases: list[dict[str, Any]], folder: str) -> list[str | list[str]]:
    """By case and flags: the error, or the names of weights that are not those of the tag `one`."""
    results: list[str | list[str]] = []
    wanted = torch.load(f"{folder}/weights.pt")
    for index, case in enumerate(cases):
        for flags in FLAGS:
            engine = fresh_engine(7, case)
            try:
                engine.load_checkpoint(f"{folder}/{index}", tag="one", **flags)
                results.append(differing(full_weights(engine.module), wanted[index]))
            except CheckpointError as error:
                results.append(str(error))
            engine.destroy()
    return results


@pytest.mark.sample(1)
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("case", [CASES[3], CASES[0], CASES[2], CASES[4], CASES[5], CASES[1]], ids=str)
def test_every_flag_on_other_numbers_of_ranks(case: dict[str, Any], ranks: int, tmp_path: Path) -> None:
    """Weights alone load wherever DeepSpeed can find them; the rest is refused on all ranks alike."""
    torch.save(run(save_two, 2, cases=[case], folder=str(tmp_path))[0], tmp_path / "weights.pt")
    first, *others = run(load_by_flags, ranks, cases=[case], folder=str(tmp_path))
    assert all(other == first for other in others)
    for flags, found in zip(FLAGS, first, strict=True):
        weights_alone = flags.get("load_module_only") or not flags.get("load_optimizer_states", True)
        if case["stage"] == 0 or (weights_alone and (case["stage"] < 3 or ranks == 1)):
            assert found == [], flags
        else:
            assert isinstance(found, str) and "saved on 2 ranks" in found, flags


def load_with_function(folder: str) -> bool:
    """Whether the script's own function gets a checkpoint of another shape."""
    engine = fresh_engine(7, {"stage": 2})
    engine.module.layers[0].weight.data = torch.zeros(1, 1)
    called = []
    engine.load_checkpoint(
        folder, tag="one", load_module_only=True, custom_load_fn=lambda src, dst: called.append(len(src))
    )
    engine.destroy()
    return bool(called)


def load_tag(folder: str) -> int:
    engine = fresh_engine(7, {"stage": 2})
    engine.load_checkpoint(folder, tag="one")
    steps = engine.global_steps
    engine.destroy()
    return steps


def test_a_tag_needs_no_latest_and_a_function_may_change_shapes(tmp_path: Path) -> None:
    run(save_two, 2, cases=[{"stage": 2}], folder=str(tmp_path))
    assert run(load_with_function, 2, folder=str(tmp_path / "0")) == [True, True]
    (tmp_path / "0" / "latest").write_text("")
    assert run(load_tag, 2, folder=str(tmp_path / "0")) == [2, 2]


# ---- without a manifest, in another order; with other settings ------------------------------------------------


def ordered_engine(case: dict[str, Any], is_reversed: bool) -> Any:
    """An engine whose parameters come in two groups, in the model's order or in reverse."""
    net = MODELS["mlp"]()
    initialize_(net, 0)
    params = list(net.parameters())
    params = params[::-1] if is_reversed else params
    return make_engine(net, ds_config(**case), model_parameters=params)


def load_in_another_order(cases: list[dict[str, Any]], folder: str) -> list[list[str]]:
    """By case: the error of a load in reverse order, and what it has changed."""
    results = []
    for index, case in enumerate(cases):
        engine = ordered_engine(case, is_reversed=False)
        train_engine(engine, 1)
        engine.save_checkpoint(f"{folder}/{index}", tag="one")
        engine.destroy()
        for file in Path(folder, str(index), "one").glob("muon_save*.json"):
            file.unlink(missing_ok=True)
        engine = ordered_engine(case, is_reversed=True)
        before = snapshot(engine)
        with pytest.raises(CheckpointError) as error:
            engine.load_checkpoint(f"{folder}/{index}", tag="one")
        results.append([str(error.value), *differing(before, snapshot(engine))])
        engine.destroy()
        engine = ordered_engine(case, is_reversed=False)
        assert engine.load_checkpoint(f"{folder}/{index}", tag="one")[0] is not None
        engine.destroy()
    return results


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", [{"stage": 2}, *CASES, {"stage": 1}], ids=str)
def test_another_order_is_found_without_a_manifest(case: dict[str, Any], tmp_path: Path) -> None:
    for [[text, *changed]] in run(load_in_another_order, 2, cases=[case], folder=str(tmp_path)):
        assert "the order of the parameters differs" in text and changed == []


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


def refused(folder: str) -> tuple[str, list[str]]:
    """The error of a load, and what it has changed."""
    engine = build({"stage": 2}, 7, checkpoint={"load_universal": True})
    train_engine(engine, 1)
    before = snapshot(engine)
    with pytest.raises(ValueError) as error:
        engine.load_checkpoint(folder, tag="universal")
    result = str(error.value), differing(before, snapshot(engine))
    engine.destroy()
    return result


def save_one(folder: str) -> dict[str, Any]:
    engine = build({"stage": 2}, 0)
    train_engine(engine, 1)
    engine.basic_optimizer.param_groups[0]["lr"] = numpy.float64(0.01)
    engine.save_checkpoint(folder, tag="saved")
    result = facts(engine)
    engine.destroy()
    return result


def load_one(folder: str) -> dict[str, Any]:
    engine = build({"stage": 3}, 7, checkpoint={"load_universal": True})
    engine.load_checkpoint(folder, tag="universal", load_optimizer_states=False)
    engine.load_checkpoint(folder, tag="universal")
    result = facts(engine)
    engine.destroy()
    return result


@pytest.mark.parametrize("damage", ["cut", "longer", "gone"])
def test_a_damaged_universal_checkpoint_is_refused_on_all_ranks(damage: str, tmp_path: Path) -> None:
    run(save_one, 2, folder=str(tmp_path))
    convert(tmp_path)
    file = tmp_path / "universal" / "zero" / "layers.3.weight" / "exp_avg.pt"
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-200])
    elif damage == "longer":
        torch.save({"param": torch.zeros(1000)}, file)
    else:
        file.unlink()
    for text, changed in run(refused, 2, folder=str(tmp_path)):
        assert "layers.3.weight/exp_avg.pt" in text
        assert changed == []


def test_a_rate_of_numpys_and_a_folder_without_latest(tmp_path: Path) -> None:
    saved = run(save_one, 2, folder=str(tmp_path))[0]
    convert(tmp_path)
    (tmp_path / "latest").unlink()
    loaded = run(load_one, 2, folder=str(tmp_path))[0]
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
