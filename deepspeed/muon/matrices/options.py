# SPDX-License-Identifier: Apache-2.0
"""The options of routing and splitting."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from deepspeed.muon.matrices.block import Cut


@dataclass(frozen=True)
class MatrixOptions:
    """The keys of ``optimizer.params`` that decide a parameter's route and its matrices, under their own names."""

    muon_include: Sequence[str] = ()
    muon_exclude: Sequence[str] = ()
    muon_split: Mapping[str, Cut] = field(default_factory=dict)
    muon_conv: str = "adamw"
    muon_lora: str = "none"
    muon_fused: str = "split"
    per_head_muon: bool = False
    tp_mode: str = "whole"


DEFAULT_OPTIONS = MatrixOptions()


def first_match(patterns: Iterable[str], names: Sequence[str]) -> str | None:
    """The first regular expression that is found in one of the names."""
    return next((pattern for pattern in patterns if any(re.search(pattern, name) for name in names)), None)
