# SPDX-License-Identifier: Apache-2.0
"""``save_checkpoint`` that fails closed: a failure on one rank is an error on all, and ``latest`` is written last."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from deepspeed.muon.errors import CheckpointError
from deepspeed.muon.log import logger
from deepspeed.muon.optimizer import MuonWithAuxAdam
from deepspeed.muon.zero.checkpoint.files import SafeFiles, is_torchs
from deepspeed.muon.zero.consensus import differences, gathered

#: Arguments of a save and a load that all ranks must pass alike.
COMMON = {
    "save_dir", "load_dir", "tag", "save_latest", "exclude_frozen_parameters", "load_module_strict", "load_module_only",
    "load_optimizer_states", "load_lr_scheduler_states", "custom_load_fn",
}  # fmt: skip


def save_checkpoint(original: Callable, engine: Any, *args: Any, **kwargs: Any) -> Any:
    """``DeepSpeedEngine.save_checkpoint``, through files of :class:`SafeFiles`.

    Raises:
        CheckpointError: on all ranks, where anything failed on one of them. Nothing of the checkpoint is left,
            ``latest`` names no incomplete one, and the engine can train on and save again.
    """
    call = inspect.signature(original).bind(engine, *args, **kwargs)
    call.apply_defaults()
    if not is_ours(engine):
        return original(engine, *args, **kwargs)
    arguments = call.arguments
    if arguments["tag"] is None:
        arguments["tag"] = f"global_step{engine.global_steps}"
    compare_arguments(engine, "save_checkpoint", arguments)
    if not arguments["save_dir"]:
        return original(**arguments)  # raises DeepSpeed's error, on all ranks
    _warn_of_unfinished_step(engine)
    _warn_of_different_client_states(engine, arguments["client_state"])
    _warn_of_frozen(engine, arguments["exclude_frozen_parameters"])
    files = SafeFiles(engine, arguments["exclude_frozen_parameters"], names_latest=arguments["save_latest"])
    with engine.basic_optimizer.whole_state():
        if is_torchs(engine.checkpoint_engine):
            arguments["save_latest"] = False
            return files.run(lambda: original(**arguments))
        files.leave_to_deepspeed(Path(arguments["save_dir"], str(arguments["tag"])))
        return original(**arguments)


def is_ours(engine: Any) -> bool:
    """Return whether an engine trains with this Muon."""
    return isinstance(getattr(engine, "basic_optimizer", None), MuonWithAuxAdam)


def compare_arguments(engine: Any, call: str, arguments: Mapping[str, Any]) -> None:
    """Raise the same CheckpointError on all ranks if they call a save or a load with different arguments."""
    values = {name: value for name, value in arguments.items() if name in COMMON}
    for name in {"save_dir", "load_dir"} & values.keys():
        values[name] = str(Path(values[name]).absolute()) if values[name] else ""
        if engine.use_node_local_storage():
            values[name] = bool(values[name])  # nodes may have different folders
    values["tag"] = None if values["tag"] is None else str(values["tag"])
    if "custom_load_fn" in values:
        values["custom_load_fn"] = values["custom_load_fn"] is not None
    titles = {name: f"{call}: the argument {name}" for name in values}
    if verdict := differences(gathered(values), titles):
        raise CheckpointError(f"{verdict['error']}; pass the same on all ranks. Nothing was written or changed")


def _warn_of_different_client_states(engine: Any, state: Any) -> None:
    """Warn where one rank's ``client_state`` is saved and others differ from it: at stage 3 each rank saves its own."""
    plain = (str, bytes, int, float, bool, type(None))
    facts = {
        str(key): value if isinstance(value, plain) else type(value).__name__ for key, value in (state or {}).items()
    }
    found = gathered(facts)
    odd = [rank for rank, other in enumerate(found) if other != found[0]]
    if odd and engine.zero_optimization_stage() != 3 and engine.global_rank == 0:
        logger.warning(
            "deepspeed-muon: client_state of ranks %s differs from that of rank 0. At ZeRO stages 0 to 2 DeepSpeed "
            "saves that of one rank per share of the model, and loads it on all: gather what all ranks need before the "
            "save",
            odd,
        )


def _warn_of_unfinished_step(engine: Any) -> None:
    """Warn when a checkpoint is saved between the micro-batches of a step."""
    done, total = position(engine), engine.gradient_accumulation_steps()
    if done and engine.global_rank == 0:
        logger.warning(
            "deepspeed-muon: this checkpoint is saved after micro-batch %d of %d; the gradients since the last step "
            "are not part of it: a resumed run begins this step again: give it these %d micro-batches once more",
            done,
            total,
            done,
        )


def _warn_of_frozen(engine: Any, are_excluded: bool) -> None:
    """Warn, once, that DeepSpeed saves what ``zero_to_fp32`` needs for frozen parameters at stages 2 and 3 only."""
    adapter = engine.muon_adapter
    if engine.zero_optimization_stage() != 1 or are_excluded or adapter.has_warned_of_frozen:
        return
    frozen = [name for name, param in engine.module.named_parameters() if not param.requires_grad]
    adapter.has_warned_of_frozen = True
    if frozen and engine.global_rank == 0:
        logger.warning(
            "deepspeed-muon: at ZeRO stage 1 DeepSpeed's zero_to_fp32 leaves out frozen parameters, here %d, first %s; "
            "they are in this checkpoint's mp_rank_*_model_states.pt, or use stage 2",
            len(frozen),
            frozen[0],
        )


def position(engine: Any) -> int:
    """Return the micro-batches since the last step; 0 if the script or framework decides which one ends a step."""
    is_managed = getattr(engine, "managed_gradient_accumulation", lambda: True)()
    if not is_managed or engine._is_gradient_accumulation_boundary is not None:
        return 0
    return engine.micro_steps % engine.gradient_accumulation_steps()
