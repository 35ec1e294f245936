# SPDX-License-Identifier: Apache-2.0
"""Loads with other settings than those of the save: what goes on as saved, what is converted, and what the log says."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.distributed import run
from helpers.engine_state import kept_dtypes, local_states, named_states
from helpers.logs import logged
from helpers.models import TinyGpt, train_engine
from helpers.training import BF16_OPTIMIZER, MOMENTA, ds_config, fresh_engine, make_engine, with_params
from helpers.universal import convert

WHOLE, SPLIT, HEADS, NORMUON = (
    {"muon_fused": "whole"},
    {"muon_fused": "split"},
    {"per_head_muon": True},
    {"normuon": True},
)
OTHER = "Muon now splits 2 parameters (first: blocks.0.qkv.weight) into other matrices than the run that saved"
RATES = {"lr": 0.01, "adam_lr": 0.002, "weight_decay": 0.2, "momentum": 0.8}
KEPT = ["0.02 instead of 0.01", "0.001 instead of 0.002", "momentum = 0.9 from the checkpoint"]
KEPT += ["weight_decay = 0.1 from the checkpoint"]
#: optimizer.params of the save and of the load, and what the log says of them.
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "other rates": ({}, RATES, KEPT),
    "normuon": (NORMUON, NORMUON, []),
    "normuon now": ({}, NORMUON, ["has no second moments for normuon; they start at zero"]),
    "normuon no more": (NORMUON, {}, ["was saved with normuon, but this run's config does not set it"]),
    "whole": (WHOLE, WHOLE, []),
    "split now": (WHOLE, SPLIT, [OTHER]),
    "heads now": (SPLIT, HEADS, [OTHER]),
}


def engine_with(params: dict[str, Any], **extra: Any) -> Any:
    return make_engine(TinyGpt(), ds_config(stage=2, optimizer=with_params(**params), **extra))


def save_each(folder: str, sections: list[dict[str, Any]]) -> None:
    for index, params in enumerate(sections):
        engine = engine_with(params)
        train_engine(engine, 1)
        engine.save_checkpoint(f"{folder}/{index}", tag="saved")
        engine.destroy()


def load_each(folder: str, loads: list[tuple[int, str, dict[str, Any]]]) -> list[str]:
    """Load the tag of each save into a run with other params, and take a step; return what is logged meanwhile."""
    results = []
    for index, tag, params in loads:
        engine = engine_with(params, checkpoint={"load_universal": tag == "universal"})
        with logged() as said:
            engine.load_checkpoint(f"{folder}/{index}", tag=tag)
            train_engine(engine, 1)
        results.append("\n".join(said))
        engine.destroy()
    return results


def test_the_log_says_what_a_load_keeps_and_what_differs(tmp_path: Path) -> None:
    sections, loads, wanted = [{}, NORMUON, WHOLE, SPLIT], [], []
    run(save_each, 2, folder=str(tmp_path), sections=sections)
    for saved, loaded, texts in CHANGES.values():
        tags = ("saved", "universal") if "muon_fused" in saved else ("saved",)
        loads += [(sections.index(saved), tag, loaded) for tag in tags]
        wanted += [texts] * len(tags)
    for index in {index for index, tag, _ in loads if tag == "universal"}:
        convert(tmp_path / str(index))
    known = [text for *_, texts in CHANGES.values() for text in texts]
    for load, texts, said in zip(loads, wanted, run(load_each, 2, folder=str(tmp_path), loads=loads)[0], strict=True):
        assert [text for text in known if text in said] == [text for text in known if text in texts], (load, said)


# ---- another dtype of the momentum ------------------------------------------------------------------------------

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
CASTS = [("fp32", "bf16"), ("int8", "fp32"), ("bf16", "fp32"), ("fp32", "int8"), ("bf16", "int8"), ("int8", "bf16")]
CAST: list[dict[str, Any]] = [
    {"stage": 2, "dtype": "bf16"},
    {"stage": 2, "offload": True},
    {"stage": 3},
    BF16_OPTIMIZER,
]


def save_and_load_each(saved: str, loaded: str, folder: str) -> list[tuple[dict, dict, list[str], set[torch.dtype]]]:
    """By case: states at a save and after a load, the warnings, and the dtypes of the momenta after a further step."""
    results = []
    for index, case in enumerate(CAST):
        engine = fresh_engine(0, case, optimizer=MOMENTA[saved])
        train_engine(engine, 2)
        engine.save_checkpoint(f"{folder}/{index}")
        before = named_states(engine)
        engine.destroy()
        engine = fresh_engine(7, case, optimizer=MOMENTA[loaded])
        with logged() as said:
            engine.load_checkpoint(f"{folder}/{index}")
        after = named_states(engine)
        train_engine(engine, 1, first_step=2)
        said = [text for text in said if "momentum" in text]
        results.append((before, after, said, kept_dtypes(local_states(engine))))
        engine.destroy()
    return results


def is_cast(value: Tensor, dtype: str, found: Tensor) -> bool:
    """Whether a momentum is what it was before, rounded to nearest."""
    if dtype == "int8":
        return bool(((found - value).abs() <= 0.501 / 127 * value.abs().max()).all()) and not found.equal(value)
    return found.equal(value.to(DTYPES[dtype]).float())


@pytest.mark.sample(2)
@pytest.mark.parametrize(("saved", "loaded"), CASTS)
def test_another_dtype_casts_once(saved: str, loaded: str, tmp_path: Path) -> None:
    """Exact to fp32, to nearest to bf16 and int8; AdamW's moments stay as they are."""
    kinds = [str(DTYPES[dtype]).removeprefix("torch.") for dtype in (saved, loaded)]
    for results in run(save_and_load_each, 2, saved=saved, loaded=loaded, folder=str(tmp_path)):
        for case, (before, after, said, kept) in zip(CAST, results, strict=True):
            for name, value in before.items():
                assert is_cast(value, loaded if name.endswith("momentum_buffer") else "fp32", after[name]), (case, name)
            assert [" is {}; converted to {},".format(*kinds) in text for text in said] == [True], case
            assert kept == {DTYPES[loaded]}, case
