# SPDX-License-Identifier: Apache-2.0
"""What is refused, in which words, and that nothing has been built by then; why; and what trains as without it."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.module_inject import layers
from deepspeed.pipe import PipelineModule
from deepspeed.runtime import config as stock_config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from torch import nn

import deepspeed
from deepspeed.muon import MuonWithAuxAdam, UnsupportedError, uninstall
from deepspeed.muon.config.schema import parse
from deepspeed.muon.zero.refusals import RULES, refuse_unsupported
from helpers.distributed import run
from helpers.experts import spread_model
from helpers.logs import logged
from helpers.models import Mlp, TinyGpt, train_engine
from helpers.refusals import CPU, NVME, Refusal, attempt
from helpers.training import FP32_GRADIENTS, PARAMS, ds_config, make_engine
from helpers.universal import convert

ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}


def muon(**params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": "Muon", "params": params}}


def refuse_config(**config: Any) -> Refusal | None:
    """What a model under this config comes to."""
    mode = layers.DEEPSPEED_AUTOTP_MODE
    try:
        return attempt(lambda: make_engine(TinyGpt(), ds_config(**config)))
    finally:
        layers.DEEPSPEED_AUTOTP_MODE = mode


def offload(**settings: Any) -> dict[str, Any]:
    return {"offload_optimizer": settings}


BF16 = {"enabled": True, "bf16_master_weights_and_grads": True}
STATES = BF16 | {"bf16_optimizer_states": True}
FP16_AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "float16"}}
ZERO = "zero_optimization"
#: settings and the key that the message names; docs/reference/wrong-configurations.md has whole messages
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "nvme": ({"zero": offload(**NVME)}, f"{ZERO}.offload_optimizer.device"),
    "nvme params": ({"zero": {"offload_param": NVME}}, f"{ZERO}.offload_param.device"),
    "nvme path": ({"stage": 3, "zero": offload(device="nvme")}, f"{ZERO}.offload_optimizer.nvme_path"),
    "nvme params path": (
        {"stage": 3, "zero": {"offload_param": {"device": "nvme"}}},
        f"{ZERO}.offload_param.nvme_path",
    ),
    "qwZ": ({"stage": 3, "zero": {"zero_quantized_weights": True}}, f"{ZERO}.zero_quantized_weights"),
    "qgZ": ({"stage": 3, "zero": {"zero_quantized_gradients": True}}, f"{ZERO}.zero_quantized_gradients"),
    "ratio": ({"stage": 3, "zero": offload(**CPU, ratio=0.5)}, f"{ZERO}.offload_optimizer.ratio"),
    "ratio 0": ({"stage": 3, "zero": offload(**CPU, ratio=0.0)}, f"{ZERO}.offload_optimizer.ratio"),
    "super": ({"stage": 3, "zero": offload(**CPU, super_offload=True)}, f"{ZERO}.offload_optimizer.super_offload"),
    "zenflow": ({"zero": {"zenflow": {}}}, f"{ZERO}.zenflow"),
    "fp16": (
        {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}},
        "fp16.fp16_master_weights_and_grads",
    ),
    "bf16": ({"bf16": BF16}, "bf16.bf16_master_weights_and_grads"),
    "bf16 offload": ({"bf16": STATES, "offload": True}, "bf16.bf16_master_weights_and_grads"),
    "bf16 gradients": ({"stage": 1, "bf16": STATES, **FP32_GRADIENTS}, "data_types.grad_accum_dtype"),
    "autocast": ({"stage": 0, "dtype": "bf16", **FP16_AUTOCAST}, "torch_autocast.dtype"),
}
#: settings that stock refuses by itself, with words of its message; it had MiCS before 0.19.7
STOCK: dict[str, tuple[dict[str, Any], str]] = {
    "ratio": ({"zero": offload(**CPU, ratio=0.5)}, "only supported for ZeRO Stage 3"),
    "norm": ({"stage": 3, "zero": {"compute_grad_norm": False}}, "compute_grad_norm"),
    "sum": ({"stage": 3, "gradient_allreduce_op": "sum"}, "not supported with ZeRO stage 3"),
    "fp16": ({"stage": 0, **CASES["fp16"][0]}, "only supported with ZeRO"),
    "mics": ({"stage": 3, "zero": {"mics_shard_size": 1}}, "mics_shard_size"),
}
AUTO = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
WRONG = {"momentumm": 0.9, "ns_steps": 0}
SUGGESTED = ("params.momentumm: got 0.9; unknown key, did you mean momentum?", "optimizer.params.ns_steps")
#: settings and what the text of a MuonConfigError has
PARAMETERS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "two mistakes": (muon(**WRONG), SUGGESTED),
    "stock's class": ({"optimizer": {"type": "MuonWithAuxAdam", "params": WRONG}}, SUGGESTED),
    "auto": (muon(**AUTO), tuple(f"{key}: got 'auto'" for key in AUTO)),
    "pattern": (muon(muon_exclude="router"), ("'router' matches none",)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_config_is_refused_before_the_engine_exists(name: str) -> None:
    settings, key = CASES[name]
    kind, text, entered = run(refuse_config, 1, **settings)[0]
    assert (kind, entered) == ("UnsupportedError", 0), text
    assert f"\n  {key}: " in text and text.count("\n") == 1, "one problem, one line"


def test_several_problems_are_all_listed() -> None:
    zero = {"zenflow": {}} | offload(**NVME)
    kind, text, entered = run(refuse_config, 1, zero=zero, **CASES["fp16"][0])[0]
    assert (kind, entered, text.count("\n")) == ("UnsupportedError", 0, 3)
    assert all(CASES[name][1] in text for name in ("zenflow", "nvme", "fp16"))


@pytest.mark.parametrize("name", PARAMETERS)
def test_wrong_parameters_are_refused_before_the_engine_exists(name: str) -> None:
    settings, words = PARAMETERS[name]
    kind, text, entered = run(refuse_config, 1, **settings)[0]
    assert (kind, entered) == ("MuonConfigError", 0)
    assert all(word in text for word in words), text


@pytest.mark.parametrize("name", STOCK)
def test_stock_refuses_first(name: str) -> None:
    settings, words = STOCK[name]
    _, text, entered = run(refuse_config, 1, **settings)[0]
    assert words in text and entered == 0


def rules_that_apply() -> dict[str, list[str]]:
    """By case, the keys of the rules that apply to its config."""

    def hits(settings: dict[str, Any]) -> list[str]:
        config = stock_config.DeepSpeedConfig(ds_config(**settings) | {"optimizer": {"type": "AdamW"}})
        return [key for key, applies, _ in RULES if applies(config)]

    return {name: hits(case[0]) for name, case in CASES.items()} | {"plain": hits({})}


def test_every_rule_has_a_case_and_applies_to_it_alone() -> None:
    named = [key for _, key in CASES.values()] + ["mics_shard_size"]
    assert [rule for rule, _, _ in RULES if not any(rule.endswith(key) for key in named)] == []
    hits = run(rules_that_apply, 1)[0]
    assert hits.pop("plain") == []
    for name, found in hits.items():
        assert found == [CASES[name][1]], name


def test_mics_is_refused_where_stock_still_has_it() -> None:
    refuse_unsupported(SimpleNamespace(zero_config=SimpleNamespace(mics_shard_size=-1)), parse({}))
    with pytest.raises(UnsupportedError, match="remove the key"):
        refuse_unsupported(SimpleNamespace(zero_config=SimpleNamespace(mics_shard_size=2)), parse({}))


def test_an_optimizer_of_the_script_is_checked_by_its_own_settings() -> None:
    """What it was given, not what are defaults; the config's section says nothing of it."""
    bf16 = SimpleNamespace(bfloat16_config=SimpleNamespace(bf16_optimizer_states=True), optimizer_params=None)
    refuse_unsupported(bf16, parse({}))
    with pytest.raises(UnsupportedError, match="bf16_optimizer_states keeps the momentum in bf16"):
        refuse_unsupported(bf16, parse({"momentum_dtype": "fp32"}))


#: settings that have no effect, or none until the script calls what they are about; AdamW trains with each
HARMLESS: dict[str, dict[str, Any]] = {
    "deepcompile": {"stage": 1, "compile": {"deepcompile": True}, "zero": {"elastic_checkpoint": True}},
    "universal": {"stage": 0, "checkpoint": {"load_universal": True}, "zero": offload(**NVME)},
    "quantized": {"stage": 2, "zero": {"zero_quantized_weights": True, "zero_quantized_gradients": True}},
    "super": {"stage": 2, "zero": offload(**CPU, super_offload=True)},
    "ratio": {"stage": 3, "zero": offload(device="none", ratio=0.5)},
}


def train_harmlessly(name: str, folder: str) -> tuple[dict[str, str], list[float], list[str]]:
    """What `compile`, a save and a load raise after a step, the learning rates, and the warnings of `initialize`."""
    net = Mlp()
    with logged() as lines:
        engine = make_engine(net, ds_config(**HARMLESS[name]))
    train_engine(engine, 1)
    raised = {}
    for call, act in {
        "compile": engine.compile if name == "deepcompile" else lambda: None,
        "save": lambda: engine.save_checkpoint(folder),
        "load": lambda: engine.load_checkpoint(folder),
    }.items():
        try:
            act()
        except Exception as error:
            raised[call] = f"{type(error).__name__}: {error}"
    rates = engine.get_lr()
    engine.destroy()
    return raised, rates, [line for line in lines if "is ignored" in line]


@pytest.mark.parametrize("name", HARMLESS)
def test_a_setting_is_refused_only_once_it_has_an_effect(name: str, tmp_path: Any) -> None:
    late = {
        "deepcompile": {"compile": "UnsupportedError: compile.deepcompile: DeepCompile runs only on GPUs"},
        "universal": {"load": "UnsupportedError: checkpoint.load_universal: DeepSpeed loads universal checkpoints at"},
    }
    for rank, (raised, rates, warnings) in enumerate(run(train_harmlessly, 2, name=name, folder=str(tmp_path))):
        assert raised.keys() == late.get(name, {}).keys(), raised
        assert all(raised[call].startswith(text) for call, text in late.get(name, {}).items())
        assert len(rates) == 1, "one group of the user's, one rate"
        assert ["elastic_checkpoint" in line for line in warnings] == [True] * (name == "deepcompile" and rank == 0)


def refuse_at_zero_init() -> Refusal | None:
    """`zero.Init` reads the config first, before the model is there."""

    def initialize() -> Any:
        with deepspeed.zero.Init(config_dict_or_path=ds_config(stage=3, zero={"zenflow": {}})):
            raise AssertionError("zero.Init went on")

    return attempt(initialize)


def test_zero_init_refuses_as_well() -> None:
    kind, text, _ = run(refuse_at_zero_init, 1)[0]
    assert kind == "UnsupportedError" and "zenflow" in text


def read_early(params: dict[str, Any]) -> str | None:
    """What a config says that is read before Hugging Face's integration has filled it in, as by `zero.Init`."""
    try:
        stock_config.DeepSpeedConfig(ds_config(optimizer={"type": "Muon", "params": params}))
    except ValueError as error:
        return str(error)
    return None


def test_auto_is_refused_at_initialize_only() -> None:
    assert run(read_early, 1, params=AUTO) == [None]
    assert "muon_lr: got 'auto'" in run(read_early, 1, params={"muon_lr": "auto"})[0]


def test_other_optimizers_are_left_alone() -> None:
    assert run(refuse_other, 1, optimizer=ADAMW, stage=1, zero={"elastic_checkpoint": True}) == [None]


def refuse_other(**config: Any) -> Refusal | None:
    """As `refuse_config`, with an engine whose optimizer is not ours."""
    net = Mlp()
    return attempt(lambda: deepspeed.initialize(model=net, config=ds_config(**config))[0])


def refuse_parallel(kind: str, client: bool = False) -> Refusal | None:
    """What only the engine knows, with the optimizer from the config or from the user."""
    config, kwargs = ds_config(stage=1) | {"train_micro_batch_size_per_gpu": 4}, {}
    if kind == "pipeline":
        config |= {"zero_optimization": {"stage": 2}}
        net = PipelineModule([nn.Linear(8, 8), nn.Linear(8, 8)], num_stages=1, loss_fn=nn.MSELoss())
    else:
        net = Mlp()
    if kind == "sequence":
        config |= {"sequence_parallel_size": 2, "data_parallel_size": 1}
    if client:
        kwargs["optimizer"] = MuonWithAuxAdam(net.parameters(), model=net, **config.pop("optimizer")["params"])
    params = [p for p in net.parameters() if p.requires_grad]
    return attempt(lambda: deepspeed.initialize(model=net, config=config, model_parameters=params, **kwargs)[0])


@pytest.mark.parametrize(
    ("kind", "client", "text"),
    [
        ("pipeline", False, "a pipeline at ZeRO stage 2 or 3"),
        ("pipeline", True, "a pipeline at ZeRO stage 2 or 3"),
        ("sequence", False, "sequence parallelism by data_parallel_size"),
    ],
)
def test_engines_that_are_refused(kind: str, client: bool, text: str) -> None:
    for name, found, _ in run(refuse_parallel, 2 if kind == "sequence" else 1, kind=kind, client=client):
        assert name == "UnsupportedError" and text in found


def disagree(about: str, stage: int, client: bool) -> Refusal | None:
    """What `deepspeed.initialize` raises where rank 1 differs."""
    net, odd, kwargs = Mlp(), dist.get_rank() == 1, {}
    params = PARAMS | ({"momentum": 0.8} if about == "optimizer.params" and odd else {})
    config = ds_config(stage=stage, optimizer={"type": "Muon", "params": params})
    if about == "the settings of parameter groups":
        kwargs["model_parameters"] = [{"params": list(net.parameters()), "momentum": 0.8 if odd else 0.9}]
    if about == "the routing" and odd:
        net.layers[0].weight.use_muon = False
    if client:
        given = kwargs.pop("model_parameters", net.parameters())
        kwargs["optimizer"] = MuonWithAuxAdam(given, model=net, **config.pop("optimizer")["params"])
    with pytest.MonkeyPatch.context() as patch:
        if about == "the deepspeed-muon version" and odd:
            patch.setattr("deepspeed.muon.zero.bind.__version__", "9.9")
        return attempt(lambda: make_engine(net, config, **kwargs))


@pytest.mark.sample(6)
@pytest.mark.parametrize(("stage", "client"), [(0, False), (2, True), (3, False), (3, True)])
@pytest.mark.parametrize(
    "about", ["optimizer.params", "the deepspeed-muon version", "the routing", "the settings of parameter groups"]
)
def test_ranks_that_disagree_are_named_on_every_rank(about: str, stage: int, client: bool) -> None:
    for kind, text, _ in run(disagree, 2, about=about, stage=stage, client=client):
        assert kind == "DisagreementError"
        assert text.startswith(f"{about} differs: rank 0 has ") and "ranks [1] have" in text


def initialize_without_us_on_rank_1() -> Refusal | None:
    """Rank 1 runs stock's Muon and is done, as nothing that follows the construction waits for rank 0."""
    if dist.get_rank() == 1:
        uninstall()
    return refuse_other(optimizer={"type": "Muon", "params": {"torch_adam": True}})


def test_a_rank_without_the_package_is_named() -> None:
    results = run(initialize_without_us_on_rank_1, 2, timeout=60, fresh=True, env={"DS_MUON_BIND_TIMEOUT": "3"})
    assert results[0][0] == "DisagreementError"
    assert results[0][1].startswith("ranks [1] did not bind deepspeed-muon")
    assert results[1] is None or results[1][0] != "DisagreementError"


# ---- why settings stay refused: with AdamW, DeepSpeed does not train them either where the tests run, on CPUs ------

ON_CPU, OWN_ADAM = "not been implemented on CPU backend", "DeepSpeedCPUAdam"
#: Case -> a pattern of DeepSpeed's error.
REASONS = {
    "qwZ": ON_CPU,
    "qgZ": ON_CPU,
    "super": "only supports NVIDIA CUDA GPUs",
    "ratio": f"Only Supports {OWN_ADAM}",
    "fp16": OWN_ADAM,
    "bf16": OWN_ADAM,
    "bf16 offload": OWN_ADAM,
    "mics": "mics_shard_size",
    "autocast": "No inf checks were recorded",
    "deepcompile": r"Error building extension 'dc'|dc\.so",
}
on_cpus = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU DeepSpeed may train these")


def train_with_adamw(**settings: Any) -> str | None:
    """DeepSpeed's error."""
    config = ds_config(**settings) | {"optimizer": ADAMW}
    try:
        engine = deepspeed.initialize(model=Mlp(), config=config)[0]
        if config.get("compile", {}).get("deepcompile"):
            engine.compile()
        train_engine(engine, 1)
    except Exception as error:
        return str(error)
    return None


@on_cpus
@pytest.mark.sample(3)
@pytest.mark.parametrize("name", REASONS)
def test_adamw_fails_too(name: str) -> None:
    settings = (CASES.get(name) or STOCK.get(name) or [HARMLESS[name]])[0]
    for error in run(train_with_adamw, 2, **settings):
        assert error is not None, "DeepSpeed has learned it: then Muon may"
        assert re.search(REASONS[name], error), error


def save_moe(folder: str) -> None:
    engine = deepspeed.initialize(model=spread_model(), config=ds_config() | {"optimizer": ADAMW})[0]
    engine.save_checkpoint(folder, tag="saved")


@on_cpus
def test_the_converter_does_not_know_moe_layers(tmp_path: Path) -> None:
    run(save_moe, 2, folder=str(tmp_path))
    with pytest.raises(AssertionError, match="universal_checkpoint_info state is missing"):
        convert(tmp_path)


# ---- what is neither refused nor changes what is trained ------------------------------------------------------


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


def test_keys_of_adamw_without_effect_change_nothing() -> None:
    """``max_grad_norm`` is one beside ``gradient_clipping``, and a number may be a string."""
    plain = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1}
    idle = {"fused": True, "foreach": True, "amsgrad": False, "torch_adam": True, "max_grad_norm": 1.0}
    idle |= {"eps": "1e-8", "bias_correction": True}
    expected, same, other = (
        run(losses, 2, stage=2, gradient_clipping=0.5, **muon(**plain | more))
        for more in ({}, idle, {"bias_correction": False})
    )
    assert same == expected != other
