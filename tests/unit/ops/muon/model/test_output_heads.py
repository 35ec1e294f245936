# SPDX-License-Identifier: Apache-2.0
"""Output heads by their role: what a model says of itself, the place of a layer, and last its name."""

from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from deepspeed.muon.model import output_heads
from helpers.foreign_models import Gpt, Swiglu, linear, module, routes
from helpers.heads import VISION, built, by_library, lost, matrices_that_follow, task_classes


def mlp(*sizes: int) -> nn.Sequential:
    layers = [linear(inputs, outputs) for inputs, outputs in pairwise(sizes)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))


def blocks() -> nn.ModuleList:
    return nn.ModuleList(Swiglu() for _ in range(2))


def experts(count: int) -> nn.Module:
    stack = nn.Module()
    stack.gate_up_proj = nn.Parameter(torch.randn(count, 8, 16))
    return stack


def with_config(model: nn.Module, **settings: int) -> nn.Module:
    model.config = SimpleNamespace(**settings)
    return model


def dit() -> nn.Module:
    """The end of a diffusion transformer: the modulation comes after the head."""
    end = module(norm=nn.LayerNorm(8), linear=linear(8, 20), modulation=nn.Sequential(nn.SiLU(), linear(8, 16)))
    return module(blocks=blocks(), final_layer=end)


#: Model, the names of its matrices at AdamW, and those that the log lists as unsure. Names without ".weight".
HEADS: dict[str, tuple[nn.Module, str, str]] = {
    "a head of torchvision's": (module(body=linear(8, 8), fc=linear(8, 10)), "fc", "fc"),
    "two heads": (
        module(body=linear(8, 8), aux1=module(fc2=linear(8, 10)), layers=blocks(), fc=linear(8, 10)),
        "aux1.fc2 fc",
        "aux1.fc2 fc",
    ),
    "by the model's last part alone": (module(body=blocks(), probe=linear(8, 10)), "probe", "probe"),
    "before the blocks": (module(readout=linear(8, 10), body=blocks()), "readout", "readout"),
    "inside of a wrapper": (module(net=module(body=blocks(), end=linear(8, 5))), "net.end", "net.end"),
    "two layers, the first hidden": (module(fc1=linear(20, 8), fc2=linear(8, 10)), "fc2", "fc2"),
    "a hidden layer with a head's name": (module(fc=linear(20, 8), out=linear(8, 10)), "out", "out"),
    "modulation after the head": (dit(), "final_layer.linear", "final_layer.linear"),
    "several actors": (
        module(body=blocks(), policy=mlp(8, 8, 4), value=mlp(8, 8, 1)),
        "value.2",
        "policy.2",
    ),
    "towers whose outputs are joined": (
        module(users=mlp(30, 9, 7), items=mlp(40, 9, 5), top=mlp(12, 9, 3)),
        "top.2",
        "users.2 items.2 top.2",
    ),
    "as many labels as the config says": (
        with_config(module(label=linear(8, 7), body=blocks(), proj=linear(8, 8)), num_labels=7),
        "label",
        "",
    ),
    "as many labels as a hidden layer has outputs": (
        with_config(module(body=blocks(), label=linear(8, 16), classifier=linear(8, 16)), num_labels=16),
        "classifier",
        "",
    ),
    "one more output for no object": (
        with_config(module(class_embed=nn.ModuleList([linear(8, 8)] * 2), body=blocks()), num_labels=7),
        "",
        "",
    ),
    "a detector": (
        with_config(module(class_embed=nn.ModuleList(linear(8, 6) for _ in range(2)), body=blocks()), num_labels=5),
        "class_embed.0 class_embed.1",
        "",
    ),
    "tokens": (with_config(module(body=blocks(), till=linear(8, 50)), vocab_size=50), "till", ""),
    "tokens as inputs": (with_config(module(soft=linear(50, 8), body=blocks()), vocab_size=50), "soft", ""),
    "a sequence that ends as wide as it begins": (mlp(8, 4, 8), "2", ""),
    "a wrapped sequence": (module(net=mlp(8, 4, 8)), "net.2", ""),
    "as many labels as experts": (
        with_config(module(body=module(experts=experts(5)), label=linear(8, 5)), num_labels=5),
        "label",
        "",
    ),
    "a headless body": (module(embed=linear(3, 8), layers=blocks(), norm=nn.LayerNorm(8)), "", ""),
    "a head of several layers": (
        module(body=blocks(), classification_head=module(dense=linear(8, 8), out_proj=linear(8, 8))),
        "classification_head.out_proj",
        "",
    ),
    "a hidden layer below a head's name": (
        module(body=blocks(), head=module(dense=linear(8, 8)), decoder=linear(8, 8)),
        "",
        "",
    ),
    "a Gpt without names": (module(inner=Gpt(), end=linear(8, 40)), "inner.wte inner.wpe inner.lm_head end", "end"),
}


@pytest.mark.parametrize(("model", "expected", "unsure"), HEADS.values(), ids=HEADS)
def test_heads_go_to_adamw(model: nn.Module, expected: str, unsure: str) -> None:
    specs = {name.removesuffix(".weight"): spec for name, spec in routes(model).items() if len(spec.shape) == 2}
    matrices = {name: spec for name, spec in specs.items() if min(spec.shape) > 1}
    heads = {name for name, spec in matrices.items() if not spec.use_muon}
    assert heads | {name for name, spec in specs.items() if min(spec.shape) == 1} >= {*expected.split()} >= heads
    assert {name for name, spec in matrices.items() if spec.is_unsure} == {*unsure.split()}


def test_a_convolution_is_a_head_if_its_name_says_so() -> None:
    model = module(first=nn.Conv2d(3, 6, 3), second=nn.Conv2d(6, 9, 3), classifier=module(low=nn.Conv2d(9, 5, 1)))
    specs = routes(model, muon_conv="flatten")
    assert [specs[f"{name}.weight"].use_muon for name in ("first", "second", "classifier.low")] == [True, True, False]
    assert not any(spec.is_unsure for spec in routes(model).values()), "AdamW updates convolutions anyway"


def test_a_list_of_heads_and_a_layer_whose_outputs_are_joined() -> None:
    """As in MusicGen, and in the pooling of speaker embeddings, outside of the body of a transformers model."""
    model = module(body=blocks(), lm_heads=nn.ModuleList(linear(8, 50) for _ in range(2)))
    model.get_output_embeddings = lambda: model.lm_heads
    assert not any(spec.use_muon for name, spec in routes(model).items() if "lm_heads" in name)
    tdnn = nn.ModuleList(module(kernel=linear(inputs, outputs)) for inputs, outputs in ((8, 8), (8, 20)))
    model = module(base=blocks(), tdnn=tdnn, extractor=linear(40, 8))
    model.base_model_prefix = "base"
    assert routes(model)["tdnn.1.kernel.weight"].use_muon


def test_a_method_of_the_model_that_fails_or_means_something_else_decides_nothing() -> None:
    model = module(body=blocks(), decoder=linear(8, 8))

    def fail(*args: object) -> None:
        raise NotImplementedError

    model.get_output_embeddings, model.get_classifier = fail, lambda index: model.decoder
    assert routes(model)["decoder.weight"].use_muon


# ---- all models of the libraries ----------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.time_limit(1800)
def test_task_models_of_transformers() -> None:
    """No matrix that follows the number of labels or tokens is Muon's, and no hidden matrix is taken for a head."""
    seen, at_muon, taken = 0, [], []
    for name in task_classes():
        pair = built(name)
        if pair is None:
            continue
        seen += 1
        follow, specs = matrices_that_follow(*pair), routes(pair[0], check=False)
        at_muon += [(name, spec.name) for spec in specs.values() if spec.name in follow and spec.use_muon]
        taken += [(name, *found) for found in lost(specs, follow)]
    assert seen > 300 and not at_muon
    assert not taken, "hidden matrices inside of blocks"


@pytest.mark.full
@pytest.mark.time_limit(1800)
@pytest.mark.parametrize("library", VISION)
@pytest.mark.parametrize("getters", [output_heads.GETTERS, ()], ids=["getters", "places"])
def test_classifiers_of_vision_libraries(
    library: str, getters: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_heads, "GETTERS", getters)
    builders: dict[str, Callable[[int], nn.Module]] = by_library(library)
    seen, at_muon, taken = 0, [], []
    for name, build in builders.items():
        try:
            pair = build(57), build(63)
        except (NotImplementedError, TypeError):  # not on the meta device; without classes
            continue
        seen += 1
        follow = matrices_that_follow(*pair)
        for conv in ("adamw", "flatten"):
            specs = routes(pair[0], check=False, muon_conv=conv)
            at_muon += [(name, spec.name) for spec in specs.values() if spec.name in follow and spec.use_muon]
            taken += [(name, *found) for found in lost(specs, follow)]
    assert seen > 60 and not at_muon and not taken
