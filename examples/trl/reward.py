# SPDX-License-Identifier: Apache-2.0
"""What GRPO rewards here."""

from typing import Any


def digits(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
    """The share of digits in each answer."""
    answers = [completion[0]["content"] for completion in completions]
    return [sum(map(str.isdigit, answer)) / max(1, len(answer)) for answer in answers]
