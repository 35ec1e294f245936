# SPDX-License-Identifier: Apache-2.0
"""AutoTP: matrices that tensor parallelism cut train as the whole matrices do."""

from dataclasses import replace
from typing import Any

import torch

from helpers.distributed import run
from helpers.oracles import Part, change_error, route, train_oracle
from helpers.tensor_parallel import holders, model
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


def test_shards_are_something_else() -> None:
    """How far the approximation is from whole matrices, and that the tests above can fail."""
    whole, shards = (reference("llama", kind) for kind in ("whole", "shards"))
    matrices = [n for n, half in route(model("llama"), OUTER).items() if half == "muon"]
    apart = {n: change_error(whole.initial[n], shards.weights[n], whole.weights[n]) for n in matrices}
    assert min(apart.values()) > 0.05
    assert max(apart.values()) > 0.2


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
