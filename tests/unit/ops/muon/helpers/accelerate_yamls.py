# SPDX-License-Identifier: Apache-2.0
"""Configurations of accelerate and of training tools in the shapes that public repositories have."""

#: What the questionnaire of ``accelerate config`` writes beside the section for DeepSpeed, at the end of the file.
REST = """
distributed_type: DEEPSPEED
downcast_bf16: 'no'
machine_rank: 0
main_training_function: main
num_machines: 1
num_processes: 4
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
#: A ds_config that :data:`SHAPES` names as ``ds.json``.
DS_CONFIG = """{
  "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
  "bf16": {"enabled": "auto"},
  "zero_optimization": {"stage": 2, "overlap_comm": true},
  "gradient_clipping": 0.5, "train_micro_batch_size_per_gpu": "auto"
}
"""
#: Where the shape was seen -> text.
SHAPES = {
    "fine-tuning with TRL: no accumulation, a launcher": """
compute_environment: LOCAL_MACHINE
debug: false
deepspeed_config:
  deepspeed_multinode_launcher: standard
  offload_optimizer_device: none
  offload_param_device: none
  zero3_init_flag: true
  zero3_save_16bit_model: true
  zero_stage: 3
mixed_precision: bf16"""
    + REST,
    "adapters with offload: fields of older versions": """
compute_environment: LOCAL_MACHINE
deepspeed_config:
  gradient_accumulation_steps: 1
  gradient_clipping: 1.0
  offload_optimizer_device: cpu
  offload_param_device: cpu
  zero3_init_flag: true
  zero3_save_16bit_model: true
  zero_stage: 3
dynamo_backend: 'NO'
fsdp_config: {}
megatron_lm_config: {}
mixed_precision: 'no'"""
    + REST,
    "the first versions: fp16 as a flag, no mixed_precision": """
compute_environment: LOCAL_MACHINE
deepspeed_config: {gradient_accumulation_steps: 2, offload_optimizer_device: none, zero_stage: 2}
distributed_type: DEEPSPEED
fp16: true
fsdp_config: {}
machine_rank: 0
main_process_ip: null
main_process_port: null
main_training_function: main
num_machines: 1
num_processes: 2""",
    "diffusion: numbers in quotes, nothing about offload": """
deepspeed_config:
  gradient_accumulation_steps: '8'
  gradient_clipping: '0.5'
  zero3_init_flag: false
  zero_stage: '1'
mixed_precision: fp16"""
    + REST,
    "auto, and values that are null": """
deepspeed_config:
  gradient_accumulation_steps: auto
  gradient_clipping: auto
  offload_optimizer_device: null
  offload_param_device: null
  zero3_init_flag: null
  zero_stage: null
mixed_precision: bf16"""
    + REST,
    "an empty section": "deepspeed_config: {}\nmixed_precision: bf16" + REST,
    "devices in capitals, a folder that nothing uses": """
deepspeed_config:
  offload_optimizer_device: CPU
  offload_optimizer_nvme_path: /nvme
  offload_param_device: NONE
  zero3_init_flag: False
  zero3_save_16bit_model: 'false'
  zero_stage: 3
mixed_precision: BF16"""
    + REST,
    "clipping off": "deepspeed_config: {gradient_clipping: 0.0, zero_stage: 2}\nmixed_precision: bf16" + REST,
    "several nodes, with filters": """
deepspeed_config:
  deepspeed_hostfile: hosts.txt
  deepspeed_inclusion_filter: node-1:0,1@node-2:0,1
  deepspeed_multinode_launcher: pdsh
  gradient_accumulation_steps: 4
  zero3_init_flag: false
  zero_stage: 2
main_process_ip: 10.0.0.1
main_process_port: 20055
mixed_precision: bf16"""
    + REST.replace("num_machines: 1", "num_machines: 2"),
    "8-bit floats": """
deepspeed_config: {gradient_clipping: 1.0, zero_stage: 2}
fp8_config: {backend: TE, fp8_format: HYBRID}
mixed_precision: fp8"""
    + REST,
    "a short one, of a tutorial": "distributed_type: DEEPSPEED\nnum_processes: 4\ndeepspeed_config: {zero_stage: 3}\n",
    "a ds_config file": "deepspeed_config: {deepspeed_config_file: ds.json, zero3_init_flag: true}" + REST,
    "a ds_config file, a launcher, and little else": """
distributed_type: DEEPSPEED
deepspeed_config:
  deepspeed_config_file: ds.json
  deepspeed_multinode_launcher: standard
num_machines: 2
num_processes: 16 # eight on each
machine_rank: 1
main_process_ip: 10.0.0.1
main_process_port: 20055
""",
    "a ds_config file, and the precision": "deepspeed_config: {deepspeed_config_file: ds.json}\nmixed_precision: bf16"
    + REST,
    "a file called none": "deepspeed_config: {deepspeed_config_file: none, zero_stage: 1}" + REST,
    "a ds_config of one's own tool": """
model: tiny
mixed_precision: bf16
fsdp_config: null
deepspeed_config:
  bf16: {enabled: true}
  zero_optimization: {stage: 2}
""",
}
#: (Text, what the refusal says)
REFUSED = [
    ("distributed_type: MULTI_GPU\ndeepspeed_config: {}\n", "distributed_type MULTI_GPU; expected DEEPSPEED"),
    ("distributed_type: NO\ndeepspeed_config: {}\nmixed_precision: fp16\n", "distributed_type NO; expected DEEPSPEED"),
    (
        "compute_environment: AMAZON_SAGEMAKER\ndistributed_type: NO\nec2_instance_type: one\n",
        "compute_environment: got 'AMAZON_SAGEMAKER'",
    ),
    ("deepspeed_config: {zero_stage: two}" + REST, "deepspeed_config.zero_stage: got 'two', expected a whole number"),
    ("deepspeed_config: {gradient_clipping: off}" + REST, "gradient_clipping: got False, expected a number"),
    ("deepspeed_config: {offload_param_device: gpu}" + REST, "offload_param_device: got 'gpu', expected none, cpu"),
    ("deepspeed_config: {offload_param_device: nvme}" + REST, "offload_param_nvme_path: expected a folder"),
    ("deepspeed_config: {zero_stage: 2}\nmixed_precision: int8" + REST, "mixed_precision: got 'int8', expected bf16"),
    ("deepspeed_config: {deepspeed_config_file: no.json}" + REST, "deepspeed_config_file: there is no file no.json"),
    (
        "deepspeed_config: {deepspeed_config_file: ds.json, zero_stage: 2, gradient_clipping: 1}" + REST,
        "accelerate refuses gradient_clipping, zero_stage next to deepspeed_config_file",
    ),
    ("deepspeed: zero3\nlearning_rate: 1.0e-5\noutput_dir: out\n", "zero3 is built into the tool: write it"),
    ("deepspeed: zero3.json\nfsdp_config: null\n", "its key deepspeed names one; give zero3.json instead"),
    ("mixed_precision: bf16\nfsdp_config: {}\nmodel: tiny\n", "not a ds_config"),
]
