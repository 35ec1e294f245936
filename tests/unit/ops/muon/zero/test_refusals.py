# SPDX-License-Identifier: Apache-2.0
"""What is refused, in which words, and that nothing has been built by then; why; and what trains as without it."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.muon import MuonWithAuxAdam, UnsupportedError, uninstall
from deepspeed.muon.config.schema import parse
from deepspeed.muon.zero.refusals import RULES, refuse_unsupported
from helpers import wrong_configs
from helpers.distributed import run, run_each
from helpers.experts import spread_model
from helpers.logs import logged
from helpers.models import Mlp, train_engine
from helpers.paths import DOCS
from helpers.refusals import CPU, NVME, Refusal, attempt
from helpers.training import PARAMS, ds_config, make_engine
from helpers.universal import convert
from helpers.wrong_configs import BF16_MASTERS, BF16_STATES, FP16_AUTOCAST, FP16_MASTERS, zero

ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}


def test_every_rank_refuses_a_wrong_config_in_our_words_before_anything_is_allocated() -> None:
    """What the config says by itself, before the engine begins."""
    results, other = run(wrong_configs.attempt_all, 2)
    assert other == results
    assert len({title for title, _, _ in results}) == len(results)
    for title, message, reached in results:
        assert re.match(r"(MuonConfigError|UnsupportedError|ValueError): ", message), (title, message)
        keys = re.findall(r'"(\w[\w-]*)":', title)
        assert not keys or any(key in message for key in keys), (title, message)
        assert reached == [] or (reached == ["__init__"] and "UnsupportedError" not in message), title
    page = (DOCS / "reference" / "wrong-configurations.md").read_text()
    assert wrong_configs.table(results) in page, "run python docs/generate.py"
    assert [key for key, _, _ in RULES if f"<br>  {key}: " not in page] == ["zero_optimization.mics_shard_size"]


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
    "deepcompile": zero(1, elastic_checkpoint=True) | {"compile": {"deepcompile": True}},
    "universal": zero(0, offload_optimizer=NVME) | {"checkpoint": {"load_universal": True}},
    "quantized": zero(2, zero_quantized_weights=True, zero_quantized_gradients=True),
    "super": zero(2, offload_optimizer=CPU | {"super_offload": True}),
    "ratio": zero(3, offload_optimizer={"device": "none", "ratio": 0.5}),
}


def train_harmlessly(name: str, folder: str) -> tuple[dict[str, str], list[float], list[str]]:
    """What `compile`, a save and a load raise after a step, the learning rates, and the warnings of `initialize`."""
    net = Mlp()
    with logged() as lines:
        engine = make_engine(net, ds_config() | HARMLESS[name])
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


def test_a_setting_is_refused_only_once_it_has_an_effect(tmp_path: Path) -> None:
    late = {
        "deepcompile": {"compile": "UnsupportedError: compile.deepcompile: DeepCompile runs only on GPUs"},
        "universal": {"load": "UnsupportedError: this engine cannot load universal checkpoints"},
    }
    cases = [{"name": name, "folder": str(tmp_path / name)} for name in HARMLESS]
    for name, results in zip(HARMLESS, run_each(train_harmlessly, 2, cases), strict=True):
        for rank, (raised, rates, warnings) in enumerate(results):
            assert raised.keys() == late.get(name, {}).keys(), raised
            assert all(raised[call].startswith(text) for call, text in late.get(name, {}).items())
            assert len(rates) == 1, "one group of the user's, one rate"
            is_told = name == "deepcompile" and rank == 0
            assert ["elastic_checkpoint" in line for line in warnings] == [True] * is_told


def read_early(params: dict[str, Any], section: dict[str, Any] | None = None) -> Refusal | None:
    """What a config says that is read before the model is there and Hugging Face's integration has filled it in."""
    config = ds_config(stage=3, optimizer={"type": "Muon", "params": params}, zero=section)

    def read() -> Any:
        with deepspeed.zero.Init(config_dict_or_path=config):
            return SimpleNamespace(destroy=list)

    return attempt(read)


def test_zero_init_refuses_what_nobody_fills_in_later() -> None:
    auto = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    wrong: list[dict[str, Any]] = [{"params": auto | {"muon_lr": "auto"}}, {"params": {"ns_steps": 0}}]
    wrong += [{"params": {}, "section": {"zenflow": {}}}]
    (accepted,), *refused = run_each(read_early, 1, [{"params": auto}, *wrong])
    assert accepted is None
    for ((_, text, _),), words in zip(refused, ("muon_lr: got 'auto'", "ns_steps", "zenflow"), strict=True):
        assert words in text


def refuse_sequence(client: bool) -> Refusal | None:
    """What only the engine knows, with the optimizer from the config or from the user."""
    net = Mlp()
    config = ds_config(stage=1, sequence_parallel_size=2, data_parallel_size=1) | {"train_micro_batch_size_per_gpu": 4}
    given: dict[str, Any] = {"model_parameters": net.parameters(), "config": config}
    if client:
        given["optimizer"] = MuonWithAuxAdam(net.parameters(), model=net, **config.pop("optimizer")["params"])
    return attempt(lambda: deepspeed.initialize(model=net, **given)[0])


def test_engines_that_are_refused() -> None:
    for results in run_each(refuse_sequence, 2, [{"client": False}, {"client": True}]):
        for name, found, _ in results:
            assert name == "UnsupportedError" and "sequence parallelism by mesh_param, or by data_parallel_s" in found


def disagree(about: str, stage: int, client: bool) -> Refusal | None:
    """What `deepspeed.initialize` raises where rank 1 differs."""
    net, odd, kwargs = Mlp(), dist.get_rank() == 1, {}
    params = PARAMS | ({"momentum": 0.8} if about == "optimizer.params" and odd else {})
    config = ds_config(stage=stage, optimizer={"type": "Muon", "params": params})
    if about == "the settings of parameter groups":
        kwargs["model_parameters"] = [{"params": list(net.parameters()), "momentum": 0.8 if odd else 0.9}]
    if about == "the order of parameters":
        kwargs["model_parameters"] = [*net.parameters()][:: -1 if odd else 1]
    if about == "the routing" and odd:
        net.layers[0].weight.use_muon = False
    if client:
        given = kwargs.pop("model_parameters", net.parameters())
        kwargs["optimizer"] = MuonWithAuxAdam(given, model=net, **config.pop("optimizer")["params"])
    with pytest.MonkeyPatch.context() as patch:
        if about == "the deepspeed-muon version" and odd:
            patch.setattr("deepspeed.muon.zero.bind.__version__", "9.9")
        return attempt(lambda: make_engine(net, config, **kwargs))


DISAGREEMENTS = {
    "optimizer.params": "ranks [1] have other optimizer.params than rank 0",
    "the deepspeed-muon version": "the deepspeed-muon version differs: rank 0 has 0",
    "the routing": "ranks [1] do not send the same parameters to Muon as rank 0",
    "the settings of parameter groups": "the parameter groups of ranks [1] have other settings",
    "the order of parameters": "ranks [1] pass the parameters in another order than rank 0; pass a list, because a set",
}


@pytest.mark.sample(2)
@pytest.mark.parametrize(("stage", "client"), [(0, False), (3, True), (2, True), (3, False)])
def test_ranks_that_disagree_are_named_on_every_rank(stage: int, client: bool) -> None:
    cases = [{"about": about, "stage": stage, "client": client} for about in DISAGREEMENTS]
    for expected, results in zip(DISAGREEMENTS.values(), run_each(disagree, 2, cases), strict=True):
        for kind, text, _ in results:
            assert kind == "DisagreementError" and text.startswith(expected)


def initialize_without_us_on_rank_1() -> Refusal | None:
    """Rank 1 runs stock's Muon and is done, as nothing that follows the construction waits for rank 0."""
    if dist.get_rank() == 1:
        uninstall()
    config = ds_config(optimizer={"type": "Muon", "params": {"torch_adam": True}})
    return attempt(lambda: deepspeed.initialize(model=Mlp(), config=config)[0])


def test_a_rank_without_the_package_is_named() -> None:
    results = run(initialize_without_us_on_rank_1, 2, timeout=60, fresh=True, env={"DS_MUON_BIND_TIMEOUT": "1"})
    assert results[0][0] == "DisagreementError"
    assert results[0][1].startswith("ranks [1] did not answer")
    assert results[1] is None or results[1][0] != "DisagreementError"


# ---- why settings stay refused: with AdamW, DeepSpeed does not train them either where the tests run, on CPUs ------

ON_CPU, OWN_ADAM = "not been implemented on CPU backend", "DeepSpeedCPUAdam"
#: Settings, and a pattern of DeepSpeed's error.
REASONS: dict[str, tuple[dict[str, Any], str]] = {
    "qwZ": (zero(3, zero_quantized_weights=True), ON_CPU),
    "qgZ": (zero(3, zero_quantized_gradients=True), ON_CPU),
    "super": (zero(3, offload_optimizer=CPU | {"super_offload": True}), "only supports NVIDIA CUDA GPUs"),
    "ratio": (zero(3, offload_optimizer=CPU | {"ratio": 0.5}), f"Only Supports {OWN_ADAM}"),
    "fp16": (FP16_MASTERS, OWN_ADAM),
    "bf16": (BF16_MASTERS, OWN_ADAM),
    "bf16 offload": (BF16_STATES | zero(2, offload_optimizer=CPU), OWN_ADAM),
    "mics": (zero(3, mics_shard_size=1), "mics_shard_size"),
    "autocast": ({"bf16": {"enabled": True}} | zero(0) | FP16_AUTOCAST, "No inf checks were recorded"),
    "deepcompile": (HARMLESS["deepcompile"], r"Error building extension 'dc'|dc\.so"),
}
on_cpus = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU DeepSpeed may train these")


def train_with_adamw(settings: dict[str, Any]) -> str | None:
    """DeepSpeed's error."""
    config = ds_config(optimizer=ADAMW) | settings
    try:
        engine = deepspeed.initialize(model=Mlp(), config=config)[0]
        if config.get("compile", {}).get("deepcompile"):
            engine.compile()
        train_engine(engine, 1)
    except Exception as error:
        return str(error)
    return None


@on_cpus
@pytest.mark.full
@pytest.mark.parametrize("name", REASONS)
def test_adamw_fails_too(name: str) -> None:
    settings, pattern = REASONS[name]
    for error in run(train_with_adamw, 2, settings=settings):
        assert error is not None, "DeepSpeed has learned it: then Muon may"
        assert re.search(pattern, error), error


def save_moe(folder: str) -> None:
    engine = deepspeed.initialize(model=spread_model(), config=ds_config() | {"optimizer": ADAMW})[0]
    engine.save_checkpoint(folder, tag="saved")


@on_cpus
@pytest.mark.full
def test_the_converter_does_not_know_moe_layers(tmp_path: Path) -> None:
    run(save_moe, 2, folder=str(tmp_path))
    with pytest.raises(AssertionError, match="universal_checkpoint_info state is missing"):
        convert(tmp_path)
