# SPDX-License-Identifier: Apache-2.0
"""AutoTP: matrices that tensor parallelism cut train as the whole matrices do."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.distributed import run
from helpers.oracles import Part, change_cosine, change_error, route, train_oracle
from helpers.rules import normuon
from helpers.tensor_parallel import bad_step, go_on, holders, model, train
from helpers.training import ORACLE, PARAMS

STEPS = 5
HEAD = 4
"""Width of a head."""
OUTER = ("model.embed", "lm_head", "gpt_neox.embed", "embed_out")


def parts_of(name: str, kind: str) -> dict[str, list[Part]]:
    """The matrices of parameters that are several, by plain indexing."""
    found = {}
    for key, param in model(name).named_parameters():
        index = torch.arange(param.numel()).view(param.shape)
        if kind == "heads" and any(f"{leaf}_proj" in key for leaf in "qkv"):
            found[key] = list(index.split(HEAD))
        if kind == "fused" and "query_key_value.weight" in key:
            found[key] = [part.reshape(-1, 24) for part in index.view(6, 3 * HEAD, 24).split(HEAD, dim=1)]
        if kind == "fused" and "gate_up" in key:
            found[key] = list(index.split(17))
        if kind == "shards" and route(model(name), OUTER)[key] == "muon":
            axis = int("o_proj" in key or "down_proj" in key)
            length = param.shape[axis]
            first = length // 3 * 2 if "self_attn" in key else length // 2
            found[key] = list(index.split([first, length - first], dim=axis))
    return found


PARAMS_OF: dict[str, dict[str, Any]] = {
    "whole": {},
    "heads": {"per_head_muon": True},
    "fused": {},
    "shards": {"tp_mode": "shard"},
}
SPLIT: dict[str, Any] = {
    "gated": {"gate_up": [17, 17]},
    "neox": {"query_key_value.weight": {"sizes": [HEAD] * 3, "groups": 6}},
}


def params_of(name: str, kind: str) -> dict[str, Any]:
    """optimizer.params."""
    return PARAMS | PARAMS_OF[kind] | ({"muon_split": SPLIT[name]} if kind == "fused" else {})


def reference(name: str, kind: str, steps: int = STEPS, **settings: Any) -> Any:
    """The oracle, which knows nothing of ranks."""
    net = model(name)
    config = replace(ORACLE, **settings)
    return train_oracle(net, net.batch, steps, route(net, OUTER), config, parts=parts_of(name, kind))


def errors(weights: dict[str, Tensor], expected: Any) -> dict[str, float]:
    """Of the change, by name; without biases of keys, whose gradient is zero but for rounding."""
    compared = ((n, w) for n, w in expected.weights.items() if not n.endswith("query_key_value.bias"))
    return {n: change_error(expected.initial[n], weights[n], w) for n, w in compared}


@pytest.mark.sample(4)
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_equals_the_oracle(stage: int, world: int) -> None:
    """Heads and widths do not divide evenly: 4 + 2 queries, 2 + 1 keys and values."""
    expected = reference("llama", "whole")
    optimizer = {"type": "Muon", "params": PARAMS}
    for weights in run(train, world, name="llama", tp=2, steps=STEPS, stage=stage, optimizer=optimizer):
        assert max(errors(weights, expected).values()) <= 1e-3


@pytest.mark.parametrize("stage", [2, *(pytest.param(stage, marks=pytest.mark.full) for stage in (0, 1, 3))])
@pytest.mark.parametrize("kind", ["whole", "shards"])
def test_normuon_equals_the_oracle(kind: str, stage: int) -> None:
    """Rows that are cut have one second moment, and shards that are matrices of their own have theirs."""
    expected = reference("llama", kind, after=normuon)
    optimizer = {"type": "Muon", "params": params_of("llama", kind) | {"normuon": True}}
    for weights in run(train, 2, name="llama", tp=2, steps=STEPS, stage=stage, optimizer=optimizer):
        assert max(errors(weights, expected).values()) <= 1e-3


def test_two_ranks_equal_one() -> None:
    optimizer = {"type": "Muon", "params": PARAMS}
    one = run(train, 1, name="llama", tp=1, steps=STEPS, stage=2, optimizer=optimizer)[0]
    two = run(train, 2, name="llama", tp=2, steps=STEPS, stage=2, optimizer=optimizer)[0]
    initial = dict(model("llama").named_parameters())
    assert max(change_error(initial[n].detach(), two[n], weight) for n, weight in one.items()) <= 1e-3


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "kind", "stage", "world"),
    [
        ("llama", "heads", 0, 2),
        ("llama", "heads", 2, 4),
        ("llama", "heads", 3, 2),
        ("neox", "fused", 1, 2),
        ("neox", "fused", 3, 4),
        ("gated", "fused", 0, 4),
        ("gated", "fused", 2, 2),
        ("gated", "fused", 3, 4),
        ("gated", "whole", 2, 4),
        ("llama", "shards", 0, 4),
        ("llama", "shards", 2, 2),
        ("llama", "shards", 3, 4),
    ],
)
def test_blocks_equal_the_oracle(name: str, kind: str, stage: int, world: int) -> None:
    expected = reference(name, kind)
    optimizer = {"type": "Muon", "params": params_of(name, kind)}
    for weights in run(train, world, name=name, tp=2, steps=STEPS, stage=stage, optimizer=optimizer):
        assert max(errors(weights, expected).values()) <= 1e-3


def test_shards_are_something_else() -> None:
    """How far the approximation is from whole matrices, and that the tests above can fail."""
    whole, shards = (reference("llama", kind) for kind in ("whole", "shards"))
    matrices = [n for n, half in route(model("llama"), OUTER).items() if half == "muon"]
    apart = {n: change_error(whole.initial[n], shards.weights[n], whole.weights[n]) for n in matrices}
    assert min(apart.values()) > 0.05
    assert max(apart.values()) > 0.2


def test_more_ranks_than_heads() -> None:
    """One of four ranks has no head at all."""
    expected = reference("llama", "whole")
    for stage in (0, 2):
        for weights in run(train, 4, name="llama", tp=4, steps=STEPS, stage=stage):
            assert max(errors(weights, expected).values()) <= 1e-3


def test_heads_need_no_exchange() -> None:
    """A head's rows lie within a rank, which may own them; what is cut through travels."""
    optimizer = {"type": "Muon", "params": params_of("llama", "heads")}
    for stage in (0, 2):
        first, second = run(holders, 2, name="llama", tp=2, stage=stage, optimizer=optimizer)
        assert first == second
        heads = [first[name] for name in first if any(f"{leaf}_proj" in name for leaf in "qkv")]
        assert [held for _, held in heads].count([0]) == 2 * (4 + 2 + 2)
        assert [held for _, held in heads].count([1]) == 2 * (2 + 1 + 1)
        assert sum(held == [owner] for owner, held in heads) >= 2 * (6 + 3 + 3) * 0.75  # the others balance the ranks
        assert all(first[f"model.layers.{i}.self_attn.o_proj.weight"][1] == [0, 1] for i in range(2))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("stage", "settings", "momentum_dtype"),
    [
        (2, {"dtype": "bf16"}, "bf16"),
        (3, {"dtype": "bf16", "offload": True}, "bf16"),
        (3, {"dtype": "bf16"}, "int8"),
        pytest.param(2, {"dtype": "bf16"}, "int8", marks=pytest.mark.full),
    ],
)
def test_half_precision(stage: int, settings: dict[str, Any], momentum_dtype: str) -> None:
    expected = reference("llama", "whole")
    matrices = [n for n, half in route(model("llama"), OUTER).items() if half == "muon"]
    params = PARAMS | {"momentum_dtype": momentum_dtype}
    optimizer = {"type": "Muon", "params": params}
    for weights in run(train, 4, name="llama", tp=2, steps=STEPS, stage=stage, optimizer=optimizer, **settings):
        for name in matrices:
            assert change_cosine(expected.initial[name], weights[name], expected.weights[name]) > 0.9, name


@pytest.mark.parametrize(
    ("stage", "world", "kind"), [(0, 2, "whole"), (2, 4, "heads"), pytest.param(3, 4, "shards", marks=pytest.mark.full)]
)
def test_resume_is_exact(stage: int, world: int, kind: str, tmp_path: Path) -> None:
    settings = {"name": "llama", "tp": 2, "stage": stage, "folder": str(tmp_path)}
    optimizer = {"type": "Muon", "params": params_of("llama", kind)}
    expected, found = (run(go_on, world, load=load, optimizer=optimizer, **settings)[0] for load in (False, True))
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name


@pytest.mark.parametrize(("stage", "clip"), [(0, 0.0), (2, 1.0), (3, 0.0)])
def test_a_bad_gradient_of_one_rank_skips_the_step_on_all(stage: int, clip: float) -> None:
    optimizer = {"type": "Muon", "params": PARAMS}
    assert run(bad_step, 2, tp=2, stage=stage, clip=clip, optimizer=optimizer) == [(True, True)] * 2
