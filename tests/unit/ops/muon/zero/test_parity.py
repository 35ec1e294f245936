# SPDX-License-Identifier: Apache-2.0
"""Training under ZeRO against the whole-matrix oracle, which computes its own gradients from the raw data."""

import itertools
from typing import Any

import pytest
import torch

from helpers.distributed import run
from helpers.models import MODELS, train_engine
from helpers.oracles import change_cosine
from helpers.parity import AUTOCAST, CELLS, FP16_AUTOCAST, SHAPES, STEPS, assert_parity, oracle, update_error
from helpers.training import PARAMS, ds_config, make_engine, train, train_on_gradients

FACTORS: dict[str, tuple[Any, ...]] = {
    "stage": (0, 1, 2, 3),
    "world": (1, 2, 3, 4),
    "model": ("wide", "mlp", "gpt", "few"),
    "accumulation": (1, 4),
    "clip": (0.0, 1.0, 0.01),
    "dtype": ("fp32", "bf16", "fp16"),
    "offload": (False, True),
}


def is_possible(case: dict[str, Any]) -> bool:
    """Offload needs ZeRO."""
    return case["stage"] > 0 or not case["offload"]


def all_pairs() -> list[dict[str, Any]]:
    """A deterministic greedy selection of cases that covers every pair of values of every two factors."""
    names = list(FACTORS)
    cases = [dict(zip(names, values, strict=True)) for values in itertools.product(*FACTORS.values())]
    cases = [case for case in cases if is_possible(case)]
    pairs_of = [{(a, case[a], b, case[b]) for a, b in itertools.combinations(names, 2)} for case in cases]
    missing = set().union(*pairs_of)
    chosen = []
    while missing:
        best = max(range(len(cases)), key=lambda i: len(pairs_of[i] & missing))
        missing -= pairs_of[best]
        chosen.append(cases[best])
    return chosen


CASES = all_pairs()
#: What every stage and world size is held to, beside the pairs: clipping, accumulation and offload together.
GRID = [
    {"stage": s, "world": w, "model": "mlp", "accumulation": 4, "clip": 1.0, "dtype": "fp32", "offload": s > 0}
    for s in (0, 1, 2, 3)
    for w in (1, 2, 3, 4)
]


def name(case: dict[str, Any]) -> str:
    """The test's id."""
    return "-".join(f"{key}={value}" for key, value in case.items())


def test_the_selection_covers_every_pair() -> None:
    for a, b in itertools.combinations(FACTORS, 2):
        for x, y in itertools.product(FACTORS[a], FACTORS[b]):
            is_chosen = any(case[a] == x and case[b] == y for case in CASES)
            assert is_chosen or (a, x, b, y) == ("stage", 0, "offload", True), (a, x, b, y)


@pytest.mark.sample(12)
@pytest.mark.parametrize("case", CASES + GRID, ids=name)
def test_training_equals_the_oracle(case: dict[str, Any]) -> None:
    settings = {key: value for key, value in case.items() if key != "world"}
    results = run(train, case["world"], steps=STEPS, **settings)
    reference = oracle(case["model"], case["clip"], case["dtype"])
    for weights in results:
        assert_parity(weights, reference, case["dtype"])


@pytest.mark.sample(9)
@pytest.mark.parametrize(("stage", "precision", "offload"), CELLS)
def test_every_cell_of_the_support_matrix(stage: int, precision: str, offload: str) -> None:
    """Autocast computes in half precision on weights that are fp32, so the oracle starts from fp32 weights."""
    autocast = {"autocast": AUTOCAST, "fp16 autocast": FP16_AUTOCAST}
    dtype, extra = ("fp32", autocast[precision]) if precision in autocast else (precision, {})
    zero = {"offload_param": {"device": "cpu"}} if offload == "both" else {}
    settings = {"stage": stage, "dtype": dtype, "offload": offload != "none", "zero": zero, **extra}
    reference = oracle("wide", 1.0, dtype)
    for weights in run(train, 2, model="wide", steps=STEPS, **settings):
        assert_parity(weights, reference, "fp32" if precision == "fp32" else "bf16")


@pytest.mark.sample(4)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("model", ["frozen", "unused", "tied", "gpt_tied"])
def test_unusual_models(stage: int, model: str) -> None:
    for weights in run(train, 2, model=model, steps=STEPS, stage=stage):
        assert_parity(weights, oracle(model, 1.0))


@pytest.mark.parametrize("offload", [False, True])
def test_zero_init(offload: bool) -> None:
    for weights in run(train, 2, model="gpt", steps=STEPS, stage=3, zero_init=True, offload=offload):
        assert_parity(weights, oracle("gpt", 1.0))


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "zero",
    [
        {"stage": 2, "round_robin_gradients": True},
        {"stage": 1, "reduce_scatter": False},
        {"stage": 2, "overlap_comm": True, "contiguous_gradients": False},
        {"stage": 3, "sub_group_size": 100},
        {"stage": 3, "overlap_comm": True, "offload_param": {"device": "cpu"}},
        {"stage": 3, "stage3_param_persistence_threshold": 0},
    ],
    ids=str,
)
def test_zero_settings_stay_the_users(zero: dict[str, Any]) -> None:
    for weights in run(train, 3, model="mlp", steps=STEPS, stage=zero["stage"], zero=zero):
        assert_parity(weights, oracle("mlp", 1.0))


def test_hierarchical_partitioning() -> None:
    for weights in run(train, 4, model="mlp", steps=STEPS, stage=3, zero={"zero_hpz_partition_size": 2}):
        assert_parity(weights, oracle("mlp", 1.0))


@pytest.mark.sample(1)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bf16_model_with_fp32_gradients(stage: int) -> None:
    """Stage 1 of these is BF16_Optimizer."""
    extra = {"data_types": {"grad_accum_dtype": "fp32"}}
    for weights in run(train, 3, model="mlp", steps=STEPS, stage=stage, dtype="bf16", **extra):
        assert_parity(weights, oracle("mlp", 1.0, "bf16"), "bf16")


def run_otherwise(way: str, steps: int = 3) -> list[float]:
    """Losses of an MLP whose layers are checkpointed by DeepSpeed, or that the engine compiles; as it is else."""
    import deepspeed

    net = MODELS["mlp"]()
    if way == "checkpointing":
        deepspeed.checkpointing.configure(None, partition_activations=False)
        for layer in net.layers[1:]:
            plain = layer.forward
            layer.forward = lambda hidden, plain=plain: deepspeed.checkpointing.checkpoint(plain, hidden)
    engine = make_engine(net, ds_config(stage=3))
    if way == "compile":
        engine.compile(backend="eager")
    losses = train_engine(engine, steps)
    engine.destroy()
    return losses


@pytest.mark.parametrize("way", ["checkpointing", pytest.param("compile", marks=pytest.mark.full)])
def test_other_ways_to_run_the_model(way: str) -> None:
    for got, expected in zip(run(run_otherwise, 2, way=way), run(run_otherwise, 2, way="plain"), strict=True):
        assert got == pytest.approx(expected, rel=1e-5)


@pytest.mark.sample(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_same_gradients_make_the_same_update_whatever_the_sharding(stage: int) -> None:
    """To the bit, without clipping: DeepSpeed sums the norm that clipping needs in another order at stage 0."""

    def update(world: int, stage: int, **more: Any) -> dict[str, torch.Tensor]:
        return run(train_on_gradients, world, shapes=SHAPES, steps=3, stage=stage, clip=0.0, **more)[0]

    base = update(1, 0)
    assert update_error(update(1, 0, ulp=True), base) > 0
    assert {world: update_error(update(world, stage), base) for world in (1, 2, 4)} == {1: 0.0, 2: 0.0, 4: 0.0}


@pytest.mark.sample(2)
@pytest.mark.parametrize("stage", [3, 0, 1, 2])
@pytest.mark.parametrize(("dtype", "cosine"), [("bf16", 0.999), ("fp16", 0.9998), ("fp32", 0.9998)])
def test_a_bf16_exchange_keeps_the_direction(dtype: str, cosine: float, stage: int) -> None:
    """Newton-Schulz in any dtype, fp32 training, 48 samples for widths up to 12: norm within 1 %."""
    params = {"type": "Muon", "params": PARAMS | {"ns_dtype": dtype, "wire_dtype": "bf16"}}
    reference = oracle("narrow", 1.0)
    for weights in run(train, 2, model="narrow", steps=STEPS, stage=stage, optimizer=params):
        for key, expected in reference.weights.items():
            initial = reference.initial[key]
            assert change_cosine(initial, weights[key], expected) >= cosine, key
            assert abs((weights[key] - initial).norm() / (expected - initial).norm() - 1) <= 0.01, key


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_no_bit_depends_on_whether_a_matrix_travels(dtype: str) -> None:
    """One rank rounds to the dtype of the wire too, and so does one that owns what it holds.

    Without clipping, whose norm is summed in an order that depends on the stage.
    """
    params = {"type": "Muon", "params": PARAMS | {"ns_dtype": dtype, "wire_dtype": "bf16"}}
    base = run(train_on_gradients, 1, shapes=SHAPES, steps=3, clip=0.0, stage=0, optimizer=params)[0]
    for world, stage in ((1, 3), (2, 1), (2, 3)):
        weights = run(train_on_gradients, world, shapes=SHAPES, steps=3, clip=0.0, stage=stage, optimizer=params)[0]
        assert all(torch.equal(weights[name], base[name]) for name in base), (world, stage)
