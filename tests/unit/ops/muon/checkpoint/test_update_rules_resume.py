# SPDX-License-Identifier: Apache-2.0
"""What update rules keep from step to step is saved for any ranks, and resumed exactly.

NorMuon's second moments are with the owners of whole matrices.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import nvme, universal
from helpers.distributed import run
from helpers.engine_state import differing
from helpers.logs import logged
from helpers.models import MODELS, train_engine
from helpers.resume import RESUMED, resume_all, save_all
from helpers.tensor_parallel import go_on
from helpers.training import PARAMS, ds_config, fresh_engine, make_engine, with_params

OPTIMIZER = with_params(normuon=True)
#: No state of their own, but they count steps, beyond the one of the checkpoint.
SCHEDULES = with_params(momentum_start=0.5, momentum_warmup_steps=4, muon_weight_decay_steps=5, ns_normalization="aol")
BOTH = with_params(**OPTIMIZER["params"] | SCHEDULES["params"])


@pytest.mark.parametrize("optimizer", [OPTIMIZER, SCHEDULES], ids=["normuon", "schedules"])
@pytest.mark.parametrize("chosen", [slice(2, None, 5), pytest.param(slice(None), marks=pytest.mark.full)], ids=str)
def test_resume_is_exact(chosen: slice, optimizer: dict[str, Any], tmp_path: Path) -> None:
    """Stages 0 to 3, both precisions, offload, sub-groups, the round-robin order, BF16_Optimizer."""
    cases = [case | {"optimizer": optimizer} for case in RESUMED[chosen]]
    folders = [str(tmp_path / str(index)) for index in range(len(cases))]
    expected = run(save_all, 2, timeout=280, cases=cases, folders=folders)
    for rank, results in enumerate(run(resume_all, 2, timeout=280, cases=cases, folders=folders)):
        for case, wanted, got in zip(cases, expected[rank], results, strict=True):
            assert differing(wanted, got) == [], case


@pytest.mark.parametrize("optimizer", [OPTIMIZER, SCHEDULES], ids=["normuon", "schedules"])
@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.full)])
def test_universal_checkpoint(stage: int, optimizer: dict[str, Any], tmp_path: Path) -> None:
    """Saved on 2 ranks; on 1 to 3 ranks, and at another stage, the weights after further steps are the same.

    Unclipped, because DeepSpeed sums the norm in another order; then only the order of gradients differs.
    """
    case = {"stage": stage, "clip": 0.0, "optimizer": optimizer}
    saved = run(universal.save_all, 2, cases=[case], folder=str(tmp_path))[0][0]
    universal.convert(tmp_path / "0")
    for world, there in ((1, stage), (2, stage), (3, 5 - stage)):
        loaded = run(universal.load_all, world, jobs=[(str(tmp_path / "0"), case | {"stage": there})])[0][0]
        for name, wanted in saved["after"].items():
            torch.testing.assert_close(loaded["after"][name], wanted, rtol=1e-4, atol=1e-5, msg=f"{world} {name}")
    plain = run(universal.load_all, 2, jobs=[(str(tmp_path / "0"), case | {"optimizer": with_params()})])[0][0]
    assert any(not torch.allclose(plain["after"][n], w, rtol=1e-3) for n, w in saved["after"].items())


def owned(case: dict[str, Any], folder: str, load: bool) -> dict[str, Tensor]:
    """The second moments of this rank, saved after two steps or loaded."""
    engine = fresh_engine(7 if load else 0, case)
    if load:
        engine.load_checkpoint(folder)
    else:
        train_engine(engine, 2)
        engine.save_checkpoint(folder)
    moments = {name: moment.clone() for name, moment in engine.basic_optimizer.second_moments.by_name.items()}
    engine.destroy()
    return moments


@pytest.mark.full
def test_each_matrix_has_one_owner_who_keeps_its_second_moment(tmp_path: Path) -> None:
    case = {"stage": 3, "optimizer": OPTIMIZER}
    saved = run(owned, 3, case=case, folder=str(tmp_path), load=False)
    names = [name for name, param in MODELS["mlp"]().named_parameters() if param.ndim == 2]
    assert sorted(name for moments in saved for name in moments) == sorted(names)
    assert all(moment.all() for moments in saved for moment in moments.values())
    for before, after in zip(saved, run(owned, 3, case=case, folder=str(tmp_path), load=True), strict=True):
        assert differing(before, after) == []


@pytest.mark.full
@pytest.mark.time_limit(1200)
def test_resume_from_nvme_is_exact(tmp_path: Path) -> None:
    def train(load: bool) -> dict[str, Tensor]:
        return nvme.run(on_nvme, 2, folder=str(tmp_path), load=load)[0]

    assert differing(train(load=False), train(load=True)) == []


def on_nvme(folder: str, load: bool) -> dict[str, Tensor]:
    """Weights after two steps that were saved and two more, or loaded and two more."""
    engine = nvme.nvme_engine(7 * load, folder=f"{folder}/nvme{load:d}", optimizer=BOTH)
    if load:
        engine.load_checkpoint(f"{folder}/saved")
    else:
        train_engine(engine, 2)
        engine.save_checkpoint(f"{folder}/saved")
    train_engine(engine, 2, first_step=2)
    weights = nvme.weights_of(engine)
    engine.destroy()
    return weights


@pytest.mark.parametrize("params", [{}, {"tp_mode": "shard"}], ids=str)
def test_resume_under_tensor_parallelism_is_exact(params: dict[str, Any], tmp_path: Path) -> None:
    optimizer = with_params(normuon=True, **params)
    case = {"name": "llama", "tp": 2, "stage": 2, "folder": str(tmp_path), "optimizer": optimizer}
    expected = run(go_on, 2, load=False, **case)
    for wanted, got in zip(expected, run(go_on, 2, load=True, **case), strict=True):
        assert differing(wanted, got) == []


def warnings_of(saved: dict[str, Any], loaded: dict[str, Any], folder: str) -> list[str]:
    """What a load says of NorMuon."""
    engine = fresh_engine(0, {"stage": 2, "optimizer": saved})
    train_engine(engine, 1)
    engine.save_checkpoint(folder)
    engine.destroy()
    engine = fresh_engine(0, {"stage": 2, "optimizer": loaded})
    with logged() as said:
        engine.load_checkpoint(folder)
    train_engine(engine, 1, first_step=1)
    engine.destroy()
    return [text for text in said if "normuon" in text.lower()]


def test_a_checkpoint_of_another_rule_warns(tmp_path: Path) -> None:
    plain = with_params()
    assert run(warnings_of, 1, saved=plain, loaded=plain, folder=str(tmp_path / "a")) == [[]]
    assert run(warnings_of, 1, saved=OPTIMIZER, loaded=OPTIMIZER, folder=str(tmp_path / "b")) == [[]]
    ((text,),) = run(warnings_of, 1, saved=plain, loaded=OPTIMIZER, folder=str(tmp_path / "c"))
    assert "has no second moments for normuon; they start at zero" in text
    ((text,),) = run(warnings_of, 1, saved=OPTIMIZER, loaded=plain, folder=str(tmp_path / "d"))
    assert "was saved with normuon; this run's config does not set it" in text


def state_dict_alone(model: str, matrices: int) -> str:
    """What a state dict of one rank of several says."""
    engine = make_engine(MODELS[model](), ds_config(stage=2, optimizer=OPTIMIZER))
    train_engine(engine, 1)
    optimizer = engine.basic_optimizer
    with optimizer.whole_state():
        assert len(optimizer.state_dict()["param_groups"][0]["second_moments"]) == matrices
    try:
        optimizer.state_dict()
    except RuntimeError as error:
        return str(error)
    finally:
        engine.destroy()
    return ""


@pytest.mark.parametrize(("world", "model", "matrices"), [(2, "mlp", 5), (3, "few", 2)])
def test_a_part_of_the_state_is_no_state_dict(world: int, model: str, matrices: int) -> None:
    """Also on a rank that owns no matrix."""
    texts = run(state_dict_alone, world, model=model, matrices=matrices)
    assert all("second moments of" in text for text in texts)


def test_plain_pytorch_saves_and_loads() -> None:
    from deepspeed.muon import MuonWithAuxAdam

    def build() -> tuple[torch.nn.Module, MuonWithAuxAdam]:
        net = MODELS["mlp"]()
        return net, MuonWithAuxAdam(net.parameters(), model=net, normuon=True, **PARAMS)

    def train(net: torch.nn.Module, optimizer: MuonWithAuxAdam, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            net(*net.batch(step)).backward()  # type: ignore[operator]
            optimizer.step()

    net, optimizer = build()
    train(net, optimizer, range(2))
    weights, state = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    second, other = build()
    second.load_state_dict(weights)
    other.load_state_dict(state)
    for pair in ((net, optimizer), (second, other)):
        train(*pair, range(2, 4))
    assert differing(dict(net.named_parameters()), dict(second.named_parameters())) == []
