# SPDX-License-Identifier: Apache-2.0
"""Import the state of another run's optimizer, by parameter name.

This Muon's momentum is an exponential average of gradients, buf = momentum * buf + (1 - momentum) * grad. AdamW's
first moment is the same with beta1 in place of momentum. The sum in Keller Jordan's first Muon, buf = momentum * buf +
grad, is 1 / (1 - momentum) times the average.
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
from deepspeed.muon.log import listed, logger
from deepspeed.muon.math.adamw import STARTED
from deepspeed.muon.matrices.splitting import MatrixSpec
from deepspeed.muon.optimizer import MuonWithAuxAdam
from deepspeed.muon.saved_state import fused_names

#: Whether Muon updates a parameter -> the keys of its state.
KEYS = {True: ("momentum_buffer",), False: ("exp_avg", "exp_avg_sq")}
#: What an import can do with a parameter's state -> the text for the log.
ACTIONS = {"kept": "{key} as saved", "first_moment": "{key} from the first moment", "zero": "{key} at zero"}
#: Parameter name -> a key of :data:`ACTIONS`.
Actions = dict[str, str]


@dataclass(frozen=True)
class Source:
    """The optimizer state of another run, which :func:`write_state` imports one parameter at a time."""

    #: What the log calls this source.
    title: str
    #: Parameter name -> whether Muon updated the parameter in the other run; otherwise AdamW did.
    is_muon: Mapping[str, bool]
    #: (parameter name, state key from :data:`KEYS`) -> that state of the whole parameter, in any shape.
    read: Callable[[str, str], Tensor]
    #: Parameter name -> number of steps taken.
    step: Callable[[str], float]


def plan_import(specs: Iterable[MatrixSpec], source: Source, choice: str | None) -> Actions:
    """Return {parameter name: key of :data:`ACTIONS`}: how to import the state of each parameter in ``specs``.

    ``choice``, the config's ``import_momentum``, is the action for parameters that AdamW updated and Muon updates now.
    If it is ``"zero"``, it is also the action for parameters that Muon updated and AdamW updates now.

    Raises:
        ImportStateError: ``source`` lacks a parameter, or ``choice`` gives no action for one (``None`` gives none).
    """
    actions: Actions = {}
    texts = {
        None: "it has no state of these parameters",
        False: "AdamW updated these parameters in the other run, and Muon updates them in this one",
        True: "Muon updated these parameters in the other run, and AdamW updates them in this one",
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
        problems = [f"{text}: {listed(names, 8)}" for text, names in refused.items()]
        raise ImportStateError(
            f"cannot import {source.title}: {'; '.join(problems)}. Assign parameters as in the other run, with "
            'muon_include and muon_exclude, or start the state of those that changed at zero: "import_momentum": "zero"'
        )
    return actions


def write_state(optimizer: MuonWithAuxAdam, partition: Partition, source: Source, actions: Actions) -> None:
    """Import the state of the parameters in a :class:`Partition` into the optimizer's state tensors on this rank.

    Parameters that are not in ``actions`` keep their state. Under ZeRO, a tensor contains several parameters and has
    one step count, the largest of theirs; an AdamW group also stores how many fewer steps each parameter has taken.
    """
    group, made = optimizer.param_groups[partition.index], dict[str, float]()
    for shard in partition.shards:
        name = shard.spec.name
        if action := actions.get(name):  # step 0 for moments at zero: their bias correction starts again
            made[name] = 0.0 if action == "zero" else source.step(name)
        elif not group["use_muon"]:
            missed = group.get(STARTED, {}).get(name, 0)
            made[name] = float(optimizer.state[partition.tensors[shard.tensor]]["step"]) - missed
    imported = {shard.tensor for shard in partition.shards if shard.spec.name in actions}
    steps: dict[int, float] = {}
    for shard in partition.shards:
        steps[shard.tensor] = max(made.get(shard.spec.name, 0.0), steps.get(shard.tensor, 0.0))
    for index in imported:
        optimizer.state[partition.tensors[index]]["step"].fill_(steps[index])
    if not group["use_muon"]:
        missed_by = {s.spec.name: int(steps[s.tensor] - made[s.spec.name]) for s in partition.shards}
        started = group.get(STARTED, {}) | missed_by
        group.pop(STARTED, None)
        if any(started.values()):
            group[STARTED] = {name: count for name, count in started.items() if count}
    for shard, start, stop, position in partition.pieces():
        action = actions.get(shard.spec.name)
        for key in KEYS[shard.spec.use_muon] if action else ():
            if action == "zero":
                values = torch.zeros(stop - start, dtype=torch.float32, device="cpu")
            else:
                whole = source.read(shard.spec.name, "exp_avg" if action == "first_moment" else key)
                values = whole.reshape(-1)[start:stop]
                values = torch.nn.functional.pad(values, (0, stop - start - values.numel()))  # rows that are new
            optimizer.write_state(partition.tensors[shard.tensor], key, values, position)


def log_import(optimizer: MuonWithAuxAdam, source: Source, actions: Actions) -> None:
    """Log how the states of each parameter group were imported, such as "8 x momentum_buffer as saved"."""
    for index, group in enumerate(optimizer.param_groups):
        shards = (shard for part in optimizer.all_partitions if part.index == index for shard in part.shards)
        names = dict.fromkeys(shard.spec.name for shard in shards)
        keys = " and ".join(KEYS[group["use_muon"]])
        counts = Counter(ACTIONS[actions[name]].format(key=keys) for name in names if name in actions)
        if counts:
            kinds = ", ".join(f"{count} x {text}" for text, count in counts.items())
            logger.info(
                "deepspeed-muon: imported the optimizer state of parameter group %s from %s: %s",
                group["name"],
                source.title,
                kinds,
            )


def warn_of_fused(optimizer: MuonWithAuxAdam, source: Source, actions: Actions) -> None:
    """Warn about fused parameters, such as QKV, that Muon splits now but may have updated whole in the other run."""
    if names := [name for name in fused_names(optimizer) if actions.get(name) == "kept"]:
        logger.warning(
            "deepspeed-muon: %d fused parameters (first: %s) are now updated as several matrices; if the run that "
            'saved %s updated each as one, set "muon_fused": "whole" in optimizer.params to keep that',
            len(names),
            names[0],
            source.title,
        )


# ---- a torch optimizer's state_dict ----------------------------------------------------------------------------


@torch.no_grad()
def import_state(
    engine: Any, state_dict: Mapping[str, Any], convention: Literal["ema", "sum"], names: Sequence[str] | None = None
) -> None:
    """Import the state of a plain PyTorch optimizer into an engine's optimizer. Call it on every rank.

    Parameters that are not in the state_dict keep their state, so one call can import the state of a Muon, and a second
    call the state of the AdamW that was used with it. Weights, schedules and DeepSpeed's counters do not change.

    Args:
        engine: a DeepSpeed engine that uses this package's Muon.
        state_dict: the state_dict of ``torch.optim.Muon``, of a Muon in Keller Jordan's style, or of torch's Adam or
            AdamW. It has for each parameter ``momentum_buffer``, or ``exp_avg``, ``exp_avg_sq`` and ``step``, in the
            parameter's shape.
        convention: how ``momentum_buffer`` was computed: ``"ema"``: buf = momentum * buf + (1 - momentum) * grad, as in
            ``torch.optim.Muon``; ``"sum"``: buf = momentum * buf + grad, which the import multiplies by 1 - momentum.
        names: the parameters' names, in the order of the state_dict. Default: its ``param_names``, which exist if the
            optimizer was built with ``model.named_parameters()``.

    Raises:
        ImportStateError: something does not fit; the message names it, and nothing has changed.
    """
    optimizer = engine.basic_optimizer
    if getattr(engine.optimizer, "swap_optimizer", False):
        raise ImportStateError(
            "import_state cannot write state that is offloaded to NVMe; "
            "import with CPU offload, save a checkpoint, and resume it with NVMe"
        )
    if convention not in ("ema", "sum"):
        raise ImportStateError(f'import_state: convention is {convention!r}; pass "ema" or "sum"')
    source = _of_state_dict(optimizer, state_dict, convention == "sum", names)
    found = [spec for spec in optimizer.specs.values() if spec.name in source.is_muon]
    actions = plan_import(found, source, momentum_policy(optimizer, source))
    for partition in optimizer.all_partitions:
        write_state(optimizer, partition, source, actions)
    if engine.global_rank == 0:
        log_import(optimizer, source, actions)
        warn_of_fused(optimizer, source, actions)


def momentum_policy(optimizer: MuonWithAuxAdam, source: Source) -> str | None:
    """Return the argument ``choice`` for :func:`plan_import`: the config's ``import_momentum``, or its default.

    Return ``None`` if the user has not set the key and Muon updated parameters in the other run.
    """
    is_set = "import_momentum" in optimizer.config.model_fields_set
    return optimizer.config.import_momentum if is_set or not any(source.is_muon.values()) else None


def _of_state_dict(
    optimizer: MuonWithAuxAdam, state_dict: Mapping[str, Any], is_sum: bool, names: Sequence[str] | None
) -> Source:
    """Check a state_dict; return it as a :class:`Source`. ``is_sum``: whether momenta are sums instead of averages."""
    specs = {spec.name: spec for spec in optimizer.specs.values()}
    groups = state_dict["param_groups"]
    members = [(index, group.get("momentum")) for group in groups for index in group["params"]]
    named = list(zip(_names(groups, names), members, strict=True))
    entries = {name: state_dict["state"][index] for name, (index, _) in named if state_dict["state"].get(index)}
    decays = {name: momentum for name, (_, momentum) in named}
    if problems := list(_problems(specs, entries, decays, is_sum)):
        raise ImportStateError(
            "the state_dict does not fit the model; pass one of the same model, and names in the state_dict's order: "
            + "; ".join(problems[:8])
        )

    def read(name: str, key: str) -> Tensor:
        value = entries[name][key]
        return value * (1.0 - decays[name]) if is_sum and key == "momentum_buffer" else value

    return Source(
        "a state_dict" + (" (sums times 1 - momentum)" if is_sum else ""),
        {name: "momentum_buffer" in entry for name, entry in entries.items()},
        read,
        lambda name: float(entries[name].get("step", 0)),
    )


def _names(groups: Sequence[Mapping[str, Any]], names: Sequence[str] | None) -> Sequence[str]:
    """Return the names of a state_dict's parameters, in its order: ``names``, or ``param_names`` of its groups."""
    count = sum(len(group["params"]) for group in groups)
    if names is None:
        names = [name for group in groups for name in group.get("param_names", ())]
    if not names:
        raise ImportStateError(
            f"the state_dict does not name its {count} parameters, so those of equal shape could be mixed up: pass "
            "names=[...], one name per parameter in the state_dict's order; for an optimizer that was built with "
            "model.parameters() that is [name for name, _ in model.named_parameters()]"
        )
    if not len(names) == len(set(names)) == count:
        raise ImportStateError(
            f"the state_dict holds {count} parameters, but there are {len(set(names))} different names: pass exactly "
            "one name per parameter, in the state_dict's order"
        )
    return names


def _problems(
    specs: Mapping[str, MatrixSpec], entries: Mapping[str, Mapping[str, Any]], decays: Mapping[str, Any], is_sum: bool
) -> Iterator[str]:
    """Yield an error text for each parameter whose saved state, ``entries[name]``, does not fit the model.

    ``decays``: parameter name -> ``momentum`` of its saved group. ``is_sum``: whether momenta are sums, not averages.
    """
    for name, entry in entries.items():
        keys = [keys for keys in KEYS.values() if all(isinstance(entry.get(key), Tensor) for key in keys)]
        if name not in specs:
            yield f"{name}: the model has no such trainable parameter"
        elif not keys:
            yield f"{name}: expected the keys momentum_buffer, or exp_avg and exp_avg_sq, but found {sorted(entry)}"
        elif any(tuple(entry[key].shape) != specs[name].shape for key in keys[0]):
            shapes = list(entry[keys[0][0]].shape), list(specs[name].shape)
            yield f"{name}: has shape {shapes[0]} in the state_dict and {shapes[1]} in the model"
        elif is_sum and "momentum_buffer" in entry and decays[name] is None:
            yield f"{name}: its saved group has no key momentum, which is needed to convert a sum into an average"
