# SPDX-License-Identifier: Apache-2.0
"""The page that reviews the log of what is split has the lines that the log has."""

import re
from typing import Any

from torch import nn

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


def log_with(scheduler: dict[str, Any] | None, **params: Any) -> list[tuple[str, str]]:
    """What the log says at start of the learning rate and the momentum of a schedule."""
    found = logged_at_start(
        optimizer={"type": "Muon", "params": params}, **({"scheduler": scheduler} if scheduler else {})
    )
    return [(level, text) for level, text in found if "scheduler.params" in text]


def logs_of_schedules() -> list[list[tuple[str, str]]]:
    cycle = {"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-3}
    return [
        log_with({"type": "WarmupLR", "params": {"warmup_max_lr": 3e-5}}, lr=1e-3),
        log_with({"type": "LRRangeTest", "params": {}}, muon_lr=0.02, adam_lr=1e-3),
        log_with({"type": "OneCycle", "params": cycle}, lr=1e-3),
        log_with({"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3}}, lr=1e-3),
        log_with({"type": "WarmupCosineLR", "params": {"total_num_steps": 9}}, lr=1e-3),
        log_with({"type": "OneCycle", "params": cycle | {"cycle_momentum": False}}, lr=1e-3),
        log_with({"type": "WarmupLR", "params": {}}, lr=1e-4),  # its maximum is the optimizer's rate by default
        log_with(None, lr=1e-3),
    ]


def test_the_rate_and_the_momentum_of_a_schedule_are_named() -> None:
    (found,) = run(logs_of_schedules, 1)
    (rate,), (default,), (cycle,), *silent = found
    assert rate == (
        "WARNING",
        "deepspeed-muon: scheduler.params.warmup_max_lr, 3e-05, is the learning rate, in place of optimizer.params.lr, "
        "0.001; change warmup_max_lr to change the rate, and write the same value for both",
    )
    assert default[0] == "WARNING"
    assert "lr_range_test_min_lr, 0.001, is the" in default[1] and "muon_lr, 0.02;" in default[1]
    assert cycle[0] == "INFO" and "between 0.8 and 0.9; Muon's momentum stays" in cycle[1]
    assert silent == [[]] * 5
