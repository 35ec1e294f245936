# SPDX-License-Identifier: Apache-2.0
"""A matrix whose whole gradient is zero in a step is left alone in it: unused, frozen, absent layers and experts."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from deepspeed.muon import MuonWithAuxAdam
from helpers.distributed import run
from helpers.oracles import OracleConfig, change_error, muon_update
from helpers.records import records
from helpers.rules import normuon
from helpers.training import BF16_OPTIMIZER, ORACLE, PARAMS, ds_config, fp32_weights, make_engine

STEPS = 6
SIZES = {"always": (24, 40), "unused": (24, 40), "late": (40, 24), "gap": (36, 36), "frozen": (30, 20)}
PARTIAL = {"first": (20, 26), "last": (26, 20)}
"""In every other step these take part in all micro-batches but the last, or in the last alone."""
FUSED = {"qkv": (30, 24), "columns": (20, 33)}
SPLIT = {"qkv": [14, 10, 6], "columns": {"sizes": [13, 12, 8], "axis": 1}}
EXPERTS = 3
SHAPE = (28, 20)
"""Of an expert."""
SHAPES: dict[str, tuple[int, ...]] = SIZES | PARTIAL | FUSED | {"experts": (EXPERTS, *SHAPE)}
ABSENT = {
    "unused": set(range(STEPS)),
    "late": {0, 1},
    "gap": {2, 3},
    "frozen": set(range(2, STEPS)),
    "experts[560]": {1, 2, 3},
    "experts[1120]": {4},
    "qkv[336]": {1, 2},
    "columns[13]": {2},
    "separate1": {1, 2, 3},
    "separate2": {4},
}
"""The steps in which each matrix has no gradient; those of a stack or a fused weight by their first element's index."""


def parts_of(name: str) -> list[Tensor]:
    """Indices of the elements of each matrix of a parameter."""
    index = torch.arange(math.prod(SHAPES[name])).view(SHAPES[name])
    if name in FUSED:
        split = SPLIT[name]
        return list(index.split(split) if isinstance(split, list) else index.split(split["sizes"], dim=1))
    return list(index) if name == "experts" else [index]


class Weight(nn.Module):
    """A weight whose gradient is what `forward` is given."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.weight.use_muon = weight.ndim > 1  # type: ignore[attr-defined]

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.weight * gradient.to(self.weight.dtype)).float().sum()


class Net(nn.Module):
    """Matrices, a stack of experts and the same experts as separate layers, whose gradients `forward` is given."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        layers = {name: Weight(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}
        experts = torch.randn(EXPERTS, *SHAPE, generator=generator)
        layers |= {"experts": Weight(experts)} | {f"separate{i}": Weight(experts[i].clone()) for i in range(EXPERTS)}
        self.layers = nn.ModuleDict(layers | {"bias": Weight(torch.zeros(7))})

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        """The sum of weights times their gradients; a layer that has none takes no part."""
        return torch.stack([self.layers[name](gradient) for name, gradient in gradients.items()]).sum()

    def named(self) -> dict[str, nn.Parameter]:
        """The weights by layer."""
        return {name: layer.weight for name, layer in self.layers.items()}


def gradients_of(step: int, micro: int = 0, micros: int = 1) -> dict[str, Tensor]:
    """By layer, those of one micro-batch; absent layers are left out, absent matrices of fused weights are zero."""
    generator = torch.Generator().manual_seed(100 * step + micro)
    found = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    found |= {f"separate{i}": found["experts"][i].clone() for i in range(EXPERTS)}
    found["bias"] = torch.ones(7)
    for name, steps in ABSENT.items():
        whole, bracket, first = name.partition("[")
        if step in steps and bracket:
            part = next(part for part in parts_of(whole) if part.flatten()[0] == int(first[:-1]))
            found[whole].view(-1)[part] = 0
        elif step in steps:
            del found[name]
    if step % 2 == 0:
        del found["last" if micro < micros - 1 else "first"]
    return found


def oracle(config: OracleConfig, accumulation: int = 1, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Each matrix on its own; nothing happens to one without a gradient. `dtype` of the model."""
    weights = {name: p.detach().to(dtype).float() for name, p in Net().named().items()}
    momenta = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    memories: dict[Any, dict[str, Tensor]] = {}
    for step in range(STEPS):
        micros = [gradients_of(step, micro, accumulation) for micro in range(accumulation)]
        for name in set().union(*micros) - {"bias"}:
            none = torch.zeros_like(weights[name])
            gradient = torch.stack([one.get(name, none).to(dtype).float() for one in micros]).mean(0).view(-1)
            for i, part in enumerate(parts_of(name) if name in SHAPES else parts_of("experts")[:1]):
                matrix, momentum = (x[name].view(-1)[part] for x in (weights, momenta))
                if gradient[part].any():
                    memory = memories.setdefault((name, i), {})
                    muon_update(matrix, gradient[part], momentum, config.lr, config, memory)
                    weights[name].view(-1)[part], momenta[name].view(-1)[part] = matrix, momentum
    return weights


def engine_of(**config: Any) -> Any:
    optimizer = {"type": "Muon", "params": PARAMS | {"muon_split": SPLIT} | config.pop("params", {})}
    net = Net()
    if "normuon" in optimizer["params"]:
        net.layers["experts"].weight.use_muon = False  # which axis a stack's outputs lie on is unknown
    if config.get("dtype") == "bf16":
        net.bfloat16()
    return make_engine(net, ds_config(optimizer=optimizer, clip=0.0, **config))


def take_steps(engine: Any, first: int, last: int, accumulation: int = 1) -> None:
    for step in range(first, last):
        for micro in range(accumulation):
            engine.backward(engine(gradients_of(step, micro, accumulation)))
            engine.step()


def train(folder: str = "", resume: bool = False, **config: Any) -> dict[str, Tensor]:
    """Master weights at the end; with `resume` in a second engine from a checkpoint in the middle of a gap."""
    accumulation = config.get("accumulation", 1)
    engine = engine_of(**config)
    if resume:
        take_steps(engine, 0, 3, accumulation)
        engine.save_checkpoint(folder)
        engine.destroy()
        engine = engine_of(**config)
        engine.load_checkpoint(folder)
    take_steps(engine, 3 if resume else 0, STEPS, accumulation)
    weights = {name.split(".")[1]: weight for name, weight in fp32_weights(engine).items()}
    engine.destroy()
    return weights


def assert_like(weights: dict[str, Tensor], expected: dict[str, Tensor], bound: float, half: bool = False) -> None:
    for name, param in Net().named().items():
        start = param.detach().to(torch.bfloat16 if half else torch.float32).float()
        if name == "unused":
            assert torch.equal(weights[name], start), name
        elif name in expected:
            assert change_error(start, weights[name], expected[name]) <= bound, name


CASES: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    **{f"stage {s}, offload, accumulation": {"stage": s, "accumulation": 3, "offload": True} for s in (3, 2, 1)},
    "stage 1": {"stage": 1},
    "stage 2, offload": {"stage": 2, "offload": True},
    "stage 3": {"stage": 3},
    "stage 3, small sub-groups": {"stage": 3, "zero": {"sub_group_size": 1000}},
    "stage 3, offload": {"stage": 3, "offload": True},
    "owners": {"stage": 1, "params": {"owners_per_matrix": 2}},
    "owners, stage 3": {"stage": 3, "params": {"owners_per_matrix": 2}},
    "normuon": {"stage": 3, "params": {"normuon": True}},
    "int8": {"stage": 2, "params": {"momentum_dtype": "int8"}},
    "bf16 momentum": {"stage": 3, "params": {"momentum_dtype": "bf16"}},
    "stage 0, bf16": {"stage": 0, "dtype": "bf16"},
    "stage 3, bf16": {"stage": 3, "dtype": "bf16"},
    "BF16_Optimizer": BF16_OPTIMIZER,
    **{f"stage {stage}, accumulation": {"stage": stage, "accumulation": 2} for stage in (0, 1, 2, 3)},
    "round robin, offload, accumulation": {
        "stage": 2,
        "accumulation": 2,
        "offload": True,
        "zero": {"round_robin_gradients": True},
    },
    "bf16, offload, accumulation": {"stage": 3, "accumulation": 2, "offload": True, "dtype": "bf16"},
    "bf16, stage 2, offload, accumulation": {"stage": 2, "accumulation": 2, "offload": True, "dtype": "bf16"},
    "BF16_Optimizer, accumulation": BF16_OPTIMIZER | {"accumulation": 2},
    "plain kernels": {"stage": 2, "params": {"kernels": "torch"}},
    "round robin": {"stage": 2, "zero": {"round_robin_gradients": True}},
}
#: Of the change of the weights. bf16 gradients and a rounded momentum differ most.
BOUNDS = {"int8": 0.1, "bf16 momentum": 0.03, "BF16_Optimizer, accumulation": 0.003}
BOUNDS |= {name: 0.003 for name in CASES if name.startswith("bf16, ")}


@pytest.mark.sample(4)
@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_what_has_no_gradient_stands_still(name: str, resume: bool, tmp_path: Path) -> None:
    case = CASES[name]
    rules = {"after": normuon} if "normuon" in name else {}
    config = OracleConfig(**{**vars(ORACLE), "clip": 0.0, **rules})
    half = case.get("dtype") == "bf16"
    expected = oracle(config, case.get("accumulation", 1), torch.bfloat16 if half else torch.float32)
    left_out = {"bias", "experts"} if "normuon" in name else {"bias"}  # which axis a stack's outputs lie on is unknown
    expected = {key: weight for key, weight in expected.items() if key not in left_out}
    for weights in run(train, 2, folder=str(tmp_path), resume=resume, **case):
        assert_like(weights, expected, BOUNDS.get(name, 1e-3), half)
        if name not in BOUNDS and not left_out & {"experts"}:  # a stack and separate layers train alike
            for i in range(EXPERTS):
                assert torch.allclose(weights["experts"][i], weights[f"separate{i}"], atol=1e-5), i


@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 3])
def test_four_ranks_agree(stage: int) -> None:
    expected = oracle(OracleConfig(**{**vars(ORACLE), "clip": 0.0}))
    del expected["bias"]
    for weights in run(train, 4, stage=stage):
        assert_like(weights, expected, 1e-3)


def train_branches(**config: Any) -> dict[str, Tensor]:
    """Weights after steps in which each rank takes the gradients of another micro-batch."""
    rank, steps = dist.get_rank(), range(STEPS)
    if config:
        engine = engine_of(**config)
        for step in steps:
            engine.backward(engine(gradients_of(step, rank, 2)))
            engine.step()
        weights = fp32_weights(engine)
        engine.destroy()
        return {name.split(".")[1]: weight for name, weight in weights.items()}
    net = Net()
    model = DistributedDataParallel(net, find_unused_parameters=True)
    optimizer = MuonWithAuxAdam(net.parameters(), model=net, muon_split=SPLIT, **PARAMS)
    for step in steps:
        optimizer.zero_grad()
        model(gradients_of(step, rank, 2)).backward()
        optimizer.step()
    return {name: param.detach() for name, param in net.named().items()}


@pytest.mark.parametrize("config", [{}, {"stage": 0}, {"stage": 0, "dtype": "bf16"}, BF16_OPTIMIZER], ids=str)
def test_a_layer_takes_part_on_one_rank_alone(config: dict[str, Any]) -> None:
    """Its gradient is the mean of all ranks', zeros included. DeepSpeed's stages 1 to 3 refuse unlike gradients."""
    half = config.get("dtype") == "bf16"
    expected = oracle(OracleConfig(**{**vars(ORACLE), "clip": 0.0}), 2, torch.bfloat16 if half else torch.float32)
    del expected["bias"]
    first, second = run(train_branches, 2, **config)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert_like(first, expected, 0.003 if half else 1e-3, half)


@pytest.mark.parametrize(
    "params", [{}, {"momentum_dtype": "int8"}, {"momentum_dtype": "bf16"}, {"cautious_weight_decay": True}]
)
def test_plain_pytorch_treats_zeros_as_no_gradient(params: dict[str, Any]) -> None:
    def trained(zeros: bool) -> tuple[list[Tensor], list[Tensor]]:
        net = Net()
        optimizer = MuonWithAuxAdam(net.parameters(), model=net, muon_split=SPLIT, **PARAMS | params)
        named = net.named()
        before: dict[str, Tensor] = {}
        for step in range(STEPS):
            gradients = gradients_of(step)
            for name, param in named.items():
                found = gradients.get(name)
                param.grad = torch.zeros_like(param) if found is None and zeros else found
            if step == 3:
                before = {name: param.detach().clone() for name, param in named.items()}
                kept = [optimizer.read_state(named["gap"], "momentum_buffer") for _ in range(1)]
            optimizer.step()
            if step == 3:
                assert torch.equal(named["gap"], before["gap"])
                assert torch.equal(named["experts"][1], before["experts"][1])
                assert not torch.equal(named["experts"][0], before["experts"][0])
                assert torch.equal(optimizer.read_state(named["gap"], "momentum_buffer"), kept[0])
        states = [optimizer.read_state(param, "momentum_buffer") for param in named.values() if param.ndim > 1]
        return [param.detach() for param in named.values()], states

    for none, zeros in zip(trained(False), trained(True), strict=True):
        assert all(map(torch.equal, none, zeros))


def write_records(folder: str) -> None:
    monitor = {"csv_monitor": {"enabled": True, "output_path": folder, "job_name": "run"}}
    engine = engine_of(stage=3, params={"monitor_interval": 1}, **monitor)
    take_steps(engine, 0, STEPS)
    engine.destroy()


def test_records_count_them(tmp_path: Path) -> None:
    run(write_records, 2, folder=str(tmp_path))
    found = [value for _, value in records(tmp_path)["matrices_without_gradient"]]
    assert found == [sum(step in steps for steps in ABSENT.values()) + (step % 2 == 0) for step in range(STEPS)]
