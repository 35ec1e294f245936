# SPDX-License-Identifier: Apache-2.0
"""Muon for DeepSpeed ZeRO. Importing this package activates it; nothing is compiled."""

from deepspeed.muon.config import MuonConfig, MuonConfigError
from deepspeed.muon.imports import ImportStateError, import_state
from deepspeed.muon.optimizer import MuonWithAuxAdam
from deepspeed.muon.routing import Block, MatrixSpec, route
from deepspeed.muon.version import __version__
from deepspeed.muon.zero.agreement import DisagreementError
from deepspeed.muon.zero.install import SeamError, activate, install, uninstall
from deepspeed.muon.zero.manifest import CheckpointError
from deepspeed.muon.zero.support import UnsupportedError

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
    "import_state",
    "install",
    "route",
    "uninstall",
]

activate()
