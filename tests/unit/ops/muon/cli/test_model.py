# SPDX-License-Identifier: Apache-2.0
"""Models built without data, from functions and from Hugging Face configs."""

import json
from pathlib import Path

import pytest
from torch import nn

from deepspeed.muon.cli.model import build
from deepspeed.muon.errors import ModelError
from helpers.models import TinyGpt


def test_a_model_is_built_without_data_and_init_works_again() -> None:
    model = build("helpers.models:TinyGpt")
    assert {param.device.type for param in model.parameters()} == {"meta"}
    assert TinyGpt().tokens.weight.device.type == "cpu"
    assert nn.Linear(4, 4).weight.abs().sum() > 0


def test_hugging_face_configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    tiny = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    (tmp_path / "hf").mkdir()
    for path in (tmp_path / "hf" / "config.json", tmp_path / "named.json"):
        path.write_text(json.dumps({"model_type": "llama", "vocab_size": 99, **tiny}))
    models = [build(name) for name in ("hf", "hf/config.json", "named.json")]
    assert {type(model).__name__ for model in models} == {"LlamaForCausalLM"}
    (tmp_path / "vit.json").write_text(json.dumps({"model_type": "vit", **tiny}))
    assert type(build("vit.json")).__name__ == "ViTModel"
    assert sum(param.numel() for param in build("llama").parameters()) > 6e9, "the default configuration"


def test_init_works_again_after_a_model_that_raises() -> None:
    with pytest.raises(ModelError, match="the function raised TypeError"):
        build("helpers.models:Block")
    assert nn.Linear(4, 4).weight.abs().sum() > 0
