# SPDX-License-Identifier: Apache-2.0
"""What an optimizer may be given as parameters: what AdamW takes trains, what it refuses is refused in its words."""

import copy
import pickle
import re
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed.muon import MuonWithAuxAdam, UnsupportedError
from helpers.distributed import run
from helpers.logs import logged
from helpers.models import MODELS, Mlp, full_weights, train_engine
from helpers.training import PARAMS, ds_config, fp32_weights, make_engine

Form = Callable[[Any], Any]
FORMS: dict[str, Form] = {
    "generator": lambda net: net.parameters(),
    "named": lambda net: net.named_parameters(),
    "group of names": lambda net: [{"params": list(net.named_parameters())}],
    "empty group": lambda net: [{"params": []}, {"params": net.parameters()}],
    "one frozen": lambda net: [net.layers[0].requires_grad_(False).weight, *net.layers[1].parameters()],
    "vectors alone": lambda net: [param for param in net.parameters() if param.ndim == 1],
}
REFUSED: dict[str, Form] = {
    "group of a set": lambda net: [{"params": set(net.parameters())}],
    "a dict": lambda net: {"params": list(net.parameters())},
    "None": lambda net: [None],
    "some names": lambda net: [("a", net.layers[0].weight), net.layers[0].bias],
    "group, then a tensor": lambda net: [{"params": [net.layers[0].weight]}, net.layers[0].bias],
    "in two groups": lambda net: [{"params": net.parameters()}, {"params": [net.layers[0].bias]}],
    "nothing": lambda net: [],
    "no parameters": lambda net: [{"lr": 0.1}],
}
SET = "optimizer parameters need to be organized in ordered collections"


def stepped(build: Callable[[Any], torch.optim.Optimizer]) -> dict[str, bool] | tuple[type, str]:
    """Which parameters a step moves, or the error of the construction."""
    net = Mlp()
    before = copy.deepcopy(net.state_dict())
    try:
        optimizer = build(net)
    except Exception as error:
        return type(error), str(error)
    net(*net.batch(0)).backward()
    optimizer.step()
    return {name: not torch.equal(before[name], value) for name, value in net.state_dict().items()}


@pytest.mark.parametrize("form", [*FORMS, *REFUSED])
def test_parameters_are_taken_or_refused_as_by_adamw(form: str) -> None:
    given = (FORMS | REFUSED)[form]
    expected = stepped(lambda net: torch.optim.AdamW(given(net)))
    assert stepped(lambda net: MuonWithAuxAdam(given(net), model=net)) == expected
    assert isinstance(expected, tuple) == (form in REFUSED)


@pytest.mark.parametrize("kind", [set, frozenset])
def test_a_set_is_refused_wherever_it_stands(kind: Callable[[Iterable[Tensor]], Any]) -> None:
    """Torch takes a set as all parameters, and a frozen one in a group; their order is another on each rank."""
    for given in (lambda net: kind(net.parameters()), lambda net: [{"params": kind(net.parameters())}]):
        error, text = stepped(lambda net, given=given: MuonWithAuxAdam(given(net), model=net))
        assert error is TypeError and text.startswith(SET)


def test_a_parameter_twice_is_told_as_by_torch_and_groups_are_not_written_to() -> None:
    net = Mlp()
    group = {"params": [net.layers[0].weight, *net.parameters()], "lr": 0.1}
    with pytest.warns(UserWarning, match="duplicate parameters"):
        MuonWithAuxAdam([group], model=net)
    assert group.keys() == {"params", "lr"}


# ---- on all ranks ---------------------------------------------------------------------------------------------

PARTS: dict[str, Form] = {"biases": FORMS["vectors alone"], "one matrix": lambda net: [net.layers[1].weight]}


def train_part(part: str, stage: int, freeze: bool) -> tuple[list[str], list[str], int, list[str]]:
    """Names of what was given and of what two steps moved, how many matrices go to Muon, the lines of log about it."""
    net = MODELS["mlp"]()
    given = PARTS[part](net)
    chosen = {id(param) for param in given}
    names = [name for name, param in net.named_parameters() if id(param) in chosen]
    for param in net.parameters() if freeze else ():
        param.requires_grad_(id(param) in chosen)
    before = {name: param.detach().clone() for name, param in net.named_parameters()}
    with logged() as lines:
        engine = make_engine(net, ds_config(stage=stage), model_parameters=given)
    matrices = sum(len(spec.blocks) for spec in engine.basic_optimizer.specs.values() if spec.use_muon)
    train_engine(engine, 2)
    moved = [name for name, value in fp32_weights(engine).items() if not torch.equal(before[name], value)]
    engine.destroy()
    return names, sorted(moved), matrices, [line for line in lines if "AdamW updates " in line]


@pytest.mark.sample(4)
@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize(("part", "count"), [("biases", 0), ("one matrix", 1)])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_part_of_the_model_trains(stage: int, part: str, count: int, freeze: bool) -> None:
    """Without a matrix AdamW trains it, and one line says so; the matrices that are counted are those trained."""
    ranks = run(train_part, 2, part=part, stage=stage, freeze=freeze)
    assert all(moved == sorted(names) and matrices == count for names, moved, matrices, _ in ranks)
    (line,), others = ranks[0][3], ranks[1][3]
    assert not others
    nothing = "AdamW updates all parameters; no matrix goes to Muon: 0-D or 1-D"
    assert ("Muon updates 1 matrices" if count else nothing) in line


def train_thawed(stage: int) -> tuple[list[str], list[str]]:
    """Thaw a matrix after the first of four steps; return what moved afterwards and the warnings about it."""
    net = MODELS["mlp"]()
    net.layers[0].requires_grad_(False)
    engine = make_engine(net, ds_config(stage=stage), model_parameters=net.parameters())
    with logged() as lines:
        train_engine(engine, 1)
        before = full_weights(net)
        net.layers[0].weight.requires_grad_(True)
        train_engine(engine, 3, first_step=1)
    moved = [name for name, value in full_weights(net).items() if not torch.equal(before[name], value)]
    engine.destroy()
    return moved, [line for line in lines if "are trainable now" in line]


@pytest.mark.sample(1)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_warning_names_a_parameter_that_is_thawed_too_late(stage: int) -> None:
    ranks = run(train_thawed, 2, stage=stage)
    assert all(moved and "layers.0.weight" not in moved for moved, _ in ranks)
    assert [len(lines) for _, lines in ranks] == [1, 0]
    assert "1 parameters (layers.0.weight) were frozen when the optimizer was built" in ranks[0][1][0]


# ---- numbers of other kinds ---------------------------------------------------------------------------------


class Complex(nn.Module):
    """A complex matrix behind a real one."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.real = nn.Linear(4, 4)
        self.mixed = nn.Linear(4, 4, bias=False)
        self.mixed.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64, generator=generator))

    def forward(self) -> Tensor:
        hidden = self.mixed(self.real(torch.ones(2, 4)).to(torch.complex64) * (1 + 2j))
        return (hidden - (3 - 1j)).abs().square().sum()


def test_a_complex_matrix_trains_as_with_adamw() -> None:
    """Newton-Schulz would read its real part alone."""
    torch.manual_seed(0)
    net = Complex()
    twin = copy.deepcopy(net)
    ours = MuonWithAuxAdam(
        net.parameters(), model=net, lr=0.01, muon_exclude="real", betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01
    )
    theirs = torch.optim.AdamW(twin.parameters(), lr=0.01)
    assert {spec.name: spec.reason for spec in ours.specs.values()}["mixed.weight"] == "numbers of torch.complex64"
    for model, optimizer in ((net, ours), (twin, theirs)):
        for _ in range(3):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
    assert torch.allclose(net.mixed.weight, twin.mixed.weight, rtol=1e-6)
    assert (net.mixed.weight - Complex().mixed.weight).imag.abs().min() > 1e-3
    net.mixed.weight.use_muon = True
    with pytest.raises(ValueError, match=re.escape("a parameter of shape [4, 4] and dtype torch.complex64")):
        MuonWithAuxAdam(net.parameters(), model=net)


def test_a_sparse_gradient_is_refused_as_by_adamw() -> None:
    net = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = MuonWithAuxAdam(net.parameters(), model=net)
    net(torch.tensor([0, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        optimizer.step()


# ---- copies ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [copy.deepcopy, copy.copy, pickle.dumps], ids=lambda make: make.__name__)
def test_a_copy_is_refused_in_words(make: Callable[[Any], Any]) -> None:
    net = Mlp()
    optimizer = MuonWithAuxAdam(net.parameters(), model=net, **PARAMS)
    with pytest.raises(UnsupportedError, match="build a new optimizer for the copied model"):
        make(optimizer)


def train_from(mode: Any) -> dict[str, Tensor]:
    net = MODELS["mlp"]()
    with mode():
        engine = make_engine(net, ds_config(stage=0))
    train_engine(engine, 2)
    return fp32_weights(engine)


def test_inference_mode_around_initialize_leaves_state_that_can_be_updated() -> None:
    """At stage 0; ZeRO's own tensors cannot be updated afterwards, whatever the optimizer."""
    inside, outside = (run(train_from, 1, mode=mode)[0] for mode in (torch.inference_mode, nullcontext))
    assert all(torch.equal(inside[name], outside[name]) for name in outside)
