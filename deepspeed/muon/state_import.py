# SPDX-License-Identifier: Apache-2.0
"""Import the state of another run's optimizer, by parameter name.

This Muon's momentum is an exponential average of gradients, buf = momentum * buf + (1 - momentum) * grad. AdamW's
first moment is one too, with beta1 for momentum. The sum in Keller Jordan's first Muon, buf = momentum * buf + grad,
is 1 / (1 - momentum) times the average.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from deepspeed.muon.errors import ImportStateError
from deepspeed.muon.exchange.partition import Partition
from deepspeed.muon.log import logger
from deepspeed.muon.matrices.splitting import MatrixSpec
from deepspeed.muon.optimizer import MuonWithAuxAdam
from deepspeed.muon.saved_state import fused_names

#: The keys of a parameter's state, by whether it has Muon.
KEYS = {True: ("momentum_buffer",), False: ("exp_avg", "exp_avg_sq")}
#: What may become of a parameter's state, with the text for the log.
ACTIONS = {"kept": "{key} as saved", "first_moment": "{key} from the first moment", "zero": "{key} at zero"}
Actions = dict[str, str]


@dataclass(frozen=True)
class Source:
    """Where state comes from."""

    #: Its name in the log.
    title: str
    #: By parameter name, whether Muon updated it in that run (otherwise AdamW).
    is_muon: Mapping[str, bool]
    #: (name, key of :data:`KEYS`) -> the state of the whole parameter, in any shape.
    read: Callable[[str, str], Tensor]
    #: name -> number of steps taken.
    step: Callable[[str], float]


def plan_import(specs: Iterable[MatrixSpec], source: Source, choice: str | None) -> Actions:
    """Decide what becomes of each parameter's state: by name, a key of :data:`ACTIONS`.

    Args:
        specs: the parameters that need state.
        choice: ``import_momentum``, for parameters that AdamW updated and Muon now updates; ``"zero"`` also
            covers the opposite change. ``None`` refuses both.

    Raises:
        ImportStateError: names the parameters that ``source`` lacks, and those whose change the choice does not cover.
    """
    actions: Actions = {}
    texts = {
        None: "it holds no state of",
        False: "AdamW updated there what Muon updates here",
        True: "Muon updated there what AdamW updates here",
    }
    refused: dict[str, list[str]] = defaultdict(list)
    for spec in specs:
        was_muon = source.is_muon.get(spec.name)
        if was_muon is spec.use_muon:
            actions[spec.name] = "kept"
        elif was_muon is not None and choice and (spec.use_muon or choice == "zero"):
            actions[spec.name] = choice
        else:
            refused[texts[was_muon]].append(spec.name)
    if refused:
        problems = [f"{text}: {', '.join(n[:8])}{', ...' if len(n) > 8 else ''}" for text, n in refused.items()]
        raise ImportStateError(
            f"{source.title} cannot be taken over: {'; '.join(problems)}. Route them as there with muon_include and "
            'muon_exclude, or start the state of those that change at zero with "import_momentum": "zero"'
        )
    return actions


def write_state(optimizer: MuonWithAuxAdam, partition: Partition, source: Source, actions: Actions) -> None:
    """Write this rank's part of the state of a partition's parameters, in place.

    A tensor's step count becomes the largest of its parameters'.

    Args:
        actions: from :func:`plan_import`; other parameters keep their state.
    """
    steps: dict[int, float] = {}
    for shard in partition.shards:
        if action := actions.get(shard.spec.name):  # the bias correction of moments at zero starts anew
            count = 0.0 if action == "zero" else source.step(shard.spec.name)
            steps[shard.tensor] = max(count, steps.get(shard.tensor, 0.0))
    for index, count in steps.items():
        optimizer.state[partition.tensors[index]]["step"].fill_(count)
    for shard, start, stop, position in partition.pieces():
        action = actions.get(shard.spec.name)
        for key in KEYS[shard.spec.use_muon] if action else ():
            if action == "zero":
                values = torch.zeros(stop - start, dtype=torch.float32, device="cpu")
            else:
                whole = source.read(shard.spec.name, "exp_avg" if action == "first_moment" else key)
                values = whole.reshape(-1)[start:stop]
            optimizer.write_state(partition.tensors[shard.tensor], key, values, position)


def log_import(optimizer: MuonWithAuxAdam, source: Source, actions: Actions) -> None:
    """Log one line per parameter group."""
    for index, group in enumerate(optimizer.param_groups):
        shards = (shard for part in optimizer.all_partitions if part.index == index for shard in part.shards)
        names = dict.fromkeys(shard.spec.name for shard in shards)
        keys = " and ".join(KEYS[group["use_muon"]])
        counts = Counter(ACTIONS[actions[name]].format(key=keys) for name in names if name in actions)
        if counts:
            kinds = ", ".join(f"{count} x {text}" for text, count in counts.items())
            logger.info("deepspeed-muon: group %s: from %s: %s", group["name"], source.title, kinds)


def warn_of_fused(optimizer: MuonWithAuxAdam, source: Source, actions: Actions) -> None:
    """Warn where the momentum of another Muon continues in parameters that it may not have cut."""
    if names := [name for name in fused_names(optimizer) if actions.get(name) == "kept"]:
        logger.warning(
            "deepspeed-muon: %d fused parameters go on as several matrices, first %s; where %s has them as one, "
            '"muon_fused": "whole" goes on as before',
            len(names),
            names[0],
            source.title,
        )


# ---- a torch optimizer's state_dict ----------------------------------------------------------------------------


@torch.no_grad()
def import_state(
    engine: Any, state_dict: Mapping[str, Any], convention: Literal["ema", "sum"], names: Sequence[str] | None = None
) -> None:
    """Import the state of a plain PyTorch optimizer, on every rank of a live engine.

    Parameters that the state_dict does not hold keep their state, so one call can import a Muon and another the AdamW
    beside it. Weights, schedules and DeepSpeed's own counters are not touched.

    Args:
        engine: from ``deepspeed.initialize``, with this Muon.
        state_dict: of ``torch.optim.Muon``, of a Muon in Keller Jordan's style, or of (torch's) Adam or AdamW: per
            parameter ``momentum_buffer``, or ``exp_avg``, ``exp_avg_sq`` and ``step``, in the parameter's shape.
        convention: what ``momentum_buffer`` is: ``"ema"``, buf = momentum * buf + (1 - momentum) * grad, as in
            ``torch.optim.Muon``; or ``"sum"``, buf = momentum * buf + grad, which is multiplied by 1 - momentum.
        names: of the parameters, by index in the state_dict. By default its own ``param_names``, which torch writes
            where the optimizer was built with ``model.named_parameters()``.

    Raises:
        ImportStateError: names what does not fit, before anything is changed.
    """
    optimizer = engine.basic_optimizer
    if getattr(engine.optimizer, "swap_optimizer", False):
        raise ImportStateError("the state lies on NVMe, where import_state does not reach it; import with CPU offload")
    if convention not in ("ema", "sum"):
        raise ImportStateError(f'convention: got {convention!r}, expected "ema" or "sum"')
    source = _of_state_dict(optimizer, state_dict, convention == "sum", names)
    found = [spec for spec in optimizer.specs.values() if spec.name in source.is_muon]
    actions = plan_import(found, source, momentum_policy(optimizer, source))
    for partition in optimizer.all_partitions:
        write_state(optimizer, partition, source, actions)
    if engine.global_rank == 0:
        log_import(optimizer, source, actions)
        warn_of_fused(optimizer, source, actions)


def momentum_policy(optimizer: MuonWithAuxAdam, source: Source) -> str | None:
    """Return ``import_momentum`` where the config sets it or no parameter had Muon; else ``None``: kinds must agree."""
    is_set = "import_momentum" in optimizer.config.model_fields_set
    return optimizer.config.import_momentum if is_set or not any(source.is_muon.values()) else None


def _of_state_dict(
    optimizer: MuonWithAuxAdam, state_dict: Mapping[str, Any], is_sum: bool, names: Sequence[str] | None
) -> Source:
    specs = {spec.name: spec for spec in optimizer.specs.values()}
    groups = state_dict["param_groups"]
    members = [(index, group.get("momentum")) for group in groups for index in group["params"]]
    named = list(zip(_names(groups, names), members, strict=True))
    entries = {name: state_dict["state"][index] for name, (index, _) in named if state_dict["state"].get(index)}
    decays = {name: momentum for name, (_, momentum) in named}
    if problems := list(_problems(specs, entries, decays, is_sum)):
        raise ImportStateError("the state_dict does not fit the model: " + "; ".join(problems[:8]))

    def read(name: str, key: str) -> Tensor:
        value = entries[name][key]
        return value * (1.0 - decays[name]) if is_sum and key == "momentum_buffer" else value

    return Source(
        "a state_dict" + (", sums times 1 - momentum" if is_sum else ""),
        {name: "momentum_buffer" in entry for name, entry in entries.items()},
        read,
        lambda name: float(entries[name].get("step", 0)),
    )


def _names(groups: Sequence[Mapping[str, Any]], names: Sequence[str] | None) -> Sequence[str]:
    """Return the names of a state_dict's parameters, in its order; its own where the caller has none."""
    count = sum(len(group["params"]) for group in groups)
    if names is None:
        names = [name for group in groups for name in group.get("param_names", ())]
    if not names:
        raise ImportStateError(
            f"the state_dict does not name its {count} parameters, and parameters of equal shape could be swapped "
            "unnoticed: pass names=[...], one per parameter in its order, as [name for name, _ in "
            "model.named_parameters()] for an optimizer that was built with model.parameters()"
        )
    if not len(names) == len(set(names)) == count:
        raise ImportStateError(
            f"the state_dict holds {count} parameters, and there are {len(set(names))} names: pass one name per "
            "parameter of it, each once, in its order"
        )
    return names


def _problems(
    specs: Mapping[str, MatrixSpec], entries: Mapping[str, Mapping[str, Any]], decays: Mapping[str, Any], is_sum: bool
) -> Iterator[str]:
    for name, entry in entries.items():
        keys = [keys for keys in KEYS.values() if all(isinstance(entry.get(key), Tensor) for key in keys)]
        if name not in specs:
            yield f"{name}: the model has no such trainable parameter"
        elif not keys:
            yield f"{name}: neither momentum_buffer nor exp_avg and exp_avg_sq, but {sorted(entry)}"
        elif any(tuple(entry[key].shape) != specs[name].shape for key in keys[0]):
            yield f"{name}: {list(entry[keys[0][0]].shape)} there, {list(specs[name].shape)} here"
        elif is_sum and "momentum_buffer" in entry and decays[name] is None:
            yield f"{name}: its group has no momentum, by which a sum becomes an average"
