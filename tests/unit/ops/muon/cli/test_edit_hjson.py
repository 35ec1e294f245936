# SPDX-License-Identifier: Apache-2.0
"""Changed values are written into a file's own text, of which all else stays."""

import difflib
from typing import Any

import hjson
import pytest

from deepspeed.muon.cli.edit_hjson import edited
from helpers.public_configs import configs

COMMENTED = """// a header
{
  "a": 1e-4, # of a
  "b": {"c": "x", "gone": true, /* last } */ "d": 2.50},
  "e": {
    "f": 1, // of f
    "gone": 3 // with it
  } # of e
  // the end
}
"""
CHANGED = """// a header
{
  "a": 1e-4, # of a
  "b": {"c": "y", "d": 2.50, "new": [1, 2.5]},
  "e": {
    "f": 1, // of f
    "new": null
  }, # of e
  // the end
  "h": {"i": "j"}
}
"""
#: Text, the object that it is changed to, and the changed text.
CASES: list[tuple[str, dict[str, Any], str]] = [
    (
        COMMENTED,
        {"a": 1e-4, "b": {"c": "y", "d": 2.5, "new": [1, 2.5]}, "e": {"f": 1, "new": None}, "h": {"i": "j"}},
        CHANGED,
    ),
    ("a: 1\nb: words } of, a string\n", {"a": 2, "b": "x", "c": 3}, 'a: 2\nb: "x"\nc: 3\n'),
    ("a: words", {"a": "words", "b": True}, "a: words\nb: true"),
    ("# only a\na: {}\n", {"a": {"b": 1}}, '# only a\na: {"b": 1}\n'),
    ("{a: 1, b: 2,}", {"b": 2, "c": 3}, "{b: 2, c: 3}"),
    ('{"a": 1}', {}, "{}"),
    ('{\r\n  "a": 1\r\n}\r\n', {"a": 1, "b": 2}, '{\r\n  "a": 1,\r\n  "b": 2\r\n}\r\n'),
    (
        "{\n  text: '''\n    a: 1 }\n    '''\n  a: 1\n}",
        {"text": "a: 1 }", "a": 2},
        "{\n  text: '''\n    a: 1 }\n    '''\n  a: 2\n}",
    ),
]


@pytest.mark.parametrize(("text", "after", "changed"), CASES)
def test_only_what_changes_is_rewritten(text: str, after: dict[str, Any], changed: str) -> None:
    assert edited(text, hjson.loads(text), after) == changed


@pytest.mark.parametrize("text", ["a:\n  b: 1\n  c: 2\n", "- a\n- b", '{"a": '])
def test_a_text_that_is_no_hjson_is_left_alone(text: str) -> None:
    assert edited(text, {"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}) is None


def test_a_diff_of_public_configs_shows_the_optimizer_alone() -> None:
    """Of each text, whatever its style, one key is replaced and one is added; the lines around them stay."""
    for name, case in configs().items():
        if case["suffix"] == "yaml":
            continue
        after = case["config"] | {"steps_per_print": 77, "new": {"a": [1]}}
        changed = edited(case["text"], case["config"], after)
        lines = difflib.ndiff(case["text"].splitlines(), (changed or "").splitlines())
        found = [line for line in lines if line[0] in "+-"]
        assert 2 <= len(found) <= 6, (name, found)
        for line in found:  # beside both keys, a comma is added to the line of the last one
            assert "77" in line or "new" in line or line[0] == "-" or line.rstrip().endswith(","), (name, found)
