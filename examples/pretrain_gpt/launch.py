# SPDX-License-Identifier: Apache-2.0
"""Start training runs: several ranks through the DeepSpeed launcher, a single one without."""

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


def environment(processes: int) -> dict[str, str]:
    """Return the environment of a run: cores shared out, and ninja on the PATH for DeepSpeed's extensions."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    defaults = {"PYTHONWARNINGS": "ignore::FutureWarning"}
    if on_cpu():
        defaults["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // processes))
    return defaults | os.environ | {"PATH": path}


def command(ranks: int) -> tuple[list[str], dict[str, str]]:
    """Return what starts a script on `ranks` ranks, and the environment that this needs."""
    port = str(free_port())
    if ranks > 1:
        launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--quiet"]
        return [*launcher, "--num_gpus", str(ranks), "--master_port", port], {}
    single = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [sys.executable], single


def launch(
    config: Path, out: Path, arguments: Sequence[str] = (), *, ranks: int = 0, jobs: int = 1, log: Path | None = None
) -> float:
    """Run train.py with a DeepSpeed config, which writes `out`/loss.csv, and return its CPU seconds.

    `ranks`: 0 for `rank_count()`. `jobs`: how many runs share the machine. `log`: where the output goes, if not here.
    """
    ranks = ranks or rank_count()
    prefix, single = command(ranks)
    script = [str(HERE / "train.py"), "--deepspeed_config", str(config), "--out", str(out), *arguments]
    with open(log or os.devnull, "w") as file:
        output = {"stdout": file, "stderr": file} if log else {}
        process = subprocess.Popen([*prefix, *script], env=environment(ranks * jobs) | single, **output)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args, log.read_text()[-2000:] if log else None)
    return usage.ru_utime + usage.ru_stime
