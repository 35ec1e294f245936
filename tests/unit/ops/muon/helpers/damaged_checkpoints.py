# SPDX-License-Identifier: Apache-2.0
"""Damaged and foreign checkpoints, and the message of a load."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from helpers.checkpoints import error_of
from helpers.engine_state import differing, snapshot
from helpers.models import MODELS, Mlp, train_engine
from helpers.training import ds_config, make_engine
from helpers.universal import ADAMW


def shard(folder: Path, rank: int) -> Path:
    return next(folder.glob(f"*zero_pp_rank_{rank}_*optim_states.pt"))


def model_file(folder: Path) -> Path:
    return min(folder.glob("*model_states.pt"))


def truncate(file: Path, keep: float = 0.6) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * keep)])


def name_in_latest(text: str) -> Callable[[Path], Any]:
    return lambda folder: (folder.parent / "latest").write_text(text)


#: title -> function that damages the folder of tag `two`.
DAMAGES: dict[str, Callable[[Path], Any]] = {
    "rank 1's shard is truncated": lambda f: truncate(shard(f, 1)),
    "rank 1's shard is empty": lambda f: truncate(shard(f, 1), 0),
    "rank 1's shard is missing": lambda f: shard(f, 1).unlink(),
    "rank 1's shard is not a pickle": lambda f: shard(f, 1).write_bytes(b"garbage" * 99),
    "rank 1's shard is a pickle of something else": lambda f: torch.save({"hello": 1}, shard(f, 1)),
    "the model's file is truncated": lambda f: truncate(model_file(f)),
    "the model's file is missing": lambda f: model_file(f).unlink(),
    "latest names a tag that does not exist": name_in_latest("three"),
    "latest is empty": name_in_latest(""),
}


def with_adamw_for(layer: int) -> Any:
    """Return the small model, whose layer of this number AdamW updates."""
    net: Any = MODELS["mlp"]()
    net.layers[layer].weight.use_muon = False
    return net


def foreign(stage: int) -> dict[str, tuple[Callable[[], Any], dict[str, Any], bool]]:
    """Return title -> (model, config, whether parameters are passed in two groups) of the run that saved."""
    own = {"stage": stage}
    order = {"sub_group_size": 100} if stage == 3 else {"round_robin_gradients": True}
    return {
        "saved by AdamW": (MODELS["mlp"], own | {"optimizer": ADAMW}, False),
        "saved with matrices of other shapes": (lambda: Mlp((7, 15, 9, 14, 11, 5)), own, False),
        "saved with more layers": (lambda: Mlp((7, 15, 9, 13, 11, 5, 5)), own, False),
        "saved with another matrix under AdamW": (lambda: with_adamw_for(0), own, False),
        "saved with another split into parameter groups": (MODELS["mlp"], own, True),
        "saved with another sub_group_size (stage 3) or round_robin_gradients": (
            MODELS["mlp"],
            own | {"zero": order},
            False,
        ),
        "saved at another stage": (MODELS["mlp"], {"stage": 2 if stage == 3 else 3}, False),
        "saved in bf16": (MODELS["mlp"], own | {"dtype": "bf16"}, False),
    }


def save_foreign(stage: int, root: Path) -> None:
    """Save a checkpoint of each case of `foreign`, in a folder named by its index."""
    import deepspeed

    for number, (model, case, split) in enumerate(foreign(stage).values()):
        net = model()
        params = list(net.parameters())
        groups: Any = [{"params": params[:4]}, {"params": params[4:]}] if split else params
        engine = deepspeed.initialize(model=net, config=ds_config(**case), model_parameters=groups)[0]
        train_engine(engine, 1)
        engine.save_checkpoint(str(root / str(number)), tag="two")
        engine.destroy()


def attempt_all(stage: int, folder: str) -> list[tuple[str, str, list[str], float]]:
    """Load every case; return (title, message, what changed in the engine, loss of the next step) of each."""
    import torch.distributed as dist

    root, rank = Path(folder), dist.get_rank()
    engine = make_engine(MODELS["mlp"](), ds_config(stage=stage))
    for tag in ("one", "two"):
        train_engine(engine, 1)
        engine.save_checkpoint(str(root / "own"), tag=tag)
    save_foreign(stage, root)
    others = [*foreign(stage)] + ["saved on one rank"] * (root / str(len(foreign(stage)))).exists()
    results = []
    for number, title in enumerate([*others, *DAMAGES]):
        copy = root / str(number)
        if title in DAMAGES:
            copy = root / f"copy{number}"
            if rank == 0:
                shutil.copytree(root / "own", copy)
                DAMAGES[title](copy / "two")
        dist.barrier()
        before, counts = snapshot(engine), (engine.global_steps, engine.skipped_steps)
        text = error_of(engine.load_checkpoint, str(copy)).replace(str(copy), "checkpoints")
        changed = differing(before, snapshot(engine))
        changed += [] if counts == (engine.global_steps, engine.skipped_steps) else ["step counts"]
        results.append((title, text, changed, train_engine(engine, 1, first_step=2 + number)[0]))
    engine.destroy()
    return results


def save_alone(stage: int, folder: str) -> None:
    """Save a checkpoint of the same model on the single rank of this job."""
    engine = make_engine(MODELS["mlp"](), ds_config(stage=stage))
    train_engine(engine, 1)
    engine.save_checkpoint(str(Path(folder) / str(len(foreign(stage)))), tag="two")
    engine.destroy()


def train_undisturbed(stage: int, steps: int) -> list[float]:
    """Return the losses of a run that loads nothing; as in `attempt_all`, its first two steps use the same batch."""
    engine = make_engine(MODELS["mlp"](), ds_config(stage=stage))
    train_engine(engine, 1)
    losses = train_engine(engine, 1) + train_engine(engine, steps, first_step=2)
    engine.destroy()
    return losses[1:]
