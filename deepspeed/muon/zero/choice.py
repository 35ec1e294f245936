# SPDX-License-Identifier: Apache-2.0
"""One choice of Newton-Schulz and one plan for all ranks: all of them race, the slowest one's rates count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from deepspeed.muon.exchange.groups import is_made, make_groups
from deepspeed.muon.math.choice import Rates, lowest
from deepspeed.muon.optimizer import MuonWithAuxAdam
from deepspeed.muon.tuning import Candidates, Tuning
from deepspeed.muon.zero.consensus import Facts, agree, differences
from deepspeed.muon.zero.tp_ranks import matrix_share


def choose(optimizer: MuonWithAuxAdam, agreed: Facts, device: torch.device, world_size: int) -> Tuning:
    """Choose the same on all ranks. They race at the same time, as they step at the same time.

    Args:
        agreed: the result of :func:`deepspeed.muon.zero.bind.agree_on_settings`, equal on all ranks.
        device: where Newton-Schulz runs.
        world_size: ranks that share the matrices.

    Raises:
        DisagreementError: on all ranks, some rank cannot race.
    """
    shapes = Counter({(rows, cols): count for rows, cols, count in agreed["shapes"]})
    methods, tables = set(agreed["ns_methods"]), optimizer.tables_on(device)

    def slowest(measure: Callable[[], Rates]) -> Rates:
        return agree(lambda: {"rates": measure()}, lambda facts: lowest([stated["rates"] for stated in facts]))

    return Candidates.of(optimizer.config, tables, methods, device, agreed["bf16"]).choose(
        shapes, world_size, agreed["races"], is_logging_rank=optimizer.context.is_logging, slowest=slowest
    )


def compare_plans(engine: Any) -> None:
    """Raise DisagreementError where ranks that hold the same parameters differ in choice or plan; make the process
    groups that any plan needs. Called after every binding.
    """
    optimizer = engine.basic_optimizer
    pinned = [group["ns_choice"] for group in optimizer.param_groups if group["use_muon"]]
    stated = {"stage": matrix_share(engine, optimizer), "choice": pinned, "plan": optimizer.digest()}
    stated["sets"] = sorted(ranks for ranks in optimizer.owner_sets if not is_made(ranks))
    titles = {"choice": "the choice of dtype, methods and kernels", "plan": "the exchange plan"}

    def state() -> Facts:
        optimizer.warm_up()  # here, where a rank may take long
        return stated

    def judge(facts: list[Facts]) -> Facts:
        sets = sorted({tuple(ranks) for one in facts for ranks in one["sets"]})
        return differences(facts, titles, within="stage") or {"sets": sets}

    make_groups(agree(state, judge)["sets"], optimizer.compute_device)
