# SPDX-License-Identifier: Apache-2.0
"""What the user asks of routing and splitting."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepspeed.muon.matrices.block import Cut


@dataclass(frozen=True)
class MatrixOptions:
    """The keys of ``optimizer.params`` that say what becomes of a parameter.

    Args:
        include: regular expressions; a matrix whose name one of them finds goes to Muon.
        exclude: regular expressions; a parameter whose name one of them finds goes to AdamW, included or not.
        split: by regular expression, how parameters that it finds are cut; the first that is found counts.
        conv: ``flatten``: a convolution is the matrix ``[out, in x kernel]``; ``adamw``: it goes to AdamW.
        lora: the factors of low-rank adapters that go to Muon, ``none``, ``B`` or ``both``.
        per_head: whether attention projections are cut into one matrix per head.
        fused: ``split``: a weight that is known to hold several projections is cut into them; ``whole``: it is not.
        tp_mode: ``whole``: a matrix that tensor parallelism cut is one; ``shard``: what each rank holds is one.
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
        """Those of a :class:`deepspeed.muon.config.schema.MuonConfig`."""
        return cls(
            config.muon_include,
            config.muon_exclude,
            config.muon_split,
            config.muon_conv,
            config.muon_lora,
            config.per_head_muon,
            config.muon_fused,
            config.tp_mode,
        )

    def cut_for(self, names: Sequence[str]) -> tuple[str, Cut] | None:
        """The first pattern of ``split`` that is found in one of a parameter's names, and how it cuts."""
        for pattern, by in self.split.items():
            if any(re.search(pattern, name) for name in names):
                return pattern, by
        return None


DEFAULT_OPTIONS = MatrixOptions()
