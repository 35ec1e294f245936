# SPDX-License-Identifier: Apache-2.0
"""Training with a checkpoint in the middle, and training from that checkpoint."""

from typing import Any

from torch import Tensor

from helpers.engine_state import snapshot
from helpers.models import train_engine
from helpers.training import BF16_MASTERS, BF16_OPTIMIZER, MOMENTA, fresh_engine

RESUMED: list[dict[str, Any]] = [
    {"stage": 0},
    {"stage": 0, "dtype": "bf16"},
    {"stage": 0, "dtype": "fp16"},
    {"stage": 2, "clip": 0.0, "zero": {"compute_grad_norm": False}},
    {"stage": 1, "gradient_allreduce_op": "sum"},
    *({"stage": stage, "dtype": dtype} for stage in (1, 2, 3) for dtype in ("fp32", "bf16")),
    BF16_OPTIMIZER,
    *({"stage": stage, **BF16_MASTERS} for stage in (1, 2, 3)),
    {"stage": 3, "optimizer": MOMENTA["int8"], **BF16_MASTERS},
    *({"stage": stage, "offload": True} for stage in (1, 2, 3)),
    {"stage": 3, "zero": {"sub_group_size": 100}},
    {"stage": 2, "zero": {"round_robin_gradients": True}},
    {"stage": 1, "zero": {"round_robin_gradients": True}, "dtype": "bf16"},
]


def save_and_go_on(case: dict[str, Any], folder: str) -> dict[str, Tensor]:
    """Train three steps, save, train three more; return the final weights and states."""
    engine = fresh_engine(0, case)
    train_engine(engine, 3)
    engine.save_checkpoint(folder)
    train_engine(engine, 3, first_step=3)
    result = snapshot(engine)
    engine.destroy()
    return result


def resume(case: dict[str, Any], folder: str) -> dict[str, Tensor]:
    """Load the checkpoint into an engine with other weights, train three steps; return as :func:`save_and_go_on`."""
    engine = fresh_engine(7, case)
    train_engine(engine, 1, first_step=9)
    assert engine.load_checkpoint(folder)[0] is not None
    assert engine.global_steps == 3
    train_engine(engine, 3, first_step=3)
    result = snapshot(engine)
    engine.destroy()
    return result


def save_all(cases: list[dict[str, Any]], folders: list[str]) -> list[dict[str, Tensor]]:
    return [save_and_go_on(case, folder) for case, folder in zip(cases, folders, strict=True)]


def resume_all(cases: list[dict[str, Any]], folders: list[str]) -> list[dict[str, Tensor]]:
    return [resume(case, folder) for case, folder in zip(cases, folders, strict=True)]
