# SPDX-License-Identifier: Apache-2.0
"""ds_muon init: the config it prints trains what AdamW keeps as AdamW did; each change has a reason."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed.muon.config.schema import parse

ADAMW = {"type": "AdamW", "params": {"lr": 2e-3, "weight_decay": 0.1}}


Command = Callable[..., Any]


@pytest.fixture
def init(tmp_path: Path, ds_muon: Command) -> Command:
    """Calls `ds_muon init --config` for a file with these sections, or with this text."""

    def call(*flags: Any, text: str = "", file: str = "ds.json", **config: Any) -> Any:
        (tmp_path / file).write_text(text or json.dumps(config))
        return ds_muon("init", "--config", tmp_path / file, *flags)

    return call


@pytest.fixture
def params(init: Command) -> Command:
    """Gives ``optimizer.params`` of what is printed for an optimizer of this type, with these settings."""
    return lambda kind, **settings: init(optimizer={"type": kind, "params": settings}).facts["optimizer"]["params"]


def test_the_config_comes_to_stdout_and_the_reasons_to_stderr(init: Command) -> None:
    config = {
        "bf16": {"enabled": "auto"},
        "optimizer": ADAMW,
        "zero_optimization": {"stage": 3},
        "own": {"key": "auto"},
    }
    found = init(**config)
    changed = {"type": "Muon", "params": ADAMW["params"] | {"betas": [0.9, 0.999], "eps": 1e-8}}
    assert found.facts == config | {"optimizer": changed}
    assert list(found.facts) == list(config), "keys stay in order"
    assert [line.split()[0] for line in found.err.splitlines() if line] == [
        *("optimizer.type", "optimizer.params.lr", "optimizer.params.betas", "optimizer.params.eps", "next:")
    ]
    facts = init("--json", **config).facts
    assert facts["config"] == found.facts
    assert {tuple(decision) for decision in facts["decisions"]} == {("key", "what", "why")}


@pytest.mark.parametrize("name", ["FusedAdam", "DeepSpeedCPUAdam", "ADAMW"])
def test_updates_get_the_size_of_adamws_whatever_its_class(name: str, params: Command) -> None:
    assert parse(params(name)).scale == parse(params(name, lr=1e-4, torch_adam=True)).scale == "match_rms_adamw"


def test_keys_without_effect_go(params: Command) -> None:
    kept = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.0}
    idle = {"bias_correction": True, "amsgrad": False, "set_grad_none": True, "fused": True, "adam_w_mode": False}
    assert params("AdamW", **kept, **idle) == kept
    assert params("Adam", **kept, adam_w_mode=False)["adam_w_mode"] is False


def test_auto_is_written_only_where_something_fills_it_in(init: Command) -> None:
    numbers = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}
    found = init(zero_optimization={"stage": 2})
    assert found.facts["optimizer"] == {"type": "Muon", "params": numbers}
    warmup = {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-5}}
    found = init(zero_optimization={"stage": 2}, scheduler=warmup)
    assert found.facts["optimizer"]["params"] == numbers | {"lr": 3e-5}
    found = init(zero_optimization={"stage": 2, "reduce_bucket_size": "auto"})
    # accelerate fills in no betas and no eps
    assert found.facts["optimizer"]["params"] == numbers | {"lr": "auto", "weight_decay": "auto"}


@pytest.mark.parametrize(
    ("clipping", "limit"),
    [({}, 0.5), ({"gradient_clipping": 1.0}, 1.0)],
)
def test_a_limit_of_the_norm_moves_to_its_key(clipping: dict, limit: float, init: Command) -> None:
    found = init(optimizer={"type": "AdamW", "params": {"lr": 1e-3, "max_grad_norm": 0.5}}, **clipping)
    assert found.facts["gradient_clipping"] == limit
    assert "max_grad_norm" not in found.out


# ---- files that are no JSON, and no ds_config -----------------------------------------------------------


def test_out_writes_a_new_file(init: Command, tmp_path: Path) -> None:
    out = tmp_path / "new.json"
    found = init("--out", out, optimizer=ADAMW)
    assert found.out == f"wrote {out}\n" and json.loads(out.read_text())["optimizer"]["type"] == "Muon"
    found = init("--out", tmp_path / "no" / "folder.json", optimizer=ADAMW)
    assert found.status == 2 and "folder.json: No such file or directory" in found.err


def test_neither_file_is_written_over(init: Command, tmp_path: Path) -> None:
    """Of accelerate's YAML two come, and one is not written without the other."""
    out, text = tmp_path / "new.json", "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3}\n"
    assert init("--out", out, text=text, file="a.yaml").status == 0
    out.unlink()
    init("--out", out, text=text, file="a.yaml").must_refuse("init", "new_accelerate.yaml: File exists")
    assert not out.exists()


YAML = """
# a comment
train_batch_size: 48
optimizer: {type: AdamW, params: {lr: 1e-4, betas: [0.9, 0.95], eps: 1e-8}}
zero_optimization:
  stage: 2
  reduce_bucket_size: 5e8
"""
HJSON = """
// as DeepSpeed reads it
train_batch_size: 48
optimizer: {
  type: AdamW
  params: { lr: 1e-4, betas: [0.9, 0.95], eps: 1e-8 } # no commas
}
zero_optimization: { stage: 2, reduce_bucket_size: 5e8 }
"""
TEXTS = {
    "YAML": YAML,
    "inside": "trainer:\n  deepspeed:\n" + YAML.replace("\n", "\n    "),
    "Hjson": HJSON,
    "braces": "/* braces */ {" + HJSON + "}",
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_yaml_and_hjson_that_hold_a_ds_config(text: str, init: Command) -> None:
    found = init(text=text, file="ds.json")
    assert "comments  " in found.err and "not kept" in found.err
    assert found.facts == {
        "train_batch_size": 48,
        "optimizer": {"type": "Muon", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8}},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8},
    }


FOREIGN = {
    "empty": ("{}", "expected keys such as optimizer"),
    "two": ('{"a": {"zero_optimization": {}}, "b": {"zero_optimization": {}}}', "a, b"),
    "names": ("deepspeed: configs/zero2.json\nbf16: true\n", "configs/zero2.json"),
    "arguments": ("output_dir: out\nlearning_rate: 1e-4\ngradient_accumulation_steps: 2\n", "training arguments"),
    "fsdp": ("distributed_type: FSDP\nfsdp_config: {}\n", "distributed_type FSDP"),
    "points": (
        "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: no.json\n",
        "deepspeed_config.deepspeed_config_file",
    ),
    "list": ("- a\n- b\n", "expected a JSON object, got list"),
    "twice": ("train_batch_size: 1\ntrain_batch_size: 2\n", "twice"),
    "broken": ('{"optimizer": ', "cannot be read"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_file_that_is_no_ds_config_is_refused(name: str, init: Command, ds_muon: Command, tmp_path: Path) -> None:
    text, words = FOREIGN[name]
    found = init(text=text, file="some.yaml")
    found.must_refuse("init", words, lines=None)
    assert found.err.startswith(f"ds_muon init: {tmp_path}/some.yaml: ")
    found = ds_muon("plan", "--config", tmp_path / "some.yaml", "--model", "x", "--world-size", 1)
    found.must_refuse("plan", "", lines=None)


def test_yaml_without_its_package(init: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    init(text=YAML, file="ds.yaml").must_refuse("init", "pip install pyyaml")


MUON, RATIO = {"type": "Muon"}, {"offload_optimizer": {"device": "cpu", "ratio": 0.5}, "stage": 3}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"optimizer": {"type": "Moun"}}, "optimizer.type: got 'Moun'"),
    ({"optimizer": MUON}, "optimizer.type: got 'Muon'"),
    ({"optimizer": MUON | {"params": {"lr": -1}}}, "optimizer.params.lr: got -1"),
    ({"optimizer": {"type": "Lamb"}}, "optimizer.type: got 'Lamb'"),
    ({"optimizer": "AdamW"}, "optimizer.type: got None"),
    ({"optimizer": {"type": "Adam", "params": [1]}}, "optimizer.params"),
    ({"optimizer": {"type": "Adam", "params": {"amsgrad": True}}}, "params.amsgrad: got True"),
    ({"optimizer": {"type": "Adam", "params": {"betaas": [0, 0]}}}, "betaas"),
    ({"optimizer": ADAMW, "zero_optimization": RATIO}, "offload_optimizer.ratio"),
]


@pytest.mark.parametrize(("config", "words"), REFUSED, ids=str)
def test_what_cannot_be_kept_is_refused(config: dict[str, Any], words: str, init: Command) -> None:
    init(**config).must_refuse("init", words, lines=None)


# ---- training -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [{}, {"lr": 3e-3, "betas": [0.8, 0.9]}, {"eps": 1e-2, "weight_decay": 0.3}])
def test_the_adamw_half_has_adamws_settings(given: dict[str, Any], params: Command) -> None:
    """Those of torch's AdamW, defaults included; test_changed_model.py trains with such settings."""
    ours = parse(params("AdamW", **given, torch_adam=True)).adam_group()
    theirs = torch.optim.AdamW([torch.zeros(1)], **given).defaults
    settings = {key: theirs[key] for key in ("lr", "eps", "weight_decay")}
    assert ours == settings | {"betas": pytest.approx(theirs["betas"]), "bias_correction": True, "fused": True}
