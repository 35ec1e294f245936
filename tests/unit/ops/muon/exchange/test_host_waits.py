# SPDX-License-Identifier: Apache-2.0
"""How often a step makes the host wait for the accelerator: once or twice, however many parameter groups."""

from collections.abc import Callable
from pathlib import Path
from traceback import FrameSummary
from typing import Any

import pytest
import torch

from helpers import late_device
from helpers.models import MODELS, train_engine
from helpers.paths import PACKAGE
from helpers.training import BF16_MASTERS, BF16_OPTIMIZER, ds_config, make_engine, with_params

SECTION = with_params(ns_dtype="bf16", kernels="torch", bucket_bytes=300)
Run = Callable[..., list[Any]]


def who_waits(stack: list[FrameSummary]) -> str:
    """Return "ours" or "DeepSpeed", whichever code called last, and "test" if there is neither in the stack."""
    for frame in stack:
        path = Path(frame.filename)
        if PACKAGE in path.parents:
            return "ours"
        if "deepspeed" in path.parts:
            return "DeepSpeed"
    return "test"


def waits_of_a_step(model: str = "mlp", **case: Any) -> dict[str, list[str]]:
    """Return by whom the host waits for the device in the third step, and where: {"ours": ["file:line", ...]}.

    Each layer is a parameter group, which gives a Muon group and an AdamW group.
    """
    net = MODELS[model]()
    layers = [layer for layer in net.modules() if [*layer.parameters(recurse=False)]]
    groups = [{"params": [*layer.parameters(recurse=False)], "lr": 0.01 + 0.001 * i} for i, layer in enumerate(layers)]
    engine = make_engine(net, ds_config(optimizer=SECTION, **case), model_parameters=groups)
    assert engine.device.type == late_device.NAME and len(engine.basic_optimizer.partitions) > 1
    assert len(engine.basic_optimizer.all_partitions) > len(engine.basic_optimizer.partitions)
    found: dict[str, list[str]] = {"ours": [], "DeepSpeed": [], "test": []}
    with pytest.MonkeyPatch.context() as patch, late_device.paces(late_device.HELD):
        train_engine(engine, 2)
        step = type(engine).step

        def watched(*args: Any, **kwargs: Any) -> Any:
            torch.accelerator.synchronize()
            with late_device.watched_waits() as stacks:
                result = step(*args, **kwargs)
            for stack in stacks:
                where = next(f for f in stack if "deepspeed" in Path(f.filename).parts)
                found[who_waits(stack)].append(f"{Path(where.filename).name}:{where.lineno}")
            return result

        patch.setattr(type(engine), "step", watched)
        train_engine(engine, 1, first_step=2)
    engine.destroy()
    return found


ONCE: list[dict[str, Any]] = [
    *({"stage": stage, "dtype": "bf16"} for stage in (1, 2, 3, 0)),
    {"stage": 2, "dtype": "bf16", "clip": 0.0},
    {"stage": 3, "dtype": "fp16"},
    {"stage": 3, **BF16_MASTERS},
    {"stage": 3, "dtype": "bf16", "zero": {"sub_group_size": 60}},
    # A column without a gradient, where the distance of whole rows divides the matrix: the sample lies in others too.
    {"stage": 0, "dtype": "bf16", "model": "dark input"},
]
#: Matrices without a gradient, however many, are looked for; `BF16_Optimizer` leaves its norm on the device.
TWICE: list[dict[str, Any]] = [
    *({"model": "unused", "stage": stage, "dtype": "bf16"} for stage in (1, 3)),
    BF16_OPTIMIZER,
]
CASES = [*((1, world, case) for world in (1, 2) for case in ONCE), *((2, 2, case) for case in TWICE)]


@pytest.mark.sample(8)
@pytest.mark.parametrize(("count", "world", "case"), CASES, ids=str)
def test_a_step_waits_as_often_as_it_must(count: int, world: int, case: dict[str, Any], late: Run) -> None:
    for found in late(waits_of_a_step, world, **case):
        assert len(found["ours"]) == count, found
        assert not found["test"], found
