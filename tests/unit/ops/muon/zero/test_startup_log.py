# SPDX-License-Identifier: Apache-2.0
"""The page that reviews the log of what is split has the lines that the log has."""

import re
from typing import Any

import pytest
from torch import nn

from helpers.distributed import run
from helpers.logs import logged
from helpers.paths import ROOT
from helpers.training import PARAMS, ds_config, make_engine
from helpers.transformers_models import MODELS

PAGE = ROOT / "docs" / "what-is-split.md"
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


@pytest.mark.parametrize("kind", REVIEWED)
def test_every_model_is_reviewed_with_and_without_heads(kind: str) -> None:
    assert {f"{kind}, per_head_muon: {value}" for value in ("false", "true")} <= reviewed().keys()
