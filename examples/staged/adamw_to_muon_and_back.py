# SPDX-License-Identifier: Apache-2.0
"""Change the optimizer in mid-run: from AdamW to Muon, and back to AdamW in two ways.

Run it as: deepspeed --num_gpus 2 adamw_to_muon_and_back.py
"""

import json
from typing import Any

import torch
from toy import Language, arguments, train, walk

import deepspeed

SCHEDULE = {"type": "WarmupCosineLR", "params": {"total_num_steps": 80, "warmup_num_steps": 10}}
BY_NAME = {"checkpoint": {"muon_changed_model": "match"}}
#: Stage -> the config's optimizer, keys that are added to its params, and keys that are added to the config.
STAGES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "adamw": ("AdamW", {"torch_adam": True}, {}),  # DeepSpeed's own AdamW would first be compiled
    "muon": ("Muon", {}, BY_NAME),
    "back": ("Muon", {"muon_exclude": ".*"}, BY_NAME),
    "back_to_deepspeeds": ("AdamW", {"torch_adam": True}, {}),
}
#: Stage -> the stage whose checkpoint it loads, and how.
LOADS: dict[str, tuple[str, dict[str, bool]]] = {
    "muon": ("adamw", {}),
    "back": ("muon", {}),
    "back_to_deepspeeds": ("muon", {"load_optimizer_states": False}),
}


def main() -> None:
    """Run the stages one after the other."""
    args = arguments(STAGES)
    for name in args.stages:
        kind, params, changes = STAGES[name]
        config = json.loads(args.deepspeed_config.read_text()) | {"scheduler": SCHEDULE} | changes
        config["optimizer"] = {"type": kind, "params": config["optimizer"]["params"] | params}
        torch.manual_seed(0)
        model = Language()
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        if name in LOADS:
            source, options = LOADS[name]
            engine.load_checkpoint(args.out / source, **options)
        train(engine, name, 20, lambda draw: (walk(draw, seed=1, length=32),))
        engine.save_checkpoint(args.out / name)
        engine.destroy()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
