# SPDX-License-Identifier: Apache-2.0
"""Copies of an engine's weights and states, and their comparison."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from helpers.models import full_weights


def flat_tensors(engine: Any) -> list[Tensor]:
    """Return the tensors that have optimizer state, in a fixed order."""
    wrapper = engine.optimizer
    for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition"):
        if hasattr(wrapper, name):
            return list(getattr(wrapper, name))
    return [p for group in engine.basic_optimizer.param_groups for p in group["params"]]


def local_states(engine: Any) -> list[dict[str, Tensor]]:
    """Return copies of this rank's optimizer state, one dict (key -> value) per tensor."""
    state = engine.basic_optimizer.state
    return [{key: torch.as_tensor(value).clone() for key, value in state[p].items()} for p in flat_tensors(engine)]


def owned_tensors(optimizer: Any) -> list[Tensor]:
    """Return the tensors that update rules keep of the matrices that this rank owns."""
    return [
        tensor for of_matrices in optimizer.owner_state.tensors_by_state.values() for tensor in of_matrices.values()
    ]


def kept_dtypes(states: Iterable[dict[str, Tensor]]) -> set[torch.dtype]:
    return {state[key].dtype for state in states for key in ("momentum_buffer", "momentum_codes") if key in state}


def named_states(engine: Any) -> dict[str, Tensor]:
    """Return "parameter.key" -> whole state, by DeepSpeed's public getter; a collective."""
    from deepspeed.utils import safe_get_full_optimizer_state

    states = {}
    for param, spec in engine.basic_optimizer.specs.items():
        for key in ("momentum_buffer",) if spec.use_muon else ("exp_avg", "exp_avg_sq"):
            states[f"{spec.name}.{key}"] = safe_get_full_optimizer_state(param, key).clone()
    return states


def master_weights(engine: Any) -> dict[str, Tensor]:
    """Return parameter -> copy of its whole fp32 weight, by DeepSpeed's public getter; a collective."""
    from deepspeed.utils import safe_get_full_fp32_param

    return {spec.name: safe_get_full_fp32_param(p).clone() for p, spec in engine.basic_optimizer.specs.items()}


def snapshot(engine: Any) -> dict[str, Tensor]:
    """Return copies of weights, master weights, states and step counts; a collective.

    At stage 3 only what is found by parameter name, because padding in flat tensors has arbitrary values.
    """
    result = {f"weight {name}": weight for name, weight in full_weights(engine.module).items()}
    entries = local_states(engine)
    result |= {f"{index} step": entry.pop("step") for index, entry in enumerate(entries)}
    if engine.zero_optimization_stage() == 3:
        masters = {f"{name} master": weight for name, weight in master_weights(engine).items()}
        return result | named_states(engine) | masters
    for index, (tensor, entry) in enumerate(zip(flat_tensors(engine), entries, strict=True)):
        result |= {f"{index} master": tensor.detach().clone()} | {f"{index} {k}": v for k, v in entry.items()}
    return result


def differing(left: dict[str, Tensor], right: dict[str, Tensor]) -> list[str]:
    """Return the names of values that are not bitwise equal, or are NaN."""
    return sorted(
        n for n in left.keys() | right.keys() if n not in left or n not in right or not left[n].equal(right[n])
    )


ADAM, MUON = ["exp_avg", "exp_avg_sq", "step"], ["momentum_buffer", "step"]
INT8 = ["momentum_absmax", "momentum_codes", "step"]
"""The keys of a tensor's state in memory."""
