# SPDX-License-Identifier: Apache-2.0
"""``ds_muon plan`` of public models against an engine: the same routes, owners and matrices, bytes within 1 %.

The widths are those of the published models; layers, experts and vocabulary are fewer, so that two ranks can hold them.
The collectives of a step break no rule on as many ranks as the models are trained on.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.scaling import GPU, MODELS, PLAIN
from deepspeed.muon.cli import main
from deepspeed.muon.cli.model import build
from deepspeed.muon.forecast.estimate import estimate, prove
from deepspeed.muon.forecast.layout import Layout, halves_of
from helpers.distributed import run
from helpers.paths import ROOT

FEW: dict[str, dict[str, Any]] = {
    "qwen3_0.6b": {"num_hidden_layers": 2, "vocab_size": 1024},
    "olmoe_1b_7b": {"num_hidden_layers": 1, "num_experts": 8, "vocab_size": 1024},
    "moonlight_16b_a3b": {"num_hidden_layers": 2, "n_routed_experts": 8, "vocab_size": 1024},
    "qwen3_next_80b_a3b": {"num_hidden_layers": 4, "num_experts": 16, "vocab_size": 1024},
    "qwen2.5_vl_3b": {"num_hidden_layers": 1, "vocab_size": 1024, "vision_config": {"depth": 2}},
}
OPTIMIZER = {"type": "Muon", "params": {"lr": 1e-3, "weight_decay": 0.1, "ns_dtype": "bf16", "ns_method": "gram"}}


def smaller(name: str, folder: Path) -> Path:
    """The public config with fewer layers, in a file."""
    config = json.loads((ROOT / "examples" / "plan" / f"{name}.json").read_text())
    for key, value in FEW[name].items():
        config[key] = config[key] | value if isinstance(value, dict) else value
    (folder / "config.json").write_text(json.dumps(config))
    return folder / "config.json"


def bound_by_an_engine(model: str, config: dict[str, Any]) -> dict[str, Any]:
    """Routes, and what this rank has allocated and sends."""
    import torch
    import transformers

    import deepspeed

    settings = transformers.AutoConfig.from_pretrained(model)
    causal = type(settings) in transformers.AutoModelForCausalLM._model_mapping
    kind = transformers.AutoModelForCausalLM if causal else transformers.AutoModel
    net = kind.from_config(settings).float()
    engine = deepspeed.initialize(model=net, config=config, model_parameters=net.parameters())[0]
    optimizer = engine.basic_optimizer
    states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    owners: dict[str, set[int]] = {}
    for plan, partition in zip(optimizer.plans, optimizer.partitions, strict=True):
        for block, owner in zip(partition.blocks, plan.of_all.owners, strict=True):
            owners.setdefault(block.shard.spec.name, set()).add(owner)
    facts = {
        "routes": {
            spec.name: (list(spec.shape), "Muon" if spec.use_muon else "AdamW", len(spec.blocks), spec.reason)
            for spec in optimizer.specs.values()
        },
        "owners": {name: sorted(of_it) for name, of_it in owners.items()},
        "state": sum(tensor.nbytes for tensor in states),
        "sent": sum(plan.sent_elements for plan in optimizer.plans) * optimizer.exchange.dtype.itemsize,
    }
    engine.destroy()
    return facts


@pytest.mark.sample(1)
@pytest.mark.time_limit(500)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", FEW)
def test_the_plan_is_what_an_engine_binds(name: str, stage: int, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    model = smaller(name, tmp_path)
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": OPTIMIZER, "zero_optimization": {"stage": stage}}
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    flags = ["--config", str(tmp_path / "ds_config.json"), "--model", str(model), "--world-size", "2"]
    assert main.main(["plan", *flags, "--all", "--json", "--device", "cpu"]) == 0
    planned = json.loads(capsys.readouterr().out)
    ranks = run(bound_by_an_engine, 2, timeout=400, model=str(model), config=config)
    rows = {row["name"]: row for row in planned["parameters"]}
    for facts in ranks:
        assert facts["routes"].keys() == rows.keys()
        for key, (*route, reason) in facts["routes"].items():
            row = rows[key]
            assert [row["shape"], row["rule"], row["blocks"]] == route and row["reason"].startswith(reason)
            assert row["owners"] == facts["owners"].get(key, [])
    for key, of_ranks in (("state_bytes", "state"), ("sent_bytes", "sent")):
        found = [facts[of_ranks] for facts in ranks]
        assert planned["per_rank"][key]["max"] == pytest.approx(max(found), rel=0.01)
        assert planned["per_rank"][key]["mean"] == pytest.approx(sum(found) / 2, rel=0.01)
    assert (planned["per_rank"]["sent_bytes"]["max"] > 0) or stage == 2, "there the matrices may lie whole on a rank"


#: By model, the most ranks at stages 0, 1 and 3: what the plans of all ranks take to list.
JOBS = {
    "llama3-8b": {0: 64, 1: 4096, 3: 512},
    "llama3-70b": {0: 8, 1: 4096, 3: 256},
    "moe-1t": {1: 256, 3: 16},
}


@pytest.mark.full
@pytest.mark.time_limit(900)
@pytest.mark.parametrize("model", JOBS)
def test_published_models_break_no_rule(model: str, record_property: Any) -> None:
    halves = halves_of(build(MODELS[model].source), PLAIN)
    for stage, world in JOBS[model].items():
        proof = prove(estimate(halves, Layout(stage, world), PLAIN, GPU), PLAIN, GPU)
        assert proof["fault"] is None and proof["ranks"] == world
        told = f"{proof['operations']:,} operations on {world:,} ranks, in {proof['seconds']:.1f} s"
        record_property("summary", f"{model}, stage {stage}: {told}")
