# SPDX-License-Identifier: Apache-2.0
"""Experts on ranks of their own: groups, batches, bad gradients, and what is refused."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed.muon import MuonWithAuxAdam
from deepspeed.muon.errors import UnsupportedError
from deepspeed.muon.matrices.routing import route
from deepspeed.muon.plan.placement import Placement, Shard
from deepspeed.muon.zero.refusals import refuse_engine
from deepspeed.muon.zero.wrappers.experts import expert_counts, shard_group
from helpers.distributed import run
from helpers.experts import spread_model
from helpers.plans import cubic_cost, make_plan
from helpers.training import ds_config, make_engine

# ---- parameter groups ---------------------------------------------------------------------------------------------


def marked(net: nn.Module, group: str) -> nn.Module:
    """The module with DeepSpeed's marks of experts on all its parameters."""
    for param in net.parameters():
        param.allreduce, param.group_name = False, group
    return net


def test_experts_get_groups_of_their_own() -> None:
    net = nn.Sequential(nn.Linear(4, 4), *(marked(nn.Linear(4, 4), name) for name in ("ep_size_2", "ep_size_4")))
    given = [{"params": list(net.parameters()), "lr": 0.5, "name": "all"}]
    optimizer = MuonWithAuxAdam(given, model=net, lr=0.1, adam_lr=0.2)
    found = [(g["name"], g.get("moe", False), g["use_muon"], len(g["params"])) for g in optimizer.param_groups]
    halves = [(name, True, muon, 1) for name in ("ep_size_2", "ep_size_4") for muon in (True, False)]
    assert found == [("all-muon", False, True, 1), ("all-adam", False, False, 1), *halves]
    assert {group["lr"] for group in optimizer.param_groups} == {0.5}
    assert [len(group["params"]) for group in optimizer.given.param_groups] == [6]
    optimizer.given.param_groups[0]["lr"] = 0.25
    assert {group["lr"] for group in optimizer.param_groups} == {0.25}


def test_groups_that_stock_has_split_keep_its_marks() -> None:
    net = nn.Sequential(nn.Linear(4, 4), marked(nn.Linear(4, 4), "ep_size_2"))
    given = [{"params": list(net[0].parameters()), "name": "dense-params"}]
    given += [{"params": list(net[1].parameters()), "name": "ep_size_2", "moe": True, "lr": 0.5}]
    optimizer = MuonWithAuxAdam(given, model=net, lr=0.1)
    assert [(g["name"], g.get("moe", False), g["lr"]) for g in optimizer.param_groups] == [
        ("dense-params-muon", False, 0.1),
        ("dense-params-adam", False, 0.1),
        ("ep_size_2", True, 0.5),
        ("ep_size_2", True, 0.5),
    ]


# ---- thousands of small matrices ------------------------------------------------------------------------------

COUNT, ROWS, COLS = 2048, 16, 12


class Many(nn.Module):
    """Equal experts, as one parameter or each with its own."""

    def __init__(self, is_stack: bool) -> None:
        super().__init__()
        self.experts = nn.Module() if is_stack else nn.ModuleList(nn.Linear(COLS, ROWS, False) for _ in range(COUNT))
        if is_stack:
            self.experts.w1 = nn.Parameter(torch.zeros(COUNT, ROWS, COLS))


@pytest.mark.parametrize("is_stack", [True, False])
def test_thousands_of_equal_matrices_go_through_few_calls(is_stack: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    net, calls = Many(is_stack), []
    optimizer = MuonWithAuxAdam(net.parameters(), model=net, lr=0.1)
    for param in net.parameters():
        param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr("deepspeed.muon.step.orthogonalize", lambda x, *_, **__: calls.append(tuple(x.shape)))
    optimizer.step()
    assert len(calls) <= 2
    assert sum(count for count, _, _ in calls) == COUNT and {shape[1:] for shape in calls} == {(ROWS, COLS)}


@pytest.mark.full
@pytest.mark.parametrize("is_stack", [True, False])
def test_thousands_of_equal_matrices_are_few_batches_on_every_rank(is_stack: bool) -> None:
    world, specs = 4, list(route(Many(is_stack)).values())
    offsets = [index * specs[0].numel for index in range(len(specs))]
    span = COUNT * ROWS * COLS // world
    shards = [Shard(spec, 0, Placement(at, span, 0)) for spec, at in zip(specs, offsets, strict=True)]
    cost = cubic_cost(30.0)
    plans = [make_plan(shards, rank, world, cost) for rank in range(world)]
    batches = [[batch.count for bucket in plan.buckets for batch in bucket.batches] for plan in plans]
    assert sum(map(sum, batches)) == COUNT
    assert max(map(len, batches)) <= 2


# ---- gradients that are not finite -----------------------------------------------------------------------------


# ---- refusals ---------------------------------------------------------------------------------------------------


def refuse_to_load(**config: Any) -> str:
    """What a load says; the key alone changes nothing."""
    engine = make_engine(spread_model(), ds_config(**config))
    with pytest.raises(UnsupportedError) as error:
        engine.load_checkpoint("nowhere")
    engine.destroy()
    return str(error.value)


def test_universal_checkpoints_are_refused() -> None:
    for text in run(refuse_to_load, 2, stage=2, checkpoint={"load_universal": True}):
        assert text.startswith("checkpoint.load_universal: DeepSpeed's converter does not know deepspeed.moe layers")


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"sequence_parallel_size": 2}, "deepspeed.moe layers with sequence parallelism"),
        ({"autotp_size": lambda: 2}, "deepspeed.moe layers with AutoTP"),
    ],
    ids=["sequence", "AutoTP"],
)
def test_other_parallelism_beside_experts_is_refused(other: dict[str, Any], text: str) -> None:
    mpu = SimpleNamespace(get_sequence_data_parallel_group=None, initialize_sequence_parallel=None)
    plain: dict[str, Any] = {"pipeline_parallelism": False, "sequence_parallel_size": 1, "mpu": mpu}
    plain |= {"load_universal_checkpoint": bool, "autotp_size": lambda: 1}
    plain |= {"has_moe_layers": True, "moe_layers": [nn.Module()], "torch_autocast_enabled": bool}
    plain |= {"seq_dp_world_size": 1, "world_size": 1}
    refuse_engine(SimpleNamespace(**plain))
    with pytest.raises(UnsupportedError, match=text):
        refuse_engine(SimpleNamespace(**plain | other))


# ---- the ranks of a group -----------------------------------------------------------------------------------------


def ranks_of_groups() -> tuple[list[tuple[bool, int]], list[str]]:
    """Of each parameter group whether it is of experts and how many ranks divide it; what the log says."""
    engine = make_engine(spread_model(), ds_config())
    optimizer = engine.basic_optimizer
    found = [(g.get("moe", False), dist.get_world_size(shard_group(engine, g))) for g in optimizer.param_groups]
    words = expert_counts(engine, optimizer)
    engine.destroy()
    return found, words


def test_experts_are_divided_among_the_ranks_that_have_them() -> None:
    expected = [(False, 4), (False, 4), (True, 2), (True, 2)]
    assert run(ranks_of_groups, 4) == [(expected, ["4 of them are experts shared by 2 ranks"])] * 4
