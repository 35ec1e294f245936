# SPDX-License-Identifier: Apache-2.0
"""The keys and sections of a ds_config that the installed DeepSpeed reads. It silently ignores other top-level keys."""

from __future__ import annotations

import functools
import inspect
from collections import UserDict
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from pydantic import BaseModel

from deepspeed.muon.config.messages import did_you_mean
from deepspeed.muon.config.schema import MuonConfig
from deepspeed.muon.log import logger

#: Keys that ``deepspeed.initialize`` reads itself.
INITIALIZE_KEYS = {"data_parallel_size", "sequence_parallel_size"}
#: Name of DeepSpeed's config class -> the section of a ds_config that it reads, as a dotted path ("": the top level).
SECTION_OF = {
    "DeepSpeedZeroConfig": "zero_optimization",
    "DeepSpeedFP16Config": "fp16",
    "DeepSpeedBF16Config": "bf16",
    "DeepSpeedMonitorConfig": "",
    "HybridEngineConfig": "hybrid_engine",
    "CompileConfig": "compile",
    "DeepSpeedThroughputTimerConfig": "timers.throughput",
    "TPTrainingConfig": "tensor_parallel",
    "CommsLoggerConfig": "comms_logger",
}
#: Sections whose value must be an object.
OBJECTS = (
    "activation_checkpointing aio autotuning bf16 bfloat16 checkpoint comet comms_logger compile csv_monitor "
    "data_efficiency data_types datastates_ckpt expert_parallel flops_profiler fp16 hybrid_engine nebula pipeline "
    "scheduler tensor_parallel tensorboard timers torch_autocast wandb weight_quantization zero_optimization"
)
#: If a misplaced key belongs in more sections than this, no message names them.
MAX_PLACES = 3


class _RecordingDict(UserDict, dict):  # type: ignore[misc]
    """A ds_config that records in its attribute ``asked`` which keys DeepSpeed looks up."""

    def __init__(self, section: dict[str, Any]) -> None:
        self.asked: set[str] = set()
        super().__init__(section)

    def __getitem__(self, key: Any) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: Any) -> bool:
        self.asked.add(key)
        return super().__contains__(key)


@functools.cache
def _empty_config() -> tuple[Any, frozenset[str]]:
    """Return (``DeepSpeedConfig`` of a nearly empty ds_config, top-level keys of a ds_config that DeepSpeed reads)."""
    from deepspeed.runtime.config import DeepSpeedConfig

    section = _RecordingDict({"train_micro_batch_size_per_gpu": 1})
    return DeepSpeedConfig(section), frozenset(section.asked | INITIALIZE_KEYS)


def known_keys() -> frozenset[str]:
    """Return the top-level keys of a ds_config that the installed DeepSpeed reads."""
    return _empty_config()[1]


def warn_of_unknown(keys: Iterable[str]) -> None:
    """Log a warning for each top-level key of a ds_config that DeepSpeed does not read; say where the key belongs."""
    for key in [key for key in keys if key not in known_keys()]:
        advice = did_you_mean(key, sorted(known_keys()), "it has no effect")
        if place := place_of(key):
            advice = f"it belongs {place}"
        elif not key[:1].isalnum() or "comment" in key.lower():  # such as // and _note
            advice = "it has no effect"
        logger.warning("deepspeed-muon: DeepSpeed has no top-level ds_config key %s; %s", key, advice)


@functools.cache
def _sections() -> dict[str, dict[str, Any]]:
    """Return {section: {key: type annotation}} for the sections that DeepSpeed parses with pydantic.

    For example, ``"zero_optimization.offload_optimizer"`` -> ``{"device": OffloadDeviceEnum, ...}``.
    """
    from deepspeed.comm.config import CommsLoggerConfig

    found: dict[str, dict[str, Any]] = {}

    def add(path: str, model: type[BaseModel]) -> None:
        found[path] = {field.alias or name: field.annotation for name, field in model.model_fields.items()}
        for key, annotation in found[path].items():
            if inner := _model_in(annotation):
                add(f"{path}.{key}".lstrip("."), inner)

    for model in (*map(type, vars(_empty_config()[0]).values()), CommsLoggerConfig):  # the last lies one level deeper
        if model.__name__ in SECTION_OF:
            add(SECTION_OF[model.__name__], model)
    return found


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_model_in, get_args(annotation))), None)


def keys_of(path: str) -> Iterable[str]:
    """Return the keys that DeepSpeed accepts in a section, such as ``zero_optimization``.

    Return an empty tuple if DeepSpeed does not check the keys of this section.
    """
    return _sections().get(path, ())


@functools.cache
def _places_by_key() -> dict[str, list[str]]:
    """Return {key: the places in a ds_config where it is allowed}, such as ``{"stage": ["in zero_optimization"]}``."""
    from deepspeed.runtime import lr_schedules

    schedules = [inspect.signature(getattr(lr_schedules, name)) for name in lr_schedules.VALID_LR_SCHEDULES]
    keys_by_section = {
        "optimizer.params": MuonConfig.model_fields,
        "scheduler.params": {key for schedule in schedules for key in schedule.parameters},
        **{path: keys for path, keys in _sections().items() if path},
    }
    found = {key: ["at the top level of the ds_config"] for key in known_keys()}
    for section, keys in keys_by_section.items():
        for key in keys:
            found.setdefault(key, []).append(f"in {section}")
    return found


def place_of(key: str) -> str | None:
    """Return where a key belongs in a ds_config, such as ``"in fp16 or in bf16"``.

    Return ``""`` if no section has this key, ``None`` if more than :data:`MAX_PLACES` have it.
    """
    places = _places_by_key().get(key, [])
    return " or ".join(places) if len(places) <= MAX_PLACES else None


def not_objects(section: Mapping[str, Any]) -> list[str]:
    """Return an error message for each section of a ds_config whose value should be a JSON object but is not."""
    examples = {"zero_optimization": '{"stage": 2}', "scheduler": '{"type": ..., "params": ...}'}
    wrong = [key for key in OBJECTS.split() if key in section and not isinstance(section[key], Mapping)]
    text = "{}: got {!r}; expected an object, such as {}"
    return [text.format(key, section[key], examples.get(key, '{"enabled": true}')) for key in wrong]
