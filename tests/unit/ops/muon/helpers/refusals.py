# SPDX-License-Identifier: Apache-2.0
"""What comes of an attempt to build an engine."""

from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine

NVME, CPU = {"device": "nvme", "nvme_path": "/tmp"}, {"device": "cpu"}
Refusal = tuple[str, str, int]
"""Type and text of the error, and how often an engine's construction began."""


def attempt(initialize: Any) -> Refusal | None:
    """What came of a `deepspeed.initialize`; `None` if it went well."""
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
