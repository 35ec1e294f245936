# SPDX-License-Identifier: Apache-2.0
"""Every exception that deepspeed-muon raises on purpose."""

from __future__ import annotations


class MuonConfigError(ValueError):
    """A value in ``optimizer.params`` that cannot be used; the message names the key and what is allowed."""


class UnsupportedError(ValueError):
    """A combination of settings that deepspeed-muon does not support; the message says what to change."""


class DisagreementError(RuntimeError):
    """The ranks of one job do not run the same optimizer; the message names the ranks."""


class SeamError(RuntimeError):
    """The installed DeepSpeed lacks a place where deepspeed-muon hooks in; the message names it."""


class CheckpointError(ValueError):
    """A checkpoint that is incomplete, damaged or of another run; the message names the file. Nothing was loaded."""


class CallOrderError(RuntimeError):
    """A call of the engine that another one must precede; the message names it. Nothing has been changed."""


class ImportStateError(ValueError):
    """State that cannot be imported; the message names the parameters and what to do. Nothing has been changed."""


class ExchangeError(RuntimeError):
    """A collective of the exchange failed or timed out; the message names its bucket and the matrices in it."""


class KernelError(RuntimeError):
    """The C++ operations are not available on this machine; the message says why and what to install."""


class SettingsError(ValueError):
    """A ds_config that cannot be read; the message names the file or the key."""


class ModelError(ValueError):
    """A model that cannot be built; the message says what was passed and what is expected."""


class RecordsError(ValueError):
    """Records of a run that cannot be drawn; the message says what is missing."""
