# SPDX-License-Identifier: Apache-2.0
"""A matrix whose whole gradient is zero in a step is left alone in it, in plain PyTorch and DDP; records count them.

Under ZeRO rows of the table of settings train the same model.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from deepspeed.muon import MuonWithAuxAdam
from helpers.distributed import run
from helpers.models import Absent, full_weights, make_batch, train_engine
from helpers.oracles import change_error
from helpers.parity import STEPS
from helpers.records import monitored, records
from helpers.settings import SETTINGS
from helpers.training import PARAMS, ds_config, make_engine


def train_with_ddp() -> dict[str, Tensor]:
    """Weights where some layers take part on one rank only."""
    net = Absent(micros=2)
    model = DistributedDataParallel(net, find_unused_parameters=True)
    optimizer = MuonWithAuxAdam(net.parameters(), model=net, muon_split=Absent.SPLIT, **PARAMS)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(*make_batch(net, step, 0, dist.get_rank(), 2)).backward()
        optimizer.step()
    return {name: param.detach() for name, param in net.named_parameters()}


def test_a_layer_takes_part_on_one_rank_of_ddp_only() -> None:
    """Its gradient is the mean of all ranks', zeros included."""
    setting = SETTINGS["matrices without gradient on a rank"]
    expected = setting.reference(setting.case(0) | {"clip": 0.0})
    first, second = run(train_with_ddp, 2)
    for name, weight in expected.weights.items():
        assert torch.equal(first[name], second[name])
        assert change_error(expected.initial[name], first[name], weight) <= 1e-3, name


@pytest.mark.parametrize(
    "params", [{}, {"momentum_dtype": "int8"}, {"momentum_dtype": "bf16"}, {"cautious_weight_decay": True}]
)
def test_plain_pytorch_treats_zeros_as_no_gradient(params: dict[str, Any]) -> None:
    """Nothing of a matrix that stands still changes, bit by bit."""

    def trained(zeros: bool) -> list[Tensor]:
        net = Absent()
        optimizer = MuonWithAuxAdam(net.parameters(), model=net, muon_split=Absent.SPLIT, **PARAMS | params)
        weights = {name: layer.weight for name, layer in net.layers.items()}
        for step in range(STEPS):
            optimizer.zero_grad()
            net(*net.batch(step)).backward()
            for param in net.parameters() if zeros else ():
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad
            before = {name: everything(optimizer, weight) for name, weight in weights.items() if step > 0}
            optimizer.step()
            if step == 3:
                after = {name: everything(optimizer, weight) for name, weight in weights.items()}
                assert {name for name in after if before[name].equal(after[name])} == {"unused", "gap", "frozen"}
                experts = [before["experts"].view(2, 3, -1)[0], after["experts"].view(2, 3, -1)[0]]
                assert [old.equal(new) for old, new in zip(*experts, strict=True)] == [False, True, False]
        return [everything(optimizer, weight) for weight in weights.values()]

    assert all(map(torch.equal, trained(False), trained(True)))


def everything(optimizer: MuonWithAuxAdam, weight: Tensor) -> Tensor:
    """A weight and its momentum, in one tensor."""
    return torch.cat([weight.detach().flatten(), optimizer.read_state(weight, "momentum_buffer").flatten()])


def write_records(folder: str) -> None:
    engine = make_engine(Absent(), monitored(folder, 1, {"muon_split": Absent.SPLIT}, stage=3))
    train_engine(engine, STEPS)
    engine.destroy()


def test_records_count_them(tmp_path: Path) -> None:
    run(write_records, 2, folder=str(tmp_path))
    found = [value for _, value in records(tmp_path)["matrices_without_gradient"]]
    assert found == [sum(step in steps for steps in Absent.ABSENT.values()) for step in range(STEPS)]


def stepped_by(call: str, stage: int) -> dict[str, Tensor]:
    """The weights after steps of the engine, or of the wrapper that it holds as ``engine.optimizer``."""
    engine = make_engine(
        net := Absent(),
        ds_config(stage=stage, optimizer={"type": "Muon", "params": PARAMS | {"muon_split": Absent.SPLIT}}),
    )
    for step in range(STEPS):
        engine.backward(engine(*make_batch(net, step, 0, dist.get_rank(), 2)))
        (engine if call == "engine" else engine.optimizer).step()
    weights = full_weights(engine.module)
    engine.destroy()
    return weights


@pytest.mark.sample(2)
@pytest.mark.parametrize("stage", [3, 1, 2])
def test_a_script_that_steps_the_wrapper_itself_gets_the_same_weights(stage: int) -> None:
    """Each step looks at its own gradients, whoever calls it."""
    ours, theirs = (run(stepped_by, 2, call=call, stage=stage)[0] for call in ("engine", "wrapper"))
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
