# SPDX-License-Identifier: Apache-2.0
"""Small models as DeepSpeed pipelines, and as whole modules with the same names and values for the oracle."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from helpers.models import GLOBAL_BATCH, Block, cross_entropy, squares, text, vectors
from helpers.training import ds_config

VOCAB, WIDTH, TIME = 19, 12, 6
TIED = "embed"
"""The key of the layer that is an embedding and the head."""
SHARED = f"tied_modules.{TIED}.weight"
#: Beginnings of names of parameters that do not go to Muon: embeddings, positions, and the head, which comes last.
ADAM = {"tied": ["tied_modules", "1."], "untied": ["0.", "1.", "5."], "late": ["0.", "1.", "5."], "mlp": ["8."]}


def _like_head(module: nn.Module, hidden: Tensor) -> Tensor:
    return hidden @ module.weight.T


class Positions(nn.Module):
    """Adds an embedding of the position to (batch, time, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(TIME, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.table(torch.arange(TIME, device=hidden.device))


@dataclass(frozen=True)
class Layer:
    """A layer of a pipeline. `key`: layers with the same key share weights; `forward`: replaces the module's own."""

    kind: type[nn.Module]
    args: tuple[Any, ...] = ()
    key: str | None = None
    forward: Callable[[nn.Module, Tensor], Tensor] | None = None

    def make(self) -> nn.Module:
        return self.kind(*self.args)


def gpt(tied: bool) -> list[Layer]:
    """Return embedding, positions, two blocks, norm, head. The first of two uniform stages ends with a block."""
    key = TIED if tied else None
    embedding = Layer(nn.Embedding, (VOCAB, WIDTH), key)
    head = replace(embedding, forward=_like_head) if tied else Layer(nn.Linear, (WIDTH, VOCAB, False))
    blocks = [Layer(Block, (WIDTH, 2))] * 2
    return [embedding, Layer(Positions), *blocks, Layer(nn.LayerNorm, (WIDTH,)), head]


def late() -> list[Layer]:
    """Return layers whose first of two uniform stages has no matrix for Muon, while the second has two blocks."""
    embedding, positions, *blocks, norm, head = gpt(tied=False)
    return [embedding, positions, norm, *blocks, head]


def mlp() -> list[Layer]:
    """Return layers whose first of two uniform stages has nothing for AdamW; the second has biases and the head."""
    widths = list(pairwise((7, 15, 9, 13, 11, 5)))
    hidden = [Layer(nn.Linear, (n, m, i > 1)) for i, (n, m) in enumerate(widths)]
    return [layer for linear in hidden for layer in (linear, Layer(nn.Tanh))][:-1]


MODELS: dict[str, tuple[Callable[[], list[Layer]], Callable[[Tensor, Tensor], Tensor]]] = {
    "tied": (lambda: gpt(tied=True), cross_entropy),
    "untied": (lambda: gpt(tied=False), cross_entropy),
    "late": (late, cross_entropy),
    "mlp": (mlp, squares),
}


def initialize_by_name(model: nn.Module) -> None:
    """Set each parameter to values that depend only on its name, whichever stage holds it."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            scale = 0.1 if param.ndim == 1 else param.shape[1] ** -0.5
            is_norm = param.ndim == 1 and name.endswith("weight")
            param.copy_(torch.randn(param.shape, generator=generator) * scale + (1.0 if is_norm else 0.0))


class Whole(nn.Module):
    """All layers of a pipeline in one module, with the pipeline's parameter names."""

    def __init__(self, name: str) -> None:
        super().__init__()
        layers, self.loss = MODELS[name]
        self.name, self.run = name, []
        self.tied_modules = nn.ModuleDict()
        for index, layer in enumerate(layers()):
            if layer.key is None:
                self.add_module(str(index), layer.make())
            elif layer.key not in self.tied_modules:
                self.tied_modules[layer.key] = layer.make()
            module = self.tied_modules[layer.key] if layer.key else getattr(self, str(index))
            self.run.append((module, layer.forward))
        initialize_by_name(self)

    def __deepcopy__(self, memo: Any) -> "Whole":
        copy = Whole(self.name)
        copy.load_state_dict(self.state_dict())
        return copy

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        hidden = inputs.to(next(self.parameters()).dtype) if inputs.is_floating_point() else inputs
        for layer, forward in self.run:
            hidden = layer(hidden) if forward is None else forward(layer, hidden)
        return self.loss(hidden, targets)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        return batch(self.name, step)


def batch(name: str, step: int) -> tuple[Tensor, Tensor]:
    """Return tokens (GLOBAL_BATCH, TIME) and the tokens that follow them; for the MLP the batch of `models.Mlp`."""
    return text(step, VOCAB, TIME) if name != "mlp" else vectors(step, (7,), (5,))


def make_pipeline(name: str, stages: int, **options: Any) -> Any:
    """Return a `PipelineModule` with uniform stages."""
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    layers, loss = MODELS[name]
    specs = [
        TiedLayerSpec(layer.key, layer.kind, *layer.args, forward_fn=layer.forward)
        if layer.key
        else LayerSpec(layer.kind, *layer.args)
        for layer in layers()
    ]
    settings = {"num_stages": stages, "loss_fn": loss, "partition_method": "uniform"} | options
    net = PipelineModule(specs, **settings)
    initialize_by_name(net)
    net.batch = partial(batch, name)
    return net


def pipeline_config(stages: int, **config: Any) -> dict[str, Any]:
    """Return a ds_config with two micro-batches for the ranks of this job."""
    import torch.distributed as dist

    rows = GLOBAL_BATCH * stages // (dist.get_world_size() * 2)
    config = ds_config(**{"stage": 1} | config)
    return config | {"train_micro_batch_size_per_gpu": rows, "gradient_accumulation_steps": 2}
