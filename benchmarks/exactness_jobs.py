# SPDX-License-Identifier: Apache-2.0
"""Training jobs of `exactness.py`, run on every rank of a pool of worker processes."""

import torch
from torch import Tensor

from helpers.models import MODELS, train_engine
from helpers.training import PARAMS, ds_config, fp32_weights, make_engine

#: What every run and the oracle use. Stock knows no ns_dtype, weight decay is left out.
SETTINGS = {"lr": 0.02, "adam_lr": 1e-3, "momentum": 0.9, "eps": 1e-8}


def ours(model: str, steps: int, stage: int, clip: float) -> dict[str, Tensor]:
    """Weights after training with deepspeed-muon, Newton-Schulz in fp32."""
    params = SETTINGS | {"ns_dtype": "fp32"}
    net = MODELS[model]()
    engine = make_engine(net, ds_config(stage=stage, clip=clip, optimizer={"type": "Muon", "params": params}))
    train_engine(engine, steps)
    weights = fp32_weights(engine)
    engine.destroy()
    return weights


def stock(model: str, steps: int, stage: int, clip: float) -> dict[str, Tensor]:
    """Weights after training with DeepSpeed's own Muon, whose `standard` iteration runs in bf16."""
    import deepspeed
    import deepspeed.muon

    params = SETTINGS | {"ns_method": "standard"}
    zero = {"reduce_scatter": False} if stage == 3 else {}
    config = ds_config(stage=stage, clip=clip, optimizer={"type": "Muon", "params": params}, zero=zero)
    net = MODELS[model]()
    deepspeed.muon.uninstall()
    try:
        engine = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)[0]
        assert type(engine.basic_optimizer).__module__.startswith("deepspeed.runtime")
        train_engine(engine, steps)
        weights = fp32_weights(engine)
        engine.destroy()
    finally:
        deepspeed.muon.install()
    return weights


def state_bytes(stage: int) -> dict[str, int]:
    """Bytes of Muon's state on this rank, and of the partition's padding, for a bf16 model."""
    params = {"type": "Muon", "params": {key: value for key, value in PARAMS.items() if key != "ns_dtype"}}
    net = MODELS["gpt"]()
    engine = make_engine(net, ds_config(stage=stage, dtype="bf16", optimizer=params))
    optimizer = engine.basic_optimizer
    tensors = [t for partition in optimizer.partitions for t in partition.tensors]
    held = sum(
        v.untyped_storage().nbytes()
        for t in tensors
        for v in optimizer.state[t].values()
        if torch.is_tensor(v) and v.ndim
    )
    elements = sum(spec.numel for spec in optimizer.specs.values() if spec.use_muon)
    result = {"bytes": held, "partition": sum(t.numel() for t in tensors), "elements": elements}
    engine.destroy()
    return result
