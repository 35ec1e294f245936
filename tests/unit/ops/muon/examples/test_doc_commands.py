# SPDX-License-Identifier: Apache-2.0
"""Every command of the documentation that a CPU can run, run as it is written; of the others, why not."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.paths import DOCS, EXAMPLES, ROOT

PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md")), *sorted(EXAMPLES.glob("*/README.md"))]
ELSEWHERE = {
    r"^make (demo|test)": "the demo is compare.py, which runs here; the tests are these",
    r"pip (install|wheel|download)": "installs; tools/release_check.py does it",
    r"--measured": "test_cli.py; the page means a GPU",
    r"^(trl|\w+=\w+ (llamafactory-cli|swift)|axolotl) |tiny_model\.py|openrlhf": "test_integrators.py",
    r"^accelerate launch|--deepspeed ds_config_muon|^python train\.py": "test_frameworks.py",
    r"^python experiments\.py": "test_experiments.py",
}
"""What is not run here."""
SMALL = "--steps 4 --layers 1 --width 32 --heads 2 --context 16 --eval-every 2 --eval-batches 1 --precision fp32"
SMALLER = (
    (r"(--num_gpus|--nproc_per_node) 8", r"\1 2"),
    (r"((?:train|compare)\.py.*)", rf"\1 {SMALL}"),
    (r"--save-every 60", "--save-every 2"),
    (r"--stop-at 120", "--stop-at 2"),
)
"""What makes a run short: the later option of two counts."""
TRAINED = {"checkpoints": "Muon", "migrating-from-adamw": "AdamW", "migrating-from-stock-muon": "stock"}
"""The optimizer of `checkpoints/global_step1000`, by page."""


def commands(page: Path) -> list[str]:
    """The lines of a page's bash blocks, joined where they continue, without comments."""
    blocks = re.findall(r"^ *```bash\n(.*?)^ *```", page.read_text(), re.M | re.S)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [text for line in lines if (text := re.sub(r"(^|\s+)#.*", "", line).strip())]


def runs_elsewhere(command: str) -> bool:
    return any(re.search(pattern, command) for pattern in ELSEWHERE)


HERE = {page: [line for line in commands(page) if not runs_elsewhere(line)] for page in PAGES}


def shell(command: str, folder: Path) -> str:
    """The output of a command in the folder, with the environment of these tests first on the path."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    options = {"cwd": folder, "env": os.environ | env | {"PATH": path}, "timeout": 600}
    done = subprocess.run(
        ["bash", "-ec", command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}"
    return done.stdout


def smaller(command: str) -> str:
    for pattern, text in SMALLER:
        command = re.sub(pattern, text, command)
    return command


def train(optimizer: str, folder: Path) -> None:
    """Make what pages call checkpoints/global_step1000, by AdamW, ours or stock's Muon."""
    name = "adamw" if optimizer == "AdamW" else "muon"
    env = "DS_MUON_AUTOLOAD=0 " if optimizer == "stock" else ""
    line = f"deepspeed --num_gpus 2 train.py --deepspeed_config ds_config_{name}.json --save-every 4 --out checkpoints"
    shell(env + smaller(line), folder)
    (folder / "checkpoints" / "global_step4").rename(folder / "checkpoints" / "global_step1000")
    (folder / "checkpoints" / "latest").write_text("global_step1000")


def prepare(page: Path, folder: Path) -> None:
    """The folder in which a reader would be: the example's, or for pages of the site one with what they name."""
    example = page.parent if page.parent.parent == EXAMPLES else EXAMPLES / "pretrain_gpt"
    shutil.copytree(example, folder, ignore=shutil.ignore_patterns("results", "__pycache__"))
    if page.is_relative_to(DOCS):
        shutil.copy(EXAMPLES / "plan" / "llama_8b.json", folder)
        for name in ("ds_config", "ours", "stock"):
            config = json.loads((folder / "ds_config_muon.json").read_text())
            config["optimizer"]["params"].pop("lr")
            config["optimizer"]["params"] |= {"muon_lr": 0.02, "adam_lr": 0.001}
            if name == "ds_config":
                config["optimizer"]["params"]["monitor_interval"] = 1
                config["csv_monitor"] = {"enabled": True, "output_path": "logs", "job_name": "run"}
            (folder / f"{name}.json").write_text(json.dumps(config))
        (folder / "model.py").write_text(
            (folder / "model.py").read_text() + "\n\ndef make_model():\n    return GPT(GPTConfig())\n"
        )
    if "ds_muon plot" in " ".join(HERE[page]):
        shell(smaller("deepspeed --num_gpus 2 train.py --deepspeed_config ds_config.json"), folder)
        shutil.copytree(folder / "logs" / "run", folder / "logs" / "pretrain_gpt")
    if page.stem in TRAINED and page.is_relative_to(DOCS):
        train(TRAINED[page.stem], folder)


@pytest.mark.full
@pytest.mark.time_limit(1500)
@pytest.mark.parametrize("page", [page for page in PAGES if HERE[page]], ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_run_as_written(page: Path, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    prepare(page, folder)
    for command in HERE[page]:
        output = shell(smaller(command), folder)
        assert output or ">" in command, f"{command} says nothing"


def test_commands_are_found() -> None:
    """Also continued ones; comments are none."""
    assert "make test" in commands(ROOT / "README.md")
    assert any(re.search(r"ds_to_universal +--inject.* --output_folder", line) for page in PAGES for line in HERE[page])
    assert not any(line.startswith("#") for page in PAGES for line in commands(page))
    assert sum(map(len, HERE.values())) > 15


def test_every_reason_not_to_run_is_needed() -> None:
    for pattern in ELSEWHERE:
        assert any(re.search(pattern, line) for page in PAGES for line in commands(page)), pattern
