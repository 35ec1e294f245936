# SPDX-License-Identifier: Apache-2.0
"""Start training runs through the DeepSpeed launcher."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from deepspeed.accelerator import get_accelerator

HERE = Path(__file__).resolve().parent
CONFIGS = {"AdamW": HERE / "ds_config_adamw.json", "Muon": HERE / "ds_config_muon.json"}
RANKS = 2


def on_cpu() -> bool:
    """Whether DeepSpeed would train on the CPU."""
    return get_accelerator().device_name() == "cpu"


def rank_count() -> int:
    """Return two, or one where there is a single accelerator."""
    return RANKS if on_cpu() else min(RANKS, get_accelerator().device_count())


def free_port() -> int:
    """Return a port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment(ranks: int) -> dict[str, str]:
    """Return the environment of a run: cores shared out, and ninja on the PATH for DeepSpeed's extensions."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    defaults = {"PYTHONWARNINGS": "ignore::FutureWarning"}
    if on_cpu():
        defaults["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // ranks))
    return defaults | os.environ | {"PATH": path}


def launch(optimizer: str, out: Path, arguments: Sequence[str] = ()) -> Path:
    """Run train.py with the config of `optimizer` and return the path of its CSV of losses."""
    ranks = rank_count()
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--quiet"]
    launcher += ["--num_gpus", str(ranks), "--master_port", str(free_port())]
    script = [str(HERE / "train.py"), "--deepspeed_config", str(CONFIGS[optimizer]), "--out", str(out)]
    subprocess.run([*launcher, *script, *arguments], env=environment(ranks), check=True)
    return out / "loss.csv"
