# SPDX-License-Identifier: Apache-2.0
"""An axolotl plugin for machines without GPUs, where axolotl cannot tell accelerate that there are ranks."""

from typing import Any

from accelerate import PartialState
from axolotl.integrations.base import BasePlugin

_init = PartialState.__init__


def _on_the_cpu(self: PartialState, cpu: bool = True, **kwargs: Any) -> None:
    _init(self, cpu=True, **kwargs)


class Cpu(BasePlugin):
    """Ranks that meet through gloo, with the model and the training on the CPU."""

    def register(self, cfg: dict) -> None:
        """Before axolotl asks which rank this is."""
        PartialState.__init__ = _on_the_cpu
        cfg["max_memory"] = {"cpu": "8GiB"}

    def get_training_args(self, cfg: dict) -> dict[str, bool]:
        """What axolotl hands on to transformers."""
        return {"use_cpu": True}
