# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a run have agreed on before they plan, and what this rank is among them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from deepspeed.muon.exchange.agreed import Agreed
from deepspeed.muon.kernels import reference
from deepspeed.muon.kernels.selection import Missing
from deepspeed.muon.kernels.table import Operations


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """Hold what is agreed; made once, when the optimizer is bound, for an engine by :mod:`deepspeed.muon.zero.bind`.

    Args:
        is_logging: this process logs what all of them know.
        kernels: of a step, but for the products of Newton-Schulz; equal on all ranks.
        lacking: why faster ones are missing.
        ranks_per_node: neighbouring ranks that share a node, as far as known; unless the config says so only they own
            a matrix together.
        peers: process group of the ranks that train the same layers; ``None``: all.
        muon_of_all_stages: in a pipeline, the parameters of all stages that go to Muon, by name, and a hash of how each
            is cut, if any.
        is_stepped_in_parts: whether calls of ``step`` are parts of an engine's step, which calls the optimizer's
            ``begin_step`` before them and ``release_scratch`` after.
        is_finite: whether the gradient of the current step is finite, by the wrapper around the optimizer; ``None``:
            the optimizer looks at its gradients, which are the same on all ranks.
    """

    is_logging: bool = True
    kernels: Operations = reference.OPERATIONS
    lacking: Missing = field(default_factory=dict)
    ranks_per_node: int = 1
    peers: Any = None
    muon_of_all_stages: dict[str, str] | None = None
    is_stepped_in_parts: bool = False
    is_finite: Callable[[], Agreed] | None = None
