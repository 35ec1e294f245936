# SPDX-License-Identifier: Apache-2.0
"""One choice of methods and one plan for all ranks: rank 0 measures for all, and the ranks compare what they have."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from deepspeed.muon.log import logger
from deepspeed.muon.math.choice import kind_of, pins, shape_key
from deepspeed.muon.math.measure import better, measure
from deepspeed.muon.optimizer import MuonWithAuxAdam
from deepspeed.muon.zero.consensus import compare, differences
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
        verdict = compare(
            lambda: _measured(optimizer, counts, ns_dtype, device) if is_first else {}, lambda facts: facts[0]
        )
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
        return {"error": f"{ON_ERROR} {type(error).__name__}: {error}"}
    chosen = pins(shapes, kind_of(device.type, ns_dtype.itemsize))
    told = []
    for shape, seconds in times.items():
        key = shape_key(*shape)
        chosen[key] = better(seconds, chosen[key])
        told.append(f"{key} {chosen[key]} ({seconds['standard'] / seconds['gram']:.2f})")
    logger.info(
        "deepspeed-muon: rank 0 measured the methods of %d of %d shapes in %.1f s (standard's time over gram's): %s",
        len(times),
        len(chosen),
        time.perf_counter() - began,
        ", ".join(told),
    )
    return {"methods": chosen}


ON_ERROR = "optimizer.params.ns_tuning: rank 0 cannot measure the methods; remove the key for the shipped rule."


def compare_plans(optimizer: MuonWithAuxAdam, **mine: Any) -> dict[str, Any]:
    """Make sure that all ranks that hold the same parameters have the same methods and the same plan.

    Args:
        mine: facts of which those of rank 0 count.

    Returns:
        Rank 0's.

    Raises:
        DisagreementError: they differ.
    """
    pinned = [group["ns_methods"] for group in optimizer.param_groups if group["use_muon"]]
    plans = hashlib.sha256("".join(plan.digest for plan in optimizer.plans).encode()).hexdigest()[:16]
    titles = {"methods": "the choice of Newton-Schulz methods", "plan": "the exchange plan"}

    def judge(facts: list[dict[str, Any]]) -> dict[str, Any]:
        error = differences(facts, titles, within="stage")
        return {"error": error} if error else facts[0]

    stated = {"stage": matrix_share(optimizer), "methods": pinned, "plan": plans, **mine}
    return compare(lambda: stated, judge)
