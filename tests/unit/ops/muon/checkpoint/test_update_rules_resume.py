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

from helpers.distributed import run
from helpers.engine_state import differing
from helpers.logs import logged
from helpers.models import MODELS, train_engine
from helpers.training import PARAMS, ds_config, fresh_engine, make_engine, with_params

OPTIMIZER = with_params(normuon=True)


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
