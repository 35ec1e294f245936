# SPDX-License-Identifier: Apache-2.0
"""Splits each of the user's parameter groups into a Muon and an AdamW half, and checks that options have an effect."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from deepspeed.muon.config.schema import MuonConfig
from deepspeed.muon.errors import MuonConfigError
from deepspeed.muon.matrices.pipeline import stages_of
from deepspeed.muon.matrices.routing import MatrixSpec, is_lora, shapes, unmatched
from deepspeed.muon.matrices.tp_sharding import whole_shape


@dataclass(frozen=True)
class Split:
    """The halves of all groups, and the user's group that each comes from."""

    #: Parameter groups of the optimizer.
    halves: list[dict[str, Any]]
    #: For each of the user's groups, the indices of its halves: none, one, two, or more with experts.
    origins: list[tuple[int, ...]]
    #: For each of the user's groups, the learning rate that a schedule describes.
    given_lrs: list[float]
    #: What one number of a schedule for all groups describes: the config's rate, else that of the first group with one.
    reference_lr: float
    #: Whether the config or a group gives a learning rate.
    sets_a_rate: bool


def split_groups(params: Iterable[Any], specs: Mapping[Any, MatrixSpec], config: MuonConfig) -> Split:
    """Split every group; frozen parameters and empty halves are left out.

    Each half carries ``lr_ratio``, its learning rate over its group's. Experts on ranks of their own get halves of
    their own, marked as ZeRO expects: ``moe``, and the name of their process group as ``name``.

    Args:
        params: parameters, named or not, or dicts with ``params`` and settings of their own, which override the
            config's.
        specs: the route of every trainable parameter.

    Raises:
        TypeError, ValueError: what torch's optimizers refuse, in their words; a parameter without a route.
        MuonConfigError: a group with an unknown setting or a wrong value.
    """
    groups = _checked(params) if specs else []  # check_options refuses a frozen model
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


def _checked(params: Any) -> list[dict[str, Any]]:
    """Return the groups with lists of parameters, once torch's own optimizer has accepted them.

    Torch takes a set in two places: as all parameters, and where it is frozen. Its order differs between ranks, so
    both are refused in the words that torch has for the set of a group.
    """
    if isinstance(params, (set, frozenset)):
        params = [{"params": params}]
    if not isinstance(params, Iterable) or isinstance(params, Tensor):
        return Optimizer(params, {}).param_groups
    items = [dict(item) if isinstance(item, dict) else item for item in params]  # torch writes into the dicts
    for item in items:
        if isinstance(item, dict) and isinstance(item.get("params"), frozenset):
            item["params"] = set(item["params"])
    return Optimizer(items, {}).param_groups


def _halves(
    group: Mapping[str, Any], base: str, where: str, specs: Mapping[Any, MatrixSpec], config: MuonConfig
) -> tuple[list[dict[str, Any]], float]:
    members = [param for param in group["params"] if param.requires_grad]
    if unknown := [list(param.shape) for param in members if param not in specs]:
        raise ValueError(f"{len(unknown)} parameters are not part of the model, first shape {unknown[0]}")
    own = {key: value for key, value in group.items() if key not in ("params", "param_names", "name", "moe")}
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
    """The expert-parallel group that spreads the parameter's experts over ranks; empty for none.

    DeepSpeed marks parameters whose values differ between ranks with ``allreduce = False``.
    """
    return "" if getattr(param, "allreduce", True) else str(param.group_name)


def check_options(
    model: nn.Module, specs: Iterable[MatrixSpec], config: MuonConfig, layers: Collection[nn.Module]
) -> dict[str, str]:
    """Refuse options that nothing in the model follows, and Muon where no matrix goes to it.

    Args:
        layers: the attention that ``qk_clip`` acts on.

    Returns:
        For a stage of a pipeline, where another stage may follow them: by option, the message.

    Raises:
        MuonConfigError: for a whole model.
    """
    specs = list(specs)
    _refuse_unknown_outputs(specs, config)
    unused = _unused_heads(specs, config) | _unused_splits(specs, config) | _unused_patterns(shapes(model), config)
    if config.qk_clip and not layers:
        unused["qk_clip"] = (
            "optimizer.params.qk_clip: no module of the model is softmax attention by the names of its projections, "
            "with queries and keys that are trained"
        )
    trained = {spec.name for spec in specs}
    is_part = any(len(whole_shape(param)) > 1 and name not in trained for name, param in model.named_parameters())
    if message := empty_muon_half(specs, is_part):
        unused["type"] = message
    return _refuse(unused, model)


def check_patterns(model: nn.Module, config: MuonConfig) -> None:
    """Raise MuonConfigError for a pattern that matches nothing in a whole model that it could act on."""
    _refuse(_unused_patterns(shapes(model), config), model)


def _refuse(unused: dict[str, str], model: nn.Module) -> dict[str, str]:
    if unused and stages_of(model) == 1:
        raise MuonConfigError("\n".join(unused.values()))
    return unused


def _refuse_unknown_outputs(specs: Iterable[MatrixSpec], config: MuonConfig) -> None:
    """Rules that tell outputs from inputs need to know which axis is which."""
    keys, unknown = config.rules.keys, [spec.name for spec in specs if spec.use_muon and spec.output_axis is None]
    if keys and unknown:
        raise MuonConfigError(
            f"optimizer.params.{keys[0]}: the axis of the outputs is unknown for {len(unknown)} stacks of matrices, "
            f"first {unknown[0]}; name them in muon_exclude, or remove {' and '.join(keys)}"
        )


def _unused_patterns(names: Mapping[str, tuple[int, ...]], config: MuonConfig) -> dict[str, str]:
    """Patterns that match nothing they could act on. ``names``: the shape of every trainable parameter."""
    matrices = [name for name, shape in names.items() if len(shape) >= 2], "matrices"
    targets = {"muon_include": matrices, "muon_exclude": (list(names), "parameters"), "muon_split": matrices}
    return {
        f"{key} {pattern}": f"optimizer.params.{key}: {pattern!r} matches none of the {len(candidates)} trainable "
        f"{kind}; the first are {', '.join(candidates[:3])}"
        for key, (candidates, kind) in targets.items()
        for pattern in unmatched(getattr(config, key), candidates)
    }


def _unused_splits(specs: Iterable[MatrixSpec], config: MuonConfig) -> dict[str, str]:
    """Patterns of ``muon_split`` that cut nothing that Muon updates."""
    used = {spec.split_pattern for spec in specs if spec.split_by == "muon_split"}
    return {
        f"muon_split {pattern}": f"optimizer.params.muon_split: {pattern!r} cuts no parameter of the Muon half: what "
        "it matches goes to AdamW, or an earlier pattern matches it too"
        for pattern in config.muon_split
        if pattern not in used
    }


def _unused_heads(specs: Iterable[MatrixSpec], config: MuonConfig) -> dict[str, str]:
    """``per_head_muon`` where no projection is in the Muon half."""
    if not config.per_head_muon or any(spec.use_muon and spec.is_projection for spec in specs):
        return {}
    text = "but no parameter of the Muon half is an attention projection by its name; give their sizes in muon_split"
    return {"per_head_muon": f"optimizer.params.per_head_muon: true, {text}"}


#: At most this many reasons stand in a message.
TOLD = 4


def empty_muon_half(specs: Sequence[MatrixSpec], is_part: bool) -> str | None:
    """Why no parameter goes to Muon, as an error message.

    ``None`` where one does, and where AdamW trains all of them with a warning: no matrix is trained, the user has
    taken matrices away from Muon (``muon_exclude``, ``use_muon = False``), or ``is_part``: the user trains a part of
    the model, such as a head or a prompt, and other matrices of it stay as they are. Low-rank adapters are refused,
    because an option sends them to Muon.
    """
    if not specs:
        return (
            "optimizer.type: Muon, but no parameter of the model is trained; give a frozen model, such as the "
            "reference of DPO, a config without an optimizer"
        )
    matrices = [spec for spec in specs if len(spec.whole) >= 2]
    if all(spec.chosen_by for spec in matrices) or any(spec.use_muon or spec.overrides_rules for spec in specs):
        return None
    has_lora = any(map(is_lora, matrices))
    if is_part and not has_lora:
        return None
    reasons: dict[str, list[str]] = {}
    for spec in matrices:
        reasons.setdefault(spec.reason, []).append(spec.name)
    told = sorted(reasons.items(), key=lambda item: -len(item[1]))
    texts = [f"{len(names)} x {reason} ({', '.join(names[:2])})" for reason, names in told[:TOLD]]
    texts += [f"{len(told) - TOLD} other reasons"] if len(told) > TOLD else []
    lora = 'for low-rank adapters write "muon_lora": "both"; ' if has_lora else ""
    return (
        f"optimizer.type: Muon, but all {len(matrices)} matrices go to AdamW: {'; '.join(texts)}. To change that, "
        f'{lora}name matrices in muon_include; or set the type to "AdamW"'
    )
