# SPDX-License-Identifier: Apache-2.0
"""Ulysses: ranks of a sequence-parallel group hold parts of the time, and attention runs on parts of the heads."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from helpers.distributed import run
from helpers.models import GLOBAL_BATCH, Block, TinyGpt, fused_parts
from helpers.oracles import change_error, route, train_oracle
from helpers.parity import HALVES, assert_parity
from helpers.training import ORACLE, PARAMS, ds_config, fp32_weights

STEPS = 5
CLIP = 4.7
"""Between the norms of the steps: gradients of another scale would be clipped otherwise."""


class SpreadBlock(Block):
    """A block on this rank's part of the time."""

    def attend(self, hidden: Tensor) -> Tensor:
        """Attention over the whole time, by DeepSpeed's exchange of time for heads."""
        from deepspeed.sequence.layer import DistributedAttention
        from deepspeed.utils import groups

        batch, time, width = hidden.shape
        qkv = self.qkv(hidden).view(batch, time, 3, self.heads, width // self.heads)
        spread = DistributedAttention(self.local, groups._get_sequence_parallel_group(), scatter_idx=2, gather_idx=1)
        return self.proj(spread(*qkv.unbind(2), 0).reshape(batch, time, width))

    def local(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Of some heads, (batch, time, heads, width), over the whole time."""
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attend(self.attention_norm(hidden))
        return hidden + self.down(torch.tanh(self.up(self.mlp_norm(hidden))))


class SpreadGpt(TinyGpt):
    """TinyGpt, of whose time this rank has a part."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.__class__ = SpreadBlock

    def forward(self, inputs: Tensor, targets: Tensor, first: int) -> Tensor:
        """As TinyGpt's, summed over the time of this rank, which begins at `first`."""
        hidden = self.tokens(inputs) + self.positions(torch.arange(first, first + inputs.shape[1]))
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.lm_head(self.norm(hidden)).flatten(0, 1)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits, targets.flatten(), reduction="sum") / len(inputs)


def begin(sp: int, optimizer: dict[str, Any] | None = None, **config: Any) -> Any:
    """An engine on ranks of which each `sp` share a sequence, rank by rank."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    import deepspeed

    rows = GLOBAL_BATCH * sp // dist.get_world_size()
    settings = ds_config(optimizer=optimizer, **config)
    settings |= {"sequence_parallel_size": sp, "train_micro_batch_size_per_gpu": rows}
    parallel_state_sp.initialize_sequence_parallel(sp)
    return deepspeed.initialize(model=SpreadGpt(), config=settings, mpu=parallel_state_sp)[0]


def take_steps(engine: Any, sp: int, steps: range) -> list[float]:
    """Train on this rank's rows and times of the global batches; the norm of each step."""
    rank, net, norms = dist.get_rank(), engine.module, []
    rows, time = GLOBAL_BATCH * sp // dist.get_world_size(), net.time // sp
    top, first = rank // sp * rows, rank % sp * time
    for step in steps:
        inputs, targets = (part[top : top + rows, first : first + time] for part in net.batch(step))
        engine.backward(engine(inputs, targets, first))
        engine.step()
        norms.append(float(engine.get_global_grad_norm() or 0.0))
    return norms


def train(sp: int = 2, **config: Any) -> tuple[dict[str, Tensor], list[float]]:
    """Master weights, and the norm of each step."""
    engine = begin(sp, **config)
    norms = take_steps(engine, sp, range(STEPS))
    weights = fp32_weights(engine)
    engine.destroy()
    return weights, norms


class ScaledGpt(TinyGpt):
    """TinyGpt whose loss is divided."""

    divisor = 1.0

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """As TinyGpt's."""
        return super().forward(inputs, targets) / self.divisor


def oracle(divisor: int = 1, clip: float = CLIP, dtype: str = "fp32", parts: Any = None) -> Any:
    """Of a loss that is divided; queries, keys and values are matrices of their own, or `parts` are."""
    net = ScaledGpt().to(HALVES[dtype])
    net.divisor = divisor
    routing = route(net, ["tokens", "positions", "lm_head"])
    return train_oracle(net, net.batch, STEPS, routing, replace(ORACLE, clip=clip), parts=parts or fused_parts(net))


#: DeepSpeed sums gradients over a sequence's ranks at stages 0 to 2, and takes their mean at stage 3.
DIVISORS = {0: 1, 1: 1, 2: 1, 3: 2}


@pytest.mark.sample(3)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_equals_the_oracle(stage: int, world: int) -> None:
    clip = CLIP / DIVISORS[stage]
    expected = oracle(DIVISORS[stage], clip)
    assert max(expected.norms) > clip > min(expected.norms)
    for weights, norms in run(train, world, stage=stage, clip=clip):
        assert_parity(weights, expected)
        assert norms == pytest.approx(expected.norms if stage else [0.0] * STEPS, rel=1e-3)


@pytest.mark.sample(1)
@pytest.mark.parametrize("stage", [1, 3])
def test_heads_and_bf16(stage: int) -> None:
    """All heads of a projection are on every rank, whatever part of them its attention computes."""
    named = {name: param for name, param in TinyGpt().named_parameters() if "qkv" in name}
    parts = {name: list(torch.arange(param.numel()).view(param.shape).split(6)) for name, param in named.items()}
    heads = {"type": "Muon", "params": PARAMS | {"per_head_muon": True}}
    divisor = DIVISORS[stage]
    for weights, _ in run(train, 2, stage=stage, clip=CLIP, optimizer=heads):
        assert_parity(weights, oracle(divisor, parts=parts))
    for weights, _ in run(train, 2, stage=stage, clip=CLIP, dtype="bf16"):
        assert_parity(weights, oracle(divisor, dtype="bf16"), "bf16")


def test_the_oracle_tells_a_gradient_of_another_scale() -> None:
    """Of a single step Newton-Schulz and AdamW hardly tell it; clipping does."""
    expected, other = oracle(), oracle(divisor=2)
    errors = [change_error(expected.initial[name], other.weights[name], w) for name, w in expected.weights.items()]
    assert max(errors) > 5e-3


def go_on(folder: str, stage: int, load: bool) -> dict[str, Tensor]:
    """Three steps, saved after the first or loaded from there."""
    engine = begin(2, stage=stage)
    if load:
        engine.load_checkpoint(folder)
    else:
        take_steps(engine, 2, range(1))
        engine.save_checkpoint(folder)
    take_steps(engine, 2, range(1, 3))
    weights = fp32_weights(engine)
    engine.destroy()
    return weights


@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 3])
def test_resume_is_exact(stage: int, tmp_path: Path) -> None:
    first, second = (run(go_on, 4, folder=str(tmp_path), stage=stage, load=load) for load in (False, True))
    for before, after in zip(first, second, strict=True):
        assert [name for name, value in before.items() if not torch.equal(value, after[name])] == []


def mesh(optimizer: dict[str, Any], stage: int) -> Any:
    """An engine with sequence parallelism by the config alone."""
    import deepspeed

    copies = dist.get_world_size() // 2
    sizes = {"sequence_parallel_size": 2, "data_parallel_size": copies}
    sizes |= {"train_micro_batch_size_per_gpu": GLOBAL_BATCH // copies}
    return deepspeed.initialize(model=SpreadGpt(), config=ds_config(stage=stage, optimizer=optimizer) | sizes)[0]


def without_sums() -> tuple[str, str]:
    """What is refused."""
    try:
        mesh({"type": "Muon", "params": PARAMS}, stage=1)
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def test_a_mesh_from_the_config_is_refused() -> None:
    for kind, text in run(without_sums, 2):
        assert kind == "UnsupportedError"
        assert "pass mpu=deepspeed.runtime.sequence_parallel.parallel_state_sp" in text


def stock_on_a_mesh(stage: int) -> tuple[dict[str, Tensor], str, Tensor]:
    """Under stock's AdamW: weights after a step, the file for the optimizer's state, and the first parameter here."""
    engine = mesh({"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}, stage)
    take_steps(engine, 2, range(1))
    name = engine._get_zero_ckpt_name("folder", "tag") if stage else ""
    param = next(engine.module.parameters())
    found = fp32_weights(engine), name, getattr(param, "ds_tensor", param).detach().clone()
    engine.destroy()
    return found


@pytest.mark.full
def test_deepspeed_trains_no_mesh_from_the_config_itself() -> None:
    """The reason of the refusal: ranks of a sequence drift apart, or save other weights under one name."""
    for stage in (0, 1, 2):
        (first, *_), (second, *_) = run(stock_on_a_mesh, 2, stage=stage)
        assert all(not torch.equal(second[name], weight) for name, weight in first.items()), stage
    (_, name, first_part), (_, other, second_part), *_ = run(stock_on_a_mesh, 4, stage=3)
    assert name == other and not torch.equal(first_part, second_part)
