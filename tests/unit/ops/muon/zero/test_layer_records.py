# SPDX-License-Identifier: Apache-2.0
"""Records of layers: against the oracle, the same however the model is sharded, and free where there are none."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed.muon import step_stats
from deepspeed.muon.step_stats import SIZES, Sample, StepStats, label, values_of
from deepspeed.muon.zero import monitor
from helpers import nvme, tensor_parallel
from helpers.distributed import run
from helpers.experts import WithExperts, spread_model
from helpers.models import MODELS, Mlp, fused_parts, train_engine
from helpers.oracles import SCALES, newton_schulz_fp64, route, train_oracle
from helpers.parity import SHAPES
from helpers.pipelines import train_pipeline
from helpers.records import Records, monitored, of_parameters, records, sections
from helpers.rules import RULES
from helpers.training import ORACLE, make_engine, train_on_gradients

CAUTIOUS = RULES["cautious"]
STEPS = 5

# ---- against the oracle -------------------------------------------------------------------------------------


def write(model: str, folder: str, params: dict[str, Any], steps: int, **config: Any) -> None:
    engine = make_engine(MODELS[model](), monitored(folder, 1, params, **config))
    train_engine(engine, steps)
    engine.destroy()


def rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


@cache
def expected() -> list[dict[str, float]]:
    """By step, what records of a TinyGpt with cautious decay should say of every matrix, from whole matrices.

    Of a parameter that is several, the sampled one is the first.
    """
    net, weights = MODELS["gpt"](), []
    found: list[tuple[Tensor, Tensor]] = []

    def orthogonalize(matrix: Tensor) -> Tensor:
        found.append((matrix.clone(), newton_schulz_fp64(matrix)))
        return found[-1][1]

    def observe(model: nn.Module, batch: tuple[Tensor, ...]) -> Callable[[], None]:
        weights.append({name: p.detach().clone() for name, p in model.named_parameters()})
        return lambda: None

    config = replace(ORACLE, **CAUTIOUS[1], orthogonalize=orthogonalize, observe=observe)
    routing, parts = route(net, ("tokens", "positions", "lm_head")), fused_parts(net)
    train_oracle(net, net.batch, STEPS, routing, config, parts=parts)
    steps, results = [], iter(found)
    for before in weights:
        step: dict[str, float] = {}
        for name in (name for name, half in routing.items() if half == "muon"):
            pieces = [before[name].reshape(-1)[part] for part in parts[name]] if name in parts else [before[name]]
            taken = [next(results) for _ in pieces]
            updates = [SCALES[config.scale](*out.shape) * out for _, out in taken]
            change = torch.cat([config.lr * update.flatten() for update in updates])
            step[f"update_to_weight_{name}"] = rms(change) / rms(torch.cat([piece.flatten() for piece in pieces]))
            acts = torch.cat([(w * u >= 0).flatten() for w, u in zip(pieces, updates, strict=True)])
            step[f"cautious_decay_{name}"] = float(acts.double().mean())
            (matrix, result), *_ = taken
            singular, of_result = (torch.linalg.svdvals(x.double()).square() for x in (matrix, result))
            step[f"effective_rank_{name}"] = float(singular.sum() ** 2 / singular.square().sum())
            step[f"orthogonality_error_{name}"] = rms(of_result - 1)
        steps.append(step)
    return steps


CASES = [(1, {"stage": 0}), (2, {"stage": 0}), (2, {"stage": 1}), (3, {"stage": 2, "offload": True}), (2, {"stage": 3})]


@pytest.mark.parametrize(("world", "case"), CASES, ids=str)
def test_records_equal_the_oracle(world: int, case: dict[str, Any], tmp_path: Path) -> None:
    run(write, world, model="gpt", folder=str(tmp_path), params=CAUTIOUS[0], steps=STEPS, **case)
    found = of_parameters(records(tmp_path))
    always = [name for name in expected()[0] if name.startswith(("update", "cautious"))]
    assert [len(found[name]) for name in always] == [STEPS] * len(always)
    sampled = found.keys() - set(always)
    assert len(sampled) == 2 * STEPS, "another parameter in every step"
    for name, rows in found.items():
        for samples, value in rows:
            wanted = expected()[samples // 48 - 1][name]
            tolerance = {"abs": 0.004} if name.startswith("cautious") else {"rel": 2e-3}  # signs of tiny elements
            assert value == pytest.approx(wanted, **tolerance), (name, samples)


def test_the_oracle_tells_the_layers_apart() -> None:
    """So that the test above can fail."""
    first = expected()[0]
    for measure in ("update_to_weight", "orthogonality_error", "effective_rank"):
        values = [value for name, value in first.items() if name.startswith(measure)]
        assert min(abs(a - b) for i, a in enumerate(values) for b in values[:i]) > 1e-4 * max(values)
    assert all(0.2 < value < 0.8 for name, value in first.items() if name.startswith("cautious"))


# ---- however the model is sharded -----------------------------------------------------------------------------


def write_on_gradients(folder: str, **config: Any) -> None:
    params = CAUTIOUS[0] | {"muon_split": {"layers.3": {"sizes": [30, 35], "axis": 1}}}  # columns
    train_on_gradients(SHAPES, 6, clip=0.0, **sections(folder, 1, params), **config)


def test_the_same_values_whatever_the_sharding(tmp_path: Path) -> None:
    found: dict[tuple[int, int], Records] = {}
    for stage, world in ((0, 1), (0, 2), (1, 2), (2, 4), (3, 2), (3, 4)):
        folder = tmp_path / f"{stage}-{world}"
        run(write_on_gradients, world, folder=str(folder), stage=stage)
        found[stage, world] = of_parameters(records(folder))
    base = found[0, 1]
    assert len(base) == 4 * len(SHAPES)
    for case, others in found.items():
        assert others.keys() == base.keys(), case
        for name, rows in base.items():
            exact = not name.startswith("update")  # sums of squares are taken in another order
            wanted = rows if exact else [(at, pytest.approx(value, rel=1e-5)) for at, value in rows]
            assert others[name] == wanted, (case, name)


def assert_alike(a: Records, b: Records, tolerance: float = 1e-3) -> None:
    assert a.keys() == b.keys()
    for name, rows in a.items():
        values, others = ([value for _, value in of] for of in (rows, b[name]))
        assert others == pytest.approx(values, rel=tolerance, abs=1e-6), name


def write_pipeline(folder: str, stages: int) -> None:
    train_pipeline("untied", stages, steps=3, **sections(folder, 1, {"qk_clip": {}}))


def test_a_pipeline_records_the_layers_of_all_stages(tmp_path: Path) -> None:
    found = []
    for stages in (1, 2):
        run(write_pipeline, stages, folder=str(tmp_path / str(stages)), stages=stages)
        found.append(of_parameters(records(tmp_path / str(stages))))
    assert {"max_logit_2", "max_logit_3", "update_to_weight_2.up.weight", "update_to_weight_3.up.weight"} <= set(
        found[0]
    )
    assert_alike(*found)


def write_tensor_parallel(folder: str, tp: int) -> None:
    tensor_parallel.train("llama", tp, 2, stage=2, **sections(folder, 1))


def test_tensor_parallel_ranks_record_whole_matrices(tmp_path: Path) -> None:
    found = []
    for tp in (1, 2):
        run(write_tensor_parallel, tp, folder=str(tmp_path / str(tp)), tp=tp)
        found.append(of_parameters(records(tmp_path / str(tp))))
    assert len(found[0]) == 2 * 7 + 4
    assert_alike(*found)


def write_experts(folder: str, spread: bool) -> None:
    net = spread_model() if spread else WithExperts(False)
    engine = make_engine(net, monitored(folder, 1, stage=2 if spread else 0))
    train_engine(engine, 3)
    engine.destroy()


def test_experts_of_a_layer_are_recorded_together(tmp_path: Path) -> None:
    for ranks in (1, 2):
        run(write_experts, ranks, folder=str(tmp_path / str(ranks)), spread=ranks > 1)
    alone, spread = (of_parameters(records(tmp_path / str(ranks))) for ranks in (1, 2))
    names = [f"update_to_weight_{label(name)}" for name in dict(WithExperts(False).named_parameters())]
    names = [name for name in dict.fromkeys(names) if "all" in name and "weight" in name.rpartition(".")[2]]
    assert len(names) == 2
    prefix = "layer.deepspeed_moe"
    for name in names:
        assert prefix in name and len(spread[name]) == 3
        assert_alike({name: alone[name]}, {name: spread[name]})


def write_offloaded(folder: str, device: str) -> None:
    engine = nvme.nvme_engine(folder=folder, device=device, **sections(folder, 1, CAUTIOUS[0]))
    train_engine(engine, 2)
    engine.destroy()


def test_nvme_gives_the_same_records_as_the_cpu(tmp_path: Path) -> None:
    for device in ("cpu", "nvme"):
        nvme.run(write_offloaded, 2, folder=str(tmp_path / device), device=device)
    found = [of_parameters(records(tmp_path / device)) for device in ("cpu", "nvme")]
    assert found[0] == found[1] and len(found[0]) >= 2 * 4


# ---- where there is no record ---------------------------------------------------------------------------------


class Operators(TorchDispatchMode):
    """Notes the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def operators_of_steps(folder: str, interval: int, steps: int, has_monitor: bool = True) -> list[tuple[list, int]]:
    """Of each step: the operators of torch, and how often something was measured."""
    settings = monitored(folder, interval, CAUTIOUS[0], stage=2)
    if not has_monitor:
        del settings["csv_monitor"]
    engine, found = make_engine(Mlp(), settings), []
    measures = [mock.patch.object(step_stats, name, wraps=getattr(step_stats, name)) for name in MEASURES]
    spies = [measure.start() for measure in measures]
    for step in range(steps):
        inputs, targets = engine.module.batch(step)
        engine.backward(engine(inputs[:24], targets[:24]))
        with Operators() as operators:
            engine.step()
        found.append((operators.names, sum(spy.call_count for spy in spies)))
    for measure in measures:
        measure.stop()
    engine.destroy()
    return found


MEASURES = ("sums_of_update", "participation_ratio", "orthogonality_error")


def test_a_step_without_a_record_does_nothing_more(tmp_path: Path) -> None:
    job = {"folder": str(tmp_path), "steps": 3}
    for rank, off in zip(
        run(operators_of_steps, 2, interval=3, **job),
        run(operators_of_steps, 2, interval=3, has_monitor=False, **job),
        strict=True,
    ):
        assert [calls for _, calls in off] == [0, 0, 0]
        assert [calls > 0 for _, calls in rank] == [False, False, True]
        assert [names for names, _ in rank[:2]] == [names for names, _ in off[:2]]
        assert len(rank[2][0]) > len(off[2][0]), "so that the line above can fail"
    assert run(operators_of_steps, 1, interval=0, **job)[0][2][1] == 0


# ---- the turn of the matrices, and values that do not exist ------------------------------------------------------


def recorder(monkeypatch: pytest.MonkeyPatch, matrices: dict[str, list[str]]) -> Any:
    monkeypatch.setattr(monitor, "union", list)
    blocks = [
        SimpleNamespace(shard=SimpleNamespace(spec=SimpleNamespace(name=parameter)), name=name)
        for parameter, names in matrices.items()
        for name in names
    ]
    plans = [SimpleNamespace(of_all=SimpleNamespace(items=blocks, counts=[1] * len(blocks)))]
    return monitor.Recorder(SimpleNamespace(plans=plans, qk_clip=None))  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [1, 2, 3, 6, 24, 225])
def test_every_matrix_has_its_turn(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = recorder(monkeypatch, {f"p{i}": [f"p{i}", f"p{i}[9]", f"p{i}[18]"] for i in range(count)})
    turns = [found.sample(turn) for turn in range(3 * count)]
    assert {sample.label for sample in turns[:count]} == {f"p{i}" for i in range(count)}
    assert len(set(turns)) == 3 * count
    early = sorted(int(sample.label[1:]) for sample in turns[:5])
    assert count < 24 or max(b - a for a, b in zip([0, *early], [*early, count], strict=True)) <= 0.45 * count


def test_without_matrices_there_is_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    assert recorder(monkeypatch, {}).sample(3) == Sample()


def test_names_of_experts() -> None:
    assert label("layers.3.moe.deepspeed_experts.17.up.weight") == "layers.3.moe.deepspeed_experts.all.up.weight"
    assert label("layers.3.experts.gate_up_proj") == "layers.3.experts.gate_up_proj"
    assert label("layers.3.up.weight") == "layers.3.up.weight"


def test_what_has_no_value_is_left_out() -> None:
    """A quotient over zero weights, a matrix without a gradient, a step that was skipped."""
    stats, group = StepStats(lambda: None, Sample("a", "a")), {"lr": 0.1, "weight_decay": 0.0}
    names = [*SIZES.values(), "update_to_weight/a", "cautious_decay/a", "orthogonality_error/a", "effective_rank/a"]
    assert values_of(names, stats.sums(names)) == {}
    stats.before_newton_schulz(("b", "a"), torch.zeros(2, 3, 4))
    stats.after_newton_schulz(("b", "a"), torch.zeros(2, 3, 4))
    stats.before_apply([("a", torch.zeros(12), torch.ones(12), 2.0)], group, cautious=True)
    assert values_of(names, stats.sums(names)) == {"update_rms_muon": pytest.approx(2.0)}
    stats.before_apply([("a", torch.ones(12), torch.ones(12), 2.0)], group | {"weight_decay": 0.1}, cautious=True)
    found = values_of(names, stats.sums(names))
    assert found["cautious_decay/a"] == 1 and found["update_to_weight/a"] == pytest.approx(0.2 * math.sqrt(2))


def test_time_to_measure_is_in_no_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(step_stats.time, "perf_counter", lambda: clock[0])
    stats = StepStats(lambda: None)
    with stats.phase("step"):
        for _ in range(2):
            with stats.phase("apply"):
                clock[0] += 1
                with stats.phase("record"):
                    clock[0] += 10
                clock[0] += 2
        clock[0] += 4
    assert stats.seconds == {"step": 10, "apply": 6, "record": 20}
