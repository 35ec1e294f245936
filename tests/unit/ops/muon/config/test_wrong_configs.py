# SPDX-License-Identifier: Apache-2.0
"""Every wrong configuration of docs/reference/errors.md gets its message there, before anything is allocated."""

import re

import pytest

from helpers.distributed import run
from helpers.paths import ROOT
from helpers.wrong_configs import attempt_all, table


@pytest.fixture(scope="module")
def results() -> list[tuple[str, str, list[str]]]:
    return run(attempt_all, 1)[0]


def test_there_are_sixty(results: list[tuple[str, str, list[str]]]) -> None:
    assert len({title for title, _, _ in results}) == len(results) >= 60


def test_each_is_refused_in_our_words(results: list[tuple[str, str, list[str]]]) -> None:
    for title, message, _ in results:
        assert re.match(r"(MuonConfigError|UnsupportedError|ValueError): ", message), (title, message)


def test_each_names_the_key(results: list[tuple[str, str, list[str]]]) -> None:
    """The innermost of the keys that were written."""
    for title, message, _ in results:
        keys = re.findall(r'"(\w[\w-]*)":', title)
        assert not keys or any(key in message for key in keys), (title, message)


def test_none_reaches_allocation(results: list[tuple[str, str, list[str]]]) -> None:
    assert [title for title, _, reached in results if reached] == []


def test_the_page_is_up_to_date(results: list[tuple[str, str, list[str]]]) -> None:
    assert table(results) in (ROOT / "docs" / "reference" / "errors.md").read_text(), "run python docs/generate.py"
