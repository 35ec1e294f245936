# SPDX-License-Identifier: Apache-2.0
"""Splits the user's parameter groups into a Muon and an AdamW half each, those of experts apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from deepspeed.muon.config.schema import MuonConfig
from deepspeed.muon.errors import MuonConfigError
from deepspeed.muon.matrices.pipeline import stages_of
from deepspeed.muon.matrices.routing import MatrixSpec, shapes, unmatched


@dataclass(frozen=True)
class Split:
    """The halves of all groups, and how they come from the user's.

    ``origins``: for each group as the user gave it, the indices of its halves (none, one, two, or more with experts).
    ``given_lrs``: for each, the learning rate that a schedule describes. ``reference_lr``: what a number of a
    schedule for all groups describes, the config's rate, or where it has none that of the first group with one.
    """

    halves: list[dict[str, Any]]
    origins: list[tuple[int, ...]]
    given_lrs: list[float]
    reference_lr: float
    #: Whether the config or a group gives a learning rate.
    sets_a_rate: bool


def split_groups(params: Iterable[Any], specs: Mapping[Any, MatrixSpec], config: MuonConfig) -> Split:
    """Groups of one kind each; frozen parameters and empty halves are left out.

    Each half carries ``lr_ratio``, its learning rate over that of the group it comes from. Experts that lie on other
    ranks than the rest get halves of their own, with the marks by which ZeRO finds their ranks: ``moe``, and as
    ``name`` that of their process group.

    Args:
        params: parameters, or dicts with ``params`` and settings of their own, which win over the config's.
        specs: the route of every trainable parameter.

    Raises:
        ValueError: a parameter without a route.
        MuonConfigError: a group with a setting that neither half knows, or with a wrong value.
    """
    items = list(params)
    groups = [dict(item) for item in items if isinstance(item, dict)]
    loose = [item for item in items if not isinstance(item, dict)]
    groups += [{"params": loose}] if loose else []
    own = [group["lr"] for group in groups if group.get("lr") is not None] if not config.sets_a_rate else []
    reference = float(own[0]) if own else config.reference_lr
    split = Split([], [], [], reference, config.sets_a_rate or bool(own))
    for index, group in enumerate(groups):
        base = group.get("name", f"group{index}" if len(groups) > 1 else "")
        halves, given_lr = _halves(group, base, f"parameter group {base or index}: ", specs, config)
        split.origins.append(tuple(range(len(split.halves), len(split.halves) + len(halves))))
        split.halves.extend(halves)
        split.given_lrs.append(given_lr)
    return split


def _halves(
    group: Mapping[str, Any], base: str, where: str, specs: Mapping[Any, MatrixSpec], config: MuonConfig
) -> tuple[list[dict[str, Any]], float]:
    given = [group["params"]] if isinstance(group["params"], Tensor) else group["params"]
    members = [param for param in given if param.requires_grad]
    unknown = [list(param.shape) for param in members if param not in specs]
    if unknown:
        raise ValueError(f"{len(unknown)} parameters are not part of the model, first shape {unknown[0]}")
    own = {key: value for key, value in group.items() if key not in ("params", "name", "moe")}
    settings = config.for_group(own, where) if own else config
    reference = settings.reference_lr
    halves = []
    for experts in sorted({expert_group(param) for param in members}):
        for use_muon, label, values in ((True, "muon", settings.muon_group()), (False, "adam", settings.adam_group())):
            half = [p for p in members if specs[p].use_muon is use_muon and expert_group(p) == experts]
            ratio = values["lr"] / reference if reference else 1.0
            marks = {"name": experts, "moe": True} if experts else {"name": f"{base}-{label}" if base else label}
            if half:
                halves.append({"params": half, **values, "lr_ratio": ratio, "use_muon": use_muon, **marks})
    return halves, reference


def expert_group(param: Any) -> str:
    """The name of the expert-parallel group over which the parameter's layer spreads its experts; empty for none.

    By DeepSpeed's marks: ``allreduce = False`` on a parameter that other ranks have other values of.
    """
    return "" if getattr(param, "allreduce", True) else str(param.group_name)


def check_options(model: nn.Module, specs: Iterable[MatrixSpec], config: MuonConfig) -> dict[str, str]:
    """Refuse options of the config that nothing in the model follows.

    Returns:
        Those of one stage of a pipeline, where another stage may follow them: by wish, what to say of it.

    Raises:
        MuonConfigError: of a whole model.
    """
    specs = list(specs)
    idle = _idle_heads(specs, config) | _idle_splits(specs, config) | _idle_patterns(shapes(model), config)
    if idle and stages_of(model) == 1:
        raise MuonConfigError("\n".join(idle.values()))
    return idle


def check_patterns(model: nn.Module, config: MuonConfig) -> None:
    """Raise MuonConfigError for a pattern that matches nothing in a whole model that it could act on."""
    idle = _idle_patterns(shapes(model), config)
    if idle and stages_of(model) == 1:
        raise MuonConfigError("\n".join(idle.values()))


def _idle_patterns(names: Mapping[str, tuple[int, ...]], config: MuonConfig) -> dict[str, str]:
    """Patterns that match nothing they could act on. ``names``: the shape of every trainable parameter."""
    idle = {}
    for key, candidates, kind in (
        ("muon_include", [name for name, shape in names.items() if len(shape) >= 2], "matrices"),
        ("muon_exclude", list(names), "parameters"),
        ("muon_split", [name for name, shape in names.items() if len(shape) >= 2], "matrices"),
    ):
        for pattern in unmatched(getattr(config, key), candidates):
            idle[f"{key} {pattern}"] = (
                f"optimizer.params.{key}: {pattern!r} matches none of the {len(candidates)} trainable {kind}; "
                f"the first are {', '.join(candidates[:3])}"
            )
    return idle


def _idle_splits(specs: Iterable[MatrixSpec], config: MuonConfig) -> dict[str, str]:
    """Patterns of ``muon_split`` that cut nothing that Muon trains."""
    found = {cut[0] for spec in specs if spec.use_muon and (cut := config.matrix_options.cut_for([spec.name]))}
    return {
        f"muon_split {pattern}": f"optimizer.params.muon_split: {pattern!r} cuts no parameter of the Muon half: what "
        "it finds goes to AdamW, or an earlier pattern finds it too"
        for pattern in config.muon_split
        if pattern not in found
    }


def _idle_heads(specs: Iterable[MatrixSpec], config: MuonConfig) -> dict[str, str]:
    """``per_head_muon`` where no projection is in the Muon half."""
    if not config.matrix_options.per_head or any(spec.use_muon and spec.is_projection for spec in specs):
        return {}
    return {
        "per_head_muon": "optimizer.params.per_head_muon: true, but no parameter of the Muon half is an attention "
        "projection by its name; give their sizes in muon_split"
    }
