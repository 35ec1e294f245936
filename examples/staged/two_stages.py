# SPDX-License-Identifier: Apache-2.0
"""Train the projector between a vision tower and a language model, then the projector and the language model.

Run it as: deepspeed --num_gpus 2 two_stages.py
"""

import json

import torch
from torch import Tensor, nn
from toy import PIXELS, WIDTH, Language, arguments, captioned, train

import deepspeed

SCHEDULE = {"type": "WarmupCosineLR", "params": {"total_num_steps": 25, "warmup_num_steps": 5}}
#: Stage -> how the names of trained parameters begin, the learning rate, and what is added to the config.
STAGES = {
    "align": (("projector",), 1e-1, {}),
    "tune": (("projector", "language"), 2e-3, {"checkpoint": {"muon_changed_model": "match"}}),
}


class VisionLanguage(nn.Module):
    """A vision tower, a projector and a language model; parameters train if their names begin as in ``trained``."""

    def __init__(self, trained: tuple[str, ...]) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(PIXELS, WIDTH), nn.GELU())
        self.projector = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.language = Language()
        for name, param in self.named_parameters():
            param.requires_grad = name.startswith(trained)

    def forward(self, image: Tensor, caption: Tensor) -> Tensor:
        """Return the loss of captions [batch, length] for images [batch, pixels]."""
        features = self.tower(image.to(self.tower[0].weight.dtype))
        return self.language(caption, self.projector(features)[:, None])


def main() -> None:
    """Run the stages one after the other."""
    args = arguments(STAGES)
    for name in args.stages:
        trained, lr, changes = STAGES[name]
        torch.manual_seed(0)
        model = VisionLanguage(trained)
        params = [param for param in model.parameters() if param.requires_grad]
        config = json.loads(args.deepspeed_config.read_text()) | {"scheduler": SCHEDULE} | changes
        config["optimizer"]["params"]["lr"] = lr
        engine, *_ = deepspeed.initialize(model=model, model_parameters=params, config=config)
        if name == "tune":
            engine.load_checkpoint(args.out / "align", load_lr_scheduler_states=False)
        train(engine, name, 25, captioned)
        engine.save_checkpoint(args.out / name)
        engine.destroy()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
