# SPDX-License-Identifier: Apache-2.0
"""Muon for DeepSpeed ZeRO. Importing this package patches DeepSpeed; it compiles nothing."""

from deepspeed.muon.config.schema import MuonConfig
from deepspeed.muon.errors import (
    CheckpointError,
    DisagreementError,
    ImportStateError,
    MuonConfigError,
    SeamError,
    UnsupportedError,
)
from deepspeed.muon.layout import Block, MatrixSpec
from deepspeed.muon.model.routing import route
from deepspeed.muon.optimizer import MuonWithAuxAdam
from deepspeed.muon.version import __version__
from deepspeed.muon.zero.patches import activate, install, uninstall

__all__ = [
    "Block",
    "CheckpointError",
    "DisagreementError",
    "ImportStateError",
    "MatrixSpec",
    "MuonConfig",
    "MuonConfigError",
    "MuonWithAuxAdam",
    "SeamError",
    "UnsupportedError",
    "__version__",
    "install",
    "route",
    "uninstall",
]

activate()
