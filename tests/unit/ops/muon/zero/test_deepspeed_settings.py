# SPDX-License-Identifier: Apache-2.0
"""Settings of DeepSpeed that are neither refused nor change what is trained."""

from typing import Any

import pytest
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from helpers.distributed import run
from helpers.models import Mlp, train_engine
from helpers.training import ds_config, make_engine


def losses(**config: Any) -> list[float] | None:
    """The losses of three steps; `None` if this version lacks a key."""
    if set(config.get("zero", {})) - set(DeepSpeedZeroConfig.model_fields):
        return None
    return train_engine(make_engine(Mlp(), ds_config(**config)), 3)


SUPPORTED: list[dict[str, Any]] = [
    *({"stage": stage} for stage in (1, 2, 3)),
    *({"stage": stage, "zero": {"reduce_scatter": False}} for stage in (1, 2, 3)),
    *({"stage": stage, "zero": {"overlap_comm": stage < 3}} for stage in (1, 2, 3)),
    *({"stage": stage, "zero": {"contiguous_gradients": False}} for stage in (1, 2, 3)),
    *({"stage": stage, "zero": {"round_robin_gradients": True}} for stage in (1, 2)),
    {"stage": 2, "zero": {"parameter_alignment": True}},
    {"stage": 3, "zero": {"offload_param": {"device": "cpu"}}},
    {"stage": 3, "zero": {"zero_hpz_partition_size": 2}},
    {"stage": 2, "zero": {"offload_optimizer": {"device": "none", "ratio": 1.0}}},
    {"stage": 2, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    {"stage": 2, "hybrid_engine": {"enabled": False}, "compile": {"deepcompile": False}},
    {"stage": 1, "prescale_gradients": True, "gradient_predivide_factor": 2.0},
    {"stage": 2, "zero_force_ds_cpu_optimizer": True, "offload": True},
    {"stage": 2, "managed_gradient_accumulation": False},
    {"stage": 2, "zero": {"allgather_partitions": False, "use_multi_rank_bucket_allreduce": False}},
    {"stage": 3, "zero": {"sub_group_size": 200, "stage3_param_persistence_threshold": 0}},
    {"stage": 3, "communication_data_type": "fp32", "zero": {"use_all_reduce_for_fetch_params": True}},
]


@pytest.mark.sample(6)
@pytest.mark.parametrize("settings", SUPPORTED, ids=str)
def test_settings_that_are_not_refused_change_nothing(settings: dict[str, Any]) -> None:
    results = run(losses, 2, **settings)
    if results == [None, None]:
        pytest.skip("this DeepSpeed does not know the key")
    tolerance = 0.05 if "torch_autocast" in settings else 1e-5
    for got, expected in zip(results, run(losses, 2, stage=0), strict=True):
        assert got == pytest.approx(expected, rel=tolerance)


ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1}
HARMLESS: dict[str, Any] = {"fused": True, "foreach": True, "amsgrad": False, "torch_adam": True, "max_grad_norm": 1.0}


def test_keys_of_adamw_without_effect_change_nothing() -> None:
    """``max_grad_norm`` is one beside ``gradient_clipping``, and a number may be a string."""
    plain = {"type": "Muon", "params": ADAMW}
    keys = {"type": "Muon", "params": ADAMW | HARMLESS | {"eps": "1e-8", "bias_correction": True}}
    uncorrected = {"type": "Muon", "params": ADAMW | {"bias_correction": False}}
    expected = run(losses, 2, stage=2, gradient_clipping=0.5, optimizer=plain)
    assert run(losses, 2, stage=2, gradient_clipping=0.5, optimizer=keys) == expected
    assert run(losses, 2, stage=2, gradient_clipping=0.5, optimizer=uncorrected) != expected
