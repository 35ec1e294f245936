# SPDX-License-Identifier: Apache-2.0
"""Steps on an accelerator whose streams run late, that of `helpers/late_device.py`: the bits of a CPU, by our waits."""

from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from helpers import late_device
from helpers.distributed import run
from helpers.late_device import HELD, PROMPT, RANDOM
from helpers.models import MODELS, make_batch, train_engine
from helpers.training import ds_config, fp32_weights, make_engine, with_params
from helpers.waits import Wait, all_waits, without

SECTION = with_params(ns_dtype="bf16", ns_method="standard", kernels="torch", bucket_bytes=300)
"""The section `optimizer`, with which a step has several buckets."""
Run = Callable[..., list[Any]]


# ---- training -----------------------------------------------------------------------------------------------------


def train_save_and_resume(folder: Path, pace: int | None, model: str = "mlp", **case: Any) -> dict[str, Tensor]:
    """Weights after two steps, a checkpoint, another engine that loads it and a third step; `None`: on the CPU."""
    if pace is not None:
        late_device.set_paces(pace)
    engine = make_engine(MODELS[model](), ds_config(optimizer=SECTION, **case))
    assert pace is None or engine.device.type == late_device.NAME
    train_engine(engine, 2)
    engine.save_checkpoint(str(folder))
    engine.destroy()
    engine = make_engine(MODELS[model](), ds_config(optimizer=SECTION, **case))
    engine.load_checkpoint(str(folder))
    train_engine(engine, 1, first_step=2)
    weights = fp32_weights(engine)
    engine.destroy()
    if pace is not None:
        torch.accelerator.synchronize()
        late_device.set_paces(RANDOM)
    return weights


CASES: list[tuple[int, dict[str, Any]]] = [
    *((1, {"stage": stage}) for stage in (1, 2, 3)),
    *((2, {"stage": stage}) for stage in (0, 1, 2, 3)),
    *((world, {"stage": stage, "offload": True}) for world in (1, 2) for stage in (1, 2, 3)),
]


@pytest.mark.sample(4)
@pytest.mark.parametrize("pace", [HELD, RANDOM], ids=["held", "random"])
@pytest.mark.parametrize(("world", "case"), CASES, ids=str)
def test_training_saves_and_loads_give_a_cpus_bits(
    world: int, case: dict[str, Any], pace: int, late: Run, tmp_path: Path
) -> None:
    case = case | {"dtype": "bf16"}
    expected = run(train_save_and_resume, world, folder=tmp_path / "cpu", pace=None, **case)
    got = late(train_save_and_resume, world, folder=tmp_path / "late", pace=pace, **case)
    for name, weights in expected[0].items():
        assert torch.equal(got[0][name], weights), name


def moved(moves: bool, stage: int) -> dict[str, Tensor]:
    """Weights after two steps; `moves`: with all state sent to pinned memory and back between them."""
    engine = make_engine(MODELS["mlp"](), ds_config(optimizer=SECTION, dtype="bf16", stage=stage))
    with late_device.paces(HELD):
        train_engine(engine, 1)
        if moves:
            engine.offload_states(non_blocking=True)
            engine.reload_states(non_blocking=True)
        train_engine(engine, 1, first_step=1)
        weights = fp32_weights(engine)
    engine.destroy()
    return weights


def test_states_move_to_the_host_and_back_late(late: Run) -> None:
    stayed, came_back = (late(moved, 1, moves=moves, stage=3)[0] for moves in (False, True))
    for name, weights in stayed.items():
        assert torch.equal(came_back[name], weights), name


# ---- the waits ----------------------------------------------------------------------------------------------------


class Setting(NamedTuple):
    """A way to train, and the waits that its results need: starts of their names."""

    world: int
    case: dict[str, Any]
    waits: tuple[str, ...]


SETTINGS = {
    "sharded": Setting(
        2,
        {"stage": 1},
        (
            "exchange.run.BucketBuffers.wait: ",
            "exchange.run.Exchange.wait: buffers.wait()",
            "exchange.run.Exchange.wait_back: buffers.wait()",
            "step.PartitionStep._turn_around: self.exchange.wait(",
            "step.PartitionStep._finish: self.exchange.wait_back(",
        ),
    ),
    "offloaded": Setting(
        1,
        {"stage": 2, "offload": True},
        (
            "exchange.run.Exchange.wait: buffers.copied.wait()",
            "exchange.run.Exchange.wait_back: buffers.copied.synchronize()",
            "exchange.run.Staging.follow_the_computation: ",
            "exchange.run.Staging.beside_the_computation: ",
        ),
    ),
    "offloaded shards": Setting(2, {"stage": 3, "offload": True}, ("exchange.run.Exchange.send_back: ",)),
}
NO_RESULT = {
    "monitor": "measures time",
    "cli.try_": "waits for the user's command",
    "zero.live_trial": "measures time",
    "exchange.consensus": "waits for what other processes write",
    "zero.wrappers.stage3": "the copies are on the stream that uses them; keeps host memory until they have ended",
}
"""Modules whose waits do not decide about results, and why."""


def of_setting(setting: Setting) -> list[Wait]:
    return [wait for wait in all_waits() if str(wait).startswith(setting.waits)]


def test_every_wait_is_left_out_in_some_setting() -> None:
    left_out = {wait for setting in SETTINGS.values() for wait in of_setting(setting)}
    assert len(left_out) == sum(len(setting.waits) for setting in SETTINGS.values())
    assert {str(wait) for wait in all_waits() if wait.module not in NO_RESULT} == set(map(str, left_out))


def tensors_of(engine: Any) -> list[Tensor]:
    """All weights and states."""
    optimizer = engine.basic_optimizer
    found = [tensor for partition in optimizer.all_partitions for tensor in partition.tensors]
    found += [value for tensor in [*found] for value in optimizer.state[tensor].values()]
    for param in engine.module.parameters():
        found += [param, param.ds_tensor] if hasattr(param, "ds_tensor") else [param]
    return [tensor.data for tensor in found]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same bits; padding may be NaN."""
    return torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))


def stream_numbers(engine: Any) -> dict[str, int]:
    exchange = engine.basic_optimizer.exchange
    numbers = {"computing": 0, "network": torch.distributed.group.WORLD.stream.stream_id}
    if exchange.group is not None:
        numbers["network"] = exchange.group.stream.stream_id
    if exchange.staging is not None:
        numbers |= {"up": exchange.staging._up.stream_id, "down": exchange.staging._down.stream_id}
    return numbers


HELD_STREAMS: list[tuple[str, ...]] = [
    ("computing",),
    ("up", "down", "network"),
    ("computing", "up", "down", "network"),
]
"""Streams that run as late as they may while all others run at once; each race shows in one of these."""


def shown(waits: list[Wait], **case: Any) -> tuple[list[bool], dict[str, bool]]:
    """Whether a step with those streams held gives the right bits; text of a wait -> whether it does without it."""
    engine = make_engine(MODELS["mlp"](), ds_config(optimizer=SECTION, dtype="bf16", **case))
    train_engine(engine, 1)
    torch.accelerator.synchronize()
    assert len(engine.basic_optimizer.plans[0].buckets) > 2
    numbers, kept = stream_numbers(engine), [tensor.clone() for tensor in tensors_of(engine)]
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    share = [part.to(engine.device) for part in make_batch(engine.module, 1, 0, rank, world, 1)]

    def step(held: tuple[str, ...]) -> list[Tensor]:
        for tensor, value in zip(tensors_of(engine), kept, strict=True):
            tensor.copy_(value)
        engine.backward(engine(*share))
        with late_device.paces(PROMPT, {numbers[name]: HELD for name in held if name in numbers}):
            engine.step()
            result = [tensor.clone() for tensor in tensors_of(engine)]
        return [tensor.cpu().contiguous() for tensor in result]

    def is_right(held: tuple[str, ...]) -> bool:
        result = torch.tensor(float(all(map(same_bits, step(held), expected))))
        torch.distributed.all_reduce(result, torch.distributed.ReduceOp.MIN)
        return bool(result)

    expected = step(())
    with_all = [is_right(held) for held in HELD_STREAMS]
    found = {}
    for wait in waits:
        with without(wait):
            found[str(wait)] = all(is_right(held) for held in HELD_STREAMS)
    with_all.append(is_right(()))
    engine.destroy()
    return with_all, found


@pytest.mark.parametrize("name", SETTINGS)
def test_a_step_needs_each_of_its_waits(name: str, late: Run) -> None:
    setting = SETTINGS[name]
    with_all, found = late(shown, setting.world, waits=of_setting(setting), **setting.case)[0]
    assert all(with_all)
    assert not [wait for wait, is_right in found.items() if is_right], "the bits are right without them"


# ---- overlap ------------------------------------------------------------------------------------------------------


def begun_for(awaited: tuple[str, int], **case: Any) -> set[tuple[str, int]]:
    """What has begun in a step, as (what, bucket), when the host has waited for one of them and for nothing after it.

    To `send`, to `compute` or to `return` a bucket.
    """
    from deepspeed.muon.exchange.run import Exchange
    from deepspeed.muon.step import PartitionStep

    engine = make_engine(MODELS["mlp"](), ds_config(optimizer=SECTION, dtype="bf16", **case))
    train_engine(engine, 1)
    staging, begun = engine.basic_optimizer.exchange.staging, list[set[tuple[str, int]]]()
    places = {
        "send": (Exchange, "send", staging._up),
        "compute": (PartitionStep, "_orthogonalize", late_device.current_stream()),
        "return": (Exchange, "send_back", staging._down),
    }
    with pytest.MonkeyPatch.context() as patch, late_device.paces(HELD):
        for what, (kind, method, stream) in places.items():

            def call(self: Any, *args: Any, what: str = what, stream: Any = stream, original: Any = None) -> None:
                with late_device.on(stream):
                    torch.ops.late.mark(f"{what} {args[-1].index}")
                original(self, *args)
                if (what, args[-1].index) == awaited:
                    stream.synchronize()
                    names = [name.split() for _, name in late_device.taken_log()]
                    begun.append({(name[0], int(name[1])) for name in names if name[0] in places})

            patch.setattr(kind, method, partialmethod(call, original=getattr(kind, method)))
        torch.ops.late.set_logging(True)
        train_engine(engine, 1, first_step=1)
    torch.ops.late.set_logging(False)
    late_device.taken_log()
    engine.destroy()
    return begun[0]


@pytest.mark.parametrize(("world", "stage"), [(1, 2), (2, 3)])
def test_a_bucket_travels_beside_the_computation_of_another(world: int, stage: int, late: Run) -> None:
    """The computation of 1 waits for no copy of 2 or 0 that was queued before it, and the copies of 2 for none of 0."""
    case = {"stage": stage, "offload": True}
    copied = {("send", 0), ("send", 1)}
    assert late(begun_for, world, awaited=("compute", 1), **case)[0] == copied | {("compute", 0), ("compute", 1)}
    assert late(begun_for, world, awaited=("send", 2), **case)[0] == copied | {("send", 2)}
