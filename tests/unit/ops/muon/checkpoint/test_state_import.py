# SPDX-License-Identifier: Apache-2.0
"""Going on from other optimizers: stock's Muon, AdamW, and state_dicts of plain PyTorch."""

import copy
import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed.muon import ImportStateError, MuonWithAuxAdam, import_state
from deepspeed.muon.cli.main import main
from deepspeed.muon.state_import import Source, write_state
from deepspeed.muon.zero.checkpoint import from_stock
from helpers.distributed import run
from helpers.logs import logged
from helpers.models import MODELS, train_engine
from helpers.oracles import adam_update, change_error, clipped, gradients_of, muon_update, route
from helpers.stock_muon import STOCK, save_stock
from helpers.training import BF16_OPTIMIZER, ORACLE, PARAMS
from helpers.universal import ADAMW, Case, build, convert, facts

NO_SCATTER = {"reduce_scatter": False}
SAVED_BY_STOCK: list[Case] = [
    {"stage": 0},
    {"stage": 2, "dtype": "bf16"},
    {"stage": 2, "offload": True},
    {"stage": 3, "zero": NO_SCATTER},
    {"stage": 2, "dtype": "fp16"},
    BF16_OPTIMIZER,
]
REST: list[Case] = [
    {"stage": 1},
    {"stage": 0, "dtype": "bf16"},
    {"stage": 2},
    {"stage": 1, "dtype": "bf16"},
    {"stage": 1, "offload": True},
    {"stage": 2, "offload": True, "dtype": "bf16"},
    {"stage": 2, "zero": {"round_robin_gradients": True}},
    {"stage": 3, "zero": NO_SCATTER, "dtype": "bf16"},
    {"stage": 3, "zero": NO_SCATTER, "offload": True},
    {"stage": 3, "zero": NO_SCATTER, "dtype": "fp16"},
]
TARGETS: list[Case] = [{"stage": 1}, {"stage": 3}, {"stage": 2, "offload": True}]


def take_over(jobs: list[tuple[str, Case]], **extra: Any) -> list[dict[str, Any]]:
    """By (folder, case): what a universal checkpoint gives an engine of other weights, and two steps after it."""
    results = []
    for folder, case in jobs:
        engine = build(case, 7, checkpoint={"load_universal": True}, **extra)
        assert engine.load_checkpoint(folder, tag="universal")[0] is not None
        result = facts(engine)
        train_engine(engine, 2, 3)
        results.append(result | {"after": facts(engine)["weights"]})
        engine.destroy()
    return results


@dataclass
class GradientAverages:
    """Averages of gradients (`first`) and of their squares (`second`), by name, in fp64, at constant weights."""

    model: nn.Module
    first: dict[str, Tensor] = field(default_factory=dict)
    second: dict[str, Tensor] = field(default_factory=dict)

    def observe(self, steps: int, clip: float, decay: dict[str, float], beta2: float) -> None:
        """Average clipped gradients over ``steps`` batches; ``decay``: parameter name -> decay of the first average."""
        params = dict(self.model.named_parameters())
        for step in range(steps):
            gradients, _ = clipped(gradients_of(self.model(*self.model.batch(step)), params), clip)
            for name, gradient in gradients.items():
                mu = decay[name]
                self.first[name] = mu * self.first.get(name, 0 * gradient) + (1 - mu) * gradient
                self.second[name] = beta2 * self.second.get(name, 0 * gradient) + (1 - beta2) * gradient.square()

    def go_on(self, steps: int, first_step: int, count: int) -> dict[str, Tensor]:
        """Train ``steps`` steps from these averages and return the weights; AdamW has counted ``count`` before."""
        model, routing = copy.deepcopy(self.model), route(self.model)
        params = dict(model.named_parameters())
        for step in range(first_step, first_step + steps):
            count += 1
            gradients, _ = clipped(gradients_of(model(*model.batch(step)), params), ORACLE.clip)
            with torch.no_grad():
                for name, param in params.items():
                    if routing[name] == "muon":
                        muon_update(param, gradients[name], self.first[name], ORACLE.lr, ORACLE)
                    else:
                        moments = self.first[name], self.second[name]
                        adam_update(param, gradients[name], *moments, count, ORACLE.adam_lr, ORACLE)
        return {name: param.detach().clone() for name, param in params.items()}


def averages(clip: float, muon: float, beta1: float) -> GradientAverages:
    """Return the averages of the small model after three steps; ``muon`` and ``beta1``: decays of the first average."""
    result = GradientAverages(MODELS["mlp"]().double())
    result.observe(
        3, clip, {name: muon if kind == "muon" else beta1 for name, kind in route(result.model).items()}, 0.95
    )
    return result


def compare(expected: GradientAverages, got: dict[str, Any], tolerance: float, label: Any, count: int = 3) -> None:
    """State, step count, and the next two steps against the definition."""
    assert got["steps"] == [count] and got["count"] == 3
    for name, kind in route(expected.model).items():
        key = "momentum_buffer" if kind == "muon" else "exp_avg"
        error = (got["states"][f"{name}.{key}"] - expected.first[name]).norm() / expected.first[name].norm()
        assert error <= tolerance, (label, name, key)
    after, initial = copy.deepcopy(expected).go_on(2, 3, count), dict(expected.model.named_parameters())
    for name, weight in after.items():
        error = change_error(initial[name].detach(), got["after"][name], weight)
        assert error <= 100 * tolerance, (label, name, error)


# ---- stock's Muon ---------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.time_limit(900)
@pytest.mark.parametrize(
    ("cases", "targets"), [(SAVED_BY_STOCK, TARGETS[:2]), (SAVED_BY_STOCK[1:2] + REST, TARGETS)], ids=["first", "rest"]
)
def test_going_on_from_stocks_muon(cases: list[Case], targets: list[Case], tmp_path: Path) -> None:
    """Momentum bit for bit by whatever layout it was saved; then the steps of the definition."""
    stock = run(save_stock, 2, fresh=True, restart=True, env=STOCK, timeout=250, cases=cases, folder=str(tmp_path))
    definition = averages(0.0, 0.9, 0.8)
    for index in range(len(cases)):
        assert main(["import", "--from", f"{tmp_path}/{index}/saved", "--to", f"{tmp_path}/{index}/universal"]) == 0
    jobs = [(str(tmp_path / str(index)), target) for index in range(len(cases)) for target in targets]
    for job, got in enumerate(run(take_over, 3, timeout=250, jobs=jobs)[0]):
        case = cases[job // len(targets)]
        scale = 64 if case.get("dtype") == "fp16" else 1
        for rank in stock:
            for name, momentum in rank[job // len(targets)].items():
                assert got["states"][f"{name}.momentum_buffer"].equal(momentum.float() / scale), (case, name)
        assert {name for rank in stock for name in rank[job // len(targets)]} == {
            name for name, kind in route(definition.model).items() if kind == "muon"
        }
        half = "dtype" in case
        # Stock's wrapper of stage 0 in bf16 makes a step with zero gradients when it is built.
        compare(definition, got, 2e-2 if half else 1e-5, case, 4 if half and case["stage"] == 0 else 3)


def outcome(folder: str, universal: bool, params: dict[str, Any], stage: int = 2) -> tuple[str, list[str]]:
    """The error of loading into the small GPT, or none, and what was logged."""
    extra = {"checkpoint": {"load_universal": True}} if universal else {}
    error = ""
    with logged() as said:
        optimizer = {"type": "Muon", "params": PARAMS | params}
        engine = build({"stage": stage, "model": "gpt"}, 7, optimizer=optimizer, **extra)
        before = facts(engine)["weights"]
        try:
            engine.load_checkpoint(folder, tag="universal" if universal else "saved")
        except ValueError as raised:
            error = str(raised)
            is_same = all(weight.equal(before[name]) for name, weight in facts(engine)["weights"].items())
            assert is_same
    engine.destroy()
    return error, [line for line in said if ": imported from " in line]


@pytest.mark.full
def test_what_changes_its_optimizer_is_refused_by_name(tmp_path: Path) -> None:
    """Stock gives the embeddings `tokens` and `positions` to Muon."""
    run(save_stock, 2, fresh=True, restart=True, env=STOCK, cases=[{"stage": 2, "model": "gpt"}], folder=str(tmp_path))
    folder = str(tmp_path / "0")
    ask = {"folder": folder, "params": {}}
    error, _ = run(outcome, 2, universal=False, **ask)[0]
    assert (
        f"stock's Muon saved it; run ds_muon import --from {folder}/saved --to {folder}/saved_universal, then" in error
    )
    error, _ = run(outcome, 2, universal=False, stage=0, **ask)[0]
    assert "saved at ZeRO stage 1, 2 or 3, this run has stage 0; load only its weights, with load_module_only" in error
    assert main(["import", "--from", f"{folder}/saved", "--to", f"{folder}/universal", "--json"]) == 0
    error, _ = run(outcome, 1, universal=True, **ask)[0]
    assert "and AdamW updates them in this one: tokens.weight, positions.weight" in error
    for params, expected in (
        (
            {"muon_include": ["tokens", "positions"]},
            ["10 x momentum_buffer as saved", "17 x exp_avg and exp_avg_sq as"],
        ),
        ({"import_momentum": "zero"}, ["8 x momentum_buffer as saved", "2 x exp_avg and exp_avg_sq at zero"]),
    ):
        error, lines = run(outcome, 1, folder=folder, universal=True, params=params)[0]
        assert error == "" and len(lines) == 2
        assert all(text in " ".join(lines) and "stock's Muon" in lines[0] for text in expected), lines


def test_files_are_read_in_the_order_of_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in range(12):
        (tmp_path / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
    read: list[str] = []

    def states(file: Path) -> dict[str, Any]:
        read.append(file.name)
        return {"optimizer_state_dict": {"optimizer_state_dict": {"param_groups": [], "state": {}}}}

    monkeypatch.setattr(from_stock, "read_states", states)
    with pytest.raises(ImportStateError, match="has no mp_rank_00_model_states"):
        from_stock.read(tmp_path)
    assert read == [f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(12)]


def test_what_starts_at_zero_counts_its_steps_anew() -> None:
    """Else AdamW's bias correction would take moments at zero for moments of many steps."""
    net = MODELS["mlp"]()
    optimizer = MuonWithAuxAdam(net.parameters(), model=net, lr=0.01)
    net(*net.batch(0)).backward()
    optimizer.step()
    names = {spec.name: spec.use_muon for spec in optimizer.specs.values()}
    source = Source(
        "a test", names, lambda name, key: torch.ones(dict(net.named_parameters())[name].shape), lambda _: 7
    )
    zeroed, *kept = (name for name, use_muon in names.items() if not use_muon)
    for partition in optimizer.all_partitions:
        write_state(optimizer, partition, source, {zeroed: "zero"} | dict.fromkeys(kept, "kept"))
    states = {optimizer.specs[param].name: state for param, state in optimizer.state.items()}
    assert [float(states[name]["step"]) for name in (zeroed, *kept)] == [0.0, *(7.0 for _ in kept)]
    assert not states[zeroed]["exp_avg"].any() and bool((states[kept[0]]["exp_avg"] == 1).all())


@pytest.mark.parametrize(("entries", "steps"), [([{}, {"step": torch.tensor(4.0)}], 4), ([{"exp_avg": 1}], 5), ([], 5)])
def test_skipped_steps_do_not_count(entries: list[dict[str, Any]], steps: int, tmp_path: Path) -> None:
    """Steps are counted by the states; where these count none, by the engine, whose count includes skipped steps."""
    torch.save({"global_steps": 7, "skipped_steps": 2}, tmp_path / "model.pt")
    saved = from_stock.Saved(tmp_path, "model.pt", stage=2)
    saved.take_steps(entries)
    assert saved.steps == steps


def test_the_command_refuses_what_is_not_stocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", "--from", str(tmp_path), "--to", str(tmp_path / "new")]) == 2
    assert "has no mp_rank_00_model_states.pt" in capsys.readouterr().err
    assert main(["import", "--from", str(tmp_path / "a"), "--to", str(tmp_path)]) == 2
    assert "exists already" in capsys.readouterr().err
    cases: list[Case] = [{"stage": 2}, {"stage": 2, "optimizer": ADAMW}]
    run(save_others, 1, cases=cases, folder=str(tmp_path))
    for index in range(2):
        assert main(["import", "--from", f"{tmp_path}/{index}/saved", "--to", str(tmp_path / "new")]) == 2
        assert "is not a checkpoint of stock's Muon" in capsys.readouterr().err
    assert not (tmp_path / "new").exists() and not list(tmp_path.glob(".*"))


# ---- AdamW ----------------------------------------------------------------------------------------------------


def save_others(cases: list[Case], folder: str) -> list[dict[str, Tensor]]:
    """By case: the moments of the optimizer after three steps, of which a checkpoint is left."""
    from deepspeed.utils import safe_get_full_optimizer_state

    results = []
    for index, case in enumerate(cases):
        engine = build(case, 0)
        train_engine(engine, 3)
        engine.save_checkpoint(f"{folder}/{index}", tag="saved")
        is_adam = case.get("optimizer", {}).get("type") == "AdamW"
        results.append(
            {
                f"{name}.{key}": safe_get_full_optimizer_state(param, key).clone()
                for name, param in engine.module.named_parameters()
                for key in (("exp_avg", "exp_avg_sq") if is_adam else ())
            }
        )
        engine.destroy()
    return results


@pytest.mark.full
def test_going_on_from_adamw(tmp_path: Path) -> None:
    """Stages 1 to 3: the first moment becomes the momentum bit for bit; then the steps of the definition."""
    resting_adamw = {"type": "AdamW", "params": ADAMW["params"] | {"lr": 0.0, "weight_decay": 0.0}}
    cases = [case | {"optimizer": resting_adamw} for case in (*TARGETS, BF16_OPTIMIZER)]
    saved = run(save_others, 2, cases=cases, folder=str(tmp_path))[0]
    for index in range(len(cases)):
        convert(tmp_path / str(index), inject=True)
    jobs = [(str(tmp_path / str(index)), target) for index in range(len(cases)) for target in TARGETS]
    definition = averages(1.0, 0.8, 0.8)
    for job, got in enumerate(run(take_over, 3, jobs=jobs)[0]):
        before = saved[job // len(TARGETS)]
        for key, state in got["states"].items():
            assert state.equal(before[key.replace("momentum_buffer", "exp_avg")]), (job, key)
        compare(definition, got, 2e-2 if "dtype" in cases[job // len(TARGETS)] else 1e-5, job)
    zero = {"type": "Muon", "params": PARAMS | {"import_momentum": "zero"}}
    for got in run(take_over, 2, jobs=jobs[:2], optimizer=zero)[0]:
        for key, state in got["states"].items():
            assert not state.any() if "momentum" in key else state.equal(saved[0][key]), key


# ---- state_dicts ----------------------------------------------------------------------------------------------


def plain_optimizers(net: nn.Module, convention: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """state_dicts of a Muon and of the AdamW beside it, after three steps that leave the weights alone."""
    matrices = [p for p in net.parameters() if p.ndim == 2]
    adamw = torch.optim.AdamW([p for p in net.parameters() if p.ndim < 2], lr=0.0, betas=(0.8, 0.95), weight_decay=0.0)
    named = [(name, p) for name, p in net.named_parameters() if p.ndim == 2]
    muon = torch.optim.Muon(named[::-1], lr=0.0, momentum=0.9, weight_decay=0.0)  # its state_dict has their names
    sums = [torch.zeros_like(p) for p in matrices]
    for step in range(3):
        net.zero_grad()
        net(*net.batch(step)).backward()
        for total, p in zip(sums, matrices, strict=True):
            total.mul_(0.9).add_(p.grad)
        muon.step()
        adamw.step()
    state = muon.state_dict()
    if convention == "sum":
        state["state"] = {index: {"momentum_buffer": total} for index, total in enumerate(sums[::-1])}
    return state, adamw.state_dict()


def import_plain(case: Case, convention: str) -> tuple[dict[str, Any], dict[str, Tensor], list[str]]:
    net = MODELS["mlp"]()
    muon, adamw = plain_optimizers(net, convention)
    engine = build(case, 0)
    engine.global_steps = 3
    errors = []
    biases = [name for name, p in net.named_parameters() if p.ndim < 2]
    for names in (biases[:-1], [*biases[:-1], "nothing"], biases[::-1], None):
        with pytest.raises(ImportStateError) as error:
            import_state(engine, adamw, convention, names=names)  # type: ignore[arg-type]
        errors.append(str(error.value))
    assert not any(state.any() for state in facts(engine)["states"].values())
    import_state(engine, muon, convention)  # type: ignore[arg-type]
    import_state(engine, adamw, convention, names=biases)  # type: ignore[arg-type]
    for state in engine.basic_optimizer.state.values():
        state["step"].fill_(3.0)
    result = facts(engine)
    train_engine(engine, 2, 3)
    result["after"] = facts(engine)["weights"]
    engine.destroy()
    names = [name for name, p in net.named_parameters() if p.ndim == 2]
    return result, {n: muon["state"][i]["momentum_buffer"] for i, n in enumerate(names[::-1])}, errors


@pytest.mark.parametrize("convention", ["ema", "sum"])
@pytest.mark.parametrize("case", [{"stage": 1}, {"stage": 3}], ids=str)
def test_going_on_from_a_state_dict(case: Case, convention: str) -> None:
    """torch.optim.Muon and AdamW, or sums as in Keller Jordan's first Muon."""
    result, source, errors = run(import_plain, 2, case=case, convention=convention)[0]
    for name, momentum in source.items():
        expected = momentum if convention == "ema" else momentum * (1.0 - 0.9)
        assert result["states"][f"{name}.momentum_buffer"].equal(expected), name
    compare(averages(0.0, 0.9, 0.8), result, 1e-5, convention)
    assert "pass exactly one name per parameter" in errors[0] and "nothing: the model has no such" in errors[1]
    assert "in the state_dict and [" in errors[2] and json.dumps(errors)
    assert "does not name its 5 parameters, so those of equal shape could be mixed up" in errors[3]
    assert "pass names=[...]" in errors[3]


class WithConvolution(nn.Module):
    """A matrix for Muon, and a convolution in channels_last for AdamW."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        self.fc = nn.Linear(4, 5)


def test_state_of_a_convolution_in_channels_last() -> None:
    """Each element arrives at its index, not at its place in memory."""
    net = WithConvolution()
    optimizer = MuonWithAuxAdam(net.parameters(), model=net, lr=0.1)
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    moments = {key: torch.randn(4, 3, 2, 2) for key in ("exp_avg", "exp_avg_sq")}
    saved = {"state": {0: {**moments, "step": 7}}, "param_groups": [{"params": [0], "param_names": ["conv.weight"]}]}
    engine = SimpleNamespace(basic_optimizer=optimizer, optimizer=optimizer, global_rank=1)
    import_state(engine, saved, "ema")
    state = optimizer.state[net.conv.weight]
    assert not state["exp_avg"].is_contiguous() and float(state["step"]) == 7
    assert all(state[key].equal(value) for key, value in moments.items())
