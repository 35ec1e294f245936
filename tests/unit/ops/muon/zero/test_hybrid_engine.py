# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's hybrid engine with inference containers, which share the weights; the table of settings has the rest."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import tensor_parallel
from helpers.distributed import run
from helpers.models import initialize_, train_engine
from helpers.oracles import route, train_oracle
from helpers.parity import assert_parity
from helpers.training import ORACLE, ds_config, fp32_weights, make_engine

pytest.importorskip("deepspeed.runtime.rollout", reason="this DeepSpeed has none")
STEPS = 3


def llama() -> Any:
    """A model for whose layers DeepSpeed has containers: as many heads of keys and values as of queries."""
    kind = tensor_parallel.TinyLlama
    net = kind(kind.config_class(**tensor_parallel.SIZES | {"num_key_value_heads": 6}))
    initialize_(net, 0)
    return net


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
        engine = make_engine(llama(), ds_config(stage=stage, hybrid_engine={"enabled": True}))
    assert len(engine._inference_containers) == 2
    held = []
    for step in range(STEPS):
        train_engine(engine, 1, first_step=step)
        engine.eval()
        held.append(container_weights(engine))
        engine.train()
    weights = fp32_weights(engine)
    engine.destroy()
    return weights, held


@pytest.mark.sample(1)
@pytest.mark.parametrize("stage", [3, 0, 1, 2])
def test_inference_containers_hold_the_weights_of_every_step(stage: int) -> None:
    """Generation itself needs DeepSpeed's CUDA operators. With any optimizer DeepSpeed freezes the head of such models,
    because its own linear layer for inference does so with the weight that they share.
    """
    net = llama()
    net.lm_head.requires_grad_(False)
    reference = train_oracle(net, net.batch, STEPS, route(net, ["model.embed"]), ORACLE)
    for weights, held in run(train_with_containers, 2, stage=stage):
        assert_parity(weights, reference)
        for pairs in held:
            assert all(used.equal(weight) for used, weight in pairs)
        assert not any(first.equal(last) for (first, _), (last, _) in zip(held[0], held[-1], strict=True))
