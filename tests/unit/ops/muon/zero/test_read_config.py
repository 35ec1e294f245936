# SPDX-License-Identifier: Apache-2.0
"""What ``ds_muon plan`` and ``init`` say about sections of a ds_config besides the optimizer's."""

import logging
from typing import Any

import pytest

from deepspeed.muon.config.messages import nearest
from deepspeed.muon.errors import SettingsError
from deepspeed.muon.zero.read_config import Settings, read_settings
from helpers.logs import logged


def read(section: dict[str, Any], params: dict[str, Any] | None = None) -> Settings:
    optimizer = {"type": "Muon", "params": {"lr": 1e-3} | (params or {})}
    return read_settings("ds_config.json", {"optimizer": optimizer} | section, world_size=1)


OBJECT = 'expected an object, such as {"enabled": true}'
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"bf16": True}, f"bf16: got True; {OBJECT}"),
    ({"fp16": "auto_cast"}, f"fp16: got 'auto_cast'; {OBJECT}"),
    ({"aio": True}, f"aio: got True; {OBJECT}"),
    ({"activation_checkpointing": True}, f"activation_checkpointing: got True; {OBJECT}"),
    ({"zero_optimization": 2}, 'zero_optimization: got 2; expected an object, such as {"stage": 2}'),
    ({"scheduler": "WarmupLR"}, "scheduler: got 'WarmupLR'; expected an object"),
    ({"zero_optimization": {"offload_optimizer": True}}, "offload_optimizer: got True; expected an object"),
    ({"zero_optimization": {"stage": 5}}, "zero_optimization.stage: got 5; expected 0, 1, 2 or 3"),
    (
        {"zero_optimization": {"offload_param": {"device": "nvm"}}},
        "zero_optimization.offload_param.device: got 'nvm'; expected none, cpu or nvme; did you mean 'nvme'?",
    ),
    # Keys as they are written, and of sections in sections.
    ({"fp16": {"loss_scal": 0}}, "fp16.loss_scal: unknown key, did you mean loss_scale?"),
    ({"tensorboard": {"enable": True}}, "tensorboard.enable: unknown key, did you mean enabled?"),
    (
        {"zero_optimization": {"stage3_max_live_parameter": 1}},
        "zero_optimization.stage3_max_live_parameter: unknown key, did you mean stage3_max_live_parameters?",
    ),
    (
        {"zero_optimization": {"offload_optimizer": {"devic": "cpu"}}},
        "zero_optimization.offload_optimizer.devic: unknown key, did you mean device?",
    ),
    # Keys in the wrong section.
    ({"zero_optimization": {"aio": {}}}, "aio: unknown key, it belongs at the top level of the ds_config"),
    ({"bf16": {"loss_scale": 0}}, "bf16.loss_scale: unknown key, it belongs in fp16"),
    (
        {"zero_optimization": {"nvme_path": "/tmp"}},
        "it belongs in zero_optimization.offload_param or in zero_optimization.offload_optimizer",
    ),
    ({"fp16": {"opt_level": "O2"}}, "fp16.opt_level: unknown key, DeepSpeed has no such key"),
]


@pytest.mark.parametrize(("section", "text"), WRONG, ids=[str(section) for section, _ in WRONG])
def test_errors_name_the_key_as_it_is_written(section: dict[str, Any], text: str) -> None:
    with pytest.raises(SettingsError) as error:
        read(section)
    assert text in str(error.value)
    assert "Input should be" not in str(error.value) and "Config" not in str(error.value)


UNKNOWN = {
    "offload_optimizer": "it belongs in zero_optimization",
    "stage3_prefetch_bucket_size": "it belongs in zero_optimization",
    "loss_scale": "it belongs in fp16",
    "weight_decay": "it belongs in optimizer.params",
    "warmup_num_steps": "it belongs in scheduler.params",
    "gradient_cliping": "did you mean gradient_clipping?",
    "zero_optimisation": "did you mean zero_optimization?",
    "_comment": "it has no effect",
    "comment": "it has no effect",
    "//": "it has no effect",
    "warmup": "it has no effect",
}


def test_unknown_keys_get_their_section_or_a_near_spelling() -> None:
    """And no key that DeepSpeed reads is unknown."""
    known = ("bf16", "fp16", "scheduler", "flops_profiler", "aio", "csv_monitor", "compile", "train_batch_size")
    with logged(logging.WARNING) as said:
        read(dict.fromkeys(UNKNOWN, 1) | dict.fromkeys(known, "auto"))
    assert said == [
        f"deepspeed-muon: DeepSpeed has no top-level ds_config key {key}; {advice}" for key, advice in UNKNOWN.items()
    ]


@pytest.mark.parametrize(
    ("given", "known"), [("onebitadam", "muonwithauxadam"), ("warmup", "amp"), ("offload_optimizer", "optimizer")]
)
def test_words_of_other_lengths_are_not_near(given: str, known: str) -> None:
    assert nearest(given, [known]) is None


def test_a_second_key_for_clipping_is_dropped() -> None:
    with logged(logging.WARNING) as said:
        assert read({"gradient_clipping": 0.5}, {"max_grad_norm": 1.0}).gradient_clipping == 0.5
    assert said == [
        "deepspeed-muon: optimizer.params.max_grad_norm 1.0 is ignored, because gradient_clipping 0.5 already clips"
    ]


def test_absurd_values_are_pointed_out() -> None:
    with logged(logging.WARNING) as said:
        read({}, {"eps": 1e8, "weight_decay": 0.1})
        read({}, {"eps": 1e-8})
    assert len(said) == 1 and "eps 1e+08" in said[0]
