# SPDX-License-Identifier: Apache-2.0
"""What the log says at the start; the page that reviews what is split has the same lines."""

import re
import time
from typing import Any

import pytest
from torch import nn

import deepspeed.muon
from deepspeed.muon.errors import log_if_slow
from helpers.distributed import run
from helpers.logs import logged, logged_at_start
from helpers.paths import ROOT
from helpers.training import PARAMS, ds_config, make_engine
from helpers.transformers_models import MODELS

PAGE = ROOT / "docs" / "evidence" / "what-is-split.md"
REVIEWED = ("llama", "qwen3", "gpt2", "deepseek_v3", "mixtral")
BEGINNINGS = ("deepspeed-muon: split into ", "deepspeed-muon: left whole")


def log_of(model: nn.Module, **params: Any) -> list[str]:
    """What the log says at start of how parameters are split."""
    with logged() as lines:
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
    ("OneCycle", CYCLE, {"lr": 1e-3}, ("INFO", "between 0.8 and 0.9; Muon's momentum does not change")),
    ("OneCycle", CYCLE | {"cycle_momentum": False}, {"lr": 1e-3}, None),
    ("WarmupCosineLR", {"total_num_steps": 9}, {"lr": 1e-3}, None),
    ("WarmupLR", {}, {"lr": 1e-4}, None),  # its maximum is the optimizer's rate by default
]


def logs_of_schedules() -> list[list[tuple[str, str]]]:
    """What the log says at start of the learning rate and the momentum of each schedule."""
    found = [
        logged_at_start(optimizer={"type": "Muon", "params": params}, scheduler={"type": kind, "params": settings})
        for kind, settings, params, _ in SCHEDULES
    ]
    return [[line for line in lines if "scheduler.params" in line[1]] for lines in found]


def test_the_rate_and_the_momentum_of_a_schedule_are_named() -> None:
    for lines, (*_, expected) in zip(run(logs_of_schedules, 1)[0], SCHEDULES, strict=True):
        assert len(lines) == (expected is not None)
        assert all(level == expected[0] and expected[1] in text for level, text in lines)


def test_three_lines_of_log_on_rank_0() -> None:
    """What is updated, by how much, and how a step runs."""
    lines, silent = run(logged_at_start, 2, stage=3, widths=(512, 512, 512))
    assert [level for level, _ in lines] == ["INFO"] * 3 and silent == []
    assert lines[0][1] == (
        f"deepspeed-muon {deepspeed.muon.__version__}: Muon updates 2 matrices (524,288 parameters), "
        "AdamW updates 2 tensors (1,024 parameters), on 2 ranks; adjust_lr_fn original, because adam_lr is set, as for "
        "stock DeepSpeed's Muon"
    )
    assert lines[1][1] == (
        "deepspeed-muon: the update of layers.1.weight [512, 512] has RMS 0.0442 x lr, by adjust_lr_fn original = "
        "sqrt(max(1, rows / cols))"
    )
    assert lines[2][1].startswith("deepspeed-muon: rank 0 sends 1.0 MB per step in fp32; kernels")
    assert "; Newton-Schulz on cpu in fp32 (set by ns_dtype)" in lines[2][1]


def test_what_takes_long_at_the_start_is_told() -> None:
    for waiting, rank, expected in ((0.0, True, 0), (0.06, True, 1), (0.06, False, 0)):
        with pytest.MonkeyPatch.context() as patch, logged() as said:
            patch.setattr("deepspeed.muon.errors.SLOW", 0.05)
            with log_if_slow("planning the exchange", rank):
                time.sleep(waiting)
        assert len(said) == expected
        assert all(line == "deepspeed-muon: planning the exchange took 0.1 s" for line in said)


def test_no_matrix_for_muon_is_a_warning_with_the_reasons() -> None:
    text = (
        "deepspeed-muon: AdamW updates all parameters; no matrix goes to Muon: use_muon = False set by the user; "
        "ignore this if you intend it, otherwise change muon_exclude or param.use_muon, or train matrices"
    )
    assert run(logged_at_start, 2, tag=False) == [[("WARNING", text)], []]


def test_small_sub_groups_are_a_warning_with_the_size_that_helps() -> None:
    warning = run(logged_at_start, 2, stage=3, zero={"sub_group_size": 50})[0][3]
    assert warning[0] == "WARNING" and "sub_group_size splits the matrices into 5 sub-groups" in warning[1]
    size = int(warning[1].rpartition("set sub_group_size to ")[2].split()[0])
    for enough, lines in ((size // 2, 4), (size, 3)):
        assert len(run(logged_at_start, 2, stage=3, zero={"sub_group_size": enough})[0]) == lines
    assert len(run(logged_at_start, 2, stage=3, groups=3)[0]) == 3, "groups of the script are no sub-groups"
