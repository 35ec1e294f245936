# SPDX-License-Identifier: Apache-2.0
"""Scripts as `ds_muon try` finds them, and runs of them on ranks, with and without it."""

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR

from deepspeed.muon.zero.tried_run import VARIABLE, replacements
from deepspeed.muon.zero.wrappers.adapter import patch
from helpers.models import MODELS, train_engine
from helpers.training import ds_config

RATE = 2.0**-9
"""A power of two: its multiples by powers of two are exact, whoever multiplies."""
SETTINGS: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.5}
ADAMW = {"type": "AdamW", "params": {"lr": RATE, "torch_adam": True, **SETTINGS, "betas": [0.9, 0.95]}}
WARMUP = {"warmup_min_lr": RATE / 4, "warmup_max_lr": RATE, "warmup_num_steps": 4, "warmup_type": "linear"}
CONFIGS: dict[str, dict[str, Any]] = {
    "schedule in the config": {"optimizer": ADAMW, "scheduler": {"type": "WarmupLR", "params": WARMUP}},
    "function that builds the schedule": {"optimizer": ADAMW},
    "optimizer and schedule of the script": {},
    "schedule of the script on the engine's optimizer": {},
}
"""What the script is -> its config beside the batch."""


def warm_up(step: int) -> float:
    return min(1.0, (step + 1) / 4)


class Wrapped(torch.optim.Optimizer):
    """An engine's optimizer as accelerate gives it to a script, which may build its schedule on it."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.defaults = optimizer, {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups


def initialize(script: str, config: dict[str, Any]) -> Any:
    """Return an engine as the script makes it."""
    import deepspeed

    torch.manual_seed(0)
    model = MODELS["mlp"]()
    more: dict[str, Any] = {"model_parameters": model.parameters()}
    if script.startswith("function"):
        more["lr_scheduler"] = lambda optimizer: LambdaLR(optimizer, warm_up)
    elif "optimizer" not in config:
        more["optimizer"] = torch.optim.AdamW(model.parameters(), lr=RATE, **SETTINGS)
        # As Trainer does: the groups have another decay than the defaults.
        more["optimizer"].defaults["weight_decay"] = 0.01
    if script.startswith("optimizer"):
        more["lr_scheduler"] = LambdaLR(more["optimizer"], warm_up)
    engine = deepspeed.initialize(model=model, config=config, **more)[0]
    if script.startswith("schedule of"):  # as Hugging Face's Trainer does
        engine.lr_scheduler = LambdaLR(Wrapped(engine.optimizer), warm_up)
    return engine


def config_of(stage: int, sections: dict[str, Any]) -> dict[str, Any]:
    """Return a ds_config with these sections and two micro-steps; without an optimizer if they have none."""
    config = ds_config(stage, 2, **({"optimizer": {}} | sections))
    return {key: value for key, value in config.items() if value != {}}


@contextmanager
def started_by_try(folder: Path, **variant: Any) -> Iterator[Path]:
    """Let this rank be a run of `ds_muon try`; the records' file."""
    records, own = folder / "records.jsonl", folder / f"rank{dist.get_rank()}.json"
    settings = {"muon": False, "factor": 1.0, "seed": 0, "steps": 5, "changes": {}, "records": str(records)} | variant
    own.write_text(json.dumps(settings))
    os.environ[VARIABLE] = str(own)
    with ExitStack() as undo:
        undo.callback(os.environ.pop, VARIABLE)
        for seam, function in replacements().items():
            undo.callback(patch(*seam.find(), function))
        yield records


def train_as_tried(script: str, stage: int, folder: Path, **variant: Any) -> tuple[Any, list[dict[str, Any]]]:
    """Run the script under `ds_muon try`; the exit code, and the records."""
    with started_by_try(folder, **variant) as records:
        engine, code = initialize(script, config_of(stage, CONFIGS[script])), None
        try:
            train_engine(engine, 20)
        except SystemExit as stop:
            code = stop.code
        engine.destroy()
        dist.barrier()
        return code, [json.loads(line) for line in records.read_text().splitlines()]


def train_plainly(script: str, stage: int, steps: int, sections: dict[str, Any]) -> list[float]:
    """Run the script with these sections in its config; the mean loss of each step over ranks and micro-steps."""
    engine = initialize(script, config_of(stage, sections))
    losses = torch.tensor(train_engine(engine, steps)).view(steps, 2).mean(1)
    dist.all_reduce(losses)
    engine.destroy()
    return (losses / dist.get_world_size()).tolist()


def problems(folder: Path) -> dict[str, str]:
    """What a run of `ds_muon try` refuses -> the message."""
    found = {}
    for case in ("a loaded checkpoint", "loss.backward", "Muon already", "another optimizer"):
        with started_by_try(folder, muon=case == "another optimizer"):
            try:
                refuse(case)
            except Exception as error:
                found[case] = f"{type(error).__name__}: {error}"
    return found


def refuse(case: str) -> None:
    import deepspeed

    sections: dict[str, Any] = {"optimizer": ADAMW}
    more: dict[str, Any] = {}
    model = MODELS["mlp"]()
    if case == "Muon already":
        sections = {"optimizer": {"type": "Muon", "params": {"lr": RATE}}}
    elif case == "another optimizer":
        sections, more = (
            {"zero_allow_untested_optimizer": True},
            {"optimizer": torch.optim.SGD(model.parameters(), 1.0)},
        )
    config = config_of(2, sections)
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config, **more)[0]
    engine.global_steps = 7 if case == "a loaded checkpoint" else 0
    if case == "loss.backward":
        engine.backward = lambda loss: loss.backward()
    train_engine(engine, 1)
