# SPDX-License-Identifier: Apache-2.0
"""ds_configs as public projects have them: `ds_muon init`, `plan`, three steps, a resume, beside AdamW."""

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hjson
import pytest
import torch
from torch import Tensor

from helpers.distributed import run
from helpers.engine_state import differing
from helpers.logs import logged
from helpers.models import MODELS, full_weights, train_engine
from helpers.public_configs import configs, runnable
from helpers.training import fp32_weights

Command = Callable[..., Any]
CONFIGS = configs()
NAMES = list(CONFIGS)
PORTION = 10
"""Configs of one test, which one call trains."""
STEPS, MORE = 3, 2
#: Warnings of our log, and what a user can do about each.
WARNINGS = (
    "elastic_checkpoint is ignored",
    r"scheduler\.params\.\w+ = .* overrides .*; change \w+ to change the learning rate",
    r"zero_optimization\.sub_group_size cuts .* write \d+ or more",
)


def steps(engine: Any, count: int, first: int) -> list[list[float]]:
    """Train; the learning rate of every group before each step. A batch is repeated until its step is not skipped."""
    rates = []
    for step in range(first, first + count):
        rates.append([float(group["lr"]) for group in engine.basic_optimizer.param_groups])
        for _ in range(40):
            skipped = engine.skipped_steps
            train_engine(engine, 1, first_step=step)
            if engine.skipped_steps == skipped:
                break
    return rates


def engine_of(config: dict[str, Any]) -> Any:
    import deepspeed

    net = MODELS["mlp"]()
    config = copy.deepcopy(config)
    return deepspeed.initialize(model=net, config=config, model_parameters=net.parameters())[0]


def finish(engine: Any) -> None:
    import deepspeed.comm.comm

    engine.destroy()
    deepspeed.comm.comm.comms_logger.enabled = False  # DeepSpeed keeps it for engines that follow


def with_torchs_adamw(config: dict[str, Any]) -> dict[str, Any]:
    """The config without what needs DeepSpeed's own AdamW, which is compiled; torch's is the same."""
    optimizer = config.get("optimizer", {"type": "AdamW", "params": {"lr": 1e-3}})
    given = {k: v for k, v in optimizer.get("params", {}).items() if k not in ("bias_correction", "max_grad_norm")}
    numbers = {k: float(v) for k, v in given.items() if isinstance(v, str)}  # Muon reads strings too
    optimizer = optimizer | {"params": given | {"torch_adam": True} | numbers}
    return config | {"optimizer": optimizer, "zero_force_ds_cpu_optimizer": False}


def train(config: dict[str, Any], folder: str, is_muon: bool) -> dict[str, Any]:
    """Rates and warnings, which weights move, whether all are finite, and with Muon whether a resume has the same bits.

    Of AdamW the rate of the first group; what an exception says, if one is raised.
    """
    read = fp32_weights if is_muon else lambda engine: full_weights(engine.module)
    ends: list[tuple[Any, dict[str, Tensor]]] = []
    try:
        with logged(30) as warnings:
            engine = engine_of(config)
        before, rates, after = read(engine), steps(engine, STEPS, 0), read(engine)
        if is_muon:
            assert engine.save_checkpoint(folder)
            ends.append((steps(engine, MORE, STEPS), read(engine)))
            finish(engine)
            engine = engine_of(config)
            engine.load_checkpoint(folder)
            ends.append((steps(engine, MORE, STEPS), read(engine)))
        finish(engine)
    except (Exception, SystemExit) as error:
        return {"error": f"{type(error).__module__}.{type(error).__name__}: {error}"}
    resumes = all(rates == ends[0][0] and not differing(weights, ends[0][1]) for rates, weights in ends)
    moved = [name for name in before if not torch.equal(after[name], before[name])]
    finite = all(torch.isfinite(weight).all() for weight in after.values())
    return {"rates": rates, "warnings": warnings, "resumes": resumes, "moved": moved, "finite": finite}


def train_all(cases: list[tuple[dict, dict | str, str]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """What AdamW and Muon do with each pair of configs; a text is the refusal of a config."""
    return [
        (
            train(with_torchs_adamw(adamw), folder, False),
            {"error": muon} if isinstance(muon, str) else train(muon, f"{folder}/checkpoints", True),
        )
        for adamw, muon, folder in cases
    ]


def converted(name: str, folder: Path, ds_muon: Command) -> dict[str, Any] | str:
    """What init prints for a config, once plan has accepted it; a refusal as text."""
    file, out = folder / f"ds.{CONFIGS[name]['suffix']}", folder / "muon.json"
    file.write_text(CONFIGS[name]["text"])
    found = ds_muon("init", "--config", file)
    if found.status:
        return found.err
    out.write_text(found.out)
    plan = ("--config", out, "--model", "helpers.models:Mlp", "--world-size", 2, "--device", "cpu")
    planned = ds_muon("plan", *plan)
    assert planned.status == 0, f"{name}: {planned.err}"
    return hjson.loads(found.out, object_pairs_hook=dict)


def surprises(adamw: dict[str, Any], muon: dict[str, Any]) -> list[str]:
    """What a user of AdamW would not expect."""
    if "error" in adamw:
        return []
    if "error" in muon:
        return [muon["error"]]
    found = [] if muon["finite"] or not adamw["finite"] else ["not finite"]
    found += [f"{name} does not move" for name in adamw["moved"] if name not in muon["moved"]]
    found += [] if muon["resumes"] else ["a resumed run has other bits"]
    expected = [rate for (rate, *_), groups in zip(adamw["rates"], muon["rates"], strict=True) for _ in groups]
    rates = [rate for groups in muon["rates"] for rate in groups]
    found += [] if rates == pytest.approx(expected, rel=1e-6) else [f"rates {rates}, not {expected}"]
    return found + [text for text in muon["warnings"] if not any(re.search(known, text) for known in WARNINGS)]


def test_what_deepspeed_has_removed_is_named(ds_muon: Command, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"optimizer": {"type": "AdamW"}, "graph_harvesting": True}))
    found = ds_muon("init", "--config", tmp_path / "ds.json")
    found.must_refuse("init", "DeepSpeed refuses this config", lines=None)
    assert "graph_harvesting" in found.err


@pytest.mark.sample(1)
@pytest.mark.parametrize("first", range(0, len(NAMES), PORTION))
def test_public_configs_have_no_surprises(first: int, tmp_path: Path, ds_muon: Command) -> None:
    names, world = NAMES[first : first + PORTION], 2 if first // PORTION % 3 == 2 else 1
    cases: list[tuple[dict, dict | str, str]] = []
    for index, name in enumerate(names):
        folder = tmp_path / str(index)
        folder.mkdir()
        muon = converted(name, folder, ds_muon)
        adamw = runnable(CONFIGS[name]["config"], world, str(folder), is_bf16=index % 2 == 0)
        if not isinstance(muon, str):
            muon = runnable(muon, world, str(folder), is_bf16=index % 2 == 0)
        cases.append((adamw, muon, str(folder)))
    ranks = run(train_all, world, timeout=280, cases=cases)
    pairs = [(name, pair) for results in ranks for name, pair in zip(names, results, strict=True)]
    found = [(name, bad) for name, pair in pairs if (bad := surprises(*pair))]
    assert not found, json.dumps(found, indent=1)
    failed = [(name, pair) for name, pair in pairs if any("error" in one for one in pair)]
    assert len(failed) <= len(pairs) // 3, json.dumps(failed, indent=1)
