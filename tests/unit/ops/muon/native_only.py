# SPDX-License-Identifier: Apache-2.0
"""The operations in C++, with nobody to fall back to."""

import shutil
from types import SimpleNamespace
from typing import Any

import pytest

from deepspeed.muon.kernels import native
from deepspeed.muon.kernels.table import Operations


def native_only(monkeypatch: pytest.MonkeyPatch, *names: str) -> Operations:
    """The table in C++ whose operations of these names fail where they would call their twin; skips without a compiler.

    With a compiler a build that fails is an error.
    """
    if native.unavailable() and shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    table = native.operations()
    monkeypatch.setattr(native, "reference", SimpleNamespace(**dict.fromkeys(names, _never)))
    return table


def _never(*args: Any) -> Any:
    raise AssertionError("the twin was called instead")
