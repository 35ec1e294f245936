# SPDX-License-Identifier: Apache-2.0
"""A gradient that is not finite on one rank leaves no trace in weights and state on any rank."""

import logging
import math
import re
from functools import partial
from typing import Any

import pytest
import torch

from deepspeed.muon.step import are_finite
from deepspeed.muon.zero.wrappers.adapter import patch
from deepspeed.muon.zero.wrappers.gradient_norms import NORM_METHODS, watch_norms
from helpers.contracts import Spoil
from helpers.distributed import run, run_each
from helpers.engine_state import differing, snapshot
from helpers.logs import logged
from helpers.models import MODELS, train_engine
from helpers.paths import PACKAGE
from helpers.training import ds_config, make_engine


def bad_step(engine: Any, step: int, layer: str, value: float) -> None:
    """A step in which the last rank has `value` in a gradient of the first micro-step, of a matrix or a bias."""
    target = {"muon": engine.module.layers[0].weight, "adam": engine.module.layers[-1].bias}[layer]
    hook = target.register_hook(Spoil(value if engine.global_rank == engine.world_size - 1 else None))
    train_engine(engine, 1, first_step=step)
    hook.remove()


def looks_at_stage_0(dtype: str) -> tuple[int, bool]:
    """How often two steps look at all gradients for a bad one; whether the second, which has one, is skipped."""
    from deepspeed.muon import optimizer as module

    looks, original = [], module.are_finite
    module.are_finite = lambda tensors: looks.append(1) or original(tensors)
    try:
        engine = make_engine(MODELS["mlp"](), ds_config(stage=0, dtype=dtype))
        train_engine(engine, 1)
        before = snapshot(engine)
        bad_step(engine, 1, "muon", math.inf)
    finally:
        module.are_finite = original
    is_skipped = differing(before, snapshot(engine)) == []
    engine.destroy()
    return len(looks), is_skipped


def test_stage_0_reads_gradients_again_only_where_deepspeed_has_no_norm() -> None:
    cases = [{"dtype": dtype} for dtype in ("bf16", "fp16", "fp32")]
    assert run_each(looks_at_stage_0, 2, cases) == [[(looks, True)] * 2 for looks in (0, 0, 2)]


# ---- the watch alone ----------------------------------------------------------------------------------------


class Wrapper:
    """What the watch sees of ZeRO: a step that takes the norms of its groups."""

    def get_grad_norm_direct(self, norm: Any) -> Any:
        return norm

    def complete_grad_norm_calculation_for_cpu_offload(self, norm: Any) -> Any:
        return norm

    def step(self, method: str, norms: list[Any]) -> list[Any]:
        return [getattr(self, method)(norm) for norm in norms]


def test_a_finite_gradient_is_finite_whatever_its_norm() -> None:
    """In fp16, whose range the norm of a scaled gradient may exceed; beside tensors of other dtypes."""
    large = torch.full((4,), 6e4)
    assert are_finite([large.half()]) and are_finite([large.half(), large, large.bfloat16(), large.double()])
    for bad in (math.inf, math.nan):
        assert not are_finite([large.half(), torch.tensor([1.0, bad]).half()])


def test_a_step_without_norms_is_refused() -> None:
    """A DeepSpeed that computes norms by other methods would let a NaN into the momentum."""
    wrapper = Wrapper()
    watch = watch_norms(partial(patch, wrapper))
    wrapper.step(NORM_METHODS[0], [1.0])
    assert watch()
    wrapper.step(NORM_METHODS[0], [])
    with pytest.raises(RuntimeError, match=r"cannot tell whether the gradient is finite.*get_grad_norm_direct"):
        watch()


def test_one_function_makes_answers_that_all_ranks_have_alike() -> None:
    makers = [path.name for path in sorted(PACKAGE.rglob("*.py")) if re.search(r"\bAgreed\(", path.read_text())]
    assert makers == ["consensus.py"]


# ---- what is reported -----------------------------------------------------------------------------------------


def reports(cases: list[dict[str, Any]]) -> list[list[int]]:
    """By case: the lines in the logs about a skip, our own and ZeRO's, after each of some bad steps."""
    from deepspeed.utils import logger

    with logged(logging.WARNING) as messages:
        handler = logging.getLogger("deepspeed.muon").handlers[-1]
        logger.addHandler(handler)
        try:
            return [count_reports(case, messages) for case in cases]
        finally:
            logger.removeHandler(handler)


def count_reports(case: dict[str, Any], messages: list[str]) -> list[int]:
    engine, counts = make_engine(MODELS["mlp"](), ds_config(**case)), []
    for step, (layer, value) in enumerate([("adam", math.inf), ("muon", math.nan), ("adam", math.nan)]):
        train_engine(engine, 1, first_step=step)
        messages.clear()
        bad_step(engine, step, layer, value)
        counts.append(sum("step is skipped" in text or "OVERFLOW" in text for text in messages))
    engine.destroy()
    return counts


def test_a_skipped_step_is_reported_once() -> None:
    """On rank 0, however many groups there are, and whoever skips it: ZeRO, or the optimizer where ZeRO would not."""
    cases: list[dict[str, Any]] = [{"stage": stage, "dtype": d} for stage in (0, 2, 3) for d in ("fp32", "bf16")]
    cases += [{"stage": 3, "dtype": "bf16", "offload": True}]
    cases += [{"stage": 1, "dtype": "bf16", "data_types": {"grad_accum_dtype": "fp32"}}]
    cases += [{"stage": 2, "dtype": "bf16", "bf16": {"enabled": True, "check_grad_overflow": False}}]
    first, second = run(reports, 2, cases=cases)
    for case, *counts in zip(cases, first, second, strict=True):
        assert counts == [[1, 1, 1], [0, 0, 0]], case
