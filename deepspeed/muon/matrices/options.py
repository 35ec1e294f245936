# SPDX-License-Identifier: Apache-2.0
"""The options of routing and splitting."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepspeed.muon.matrices.block import Cut


@dataclass(frozen=True)
class MatrixOptions:
    """The keys of ``optimizer.params`` that decide a parameter's route and its matrices.

    Args:
        include: regular expressions; matrices whose name matches one go to Muon.
        exclude: regular expressions; parameters whose name matches one go to AdamW, even if ``include`` matches.
        split: by regular expression, how matching parameters are cut; the first match counts.
        conv: ``flatten``: a convolution is a matrix ``[out, in x kernel]``; ``adamw``: it goes to AdamW.
        lora: which factors of low-rank adapters go to Muon: ``none``, ``B`` or ``both``.
        per_head: whether attention projections are cut into one matrix per head.
        fused: ``split``: a weight known to hold several projections is cut into them; ``whole``: it is not.
        tp_mode: of a matrix that tensor parallelism cut: ``whole``, or each rank's ``shard`` as a matrix of its own.
    """

    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    split: Mapping[str, Cut] = field(default_factory=dict)
    conv: str = "adamw"
    lora: str = "none"
    per_head: bool = False
    fused: str = "split"
    tp_mode: str = "whole"

    @classmethod
    def of(cls, config: Any) -> MatrixOptions:
        """The options in a :class:`deepspeed.muon.config.schema.MuonConfig`."""
        return cls(
            include=config.muon_include,
            exclude=config.muon_exclude,
            split=config.muon_split,
            conv=config.muon_conv,
            lora=config.muon_lora,
            per_head=config.per_head_muon,
            fused=config.muon_fused,
            tp_mode=config.tp_mode,
        )

    def cut_for(self, names: Sequence[str]) -> tuple[str, Cut] | None:
        """The first pattern of ``split`` that matches one of a parameter's names, and how it cuts."""
        for pattern, by in self.split.items():
            if any(re.search(pattern, name) for name in names):
                return pattern, by
        return None


DEFAULT_OPTIONS = MatrixOptions()
