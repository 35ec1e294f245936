# SPDX-License-Identifier: Apache-2.0
"""One rank of gpu.py: the step of a stack of matrices through deepspeed.initialize, alone or over the wire.

Started as `gpu_step.py SETTING_AS_JSON RESULT_FILE`. With `wire`, the rank sends every matrix to itself through the
exchange: the collectives of a step with many ranks, on one.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gpu_timing as timing
from deepspeed.muon.plan.plan import Bucket, Plan

#: Llama 3.2 1B: width, of its keys and values, of its feed-forward network, layers.
LLAMA_1B, QUICK = (2048, 512, 8192, 16), (64, 32, 96, 2)


class Layer(nn.Module):
    """The seven matrices of a Llama's layer, without the attention between them."""

    def __init__(self, width: int, narrow: int, inside: int) -> None:
        super().__init__()
        shapes = {"q": (width, width), "k": (width, narrow), "v": (width, narrow), "o": (width, width)}
        shapes |= {"gate": (width, inside), "up": (width, inside), "down": (inside, width)}
        self.linear = nn.ModuleDict({name: nn.Linear(*shape, bias=False) for name, shape in shapes.items()})

    def forward(self, x: Tensor) -> Tensor:
        """``[tokens, width]`` to the same; every matrix gets a gradient."""
        f = self.linear
        mixed = torch.cat([f["k"](x), f["v"](x)], -1).sum(-1, keepdim=True)
        x = x + f["o"](f["q"](x) + mixed)
        return x + f["down"](nn.functional.silu(f["gate"](x)) * f["up"](x))


def matrices(sizes: tuple[int, int, int, int]) -> list[tuple[int, int]]:
    """(rows, cols) of every matrix."""
    width, narrow, inside, layers = sizes
    of_layer = [(width, width)] * 2 + [(narrow, width)] * 2 + [(inside, width)] * 2 + [(width, inside)]
    return of_layer * layers


def over_the_wire(plan: Plan) -> Plan:
    """The plan of one rank, which owns and holds all, with every run sent from itself to itself."""
    return dataclasses.replace(plan, buckets=tuple(map(_sent, plan.buckets)))


def _sent(bucket: Bucket) -> Bucket:
    at, runs, received = 0, [], []
    for run in bucket.runs:
        runs.append(dataclasses.replace(run, owned=False, at=at))
        received.append((at, run.at, run.length))
        at += run.length
    moved = {"runs": tuple(runs), "received": tuple(received), "send_counts": (at,), "receive_counts": (at,)}
    return dataclasses.replace(bucket, **moved, travels=True)


def build(setting: dict[str, Any]) -> Any:
    """An engine of stage 1 in bf16."""
    import deepspeed

    width, narrow, inside, layers = setting["sizes"]
    torch.manual_seed(0)
    with torch.device("cpu" if setting["device"] == "cpu" else "cuda"):
        net = nn.Sequential(*(Layer(width, narrow, inside) for _ in range(layers)))
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "bf16": {"enabled": True},
        "steps_per_print": 10**9,
        "optimizer": {"type": "Muon", "params": {"lr": 1e-3, "muon_include": ["weight"]}},
        "zero_optimization": {"stage": 1},
    }
    engine = deepspeed.initialize(model=net, config=config, model_parameters=net.parameters())[0]
    if setting["wire"]:
        bound = engine.basic_optimizer._bound
        for key, part in bound.items():
            part.exchange.group = torch.distributed.group.WORLD if part.exchange.group is None else part.exchange.group
            bound[key] = dataclasses.replace(part, plan=over_the_wire(part.plan))
    return engine


def run(setting: dict[str, Any]) -> dict[str, Any]:
    """Seconds of the optimizer's step and of the engine's; the sum of the weights after all."""
    engine, device = build(setting), setting["device"]
    optimizer, inner = engine.basic_optimizer, []
    whole = optimizer.step
    optimizer.step = lambda *args: inner.append(timing.once(lambda: whole(*args), device))
    outer = []
    x = torch.randn(8, setting["sizes"][0], device=engine.device, dtype=torch.bfloat16)
    for step in range(setting["steps"] + 3):
        engine.backward(engine(x).float().square().mean())
        spent = timing.once(engine.step, device)
        if step < 3:  # kernels are compiled and tuned, buffers allocated
            inner.clear()
        else:
            outer.append(spent)
    peak = torch.cuda.max_memory_allocated() if device != "cpu" else 0
    weights = [p.detach().double().cpu() for p in engine.module.parameters()]
    return {
        "optimizer": inner,
        "engine": outer,
        "kernels": optimizer.kernels.name,
        "peak GB": peak / 1e9,
        "weights": float(sum((i + 1) * (w.sum() + w.abs().sum()) for i, w in enumerate(weights))),
    }


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(run(json.loads(sys.argv[1]))))
