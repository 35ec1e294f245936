# SPDX-License-Identifier: Apache-2.0
"""The package's exceptions, its logger, and lists in texts."""

from __future__ import annotations

import logging
from collections.abc import Sequence


class MuonConfigError(ValueError):
    """A key or value in ``optimizer.params`` is not usable; the message names the key and what is allowed."""


class UnsupportedError(ValueError):
    """A combination of settings that deepspeed-muon does not support; the message says what to change."""


class DisagreementError(RuntimeError):
    """The ranks of one job do not run the same optimizer; the message names the ranks."""


class ExchangeError(RuntimeError):
    """The ranks cannot send each other matrices; the message says why and what helps."""


class SeamError(RuntimeError):
    """The installed DeepSpeed lacks an attribute that deepspeed-muon replaces; the message names the attribute."""


class CheckpointError(ValueError):
    """A checkpoint is incomplete, damaged or from another run. The message names the file. Nothing was loaded."""


class CallOrderError(RuntimeError):
    """A DeepSpeed engine method was called too early; nothing has changed. The message names the call to make first."""


class ImportStateError(ValueError):
    """Optimizer state cannot be imported; the message names the parameters and what to do. Nothing has changed."""


class KernelError(RuntimeError):
    """The C++ kernels for the CPU cannot be built or loaded; the message says why and what to install."""


class SettingsError(ValueError):
    """A ds_config cannot be read; the message names the file or the key."""


class ModelError(ValueError):
    """``ds_muon`` cannot build the model; the message says what was passed and what is expected."""


logger = logging.getLogger("deepspeed.muon")

if logger.level == logging.NOTSET:
    logger.setLevel(logging.INFO)
if not logger.hasHandlers():
    _handler = logging.StreamHandler()
    _handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] %(message)s"))
    logger.addHandler(_handler)
    logger.propagate = False


def listed(names: Sequence[str], most: int) -> str:
    """Return the first ``most`` names as a text, separated by commas, with "..." at the end if there are more."""
    return ", ".join([*names[:most], *(["..."] if len(names) > most else [])])
