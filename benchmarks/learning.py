# SPDX-License-Identifier: Apache-2.0
"""Held-out losses on examples/pretrain_gpt, by optimizer, against seconds."""

import dataclasses
import itertools
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy

from benchmarks import ranks, report
from benchmarks.training import VARIANTS

EXAMPLE = report.ROOT / "examples" / "pretrain_gpt"
sys.path.append(str(EXAMPLE))

from losslog import Row, evaluations, first_reaching, is_complete, read_log  # noqa: E402


@dataclasses.dataclass(frozen=True)
class Curve:
    """A training of the example. `params` replace its optimizer's, `bf16` its section; `nearest`: how bf16 and int8 are
    rounded.
    """

    label: str
    variant: str = "ours"
    config: str = "ds_config_muon.json"
    params: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    bf16: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    clip: float = 1.0
    nearest: bool = False


PARAMS = json.loads((EXAMPLE / "ds_config_muon.json").read_text())["optimizer"]["params"]
#: Stock's keys for the rates of ours: an update of RMS 0.2 lr for the square matrices, which have 192 rows and, if
#: orthogonal, entries of RMS 192 ** -0.5; and lr for the AdamW half.
STOCK = {name: PARAMS[name] for name in ("weight_decay", "betas", "eps")} | {"momentum": 0.95, "ns_method": "standard"}
STOCK |= {"muon_lr": round(0.2 * PARAMS["lr"] * 192**0.5, 4), "adam_lr": PARAMS["lr"]}
NO_FP32 = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
BF16, INT8 = (PARAMS | {"momentum_dtype": dtype} for dtype in ("bf16", "int8"))
CURVES = {
    "adamw": Curve("AdamW", "adamw", "ds_config_adamw.json"),
    "stock-clip": Curve("stock Muon, clip 1", "stock", params=STOCK),
    "stock": Curve("stock Muon, no clip", "stock", params=STOCK, clip=0.0),
    "ours": Curve("deepspeed-muon, clip 1"),
    "fp32": Curve("momentum in fp32", params=PARAMS | {"momentum_dtype": "fp32"}),
    "bf16": Curve("momentum in bf16", params=BF16),
    "nearest": Curve("bf16, rounded to nearest", params=BF16, nearest=True),
    "masters": Curve("weights and states in bf16", bf16=NO_FP32),
    "masters-nearest": Curve("weights and states in bf16, rounded to nearest", bf16=NO_FP32, nearest=True),
    "int8": Curve("momentum in int8", params=INT8),
    "int8-nearest": Curve("int8, rounded to nearest", params=INT8, nearest=True),
}


def rank(arguments: list[str], variant: str, nearest: bool) -> None:
    """One rank of a training, with the optimizer that the variant names."""
    import train as example

    if nearest:  # of the PyTorch operations, which then are those in use
        from deepspeed.muon.kernels import kernel_set, selection

        kernel_set.round_ = lambda target, source, noise, spare: target.copy_(source)
        kernel_set.noise = lambda out, spare, key, first: out.fill_(2**15)
        selection.choose = lambda unavailable: kernel_set.TORCH  # type: ignore[attr-defined]
    train = example.train

    def checked(engine: Any, *rest: Any) -> None:
        VARIANTS[variant].check(engine)
        train(engine, *rest)

    example.train, sys.argv = checked, ["train.py", *arguments]
    example.main()


def trained(curve: Curve, folder: Path, steps: int, seed: int, world: int, points: int) -> list[Row]:
    """The log of a training, which is run unless it is complete in the folder."""
    log = folder / "loss.csv"
    if not is_complete(log, steps):
        folder.mkdir(parents=True, exist_ok=True)
        config = json.loads((EXAMPLE / curve.config).read_text()) | {"gradient_clipping": curve.clip}
        config["bf16"] = dict(curve.bf16 or config["bf16"])
        config["optimizer"]["params"] = dict(curve.params or config["optimizer"]["params"])
        (folder / "ds_config.json").write_text(json.dumps(config))
        arguments = ["--deepspeed_config", str(folder / "ds_config.json"), "--out", str(folder), "--seed", str(seed)]
        arguments += ["--steps", str(steps), "--eval-every", str(max(1, steps // points))]
        setting = {"arguments": arguments, "variant": curve.variant, "nearest": curve.nearest}
        ranks.run(rank, setting, world, 3600, environment=VARIANTS[curve.variant].environment)
    last = evaluations(log)[-1]
    print(f"{curve.label}, seed {seed}: {last.held_out:.4f} after {last.seconds:.0f} s", flush=True)
    return read_log(log)


def loss_at(rows: list[Row], seconds: float) -> float:
    """Held-out loss after this many seconds, between the two evaluations around them; NaN after the last."""
    return float(numpy.interp(seconds, [row.seconds for row in rows], [row.held_out for row in rows], right=math.nan))


#: Of Student's t-distribution: 95 % lie within it on both sides, by the number of samples.
QUANTILES = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}


def interval(differences: Sequence[float]) -> str:
    """Mean of the differences of pairs of runs, one per seed, and its 95 % interval."""
    mean, count = statistics.fmean(differences), len(differences)
    half = QUANTILES.get(count, 1.96) * statistics.stdev(differences) / count**0.5
    return f"{mean:+.4f} ({mean - half:+.4f} to {mean + half:+.4f})"


def compared(runs: Mapping[str, list[list[Row]]]) -> list[dict[str, Any]]:
    """A row for each run, relative to the first one: its seconds, or of several seeds their losses."""
    held_out = {name: [[r for r in rows if not math.isnan(r.held_out)] for rows in logs] for name, logs in runs.items()}
    base, result = next(iter(held_out)), []
    target, total = held_out[base][0][-1].held_out, held_out[base][0][-1].seconds
    for name, logs in held_out.items():
        (first, *_, last), finals = runs[name][0], [rows[-1].held_out for rows in logs]
        away = [a - b[-1].held_out for a, b in zip(finals, held_out[base], strict=True)]
        row = {"run": CURVES[name].label, "final loss": f"{statistics.fmean(finals):.4f}"}
        if len(finals) > 1:
            row |= {"standard deviation": f"{statistics.stdev(finals):.4f}", f"less {base}'s": interval(away)}
            row["of each seed"] = ", ".join(f"{loss:.4f}" for loss in finals)
        else:
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
    points: int = 24,
    output: str = "",
) -> str:
    """Held-out loss against seconds of training on examples/pretrain_gpt: AdamW, stock's Muon, ours.

    ZeRO 2, bf16, one thread per rank, the example's own configs and schedule. The clock counts training steps only;
    stock's compilation is in its first step. Stock's Muon runs with the example's gradient_clipping, which it applies
    to the orthogonalized updates, and without; with its faster method, and with the rates that give square matrices the
    updates of ours. Runs that are complete in build/loss are not repeated. The dtypes of the momentum:
    --runs fp32 bf16 int8 int8-nearest --steps 60 --seeds 5 --world 1 --points 6 --output NAME, for momentum-dtype.
    Weights without fp32 copies: --runs fp32 masters masters-nearest --seeds 3 --world 1, for bf16-masters.

    Args:
        runs: optimizers; the others are relative to the first
        steps: length of every run
        seeds: runs of each
        world: ranks
        points: evaluations of each
        output: base name of the result files
    """
    logs: dict[str, list[list[Row]]] = {name: [] for name in runs}
    for seed, name in itertools.product(range(seeds), runs):
        folder = report.ROOT / "build" / "loss" / f"{name}-seed{seed}-{steps}"
        logs[name].append(trained(CURVES[name], folder, steps, seed, world, points))
    rows = [
        {"run": CURVES[name].label, "seed": seed} | dataclasses.asdict(row)
        for name, of_run in logs.items()
        for seed, log in enumerate(of_run)
        for row in log
        if not math.isnan(row.held_out)
    ]
    note = "Stock's rates are those of ours in its own scale, not of a sweep of its own: {muon_lr} and {adam_lr}."
    kind = "Loss per second" if seeds == 1 else f"Loss of {seeds} seeds, with 95 % intervals of paired differences"
    title = f"{kind}, {steps} steps of examples/pretrain_gpt, {world} ranks"
    chart = report.lines(rows, lambda row: f"{row['run']}, {row['seed']}", "seconds", "held_out")
    tables = report.table(compared(logs)), note.format(**STOCK) if "stock" in " ".join(runs) else ""
    return report.write(output or report.name_of("loss-per-second"), title, rows, *tables, draw=chart)
