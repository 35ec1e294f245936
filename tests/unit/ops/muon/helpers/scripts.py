# SPDX-License-Identifier: Apache-2.0
"""Run the scripts of examples on two ranks."""

import os
import runpy
import sys
from pathlib import Path

import torch

RANKS = 2
TIMEOUT = 480.0
"""Seconds in which a script must end."""
ENV = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
"""Environment variables of its ranks."""


def run_script(script: Path, arguments: list[str], folder: Path) -> None:
    """Be the process in which Python was told to run a script."""
    os.chdir(folder)
    sys.argv, sys.path[0] = [str(script), *arguments], str(script.parent)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as done:
        if done.code:
            raise RuntimeError(f"exit code {done.code}") from done
    assert not torch.distributed.is_initialized(), "the script leaves its process group behind"
