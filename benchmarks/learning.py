# SPDX-License-Identifier: Apache-2.0
"""Held-out losses on examples/pretrain_gpt: against seconds, after AdamW's hand-over."""

import copy
import dataclasses
import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from benchmarks import ranks, report
from benchmarks.training import VARIANTS, check_optimizer

EXAMPLE = report.ROOT / "examples" / "pretrain_gpt"
sys.path.append(str(EXAMPLE))

from losslog import Row, evaluations, first_reaching, is_complete, read_log  # noqa: E402

#: Width of the example's model: an orthogonal square matrix of this size has entries of RMS width ** -0.5.
WIDTH = 192


@dataclasses.dataclass(frozen=True)
class Curve:
    """A training of the example. `params` replace those of its optimizer; `nearest`: its bf16 momentum is rounded so."""

    label: str
    variant: str = "ours"
    config: str = "ds_config_muon.json"
    params: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    clip: float = 1.0
    nearest: bool = False


def muon_params(**more: Any) -> dict[str, Any]:
    """Those of the example's config, and more."""
    return json.loads((EXAMPLE / "ds_config_muon.json").read_text())["optimizer"]["params"] | more


def stock_params() -> dict[str, Any]:
    """Stock's keys for the rates of ours: an update of RMS 0.2 lr for square matrices, and lr for the AdamW half."""
    ours = muon_params()
    kept = {name: ours[name] for name in ("weight_decay", "betas", "eps")}
    muon_lr = round(0.2 * ours["lr"] * WIDTH**0.5, 4)
    return kept | {"muon_lr": muon_lr, "adam_lr": ours["lr"], "momentum": 0.95, "ns_method": "standard"}


CURVES = {
    "adamw": Curve("AdamW", "adamw", "ds_config_adamw.json"),
    "stock-clip": Curve("stock Muon, clip 1", "stock", params=stock_params()),
    "stock": Curve("stock Muon, no clip", "stock", params=stock_params(), clip=0.0),
    "ours": Curve("deepspeed-muon, clip 1"),
    "fp32": Curve("momentum in fp32", params=muon_params(momentum_dtype="fp32")),
    "bf16": Curve("momentum in bf16", params=muon_params(momentum_dtype="bf16")),
    "nearest": Curve("bf16, rounded to nearest", params=muon_params(momentum_dtype="bf16"), nearest=True),
}


def rank(arguments: list[str], variant: str, nearest: bool) -> None:
    """One rank of a training, with the optimizer that the variant names."""
    import train as example

    if nearest:  # of the PyTorch operations, which then are those in use
        from deepspeed.muon.kernels import reference, selection

        reference.round_ = lambda target, source, noise, spare: target.copy_(source)
        selection.choose = lambda missing: reference.OPERATIONS
    train = example.train

    def checked(engine: Any, *rest: Any) -> None:
        check_optimizer(engine, VARIANTS[variant])
        train(engine, *rest)

    example.train, sys.argv = checked, ["train.py", *arguments]
    example.main()


def trained(curve: Curve, folder: Path, steps: int, seed: int, world: int) -> list[Row]:
    """The log of a training, which is run unless it is complete in the folder."""
    log = folder / "loss.csv"
    if not is_complete(log, steps):
        folder.mkdir(parents=True, exist_ok=True)
        config = json.loads((EXAMPLE / curve.config).read_text()) | {"gradient_clipping": curve.clip}
        config["optimizer"]["params"] = dict(curve.params or config["optimizer"]["params"])
        (folder / "ds_config.json").write_text(json.dumps(config))
        arguments = ["--deepspeed_config", str(folder / "ds_config.json"), "--out", str(folder), "--seed", str(seed)]
        arguments += ["--steps", str(steps), "--eval-every", str(max(1, steps // 24))]
        setting = {"arguments": arguments, "variant": curve.variant, "nearest": curve.nearest}
        ranks.run(rank, setting, world, 3600, environment=VARIANTS[curve.variant].environment)
    last = evaluations(log)[-1]
    print(f"{curve.label}, seed {seed}: {last.held_out:.4f} after {last.seconds:.0f} s", flush=True)
    return read_log(log)


def loss_at(rows: list[Row], seconds: float) -> float | str:
    """Held-out loss after this many seconds, between the two evaluations around them."""
    for before, after in itertools.pairwise(rows):
        if before.seconds <= seconds <= after.seconds:
            share = (seconds - before.seconds) / (after.seconds - before.seconds)
            return before.held_out + share * (after.held_out - before.held_out)
    return "-"


def compared(runs: Mapping[str, list[list[Row]]]) -> list[dict[str, Any]]:
    """A row for the seeds of each run; what is relative to the first run is that of the first seed, or of each."""
    held_out = {name: [[r for r in rows if not math.isnan(r.held_out)] for rows in logs] for name, logs in runs.items()}
    base, result = next(iter(held_out)), []
    target, total = held_out[base][0][-1].held_out, held_out[base][0][-1].seconds
    for name, logs in held_out.items():
        (first, *_, last), finals = runs[name][0], [rows[-1].held_out for rows in logs]
        away = statistics.fmean(a - b[-1].held_out for a, b in zip(finals, held_out[base], strict=True))
        row = {"run": CURVES[name].label, "final loss": f"{statistics.fmean(finals):.4f}"}
        if len(finals) > 1:
            row |= {"standard deviation": f"{statistics.stdev(finals):.4f}", f"less {base}'s": f"{away:+.4f}"}
            row["of each seed"] = ", ".join(f"{loss:.4f}" for loss in finals)
        row |= {"seconds": last.seconds, "first step s": first.seconds}
        row["ms per later step"] = 1e3 * (last.seconds - first.seconds) / (last.step - first.step)
        reached = first_reaching(logs[0], target)
        row[f"seconds to {base}'s final loss"] = reached.seconds if reached else "not reached"
        row[f"of {base}'s seconds"] = f"{reached.seconds / total:.0%}" if reached else "-"
        row |= {f"loss at {p:.0%} of {base}'s seconds": loss_at(logs[0], p * total) for p in (0.25, 0.5, 1.0)}
        result.append(row)
    return result


def loss(
    runs: Annotated[tuple[str, ...], CURVES] = ("adamw", "stock-clip", "stock", "ours"),
    steps: int = 240,
    seeds: int = 1,
    world: int = 2,
    out: str = "build/loss",
    output: str = "",
) -> str:
    """Held-out loss against seconds of training on examples/pretrain_gpt: AdamW, stock's Muon, ours.

    ZeRO 2, bf16, one thread per rank, the example's own configs and schedule. The clock counts training steps only;
    stock's compilation is in its first step. Stock's Muon runs with the example's gradient_clipping, which it applies
    to the orthogonalized updates, and without; with its faster method, and with the rates that give square matrices the
    updates of ours. Runs that are complete in --out are not repeated. The dtypes of the momentum:
    --runs fp32 bf16 nearest --steps 60 --seeds 3 --world 1 --output momentum-dtype.

    Args:
        runs: optimizers; the others are relative to the first
        steps: length of every run
        seeds: runs of each
        world: ranks
        out: folder of the runs
        output: base name of the result files
    """
    logs: dict[str, list[list[Row]]] = {name: [] for name in runs}
    for seed, name in itertools.product(range(seeds), runs):
        folder = report.ROOT / out / f"{name}-seed{seed}-{steps}"
        logs[name].append(trained(CURVES[name], folder, steps, seed, world))
    rows = [
        {
            "run": CURVES[name].label,
            "seed": seed,
            "step": row.step,
            "seconds": row.seconds,
            "held-out loss": row.held_out,
        }
        for name, of_run in logs.items()
        for seed, log in enumerate(of_run)
        for row in log
        if not math.isnan(row.held_out)
    ]
    note = "Stock has the rates of ours in its own scale, not of a sweep of its own: {muon_lr} and {adam_lr}."
    title = f"Loss per second, {steps} steps of examples/pretrain_gpt, {world} ranks"
    chart = report.lines(rows, lambda row: f"{row['run']}, {row['seed']}", "seconds", "held-out loss")
    told = note.format(**stock_params()) if "stock" in " ".join(runs) else ""
    name = output or report.name_of("loss-per-second")
    return report.write(name, title, rows, report.table(compared(logs)), told, draw=chart)


# ---- from AdamW to Muon ---------------------------------------------------------------------------------

BATCH, BEFORE, WARMUP, ADAM_RATE, MUON_RATES, EVALUATED = 16, 120, 12, 2e-3, (2e-3, 1.6e-2), (1, 10, 20, 40, 80)
STARTS: dict[str, Callable[[Tensor], Tensor]] = {"first moment": torch.clone, "zero": torch.zeros_like}


class Run:
    """The example's model, smaller, in fp32 on one process."""

    def __init__(self, seed: int) -> None:
        import data
        import model

        torch.manual_seed(seed)
        self.data, self.corpus, self.seed, self.steps = data, data.load_corpus(), seed, 0
        self.model = model.GPT(model.GPTConfig(layers=3, width=128, heads=4, context=96))

    def loss(self, text: Any, offsets: Any) -> Tensor:
        """Of the windows of a text at these offsets."""
        return self.model(*self.data.windows(text, offsets, 96))

    def train(self, optimizer: torch.optim.Optimizer) -> None:
        """One step."""
        self.loss(self.corpus.train, self.data.train_offsets(self.corpus, self.seed, self.steps, BATCH, 96)).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        self.steps += 1

    @torch.no_grad()
    def held_out(self) -> float:
        """Loss on a fixed sample of the held-out text."""
        offsets = self.data.held_out_offsets(self.corpus, 4 * BATCH, 96).reshape(4, BATCH)
        return statistics.fmean(self.loss(self.corpus.held_out, part).item() for part in offsets)


def handed_over(before: Run, adamw: torch.optim.Optimizer, rate: float, start: str) -> dict[str, float]:
    """Held-out losses of a run that goes on with Muon from the weights of another, at EVALUATED steps."""
    from deepspeed.muon import MuonWithAuxAdam

    run, losses = Run(before.seed), {}
    run.model, run.steps = copy.deepcopy(before.model), before.steps
    settings = {"lr": rate, "adam_lr": ADAM_RATE, "betas": (0.9, 0.95), "eps": 1e-8, "adjust_lr_fn": "match_rms_adamw"}
    muon = MuonWithAuxAdam(run.model.parameters(), model=run.model, **settings)
    for ours, theirs in zip(run.model.parameters(), before.model.parameters(), strict=True):
        saved = {key: value.clone() for key, value in adamw.state[theirs].items()}
        started = {"step": saved["step"], "momentum_buffer": STARTS[start](saved["exp_avg"])}
        muon.state[ours] = started if muon.specs[ours].use_muon else saved
    for number in range(1, EVALUATED[-1] + 1):
        run.train(muon)
        if number in EVALUATED:
            losses[str(number)] = run.held_out()
    return losses


def handover(seeds: int = 3) -> str:
    """What Muon's momentum should start from where AdamW's run goes on with Muon: the first moment, or zero.

    The model of examples/pretrain_gpt, smaller, in fp32 on one process: AdamW with warm-up, then Muon at a constant
    rate, with AdamW's half going on.

    Args:
        seeds: runs of each kind
    """
    torch.set_num_threads(report.cores())
    kinds, rows, means = list(itertools.product(MUON_RATES, STARTS)), [], []
    for seed in range(seeds):
        run, betas = Run(seed), (0.9, 0.95)
        adamw = torch.optim.AdamW(run.model.parameters(), lr=ADAM_RATE, betas=betas, eps=1e-8, weight_decay=0.0)
        for step in range(BEFORE):
            adamw.param_groups[0]["lr"] = ADAM_RATE * min(1.0, (step + 1) / WARMUP)
            run.train(adamw)
        for rate, start in kinds:
            rows.append({"muon_lr": rate, "start": start, "seed": seed} | handed_over(run, adamw, rate, start))
            print(rows[-1], flush=True)
    for rate, start in kinds:
        own = [row for row in rows if (row["muon_lr"], row["start"]) == (rate, start)]
        losses = {str(n): f"{statistics.fmean(row[str(n)] for row in own):.3f}" for n in EVALUATED}
        means.append({"steps after the change": f"Muon at {rate:g}, {start}"} | losses)
    told = f"Held-out loss after {BEFORE} steps of AdamW at {ADAM_RATE:g} and some of Muon, mean of {seeds} seeds."
    name = report.name_of("import-momentum")
    return report.write(name, "Where Muon's momentum starts", rows, told, report.table(means))
