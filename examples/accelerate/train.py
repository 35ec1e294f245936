# SPDX-License-Identifier: Apache-2.0
"""Train a small Llama on bytes with accelerate; the optimizer is whatever the DeepSpeed config names.

Run it as: accelerate launch --use_deepspeed --num_processes 2 train.py --deepspeed_config ds_config_muon.json
"""

import argparse
import json
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration, DeepSpeedPlugin, PartialState, skip_first_batches
from accelerate.utils import DummyOptim, DummyScheduler, set_seed
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig

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


def parse_args() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--deepspeed_config", required=True, help="path of the DeepSpeed config")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--steps", type=int, default=90, help="number of optimizer steps")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the order of the data")
    parser.add_argument("--save_every", type=int, help="steps between two checkpoints")
    parser.add_argument("--resume", type=Path, help="checkpoint to continue from, out/step_N")
    parser.add_argument("--out", type=Path, default="out", help="folder of history.json and the checkpoints")
    return parser.parse_args()


def byte_windows(length: int) -> list[dict[str, Tensor]]:
    """Cut the source of Python's argparse into windows of bytes; the model shifts the labels itself."""
    text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8)
    return [{"input_ids": window, "labels": window} for window in text.long().split(length)[:-1]]


def train(accelerator: Accelerator, args: argparse.Namespace) -> list[dict[str, float]]:
    """Do the steps that are left of the epoch and return step, loss, gradient norm and learning rate of each."""
    model = AutoModelForCausalLM.from_config(CONFIG)
    # The optimizer is the config's: under offload accelerate would swap one made here for DeepSpeedCPUAdam.
    optimizer = DummyOptim(model.parameters(), lr=args.lr, weight_decay=0.1)
    scheduler = DummyScheduler(optimizer, warmup_num_steps=5)
    loader = DataLoader(byte_windows(CONFIG.max_position_embeddings), batch_size=8, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    done, history = 0, []
    if args.resume:
        accelerator.load_state(args.resume)
        done = int(args.resume.name.removeprefix("step_"))
    model.train()
    for step, batch in enumerate(skip_first_batches(loader, done), done + 1):
        lr = optimizer.param_groups[0]["lr"]
        loss = model(**batch).loss
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        mean = accelerator.gather(loss.detach()).mean().item()
        history.append({"step": step, "loss": mean, "grad_norm": norm, "lr": lr})
        accelerator.print(history[-1])
        if args.save_every and step % args.save_every == 0:
            accelerator.save_state(args.out / f"step_{step}")
        if step == args.steps:
            break
    return history


def main() -> None:
    """Train on the ranks that the launcher started."""
    args = parse_args()
    if not torch.cuda.is_available():
        PartialState(cpu=True)  # for CPU-only machines: Accelerator(cpu=True) would leave DeepSpeed out
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=args.deepspeed_config),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=args.seed),
    )
    set_seed(args.seed)
    history = train(accelerator, args)
    if accelerator.is_main_process:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "history.json").write_text(json.dumps(history))
    accelerator.end_training()


if __name__ == "__main__":
    main()
