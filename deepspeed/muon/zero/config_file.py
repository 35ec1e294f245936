# SPDX-License-Identifier: Apache-2.0
"""Reads the file of a ds_config: JSON, Hjson or YAML. A file that holds something else is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import hjson
import torch

from deepspeed.muon.config.messages import nearest
from deepspeed.muon.errors import SettingsError
from deepspeed.muon.zero.known_keys import known_keys

#: Keys of accelerate's configuration that no ds_config has; one of them is enough.
ACCELERATE_KEYS = {"compute_environment", "deepspeed_config", "distributed_type", "fsdp_config", "mixed_precision"}
#: Keys under which training tools name the file of their ds_config.
NAMES_A_FILE = ("deepspeed", "deepspeed_config", "deepspeed_config_file", "ds_config")
#: Keys of training arguments that no ds_config has.
TRAINING_ARGUMENTS = {"learning_rate", "model_name_or_path", "output_dir", "per_device_train_batch_size"}
#: Levels of a file at which a ds_config is looked for.
MAX_DEPTH = 4
#: Whether text starts with a brace, after comments.
_BRACED = re.compile(r"\ufeff?(?:\s|(?:#|//)[^\n]*\n|/\*.*?\*/)*\{", re.DOTALL)


def parse_file(path: str) -> dict[str, Any]:
    """Return the object in a JSON, Hjson or YAML file.

    Text without braces is YAML if it can be. DeepSpeed's reader takes it for Hjson without the outer braces, which
    makes a string of what is nested by indentation.

    Raises:
        SettingsError: the file cannot be read, or holds no object.
    """
    from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys

    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        is_yaml = Path(path).suffix in (".yaml", ".yml") or not _BRACED.match(text)
        section = _parse_yaml(path, text) if is_yaml else None
        if section is None:
            section = hjson.loads(text, object_pairs_hook=dict_raise_error_on_duplicate_keys)
    except OSError as error:
        raise SettingsError(f"--config {path}: {error.strerror}") from None
    except ValueError as error:
        raise SettingsError(f"--config {path}: not a ds_config: {error}") from None
    if not isinstance(section, dict):
        raise SettingsError(f"--config {path}: expected a JSON object, got {type(section).__name__}")
    return section


def find_ds_config(path: str, section: dict[str, Any]) -> dict[str, Any]:
    """Return the section itself if it is a ds_config, else the only part of it that is one.

    Raises:
        SettingsError: there is none; the message says what the file is and which file to give instead.
    """
    if is_accelerates(section):
        nested = section.get("deepspeed_config")
        file = nested.get("deepspeed_config_file") if isinstance(nested, Mapping) else None
        instead = (
            f"give the file that its deepspeed_config_file names, {file}"
            if file
            else f"ds_muon init --config {path} --out ds_config.json writes a ds_config from it, which its "
            "deepspeed_config_file then names"
        )
        raise SettingsError(f"--config {path}: accelerate's configuration, not a ds_config; {instead}")
    named = next((key for key in NAMES_A_FILE if isinstance(section.get(key), str)), None)
    if named and not _is_ds_config(section):
        raise SettingsError(f"--config {path}: not a ds_config; it names one as {named}, give {section[named]}")
    if foreign := sorted(TRAINING_ARGUMENTS & section.keys()):
        raise SettingsError(
            f"--config {path}: training arguments ({', '.join(foreign)}), not a ds_config; give the file that its "
            "script takes as --deepspeed"
        )
    if _is_ds_config(section) or (section.keys() & known_keys() and not list(_parts(section))):
        return section
    parts = list(_parts(section))
    if len(parts) == 1:
        return parts[0][1]
    where = (
        f"ds_configs lie under {', '.join(name for name, _ in parts)}; write one of them into a file" if parts else ""
    )
    near = {key: nearest(key.lower(), sorted(known_keys()), cutoff=0.75) for key in section}
    hints = [f"did you mean {near[key]} where it says {key}?" for key in section if near[key]]
    listed = ", ".join(list(section)[:6]) or "none"
    raise SettingsError(
        f"--config {path}: not a ds_config: DeepSpeed knows none of its top-level keys ({listed}); "
        + (where or " ".join(hints) or "expected keys such as optimizer or zero_optimization")
    )


def is_accelerates(section: Mapping[str, Any]) -> bool:
    """Return whether a file is accelerate's configuration, which ``accelerate config`` writes."""
    return bool(ACCELERATE_KEYS & section.keys()) and not _is_ds_config(section)


def is_optimizer(name: str) -> bool:
    """Return whether DeepSpeed, torch or transformers has an optimizer of this name, in any case."""
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

    known = [*dir(torch.optim), *DEEPSPEED_OPTIMIZERS, "adafactor", "onebitadam", "zerooneadam"]
    return name.lower() in map(str.lower, known)


def _is_ds_config(section: Mapping[str, Any]) -> bool:
    """Return whether a section has what only a ds_config has: ZeRO's settings, or an optimizer by type."""
    optimizer = section.get("optimizer")
    has_optimizer = isinstance(optimizer, Mapping) and "type" in optimizer
    return isinstance(section.get("zero_optimization"), Mapping) or has_optimizer


def _parts(section: Mapping[str, Any], above: str = "", level: int = 1) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return the ds_configs below a section, with their dotted keys."""
    for key, value in section.items():
        if isinstance(value, dict) and _is_ds_config(value):
            yield f"{above}{key}", value
        elif isinstance(value, dict) and level < MAX_DEPTH:
            yield from _parts(value, f"{above}{key}.", level + 1)


def _parse_yaml(path: str, text: str) -> Any:
    """Return what YAML holds; ``None`` for text that is no YAML, which may be Hjson.

    Raises:
        SettingsError: PyYAML is missing. ValueError: a key twice.
    """
    try:
        import yaml
    except ImportError:
        raise SettingsError(f"--config {path}: YAML, which needs PyYAML to be read; pip install pyyaml") from None

    class Loader(yaml.SafeLoader):
        """YAML 1.2's numbers, so that 1e-4 is one; no dates, which JSON lacks; each key once."""

        yaml_implicit_resolvers = {
            first: [(tag, regexp) for tag, regexp in found if tag != "tag:yaml.org,2002:timestamp"]
            for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            """As of the base class, for keys that differ."""
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
