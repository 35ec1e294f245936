# SPDX-License-Identifier: Apache-2.0
"""Train a small Llama on bytes with Lightning; the optimizer is whatever the DeepSpeed config names.

Run it as: python train.py --deepspeed_config ds_config_muon.json
"""

import argparse
import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

RANKS = 2
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


class ByteLlama(pl.LightningModule):
    """A small Llama whose optimizer comes from the DeepSpeed config."""

    def __init__(self) -> None:
        super().__init__()
        self.llama = LlamaForCausalLM(CONFIG)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of one batch."""
        return self.llama(**batch).loss

    def configure_optimizers(self) -> None:
        """Lightning wants this method, but ignores what it returns where the DeepSpeed config has an optimizer."""


class CPUDeepSpeedStrategy(DeepSpeedStrategy):
    """DeepSpeedStrategy for machines without a GPU: only the check that the accelerator is CUDA is left out."""

    def __init__(self, ranks: int, **kwargs: Any) -> None:
        super().__init__(parallel_devices=[torch.device("cpu", rank) for rank in range(ranks)], **kwargs)

    def setup_environment(self) -> None:
        """Do what DeepSpeedStrategy does after its check."""
        DDPStrategy.setup_environment(self)


class History(Callback):
    """Collects the loss, gradient norm and learning rate of every step."""

    def __init__(self, path: Path) -> None:
        self.path, self.rows = path, []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        """Add a row."""
        engine = trainer.strategy.deepspeed_engine
        loss = trainer.strategy.reduce(args[1]["loss"], reduce_op="mean").item()
        norm, lr = float(engine.get_global_grad_norm()), engine.get_lr()[0]
        self.rows.append({"step": trainer.global_step, "loss": loss, "grad_norm": norm, "lr": lr})

    def on_train_end(self, trainer: pl.Trainer, *args: Any) -> None:
        """Write the rows."""
        if trainer.is_global_zero:
            self.path.write_text(json.dumps(self.rows))


def parse_args() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--deepspeed_config", required=True, help="path of the DeepSpeed config")
    parser.add_argument("--epochs", type=int, default=5, help="number of epochs, each ending with a checkpoint")
    parser.add_argument("--epoch_steps", type=int, default=20, help="optimizer steps of an epoch")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the order of the data")
    parser.add_argument("--resume", help="checkpoint to continue from")
    parser.add_argument("--out", type=Path, default="out", help="folder of history.json and the checkpoints")
    return parser.parse_args()


def byte_windows(length: int) -> list[dict[str, Tensor]]:
    """Cut the source of Python's argparse into windows of bytes; the model shifts the labels itself."""
    text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8)
    return [{"input_ids": window, "labels": window} for window in text.long().split(length)[:-1]]


def main() -> None:
    """Train on the ranks that the launcher started."""
    args = parse_args()
    pl.seed_everything(args.seed)
    if torch.cuda.is_available():
        strategy = DeepSpeedStrategy(config=args.deepspeed_config)
    else:
        strategy = CPUDeepSpeedStrategy(RANKS, config=args.deepspeed_config)
    trainer = pl.Trainer(
        strategy=strategy,
        devices=RANKS,
        precision="bf16-true",
        gradient_clip_val=1.0,
        max_epochs=args.epochs,
        limit_train_batches=args.epoch_steps,
        callbacks=[
            History(args.out / "history.json"),
            ModelCheckpoint(args.out, filename="{epoch}", save_top_k=-1),
        ],
        logger=False,
    )
    loader = DataLoader(byte_windows(CONFIG.max_position_embeddings), batch_size=8, shuffle=True)
    trainer.fit(ByteLlama(), loader, ckpt_path=args.resume)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
