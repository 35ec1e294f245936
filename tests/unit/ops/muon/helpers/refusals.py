# SPDX-License-Identifier: Apache-2.0
"""Try to build an engine, and keep the error."""

from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine

NVME, CPU = {"device": "nvme", "nvme_path": "/tmp"}, {"device": "cpu"}
Refusal = tuple[str, str, int]
"""Type and text of the error, and how often an engine's construction began."""


def attempt(initialize: Any) -> Refusal | None:
    """Call `initialize()`; return (error type, message, number of engines begun), or `None` if it succeeds."""
    original, entered = DeepSpeedEngine.__init__, []

    def spy(self: Any, *args: Any, **kwargs: Any) -> None:
        entered.append(self)
        original(self, *args, **kwargs)

    DeepSpeedEngine.__init__ = spy
    try:
        initialize().destroy()
    except Exception as error:
        return type(error).__name__, str(error), len(entered)
    finally:
        DeepSpeedEngine.__init__ = original
    return None
