# SPDX-License-Identifier: Apache-2.0
"""QK-clip on models of transformers, with tensor parallelism, around frozen heads and loads."""

from typing import Any

import pytest
import torch

from deepspeed.muon import MuonWithAuxAdam
from helpers import tensor_parallel
from helpers.attention import logits_around_a_step
from helpers.distributed import run
from helpers.models import MODELS, train_engine
from helpers.oracles import change_error
from helpers.refusals import Refusal, attempt
from helpers.training import ds_config, fp32_weights, make_engine, with_params


def logits_around_a_load(folder: str, stage: int) -> tuple[float, float]:
    """The largest of a step, and of the same step after a micro-batch of other weights and a load."""
    net = MODELS["gpt"]()
    optimizer = with_params(lr=10.0, qk_clip={"tau": 1e6})
    engine = make_engine(net, ds_config(stage=stage, accumulation=2, optimizer=optimizer))
    engine.save_checkpoint(folder)
    train_engine(engine, 1)
    clip = engine.basic_optimizer.qk_clip
    found = [max(clip.largest.values())]
    engine.backward(engine(*net.batch(0)))
    engine.step()
    assert max(float(part.max()) for part in clip.watch.largest.values()) > 10 * found[0]
    engine.load_checkpoint(folder)
    train_engine(engine, 1)
    found.append(max(clip.largest.values()))
    engine.destroy()
    return found[0], found[1]


@pytest.mark.sample(1)
@pytest.mark.parametrize("stage", [3, 0, 2])
def test_a_load_forgets_the_logits_of_other_weights(tmp_path: Any, stage: int) -> None:
    first, again = run(logits_around_a_load, 1, folder=str(tmp_path), stage=stage)[0]
    assert again == first


@pytest.mark.sample(4)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "phi3", "qwen2", "deepseek_v3"])
def test_logits_of_transformers_are_at_most_the_threshold(kind: str, zero: int) -> None:
    """Without a step's update, each layer's own inputs give each head the threshold or what it had."""
    before, after, tau = run(logits_around_a_step, 2, kind=kind, share=0.6, zero=zero)[0]
    assert before and max(max(heads) for heads in before) > tau
    for heads, clipped in zip(before, after, strict=True):
        for old, new in zip(heads, clipped, strict=True):
            assert new <= tau * (1 + 1e-4)
            assert new == pytest.approx(min(old, tau), rel=1e-4) or kind in ("phi3", "qwen2"), "a key may be shared"


@pytest.mark.sample(1)
@pytest.mark.parametrize("stage", [2, 0, 1, 3])
def test_tensor_parallel_ranks_train_as_one(stage: int) -> None:
    """Each rank sees and scales its own heads, of which two share a key."""
    settings = {"name": "llama, sdpa", "steps": 3, "optimizer": with_params(qk_clip={"tau": 0.2})}
    alone = run(tensor_parallel.train, 1, tp=1, stage=0, **settings)[0]
    plain = run(tensor_parallel.train, 1, tp=1, stage=0, name="llama, sdpa", steps=3)[0]
    found = run(tensor_parallel.train, 2, tp=2, stage=stage, **settings)[0]
    start = {key: param.detach() for key, param in tensor_parallel.model("llama").named_parameters()}
    for key in alone:
        assert change_error(start[key], found[key], alone[key]) <= 1e-3, key
    assert all(change_error(start[key], plain[key], alone[key]) > 0.01 for key in alone if "q_proj" in key)


def with_hidden_heads() -> Refusal | None:
    net = tensor_parallel.model("neox")
    return attempt(lambda: tensor_parallel.build(net, optimizer=with_params(qk_clip={})))


def test_a_projection_whose_heads_tensor_parallelism_hides_is_refused() -> None:
    for _, text, _ in run(with_hidden_heads, 2):
        assert "attention layers: gpt_neox.layers.0" in text


def test_weights_in_bf16_are_scaled_by_less_than_their_precision() -> None:
    """By 0.999, which rounding to nearest would undo; in plain PyTorch, at a learning rate of zero."""

    def stepped(tau: float) -> tuple[float, torch.Tensor]:
        """The largest logit of the first layer, and its queries' and keys' weights after a step."""
        net = MODELS["gpt"]().bfloat16()
        clip = {"tau": tau, "logits": "exact"}
        optimizer = MuonWithAuxAdam(net.parameters(), model=net, lr=0.0, qk_clip=clip)
        net(*net.batch(0)).backward()
        optimizer.step()
        block = net.blocks[0]
        weight = block.qkv.weight.detach()[: 2 * block.qkv.weight.shape[1]]
        return next(iter(optimizer.qk_clip.largest.values())), weight.unflatten(0, (2 * block.heads, -1)).float()

    largest, before = stepped(1e6)
    _, after = stepped(0.998 * largest)
    shares = [float((new != old).float().mean()) for new, old in zip(after, before, strict=True)]
    clipped = [share for share in shares if share > 0]
    assert len(clipped) == 2, "queries and keys of the head with the largest logit"
    assert all(0.05 < share < 0.4 for share in clipped), "0.001 of a weight is 0.13 to 0.26 of a unit"


def clip_around_frozen_heads(how: str, stage: int) -> dict[str, list[float]]:
    """By layer, how far a step at a learning rate of zero changes queries, keys and values of its fused weight.

    The first layer is frozen by its flag or by a gradient of zero, the second has queries without a gradient.
    """
    net = MODELS["gpt"]()
    still = {"lr": 0.0, "adam_lr": 0.0, "weight_decay": 0.0, "qk_clip": {"tau": 0.01}}
    adam = {"muon_exclude": ["qkv"]} if "AdamW" in how else {}
    engine = make_engine(net, ds_config(stage=stage, clip=0.0, optimizer=with_params(**still, **adam)))
    first, second = (block.qkv.weight for block in net.blocks)
    rows = torch.ones(36, 1)
    rows[:12] = 0
    second.register_hook(lambda gradient: gradient * rows.to(gradient))
    if "flag" in how:
        first.requires_grad_(False)
    else:
        first.register_hook(torch.zeros_like)
    train_engine(engine, 1)
    first.requires_grad_(True)
    found, start = fp32_weights(engine), dict(MODELS["gpt"]().named_parameters())
    engine.destroy()
    names = [f"blocks.{layer}.qkv.weight" for layer in (0, 1)]
    return {name: [float(x.abs().max()) for x in (found[name] - start[name].detach()).split(12)] for name in names}


@pytest.mark.sample(4)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("how", ["flag", "zeros", "flag, AdamW"])
def test_heads_that_stand_still_are_not_scaled(how: str, stage: int) -> None:
    """A frozen layer, and queries without a gradient beside keys that have one; AdamW knows no matrices."""
    for rank in run(clip_around_frozen_heads, 2, how=how, stage=stage):
        assert rank["blocks.0.qkv.weight"] == [0, 0, 0]
        queries, keys, values = rank["blocks.1.qkv.weight"]
        assert (queries > 0) == ("AdamW" in how) and keys > 0 and values == 0
