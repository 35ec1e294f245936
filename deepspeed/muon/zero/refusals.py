# SPDX-License-Identifier: Apache-2.0
"""Checks for combinations of settings that are not supported; each raises an error that says what to change."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import deepspeed.comm as comm
import torch
from torch import nn

from deepspeed.muon.config.messages import did_you_mean
from deepspeed.muon.config.schema import MuonConfig
from deepspeed.muon.errors import CheckpointError, MuonConfigError, UnsupportedError
from deepspeed.muon.optimizer import MuonWithAuxAdam
from deepspeed.muon.zero.wrappers.gradient_norms import is_fp16_autocast
from deepspeed.muon.zero.wrappers.grids import shard_group, tp_rank
from deepspeed.muon.zero.wrappers.stage3 import part_size, sub_groups

#: Section of a ds_config -> attribute of ``DeepSpeedConfig`` that holds it.
SECTIONS = {
    "zero_optimization": "zero_config",
    "fp16": "float16_config",
    "bf16": "bfloat16_config",
}


def refuse_unsupported(ds_config: Any, settings: MuonConfig) -> None:
    """Raise UnsupportedError if deepspeed-muon does not support some settings; the error lists all of them.

    ``ds_config``: a ``DeepSpeedConfig``. ``settings``: the optimizer's, which may differ from those in the ds_config if
    the script built the optimizer.
    """
    problems = [f"{key}: {advice}" for key, applies, advice in RULES if applies(ds_config)]
    problems += [f"{MOMENTUM_DTYPE}: {text}" for text in _momentum_problems(ds_config, settings)]
    if problems:
        raise UnsupportedError("deepspeed-muon does not support this configuration:\n  " + "\n  ".join(problems))


def _setting(ds_config: Any, key: str, default: Any = None) -> Any:
    """Return the config's value at a dotted path, such as ``zero_optimization.stage``; ``default`` if there is none."""
    section, *names = key.split(".")
    value = ds_config
    for name in (SECTIONS.get(section, section), *names):
        value = getattr(value, name, None)
        if value is None:
            return default
    return value


def offload_device(ds_config: Any, section_key: str) -> str:
    """Return ``"cpu"``, ``"nvme"`` or ``"none"``: the device to which a ``DeepSpeedConfig`` offloads.

    ``section_key``: what is offloaded, either ``"offload_optimizer"`` or ``"offload_param"``.
    """
    device = _setting(ds_config, f"zero_optimization.{section_key}.device", "none")
    return str(getattr(device, "value", device))


Rule = tuple[str, Callable[[Any], Any], str]
"""(key that the message names, function that returns whether to refuse a ``DeepSpeedConfig``, what to change)."""


def _stage(ds_config: Any) -> int:
    return _setting(ds_config, "zero_optimization.stage", 0)


def is_bf16_optimizer(ds_config: Any) -> bool:
    """Return whether DeepSpeed wraps the optimizer of a bf16 model in ``BF16_Optimizer``.

    The answer holds only without ``offload_optimizer``, with which DeepSpeed uses another wrapper.
    """
    return _stage(ds_config) == 1 and _setting(ds_config, "grad_accum_dtype") in ("fp32", "float32")


def _is_scaled(ds_config: Any) -> bool:
    """Return whether DeepSpeed scales the loss, given a bf16 model under ``torch_autocast`` in fp16."""
    is_on_accelerator = offload_device(ds_config, "offload_optimizer") == "none"
    return _stage(ds_config) > 0 and not (is_bf16_optimizer(ds_config) and is_on_accelerator)


def _forbidden(key: str, advice: str, first_stage: int = 0) -> Rule:
    """Return a :data:`Rule` that refuses a true value of the dotted ``key``, from ZeRO stage ``first_stage`` on.

    ``advice``: the end of the error message, which says why and what to change.
    """
    return key, lambda c: bool(_setting(c, key)) and _stage(c) >= first_stage, advice


def _nvme_rules(section_key: str, kept: str, instead: str) -> tuple[Rule, Rule]:
    """Return a :data:`Rule` that refuses offload to NVMe below ZeRO stage 3, and one that refuses it without a path.

    ``section_key``: either ``"offload_optimizer"`` or ``"offload_param"``. ``kept``: what this section offloads.
    ``instead``: what to set below stage 3, for the error message.
    """

    def applies(ds_config: Any) -> bool:
        return _stage(ds_config) > 0 and offload_device(ds_config, section_key) == "nvme"

    key = f"zero_optimization.{section_key}"
    no_stage_3 = (
        f"DeepSpeed swaps to NVMe at stage 3 only and would keep the {kept} in memory; {instead}, or set "
        "zero_optimization.stage to 3"
    )
    no_path = 'device "nvme" needs it; write a folder on the disk to use'
    return (
        (f"{key}.device", lambda c: applies(c) and _stage(c) < 3, no_stage_3),
        (f"{key}.nvme_path", lambda c: applies(c) and not _setting(c, f"{key}.nvme_path"), no_path),
    )


ON_GPUS = "runs only on GPUs, and deepspeed-muon was not tested with it; set this key to false"
RULES: tuple[Rule, ...] = (
    *_nvme_rules("offload_optimizer", "states", 'use "cpu"'),
    *_nvme_rules("offload_param", "parameters", "remove offload_param"),
    _forbidden(
        "zero_optimization.offload_optimizer.super_offload",
        "it runs its own Adam, only on NVIDIA GPUs; set super_offload to false",
        first_stage=3,
    ),
    _forbidden(
        "zero_optimization.zenflow",
        "it updates the largest columns of a matrix first, with its own Adam, where Muon updates whole matrices; "
        "remove the section",
    ),
    _forbidden("zero_optimization.zero_quantized_weights", f"quantization {ON_GPUS}", first_stage=3),
    _forbidden("zero_optimization.zero_quantized_gradients", f"quantization {ON_GPUS}", first_stage=3),
    _forbidden("fp16.fp16_master_weights_and_grads", "DeepSpeed requires its own CPU Adam; set it to false"),
    (
        "zero_optimization.offload_optimizer.ratio",
        lambda c: (
            _setting(c, "zero_optimization.offload_optimizer.ratio", 1.0) < 1.0
            and offload_device(c, "offload_optimizer") != "none"
        ),
        "below 1.0 another optimizer updates the part on the accelerator; remove the key or set it to 1.0",
    ),
    (
        "zero_optimization.mics_shard_size",
        lambda c: _setting(c, "zero_optimization.mics_shard_size", -1) > 0,
        "MiCS is not supported yet; remove the key",
    ),
    (
        "bf16.bf16_master_weights_and_grads",
        lambda c: (
            _setting(c, "bf16.bf16_master_weights_and_grads")
            and (not _setting(c, "bf16.bf16_optimizer_states") or offload_device(c, "offload_optimizer") != "none")
        ),
        "with fp32 states, or with offload, DeepSpeed requires its own CPU Adam; set bf16.bf16_optimizer_states to "
        "true and remove offload_optimizer, or set bf16.bf16_master_weights_and_grads to false",
    ),
    (
        "data_types.grad_accum_dtype",
        lambda c: _setting(c, "bf16.bf16_master_weights_and_grads") and is_bf16_optimizer(c),
        "fp32 at stage 1 selects DeepSpeed's BF16_Optimizer, which keeps fp32 weights whatever "
        "bf16.bf16_master_weights_and_grads says; remove one of them",
    ),
    (
        "torch_autocast.dtype",
        lambda c: (
            _setting(c, "bf16.enabled")
            and _setting(c, "torch_autocast_enabled")
            and _setting(c, "torch_autocast_dtype") == torch.float16
            and not _is_scaled(c)
        ),
        "at stage 0, and at stage 1 with fp32 gradients, DeepSpeed has no loss scale for a bf16 model; use bfloat16, "
        "or remove bf16",
    ),
)
LOAD_ORIGINAL = "remove the key, and load the checkpoint as it was saved, on as many ranks"
#: The key in messages about settings of the optimizer that DeepSpeed's settings contradict.
MOMENTUM_DTYPE = "optimizer.params.momentum_dtype"


def _momentum_problems(ds_config: Any, settings: MuonConfig) -> Iterator[str]:
    """Yield an error message for each of DeepSpeed's settings that contradicts the setting ``momentum_dtype``."""
    stays = _setting(ds_config, "zero_optimization.save_muon_momentum_buffer_in_memory")
    if settings.momentum_dtype != "fp32" and offload_device(ds_config, "offload_optimizer") == "nvme" and not stays:
        yield (
            "DeepSpeed swaps optimizer states to NVMe in fp32; set "
            "zero_optimization.save_muon_momentum_buffer_in_memory to true, which keeps the momentum in memory, or "
            'momentum_dtype to "fp32"'
        )
    is_asked = settings.momentum_dtype == "fp32" and "momentum_dtype" in settings.model_fields_set
    if is_asked and _setting(ds_config, "bf16.bf16_optimizer_states"):
        yield "bf16.bf16_optimizer_states keeps the momentum in bf16; remove one of them"


def renames_parameters(ds_config: Any) -> bool:
    """Return whether AutoEP (``expert_parallel``) will replace parameters by new ones with other names and shapes."""
    return bool(_setting(ds_config, "expert_parallel_config.enabled"))


def refuse_engine(engine: Any) -> None:
    """Raise UnsupportedError with all problems if deepspeed-muon does not support the engine's kinds of parallelism."""
    if problems := list(_engine_problems(engine)):
        raise UnsupportedError("deepspeed-muon does not support this engine yet: " + "; ".join(problems))


def refuse_universal(engine: Any) -> None:
    """Raise UnsupportedError if the engine cannot load universal checkpoints. Call it before such a load."""
    problems = []
    if engine.zero_optimization_stage() == 0 and not engine.pipeline_parallelism:
        problems += ["DeepSpeed loads universal checkpoints at stages 1 to 3 only; set zero_optimization.stage to 1"]
    if engine.moe_layers:
        problems += [f"DeepSpeed's converter does not know deepspeed.moe layers; {LOAD_ORIGINAL}"]
    if tp_rank(engine)[1] > 1 and engine.autotp_size() <= 1:
        problems += [
            "with an mpu or a model axis DeepSpeed's converter does not know how the weights are sharded; "
            + LOAD_ORIGINAL
        ]
    if problems:
        raise UnsupportedError(
            "this engine cannot load universal checkpoints (checkpoint.load_universal): " + "; ".join(problems)
        )


def refuse_qk_clip(engine: Any) -> None:
    """Raise UnsupportedError if the engine uses sequence parallelism, with which ``qk_clip`` cannot observe logits."""
    if _uses_sequence_parallelism(engine):
        raise UnsupportedError(
            "optimizer.params.qk_clip: not supported with sequence parallelism, where ranks exchange attention "
            "heads; remove qk_clip"
        )


def _uses_sequence_parallelism(engine: Any) -> bool:
    return (getattr(engine, "sequence_parallel_size", 1) or 1) > 1


def _engine_problems(engine: Any) -> Iterator[str]:
    _, tp_size = tp_rank(engine)
    if engine.moe_layers and _uses_sequence_parallelism(engine):
        yield (
            "deepspeed.moe layers with sequence parallelism, where DeepSpeed takes the ranks of a sequence for "
            "tensor-parallel ones and mixes up their tokens; use data parallelism"
        )
    if engine.moe_layers and engine.autotp_size() > 1:
        yield "deepspeed.moe layers with AutoTP, which may cut experts that differ from rank to rank; pass an mpu"
    is_cut = engine.has_moe_layers or tp_size > 1 or engine.pipeline_parallelism
    if is_cut and is_fp16_autocast(engine) and not engine.zero_optimization():
        yield (
            "experts, tensor parallelism or a pipeline under fp16 autocast at stage 0, where some ranks would skip a "
            "step that others take; set zero_optimization.stage to 1"
        )
    if engine.pipeline_parallelism:
        yield from _pipeline_problems(engine)
    elif engine.mpu is not None and tp_size * engine.seq_dp_world_size != engine.world_size:
        yield (
            "a model-parallel unit (mpu) with other axes than tensor and data parallelism, which are "
            f"{tp_size} x {engine.seq_dp_world_size} of {engine.world_size} ranks; use DeepSpeed's PipelineModule for "
            "pipelines"
        )
    if _uses_sequence_parallelism(engine) and not hasattr(engine.mpu, "get_sequence_data_parallel_group"):
        yield (
            "sequence parallelism by mesh_param, or by data_parallel_size in the config, where DeepSpeed leaves each "
            "rank of a sequence its own gradients, or at stage 3 lets the ranks overwrite one another's checkpoints; "
            "pass mpu=deepspeed.runtime.sequence_parallel.parallel_state_sp to initialize"
        )


def _pipeline_problems(engine: Any) -> Iterator[str]:
    if engine.zero_optimization_stage() > 1:
        yield "a pipeline at ZeRO stage 2 or 3, which DeepSpeed refuses; set zero_optimization.stage to 1"
    if hasattr(engine.module, "phase_bounds"):
        yield "DualPipeV, whose ranks hold two stages each; use PipelineModule"


# ---- loads by parameter names ------------------------------------------------------------------------------------

#: The key of a ds_config's section ``checkpoint`` that allows such loads.
KEY = "muon_changed_model"


def refuse_load_by_name(engine: Any) -> None:
    """Raise CheckpointError if the engine cannot load a checkpoint of a changed model by parameter names.

    It cannot in a pipeline, under tensor parallelism, and with experts that differ between ranks. Call it before such a
    load.
    """
    unsupported = {
        "pipelines": engine.pipeline_parallelism,
        "tensor parallelism": tp_rank(engine)[1] > 1,
        "experts that are spread over ranks": engine.has_moe_layers,
    }
    if found := [name for name, is_used in unsupported.items() if is_used]:
        raise CheckpointError(
            f"checkpoint.{KEY}: not supported with {' and '.join(found)}; remove this key and resume the same model, "
            "or resume without them"
        )


def check_section(section: Mapping[str, Any] | None) -> None:
    """Raise MuonConfigError for an unknown ``muon*`` key in the ds_config's section ``checkpoint``, or a wrong value.

    The only such key is ``muon_changed_model``: "error" or "match". Other keys are DeepSpeed's and are not checked.
    """
    for key, value in (section or {}).items():
        if key == KEY and value not in ("error", "match"):
            raise MuonConfigError(f'checkpoint.{KEY}: got {value!r}; expected "error" or "match"')
        if key.startswith("muon") and key != KEY:
            hint = did_you_mean(key, [KEY], f"the only key of deepspeed-muon in this section is {KEY}", quote="'")
            raise MuonConfigError(f"checkpoint.{key}: unknown key; {hint}")


#: DeepSpeed swaps tensors of at least this many bytes, or of ``aio.block_size`` if that is larger.
MIN_SWAPPED_BYTES = 2**20
#: Bit of CAP_IPC_LOCK, the Linux capability that allows a process to lock any amount of memory.
CAP_IPC_LOCK_BIT = 14


def swap_threshold(ds_config: Any) -> int:
    """Return the size in bytes of the smallest tensor that DeepSpeed swaps to NVMe. Smaller tensors stay in memory."""
    return max(MIN_SWAPPED_BYTES, int(ds_config.aio_config["block_size"]))


def check_nvme(engine: Any, optimizer: MuonWithAuxAdam) -> None:
    """Check the settings for offload to NVMe before ZeRO allocates memory; do nothing without such offload.

    Raises:
        UnsupportedError: lists all problems, such as too few buffers, or a folder that cannot be written to.
    """
    ds_config = engine._config
    asked = [name for name in ("offload_optimizer", "offload_param") if offload_device(ds_config, name) == "nvme"]
    if not asked or engine.zero_optimization_stage() != 3:
        return
    sizes = [(group, _sub_group_sizes(engine, group)) for group in optimizer.param_groups]
    problems = [
        *(
            problem
            for name in asked
            for problem in _path_problems(name, getattr(ds_config.zero_config, name).nvme_path)
        ),
        *_library_problems(),
        *(_optimizer_problems(ds_config, sizes) if "offload_optimizer" in asked else ()),
        *(_param_problems(ds_config, sizes, engine.dp_world_size) if "offload_param" in asked else ()),
    ]
    if problems:
        raise UnsupportedError("offload to NVMe cannot work as configured:\n  " + "\n  ".join(problems))


def _elements_per_rank(param: nn.Parameter, world_size: int) -> int:
    return part_size(getattr(param, "ds_numel", param.numel()), world_size)


Sizes = list[tuple[dict[str, Any], list[int]]]
"""Pairs of a parameter group and a list: how many elements of each of its sub-groups one rank holds."""


def _sub_group_sizes(engine: Any, group: dict[str, Any]) -> list[int]:
    """Predict how many elements one rank holds of each sub-group into which stage 3 divides a parameter group."""
    limit, ranks = engine._config.zero_config.sub_group_size, comm.get_world_size(shard_group(engine, group))
    parts = [_elements_per_rank(param, ranks) for param in group["params"] if param.requires_grad]
    return [sum(parts[index] for index in indices) for indices in sub_groups(parts, limit)]


def _buffers_per_sub_group(group: dict[str, Any], ds_config: Any) -> int:
    """Return how many of DeepSpeed's NVMe swap buffers each sub-group of a parameter group needs in its step.

    A sub-group needs one for its weights, one for its gradient and one for each optimizer state that is swapped.
    """
    if not group["use_muon"]:
        return 4
    return 2 if ds_config.zero_config.save_muon_momentum_buffer_in_memory else 3


def buffers_needed(ds_config: Any, sizes: Sizes) -> int:
    """Return the smallest ``offload_optimizer.buffer_count`` with which DeepSpeed's swapper can step every sub-group.

    ``ds_config``: the ``DeepSpeedConfig``. ``sizes``: for each parameter group, how many elements one rank holds of
    each sub-group, such as ``[(group, [1000, 600])]``.
    """
    section = ds_config.zero_config.offload_optimizer
    needs = [
        _buffers_per_sub_group(group, ds_config)
        for group, numels in sizes
        for numel in numels
        if 4 * numel >= swap_threshold(ds_config)
    ]
    # Sub-groups with buffers at the same time: also the next one while it is read, the previous while it is written.
    window = 1 + section.pipeline_read + section.pipeline_write
    return max((sum(needs[at : at + window]) for at in range(len(needs))), default=1)


def _optimizer_problems(ds_config: Any, sizes: Sizes) -> Iterator[str]:
    """Yield error messages about the buffers of ``offload_optimizer``: too few, or more memory than can be locked."""
    section, needed = ds_config.zero_config.offload_optimizer, buffers_needed(ds_config, sizes)
    if section.buffer_count < needed:
        window = 1 + section.pipeline_read + section.pipeline_write
        muon = _buffers_per_sub_group({"use_muon": True}, ds_config)
        yield (
            f"zero_optimization.offload_optimizer.buffer_count: got {section.buffer_count}; write {needed} or more. "
            f"A Muon sub-group takes {muon} buffers, an AdamW sub-group 4, and up to {window} sub-groups are in memory "
            "at once"
        )
    largest = max((numel for _, numels in sizes for numel in numels), default=0)
    yield from _lock_problems("offload_optimizer.buffer_count", max(section.buffer_count, needed) * largest * 4)


def _param_problems(ds_config: Any, sizes: Sizes, world_size: int) -> Iterator[str]:
    """Yield error messages about the buffers of ``offload_param``: too small, or more memory than can be locked."""
    section, params = ds_config.zero_config.offload_param, [p for group, _ in sizes for p in group["params"]]
    parts = [(_elements_per_rank(p, world_size), p.element_size()) for p in params]
    largest = max((part for part, itemsize in parts if part * itemsize >= swap_threshold(ds_config)), default=0)
    if section.buffer_size < largest:
        yield (
            f"zero_optimization.offload_param.buffer_size: got {section.buffer_size}; write {largest} or more, the "
            "number of elements of the largest parameter that one rank holds"
        )
    itemsize = max((itemsize for _, itemsize in parts), default=4)
    yield from _lock_problems("offload_param.buffer_size", section.buffer_count * section.buffer_size * itemsize)


def _lock_problems(key: str, needed_bytes: int) -> Iterator[str]:
    """Yield an error message if this process may not lock ``needed_bytes`` of memory for DeepSpeed's buffers.

    ``key``: config key of the number or size of these buffers, for the message.
    """
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit != resource.RLIM_INFINITY and needed_bytes > limit and not _may_lock():
        yield (
            f"zero_optimization.{key}: the buffers lock {needed_bytes:,} bytes of memory and the limit of this process "
            f"is {limit:,}; raise this limit (ulimit -l unlimited), or write a smaller sub_group_size or buffer_size"
        )


def _may_lock() -> bool:
    """Return whether this process may lock any amount of memory (``CAP_IPC_LOCK``); True if that is unknown."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return True  # not known: let DeepSpeed try
    capabilities = next((line for line in status.splitlines() if line.startswith("CapEff:")), "CapEff: 0")
    return bool(int(capabilities.split()[1], 16) >> CAP_IPC_LOCK_BIT & 1)


def _path_problems(section_key: str, nvme_path: Path) -> Iterator[str]:
    """Yield an error message if no file can be written with direct I/O in the folder ``nvme_path``.

    ``section_key``: section that names the folder, either ``"offload_optimizer"`` or ``"offload_param"``.
    """
    try:
        Path(nvme_path).mkdir(parents=True, exist_ok=True)
        probe = Path(nvme_path) / f".deepspeed_muon_{os.getpid()}"
        try:
            os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | getattr(os, "O_DIRECT", 0)))
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        yield (
            f"zero_optimization.{section_key}.nvme_path: no file can be written to {nvme_path} with direct I/O "
            f"({error.strerror}); name a folder on a disk that this user can write to"
        )


def _library_problems() -> Iterator[str]:
    """Yield error messages if this DeepSpeed's NVMe swapper is too old, or its extension async_io cannot be built."""
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from deepspeed.runtime.swap_tensor.pipelined_optimizer_swapper import PipelinedOptimizerSwapper

    # Without this method no buffer can be released, and no tensor can be kept in memory.
    if not hasattr(PipelinedOptimizerSwapper, "release_swap_buffers"):
        yield (
            "zero_optimization: this DeepSpeed cannot offload Muon's states to NVMe; install DeepSpeed 0.19.8 or later"
        )
    if not installed_ops.get("async_io") and not AsyncIOBuilder().is_compatible(verbose=False):
        yield (
            "zero_optimization: DeepSpeed cannot build async_io here; install libaio with its headers (libaio-dev, "
            "libaio-devel), ninja and a C++ compiler"
        )
