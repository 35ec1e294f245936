# SPDX-License-Identifier: Apache-2.0
"""Packaging that pyproject.toml cannot express: requirements live in requirements/, sources in csrc/.

The repository's ``deepspeed/`` folder has no ``__init__.py``: it is laid beside the files of the installed
DeepSpeed, and a folder without one does not hide them.
"""

import re
from pathlib import Path

from setuptools import find_namespace_packages, setup

ROOT = Path(__file__).parent


def requirements(name: str) -> list[str]:
    """Lines of ``requirements/<name>.txt`` without comments."""
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    return [line for line in (raw.partition("#")[0].strip() for raw in lines) if line]


version = re.search(r'__version__ = "(.+?)"', (ROOT / "deepspeed/muon/version.py").read_text()).group(1)

setup(
    version=version,
    packages=find_namespace_packages(include=["deepspeed.muon", "deepspeed.muon.*"]),
    py_modules=["deepspeed_muon"],
    install_requires=requirements("requirements"),
    extras_require={name: requirements(f"requirements-{name}") for name in ("example", "dev", "hopper")},
)
