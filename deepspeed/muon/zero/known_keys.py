# SPDX-License-Identifier: Apache-2.0
"""The keys of a ds_config that the installed DeepSpeed reads, and the sections that they belong in.

DeepSpeed ignores a top-level key that it does not know in silence.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel

from deepspeed.muon.config.messages import did_you_mean
from deepspeed.muon.config.schema import MuonConfig
from deepspeed.muon.log import logger

#: Keys that ``deepspeed.initialize`` reads itself.
OF_INITIALIZE = {"data_parallel_size", "sequence_parallel_size"}


class _Noting(dict):
    """A section that notes which keys are asked for."""

    def __init__(self, section: dict[str, Any]) -> None:
        super().__init__(section)
        self.asked: set[str] = set()

    def get(self, key: Any, default: Any = None) -> Any:
        """As of a dict."""
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: Any) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: Any) -> bool:
        self.asked.add(key)
        return super().__contains__(key)

    def keys(self) -> Any:
        """Itself, because DeepSpeed asks ``key in section.keys()``."""
        return self


@functools.cache
def known_keys() -> frozenset[str]:
    """What DeepSpeed looks up while it reads a config."""
    from deepspeed.runtime.config import DeepSpeedConfig

    section = _Noting({"train_micro_batch_size_per_gpu": 1})
    DeepSpeedConfig(section)
    return frozenset(section.asked | OF_INITIALIZE)


def warn_of_unknown(keys: Iterable[str]) -> None:
    """Name the keys that DeepSpeed does not read, and the section they belong in, or the nearest key that it reads."""
    for key in [key for key in keys if key not in known_keys()]:
        advice = did_you_mean(key, sorted(known_keys()), "it has no effect")
        if place := place_of(key):
            advice = f"it belongs {place}"
        elif not key[:1].isalnum() or "comment" in key.lower():  # such as // and _note
            advice = "it has no effect"
        logger.warning("deepspeed-muon: DeepSpeed reads no key %s of a ds_config; %s", key, advice)


#: DeepSpeed's classes, and the sections of a ds_config that they read.
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


@functools.cache
def _models() -> dict[str, type[BaseModel]]:
    """Return DeepSpeed's classes of :data:`SECTION_OF`, by name."""
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.runtime.config import DeepSpeedConfig

    found = [type(value) for value in vars(DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1})).values()]
    return {kind.__name__: kind for kind in (*found, CommsLoggerConfig) if kind.__name__ in SECTION_OF}


def keys_of(model: type[BaseModel]) -> dict[str, type[BaseModel] | None]:
    """Return the keys of a section as they are written, each with the class of its own section, if it is one."""
    return {field.alias or name: _section_in(field.annotation) for name, field in model.model_fields.items()}


def _section_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_section_in, get_args(annotation))), None)


def _places(model: type[BaseModel], path: str) -> Iterator[tuple[str, str]]:
    """Yield (key, section) of all keys below a section."""
    for key, inner in keys_of(model).items():
        if path:
            yield key, path
        if inner is not None:
            yield from _places(inner, f"{path}.{key}" if path else key)


#: The most sections that a message names for a misplaced key.
MOST_PLACES = 3


@functools.cache
def _all_places() -> dict[str, list[str]]:
    """Return the sections that have a key."""
    from deepspeed.runtime import lr_schedules

    found: dict[str, list[str]] = {key: ["at the top level of the ds_config"] for key in known_keys()}
    pairs = [(key, "optimizer.params") for key in MuonConfig.model_fields]
    for name in lr_schedules.VALID_LR_SCHEDULES:
        pairs += [(key, "scheduler.params") for key in inspect.signature(getattr(lr_schedules, name)).parameters]
    for title, model in _models().items():
        pairs += _places(model, SECTION_OF[title])
    for key, place in dict.fromkeys(pairs):
        found.setdefault(key, []).append(f"in {place}")
    return found


def place_of(key: str) -> str | None:
    """Return where a key belongs; ``None`` where no section has it, or so many that naming them helps nobody."""
    places = _all_places().get(key, [])
    return " or ".join(places) if len(places) <= MOST_PLACES else None


def section_at(title: str, path: Iterable[Any]) -> type[BaseModel] | None:
    """Return DeepSpeed's class of the section below the one of class ``title``, if it is known."""
    model = _models().get(title)
    for key in path:
        model = keys_of(model).get(key) if model is not None else None
    return model


#: Sections that DeepSpeed expects to be objects.
_OBJECTS = (
    "activation_checkpointing aio autotuning bf16 bfloat16 checkpoint comet comms_logger compile csv_monitor "
    "data_efficiency data_types datastates_ckpt expert_parallel flops_profiler fp16 hybrid_engine nebula pipeline "
    "scheduler tensor_parallel tensorboard timers torch_autocast wandb weight_quantization zero_optimization"
)


def not_objects(section: Mapping[str, Any]) -> list[str]:
    """Return a message for each section of a ds_config that is no object, which DeepSpeed reports as a TypeError."""
    found = []
    for key in _OBJECTS.split():
        if key in section and not isinstance(section[key], Mapping):
            example = {"zero_optimization": '{"stage": 2}', "scheduler": '{"type": ..., "params": ...}'}
            text = f"{key}: got {section[key]!r}; expected an object, such as "
            found.append(text + example.get(key, '{"enabled": true}'))
    return found
