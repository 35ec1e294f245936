# SPDX-License-Identifier: Apache-2.0
"""Small models built like those of well-known libraries, and what the routing says of a model."""

from typing import Any

import torch
from torch import nn

from deepspeed.muon.matrices.routing import route
from deepspeed.muon.matrices.splitting import MatrixSpec

WIDTH = 8


def module(**children: nn.Module) -> nn.Module:
    """Return a module with these children and nothing else."""
    parent = nn.Module()
    for name, child in children.items():
        parent.add_module(name, child)
    return parent


def linear(inputs: int = WIDTH, outputs: int = 2 * WIDTH, bias: bool = False) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias)


def routes(model: nn.Module) -> dict[str, MatrixSpec]:
    """Return name -> MatrixSpec, after checks that hold for every model."""
    specs = route(model)
    trainable = {name: param for name, param in model.named_parameters() if param.requires_grad}
    assert list(specs) == list(trainable.values()), "every trainable parameter once, in the model's order"
    for name, param in trainable.items():
        spec = specs[param]
        assert spec.name == name
        assert spec.shape == tuple(getattr(param, "ds_shape", param.shape))
        assert spec.reason
        assert covered(spec) == (list(range(spec.numel)) if spec.use_muon else [])
    return {spec.name: spec for spec in specs.values()}


def covered(spec: MatrixSpec) -> list[int]:
    """Return the indices of all elements of the blocks, sorted, with repetitions."""
    return sorted(
        block.offset + i * block.stride + j
        for block in spec.blocks
        for i in range(block.rows)
        for j in range(block.cols)
    )


def muon_names(model: nn.Module) -> set[str]:
    return {name for name, spec in routes(model).items() if spec.use_muon}


def reason(model: nn.Module, name: str) -> str:
    """Return why `name` goes to AdamW."""
    spec = routes(model)[name]
    assert not spec.use_muon, spec.reason
    return spec.reason


# ---- modules of foreign libraries -----------------------------------------------------------------------


class Conv1D(nn.Module):
    """Like Hugging Face's of GPT-2: a linear layer whose weight is [in, out]."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))


class Projector(nn.Module):
    """Linear by its attributes, like quantized and parallel layers of several libraries."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.in_features, self.out_features = inputs, outputs
        self.weight = nn.Parameter(torch.randn(outputs, inputs))


class ColumnParallelLinear(nn.Module):
    """Linear by the name of its class, like Megatron's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(12, 8))


class TokenMixingLinear(nn.Module):
    """Linear by the name of its class, with a weight that has a name of embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.token_weight = nn.Parameter(torch.randn(12, 8))


class VocabParallelEmbedding(nn.Module):
    """An embedding by the name of its class, like Megatron's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(30, 8))


class Mixer(nn.Module):
    """A module with a matrix of unknown purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, 8))


class Swiglu(nn.Module):
    """Llama's MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = linear(), linear(), linear(2 * WIDTH, WIDTH)


class BertLayer(nn.Module):
    """Nested modules called `output`, with a Linear called `dense`."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = module(
            self=module(query=linear(), key=linear(), value=linear()),
            output=module(dense=linear(), LayerNorm=nn.LayerNorm(WIDTH)),
        )
        self.intermediate = module(dense=linear())
        self.output = module(dense=linear(2 * WIDTH, WIDTH), LayerNorm=nn.LayerNorm(WIDTH))


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


class HuggingFace(nn.Module):
    """Names its head itself; the head may be None, a module, or something that is no module."""

    def __init__(self, head: Any = "unembed") -> None:
        super().__init__()
        self.hidden = linear()
        self.unembed = linear(WIDTH, 32, bias=True)
        self._head = getattr(self, head) if isinstance(head, str) else head

    def get_output_embeddings(self) -> Any:
        return self._head


class Adapted(nn.Module):
    """A frozen linear layer with two factors, named as in a library."""

    def __init__(self, down: str, up: str, rank: int = 2) -> None:
        super().__init__()
        self.base_layer = nn.Linear(8, 12)
        self.base_layer.requires_grad_(False)
        self.add_module(down, nn.Linear(8, rank, bias=False))
        self.add_module(up, nn.Linear(rank, 12, bias=False))
