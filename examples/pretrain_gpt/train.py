# SPDX-License-Identifier: Apache-2.0
"""Train a small GPT with DeepSpeed; the optimizer is whatever the DeepSpeed config names.

Run it as: deepspeed --num_gpus 2 train.py --deepspeed_config ds_config_muon.json
"""

import argparse
import json
import math
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed.utils import set_log_level_from_string
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

import deepspeed
from data import Corpus, held_out_offsets, load_corpus, train_offsets, windows
from deepspeed import DeepSpeedEngine
from deepspeed import comm as dist
from losslog import LossLog, Row
from model import GPT, GPTConfig


def parse_args() -> argparse.Namespace:
    """Return the command line's arguments, those of the DeepSpeed launcher included."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--local_rank", type=int, default=0, help="set by the launcher")
    parser.add_argument("--stage", type=int, choices=range(4), help="ZeRO stage (default: the config's)")
    parser.add_argument("--lr", type=float, help="peak learning rate (default: the config's)")
    parser.add_argument(
        "--precision", choices=("bf16", "fp32"), help="of weights and activations (default: the config's)"
    )
    parser.add_argument("--steps", type=int, default=240, help="length of the learning-rate schedule")
    parser.add_argument("--stop-at", type=int, help="end after this step, to be resumed later")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the order of the data")
    parser.add_argument("--eval-every", type=int, default=10, help="steps between two held-out losses")
    parser.add_argument("--eval-batches", type=int, default=4, help="global batches of a held-out loss")
    parser.add_argument("--save-every", type=int, default=0, help="steps between two checkpoints (0: none)")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in --out")
    parser.add_argument("--out", type=Path, default="results/run", help="folder of loss.csv and checkpoints")
    for size in fields(GPTConfig):
        if size.name != "vocab":
            parser.add_argument(f"--{size.name}", type=int, default=size.default, help="of the model")
    parser.add_argument("--data", nargs="*", default=[], help="files or folders (default: Python's library)")
    return deepspeed.add_config_arguments(parser).parse_args()


def load_config(
    path: str, stage: int | None = None, lr: float | None = None, precision: str | None = None
) -> dict[str, Any]:
    """Read a DeepSpeed config and apply the overrides of the command line."""
    config = json.loads(Path(path).read_text())
    if precision is not None:
        config["bf16"] = {"enabled": precision == "bf16"}
    if stage is not None:
        config["zero_optimization"]["stage"] = stage
    if lr is not None:
        config["optimizer"]["params"]["lr"] = lr
    return config


def lr_scale(step: int, steps: int) -> float:
    """Linear warm-up over the first tenth of the steps, then linear decay to a tenth of the peak."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    return 1 - 0.9 * min(1.0, (step - warmup) / max(1, steps - 1 - warmup))


def share_of_rank(engine: DeepSpeedEngine, text: np.ndarray, offsets: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return this rank's (inputs, targets) of the global batch at `offsets`."""
    start = dist.get_rank() * engine.train_micro_batch_size_per_gpu()
    mine = offsets[start : start + engine.train_micro_batch_size_per_gpu()]
    inputs, targets = windows(text, mine, engine.module.config.context)
    return inputs.to(engine.device), targets.to(engine.device)


def mean_over_ranks(loss: Tensor) -> float:
    """Average a loss over the ranks."""
    total = loss.detach().float().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def evaluate(engine: DeepSpeedEngine, corpus: Corpus, batches: int) -> float:
    """Return the loss on a fixed sample of the held-out text."""
    batch = engine.train_batch_size()
    offsets = held_out_offsets(corpus, batches * batch, engine.module.config.context)
    engine.eval()
    with torch.no_grad():
        parts = [share_of_rank(engine, corpus.held_out, part) for part in offsets.reshape(-1, batch)]
        losses = torch.stack([engine(inputs, targets) for inputs, targets in parts])
    engine.train()
    return mean_over_ranks(losses.mean())


def train_step(engine: DeepSpeedEngine, corpus: Corpus, seed: int, step: int) -> float:
    """Do one optimizer step and return the training loss before it."""
    offsets = train_offsets(corpus, seed, step, engine.train_batch_size(), engine.module.config.context)
    loss = engine(*share_of_rank(engine, corpus.train, offsets))
    engine.backward(loss)
    engine.step()
    return mean_over_ranks(loss)


def largest_logits(engine: DeepSpeedEngine) -> dict[str, float]:
    """Return the largest attention logit of each layer in the last step, if the optimizer has QK-clip."""
    clip = getattr(engine.basic_optimizer, "qk_clip", None)
    return {f"max_logit/{layer}": logit for layer, logit in clip.largest.items()} if clip else {}


def train(engine: DeepSpeedEngine, corpus: Corpus, args: argparse.Namespace) -> None:
    """Run the steps that are left, logging the losses and saving checkpoints on the way."""
    state = {"step": 0, "seconds": 0.0}
    if args.resume:
        state.update(engine.load_checkpoint(args.out)[1] or {})
    is_main = dist.get_rank() == 0
    log = LossLog(args.out / "loss.csv", state["step"]) if is_main else None
    last = min(args.steps, args.stop_at or args.steps)
    ahead = range(state["step"] + 1, last + 1)
    bar = tqdm(ahead, initial=state["step"], total=args.steps, disable=not is_main)
    for step in bar:
        lr, began = engine.get_lr()[0], time.perf_counter()
        loss = train_step(engine, corpus, args.seed, step)
        state = {"step": step, "seconds": state["seconds"] + time.perf_counter() - began}
        row = Row(train=loss, lr=lr, **state)
        if step % args.eval_every == 0 or step == args.steps:
            row.held_out = evaluate(engine, corpus, args.eval_batches)
            bar.set_postfix(train=f"{loss:.3f}", held_out=f"{row.held_out:.3f}")
        if is_main:
            log.write(row)
            values = {"train_loss": loss} | largest_logits(engine)
            samples = engine.global_samples
            engine.monitor.write_events([(f"Train/Samples/{name}", value, samples) for name, value in values.items()])
        if args.save_every and step % args.save_every == 0:
            engine.save_checkpoint(args.out, client_state=state)
        if not math.isfinite(loss):
            bar.set_description(f"stopped, training loss {loss}")
            break


def main() -> None:
    """Train on the ranks that the launcher started."""
    args = parse_args()
    set_log_level_from_string("warning")
    torch.manual_seed(args.seed)
    model = GPT(GPTConfig(args.layers, args.width, args.heads, args.context))
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config=load_config(args.deepspeed_config, args.stage, args.lr, args.precision),
        lr_scheduler=lambda optimizer: LambdaLR(optimizer, lambda step: lr_scale(step, args.steps)),
    )
    train(engine, load_corpus(args.data), args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
