# SPDX-License-Identifier: Apache-2.0
"""Small models, their data and the DeepSpeed training loop.

Every model has `batch(step)`, the global batch of GLOBAL_BATCH samples of that step, and `forward(inputs,
targets)`, the loss as the mean over the samples given, so that equal shares of the global batch may be spread
over ranks and micro-steps in any way without changing the average. The global gradient norms of the first
steps lie above 1, so that clipping at 1 acts.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

GLOBAL_BATCH = 48
"""Samples of one optimizer step: divisible by every world size up to 4 times 1, 2 or 4 micro-steps."""
UNEVEN = (7, 15, 9, 13, 11, 5)
"""Widths whose matrices straddle the borders of the partitions at 2, 3 and 4 ranks."""
EVEN = (16, 16, 32, 16, 16, 8)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _gathered(model: nn.Module, modifier_rank: int | None = None) -> AbstractContextManager[None]:
    """Hold the parameters of `model` in their full shapes within the context; keep what rank `modifier_rank` writes."""
    if not any(hasattr(param, "ds_id") for param in model.parameters()):
        return nullcontext()
    from deepspeed.runtime.zero import GatheredParameters

    return GatheredParameters(list(model.parameters()), modifier_rank=modifier_rank)


def initialize_(model: nn.Module, seed: int) -> None:
    """Fill matrices from N(0, 1 / columns) and vectors from N(0, 0.01), norm weights from N(1, 0.01)."""
    generator = _generator(seed)
    with _gathered(model, modifier_rank=0), torch.no_grad():
        for name, param in model.named_parameters():
            noise = torch.randn(param.shape, generator=generator)
            scale = 0.1 if param.ndim == 1 else param.shape[1] ** -0.5
            param.copy_(noise * scale + (1.0 if name.endswith("norm.weight") else 0.0))


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    dtype = torch.promote_types(outputs.dtype, torch.float32)
    return F.mse_loss(outputs.to(dtype), targets.to(dtype))


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of (batch, time, vocabulary), summed over time, mean over the batch."""
    logits = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, targets.flatten(), reduction="sum") / len(targets)


def vectors(step: int, inputs: Sequence[int], targets: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return a global batch: inputs from N(0, 1) and targets from N(0, 16) of these shapes."""
    generator = _generator(1000 + step)
    first, second = (torch.randn(GLOBAL_BATCH, *shape, generator=generator) for shape in (inputs, targets))
    return first, 4 * second


def text(step: int, vocab: int, time: int) -> tuple[Tensor, Tensor]:
    """Return a global batch: tokens (GLOBAL_BATCH, time), int64, and the tokens that follow them."""
    tokens = torch.randint(vocab, (GLOBAL_BATCH, time + 1), generator=_generator(1000 + step))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def without_head_(model: nn.Module) -> None:
    """Tag the layers that no other layer follows for Muon, which would leave them to AdamW as output heads."""
    inputs = {layer.in_features for layer in model.modules() if isinstance(layer, nn.Linear)}
    for layer in model.modules():
        if isinstance(layer, nn.Linear) and layer.out_features not in inputs:
            layer.weight.use_muon = True  # type: ignore[assignment]


class Mlp(nn.Module):
    """Linear layers with biases and tanh between them, from `widths[0]` inputs to `widths[-1]` outputs.

    `tied`: pairs (i, j) where layer j uses the weight of layer i. `frozen`: layers that do not train.
    `unused`: (inputs, outputs) of a trainable layer that takes no part in the loss.
    """

    def __init__(
        self,
        widths: Sequence[int] = UNEVEN,
        tied: Sequence[tuple[int, int]] = (),
        frozen: Sequence[int] = (),
        unused: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        self.widths = tuple(widths)
        self.layers = nn.ModuleList(nn.Linear(n, m) for n, m in pairwise(widths))
        for first, second in tied:
            self.layers[second].weight = self.layers[first].weight
        self.unused = nn.Linear(*unused) if unused else None
        initialize_(self, 0)
        for index in frozen:
            self.layers[index].requires_grad_(False)
        without_head_(self)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        hidden = inputs.to(self.layers[0].weight.dtype)
        for layer in self.layers[:-1]:
            hidden = torch.tanh(layer(hidden))
        return squares(self.layers[-1](hidden), targets)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        return vectors(step, self.widths[:1], self.widths[-1:])


class DarkInput(Mlp):
    """An Mlp whose first input is always zero, as padding can be, so that a whole column has no gradient."""

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        inputs, targets = super().batch(step)
        inputs[:, 0] = 0
        return inputs, targets


class Block(nn.Module):
    """Causal self-attention and a tanh MLP of odd width, each after a LayerNorm, on (batch, time, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)  # a bias of the keys would have no gradient
        self.proj = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 5)
        self.down = nn.Linear(2 * width + 5, width)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)

    def forward(self, hidden: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(hidden)).unflatten(-1, (3, self.heads, -1))
        hidden = hidden + self.proj(self.attend(*qkv.unbind(2)).flatten(2))
        return hidden + self.down(torch.tanh(self.up(self.mlp_norm(hidden))))


class TinyGpt(nn.Module):
    """Token and position embeddings, 2 blocks and a head, which `tied` shares with the token embedding."""

    vocab, width, time = 19, 12, 6

    def __init__(self, tied: bool = False, seed: int = 0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(self.vocab, self.width)
        self.positions = nn.Embedding(self.time, self.width)
        self.blocks = nn.ModuleList(Block(self.width, 2) for _ in range(2))
        self.norm = nn.LayerNorm(self.width)
        self.lm_head = nn.Linear(self.width, self.vocab, bias=False)
        if tied:
            self.lm_head.weight = self.tokens.weight
        initialize_(self, seed)

    def forward(self, inputs: Tensor, targets: Tensor, first: int = 0) -> Tensor:
        """Cross-entropy, summed over time, which begins at `first`, mean over the batch; (batch, time), int64."""
        times = torch.arange(first, first + inputs.shape[1], device=inputs.device)
        hidden = self.tokens(inputs) + self.positions(times)
        for block in self.blocks:
            hidden = block(hidden)
        return cross_entropy(self.lm_head(self.norm(hidden)), targets)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        return text(step, self.vocab, self.time)


def fused_parts(model: nn.Module) -> dict[str, list[Tensor]]:
    """Return, for each `qkv` of a TinyGpt, name -> element indices of its three matrices: queries, keys, values."""
    named = {name: param for name, param in model.named_parameters() if name.endswith("qkv.weight")}
    return {name: list(torch.arange(param.numel()).view(param.shape).chunk(3)) for name, param in named.items()}


class Conv1D(nn.Module):
    """A linear map whose weight (inputs, outputs) is the transpose of `nn.Linear`'s, as GPT-2's."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ self.weight


class Experts(nn.Module):
    """The mean of several linear maps, whose weights are one stack (experts, inputs, outputs)."""

    def __init__(self, experts: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.empty(experts, inputs, outputs))

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh(torch.einsum("bi,eio->beo", hidden, self.down)).mean(1)


class Fused(nn.Module):
    """A chain of all kinds of parameters that are several matrices, or one matrix in another shape.

    `qkv`: rows 7 + 5 + 4. `c_attn`: columns 5 + 4 + 3. `grouped`: rows (4 + 2 + 2) x 3 groups. `experts`: 3 of 24 x 6.
    `conv`: (5, 2, 3, 3), a matrix 5 x 18.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 5, 3)
        self.qkv = nn.Linear(80, 16)
        self.c_attn = Conv1D(16, 12)
        self.grouped = nn.Linear(12, 24)
        self.experts = Experts(3, 24, 6)
        self.lm_head = nn.Linear(6, 5)
        initialize_(self, 0)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        hidden = torch.tanh(self.conv(inputs.to(self.conv.weight.dtype))).flatten(1)
        for layer in (self.qkv, self.c_attn, self.grouped, self.experts):
            hidden = torch.tanh(layer(hidden))
        return squares(self.lm_head(hidden), targets)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        return vectors(step, (2, 6, 6), (5,))


class Maps(nn.Module):
    """Linear maps of one weight, each of which takes part in the loss of the samples in its column of `present`."""

    def __init__(self, shape: Sequence[int], sizes: Sequence[int], axis: int = 0) -> None:
        super().__init__()
        self.weight, self.sizes, self.axis = nn.Parameter(torch.empty(shape)), torch.tensor(sizes), axis
        self.weight.use_muon = True  # type: ignore[attr-defined]

    def forward(self, inputs: Tensor, present: Tensor) -> Tensor:
        weight = self.weight.flatten(0, -2)
        inputs = inputs[:, : weight.shape[1]].to(weight.dtype)
        mask = present.to(weight.dtype).repeat_interleave(self.sizes, 1)
        outputs = (inputs * mask if self.axis else inputs) @ weight.T
        squares = (torch.tanh(outputs) - 1).square()
        return (squares if self.axis else squares * mask).float().mean()


class Absent(nn.Module):
    """Layers, matrices of fused weights and experts that take no part in the loss of some steps.

    Of `micros` micro-steps, or ranks, of every other step "first" takes part in all but the last, "last" in that alone.
    """

    SPLIT = {"qkv": [14, 10, 6], "columns": {"sizes": [13, 12, 8], "axis": 1}}
    LAYERS = {
        "always": ((24, 40), [24]),
        "unused": ((24, 40), [24]),
        "late": ((40, 24), [40]),
        "gap": ((36, 36), [36]),
        "frozen": ((30, 20), [30]),
        "first": ((20, 26), [20]),
        "last": ((26, 20), [26]),
        "qkv": ((30, 24), [14, 10, 6]),
        "columns": ((20, 33), [13, 12, 8], 1),
        "experts": ((3, 28, 20), [28, 28, 28]),
    }
    ABSENT = {
        ("unused", 0): {0, 1, 2, 3, 4},
        ("late", 0): {0, 1},
        ("gap", 0): {2, 3},
        ("frozen", 0): {2, 3, 4},
        ("qkv", 1): {1, 2},
        ("columns", 0): {2},
        ("experts", 1): {1, 2, 3},
        ("experts", 2): {4},
    }
    """(layer, number of its matrix) -> the steps in which no sample has a gradient for it."""

    def __init__(self, micros: int = 1) -> None:
        super().__init__()
        self.micros = micros
        self.layers = nn.ModuleDict({name: Maps(*how) for name, how in self.LAYERS.items()})
        self.bias = nn.Parameter(torch.empty(7))
        initialize_(self, 0)

    def present(self, step: int) -> Tensor:
        """Return for each sample and matrix, in order, whether it takes part."""
        keys = [(name, index) for name, how in self.LAYERS.items() for index in range(len(how[1]))]
        found = torch.tensor([step not in self.ABSENT.get(key, ()) for key in keys]).repeat(GLOBAL_BATCH, 1)
        if step % 2 == 0 and self.micros > 1:
            border = GLOBAL_BATCH // self.micros * (self.micros - 1)
            found[border:, keys.index(("first", 0))] = False
            found[:border, keys.index(("last", 0))] = False
        return found

    def forward(self, inputs: Tensor, present: Tensor) -> Tensor:
        """The sum of the layers' losses; a layer that no sample has takes no part."""
        loss = (inputs[:, :7].to(self.bias.dtype) - self.bias).float().square().mean()
        columns = present.split([len(how[1]) for how in self.LAYERS.values()], 1)
        for layer, mine in zip(self.layers.values(), columns, strict=True):
            loss = loss + layer(inputs, mine) if mine.any() else loss
        return loss

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs (GLOBAL_BATCH, 40) from N(0, 1), and `present`."""
        return torch.randn(GLOBAL_BATCH, 40, generator=_generator(1000 + step)), self.present(step)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": Mlp,
    "wide": lambda: Mlp(EVEN),
    "tied": lambda: Mlp((7, 11, 11, 11, 5), tied=[(1, 2)]),
    "frozen": lambda: Mlp(frozen=[1]),
    "unused": lambda: Mlp(unused=(6, 10)),
    "few": lambda: Mlp((6, 4, 3)),  # at 3 and 4 ranks some rank holds nothing of a group but padding
    "narrow": lambda: Mlp((12, 12, 8, 12, 6)),  # the global batch has 4 samples per column
    "swapped": lambda: Mlp((512, 1024, 512, 8)),  # at 2 ranks its large matrices are just what is swapped to NVMe
    "broad": lambda: Mlp((64, 96, 96, 128, 64, 8)),  # ranks that hold them whole share its large matrices
    "dark input": lambda: DarkInput((32, 32, 32)),
    "fused": Fused,
    "gpt": TinyGpt,
    "gpt_tied": lambda: TinyGpt(tied=True),
}
"""Models by name, so that a test can name one to its ranks."""


def make_batch(
    model: nn.Module, step: int, micro: int, rank: int, world: int, accumulation: int = 1
) -> tuple[Tensor, Tensor]:
    """Return the share of `rank` in micro-step `micro` of the global batch of `step`.

    The shares of all ranks and micro-steps are disjoint, equally large, and make up the global batch.
    """
    size, rest = divmod(GLOBAL_BATCH, world * accumulation)
    if rest:
        raise ValueError(f"{GLOBAL_BATCH} samples do not split over {world} ranks and {accumulation} micro-steps")
    start = (micro * world + rank) * size
    inputs, targets = (part[start : start + size] for part in model.batch(step))
    return inputs, targets


def shares(engine: Any, step: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the micro-batches of this rank's copy of the model, inputs in the dtype of its weights."""
    import torch.distributed as dist

    group, accumulation = engine.data_parallel_group, engine.gradient_accumulation_steps()
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    dtype = next(engine.module.parameters()).dtype
    for micro in range(accumulation):
        inputs, targets = make_batch(engine.module, step, micro, rank, world, accumulation)
        yield inputs.to(engine.device, dtype if inputs.is_floating_point() else None), targets.to(engine.device)


def train_engine(engine: Any, steps: int, first_step: int = 0) -> list[float]:
    """Train an engine on its shares of `steps` global batches; return the losses of its micro-steps.

    Ranks that share a copy of the model get the same. A pipeline returns no losses.
    """
    losses = []
    for step in range(first_step, first_step + steps):
        if engine.pipeline_parallelism:
            engine.train_batch(shares(engine, step))
            continue
        for share in shares(engine, step):
            loss = engine(*share)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def halve(model: nn.Module, seed: int) -> nn.Module:
    """Halve the weights of `model` if `seed` is not 0, so that a load has something to change; return the model."""
    for param in model.parameters() if seed else ():
        getattr(param, "ds_tensor", param).data.mul_(0.5)
    return model


def full_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return name -> CPU copy of each parameter in its full shape; a collective at ZeRO stage 3."""
    with _gathered(model):
        return {name: param.detach().cpu().clone() for name, param in model.named_parameters()}
