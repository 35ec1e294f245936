# SPDX-License-Identifier: Apache-2.0
"""What it costs a training step to see attention logits, on one process."""

import copy
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import ranks, report
from benchmarks.rates import alternate, summary

VARIANTS = ("without", "auto", "exact", "sampled", "bound")


class Layer(nn.Module):
    """Causal attention and a feed-forward part, each beside the residual stream."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(hidden, 4 * hidden, bias=False), nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, tokens, hidden]`` to the same."""
        normal = F.layer_norm(x, x.shape[-1:])
        projections = (project(normal) for project in (self.q_proj, self.k_proj, self.v_proj))
        heads = (each.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for each in projections)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.o_proj(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(F.layer_norm(x, x.shape[-1:]))).square())


def rank(layers: int, hidden: int, heads: int, tokens: int, batch: int, rounds: int, device: str) -> dict[str, Any]:
    """Train copies of a model in turn: seconds by variant."""
    from deepspeed.muon import MuonWithAuxAdam

    start = nn.Sequential(*(Layer(hidden, heads) for _ in range(layers))).to(device)
    x = torch.randn(batch, tokens, hidden, device=device)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    steps = {}
    for name in VARIANTS:
        model = copy.deepcopy(start)
        clip = {} if name == "without" else {"qk_clip": {"logits": name}}
        steps[name] = partial(step, model, MuonWithAuxAdam(model.parameters(), model=model, lr=1e-3, **clip))
    alternate(steps, device, 1)
    return {"times": alternate(steps, device, rounds, 600)}


def clip(
    layers: int = 4,
    hidden: int = 512,
    heads: int = 8,
    tokens: int = 1024,
    batch: int = 2,
    rounds: int = 9,
    threads: int = 2,
    device: Annotated[str, ("cpu", "cuda")] = "cpu",
    output: str = "",
) -> str:
    """A training step with QK-clip by how logits are found: forward, backward and the optimizer, fp32, in turn.

    Args:
        layers: of the model
        hidden: its width
        heads: of each layer
        tokens: of a sequence
        batch: sequences of a step
        rounds: timed steps of each
        threads: of the process
        device: where
        output: base name of the result files
    """
    setting = {"layers": layers, "hidden": hidden, "heads": heads, "tokens": tokens, "batch": batch}
    (found,) = ranks.run(rank, setting | {"rounds": rounds, "device": device}, 1, 900, threads, device)
    rows = [{"logits": name} | summary(times) for name, times in found["times"].items()]
    for row in rows:
        row["of a step without"] = row["median ms"] / rows[0]["median ms"]
    caption = ", ".join(f"{value} {name}" for name, value in setting.items()) + f", {threads} threads, fp32."
    name = output or report.name_of("clip")
    return report.write(name, "A training step with QK-clip", rows, caption, report.table(rows))
