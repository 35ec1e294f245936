# SPDX-License-Identifier: Apache-2.0
"""Unsupported combinations of settings. Each is refused with a message that says what to change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from deepspeed.muon.errors import UnsupportedError


def refuse_unsupported(config: Any, momentum_dtype: str | None = None) -> None:
    """Check a ``DeepSpeedConfig`` whose optimizer is Muon.

    Args:
        momentum_dtype: of the optimizer, where the script has built it; else the config's.

    Raises:
        UnsupportedError: listing every combination that is not supported.
    """
    problems = [f"{key}: {advice}" for key, applies, advice in RULES if applies(config)]
    kept = momentum_dtype or (_get(config, "optimizer_params") or {}).get("momentum_dtype")
    if kept == "bf16" and _on_nvme(config, "offload_optimizer"):
        problems.append(f"{BF16_ON_NVME[0]}: {BF16_ON_NVME[1]}")
    if problems:
        raise UnsupportedError("deepspeed-muon does not support this configuration:\n  " + "\n  ".join(problems))


def _get(config: Any, path: str, default: Any = None) -> Any:
    for name in path.split("."):
        config = getattr(config, name, None)
        if config is None:
            return default
    return config


def _is_set(path: str) -> Callable[[Any], bool]:
    return lambda config: bool(_get(config, path))


def is_nvme(section: Any) -> bool:
    """Whether an ``offload_optimizer`` or ``offload_param`` section asks for NVMe."""
    device = getattr(section, "device", None)
    return str(getattr(device, "value", device)) == "nvme"


def _on_nvme(config: Any, section: str) -> bool:
    return is_nvme(_get(config, f"zero_config.{section}"))


def _fp16_autocast(config: Any) -> bool:
    return bool(_get(config, "torch_autocast_enabled")) and "float16" in str(
        _get(config, "torch_autocast_dtype")
    ).replace("bfloat16", "")


#: This refusal depends on the optimizer as well.
BF16_ON_NVME = (
    "optimizer.params.momentum_dtype",
    'DeepSpeed swaps optimizer states to NVMe in fp32; set it to "fp32", or offload_optimizer.device to "cpu"',
)
RULES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "zero_optimization.offload_optimizer.device",
        lambda c: _on_nvme(c, "offload_optimizer") and _get(c, "zero_optimization_stage", 0) != 3,
        'DeepSpeed swaps to NVMe at stage 3 only and would keep the states in memory; use "cpu", or set '
        "zero_optimization.stage to 3",
    ),
    (
        "zero_optimization.offload_param.device",
        lambda c: _on_nvme(c, "offload_param") and _get(c, "zero_optimization_stage", 0) != 3,
        "DeepSpeed swaps to NVMe at stage 3 only and would keep the parameters in memory; remove offload_param, or set "
        "zero_optimization.stage to 3",
    ),
    (
        "zero_optimization.offload_optimizer.nvme_path",
        lambda c: _on_nvme(c, "offload_optimizer") and not _get(c, "zero_config.offload_optimizer.nvme_path"),
        'device "nvme" needs it; write a folder on the disk to use',
    ),
    (
        "zero_optimization.offload_param.nvme_path",
        lambda c: _on_nvme(c, "offload_param") and not _get(c, "zero_config.offload_param.nvme_path"),
        'device "nvme" needs it; write a folder on the disk to use',
    ),
    (
        "zero_optimization.offload_optimizer.ratio",
        lambda c: _get(c, "zero_config.offload_optimizer.ratio", 1.0) < 1.0,
        "a part on the accelerator is updated by another optimizer; remove the key or set it to 1.0",
    ),
    (
        "zero_optimization.offload_optimizer.super_offload",
        _is_set("zero_config.offload_optimizer.super_offload"),
        "SuperOffload runs its own CPU Adam; set it to false",
    ),
    ("zero_optimization.zenflow", _is_set("zero_config.zenflow"), "ZenFlow runs its own CPU Adam; remove the section"),
    (
        "zero_optimization.elastic_checkpoint",
        _is_set("zero_config.elastic_checkpoint"),
        "it cannot store two kinds of optimizer state; set it to false and use universal checkpoints",
    ),
    (
        "zero_optimization.compute_grad_norm",
        lambda c: _get(c, "zero_config.compute_grad_norm", True) is False,
        "the norm is what keeps a non-finite gradient out of the momentum; set it to true",
    ),
    (
        "zero_optimization.zero_quantized_weights",
        _is_set("zero_config.zero_quantized_weights"),
        "quantized gathering is not tested; set it to false",
    ),
    (
        "zero_optimization.zero_quantized_gradients",
        _is_set("zero_config.zero_quantized_gradients"),
        "quantized reduction is not tested; set it to false",
    ),
    (
        "zero_optimization.mics_shard_size",
        lambda c: (_get(c, "zero_config.mics_shard_size", -1) or -1) > 0,
        "MiCS is not supported yet; remove the key",
    ),
    (
        "checkpoint.load_universal",
        lambda c: bool(_get(c, "load_universal_checkpoint")) and _get(c, "zero_optimization_stage", 0) == 0,
        "DeepSpeed loads universal checkpoints at stages 1 to 3 only; set zero_optimization.stage to 1",
    ),
    (
        "fp16.enabled",
        lambda c: bool(_get(c, "float16_config.enabled")) and _get(c, "zero_optimization_stage", 0) == 0,
        "at stage 0 DeepSpeed divides gradients by a loss scale by which it never multiplied the loss; "
        "set zero_optimization.stage to 1, or use bf16",
    ),
    (
        "fp16.fp16_master_weights_and_grads",
        _is_set("float16_config.fp16_master_weights_and_grads"),
        "master weights and optimizer states are fp32; set it to false",
    ),
    (
        "bf16.bf16_master_weights_and_grads",
        _is_set("bfloat16_config.bf16_master_weights_and_grads"),
        "master weights and optimizer states are fp32; set it to false",
    ),
    ("torch_autocast.dtype", _fp16_autocast, "fp16 autocast skips steps rank by rank; use bfloat16"),
    ("compile.deepcompile", _is_set("compile_config.deepcompile"), "DeepCompile is not supported; set it to false"),
    ("hybrid_engine.enabled", _is_set("hybrid_engine.enabled"), "the hybrid engine is not supported; set it to false"),
)


def renames_parameters(config: Any) -> bool:
    """Whether DeepSpeed will replace parameters of the model by others with new names and shapes."""
    return bool(_get(config, "expert_parallel_config.enabled"))


def refuse_engine(engine: Any) -> None:
    """Refuse what only the engine knows: kinds of pipelines and of model and sequence parallelism, experts beside them.

    Raises:
        UnsupportedError: as :func:`refuse_unsupported`.
    """
    problems = list(_engine_problems(engine))
    if problems:
        raise UnsupportedError("deepspeed-muon does not support this engine yet: " + "; ".join(problems))


def _engine_problems(engine: Any) -> Iterator[str]:
    sizes = [getattr(engine, name, 1) or 1 for name in ("mp_world_size", "sequence_parallel_size")]
    if engine.has_moe_layers and (engine.pipeline_parallelism or max(*sizes, engine.autotp_size()) > 1):
        yield "experts (deepspeed.moe layers, AutoEP) together with tensor, sequence or pipeline parallelism"
    if engine.moe_layers and engine.load_universal_checkpoint():
        yield "universal checkpoints of deepspeed.moe layers, which DeepSpeed's converter does not know"
    if engine.pipeline_parallelism:
        yield from _pipeline_problems(engine)
    elif engine.mpu is not None and engine.autotp_size() <= 1 and getattr(engine, "mp_world_size", 1) > 1:
        yield "a model-parallel unit (mpu) of more than one rank"
    if engine.autotp_size() > 1 and engine.load_universal_checkpoint():
        yield "universal checkpoints with tensor parallelism; resume on as many ranks without checkpoint.load_universal"
    is_spread = (getattr(engine, "sequence_parallel_size", 1) or 1) > 1
    if is_spread and not hasattr(engine.mpu, "get_sequence_data_parallel_group"):
        yield (
            "sequence parallelism by data_parallel_size in the config, where DeepSpeed leaves each rank of a sequence "
            "its own gradients; pass mpu=deepspeed.runtime.sequence_parallel.parallel_state_sp to initialize"
        )


def _pipeline_problems(engine: Any) -> Iterator[str]:
    stage = engine.zero_optimization_stage()
    if stage > 1:
        yield "a pipeline at ZeRO stage 2 or 3, which DeepSpeed refuses; set zero_optimization.stage to 1"
    if stage == 0 and not engine.bfloat16_enabled():
        yield (
            "a pipeline without ZeRO, where DeepSpeed clips by the norm of the first stage alone; set "
            "zero_optimization.stage to 1"
        )
    if hasattr(engine.module, "phase_bounds"):
        yield "DualPipeV, whose ranks hold two stages each; use PipelineModule"
    if engine.mpu.get_slice_parallel_world_size() > 1:
        yield 'a topology with a "model" axis, whose matrices are cut; use pipe and data axes only'
    if engine.load_universal_checkpoint():
        yield "universal checkpoints of pipelines; resume with the same stages, without checkpoint.load_universal"
