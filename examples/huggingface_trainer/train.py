# SPDX-License-Identifier: Apache-2.0
"""Train a small Llama on bytes with transformers.Trainer; the optimizer is whatever the DeepSpeed config names.

Run it as: deepspeed --num_gpus 2 train.py --deepspeed ds_config_muon.json --bf16
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, HfArgumentParser, LlamaConfig, Trainer, TrainingArguments, set_seed

CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    use_cache=False,
)


#: How this version of transformers calls it.
CHECKPOINTING = next(
    name for name in ("activation_checkpointing", "gradient_checkpointing") if hasattr(TrainingArguments, name)
)


def byte_windows(length: int) -> list[dict[str, Tensor]]:
    """Cut the source of Python's argparse into windows of bytes; the model shifts the labels itself."""
    text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8)
    return [{"input_ids": window, "labels": window} for window in text.long().split(length)[:-1]]


def main() -> None:
    """Train on the ranks that the launcher started."""
    parser = HfArgumentParser(TrainingArguments)
    parser.set_defaults(
        output_dir="out", max_steps=100, learning_rate=3e-3, weight_decay=0.1, warmup_steps=5, logging_steps=1
    )
    parser.set_defaults(per_device_train_batch_size=8, **{CHECKPOINTING: True})
    (args,) = parser.parse_args_into_dataclasses()
    set_seed(args.seed)
    model = AutoModelForCausalLM.from_config(CONFIG)
    trainer = Trainer(model=model, args=args, train_dataset=byte_windows(CONFIG.max_position_embeddings))
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_state()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
