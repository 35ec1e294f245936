# SPDX-License-Identifier: Apache-2.0
"""AutoTP: which ranks have which parts of matrices."""

import pytest

from deepspeed.muon.zero.wrappers.grids import _lines, _positions
from helpers.distributed import run
from helpers.tensor_parallel import holders
from helpers.training import with_params


def test_heads_need_no_exchange() -> None:
    """A head's rows lie within a rank, which may own them; what is cut through travels."""
    optimizer = with_params(per_head_muon=True)
    for stage in (0, 2):
        first, second = run(holders, 2, name="llama", tp=2, stage=stage, optimizer=optimizer)
        assert first == second
        heads = [first[name] for name in first if any(f"{leaf}_proj" in name for leaf in "qkv")]
        assert [held for _, held in heads].count([0]) == 2 * (4 + 2 + 2)
        assert [held for _, held in heads].count([1]) == 2 * (2 + 1 + 1)
        assert sum(held == [owner] for owner, held in heads) >= 2 * (6 + 3 + 3) * 0.75  # the others balance the ranks
        assert all(first[f"model.layers.{i}.self_attn.o_proj.weight"][1] == [0, 1] for i in range(2))


# ---- marks of ranks ----------------------------------------------------------------------------------------


def groups(world: int, tp: int) -> tuple[list[list[int]], list[list[int]]]:
    """Data-parallel and tensor-parallel ranks of each rank, tensor-parallel ones adjacent."""
    data = [list(range(rank % tp, world, tp)) for rank in range(world)]
    return data, [list(range(rank // tp * tp, rank // tp * tp + tp)) for rank in range(world)]


@pytest.mark.parametrize(("world", "tp"), [(8, 2), (12, 4), (2048, 8)])
def test_lines_are_those_of_the_grid(world: int, tp: int) -> None:
    data, tensor = groups(world, tp)
    lines = _lines(data, tensor, _positions(data, tensor))
    assert lines == [range(rank % tp, world - tp + rank % tp + 1, tp) for rank in range(world)]


def test_uneven_groups_are_found() -> None:
    data = [[0, 1, 3], [0, 1, 3], [2, 4, 5], [0, 1, 3], [2, 4, 5], [2, 4, 5]]
    tensor = [[0, 2], [1, 4], [0, 2], [3, 5], [1, 4], [3, 5]]
    assert _lines(data, tensor, _positions(data, tensor)) is None
