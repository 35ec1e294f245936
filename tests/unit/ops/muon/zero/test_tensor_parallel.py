# SPDX-License-Identifier: Apache-2.0
"""AutoTP: matrices that tensor parallelism cut train as the whole matrices do."""

from typing import Any

from helpers.distributed import run
from helpers.tensor_parallel import holders
from helpers.training import PARAMS

HEAD = 4
"""Width of a head."""


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
