# SPDX-License-Identifier: Apache-2.0
"""Optimizers alone, on one process: ours, torch's, stock's and implementations of AdamW step in turn."""

import copy
import statistics
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import torch
from torch import nn

from benchmarks import ranks, report, roofline
from benchmarks.rates import alternate, measure, summary
from benchmarks.training import LAYERS, Layer, PhaseClock

MUON = {"lr": 1e-3, "weight_decay": 0.1, "momentum": 0.95}
ADAMW = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.01}


def _ours(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    from deepspeed.muon import MuonWithAuxAdam

    return MuonWithAuxAdam(model.parameters(), model=model, adjust_lr_fn="original", **MUON, **settings)


def _stock(model: nn.Module) -> torch.optim.Optimizer:
    from deepspeed.runtime.zero.muon.original_muon import SingleDeviceMuon

    return SingleDeviceMuon(model.parameters(), **MUON)


def _adamw(**settings: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.AdamW(model.parameters(), **ADAMW, **settings)


def _cpu_adam(model: nn.Module) -> torch.optim.Optimizer:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(model.parameters(), adamw_mode=True, **ADAMW)


#: Both Muons have torch's scale.
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "ours": _ours,
    "ours-torch": lambda model: _ours(model, kernels="torch"),
    "torch-muon": lambda model: torch.optim.Muon(model.parameters(), nesterov=True, ns_steps=5, **MUON),
    "stock-muon": _stock,
    "adamw": _adamw(),
    "adamw-foreach": _adamw(foreach=True),
    "adamw-fused": _adamw(fused=True),
    "cpu-adam": _cpu_adam,
}


def rank(model: str, layers: int, hidden: int, optimizers: list[str], rounds: int, device: str) -> dict[str, Any]:
    """Step them in turn: seconds by name, how far each one's first change is from the first's; of ours the phases."""
    torch.manual_seed(0)
    with torch.device(device):
        start = nn.Sequential(*[Layer(hidden, LAYERS[model](hidden)) for _ in range(layers)])
    gradients, models, built = [torch.randn_like(p) * 1e-3 for p in start.parameters()], {}, {}
    for name in optimizers:
        twin = copy.deepcopy(start)
        for parameter, gradient in zip(twin.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()
        try:
            models[name], built[name] = twin, OPTIMIZERS[name](twin)
        except Exception as error:  # a just-in-time build fails in many ways; the others still count
            print(f"{name} is left out: {type(error).__name__}: {error}", file=sys.stderr)
    steps = {name: optimizer.step for name, optimizer in built.items()}
    clock = PhaseClock(
        next((built[name] for name in built if name.startswith("ours")), next(iter(built.values()))), device
    )
    first = alternate(steps, device, 0)
    apart = {name: distance(models[name], models[optimizers[0]], start) for name in built}
    clock.take()
    times = alternate(steps, device, rounds - 1, 600)
    phases = {name: spent / rounds for name, spent in clock.take().items()}
    kernels = {name: built[name].kernels for name in built if name.startswith("ours")}
    facts = {name: [table.name, roofline.has_symmetric(table)] for name, table in kernels.items()}
    return {"first": first, "times": times, "apart": apart, "phases": phases, "kernels": facts}


@torch.no_grad()
def distance(a: nn.Module, b: nn.Module, start: nn.Module) -> float:
    """How far the changes of two models are apart, relative to the second's."""
    difference = sum(float((p - q).square().sum()) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    change = sum(float((q - s).square().sum()) for q, s in zip(b.parameters(), start.parameters(), strict=True))
    return (difference / change) ** 0.5


def single(
    optimizers: Annotated[tuple[str, ...], OPTIMIZERS] = ("ours", "torch-muon", "adamw-fused"),
    layers: int = 8,
    hidden: int = 512,
    model: Annotated[str, LAYERS] = "block",
    rounds: int = 12,
    threads: int = 2,
    device: str = "cpu",
    output: str = "",
) -> str:
    """One step of the optimizer alone, on one process: deepspeed-muon, torch.optim.Muon, AdamW, ...

    The same matrices, fp32 parameters and gradients for all; the optimizers step in turn. Beside it the floor of a step
    of Muon, as a whole and by phase. The AdamWs of a CPU on 20 M elements: --optimizers adamw adamw-foreach adamw-fused
    cpu-adam --model flat --hidden 4472 --layers 1 --threads 1 --output aux-adam.

    Args:
        optimizers: which; ours-torch is ours with the plain PyTorch twin of every kernel
        layers: of the model
        hidden: width of a layer
        model: matrices of a layer: block has three, qwen those of Qwen3-1.7B at 2048, flat one
        rounds: timed steps of each
        threads: of the process
        device: cpu or cuda
        output: base name of the result files
    """
    setting = {"model": model, "layers": layers, "hidden": hidden, "rounds": rounds, "device": device}
    rates = measure(1, threads, device)
    (found,) = ranks.run(rank, setting | {"optimizers": optimizers}, 1, 900, threads, device)
    shapes = LAYERS[model](hidden)
    kernels, has_symmetric = next(iter(found["kernels"].values()), ("", False))
    floor = roofline.floor(shapes * layers, roofline.Sharding(0), rates, symmetric=has_symmetric)
    rows, phases = rows_of(found, floor), []
    if kernels:
        spent = found["phases"]
        passes = spent["prepare"] + spent["apply"]
        parts = (
            ("Newton-Schulz", spent["newton_schulz"], floor.newton_schulz),
            ("elementwise", passes, floor.elementwise),
        )
        for name, time, least in parts:
            phases.append(
                {"phase of ours": name, "mean ms": 1e3 * time, "floor ms": 1e3 * least, "time / floor": time / least}
            )
    caption = (
        f"{layers} x {{{', '.join(f'{r}x{c}' for r, c in shapes)}}}, fp32 parameters and gradients"
        f"{f'; kernels of ours: {kernels}' * bool(kernels)}. {rounds} alternating steps. {rates}"
    )
    changed = f"{threads}-threads" * (threads != 2), f"{model}-{layers}x{hidden}" * ((layers, hidden) != (8, 512))
    name = output or report.name_of(
        "single", "plain" * ("ours-torch" in optimizers), *changed, device * (device != "cpu")
    )
    chart = report.bars(rows, lambda row: row["optimizer"], "median ms", unit="milliseconds of a step")
    title, tables = f"The optimizer alone, one process, {threads} threads", [report.table(t) for t in (rows, phases)]
    return report.write(name, title, [*rows, *phases], caption, *tables, draw=chart)


def rows_of(found: Mapping[str, Any], floor: roofline.Floor) -> list[dict[str, Any]]:
    """A row per optimizer; the floor is that of Muon's step."""
    reference, rows = "torch-muon" if "torch-muon" in found["times"] else next(iter(found["times"])), []
    for name, times in found["times"].items():
        row = {"optimizer": name, "first step ms": 1e3 * found["first"][name][0]} | summary(times)
        row[f"speed / {reference}"] = statistics.median(found["times"][reference]) / statistics.median(times)
        if name.startswith("ours") or "muon" in name:
            row |= {"floor ms": 1e3 * floor.total, "time / floor": row["median ms"] / 1e3 / floor.total}
        rows.append(row | {f"first change apart from {next(iter(found['apart']))}": found["apart"][name]})
    return rows
