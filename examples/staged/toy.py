# SPDX-License-Identifier: Apache-2.0
"""What the scripts in this folder share: their arguments, a model, data and the loop over steps."""

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

TOKENS, WIDTH, BATCH = 64, 64, 16
KINDS, PIXELS = 4, 48


def arguments(stages: Iterable[str]) -> argparse.Namespace:
    """Read the command line: which stages to run, by default all, with which config, and where checkpoints go."""
    parser = argparse.ArgumentParser()
    parser.add_argument("stages", nargs="*", default=[*stages])
    parser.add_argument("--deepspeed_config", type=Path, default=Path(__file__).with_name("ds_config.json"))
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--local_rank", help="passed by DeepSpeed's launcher")
    return parser.parse_args()


class Language(nn.Module):
    """An embedding, two layers and a head, which predict the next token from the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.lm_head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, text: Tensor, image: Tensor | float = 0.0) -> Tensor:
        """Return the loss of ``text`` [batch, length]; ``image`` is added to each token's embedding."""
        hidden = self.tokens(text[:, :-1]) + image
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return F.cross_entropy(self.lm_head(hidden).flatten(0, 1).float(), text[:, 1:].flatten())


def walk(draw: torch.Generator, seed: int, length: int, noise: float = 0.0, tokens: int = TOKENS) -> Tensor:
    """Return text [batch, length] in which each token has one successor; ``noise``: share of random tokens."""
    successor = torch.randperm(tokens, generator=torch.Generator().manual_seed(seed))
    text = torch.randint(tokens, (BATCH, length), generator=draw)
    for i in range(1, length):
        is_noise = torch.rand(BATCH, generator=draw) < noise
        text[:, i] = torch.where(is_noise, text[:, i], successor[text[:, i - 1]])
    return text


def captioned(draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return images [batch, pixels] of four kinds, and captions [batch, length] in the words of their kind."""
    kind = torch.randint(KINDS, (BATCH,), generator=draw)
    image = torch.eye(KINDS).repeat(1, PIXELS // KINDS)[kind] + 0.1 * torch.randn(BATCH, PIXELS, generator=draw)
    return image, KINDS * walk(draw, seed=1, length=16, tokens=TOKENS // KINDS) + kind[:, None]


def train(engine: Any, stage: str, steps: int, batch: Callable[[torch.Generator], tuple[Tensor, ...]]) -> None:
    """Take ``steps`` steps on what ``batch`` returns, other data on each rank; rank 0 prints every tenth."""
    draw = torch.Generator().manual_seed(engine.global_rank)
    for _ in range(steps):
        loss = engine(*(part.to(engine.device) for part in batch(draw)))
        engine.backward(loss)
        rate = engine.get_lr()[0]
        engine.step()
        if engine.global_rank == 0 and engine.global_steps % 10 == 0:
            print(f"{stage}: step {engine.global_steps}, learning rate {rate:.4f}, loss {loss.item():.3f}")
