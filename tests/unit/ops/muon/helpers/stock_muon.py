# SPDX-License-Identifier: Apache-2.0
"""A job that trains with stock's own Muon. It must run with deepspeed-muon off, so it imports nothing from it."""

import sys
from typing import Any

from torch import Tensor

from helpers.models import MODELS, train_engine
from helpers.training import ds_config

STOCK = {"DS_MUON_AUTOLOAD": "0", "TORCHDYNAMO_DISABLE": "1"}
"""Environment of such a job; stock compiles its Newton-Schulz otherwise."""
PARAMS = {"lr": 0.0, "momentum": 0.9, "betas": [0.8, 0.95], "ns_method": "standard", "torch_adam": True}
"""The weights stay where they are, so that momentum follows from the definition."""


def momentum_of(engine: Any) -> dict[str, Tensor]:
    """Return name -> stock's momentum, for the parameters whose whole momentum this rank holds."""
    from deepspeed.utils import safe_get_full_optimizer_state

    names = {param: name for name, param in engine.module.named_parameters()}
    stage, wrapper = engine.zero_optimization_stage(), engine.optimizer
    found: dict[str, Tensor] = {}
    if stage == 0:
        for index, group in enumerate(engine.basic_optimizer.param_groups):
            params = group["params"] if wrapper is engine.basic_optimizer else wrapper.fp16_groups[index]
            for param, key in zip(params, group["params"], strict=True):
                if group["use_muon"]:
                    found[names[param]] = engine.basic_optimizer.state[key]["momentum_buffer"].clone()
    elif stage in (1, 2) and not getattr(wrapper, "cpu_offload", True):
        for index, group in enumerate(engine.basic_optimizer.param_groups):
            before = 0
            for param in wrapper.params_in_partition[index] if group["use_muon"] else ():
                buffer = engine.basic_optimizer.state[group["params"][0]]["momentum_buffer"]
                found[names[param]] = buffer[before : before + param.numel()].view(param.shape).clone()
                before += param.numel()
    else:
        for param, name in names.items():
            if param.use_muon:
                found[name] = safe_get_full_optimizer_state(param, "momentum_buffer").clone()
    return found


def save_stock(cases: list[dict[str, Any]], folder: str) -> list[dict[str, Tensor]]:
    """Take three steps at learning rate 0 in each case and save; return the momentum of stock's Muon by case."""
    import deepspeed

    assert "deepspeed.muon" not in sys.modules
    results = []
    for index, case in enumerate(cases):
        case = {"clip": 0.0, "zero_force_ds_cpu_optimizer": False} | case
        net = MODELS[case.pop("model", "mlp")]()
        config = ds_config(**case, optimizer={"type": "Muon", "params": PARAMS})
        engine = deepspeed.initialize(model=net, config=config, model_parameters=net.parameters())[0]
        train_engine(engine, 3)
        engine.save_checkpoint(f"{folder}/{index}", tag="saved")
        results.append(momentum_of(engine))
        engine.destroy()
    return results
