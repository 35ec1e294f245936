# SPDX-License-Identifier: Apache-2.0
"""CPU offload on an accelerator: shards in the host's memory, Newton-Schulz on the GPU, pinned buffers between."""

from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.distributed import run
from helpers.training import FixedGradients, ds_config, make_engine, with_params

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
GPU = {"DS_ACCELERATOR": "cuda"}
SHAPES = [(256, 512), (512, 256), (256, 256), (128, 512)] * 4


def offloaded(stage: int, bucket_bytes: int) -> dict[str, Any]:
    """Weights after some steps, kinds of the buffers, memory of the GPU after each step."""
    net, section = FixedGradients(SHAPES), with_params(ns_dtype="bf16", bucket_bytes=bucket_bytes)
    engine = make_engine(net, ds_config(stage=stage, dtype="bf16", offload=True, optimizer=section))
    optimizer, used = engine.basic_optimizer, []
    for step in range(6):
        engine.backward(engine([g.cuda() for g in net.gradients(step)]))
        engine.step()
        used.append(torch.cuda.memory_allocated())
    storage = optimizer.workspace._storage
    weights: list[Tensor] = [t.detach().clone() for p in optimizer.partitions for t in p.tensors]
    result = {
        "weights": weights,
        "devices": {t.device.type for p in optimizer.partitions for t in p.tensors},
        "pinned": {name: t.is_pinned() for (name, *_), t in storage.items() if t.device.type == "cpu"},
        "near": {t.device.type for (name, *_), t in storage.items() if name.startswith("matrices")},
        "used": used,
        "buckets": len(optimizer.plans[0].buckets),
    }
    engine.destroy()
    return result


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_staging_on_the_gpu(stage: int) -> None:
    """Many buckets in collective end where one bucket after the other does; a race would show in the bits."""
    one = run(offloaded, 1, fresh=True, restart=True, env=GPU, stage=stage, bucket_bytes=2**30)[0]
    many = run(offloaded, 1, fresh=True, restart=True, env=GPU, stage=stage, bucket_bytes=2**18)[0]
    assert one["buckets"] == 1 and many["buckets"] > 6
    assert many["devices"] == {"cpu"} and many["near"] == {"cuda"}
    staged = {name: pinned for name, pinned in many["pinned"].items() if name.startswith("pinned")}
    assert len(staged) == 3 and all(staged.values())
    assert many["used"][2] == many["used"][-1], "nothing is allocated in the steady state"
    for a, b in zip(one["weights"], many["weights"], strict=True):
        assert (a - b).norm() / b.norm() <= 1e-3
