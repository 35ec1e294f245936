# SPDX-License-Identifier: Apache-2.0
"""How often a step makes the host wait for the accelerator: once, whatever the number of parameter groups."""

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


def waits_of_a_step(model: str = "mlp", extra: bool = False, **case: Any) -> dict[str, list[str]]:
    """Return by whom the host waits for the device in the third step, and where: {"ours": ["file:line", ...]}.

    Each layer is a parameter group, which gives a Muon group and an AdamW group. `extra`: read an element in a step.
    """
    net = MODELS[model]()
    layers = [layer for layer in net.modules() if [*layer.parameters(recurse=False)]]
    groups = [{"params": [*layer.parameters(recurse=False)], "lr": 0.01 + 0.001 * i} for i, layer in enumerate(layers)]
    engine = make_engine(net, ds_config(optimizer=SECTION, **case), model_parameters=groups)
    assert engine.device.type == late_device.NAME and len(engine.basic_optimizer.partitions) > 1
    assert len(engine.basic_optimizer.all_partitions) > len(engine.basic_optimizer.partitions)
    found: dict[str, list[str]] = {"ours": [], "DeepSpeed": [], "test": []}
    with pytest.MonkeyPatch.context() as patch, late_device.paces(late_device.HELD):
        if extra:
            read_an_element(patch)
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


def read_an_element(patch: pytest.MonkeyPatch) -> None:
    """Make each bucket read an element, in the package's own code."""
    from deepspeed.muon.exchange.run import BucketBuffers

    code = compile(
        "def read(self):\n    self.matrices[:1].sum().item()\n", str(PACKAGE / "exchange/buffers.py"), "exec"
    )
    scope: dict[str, Any] = {}
    exec(code, scope)
    patch.setattr(BucketBuffers, "unpack", scope["read"])


CASES: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": {"stage": stage, "dtype": "bf16"} for stage in (1, 2, 3, 0)},
    "without clipping": {"stage": 2, "dtype": "bf16", "clip": 0.0},
    "fp16": {"stage": 3, "dtype": "fp16"},
    "bf16 masters": {"stage": 3, **BF16_MASTERS},
    "sub-groups": {"stage": 3, "dtype": "bf16", "zero": {"sub_group_size": 60}},
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_step_waits_once(case: dict[str, Any], world: int, late: Run) -> None:
    for found in late(waits_of_a_step, world, **case):
        assert len(found["ours"]) == 1, found
        assert not found["test"], found


def test_a_column_without_gradient_makes_no_wait(late: Run) -> None:
    """The sample of a gradient lies in many columns, also where the distance of whole rows divides the matrix."""
    for found in late(waits_of_a_step, 1, model="dark input", stage=0, dtype="bf16"):
        assert len(found["ours"]) == 1, found


@pytest.mark.parametrize("stage", [1, 3])
def test_a_step_waits_twice_if_a_sample_is_zero(stage: int, late: Run) -> None:
    """However many matrices have no gradient."""
    for found in late(waits_of_a_step, 2, model="unused", stage=stage, dtype="bf16"):
        assert len(found["ours"]) == 2, found


def test_bf16_optimizer_waits_twice(late: Run) -> None:
    """Once for the norm that DeepSpeed leaves on the device, once for the look for gradients."""
    for found in late(waits_of_a_step, 2, **BF16_OPTIMIZER):
        assert len(found["ours"]) == 2, found


def test_one_more_read_is_seen(late: Run) -> None:
    found = late(waits_of_a_step, 1, extra=True, stage=2, dtype="bf16")[0]
    assert len(found["ours"]) > 1
