# SPDX-License-Identifier: Apache-2.0
"""YAML as public repositories have it: with what `init` makes of it, accelerate starts the same run with Muon."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate.commands.launch as launcher
import pytest
from accelerate.utils import DeepSpeedPlugin, patch_environment
from accelerate.utils.launch import prepare_deepspeed_cmd_env

from helpers.accelerate_yamls import DS_CONFIG, REFUSED, SHAPES
from helpers.distributed import run
from helpers.models import MODELS, train_engine
from helpers.public_configs import runnable
from helpers.training import fp32_weights

#: Variables by which the launcher passes what is in the ds_config now.
MOVED = ("ZERO_STAGE", "OFFLOAD", "ZERO3_SAVE", "GRADIENT", "CONFIG", "MIXED_PRECISION")
OWN = "a ds_config of one's own tool"


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, dict[str, str]]]:
    """Gives the command and the variables by which `accelerate launch` would start a script, without starting it."""

    def call(*flags: Any) -> tuple[Any, dict[str, str]]:
        args = launcher.launch_command_parser().parse_args([*map(str, flags), "script.py"])
        found: list[Any] = []
        monkeypatch.setattr(launcher, "deepspeed_launcher", found.append)
        launcher.launch_command(args)
        command, variables = prepare_deepspeed_cmd_env(*found)
        return command, {key: value for key, value in variables.items() if key.startswith(("ACCELERATE", "FP8"))}

    monkeypatch.setattr("accelerate.utils.launch.is_fp8_available", lambda: True)
    return call


def ds_config(variables: dict[str, str]) -> dict[str, Any]:
    """What accelerate's plugin makes of the launcher's variables, without an optimizer, and without offload to none."""
    with patch_environment(**variables):
        plugin = DeepSpeedPlugin()
        plugin.set_mixed_precision(variables["ACCELERATE_MIXED_PRECISION"])
    zero = plugin.deepspeed_config["zero_optimization"]
    for part in ("offload_optimizer", "offload_param"):
        offload = {key: value for key, value in zero.pop(part, {}).items() if value not in (None, "none")}
        zero |= {part: offload} if offload else {}
    zero.setdefault("stage3_gather_16bit_weights_on_model_save", False)
    return {key: value for key, value in plugin.deepspeed_config.items() if key != "optimizer"}


@pytest.mark.parametrize("name", [name for name in SHAPES if name != OWN])
def test_accelerate_starts_the_same_run(
    name: str, launched: Callable, ds_muon: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text(DS_CONFIG)
    Path("old.yaml").write_text(SHAPES[name])
    found = ds_muon("init", "--config", "old.yaml", "--out", "new.json")
    assert found.status == 0, found.err
    *_, flags = found.err.partition("accelerate launch ")[2].partition(" SCRIPT")[0].split("new_accelerate.yaml")
    old_flags = []
    if flags and "deepspeed_config_file" in SHAPES[name]:  # accelerate refuses the precision there, but not as a flag
        Path("old.yaml").write_text(SHAPES[name].replace("mixed_precision: bf16", ""))
        old_flags = flags.split()
    command, old = launched("--config_file", "old.yaml", *old_flags)
    new_command, new = launched("--config_file", "new_accelerate.yaml", *flags.split())
    assert new_command == command
    assert ds_config(new) == ds_config(old)
    rest = [{key: value for key, value in one.items() if not any(part in key for part in MOVED)} for one in (old, new)]
    assert rest[0] == rest[1]


@pytest.mark.parametrize(("text", "words"), REFUSED)
def test_what_accelerate_would_not_start_with_deepspeed_is_refused_by_name(
    text: str, words: str, ds_muon: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text(DS_CONFIG)
    Path("some.yaml").write_text(text)
    ds_muon("init", "--config", "some.yaml").must_refuse("init", words)


def train(configs: list[dict[str, Any]]) -> list[bool]:
    """Whether the weights have moved after three steps with each config, and are finite."""
    import deepspeed

    found = []
    for config in configs:
        net = MODELS["mlp"]()
        engine = deepspeed.initialize(model=net, config=config, model_parameters=net.parameters())[0]
        before = fp32_weights(engine)
        train_engine(engine, 3)
        found.append(
            all(after.isfinite().all() and not after.equal(before[n]) for n, after in fp32_weights(engine).items())
        )
        engine.destroy()
    return found


@pytest.mark.full
def test_each_shape_trains(ds_muon: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text(DS_CONFIG)
    configs = []
    for text in SHAPES.values():
        Path("old.yaml").write_text(text)
        config = runnable(ds_muon("init", "--config", "old.yaml").facts, 1, str(tmp_path), is_bf16=True)
        configs += [] if config in configs else [config]
    assert run(train, 1, configs=configs)[0] == [True] * len(configs)
