# SPDX-License-Identifier: Apache-2.0
"""Optimizers alone, on one process: ours, torch's, stock's and implementations of AdamW step in turn."""

import copy
import importlib
import sys
from collections.abc import Callable
from typing import Annotated, Any

import torch
from torch import nn

from benchmarks import ranks, report, roofline
from benchmarks.rates import DTYPES, alternate, measure, summary
from benchmarks.training import LAYERS, PhaseClock, stack
from deepspeed.muon.math.newton_schulz import METHODS

Maker = Callable[[nn.Module], torch.optim.Optimizer]
MUON = {"lr": 1e-3, "weight_decay": 0.1, "momentum": 0.95}
ADAMW = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.01}


def of(path: str, takes_model: bool = False, **settings: Any) -> Maker:
    """An optimizer's class by its name, which is imported where it is used: that of ours activates deepspeed-muon."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        module, _, name = path.rpartition(".")
        more = {"model": model} if takes_model else {}
        return getattr(importlib.import_module(module), name)(model.parameters(), **settings, **more)

    return make


def ours(**fixed: Any) -> Maker:
    """Ours, with these of its choices fixed."""
    return of("deepspeed.muon.MuonWithAuxAdam", True, adjust_lr_fn="original", **MUON, **fixed)


OPTIMIZERS = {
    "ours": ours(),
    "ours-torch": ours(kernels="torch"),
    **{
        f"ours-{dtype}-{method}{'-torch' * (kernels == 'torch')}": ours(
            ns_dtype=dtype, wire_dtype="bf16", ns_method=method, kernels=kernels
        )
        for dtype in DTYPES
        for method in METHODS
        for kernels in ("auto", "torch")
    },
    "ours-normuon": ours(normuon=True),
    "ours-muon-eq": ours(muon_eq="rows"),
    "ours-muon-plus": ours(muon_plus=True),
    "ours-cautious": ours(cautious_weight_decay=True),
    "ours-schedules": ours(momentum_start=0.85, muon_weight_decay_steps=1000),
    "ours-momentum-bf16": ours(momentum_dtype="bf16"),
    "ours-momentum-int8": ours(momentum_dtype="int8"),
    "torch-muon": of("torch.optim.Muon", **MUON),
    "stock-muon": of("deepspeed.runtime.zero.muon.original_muon.SingleDeviceMuon", **MUON),
    "adamw": of("torch.optim.AdamW", **ADAMW),
    "adamw-foreach": of("torch.optim.AdamW", foreach=True, **ADAMW),
    "adamw-fused": of("torch.optim.AdamW", fused=True, **ADAMW),
    "cpu-adam": of("deepspeed.ops.adam.DeepSpeedCPUAdam", adamw_mode=True, **ADAMW),
}


def rank(model: str, layers: int, hidden: int, optimizers: list[str], rounds: int, device: str) -> dict[str, Any]:
    """Step them in turn: seconds by name, how far each one's first change is from the first's; of ours the phases."""
    start = stack(model, layers, hidden, device)
    gradients, models, built = [torch.randn_like(p) * 1e-3 for p in start.parameters()], {}, {}
    for name in optimizers:
        models[name] = copy.deepcopy(start)
        for parameter, gradient in zip(models[name].parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()
        try:
            built[name] = OPTIMIZERS[name](models[name])
        except Exception as error:  # a just-in-time build fails in many ways; the others still count
            print(f"{name} is left out: {type(error).__name__}: {error}", file=sys.stderr)
    steps = {name: optimizer.step for name, optimizer in built.items()}
    kernels = {name: built[name].context.kernels for name in built if name.startswith("ours")}
    clock = PhaseClock(built[next(iter(kernels or built))], device)
    first = alternate(steps, device, 0)
    apart = {name: distance(models[name], models[next(iter(built))], start) for name in built}
    clock.take()
    times = alternate(steps, device, rounds - 1, 600)
    phases = {name: spent / rounds for name, spent in clock.take().items()}
    facts = [
        [built[name].context.kernels.name, roofline.has_symmetric(built[name].context.kernels)] for name in kernels
    ]
    return {"first": first, "times": times, "apart": apart, "phases": phases, "kernels": facts}


@torch.no_grad()
def distance(a: nn.Module, b: nn.Module, start: nn.Module) -> float:
    """How far the changes of two models are apart, relative to the second's."""
    triples = zip(a.parameters(), b.parameters(), start.parameters(), strict=True)
    sums = [(float((p - q).square().sum()), float((q - s).square().sum())) for p, q, s in triples]
    return (sum(difference for difference, _ in sums) / sum(change for _, change in sums)) ** 0.5


def single(
    optimizers: Annotated[tuple[str, ...], OPTIMIZERS] = ("ours", "torch-muon", "adamw-fused"),
    layers: int = 8,
    hidden: int = 512,
    model: Annotated[str, LAYERS] = "block",
    rounds: int = 12,
    threads: int = 2,
    device: Annotated[str, ("cpu", "cuda")] = "cpu",
    output: str = "",
) -> str:
    """One step of the optimizer alone, on one process: deepspeed-muon, torch.optim.Muon, AdamW, ...

    The same matrices, fp32 parameters and gradients for all; the optimizers step in turn. Beside it the floor of a step
    of Muon, as a whole and by phase. The AdamWs of a CPU on 20 M elements: --optimizers adamw adamw-foreach adamw-fused
    cpu-adam --model flat --hidden 4472 --layers 1 --threads 1 --output aux-adam.

    Args:
        optimizers: which; ours-torch is ours with the plain PyTorch twin of every kernel, ours-DTYPE-METHOD[-torch] has
            these fixed, to hold what ours chooses against, ours-normuon and its like have a rule
        layers: of the model
        hidden: width of a layer
        model: matrices of a layer: block has three, qwen those of Qwen3-1.7B at 2048, flat one
        rounds: timed steps of each
        threads: of the process
        device: where
        output: base name of the result files
    """
    setting = {"model": model, "layers": layers, "hidden": hidden, "rounds": rounds, "device": device}
    rates = measure(1, threads, device)
    (found,) = ranks.run(rank, setting | {"optimizers": optimizers}, 1, 900, threads, device)
    rates = rates.best(measure(1, threads, device))  # before and after: what else runs on the machine changes
    shapes, ((kernels, symmetric), *_) = LAYERS[model](hidden), (*found["kernels"], ("", False))
    floor, _ = roofline.floor(shapes * layers, 0, 1, rates, symmetric=symmetric)
    base, rows, spent = next(iter(found["times"])), [], {name: 1e3 * time for name, time in found["phases"].items()}
    medians = {name: summary(times)["median ms"] for name, times in found["times"].items()}
    reference = "torch-muon" if "torch-muon" in medians else base
    for name, times in found["times"].items():
        row = {"optimizer": name, "first step ms": 1e3 * found["first"][name][0]} | summary(times)
        row[f"speed / {reference}"] = medians[reference] / medians[name]
        if not name.startswith(("adamw", "cpu-adam")):
            least = 1e3 * sum(floor)
            row |= {"floor ms": least, "time / floor": medians[name] / least}
            row["fastest / floor"] = row["fastest ms"] / least  # rates are the best that were seen, too
        rows.append(row | {f"first change, from that of {base}": found["apart"][name]})
    of_ours = ""
    if kernels:
        passes, (least, least_passes, _) = spent["prepare"] + spent["apply"], (1e3 * part for part in floor)
        of_ours = f"Of ours, with kernels {kernels}: Newton-Schulz {spent['newton_schulz']:.3g} ms, floor {least:.3g}; "
        of_ours += f"elementwise {passes:.3g} ms, floor {least_passes:.3g} (means)."
    sizes = ", ".join(f"{rows}x{cols}" for rows, cols in shapes)
    caption = f"{layers} x {{{sizes}}}, fp32 parameters and gradients; {rounds} alternating steps. {rates}"
    changed = f"{threads}-threads" * (threads != 2), f"{model}-{layers}x{hidden}" * ((layers, hidden) != (8, 512))
    changed = *changed, "plain" * ("ours-torch" in optimizers), device * (device != "cpu")
    name = output or report.name_of("single", *changed)
    chart = report.bars(rows, lambda row: row["optimizer"], "median ms", unit="milliseconds of a step")
    title = f"The optimizer alone, one process, {threads} threads"
    return report.write(name, title, rows, caption, report.table(rows), of_ours, draw=chart)
