# SPDX-License-Identifier: Apache-2.0
"""Everything that is measured on one GPU; started by gpu.sh, which runs the tests first.

    python benchmarks/gpu.py [--parts ns elementwise threshold step exchange] [--name NAME] [--device cpu] [--quick]

A case that fails is reported where it fails and in the last table, and the others go on; the exit code is then 1.
Results go to benchmarks/results/gpu-<name>.csv and .md. With `--device cpu --quick` every line of it runs on a CPU.
"""

import argparse
import contextlib
import dataclasses
import json
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import gpu_kernels
import gpu_step
import gpu_timing as timing
import launcher
import machine
import output
import rates
from gpu_kernels import Row
from roofline import Sharding, describe, floor

FAILED: list[str] = []


@contextlib.contextmanager
def attempt(case: str) -> Iterator[None]:
    """One case: what it raises is printed and counted."""
    try:
        yield
    except Exception:
        FAILED.append(case)
        print(f"FAILED: {case}\n{traceback.format_exc()}", file=sys.stderr, flush=True)


def launched(setting: dict, device: str) -> dict:
    """What one rank reports of a setting of gpu_step.py."""
    worker = str(Path(gpu_step.__file__).resolve())
    environment = {"DS_ACCELERATOR": device}
    return launcher.run_ranks([worker, json.dumps(setting)], 1, 240, torch.get_num_threads(), environment, device)[0]


def step(device: str, quick: bool, found: rates.Rates, attempt: Callable) -> Iterator[Row]:
    """The step of a Llama of 1B parameters on one rank, against its floor."""
    sizes = gpu_step.QUICK if quick else gpu_step.LLAMA_1B
    shapes = gpu_step.matrices(sizes)
    setting = {"sizes": sizes, "device": device, "wire": False, "steps": 3 if quick else 10}
    result = launched(setting, device)
    for symmetric in (True, False):
        least = floor(shapes, Sharding(1), found, symmetric=symmetric).total
        label = "symmetric products half" if symmetric else "every product in full"
        for what in ("optimizer", "engine"):
            row = {"part": "step", "case": f"{sum(a * b for a, b in shapes) / 1e6:.0f} M, floor: {label}"}
            row |= {"what": f"{what}.step, {result['kernels']}"} | timing.summary(result[what])
            yield row | {"of floor": row["ms"] / 1e3 / least, "peak GB": result["peak GB"]}


def exchange(device: str, quick: bool, found: rates.Rates, attempt: Callable) -> Iterator[Row]:
    """The same step with every matrix sent from the rank to itself: same weights, and what it costs."""
    width, narrow, inside, _ = gpu_step.QUICK if quick else gpu_step.LLAMA_1B
    setting = {"sizes": (width, narrow, inside, 2 if quick else 4), "device": device, "steps": 3 if quick else 10}
    results = {wire: launched(setting | {"wire": wire}, device) for wire in (False, True)}
    for wire, result in results.items():
        row = {"part": "exchange", "case": f"{setting['sizes'][3]} layers"}
        yield row | {"what": "over the wire" if wire else "no exchange"} | timing.summary(result["optimizer"])
    with attempt("exchange: the weights are the same bits"):
        assert results[True]["weights"] == results[False]["weights"], results


PARTS: dict[str, Callable[..., Iterator[Row]]] = {
    "ns": gpu_kernels.newton_schulz,
    "elementwise": gpu_kernels.elementwise,
    "threshold": gpu_kernels.threshold,
    "step": step,
    "exchange": exchange,
}


def rivals(rows: list[Row]) -> list[str]:
    """Our fastest shipped Newton-Schulz against stock's gram and torch.optim.Muon, by shape."""
    lines = []
    for case in dict.fromkeys(row["case"] for row in rows if row["part"] == "Newton-Schulz"):
        spent = {row["what"]: row["ms"] for row in rows if row["case"] == case and row["part"] == "Newton-Schulz"}
        best = min((name for name in spent if name.startswith("ours")), key=spent.__getitem__, default=None)
        if best:
            others = [name for name in ("stock, gram", "stock, standard", "torch.optim.Muon") if name in spent]
            against = ", ".join(f"{spent[name] / spent[best]:.2f}x {name}" for name in others)
            lines.append(f"{case}: {best}: {against}")
    return lines


def report(rows: list[Row], found: rates.Rates, name: str) -> str:
    """Write the files; the tables, the short one last."""
    parts = [f"# One GPU: {name}\n\n{describe(found)}"]
    for part in dict.fromkeys(row["part"] for row in rows):
        of_part = [row for row in rows if row["part"] == part]
        parts.append(f"## {part}\n\n" + output.table(of_part))
    failures = "\n".join(f"- FAILED: {case}" for case in FAILED) or "No case failed."
    parts.append("## In short\n\n" + "\n".join(f"- {line}" for line in rivals(rows)) + f"\n\n{failures}")
    if rows:
        facts = dataclasses.asdict(found)
        return output.write(machine.RESULTS / f"gpu-{name}", [row | facts for row in rows], "\n\n".join(parts))
    return "\n\n".join(parts)


def name_of(device: str) -> str:
    """A file-name part: the GPU's, or the CPU's."""
    text = torch.cuda.get_device_name() if device == "cuda" else machine.slug()
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def main() -> int:
    """Run the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--name", help="of the result files; by default the GPU's")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it runs, measures nothing")
    args = parser.parse_args()
    bf16, fp32 = (rates.product_rate(dtype, args.device) for dtype in (torch.bfloat16, torch.float32))
    copy = rates.copy_rate(args.device)
    found = rates.Rates(bf16, fp32, copy, copy)
    rows: list[Row] = []
    for part in args.parts:
        with attempt(part):
            for row in PARTS[part](args.device, args.quick, found, attempt):
                rows.append(row)
                print(", ".join(f"{key} {output.cell(value)}" for key, value in row.items()), flush=True)
    name = (args.name or name_of(args.device)) + ("-quick" if args.quick else "")
    print("\n" + report(rows, found, name), flush=True)
    return 1 if FAILED else 0


if __name__ == "__main__":
    sys.exit(main())
