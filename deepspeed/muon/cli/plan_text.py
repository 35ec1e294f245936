# SPDX-License-Identifier: Apache-2.0
"""Write the plan of a run as text, for ``ds_muon plan``. ``forecast.py`` computes its numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from deepspeed.muon.cli.forecast import GroupSpec, StepCost
from deepspeed.muon.describe import Description, Group, Row, aligned, describe
from deepspeed.muon.math.newton_schulz import Schedule
from deepspeed.muon.step import NewtonSchulz


def rows_of(
    groups: Sequence[GroupSpec], costs: Sequence[StepCost], world_size: int, schedule: Schedule, dtype: str, fold: bool
) -> list[Row]:
    """Return the rows of the table that ``ds_muon plan`` prints: what Muon or AdamW does with each parameter.

    ``costs``: ``Estimate.costs``, whose plans have the owner of each matrix, the rank that orthogonalizes it.
    ``schedule``, ``dtype``: coefficients and dtype of Newton-Schulz. ``fold``: whether to merge rows of parameters that
    differ only in layer number and owners.
    """
    owners = {name: ranks for cost in costs for name, ranks in cost.plan.owners_of_parameters.items()}
    is_on_each = any(cost.part.world_size < world_size for cost in costs)
    if is_on_each:
        owners = {name: {*range(world_size)} for name in owners}
    described = []
    for group in groups:
        how = NewtonSchulz(schedule=schedule, dtype=dtype, method=group.method(schedule, dtype))
        planned: dict[str, Any] = {"scale": group.scale, "method": how.method, "flops": how.flops, "dtype": dtype}
        planned |= {"owners": owners, "is_on_each": is_on_each}
        described.append(Group(use_muon=group.use_muon, specs=group.specs, **(planned if group.use_muon else {})))
    return list(describe(described, fold).rows)


def as_json(row: Row) -> dict[str, Any]:
    """Return a row of the table as an entry of ``parameters`` in the object that ``ds_muon plan --json`` prints."""
    return {
        "name": row.name,
        "count": row.count,
        "shape": list(row.shape),
        "rule": row.updated_by,
        "reason": row.reason,
        "blocks": row.matrices,
        "scales": list(row.scales),
        "methods": list(row.methods),
        "cost": row.cost,
        "owners": list(row.owners),
        "on_each": row.is_on_each,
    }


def quantity(value: float, unit: str = "B") -> str:
    """Return a value with three digits and a unit prefix, such as ``56.6 MB``."""
    prefixes = iter(("", "k", "M", "G", "T", "P"))
    prefix = next(prefixes)
    while abs(value) >= 999.5 and prefix != "P":
        value, prefix = value / 1000, next(prefixes)
    return f"{value:.3g} {prefix}{unit}"


#: Key of ``memory.rows`` in the object that ``ds_muon plan --json`` prints -> title of its row.
MEMORY_TITLES = {
    "weights": "weights",
    "gathered_weights": "weights that stage 3 gathers, at most",
    "gradients": "gradients",
    "gradient_buckets": "ZeRO's buckets for gradients",
    "fp32_weights": "fp32 weights",
    "optimizer_state": "optimizer state",
    "fp32_gradients": "fp32 gradients, in the step only",
    "scratch": "scratch of Muon, in the step only",
    "nccl": "NCCL from the start on (NCCL_MAX_P2P_NCHANNELS limits it)",
}


def plan_text(facts: dict[str, Any], rows: Sequence[Row], shows_why: bool) -> str:
    """Return the text that ``ds_muon plan`` prints: first whether the run fits and what Muon costs, then the details.

    ``facts``: the object that ``ds_muon plan --json`` prints. ``rows``: the result of :func:`rows_of`. ``shows_why``:
    whether to add what the plan assumes.
    """
    ranks, totals = facts["per_rank"], facts["totals"]
    halves = [f"{half['parameters']:,} parameters in {half['tensors']:,} tensors" for half in totals.values()]
    flop = {key: quantity(value * 1e9, "FLOP") for key, value in ranks["newton_schulz_gflop"].items()}
    imbalance = f"imbalance {ranks['imbalance']:.3f} (max over mean); heaviest matrix {flop['heaviest_matrix']}"
    lines = [
        ("Muon", f"{halves[0]}, {totals['muon']['matrices']:,} matrices"),
        ("AdamW", halves[1]),
        *(
            [("optimizer state per rank", f"{_over_ranks(ranks['state_bytes'])}, on the host")]
            if facts["offload"]
            else ()
        ),
        ("sent per rank and step", _sent(facts)),
        ("Newton-Schulz per rank", f"mean {flop['mean']}, max {flop['max']}; {imbalance}"),
        *_share(facts["share"]["by_tokens"]),
        *([("coming from stock", _clipping(facts["stock_clipping"]))] if facts["stock_tuning"] else ()),
        *([("beyond plain Muon", ", ".join(facts["beyond_muon"]))] if facts["beyond_muon"] else ()),
    ]
    head = f"{facts['model']}, stage {facts['stage']}, {facts['world_size']:,} ranks, adjust_lr_fn {facts['scale']}"
    notes = [*facts["notes"], *(facts["assumptions"] if shows_why else ["--why says what this plan assumes"])]
    memory, routes = _memory_table(facts["memory"]["rows"]), str(Description(tuple(rows)))
    answers = "\n".join([_fit(facts), _cost(facts)])
    return "\n\n".join([head, answers, memory, aligned(lines), routes, "\n".join(notes)])


def _fit(facts: dict[str, Any]) -> str:
    """Return the line that says whether the run fits into the memory of a device."""
    memory = facts["memory"]
    needed, adamw = (quantity(memory["needed_bytes"][half]) for half in ("muon", "adamw"))
    if memory["fits"] is None:
        return f"memory: {needed} on each rank, plus activations; AdamW: {adamw}. --memory GB says whether that fits"
    limit, left = quantity(memory["limit_bytes"]), quantity(memory["left_for_activations_bytes"])
    if memory["fits"]:
        backward = f"the backward leaves {left} for activations"
        return f"fits: at most {needed} of {limit} on each rank; {backward}; AdamW: {adamw}"
    return (
        f"does not fit: {needed} on each rank, which has {limit}; AdamW: {adamw}. More ranks, a higher stage or "
        "offload_optimizer need less"
    )


def _cost(facts: dict[str, Any]) -> str:
    """Return the line on Muon's cost: its share of a step, and the most operations and sent bytes of a rank."""
    ranks, share = facts["per_rank"], facts["share"]
    few, many = (f"{_percent(row['counted'])} of a step of {row['tokens']:,}" for row in share["by_tokens"][1:3])
    flop = quantity(ranks["newton_schulz_gflop"]["max"] * 1e9, "FLOP")
    sent = quantity(ranks["sent_bytes"]["max"]) if ranks["sent_bytes"]["max"] else "nothing"
    return f"cost: {few} tokens per rank, {many}; at most, a rank computes {flop} of Newton-Schulz and sends {sent}"


def _memory_table(rows: dict[str, dict[str, float]]) -> str:
    lines: list[tuple[str, ...]] = [("on a device", "Muon", "AdamW")]
    for row, title in MEMORY_TITLES.items():
        pair = [rows[half][row] for half in ("muon", "adamw")]
        if any(pair):
            lines.append((title, *(quantity(nbytes) if nbytes else "-" for nbytes in pair)))
    return aligned(lines)


def _share(by_tokens: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield two rows (title, text): the numbers of tokens per rank and step, and Muon's share of a step with each."""
    cells = [[f"{row['tokens']:,}" for row in by_tokens], [_percent(row["counted"]) for row in by_tokens]]
    yield from zip(("tokens per rank and step", "Muon's share of a step"), aligned(cells).splitlines(), strict=True)


def _percent(share: float) -> str:
    return f"{100 * share:.{0 if share >= 0.0995 else 1 if share >= 0.00995 else 2}f} %"


def _over_ranks(nbytes: dict[str, float]) -> str:
    if nbytes["mean"] == nbytes["max"]:
        return f"{quantity(nbytes['max'])} on every rank"
    return f"mean {quantity(nbytes['mean'])}, max {quantity(nbytes['max'])}"


def _sent(facts: dict[str, Any]) -> str:
    ranks = facts["per_rank"]
    sent = ranks["sent_bytes"]
    if not sent["max"]:
        if facts["stage"] == 0:
            return "nothing: every rank holds every matrix and orthogonalizes it itself"
        return "nothing: every matrix lies whole in the shard of one rank, which orthogonalizes it"
    mean = f"mean {quantity(sent['mean'])}, max {quantity(sent['max'])}"
    if facts["stage"] == 0:
        return f"{mean}; {ranks['collectives']:,} all-gathers of results"
    least = f"{quantity(sent['least_mean'])} if the owner of each matrix were the rank that holds most of it"
    return f"{mean}; the mean would be {least}; {ranks['collectives']:,} all-to-alls" + (
        f" in {ranks['parts']} sub-groups, one after the other" if ranks["parts"] > 1 else ""
    )


def _clipping(clip: dict[str, float]) -> str:
    limit, factor = clip["gradient_clipping"], clip["divided_by"]
    if limit <= 0:
        return f"stock DeepSpeed's clipping at {limit} had no effect on Muon's updates"
    if factor <= 1:
        return f"stock DeepSpeed's clipping at {limit} had no effect: updates' norm is about {clip['update_norm']:.3g}"
    return f"stock DeepSpeed's clipping at {limit} divided its updates by about {factor:,.0f}"
