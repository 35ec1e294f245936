# SPDX-License-Identifier: Apache-2.0
"""Find a model's output heads: the linear layers whose outputs no other layer takes as inputs.

What the model says comes first: the output layer that it returns, and how many labels, classes and tokens it knows.
Next comes a layer's place: outside of repeated blocks, with a number of outputs that no other layer takes as inputs.
Names come last. The forward pass is not traced, because its inputs are unknown when the optimizer is built.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from torch import nn

from deepspeed.muon.matrices.fused import output_axis
from deepspeed.muon.matrices.heads import first_number, is_projection
from deepspeed.muon.matrices.pipeline import embeddings_and_heads, is_pipeline
from deepspeed.muon.matrices.splitting import Use, embedding_reason, is_convolution, is_linear_like, without_wrappers
from deepspeed.muon.matrices.tp_sharding import whole_shape

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
    r"(^|[._])(heads?|classifiers?|logits?|fc|outs?|outputs?|pred|predictors?|predictions?|scores?|readout|regressor)"
    r"\d*([._]|$)"
)
#: A path through a repeated block: a number, and later a name.
_IN_BLOCK = re.compile(r"(^|\.)\d+\.(.*\.)?[^\d.]")
#: Into how many equal parts a model may split a layer's outputs, each of which another layer takes: gate and up;
#: queries, keys and values; two or six numbers for modulation.
PARTS = (1, 2, 3, 6)


class Layer(NamedTuple):
    """A linear layer or convolution, at one place in the model, whose weight may be an output head."""

    param: nn.Parameter
    path: str
    outputs: int
    inputs: int

    @property
    def is_in_block(self) -> bool:
        """Return whether the layer lies in a block that is repeated, such as ``layers.0.mlp``."""
        return bool(_IN_BLOCK.search(self.path))


class OutputHeads(NamedTuple):
    """``reasons``: each output head, and why it is one. ``uncertain``: weights of layers that may be heads."""

    reasons: dict[nn.Parameter, str]
    uncertain: frozenset[nn.Parameter]


def find_output_heads(
    model: nn.Module, uses: Mapping[nn.Parameter, Sequence[Use]], hidden: Iterable[nn.Parameter]
) -> OutputHeads:
    """Find the output heads of ``model``.

    Of a pipeline stage only names and the pipeline's own layout count, because the rest of the model is elsewhere.

    Args:
        uses: each parameter of the model -> the places that use it, in the model's order.
        hidden: parameters that are no heads, whatever their place: routers and factors of low-rank adapters.
    """
    no_head = set(hidden)
    layers = [layer for param, found in uses.items() if param not in no_head for layer in _layers(param, found)]
    reasons = _named(layers) | _returned(model) | embeddings_and_heads(model)
    if is_pipeline(model) or sum(len(whole_shape(param)) > 1 for param in uses) < 2:
        return OutputHeads(reasons, frozenset())
    reasons = _last_of_sequence(model) | reasons
    taken = {width for param, found in uses.items() if param not in no_head for width in _taken_inputs(param, found)}
    reasons = _counted(model, layers, taken) | reasons
    ends = [layer for layer in layers if layer.param not in reasons and _is_end(layer, taken)]
    return _with_ends(model, layers, ends, reasons)


def _layers(param: nn.Parameter, uses: Sequence[Use]) -> Iterator[Layer]:
    """Yield a :class:`Layer` for each linear layer or convolution that uses ``param`` as its weight."""
    shape = whole_shape(param)
    if len(shape) < 2 or min(shape) < 1:
        return
    for use in uses:
        if is_convolution(use.module) and len(shape) > 2:
            groups: Any = use.module.groups
            yield Layer(param, use.path, shape[0], shape[1] * groups)
        elif len(shape) == 2 and is_linear_like(use.module, use.attribute) and not embedding_reason(use):
            axis = output_axis(use.module)
            yield Layer(param, use.path, shape[axis], shape[1 - axis])


def _taken_inputs(param: nn.Parameter, uses: Sequence[Use]) -> Iterator[int]:
    """Yield the numbers of inputs that a parameter's layers may take: an embedding none, a norm one for each weight."""
    shape, layers = whole_shape(param), list(_layers(param, uses))
    if layers:
        yield from (layer.inputs for layer in layers)
    elif not all(embedding_reason(use) or use.attribute.endswith("bias") for use in uses):
        yield from (size for size in shape if size > 1)


def _returned(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return {weight: reason} for the output layers that the model, or a model inside of it, returns by a method."""
    found: dict[nn.Parameter, str] = {}
    for module in model.modules():
        for name in GETTERS:
            get = getattr(module, name, None)
            try:
                heads = get() if callable(get) else None
            except (AttributeError, NotImplementedError, TypeError):  # a model without a head, or another method
                continue
            for head in heads if isinstance(heads, (list, tuple)) else [heads]:
                if isinstance(head, nn.Module):
                    found |= dict.fromkeys(head.parameters(), f"output head ({name})")
    return found


def _named(layers: Iterable[Layer]) -> dict[nn.Parameter, str]:
    """Return {weight: reason} for layers with the name of a head, and the last layer of a module with such a name."""
    last_of: dict[str, tuple[nn.Parameter, str]] = {}
    for layer in layers:
        parts = layer.path.split(".")
        before = list(takewhile(lambda part: part not in NAMES, parts))
        named = [] if parts[0] in TOP_LEVEL_NAMES or layer.path == "output" else before
        is_named = len(named) < len(parts)
        if is_named and (len(named) == len(parts) - 1 or not any(part.isdigit() for part in named)):
            place = ".".join(parts[len(named) :])
            last_of[".".join(parts[: len(named) + 1])] = layer.param, f"output head {place}"
    return dict(last_of.values())


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


def _counted(model: nn.Module, layers: Iterable[Layer], taken: set[int]) -> dict[nn.Parameter, str]:
    """Return {weight: reason} for layers with as many outputs as the model has labels, or a side as it has tokens."""
    labels, tokens = set[int](), set[int]()
    sources = {id(source): source for module in model.modules() for source in (module, getattr(module, "config", None))}
    for source in sources.values():
        for name in LABELS:
            if count := first_number(source, (name,)):
                labels |= {count, count + 1}  # one more in detectors, for "no object"
        tokens.add(first_number(source, ("vocab_size",)))
    layers = list(layers)
    widths_in_blocks = {side for layer in layers if layer.is_in_block for side in (layer.outputs, layer.inputs)}
    tokens -= widths_in_blocks | {0, 1}
    found = {}
    for layer in layers:
        if layer.is_in_block:
            continue
        if layer.outputs in labels - taken:
            found[layer.param] = f"output head: {layer.outputs} outputs, by the model's number of labels"
        elif tokens & {layer.outputs, layer.inputs}:
            found[layer.param] = "output head or embedding: one side is the model's vocab_size"
    return found


def _is_end(layer: Layer, taken: set[int]) -> bool:
    """Return whether a linear layer outside of repeated blocks has outputs that no layer takes, not even in parts."""
    is_linear = len(whole_shape(layer.param)) == 2  # the outputs of a convolution may be taken as a flattened image
    if layer.is_in_block or not is_linear or is_projection(layer.path.rpartition(".")[2]):
        return False
    return not any(layer.outputs == parts * width for parts in PARTS for width in taken)


def _with_ends(
    model: nn.Module, layers: Sequence[Layer], ends: Sequence[Layer], known: dict[nn.Parameter, str]
) -> OutputHeads:
    """Return the heads in ``known`` and those among ``ends``, the layers whose outputs no other layer takes.

    transformers separates a model's body from its heads. In other models an end is a head if it is the last one in the
    model's last part, has a head's name, or as many outputs as a head. The rest is uncertain: a model may join the
    outputs of several layers before the next one.
    """
    bodies = _bodies(model)
    last = _last_end(layers, ends)
    counts = {layer.outputs for layer in layers if layer.param in known}
    reasons, uncertain = dict(known), set()
    for layer in ends:
        is_in_body = _is_in_body(layer.path, bodies)
        has_heads_place = layer is last or _WORDS.search(layer.path) or layer.outputs in counts
        if is_in_body is False or (is_in_body is None and has_heads_place):
            reasons[layer.param] = f"output head: no other layer takes its {layer.outputs} outputs"
        elif is_in_body is None:
            uncertain.add(layer.param)
    return OutputHeads(reasons, frozenset(uncertain - reasons.keys()))


def _last_end(layers: Sequence[Layer], ends: Sequence[Layer]) -> Layer | None:
    """Return the last of ``ends`` if it is in the model's last part: below the same child as the model's last layer."""
    paths = [layer.path.split(".") for layer in layers]
    shared = len(list(takewhile(lambda names: len({*names}) == 1, zip(*paths, strict=False))))
    if ends and ends[-1].path.split(".")[: shared + 1] == paths[-1][: shared + 1]:
        return ends[-1]
    return None


def _bodies(model: nn.Module) -> dict[str, str]:
    """Return {path of a transformers model: path of its body}; the two are equal if the model has no heads."""
    bodies = {}
    for path, module in model.named_modules():
        prefix: Any = getattr(module, "base_model_prefix", None)
        if isinstance(prefix, str):
            has_body = bool(prefix) and isinstance(getattr(module, prefix, None), nn.Module)
            place = without_wrappers(path)
            bodies[place] = f"{place}.{prefix}".lstrip(".") if has_body else place
    return bodies


def _is_in_body(path: str, bodies: Mapping[str, str]) -> bool | None:
    """Return whether a layer is in the body of the innermost transformers model around it; ``None`` outside of one."""

    def is_inside(folder: str) -> bool:
        return not folder or path == folder or path.startswith(folder + ".")

    around = [model for model in bodies if is_inside(model)]
    return is_inside(bodies[max(around, key=len)]) if around else None
