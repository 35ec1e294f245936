# SPDX-License-Identifier: Apache-2.0
"""The forecast is what the live engine binds: routes, plans, owners, state, traffic; its sums are the planner's."""

import dataclasses
import json
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed.muon.cli import main
from deepspeed.muon.cli.forecast import (
    GroupSpec,
    estimate,
    lay_out,
    per_rank,
    step_operations,
)
from deepspeed.muon.config.schema import parse
from deepspeed.muon.exchange.memory import Memory, peak
from deepspeed.muon.math.newton_schulz import method_of
from deepspeed.muon.zero.read_config import Layout
from helpers.distributed import run
from helpers.forecasts import STEPS, bound, check_against_the_engine, forecast
from helpers.paths import ROOT
from helpers.plans import counted_cost, demand_of, make_plan, specs
from helpers.training import FP32_GRADIENTS, with_params

GPU = Memory(wire="bf16", dtype="bf16", device_type="cuda")
CASES: list[tuple[str, Layout, dict[str, Any]]] = [
    *((model, Layout(stage, world), {}) for model in ("mlp", "gpt") for stage in (1, 2, 3) for world in (1, 2, 3)),
    *((model, Layout(stage, 3), {}) for model in ("tied", "frozen", "few") for stage in (0, 2, 3)),
    # The last sub-group is filled exactly, by a matrix of 36 x 12.
    *(("gpt", Layout(3, 2, sub_group_size=n), {"zero": {"sub_group_size": n}}) for n in (20, 150, 216)),
    ("gpt", Layout(2, 3, round_robin=True), {"zero": {"round_robin_gradients": True}}),
    ("mlp", Layout(1, 3, alignment=4), {"zero": {"parameter_alignment": True}}),
    *(
        ("gpt", Layout(stage, 2), {"optimizer": with_params(**changed)})
        for stage in (0, 1, 3)
        for changed in ({"momentum_dtype": "bf16"}, {"momentum_dtype": "int8"}, {"normuon": True})
    ),
    ("gpt", Layout(1, 2), {"dtype": "bf16", **FP32_GRADIENTS}),
    ("gpt", Layout(2, 2), {"dtype": "bf16", "offload": True}),
]


@pytest.mark.sample(8)
@pytest.mark.parametrize(("model", "layout", "config"), CASES, ids=str)
def test_the_engine_binds_what_was_forecast(model: str, layout: Layout, config: dict[str, Any]) -> None:
    wrappers = check_against_the_engine(model, layout, **config)
    assert (wrappers == {"BF16_Optimizer"}) is ("data_types" in config)
    assert len(forecast(model, layout)[1]) > 1 or "sub_group_size" not in config.get("zero", {})


# ---- public models --------------------------------------------------------------------------------------

#: The widths are those of the published models; there are fewer layers, experts and words.
FEW: dict[str, dict[str, Any]] = {
    "qwen3_0.6b": {"num_hidden_layers": 2, "vocab_size": 1024},
    "olmoe_1b_7b": {"num_hidden_layers": 1, "num_experts": 8, "vocab_size": 1024},
    "moonlight_16b_a3b": {"num_hidden_layers": 2, "n_routed_experts": 8, "vocab_size": 1024},
    "qwen3_next_80b_a3b": {"num_hidden_layers": 4, "num_experts": 16, "vocab_size": 1024},
    "qwen2.5_vl_3b": {"num_hidden_layers": 1, "vocab_size": 1024, "vision_config": {"depth": 2}},
}


ROUTE = ("shape", "rule", "blocks", "owners")


def smaller(name: str, folder: Path) -> Path:
    """The public config with fewer layers, in a file."""
    config = json.loads((ROOT / "examples" / "plan" / f"{name}.json").read_text())
    for key, value in FEW[name].items():
        config[key] = config[key] | value if isinstance(value, dict) else value
    (folder / "config.json").write_text(json.dumps(config))
    return folder / "config.json"


@pytest.mark.sample(1)
@pytest.mark.time_limit(500)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", FEW)
def test_the_command_plans_what_an_engine_binds(
    name: str, stage: int, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """The same routes, owners and matrices, and bytes within 1 %."""
    import_module("transformers.modeling_utils")  # it keeps what it finds in torch.nn.init, which the command empties
    model, optimizer = str(smaller(name, tmp_path)), with_params(ns_dtype="bf16", ns_method="gram")
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": optimizer, "zero_optimization": {"stage": stage}}
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    flags = ["--config", str(tmp_path / "ds_config.json"), "--model", model, "--world-size", "2"]
    assert main.main(["plan", *flags, "--all", "--json", "--device", "cpu"]) == 0
    planned = json.loads(capsys.readouterr().out)
    ranks = run(bound, 2, timeout=400, model=model, stage=stage, optimizer=optimizer)
    rows = {row["name"]: row for row in planned["parameters"]}
    for facts in ranks:
        assert facts["routes"] == {name: {key: row[key] for key in ROUTE} for name, row in rows.items()}
        assert all(rows[name]["reason"].startswith(reason) for name, reason in facts["reasons"].items())
    for key, found in (
        ("state", [facts["state"] for facts in ranks]),
        ("sent", [sum(facts["sent"]) for facts in ranks]),
    ):
        of_ranks = {"mean": sum(found) / 2, "max": max(found)}
        assert {kind: planned["per_rank"][f"{key}_bytes"][kind] for kind in of_ranks} == pytest.approx(
            of_ranks, rel=0.01
        )
    for row, nbytes in ranks[0]["memory"].items():
        if nbytes is not None:  # gradients are a tensor at stage 3 only
            assert planned["memory"]["rows"]["muon"][row] == pytest.approx(nbytes, rel=0.01), row
    assert (planned["per_rank"]["sent_bytes"]["max"] > 0) or stage == 2, "there the matrices may lie whole on a rank"


# ---- without an engine ----------------------------------------------------------------------------------


def group(shapes: list[tuple[int, int]], split: bool = False) -> GroupSpec:
    """A Muon group of matrices of these shapes, each one block or two."""
    return GroupSpec(use_muon=True, specs=tuple(specs(shapes, split)))


shape = st.tuples(st.integers(1, 9), st.integers(1, 9))


@settings(max_examples=100, deadline=None)
@given(
    shapes=st.lists(shape, min_size=1, max_size=9),
    world_size=st.integers(1, 12),
    stage=st.sampled_from([1, 3]),
    split=st.booleans(),
    alignment=st.integers(1, 4),
    sub_group=st.integers(1, 40),
    bucket_bytes=st.sampled_from([None, 1, 60]),
)
def test_sums_and_memory_of_all_ranks_are_those_of_the_plans(
    shapes: list[tuple[int, int]],
    world_size: int,
    stage: int,
    split: bool,
    alignment: int,
    sub_group: int,
    bucket_bytes: int | None,
) -> None:
    """Memory: exactly where each bucket of an owner has one matrix, else no less."""
    groups, layout = [group(shapes, split)], Layout(stage, world_size, sub_group, alignment=alignment)
    found = estimate(groups, layout, parse({"bucket_bytes": bucket_bytes} if bucket_bytes else {}), GPU)
    parts: list[list[Any]] = [[] for _ in range(world_size)]
    for step, part in zip(found.costs, lay_out(groups, layout), strict=True):
        cost = counted_cost("auto", STEPS, "bf16", 2, "cuda")
        plans = [make_plan(part.shards, rank, world_size, cost, bucket_bytes) for rank in range(world_size)]
        for rank, plan in enumerate(plans):
            parts[rank].append(demand_of(plan, partial(method_of, ns_method="auto", schedule=STEPS, dtype="bf16")))
            assert plan.slots(plan.travels(staged=False)) == step.slots
            for demand, planned in zip(step.demands[rank], parts[rank][-1].demands, strict=True):
                assert (demand.batches, demand.buffers) >= (planned.batches, planned.buffers)
                if bucket_bytes == 1:
                    assert (demand.batches, demand.buffers) == (planned.batches, planned.buffers)
        assert [plan.sent_elements * 2 for plan in plans] == step.sent_bytes
        assert (step.plan.owners, len(step.plan.buckets)) == (plans[0].owners, len(plans[0].buckets))
        batches = [[b for bucket in plan.buckets for b in bucket.batches] for plan in plans]
        assert step.flops == [sum(b.count * cost.flops(b.rows, b.cols) for b in owned) for owned in batches]
    peaks = [peak(of_rank, GPU).total for of_rank in parts]
    assert found.peak.total >= max(peaks)
    if bucket_bytes == 1:
        assert found.peak.total == max(peaks)


def test_stage_0_sends_nothing_and_repeats_newton_schulz() -> None:
    found = estimate([group([(8, 8), (8, 16)])], Layout(0, 4), parse({}), GPU)
    facts = per_rank(found)
    assert facts["sent_bytes"] == {"mean": 0.0, "max": 0.0, "least_mean": 0.0}
    gflop = facts["newton_schulz_gflop"]
    assert gflop["mean"] == gflop["max"] == sum(found.costs[0].flops) / 1e9 > 0


def test_each_part_waits_for_its_own_busiest_rank() -> None:
    """Each of two ranks does all of one part: nobody has more work, and yet a step takes twice the mean."""
    found = estimate([group([(8, 8)]), group([(8, 8)])], Layout(3, 2), parse({}), GPU)
    first, second = found.costs
    costs = [dataclasses.replace(first, flops=[6.0, 0.0]), dataclasses.replace(second, flops=[0.0, 6.0])]
    assert per_rank(dataclasses.replace(found, costs=costs))["imbalance"] == 2.0


def test_operations_of_a_step_on_an_accelerator() -> None:
    """Whole products; of exchange and Newton-Schulz, the shorter hides but for a bucket."""
    muon, m = group([(8192, 8192)] * 4), 8192
    found = estimate([muon], Layout(3, 2), parse({}), GPU)
    step, (cost,) = step_operations(found, STEPS, GPU), found.costs
    computed, exchange = 2 * (20 + 10) * m**3, 8000 * 2 * 2 * m * m + 2 * 2 * 8e9
    assert (len(cost.plan.buckets), max(cost.sent_bytes)) == (2, 2 * 2 * m * m) and exchange < computed
    assert step == {"newton_schulz": computed, "communication": pytest.approx(exchange / 2)}
