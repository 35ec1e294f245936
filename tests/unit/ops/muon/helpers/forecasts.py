# SPDX-License-Identifier: Apache-2.0
"""Comparison of the forecast for a model with what an engine plans."""

from typing import Any

import torch
from torch import nn

from deepspeed.muon.cli.forecast import ABSMAX_BYTES, StepCost, StepPart, group_specs, lay_out, step_cost
from deepspeed.muon.config.schema import parse
from deepspeed.muon.exchange.plan import CostModel
from deepspeed.muon.math.newton_schulz import schedule
from deepspeed.muon.zero.read_config import Layout
from helpers.distributed import run
from helpers.engine_state import owned_tensors
from helpers.models import MODELS
from helpers.plans import counted_cost, make_plan
from helpers.training import PARAMS, ds_config, make_engine

STEPS, ITEMSIZE = schedule("simple"), 4


def cost_of(ns_method: str) -> CostModel:
    return counted_cost(ns_method, STEPS, "fp32", ITEMSIZE, "cpu")


def built(model: str) -> nn.Module:
    """Return a model by its name, or of a config file of transformers."""
    if model in MODELS:
        return MODELS[model]()
    import transformers

    settings = transformers.AutoConfig.from_pretrained(model)
    is_causal = type(settings) in transformers.AutoModelForCausalLM._model_mapping
    kind = transformers.AutoModelForCausalLM if is_causal else transformers.AutoModel
    return kind.from_config(settings).float()


def bound(model: str, **config: Any) -> dict[str, Any]:
    """Return what an engine has planned on this rank."""
    engine = make_engine(built(model), ds_config(**config))
    optimizer = engine.basic_optimizer
    itemsize = optimizer.exchange.dtype.itemsize
    states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    owners: dict[str, set[int]] = {}
    for plan, partition in zip(optimizer.plans, optimizer.partitions, strict=True):
        for block, owner in zip(partition.blocks, plan.owners, strict=True):
            owners.setdefault(block.shard.spec.name, set()).add(owner)
    facts = {
        "digests": [plan.digest for plan in optimizer.plans],
        "owners": [plan.owners for plan in optimizer.plans],
        "buckets": [len(plan.buckets) for plan in optimizer.plans],
        "sent": [plan.sent_elements * itemsize for plan in optimizer.plans],
        "state": sum(tensor.nbytes for tensor in (*states, *owned_tensors(optimizer))),
        "memory": {
            "weights": sum(getattr(p, "ds_tensor", p).nbytes for p in engine.module.parameters()),
            "fp32_weights": sum(tensor.nbytes for part in optimizer.all_partitions for tensor in part.tensors),
            "gradients": getattr(getattr(engine.optimizer, "grad_partitions_flat_buffer", None), "nbytes", None),
        },
        "wrapper": type(engine.optimizer).__name__,
        "routes": {
            spec.name: {
                "shape": list(spec.shape),
                "rule": "Muon" if spec.use_muon else "AdamW",
                "blocks": len(spec.blocks),
                "owners": sorted(owners.get(spec.name, ())),
            }
            for spec in optimizer.specs.values()
        },
        "reasons": {spec.name: spec.reason for spec in optimizer.specs.values()},
    }
    engine.destroy()
    return facts


def forecast(model: str, layout: Layout, params: dict[str, Any] = PARAMS) -> tuple[list[StepPart], list[StepCost]]:
    parts = lay_out(group_specs(MODELS[model](), parse(params)), layout)
    return parts, [step_cost(part, cost_of(part.group.ns_method)) for part in parts if part.group.use_muon]


def check_against_the_engine(model: str, layout: Layout, **config: Any) -> set[str]:
    """Compare forecast and engine on every rank; return the names of the wrapper classes met."""
    parts, costs = forecast(model, layout, config.get("optimizer", {"params": PARAMS})["params"])
    live = run(bound, layout.world_size, model=model, stage=layout.stage, **config)
    state = sum(part.state_bytes for part in parts)
    for rank, facts in enumerate(live):
        plans = [
            make_plan(part.shards, rank % part.world_size, part.world_size, cost_of(part.group.ns_method))
            for part in (cost.part for cost in costs)
        ]
        assert [plan.digest for plan in plans] == facts["digests"]
        assert [cost.plan.owners for cost in costs] == facts["owners"]
        assert [len(cost.plan.buckets) for cost in costs] == facts["buckets"]
        assert [cost.sent_bytes[rank % cost.part.world_size] for cost in costs] == facts["sent"]
        few = ABSMAX_BYTES * sum(len(p.shards) for p in parts if p.group.momentum_dtype == "int8") if rank else 0
        moments = sum(cost.owner_state_bytes[rank % cost.part.world_size] for cost in costs)
        assert abs(state + moments - facts["state"]) <= few
    return {facts["wrapper"] for facts in live}
