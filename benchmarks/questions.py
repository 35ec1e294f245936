# SPDX-License-Identifier: Apache-2.0
"""Questions of docs/evidence/questions.md, answered by small trainings in fp32 on one process.

The models are those of examples/pretrain_gpt and a Llama, the text is what every machine has: the sources of Python's
library, and for fine-tuning torch's C++ headers.
"""

import copy
import csv
import functools
import itertools
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import rates, report
from deepspeed.muon.config.schema import parse
from deepspeed.muon.forecast.estimate import estimate, share_of_step, step_operations
from deepspeed.muon.forecast.layout import Layout, group_specs
from deepspeed.muon.plan.memory import Memory

sys.path.append(str(report.ROOT / "examples" / "pretrain_gpt"))

import data
from model import GPT, GPTConfig
from train import lr_scale

BATCH, CONTEXT, WIDTH, EVALUATED = 16, 96, 128, 128
ADAM: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8}


# ---- models, optimizers, training ---------------------------------------------------------------------------------


class Llama(nn.Module):
    """Of transformers, with grouped queries and SwiGLU; the forward of the example's GPT."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": WIDTH, "intermediate_size": 3 * WIDTH, "num_hidden_layers": 3, "vocab_size": 256}
        config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=CONTEXT)
        self.llama = LlamaForCausalLM(config)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats per token, of (batch, time)."""
        logits = self.llama(input_ids=inputs).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "GPT": lambda: GPT(GPTConfig(layers=3, width=WIDTH, heads=4, context=CONTEXT)),
    "Llama": Llama,
}


def optimizer(name: str, model: nn.Module, lr: float, **settings: Any) -> torch.optim.Optimizer:
    """AdamW, or Muon at the same rate in both halves, of the parameters that train."""
    from deepspeed.muon import MuonWithAuxAdam

    params = [p for p in model.parameters() if p.requires_grad]
    if name == "AdamW":
        return torch.optim.AdamW(params, lr=lr, weight_decay=0.0, **ADAM)
    return MuonWithAuxAdam(params, model=model, **{"lr": lr} | ADAM | settings)


def learn(
    model: nn.Module,
    chosen: torch.optim.Optimizer,
    corpus: data.Corpus,
    seed: int,
    steps: Iterable[int],
    scale: Callable[[int], float] = lambda step: 1.0,
) -> None:
    """Train for these steps, whose numbers and the seed decide about the text; gradients are clipped at 1."""
    base = [group["lr"] for group in chosen.param_groups]
    for step in steps:
        for group, lr in zip(chosen.param_groups, base, strict=True):
            group["lr"] = lr * scale(step)
        offsets = data.train_offsets(corpus, seed, step, BATCH, CONTEXT)
        model(*data.windows(corpus.train, offsets, CONTEXT)).backward()
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        chosen.step()
        chosen.zero_grad()


@torch.no_grad()
def held_out(model: nn.Module, corpus: data.Corpus) -> float:
    """Loss on fixed windows of text that is not trained on, nats per byte."""
    offsets = data.held_out_offsets(corpus, EVALUATED, CONTEXT).reshape(-1, BATCH)
    return statistics.fmean(model(*data.windows(corpus.held_out, part, CONTEXT)).item() for part in offsets)


@functools.cache
def python_text() -> data.Corpus:
    """Sources of Python's library."""
    return data.load_corpus()


@functools.cache
def cpp_text() -> data.Corpus:
    """Headers of torch's C++ library."""
    return data.load_corpus([str(Path(torch.__file__).parent / "include" / "ATen")])


def trained(name: str, model: str, lr: float, seed: int, steps: int) -> tuple[nn.Module, float]:
    """A new model after a whole training on Python's sources, and its loss."""
    torch.manual_seed(seed)
    net = MODELS[model]()
    learn(net, optimizer(name, net, lr), python_text(), seed, range(steps), functools.partial(lr_scale, steps=steps))
    return net, held_out(net, python_text())


def spread(values: list[float]) -> str:
    """Mean, and the standard deviation of several."""
    deviation = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.3f}{deviation}"


# ---- which learning rate --------------------------------------------------------------------------------------------


def sweep(steps: int = 120, seeds: int = 1, points: int = 9) -> str:
    """Which learning rate: AdamW's and Muon's loss over four decades of it, on two models.

    Both halves of Muon's optimizer have the same rate, as with `lr` alone in the config.

    Args:
        steps: length of every run, warm-up and decay included
        seeds: runs at each rate
        points: rates, from 1e-4 to 1 at equal ratios
    """
    torch.set_num_threads(report.cores())
    grid = [float(f"{10 ** (-4 + 4 * index / (points - 1)):.2g}") for index in range(points)]
    rows: list[dict[str, Any]] = []
    for model, name, lr, seed in itertools.product(MODELS, ("AdamW", "Muon"), grid, range(seeds)):
        rows.append({"model": model, "optimizer": name, "lr": lr, "seed": seed})
        rows[-1]["held_out"] = trained(name, model, lr, seed, steps)[1]
        print(rows[-1], flush=True)
    means, summary = [], []
    for model, name in itertools.product(MODELS, ("AdamW", "Muon")):
        own = [row for row in rows if (row["model"], row["optimizer"]) == (model, name)]
        by_rate = {lr: [row["held_out"] for row in own if row["lr"] == lr] for lr in grid}
        losses = {lr: statistics.fmean(values) for lr, values in by_rate.items()}
        means += [{"run": f"{name}, {model}", "lr": lr, "held_out": loss} for lr, loss in losses.items()]
        best = min(losses, key=losses.__getitem__)
        close = [lr for lr, loss in losses.items() if loss <= losses[best] + 0.1]
        row = {"model": model, "optimizer": name, "best rate": f"{best:g}", "loss": spread(by_rate[best])}
        summary.append(row | {"within 0.1 of it": f"{close[0]:g} to {close[-1]:g}"})
    axes = {"xscale": "log", "xlabel": "learning rate", "ylabel": "held-out loss (nats per byte)", "ylim": (1.7, 4)}
    chart = report.lines(means, lambda row: row["run"], "lr", "held_out", **axes)
    title = f"Loss by learning rate, {steps} steps, seeds: {seeds}"
    per_rate = [
        {"rate": f"{lr:g}"} | {row["run"]: f"{row['held_out']:.3f}" for row in means if row["lr"] == lr} for lr in grid
    ]
    return report.write(report.name_of("sweep"), title, rows, report.table(summary), report.table(per_rate), draw=chart)


# ---- fine-tuning ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tuning:
    """A fine-tuning: who trained the model before, and how it goes on."""

    before: str
    how: str
    lr: float
    seed: int = 0


#: Rates of the training before, the best of `sweep`.
BEFORE_RATES = {"AdamW": 1e-3, "Muon": 2e-2}
#: Ways to go on, and where the search for the rate of each starts.
HOW = {"AdamW": 5e-4, "Muon": 4e-3, "LoRA, AdamW": 4e-3, "LoRA, Muon": 1.6e-2}


@dataclass
class Tunings:
    """Fine-tunings on C++ of models that know Python, each run once; `final` and `tune` of the example's search."""

    before: int
    steps: int

    def __post_init__(self) -> None:
        self.done: dict[Tuning, tuple[float, float]] = {}
        self.base = functools.cache(self._base)

    def _base(self, name: str, seed: int) -> nn.Module:
        return trained(name, "GPT", BEFORE_RATES[name], seed, self.before)[0]

    def losses(self, run: Tuning) -> tuple[float, float]:
        """On C++ and on Python, afterwards."""
        if run not in self.done:
            net = copy.deepcopy(self.base(run.before, run.seed))
            settings = {}
            if run.how.startswith("LoRA"):
                from peft import LoraConfig, inject_adapter_in_model

                torch.manual_seed(run.seed)
                modules = ["query", "key", "value", "proj", "up"]
                net = inject_adapter_in_model(LoraConfig(r=8, lora_alpha=16, target_modules=modules), net)
                settings = {"muon_lora": "both"}
            chosen = optimizer(run.how.rpartition(" ")[2], net, run.lr, **settings)
            scale = functools.partial(lr_scale, steps=self.steps)
            learn(net, chosen, cpp_text(), run.seed, range(self.steps), scale)
            self.done[run] = held_out(net, cpp_text()), held_out(net, python_text())
            print(run, self.done[run], flush=True)
        return self.done[run]

    def final(self, run: Tuning) -> float:
        """What the search for the best rate goes by."""
        return self.losses(run)[0]


def finetune(before: int = 200, steps: int = 40, seeds: int = 3) -> str:
    """Whether to fine-tune with Muon a model that AdamW has trained, and the other way round; with and without LoRA.

    A GPT learns Python with AdamW or Muon, then C++ with either, at the best rate for each of the pairs, which is
    searched for with seed 0 by factors of 2; the seeds that are compared had no part in the search.

    Args:
        before: steps on Python's sources
        steps: steps on C++
        seeds: runs of each pair that are compared
    """
    from runs import tune

    torch.set_num_threads(report.cores())
    runs, rows, summary = Tunings(before, steps), [], []
    for name in BEFORE_RATES:
        untouched = [runs.base(name, seed) for seed in range(1, seeds + 1)]
        known = [[held_out(net, text()) for net in untouched] for text in (cpp_text, python_text)]
        start = {"trained by": name, "goes on with": "nothing", "rate": "-", "at the edge": ""}
        summary.append(start | {"loss on C++": spread(known[0]), "loss on Python": spread(known[1])})
        for how, rate in HOW.items():
            best = tune(runs, Tuning(name, how, rate), refine=False)
            found = [runs.losses(replace(best.run, seed=seed)) for seed in range(1, seeds + 1)]
            row = {"trained by": name, "goes on with": how, "rate": f"{best.run.lr:g}"}
            row["at the edge"] = "yes" if best.at_the_edge else ""
            summary.append(row | {"loss on C++": spread([a for a, _ in found])})
            summary[-1]["loss on Python"] = spread([b for _, b in found])
    for run, (new, old) in runs.done.items():
        row = {"trained by": run.before, "goes on with": run.how, "lr": run.lr, "seed": run.seed}
        rows.append(row | {"c++": new, "python": old})
    tuned = [row | {"run": f"{row['trained by']}, then {row['goes on with']}"} for row in rows if row["seed"] == 0]
    tuned.sort(key=lambda row: (row["run"], row["lr"]))
    axes = {"xlabel": "held-out loss on Python (what is kept)", "ylabel": "held-out loss on C++ (what is learned)"}
    chart = report.lines(tuned, lambda row: row["run"], "python", "c++", **axes)
    title = f"Fine-tuning: {before} steps on Python, {steps} on C++, {seeds} seeds"
    return report.write(report.name_of("finetune"), title, rows, report.table(summary), draw=chart)


# ---- what a step costs --------------------------------------------------------------------------------------------


def share(width: int = 256, layers: int = 4, windows: int = 256, rounds: int = 5) -> str:
    """Which share of a step the optimizer takes, by tokens per step: measured, and as `ds_muon plan` counts it.

    The chart has all machines whose tables are among the results.

    Args:
        width: of the GPT
        layers: of the GPT
        windows: the most of a step, 96 tokens each; beyond 16 gradients are accumulated
        rounds: steps of each; medians count
    """
    torch.set_num_threads(report.cores())
    net = GPT(GPTConfig(layers=layers, width=width, heads=width // 32, context=CONTEXT))
    muon, adamw = optimizer("Muon", net, 1e-4), optimizer("AdamW", net, 1e-4)
    counted, parameters, rows, count = counted_operations(net), sum(p.numel() for p in net.parameters()), [], 1

    def forward_and_backward(count: int) -> None:
        for first in range(0, count, BATCH):
            offsets = data.train_offsets(python_text(), 0, first, min(BATCH, count - first), CONTEXT)
            net(*data.windows(python_text().train, offsets, CONTEXT)).backward()

    forward_and_backward(1)
    while count <= windows:
        calls = {"model": lambda count=count: forward_and_backward(count), "Muon": muon.step, "AdamW": adamw.step}
        times = {name: statistics.median(found) for name, found in rates.alternate(calls, rounds=rounds).items()}
        tokens = count * CONTEXT
        row = {"tokens per step": tokens, **{f"{name} ms": 1e3 * value for name, value in times.items()}}
        for name in ("Muon", "AdamW"):
            row[f"{name}'s share"] = times[name] / (times[name] + times["model"])
        rows.append(row | {"counted": share_of_step(counted, 6 * parameters, tokens)})
        print(rows[-1], flush=True)
        count *= 4
    names = ("Muon's share", "AdamW's share", "counted")
    title = f"The optimizer's share of a step, GPT of {parameters / 1e6:.1f} million parameters, fp32, one process"
    shown = [{k: f"{v:.1%}" if k in names else v for k, v in row.items()} for row in rows]
    text = report.write(report.name_of("share"), title, rows, report.table(shown))
    report.chart("share", shares_of_machines())
    return text


def counted_operations(net: nn.Module) -> float:
    """Operations of Muon in a step of one process, in fp32."""
    config, memory = parse({"lr": 1e-4}), Memory(wire="fp32", dtype="fp32", device_type="cpu")
    found = estimate(group_specs(net, config), Layout(0, 1), config, memory)
    return sum(step_operations(found, config.schedule, memory).values())


def shares_of_machines() -> Callable[[Any], None]:
    """The chart of `share`: a line for each machine that has a table, and one for what is counted."""
    points: list[dict[str, Any]] = []
    counted: dict[float, float] = {}
    for path in sorted(report.RESULTS.glob("share-*.csv")):
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        tokens = [float(row["tokens per step"]) for row in rows]
        name = f"measured, {rows[0]['cpu']}, {rows[0]['cores']} cores"
        points += [
            {"x": x, "share": float(row["Muon's share"]), "by": name} for x, row in zip(tokens, rows, strict=True)
        ]
        counted |= {x: float(row["counted"]) for x, row in zip(tokens, rows, strict=True)}
    points += [{"x": x, "share": counted[x], "by": "counted"} for x in sorted(counted)]
    axes = {"xscale": "log", "yscale": "log", "xlabel": "tokens per step", "ylabel": "Muon's share of a step"}
    return report.lines(points, lambda row: row["by"], "x", "share", **axes)


# ---- where momentum starts ------------------------------------------------------------------------------------------

BEFORE, WARMUP, AFTER = 120, 12, (1, 10, 20, 40, 80)
ADAM_RATE, MUON_RATES = 2e-3, (2e-3, 1.6e-2)
STARTS: dict[str, Callable[[Tensor], Tensor]] = {"first moment": torch.clone, "zero": torch.zeros_like}


def handover(seeds: int = 3) -> str:
    """What Muon's momentum should start from where AdamW's run goes on with Muon: the first moment, or zero.

    AdamW with warm-up, then Muon at a constant rate, with AdamW's half going on.

    Args:
        seeds: runs of each kind
    """
    torch.set_num_threads(report.cores())
    rows = []
    for seed in range(seeds):
        torch.manual_seed(seed)
        model = MODELS["GPT"]()
        adamw = optimizer("AdamW", model, ADAM_RATE)
        learn(model, adamw, python_text(), seed, range(BEFORE), lambda step: min(1.0, (step + 1) / WARMUP))
        for rate, start in itertools.product(MUON_RATES, STARTS):
            twin, row = copy.deepcopy(model), {"muon_lr": rate, "start": start, "seed": seed}
            settings = {"adam_lr": ADAM_RATE, "adjust_lr_fn": "match_rms_adamw"}
            muon = optimizer("Muon", twin, rate, **settings)
            for own, theirs in zip(twin.parameters(), model.parameters(), strict=True):
                saved = {key: value.clone() for key, value in adamw.state[theirs].items()}
                started = {"step": saved["step"], "momentum_buffer": STARTS[start](saved["exp_avg"])}
                muon.state[own] = started if muon.specs[own].use_muon else saved  # type: ignore[attr-defined]
            for first, last in itertools.pairwise((0, *AFTER)):
                learn(twin, muon, python_text(), seed, range(BEFORE + first, BEFORE + last))
                row[str(last)] = held_out(twin, python_text())
            rows.append(row)
    means = []
    for rate, start in itertools.product(MUON_RATES, STARTS):
        own = [row for row in rows if (row["muon_lr"], row["start"]) == (rate, start)]
        losses = {str(n): f"{statistics.fmean(row[str(n)] for row in own):.3f}" for n in AFTER}
        means.append({"steps after the change": f"Muon at {rate:g}, {start}"} | losses)
    told = f"Held-out loss after {BEFORE} steps of AdamW at {ADAM_RATE:g} and some of Muon, mean of {seeds} seeds."
    name = report.name_of("import-momentum")
    return report.write(name, "Where Muon's momentum starts", rows, told, report.table(means))
