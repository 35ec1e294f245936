# SPDX-License-Identifier: Apache-2.0
"""hpZ, autocast and activation checkpointing around parameters that are several matrices, against the oracle."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from helpers.distributed import run
from helpers.models import Fused, Mlp, train_engine
from helpers.parity import AUTOCAST, STEPS, assert_parity, oracle
from helpers.split_model import OPTIMIZER, reference
from helpers.training import ds_config, fp32_weights, make_engine, train

# ---- hpZ ------------------------------------------------------------------------------------------------------


def train_hierarchically() -> tuple[dict[str, Tensor], bool]:
    """Master weights, and whether parameters really have a second copy within each half of the ranks."""
    zero = {"zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 0}
    engine = make_engine(Fused(), ds_config(stage=3, zero=zero, optimizer=OPTIMIZER))
    train_engine(engine, STEPS)
    is_hierarchical = all(param.ds_secondary_tensor_num_of_groups == 2 for param in engine.module.parameters())
    weights = fp32_weights(engine)
    engine.destroy()
    return weights, is_hierarchical


def test_hierarchical_partitioning_of_blocks() -> None:
    """At stage 3, the only one that has it."""
    for weights, is_hierarchical in run(train_hierarchically, 4):
        assert is_hierarchical
        assert_parity(weights, reference())


# ---- autocast -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_autocast_of_blocks(stage: int) -> None:
    expected = reference()
    for weights in run(train, 2, model="fused", steps=STEPS, stage=stage, optimizer=OPTIMIZER, **AUTOCAST):
        assert_parity(weights, expected, "bf16")
        name = "qkv.weight"
        difference = (weights[name] - expected.weights[name]).norm() / expected.weights[name].norm()
        assert difference > 1e-5, "products in bf16 differ from the oracle's"


# ---- activation checkpointing ---------------------------------------------------------------------------------


def of_torch() -> Callable[..., Tensor]:
    return partial(checkpoint, use_reentrant=False)


def of_deepspeed(ranks: int = 1) -> Callable[..., Tensor]:
    """DeepSpeed's, over whose model-parallel ranks activations are partitioned."""
    import deepspeed

    group = dist.new_group(range(ranks)) if ranks > 1 else None
    facts = {"rank": dist.get_rank(), "world_size": ranks, "group": group}
    mpu = SimpleNamespace(**{f"get_model_parallel_{key}": lambda value=value: value for key, value in facts.items()})
    deepspeed.checkpointing.configure(mpu if ranks > 1 else None, partition_activations=ranks > 1)
    return deepspeed.checkpointing.checkpoint


KINDS: dict[str, Callable[[], Callable[..., Tensor]]] = {
    "torch": of_torch,
    "DeepSpeed": of_deepspeed,
    "partitioned": partial(of_deepspeed, 2),
}


class Counted(nn.Module):
    """A layer that counts how often it runs."""

    def __init__(self, layer: nn.Linear, save: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer, self.save, self.count = layer, save, 0

    def run(self, hidden: Tensor) -> Tensor:
        """The layer itself."""
        self.count += 1
        return self.layer(hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.save(self.run, hidden)


def train_with_checkpointing(kind: str, stage: int) -> tuple[dict[str, Tensor], list[int]]:
    """Master weights, and how often layers ran. Ranks over which activations are partitioned have the same data."""
    net, is_partitioned = Mlp(), kind == "partitioned"
    save = KINDS[kind]()
    for index in range(1, len(net.layers)):
        net.layers[index] = Counted(net.layers[index], save)
    engine = make_engine(net, ds_config(stage=stage))
    for step in range(STEPS):
        batch: Any = net.batch(step)
        rows = slice(None) if is_partitioned else slice(24 * dist.get_rank(), 24 * dist.get_rank() + 24)
        engine.backward(engine(*(part[rows] for part in batch)))
        engine.step()
    weights = {name.replace(".layer.", "."): value for name, value in fp32_weights(engine).items()}
    counts = [layer.count for layer in net.layers[1:]]
    engine.destroy()
    return weights, counts


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_activation_checkpointing(kind: str, stage: int) -> None:
    expected = oracle("mlp", 1.0)
    for weights, counts in run(train_with_checkpointing, 2, kind=kind, stage=stage):
        assert_parity(weights, expected)
        assert counts == [2 * STEPS] * 4, "each layer runs again in the backward pass"


def test_the_partitioned_activations_are_partitioned() -> None:
    """Where ranks differ in their data, what they gather is a mixture of it."""
    expected = oracle("mlp", 1.0)
    for weights, _ in run(train_mixed, 2):
        with pytest.raises(AssertionError):
            assert_parity(weights, expected)


def train_mixed() -> tuple[dict[str, Tensor], list[int]]:
    """As `train_with_checkpointing`, of ranks with data of their own that partition activations nevertheless."""
    KINDS["mixed"] = KINDS["partitioned"]
    return train_with_checkpointing("mixed", 1)
