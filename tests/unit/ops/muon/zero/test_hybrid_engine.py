# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's hybrid engine: steps between phases of generation, which sees the new weights."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from helpers.distributed import run
from helpers.engine_state import differing, snapshot
from helpers.models import GLOBAL_BATCH, full_weights, initialize_
from helpers.oracles import route, train_oracle
from helpers.parity import assert_parity
from helpers.training import ORACLE, ds_config, fp32_weights, make_engine

transformers = pytest.importorskip("transformers")
pytest.importorskip("deepspeed.runtime.rollout", reason="this DeepSpeed has none")

STEPS, VOCAB, TIME, NEW = 3, 19, 6, 4
IDS = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
SIZES = IDS | {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 32}
CONFIGS = {
    "opt": transformers.OPTConfig(
        hidden_size=16, ffn_dim=24, word_embed_proj_dim=16, dropout=0.0, enable_bias=False, **SIZES
    ),
    "qwen3": transformers.Qwen3Config(
        hidden_size=16, intermediate_size=24, num_key_value_heads=2, head_dim=4, tie_word_embeddings=False, **SIZES
    ),
    "llama": transformers.LlamaConfig(hidden_size=16, intermediate_size=24, num_key_value_heads=4, **SIZES),
}


def build(kind: str, seed: int = 0) -> nn.Module:
    net = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind])
    initialize_(net, seed)
    return net


def engine_for(kind: str, seed: int = 0, **config: Any) -> Any:
    engine = make_engine(build(kind, seed), ds_config(hybrid_engine={"enabled": True}, **config))
    assert type(engine).__name__ == "DeepSpeedHybridEngine"
    return engine


class WithLoss(nn.Module):
    """What the oracle trains."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return loss_of(self.net, inputs, targets)


def loss_of(net: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy, summed over time, mean over the batch; arguments (batch, time), int64."""
    logits = net(input_ids=inputs, use_cache=False).logits.flatten(0, 1)
    return F.cross_entropy(logits, targets.flatten(), reduction="sum") / len(inputs)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets (GLOBAL_BATCH, TIME), one token apart; none is padding."""
    text = torch.randint(1, VOCAB, (GLOBAL_BATCH, TIME + 1), generator=torch.Generator().manual_seed(step))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def generated(engine: Any, way: str = "generate") -> Tensor:
    """What the engine's model writes after some prompts, in its phase of generation; by `way` as a rollout."""
    from deepspeed.runtime.rollout import RolloutRequest, SamplingConfig, build_rollout

    prompts = batch(99)[0]
    engine.eval()
    if way == "rollout":
        tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=None)
        rollout = build_rollout(SimpleNamespace(engine="hybrid_engine"), engine, tokenizer)
        request = RolloutRequest(prompts, torch.ones_like(prompts))
        text = rollout.generate(request, SamplingConfig(max_new_tokens=NEW, temperature=0.0)).input_ids
    else:
        text = write(engine.module, prompts)
    engine.train()
    return text


def write(net: Any, prompts: Tensor) -> Tensor:
    with torch.no_grad():
        return net.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=NEW, do_sample=False)


def expected_text(kind: str, weights: dict[str, Tensor]) -> Tensor:
    """What a model of its own with these weights writes."""
    net = build(kind)
    net.load_state_dict(weights, strict=False)
    return write(net.eval(), batch(99)[0])


def step_on(engine: Any, step: int, factor: float = 1.0) -> None:
    """One step on this rank's share; the last rank's loss is multiplied by `factor`."""
    share = GLOBAL_BATCH // dist.get_world_size()
    inputs, targets = (part[dist.get_rank() * share :][:share] for part in batch(step))
    is_last = dist.get_rank() == dist.get_world_size() - 1
    engine.backward(loss_of(engine, inputs, targets) * (factor if is_last else 1.0))
    engine.step()


def train(kind: str, way: str, **config: Any) -> tuple[dict[str, Tensor], list[tuple[Tensor, Tensor]]]:
    """Master weights, and before each step and at the end what was written and what had to be."""
    engine = engine_for(kind, **config)
    texts = []
    for step in range(STEPS + 1):
        texts.append((generated(engine, way), expected_text(kind, full_weights(engine.module))))
        if step < STEPS:
            step_on(engine, step)
    weights = fp32_weights(engine)
    engine.destroy()
    return weights, texts


def oracle(kind: str, frozen: str | None = None) -> Any:
    """The reference in fp64, one module of which may be frozen."""
    net = WithLoss(build(kind))
    if frozen is not None:
        net.net.get_submodule(frozen).requires_grad_(False)
    adam = ["net.model.embed", "net.model.decoder.embed", "net.lm_head"]
    found = train_oracle(net, batch, STEPS, route(net, adam), ORACLE)
    for weights in (found.weights, found.initial):
        weights.update({name.removeprefix("net."): weights.pop(name) for name in list(weights)})
    return found


@pytest.mark.sample(4)
@pytest.mark.parametrize(("kind", "way"), [("opt", "generate"), ("qwen3", "rollout")])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_equals_the_oracle_and_generation_sees_every_step(stage: int, kind: str, way: str) -> None:
    reference = oracle(kind)
    for weights, texts in run(train, 2, kind=kind, way=way, stage=stage):
        assert_parity(weights, reference)
        assert all(text.equal(wanted) for text, wanted in texts)
        assert len({str(text) for text, _ in texts}) == STEPS + 1, "every step changes what is written"


def through_bad_steps(bad: list[float], **config: Any) -> tuple[list[list[str]], dict[str, Tensor]]:
    """What changed in steps whose loss on the last rank is infinite or no number; everything after good ones."""
    engine = engine_for("opt", **config)
    changes = []
    for step in range(STEPS):
        for factor in bad:
            generated(engine)
            before = snapshot(engine)
            step_on(engine, step, factor)
            changes.append(differing(before, snapshot(engine)))
        step_on(engine, step)
    result = snapshot(engine)
    engine.destroy()
    return changes, result


@pytest.mark.sample(2)
@pytest.mark.parametrize("config", [{"stage": 0}, {"stage": 1}, {"stage": 2, "dtype": "bf16"}, {"stage": 3}], ids=str)
def test_a_bad_step_leaves_no_trace(config: dict[str, Any]) -> None:
    bad = [math.nan, math.inf]
    clean, through = (run(through_bad_steps, 2, bad=bad[:count], **config) for count in (0, 2))
    for (_, wanted), (changes, got) in zip(clean, through, strict=True):
        assert changes == [[]] * (2 * STEPS)
        assert differing(got, wanted) == []


def resumed(folder: str, **config: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Everything after a save between two steps, and after a load into another engine and the second step there."""
    found = []
    for load in (False, True):
        engine = engine_for("opt", seed=7 if load else 0, **config)
        if load:
            engine.load_checkpoint(folder)
        else:
            step_on(engine, 0)
            engine.save_checkpoint(folder)
        generated(engine)
        step_on(engine, 1)
        found.append(snapshot(engine))
        engine.destroy()
    return found[0], found[1]


@pytest.mark.sample(2)
@pytest.mark.parametrize("config", [{"stage": 3}, {"stage": 2, "dtype": "bf16"}, {"stage": 1}, {"stage": 0}], ids=str)
def test_resume_is_exact(config: dict[str, Any], tmp_path: Path) -> None:
    for wanted, got in run(resumed, 2, folder=str(tmp_path), **config):
        assert differing(wanted, got) == []


# ---- weights shared with inference containers -------------------------------------------------------------------


def container_weights(engine: Any) -> list[tuple[Tensor, Tensor]]:
    """What the container of each layer generates with, and the weights of the layer; at stage 3 both are gathered."""
    from deepspeed.runtime.zero import GatheredParameters

    pairs = []
    with GatheredParameters(list(engine.module.parameters())):
        for container, layer in zip(engine._inference_containers, engine.module.model.layers, strict=True):
            held, mlp, own = container.module, layer.mlp, layer.self_attn
            qkv = torch.cat([own.q_proj.weight, own.k_proj.weight, own.v_proj.weight])
            parts = [held.attention.attn_qw, held.attention.attn_kw, held.attention.attn_vw]
            pairs.append((torch.cat(parts) if engine.Z3_enabled else held.attention.attn_qkvw, qkv))
            up_gate = torch.cat([mlp.up_proj.weight, mlp.gate_proj.weight])
            parts = [held.mlp.inter_up_w, held.mlp.inter_gate_w]
            pairs.append((torch.cat(parts) if engine.Z3_enabled else held.mlp.inter_w, up_gate))
            pairs += [(held.attention.attn_ow, own.o_proj.weight), (held.mlp.output_w, mlp.down_proj.weight)]
        return [(used.detach().clone(), weight.detach().clone()) for used, weight in pairs]


def train_with_containers(stage: int) -> tuple[dict[str, Tensor], list[list[tuple[Tensor, Tensor]]]]:
    """Master weights, and after each step what the containers hold. Their operators are DeepSpeed's own in Python."""
    from deepspeed.ops.transformer.inference.op_binding.base import BaseOp

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BaseOp, "inference_module", SimpleNamespace())
        engine = engine_for("llama", stage=stage)
    assert len(engine._inference_containers) == 2
    held = []
    for step in range(STEPS):
        step_on(engine, step)
        engine.eval()
        held.append(container_weights(engine))
        engine.train()
    weights = fp32_weights(engine)
    engine.destroy()
    return weights, held


@pytest.mark.sample(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_inference_containers_hold_the_weights_of_every_step(stage: int) -> None:
    """Generation itself needs DeepSpeed's CUDA operators. With any optimizer DeepSpeed freezes the head of such models,
    because its own linear layer for inference does so with the weight that they share.
    """
    reference = oracle("llama", frozen="lm_head")
    for weights, held in run(train_with_containers, 2, stage=stage):
        assert_parity(weights, reference)
        for pairs in held:
            assert all(used.equal(weight) for used, weight in pairs)
        assert not any(first.equal(last) for (first, _), (last, _) in zip(held[0], held[-1], strict=True))
