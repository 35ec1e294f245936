# SPDX-License-Identifier: Apache-2.0
"""A model and a training that version 0.1.0 knows, and the command that made checkpoint/saved_by_0_1_0 with it.

With 0.1.0 installed, in this folder: torchrun --nproc_per_node 2 first_release.py FOLDER
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STAGES, BEFORE, AFTER = (0, 1, 2, 3), 3, 2


class Model(nn.Module):
    """A model with parameters for Muon and for AdamW."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.up, self.down = nn.Linear(8, 13), nn.Linear(13, 8, bias=False)
        self.norm, self.lm_head = nn.LayerNorm(8), nn.Linear(8, 11, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Cross-entropy of [batch, time] against itself, shifted by one."""
        x = self.tokens(tokens)
        x = self.norm(x + self.down(torch.tanh(self.up(x))))
        return F.cross_entropy(self.lm_head(x[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def engine_of(stage: int) -> Any:
    """Return an engine for two ranks, with a schedule and clipping."""
    import deepspeed

    torch.manual_seed(0)
    model = Model()
    params = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, "ns_dtype": "fp32", "ns_method": "standard"}
    warmup = {"warmup_min_lr": 0, "warmup_max_lr": 0.02, "warmup_num_steps": 10, "warmup_type": "linear"}
    config = {
        "train_batch_size": 8,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "Muon", "params": params},
        "scheduler": {"type": "WarmupLR", "params": warmup},
        "zero_optimization": {"stage": stage},
        "steps_per_print": 10**9,
    }
    return deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())[0]


def train(engine: Any, first: int, steps: int) -> list[float]:
    """Train `steps` steps from step `first` on; return this rank's losses."""
    losses = []
    for step in range(first, first + steps):
        tokens = torch.randint(11, (8, 6), generator=torch.Generator().manual_seed(step))
        loss = engine(tokens[4 * engine.global_rank :][:4])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def weights(engine: Any) -> dict[str, Tensor]:
    """Return name -> whole weight, on every rank."""
    import deepspeed

    found = {}
    for name, param in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([param], enabled=hasattr(param, "ds_id")):
            found[name] = param.detach().clone()
    return found


def save(folder: Path) -> None:
    """Save checkpoints of all stages after BEFORE steps, with the weights then and AFTER steps later."""
    import deepspeed.comm as dist

    for stage in STAGES:
        engine = engine_of(stage)
        train(engine, 0, BEFORE)
        engine.save_checkpoint(str(folder / f"stage{stage}"), tag="saved")
        expected = {"saved": weights(engine)}
        expected["losses"] = train(engine, BEFORE, AFTER)
        expected["later"] = weights(engine)
        if dist.get_rank() == 0:
            torch.save(expected, folder / f"stage{stage}" / "expected.pt")
            for script in (folder / f"stage{stage}").glob("zero_to_*.py"):  # DeepSpeed's copies of its own sources
                script.unlink()
        engine.destroy()


if __name__ == "__main__":
    save(Path(sys.argv[1]).resolve())
