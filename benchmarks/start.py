# SPDX-License-Identifier: Apache-2.0
"""Time the start: from the first moment of the processes to the end of the first step, next to AdamW."""

import statistics
import tempfile
import time
from collections import defaultdict

import torch
from torch import nn

from benchmarks import ranks, report

#: Optimizer -> environment: AdamW runs as if deepspeed-muon were not installed.
OPTIMIZERS = {"Muon": {}, "AdamW": {"DS_MUON_AUTOLOAD": "0"}}
PARTS = ("import", "initialize", "first step", "second step")


def start(world: int = 2, stage: int = 1, layers: int = 8, width: int = 512, rounds: int = 3) -> str:
    """Time the start of Muon and AdamW; cold, where extensions are compiled first, and warm, where they are there.

    DeepSpeed compiles extensions too: for its collectives on a CPU, and for AdamW.

    Args:
        world: number of ranks, with one thread each
        stage: ZeRO stage
        layers: number of layers of the model, each with three matrices
        width: width of the matrices; two in each layer are four times as long
        rounds: how often each optimizer is started, in turn; the table shows medians of the slowest rank's times
    """
    setting = {"stage": stage, "layers": layers, "width": width}
    found = defaultdict[tuple[str, str], list[dict[str, float]]](list)
    for _ in range(rounds):
        for name, environment in OPTIMIZERS.items():
            with tempfile.TemporaryDirectory(prefix="start-") as folder:
                variables = {**environment, "TORCH_EXTENSIONS_DIR": folder}
                for which in ("cold", "warm"):
                    seconds = ranks.run(rank, {"name": name, **setting}, world=world, environment=variables)
                    slowest = {part: max(one[part] for one in seconds) for part in PARTS}
                    found[which, name].append(slowest)
    rows = []
    for (which, name), rounds_of_it in sorted(found.items()):
        row: dict[str, object] = {"extensions": which, "optimizer": name}
        for part in PARTS:
            row[f"{part} s"] = statistics.median(one[part] for one in rounds_of_it)
        until = [sum(one[part] for part in PARTS[:-1]) for one in rounds_of_it]
        rows.append(
            row | {"until the first step s": statistics.median(until), "fastest s": min(until), "slowest s": max(until)}
        )
    title = "From the start of the processes to the first step"
    text = f"{layers} x {{{width}x{width}, {4 * width}x{width}, {width}x{4 * width}}}, stage {stage}, {world} ranks, "
    text += f"one thread each; rounds: {rounds}, alternating, of which medians are shown"
    return report.write(report.name_of("start"), title, rows, text, report.table(rows))


def rank(name: str, stage: int, layers: int, width: int) -> dict[str, float]:
    """Return the seconds of each part; the first one begins with the process."""
    import psutil

    import deepspeed

    ends = [psutil.Process().create_time(), time.time()]
    model = nn.Sequential(
        *(
            nn.Linear(width * inputs, width * outputs, bias=False)
            for _ in range(layers)
            for outputs, inputs in ((1, 1), (4, 1), (1, 4))
        )
    )
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True},
        "optimizer": {"type": name, "params": {"lr": 1e-3}},
        "steps_per_print": 10**9,
    }
    with ranks.joined():
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        ends.append(time.time())
        for _ in range(2):
            engine.backward(engine(torch.randn(1, width, dtype=torch.bfloat16)).float().square().mean())
            engine.step()
            ends.append(time.time())
        engine.destroy()
    return {part: end - begin for part, begin, end in zip(PARTS, ends[:-1], ends[1:], strict=True)}
