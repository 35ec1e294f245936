# SPDX-License-Identifier: Apache-2.0
"""Training on an accelerator, and shards of CPU offload staged to it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.distributed import run
from helpers.models import MODELS, train_engine
from helpers.oracles import change_cosine
from helpers.parity import oracle
from helpers.training import FixedGradients, ds_config, make_engine, train, with_params

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
GPU = {"DS_ACCELERATOR": "cuda"}


def offloaded(stage: int) -> list[set[str]]:
    """Devices of masters and states at first, moved to the host, and back again."""
    engine = make_engine(MODELS["narrow"](), ds_config(stage=stage, dtype="bf16"))
    train_engine(engine, 1)

    def devices() -> set[str]:
        states = engine.basic_optimizer.state
        return {t.device.type for p, entry in states.items() for t in (p, *entry.values()) if t.ndim}

    result = [devices()]
    engine.offload_states()
    result.append(devices())
    engine.reload_states()
    result.append(devices())
    train_engine(engine, 1, first_step=1)
    engine.destroy()
    return result


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_states_move_to_the_host_and_back(stage: int) -> None:
    assert run(offloaded, 1, fresh=True, restart=True, env=GPU, stage=stage) == [[{"cuda"}, {"cpu"}, {"cuda"}]]


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_training_on_the_gpu(stage: int, offload: bool) -> None:
    settings: dict[str, Any] = {"optimizer": with_params(ns_dtype="auto")}
    weights = run(
        train, 1, fresh=True, restart=True, env=GPU, model="narrow", steps=5, stage=stage, offload=offload, **settings
    )[0]
    reference = oracle("narrow", 1.0)
    for name in dict(MODELS["narrow"]().named_parameters()):
        assert change_cosine(reference.initial[name], weights[name], reference.weights[name]) >= 0.99, name


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_ranks_on_one_gpu(stage: int) -> None:
    """Matrices travel between processes, over gloo: NCCL needs a GPU for each."""
    settings: dict[str, Any] = {"optimizer": with_params(ns_dtype="auto", bucket_bytes=2**13)}
    shared = GPU | {"LOCAL_RANK": "0"}
    of_ranks = run(train, 2, fresh=True, restart=True, env=shared, model="narrow", steps=5, stage=stage, **settings)
    reference = oracle("narrow", 1.0)
    for name in dict(MODELS["narrow"]().named_parameters()):
        assert torch.equal(of_ranks[0][name], of_ranks[1][name]), name
        assert change_cosine(reference.initial[name], of_ranks[0][name], reference.weights[name]) >= 0.99, name


SHAPES = [(256, 512), (512, 256), (256, 256), (128, 512)] * 4


def train_in_buckets(stage: int, bucket_bytes: int) -> dict[str, Any]:
    """Weights after some steps, kinds of the buffers, memory of the GPU after each step."""
    net, section = FixedGradients(SHAPES), with_params(ns_dtype="auto", bucket_bytes=bucket_bytes)
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
        "slots": len([name for name, *_ in storage if name.startswith("pinned")]),
        "used": used,
        "buckets": len(optimizer.plans[0].buckets),
    }
    engine.destroy()
    return result


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_staging_on_the_gpu(stage: int) -> None:
    """Many buckets in collective end where one bucket after the other does; a race would show in the bits."""
    one = run(train_in_buckets, 1, fresh=True, restart=True, env=GPU, stage=stage, bucket_bytes=2**30)[0]
    many = run(train_in_buckets, 1, fresh=True, restart=True, env=GPU, stage=stage, bucket_bytes=2**18)[0]
    assert one["buckets"] == 1 and many["buckets"] > 6
    staged = {name: pinned for name, pinned in many["pinned"].items() if name.startswith("pinned")}
    assert many["devices"] == {"cpu"} and many["slots"] == len(staged) == 3 and all(staged.values())
    assert many["used"][2] == many["used"][-1], "nothing is allocated in the steady state"
    for a, b in zip(one["weights"], many["weights"], strict=True):
        assert (a - b).norm() / b.norm() <= 1e-3
