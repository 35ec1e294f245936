# SPDX-License-Identifier: Apache-2.0
"""Small models built like those of well-known libraries, and what the routing says of a model."""

from typing import Any

import torch
from torch import nn

from deepspeed.muon.config.schema import MuonConfig
from deepspeed.muon.layout import MatrixSpec
from deepspeed.muon.model.routing import route

WIDTH = 8


def module(**children: nn.Module) -> nn.Module:
    parent = nn.Module()
    for name, child in children.items():
        parent.add_module(name, child)
    return parent


def nested(path: str, child: nn.Module) -> nn.Module:
    for part in reversed(path.split(".")):
        child = module(**{part: child})
    return child


def linear(inputs: int = WIDTH, outputs: int = 2 * WIDTH, bias: bool = False) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias)


def of_class(name: str, weight: str = "weight", **attributes: Any) -> nn.Module:
    """Return a module whose class has this name, with a matrix 12 x 8 called `weight`, and with these attributes."""
    made = type(name, (nn.Module,), {})()
    made.register_parameter(weight, nn.Parameter(torch.randn(12, 8)))
    vars(made).update(attributes)
    return made


def routes(model: nn.Module, check: bool = True, **options: Any) -> dict[str, MatrixSpec]:
    """Return name -> MatrixSpec under these options, after checks (``check``) that hold for every model."""
    specs = route(model, MuonConfig(**options))
    trainable = {name: param for name, param in model.named_parameters() if param.requires_grad}
    assert list(specs) == list(trainable.values()), "every trainable parameter once, in the model's order"
    for name, param in trainable.items() if check else ():
        spec = specs[param]
        assert spec.name == name
        assert spec.shape == tuple(getattr(param, "ds_shape", param.shape))
        assert spec.reason
        assert covered(spec) == (list(range(spec.numel)) if spec.use_muon else [])
    return {spec.name: spec for spec in specs.values()}


def covered(spec: MatrixSpec) -> list[int]:
    """Return the indices of all elements of the blocks, sorted, with repetitions."""
    return sorted(block.element(at) for block in spec.blocks for at in range(block.numel))


def splits(model: nn.Module, **options: Any) -> dict[str, str]:
    """Return how each parameter of the Muon half was split, by the last two words of its name without ".weight"."""
    specs = [spec for spec in routes(model, **options).values() if spec.use_muon and spec.split]
    return {".".join(spec.name.removesuffix(".weight").split(".")[-2:]): spec.split for spec in specs}


class Swiglu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = linear(), linear(), linear(2 * WIDTH, WIDTH)


class Gpt(nn.Module):
    """A GPT whose positions are a parameter, not an embedding module."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.wte = nn.Embedding(32, WIDTH)
        self.wpe = nn.Parameter(torch.randn(16, WIDTH))
        self.h = nn.ModuleList(
            module(ln=nn.LayerNorm(WIDTH), attn=linear(WIDTH, 3 * WIDTH, bias=True), mlp=linear(bias=True))
            for _ in range(2)
        )
        self.lm_head = linear(WIDTH, 32)
        if tied:
            self.lm_head.weight = self.wte.weight


class Adapted(nn.Module):
    """A frozen linear layer with two factors, named as in a library."""

    def __init__(self, down: str, up: str) -> None:
        super().__init__()
        self.base_layer = nn.Linear(8, 12)
        self.base_layer.requires_grad_(False)
        self.add_module(down, nn.Linear(8, 2, bias=False))
        self.add_module(up, nn.Linear(2, 12, bias=False))
