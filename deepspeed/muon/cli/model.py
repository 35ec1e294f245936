# SPDX-License-Identifier: Apache-2.0
"""Builds a model on the meta device: modules, names and shapes, and no data."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from deepspeed.muon.errors import ModelError

EXPECTED = (
    "expected a Hugging Face config.json or its folder, a model type such as llama, a name on the hub, "
    "package.module:function or path/to/file.py:function"
)


def build(text: str) -> nn.Module:
    """The model that a command line names.

    Args:
        text: a Hugging Face config file, folder, model type or hub name; or ``module:function`` or ``file.py:function``
            of a function without arguments that returns the model.

    Raises:
        ModelError: there is no such thing, or it cannot be built.
    """
    source, colon, function = text.rpartition(":")
    if colon and not Path(text).exists():
        return _from_function(text, source, function)
    return _from_hugging_face(text)


@contextlib.contextmanager
def _without_data() -> Iterator[None]:
    """Tensors get no storage, and ``torch.nn.init`` does nothing, as there is nothing to fill."""
    names = [name for name in vars(nn.init) if name.endswith("_") and not name.startswith("_")]
    originals = {name: getattr(nn.init, name) for name in names}
    for name in names:
        setattr(nn.init, name, lambda tensor, *args, **kwargs: tensor)
    try:
        with torch.device("meta"):
            yield
    finally:
        for name, original in originals.items():
            setattr(nn.init, name, original)


def _from_function(text: str, source: str, name: str) -> nn.Module:
    try:
        module = _load(source)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"--model {text!r}: importing {source} raised {_brief(error)}") from None
    function = getattr(module, name, None)
    if not callable(function):
        near = difflib.get_close_matches(name, [key for key, value in vars(module).items() if callable(value)], n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ModelError(f"--model {text!r}: {source} has no function {name!r}{hint}")
    try:
        with _without_data():
            model = function()
    except Exception as error:
        raise ModelError(f"--model {text!r}: the function raised {_brief(error)}") from None
    if not isinstance(model, nn.Module):
        raise ModelError(f"--model {text!r}: the function returned {type(model).__name__}, expected a torch.nn.Module")
    return model


def _load(source: str) -> ModuleType:
    path = Path(source)
    if path.suffix != ".py":
        sys.path.insert(0, str(Path.cwd()))
        return importlib.import_module(source)
    if not path.is_file():
        raise ModelError(f"--model: there is no file {source}")
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _from_hugging_face(text: str) -> nn.Module:
    try:
        import transformers
    except ImportError:
        raise ModelError(f"--model {text!r}: needs the package transformers; {EXPECTED}") from None
    config = _config(transformers, text)
    try:
        with _without_data():
            try:
                return transformers.AutoModelForCausalLM.from_config(config)
            except ValueError as error:
                if "Unrecognized configuration class" not in str(error):
                    raise
                return transformers.AutoModel.from_config(config)
    except Exception as error:
        raise ModelError(f"--model {text!r}: building {type(config).__name__} raised {_brief(error)}") from None


def _config(transformers: ModuleType, text: str) -> Any:
    types = list(transformers.CONFIG_MAPPING.keys())
    exists = Path(text).exists()
    if not exists and text in types:
        return transformers.AutoConfig.for_model(text)
    near = difflib.get_close_matches(text, types, n=1)
    hint = f"did you mean {near[0]}?" if near else EXPECTED
    if not exists and (text.count("/") > 1 or text.endswith(".json") or text.startswith((".", "/"))):
        raise ModelError(f"--model {text!r}: no such file or folder; {EXPECTED}")
    try:
        return transformers.AutoConfig.from_pretrained(text)
    except Exception as error:
        if exists or "/" in text:
            raise ModelError(f"--model {text!r}: its config cannot be read: {_brief(error)}") from None
        raise ModelError(f"--model {text!r}: no such file, folder, model type or name on the hub; {hint}") from None


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
