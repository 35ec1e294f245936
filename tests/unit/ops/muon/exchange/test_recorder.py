# SPDX-License-Identifier: Apache-2.0
"""What ranks call is recorded as they call it, and a step calls what its program says."""

from typing import Any

import pytest
import torch

from deepspeed.muon.exchange.collective_recorder import CollectiveRecorder
from deepspeed.muon.plan.program import Collective, collectives_of
from helpers.distributed import RankError, run
from helpers.training import PARAMS, FixedGradients, ds_config, make_engine

Facts = tuple[str, tuple[int, ...], str, int, int | None, tuple[int, ...], tuple[int, ...]]


def facts(call: Collective) -> Facts:
    return call.kind, tuple(call.group.ranks), call.dtype, call.numel, call.root, call.sent, call.received


def every_collective() -> list[Facts]:
    """Of two ranks."""
    import torch.distributed as dist

    rank, recorder = dist.get_rank(), CollectiveRecorder()
    x, wide = torch.ones(2), torch.ones(4)
    with recorder.recording():
        dist.all_reduce(x)
        dist.broadcast(x.bfloat16(), src=1)
        dist.all_gather_into_tensor(wide, x)
        dist.all_gather([torch.empty(2), torch.empty(2)], x)
        dist.reduce_scatter_tensor(x, wide)
        dist.all_to_all_single(torch.empty(4), wide)
        dist.all_to_all_single(
            torch.empty(3 + rank, 2), torch.ones(3 + rank, 2), [2 - rank, 1 + 2 * rank], [2 - rank, 1 + 2 * rank]
        )
        dist.gather(x, [torch.empty(2), torch.empty(2)] if rank == 0 else None, dst=0)
        dist.barrier()
        for _ in range(2):
            dist.new_group([0, 1])
    assert all(call.caller.startswith("exchange/test_recorder.py:") for call in recorder.calls)
    return [facts(call) for call in recorder.calls]


def test_every_kind_is_recorded_as_it_is_called() -> None:
    first, second = run(every_collective, 2)
    both, none = (0, 1), ((), ())
    assert first == [
        ("all_reduce", both, "fp32", 2, None, *none),
        ("broadcast", both, "bf16", 2, 1, *none),
        ("all_gather", both, "fp32", 2, None, *none),
        ("all_gather", both, "fp32", 0, None, (2, 2), (2, 2)),
        ("reduce_scatter", both, "fp32", 2, None, *none),
        ("all_to_all", both, "fp32", 4, None, *none),
        ("all_to_all", both, "fp32", 0, None, (4, 2), (4, 2)),
        ("gather", both, "fp32", 2, 0, *none),
        ("barrier", both, "", 0, None, *none),
        *[("new_group of ranks 0 to 1", both, "", 0, None, *none)] * 2,
    ]
    assert second[6] == ("all_to_all", both, "fp32", 0, None, (2, 6), (2, 6))
    assert second[:6] == first[:6] and second[7:] == first[7:]


def unlike_messages() -> None:
    import torch.distributed as dist

    if dist.get_rank() == 0:
        dist.send(torch.ones(4), 1)
    else:
        dist.recv(torch.ones(2, dtype=torch.float64), 0)


def test_messages_whose_ends_differ_fail_although_gloo_forgives_them() -> None:
    """What it forgives of collectives: test_program.py."""
    with pytest.raises(RankError, match=r"gloo does not: rank 0: send of 4 fp32 .*; rank 1: recv of 2 float64"):
        run(unlike_messages, 2, fresh=True)


# ---- a step -----------------------------------------------------------------------------------------------------

SHAPES = [(24, 48), (48, 24), (36, 36), (60, 24), (24, 48), (25, 35)]


def recorded_steps(params: dict[str, Any], **config: Any) -> tuple[list[Facts], list[Facts]]:
    """What this rank calls in two steps at the lines of the exchange, and what its programs say."""
    engine = make_engine(
        FixedGradients(SHAPES), ds_config(optimizer={"type": "Muon", "params": PARAMS | params}, **config)
    )
    recorder = CollectiveRecorder()
    for step in range(2):
        gradients = engine.module.gradients(step)
        engine.backward(engine(gradients))
        with recorder.recording():
            engine.step()
    files = ("deepspeed/muon/exchange/exchange.py:", "deepspeed/muon/exchange/owner_set.py:")
    called = [facts(call) for call in recorder.calls if call.caller.startswith(files)]
    bounds = engine.basic_optimizer._steps.values()
    planned = [facts(call) for bound in bounds for call in collectives_of(bound.program)]
    engine.destroy()
    return called, 2 * planned


JOBS: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (1, {}, {"stage": 1}),
    (2, {"bucket_bytes": 4096}, {"stage": 1}),
    (3, {"bucket_bytes": 4096}, {"stage": 2, "offload": True}),
    (2, {}, {"stage": 3, "zero": {"sub_group_size": 1000}}),
    (2, {"owners_per_matrix": 2, "wire_dtype": "bf16"}, {"stage": 3}),
    (4, {"owners_per_matrix": 4, "ns_dtype": "bf16", "ns_method": "gram"}, {"stage": 1}),
    (4, {"owners_per_matrix": 2, "ns_dtype": "bf16"}, {"stage": 0}),
]


@pytest.mark.sample(4)
@pytest.mark.parametrize(("world", "params", "config"), JOBS, ids=lambda value: str(value))
def test_a_step_calls_what_its_program_says(world: int, params: dict[str, Any], config: dict[str, Any]) -> None:
    for called, planned in run(recorded_steps, world, params=params, **config):
        assert called == planned
        assert bool(planned) == (world > 1)
