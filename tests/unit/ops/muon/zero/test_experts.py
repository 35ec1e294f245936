# SPDX-License-Identifier: Apache-2.0
"""Experts on ranks of their own, by DeepSpeed's MoE layers and by AutoEP: groups, batches, and what is refused."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed.muon import MuonWithAuxAdam
from deepspeed.muon.errors import UnsupportedError
from deepspeed.muon.matrices import routing
from deepspeed.muon.plan.placement import Placement, Shard
from deepspeed.muon.zero.refusals import refuse_engine
from deepspeed.muon.zero.wrappers.experts import expert_counts, shard_group
from helpers.distributed import run
from helpers.experts import Mixtral, WithExperts, autoep, global_name, spread_model
from helpers.experts_beside import beside_autoep, cut_experts, stock_on_sequences
from helpers.models import train_engine
from helpers.oracles import OracleResult, change_error, route, train_oracle
from helpers.plans import cubic_cost, make_plan
from helpers.training import ORACLE, PARAMS, ds_config, fp32_weights, make_engine
from helpers.transformers_models import needs_stacks

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
    monkeypatch.setattr(
        "deepspeed.muon.step.partition_step.orthogonalize", lambda x, *_, **__: calls.append(tuple(x.shape))
    )
    optimizer.step()
    assert len(calls) <= 2
    assert sum(count for count, _, _ in calls) == COUNT and {shape[1:] for shape in calls} == {(ROWS, COLS)}


@pytest.mark.full
@pytest.mark.parametrize("is_stack", [True, False])
def test_thousands_of_equal_matrices_are_few_batches_on_every_rank(is_stack: bool) -> None:
    world, specs = 4, list(routing.route(Many(is_stack)).values())
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


# ---- DeepSpeed's layers ------------------------------------------------------------------------------------


STEPS = 5
TO_ADAM = ["lm_head", "layer.deepspeed_moe.gate"]


def given_groups(net: nn.Module, how: str) -> dict[str, Any]:
    """Ways to hand the parameters to `deepspeed.initialize`."""
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    if how == "one group":
        return {"model_parameters": net.parameters()}
    if how == "unnamed groups":
        decayed = [[p for p in net.parameters() if (p.ndim > 1) is matrix] for matrix in (True, False)]
        return {"model_parameters": [{"params": params} for params in decayed]}
    if how == "client":
        return {"optimizer": MuonWithAuxAdam(net.parameters(), model=net, **PARAMS)}
    groups = split_params_into_different_moe_groups_for_optimizer({"params": list(net.parameters()), "name": "all"})
    return {"model_parameters": groups}


def train_spread(steps: int = STEPS, how: str = "one group", width: int = 11, **config: Any) -> dict[str, Any]:
    """Weights under the twin's names, and how many matrices of experts each rank computes for all that have them."""
    net = spread_model(width)
    settings = ds_config(**config)
    if how == "client":
        settings.pop("optimizer")
    engine = make_engine(net, settings, **given_groups(net, how))
    train_engine(engine, steps)
    weights = {global_name(name, dist.get_rank()): value for name, value in fp32_weights(engine).items()}
    groups = engine.basic_optimizer.param_groups
    shared = [p for p in engine.basic_optimizer.partitions if groups[p.index].get("moe") and p.is_replicated]
    engine.destroy()
    return {"weights": weights, "sharing": [partition.world_size for partition in shared]}


def reference(clip: float = 1.0, width: int = 11) -> OracleResult:
    """The oracle's training of the twin."""
    net = WithExperts(spread=False, width=width)
    return train_oracle(net, net.batch, STEPS, route(net, TO_ADAM), replace(ORACLE, clip=clip))


def assert_equal(found: list[dict[str, Any]], expected: OracleResult) -> None:
    """1e-3 of the change, on every rank for the experts that it has."""
    seen = set()
    for rank, result in enumerate(found):
        for name, weight in result["weights"].items():
            assert change_error(expected.initial[name], weight, expected.weights[name]) <= 1e-3, (rank, name)
        seen |= result["weights"].keys()
    assert seen == expected.weights.keys()


@pytest.mark.parametrize("how", ["unnamed groups", "client", "stock's groups"])
def test_however_the_parameters_are_given(how: str) -> None:
    assert_equal(run(train_spread, 4, stage=2, how=how), reference())


def test_ranks_that_have_the_same_experts_share_the_work_at_stage_0() -> None:
    found = run(train_spread, 4, stage=0, clip=0.0, width=96)
    assert [result["sharing"] for result in found] == [[2]] * 4
    assert_equal(found, reference(0.0, width=96))


# ---- with other parallelism --------------------------------------------------------------------------------


#: Ranks, model-parallel ranks and stages.
MPU, PIPELINE, BOTH = {"size": 2}, {"stages": 2}, {"size": 2, "stages": 2}


@pytest.mark.full
def test_experts_that_are_cut_are_refused() -> None:
    name = "1.layer.deepspeed_moe.experts.deepspeed_experts.0.up.weight"
    for kind, text, _ in run(cut_experts, 4):
        assert kind == "UnsupportedError"
        assert f"tensor parallelism splits 4 matrices of experts (first: {name})" in text


STOCK = {
    "mpu": "AutoEP does not currently support tensor model parallelism from mpu",
    "sequence": "AutoEP does not currently support tensor model parallelism from mpu",
    "pipeline": "AutoEP: no MoE layers detected",
}


@pytest.mark.full
@pytest.mark.parametrize("kind", STOCK)
def test_stock_refuses_autoep_beside_other_parallelism(kind: str) -> None:
    for name, text, _ in run(beside_autoep, 4, kind=kind):
        assert name == "ValueError" and STOCK[kind] in text


@pytest.mark.full
def test_stock_mixes_up_tokens_where_ranks_share_sequences() -> None:
    """The reason of the refusal: experts see other tokens, so that AdamW's first step has other signs."""
    net = WithExperts(spread=False)
    routing = dict.fromkeys(dict(net.named_parameters()), "adam")
    expected = train_oracle(net, net.batch, 1, routing, replace(ORACLE, clip=0.0, adam_weight_decay=0.01))
    for weights in run(stock_on_sequences, 4):
        errors = {n: change_error(expected.initial[n], w, expected.weights[n]) for n, w in weights.items()}
        assert max(error for name, error in errors.items() if "experts" in name) > 0.2, errors


# ---- AutoEP ------------------------------------------------------------------------------------------------


def routes(include: list[str] | None = None) -> dict[str, tuple[bool, str, str]]:
    """Where each parameter goes, why, and how it was split."""
    optimizer = {"type": "Muon", "params": PARAMS | ({"muon_exclude": include} if include else {})}
    engine = make_engine(Mixtral(), autoep(2, 2, optimizer=optimizer))
    found = {s.name: (s.use_muon, s.reason, s.split) for s in engine.basic_optimizer.specs.values()}
    engine.destroy()
    return found


@needs_stacks
def test_the_router_goes_to_adamw_and_experts_to_muon_one_by_one() -> None:
    found = run(routes, 2)[0]
    prefix = "model.layers.1.mlp."
    assert found[f"{prefix}router.gate.weight"] == (False, "MoE router, tied", "")  # stock keeps its old name beside
    for name, size in (("w1", "10 x 12"), ("w2", "12 x 10"), ("w3", "10 x 12")):
        reason = "stack of 2 matrices of GroupedExperts"
        assert found[f"{prefix}experts.{name}"] == (True, reason, f"2 of {size}")


@needs_stacks
def test_patterns_may_name_parameters_that_stock_has_put_in() -> None:
    found = run(routes, 2, include=[r"experts\.w3$"])[0]
    assert [name for name, (use_muon, *_) in found.items() if "experts" in name and not use_muon] == [
        f"model.layers.{layer}.mlp.experts.w3" for layer in (0, 1)
    ]


def train_with_given(kind: str) -> str | None:
    """Train two steps with an optimizer of the script's; what is refused."""
    net, config = Mixtral(), autoep(2, 2)
    params = config.pop("optimizer")["params"]

    def build(parameters: Any) -> MuonWithAuxAdam:
        return MuonWithAuxAdam(parameters, model=net, **params)

    given = build(net.parameters()) if kind == "built before" else build
    try:
        engine = make_engine(net, config, optimizer=given, model_parameters=list(net.parameters()))
    except UnsupportedError as error:
        return str(error)
    train_engine(engine, 2)
    engine.destroy()
    return None


@needs_stacks
def test_an_optimizer_of_the_script() -> None:
    assert run(train_with_given, 2, kind="function") == [None, None]
    for text in run(train_with_given, 2, kind="built before"):
        assert text is not None and "DeepSpeed replaced parameters" in text


# ---- beside AutoTP ------------------------------------------------------------------------------------------------
