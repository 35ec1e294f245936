# SPDX-License-Identifier: Apache-2.0
"""The rule for ns_method auto: the shipped file, the command that measures it anew, and a measurement's bounds."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed.muon.errors import RuleError
from deepspeed.muon.kernels import reference
from deepspeed.muon.math import choice, measure
from deepspeed.muon.math.choice import KINDS, choose_method, kind_of, parse, pins, shape_key, shipped
from deepspeed.muon.math.coefficients import schedule
from deepspeed.muon.math.newton_schulz import METHODS
from deepspeed.muon.optimizer import MuonWithAuxAdam
from helpers.models import Mlp

CPU = torch.device("cpu")
SIDES = (1, 3, 48, 64, 127, 128, 200, 512, 1024, 4096, 11008, 10**6)
#: Never below 10, from twice as long up to 99, from there always.
BANDS = {"basis": "made up", "bands": [[1, None], [10, 2.0], [100, 1]]}

# ---- the shipped file -----------------------------------------------------------------------------------


def test_the_shipped_rule_answers_for_every_shape() -> None:
    assert set(shipped()) == set(KINDS) == {kind_of(*of) for of in (("cpu", 2), ("cpu", 4), ("cuda", 2), ("xpu", 4))}
    for kind, rule in shipped().items():
        for rows in SIDES:
            for cols in SIDES:
                method = choose_method(rows, cols, "auto", kind)
                assert method in METHODS and method == choose_method(cols, rows, "auto", kind) == rule.method(
                    rows, cols
                )
        assert rule.basis


def test_bands() -> None:
    rule = parse(dict.fromkeys(KINDS, BANDS))["cpu bf16"]
    expected = {(9, 900): "standard", (10, 20): "gram", (10, 19): "standard", (99, 197): "standard", (100, 100): "gram"}
    assert {shape: rule.method(*shape) for shape in expected} == expected
    assert rule.method(20, 10) == "gram"


WRONG: dict[str, Any] = {
    "no object": [1],
    "a kind too few": dict.fromkeys(KINDS[1:], BANDS),
    "a kind too many": dict.fromkeys((*KINDS, "tpu bf16"), BANDS),
    "no basis": {kind: {"bands": BANDS["bands"]} for kind in KINDS},
    "no bands": {kind: BANDS | {"bands": []} for kind in KINDS},
    "not from 1": {kind: BANDS | {"bands": [[2, 2.0]]} for kind in KINDS},
    "out of order": {kind: BANDS | {"bands": [[1, 2.0], [9, 1], [8, 1]]} for kind in KINDS},
    "an aspect below 1": {kind: BANDS | {"bands": [[1, 0.5]]} for kind in KINDS},
    "a word": {kind: BANDS | {"bands": [[1, "gram"]]} for kind in KINDS},
    "half a band": {kind: BANDS | {"bands": [[1]]} for kind in KINDS},
}


@pytest.mark.parametrize("name", [*WRONG, "cut short", "absent"])
def test_a_bad_file_is_refused_in_words(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "choice.json"
    if name != "absent":
        file.write_text(json.dumps(WRONG[name]) if name in WRONG else '{"cpu bf16": {')
    monkeypatch.setattr(choice, "FILE", file)
    shipped.cache_clear()
    try:
        with pytest.raises(
            RuleError,
            match=r"^choice.json: .*; install deepspeed-muon again, or run python -m benchmarks choose --write",
        ):
            choose_method(64, 64, "auto", "cpu bf16")
    finally:
        shipped.cache_clear()


def test_what_wins() -> None:
    kind = "cpu fp32"
    assert pins([(8, 16), (4, 4)], kind) == {"4x4": "standard", "8x16": shipped()[kind].method(8, 16)}
    for method in METHODS:
        assert choose_method(16, 8, method, kind, {"8x16": "standard"}) == method
        assert choose_method(16, 8, "auto", kind, {"8x16": method}) == method
        assert choose_method(16, 9, "auto", kind, {"8x16": method}) == shipped()[kind].method(16, 9)
    assert choice.unknown_methods({"8x16": "gram", "9x9": "quintic"}) == ["'quintic' for 9x9"]
    assert choice.unknown_methods(["gram"]) == ["['gram']"]


# ---- a measurement --------------------------------------------------------------------------------------


class Time:
    """A clock that stands still except while Newton-Schulz runs, for as long as it is told."""

    def __init__(self, seconds: Callable[[tuple[int, ...], str], float]) -> None:
        self.now, self.seconds, self.calls = 0.0, seconds, [("", 0)]

    def __call__(self) -> float:
        return self.now

    def orthogonalize(self, x: Tensor, schedule: Any, method: str, **rest: Any) -> Tensor:
        self.now += self.seconds(tuple(x.shape), method)
        self.calls.append((method, x.size(0)))
        return x


def test_a_measurement_is_bounded_and_keeps_the_median(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first runs are slow and not counted; a shape for which no time is left is missing, and the rule's."""
    runs: dict[tuple, int] = {}

    def seconds(shape: tuple[int, ...], method: str) -> float:
        runs[shape, method] = runs.get((shape, method), 0) + 1
        operations = shape[0] * shape[1] ** 2 * shape[2]
        return 1.0 if runs[shape, method] == 1 else {"standard": 3e-6, "gram": 1.5e-6}[method] * operations

    time = Time(seconds)
    monkeypatch.setattr(measure, "orthogonalize", time.orthogonalize)
    shapes = {(8, 8): 100, (4, 8): 3, (64, 64): 1, (640, 640): 1}
    times = measure.measure(shapes, schedule("simple"), torch.float32, CPU, reference.OPERATIONS, 8.0, time)
    assert list(times) == [(4, 8), (8, 8)], "cheap ones first; the third would take too long"
    assert times[4, 8] == pytest.approx({"standard": 3 * 4 * 4 * 8 * 3e-6, "gram": 3 * 4 * 4 * 8 * 1.5e-6})
    assert 4 < time.now <= 8.0
    assert max(count for _, count in time.calls) == 100 and time.calls[1] == ("standard", 3)


def test_a_large_matrix_is_a_batch_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    time = Time(lambda shape, method: 0.1)
    monkeypatch.setattr(measure, "orthogonalize", time.orthogonalize)
    monkeypatch.setattr(measure, "BATCH_BYTES", 4 * 64 * 2)
    for shape, count in (((8, 8), 2), ((4, 8), 4), ((16, 16), 1)):
        measure.race(shape, 9, schedule("simple"), torch.float32, CPU, reference.OPERATIONS, 0.0, time)
        assert time.calls[-1][1] == count
    assert [method for method, _ in time.calls[-4:]] == [*METHODS, *METHODS], "one round that counts, in turn"


def test_a_measurement_leaves_torchs_generator_alone() -> None:
    state = torch.get_rng_state()
    times = measure.measure({(4, 8): 2}, schedule("simple"), torch.float32, CPU, reference.OPERATIONS, 0.01)
    assert torch.equal(torch.get_rng_state(), state)
    assert set(times[4, 8]) == set(METHODS) and all(value > 0 for value in times[4, 8].values())


@pytest.mark.parametrize(("gram", "usual", "expected"), [(0.5, "standard", "gram"), (2.0, "gram", "standard")])
def test_only_what_is_clearly_faster_wins(gram: float, usual: str, expected: str) -> None:
    assert measure.better({"standard": 1.0, "gram": gram}, usual) == expected
    for near in (0.99, 1.01):
        assert measure.better({"standard": 1.0, "gram": near}, usual) == usual


# ---- plain PyTorch --------------------------------------------------------------------------------------


def test_plain_pytorch_keeps_its_methods_and_does_not_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Mlp()

    def trained(**config: Any) -> MuonWithAuxAdam:
        optimizer = MuonWithAuxAdam(net.parameters(), model=net, lr=0.01, ns_dtype="fp32", **config)
        net(*net.batch(0)).backward()
        return optimizer

    said: list[str] = []
    monkeypatch.setattr("deepspeed.muon.optimizer.logger.warning", lambda text, *args: said.append(text % args))
    optimizer = trained(ns_tuning="measured")
    optimizer.step()
    (group, _) = optimizer.param_groups
    assert group["ns_methods"] == pins(optimizer.shapes, "cpu fp32")
    assert said == ["deepspeed-muon: ns_tuning: measured acts under DeepSpeed only; the shipped rule is taken"]
    group["ns_methods"][shape_key(7, 15)] = "gram"
    saved = optimizer.state_dict()
    for steps_before_loading in (0, 1):
        other = trained()
        for _ in range(steps_before_loading):
            other.step()
        other.load_state_dict(saved)
        other.step()
        assert other.param_groups[0]["ns_methods"] == group["ns_methods"]


# ---- what the commands say ------------------------------------------------------------------------------


def test_plan_and_report_name_method_and_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    from deepspeed.muon.cli.main import main

    (tmp_path / "net.py").write_text("from torch import nn\ndef net():\n    return nn.Sequential(nn.Linear(64, 640))\n")
    monkeypatch.chdir(tmp_path)
    rule = shipped()["cpu fp32"].method(64, 640)
    for params, methods in (({"ns_method": "standard"}, ["standard"]), ({"ns_tuning": "measured"}, [rule])):
        config = {"optimizer": {"type": "Muon", "params": {"ns_dtype": "fp32", "muon_include": "weight"} | params}}
        (tmp_path / "ds.json").write_text(json.dumps(config))
        command = ["plan", "--config", "ds.json", "--model", "net.py:net", "--world-size", "2", "--device", "cpu"]
        assert main([*command, "--json"]) == main(command) == 0
        facts, text = capsys.readouterr().out.split("\n", 1)
        assert [row["methods"] for row in json.loads(facts)["parameters"]] == [methods, []]
        assert ("rank 0 may choose others at start" in facts) is ("ns_tuning" in params)
        (line,) = [line for line in text.splitlines() if "0.weight" in line]
        assert methods[0] in line.split()
    main(["report", "--json"])
    main(["report"])
    facts, text = capsys.readouterr().out.split("\n", 1)
    stated = json.loads(facts)["ns_rule"]
    assert stated["for"] in KINDS and stated["basis"] == shipped()[stated["for"]].basis
    (line,) = [line for line in text.splitlines() if line.startswith("Newton-Schulz methods")]
    assert stated["basis"] in line and f"{stated['for']}: gram from this aspect ratio on" in line
