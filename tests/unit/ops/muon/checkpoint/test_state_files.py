# SPDX-License-Identifier: Apache-2.0
"""The state of an engine by name, in files, through zero_to_fp32, and its size."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.distributed import run
from helpers.engine_state import ADAM, MUON, differing, local_states, named_states, state_sizes
from helpers.models import MODELS, train_engine
from helpers.oracles import OracleConfig, route, train_oracle
from helpers.training import BF16_OPTIMIZER, PARAMS, ds_config, fp32_weights, fresh_engine, make_engine

#: Where ``safe_get_full_optimizer_state`` has to find every state.
NAMED: list[dict[str, Any]] = [
    {"stage": 1},
    {"stage": 2},
    {"stage": 3},
    {"stage": 3, "zero": {"sub_group_size": 100}},
    {"stage": 2, "zero": {"round_robin_gradients": True}},
    BF16_OPTIMIZER,
    *({"stage": stage, "offload": True} for stage in (1, 2, 3)),
]


# ---- states by name ---------------------------------------------------------------------------------------


def names_of_states(case: dict[str, Any], folder: str) -> dict[str, dict[str, Tensor]]:
    """The states at first, after a step, loaded into another engine, and there after a second step."""
    engine = fresh_engine(0, case)
    result = {"first": named_states(engine)}
    train_engine(engine, 1)
    result["trained"] = named_states(engine)
    engine.save_checkpoint(folder)
    engine.destroy()
    engine = fresh_engine(7, case)
    engine.load_checkpoint(folder)
    result["loaded"] = named_states(engine)
    train_engine(engine, 1, first_step=1)
    result["resumed"] = named_states(engine)
    engine.destroy()
    return result


def oracle_states(steps: int) -> dict[str, Tensor]:
    """The same states after `steps` steps of the oracle."""
    net = MODELS["mlp"]()
    shared = {key: PARAMS[key] for key in ("lr", "adam_lr", "momentum", "weight_decay", "eps")}
    config = OracleConfig(**shared, adam_weight_decay=PARAMS["weight_decay"], betas=(0.9, 0.95), clip=1.0)
    routing = route(net)
    reference = train_oracle(net, net.batch, steps, routing, config)
    first = {"muon": "momentum_buffer", "adam": "exp_avg"}
    states = {f"{name}.{first[kind]}": reference.momentum[name] for name, kind in routing.items()}
    return states | {f"{n}.exp_avg_sq": reference.second_moment[n] for n, kind in routing.items() if kind == "adam"}


@pytest.mark.sample(4)
@pytest.mark.parametrize("case", NAMED, ids=str)
def test_states_are_found_by_name(case: dict[str, Any], tmp_path: Path) -> None:
    expected = {"trained": oracle_states(1), "resumed": oracle_states(2)}
    for result in run(names_of_states, 2, case=case, folder=str(tmp_path)):
        assert not any(state.any() for state in result["first"].values())
        assert differing(result["trained"], result["loaded"]) == []
        for moment, states in expected.items():
            assert result[moment].keys() == states.keys()
            for name in states if case.get("dtype") != "bf16" else ():
                error = (result[moment][name] - states[name]).norm() / states[name].norm()
                assert error <= (1e-5 if moment == "trained" else 1e-3), (moment, name)


# ---- files ------------------------------------------------------------------------------------------------


def tagged(tags: dict[int, bool]) -> Any:
    """The small model with `use_muon` set on some of its layers."""
    net = MODELS["mlp"]()
    for layer, tag in tags.items():
        net.layers[layer].weight.use_muon = tag
    return net


def save_once(case: dict[str, Any], folder: str, tags: dict[int, bool], **extra: Any) -> list[list[str]]:
    """One step and a checkpoint; the keys of each state in memory afterwards."""
    import deepspeed

    engine = deepspeed.initialize(model=tagged(tags), config=ds_config(**case, **extra))[0]
    train_engine(engine, 1)
    engine.save_checkpoint(folder)
    keys = [sorted(entry) for entry in local_states(engine)]
    engine.destroy()
    return keys


@pytest.mark.parametrize("case", [{"stage": 2}, {"stage": 3}, {"stage": 3, "offload": True}, BF16_OPTIMIZER], ids=str)
def test_the_files_hold_adams_keys_and_no_second_moment_for_muon(case: dict[str, Any], tmp_path: Path) -> None:
    assert run(save_once, 2, case=case, folder=str(tmp_path), tags={}) == [[MUON, ADAM]] * 2
    files = sorted(tmp_path.glob("*/*zero_pp_rank_*_optim_states.pt"))
    assert len(files) == 2
    for file in files:
        saved = torch.load(file, weights_only=False)["optimizer_state_dict"]
        state = saved.get("optimizer_state_dict", saved.get("base_optimizer_state"))["state"]
        assert [sorted(entry) for entry in state.values()] == [ADAM, ADAM]
        assert state[0]["exp_avg_sq"].shape == state[0]["exp_avg"].shape
        assert state[0]["exp_avg"].any() and not state[0]["exp_avg_sq"].any()
        assert state[0]["exp_avg_sq"].untyped_storage().nbytes() == 4


def refusal(case: dict[str, Any], folder: str, tags: dict[int, bool]) -> str:
    """The error of loading into an engine whose layers carry these tags."""
    engine = make_engine(tagged(tags), ds_config(**case))
    with pytest.raises(ValueError) as error:
        engine.load_checkpoint(folder)
    engine.destroy()
    return str(error.value)


FOREIGN = [{"stage": 0}, {"stage": 0, "dtype": "bf16"}, {"stage": 2}, {"stage": 3}, BF16_OPTIMIZER]


@pytest.mark.parametrize("case", FOREIGN, ids=str)
def test_a_checkpoint_of_stock_adamw_is_refused(case: dict[str, Any], tmp_path: Path) -> None:
    stock = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    run(save_once, 2, case=case, folder=str(tmp_path), tags={}, optimizer=stock)
    for text in run(refusal, 2, case=case, folder=str(tmp_path), tags={}):
        assert "another optimizer saved it; if that was AdamW, " in text
        tag = f"{tmp_path}/{Path(tmp_path, 'latest').read_text()}"
        command = f"--inject_missing_state --input_folder {tag} --output_folder {tag}_universal, then load it with"
        is_converted = f"convert it with python -m deepspeed.checkpoint.ds_to_universal {command}" in text
        assert is_converted == (case["stage"] > 0)
        assert is_converted or "or only its weights, with load_module_only=True and load_optimizer_states" in text


@pytest.mark.parametrize("case", FOREIGN, ids=str)
def test_a_checkpoint_of_another_routing_is_refused(case: dict[str, Any], tmp_path: Path) -> None:
    run(save_once, 2, case=case, folder=str(tmp_path), tags={0: False})
    for text in run(refusal, 2, case=case, folder=str(tmp_path), tags={1: False}):
        assert "Muon updated other parameters in the run that saved it; use that run's model, parameter groups" in text
        assert "['layers.1.weight'] only in the checkpoint and ['layers.0.weight'] only in this run" in text


# ---- zero_to_fp32 ------------------------------------------------------------------------------------------


def save_weights(cases: list[dict[str, Any]], folder: str) -> list[dict[str, Tensor]]:
    """By case: the fp32 weights of an engine whose checkpoint is left."""
    results = []
    for index, case in enumerate(cases):
        engine = fresh_engine(0, case)
        train_engine(engine, 2)
        engine.save_checkpoint(f"{folder}/{index}")
        results.append(fp32_weights(engine))
        engine.destroy()
    return results


@pytest.mark.parametrize("scripted", [pytest.param(2, marks=pytest.mark.full), 4])
def test_zero_to_fp32_gives_the_weights(scripted: int, tmp_path: Path) -> None:
    """The function for every wrapper, and the script that DeepSpeed leaves in the checkpoint."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    pairs = [(stage, dtype) for stage in (1, 2, 3) for dtype in ("fp32", "bf16")]
    stages: list[dict[str, Any]] = [{"stage": stage, "dtype": dtype} for stage, dtype in pairs]
    cases = [*stages, {"stage": 3, "offload": True}, BF16_OPTIMIZER]
    saved = run(save_weights, 2, cases=cases, folder=str(tmp_path))[0]
    for index, weights in enumerate(saved):
        assert differing(weights, get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / str(index)))) == [], index
    folder = tmp_path / str(scripted)
    command = [sys.executable, "zero_to_fp32.py", ".", "out", "--max_shard_size", "1GB"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (file,) = (folder / "out").glob("pytorch_model*.bin")
    assert differing(saved[scripted], torch.load(file, weights_only=True)) == []


# ---- size -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.full)])
def test_muon_keeps_four_bytes_per_parameter(world: int) -> None:
    cases = [{"stage": stage, "dtype": dtype} for stage in (1, 2, 3) for dtype in ("fp32", "bf16")]
    matrices = [p.numel() for p in MODELS["mlp"]().parameters() if p.ndim == 2]
    for case, *ranks in zip(cases, *run(state_sizes, world, cases=cases), strict=True):
        used, flat, tensors = (sum(column) for column in zip(*ranks, strict=True))
        assert used == 4 * flat + 4 * tensors, case  # the momentum, and the step count of each tensor
        padding = flat - sum(matrices)
        assert 0 <= padding < (len(matrices) * world if case["stage"] == 3 else 2 * world), case
