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
#: Fields that accelerate also reads when ``deepspeed_config_file`` is set.
KEPT = (
    "deepspeed_config_file",
    "deepspeed_exclusion_filter",
    "deepspeed_hostfile",
    "deepspeed_inclusion_filter",
    "deepspeed_moe_layer_cls_names",
    "deepspeed_multinode_launcher",
    "zero3_init_flag",
)
#: ``mixed_precision`` -> what accelerate adds to a ds_config.
PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "auto_cast": True}},
    "fp8": {"bf16": {"enabled": True}},
    "no": {},
}
#: ``distributed_type`` and ``compute_environment`` of a configuration for DeepSpeed.
DEEPSPEED, LOCAL = "DEEPSPEED", "LOCAL_MACHINE"


def fields_of(path: str, section: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of accelerate's section ``deepspeed_config``.

    ``section``: accelerate's parsed configuration. ``path``: the file it was read from, for error messages.

    Raises:
        SettingsError: the configuration does not use DeepSpeed.
    """
    if (place := section.get("compute_environment") or LOCAL) != LOCAL:
        raise SettingsError(
            f"{path}: compute_environment: got {place!r}, expected {LOCAL}, the only one in which accelerate reads a "
            "section deepspeed_config"
        )
    kind = section.get("distributed_type", DEEPSPEED)
    kind = "NO" if kind is False else str(kind).upper()  # YAML reads NO as false
    fields = section.get("deepspeed_config") or {}
    if kind != DEEPSPEED or not isinstance(fields, Mapping):
        raise SettingsError(
            f"{path}: accelerate's configuration has distributed_type {kind}; expected DEEPSPEED, and a section "
            "deepspeed_config; run accelerate config and choose DeepSpeed"
        )
    return fields


def precision_of(path: str, section: Mapping[str, Any]) -> str:
    """Return accelerate's ``mixed_precision``, a key of :data:`PRECISIONS`; raise SettingsError if it is none."""
    old = "fp16" if section.get("fp16") else "no"  # as accelerate reads files of its first versions
    precision = str(section.get("mixed_precision", old) or "no").lower()
    if precision not in PRECISIONS:
        raise SettingsError(f"{path}: mixed_precision: got {precision!r}, expected {', '.join(PRECISIONS)}")
    return precision


def ds_config_of(path: str, section: Mapping[str, Any]) -> dict[str, Any]:
    """Convert accelerate's configuration to a ds_config without a section ``optimizer``, as accelerate does.

    ``section``, ``path``: as for :func:`fields_of`.

    Raises:
        SettingsError: the configuration does not use DeepSpeed, or a field has a wrong value.
    """
    fields = fields_of(path, section)
    zero: dict[str, Any] = {"stage": _number(path, fields, "zero_stage", 2)}
    for part in ("optimizer", "param"):
        key, folder = f"offload_{part}_device", f"offload_{part}_nvme_path"
        device = str(fields.get(key) or "none").lower()
        if device not in ("none", "cpu", "nvme"):
            raise SettingsError(f"{path}: deepspeed_config.{key}: got {fields[key]!r}, expected none, cpu or nvme")
        if device == "nvme" and not fields.get(folder):
            raise SettingsError(f"{path}: deepspeed_config.{folder}: expected a folder, because {key} is nvme")
        if device != "none":
            zero[f"offload_{part}"] = {"device": device} | ({"nvme_path": fields[folder]} if device == "nvme" else {})
    if fields.get("zero3_save_16bit_model") is not None:
        is_true = str(fields["zero3_save_16bit_model"]).lower() == "true"
        zero["stage3_gather_16bit_weights_on_model_save"] = is_true
    clipping = _number(path, fields, "gradient_clipping", "auto", float)
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": _number(path, fields, "gradient_accumulation_steps", "auto"),
        **({"gradient_clipping": clipping} if clipping else {}),
        **copy.deepcopy(PRECISIONS[precision_of(path, section)]),
        "zero_optimization": zero,
    }


def with_ds_config_file(section: Mapping[str, Any], ds_config: str) -> str:
    """Return accelerate's configuration ``section`` as YAML text that names the ds_config file ``ds_config``.

    The text omits the DeepSpeed settings that accelerate expects in that file instead.
    """
    import yaml

    kept = {key: value for key, value in section.items() if key not in ("mixed_precision", "fp16")}
    fields = {key: value for key, value in (section.get("deepspeed_config") or {}).items() if key not in MOVED}
    kept["deepspeed_config"] = fields | {"deepspeed_config_file": ds_config}
    return yaml.safe_dump(kept, sort_keys=False)


def notes_on(path: str, section: Mapping[str, Any], out: str, has_file: bool) -> list[tuple[str, str, str]]:
    """Return (field, what was done, why) for the fields of accelerate's configuration of which the user should know.

    ``out``: file of the new ds_config. ``has_file``: whether the configuration already named a ds_config file.

    Raises:
        SettingsError: accelerate refuses a field next to ``deepspeed_config_file``, or ``mixed_precision`` is wrong.
    """
    fields, precision = fields_of(path, section), precision_of(path, section)
    if has_file and (refused := [key for key in MOVED if key in fields]):
        raise SettingsError(
            f"{path}: deepspeed_config: accelerate refuses {', '.join(refused)} next to "
            "deepspeed_config_file; write them into that file"
        )
    found = []
    if needs_flag(precision, has_file):
        flag = f"--mixed_precision {precision}"
        why = f"accelerate refuses it next to deepspeed_config_file; pass {flag} to accelerate launch"
        found.append(("mixed_precision", "removed", why))
    elif precision != "no":
        found.append(("mixed_precision", f"moved to {precision}.enabled", f"{out} sets it now"))
    for part in ("optimizer", "param"):
        device, folder = f"offload_{part}_device", f"offload_{part}_nvme_path"
        if fields.get(folder) and str(fields.get(device)).lower() != "nvme":
            found.append((f"deepspeed_config.{folder}", "removed", f"it has no effect, because {device} is not nvme"))
    if _number(path, fields, "gradient_clipping", "auto", float) == 0:
        why = "accelerate does not pass 0 on, so DeepSpeed clips at its default, 1.0"
        found.append(("deepspeed_config.gradient_clipping", "removed", why))
    return found + [
        (
            f"deepspeed_config.{key}",
            "kept, without effect",
            f"accelerate has no such field; a key of DeepSpeed's goes into {out}",
        )
        for key in fields
        if key not in (*MOVED, *KEPT)
    ]


def needs_flag(precision: str, has_file: bool) -> bool:
    """Return whether ``accelerate launch`` needs the flag ``--mixed_precision`` next to the new configuration."""
    return precision == "fp8" or (has_file and precision != "no")


def _number(path: str, fields: Mapping[str, Any], key: str, default: Any, kind: type[int] | type[float] = int) -> Any:
    value = fields.get(key)
    if value is None or str(value).lower() == "auto":
        return default
    try:
        return kind(str(value))
    except ValueError:
        raise SettingsError(f"{path}: deepspeed_config.{key}: got {value!r}, expected a number") from None
