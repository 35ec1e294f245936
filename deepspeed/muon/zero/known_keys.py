# SPDX-License-Identifier: Apache-2.0
"""The top-level keys of a ds_config that the installed DeepSpeed reads; it ignores all others in silence."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from deepspeed.muon.config.messages import did_you_mean
from deepspeed.muon.log import logger

#: Keys that ``deepspeed.initialize`` reads itself.
OF_INITIALIZE = {"data_parallel_size", "sequence_parallel_size"}


class _Noting(dict):
    """A section that notes which keys are asked for."""

    def __init__(self, section: dict[str, Any]) -> None:
        super().__init__(section)
        self.asked: set[str] = set()

    def get(self, key: Any, default: Any = None) -> Any:
        """As of a dict."""
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: Any) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: Any) -> bool:
        self.asked.add(key)
        return super().__contains__(key)

    def keys(self) -> Any:
        """Itself, because DeepSpeed asks ``key in section.keys()``."""
        return self


@functools.cache
def known_keys() -> frozenset[str]:
    """What DeepSpeed looks up while it reads a config."""
    from deepspeed.runtime.config import DeepSpeedConfig

    section = _Noting({"train_micro_batch_size_per_gpu": 1})
    DeepSpeedConfig(section)
    return frozenset(section.asked | OF_INITIALIZE)


def warn_of_unknown(keys: Iterable[str]) -> None:
    """Name the keys that DeepSpeed does not read, and the nearest that it does."""
    for key in [key for key in keys if key not in known_keys()]:
        logger.warning(
            "deepspeed-muon: DeepSpeed reads no key %s of a ds_config; %s",
            key,
            did_you_mean(key, sorted(known_keys()), "it has no effect"),
        )
