# SPDX-License-Identifier: Apache-2.0
"""State of another run's optimizer, by parameter name, and how it becomes the state of this one.

Muon's momentum here is an exponential average of gradients: buf = momentum * buf + (1 - momentum) * grad. So is
AdamW's first moment, with beta1 for momentum; the sum of Keller Jordan's first Muon, buf = momentum * buf + grad,
is 1 / (1 - momentum) times the average.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from deepspeed.muon.errors import ImportStateError
from deepspeed.muon.exchange.partition import Partition
from deepspeed.muon.log import logger
from deepspeed.muon.matrices.routing import MatrixSpec
from deepspeed.muon.matrices.splitting import is_fused
from deepspeed.muon.optimizer import MuonWithAuxAdam

#: The keys of a parameter's state, by whether it has Muon.
KEYS = {True: ("momentum_buffer",), False: ("exp_avg", "exp_avg_sq")}
#: What becomes of a parameter's state, and what the log says of it.
ACTIONS = {
    "kept": "{key} as saved",
    "first_moment": "{key} from the first moment",
    "zero": "{key} at zero",
}
Actions = dict[str, str]


@dataclass(frozen=True)
class Source:
    """Where state comes from.

    Args:
        title: what the log calls it.
        is_muon: by name of a parameter, whether Muon updated it there (else AdamW).
        read: (name, key of :data:`KEYS`) -> the whole parameter's state, of any shape with its number of elements.
        step: name -> how many steps it has taken.
    """

    title: str
    is_muon: Mapping[str, bool]
    read: Callable[[str, str], Tensor]
    step: Callable[[str], float]


def decide(specs: Iterable[MatrixSpec], source: Source, choice: str | None) -> Actions:
    """What becomes of each parameter's state: a key of :data:`ACTIONS`, by name.

    Args:
        specs: the parameters to be served.
        choice: ``import_momentum``, for parameters that AdamW updated there and Muon updates here; ``"zero"`` is for
            those of the opposite kind as well. ``None``: such parameters are refused.

    Raises:
        ImportStateError: naming the parameters that ``source`` lacks, and those whose kind changes against the choice.
    """
    actions: Actions = {}
    absent: list[str] = []
    to_muon: list[str] = []
    to_adamw: list[str] = []
    for spec in specs:
        there = source.is_muon.get(spec.name)
        if there is None:
            absent.append(spec.name)
        elif there is spec.use_muon:
            actions[spec.name] = "kept"
        elif choice == "zero" or (spec.use_muon and choice):
            actions[spec.name] = choice
        else:
            (to_muon if spec.use_muon else to_adamw).append(spec.name)
    problems = [
        f"{text}: {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
        for text, names in (
            ("it holds no state of", absent),
            ("AdamW updated there what Muon updates here", to_muon),
            ("Muon updated there what AdamW updates here", to_adamw),
        )
        if names
    ]
    if problems:
        raise ImportStateError(
            f"{source.title} cannot be taken over: {'; '.join(problems)}. Route them as there with muon_include and "
            'muon_exclude, or start the state of those that change at zero with "import_momentum": "zero"'
        )
    return actions


def fill(optimizer: MuonWithAuxAdam, partition: Partition, source: Source, actions: Actions) -> None:
    """Write what this rank holds of a partition's parameters in ``actions`` into their state, in place.

    A tensor's step count becomes that of its parameters.
    """
    steps: dict[int, float] = {}
    for shard in partition.shards:
        if action := actions.get(shard.spec.name):  # moments at zero take their bias correction from the start
            count = 0.0 if action == "zero" else source.step(shard.spec.name)
            steps[shard.tensor] = max(count, steps.get(shard.tensor, 0.0))
    for index, count in steps.items():
        optimizer.state[partition.tensors[index]]["step"].fill_(count)
    for shard, start, stop, position in partition.pieces():
        action = actions.get(shard.spec.name)
        for key in KEYS[shard.spec.use_muon] if action else ():
            buffer = optimizer.state[partition.tensors[shard.tensor]][key]
            target = buffer.view(-1)[position : position + stop - start]
            if action == "zero":
                target.zero_()
            else:
                whole = source.read(shard.spec.name, "exp_avg" if action == "first_moment" else key)
                target.copy_(whole.reshape(-1)[start:stop])


def report(optimizer: MuonWithAuxAdam, source: Source, actions: Actions) -> None:
    """Log one line per parameter group."""
    members: dict[int, dict[str, str]] = {}
    for partition in optimizer.all_partitions:
        names = (shard.spec.name for shard in partition.shards)
        members.setdefault(partition.index, {}).update({name: actions[name] for name in names if name in actions})
    for index, group in sorted(members.items()):
        keys = " and ".join(KEYS[optimizer.param_groups[index]["use_muon"]])
        kinds = [f"{count} x {ACTIONS[action].format(key=keys)}" for action, count in Counter(group.values()).items()]
        if kinds:
            name = optimizer.param_groups[index]["name"]
            logger.info("deepspeed-muon: group %s: from %s: %s", name, source.title, ", ".join(kinds))


def warn_of_fused(optimizer: MuonWithAuxAdam, source: Source, actions: Actions) -> None:
    """Another Muon's state goes on in parameters that it may not have cut."""
    names = [s.name for s in optimizer.specs.values() if is_fused(s.split) and actions.get(s.name) == "kept"]
    if names:
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
    engine: Any,
    state_dict: Mapping[str, Any],
    convention: Literal["ema", "sum"],
    names: Sequence[str] | None = None,
) -> None:
    """Take over the state of a plain PyTorch optimizer, on every rank of a live engine.

    Parameters that the optimizer does not hold are left alone, so that one call can bring a Muon and another
    the AdamW beside it. Weights, schedules and DeepSpeed's own counts are not touched.

    Args:
        engine: of ``deepspeed.initialize``, with this Muon.
        state_dict: of ``torch.optim.Muon``, of a Muon in Keller Jordan's style, or of (torch's) Adam or AdamW: per
            parameter ``momentum_buffer``, or ``exp_avg``, ``exp_avg_sq`` and ``step``, in the parameter's shape.
        convention: what ``momentum_buffer`` is: ``"ema"``, buf = momentum * buf + (1 - momentum) * grad, as in
            ``torch.optim.Muon``; or ``"sum"``, buf = momentum * buf + grad, which is multiplied by 1 - momentum.
        names: of the parameters by index in the state_dict. By default its own ``param_names``, else the model's
            trainable parameters in order, or its Muon matrices where their number fits.

    Raises:
        ImportStateError: naming what does not fit, before anything is changed.
    """
    optimizer = engine.basic_optimizer
    if getattr(engine.optimizer, "swap_optimizer", False):
        raise ImportStateError("the state lies on NVMe, where import_state does not reach it; import with CPU offload")
    if convention not in ("ema", "sum"):
        raise ImportStateError(f'convention: got {convention!r}, expected "ema" or "sum"')
    source = _of_state_dict(optimizer, state_dict, convention == "sum", names)
    held = [spec for spec in optimizer.specs.values() if spec.name in source.is_muon]
    actions = decide(held, source, chosen(optimizer, source))
    for partition in optimizer.all_partitions:
        fill(optimizer, partition, source, actions)
    if engine.global_rank == 0:
        report(optimizer, source, actions)
        warn_of_fused(optimizer, source, actions)


def chosen(optimizer: MuonWithAuxAdam, source: Source) -> str | None:
    """``import_momentum`` where the config sets it, or where no parameter had Muon; else the kinds must agree."""
    is_asked = "import_momentum" in optimizer.config.model_fields_set
    return optimizer.config.import_momentum if is_asked or not any(source.is_muon.values()) else None


def _of_state_dict(
    optimizer: MuonWithAuxAdam, state_dict: Mapping[str, Any], is_sum: bool, names: Sequence[str] | None
) -> Source:
    specs = {spec.name: spec for spec in optimizer.specs.values()}
    groups = state_dict["param_groups"]
    group_of = {index: group for group in groups for index in group["params"]}
    found = [state_dict["state"].get(index, {}) for index in group_of]
    decays = [group.get("momentum") for group in group_of.values()]
    problems = []
    for order in _orders(list(specs.values()), groups, names):
        entries = {name: entry for name, entry in zip(order, found, strict=True) if entry}
        decay_of = dict(zip(order, decays, strict=True))
        problems.append(list(_problems(specs, entries, decay_of, is_sum)))
        if not problems[-1]:
            break
    else:
        raise ImportStateError("the state_dict does not fit the model: " + "; ".join(problems[0][:8]))

    def read(name: str, key: str) -> Tensor:
        value = entries[name][key]
        return value * (1.0 - decay_of[name]) if is_sum and key == "momentum_buffer" else value

    return Source(
        "a state_dict" + (", sums times 1 - momentum" if is_sum else ""),
        {name: "momentum_buffer" in entry for name, entry in entries.items()},
        read,
        lambda name: float(entries[name].get("step", 0)),
    )


def _orders(
    specs: Sequence[MatrixSpec], groups: Sequence[Mapping[str, Any]], given: Sequence[str] | None
) -> list[list[str]]:
    """The orders in which the state_dict may name the parameters, the likeliest first.

    Keller Jordan's Muon sorts its own by shape, the greatest first.
    """
    count = sum(len(group["params"]) for group in groups)
    stated = [name for group in groups for name in group.get("param_names", ())]
    names = [spec.name for spec in specs]
    muon = [spec.name for spec in specs if spec.use_muon]
    by_shape = [spec.name for spec in sorted(specs, key=lambda spec: spec.shape, reverse=True) if spec.use_muon]
    guesses = [stated, names, muon, by_shape, by_shape + [name for name in names if name not in set(muon)]]
    orders = [list(given)] if given is not None else guesses
    fitting = [order for order in orders if len(order) == count and len(set(order)) == count]
    if not fitting:
        raise ImportStateError(
            f"the state_dict holds {count} parameters, the model has {len(names)} trainable ones and {len(muon)} Muon "
            f"matrices{'' if given is None else f', names has {len(given)}'}: pass one name per parameter of it, each "
            "once, in its order"
        )
    return fitting


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
