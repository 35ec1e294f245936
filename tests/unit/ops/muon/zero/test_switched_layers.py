# SPDX-License-Identifier: Apache-2.0
"""Layers whose `requires_grad` is switched off and on during a run, and experts without tokens, stand still meanwhile.

Bits are compared around each step for what stands still; at the end all weights are the oracle's.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from helpers import nvme, pipelines, split_model, tensor_parallel
from helpers.distributed import run
from helpers.engine_state import named_states
from helpers.experts import EXPERTS, WithExperts, global_name, spread_model
from helpers.models import MODELS, fused_parts, train_engine
from helpers.oracles import OracleResult, Part, change_error, route, train_oracle
from helpers.training import ORACLE, ds_config, fp32_weights, make_engine, with_params

STEPS = 5
SAVED = 2
"""The step before which a run with a checkpoint is saved and loaded, while layers are frozen."""
WITHOUT_TOKENS = {1, 2}
"""The steps in which the last expert gets none."""
EXPERT = "layer.deepspeed_moe.experts.deepspeed_experts."
now = 0
"""The step that is trained, for gates."""


@dataclass(frozen=True)
class Kind:
    """A model and how it is trained.

    `model`: for the oracle; `adam`: the matrices that AdamW has; `parts`: of parameters that are several matrices.
    `frozen`: by parameter, the steps in which it is frozen. `engine`: makes one. `step(engine, number)`: trains.
    """

    model: Callable[[], Any]
    frozen: dict[str, set[int]]
    engine: Callable[..., Any]
    step: Callable[[Any, int], Any] = lambda engine, number: train_engine(engine, 1, first_step=number)
    weights: Callable[[Any], dict[str, Tensor]] = fp32_weights
    name: Callable[[str], str] = lambda name: name
    adam: tuple[str, ...] = ()
    parts: Callable[[], dict[str, list[Part]]] = dict


def of_model(name: str, **params: Any) -> Callable[..., Any]:
    return lambda **config: make_engine(MODELS[name](), ds_config(optimizer=with_params(**params), **config))


def pipeline_of(name: str, **config: Any) -> Any:
    return make_engine(pipelines.make_pipeline(name, 2), pipelines.pipeline_config(2, **config))


def tensor_parallel_engine(**config: Any) -> Any:
    settings = ds_config(**config, tensor_parallel={"autotp_size": 2})
    settings["train_micro_batch_size_per_gpu"] *= 2
    return make_engine(tensor_parallel.model("llama"), settings)


def closing(logits: Tensor) -> Tensor:
    """Logits of a gate that keeps tokens from the last expert."""
    closed = torch.zeros_like(logits)
    closed[..., -1] = -1e9 if now in WITHOUT_TOKENS else 0.0
    return logits + closed


def twin() -> nn.Module:
    net = WithExperts(spread=False)
    net.layer.deepspeed_moe.gate.wg.register_forward_hook(lambda gate, args, logits: closing(logits))
    return net


@contextmanager
def closing_gates() -> Iterator[None]:
    """DeepSpeed's gates do so within; the twin's always."""
    from deepspeed.moe import sharded_moe

    original = sharded_moe.top1gating
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded_moe, "top1gating", lambda logits, *args, **more: original(closing(logits), *args, **more))
        yield


def experts_engine(**config: Any) -> Any:
    return make_engine(spread_model(), ds_config(**config))


KINDS: dict[str, Kind] = {
    "layers": Kind(
        MODELS["mlp"],
        {"layers.0.weight": {0, 1}, "layers.1.weight": {1, 2}, "layers.3.weight": {4}, "layers.4.weight": {*range(5)}},
        of_model("mlp"),
    ),
    "blocks": Kind(
        MODELS["fused"],
        {"qkv.weight": {1, 2}, "conv.weight": {2}, "experts.down": {0, 2}, "c_attn.weight": {3, 4}},
        of_model("fused", **split_model.OPTIMIZER["params"]),
        adam=("lm_head",),
        parts=split_model.parts,
    ),
    "experts": Kind(
        twin,
        {f"{EXPERT}0.up.weight": {2, 3}, f"{EXPERT}3.down.weight": {3}, "first.weight": {1, 2}},
        experts_engine,
        name=lambda name: global_name(name, dist.get_rank()),
        adam=("lm_head", "layer.deepspeed_moe.gate"),
    ),
    "tensor parallelism": Kind(
        lambda: tensor_parallel.model("llama"),
        {
            f"model.layers.{i}.{name}.weight": {i + 1, i + 2}
            for i in (0, 1)
            for name in ("self_attn.q_proj", "mlp.down_proj")
        },
        tensor_parallel_engine,
        lambda engine, number: tensor_parallel.train_steps(engine, 1, 2, first=number),
        weights=tensor_parallel.whole_weights,
        adam=("model.embed", "lm_head"),
    ),
    "pipeline": Kind(
        lambda: pipelines.Whole("tied"),
        {"2.qkv.weight": {1, 2}, "2.up.weight": {0}, "3.down.weight": {2, 3}, "3.qkv.weight": {2}},
        partial(pipeline_of, "tied"),
        lambda engine, number: engine.train_batch(pipelines.shares("tied", engine, number)),
        adam=tuple(pipelines.ADAM["tied"]),
        parts=lambda: fused_parts(pipelines.Whole("tied")),
    ),
    "NVMe": Kind(
        nvme.Wide,
        {"up.weight": {1, 2}, "narrow.weight": {2}, "down.weight": {3}},
        lambda swap, **config: nvme.nvme_engine(folder=swap, **config),
        adam=("tokens",),
    ),
}


def reference(kind: Kind, clip: float) -> OracleResult:
    def batch(step: int) -> Any:
        global now
        now = step
        return net.batch(step)

    net, parts = kind.model(), kind.parts()
    routing = route(net, kind.adam) | dict.fromkeys(parts, "muon")
    config = replace(ORACLE, clip=clip)
    return train_oracle(net, batch, STEPS, routing, config, parts=parts, frozen=partial(frozen_in, kind))


def frozen_in(kind: Kind, step: int) -> set[str]:
    return {name for name, steps in kind.frozen.items() if step in steps}


def held(engine: Any) -> dict[str, Tensor]:
    """Weights and momenta of this rank's parameters by name."""
    from deepspeed.utils import safe_get_full_fp32_param

    masters = {spec.name: safe_get_full_fp32_param(param) for param, spec in engine.basic_optimizer.specs.items()}
    states = {name.removesuffix(".momentum_buffer"): state for name, state in named_states(engine).items()}
    return {
        name: torch.cat([masters[name].flatten().clone(), states[name].flatten()])
        for name in masters.keys() & states.keys()
    }


def train(name: str, folder: str, resume: bool, **config: Any) -> dict[str, Tensor]:
    """The weights at the end; with `resume` from a checkpoint that was saved while layers were frozen."""
    global now
    kind, engine = KINDS[name], KINDS[name].engine(**config)
    params = {spec.name: param for param, spec in engine.basic_optimizer.specs.items()}
    own = {kind.name(name): name for name in params}
    for now in range(STEPS):
        switched = {own[name] for name in frozen_in(kind, now) if name in own}
        if "experts" in name and now in WITHOUT_TOKENS:
            still = switched | {own[n] for n in own if n.startswith(f"{EXPERT}{EXPERTS - 1}.") and n.endswith("weight")}
        else:
            still = switched
        before = held(engine)
        for each, param in params.items():
            param.requires_grad_(each not in switched)
        if resume and now == SAVED:
            engine.save_checkpoint(folder)
            engine.destroy()
            engine = kind.engine(**config)
            engine.load_checkpoint(folder)
            params = {spec.name: param for param, spec in engine.basic_optimizer.specs.items()}
            for each, param in params.items():
                param.requires_grad_(each not in switched)
        kind.step(engine, now)
        for param in params.values():
            param.requires_grad_(True)
        after = held(engine)
        for each in before:
            assert torch.equal(before[each], after[each]) == (each in still), (now, each)
    weights = {kind.name(each): weight for each, weight in kind.weights(engine).items()}
    engine.destroy()
    return weights


def train_experts(**config: Any) -> dict[str, Tensor]:
    with closing_gates():
        return train(**config)


CASES: list[tuple[str, int, dict[str, Any]]] = [
    *(("layers", 2, {"stage": stage}) for stage in (0, 1, 2, 3)),
    *(("layers", 2, {"stage": stage, "offload": True, "accumulation": 2}) for stage in (1, 2, 3)),
    ("layers", 3, {"stage": 1, "zero": {"round_robin_gradients": True}}),
    ("layers", 3, {"stage": 3, "zero": {"sub_group_size": 100}}),
    *(("blocks", 2, {"stage": stage}) for stage in (0, 1, 2, 3)),
    *(("blocks", 3, {"stage": stage, "offload": True}) for stage in (1, 2, 3)),
    *(("experts", world, {"stage": stage}) for stage in (0, 1, 2) for world in (2, 4)),
    ("experts", 4, {"stage": 2, "offload": True, "accumulation": 2}),
    *(("tensor parallelism", 2, {"stage": stage}) for stage in (0, 1, 2, 3)),
    ("tensor parallelism", 4, {"stage": 1}),
    ("tensor parallelism", 4, {"stage": 3, "offload": True}),
    *(("pipeline", 4, config) for config in ({}, {"offload": True}, {"stage": 0})),
    *(("NVMe", 2, config) for config in ({}, {"pipelined": True}, {"params": "nvme", "pipelined": True})),
]


@pytest.mark.time_limit(1200)
@pytest.mark.sample(5)
@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(("name", "world", "config"), CASES, ids=str)
def test_what_is_switched_off_stands_still(
    name: str, world: int, config: dict[str, Any], resume: bool, tmp_path: Path
) -> None:
    clip = 0.0 if config.get("stage") == 0 and name == "experts" else 1.0  # there DeepSpeed clips by a mean of norms
    expected = reference(KINDS[name], clip)
    settings = {"name": name, "folder": str(tmp_path), "resume": resume, "clip": clip, **config}
    if name == "NVMe":
        settings["swap"] = str(tmp_path / "swap")
    runner = nvme.run if name == "NVMe" else run
    for weights in runner(train_experts if name == "experts" else train, world, **settings):
        for key, weight in weights.items():
            assert change_error(expected.initial[key], weight, expected.weights[key]) <= 1e-3, key
