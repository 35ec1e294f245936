# SPDX-License-Identifier: Apache-2.0
"""The command ds_muon as its tests call it."""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from deepspeed.muon.cli import main


class Outcome(NamedTuple):
    """Exit status, stdout and stderr of a command."""

    status: int
    out: str
    err: str

    @property
    def facts(self) -> dict[str, Any]:
        """The object that a command has printed which succeeded."""
        assert self.status == 0, self.err
        return json.loads(self.out)

    def must_refuse(self, command: str, words: str, lines: int | None = 1) -> None:
        """Assert that this is a user's mistake, explained with these words in so many lines of stderr, if given."""
        text = self.err.removeprefix("a model talks\n")
        assert (self.status, self.out) == (2, ""), self
        assert words in text and text.startswith(f"ds_muon {command}: "), text
        assert lines is None or text.count("\n") == lines, text


@pytest.fixture
def ds_muon(capsys: pytest.CaptureFixture) -> Callable[..., Outcome]:
    """Runs the command in this process."""

    def call(*arguments: Any) -> Outcome:
        try:
            status = main.main([str(argument) for argument in arguments])
        except SystemExit as stop:
            status = int(stop.code or 0)
        return Outcome(status, *capsys.readouterr())

    return call
