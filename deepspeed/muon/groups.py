# SPDX-License-Identifier: Apache-2.0
"""Splits the user's parameter groups into a Muon and an AdamW half each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from deepspeed.muon.config import MuonConfig, MuonConfigError
from deepspeed.muon.routing import MatrixSpec


def split_groups(params: Iterable[Any], specs: Mapping[Any, MatrixSpec], config: MuonConfig) -> list[dict[str, Any]]:
    """Groups of one kind each; frozen parameters and empty halves are left out.

    Args:
        params: parameters, or dicts with ``params`` and settings of their own, which win over the config's.
        specs: the route of every trainable parameter.

    Raises:
        ValueError: a parameter without a route.
        MuonConfigError: a group with a setting that neither half knows.
    """
    items = list(params)
    groups = [dict(item) for item in items if isinstance(item, dict)]
    loose = [item for item in items if not isinstance(item, dict)]
    groups += [{"params": loose}] if loose else []
    halves = []
    for index, group in enumerate(groups):
        given = [group["params"]] if isinstance(group["params"], Tensor) else group["params"]
        members = [param for param in given if param.requires_grad]
        _check(group, members, specs, config)
        base = group.get("name", f"group{index}" if len(groups) > 1 else "")
        for use_muon, label, settings in ((True, "muon", config.muon_group()), (False, "adam", config.adam_group())):
            half = [param for param in members if specs[param].use_muon is use_muon]
            own = {key: value for key, value in group.items() if key in settings}
            name = f"{base}-{label}" if base else label
            if half:
                halves.append({"params": half, **settings, **own, "use_muon": use_muon, "name": name})
    return halves


def _check(group: dict[str, Any], members: list[Any], specs: Mapping[Any, MatrixSpec], config: MuonConfig) -> None:
    unknown = [list(param.shape) for param in members if param not in specs]
    if unknown:
        raise ValueError(f"{len(unknown)} parameters are not part of the model, first shape {unknown[0]}")
    known = {"params", "name", *config.muon_group(), *config.adam_group()}
    if strange := sorted(group.keys() - known):
        raise MuonConfigError(f"parameter group: unknown keys {strange}; known: {sorted(known)}")
