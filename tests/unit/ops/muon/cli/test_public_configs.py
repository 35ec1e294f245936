# SPDX-License-Identifier: Apache-2.0
"""ds_configs as public projects have them: `ds_muon init`, `plan`, three steps, a resume, beside AdamW."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed.muon.cli import main
from helpers.distributed import run
from helpers.logs import logged
from helpers.models import MODELS, full_weights, train_engine
from helpers.public_configs import REMOVED, configs, runnable
from helpers.training import fp32_weights

CONFIGS = configs()
NAMES = list(CONFIGS)
PORTION = 10
"""Configs of one test, which one call trains."""
STEPS, MORE = 3, 2
MODEL = """
import sys
sys.path.insert(0, {tests!r})
from helpers.models import MODELS
model = MODELS["mlp"]
"""
#: What is refused though AdamW trains with it, with the key and a remedy.
REFUSALS: tuple[str, ...] = ()
#: Warnings of our log, and what a user can do about each.
WARNINGS = (
    "elastic_checkpoint is ignored",
    r"scheduler\.params\.\w+, .*, is the learning rate, in place of .*; change \w+ to change the rate",
    r"zero_optimization\.sub_group_size cuts .* write \d+ or more",
    r"DeepSpeed has no top-level ds_config key _comment; it has no effect",
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


def finish(engine: Any) -> None:
    import deepspeed.comm.comm

    engine.destroy()
    deepspeed.comm.comm.comms_logger.enabled = False  # DeepSpeed keeps it for engines that follow


def train_adamw(config: dict[str, Any]) -> dict[str, Any]:
    """Rates, and what moved, with the config as it was."""
    import deepspeed

    optimizer = config.setdefault("optimizer", {"type": "AdamW", "params": {"lr": 1e-3}})
    # DeepSpeed's own AdamW is compiled; torch's is the same.
    optimizer["params"] = {k: v for k, v in optimizer.get("params", {}).items() if k not in NOT_FOR_TORCH}
    numbers = {k: float(v) for k, v in optimizer["params"].items() if isinstance(v, str)}  # Muon reads strings too
    optimizer["params"] |= {"torch_adam": True} | numbers
    config["zero_force_ds_cpu_optimizer"] = False
    net = MODELS["mlp"]()
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    engine = deepspeed.initialize(model=net, config=config, model_parameters=net.parameters())[0]
    rates = steps(engine, STEPS, 0)
    after = full_weights(engine.module)
    finish(engine)
    return {
        "rates": [group[0] for group in rates],
        "moved": [
            name for name in before if not torch.equal(after[name].float(), before[name].to(after[name].dtype).float())
        ],
        "finite": all(torch.isfinite(weight).all() for weight in after.values()),
    }


NOT_FOR_TORCH = ("bias_correction", "max_grad_norm")


def train_muon(config: dict[str, Any], folder: str) -> dict[str, Any]:
    """Rates, what moved, warnings at start, and whether a resumed run has the bits of one that went on."""
    import deepspeed

    def engine_of() -> Any:
        net = MODELS["mlp"]()
        return deepspeed.initialize(
            model=net, config=json.loads(json.dumps(config)), model_parameters=net.parameters()
        )[0]

    with logged(30) as warnings:
        engine = engine_of()
    before = fp32_weights(engine)
    rates = steps(engine, STEPS, 0)
    after = fp32_weights(engine)
    assert engine.save_checkpoint(folder)
    later = steps(engine, MORE, STEPS)
    went_on = fp32_weights(engine)
    finish(engine)
    engine = engine_of()
    engine.load_checkpoint(folder)
    resumed = steps(engine, MORE, STEPS)
    weights = fp32_weights(engine)
    finish(engine)
    return {
        "rates": rates,
        "moved": [name for name in before if not torch.equal(after[name], before[name])],
        "finite": all(torch.isfinite(weight).all() for weight in after.values()),
        "resumes": later == resumed and all(torch.equal(went_on[name], weights[name]) for name in weights),
        "warnings": warnings,
    }


def attempt(what: Any, **arguments: Any) -> dict[str, Any]:
    try:
        return what(**arguments)
    except (Exception, SystemExit) as error:
        return {"error": f"{type(error).__module__}.{type(error).__name__}: {error}"}


def train_all(cases: list[tuple[dict, dict | str, str]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """What AdamW and Muon do with each pair of configs."""
    results = []
    for adamw, muon, folder in cases:
        before = attempt(train_adamw, config=adamw)
        refused = {"error": muon} if isinstance(muon, str) else {}
        results.append((before, refused or attempt(train_muon, config=muon, folder=f"{folder}/checkpoints")))
    return results


def converted(name: str, folder: Path, capsys: pytest.CaptureFixture) -> dict[str, Any] | str:
    """What init prints for a config, once plan has accepted it; a refusal as text."""
    file, out = folder / f"ds.{CONFIGS[name]['suffix']}", folder / "muon.json"
    file.write_text(CONFIGS[name]["text"])
    (folder / "model.py").write_text(MODEL.format(tests=str(Path(__file__).parents[1])))
    status = main.main(["init", "--config", str(file)])
    text, err = capsys.readouterr()
    if status:
        return err
    out.write_text(text)
    arguments = ["--config", str(out), "--model", f"{folder}/model.py:model", "--world-size", "2", "--device", "cpu"]
    assert main.main(["plan", *arguments]) == 0, f"{name}: {capsys.readouterr().err}"
    capsys.readouterr()
    return json.loads(text)


def surprises(adamw: dict[str, Any], muon: dict[str, Any]) -> list[str]:
    """What a user of AdamW would not expect."""
    if "error" in adamw:
        return []
    if "error" in muon:
        return [] if any(re.search(words, muon["error"]) for words in REFUSALS) else [muon["error"]]
    found = [] if muon["finite"] or not adamw["finite"] else ["not finite"]
    found += [f"{name} does not move" for name in adamw["moved"] if name not in muon["moved"]]
    found += [] if muon["resumes"] else ["a resumed run has other bits"]
    expected = [rate for rate, groups in zip(adamw["rates"], muon["rates"], strict=True) for _ in groups]
    rates = [rate for groups in muon["rates"] for rate in groups]
    found += [] if rates == pytest.approx(expected, rel=1e-6) else [f"rates {rates}, not {expected}"]
    return found + [text for text in muon["warnings"] if not any(re.search(known, text) for known in WARNINGS)]


def check(names: list[str], world: int, folder: Path, capsys: pytest.CaptureFixture) -> None:
    cases: list[tuple[dict, dict | str, str]] = []
    for index, name in enumerate(names):
        own = folder / str(index)
        own.mkdir()
        pair = (CONFIGS[name]["config"], converted(name, own, capsys))
        is_bf16 = index % 2 == 0
        filled = [c if isinstance(c, str) else runnable(c, world, str(own), is_bf16) for c in pair]
        cases.append((filled[0], filled[1], str(own)))
    ranks = run(train_all, world, timeout=280, cases=cases)
    found = [
        (name, bad) for results in ranks for name, pair in zip(names, results, strict=True) if (bad := surprises(*pair))
    ]
    assert not found, json.dumps(found, indent=1)
    failed = [(name, pair) for name, pair in zip(names, ranks[0], strict=True) if any("error" in one for one in pair)]
    assert len(failed) <= len(names) // 3, json.dumps(failed, indent=1)


def test_the_configs_differ_and_use_every_section() -> None:
    from deepspeed.muon.zero.known_keys import known_keys

    assert len({case["text"] for case in CONFIGS.values()}) == 200
    used = {key for config in (*(case["config"] for case in CONFIGS.values()), *REMOVED.values()) for key in config}
    assert known_keys() - used <= UNUSED


@pytest.mark.parametrize("name", REMOVED)
def test_what_deepspeed_has_removed_is_named(name: str, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"optimizer": {"type": "AdamW"}} | REMOVED[name]))
    assert main.main(["init", "--config", str(tmp_path / "ds.json")]) == 2
    err = capsys.readouterr().err
    assert "DeepSpeed refuses this config" in err and any(words in err for words in (name, *REMOVED[name]))


#: Keys that need a topology of ranks, another engine or a package, and have tests of their own.
UNUSED = {"data_parallel_size", "datastates_ckpt"}


@pytest.mark.sample(2)
@pytest.mark.parametrize("first", range(0, len(NAMES), PORTION))
def test_public_configs_have_no_surprises(first: int, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    world = 2 if first // PORTION % 3 == 2 else 1
    check(NAMES[first : first + PORTION], world, tmp_path, capsys)
