# SPDX-License-Identifier: Apache-2.0
"""Going on from other optimizers: stock's Muon and AdamW."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed.muon import ImportStateError, MuonWithAuxAdam
from deepspeed.muon.cli.main import main
from deepspeed.muon.zero.checkpoint import import_states
from helpers.checkpoints import error_of
from helpers.distributed import run
from helpers.engine_state import differing, named_states
from helpers.logs import logged
from helpers.models import MODELS, train_engine
from helpers.oracles import route, train_oracle
from helpers.stock_muon import STOCK, save_stock
from helpers.training import BF16_OPTIMIZER, ORACLE, PARAMS, fp32_weights
from helpers.universal import ADAMW, Case, build, convert, facts

NO_SCATTER = {"reduce_scatter": False}
SAVED_BY_STOCK: list[Case] = [
    BF16_OPTIMIZER,
    *({"stage": stage} | more for stage in (1, 2) for more in ({}, {"dtype": "bf16"}, {"offload": True})),
    {"stage": 2, "zero": {"round_robin_gradients": True}},
    {"stage": 2, "offload": True, "dtype": "bf16"},
    {"stage": 2, "dtype": "fp16"},
    *(
        {"stage": 3, "zero": NO_SCATTER, **more}
        for more in ({}, {"dtype": "bf16"}, {"offload": True}, {"dtype": "fp16"})
    ),
]
TARGETS: list[Case] = [{"stage": 1}, {"stage": 3}, {"stage": 2, "offload": True}]


def take_over(jobs: list[tuple[str, Case]], **extra: Any) -> list[dict[str, Any]]:
    """Return what each universal checkpoint gives an engine of other weights, by (folder, case); a step changes all."""
    results = []
    for folder, case in jobs:
        engine = build(case, 7, checkpoint={"load_universal": True}, **extra)
        assert engine.load_checkpoint(folder, tag="universal")[0] is not None
        results.append(found := facts(engine))
        train_engine(engine, 1, 3)
        assert differing(found["states"], named_states(engine)) == sorted(found["states"])
        engine.destroy()
    return results


def moments(clip: float, momentum: float, beta1: float) -> dict[str, Tensor]:
    """Return "parameter.key" -> state of Muon and AdamW after three steps at learning rate 0, in fp64."""
    net = MODELS["mlp"]()
    still = {"lr": 0.0, "adam_lr": 0.0, "weight_decay": 0.0, "adam_weight_decay": 0.0}
    config = replace(ORACLE, **still, clip=clip, momentum=momentum, betas=(beta1, 0.95))
    result = train_oracle(net, net.batch, 3, route(net), config)
    first = {"muon": "momentum_buffer", "adam": "exp_avg"}
    found = {f"{name}.{first[kind]}": result.momentum[name] for name, kind in route(net).items()}
    return found | {f"{n}.exp_avg_sq": result.second_moment[n] for n, kind in route(net).items() if kind == "adam"}


def compare(expected: dict[str, Tensor], got: dict[str, Any], tolerance: float, label: Any) -> None:
    """State and step count against the definition."""
    assert got["steps"] == [3] and got["count"] == 3 and got["states"].keys() == expected.keys()
    for key, state in expected.items():
        assert (got["states"][key] - state).norm() <= tolerance * state.norm(), (label, key)


# ---- stock's Muon ---------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.time_limit(900)
@pytest.mark.parametrize("cases", [SAVED_BY_STOCK[:7], SAVED_BY_STOCK[7:]], ids=["first", "rest"])
def test_going_on_from_stocks_muon(cases: list[Case], tmp_path: Path) -> None:
    """Momentum bit for bit by whatever layout it was saved, and that of the definition."""
    stock = run(save_stock, 2, fresh=True, restart=True, env=STOCK, timeout=250, cases=cases, folder=str(tmp_path))
    definition = moments(0.0, 0.9, 0.8)
    for index in range(len(cases)):
        assert main(["import", "--from", f"{tmp_path}/{index}/saved", "--to", f"{tmp_path}/{index}/universal"]) == 0
    jobs = [(str(tmp_path / str(index)), target) for index in range(len(cases)) for target in TARGETS]
    for job, got in enumerate(run(take_over, 3, timeout=250, jobs=jobs)[0]):
        case = cases[job // len(TARGETS)]
        scale = 64 if case.get("dtype") == "fp16" else 1
        for rank in stock:
            for name, momentum in rank[job // len(TARGETS)].items():
                assert got["states"][f"{name}.momentum_buffer"].equal(momentum.float() / scale), (case, name)
        names = {f"{name}.momentum_buffer" for rank in stock for name in rank[job // len(TARGETS)]}
        assert names == {key for key in definition if "momentum" in key}
        compare(definition, got, 2e-2 if "dtype" in case else 1e-5, case)


def outcome(folder: str, universal: bool, params: dict[str, Any], stage: int = 2) -> tuple[str, list[str]]:
    """The error of loading into the small GPT, or none, and what was logged."""
    extra = {"checkpoint": {"load_universal": True}} if universal else {}
    with logged() as said:
        optimizer = {"type": "Muon", "params": PARAMS | params}
        engine = build({"stage": stage, "model": "gpt"}, 7, optimizer=optimizer, **extra)
        before = fp32_weights(engine)
        error = error_of(engine.load_checkpoint, folder, tag="universal" if universal else "saved")
        assert not error or differing(before, fp32_weights(engine)) == []
    engine.destroy()
    return error, [line for line in said if ": imported the optimizer states " in line]


@pytest.mark.full
def test_what_changes_its_optimizer_is_refused_by_name(tmp_path: Path) -> None:
    """Stock gives the embeddings `tokens` and `positions` to Muon."""
    run(save_stock, 2, fresh=True, restart=True, env=STOCK, cases=[{"stage": 2, "model": "gpt"}], folder=str(tmp_path))
    folder = str(tmp_path / "0")
    ask = {"folder": folder, "params": {}}
    error, _ = run(outcome, 2, universal=False, **ask)[0]
    import_to = f"ds_muon import --from {folder}/saved --to {folder}/saved_universal"
    assert f"stock DeepSpeed's Muon saved this checkpoint; run {import_to}, then" in error
    error, _ = run(outcome, 2, universal=False, stage=0, **ask)[0]
    assert "saved at ZeRO stage 1 or 2, this run has stage 0; load it as it was saved, or only its weights" in error
    assert main(["import", "--from", f"{folder}/saved", "--to", f"{folder}/universal", "--json"]) == 0
    error, _ = run(outcome, 1, universal=True, **ask)[0]
    assert "moved from Muon to AdamW: tokens.weight, positions.weight. Assign" in error
    to_muon, zero = {"muon_include": ["tokens", "positions"]}, {"import_momentum": "zero"}
    for params, expected in (
        (to_muon, ["27: as saved"]),
        (zero, ["25: as saved", "2: moved from Muon to AdamW, state at zero (tokens.weight, positions.weight)"]),
    ):
        error, lines = run(outcome, 1, folder=folder, universal=True, params=params)[0]
        assert error == "" and len(lines) == 1
        assert all(text in lines[0] and "stock's Muon" in lines[0] for text in expected), lines


def test_files_are_read_in_the_order_of_the_ranks() -> None:
    files = [Path(f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt") for rank in range(12)]
    assert import_states._by_rank(iter(sorted(files))) == files


def test_what_starts_at_zero_counts_its_steps_anew() -> None:
    """Else AdamW's bias correction would take moments at zero for moments of many steps."""
    net = MODELS["mlp"]()
    optimizer = MuonWithAuxAdam(net.parameters(), model=net, lr=0.01)
    net(*net.batch(0)).backward()
    optimizer.step()
    names = {spec.name: spec.use_muon for spec in optimizer.specs.values()}
    params = dict(net.named_parameters())
    states = SimpleNamespace(read=lambda name, key: torch.ones_like(params[name]), step=lambda _: 7.0)
    zeroed, *kept = (name for name, use_muon in names.items() if not use_muon)
    adapter = SimpleNamespace(optimizer=optimizer, resident_partitions=lambda: optimizer.all_partitions)
    import_states.write(adapter, states, dict.fromkeys(names, "kept") | {zeroed: "zero"})
    found = {optimizer.specs[param].name: state for param, state in optimizer.state.items()}
    assert [float(found[name]["step"]) for name in (zeroed, *kept)] == [0.0, *(7.0 for _ in kept)]
    assert not found[zeroed]["exp_avg"].any() and bool((found[kept[0]]["exp_avg"] == 1).all())


def test_advice_fits_what_does_not_match() -> None:
    """`import_momentum` helps parameters that moved between Muon and AdamW, not those that are missing or differ."""
    net = MODELS["mlp"]()
    optimizer = MuonWithAuxAdam(net.parameters(), model=net, lr=0.01)
    first, *rest = optimizer.specs.values()
    saved = {spec.name: spec.use_muon for spec in rest}
    shapes = {spec.name: spec.shape for spec in rest}
    for more, shape, advice in (
        ({}, (), {import_states.SAME_MODEL}),
        ({first.name: True}, (7, 7), {import_states.SAME_MODEL}),
        ({first.name: False}, first.shape, {import_states.SAME_ROUTING}),
    ):
        other_run = SimpleNamespace(title="a run", is_muon=saved | more, shapes=shapes | dict.fromkeys(more, shape))
        with pytest.raises(ImportStateError) as error:
            import_states.match(optimizer, other_run)
        found = {text for text in (import_states.SAME_MODEL, import_states.SAME_ROUTING) if text in str(error.value)}
        assert found == advice and first.name in str(error.value)


@pytest.mark.parametrize(("steps", "count"), [({"a": 4.0}, 4), ({"b": 4.0}, 4), ({}, 5)])
def test_skipped_steps_do_not_count(steps: dict[str, float], count: int) -> None:
    """Steps are counted by the states; where these count none, by the engine, whose count includes skipped steps."""
    saved = object.__new__(import_states.SavedFiles)
    saved.groups, saved._steps_taken = [], steps
    saved.model_state = {"global_steps": 7, "skipped_steps": 2}
    assert saved.step("a") == count


def test_the_command_refuses_what_is_not_stocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", "--from", str(tmp_path), "--to", str(tmp_path / "new")]) == 2
    assert "has no mp_rank_00_model_states.pt" in capsys.readouterr().err
    assert main(["import", "--from", str(tmp_path / "a"), "--to", str(tmp_path)]) == 2
    assert "exists already" in capsys.readouterr().err
    cases: list[Case] = [{"stage": 2}, {"stage": 2, "optimizer": ADAMW}]
    run(save_others, 1, cases=cases, folder=str(tmp_path))
    for index in range(2):
        assert main(["import", "--from", f"{tmp_path}/{index}/saved", "--to", str(tmp_path / "new")]) == 2
        assert "is not a checkpoint of stock DeepSpeed's Muon" in capsys.readouterr().err
    assert not (tmp_path / "new").exists() and not list(tmp_path.glob(".*"))


# ---- AdamW ----------------------------------------------------------------------------------------------------


def save_others(cases: list[Case], folder: str) -> list[dict[str, Tensor]]:
    """By case: AdamW's moments after three steps, if it has any, of which a checkpoint is left."""
    from deepspeed.utils import safe_get_full_optimizer_state

    results = []
    for index, case in enumerate(cases):
        engine = build(case, 0)
        train_engine(engine, 3)
        engine.save_checkpoint(f"{folder}/{index}", tag="saved")
        keys = ("exp_avg", "exp_avg_sq") if "optimizer" in case else ()
        params = [(name, param, key) for name, param in engine.module.named_parameters() for key in keys]
        results.append({f"{n}.{key}": safe_get_full_optimizer_state(param, key).clone() for n, param, key in params})
        engine.destroy()
    return results


@pytest.mark.full
def test_going_on_from_adamw(tmp_path: Path) -> None:
    """Stages 1 to 3: the first moment becomes the momentum bit for bit, and that of the definition."""
    resting_adamw = {"type": "AdamW", "params": ADAMW["params"] | {"lr": 0.0, "weight_decay": 0.0}}
    cases = [case | {"optimizer": resting_adamw} for case in (*TARGETS, BF16_OPTIMIZER)]
    saved = run(save_others, 2, cases=cases, folder=str(tmp_path))[0]
    for index in range(len(cases)):
        convert(tmp_path / str(index), inject=True)
    jobs = [(str(tmp_path / str(index)), target) for index in range(len(cases)) for target in TARGETS]
    definition = moments(1.0, 0.8, 0.8)
    for job, got in enumerate(run(take_over, 3, jobs=jobs)[0]):
        before = saved[job // len(TARGETS)]
        for key, state in got["states"].items():
            assert state.equal(before[key.replace("momentum_buffer", "exp_avg")]), (job, key)
        compare(definition, got, 2e-2 if "dtype" in cases[job // len(TARGETS)] else 1e-5, job)
    zero = {"type": "Muon", "params": PARAMS | {"import_momentum": "zero"}}
    for got in run(take_over, 2, jobs=jobs[:2], optimizer=zero)[0]:
        for key, state in got["states"].items():
            assert not state.any() if "momentum" in key else state.equal(saved[0][key]), key
