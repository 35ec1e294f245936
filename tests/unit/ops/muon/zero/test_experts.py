# SPDX-License-Identifier: Apache-2.0
"""Experts on ranks of their own, by DeepSpeed's MoE layers and by AutoEP: groups, batches, and what is refused."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed.muon import MuonWithAuxAdam
from deepspeed.muon.errors import UnsupportedError
from deepspeed.muon.zero.refusals import refuse_engine
from deepspeed.muon.zero.wrappers.grids import shard_group
from helpers.distributed import run, run_each
from helpers.experts import Mixtral, autoep, cut_experts, spread_model
from helpers.models import without_head_
from helpers.refusals import Refusal, attempt
from helpers.training import ds_config, make_engine
from helpers.transformers_models import needs_stacks

# ---- parameter groups ---------------------------------------------------------------------------------------------


def marked(net: nn.Module, group: str) -> nn.Module:
    """The module with DeepSpeed's marks of experts on all its parameters."""
    for param in net.parameters():
        param.allreduce, param.group_name = False, group
    return net


def test_experts_get_groups_of_their_own() -> None:
    net = nn.ModuleList([nn.Linear(4, 4), *(marked(nn.Linear(4, 4), name) for name in ("ep_size_2", "ep_size_4"))])
    given = [{"params": list(net.parameters()), "lr": 0.5, "name": "all"}]
    optimizer = MuonWithAuxAdam(given, model=net, lr=0.1, adam_lr=0.2)
    found = [(g["name"], g.get("moe", False), g["use_muon"], len(g["params"])) for g in optimizer.param_groups]
    halves = [(name, True, muon, 1) for name in ("ep_size_2", "ep_size_4") for muon in (True, False)]
    assert found == [("all-muon", False, True, 1), ("all-adam", False, False, 1), *halves]
    assert {group["lr"] for group in optimizer.param_groups} == {0.5}
    assert [len(group["params"]) for group in optimizer.given.param_groups] == [6]
    optimizer.given.param_groups[0]["lr"] = 0.25
    assert {group["lr"] for group in optimizer.param_groups} == {0.25}


# ---- thousands of small matrices ------------------------------------------------------------------------------

COUNT, ROWS, COLS = 2048, 16, 12


class Many(nn.Module):
    """Equal experts, as one parameter or each with its own."""

    def __init__(self, is_stack: bool) -> None:
        super().__init__()
        self.experts = nn.Module() if is_stack else nn.ModuleList(nn.Linear(COLS, ROWS, False) for _ in range(COUNT))
        if is_stack:
            self.experts.w1 = nn.Parameter(torch.zeros(COUNT, ROWS, COLS))
        without_head_(self)


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


# ---- refusals ---------------------------------------------------------------------------------------------------


def refuse_to_load() -> Refusal | None:
    engine = make_engine(spread_model(), ds_config(checkpoint={"load_universal": True}))
    return attempt(lambda: engine.load_checkpoint("nowhere"))


def test_universal_checkpoints_are_refused() -> None:
    """By the load: the key changes nothing before."""
    for kind, text, _ in run(refuse_to_load, 2):
        assert kind == "UnsupportedError" and "checkpoint.load_universal" in text


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


def ranks_of_groups(stage: int, width: int) -> tuple[list[tuple[bool, int]], list[int]]:
    """Of each parameter group whether it is of experts and how many ranks divide it; how many share work on experts."""
    engine = make_engine(spread_model(width), ds_config(stage=stage, clip=0.0))
    optimizer = engine.basic_optimizer
    groups = optimizer.param_groups
    found = [(group.get("moe", False), dist.get_world_size(shard_group(engine, group))) for group in groups]
    shared = [p for p in optimizer.partitions if groups[p.index].get("moe") and p.is_replicated]
    engine.destroy()
    return found, [partition.world_size for partition in shared]


@pytest.mark.parametrize(("stage", "width", "sharing"), [(0, 96, [2]), pytest.param(2, 11, [], marks=pytest.mark.full)])
def test_experts_are_divided_among_the_ranks_that_have_them(stage: int, width: int, sharing: list[int]) -> None:
    """At stage 0, where all have the state, those ranks share the work."""
    groups = [(False, 4), (False, 4), (True, 2), (True, 2)]
    assert run(ranks_of_groups, 4, stage=stage, width=width) == [(groups, sharing)] * 4


# ---- with other parallelism --------------------------------------------------------------------------------


@pytest.mark.full
def test_experts_that_are_cut_are_refused() -> None:
    name = "1.layer.deepspeed_moe.experts.deepspeed_experts.0.up.weight"
    for kind, text, _ in run(cut_experts, 4):
        assert kind == "UnsupportedError"
        assert f"tensor parallelism splits 4 matrices of experts (first: {name})" in text


# ---- AutoEP ------------------------------------------------------------------------------------------------


def train_with_given(kind: str) -> Refusal | None:
    """What is refused of an optimizer of the script's."""
    net, config = Mixtral(), autoep(2, 2)
    build = partial(MuonWithAuxAdam, model=net, **config.pop("optimizer")["params"])
    given = build(net.parameters()) if kind == "built before" else build
    return attempt(lambda: make_engine(net, config, optimizer=given, model_parameters=list(net.parameters())))


@needs_stacks
def test_an_optimizer_of_the_script() -> None:
    accepted, refused = run_each(train_with_given, 2, [{"kind": "function"}, {"kind": "built before"}])
    assert accepted == [None, None]
    assert all("DeepSpeed replaced parameters" in text for _, text, _ in refused)
