# SPDX-License-Identifier: Apache-2.0
"""What a record of DeepSpeed's monitor costs a training step."""

import statistics
import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from benchmarks import ranks, report
from benchmarks.attention import Layer
from benchmarks.rates import seconds, summary

#: What steps take turns at, by what is between two records.
INTERVAL = 2


class Model(nn.Module):
    """Layers of attention; the loss is the mean square of what leaves them."""

    def __init__(self, layers: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Layer(hidden, heads) for _ in range(layers)))

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, tokens, hidden]`` to a scalar."""
        return self.blocks(x).float().square().mean()


def rank(
    layers: int, hidden: int, heads: int, tokens: int, batch: int, rounds: int, stage: int, device: str
) -> dict[str, Any]:
    """Seconds of whole training steps, every second one recorded."""
    import deepspeed
    from deepspeed.muon.monitor.write_records import Recorder

    with ranks.joined(), tempfile.TemporaryDirectory() as folder:
        params = {"lr": 1e-3, "weight_decay": 0.1, "cautious_weight_decay": True, "monitor_interval": INTERVAL}
        config = {
            "train_micro_batch_size_per_gpu": batch,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "Muon", "params": params},
            "csv_monitor": {"enabled": True, "output_path": folder, "job_name": "run"},
            "steps_per_print": 10**9,
        }
        torch.manual_seed(0)
        model = Model(layers, hidden, heads)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        x = torch.randn(batch, tokens, hidden, device=engine.device, dtype=torch.bfloat16)

        def step() -> None:
            engine.backward(engine(x))
            engine.step()

        times: dict[str, list[float]] = {"without a record": [], "with a record": []}
        recorder: Recorder = engine._muon_recorder
        for number in range(INTERVAL * (rounds + 2)):
            name = "with a record" if recorder.is_due(engine) else "without a record"
            torch.distributed.barrier()
            taken = seconds(step, device)
            if number >= 2 * INTERVAL:
                times[name].append(taken)
        file = Path(folder) / "run/Train_Muon_record_ms.csv"
        own = [float(line.split(",")[1]) for line in file.read_text().split()[1:]] if file.exists() else []
        return {"times": times, "own": own}


def records(
    layers: int = 4,
    hidden: int = 512,
    heads: int = 8,
    tokens: int = 1024,
    batch: int = 1,
    rounds: int = 15,
    world: int = 2,
    stage: int = 2,
    device: Annotated[str, ("cpu", "cuda")] = "cpu",
    output: str = "",
) -> str:
    """A training step under ZeRO with and without a record, in turn: forward, backward and the optimizer, bf16.

    Args:
        layers: of the model
        hidden: its width
        heads: of each layer
        tokens: of a sequence
        batch: sequences of a step on a rank
        rounds: timed steps of each
        world: ranks
        stage: of ZeRO
        device: where
        output: base name of the result files
    """
    setting = {"layers": layers, "hidden": hidden, "heads": heads, "tokens": tokens, "batch": batch, "stage": stage}
    found = ranks.run(rank, setting | {"rounds": rounds, "device": device}, world, 900, 1, device)
    slowest = {
        name: [max(step) for step in zip(*(of_rank["times"][name] for of_rank in found), strict=True)]
        for name in found[0]["times"]
    }
    rows = [{"step": name} | summary(times) for name, times in slowest.items()]
    plain, recorded = (statistics.median(times) for times in slowest.values())
    own = statistics.median(found[0]["own"]) / 1e3
    for name, spent in (("slower by", recorded - plain), ("of it measured and summed, `record_ms`", own)):
        rows[1] |= {f"{name}, ms": 1e3 * spent, f"{name}, of a step at an interval of 10": f"{spent / plain / 10:.2%}"}
    caption = ", ".join(f"{value} {name}" for name, value in setting.items()) + f", {world} ranks of one thread, bf16."
    name = output or report.name_of("records")
    return report.write(name, "A training step with a record", rows, caption, report.table(rows))
