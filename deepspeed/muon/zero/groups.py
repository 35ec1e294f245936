# SPDX-License-Identifier: Apache-2.0
"""The parameter groups of a checkpoint against those of the optimizer."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from deepspeed.muon.choice import unknown_methods
from deepspeed.muon.logs import logger
from deepspeed.muon.optimizer import MuonWithAuxAdam
from deepspeed.muon.splitting import is_fused

#: What a group keeps whatever is loaded: its ratio of the schedule, and by what ZeRO finds the ranks of its experts.
OWN = ("lr_ratio", "name", "moe")
Groups = Sequence[Mapping[str, Any]]


def saved_groups(saved: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The groups in what a wrapper of DeepSpeed's, or its converter, has written."""
    inner = saved.get("optimizer_state_dict", saved)
    return inner["param_groups"] if "param_groups" in inner else inner["base_optimizer_state"]["param_groups"]


def matrices(optimizer: Any) -> set[str]:
    """Names of the parameters that go to Muon."""
    return {spec.name for spec in optimizer.specs.values() if spec.use_muon}


def blocks(optimizer: Any) -> dict[str, str]:
    """By name, of each parameter that is several matrices a hash of where these lie in it."""
    return {
        spec.name: hashlib.sha256(str([(b.offset, b.rows, b.cols, b.bands) for b in spec.blocks]).encode()).hexdigest()[
            :8
        ]
        for spec in optimizer.specs.values()
        if len(spec.blocks) > 1
    }


def kinds(groups: Groups) -> list[bool | None]:
    """Of each group, whether it is Muon's; ``None``: another optimizer's."""
    return [group.get("use_muon") for group in groups]


def check_groups(optimizer: MuonWithAuxAdam, groups: Groups) -> None:
    """Raise ValueError where :func:`routing_difference` finds one; warn where parameters are cut otherwise here."""
    if text := routing_difference(optimizer, groups):
        raise ValueError(text)
    here = blocks(optimizer)
    stated = [group["blocks"] for group in groups if "blocks" in group]
    # What knows no blocks was saved before fused weights were cut.
    there = stated[0] if stated else {name: here[name] for name in here.keys() - fused(optimizer)}
    if other := sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name)):
        logger.warning(
            "deepspeed-muon: %d parameters are cut into other matrices than in the run that was saved, first %s; "
            'muon_fused, muon_split and per_head_muon as there ("muon_fused": "whole" if it knew no such key) go on '
            "with the same updates",
            len(other),
            other[0],
        )


def fused(optimizer: Any) -> set[str]:
    """Names of the parameters that ``muon_fused`` cuts."""
    return {spec.name for spec in optimizer.specs.values() if is_fused(spec.split)}


def routing_difference(optimizer: MuonWithAuxAdam, groups: Groups) -> str | None:
    """An error text unless saved groups are of the same kinds, of known methods, and the same parameters go to Muon."""
    saved, current = kinds(groups), kinds(optimizer.param_groups)
    there = {name for group in groups for name in group.get("matrices", ())}
    here = matrices(optimizer)
    if saved == current and there == here:
        unknown = [text for group in groups for text in unknown_methods(group.get("ns_methods", {}))]
        return f"it was saved with methods that this deepspeed-muon lacks: {', '.join(unknown)}" if unknown else None
    return (
        f"the checkpoint's parameter groups are {_words(saved)}, the optimizer's are {_words(current)}; "
        f"Muon has {sorted(there - here)[:4]} in the checkpoint only and {sorted(here - there)[:4]} here only: "
        "it was saved with another optimizer or another routing. To go on from AdamW, convert it with python -m "
        "deepspeed.checkpoint.ds_to_universal --inject_missing_state, from stock's Muon with ds_muon import, "
        'and load the result with "checkpoint": {"load_universal": true}'
    )


def settings_of(current: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """The saved settings of a group, which act as with any optimizer of torch's; a warning where the config's differ.

    Learning rates are left out of the warning, since a schedule changes them. Their ratio is the config's: a schedule
    is built from the config too. Of ``ns_methods`` the warning names the shapes that differ.
    """
    settings = {key: value for key, value in saved.items() if key not in (*OWN, "params", "matrices", "blocks")}
    for key, value in settings.items():
        here = current.get(key, value)
        if key == "ns_methods":
            value = {shape: method for shape, method in value.items() if here.get(shape, method) != method}
            here = {shape: here[shape] for shape in value}
        if key in ("lr", "initial_lr") or value == here:
            continue
        logger.warning(
            "deepspeed-muon: group %s goes on with %s = %s from the checkpoint; the config has %s",
            current.get("name"),
            key,
            value,
            here,
        )
    return {key: value for key, value in current.items() if key != "params"} | settings


def _words(flags: Sequence[bool | None]) -> str:
    return str([{True: "Muon", False: "AdamW", None: "unknown"}[flag] for flag in flags])
