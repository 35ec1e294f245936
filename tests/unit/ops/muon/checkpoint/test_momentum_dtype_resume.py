# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a momentum in bf16 or int8: exact resume, the universal route, another momentum_dtype after it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.distributed import run
from helpers.engine_state import kept_dtypes, local_states, named_states
from helpers.logs import logged
from helpers.models import MODELS, Mlp, train_engine
from helpers.training import BF16_OPTIMIZER, MOMENTA, fresh_engine
from helpers.universal import peak_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}


# ---- another momentum_dtype -------------------------------------------------------------------------------


def save_each(cases: list[dict[str, Any]], dtype: str, folders: list[str]) -> list[dict[str, Tensor]]:
    """The states by name that two steps leave in a checkpoint."""
    results = []
    for case, folder in zip(cases, folders, strict=True):
        engine = fresh_engine(0, case, optimizer=MOMENTA[dtype])
        train_engine(engine, 2)
        engine.save_checkpoint(folder)
        results.append(named_states(engine))
        engine.destroy()
    return results


def load_each(cases: list[dict[str, Any]], dtype: str, folders: list[str]) -> list[tuple[dict, list[str], set]]:
    """The states by name after a load, the warnings, and the dtypes of the momenta kept after a further step."""
    results = []
    for case, folder in zip(cases, folders, strict=True):
        engine = fresh_engine(7, case, optimizer=MOMENTA[dtype])
        with logged() as said:
            engine.load_checkpoint(folder)
        states = named_states(engine)
        train_engine(engine, 1, first_step=2)
        kept = kept_dtypes(local_states(engine))
        results.append((states, [text for text in said if "momentum" in text], kept))
        engine.destroy()
    return results


CHANGED: list[dict[str, Any]] = [{"stage": 1}, {"stage": 2, "dtype": "bf16"}, {"stage": 3}, BF16_OPTIMIZER]
CHANGED += [{"stage": stage, "offload": True} for stage in (2, 3)]


def cast(value: Tensor, dtype: str, found: Tensor) -> bool:
    """Whether a momentum is what it was before, rounded to nearest."""
    if dtype == "int8":
        return bool(((found - value).abs() <= 0.501 / 127 * value.abs().max()).all()) and not found.equal(value)
    return found.equal(value.to(DTYPES[dtype]).float())


PAIRS = [("fp32", "bf16"), ("int8", "fp32"), ("bf16", "fp32"), ("fp32", "int8"), ("bf16", "int8"), ("int8", "bf16")]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("saved", "loaded"), PAIRS)
def test_another_dtype_casts_once(saved: str, loaded: str, tmp_path: Path) -> None:
    """Exact to fp32, to nearest to bf16 and int8; AdamW's moments stay as they are."""
    folders = [str(tmp_path / str(index)) for index in range(len(CHANGED))]
    expected = run(save_each, 2, cases=CHANGED, dtype=saved, folders=folders)
    for rank, results in enumerate(run(load_each, 2, cases=CHANGED, dtype=loaded, folders=folders)):
        for case, before, (after, warnings, kept) in zip(CHANGED, expected[rank], results, strict=True):
            for name, value in before.items():
                is_momentum = name.endswith("momentum_buffer")
                assert cast(value, loaded if is_momentum else "fp32", after[name]), (case, name)
            kinds = [str(DTYPES[dtype]).removeprefix("torch.") for dtype in (saved, loaded)]
            assert [" is {}; converted to {},".format(*kinds) in text for text in warnings] == [True], case
            assert kept == {DTYPES[loaded]}, case


# ---- stock's universal converter --------------------------------------------------------------------------


# ---- memory -----------------------------------------------------------------------------------------------

MODELS["large"] = lambda: Mlp((1024,) * 5)


def save_peaks(stages: list[int], folder: str) -> list[float]:
    """Return, for each stage, bytes per element that torch allocates at most during a save of an int8 momentum."""
    found = []
    for stage in stages:
        engine = fresh_engine(0, {"stage": stage, "model": "large"}, optimizer=MOMENTA["int8"])
        train_engine(engine, 1)
        numel = sum(getattr(param, "ds_numel", param.numel()) for param in engine.module.parameters())
        peak = peak_of(lambda engine=engine, stage=stage: engine.save_checkpoint(f"{folder}/{stage}"))
        found.append(peak * 2**20 / numel)
        engine.destroy()
    return found


def test_a_save_of_int8_takes_a_chunk_of_host_memory(tmp_path: Path) -> None:
    """2.5 bytes per element of this model, whatever its size; with the whole momentum in fp32 it is 6.2."""
    for peak in run(save_peaks, 1, stages=[1, 3], folder=str(tmp_path))[0]:
        assert peak < 4
