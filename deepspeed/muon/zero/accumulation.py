# SPDX-License-Identifier: Apache-2.0
"""Gradient accumulation and checkpoints: gradients of an unfinished step are not part of a checkpoint.

A step that was under way when the checkpoint was saved begins again with its first micro-batch.
"""

from __future__ import annotations

from typing import Any

from deepspeed.muon.logs import logger


def warn_of_unfinished_step(engine: Any) -> None:
    """Say so where a checkpoint is saved between the micro-batches of a step."""
    done, total = _position(engine), engine.gradient_accumulation_steps()
    if done and engine.global_rank == 0:
        logger.warning(
            "deepspeed-muon: this checkpoint is saved after micro-batch %d of %d; the gradients since the last step "
            "are not part of it: a resumed run begins this step again: give it these %d micro-batches once more",
            done,
            total,
            done,
        )


def begin_step_again(engine: Any) -> None:
    """Forget the micro-batches and gradients since the last step, which belong to other weights after a load."""
    engine.micro_steps -= _position(engine)
    engine.zero_grad()
    wrapper = engine.optimizer
    if hasattr(wrapper, "zero_grad"):
        wrapper.zero_grad(set_to_none=True)
    for name in ("averaged_gradients", "all_grad_tensors"):
        getattr(wrapper, name, {}).clear()
    if type(wrapper).__name__ == "DeepSpeedZeroOptimizer":
        wrapper.micro_step_id = -1  # counted up before the first micro-batch, which replaces what is accumulated


def _position(engine: Any) -> int:
    """Micro-batches since the last step; 0 where a script or framework says itself which one ends a step."""
    if not getattr(engine, "managed_gradient_accumulation", lambda: True)():
        return 0
    if engine._is_gradient_accumulation_boundary is not None:
        return 0
    return engine.micro_steps % engine.gradient_accumulation_steps()
