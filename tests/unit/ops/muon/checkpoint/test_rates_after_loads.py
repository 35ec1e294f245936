# SPDX-License-Identifier: Apache-2.0
"""Loads that take no learning rates from a checkpoint: the next step has the rate at the schedule's position."""

from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed import initialize
from helpers.changed_models import ADAMW, MATCH, Layers
from helpers.distributed import run
from helpers.models import train_engine
from helpers.training import ds_config, with_params
from helpers.universal import convert

#: Way to load that takes no learning rates from the checkpoint -> (optimizer that saves, config and arguments).
AS_ADAMW = with_params(lr=1e-3)
WITHOUT_RATES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "without states": (AS_ADAMW, {"optimizer": AS_ADAMW}, {"load_optimizer_states": False}),
    "of AdamW, universal": (ADAMW, {"optimizer": AS_ADAMW, "checkpoint": {"load_universal": True}}, {}),
    "of AdamW by name": (ADAMW, MATCH | {"optimizer": AS_ADAMW}, {}),
    "by name": (AS_ADAMW, MATCH | {"optimizer": with_params(lr=1e-3, muon_exclude="layers.1")}, {}),
}
WARMUP = {"scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 2, "total_num_steps": 9}}}


def rates_of_both(folder: str, stage: int, way: str) -> list[tuple[list[float], list[float]]]:
    """For DeepSpeed's schedule and torch's: the next step's rates at a save, and after its load."""
    found = []
    optimizer, config, arguments = WITHOUT_RATES[way]
    for name, extra in (("deepspeed", WARMUP), ("torch", {})):
        rates = []
        for section in ({"optimizer": optimizer}, config):
            net = Layers()
            options = {"model_parameters": net.parameters(), "config": ds_config(stage=stage, **section, **extra)}
            if not extra:
                options["lr_scheduler"] = lambda it: torch.optim.lr_scheduler.ExponentialLR(it, 0.5)
            engine = initialize(model=net, **options)[0]
            if not rates:
                train_engine(engine, 3)
                engine.save_checkpoint(f"{folder}/{name}", tag="saved")
                if "universal" in way:
                    convert(Path(folder, name), inject=True)
            else:
                tag = "universal" if "universal" in way else "saved"
                engine.load_checkpoint(f"{folder}/{name}", tag, **arguments)
            rates.append([group["lr"] for group in engine.lr_scheduler.optimizer.param_groups])
            engine.destroy()
        found.append((rates[0], rates[1]))
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("way", WITHOUT_RATES)
def test_the_first_step_has_the_rate_of_the_schedule(way: str, stage: int, tmp_path: Path) -> None:
    for before, after in run(rates_of_both, 1, folder=str(tmp_path), stage=stage, way=way)[0]:
        assert 0 < before[0] < 0.99e-3 and after == pytest.approx(before[:1] * len(after))
