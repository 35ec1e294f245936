# SPDX-License-Identifier: Apache-2.0
"""The package's exceptions and logger, and :func:`listed`, which shortens lists in messages."""

from __future__ import annotations

import logging
from collections.abc import Sequence


class MuonConfigError(ValueError):
    """A setting in the ds_config or a parameter group is wrong; the message names the key and what is allowed."""


class UnsupportedError(ValueError):
    """deepspeed-muon does not support these settings, this model or this call; the message says what to change."""


class DisagreementError(RuntimeError):
    """Ranks of one job differ in optimizer, settings or plan, or do not answer; the message names the ranks."""


class ExchangeError(RuntimeError):
    """The ranks cannot send each other matrices; the message says why and what helps."""


class SeamError(RuntimeError):
    """The installed DeepSpeed lacks an attribute that deepspeed-muon patches; the message names the attribute."""


class CheckpointError(ValueError):
    """A checkpoint cannot be saved or loaded; the message says why and what to do. A failed load changes nothing."""


class CallOrderError(RuntimeError):
    """A DeepSpeed engine method was called too early; nothing has changed. The message names the call to make first."""


class ImportStateError(ValueError):
    """Optimizer state of another run or of a universal checkpoint cannot be used; the message says why.

    Nothing has changed.
    """


class KernelError(RuntimeError):
    """The C++ kernels for the CPU cannot be built or loaded; the message says why and what to install."""


class SettingsError(ValueError):
    """``ds_muon`` cannot use a ds_config, a flag, or the script that ``ds_muon try`` runs; the message says why."""


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
