# SPDX-License-Identifier: Apache-2.0
"""One choice of methods and one plan for all ranks: rank 0 measures for all, and the ranks compare what they have."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from deepspeed.muon.log import logger
from deepspeed.muon.math.choice import kind_of, pins, shape_key
from deepspeed.muon.math.measure import better, measure
from deepspeed.muon.optimizer import MuonWithAuxAdam
from deepspeed.muon.zero.consensus import compare, differences, with_type
from deepspeed.muon.zero.wrappers.tensor_parallel import matrix_share


def shapes_to_measure(optimizer: MuonWithAuxAdam) -> Counter[tuple[int, int]]:
    """How many matrices there are of each shape whose method ``ns_tuning: measured`` is to choose."""
    is_open = any(group["use_muon"] and group["ns_method"] == "auto" for group in optimizer.param_groups)
    return optimizer.shapes if optimizer.config.ns_tuning == "measured" and is_open else Counter()


def tune(
    optimizer: MuonWithAuxAdam, shapes: Sequence[Sequence[int]], ns_dtype: torch.dtype, device: torch.device
) -> None:
    """Under ``ns_tuning: measured``, let rank 0 time the methods, and pin its choice on all ranks.

    Args:
        shapes: rows, columns and number of the matrices of all ranks, those of other pipeline stages included.

    Raises:
        DisagreementError: on all ranks, rank 0 cannot measure.
    """
    if shapes:
        is_first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
        counts = Counter({(rows, cols): count for rows, cols, count in shapes})
        mine = partial(_measured, optimizer, counts, ns_dtype, device) if is_first else dict
        verdict = compare(mine, lambda facts: facts[0])
        for group in optimizer.param_groups:
            if group["use_muon"]:
                group["ns_methods"] = dict(verdict["methods"])


def _measured(
    optimizer: MuonWithAuxAdam, shapes: Counter[tuple[int, int]], ns_dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """The method of each shape: the shipped rule's, unless another is clearly faster."""
    began = time.perf_counter()
    try:
        times = measure(shapes, optimizer.config.schedule, ns_dtype, device, optimizer.kernels)
    except Exception as error:  # the other ranks wait for this
        advice = "rank 0 cannot measure the methods; remove the key for the shipped rule"
        return {"error": f"optimizer.params.ns_tuning: {advice}. {with_type(error)}"}
    chosen = pins(shapes, kind_of(device.type, ns_dtype.itemsize))
    told = []
    for shape, seconds in times.items():
        key = shape_key(*shape)
        chosen[key] = better(seconds, chosen[key])
        told.append(f"{key} {chosen[key]} ({seconds['standard'] / seconds['gram']:.2f})")
    logger.info(
        f"deepspeed-muon: rank 0 measured the methods of {len(times)} of {len(chosen)} shapes in "
        f"{time.perf_counter() - began:.1f} s (standard's time over gram's): {', '.join(told)}"
    )
    return {"methods": chosen}


def compare_plans(optimizer: MuonWithAuxAdam, **mine: Any) -> dict[str, Any]:
    """Raise DisagreementError where ranks that hold the same parameters differ in methods or plan.

    Returns the facts of rank 0, with ``mine`` among them.
    """
    pinned = [group["ns_methods"] for group in optimizer.param_groups if group["use_muon"]]
    plans = hashlib.sha256("".join(plan.digest for plan in optimizer.plans).encode()).hexdigest()[:16]
    stated = {"stage": matrix_share(optimizer), "methods": pinned, "plan": plans, **mine}
    titles = {"methods": "the choice of Newton-Schulz methods", "plan": "the exchange plan"}
    return compare(lambda: stated, lambda facts: differences(facts, titles, within="stage") or facts[0])
