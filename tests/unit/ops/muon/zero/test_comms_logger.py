# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's communication log, which it enables by the section's mere presence, leaves training and checkpoints
alone.
"""

from pathlib import Path
from typing import Any

import pytest

from deepspeed.muon.zero.consensus import agree, raise_on_all_ranks
from helpers.distributed import run
from helpers.engine_state import differing
from helpers.models import Mlp, train_engine
from helpers.records import sections
from helpers.training import ds_config, fp32_weights, make_engine

EVERYTHING = {"enabled": True, "verbose": True, "prof_all": True, "debug": True}
SECTIONS = [
    {"enabled": False},
    EVERYTHING,
    {"enabled": True, "prof_all": False, "prof_ops": ["all_reduce", "all_gather_object", "broadcast_object_list"]},
]


def train_save_load(stage: int, folder: str, section: dict[str, Any], **config: Any) -> dict[str, Any]:
    """Everything in which the ranks communicate; the weights differ from what is expected in these names."""
    from deepspeed.comm import comm

    try:
        engine = make_engine(Mlp(), ds_config(stage=stage, comms_logger=section, **config))
        train_engine(engine, 1)
        assert engine.save_checkpoint(folder, tag="saved")
        train_engine(engine, 1, first_step=1)
        expected = fp32_weights(engine)
        assert engine.load_checkpoint(folder)[0] is not None
        train_engine(engine, 1, first_step=1)
        found = fp32_weights(engine)
        engine.destroy()
    finally:
        comm.comms_logger.enabled = False
        comm.comms_logger.reset_data()
    return {"differing": differing(found, expected)}


@pytest.mark.parametrize(
    ("stage", "section"),
    [
        (0, SECTIONS[0]),
        (3, SECTIONS[1]),
        (1, SECTIONS[2]),
        *(pytest.param(s, section, marks=pytest.mark.full) for s in (0, 1, 2, 3) for section in SECTIONS),
    ],
)
def test_saves_and_loads(stage: int, section: dict[str, Any], tmp_path: Path) -> None:
    config = {"wall_clock_breakdown": True, **sections(str(tmp_path), 1, {"normuon": True})}
    for rank in run(train_save_load, 2, stage=stage, folder=str(tmp_path), section=section, **config):
        assert rank["differing"] == []


def exit_on_rank_1(way: str) -> str:
    """The error of this rank where rank 1 exits in work that the ranks do together."""
    import torch.distributed as dist

    def act() -> dict[str, Any]:
        if dist.get_rank() == 1:
            raise SystemExit(0)
        return {}

    with pytest.raises(RuntimeError) as error:
        raise_on_all_ranks(act, RuntimeError) if way == "raise" else agree(act, lambda facts: {})
    return str(error.value)


@pytest.mark.parametrize("way", ["raise", "agree"])
def test_a_rank_that_exits_is_an_error_on_all(way: str) -> None:
    assert all("rank 1: SystemExit: 0" in text for text in run(exit_on_rank_1, 2, way=way))
