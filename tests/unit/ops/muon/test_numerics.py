# SPDX-License-Identifier: Apache-2.0
"""Settings of torch that a script leaves on do not change what the optimizer computes."""

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed.muon import MuonWithAuxAdam
from helpers.distributed import run
from helpers.engine_state import owned_tensors
from helpers.models import MODELS
from helpers.paths import PACKAGE
from helpers.training import PARAMS, FixedGradients, ds_config, fp32_weights, make_engine

SHAPES = [(24, 48), (48, 24), (36, 36)]
RULES: dict[str, dict[str, Any]] = {
    "fp32": {"ns_dtype": "fp32"},
    "normuon": {"ns_dtype": "fp32", "normuon": True, "muon_eq": "rows"},
    "muon_plus": {"ns_dtype": "fp32", "muon_plus": True},
    "bf16": {"ns_dtype": "bf16", "momentum_dtype": "bf16", "cautious_weight_decay": True},
    "int8": {"ns_dtype": "fp32", "momentum_dtype": "int8", "ns_method": "gram"},
}


@contextmanager
def changed(get: Callable[[], Any], set_: Callable[[Any], Any], value: Any) -> Iterator[None]:
    before = get()
    set_(value)
    try:
        yield
    finally:
        set_(before)


def default_dtype(dtype: torch.dtype) -> Any:
    return changed(torch.get_default_dtype, torch.set_default_dtype, dtype)


SETTINGS: dict[str, Callable[[], Any]] = {
    "default dtype bf16": lambda: default_dtype(torch.bfloat16),
    "default dtype fp64": lambda: default_dtype(torch.float64),
    "default device": lambda: torch.device("meta"),
    "matmul precision": lambda: changed(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"
    ),
    "deterministic": lambda: changed(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
    ),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "inference mode": torch.inference_mode,
}
"""What a script may have set, by name: a context."""


def trained(params: dict[str, Any], setting: Callable[[], Any] | None) -> list[Tensor]:
    """Weights and state after three steps on fixed gradients in plain PyTorch."""
    net = FixedGradients(SHAPES)
    net.register_parameter("bias", nn.Parameter(torch.ones(5)))
    gradients = [net.gradients(number) for number in range(3)]
    optimizer = MuonWithAuxAdam(net.parameters(), model=net, **PARAMS | params)
    for number in range(3):
        for layer, gradient in zip(net.layers, gradients[number], strict=True):
            layer.weight.grad = gradient.clone()
        net.bias.grad = torch.full((5,), 0.1 * number + 0.1, dtype=torch.float32)
        if setting is None:
            optimizer.step()
        else:
            with setting():
                optimizer.step()
    state = [value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor)]
    return [*(p.detach() for p in net.parameters()), *state, *owned_tensors(optimizer)]


@pytest.mark.parametrize("rule", RULES)
def test_no_setting_of_the_script_changes_a_step(rule: str) -> None:
    expected = trained(RULES[rule], None)
    for name, setting in SETTINGS.items():
        got = trained(RULES[rule], setting)
        assert [value.dtype for value in got] == [value.dtype for value in expected], name
        assert not any(value.is_inference() for value in got), name
        assert all(map(torch.equal, got, expected)), name


def test_a_step_leaves_the_settings_as_they_were() -> None:
    read = (
        torch.get_default_dtype,
        torch.get_float32_matmul_precision,
        lambda: torch.is_autocast_enabled("cpu"),
        torch.is_inference_mode_enabled,
        torch.is_grad_enabled,
        lambda: torch.backends.cuda.matmul.allow_fp16_accumulation,
        lambda: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
    )
    net = FixedGradients(SHAPES)
    optimizer = MuonWithAuxAdam(net.parameters(), model=net, **PARAMS)
    for name, setting in SETTINGS.items():
        with setting():
            before = [one() for one in read]
            optimizer.step()
            assert [one() for one in read] == before, name


def test_a_closure_runs_under_the_settings_of_the_script() -> None:
    net = FixedGradients(SHAPES)
    optimizer, seen = MuonWithAuxAdam(net.parameters(), model=net, **PARAMS), []

    def closure() -> float:
        seen.append((torch.get_default_dtype(), torch.is_autocast_enabled("cpu")))
        return 0.5

    with default_dtype(torch.float64), torch.autocast("cpu", dtype=torch.bfloat16):
        assert optimizer.step(closure) == 0.5
    assert seen == [(torch.float64, True)]


def engines(stage: int, rules: dict[str, Any], dtype: torch.dtype, precision: str) -> dict[str, Tensor]:
    """Master weights after three steps of an engine that was built and stepped under a default dtype."""
    gradients = [FixedGradients(SHAPES).gradients(number) for number in range(3)]
    net = FixedGradients(SHAPES)
    section = {"type": "Muon", "params": PARAMS | {"ns_dtype": "fp32"} | rules}
    with (
        default_dtype(dtype),
        changed(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, precision),
    ):
        engine = make_engine(net, ds_config(stage=stage, optimizer=section, dtype="bf16"))
        for one in gradients:
            engine.backward(engine(one))
            engine.step()
        weights = fp32_weights(engine)
    engine.destroy()
    return weights


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_default_dtype_that_a_factory_leaves_on_changes_nothing_under_deepspeed(stage: int) -> None:
    kwargs: dict[str, Any] = {"stage": stage, "rules": {"normuon": True}}
    expected = run(engines, 2, **kwargs, dtype=torch.float32, precision="highest")
    got = run(engines, 2, **kwargs, dtype=torch.bfloat16, precision="medium")
    for rank in range(2):
        assert all(torch.equal(got[rank][name], expected[rank][name]) for name in expected[rank])


def test_qk_clip_under_a_default_dtype() -> None:
    def logits(setting: Callable[[], Any]) -> tuple[dict[str, float], list[Tensor]]:
        net = MODELS["gpt"]()
        batch = net.batch(0)
        optimizer = MuonWithAuxAdam(net.parameters(), model=net, **PARAMS, qk_clip={"tau": 0.01})
        loss = net(*batch)
        loss.backward()
        with setting():
            optimizer.step()
        assert optimizer.qk_clip is not None
        return optimizer.qk_clip.largest, [p.detach() for p in net.parameters()]

    largest, weights = logits(lambda: default_dtype(torch.float32))
    for name in ("default dtype bf16", "default dtype fp64", "default device", "autocast"):
        found, changed_weights = logits(SETTINGS[name])
        assert found == largest, name
        assert all(map(torch.equal, changed_weights, weights)), name


FACTORIES = {"zeros", "ones", "empty", "full", "tensor", "arange", "eye", "linspace", "rand", "randn", "randint"}


def test_every_new_tensor_states_its_device_and_dtype() -> None:
    """A default of the script would decide otherwise."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            owner = node.func.value
            if isinstance(owner, ast.Name) and owner.id == "torch" and node.func.attr in FACTORIES:
                stated = {keyword.arg for keyword in node.keywords}
                assert {"device", "dtype"} <= stated or "out" in stated, f"{path}:{node.lineno}"


def test_compiling_a_step_does_not_trace_into_it() -> None:
    net = FixedGradients(SHAPES)
    optimizer = MuonWithAuxAdam(net.parameters(), model=net, **PARAMS)
    for layer, gradient in zip(net.layers, net.gradients(0), strict=True):
        layer.weight.grad = gradient
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    before = net.layers[0].weight.detach().clone()
    torch.compile(lambda: optimizer.step(), backend=backend)()
    torch._dynamo.reset()
    assert not graphs
    assert not torch.equal(net.layers[0].weight.detach(), before)
