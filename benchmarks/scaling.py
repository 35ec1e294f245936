# SPDX-License-Identifier: Apache-2.0
"""Plans of known models on up to 4096 ranks, and predicted against measured steps of a small model."""

import dataclasses
import gc
import itertools
import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch

from benchmarks import ranks, report
from benchmarks.roofline import muon_group
from benchmarks.training import Job, rounds
from deepspeed.muon.cli.model import build
from deepspeed.muon.config.schema import parse
from deepspeed.muon.forecast.estimate import Estimate, Machine, estimate, milliseconds, per_rank, totals
from deepspeed.muon.forecast.layout import GroupSpec, Layout, StepCost, group_specs
from deepspeed.muon.forecast.measured import measure
from deepspeed.muon.kernels.selection import choose, product_tables, unavailable_kernels
from deepspeed.muon.plan.memory import Memory
from deepspeed.muon.plan.placement import Spread
from deepspeed.muon.plan.plan import global_plan, without_collector
from deepspeed.muon.tuning import Candidates

OWN, EXAMPLES = Path(__file__).parent, report.ROOT / "examples" / "plan"


class Network(NamedTuple):
    """What one rank's connection to the others can do.

    `gbs`: 10^9 bytes sent per second while as many are received. `latency_us`: of one collective. `message_us`: of each
    message that a rank sends in it. `near_gbs`, `near_latency_us`: within a node.
    """

    gbs: float
    latency_us: float
    message_us: float
    near_gbs: float
    near_latency_us: float


class Model(NamedTuple):
    """A model, the tokens of a training step of it in millions, and the part of its experts that a token meets."""

    source: str
    tokens: float
    active: float = 1.0


#: Tokens as the models' reports have them: Llama 3 (arXiv 2407.21783, section 3.4.1, from 4 to 16 million), Kimi K2
#: (arXiv 2507.20534, section 2.4), whose shapes the mixture has.
MODELS = {
    "gpt2-xl": Model(f"{OWN}/models/gpt2-xl.json", 0.5),
    "llama3-8b": Model(f"{EXAMPLES}/llama_8b.json", 4),
    "llama3-70b": Model(f"{OWN}/models/llama3-70b.json", 16),
    "llama3-405b": Model(f"{OWN}/models/llama3-405b.json", 16),
    "moe-1t": Model(f"{EXAMPLES}/moe_1t.py:model", 67, active=8 / 384),
}
#: Operations of forward and backward per second and rank, 10^12: 40 % of an H100's dense bf16.
TRAINING_TFLOPS = 400.0
PLAIN = parse({"lr": 1e-3})
GPU = Memory(wire="bf16", dtype="bf16", device_type="cuda")
ONE_OWNER = parse({"lr": 1e-3, "owners_per_matrix": 1})
NOTES = """Busiest: operations of the busiest rank over the mean of one owner per matrix; as planned, with one owner
each, and with rounds of as many equal matrices as ranks, padded, as dion has them. MB, messages: sent per rank and
step, there and back; messages and runs are of the busiest rank. Planning: one rank's plans of all parts, measured on
this machine. Parts: sub-groups of stage 3, stepped one after the other. Scratch: of a step, on the rank that needs
most."""
SHARES = f"""Training s: forward and backward, 6 operations per active parameter and token, at {TRAINING_TFLOPS:.0f}
TFLOP/s per rank, for the stated tokens per step. ZeRO s: the bf16 weights that ZeRO gathers, once at stage 1 and twice
at stage 3, and the gradients that it reduces, at the bandwidth of the network. Exposed ms: what Muon adds to a step
with AdamW. Of training: the part that this is of it; of a step: of the longer of training and ZeRO. Owners: the most of
one matrix."""


def forecast(
    name: str, groups: Sequence[GroupSpec], stage: int, world: int, stated: tuple[Machine, Network] | None
) -> dict[str, Any]:
    """A row of the table."""
    found = estimate(groups, Layout(stage, world), PLAIN, GPU)
    facts = per_rank(found)
    row = {"model": name, "stage": stage, "ranks": world, "matrices": totals(groups, True)["matrices"]}
    row |= {"parts": facts["parts"], "rounds": facts["rounds"]} | busiest(found)
    row |= {"MB mean": facts["sent_bytes"]["mean"] / 1e6, "MB max": facts["sent_bytes"]["max"] / 1e6}
    row |= {"messages": sum(map(messages, found.costs)), "runs": sum(cost.runs for cost in found.costs)}
    row |= {"scratch GB": facts["scratch_bytes"]["max"] / 1e9}
    row |= {"owners": max(count for cost in found.costs for count in cost.plan.counts)}
    row |= share_of_training(name, groups, found, *stated) if stated else {}
    for title, rank in {"planning s": 0, "of a middle rank": world // 2}.items():
        gc.collect()
        begin = time.perf_counter()
        with without_collector():  # as when an optimizer binds
            for part, counts in ((cost.part, cost.plan.counts) for cost in found.costs):
                cost = part.group.cost_model(PLAIN.schedule, "bf16", 2, "cuda", found.layout.ranks_per_node)
                global_plan(part.shards, part.world_size, cost, counts=counts).view(rank)
        row[title] = time.perf_counter() - begin
    return row


def busiest(planned: Estimate) -> dict[str, float]:
    """Operations of the busiest rank over the mean of one owner per matrix, by who owns a matrix."""
    alone, world = estimate(planned.groups, planned.layout, ONE_OWNER, GPU), planned.world_size
    mean = sum(sum(cost.flops) for cost in alone.costs) / world
    # Parts are stepped one after the other, so each waits for its own busiest rank.
    found = {"busiest": planned, "of one owner each": alone}
    row = {title: sum(max(cost.flops) for cost in of.costs) / mean for title, of in found.items()}
    shapes = Counter(item.shape for cost in alone.costs for item in cost.part.items)
    flops = muon_group([*shapes]).cost_model(PLAIN.schedule, GPU.dtype, GPU.wire_bytes, GPU.device_type).flops
    padded = sum(math.ceil(count / world) * flops(*shape) for shape, count in shapes.items())
    return row | {"in padded rounds": padded / mean}


def messages(cost: StepCost) -> int:
    """Messages of the busiest rank, one per round and rank that it sends anything to, there and back."""
    world = cost.plan.world_size
    there, back = [0] * world, [0] * world  # if no two matrices shared one
    owners_of: dict[Spread, Counter[int]] = {}
    for owner, item in cost.plan.owned:
        owners_of.setdefault(item.spread, Counter())[owner] += 1
    for spread, owners in owners_of.items():
        holders = set(spread.holders)
        for owner, count in owners.items():
            back[owner] += count * len(holders - {owner})
        for rank in holders if cost.plan.copies == 1 else ():
            there[rank] += owners.total() - owners[rank]
    # All that goes to one rank in one round is one message.
    most = len(cost.plan.rounds) * (world - 1)
    return max(min(a, most) + min(b, most) for a, b in zip(there, back, strict=True))


def phases(found: Estimate, machine: Machine, network: Network | None) -> dict[str, float]:
    """Milliseconds of one step of the optimizer, with `between_owners`, `exchange` and `total` over a known network.

    In the total, Newton-Schulz, with what owners of one matrix wait for each other, and exchange of a part overlap,
    except that the first round's way there and the last one's way back overlap with nothing: one round's share of the
    shorter adds to the longer.
    """
    known = milliseconds(found, machine)
    if network is None:
        return known
    together, travels, betweens = 0.0, 0.0, 0.0
    for cost in found.costs:
        between = _between(cost, network, found.layout.ranks_per_node)
        compute = max(cost.flops) / (machine.tflops * 1e9) + between
        waits = cost.collectives * network.latency_us + messages(cost) * network.message_us
        travel = max(cost.sent_bytes) / (network.gbs * 1e6) + waits / 1e3
        together += max(compute, travel) + min(compute, travel) / max(1, cost.rounds)
        travels, betweens = travels + travel, betweens + between
    return known | {"between_owners": betweens, "exchange": travels, "total": known["elementwise"] + together}


def _between(cost: StepCost, network: Network, ranks_per_node: int) -> float:
    is_near = max(cost.plan.counts, default=1) <= ranks_per_node
    gbs, latency = (network.near_gbs, network.near_latency_us) if is_near else (network.gbs, network.latency_us)
    calls = Counter[int]()
    for owner, item in cost.plan.owned:
        calls[owner] += cost.model.of_owner(*item.shape, item.owners).calls
    return max(cost.between_bytes) / (gbs * 1e6) + max(calls.values(), default=0) * latency / 1e3


def share_of_training(
    name: str, groups: Sequence[GroupSpec], found: Estimate, machine: Machine, network: Network
) -> dict[str, Any]:
    """Milliseconds of the optimizer's step by phase, and what Muon adds to a training step."""
    model, by_phase = MODELS[name], phases(found, machine, network)
    specs = [spec for group in groups for spec in group.specs]
    active = sum(spec.numel * (model.active if ".experts." in spec.name else 1.0) for spec in specs)
    training = 6 * active * model.tokens * 1e6 / (found.world_size * TRAINING_TFLOPS * 1e12)
    travels = 2 * sum(spec.numel for spec in specs) * (3 if found.layout.stage == 3 else 2)
    zero = travels / (network.gbs * 1e9)
    exposed = by_phase["total"] / 1e3 - sum(part.numel for part in found.parts) * machine.adamw_ns / 1e9
    row = {f"{phase} ms": value for phase, value in by_phase.items()}
    row |= {"tokens M": model.tokens, "training s": training, "ZeRO s": zero, "exposed ms": 1e3 * exposed}
    return row | {"of training": f"{exposed / training:.2%}", "of a step": f"{exposed / max(training, zero):.2%}"}


def scaling(
    models: Annotated[tuple[str, ...], MODELS] = tuple(MODELS),
    worlds: tuple[int, ...] = (8, 64, 512, 1024, 4096),
    stages: tuple[int, ...] = (1, 3),
    machine: str = "",
    measured: tuple[int, ...] = (1, 2, 4),
) -> str:
    """Plans of known models on up to 4096 ranks, and predicted against measured steps of a small model.

    Owners are balanced for an accelerator. The small model is that of `step`, on gloo over loopback, one thread per
    rank; its steps are predicted from Newton-Schulz, passes and exchange that are measured alone. A rank that shares
    its core has its share of the rates.

    Args:
        models: which
        worlds: numbers of ranks
        stages: of ZeRO
        machine: JSON file with every constant of Machine, and of Network under "network", for columns of milliseconds
        measured: numbers of ranks whose steps are measured; 0 for none
    """
    stated, rows, points = None, [], []
    if machine:
        given = json.loads(Path(machine).read_text())
        network = Network(**given.pop("network"))
        stated = Machine(**given), network
    for name in models:
        groups = group_specs(build(MODELS[name].source), PLAIN)
        for stage, world in itertools.product(stages, worlds):
            rows.append(forecast(name, groups, stage, world, stated))
            print(rows[-1], flush=True)
    parts = [
        f"Milliseconds are predicted for {stated[0]}, {stated[1]}, not measured." if stated else "",
        report.table(rows),
        NOTES,
        SHARES if stated else "",
    ]
    if any(measured):
        alone, network, points = compare(measured, stages)
        parts += [f"## Measured points\n\nPredicted for {alone}, {network}.\n\n{report.table(points)}"]
        report.write_csv(report.RESULTS / f"{report.name_of('scaling')}-measured.csv", points)
    return report.write(report.name_of("scaling"), "Scaling of the plan", rows, *parts)


def memory(
    models: Annotated[tuple[str, ...], MODELS] = ("llama3-8b", "llama3-70b"),
    worlds: tuple[int, ...] = (8, 64),
    stages: tuple[int, ...] = (1, 2, 3),
    cards: tuple[int, ...] = (24, 80, 141),
) -> str:
    """Memory of a rank by model and stage, and the cards that hold it. Planned, not measured.

    Without activations and buckets of ZeRO: bf16 weights and gradients, fp32 master weights, optimizer state, and the
    scratch of a step.

    Args:
        models: which
        worlds: numbers of ranks
        stages: of ZeRO, 1 to 3
        cards: memory of cards, 10^9 bytes
    """
    rows = []
    for name in models:
        groups = group_specs(build(MODELS[name].source), PLAIN)
        numel = sum(totals(groups, use_muon)["parameters"] for use_muon in (True, False))
        for world, stage in itertools.product(worlds, stages):
            facts = per_rank(estimate(groups, Layout(stage, world), PLAIN, GPU))
            weights, gradients = (2 * numel / (world if stage >= least else 1) for least in (3, 2))
            state, scratch = 4 * numel / world + facts["state_bytes"]["max"], facts["scratch_bytes"]["max"]
            total = weights + gradients + state + scratch
            row = {"model": name, "ranks": world, "stage": stage, "weights GB": weights / 1e9}
            row |= {"gradients GB": gradients / 1e9, "master + state GB": state / 1e9, "scratch GB": scratch / 1e9}
            left = {f"left of {card} GB": f"{card - total / 1e9:.0f}" if total < card * 1e9 else "-" for card in cards}
            rows.append(row | left)
    return report.table(rows)


def compare(worlds: Sequence[int], stages: Sequence[int]) -> tuple[Machine, Network | None, list[dict[str, Any]]]:
    """The rates of one core alone and of loopback, and measured steps beside those that follow from them."""
    jobs = [Job(str(s), "ours", w, warmup=2) for w in worlds for s in stages]
    (alone,) = ranks.run(rank, {"shapes": jobs[0].matrices})
    *_, records = rounds(jobs, 2)
    found = report.summarize(records, "world", "case")
    sent = [row["exchange MB"] / 1e3 / row["alone s"] for row in found if row["world"] == 2 and row["exchange MB"]]
    network = _loopback(statistics.fmean(sent)) if sent else None
    cpu = Memory(wire="bf16", dtype="fp32", device_type="cpu")
    machine, points = Machine(**alone), []
    for row in found:
        share = max(1.0, row["world"] / report.cores())
        slower = {name: getattr(machine, name) * share for name in ("muon_ns", "adamw_ns", "run_us")}
        link = network and network._replace(gbs=network.gbs / share)
        of_rank = dataclasses.replace(machine, tflops=machine.tflops / share, **slower)
        groups, layout = [muon_group(jobs[0].matrices)], Layout(int(row["case"]), row["world"])
        step = phases(estimate(groups, layout, PLAIN, cpu), of_rank, link)
        predicted, measured = step.get("total", step["elementwise"] + step["newton_schulz"]), 1e3 * row["optimizer s"]
        point = {"ranks": row["world"], "stage": row["case"], "measured ms": measured, "predicted ms": predicted}
        point |= {"error": f"{predicted / measured - 1:+.0%}", "Newton-Schulz ms": 1e3 * row["newton_schulz s"]}
        point |= {"predicted Newton-Schulz ms": step["newton_schulz"], "predicted elementwise ms": step["elementwise"]}
        point |= {"elementwise ms": 1e3 * (row["prepare s"] + row["apply s"]), "waiting ms": 1e3 * row["exchange s"]}
        points.append(point | {"predicted exchange ms": step.get("exchange", 0.0)})
    return machine, network, points


def _loopback(gbs: float) -> Network:
    return Network(gbs=gbs, latency_us=0.0, message_us=0.0, near_gbs=gbs, near_latency_us=0.0)


def rank(shapes: list[tuple[int, int]]) -> dict[str, Any]:
    """The constants of one core alone."""
    torch.set_num_threads(1)
    groups, cpu = [muon_group([tuple(shape) for shape in shapes])], torch.device("cpu")
    unavailable = unavailable_kernels("auto", ["cpu"])
    candidates = Candidates.from_config(parse({}), product_tables(unavailable, "cpu"), {"auto"}, cpu, has_bf16=True)
    return dataclasses.asdict(measure(groups, candidates, torch.bfloat16, cpu, choose(unavailable), 1)[0])
