# SPDX-License-Identifier: Apache-2.0
"""The examples for training tools, with the tools' own command lines: two ranks, at ZeRO stages 2 and 3."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from helpers.checkpoints import optimizer_states, same
from helpers.paths import EXAMPLES

RANKS, STEPS, TIMEOUT = 2, 20, 400.0
LINE = "Muon updates 14 matrices (98,304 parameters), AdamW updates 13 tensors (33,728 parameters), on 2 ranks"


@dataclass(frozen=True)
class Tool:
    """How a tool is started."""

    folder: str
    module: str  # what has to be installed
    config: str  # the tool's own, in the folder
    command: str  # `{}` stands for the config
    settings: tuple[tuple[str, Any], ...] = (("use_cpu", True),)  # what a machine without GPUs needs in the config
    env: tuple[tuple[str, str], ...] = ()  # the same, in the environment
    measure: tuple[str, float] = ("loss", -0.5)  # what the log says of every step, and by how much it changes


RANKS_BY_ENV = ("NPROC_PER_NODE", "2")
TRL = "trl {} --config {{}} --multi_gpu --num_processes 2"
AXOLOTL = (("AXOLOTL_DO_NOT_TRACK", "1"), ("LOG_LEVEL", "INFO"))
TOOLS = {
    "trl-sft": Tool("trl", "trl", "sft.yaml", TRL.format("sft")),
    "trl-dpo": Tool("trl", "trl", "dpo.yaml", TRL.format("dpo")),
    "trl-grpo": Tool("trl", "trl", "grpo.yaml", TRL.format("grpo"), measure=("rewards/digits/mean", 0.05)),
    "llamafactory": Tool(
        *("llama_factory", "llamafactory", "sft.yaml", "llamafactory-cli train {}"),
        env=(("FORCE_TORCHRUN", "1"), RANKS_BY_ENV),
    ),
    "ms-swift": Tool("ms_swift", "swift", "sft.yaml", "swift sft {}", env=(RANKS_BY_ENV,)),
    "axolotl": Tool(
        *("axolotl", "axolotl", "sft.yaml", "axolotl train {} --launcher torchrun -- --nproc_per_node 2"),
        settings=(("plugins", ["cpu.Cpu"]),),
        env=AXOLOTL,
    ),
}


def start(command: list[str], folder: Path, extra: tuple[tuple[str, str], ...] = ()) -> str:
    """What a command and its children write on a machine without GPUs; all of them end with it.

    A rank stays for a moment after its last line: gloo's threads need Python to release the last tensors, and a rank
    that ends first aborts (pytorch/pytorch#179291), with AdamW as well.

    In place of torchvision and torchaudio are empty modules: their wheels beside a CPU build of torch need CUDA's
    libraries, the CPU builds are on PyTorch's own index only, and the examples have neither images nor sound.
    """
    (folder / "stand_ins").mkdir(exist_ok=True)
    at_start = "import atexit, sys, time\natexit.register(time.sleep, 0.5)\n"
    if torch.version.cuda is None:
        (folder / "stand_ins" / "torchaudio.py").write_text("")
        at_start += 'sys.modules["torchvision"] = None\n'
    (folder / "stand_ins" / "sitecustomize.py").write_text(at_start)
    env = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env["PYTHONPATH"] = os.pathsep.join([str(folder / "stand_ins"), str(folder)])
    log = folder / "log.txt"
    options = {"cwd": folder, "env": os.environ | env | dict(extra), "stderr": subprocess.STDOUT}
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, start_new_session=True, **options)
        try:
            code = process.wait(TIMEOUT)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait()
    text = log.read_text(errors="replace")
    assert code == 0, f"{' '.join(command)}: {code}\n{text[-6000:]}"
    return text


def rows(folder: Path, measure: str) -> list[dict[str, float]]:
    """What the tool logs of every step, without times and counts of tokens."""
    history = json.loads((folder / f"out/checkpoint-{STEPS}/trainer_state.json").read_text())["log_history"]
    keys = {"step", "loss", "grad_norm", "learning_rate", measure}
    return [{key: row[key] for key in keys} for row in history if "loss" in row]


def states(folder: Path, step: int) -> list[Any]:
    return optimizer_states(folder / f"out/checkpoint-{step}", RANKS)


def train(tool: Tool, stage: int, folder: Path, tiny: Path, resume: Path | None = None) -> None:
    """Run an example at another ZeRO stage, with a checkpoint every STEPS / 2 steps."""
    shutil.copytree(EXAMPLES / tool.folder, folder, ignore=shutil.ignore_patterns("out", "tiny"))
    (folder / "tiny").symlink_to(tiny)
    config = json.loads((folder / "ds_config_muon.json").read_text())
    config["zero_optimization"]["stage"] = stage
    (folder / "ds_config.json").write_text(json.dumps(config))
    settings = {"deepspeed": "ds_config.json", "output_dir": "out", "max_steps": STEPS, "save_steps": STEPS // 2}
    settings |= {**dict(tool.settings), **({"resume_from_checkpoint": str(resume)} if resume else {})}
    own = yaml.safe_load((folder / tool.config).read_text())
    (folder / tool.config).write_text(yaml.safe_dump(own | settings))
    program, *arguments = tool.command.format(tool.config).split()
    output = start([str(Path(sys.executable).parent / program), *arguments], folder, tool.env)
    assert output.count(LINE) == 1


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model and data of all examples."""
    folder = tmp_path_factory.mktemp("integrators")
    start([sys.executable, str(EXAMPLES / "tiny_model.py"), "tiny"], folder)
    return folder / "tiny"


CASES = [pytest.param(name, stage, marks=pytest.mark.full) for name in TOOLS for stage in (2, 3)]


@pytest.mark.time_limit(1000)
@pytest.mark.parametrize(("name", "stage"), CASES)
def test_ours_trains_and_resumes_exactly(name: str, stage: int, tiny: Path, tmp_path: Path) -> None:
    tool = TOOLS[name]
    if find_spec(tool.module) is None:
        pytest.skip(f"{tool.module} is not installed")
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    train(tool, stage, whole, tiny)
    train(tool, stage, resumed, tiny, whole / f"out/checkpoint-{STEPS // 2}")
    measure, change = tool.measure
    found = rows(whole, measure)
    assert [row["step"] for row in found] == list(range(1, STEPS + 1))
    assert (found[-1][measure] - found[0][measure]) / change > 1
    assert rows(resumed, measure)[STEPS // 2 :] == found[STEPS // 2 :]
    assert same(states(whole, STEPS), states(resumed, STEPS))
    assert not same(states(whole, STEPS // 2), states(whole, STEPS))
