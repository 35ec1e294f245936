# SPDX-License-Identifier: Apache-2.0
"""The examples for transformers.Trainer, accelerate and Lightning on two ranks, at ZeRO stages 2 and 3."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from helpers.checkpoints import optimizer_states, same
from helpers.distributed import Pool
from helpers.paths import EXAMPLES
from helpers.scripts import ENV, RANKS, TIMEOUT, run_script

STEPS = 8


def launch(script: Path, arguments: list[str], folder: Path) -> str:
    """Run the script on all ranks, with the environment that torchrun gives; their output."""
    pool = Pool(RANKS, ENV, timeout=None)
    try:
        pool.run(run_script, {"script": script, "arguments": arguments, "folder": folder}, TIMEOUT)
        return "".join(rank.log.read_text(errors="replace") for rank in pool.ranks)
    finally:
        pool.close()


@dataclass
class Run:
    """One finished run of an example."""

    framework: str
    folder: Path
    output: str

    def rows(self) -> list[dict[str, Any]]:
        """Step, loss, gradient norm and learning rate of every step, as the framework reports them."""
        if self.framework == "huggingface_trainer":
            rows = json.loads((self.folder / "trainer_state.json").read_text())["log_history"]
            return [row for row in rows if "loss" in row]
        return json.loads((self.folder / "history.json").read_text())

    def optimizer_states(self, step: int) -> list[Any]:
        """What the checkpoint after `step` holds of fp32 weights and optimizer state, by rank."""
        return optimizer_states(self.checkpoint(step), RANKS)

    def checkpoint(self, step: int) -> Path:
        names = {
            "huggingface_trainer": f"checkpoint-{step}",
            "accelerate": f"step_{step}",
            "lightning": f"epoch={2 * step // STEPS - 1}.ckpt",
        }
        return self.folder / names[self.framework]


def arguments(framework: str, config: Path, folder: Path, steps: int, resume: Path | None) -> list[str]:
    """The command line of one run that saves a checkpoint every STEPS / 2 steps."""
    if framework == "huggingface_trainer":
        line = (
            f"--deepspeed {config} --output_dir {folder} --max_steps {steps} --save_steps {STEPS // 2} --bf16 --use_cpu"
        )
        return [*line.split(), *(["--resume_from_checkpoint", str(resume)] if resume else [])]
    line = f"--deepspeed_config {config} --out {folder}"
    if framework == "accelerate":
        line += f" --steps {steps} --save_every {STEPS // 2}"
    else:
        line += f" --epochs {max(1, 2 * steps // STEPS)} --epoch_steps {min(steps, STEPS // 2)}"
    return [*line.split(), *(["--resume", str(resume)] if resume else [])]


def train(
    framework: str, optimizer: str, stage: int, folder: Path, steps: int = STEPS, resume: Path | None = None
) -> Run:
    """Run an example with its config for the optimizer at another ZeRO stage."""
    config = json.loads((EXAMPLES / framework / f"ds_config_{optimizer}.json").read_text())
    config["zero_optimization"]["stage"] = stage
    if optimizer == "adamw":
        config["optimizer"]["params"]["torch_adam"] = True  # DeepSpeed's own takes minutes to compile
    folder.mkdir(parents=True)
    path = folder / "ds_config.json"
    path.write_text(json.dumps(config))
    line = arguments(framework, path, folder, steps, resume)
    return Run(framework, folder, launch(EXAMPLES / framework / "train.py", line, folder))


FRAMEWORKS = ("huggingface_trainer", "accelerate", "lightning")


@pytest.mark.parametrize("folder", sorted(path.parent.name for path in EXAMPLES.glob("*/ds_config_adamw.json")))
def test_the_configs_differ_in_the_optimizers_type_only(folder: str) -> None:
    """Of training from scratch, in the tuned learning rate too."""
    adamw, muon = (json.loads((EXAMPLES / folder / f"ds_config_{name}.json").read_text()) for name in ("adamw", "muon"))
    assert (adamw["optimizer"].pop("type"), muon["optimizer"].pop("type")) == ("AdamW", "Muon")
    if folder == "pretrain_gpt":
        assert adamw["optimizer"]["params"].pop("lr") != muon["optimizer"]["params"].pop("lr")
    assert adamw == muon


@pytest.mark.parametrize(
    ("framework", "stage", "with_adamw"),
    [
        (FRAMEWORKS[0], 2, False),
        pytest.param(FRAMEWORKS[0], 3, True, marks=pytest.mark.full),
        *(pytest.param(name, stage, True, marks=pytest.mark.full) for name in FRAMEWORKS[1:] for stage in (2, 3)),
    ],
)
def test_a_run_learns_and_resumes_exactly(framework: str, stage: int, with_adamw: bool, tmp_path: Path) -> None:
    """Before clipping, the gradient norm of the first step is AdamW's.

    Up to its last bits: ZeRO adds the squares up by parameter group, and Muon's groups are others.
    """
    pytest.importorskip("lightning.pytorch" if framework == "lightning" else "accelerate")
    pytest.importorskip("transformers")
    muon = train(framework, "muon", stage, tmp_path / "muon")
    resumed = train(framework, "muon", stage, tmp_path / "resumed", resume=muon.checkpoint(STEPS // 2))
    matrices = "Muon updates 14 matrices (98,304 parameters), AdamW updates 7 tensors (33,088 parameters), on 2 ranks"
    assert matrices in muon.output and matrices in resumed.output
    first, *_, last = rows = muon.rows()
    if with_adamw:
        adamw = train(framework, "adamw", stage, tmp_path / "adamw", steps=1)
        assert adamw.rows()[0]["loss"] == first["loss"] and "deepspeed-muon" not in adamw.output
        assert first["grad_norm"] == pytest.approx(adamw.rows()[0]["grad_norm"], rel=1e-6)
    assert len(rows) == STEPS and last["loss"] < first["loss"] - 0.5
    late = [[row for row in found if row["step"] > STEPS // 2] for found in (rows, resumed.rows())]
    assert len(late[0]) == STEPS // 2 and late[0] == late[1]
    assert same(muon.optimizer_states(STEPS), resumed.optimizer_states(STEPS))
    assert not same(muon.optimizer_states(STEPS // 2), muon.optimizer_states(STEPS))


@pytest.mark.full
@pytest.mark.parametrize("stage", [2, 3])
def test_one_line_of_config_trains_in_the_trainer(stage: int, tmp_path: Path) -> None:
    """A preset, whose learning rate the trainer follows without being told."""
    pytest.importorskip("transformers")
    config = {
        "optimizer": {"type": "Muon", "params": {"preset": "kimi_k2"}},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": "auto"},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
    }
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    line = arguments("huggingface_trainer", tmp_path / "ds_config.json", tmp_path, STEPS, None)
    run = Run("huggingface_trainer", tmp_path, launch(EXAMPLES / "huggingface_trainer/train.py", line, tmp_path))
    assert re.search(r"deepspeed-muon \S+: Muon updates ", run.output)
    losses = [row["loss"] for row in run.rows()]
    assert len(losses) == STEPS and losses[-1] < losses[0] - 0.05
    assert run.rows()[-2]["learning_rate"] <= 2e-4
