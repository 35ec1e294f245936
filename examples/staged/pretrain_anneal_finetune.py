# SPDX-License-Identifier: Apache-2.0
"""Pretrain with warm-up, anneal the learning rate to zero on clean text, then fine-tune on other, shorter text.

Run it as: deepspeed --num_gpus 2 pretrain_anneal_finetune.py
"""

import json
from typing import Any

import torch
from toy import Language, arguments, train, walk

import deepspeed

WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 10}}
TO_ZERO = {
    "type": "WarmupCosineLR",
    "params": {"total_num_steps": 15, "warmup_num_steps": 1, "warmup_min_ratio": 1.0, "cos_min_ratio": 0.0},
}
TUNING = {"type": "WarmupCosineLR", "params": {"total_num_steps": 20, "warmup_num_steps": 5}}
#: What of a checkpoint is left behind: the schedule, or all but the weights.
NEW_SCHEDULE = {"load_lr_scheduler_states": False}
ONLY_WEIGHTS = {"load_module_only": True, "load_optimizer_states": False}
STAGES: dict[str, dict[str, Any]] = {
    "pretrain": {"lr": 1e-2, "scheduler": WARMUP, "steps": 30, "text": {"seed": 1, "length": 32, "noise": 0.3}},
    "anneal": {"lr": 1e-2, "scheduler": TO_ZERO, "steps": 15, "text": {"seed": 1, "length": 32, "noise": 0.1}},
    "finetune": {"lr": 3e-3, "scheduler": TUNING, "steps": 20, "text": {"seed": 2, "length": 16, "noise": 0.1}},
}
#: Stage -> the stage whose checkpoint it loads, and how.
LOADS = {"anneal": ("pretrain", NEW_SCHEDULE), "finetune": ("anneal", ONLY_WEIGHTS)}


def main() -> None:
    """Run the stages one after the other."""
    args = arguments(STAGES)
    for name in args.stages:
        stage, config = STAGES[name], json.loads(args.deepspeed_config.read_text())
        config["scheduler"] = stage["scheduler"]
        config["optimizer"]["params"]["lr"] = stage["lr"]
        torch.manual_seed(0)
        model = Language()
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        if name in LOADS:
            source, options = LOADS[name]
            engine.load_checkpoint(args.out / source, **options)
        train(engine, name, stage["steps"], lambda draw: (walk(draw, **stage["text"]),))
        engine.save_checkpoint(args.out / name)
        engine.destroy()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
