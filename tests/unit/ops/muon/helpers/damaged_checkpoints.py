# SPDX-License-Identifier: Apache-2.0
"""Damaged and foreign checkpoints, and the message of a load: docs/evidence/damaged-checkpoints.md."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from helpers.checkpoints import remove_manifests
from helpers.engine_state import differing, snapshot
from helpers.models import MODELS, Mlp, train_engine
from helpers.training import ds_config, make_engine
from helpers.universal import ADAMW


def shard(folder: Path, rank: int) -> Path:
    """Return the path of a rank's optimizer file."""
    return next(folder.glob(f"*zero_pp_rank_{rank}_*optim_states.pt"))


def model_file(folder: Path) -> Path:
    return min(folder.glob("*model_states.pt"))


def manifest(folder: Path, rank: int) -> Path:
    return folder / f"muon_save.{rank:05d}.json"


def truncate(file: Path, keep: float = 0.6) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * keep)])


def flip(file: Path) -> None:
    """Flip the bits of one byte in the middle of the largest tensor: the file keeps its size and still loads."""
    data = bytearray(file.read_bytes())
    values = max(_tensors(torch.load(file, weights_only=False)), key=torch.Tensor.numel)
    at = data.find(values.numpy().tobytes()) + values.numel() // 2 * 4
    data[at] ^= 0x10
    file.write_bytes(bytes(data))


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value.detach().contiguous()] if value.numel() > 1 and value.any() else []
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in items for tensor in _tensors(item)]


def swap(first: Path, second: Path) -> None:
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(kept)


def interrupt(folder: Path) -> None:
    """Replace the header, as a save over this tag does that is killed right after it."""
    file = folder / "muon_save.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"save_id": "0" * 32}))


def unverified(damage: Callable[[Path], Any]) -> Callable[[Path], Any]:
    return lambda folder: [remove_manifests(folder), damage(folder)]


def name_in_latest(text: str) -> Callable[[Path], Any]:
    return lambda folder: (folder.parent / "latest").write_text(text)


#: title -> function that damages the folder of tag `two`; its neighbour `one` was saved a step earlier.
DAMAGES: dict[str, Callable[[Path], Any]] = {
    "rank 1's shard is truncated": lambda f: truncate(shard(f, 1)),
    "rank 1's shard is empty": lambda f: truncate(shard(f, 1), 0),
    "one byte of rank 1's tensors is changed": lambda f: flip(shard(f, 1)),
    "rank 1's shard is missing": lambda f: shard(f, 1).unlink(),
    "rank 1's shard is a pickle of something else": lambda f: torch.save({"hello": 1}, shard(f, 1)),
    "the shards of rank 0 and 1 are swapped": lambda f: swap(shard(f, 0), shard(f, 1)),
    "rank 1's shard is from an earlier save": lambda f: shutil.copy(shard(f.parent / "one", 1), shard(f, 1)),
    "rank 1's shard and manifest are from an earlier save": lambda f: [
        shutil.copy(find(f.parent / "one", 1), find(f, 1)) for find in (shard, manifest)
    ],
    "the model's file is truncated": lambda f: truncate(model_file(f)),
    "the model's file is missing": lambda f: model_file(f).unlink(),
    "rank 1's manifest is missing: it was killed while saving": lambda f: manifest(f, 1).unlink(),
    "rank 1's manifest is truncated": lambda f: truncate(manifest(f, 1)),
    "the header is truncated": lambda f: truncate(f / "muon_save.json"),
    "a save over this tag was killed": interrupt,
    "latest names a tag that does not exist": name_in_latest("three"),
    "latest is empty": name_in_latest(""),
    "no manifest, rank 1's shard is truncated": unverified(lambda f: truncate(shard(f, 1))),
    "no manifest, rank 1's shard is missing": unverified(lambda f: shard(f, 1).unlink()),
    "no manifest, rank 1's shard is not a pickle": unverified(lambda f: shard(f, 1).write_bytes(b"garbage" * 99)),
    "no manifest, the model's file is truncated": unverified(lambda f: truncate(model_file(f))),
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


def attempt(engine: Any, folder: Path) -> str:
    try:
        engine.load_checkpoint(str(folder))
    except ValueError as error:
        return f"{type(error).__name__}: {error}".replace(str(folder), "checkpoints")
    return "loaded"


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
        text = attempt(engine, copy)
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


def table(results: list[tuple[str, str, list[str], float]]) -> str:
    """Return the cases as a Markdown table, without file sizes and torch's own messages."""
    lines = ["| the checkpoint | message |", "|---|---|"]
    for title, message, *_ in results:
        text = re.sub(r"\d+ bytes, but \d+ were", "... bytes, but ... were", message)
        text = re.sub(r"cannot be read: .*?(?=( \(found by ranks \[\d\]\))? \()", "cannot be read: ...", text)
        lines.append(f"| {title} | `{text}` |")
    return "\n".join(lines)
