# SPDX-License-Identifier: Apache-2.0
"""Build the model that the flag ``--model`` of ``ds_muon plan`` names, on the meta device."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from deepspeed.muon.cli.parser import EXPECTED
from deepspeed.muon.config.messages import did_you_mean
from deepspeed.muon.errors import ModelError
from deepspeed.muon.zero.wrappers.adapter import patched


def build(text: str) -> nn.Module:
    """Return the model that the flag ``--model`` of ``ds_muon plan`` names, built on the meta device.

    Args:
        text: the flag's value: a Hugging Face config file, folder, model type or hub name; or
            ``module:function`` or ``file.py:function``, where the function takes no arguments and returns the model.

    Raises:
        ModelError: the model is not found or cannot be built.
    """
    source, colon, function = text.rpartition(":")
    try:
        if colon and not Path(text).exists():
            return _from_function(source, function)
        return _from_hugging_face(text)
    except ModelError as error:
        raise ModelError(f"--model {text!r}: {error}") from None


@contextlib.contextmanager
def _as_model_error(what: str) -> Iterator[None]:
    """Turn any exception in the ``with`` block other than a ModelError into a ModelError with a one-line message.

    The message consists of ``what``, the exception's type and the first line of its text.
    """
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        brief = (str(error).strip().splitlines() or [""])[0]
        raise ModelError(f"{what} {type(error).__name__}: {brief}") from None


@contextlib.contextmanager
def _without_data() -> Iterator[None]:
    """Create tensors on the meta device and let the functions of ``torch.nn.init`` do nothing in the ``with`` block."""
    names = [name for name in vars(nn.init) if name.endswith("_") and not name.startswith("_")]
    fillers = dict.fromkeys(names, lambda original, tensor, *args, **kwargs: tensor)
    with patched(nn.init, **fillers), torch.device("meta"):
        yield


def _from_function(source: str, name: str) -> nn.Module:
    with _as_model_error(f"importing {source} raised"):
        module = _load(source)
    function = getattr(module, name, None)
    if not callable(function):
        callables = [key for key, value in vars(module).items() if callable(value)]
        hint = did_you_mean(name, callables, "")
        raise ModelError("; ".join(filter(None, [f"{source} has no function {name!r}", hint])))
    with _as_model_error("the function raised"), _without_data():
        model = function()
    if not isinstance(model, nn.Module):
        raise ModelError(f"the function returned {type(model).__name__}, expected a torch.nn.Module")
    return model


def _load(source: str) -> ModuleType:
    path = Path(source)
    if path.suffix != ".py":
        sys.path.insert(0, str(Path.cwd()))
        return importlib.import_module(source)
    if not path.is_file():
        raise ModelError(f"there is no file {source}")
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _from_hugging_face(text: str) -> nn.Module:
    if text.endswith(".py"):
        raise ModelError(
            f"a Python file needs a function: {text}:function, which returns the model (the file is imported)"
        )
    try:
        import transformers
    except ImportError:
        raise ModelError(
            f"a Hugging Face model needs the package transformers (pip install transformers); {EXPECTED}"
        ) from None
    config = _config(transformers, text)
    with _as_model_error(f"building {type(config).__name__} raised"), _without_data():
        try:
            return transformers.AutoModelForCausalLM.from_config(config)
        except ValueError as error:
            if "Unrecognized configuration class" not in str(error):
                raise
            return transformers.AutoModel.from_config(config)


def _config(transformers: ModuleType, text: str) -> Any:
    types = list(transformers.CONFIG_MAPPING.keys())
    exists = Path(text).exists()
    if not exists and text in types:
        return transformers.AutoConfig.for_model(text)
    if not exists and (text.count("/") > 1 or text.endswith(".json") or text.startswith((".", "/"))):
        raise ModelError(f"no such file or folder; {EXPECTED}")
    try:
        with _as_model_error("its config cannot be read:"):
            return transformers.AutoConfig.from_pretrained(text)
    except ModelError:
        if exists or "/" in text:
            raise
        hint = did_you_mean(text, types, EXPECTED)
        raise ModelError(f"no such file, folder, model type or name on the hub; {hint}") from None
