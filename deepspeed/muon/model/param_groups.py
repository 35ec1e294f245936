# SPDX-License-Identifier: Apache-2.0
"""Split each of the user's parameter groups into a Muon and an AdamW group, its halves; refuse unused options."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from deepspeed.muon.config.messages import ELSEWHERE, nearest
from deepspeed.muon.config.schema import GROUP_KEYS, HARMLESS, MuonConfig, is_harmless
from deepspeed.muon.errors import MuonConfigError, listed, logger
from deepspeed.muon.layout import MatrixSpec, whole_shape
from deepspeed.muon.model.fused_weights import stages_of
from deepspeed.muon.model.routing import shapes
from deepspeed.muon.model.splitting import first_match


@dataclass(frozen=True)
class Split:
    """The result of :func:`split_groups`: the optimizer's parameter groups, and from which user group each comes."""

    #: The optimizer's parameter groups.
    halves: list[dict[str, Any]]
    #: For each of the user's groups, the indices of its halves in ``halves``: none, one, two, or more with experts.
    origins: list[tuple[int, ...]]
    #: For each of the user's groups, the learning rate that a scheduler sees and sets.
    given_lrs: list[float]
    #: The learning rate that a scheduler sees for all groups: the config's, otherwise the first one set by a group.
    reference_lr: float
    #: Whether the config or a group sets a learning rate.
    sets_learning_rate: bool


def split_groups(params: Iterable[Any], specs: Mapping[nn.Parameter, MatrixSpec], config: MuonConfig) -> Split:
    """Split each of the user's parameter groups into "halves": a Muon group and an AdamW group of the optimizer.

    Each half stores as ``lr_ratio`` its learning rate divided by the user group's. Frozen parameters and empty halves
    are left out. The experts of each expert-parallel process group get halves of their own, with ``moe`` true and
    the process group's name as ``name``, as ZeRO requires.

    Args:
        params: parameters, ``(name, parameter)`` pairs, or dicts with ``params`` and settings that override the
            config's. Other keys of a dict are copied into both halves.
        specs: trainable parameter -> its :class:`MatrixSpec`, which says whether it goes to Muon.

    Raises:
        TypeError, ValueError: torch's optimizers would refuse ``params``, or a parameter is not in ``specs``.
        MuonConfigError: a group has an unknown setting or a wrong value.
    """
    groups = _checked(params) if specs else []  # check_options refuses a frozen model
    halves_of_all, origins, given_lrs = list[dict[str, Any]](), list[tuple[int, ...]](), list[float]()
    for index, group in enumerate(groups):
        name_prefix = group.get("name", f"group{index}" if len(groups) > 1 else "")
        halves, given_lr = _halves(group, name_prefix, f"parameter group {name_prefix or index}: ", specs, config)
        origins.append(tuple(range(len(halves_of_all), len(halves_of_all) + len(halves))))
        halves_of_all.extend(halves)
        given_lrs.append(given_lr)
    own = [lr for group, lr in zip(groups, given_lrs, strict=True) if group.get("lr") is not None]
    reference = config.reference_lr if config.sets_learning_rate or not own else own[0]
    return Split(halves_of_all, origins, given_lrs, reference, config.sets_learning_rate or bool(own))


def _checked(params: Iterable[Any]) -> list[dict[str, Any]]:
    """Return ``params`` as a list of parameter groups, after the checks of ``torch.optim.Optimizer``."""
    # Torch refuses a set as the ``params`` of a group, but accepts a frozenset there and a set of all parameters. The
    # order of any set differs between ranks, so all are passed on in the form that torch refuses.
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
    group: Mapping[str, Any], name_prefix: str, where: str, specs: Mapping[nn.Parameter, MatrixSpec], config: MuonConfig
) -> tuple[list[dict[str, Any]], float]:
    """Split one of the user's groups as :func:`split_groups` does; return (its halves, the user group's learning rate).

    ``name_prefix``: how the names of the halves begin, such as ``group0``. ``where``: prefix of error messages.
    """
    members = [param for param in group["params"] if param.requires_grad]
    if unknown := [list(param.shape) for param in members if param not in specs]:
        raise ValueError(
            f"{len(unknown)} parameters (the first of shape {unknown[0]}) are not parameters of model=...; pass "
            "the model's current parameters"
        )
    keys = [key for key in group if key not in ("params", "name", "moe")]
    overrides = {key: group[key] for key in keys if not is_user_data(key, group[key])}
    users = {key: group[key] for key in keys if key not in overrides}
    names = users.get("param_names") or ()
    name_of = dict(zip(group["params"], names, strict=True)) if len(names) == len(group["params"]) else {}
    settings = config.for_group(overrides, where) if overrides else config
    reference = settings.reference_lr
    halves = []
    for experts in sorted({expert_group(param) for param in members}):
        for use_muon, label, of_half in (
            (True, "muon", settings.muon_group()),
            (False, "adam", settings.adam_group()),
        ):
            half = [p for p in members if specs[p].use_muon is use_muon and expert_group(p) == experts]
            if not half:
                continue
            ratio = of_half["lr"] / reference if reference else 1.0
            if users.get("initial_lr") is not None:
                users["initial_lr"] = group["initial_lr"] * ratio
            if name_of:
                users["param_names"] = [name_of[param] for param in half]
            # ZeRO finds experts and their process group by these keys, so the experts of a process group get their own
            # halves.
            marks = (
                {"name": experts, "moe": True}
                if experts
                else {"name": f"{name_prefix}-{label}" if name_prefix else label}
            )
            ours = {"lr_ratio": ratio, "use_muon": use_muon, **marks}
            # Muon groups have betas, without effect, because torch's schedulers cycle the betas of every group.
            halves.append({"params": half, **users, "betas": settings.betas, **of_half, **ours})
    return halves, reference


#: An unknown key of a parameter group counts as a misspelt setting if it is at least this similar to one (0 to 1).
MISSPELT = 0.8
#: Keys that the optimizer itself writes into its groups.
OF_HALVES = ("lr_ratio", "use_muon", "matrices", "blocks")


def is_user_data(key: Any, value: Any) -> bool:
    """Return whether a key of a parameter group is the user's own data, such as ``lr_scale``, and not a setting.

    Misspelt settings and other projects' names of settings are not user data. A setting of torch's AdamW counts as user
    data if its ``value`` changes no result, such as ``foreach=True``.
    """
    text = str(key).lower()
    if key in HARMLESS:
        return value is None or is_harmless(key, value)
    if key in MuonConfig.model_fields or text in ELSEWHERE or key in OF_HALVES:
        return False
    words = f"_{text}_"
    return any(f"_{known}_" in words for known in GROUP_KEYS if known != text) or not nearest(
        text, GROUP_KEYS, MISSPELT
    )


#: Larger values are probably mistakes. A warning names them; they are allowed, because AdamW trains with them, too.
LARGEST_EPS, LARGEST_LR, LARGEST_DECAY = 1e-2, 10.0, 1.0


def warn_of_odd_settings(groups: Iterable[Mapping[str, Any]]) -> None:
    """Log one warning that names all settings in the groups that are allowed but probably mistakes."""
    oddities = []
    for group in groups:
        (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
        if lr > LARGEST_LR:
            oddities.append(f"lr {lr:g}, more than {LARGEST_LR:g}: a step moves weights by that much")
        if lr * decay > LARGEST_DECAY:
            oddities.append(f"lr {lr:g} x weight_decay {decay:g}, more than 1: a step changes the sign of weights")
        if not group["use_muon"] and group["eps"] > LARGEST_EPS:
            oddities.append(
                f"eps {group['eps']:g}, more than {LARGEST_EPS:g}: parameters that AdamW updates hardly move"
            )
        if not group["use_muon"] and beta1 > beta2:
            oddities.append(f"betas {[beta1, beta2]}, the first above the second: they may be swapped")
    if oddities:
        logger.warning(
            "deepspeed-muon: unusual settings, probably mistakes (training continues with them): %s",
            "; ".join(dict.fromkeys(oddities)),
        )


#: The most names that a warning lists.
MAX_LISTED = 3


def warn_of_late_parameters(frozen: MutableMapping[str, nn.Parameter]) -> None:
    """Warn of parameters that became trainable after the optimizer was built, and remove them from ``frozen``.

    ``frozen``: {name: parameter} of those that were frozen when the optimizer was built.
    """
    late = [name for name, param in frozen.items() if param.requires_grad]
    for name in late:
        del frozen[name]
    if late:
        logger.warning(
            "deepspeed-muon: %d parameters (%s) were frozen when the optimizer was built and are trainable now; it "
            "does not update them. Build the optimizer while they are trainable and freeze them afterwards; or save, "
            'build it again, and load the checkpoint with "checkpoint": {"muon_changed_model": "match"}',
            len(late),
            listed(late, MAX_LISTED),
        )


def check_betas(group: Mapping[str, Any]) -> None:
    """Raise MuonConfigError if a schedule or script has set a group's ``momentum`` or ``betas`` outside of [0, 1)."""
    key, values = ("momentum", (group["momentum"],)) if group["use_muon"] else ("betas", group["betas"])
    if not all(0 <= value < 1 for value in values):
        numbers = ", ".join(f"{value:g}" for value in values)
        raise MuonConfigError(
            f"parameter group {group['name']}: {key}: a schedule or the script has set it to {numbers}; "
            "expected numbers from 0 to below 1; in DeepSpeed's OneCycle set scheduler.params.decay_mom_rate to 0"
        )


def expert_group(param: Any) -> str:
    """Return the name of a parameter's expert-parallel process group; "" if the parameter is not part of an expert."""
    # DeepSpeed sets allreduce to False on experts, because each rank has other experts.
    return "" if getattr(param, "allreduce", True) else str(param.group_name)


def check_options(
    model: nn.Module, specs: Iterable[MatrixSpec], config: MuonConfig, layers: Collection[nn.Module] | None
) -> dict[str, str]:
    """Raise MuonConfigError if an option does not fit this model or has no effect, or if no matrix goes to Muon.

    :func:`no_matrix_error` says when it is allowed that no matrix goes to Muon. ``specs``: the trainable parameters.
    ``layers``: the attention layers on which QK-clip acts; ``None`` without QK-clip.

    Return an empty dict for a whole model. For a pipeline stage, return {option without effect: error message}; the
    caller raises the error if the option is without effect in all stages.
    """
    specs, rules = list(specs), [rule.KEY for rule in config.rules if rule.NEEDS_AXIS]
    # These rules treat outputs and inputs differently, so they must know which axis is which.
    unknown = [spec.name for spec in specs if spec.use_muon and spec.output_axis is None]
    if rules and unknown:
        raise MuonConfigError(
            f"optimizer.params.{rules[0]}: it is unknown whether rows or columns are the outputs in {len(unknown)} "
            f"stacks of matrices (first: {unknown[0]}); list them in muon_exclude, or remove {' and '.join(rules)}"
        )
    unused = {}
    if config.per_head_muon and not any(spec.use_muon and spec.is_projection for spec in specs):
        unused["per_head_muon"] = (
            "optimizer.params.per_head_muon: true, but no parameter that goes to Muon has the name of an attention "
            "projection; give the sizes of the heads in muon_split, or remove the key"
        )
    used = {spec.split_pattern for spec in specs if spec.split_by == "muon_split"}
    for pattern in config.muon_split:
        if pattern not in used:
            unused[f"muon_split {pattern}"] = (
                f"optimizer.params.muon_split: {pattern!r} has no effect, because what it matches goes to AdamW or is "
                "split by an earlier pattern; remove it, or move it before that pattern"
            )
    unused |= _unmatched(model, config)
    if layers is not None and not layers:
        unused["qk_clip"] = (
            "optimizer.params.qk_clip: found no softmax attention in the model whose query and key projections have "
            "known names, such as q_proj and k_proj, and are trained; remove the key"
        )
    trained = {spec.name for spec in specs}
    is_part = any(len(whole_shape(param)) > 1 and name not in trained for name, param in model.named_parameters())
    if message := no_matrix_error(specs, is_part):
        unused["type"] = message
    return _refuse(unused, model)


def check_patterns(model: nn.Module, config: MuonConfig) -> None:
    """Raise MuonConfigError if a pattern of ``muon_include``, ``muon_exclude`` or ``muon_split`` matches nothing.

    Frozen parameters do not count; ``muon_include`` and ``muon_split`` match only matrices. Do nothing for a pipeline
    stage, because the pattern may match in another stage.
    """
    _refuse(_unmatched(model, config), model)


def _refuse(unused: dict[str, str], model: nn.Module) -> dict[str, str]:
    """Raise MuonConfigError if ``unused`` has error messages. For a pipeline stage, return ``unused`` instead."""
    if unused and stages_of(model) == 1:
        raise MuonConfigError("\n".join(unused.values()))
    return unused


def _unmatched(model: nn.Module, config: MuonConfig) -> dict[str, str]:
    """Return {option and pattern, such as "muon_exclude .*bias": error message}, for patterns that match nothing."""
    names = shapes(model)
    matrices = [name for name, shape in names.items() if len(shape) >= 2], "matrices"
    targets = {"muon_include": matrices, "muon_exclude": (list(names), "parameters"), "muon_split": matrices}
    return {
        f"{key} {pattern}": f"optimizer.params.{key}: {pattern!r} matches none of the {len(candidates)} trainable "
        f"{kind}; the nearest is {nearest(pattern, candidates, cutoff=0.0)}, and ds_muon plan --all lists all"
        for key, (candidates, kind) in targets.items()
        for pattern in getattr(config, key)
        if first_match([pattern], candidates) is None
    }


#: How many reasons a message lists at most.
MAX_REASONS = 4


def no_matrix_error(specs: Sequence[MatrixSpec], is_part: bool) -> str | None:
    """Return the error message if no parameter goes to Muon and that is probably a mistake; otherwise ``None``.

    It is not a mistake if no matrix is trained; if the user's options (``muon_exclude``, ``use_muon = False``) decide
    on every matrix, or send one to AdamW that the package's rules would send to Muon; or if the model has frozen
    matrices (``is_part``). It is a mistake if no parameter is trained, or if low-rank adapters are, because
    ``muon_lora`` can send them to Muon.
    """
    if not specs:
        return (
            "optimizer.type: Muon, but no parameter of the model is trained; for a frozen model, such as DPO's "
            "reference model, use a config without an optimizer"
        )
    matrices = [spec for spec in specs if len(spec.whole) >= 2]
    if all(spec.chosen_by for spec in matrices) or any(spec.use_muon or spec.overrides_rules for spec in specs):
        return None
    has_lora = any(spec.is_lora for spec in matrices)
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
        f'{lora}list matrices in muon_include; or set the type to "AdamW"'
    )


#: Keys whose value in a half is the user group's value times ``lr_ratio``. Without the ratio, schedules with absolute
#: rates, such as OneCycleLR and WarmupLR, would set the same rate in both halves.
RATES = ("lr", "initial_lr")
#: Key that belongs to one half only -> whether that is the Muon half. A cycle of ``betas`` does not change Muon's
#: momentum, because the usual cycles (0.85 to 0.95) are chosen for Adam's first moment.
HALF_OF = {"betas": False, "momentum": True}


class UserGroup(UserDict):
    """A parameter group that the user passed, as a view of the Muon and AdamW halves into which the optimizer split it.

    Reading ``lr`` or ``initial_lr`` returns a half's value divided by the half's ``lr_ratio``; writing sets each half's
    to the value times its ``lr_ratio``. ``betas`` are the AdamW half's, ``momentum`` is the Muon half's. Other keys
    that a scheduler writes stay in this object.

    ``indices``: the halves' indices in ``optimizer.param_groups``. ``lr``, ``betas``: returned if no half has this key.
    """

    def __init__(self, optimizer: Optimizer, indices: Sequence[int], lr: float, betas: tuple[float, float]) -> None:
        # A function, because a load replaces the groups, and because a deep copy of a scheduler copies a function by
        # reference and so does not copy the optimizer.
        self._current_halves = lambda: [optimizer.param_groups[index] for index in indices]
        self.data = {"params": [], "lr": lr, "betas": betas}

    @property
    def _halves(self) -> list[dict[str, Any]]:
        return self._current_halves()

    def __getitem__(self, key: str) -> Any:
        if key == "params":
            return [param for half in self._halves for param in half["params"]]
        if key in RATES:
            values = [half[key] / half["lr_ratio"] for half in self._halves if half["lr_ratio"] and key in half]
        elif key in HALF_OF:
            values = [half[key] for half in self._halves if half["use_muon"] is HALF_OF[key]]
        else:
            values = [half[key] for half in self._halves if key in half and key not in self.data]
        return values[0] if values else self.data[key]

    def __contains__(self, key: object) -> bool:
        return key in self.data or any(key in half for half in self._halves)

    def __setitem__(self, key: str, value: Any) -> None:
        self.data[key] = value
        for half in self._halves:
            if key in RATES:
                half[key] = float(value) * half["lr_ratio"]
            elif key in HALF_OF and half["use_muon"] is HALF_OF[key]:
                half[key] = value


class UserGroups(Optimizer):
    """The optimizer as a learning-rate scheduler sees it: with the user's parameter groups; ``step`` does nothing.

    ``origins`` and ``lrs``: for each of the user's groups, the indices of its halves and its learning rate.
    """

    def __init__(self, optimizer: Optimizer, origins: Sequence[Sequence[int]], lrs: Sequence[float]) -> None:
        self.optimizer, betas = optimizer, optimizer.defaults["betas"]
        self.defaults = {"lr": optimizer.defaults["lr"], "betas": betas}
        groups = [UserGroup(optimizer, indices, lr, betas) for indices, lr in zip(origins, lrs, strict=True)]
        self.param_groups = groups  # type: ignore[assignment]
        # Schedulers warn if they step before their optimizer, and this object is their optimizer.
        optimizer.register_step_post_hook(lambda *_: self.step())

    @property
    def state(self) -> Any:  # type: ignore[override]
        """Return the state of the real optimizer."""
        return self.optimizer.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing; the real optimizer updates the parameters."""

    # torch.optim.Optimizer wraps ``step`` to call hooks, except where this mark says that it has been wrapped.
    step.hooked = True  # type: ignore[attr-defined]
