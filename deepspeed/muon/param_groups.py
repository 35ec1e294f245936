# SPDX-License-Identifier: Apache-2.0
"""Splits each of the user's parameter groups into a Muon and an AdamW half, and checks that options have an effect."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from deepspeed.muon.config.messages import ADVICE, PEERS, nearest
from deepspeed.muon.config.schema import MuonConfig
from deepspeed.muon.config.types import GROUP_KEYS, HARMLESS, is_harmless
from deepspeed.muon.errors import MuonConfigError
from deepspeed.muon.log import logger
from deepspeed.muon.matrices.pipeline import stages_of
from deepspeed.muon.matrices.routing import is_lora, shapes
from deepspeed.muon.matrices.splitting import MatrixSpec, first_match
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
            config's, and with keys of the user's, which stay in both halves.
        specs: the route of every trainable parameter.

    Raises:
        TypeError, ValueError: what torch's optimizers refuse, in their words; a parameter without a route.
        MuonConfigError: a group with an unknown setting or a wrong value.
    """
    groups = _checked(params) if specs else []  # check_options refuses a frozen model
    halves_of_all, origins, given_lrs = list[dict[str, Any]](), list[tuple[int, ...]](), list[float]()
    for index, group in enumerate(groups):
        base = group.get("name", f"group{index}" if len(groups) > 1 else "")
        halves, given_lr = _halves(group, base, f"parameter group {base or index}: ", specs, config)
        origins.append(tuple(range(len(halves_of_all), len(halves_of_all) + len(halves))))
        halves_of_all.extend(halves)
        given_lrs.append(given_lr)
    own = [lr for group, lr in zip(groups, given_lrs, strict=True) if group.get("lr") is not None]
    reference = config.reference_lr if config.sets_a_rate or not own else own[0]
    return Split(halves_of_all, origins, given_lrs, reference, config.sets_a_rate or bool(own))


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
    keys = [key for key in group if key not in ("params", "name", "moe")]
    own = {key: group[key] for key in keys if not is_users(key, group[key])}
    users = {key: group[key] for key in keys if key not in own}
    names = users.get("param_names") or ()
    name_of = dict(zip(group["params"], names, strict=True)) if len(names) == len(group["params"]) else {}
    settings = config.for_group(own, where) if own else config
    reference = settings.reference_lr
    halves = []
    for experts in sorted({expert_group(param) for param in members}):
        for use_muon, label, values in ((True, "muon", settings.muon_group()), (False, "adam", settings.adam_group())):
            half = [p for p in members if specs[p].use_muon is use_muon and expert_group(p) == experts]
            if not half:
                continue
            ratio = values["lr"] / reference if reference else 1.0
            if users.get("initial_lr") is not None:
                users["initial_lr"] = group["initial_lr"] * ratio
            if name_of:
                users["param_names"] = [name_of[param] for param in half]
            marks = {"name": experts, "moe": True} if experts else {"name": f"{base}-{label}" if base else label}
            ours = {"lr_ratio": ratio, "use_muon": use_muon, **marks}
            # Schedulers of torch cycle the betas of every group, those of Muon without effect.
            halves.append({"params": half, **users, "betas": settings.betas, **values, **ours})
    return halves, reference


#: From this similarity on a strange key of a parameter group is a misspelt one of ours.
MISSPELT = 0.8
#: Keys of the optimizer's own groups, which describe them.
OF_HALVES = ("lr_ratio", "use_muon", "ns_choice", "ns_methods", "owner_counts", "matrices", "blocks")


def is_users(key: Any, value: Any) -> bool:
    """Return whether a key of a parameter group is the user's own, which acts on nothing and stays in the group.

    Torch's optimizers keep every key that they do not know, and scripts use that: ``lr_scale``, ``param_names``,
    ``initial_lr``. No such key is one that may be set elsewhere, one of another project's with a namesake, or a
    misspelt one.
    """
    text = str(key).lower()
    if key in HARMLESS:
        return value is None or is_harmless(key, value)
    if key in MuonConfig.model_fields or text in PEERS or key in ADVICE or key in OF_HALVES:
        return False
    words = f"_{text}_"
    return any(f"_{known}_" in words for known in GROUP_KEYS if known != text) or not nearest(
        text, GROUP_KEYS, MISSPELT
    )


#: Larger values than these are mistakes, as far as is known; a pair of ``betas`` is in order of size.
LARGEST_EPS, LARGEST_LR, LARGEST_DECAY = 1e-2, 10.0, 1.0


def warn_of_odd_settings(groups: Iterable[Mapping[str, Any]]) -> None:
    """Log one warning that names the keys of the optimizer's groups whose values are allowed and hardly meant."""
    found = []
    for group in groups:
        (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
        if lr > LARGEST_LR:
            found.append(f"lr {lr:g}, more than {LARGEST_LR:g}: a step moves weights by that much")
        if lr * decay > LARGEST_DECAY:
            found.append(f"lr {lr:g} x weight_decay {decay:g}, more than 1: a step changes the sign of weights")
        if not group["use_muon"] and group["eps"] > LARGEST_EPS:
            found.append(f"eps {group['eps']:g}, more than {LARGEST_EPS:g}: the AdamW half hardly moves")
        if not group["use_muon"] and beta1 > beta2:
            found.append(f"betas {[beta1, beta2]}, the first above the second: they may be swapped")
    if found:
        logger.warning(
            "deepspeed-muon: unusual settings, with which AdamW would train too: %s", "; ".join(dict.fromkeys(found))
        )


def check_decay_rates(group: Mapping[str, Any]) -> None:
    """Raise MuonConfigError where a schedule or a script has driven a decay rate of a half out of its range."""
    key, values = ("momentum", (group["momentum"],)) if group["use_muon"] else ("betas", group["betas"])
    if not all(0 <= value < 1 for value in values):
        found = ", ".join(f"{value:g}" for value in values)
        raise MuonConfigError(
            f"parameter group {group['name']}: {key}: a schedule or the script has set it to {found}; "
            "expected numbers from 0 to below 1; in DeepSpeed's OneCycle set scheduler.params.decay_mom_rate to 0"
        )


def expert_group(param: Any) -> str:
    """Return the expert-parallel group that spreads the parameter's experts over ranks; empty for none.

    DeepSpeed marks parameters whose values differ between ranks with ``allreduce = False``.
    """
    return "" if getattr(param, "allreduce", True) else str(param.group_name)


def check_options(
    model: nn.Module, specs: Iterable[MatrixSpec], config: MuonConfig, layers: Collection[nn.Module] | None
) -> dict[str, str]:
    """Refuse options that nothing in the model follows, and Muon where no matrix goes to it.

    Args:
        layers: the attention that QK-clip acts on; ``None`` without it.

    Returns:
        For a stage of a pipeline, where another stage may follow them: by option, the message.

    Raises:
        MuonConfigError: for a whole model.
    """
    specs, rules = list(specs), config.rules.keys
    # Rules that tell outputs from inputs need to know which axis is which.
    unknown = [spec.name for spec in specs if spec.use_muon and spec.output_axis is None]
    if rules and unknown:
        raise MuonConfigError(
            f"optimizer.params.{rules[0]}: the axis of the outputs is unknown for {len(unknown)} stacks of matrices, "
            f"first {unknown[0]}; name them in muon_exclude, or remove {' and '.join(rules)}"
        )
    unused = {}
    if config.per_head_muon and not any(spec.use_muon and spec.is_projection for spec in specs):
        unused["per_head_muon"] = (
            "optimizer.params.per_head_muon: true, but no parameter of the Muon half is an attention projection by its "
            "name; give their sizes in muon_split"
        )
    used = {spec.split_pattern for spec in specs if spec.split_by == "muon_split"}
    for pattern in config.muon_split:
        if pattern not in used:
            unused[f"muon_split {pattern}"] = (
                f"optimizer.params.muon_split: {pattern!r} cuts no parameter of the Muon half: what it matches goes to "
                "AdamW, or an earlier pattern matches it too"
            )
    unused |= _unmatched(model, config)
    if layers is not None and not layers:
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
    _refuse(_unmatched(model, config), model)


def _refuse(unused: dict[str, str], model: nn.Module) -> dict[str, str]:
    if unused and stages_of(model) == 1:
        raise MuonConfigError("\n".join(unused.values()))
    return unused


def _unmatched(model: nn.Module, config: MuonConfig) -> dict[str, str]:
    """Return a message for each pattern that matches nothing that it could act on."""
    names = shapes(model)
    matrices = [name for name, shape in names.items() if len(shape) >= 2], "matrices"
    targets = {"muon_include": matrices, "muon_exclude": (list(names), "parameters"), "muon_split": matrices}
    return {
        f"{key} {pattern}": f"optimizer.params.{key}: {pattern!r} matches none of the {len(candidates)} trainable "
        f"{kind}; the first are {', '.join(candidates[:3])}"
        for key, (candidates, kind) in targets.items()
        for pattern in getattr(config, key)
        if first_match([pattern], candidates) is None
    }


#: The most reasons that a message lists.
MAX_REASONS = 4


def empty_muon_half(specs: Sequence[MatrixSpec], is_part: bool) -> str | None:
    """Return why no parameter goes to Muon, as an error message.

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
    by_count = sorted(reasons.items(), key=lambda item: -len(item[1]))
    texts = [f"{len(names)} x {reason} ({', '.join(names[:2])})" for reason, names in by_count[:MAX_REASONS]]
    texts += [f"{len(by_count) - MAX_REASONS} other reasons"] if len(by_count) > MAX_REASONS else []
    lora = 'for low-rank adapters write "muon_lora": "both"; ' if has_lora else ""
    return (
        f"optimizer.type: Muon, but all {len(matrices)} matrices go to AdamW: {'; '.join(texts)}. To change that, "
        f'{lora}name matrices in muon_include; or set the type to "AdamW"'
    )
