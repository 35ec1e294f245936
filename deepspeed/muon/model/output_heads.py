# SPDX-License-Identifier: Apache-2.0
"""Find a model's output heads: the linear layers whose outputs no other layer takes as inputs.

The first evidence is what the model declares: its output layer, and its numbers of labels, classes and tokens. The
second is a layer's place: outside of repeated blocks, with a number of outputs that no other layer takes as inputs. The
last is its name. The forward pass is not traced, because its inputs are unknown when the optimizer is built.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from operator import itemgetter
from typing import Any, NamedTuple

from torch import nn

from deepspeed.muon.layout import whole_shape
from deepspeed.muon.model.fused_weights import (
    embeddings_and_heads,
    first_number,
    is_pipeline,
    is_projection,
    output_axis,
)
from deepspeed.muon.model.splitting import Use, embedding_reason, is_convolution, is_linear_like, without_wrappers

#: Methods that return a model's output layer: of transformers and of timm.
GETTERS = ("get_output_embeddings", "get_classifier")
#: Attributes of models and their configs: how many labels or classes a model predicts.
LABELS = ("num_labels", "num_classes", "n_classes")
#: Names of heads anywhere in a model, and at its top level only. The last layer of a module with such a name is a head.
NAMES = frozenset(
    (
        *("lm_head", "score", "classifier", "classification_head", "qa_outputs", "logits", "to_logits"),
        *("embed_out", "output_projection", "output_layer", "unembed"),
    )
)
TOP_LEVEL_NAMES = frozenset(("head", "heads", "mlp_head"))
#: Words in names of heads. They count only for layers whose outputs no other layer takes.
_WORDS = re.compile(
    r"(^|[._])(heads?|class|cls|classifiers?|logits?|outs?|outputs?|pred|predictors?|predictions?|scores?|readout"
    r"|regressor)\d*([._]|$)|(^|\.)fc(\.|$)"
)
#: A path through a repeated block: a number, and later a name.
_IN_BLOCK = re.compile(r"(^|\.)\d+\.(.*\.)?[^\d.]")
#: Into how many equal parts a model may split a layer's outputs, each of which another layer takes: gate and up;
#: queries, keys and values; two or six numbers for modulation.
PARTS = (1, 2, 3, 6)
#: Names of transformers' classes for a task, such as BertForMaskedLM. Without a module for its body, such a model may
#: have heads anywhere.
_TASK_CLASS = re.compile(r"For[A-Z]")


class Layer(NamedTuple):
    """A linear layer or convolution, at one place in the model, whose weight may be an output head.

    ``is_in_body``: whether it is in the body of a transformers model (its base model, which has no heads); ``None`` if
    there is no known body. ``is_in_block``: whether it is in a block that is repeated, such as ``layers.0.mlp``.
    ``outputs``, ``inputs``: numbers of features.
    """

    param: nn.Parameter
    path: str
    outputs: int
    inputs: int
    is_linear: bool
    is_in_block: bool
    is_in_body: bool | None


class OutputHeads(NamedTuple):
    """The result of :func:`find_output_heads`.

    ``reasons``: {weight of an output head: why it is one}. ``uncertain``: weights for which only their place in the
    model tells whether they are heads. Those taken for heads are in ``reasons``, too.
    """

    reasons: dict[nn.Parameter, str]
    uncertain: frozenset[nn.Parameter]


def find_output_heads(
    model: nn.Module, uses: Mapping[nn.Parameter, Sequence[Use]], hidden: Iterable[nn.Parameter]
) -> OutputHeads:
    """Find the output heads of ``model``.

    In a pipeline stage, a layer's place among the other layers is not used, because most of the model is elsewhere. Nor
    is it in a model with a single matrix.

    Args:
        uses: each parameter of the model -> the places that use it.
        hidden: parameters that cannot be heads, whatever their place: routers and factors of low-rank adapters.
    """
    no_head = set(hidden)
    candidates = {param: found for param, found in uses.items() if param not in no_head}
    layers = _in_module_order(model, candidates)
    stated = _returned(model, layers) | embeddings_and_heads(model)
    if is_pipeline(model) or sum(len(whole_shape(param)) > 1 for param in uses) < 2:
        return OutputHeads(_named(layers, lambda layer: True) | stated, frozenset())
    taken = Counter(width for param, found in candidates.items() for width in _taken_inputs(param, found))

    def is_end(layer: Layer) -> bool:
        """Return whether a layer is where a head may be, and no layer seems to take its outputs as inputs.

        A layer seems to take them if its number of inputs is that of the outputs, of one of 2, 3 or 6 equal parts of
        them or, in a repeated block, of 2, 3 or 6 times as many.
        """
        # A layer may take the outputs of a convolution as a flattened image, so for convolutions the name counts too.
        is_hidden = not layer.is_linear and not _WORDS.search(layer.path)
        if not _has_place(layer) or is_hidden or is_projection(layer.path.rpartition(".")[2]):
            return False
        joined = [layer.outputs * parts for parts in PARTS if layer.is_in_block]  # such as a mean and a deviation
        return not any(layer.outputs == parts * width or width in joined for parts in PARTS for width in taken)

    known = _last_of_sequence(model) | _counted(model, layers, taken)
    known |= _named([layer for layer in layers if not layer.is_in_body], is_end) | stated
    return _with_ends(layers, [layer for layer in layers if layer.param not in known and is_end(layer)], known)


def _has_place(layer: Layer) -> bool:
    """Return whether a layer is outside of a transformers model's body, or outside of repeated blocks, as heads are."""
    return layer.is_in_body is False or not layer.is_in_block


def _in_module_order(model: nn.Module, uses: Mapping[nn.Parameter, Sequence[Use]]) -> list[Layer]:
    """Return the layers whose weights are in ``uses``, in the order of the model's modules."""
    order = {path: place for place, (path, _) in enumerate(model.named_modules(remove_duplicate=False))}
    bodies = _bodies(model)
    numbered = [
        (order[use.name.rpartition(".")[0]], _layer(param, use, bodies)) for param in uses for use in uses[param]
    ]
    return [layer for _, layer in sorted(numbered, key=itemgetter(0)) if layer is not None]


def _layer(param: nn.Parameter, use: Use, bodies: Mapping[str, str | None]) -> Layer | None:
    """Return the linear layer or convolution at ``use`` whose weight is ``param``; ``None`` for another module.

    ``bodies``: from :func:`_bodies`.
    """
    shape, module = whole_shape(param), use.module
    if is_convolution(module) and len(shape) > 2:
        outputs, inputs = shape[0], shape[1] * module.groups
    elif len(shape) == 2 and is_linear_like(module, use.attribute) and not embedding_reason(use):
        axis = output_axis(module)
        outputs, inputs = shape[axis], shape[1 - axis]
    else:
        return None
    is_in_block, is_in_body = bool(_IN_BLOCK.search(use.path)), _is_in_body(use.path, bodies)
    return Layer(param, use.path, outputs, inputs, len(shape) == 2, is_in_block, is_in_body)


def _taken_inputs(param: nn.Parameter, uses: Sequence[Use]) -> Iterator[int]:
    """Yield the number of inputs of each layer that uses ``param``.

    Embeddings and biases yield nothing. Other parameters, such as a norm's, yield those of their last two sizes that
    are above 1.
    """
    layers = [layer for use in uses if (layer := _layer(param, use, {})) is not None]
    if layers:
        yield from (layer.inputs for layer in layers)
    elif not all(embedding_reason(use) or use.attribute.endswith("bias") for use in uses):
        yield from (size for size in whole_shape(param)[-2:] if size > 1)


def _returned(model: nn.Module, layers: Sequence[Layer]) -> dict[nn.Parameter, str]:
    """Return {weight: reason} for the output layers that methods in :data:`GETTERS` of the model's modules return."""
    reasons: dict[nn.Parameter, str] = {}
    for module in model.modules():
        for name in GETTERS:
            get = getattr(module, name, None)
            try:
                heads = get() if callable(get) else None
            except (AttributeError, NotImplementedError, TypeError):  # a model without a head, or another method
                continue
            for head in heads if isinstance(heads, (list, tuple, nn.ModuleList)) else [heads]:
                if isinstance(head, nn.Module):
                    weights = {*head.parameters()}
                    inside = [layer.param for layer in layers if layer.param in weights]
                    reasons |= dict.fromkeys(inside[-1:], f"output head ({name})")
    return reasons


def _named(layers: Sequence[Layer], is_end: Callable[[Layer], bool]) -> dict[nn.Parameter, str]:
    """Return {weight: reason} for layers with the name of a head, and the last layer of a module with such a name.

    The latter must be the model's last layer, or no other layer may take its outputs (``is_end``).
    """
    reasons, last_of = dict[nn.Parameter, str](), dict[str, Layer]()
    for layer in layers:
        parts = layer.path.split(".")
        before = list(takewhile(lambda part: part not in NAMES, parts))
        if len(before) == len(parts) - 1 or layer.path in (*TOP_LEVEL_NAMES, "output"):
            reasons[layer.param] = f"output head {parts[-1]}"
        elif parts[0] in TOP_LEVEL_NAMES:
            last_of[parts[0]] = layer
        elif len(before) < len(parts) and not any(part.isdigit() for part in before):
            last_of[".".join(parts[: len(before) + 1])] = layer
    for layer in last_of.values():
        if layer is layers[-1] or is_end(layer):
            reasons.setdefault(layer.param, f"output head {layer.path}")
    return reasons


def _last_of_sequence(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return {weight: reason} for the last layer of a model that is an ``nn.Sequential``, or wraps nothing but one."""
    module, is_sequence = model, False
    while children := [child for child in module.children() if any(True for _ in child.parameters())]:
        if not isinstance(module, nn.Sequential) and len(children) > 1:
            return {}
        is_sequence |= len(children) > 1
        module = children[-1]
    weights = [p for name, p in module.named_parameters() if len(whole_shape(p)) > 1 and is_linear_like(module, name)]
    return dict.fromkeys(weights, "output head: the last layer of a sequence") if is_sequence else {}


def _counted(model: nn.Module, layers: Sequence[Layer], taken: Counter[int]) -> dict[nn.Parameter, str]:
    """Return {weight: reason} for output heads by their size: that of the model's labels or vocabulary.

    Such a layer has as many outputs as the model has labels, or as many outputs or inputs as it has tokens.
    ``taken``: number of inputs -> number of layers that take so many.
    """
    labels = {count for owner in _outermost(model) for name in LABELS if (count := first_number(owner, (name,))) > 1}
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    tokens = {first_number(config, ("vocab_size",)) for config in configs.values()}
    in_blocks = {side for layer in layers if layer.is_in_block for side in (layer.outputs, layer.inputs)}
    tokens -= {0, 1} | in_blocks
    by_scorers = Counter(layer.inputs for layer in layers if layer.outputs == 1)  # which rate each label
    reasons = {}
    for layer in layers:
        # Detectors have one more output, for "no object".
        is_label = layer.outputs in labels or (layer.outputs - 1 in labels and _WORDS.search(layer.path))
        is_outside = layer.is_in_body is False and layer.outputs not in in_blocks
        if not _has_place(layer):
            continue
        if is_label and (is_outside or taken[layer.outputs] == by_scorers[layer.outputs]):
            reasons[layer.param] = f"output head: {layer.outputs} outputs, by the model's number of labels"
        elif tokens & {layer.outputs, layer.inputs}:
            reasons[layer.param] = "output head or embedding: one side is the model's vocab_size"
    return reasons


def _outermost(model: nn.Module) -> Iterator[Any]:
    """Yield all modules, and the config of each module that is not inside another module with a config."""
    inside: tuple[str, ...] = ()
    for path, module in model.named_modules():
        yield module
        if (config := getattr(module, "config", None)) is not None and not path.startswith(inside):
            inside += (f"{path}." if path else "",)
            yield config


def _with_ends(layers: Sequence[Layer], ends: Sequence[Layer], known: Mapping[nn.Parameter, str]) -> OutputHeads:
    """Return the output heads: those in ``known``, {weight: reason}, and some of ``ends``.

    ``ends``: layers whose outputs no other layer takes. Outside the body of a transformers model (its base model, which
    has no heads), all of them are heads. Without a known body, one of them is a head if it is the last one in the
    model's last part (:func:`_last_end`), has a head's name, or has as many outputs as another head. All ``ends``
    without a known body are uncertain, because a model may concatenate the outputs of several layers before the next
    one. ``layers``: all layers, in the order of the model's modules.
    """
    last = _last_end(layers, ends)
    unclear = [layer for layer in ends if layer.is_in_body is None]
    heads = [layer for layer in ends if layer.is_in_body is False]
    heads += [layer for layer in unclear if layer is last or _WORDS.search(layer.path)]
    counts = {layer.outputs for layer in (*heads, *(layer for layer in layers if layer.param in known))}
    heads += [layer for layer in unclear if layer.outputs in counts]
    reasons = {layer.param: f"output head: no other layer takes its {layer.outputs} outputs" for layer in heads}
    return OutputHeads({**reasons, **known}, frozenset(layer.param for layer in unclear))


def _last_end(layers: Sequence[Layer], ends: Sequence[Layer]) -> Layer | None:
    """Return the last of ``ends`` if it is in the model's last part: below the same child as the model's last layer."""
    paths = [layer.path.split(".") for layer in layers]
    shared = len(list(takewhile(lambda names: len({*names}) == 1, zip(*paths, strict=False))))
    if ends and ends[-1].path.split(".")[: shared + 1] == paths[-1][: shared + 1]:
        return ends[-1]
    return None


def _bodies(model: nn.Module) -> dict[str, str | None]:
    """Return {path of each transformers model in ``model``: path of its body, the base model without heads}.

    The two paths are equal for a model without heads. The body's path is ``None`` if it is unknown.
    """
    bodies: dict[str, str | None] = {}
    for path, module in model.named_modules():
        prefix: Any = getattr(module, "base_model_prefix", None)
        if isinstance(prefix, str):
            place = without_wrappers(path)
            if prefix and isinstance(getattr(module, prefix, None), nn.Module):
                bodies[place] = f"{place}.{prefix}".lstrip(".")
            else:
                bodies[place] = None if _TASK_CLASS.search(type(module).__name__) else place
    return bodies


def _is_in_body(path: str, bodies: Mapping[str, str | None]) -> bool | None:
    """Return whether the layer at ``path`` is in the body (base model) of the innermost transformers model around it.

    Return ``None`` without such a model, or if its body is unknown. ``bodies``: from :func:`_bodies`.
    """

    def is_inside(prefix: str) -> bool:
        return not prefix or path == prefix or path.startswith(prefix + ".")

    around = [model for model in bodies if is_inside(model)]
    body = bodies[max(around, key=len)] if around else None
    return None if body is None else is_inside(body)
