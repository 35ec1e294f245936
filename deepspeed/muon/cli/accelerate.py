# SPDX-License-Identifier: Apache-2.0
"""Convert accelerate's configuration, which ``accelerate config`` writes, to a ds_config."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from deepspeed.muon.errors import SettingsError

#: Fields that accelerate refuses together with ``deepspeed_config_file``, because the ds_config sets them.
MOVED = (
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero_stage",
    "offload_optimizer_device",
    "offload_param_device",
    "offload_optimizer_nvme_path",
    "offload_param_nvme_path",
    "zero3_save_16bit_model",
)
#: ``mixed_precision`` -> what accelerate adds to a ds_config.
PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "auto_cast": True}},
    "fp8": {"bf16": {"enabled": True}},
    "no": {},
}


def ds_config_of(path: str, section: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a configuration of Hugging Face accelerate to a ds_config without a section ``optimizer``.

    ``section``: the parsed configuration. ``path``: the file it was read from, for error messages.

    Raises:
        SettingsError: the configuration does not use DeepSpeed, names a ds_config file, or has an unknown
            ``mixed_precision``, or a ``zero_stage`` or ``gradient_accumulation_steps`` that is not a number.
    """
    kind = str(section.get("distributed_type", "DEEPSPEED")).upper()
    fields = section.get("deepspeed_config") or {}
    if kind != "DEEPSPEED" or not isinstance(fields, Mapping):
        raise SettingsError(
            f"--config {path}: accelerate's configuration has distributed_type {kind}; expected DEEPSPEED, and a "
            "section deepspeed_config; run accelerate config and choose DeepSpeed"
        )
    if fields.get("deepspeed_config_file"):
        raise SettingsError(
            f"--config {path}: this is accelerate's configuration, not a ds_config; give the file that its "
            f"deepspeed_config_file names, {fields['deepspeed_config_file']}"
        )
    stage = _number(path, fields, "zero_stage", 2)
    zero: dict[str, Any] = {"stage": stage}
    for part in ("optimizer", "param"):
        device = fields.get(f"offload_{part}_device") or "none"
        if device != "none":
            folder = {"nvme_path": fields.get(f"offload_{part}_nvme_path")} if device == "nvme" else {}
            zero[f"offload_{part}"] = {"device": device, **folder}
    if stage == 3 and "zero3_save_16bit_model" in fields:
        zero["stage3_gather_16bit_weights_on_model_save"] = _flag(fields["zero3_save_16bit_model"])
    precision = str(section.get("mixed_precision") or "no").lower()
    if precision not in PRECISIONS:
        raise SettingsError(f"--config {path}: mixed_precision: got {precision!r}, expected {', '.join(PRECISIONS)}")
    clipping = fields.get("gradient_clipping") or "auto"
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": _number(path, fields, "gradient_accumulation_steps", "auto"),
        "gradient_clipping": clipping if clipping == "auto" else float(clipping),
        **copy.deepcopy(PRECISIONS[precision]),
        "zero_optimization": zero,
    }


def with_ds_config_file(section: Mapping[str, Any], ds_config: str) -> str:
    """Return accelerate's configuration ``section`` as YAML text that names the ds_config file ``ds_config``.

    The text omits the DeepSpeed settings that accelerate expects in that file instead.
    """
    import yaml

    kept = {key: value for key, value in section.items() if key != "mixed_precision"}
    fields = {key: value for key, value in (section.get("deepspeed_config") or {}).items() if key not in MOVED}
    kept["deepspeed_config"] = {"deepspeed_config_file": ds_config, **fields}
    return yaml.safe_dump(kept, sort_keys=False)


def _number(path: str, fields: Mapping[str, Any], key: str, default: Any) -> Any:
    value = fields.get(key, default)
    if value is None or value == "auto":
        return default
    try:
        return int(value)
    except (TypeError, ValueError):
        raise SettingsError(f"--config {path}: deepspeed_config.{key}: got {value!r}, expected a number") from None


def _flag(value: Any) -> bool:
    return str(value).lower() in ("true", "1", "yes", "on")
