# SPDX-License-Identifier: Apache-2.0
"""The recipes of examples/staged on two ranks: what a stage keeps of the one before, bit for bit; that it learns."""

import json
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from helpers.distributed import Pool
from helpers.engine_state import named_states
from helpers.models import full_weights
from helpers.paths import EXAMPLES
from helpers.scripts import ENV, RANKS, TIMEOUT, run_script
from helpers.training import fp32_weights

STAGED = EXAMPLES / "staged"
Found = dict[str, Any]
"""What was seen of one engine: weights, masters and states after the load and at the save, rates, losses, steps."""


def copies(engine: Any) -> Found:
    """Whole weights, fp32 master weights and optimizer states by name, and the step count."""
    states = {}
    if hasattr(engine.basic_optimizer, "specs"):
        states = named_states(engine)
    elif engine.optimizer.optimizer.state:  # DeepSpeed's AdamW
        states = adamw_states(engine)
    return {
        "weights": full_weights(engine.module),
        "masters": fp32_weights(engine),
        "states": states,
        "steps": engine.global_steps,
    }


def adamw_states(engine: Any) -> dict[str, Tensor]:
    from deepspeed.utils import safe_get_full_optimizer_state

    keys, params = ("exp_avg", "exp_avg_sq"), engine.module.named_parameters()
    return {f"{name}.{key}": safe_get_full_optimizer_state(p, key).clone() for name, p in params for key in keys}


def watch(engine: Any, found: Found) -> None:
    """Write into ``found`` what the engine loads, does and saves."""
    load, backward, step, save = engine.load_checkpoint, engine.backward, engine.step, engine.save_checkpoint
    found |= {"built": full_weights(engine.module), "losses": [], "rates": []}

    def loading(*args: Any, **options: Any) -> Any:
        result = load(*args, **options)
        found["loaded"] = copies(engine)
        return result

    def going_back(loss: Tensor) -> None:
        found["losses"].append(loss.item())
        backward(loss)

    def stepping() -> None:
        found["rates"].append([group["lr"] for group in engine.optimizer.param_groups])
        step()

    def saving(*args: Any, **options: Any) -> Any:
        found["saved"] = copies(engine) | {"rates": [group["lr"] for group in engine.optimizer.param_groups]}
        return save(*args, **options)

    engine.load_checkpoint, engine.backward, engine.step, engine.save_checkpoint = loading, going_back, stepping, saving


def watched(script: Path, arguments: list[str], folder: Path) -> dict[str, Found]:
    """Run a script; return what was seen of its engines, by stage."""
    import deepspeed

    found, initialize = [], deepspeed.initialize

    def initializing(**options: Any) -> Any:
        made = initialize(**options)
        found.append(Found())
        watch(made[0], found[-1])
        return made

    deepspeed.initialize = initializing
    run_script(script, arguments, folder)
    return found


def stages(name: str, stage: int, folder: Path) -> list[Found]:
    """Run an example at a ZeRO stage; return what rank 0 saw of each engine."""
    config = json.loads((STAGED / "ds_config.json").read_text())
    config["zero_optimization"]["stage"] = stage
    (folder / "ds_config.json").write_text(json.dumps(config))
    line = ["--deepspeed_config", str(folder / "ds_config.json"), "--out", str(folder / "out")]
    pool = Pool(RANKS, ENV, timeout=None)
    try:
        found = pool.run(watched, {"script": STAGED / f"{name}.py", "arguments": line, "folder": folder}, TIMEOUT)[0]
    finally:
        pool.close()
    for engine in found:
        early, late = (sum(engine["losses"][part]) / 5 for part in (slice(5), slice(-5, None)))
        assert late < early - 0.01, (early, late)
    return found


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(left[name].equal(right[name]) for name in left)


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_annealing_keeps_the_state_and_fine_tuning_only_the_weights(stage: int, tmp_path: Path) -> None:
    pretrain, anneal, finetune = stages("pretrain_anneal_finetune", stage, tmp_path)
    assert len(pretrain["saved"]["states"]) == 10 and all(value.any() for value in pretrain["saved"]["states"].values())
    for key in ("weights", "masters", "states"):
        assert same(anneal["loaded"][key], pretrain["saved"][key]), key
    assert anneal["loaded"]["steps"] == pretrain["saved"]["steps"] == len(pretrain["losses"])
    up, down = ([rates[0] for rates in each["rates"]] for each in (pretrain, anneal))
    assert up[0] == 0 and up[:10] == sorted(up[:10]) and up[10:] == pytest.approx([1e-2] * (len(up) - 10))
    assert down[:2] == pytest.approx([1e-2] * 2) and down == sorted(down, reverse=True) and 0 < down[-1] < 2e-4
    assert anneal["saved"]["rates"] == [0, 0]
    assert same(finetune["loaded"]["weights"], anneal["saved"]["weights"])
    assert finetune["loaded"]["steps"] == 0 and not any(value.any() for value in finetune["loaded"]["states"].values())
    assert 0 < max(rates[0] for rates in finetune["rates"]) <= 3e-3


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_second_stage_keeps_the_projectors_state(stage: int, tmp_path: Path) -> None:
    align, tune = stages("two_stages", stage, tmp_path)
    loaded, saved = tune["loaded"], align["saved"]
    projector = {key: value for key, value in loaded["states"].items() if key.startswith("projector")}
    assert len(projector) == 2 + 2 * 2 and same(projector, saved["states"])
    assert all(value.any() for value in projector.values())
    others = [value for key, value in loaded["states"].items() if key.startswith("language")]
    assert len(others) == 2 + 2 * 4 and not any(value.any() for value in others)
    assert same(loaded["weights"], saved["weights"])
    assert all(loaded["masters"][name].equal(value) for name, value in saved["masters"].items())
    for engine, trained in ((align, ("projector",)), (tune, ("projector", "language"))):
        for name, built in align["built"].items():
            before = engine["loaded"]["weights"][name] if "loaded" in engine else built
            assert engine["saved"]["weights"][name].equal(before) != name.startswith(trained), name
    assert max(rates[0] for rates in tune["rates"]) <= 2e-3 < max(rates[0] for rates in align["rates"])


@pytest.mark.sample(1)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_muon_starts_from_adamws_first_moment_and_adamw_from_zero(stage: int, tmp_path: Path) -> None:
    """The schedule continues without a break, also in the first step."""
    adamw, muon, back, deepspeeds = stages("adamw_to_muon_and_back", stage, tmp_path)
    matrices = {"layers.0.weight", "layers.1.weight"}
    moments = adamw["saved"]["states"]
    expected = {
        key.replace("exp_avg", "momentum_buffer") if is_matrix else key: value
        for key, value in moments.items()
        if not (is_matrix := key.rpartition(".")[0] in matrices) or key.endswith("exp_avg")
    }
    assert len(expected) == 10 and same(muon["loaded"]["states"], expected)
    assert len(back["loaded"]["states"]) == 12
    for key, value in back["loaded"]["states"].items():
        assert value.any() != (key.rpartition(".")[0] in matrices)
        assert not value.any() or value.equal(muon["saved"]["states"][key])
    for after, before in ((muon, adamw), (back, muon)):
        assert same(after["loaded"]["masters"], before["saved"]["masters"])
    for after, before in ((muon, adamw), (back, muon), (deepspeeds, muon)):
        assert same(after["loaded"]["weights"], before["saved"]["weights"])
        assert after["loaded"]["steps"] == before["saved"]["steps"]
        assert after["rates"][1][0] < before["rates"][-1][0]
    for after, before in ((muon, adamw), (back, muon)):
        assert set(after["rates"][0]) == set(before["saved"]["rates"])
    assert deepspeeds["loaded"]["states"] == {} or not any(v.any() for v in deepspeeds["loaded"]["states"].values())
