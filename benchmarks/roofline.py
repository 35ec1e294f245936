# SPDX-License-Identifier: Apache-2.0
"""The least time that an optimizer step can take here: its least work over the measured rates of the machine.

    python benchmarks/roofline.py [--matrices 8x512x512 8x2048x512 8x512x2048] [--ranks 2] [--threads 1] [--symmetric]

Counted per rank, and nothing else:
    Newton-Schulz   operations of every product of the method that is chosen for each shape, as the code calls them;
                    one rank does at least an equal share, and at least the heaviest matrix. With --symmetric a
                    product whose result is symmetric counts half: a kernel computes one triangle.
    elementwise     bytes of the shard: gradient read 4, momentum read and written 8, parameter read and written 8,
                    input of Newton-Schulz written 2, its result read 2 (bf16; 4 and 4 in fp32).
    exchange        bytes that a rank must send if each matrix is gathered where most of it lies: the mean of the ranks.
The three add up: on a CPU the same cores do all three.
"""

import argparse
import dataclasses
import functools
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

import launcher
import output
from deepspeed.muon.forecast.layout import Half, Layout, lay_out, step_cost
from deepspeed.muon.kernels import reference
from deepspeed.muon.kernels.table import Operations
from deepspeed.muon.math.choice import choose_method
from deepspeed.muon.math.coefficients import schedule
from deepspeed.muon.math.newton_schulz import orthogonalize
from deepspeed.muon.matrices.block import Block
from deepspeed.muon.matrices.routing import MatrixSpec
from deepspeed.muon.plan.cost import cost_model
from rates import Rates

GRADIENT_BYTES, PARAMETER_BYTES, MOMENTUM_BYTES = 4, 4, 4
ITEMSIZE = {"bf16": 2, "fp32": 4}
#: The model of the benchmarks: eight blocks of hidden width 512.
MODEL = (*[(512, 512)] * 8, *[(2048, 512)] * 8, *[(512, 2048)] * 8)
Matrices = Sequence[tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class Sharding:
    """How ZeRO spreads the optimizer; ``offload``: the shards are in the host's memory."""

    stage: int
    ranks: int = 1
    offload: bool = False


@dataclasses.dataclass(frozen=True)
class Demand:
    """The least that one rank must do in a step: operations, bytes in memory, sent, and over the host's link."""

    flops: float
    bytes: float
    sent: float = 0.0
    linked: float = 0.0


@dataclasses.dataclass(frozen=True)
class Floor:
    """Seconds."""

    newton_schulz: float
    elementwise: float
    exchange: float = 0.0

    @property
    def total(self) -> float:
        """Of the whole step of the optimizer."""
        return self.newton_schulz + self.elementwise + self.exchange


@functools.cache
def products(rows: int, cols: int, method: str, steps: int = 5) -> tuple[float, float]:
    """Operations for one matrix: in products with a symmetric result, and in others.

    Counted by running the method on tensors without data; a multiply-add is two operations.
    """
    symmetric = 0

    def counted(operation):  # an operation of the table whose result is symmetric
        def run(*args, **kwargs):
            nonlocal symmetric
            before = counter.get_total_flops()
            result = operation(*args, **kwargs)
            symmetric += counter.get_total_flops() - before
            return result

        return run

    table = dataclasses.replace(
        reference.OPERATIONS,
        normalize_=lambda x: x,
        square=counted(reference.square),
        product=counted(reference.product),
    )
    x = torch.empty(1, rows, cols, dtype=torch.bfloat16, device="meta")
    with FlopCounterMode(display=False) as counter:
        orthogonalize(x, schedule("simple", steps), method, kernels=table)
    return float(symmetric), float(counter.get_total_flops() - symmetric)


def least_flops(rows: int, cols: int, method: str = "auto", steps: int = 5, symmetric: bool = False) -> float:
    """Least operations to orthogonalize one matrix; ``symmetric`` counts symmetric products half."""
    mirrored, other = products(rows, cols, choose_method(rows, cols, method, "cpu bf16"), steps)
    return mirrored * (0.5 if symmetric else 1.0) + other


def has_symmetric(kernels: Operations) -> bool:
    """Whether a table computes symmetric products by a kernel of its own."""
    return kernels.square is not reference.square


def bytes_per_element(dtype: str = "bf16", momentum_bytes: int = MOMENTUM_BYTES) -> int:
    """Bytes of the elementwise passes per element of the shard, each tensor touched once."""
    return GRADIENT_BYTES + 2 * momentum_bytes + 2 * PARAMETER_BYTES + 2 * ITEMSIZE[dtype]


def demands(
    matrices: Matrices, sharding: Sharding, dtype: str = "bf16", method: str = "auto", symmetric: bool = False
) -> list[Demand]:
    """What one rank must do at least. At stage 0 there are two ways: to repeat the work, or to share it."""
    work = [least_flops(rows, cols, method, symmetric=symmetric) for rows, cols in matrices]
    numel, ranks = sum(rows * cols for rows, cols in matrices), sharding.ranks
    held = numel if sharding.stage == 0 else numel / ranks
    moved = held * bytes_per_element(dtype)
    linked = 2 * held * ITEMSIZE[dtype] if sharding.offload else 0.0
    share = max(sum(work) / ranks, max(work))
    if sharding.stage == 0:
        sent = numel * ITEMSIZE[dtype] * (ranks - 1) / ranks
        return [Demand(sum(work), moved, 0.0, linked), Demand(share, moved, sent, linked)]
    return [Demand(share, moved, _least_sent(matrices, sharding, ITEMSIZE[dtype]), linked)]


def _least_sent(matrices: Matrices, sharding: Sharding, itemsize: int) -> float:
    """Bytes, mean of the ranks: there and back, of all but the largest part of each matrix."""
    specs = tuple(
        MatrixSpec(str(i), (rows, cols), True, "", (Block(0, rows, cols, cols),))
        for i, (rows, cols) in enumerate(matrices)
    )
    layout, cost = Layout(sharding.stage, sharding.ranks), cost_model("auto", schedule("simple"), itemsize, "cpu")
    return sum(step_cost(part, cost).least_bytes for part in lay_out([Half(True, specs)], layout))


def floor_of(demand: Demand, rates: Rates, dtype: str = "bf16") -> Floor:
    """A demand over the rates."""
    memory = rates.host_copy if demand.linked else rates.copy
    rate = rates.bf16 if dtype == "bf16" else rates.fp32
    exchange = demand.sent / rates.network + demand.linked / rates.link
    return Floor(demand.flops / rate, demand.bytes / memory, exchange)


def floor(
    matrices: Matrices,
    sharding: Sharding,
    rates: Rates,
    dtype: str = "bf16",
    method: str = "auto",
    symmetric: bool = False,
) -> Floor:
    """The least seconds of the optimizer's step on this machine."""
    options = demands(matrices, sharding, dtype, method, symmetric)
    return min((floor_of(demand, rates, dtype) for demand in options), key=lambda found: found.total)


def measure(ranks: int = 1, threads: int = 1, device: str = "cpu", timeout: float = 120) -> Rates:
    """The rates of one rank of this many, the mean of all; some ten seconds."""
    worker = str(Path(__file__).resolve().parent / "rates.py")
    setting = json.dumps({"threads": threads, "device": device})
    found = launcher.run_ranks([worker, setting], ranks, timeout, threads, {"DS_MUON_AUTOLOAD": "0"}, device)
    return Rates(**{name: sum(rates[name] for rates in found) / ranks for name in found[0]})


def describe(rates: Rates) -> str:
    """The rates in words."""
    facts = f"bf16 products {rates.bf16 / 1e12:.3f} TFLOP/s, fp32 {rates.fp32 / 1e12:.3f}, copy {rates.copy / 1e9:.1f}"
    facts += " GB/s read and written"
    if rates.link != float("inf"):
        facts += f", host copy {rates.host_copy / 1e9:.1f}, host link {rates.link / 1e9:.1f} GB/s"
    if rates.network != float("inf"):
        facts += f", network {rates.network / 1e9:.2f} GB/s sent"
    return f"Per rank: {facts}."


def parse_matrices(texts: Sequence[str]) -> list[tuple[int, int]]:
    """`8x512x2048` is eight matrices of 512 rows and 2048 columns."""
    found = []
    for text in texts:
        count, rows, cols = map(int, text.split("x"))
        found += [(rows, cols)] * count
    return found


def rows_of(matrices: Matrices, ranks: int, rates: Rates, dtype: str, symmetric: bool) -> list[dict]:
    """One row per stage."""
    rows = []
    for stage in range(4):
        sharding = Sharding(stage, ranks)
        demand = min(
            demands(matrices, sharding, dtype, symmetric=symmetric),
            key=lambda option: floor_of(option, rates, dtype).total,
        )
        found = floor_of(demand, rates, dtype)
        row = {"stage": stage, "GFLOP": demand.flops / 1e9, "MB in memory": demand.bytes / 1e6}
        row |= {"MB sent": demand.sent / 1e6, "Newton-Schulz ms": 1e3 * found.newton_schulz}
        row |= {"elementwise ms": 1e3 * found.elementwise, "exchange ms": 1e3 * found.exchange}
        rows.append(row | {"floor ms": 1e3 * found.total})
    return rows


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--matrices", nargs="+", metavar="COUNTxROWSxCOLS", help="by default those of step.py")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--dtype", choices=ITEMSIZE, default="bf16", help="of Newton-Schulz and its exchange")
    parser.add_argument("--symmetric", action="store_true", help="count symmetric products half")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    return parser.parse_args()


def draw(rows: list[dict]):
    """Stacked bars: what the floor consists of, by stage."""

    def on(axes) -> None:
        base = [0.0] * len(rows)
        for part in ("Newton-Schulz ms", "elementwise ms", "exchange ms"):
            values = [row[part] for row in rows]
            axes.bar([f"stage {row['stage']}" for row in rows], values, bottom=base, label=part.removesuffix(" ms"))
            base = [a + b for a, b in zip(base, values, strict=True)]
        axes.set_ylabel("least milliseconds of a step")
        axes.legend()

    return on


def main() -> None:
    """Measure the rates and print the floor of every stage."""
    args = arguments()
    matrices = parse_matrices(args.matrices) if args.matrices else MODEL
    rates = measure(args.ranks, args.threads, args.device).best(measure(args.ranks, args.threads, args.device))
    rows = rows_of(matrices, args.ranks, rates, args.dtype, args.symmetric)
    numel = sum(rows * cols for rows, cols in matrices)
    counted = "symmetric products counted half" if args.symmetric else "every product counted in full"
    title = f"# The floor of a step: {len(matrices)} matrices, {numel / 1e6:.1f} M parameters, {args.ranks} ranks"
    text = f"{title}\n\n{args.threads} threads per rank, {args.dtype}, {counted}. {describe(rates)}\n\n"
    path = output.path_of("roofline", f"{args.ranks}-ranks", *(["symmetric"] if args.symmetric else []))
    print(output.write(path, [row | dataclasses.asdict(rates) for row in rows], text + output.table(rows), draw(rows)))


if __name__ == "__main__":
    main()
