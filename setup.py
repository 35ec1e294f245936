# SPDX-License-Identifier: Apache-2.0
"""Tell setuptools what pyproject.toml cannot: requirements are in ``requirements/``, C++ sources in ``csrc/``.

The repository's ``deepspeed/`` folder has no ``__init__.py``: its files are installed into the folder of DeepSpeed,
and an ``__init__.py`` on the import path would hide the installed DeepSpeed.
"""

import os
import re
from pathlib import Path

from setuptools import find_namespace_packages, setup

ROOT = Path(__file__).parent


def requirements(name: str) -> list[str]:
    """Return the lines of ``requirements/<name>.txt`` without comments and blank lines."""
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    return [line for line in (raw.partition("#")[0].strip() for raw in lines) if line]


def with_compiled_kernels() -> dict:
    """Return the arguments of ``setup`` that compile csrc/muon into the wheel, for ``DS_BUILD_MUON=1 pip wheel``.

    The wheel gets one extension module for each common level of vector instructions, such as AVX2 and AVX512, and a run
    imports the one for its CPU. The modules work only with the torch version that they were compiled for. The wheel's
    version names it: ``0.2.0+torch2.13``. Run pip with ``--no-build-isolation``, because the build imports torch.
    """
    os.environ["DS_MUON_AUTOLOAD"] = "0"  # an installed version must not be imported in place of this one
    import torch
    from torch.utils.cpp_extension import BuildExtension

    import deepspeed

    deepspeed.__path__.insert(0, str(ROOT / "deepspeed"))
    from deepspeed.muon.kernels.builder import MuonBuilder, capabilities_in_wheel

    extensions = [MuonBuilder(capability).builder() for capability in capabilities_in_wheel()]
    for extension in extensions:
        extension.sources = [os.path.relpath(path, ROOT) for path in extension.sources]
        extension.extra_link_args.append("-Wl,--strip-debug")  # Python's own flags may contain -g
    torch_version = ".".join(torch.__version__.split(".")[:2])
    return {
        "version": f"{version}+torch{torch_version}",
        "ext_modules": extensions,
        "cmdclass": {"build_ext": BuildExtension},
    }


version = re.search(r'__version__ = "(.+?)"', (ROOT / "deepspeed/muon/version.py").read_text()).group(1)

is_compiled = os.environ.get("DS_BUILD_MUON", "0") == "1"

setup(
    packages=[*find_namespace_packages(include=["deepspeed.muon", "deepspeed.muon.*"]), "deepspeed.muon.csrc"],
    package_dir={"deepspeed.muon.csrc": "csrc/muon"},
    package_data={
        "deepspeed.muon": ["py.typed"],
        "deepspeed.muon.math": ["*.json"],
        "deepspeed.muon.csrc": ["*.cpp", "*.h"],
    },
    py_modules=["deepspeed_muon"],
    install_requires=requirements("requirements"),
    extras_require={name: requirements(f"requirements-{name}") for name in ("example", "dev")},
    **(with_compiled_kernels() if is_compiled else {"version": version}),
)
