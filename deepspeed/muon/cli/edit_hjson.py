# SPDX-License-Identifier: Apache-2.0
"""Change values in the text of a JSON or Hjson object; keep comments, layout, and the spelling of the rest."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import hjson
from hjson.decoder import HjsonDecoder, getNext, scanKeyName

QUOTES = "\"'"
#: Matches the comment that follows a value on its line.
COMMENT = re.compile(r"[ \t]*(?:#|//)[^\n]*")


class _Member(NamedTuple):
    """A member of an object in a text: the index of its key, and the first index and the end of its value.

    ``is_bare``: whether the value is a string without quotes, which extends to the end of its line.
    """

    key: str
    start: int
    value: int
    end: int
    is_bare: bool


def edited(text: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> str | None:
    """Return the ``text`` of the object ``before`` in JSON or Hjson, changed to that of the object ``after``.

    New members come last in their object. ``None`` if the text is not Hjson for ``before``, but YAML for instance.
    """
    try:
        if hjson.loads(text) != before:
            return None
        for path, value, is_removed in _changes(before, after):
            text = _without(text, path) if is_removed else _with(text, path, value)
        return text if hjson.loads(text) == after else None
    except (ValueError, IndexError):
        return None


def _changes(
    before: Mapping[str, Any], after: Mapping[str, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any, bool]]:
    """Yield (path of keys, new value, whether the key is removed) for each difference between two objects."""
    yield from (((*path, key), None, True) for key in before if key not in after)
    for key, value in after.items():
        old = before.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            yield from _changes(old, value, (*path, key))
        elif key not in before or old != value:
            yield (*path, key), value, False


def _members(text: str, path: tuple[str, ...], at: int = 0) -> tuple[list[_Member], int]:
    """Return the members of an object, and the index at which it ends: that of its brace, or the text's length.

    ``path``: keys that lead to the object, from the one that starts at index ``at``.
    """
    char, at = getNext(text, at)
    members, scan = list[_Member](), HjsonDecoder().scan_once
    at += char == "{"
    while True:
        char, at = getNext(text, at)
        if char == ",":
            char, at = getNext(text, at + 1)
        if char in ("", "}"):
            return members, at
        start = at
        key, at = scanKeyName(text, at)
        _, value = getNext(text, getNext(text, at)[1] + 1)
        if path and key == path[0]:
            return _members(text, path[1:], value)
        found, at = scan(text, value)
        is_bare = isinstance(found, str) and text[value] not in QUOTES
        members.append(_Member(key, start, value, value + len(text[value:at].rstrip()), is_bare))


def _with(text: str, path: tuple[str, ...], value: Any) -> str:
    """Return ``text`` with ``value`` at ``path``, the last key of which may be new."""
    members, close = _members(text, path[:-1])
    written = json.dumps(value)
    for member in members:
        if member.key == path[-1]:
            return text[: member.value] + written + text[member.end :]
    if not members:
        return f"{text[:close]}{json.dumps(path[-1])}: {written}{text[close:]}"
    last = members[-1]
    new = f"{json.dumps(path[-1]) if text[last.start] in QUOTES else path[-1]}: {written}"
    indent = text[text.rfind("\n", 0, last.start) + 1 : last.start]
    char, after = getNext(text, last.end)
    has_commas = getNext(text, members[0].end)[0] == "," if len(members) > 1 else not last.is_bare
    comma = "," if has_commas and char != "," else ""
    if indent.strip():  # the last key shares its line with others
        at = after + 1 if char == "," else last.end
        return f"{text[:at]}{comma} {new}{text[at:]}"
    at = len(text[:close].rstrip())
    newline = "\r\n" if "\r\n" in text else "\n"
    return f"{text[: last.end]}{comma}{text[last.end : at]}{newline}{indent}{new}{text[at:]}"


def _without(text: str, path: tuple[str, ...]) -> str:
    """Return ``text`` without the member at ``path``, and without the comma that separated it."""
    members, _ = _members(text, path[:-1])
    index = [member.key for member in members].index(path[-1])
    if index + 1 < len(members):
        return text[: members[index].start] + text[members[index + 1].start :]
    comment = COMMENT.match(text, members[index].end)
    end = comment.end() if comment else members[index].end
    if not index:
        return text[: members[0].start] + text[end:]
    last = members[index - 1].end
    char, at = getNext(text, last)
    at = at + 1 if char == "," else last
    return text[:last] + text[at : members[index].start].rstrip() + text[end:]
