# SPDX-License-Identifier: Apache-2.0
"""One step of the optimizer alone, on one process: deepspeed-muon, torch.optim.Muon and fused AdamW.

    python benchmarks/single.py [--threads 2] [--rounds 12] [--layers 8] [--hidden 512] [--kernels torch]

The same matrices, fp32 parameters and gradients for all; the optimizers step in turn (A B C A B C ...). Beside it the
floor of roofline.py, for the whole step and for its phases. With --kernels torch ours runs the plain PyTorch twins.
"""

import argparse
import contextlib
import copy
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

import launcher
import output
import roofline
from deepspeed.muon.kernels import reference
from deepspeed.muon.optimizer import MuonWithAuxAdam
from step_worker import Block
from timing import seconds, summary

OURS, TORCH, ADAMW = "deepspeed-muon", "torch.optim.Muon", "fused AdamW"
SETTINGS = {"lr": 1e-3, "weight_decay": 0.1, "momentum": 0.95}


class Phases:
    """Seconds by phase of the step, as the optimizer names them."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time what runs inside."""
        begin = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - begin


def ours(model: nn.Module, plain: bool) -> MuonWithAuxAdam:
    """Our optimizer with torch's scale; ``plain``: with the PyTorch twin of every kernel."""
    optimizer = MuonWithAuxAdam(model.parameters(), model=model, adjust_lr_fn="original", **SETTINGS)
    if plain:
        optimizer.kernels = reference.OPERATIONS
    return optimizer


def build(setting: dict) -> dict[str, tuple[torch.optim.Optimizer, nn.Module]]:
    """The optimizers by name, each with a model of its own, all from one start and with the same gradients."""
    torch.manual_seed(0)
    start = nn.Sequential(*[Block(setting["hidden"]) for _ in range(setting["layers"])])
    gradients = [torch.randn_like(p) * 1e-3 for p in start.parameters()]
    makers: dict[str, Callable] = {
        OURS: lambda model: ours(model, setting["plain"]),
        TORCH: lambda model: torch.optim.Muon(model.parameters(), nesterov=True, ns_steps=5, **SETTINGS),
        ADAMW: lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True),
    }
    built = {}
    for name, make in makers.items():
        model = copy.deepcopy(start)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()
        built[name] = make(model), model
    return built


def apart(a: nn.Module, b: nn.Module, start: list[torch.Tensor]) -> float:
    """How far the changes of two models are apart, relative to the second's."""
    pairs = list(zip(a.parameters(), b.parameters(), start, strict=True))
    difference = sum((p - q).square().sum().item() for p, q, _ in pairs)
    return (difference / sum((q - s).square().sum().item() for _, q, s in pairs)) ** 0.5


def work(setting: dict) -> dict:
    """The worker: the first step of each, then rounds of one step of each."""
    torch.set_num_threads(setting["threads"])
    built = build(setting)
    optimizer = built[OURS][0]
    initial = [p.detach().clone() for p in built[OURS][1].parameters()]
    first = {name: seconds(found[0].step) for name, found in built.items()}
    with torch.no_grad():
        difference = apart(built[OURS][1], built[TORCH][1], initial)
    times: dict[str, list[float]] = {name: [] for name in built}
    phases: list[dict[str, float]] = []
    for _ in range(setting["rounds"]):
        for name, (candidate, _model) in built.items():
            recorder = optimizer.phase = Phases()
            times[name].append(seconds(candidate.step))
            if name == OURS:
                phases.append(dict(recorder.seconds))
    medians = {name: statistics.median(found[name] for found in phases) for name in phases[0]}
    facts = {"difference": difference, "kernels": optimizer.kernels.name, "phases": medians}
    return facts | {"first": first, "times": times, "symmetric": roofline.has_symmetric(optimizer.kernels)}


def rows_of(result: dict, floor: roofline.Floor) -> list[dict]:
    """One row per optimizer; the floor is that of Muon's step."""
    torch_median = statistics.median(result["times"][TORCH])
    rows = []
    for name, times in result["times"].items():
        row = {"optimizer": name, "first step ms": round(1e3 * result["first"][name], 1)} | summary(times)
        row["speed / torch.optim.Muon"] = torch_median / statistics.median(times)
        if name != ADAMW:
            row |= {"floor ms": 1e3 * floor.total, "time / floor": statistics.median(times) / floor.total}
        rows.append(row)
    return rows


def phases_of(result: dict, floor: roofline.Floor) -> list[dict]:
    """Ours by phase, beside the floor of each."""
    spent = result["phases"]
    elementwise = spent["prepare"] + spent["apply"]
    parts = (
        ("Newton-Schulz", spent["newton_schulz"], floor.newton_schulz),
        ("elementwise", elementwise, floor.elementwise),
    )
    return [
        {"phase of ours": name, "median ms": 1e3 * time, "floor ms": 1e3 * least, "time / floor": time / least}
        for name, time, least in parts
    ]


def draw(rows: list[dict]):
    """A bar per optimizer with its spread, and the floor as a line."""

    def on(axes) -> None:
        medians = [row["median ms"] for row in rows]
        spread = [
            [row["median ms"] - row["fastest ms"] for row in rows],
            [row["slowest ms"] - row["median ms"] for row in rows],
        ]
        axes.barh([row["optimizer"] for row in rows], medians, xerr=spread, capsize=3)
        axes.axvline(rows[0]["floor ms"], color="black", linestyle=":", label="floor of Muon's step")
        axes.set_xlabel("milliseconds of a step")
        axes.legend()

    return on


def report(args: argparse.Namespace, result: dict, rates: roofline.Rates) -> str:
    """Write the files; returns the tables."""
    d, h = args.hidden, 4 * args.hidden
    matrices = [(d, d), (h, d), (d, h)] * args.layers
    floor = roofline.floor(matrices, roofline.Sharding(0), rates, symmetric=result["symmetric"])
    rows, phases = rows_of(result, floor), phases_of(result, floor)
    text = (
        f"# The optimizer alone, one process, {args.threads} threads\n\n"
        f"{args.layers} x {{{d}x{d}, {h}x{d}, {d}x{h}}}, fp32 parameters and gradients; kernels of ours: "
        f"{result['kernels']}. Medians of {args.rounds} alternating steps. {roofline.describe(rates)}\n\n"
        f"{output.table(rows)}\n\n{output.table(phases)}\n\n"
        f"After the first step the changes of ours and of {TORCH} are {result['difference']:.1%} apart."
    )
    deviations = [f"{args.threads}-threads"] * (args.threads != 2) + ["plain"] * (args.kernels == "torch")
    deviations += [f"{args.layers}x{args.hidden}"] * ((args.layers, args.hidden) != (8, 512))
    return output.write(output.path_of("single", *deviations), [*rows, *phases], text, draw(rows))


def main() -> None:
    """Measure the rates, then the optimizers in a process of their own, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12, help="timed steps of each optimizer")
    parser.add_argument("--layers", type=int, default=8, help="blocks of three matrices")
    parser.add_argument("--hidden", type=int, default=512, help="width of a block; inside it is 4 times that")
    parser.add_argument("--kernels", choices=("in-use", "torch"), default="in-use", help="of ours")
    args = parser.parse_args()
    rates = roofline.measure(1, args.threads)
    setting = {name: getattr(args, name) for name in ("threads", "rounds", "layers", "hidden")}
    setting["plain"] = args.kernels == "torch"
    command = [__file__, "--worker", json.dumps(setting)]
    (result,) = launcher.run_ranks(command, 1, 600, args.threads, {"DS_MUON_AUTOLOAD": "0"})
    print(report(args, result, rates.best(roofline.measure(1, args.threads))))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        Path(sys.argv[3]).write_text(json.dumps(work(json.loads(sys.argv[2]))))
    else:
        main()
