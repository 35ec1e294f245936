# SPDX-License-Identifier: Apache-2.0
"""The accelerator's paths: Newton-Schulz in bf16 there, and shards of CPU offload staged to it."""

from typing import Any

import pytest
import torch

from deepspeed.muon.math.coefficients import schedule
from deepspeed.muon.math.newton_schulz import orthogonalize
from helpers.distributed import run
from helpers.models import MODELS, train_engine
from helpers.oracles import change_cosine, newton_schulz_fp64
from helpers.parity import oracle
from helpers.training import PARAMS, ds_config, make_engine, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
GPU = {"DS_ACCELERATOR": "cuda"}


@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("shape", [(256, 1024), (1024, 256), (512, 512)], ids=str)
def test_the_iteration_on_the_gpu(method: str, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(3, *shape, device="cuda", dtype=torch.bfloat16)
    exact = torch.stack([newton_schulz_fp64(m.cpu()) for m in matrix])
    result = orthogonalize(matrix.clone(), schedule("simple"), method).double().cpu()
    assert (result - exact).norm() / exact.norm() <= 0.03


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
    assert run(offloaded, 1, fresh=True, env=GPU, stage=stage) == [[{"cuda"}, {"cpu"}, {"cuda"}]]


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_training_on_the_gpu(stage: int, offload: bool) -> None:
    settings: dict[str, Any] = {"optimizer": {"type": "Muon", "params": PARAMS | {"ns_dtype": "bf16"}}}
    weights = run(train, 1, fresh=True, env=GPU, model="narrow", steps=5, stage=stage, offload=offload, **settings)[0]
    reference = oracle("narrow", 1.0)
    for name in dict(MODELS["narrow"]().named_parameters()):
        assert change_cosine(reference.initial[name], weights[name], reference.weights[name]) >= 0.99, name
