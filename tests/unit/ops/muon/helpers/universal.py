# SPDX-License-Identifier: Apache-2.0
"""Jobs that save, convert and load universal checkpoints on the ranks of a pool."""

from argparse import Namespace
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

from torch import nn
from torch.profiler import ProfilerActivity, profile

from helpers.engine_state import named_states
from helpers.models import MODELS, initialize_
from helpers.training import ds_config, fp32_weights

Case = dict[str, Any]
"""Arguments of ds_config, and ``model``, ``groups`` (of different settings) and ``seed``."""
ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.8, 0.95], "eps": 1e-8, "torch_adam": True}}


def groups_of(net: nn.Module) -> list[dict[str, Any]]:
    """Return the parameters as two groups with different settings, the second in reversed order."""
    params = [param for param in net.parameters() if param.requires_grad]
    own = {"momentum": 0.8, "ns_method": "standard", "weight_decay": 0.0, "betas": (0.7, 0.9)}
    return [{"params": params[:3], **own}, {"params": params[3:][::-1], "lr": 0.01}]


def build(case: Case, seed: int, **extra: Any) -> Any:
    """Return an engine of this case, with weights from ``seed``."""
    import deepspeed

    case = dict(case)
    net = MODELS[case.pop("model", "mlp")]()
    initialize_(net, seed)
    params = groups_of(net) if case.pop("groups", False) else [p for p in net.parameters() if p.requires_grad]
    return deepspeed.initialize(model=net, config=ds_config(**case, **extra), model_parameters=params)[0]


def facts(engine: Any) -> dict[str, Any]:
    """Return what a checkpoint must restore: weights, states and step counts by name, group settings, schedule."""
    optimizer = engine.basic_optimizer
    return {
        "weights": fp32_weights(engine),
        "states": named_states(engine),
        "keys": sorted({key for state in optimizer.state.values() for key in state}),
        "steps": sorted({float(state["step"]) for state in optimizer.state.values()}),
        "settings": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
        "schedule": engine.lr_scheduler.state_dict() if engine.lr_scheduler else None,
        "count": engine.global_steps,
    }


def convert(folder: Path, inject: bool = False) -> None:
    from deepspeed.checkpoint.ds_to_universal import main

    main(
        Namespace(
            input_folder=str(folder / "saved"),
            output_folder=str(folder / "universal"),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=inject,
        )
    )


def peak_of(action: Callable[[], Any]) -> float:
    """Return the peak of MB that torch allocates during `action`, beyond those before it; mapped files do not count."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        action()
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(accumulate(sizes), default=0) / 2**20
