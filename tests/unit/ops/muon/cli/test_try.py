# SPDX-License-Identifier: Apache-2.0
"""The command ds_muon try: which runs it starts, what it concludes, and how it continues after an interruption."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from helpers.paths import EXAMPLES
from helpers.ports import free_port

#: A run without DeepSpeed, in a process that starts fast: its loss is lowest at five times AdamW's rate.
SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
run = json.loads(Path(os.environ["PYTHON_DS_MUON_TRY"]).read_text())
behavior, name = json.loads(sys.argv[1]), Path(run["records"]).stem
with open("starts", "a") as starts:
    starts.write(name + " " + sys.argv[2] + "\\n")
if behavior.get("fails") == name:
    sys.exit("Traceback ...\\nRuntimeError: no luck\\nthe launcher says more")
if behavior.get("stops") == name and not Path("stopped").exists():
    Path("stopped").touch()
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(100)
file = open(run["records"], "a")
config = json.loads(Path("ds.json").read_text())
print(json.dumps({"config": config, "built_by_script": False}), file=file)
import math
gain = behavior.get("gain", 0.5) / (1 + abs(math.log(run["factor"] / 5))) if run["muon"] else 0.0
pace = 1.0 if behavior.get("slow") == name else 0.5
gain += behavior.get("spread", 0.0) * math.sin(run["seed"] * (1 + run["muon"]))
for step in range(1, run["steps"] + 1):
    loss = 3.0 - gain * step / run["steps"] + 0.01 * (step % 3 if run["muon"] else 0)
    print(json.dumps({"step": step, "loss": loss, "seconds": pace * step, "lr": 1.0, "peak": 2**30}), file=file)
    if behavior.get("diverges") == name:
        print(json.dumps({"end": "diverged"}), file=file)
        sys.exit()
print(json.dumps({"end": "done"}), file=file)
"""
CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 2e-3, "warmup_num_steps": 5}},
}
RATES = ["adamw_x1", "muon_x1", "muon_x3", "muon_x10", "muon_x30", "muon_x5.5"]
"""The runs in their order, where the best rate is between 3 and 10."""


@pytest.fixture
def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ds_muon: Callable[..., Any]) -> Callable[..., Any]:
    """Runs `ds_muon try` with flags; the runs behave as the keywords say."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("deepspeed.muon.cli.try_.POLL", 0.02)
    Path("run.py").write_text(SCRIPT)
    Path("ds.json").write_text(json.dumps(CONFIG))

    def call(*flags: Any, command: tuple[str, ...] = (), draws: bool = False, **behavior: Any) -> Any:
        if not draws:
            monkeypatch.setitem(sys.modules, "matplotlib", None)
        given = command or (sys.executable, "-S", "-E", "run.py", json.dumps(behavior), "to/{variant}")
        return ds_muon("try", "--steps", "20", "--out", "out", *flags, "--", *given)

    return call


def starts() -> list[str]:
    return [line.split()[0] for line in Path("starts").read_text().splitlines()]


def test_the_best_rate_and_what_lies_between_the_best_two_is_found(trial: Callable[..., Any]) -> None:
    found = trial("--config", "ds.json", "--json", draws=True)
    facts = found.facts
    assert starts() == RATES
    assert [int(count) for count in re.findall(r"(\d+) more planned", found.err)] == [5, 4, 3, 2, 1, 0]
    assert [row["state"] for row in facts["runs"]] == ["done"] * 6
    assert [row["rate"] for row in facts["runs"]] == ["0.002", "0.002", "0.006", "0.02", "0.06", "0.011"]
    assert facts["verdict"].startswith("Muon x5.5 (rate 0.011) ends at 2.6")
    assert ": lower, -0.3988 +- 0.0444 (scatter" in facts["verdict"]
    assert [note[:26] for note in facts["notes"]] == ["AdamW had one rate only; -"]
    config = json.loads(Path("out/ds_config_muon.json").read_text())
    assert config["optimizer"]["type"] == "Muon" and config["optimizer"]["params"]["lr"] == 0.0055
    assert config["scheduler"]["params"] == {"warmup_min_lr": 0, "warmup_max_lr": 0.011, "warmup_num_steps": 5}
    assert Path("out/losses.png").stat().st_size > 10_000
    run = json.loads(Path("out/muon_x3.json").read_text())
    assert (run["muon"], run["factor"], run["steps"]) == (True, 3.0, 20)
    assert run["changes"]["optimizer"]["params"]["lr"] == 1e-3, "the run multiplies the rate itself"
    assert "muon_x3 to/muon_x3" in Path("starts").read_text().splitlines(), "{variant} is replaced"


def test_a_run_that_fails_or_diverges_is_a_row(trial: Callable[..., Any]) -> None:
    found = trial("--json", fails="muon_x10", diverges="muon_x30")
    facts = found.facts
    assert "muon_x10.log" in found.err and "are kept" not in found.err
    rows = {row["variant"]: row["state"] for row in facts["runs"]}
    assert rows["Muon x10"] == "failed" and rows["Muon x30"] == "diverged at step 1"
    assert starts()[-1] == "muon_x1.7", "the best neighbour is the one that has a loss"
    assert "4 runs have ended in out before, and are kept" in trial(fails="muon_x10", diverges="muon_x30").err
    assert starts()[-1] == "muon_x10", "what has failed runs again, and nothing else does"
    assert len(starts()) == 7


def test_limits_of_the_comparison_are_notes(trial: Callable[..., Any]) -> None:
    """The best rate may lie outside of what was tried, and times may not compare."""
    facts = trial("--json", "--rates", "1,3", "--adamw-rates", "1,3", draws=True, slow="muon_x1").facts
    assert facts["notes"] == [
        "Muon's best rate is the highest of these; --rates 3,9 tries more",
        "Muon's runs took 500 to 1000 ms a step for equal work, so other jobs ran too; do not compare times",
    ]


@pytest.mark.parametrize(
    ("behavior", "states", "verdict"),
    [
        ({"gain": -0.5}, ["done", "done"], "AdamW stays"),
        ({"gain": -20.0}, ["done", "diverged at step 20"], "No run of Muon is done, so AdamW stays."),
        ({"diverges": "adamw_x1"}, ["diverged at step 1", "done"], "no run of AdamW to compare it with; try lower"),
    ],
    ids=["Muon is worse", "Muon ends far above its start", "AdamW diverges"],
)
def test_where_muon_has_not_won_the_verdict_says_so(
    behavior: dict[str, Any], states: list[str], verdict: str, trial: Callable[..., Any]
) -> None:
    facts = trial("--json", "--rates", "3", **behavior).facts
    assert [row["state"] for row in facts["runs"]] == states and verdict in facts["verdict"]


def test_a_trial_that_is_stopped_continues(trial: Callable[..., Any]) -> None:
    found = trial(stops="muon_x3")
    assert (found.status, found.out) == (130, "")
    children = [child.cmdline() for child in psutil.Process().children()]
    assert not any("run.py" in words for words in children), "the run has ended with the command"
    found = trial(stops="muon_x3")
    assert found.status == 0 and "Muon x5.5 " in found.out
    assert starts() == [*RATES[:3], *RATES[2:]]


def test_what_a_killed_trial_has_left_ends_first(trial: Callable[..., Any]) -> None:
    Path("out").mkdir()
    with subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(100)"]) as left:
        born = psutil.Process(left.pid).create_time()
        Path("out/running.json").write_text(json.dumps([[2**22 + 1, 0.0], [left.pid, born]]))
        found = trial()
        assert found.status == 0 and f"ending process {left.pid}, which an earlier" in found.err
        assert not psutil.pid_exists(left.pid)
    Path("out/running.json").write_text(json.dumps([[os.getpid(), psutil.Process().create_time()], None]))
    trial().must_refuse("try", f"another ds_muon try, process {os.getpid()}, uses")


def test_close_ones_run_again_with_other_seeds(trial: Callable[..., Any]) -> None:
    facts = trial("--json", gain=0.02, spread=0.1).facts
    assert starts()[6:] == ["adamw_x1_seed1", "muon_x5.5_seed1", "adamw_x1_seed2", "muon_x5.5_seed2"]
    assert "no clear difference" in facts["verdict"] and "(mean of 3 seeds)" in facts["verdict"]


def test_a_trial_ends_on_a_terminal_and_without_matplotlib(
    trial: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert trial().status == 0 and not Path("out/losses.png").exists()


def test_what_cannot_be_tried_is_refused(trial: Callable[..., Any], ds_muon: Callable[..., Any]) -> None:
    found = trial(fails="adamw_x1")
    assert found.status == 2 and "fails without Muon: RuntimeError: no luck; its output is in" in found.err
    assert starts() == ["adamw_x1"]
    trial(command=("no/such/program",)).must_refuse("try", "choose another folder with --out")
    ds_muon("try", "--out", "new", "--", "no/such/program").must_refuse("try", "cannot start no/such/program: No such")
    idle = ds_muon("try", "--out", "idle", "--", sys.executable, "-S", "-c", "pass")
    assert idle.status == 2 and "it ended without a step of a DeepSpeed engine" in idle.err
    ds_muon("try").must_refuse("try", "write your own command after --")
    wrong = ds_muon("try", "--rates", "1,0", "--", "python")
    assert wrong.status == 2 and "expected numbers above 0 with commas" in wrong.err
    short = ds_muon("try", "--steps", "1", "--", "python")
    assert short.status == 2 and "expected a whole number of at least 2" in short.err
    assert "unknown flag --rate-s" in ds_muon("try", "--rate-s", "1", "--", "python", "--unknown-of-theirs").err
    Path("ds.json").write_text(json.dumps(CONFIG | {"optimizer": {"type": "Muon", "params": {"lr": 1e-3}}}))
    ds_muon("try", "--config", "ds.json", "--", "python").must_refuse("try", "got 'Muon', so the config needs no")


ACCELERATE = """
import sys, torch
from accelerate import Accelerator, PartialState
PartialState(cpu=True)
accelerator = Accelerator(gradient_accumulation_steps=2)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 16), torch.nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
loader = torch.utils.data.DataLoader(torch.randn(400, 8), batch_size=4)
model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
for batch in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(batch).square().mean())
        optimizer.step(), schedule.step(), optimizer.zero_grad()
"""
YAML = """
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config: {zero_stage: 2, gradient_accumulation_steps: 2}
num_machines: 1
num_processes: 2
machine_rank: 0
use_cpu: true
"""
TRAINER = ("train.py", "--deepspeed", "ds_config_adamw.json", "--bf16", "--use_cpu", "--output_dir", "{variant}")
GPT = ("train.py", "--deepspeed_config", "ds_config_adamw.json", "--precision", "fp32", "--width", "32", "--heads", "2")


@pytest.mark.full
@pytest.mark.time_limit(900)
@pytest.mark.parametrize("example", ["pretrain_gpt", "huggingface_trainer", "accelerate"])
def test_real_commands_on_two_ranks(
    example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ds_muon: Callable[..., Any]
) -> None:
    """The Trainer's config has "auto" everywhere; accelerate's YAML has no optimizer, so the script builds it."""
    for name, value in {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    port, config = str(free_port()), "ds_config_adamw.json"
    runner = (sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", port)
    commands = {"pretrain_gpt": (*runner, *GPT, "--out", str(tmp_path / "{variant}")), "huggingface_trainer": runner}
    commands["huggingface_trainer"] += (*TRAINER[:-1], str(tmp_path / "{variant}"))
    if example == "accelerate":
        config = "a.yaml"
        (tmp_path / config).write_text(YAML)
        (tmp_path / "run.py").write_text(ACCELERATE)
        launch = ("-m", "accelerate.commands.launch", "--config_file", config, "--main_process_port", port)
        commands[example] = (sys.executable, *launch, "run.py")
    monkeypatch.chdir(tmp_path if example == "accelerate" else EXAMPLES / example)
    flags = ("--config", config, "--steps", "6", "--rates", "3", "--repeats", "0", "--out", tmp_path / "out", "--json")
    facts = ds_muon("try", *flags, "--", *commands[example]).facts
    assert [(row["variant"], row["state"]) for row in facts["runs"]] == [("AdamW x1", "done"), ("Muon x3", "done")]
    assert facts["verdict"].startswith("Muon x3 (rate 0.00") and " after 6 steps" in facts["verdict"]
