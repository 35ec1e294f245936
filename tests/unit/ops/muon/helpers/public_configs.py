# SPDX-License-Identifier: Apache-2.0
"""ds_configs as public projects have them, all with AdamW or without an optimizer: combinations of their sections.

`configs()` lists them by name, always the same. Each is the text of a file. `runnable` gives a config to a small model
on a few ranks, as a project's own script or Hugging Face's Trainer does: it fills in "auto", batch sizes and folders.
"""

import copy
import json
from typing import Any

from helpers.models import GLOBAL_BATCH

COUNT = 200
AUTO = "auto"

#: Kind of project -> section `optimizer`.
OPTIMIZERS: dict[str, dict[str, Any] | None] = {
    "trainer": {"type": "AdamW", "params": {"lr": AUTO, "betas": AUTO, "eps": AUTO, "weight_decay": AUTO}},
    "none": None,
    "megatron": {"type": "Adam", "params": {"lr": 6e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    "bert": {"type": "Adam", "params": {"lr": 4e-4, "bias_correction": True, "max_grad_norm": 1.0}},
    "rlhf": {"type": "AdamW", "params": {"lr": 9.65e-6, "betas": [0.9, 0.95], "weight_decay": 0.0}},
    "cifar": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
    "speech": {"type": "AdamW", "params": {"lr": "2e-4", "betas": [0.9, 0.98], "eps": "1e-9"}},
    "empty": {"type": "AdamW", "params": {}},
    "torch": {"type": "AdamW", "params": {"lr": 5e-5, "torch_adam": True, "adam_w_mode": True}},
    "l2": {"type": "Adam", "params": {"lr": 1e-3, "adam_w_mode": False, "weight_decay": 1e-4}},
    "fused": {"type": "AdamW", "params": {"lr": 2e-5, "fused": True, "amsgrad": False, "weight_decay": 0.05}},
}
WARMUP = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), AUTO)
STAIRS = {"cycle_first_step_size": 1000, "cycle_first_stair_count": 500, "decay_lr_rate": 0.001}
CYCLE = {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_min_mom": 0.85, "cycle_max_mom": 0.99}
#: Kind of scheduler -> (`type`, `params`) of the section `scheduler`.
SCHEDULERS: dict[str, tuple[str, dict[str, Any]] | None] = {
    "none": None,
    "trainer": ("WarmupLR", WARMUP),
    "trainer decay": ("WarmupDecayLR", WARMUP | {"last_batch_iteration": -1, "total_num_steps": AUTO}),
    "warm-up": ("WarmupLR", {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000}),
    "linear": ("WarmupLR", {"warmup_max_lr": 1e-4, "warmup_num_steps": 5, "warmup_type": "linear"}),
    "defaults": ("WarmupLR", {}),
    "decay": ("WarmupDecayLR", {"total_num_steps": 100, "warmup_min_lr": 1e-6, "warmup_max_lr": 3e-4}),
    "cosine": ("WarmupCosineLR", {"total_num_steps": 100, "warmup_num_steps": 4}),
    "one cycle": ("OneCycle", STAIRS | CYCLE),
    "one cycle, no momentum": ("OneCycle", {"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-3, "cycle_momentum": False}),
    "range test": ("LRRangeTest", {"lr_range_test_min_lr": 1e-5, "lr_range_test_step_size": 2}),
}
BUCKETS = {"allgather_bucket_size": 2e8, "reduce_bucket_size": 2e8, "overlap_comm": True, "contiguous_gradients": True}
AUTO_BUCKETS = dict.fromkeys(
    ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"), AUTO
)
LIVE = {"sub_group_size": 1e9, "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9}
CPU, NONE = {"device": "cpu", "pin_memory": True}, {"device": "none", "nvme_path": None}
#: The section `zero_optimization`.
ZERO: dict[str, dict[str, Any] | None] = {
    "none": None,
    "1": {"stage": 1, "reduce_bucket_size": 5e8},
    "1 plain": {"stage": 1, "contiguous_gradients": False, "overlap_comm": False, "reduce_scatter": False},
    "2 trainer": {"stage": 2, "allgather_partitions": True, "reduce_scatter": True, **BUCKETS},
    "2 offload": {"stage": 2, "offload_optimizer": CPU, "round_robin_gradients": True, **BUCKETS},
    "2 old offload": {"stage": 2, "cpu_offload": True, "contiguous_gradients": True},
    "2 ignore": {"stage": 2, "ignore_unused_parameters": True, "load_from_fp32_weights": True},
    "2 multi": {"stage": 2, "use_multi_rank_bucket_allreduce": False, "overlap_comm": True},
    "3 trainer": {"stage": 3, **AUTO_BUCKETS, **LIVE, "stage3_gather_16bit_weights_on_model_save": True},
    "3 offload": {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU, **AUTO_BUCKETS},
    "3 none": {"stage": 3, "offload_optimizer": NONE, "offload_param": NONE, "overlap_comm": True},
    "3 rlhf": {"stage": 3, "stage3_param_persistence_threshold": 1e4, "memory_efficient_linear": False},
    "3 small groups": {"stage": 3, "sub_group_size": 200, "stage3_prefetch_bucket_size": 0},
    "3 old": {"stage": 3, "stage3_gather_fp16_weights_on_model_save": True, "cpu_offload_param": False},
    "1 elastic": {"stage": 1, "elastic_checkpoint": True, "reduce_bucket_size": 5e8},
}
SCALE = {"loss_scale": 0, "loss_scale_window": 100, "hysteresis": 2, "min_loss_scale": 1, "initial_scale_power": 8}
#: Precision.
PRECISIONS: dict[str, dict[str, Any]] = {
    "auto": {"fp16": {"enabled": AUTO, **SCALE, "initial_scale_power": 16}, "bf16": {"enabled": AUTO}},
    "bf16": {"bf16": {"enabled": True}},
    "fp32": {},
    "fp16": {"fp16": {"enabled": True, **SCALE}},
    "fp16 static": {"fp16": {"enabled": True, "loss_scale": 128.0}},
    "fp16 auto_cast": {"fp16": {"enabled": True, "auto_cast": True, "initial_scale_power": 10}},
    "bfloat16": {"bfloat16": {"enabled": True}},
    "bf16 fp32 gradients": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "communication": {"bf16": {"enabled": True}, "communication_data_type": "fp32"},
}
OFF = {"enabled": False}
#: Everything else that DeepSpeed reads.
EXTRAS: dict[str, dict[str, Any]] = {
    "printing": {"steps_per_print": 2000, "wall_clock_breakdown": False, "gradient_clipping": 1.0},
    "auto clipping": {"gradient_clipping": AUTO, "steps_per_print": 1e5},
    "clock": {"wall_clock_breakdown": True, "steps_per_print": 1, "gradient_clipping": 0.1},
    "scaling": {"prescale_gradients": False, "gradient_predivide_factor": 1.0, "gradient_allreduce_op": "mean"},
    "prescaled": {"prescale_gradients": True, "gradient_predivide_factor": 2.0},
    "flops": {"flops_profiler": {"enabled": True, "profile_step": 1, "output_file": "FOLDER/flops.txt"}},
    "checkpointing": {"activation_checkpointing": {"partition_activations": True, "number_checkpoints": None}},
    "aio": {"aio": {"block_size": 262144, "queue_depth": 32, "thread_count": 1, "overlap_events": True}},
    "csv": {"csv_monitor": {"enabled": True, "output_path": "FOLDER/csv", "job_name": "run"}},
    "tensorboard": {"tensorboard": {"enabled": True, "output_path": "FOLDER/tb", "job_name": "run"}},
    "monitors off": {"wandb": OFF | {"group": "g"}, "comet": OFF | {"project": "p"}, "log_level": "warning"},
    "comms logger": {"comms_logger": {"enabled": True, "verbose": False, "prof_all": True, "prof_ops": []}},
    "data efficiency": {"data_efficiency": {"enabled": True, "seed": 1, "data_routing": OFF}},
    "checkpoint": {"checkpoint": {"tag_validation": "Warn", "parallel_write": {"pipeline_stage": False}}},
    "node storage": {"checkpoint": {"use_node_local_storage": False, "tag_validation": "Fail"}},
    "untested": {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False},
    "dump": {"dump_state": True, "memory_breakdown": False, "disable_python_gc": False},
    "off": {"hybrid_engine": OFF | {"max_out_tokens": 512}, "autotuning": OFF | {"fast": True}, "expert_parallel": OFF},
    "timers": {"timers": {"throughput": {"enabled": True, "synchronized": True}}, "dataloader_drop_last": True},
    "pipeline": {"pipeline": {"stages": AUTO, "partition": "best", "activation_checkpoint_interval": 0}},
    "gather": {"disable_allgather": True, "seq_parallel_communication_data_type": "fp32"},
    "comment": {"_comment": "from a public repository", "vocabulary_size": None, "compile": {"deepcompile": False}},
    "topology": {"sequence_parallel_size": 1, "tensor_parallel": {"autotp_size": 1}},
    "managed": {"managed_gradient_accumulation": True, "weight_quantization": OFF},
    "experts": {"use_data_before_expert_parallelism": False},
}
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
#: Batch sizes.
BATCHES: dict[str, dict[str, Any]] = {
    "trainer": dict.fromkeys(BATCH, AUTO),
    "whole": {"train_batch_size": 4096},
    "micro": {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2},
    "strings": {"train_micro_batch_size_per_gpu": 4},
    "both": {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 32},
}
#: How a file is written.
STYLES = ("json", "json", "comments", "hjson", "yaml", "json")
#: What Hugging Face's Trainer fills in, by the last part of the key.
FILLED: dict[str, Any] = {
    "lr": 1e-3,
    "betas": [0.9, 0.999],
    "eps": 1e-8,
    "weight_decay": 0.01,
    "gradient_clipping": 1.0,
}
FILLED |= {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 2, "total_num_steps": 20}
FILLED |= {"reduce_bucket_size": 4096, "stage3_prefetch_bucket_size": 3686, "stage3_param_persistence_threshold": 640}


def configs() -> dict[str, dict[str, Any]]:
    """Return name -> config: `text` of the file, its `suffix`, and the `config` itself.

    Each table advances by as many entries from one config to the next as stands beside it.
    """
    tables = ((OPTIMIZERS, 1), (SCHEDULERS, 1), (ZERO, 3), (PRECISIONS, 1), (EXTRAS, 5), (BATCHES, 1))
    found: dict[str, dict[str, Any]] = {}
    for index in range(COUNT):
        names = [list(table)[(index * step + index // len(table)) % len(table)] for table, step in tables]
        optimizer, scheduler, zero, precision, extra, batch = names
        schedule = SCHEDULERS[scheduler]
        sections = {
            "zero_optimization": ZERO[zero],
            "optimizer": OPTIMIZERS[optimizer],
            "scheduler": schedule and {"type": schedule[0], "params": schedule[1]},
        }
        named = {key: section for key, section in sections.items() if section is not None}
        config = copy.deepcopy(BATCHES[batch] | PRECISIONS[precision] | named | EXTRAS[extra])
        style = STYLES[index % len(STYLES)]
        suffix = "yaml" if style == "yaml" else "json"
        name = f"{index}: {'; '.join((*names, style))}"
        found[name] = {"text": _written(config, style), "suffix": suffix, "config": config}
    return found


def _written(config: dict[str, Any], style: str) -> str:
    text = json.dumps(config, indent=4)
    if style == "comments":
        return "// from a public repository\n" + text.replace("{\n", "{ # a comment\n", 2)
    if style == "hjson":
        import hjson

        return hjson.dumps(config)
    if style == "yaml":
        import yaml

        return yaml.safe_dump(config, sort_keys=False)
    return text


def runnable(config: dict[str, Any], world: int, folder: str, is_bf16: bool) -> dict[str, Any]:
    """Return the config with the values that a script, a Trainer and a launcher fill in for `world` ranks."""
    accumulation = config.get("gradient_accumulation_steps", 1)
    accumulation = 1 if accumulation == AUTO else int(accumulation)
    filled = _filled(config, folder, is_bf16)
    filled.pop("train_batch_size", None)
    filled["train_micro_batch_size_per_gpu"] = GLOBAL_BATCH // (world * accumulation)
    return filled | {"gradient_accumulation_steps": accumulation}


def _filled(section: Any, folder: str, is_bf16: bool, name: str = "", above: str = "") -> Any:
    """Return a section with "auto" and "FOLDER" replaced."""
    if isinstance(section, dict):
        return {key: _filled(value, folder, is_bf16, key, name) for key, value in section.items()}
    if section == AUTO:
        return is_bf16 and above == "bf16" if name == "enabled" else FILLED.get(name, AUTO)
    return section.replace("FOLDER", folder) if isinstance(section, str) else copy.deepcopy(section)
