# SPDX-License-Identifier: Apache-2.0
"""Which settings are refused, in which words, and that nothing has been built by then."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from deepspeed.muon import MuonWithAuxAdam, UnsupportedError
from deepspeed.muon.zero.support import RULES, refuse_unsupported
from distributed import run
from models import Mlp, train_engine
from training import PARAMS, ds_config, make_engine

Refusal = tuple[str, str, int]
"""Type and text of the error, and how often an engine's construction began."""


def attempt(initialize: Any) -> Refusal | None:
    """What came of a `deepspeed.initialize`; `None` if it went well."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    original, entered = DeepSpeedEngine.__init__, []

    def spy(self: Any, *args: Any, **kwargs: Any) -> None:
        entered.append(self)
        original(self, *args, **kwargs)

    DeepSpeedEngine.__init__ = spy
    try:
        initialize().destroy()
    except Exception as error:
        return type(error).__name__, str(error), len(entered)
    finally:
        DeepSpeedEngine.__init__ = original
    return None


def refuse_config(**config: Any) -> Refusal | None:
    """What an MLP under this config comes to."""
    from deepspeed.module_inject import layers

    mode = getattr(layers, "DEEPSPEED_AUTOTP_MODE", None)
    try:
        return attempt(lambda: make_engine(Mlp(), ds_config(**config)))
    finally:
        layers.DEEPSPEED_AUTOTP_MODE = mode


def offload(**settings: Any) -> dict[str, Any]:
    return {"offload_optimizer": settings}


OURS, STOCK = False, True
#: settings, key that the message names, what it says to change, whether stock refuses first by itself
CASES: dict[str, tuple[dict[str, Any], str, str, bool]] = {
    "nvme": ({"zero": offload(device="nvme", nvme_path="/tmp")}, "offload_optimizer.device", 'use "cpu"', OURS),
    "ratio": (
        {"stage": 3, "zero": offload(device="cpu", ratio=0.5)},
        "offload_optimizer.ratio",
        "remove the key or set it to 1.0",
        OURS,
    ),
    "ratio-0": ({"stage": 3, "zero": offload(device="cpu", ratio=0.0)}, "offload_optimizer.ratio", "1.0", OURS),
    "ratio-stage-2": ({"zero": offload(device="cpu", ratio=0.5)}, "Partial offloading", "ZeRO Stage 3", STOCK),
    "superoffload": (
        {"stage": 3, "zero": offload(device="cpu", super_offload=True)},
        "offload_optimizer.super_offload",
        "set it to false",
        OURS,
    ),
    "zenflow": ({"zero": {"zenflow": {}}}, "zero_optimization.zenflow", "remove the section", OURS),
    "elastic": (
        {"stage": 1, "zero": {"elastic_checkpoint": True}},
        "zero_optimization.elastic_checkpoint",
        "use universal checkpoints",
        OURS,
    ),
    "norm": ({"zero": {"compute_grad_norm": False}}, "compute_grad_norm", "set it to true", OURS),
    "norm-stage-3": ({"stage": 3, "zero": {"compute_grad_norm": False}}, "compute_grad_norm", "", STOCK),
    "mics": ({"stage": 3, "zero": {"mics_shard_size": 1}}, "zero_optimization.mics_shard_size", "", STOCK),
    "fp16-masters": (
        {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}},
        "fp16.fp16_master_weights_and_grads",
        "set it to false",
        OURS,
    ),
    "bf16-masters": (
        {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
        "bf16.bf16_master_weights_and_grads",
        "set it to false",
        OURS,
    ),
    "bf16-states": (
        {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
        "bf16.bf16_master_weights_and_grads",
        "set it to false",
        OURS,
    ),
    "autocast": ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, "torch_autocast", "bfloat16", OURS),
    "deepcompile": ({"compile": {"deepcompile": True}}, "compile.deepcompile", "set it to false", OURS),
    "tensor": ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel.autotp_size", "set it to 1", OURS),
    "expert": (
        {"expert_parallel": {"enabled": True, "autoep_size": 2, "preset_model": "mixtral"}},
        "expert_parallel.enabled",
        "set it to false",
        OURS,
    ),
    "hybrid": ({"hybrid_engine": {"enabled": True}}, "hybrid_engine.enabled", "set it to false", OURS),
}


def unknown_keys() -> list[str]:
    """Names of cases whose key this DeepSpeed does not have yet."""
    from deepspeed.runtime import config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    norm = [] if "compute_grad_norm" in DeepSpeedZeroConfig.model_fields else ["norm"]
    return norm + ([] if hasattr(config, "get_expert_parallel_config") else ["expert"])


@pytest.mark.parametrize("name", CASES)
def test_a_config_is_refused_before_the_engine_exists(name: str) -> None:
    settings, key, advice, stock = CASES[name]
    if name in unknown_keys():
        pytest.skip("this DeepSpeed does not know the key")
    kind, text, entered = run(refuse_config, 1, **settings)[0]
    assert entered == 0
    if stock and kind != "UnsupportedError":
        assert kind in ("ValidationError", "DeepSpeedConfigError") and key.rpartition(".")[2] in text
        return
    assert kind == "UnsupportedError", text
    assert key in text and advice in text
    assert text.count("\n") == 1, "one problem, one line"


def rules_that_apply(unknown: list[str]) -> dict[str, list[str]]:
    """By case, the keys of the rules that apply to its config."""
    from deepspeed.runtime.config import DeepSpeedConfig

    def hits(settings: dict[str, Any]) -> list[str]:
        config = DeepSpeedConfig(ds_config(**settings) | {"optimizer": {"type": "AdamW"}})
        return [key for key, applies, _ in RULES if applies(config)]

    cases = {name: case[0] for name, case in CASES.items() if case[3] == OURS and name not in unknown}
    return {name: hits(case) for name, case in cases.items()} | {"plain": hits({})}


def test_every_rule_has_a_case_and_applies_to_it_alone() -> None:
    assert [key for key, _, _ in RULES if not any(named in key for _, named, _, _ in CASES.values())] == []
    hits = run(rules_that_apply, 1, unknown=unknown_keys())[0]
    assert hits.pop("plain") == []
    for name, found in hits.items():
        assert len(found) == 1 and CASES[name][1] in found[0], name


def test_mics_is_refused_where_stock_still_has_it() -> None:
    refuse_unsupported(SimpleNamespace(zero_config=SimpleNamespace(mics_shard_size=-1)))
    with pytest.raises(UnsupportedError, match="mics_shard_size: .*remove the key"):
        refuse_unsupported(SimpleNamespace(zero_config=SimpleNamespace(mics_shard_size=2)))


def test_several_problems_are_all_listed() -> None:
    kind, text, entered = run(
        refuse_config,
        1,
        zero={"elastic_checkpoint": True, "zenflow": {}} | offload(device="nvme", nvme_path="/tmp"),
        hybrid_engine={"enabled": True},
    )[0]
    assert (kind, entered) == ("UnsupportedError", 0)
    for key in ("elastic_checkpoint", "zenflow", "offload_optimizer.device", "hybrid_engine"):
        assert key in text
    assert text.count("\n") == 4


def refuse_at_zero_init() -> Refusal | None:
    """`zero.Init` reads the config first, before the model is there."""
    import deepspeed

    def initialize() -> Any:
        with deepspeed.zero.Init(config_dict_or_path=ds_config(stage=3, zero={"elastic_checkpoint": True})):
            raise AssertionError("zero.Init went on")

    return attempt(initialize)


def test_zero_init_refuses_as_well() -> None:
    kind, text, _ = run(refuse_at_zero_init, 1)[0]
    assert kind == "UnsupportedError" and "elastic_checkpoint" in text


@pytest.mark.parametrize("name", ["Muon", "MuonWithAuxAdam"])
def test_wrong_parameters_are_refused_before_the_engine_exists(name: str) -> None:
    optimizer = {"type": name, "params": PARAMS | {"momentumm": 0.9, "ns_steps": 0}}
    kind, text, entered = run(refuse_config, 1, optimizer=optimizer)[0]
    assert (kind, entered) == ("MuonConfigError", 0)
    assert "optimizer.params.momentumm" in text and "did you mean momentum?" in text
    assert "optimizer.params.ns_steps" in text


def test_other_optimizers_are_left_alone() -> None:
    adamw = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    assert run(refuse_other, 1, optimizer=adamw, stage=1, zero={"elastic_checkpoint": True}) == [None]


def refuse_other(**config: Any) -> Refusal | None:
    """As `refuse_config`, with an engine whose optimizer is not ours."""
    import deepspeed

    net = Mlp()
    return attempt(lambda: deepspeed.initialize(model=net, config=ds_config(**config))[0])


def train_one_step(**config: Any) -> list[float] | str:
    """The loss of one step, or that this version lacks a key."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    if set(config.get("zero", {})) - set(DeepSpeedZeroConfig.model_fields):
        return "unknown key"
    engine = make_engine(Mlp(), ds_config(**config))
    losses = train_engine(engine, 1)
    engine.destroy()
    return losses


SUPPORTED: list[dict[str, Any]] = [
    *({"stage": stage} for stage in (0, 1, 2, 3)),
    *({"stage": stage, "zero": {"reduce_scatter": False}} for stage in (1, 2, 3)),
    *({"stage": stage, "zero": {"overlap_comm": stage < 3}} for stage in (1, 2, 3)),
    *({"stage": stage, "zero": {"contiguous_gradients": False}} for stage in (1, 2, 3)),
    *({"stage": stage, "zero": {"round_robin_gradients": True}} for stage in (1, 2)),
    {"stage": 2, "zero": {"parameter_alignment": True}},
    {"stage": 3, "zero": {"offload_param": {"device": "cpu"}}},
    {"stage": 3, "zero": {"zero_hpz_partition_size": 2}},
    {"stage": 2, "zero": offload(device="none", ratio=1.0)},
    {"stage": 2, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    {"stage": 2, "hybrid_engine": {"enabled": False}, "compile": {"deepcompile": False}},
]


@pytest.mark.parametrize("settings", SUPPORTED, ids=str)
def test_settings_that_are_not_refused(settings: dict[str, Any]) -> None:
    losses = run(train_one_step, 2, **settings)
    if "unknown key" in losses:
        pytest.skip("this DeepSpeed does not know the key")
    assert len(losses) == 2


def model_parallel_unit() -> SimpleNamespace:
    """An mpu whose ranks all hold parts of one model."""
    rank, world = dist.get_rank(), dist.get_world_size()
    alone = [dist.new_group([r]) for r in range(world)][rank]
    model = {"rank": rank, "world_size": world, "group": dist.group.WORLD}
    data = {"rank": 0, "world_size": 1, "group": alone}
    getters = {f"get_model_parallel_{key}": value for key, value in model.items()}
    getters |= {f"get_data_parallel_{key}": value for key, value in data.items()}
    return SimpleNamespace(**{name: lambda value=value: value for name, value in getters.items()})


class Experts(nn.Module):
    """A linear layer and DeepSpeed's own mixture of experts."""

    def __init__(self) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        self.linear = nn.Linear(8, 8)
        self.moe = MoE(8, nn.Linear(8, 8), num_experts=2)


def refuse_parallel(kind: str, client: bool = False) -> Refusal | None:
    """What only the engine knows, with the optimizer from the config or from the user."""
    from deepspeed.pipe import PipelineModule

    import deepspeed

    config, kwargs = ds_config(stage=1) | {"train_micro_batch_size_per_gpu": 4}, {}
    if kind == "pipeline":
        net = PipelineModule([nn.Linear(8, 8), nn.Linear(8, 8)], num_stages=1, loss_fn=nn.MSELoss())
    else:
        net = Experts() if kind == "moe" else Mlp()
    if kind == "sequence":
        config |= {"sequence_parallel_size": 2, "data_parallel_size": 1}
    if kind == "mpu":
        kwargs["mpu"] = model_parallel_unit()
    if client:
        kwargs["optimizer"] = MuonWithAuxAdam(net.parameters(), model=net, **config.pop("optimizer")["params"])
    params = [p for p in net.parameters() if p.requires_grad]
    return attempt(lambda: deepspeed.initialize(model=net, config=config, model_parameters=params, **kwargs)[0])


def refuse_all_parallel(kinds: list[str]) -> list[Refusal | None]:
    return [refuse_parallel(kind) for kind in kinds]


@pytest.mark.parametrize("client", [False, True])
def test_engines_that_are_refused(client: bool) -> None:
    for kind, words in {"pipeline": "pipeline parallelism", "moe": "deepspeed.moe layers"}.items():
        name, text, _ = run(refuse_parallel, 1, kind=kind, client=client)[0]
        assert name == "UnsupportedError" and words in text


def test_parallelism_over_ranks_is_refused() -> None:
    """In a pool of its own, because DeepSpeed keeps these groups in globals."""
    for sequence, mpu in run(refuse_all_parallel, 2, fresh=True, kinds=["sequence", "mpu"]):
        assert mpu[0] == sequence[0] == "UnsupportedError"
        assert "model-parallel unit" in mpu[1] and "sequence parallelism" in sequence[1]
