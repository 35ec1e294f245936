# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a bf16 momentum: exact resume, the universal route, and a momentum_dtype that changes in between."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import universal
from helpers.distributed import run
from helpers.engine_state import differing, local_states, named_states
from helpers.models import train_engine
from helpers.resume import RESUMED, resume_all, save_all
from helpers.training import BF16_MOMENTUM, BF16_OPTIMIZER, PARAMS, fresh_engine

FP32 = {"type": "Muon", "params": PARAMS}
OPTIMIZERS = {"fp32": FP32, "bf16": BF16_MOMENTUM}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.mark.parametrize("chosen", [slice(1, None, 6), pytest.param(slice(None), marks=pytest.mark.full)], ids=str)
def test_resume_is_exact(chosen: slice, tmp_path: Path) -> None:
    """Stages 0 to 3, both precisions, offload, sub-groups, the round-robin order, BF16_Optimizer."""
    cases = [case | {"optimizer": BF16_MOMENTUM} for case in RESUMED[chosen]]
    folders = [str(tmp_path / str(index)) for index in range(len(cases))]
    expected = run(save_all, 2, timeout=280, cases=cases, folders=folders)
    for rank, results in enumerate(run(resume_all, 2, timeout=280, cases=cases, folders=folders)):
        for case, wanted, got in zip(cases, expected[rank], results, strict=True):
            assert differing(wanted, got) == [], case
            moments = [value for key, value in got.items() if key.endswith(" momentum_buffer")]
            assert case["stage"] == 3 or {moment.dtype for moment in moments} == {torch.bfloat16}, case


# ---- another momentum_dtype -------------------------------------------------------------------------------


def save_each(cases: list[dict[str, Any]], dtype: str, folders: list[str]) -> list[dict[str, Tensor]]:
    """The states by name that two steps leave in a checkpoint."""
    results = []
    for case, folder in zip(cases, folders, strict=True):
        engine = fresh_engine(0, case, optimizer=OPTIMIZERS[dtype])
        train_engine(engine, 2)
        engine.save_checkpoint(folder)
        results.append(named_states(engine))
        engine.destroy()
    return results


def load_each(cases: list[dict[str, Any]], dtype: str, folders: list[str]) -> list[tuple[dict, list[str], set]]:
    """The states by name after a load, the warnings, and the dtypes of the momenta kept after a further step."""
    import logging

    results = []
    for case, folder in zip(cases, folders, strict=True):
        engine = fresh_engine(7, case, optimizer=OPTIMIZERS[dtype])
        records: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record, said=records: said.append(record.getMessage())
        logging.getLogger("deepspeed.muon").addHandler(handler)
        engine.load_checkpoint(folder)
        logging.getLogger("deepspeed.muon").removeHandler(handler)
        states = named_states(engine)
        train_engine(engine, 1, first_step=2)
        kept = {entry["momentum_buffer"].dtype for entry in local_states(engine) if "momentum_buffer" in entry}
        results.append((states, [text for text in records if "momentum" in text], kept))
        engine.destroy()
    return results


CHANGED: list[dict[str, Any]] = [{"stage": 1}, {"stage": 2, "dtype": "bf16"}, {"stage": 3}, BF16_OPTIMIZER]
CHANGED += [{"stage": stage, "offload": True} for stage in (2, 3)]


@pytest.mark.parametrize(("saved", "loaded"), [("fp32", "bf16"), ("bf16", "fp32")])
def test_another_dtype_casts_once(saved: str, loaded: str, tmp_path: Path) -> None:
    """Exact from bf16, to nearest to bf16; AdamW's moments stay as they are."""
    folders = [str(tmp_path / str(index)) for index in range(len(CHANGED))]
    expected = run(save_each, 2, cases=CHANGED, dtype=saved, folders=folders)
    for rank, results in enumerate(run(load_each, 2, cases=CHANGED, dtype=loaded, folders=folders)):
        for case, before, (after, warnings, kept) in zip(CHANGED, expected[rank], results, strict=True):
            for name, value in before.items():
                cast = value.to(DTYPES[loaded]).float() if name.endswith("momentum_buffer") else value
                assert after[name].equal(cast), (case, name)
            assert len(warnings) == 1, case
            assert kept == {DTYPES[loaded]}, case


# ---- stock's universal converter --------------------------------------------------------------------------


SLOWER = [pytest.param(case, marks=pytest.mark.full) for case in ({"stage": 2}, BF16_OPTIMIZER)]


@pytest.mark.parametrize("case", [{"stage": 3}, *SLOWER], ids=str)
def test_universal_checkpoint(case: dict[str, Any], tmp_path: Path) -> None:
    """Saved on 2 ranks in bf16, loaded on 1 and 2 in bf16, and in fp32: the same momentum, in the config's dtype."""
    saved = run(universal.save_all, 2, cases=[case | {"optimizer": BF16_MOMENTUM}], folder=str(tmp_path))[0][0]
    universal.convert(tmp_path / "0")
    for world, dtype in ((1, "bf16"), (2, "bf16"), (1, "fp32")):
        jobs = [(str(tmp_path / "0"), case | {"optimizer": OPTIMIZERS[dtype]})]
        loaded = run(universal.load_all, world, jobs=jobs)[0][0]
        assert differing(loaded["states"], saved["states"]) == []
        assert loaded["momentum"] == {DTYPES[dtype]}, (world, dtype)
        assert loaded["keys"] == saved["keys"]
        if (world, dtype) == (2, "bf16"):
            assert differing(loaded["after"], saved["after"]) == []
