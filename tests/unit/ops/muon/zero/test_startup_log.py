# SPDX-License-Identifier: Apache-2.0
"""What the log says at the start; the page that reviews what is split has the same lines."""

import logging
import re
from typing import Any

import pytest
from torch import nn

import deepspeed.muon
from helpers.distributed import run, run_each
from helpers.logs import logged, logged_at_start
from helpers.models import Mlp
from helpers.paths import ROOT
from helpers.training import PARAMS, ds_config, make_engine
from helpers.transformers_models import MODELS

PAGE = ROOT / "docs" / "evidence" / "what-is-split.md"
REVIEWED = ("llama", "qwen3", "gpt2", "deepseek_v3", "mixtral")
BEGINNINGS = ("deepspeed-muon: split into ", "deepspeed-muon: left whole")


def log_of(model: nn.Module, **params: Any) -> list[str]:
    """What the log says at start of how parameters are split."""
    with logged(logging.DEBUG) as lines:
        make_engine(model, ds_config(stage=2, optimizer={"type": "Muon", "params": PARAMS | params})).destroy()
    return [line for line in lines if line.startswith(BEGINNINGS)]


def logs() -> dict[str, list[str]]:
    """By model and switch, as the page's headings name them."""
    return {
        f"{kind}, per_head_muon: {str(per_head).lower()}": log_of(MODELS[kind](), per_head_muon=per_head)
        for kind in REVIEWED
        for per_head in (False, True)
    }


def reviewed() -> dict[str, list[tuple[str, str]]]:
    """By heading of the page, its lines of log and the sentence that follows each."""
    sections = re.split(r"^### ", PAGE.read_text(), flags=re.MULTILINE)[1:]
    found = {section.partition("\n")[0]: section for section in sections}
    pattern = re.compile(r"^\| `(deepspeed-muon: [^`]+)` \| (.+) \|$", re.MULTILINE)
    return {heading: pattern.findall(section) for heading, section in found.items()}


@pytest.mark.full
def test_the_page_has_the_lines_of_the_log() -> None:
    (found,) = run(logs, 1)
    page = reviewed()
    assert found == {heading: [line for line, _ in entries] for heading, entries in page.items()}
    assert all(sentence.strip() for entries in page.values() for _, sentence in entries)


CYCLE = {"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-3}
IN_PLACE = "overrides optimizer.params."
#: Type and settings of a scheduler, optimizer.params, and what the log says of the rate or the momentum, if anything.
SCHEDULES: list[tuple[str, dict[str, Any], dict[str, Any], tuple[str, str] | None]] = [
    (
        "WarmupLR",
        {"warmup_max_lr": 3e-5},
        {"lr": 1e-3},
        ("WARNING", f"warmup_max_lr = 3e-05 {IN_PLACE}lr = 0.001"),
    ),
    (
        "LRRangeTest",
        {},
        {"muon_lr": 0.02},
        ("WARNING", f"min_lr = 0.001 {IN_PLACE}muon_lr = 0.02"),
    ),
    ("WarmupLR", {"warmup_max_lr": 1e-2}, {"weight_decay": 0.1}, ("WARNING", "warmup_max_lr in scheduler.params sets")),
    ("OneCycle", CYCLE, {"lr": 1e-3}, ("INFO", "between 0.8 and 0.9; Muon's momentum does not change")),
    ("OneCycle", CYCLE | {"cycle_momentum": False}, {"lr": 1e-3}, None),
    ("WarmupCosineLR", {"total_num_steps": 9}, {"lr": 1e-3}, None),
    ("WarmupLR", {}, {"lr": 1e-4}, None),  # its maximum is the optimizer's rate by default
]


def test_the_rate_and_the_momentum_of_a_schedule_are_named() -> None:
    cases = [
        {"optimizer": {"type": "Muon", "params": params}, "scheduler": {"type": kind, "params": settings}}
        for kind, settings, params, _ in SCHEDULES
    ]
    for (said,), (*_, expected) in zip(run_each(logged_at_start, 1, cases), SCHEDULES, strict=True):
        lines = [line for line in said if "scheduler.params" in line[1]]
        assert len(lines) == (expected is not None)
        assert all(level == expected[0] and expected[1] in text for level, text in lines)


def described(stage: int) -> list[Any]:
    """The table's rows of an engine's optimizer after its learning rate was set."""
    config = ds_config(stage=stage, optimizer={"type": "Muon", "params": PARAMS})
    engine = make_engine(Mlp(DESCRIBED), config)
    engine.basic_optimizer.given.param_groups[0]["lr"] = 0.5
    rows, text = engine.basic_optimizer.describe().rows, str(engine.basic_optimizer.describe())
    engine.destroy()
    assert len(text.splitlines()) == 1 + len(rows) and all(row.name in text for row in rows)
    return [*rows]


DESCRIBED = (12, 16, 48, 12)
"""Widths of the model."""


@pytest.mark.parametrize(("stage", "world"), [(1, 2), (3, 2), pytest.param(0, 1, marks=pytest.mark.full)])
def test_the_table_has_every_shape_with_its_rate_and_owners(stage: int, world: int) -> None:
    rows = run(described, world, stage=stage)[0]
    muon, adamw = ([row for row in rows if row.updated_by == half] for half in ("Muon", "AdamW"))
    scales = {(16, 12): (4 / 3) ** 0.5, (48, 16): 3**0.5, (12, 48): 1.0}
    assert {row.shape: row.scales for row in muon} == {shape: (pytest.approx(one),) for shape, one in scales.items()}
    methods = {row.shape: (row.methods, row.dtype) for row in muon}
    assert methods == {shape: (("standard" if shape == (16, 12) else "gram",), "fp32") for shape in scales}
    assert sum(row.cost for row in muon) == pytest.approx(1.0)
    assert {row.lr for row in muon} == {0.5}
    assert all({*row.owners} <= {*range(world)} for row in muon)
    assert [(row.shape, row.count, row.scales) for row in adamw] == [((size,), 1, ()) for size in (16, 48, 12)]


def test_before_the_first_step_the_table_has_neither_owners_nor_methods() -> None:
    model = Mlp(DESCRIBED)
    rows = deepspeed.muon.MuonWithAuxAdam(model.parameters(), model=model, **PARAMS).describe().rows
    assert {row.shape for row in rows if row.updated_by == "Muon"} == {(16, 12), (48, 16), (12, 48)}
    assert not any(row.owners or row.methods for row in rows)


def test_small_sub_groups_are_a_warning_with_the_size_that_helps() -> None:
    small, scripts = {"stage": 3, "zero": {"sub_group_size": 50}}, {"stage": 3, "groups": 3}
    (lines, _), (of_groups, _) = run_each(logged_at_start, 2, [small, scripts])
    assert len(of_groups) == 1, "groups of the script are no sub-groups"
    level, text = lines[1]
    assert level == "WARNING" and "sub_group_size splits the matrices into 5 sub-groups" in text
    size = int(text.rpartition("set sub_group_size to ")[2].split()[0])
    cases = [small | {"zero": {"sub_group_size": enough}} for enough in (size // 2, size)]
    assert [len(lines) for lines, _ in run_each(logged_at_start, 2, cases)] == [2, 1]
