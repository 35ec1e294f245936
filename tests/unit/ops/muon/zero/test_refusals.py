# SPDX-License-Identifier: Apache-2.0
"""What is refused, in which words, and that nothing has been built by then: settings, engines, ranks at odds."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from deepspeed.module_inject import layers
from deepspeed.pipe import PipelineModule
from deepspeed.runtime import config as stock_config
from torch import nn

import deepspeed
from deepspeed.muon import MuonWithAuxAdam, UnsupportedError, uninstall
from deepspeed.muon.config.schema import parse
from deepspeed.muon.zero.refusals import RULES, refuse_unsupported
from helpers.distributed import run
from helpers.logs import logged
from helpers.models import Mlp, train_engine
from helpers.refusals import CPU, NVME, Refusal, attempt
from helpers.training import PARAMS, ds_config, make_engine


def refuse_config(**config: Any) -> Refusal | None:
    """What an MLP under this config comes to."""
    mode = layers.DEEPSPEED_AUTOTP_MODE
    try:
        return attempt(lambda: make_engine(Mlp(), ds_config(**config)))
    finally:
        layers.DEEPSPEED_AUTOTP_MODE = mode


def offload(**settings: Any) -> dict[str, Any]:
    return {"offload_optimizer": settings}


BF16 = {"enabled": True, "bf16_master_weights_and_grads": True}
STATES = BF16 | {"bf16_optimizer_states": True}
FALSE, STAGE_3 = "set it to false", "set zero_optimization.stage to 3"
#: settings, key that the message names, what it says to change
CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "nvme": ({"zero": offload(**NVME)}, "zero_optimization.offload_optimizer.device", 'use "cpu"'),
    "nvme params": ({"zero": {"offload_param": NVME}}, "zero_optimization.offload_param.device", STAGE_3),
    "nvme path": (
        {"stage": 3, "zero": offload(device="nvme")},
        "zero_optimization.offload_optimizer.nvme_path",
        "write a folder",
    ),
    "nvme params path": (
        {"stage": 3, "zero": {"offload_param": {"device": "nvme"}}},
        "zero_optimization.offload_param.nvme_path",
        "write a folder",
    ),
    "qwZ": ({"stage": 3, "zero": {"zero_quantized_weights": True}}, "zero_optimization.zero_quantized_weights", FALSE),
    "qgZ": ({"stage": 3, "zero": {"zero_quantized_gradients": True}}, "zero_optimization.zero_quantized_grad", FALSE),
    "ratio": ({"stage": 3, "zero": offload(**CPU, ratio=0.5)}, "offload_optimizer.ratio", "set it to 1.0"),
    "ratio 0": ({"stage": 3, "zero": offload(**CPU, ratio=0.0)}, "offload_optimizer.ratio", "remove the key"),
    "super": ({"stage": 3, "zero": offload(**CPU, super_offload=True)}, "offload_optimizer.super_offload", FALSE),
    "zenflow": ({"zero": {"zenflow": {}}}, "zero_optimization.zenflow", "remove the section"),
    "fp16": ({"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}, "fp16.fp16_master_weights", FALSE),
    "bf16": ({"bf16": BF16}, "bf16.bf16_master_weights_and_grads", "set bf16.bf16_optimizer_states to true"),
    "bf16 offload": ({"bf16": STATES, "offload": True}, "bf16.bf16_master_weights_and_grads", "remove offload_opt"),
    "bf16 gradients": (
        {"stage": 1, "bf16": STATES, "data_types": {"grad_accum_dtype": "fp32"}},
        "data_types.grad_accum_dtype",
        "remove one of them",
    ),
    "autocast": (
        {"stage": 0, "dtype": "bf16", "torch_autocast": {"enabled": True, "dtype": "float16"}},
        "torch_autocast.dtype",
        "use bfloat16",
    ),
}
#: settings that stock refuses by itself, with words of its message; it had MiCS before 0.19.7
STOCK: dict[str, tuple[dict[str, Any], str]] = {
    "ratio": ({"zero": offload(**CPU, ratio=0.5)}, "only supported for ZeRO Stage 3"),
    "norm": ({"stage": 3, "zero": {"compute_grad_norm": False}}, "compute_grad_norm"),
    "sum": ({"stage": 3, "gradient_allreduce_op": "sum"}, "not supported with ZeRO stage 3"),
    "fp16": ({"stage": 0, **CASES["fp16"][0]}, "only supported with ZeRO"),
    "mics": ({"stage": 3, "zero": {"mics_shard_size": 1}}, "mics_shard_size"),
}


@pytest.mark.sample(7)
@pytest.mark.parametrize("name", CASES)
def test_a_config_is_refused_before_the_engine_exists(name: str) -> None:
    settings, key, advice = CASES[name]
    kind, text, entered = run(refuse_config, 1, **settings)[0]
    assert (kind, entered) == ("UnsupportedError", 0), text
    assert key in text and advice in text
    assert text.count("\n") == 1, "one problem, one line"


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
    named = [key for _, key, _ in CASES.values()] + ["mics_shard_size"]
    assert [rule for rule, _, _ in RULES if not any(key in rule for key in named)] == []
    hits = run(rules_that_apply, 1)[0]
    assert hits.pop("plain") == []
    for name, found in hits.items():
        assert len(found) == 1 and CASES[name][1] in found[0], name


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


def test_several_problems_are_all_listed() -> None:
    zero = {"zenflow": {}} | offload(**NVME)
    masters = {"enabled": True, "fp16_master_weights_and_grads": True}
    kind, text, entered = run(refuse_config, 1, zero=zero, fp16=masters)[0]
    assert (kind, entered) == ("UnsupportedError", 0)
    for key in ("zenflow", "offload_optimizer.device", "fp16.fp16_master_weights_and_grads"):
        assert key in text
    assert text.count("\n") == 3


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
    filled = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
    assert run(read_early, 1, params=filled) == [None]
    assert "muon_lr: got 'auto'" in run(read_early, 1, params={"muon_lr": "auto"})[0]
    kind, text, entered = run(refuse_config, 1, optimizer={"type": "Muon", "params": filled})[0]
    assert (kind, entered, text.count("got 'auto'")) == ("MuonConfigError", 0, 4)


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


@pytest.mark.parametrize("client", [False, True])
def test_engines_that_are_refused(client: bool) -> None:
    name, text, _ = run(refuse_parallel, 1, kind="pipeline", client=client)[0]
    assert name == "UnsupportedError" and "a pipeline at ZeRO stage 2 or 3" in text


def test_parallelism_over_ranks_is_refused() -> None:
    for name, text, _ in run(refuse_parallel, 2, kind="sequence"):
        assert name == "UnsupportedError" and "sequence parallelism by data_parallel_size" in text


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
