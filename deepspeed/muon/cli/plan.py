# SPDX-License-Identifier: Apache-2.0
"""The plan of a run as text, and the model that it is for."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from deepspeed.muon.cli.parser import EXPECTED
from deepspeed.muon.config.messages import did_you_mean
from deepspeed.muon.describe import Description, Group, Row, aligned, describe
from deepspeed.muon.errors import ModelError
from deepspeed.muon.forecast import GroupSpec, StepCost
from deepspeed.muon.math.newton_schulz import Schedule
from deepspeed.muon.step import NewtonSchulz
from deepspeed.muon.zero.wrappers.adapter import replaced


def rows_of(
    groups: Sequence[GroupSpec], costs: Sequence[StepCost], world_size: int, schedule: Schedule, dtype: str, fold: bool
) -> list[Row]:
    """Return the rows of the table of parameters.

    ``costs``: ``Estimate.costs``, which tell the owners. ``schedule``, ``dtype``: coefficients and dtype of
    Newton-Schulz. ``fold``: merge rows of parameters that differ only in layer number and owners.
    """
    owners: dict[str, set[int]] = {}
    for cost in costs:
        for item, owner in zip(cost.plan.items, cost.plan.owners, strict=True):
            owners.setdefault(item.shard.spec.name, set()).add(owner)
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
    """Return a row as an entry of ``parameters`` in the object that ``ds_muon plan --json`` prints."""
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


#: Row of ``facts["memory"]`` -> its title.
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
    """Return the text that ``ds_muon plan`` prints, the answers first.

    ``facts``: the object that ``ds_muon plan --json`` prints. ``rows``: of the table of parameters. ``shows_why``:
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
    """Return the sentence that says whether the run fits into the memory of a device."""
    memory = facts["memory"]
    needed, adamw = (quantity(memory["needed_bytes"][half]) for half in ("muon", "adamw"))
    if memory["fits"] is None:
        return f"memory: {needed} on each rank and activations; AdamW: {adamw}. --memory GB says whether that fits"
    limit, left = quantity(memory["limit_bytes"]), quantity(memory["left_for_activations_bytes"])
    if memory["fits"]:
        return f"fits: {needed} of {limit} on each rank, which leaves {left} for activations; AdamW: {adamw}"
    return (
        f"does not fit: {needed} on each rank, which has {limit}; AdamW: {adamw}. More ranks, a higher stage or "
        "offload_optimizer need less"
    )


def _cost(facts: dict[str, Any]) -> str:
    """Return the sentence that says what Muon costs in a step."""
    ranks, share = facts["per_rank"], facts["share"]
    few, many = (f"{_percent(row['counted'])} of a step of {row['tokens']:,}" for row in share["by_tokens"][1:3])
    flop = quantity(ranks["newton_schulz_gflop"]["max"] * 1e9, "FLOP")
    sent = quantity(ranks["sent_bytes"]["max"]) if ranks["sent_bytes"]["max"] else "nothing"
    return f"cost: {few} tokens per rank, {many}; the busiest rank computes {flop} of Newton-Schulz and sends {sent}"


def _memory_table(rows: dict[str, dict[str, float]]) -> str:
    lines: list[tuple[str, ...]] = [("on a device", "Muon", "AdamW")]
    for row, title in MEMORY_TITLES.items():
        pair = [rows[half][row] for half in ("muon", "adamw")]
        if any(pair):
            lines.append((title, *(quantity(nbytes) if nbytes else "-" for nbytes in pair)))
    return aligned(lines)


def _share(by_tokens: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield rows (title, text) about Muon's share of a step, one column for each number of tokens."""
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
        f" in {ranks['parts']} parts, one after the other" if ranks["parts"] > 1 else ""
    )


def _clipping(clip: dict[str, float]) -> str:
    limit, factor = clip["gradient_clipping"], clip["divided_by"]
    if limit <= 0:
        return f"stock's clipping at {limit} had no effect on its updates"
    if factor <= 1:
        return f"stock's clipping at {limit} had no effect: its updates' norm is about {clip['update_norm']:.3g}"
    return f"stock's clipping at {limit} divided its updates by about {factor:,.0f}"


def build(text: str) -> nn.Module:
    """Return the model that the flag ``--model`` names, built on the meta device.

    Args:
        text: a Hugging Face config file, folder, model type or hub name; or ``module:function`` or
            ``file.py:function``, where the function takes no arguments and returns the model.

    Raises:
        ModelError: the model is not found or cannot be built.
    """
    source, colon, function = text.rpartition(":")
    try:
        if colon and not Path(text).exists():
            return _from_function(source, function)
        return _from_hugging_face(text)
    except ModelError as error:
        raise ModelError(f"--model {text!r}: {error}") from None


@contextlib.contextmanager
def _as_model_error(what: str) -> Iterator[None]:
    """Turn an exception in the ``with`` block into a ModelError whose one-line message begins with ``what``."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        brief = (str(error).strip().splitlines() or [""])[0]
        raise ModelError(f"{what} {type(error).__name__}: {brief}") from None


@contextlib.contextmanager
def _without_data() -> Iterator[None]:
    """Return a context in which tensors are created on the meta device and ``torch.nn.init`` does nothing."""
    names = [name for name in vars(nn.init) if name.endswith("_") and not name.startswith("_")]
    fillers = dict.fromkeys(names, lambda original, tensor, *args, **kwargs: tensor)
    with replaced(nn.init, **fillers), torch.device("meta"):
        yield


def _from_function(source: str, name: str) -> nn.Module:
    with _as_model_error(f"importing {source} raised"):
        module = _load(source)
    function = getattr(module, name, None)
    if not callable(function):
        callables = [key for key, value in vars(module).items() if callable(value)]
        hint = did_you_mean(name, callables, "")
        raise ModelError("; ".join(filter(None, [f"{source} has no function {name!r}", hint])))
    with _as_model_error("the function raised"), _without_data():
        model = function()
    if not isinstance(model, nn.Module):
        raise ModelError(f"the function returned {type(model).__name__}, expected a torch.nn.Module")
    return model


def _load(source: str) -> ModuleType:
    path = Path(source)
    if path.suffix != ".py":
        sys.path.insert(0, str(Path.cwd()))
        return importlib.import_module(source)
    if not path.is_file():
        raise ModelError(f"there is no file {source}")
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _from_hugging_face(text: str) -> nn.Module:
    if text.endswith(".py"):
        raise ModelError(
            f"a Python file needs a function: {text}:function, which returns the model (the file is imported)"
        )
    if Path(text).exists():
        os.environ["HF_HUB_OFFLINE"] = "1"  # a local model must not wait for a network that does not answer
    try:
        import transformers
    except ImportError:
        raise ModelError(
            f"a Hugging Face model needs the package transformers (pip install transformers); {EXPECTED}"
        ) from None
    config = _config(transformers, text)
    with _as_model_error(f"building {type(config).__name__} raised"), _without_data():
        try:
            return transformers.AutoModelForCausalLM.from_config(config)
        except ValueError as error:
            if "Unrecognized configuration class" not in str(error):
                raise
            return transformers.AutoModel.from_config(config)


def _config(transformers: ModuleType, text: str) -> Any:
    types = list(transformers.CONFIG_MAPPING.keys())
    exists = Path(text).exists()
    if not exists and text in types:
        return transformers.AutoConfig.for_model(text)
    if not exists and (text.count("/") > 1 or text.endswith(".json") or text.startswith((".", "/"))):
        raise ModelError(f"no such file or folder; {EXPECTED}")
    try:
        with _as_model_error("its config cannot be read:"):
            return transformers.AutoConfig.from_pretrained(text)
    except ModelError:
        if exists or "/" in text:
            raise
        hint = did_you_mean(text, types, EXPECTED)
        raise ModelError(f"no such file, folder, model type or name on the hub; {hint}") from None
