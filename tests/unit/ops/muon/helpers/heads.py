# SPDX-License-Identifier: Apache-2.0
"""All models of transformers, timm and torchvision, without memory, and which of their matrices are output heads.

A matrix is an output head if its shape follows the number of labels, classes or tokens that the model is built with.
"""

import importlib
import re
from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
import transformers
from torch import nn

from deepspeed.muon.layout import MatrixSpec

VISION = ("timm", "torchvision")
#: Two numbers of labels.
LABELS = (7, 11)


def task_classes() -> Iterator[str]:
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    tables = [getattr(auto, name) for name in dir(auto) if re.fullmatch(r"MODEL_FOR_\w+MAPPING_NAMES", name)]
    entries = [entry for table in tables for entry in table.values()]
    names = {name for entry in entries for name in ([entry] if type(entry) is str else entry)}
    yield from sorted(name for name in names if hasattr(transformers, name))


def built(name: str) -> tuple[nn.Module, ...] | None:
    """Return the model of a class of transformers with each number of labels; ``None`` if it cannot be built."""
    models = []
    for count in LABELS:
        try:
            model_class = getattr(transformers, name)
            config = model_class.config_class(num_labels=count)
            if type(getattr(config, "vocab_size", None)) is int:
                config.vocab_size += count
            with torch.device("meta"):
                models.append(model_class(config))
        except Exception:  # a library is missing, or the config has no defaults
            return None
    return tuple(models)


def by_library(library: str) -> dict[str, Callable[[int], nn.Module]]:
    """Return {name: function that builds the model with a number of classes} for a library's registry."""
    pytest.importorskip("torchvision", exc_type=(ImportError, RuntimeError))
    module = pytest.importorskip(library)
    if library == "timm":
        return {name: _on_meta(module.create_model, name) for name in module.list_models()}
    models = module.models
    return {name: _on_meta(models.get_model, name, **_without_weights(models, name)) for name in models.list_models()}


def _without_weights(models: object, name: str) -> dict[str, None]:
    builder = models.get_model_builder(name)  # type: ignore[attr-defined]
    has_backbone = any(kind in builder.__module__ for kind in ("segmentation", "detection"))
    return {"weights": None} | ({"weights_backbone": None} if has_backbone else {})


def _on_meta(build: Callable, name: str, **settings: object) -> Callable[[int], nn.Module]:
    def call(classes: int) -> nn.Module:
        with torch.device("meta"):
            return build(name, num_classes=classes, **settings)

    return call


def matrices_that_follow(first: nn.Module, second: nn.Module) -> set[str]:
    """Return the names of the matrices that have another shape in the second model, with all names of tied ones."""
    shapes = {name: param.shape for name, param in second.named_parameters(remove_duplicate=False)}
    found = first.named_parameters(remove_duplicate=False)
    return {name for name, param in found if param.ndim > 1 and shapes.get(name) != param.shape}


def lost(specs: Mapping[str, MatrixSpec], follow: set[str]) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Yield name, shape and reason of matrices in repeated blocks that are taken for heads; boxes are outputs, too."""
    for spec in specs.values():
        is_in_block = re.search(r"\.\d+\.(\w+\.)*[a-z_]\w*\.weight$", spec.name)
        if (
            is_in_block
            and "bbox_embed" not in spec.name
            and not spec.use_muon
            and "output head" in spec.reason
            and spec.name not in follow
        ):
            yield spec.name, spec.shape, spec.reason
