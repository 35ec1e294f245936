# SPDX-License-Identifier: Apache-2.0
"""Read a ds_config from a JSON, Hjson or YAML file and check it as an engine would; name this machine's accelerator."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hjson
import torch
from deepspeed.accelerator import get_accelerator
from pydantic import ValidationError

from deepspeed.muon.config.messages import FILLED_BY, nearest, own_words
from deepspeed.muon.config.schema import MuonConfig, parse
from deepspeed.muon.errors import MuonConfigError, SettingsError, UnsupportedError
from deepspeed.muon.math.newton_schulz import DTYPES
from deepspeed.muon.model.param_groups import warn_of_odd_settings
from deepspeed.muon.zero.patches import TYPES, is_muon, without_double_clipping
from deepspeed.muon.zero.refusals import is_bf16_optimizer, offload_device, refuse_unsupported, renames_parameters
from deepspeed.muon.zero.scheduler import momentum_note, rate_warning, read_schedule
from deepspeed.muon.zero.wrappers.stage12 import alignment_of

#: Keys that depend on the number of ranks; the engine checks them.
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
#: Replaces a learning rate "auto". A forecast depends on whether a learning rate is set, not on its value.
PLACEHOLDER_LR = 1e-3
#: Keys of accelerate's configuration that no ds_config has. A file with any of them is taken for accelerate's.
ACCELERATE_KEYS = {"compute_environment", "distributed_type"}
#: Keys of the section ``deepspeed_config`` in accelerate's configuration. Any of them identifies accelerate's file.
ACCELERATE_FIELDS = {"deepspeed_config_file", "offload_optimizer_device", "zero3_init_flag", "zero_stage"}
#: Keys under which training tools name the file of their ds_config.
FILE_KEYS = ("deepspeed", "deepspeed_config", "deepspeed_config_file", "ds_config")
#: Keys of training arguments that no ds_config has.
TRAINING_ARGUMENTS = {"learning_rate", "model_name_or_path", "output_dir", "per_device_train_batch_size"}
#: A file with none of these keys, and without a ds_config inside, is not a ds_config.
DS_CONFIG_KEYS = {"optimizer", "scheduler", "zero_optimization", "bf16", "fp16", "gradient_clipping", *BATCH_KEYS}
#: How many levels deep a file is searched for a ds_config.
MAX_DEPTH = 4
#: Matches text that starts with a brace, after comments and blanks.
_BRACED = re.compile(r"\ufeff?(?:\s|(?:#|//)[^\n]*\n|/\*.*?\*/)*\{", re.DOTALL)


@dataclass(frozen=True)
class Layout:
    """How ZeRO splits parameter groups at ``stage`` 0 to 3 over ``world_size`` data-parallel ranks.

    Args:
        sub_group_size: at stage 3 a sub-group ends once it has this many elements on one rank.
        round_robin: DeepSpeed's setting ``round_robin_gradients``, for stages 1 and 2.
        alignment: at stages 1 and 2 each parameter starts at a multiple of this many elements of the flat tensor.
    """

    stage: int
    world_size: int
    sub_group_size: int = 10**9
    round_robin: bool = False
    alignment: int = 1


@dataclass(frozen=True)
class Buffers:
    """What ZeRO keeps on a device in addition to the optimizer: weights, gradients and communication buffers.

    Args:
        dtype: dtype of the weights, such as ``bf16``.
        offload_param: whether stage 3 keeps the weights on the host or on NVMe.
        accumulated_dtype: dtype of the gradients that ZeRO keeps from one micro-batch to the next.
        keeps_whole_gradients: whether each rank keeps these gradients of all parameters, as under ``BF16_Optimizer``.
        reduced: number of elements of the buffers in which gradients are reduced.
        gathered: the largest number of weights that stage 3 gathers at a time.
    """

    dtype: str = "fp32"
    offload_param: bool = False
    accumulated_dtype: str = "fp32"
    keeps_whole_gradients: bool = False
    reduced: int = 0
    gathered: int = 10**9


@dataclass(frozen=True)
class Settings:
    """The settings of a ds_config that ``ds_muon`` needs to forecast a run.

    Attributes:
        config: the settings in ``optimizer.params``.
        layout: how ZeRO will shard the parameters.
        offload: whether the optimizer is offloaded to the CPU or NVMe.
        buffers: what ZeRO keeps on a device in addition to the optimizer.
        gradient_clipping: the norm to which gradients are clipped; 0.0 if they are not.
        notes: sentences for the user about values that were assumed or not checked.
    """

    config: MuonConfig
    layout: Layout
    offload: bool
    buffers: Buffers
    gradient_clipping: float
    notes: tuple[str, ...]


def read_settings(path: str, section: dict[str, Any], world_size: int, stage: int | None = None) -> Settings:
    """Return the settings of a ds_config whose optimizer is Muon, checked as an engine would.

    Args:
        path: the file's name, for errors.
        section: the ds_config in the file, from :func:`find_ds_config`.
        world_size: number of data-parallel ranks.
        stage: ZeRO stage to use instead of the config's, unless it is ``None``.

    Raises:
        SettingsError: DeepSpeed refuses a value, or the optimizer is not Muon.
        MuonConfigError: ``optimizer.params`` is wrong.
        UnsupportedError: deepspeed-muon does not support a combination of settings.
    """
    name, params = _require_muon(path, section)
    autos, defaults = [key for key in FILLED_BY if params.get(key) == "auto"], list[str]()
    params = {key: value for key, value in params.items() if key not in autos}
    params |= {"lr": PLACEHOLDER_LR} if "lr" in autos else {}
    params = without_double_clipping(params, section.get("gradient_clipping"))
    config, schedule = parse(params), read_schedule(section.get("scheduler"))
    muon = config.muon_group() | {"betas": config.betas, "use_muon": True}
    warn_of_odd_settings((muon, config.adam_group() | {"use_muon": False}))
    rate = "" if autos else rate_warning(schedule, config)
    of_schedule = filter(None, (rate, momentum_note(schedule)))
    left_out = {"optimizer", *BATCH_KEYS}
    section = _drop_autos({key: value for key, value in section.items() if key not in left_out}, "", defaults)
    section |= {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": name, "params": params}}
    if stage is not None:
        section["zero_optimization"] = dict(section.get("zero_optimization") or {}) | {"stage": stage}
    stock = _stock_config(path, section)
    refuse_unsupported(stock, config)
    notes = [*_assumptions(autos, defaults, stock), *of_schedule]
    zero, offloads = stock.zero_config, offload_device(stock, "offload_optimizer") in ("cpu", "nvme")
    # Stages 1 and 2 run under DeepSpeedZeroOptimizer, unless BF16_Optimizer does, which neither reorders nor aligns.
    is_flat = not (stock.bfloat16_config.enabled and is_bf16_optimizer(stock) and not offloads)
    dtype = "bf16" if stock.bfloat16_config.enabled else "fp16" if stock.float16_config.enabled else "fp32"
    alignment = alignment_of(zero, DTYPES[dtype].itemsize) if is_flat else 1
    round_robin = is_flat and bool(zero.round_robin_gradients)
    layout = Layout(int(zero.stage), world_size, int(zero.sub_group_size), round_robin, alignment)
    buffers = _buffers(stock, dtype, is_flat)
    return Settings(config, layout, offloads, buffers, float(stock.gradient_clipping), tuple(notes))


def _buffers(stock: Any, dtype: str, is_flat: bool) -> Buffers:
    """Return the :class:`Buffers` of a ``DeepSpeedConfig``, ``stock``, whose weights have ``dtype``.

    ``is_flat``: whether DeepSpeed uses another wrapper than ``BF16_Optimizer``.
    """
    zero, stage = stock.zero_config, int(stock.zero_config.stage)
    count = (
        0 if stage == 0 or not (is_flat and zero.contiguous_gradients) else 2 if zero.overlap_comm and stage < 3 else 1
    )
    return Buffers(
        dtype=dtype,
        offload_param=offload_device(stock, "offload_param") in ("cpu", "nvme"),
        accumulated_dtype="fp32" if stock.grad_accum_dtype in ("fp32", "float32") else dtype,
        keeps_whole_gradients=not is_flat,
        reduced=count * int(zero.reduce_bucket_size),
        gathered=int(zero.max_live_parameters),
    )


def _assumptions(autos: list[str], defaults: list[str], stock: Any) -> Iterator[str]:
    """Yield sentences that tell the user what ``ds_muon plan`` assumes about a ds_config, or does not check.

    ``autos``: keys of ``optimizer.params`` whose value is "auto". ``defaults``: keys of other sections whose value is
    "auto", such as ``zero_optimization.reduce_bucket_size``.
    ``stock``: the ``DeepSpeedConfig`` of the ds_config.
    """
    defaults = [key for key in defaults if not key.startswith("scheduler.")]  # a plan does not depend on its values
    texts = [f"optimizer.params: {', '.join(autos)} filled in by Hugging Face's integration"] if autos else []
    texts += [f"{', '.join(defaults)} taken as DeepSpeed's defaults"] if defaults else []
    if texts:
        yield f"auto: {'; '.join(texts)}"
    yield "not checked until an engine is built: batch sizes, pipeline, native MoE layers, sequence parallelism"
    if renames_parameters(stock):
        yield "expert_parallel: predicted as if every rank had all experts, with the names that they have in --model"
    if stock.tensor_parallel_config.autotp_size > 1:
        yield "tensor_parallel: predicted as if all ranks were data-parallel; a rank's memory and work are the same"
    if stock.bfloat16_config.bf16_optimizer_states:
        yield "bf16.bf16_optimizer_states: states in bf16 are counted as if they were fp32"
    if "nvme" in (offload_device(stock, "offload_optimizer"), offload_device(stock, "offload_param")):
        yield "zero_optimization: NVMe is counted as the host's memory; the time to read and write it is not predicted"


def _require_muon(path: str, section: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return (``optimizer.type``, ``optimizer.params``) of a ds_config; raise SettingsError if the type is not Muon."""
    optimizer = section.get("optimizer")
    name = optimizer.get("type") if isinstance(optimizer, dict) else None
    if not isinstance(optimizer, dict) or not isinstance(name, str) or not is_muon(name):
        raise SettingsError(f'{path}: optimizer.type: got {name!r}, expected "Muon"; {_hint(section, name)}')
    params = optimizer.get("params") or {}
    if not isinstance(params, dict):
        raise SettingsError(f"{path}: optimizer.params: expected an object, got {params!r}")
    return name, params


def _hint(section: dict[str, Any], name: Any) -> str:
    """Return advice for a ds_config whose optimizer type is ``name`` and not Muon, such as ``"did you mean Muon?"``."""
    near = nearest("optimizer", section.keys() - {"optimizer"})
    if near and section.get("optimizer") is None:
        return f"did you mean optimizer instead of {near}?"
    is_misspelt = isinstance(name, str) and nearest(name.lower(), TYPES)
    return "did you mean Muon?" if is_misspelt else "ds_muon init converts this file"


def _drop_autos(section: dict[str, Any], prefix: str, dropped: list[str]) -> dict[str, Any]:
    """Return a copy of a section without keys whose value is "auto"; append their dotted paths to ``dropped``.

    ``prefix``: dotted path of the section, such as ``"fp16."``.
    """
    kept = {}
    for key, value in section.items():
        if isinstance(value, dict):
            kept[key] = _drop_autos(value, f"{prefix}{key}.", dropped)
        elif value != "auto":
            kept[key] = value
        else:
            dropped.append(f"{prefix}{key}")
    return kept


def _stock_config(path: str, section: dict[str, Any]) -> Any:
    """Return the ``DeepSpeedConfig`` of a ds_config; raise SettingsError with the reason if DeepSpeed refuses it."""
    from deepspeed.runtime.config import DeepSpeedConfig

    try:
        return DeepSpeedConfig(section)
    except (MuonConfigError, UnsupportedError):
        raise
    except ValidationError as error:
        lines = (f"{'.'.join(map(str, e['loc']))}: got {e['input']!r}; {own_words(dict(e))}" for e in error.errors())
        reason = "; ".join(dict.fromkeys(lines))
    except Exception as error:
        reason = (str(error) or repr(error)).splitlines()[0]
    raise SettingsError(f"{path}: DeepSpeed refuses this config: {reason}")


# ---- the file -----------------------------------------------------------------------------------------------------


def parse_file(path: str) -> dict[str, Any]:
    """Return the object in a JSON, Hjson or YAML file as a dict.

    Raises:
        SettingsError: the file cannot be read, or does not contain an object.
    """
    from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys

    try:
        # YAML before Hjson, which accepts most YAML but reads nested sections as strings.
        text = Path(path).read_text(encoding="utf-8-sig")
        is_yaml = Path(path).suffix in (".yaml", ".yml") or not _BRACED.match(text)
        section = _parse_yaml(path, text) if is_yaml else None
        if section is None:
            section = hjson.loads(text, object_pairs_hook=dict_raise_error_on_duplicate_keys)
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise SettingsError(f"{path}: cannot be read as JSON, Hjson or YAML: {error}") from None
    if not isinstance(section, dict):
        raise SettingsError(f"{path}: expected a JSON object, got {type(section).__name__}")
    return section


def find_ds_config(path: str, section: dict[str, Any]) -> dict[str, Any]:
    """Return the ds_config in a parsed file: its whole content ``section``, or the only ds_config nested in it.

    Raises:
        SettingsError: the file is another kind of configuration, or contains no ds_config, or several.
    """
    if is_accelerate_config(section):
        file = accelerates_ds_config_file(section)
        instead = (
            f"give the file that its deepspeed_config_file names, {file}"
            if file
            else f"run ds_muon init --config {path} --out ds_config.json, which writes a ds_config and a YAML for "
            "accelerate that names it; then give ds_config.json"
        )
        raise SettingsError(f"{path}: this is accelerate's configuration, not a ds_config; {instead}")
    named = next((key for key in FILE_KEYS if isinstance(section.get(key), str)), None)
    if named and not _is_ds_config(section):
        file = section[named]
        instead = (
            f"give {file} instead"
            if Path(file).suffix
            else f"{file} is built into the tool: write it into a file, and give that"
        )
        raise SettingsError(f"{path}: not a ds_config, but its key {named} names one; {instead}")
    if foreign := sorted(TRAINING_ARGUMENTS & section.keys()):
        raise SettingsError(
            f"{path}: this file holds training arguments ({', '.join(foreign)}) and is not a ds_config; pass "
            "the file that the script gets as --deepspeed"
        )
    parts = dict(_nested_ds_configs(section))
    if _is_ds_config(section) or (section.keys() & DS_CONFIG_KEYS and not parts):
        return section
    if len(parts) == 1:
        return next(iter(parts.values()))
    raise SettingsError(
        f"{path}: not a ds_config: "
        + (
            f"ds_configs lie under {', '.join(parts)}; write one of them into a file"
            if parts
            else "expected keys such as optimizer or zero_optimization"
        )
    )


def is_accelerate_config(section: Mapping[str, Any]) -> bool:
    """Return whether a parsed file is accelerate's configuration, as ``accelerate config`` writes it."""
    fields = section.get("deepspeed_config")
    has_fields = isinstance(fields, Mapping) and bool(ACCELERATE_FIELDS & fields.keys())
    return (has_fields or bool(ACCELERATE_KEYS & section.keys())) and not _is_ds_config(section)


def accelerates_ds_config_file(section: Mapping[str, Any]) -> str | None:
    """Return the path that accelerate's configuration ``section`` names as its ds_config; ``None`` if it names none."""
    fields = section.get("deepspeed_config")
    file = fields.get("deepspeed_config_file") if isinstance(fields, Mapping) else None
    return str(file) if file and str(file).lower() != "none" else None


def is_optimizer(name: str) -> bool:
    """Return whether DeepSpeed, torch or transformers has an optimizer of this name, ignoring case."""
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

    known = [*dir(torch.optim), *DEEPSPEED_OPTIMIZERS, "adafactor", "onebitadam", "zerooneadam"]
    return name.lower() in map(str.lower, known)


def _is_ds_config(section: Mapping[str, Any]) -> bool:
    """Return whether an object has a key that only a ds_config has: ``zero_optimization``, or ``optimizer.type``."""
    optimizer = section.get("optimizer")
    has_optimizer = isinstance(optimizer, Mapping) and "type" in optimizer
    return isinstance(section.get("zero_optimization"), Mapping) or has_optimizer


def _nested_ds_configs(
    section: Mapping[str, Any], prefix: str = "", level: int = 1
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (dotted path, ds_config) for each ds_config that is nested in an object, at most :data:`MAX_DEPTH` deep."""
    for key, value in section.items():
        if isinstance(value, dict) and _is_ds_config(value):
            yield f"{prefix}{key}", value
        elif isinstance(value, dict) and level < MAX_DEPTH:
            yield from _nested_ds_configs(value, f"{prefix}{key}.", level + 1)


def _parse_yaml(path: str, text: str) -> Any:
    """Return the value of a YAML text; ``None`` if the text is not valid YAML, because it may be Hjson.

    Raise SettingsError if PyYAML is not installed, and ValueError if a key occurs twice in one object.
    """
    try:
        import yaml
    except ImportError:
        raise SettingsError(f"{path}: PyYAML is needed to read YAML; run pip install pyyaml") from None

    # Refuses a key that occurs twice, reads 1e-4 as a number (YAML 1.2), and leaves dates as strings.
    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers = {
            first: [(tag, regexp) for tag, regexp in found if tag != "tag:yaml.org,2002:timestamp"]
            for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag[-6:] != ":merge"]
            if twice := sorted({str(key) for key in keys if keys.count(key) > 1}):
                raise ValueError(f"keys that occur twice: {twice}")
            return super().construct_mapping(node, deep)

    number = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)[eE][-+]?\d+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError:
        return None


# ---- this machine -------------------------------------------------------------------------------------------------


def accelerator() -> dict[str, Any]:
    """Return facts on this machine's accelerator.

    For example ``{"kind": "cuda", "count": 8, "name": "NVIDIA H100", "backend": "nccl"}``.
    """
    found = get_accelerator()
    kind, count, backend = found.device_name(), int(found.device_count()), found.communication_backend_name()
    ask = getattr(torch.get_device_module(kind), "get_device_name", None)
    name = ask(0) if ask and found.is_available() else kind
    return {"kind": kind, "count": count, "name": name, "backend": backend}


def backends() -> dict[str, bool]:
    """Return {communication backend: whether torch was built with it}, for ``"gloo"`` and ``"nccl"``."""
    return {"gloo": torch.distributed.is_gloo_available(), "nccl": torch.distributed.is_nccl_available()}
