# SPDX-License-Identifier: Apache-2.0
"""Jobs behind docs/evidence/exactness.md: training with stock's Muon or ours, and the size of the state."""

import torch
from torch import Tensor

from helpers.models import MODELS, train_engine
from helpers.parity import STEPS
from helpers.training import PARAMS, ds_config, fp32_weights, make_engine

SETTINGS = {"lr": 0.02, "adam_lr": 1e-3, "momentum": 0.9, "eps": 1e-8}
"""Of both; stock knows no ns_dtype. Without weight decay."""


def weights_of(who: str, stage: int, clip: float) -> dict[str, Tensor]:
    """Return the weights after training with stock's Muon (Newton-Schulz in bf16) or ours (in fp32)."""
    import deepspeed.muon

    method = {"ns_dtype": "fp32"} if who == "ours" else {"ns_method": "standard"}
    zero = {"reduce_scatter": False} if who == "stock" and stage == 3 else {}
    config = ds_config(stage=stage, clip=clip, optimizer={"type": "Muon", "params": SETTINGS | method}, zero=zero)
    net = MODELS["mlp"]()
    if who == "stock":
        deepspeed.muon.uninstall()
    try:
        engine = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)[0]
        assert type(engine.basic_optimizer).__module__.startswith("deepspeed.muon") is (who == "ours")
        train_engine(engine, STEPS)
        weights = fp32_weights(engine)
        engine.destroy()
    finally:
        deepspeed.muon.install()
    return weights


def state_bytes(stage: int) -> tuple[int, int, int]:
    """Return (bytes of Muon's state, elements of the partition, elements of the matrices) of a bf16 model."""
    optimizer = {"type": "Muon", "params": {key: value for key, value in PARAMS.items() if key != "ns_dtype"}}
    engine = make_engine(MODELS["gpt"](), ds_config(stage=stage, dtype="bf16", optimizer=optimizer))
    muon = engine.basic_optimizer
    tensors = [tensor for partition in muon.partitions for tensor in partition.tensors]
    states = [value for tensor in tensors for value in muon.state[tensor].values() if torch.is_tensor(value)]
    nbytes = sum(value.untyped_storage().nbytes() for value in states if value.ndim)
    elements = sum(spec.numel for spec in muon.specs.values() if spec.use_muon)
    engine.destroy()
    return nbytes, sum(tensor.numel() for tensor in tensors), elements
