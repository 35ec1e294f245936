# SPDX-License-Identifier: Apache-2.0
"""Universal checkpoints with tensor parallelism: the run goes on at other stages, data-parallel ranks and sizes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.distributed import run
from helpers.oracles import change_error
from helpers.tensor_parallel import engine_of, model, train_steps, whole_weights
from helpers.universal import convert

Weights = dict[str, Tensor]


def save(name: str, tp: int, folder: str, **config: Any) -> tuple[Weights, Weights]:
    """Two steps, a checkpoint, two more; the whole weights at both moments."""
    with engine_of(model(name), tp, **config) as engine:
        train_steps(engine, 2, tp)
        engine.save_checkpoint(folder, tag="saved")
        saved = whole_weights(engine)
        train_steps(engine, 2, tp, first=2)
        return saved, whole_weights(engine)


def load(name: str, tp: int, folder: str, **config: Any) -> tuple[Weights, Weights]:
    """What :func:`save` gives, by an engine of other weights that loads the universal checkpoint."""
    with engine_of(model(name, seed=1), tp, checkpoint={"load_universal": True}, **config) as engine:
        assert engine.load_checkpoint(folder, tag="universal")[0] is not None
        loaded = whole_weights(engine)
        train_steps(engine, 2, tp, first=2)
        return loaded, whole_weights(engine)


#: model; stage, ranks and tensor-parallel size of the saving run; those of the run that loads.
CASES = [
    ("llama", (1, 2, 2), (2, 2, 1)),
    ("llama", (2, 4, 2), (3, 2, 2)),
    ("llama", (3, 4, 2), (1, 4, 2)),
    ("llama", (2, 2, 1), (2, 4, 2)),
    ("gated", (2, 4, 2), (3, 4, 2)),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "saved", "loaded"), CASES, ids=str)
def test_the_run_goes_on(name: str, saved: tuple[int, int, int], loaded: tuple[int, int, int], tmp_path: Path) -> None:
    def job(fn: Any, stage: int, world: int, tp: int) -> tuple[Weights, Weights]:
        return run(fn, world, fresh=True, name=name, tp=tp, stage=stage, folder=str(tmp_path))[0]

    before, after = job(save, *saved)
    convert(tmp_path)
    found, last = job(load, *loaded)
    assert found.keys() == before.keys()
    for key, weight in before.items():
        assert torch.equal(found[key], weight), key
        assert change_error(weight, last[key], after[key]) <= 1e-3, key
