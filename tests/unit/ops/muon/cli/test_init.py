# SPDX-License-Identifier: Apache-2.0
"""ds_muon init: the config it prints trains what AdamW keeps as AdamW did; each change has a reason."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed.muon.cli import main
from deepspeed.muon.config.schema import parse
from helpers.distributed import run
from helpers.models import MODELS, train_engine
from helpers.training import ds_config, fp32_weights

ADAMW = {"type": "AdamW", "params": {"lr": 2e-3, "weight_decay": 0.1}}


def init(capsys: pytest.CaptureFixture, folder: Path, *flags: str, **config: Any) -> tuple[int, str, str]:
    """Exit status, stdout and stderr for a config in a file."""
    (folder / "ds.json").write_text(json.dumps(config))
    status = main.main(["init", "--config", str(folder / "ds.json"), *flags])
    return status, *capsys.readouterr()


def params(capsys: pytest.CaptureFixture, folder: Path, **optimizer: Any) -> dict[str, Any]:
    """``optimizer.params`` of what is printed."""
    status, out, err = init(capsys, folder, optimizer=optimizer)
    assert status == 0, err
    return json.loads(out)["optimizer"]["params"]


def test_the_config_comes_to_stdout_and_the_reasons_to_stderr(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    config = {
        "bf16": {"enabled": "auto"},
        "optimizer": ADAMW,
        "zero_optimization": {"stage": 3},
        "own": {"key": "auto"},
    }
    status, out, err = init(capsys, tmp_path, **config)
    changed = {"type": "Muon", "params": ADAMW["params"] | {"betas": [0.9, 0.999], "eps": 1e-8}}
    assert status == 0 and json.loads(out) == config | {"optimizer": changed}
    assert list(json.loads(out)) == list(config), "keys stay in order"
    assert [line.split()[0] for line in err.splitlines()] == [
        *("optimizer.type", "optimizer.params.lr", "optimizer.params.betas", "optimizer.params.eps")
    ]
    assert re.search(r"params\.lr +kept +the rate of AdamW, a safe start; then try 3 and 10 times\n", err)
    facts = json.loads(init(capsys, tmp_path, "--json", **config)[1])
    assert facts["config"] == json.loads(out)
    assert {tuple(decision) for decision in facts["decisions"]} == {("key", "what", "why")}


def test_updates_get_the_size_of_adamws(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    for section in ({"lr": 1e-4}, {}, {"lr": 1e-4, "torch_adam": True}):
        assert parse(params(capsys, tmp_path, type="AdamW", params=section)).scale == "match_rms_adamw"


def test_keys_without_effect_go(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    given = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.0}
    idle = {"bias_correction": True, "amsgrad": False, "set_grad_none": True, "fused": True, "adam_w_mode": False}
    assert params(capsys, tmp_path, type="AdamW", params=given | idle) == given
    assert params(capsys, tmp_path, type="Adam", params=given | {"adam_w_mode": False})["adam_w_mode"] is False


def test_without_an_optimizer_the_trainer_fills_in(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    status, out, err = init(capsys, tmp_path, zero_optimization={"stage": 2})
    assert status == 0 and "Trainer" in err
    assert json.loads(out)["optimizer"] == {
        "type": "Muon",
        "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto"),
    }


MUON, ZERO = {"type": "Muon"}, {"offload_optimizer": {"device": "cpu", "ratio": 0.5}, "stage": 3}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "misspelt": ({"optimizer": {"type": "Moun"}}, "did you mean muon?"),
    "muon": ({"optimizer": MUON}, "optimizer.type: got 'Muon', which needs no change"),
    "lamb": ({"optimizer": {"type": "Lamb"}}, "settings of other optimizers say nothing about Muon"),
    "typo": ({"optimizer": {"type": "AdamV"}}, 'expected "AdamW" or "Adam"; did you mean adam'),
    "text": ({"optimizer": "AdamW"}, "optimizer.type: got None, expected"),
    "list": ({"optimizer": {"type": "Adam", "params": [1]}}, "optimizer.params: expected an object, got [1]"),
    "amsgrad": ({"optimizer": {"type": "Adam", "params": {"amsgrad": True}}}, "params.amsgrad: got True, which the"),
    "key": ({"optimizer": {"type": "Adam", "params": {"betaas": [0, 0]}}}, "unknown key, did you mean betas?"),
    "value": ({"optimizer": {"type": "Adam", "params": {"lr": -1}}}, "optimizer.params.lr: got -1"),
    "norm": ({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1}}}, "key gradient_clipping instead"),
    "zero": ({"optimizer": ADAMW, "zero_optimization": ZERO}, "offload_optimizer.ratio: a part on the accelerator"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_kept_is_refused(name: str, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    config, words = REFUSED[name]
    status, out, err = init(capsys, tmp_path, **config)
    assert (status, out) == (2, "") and words in err and err.startswith("ds_muon init: ")


# ---- training -------------------------------------------------------------------------------------------


def train_as_configured(config: dict[str, Any]) -> dict[str, Tensor]:
    """Weights after four steps with whatever optimizer the config names."""
    import deepspeed

    net = MODELS["mlp"]()
    engine = deepspeed.initialize(model=net, config=ds_config(**config), model_parameters=net.parameters())[0]
    train_engine(engine, 4)
    weights = fp32_weights(engine)
    engine.destroy()
    return weights


@pytest.mark.parametrize("given", [{}, {"lr": 3e-3, "betas": [0.8, 0.9]}, {"eps": 1e-2, "weight_decay": 0.3}])
def test_the_adamw_half_goes_on_as_adamw(given: dict[str, Any], capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    """DeepSpeed's own AdamW with the config as it was; ours with everything left to AdamW. Defaults included."""
    adamw = {"type": "AdamW", "params": given | {"torch_adam": True}}
    muon = params(capsys, tmp_path, **adamw) | {"muon_exclude": ".*"}
    before = run(train_as_configured, 2, config={"stage": 2, "optimizer": adamw})[0]
    after = run(train_as_configured, 2, config={"stage": 2, "optimizer": {"type": "Muon", "params": muon}})[0]
    initial = dict(MODELS["mlp"]().named_parameters())
    for name in before:
        assert not torch.equal(before[name], initial[name])
        torch.testing.assert_close(after[name], before[name], rtol=1e-6, atol=1e-8)


def test_numbers_keep_their_spelling(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    text = """{
  "train_batch_size": 1,
  "gradient_clipping": 1.0,
  "zero_optimization": {"stage": 2, "reduce_bucket_size": 2e8, "allgather_bucket_size": 5E+8},
  "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.00010, "warmup_num_steps": 10}},
  "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.90, 0.999], "eps": 1.0e-8}}
}"""
    (tmp_path / "ds.json").write_text(text)
    assert main.main(["init", "--config", str(tmp_path / "ds.json")]) == 0
    out = capsys.readouterr().out
    number = r"(?<![\w.\"])-?\d[\w.+-]*"
    assert re.findall(number, out) == re.findall(number, text)
