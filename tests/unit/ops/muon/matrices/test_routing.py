# SPDX-License-Identifier: Apache-2.0
"""Which parameter goes to Muon and which to AdamW, on small models built like those of well-known libraries."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.muon.matrices.block import Block
from deepspeed.muon.matrices.routing import HEAD_NAMES, route
from helpers.foreign_models import (
    WIDTH,
    BertLayer,
    ColumnParallelLinear,
    Conv1D,
    Gpt,
    HuggingFace,
    Mixer,
    Projector,
    Swiglu,
    TokenMixingLinear,
    VocabParallelEmbedding,
    linear,
    module,
    muon_names,
    reason,
    routes,
)

# ---- Muon's half ----------------------------------------------------------------------------------------

HIDDEN: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "linear": (lambda: module(fc=linear(bias=True)), {"fc.weight"}),
    "sequential": (lambda: nn.Sequential(linear(), nn.ReLU(), linear(16, 4)), {"0.weight", "2.weight"}),
    "the model itself": (lambda: linear(bias=True), {"weight"}),
    "gpt": (Gpt, {f"h.{i}.{part}.weight" for i in range(2) for part in ("attn", "mlp")}),
    "glu": (lambda: module(mlp=Swiglu()), {f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")}),
    "gate of an mlp": (lambda: module(mlp=module(gate=linear(), up=linear())), {"mlp.gate.weight", "mlp.up.weight"}),
    "bert": (
        lambda: module(encoder=module(layer=nn.ModuleList([BertLayer()]))),
        {
            f"encoder.layer.0.{path}.weight"
            for path in (
                *(f"attention.self.{part}" for part in ("query", "key", "value")),
                "attention.output.dense",
                "intermediate.dense",
                "output.dense",
            )
        },
    ),
    "nested output": (lambda: module(block=module(output=linear())), {"block.output.weight"}),
    "attention": (
        lambda: module(attn=nn.MultiheadAttention(WIDTH, 2)),
        {"attn.in_proj_weight", "attn.out_proj.weight"},
    ),
    "attention with other keys": (
        lambda: module(attn=nn.MultiheadAttention(WIDTH, 2, kdim=6, vdim=4)),
        {"attn.q_proj_weight", "attn.k_proj_weight", "attn.v_proj_weight", "attn.out_proj.weight"},
    ),
    "encoder layer": (
        lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16),
        {"self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight"},
    ),
    "hugging face conv1d": (lambda: module(c_attn=Conv1D(24, 8)), {"c_attn.weight"}),
    "in_features and out_features": (lambda: module(down=Projector(8, 12)), {"down.weight"}),
    "parallel linear": (lambda: module(qkv=ColumnParallelLinear()), {"qkv.weight"}),
    "token mixing": (lambda: module(mix=TokenMixingLinear()), {"mix.token_weight"}),
    "a linear with the name of an embedding": (lambda: module(patch_embed=linear()), {"patch_embed.weight"}),
    "a subclass of linear": (lambda: module(fc=type("Special", (nn.Linear,), {})(8, 4)), {"fc.weight"}),
    "gate_proj beside experts": (
        lambda: module(gate_proj=linear(), experts=nn.ModuleList([nn.ReLU()])),
        {"gate_proj.weight"},
    ),
    "experts": (
        lambda: module(experts=nn.ModuleList([Swiglu()])),
        {f"experts.0.{p}_proj.weight" for p in ("gate", "up", "down")},
    ),
}


@pytest.mark.parametrize(("make", "expected"), HIDDEN.values(), ids=HIDDEN)
def test_hidden_matrices_go_to_muon(make: Callable[[], nn.Module], expected: set[str]) -> None:
    assert muon_names(make()) == expected


def test_the_reason_names_the_kind_of_module() -> None:
    assert routes(module(fc=linear()))["fc.weight"].reason == "hidden matrix of Linear"
    assert routes(module(fc=Conv1D(4, 8)))["fc.weight"].reason == "hidden matrix of Conv1D"


def test_a_whole_matrix_is_one_block() -> None:
    assert routes(module(fc=linear()))["fc.weight"].blocks == (Block(0, 16, 8, 8),)


# ---- AdamW's half ---------------------------------------------------------------------------------------


def moe(experts: str, **routers: nn.Module) -> nn.Module:
    return module(block=module(**routers, **{experts: nn.ModuleList([Swiglu(), Swiglu()])}))


def named(kind: str, base: type[nn.Module] = Mixer) -> nn.Module:
    """A module whose class is called `kind`."""
    return type(kind, (base,), {})()


ADAMW: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "bias": (lambda: module(fc=linear(bias=True)), "fc.bias", "1-D"),
    "layer norm": (lambda: module(norm=nn.LayerNorm(8)), "norm.weight", "1-D"),
    "scalar": (lambda: nn.ParameterDict({"s": nn.Parameter(torch.tensor(1.0))}), "s", "0-D"),
    "conv1d": (lambda: module(conv=nn.Conv1d(4, 8, 3)), "conv.weight", "convolution (Conv1d)"),
    "conv2d": (lambda: module(conv=nn.Conv2d(4, 8, 3)), "conv.weight", "convolution (Conv2d)"),
    "bilinear": (lambda: module(mix=nn.Bilinear(4, 5, 6)), "mix.weight", "more than two"),
    "3-D experts": (lambda: nn.ParameterDict({"w": torch.randn(2, 8, 8)}), "w", "more than two"),
    "row": (lambda: module(shared_expert_gate=linear(8, 1)), "shared_expert_gate.weight", "vector"),
    "column": (lambda: module(up=linear(1, 8)), "up.weight", "vector"),
    "embedding": (lambda: module(tokens=nn.Embedding(9, 8)), "tokens.weight", "embedding (Embedding)"),
    "embedding bag": (lambda: module(tokens=nn.EmbeddingBag(9, 8)), "tokens.weight", "embedding (EmbeddingBag)"),
    "parallel embedding": (lambda: module(words=VocabParallelEmbedding()), "words.weight", "embedding (Vocab"),
    "positions": (Gpt, "wpe", "embedding by its name wpe"),
    "class token": (lambda: nn.ParameterDict({"pos_embed": torch.randn(4, 8)}), "pos_embed", "embedding by its name"),
    "lstm": (lambda: module(rnn=nn.LSTM(4, 8)), "rnn.weight_ih_l0", "LSTM is not a known linear module"),
    "unknown": (lambda: module(mixer=Mixer()), "mixer.table", "Mixer is not a known linear module; for Muon set"),
    "top-level output": (lambda: module(output=linear()), "output.weight", "output head output"),
    "hugging face head": (HuggingFace, "unembed.weight", "output head (get_output_embeddings)"),
    "mixtral": (lambda: moe("experts", gate=linear(8, 2)), "block.gate.weight", "MoE router"),
    "residual": (
        lambda: moe("experts", coefficient=linear(8, 2)),
        "block.coefficient.weight",
        "mixture of a residual MoE",
    ),
    "switch": (lambda: moe("mlps", router=module(proj=linear(8, 2))), "block.router.proj.weight", "MoE router"),
    "router": (lambda: moe("mlps", my_router=linear(8, 2)), "block.my_router.weight", "MoE router"),
    "router by its class": (lambda: module(mlp=named("TopKRouter")), "mlp.table", "MoE router"),
    "deepseek gate": (lambda: module(mlp=module(gate=named("MoEGate"))), "mlp.gate.table", "MoE router"),
    "deepspeed moe": (
        lambda: module(deepspeed_moe=module(gate=module(wg=linear(8, 2)), experts=nn.ModuleList([Swiglu()]))),
        "deepspeed_moe.gate.wg.weight",
        "MoE router",
    ),
}


@pytest.mark.parametrize(("make", "name", "part"), ADAMW.values(), ids=ADAMW)
def test_the_rest_goes_to_adamw_with_a_reason(make: Callable[[], nn.Module], name: str, part: str) -> None:
    assert part in reason(make(), name)


@pytest.mark.parametrize("name", sorted(HEAD_NAMES))
@pytest.mark.parametrize("depth", [0, 2])
def test_output_heads_by_name(name: str, depth: int) -> None:
    model = module(**{name: linear(), "fc": linear()})
    prefix = "".join(f"m{i}." for i in range(depth))
    for i in reversed(range(depth)):
        model = module(**{f"m{i}": model})
    assert reason(model, f"{prefix}{name}.weight") == f"output head {name}"
    assert muon_names(model) == {f"{prefix}fc.weight"}


@pytest.mark.parametrize("name", ["lm_head_norm", "my_score", "classifiers", "outputs"])
def test_names_that_only_contain_a_heads_are_hidden(name: str) -> None:
    assert muon_names(module(**{name: linear()})) == {f"{name}.weight"}


@pytest.mark.parametrize("experts", ["experts", "deepspeed_moe"])
def test_only_the_router_of_a_moe_block_goes_to_adamw(experts: str) -> None:
    model = moe(experts, gate=linear(8, 2))
    expected = {f"block.{experts}.{i}.{part}_proj.weight" for i in range(2) for part in ("gate", "up", "down")}
    assert muon_names(model) == expected


@pytest.mark.parametrize(
    "lstm", [nn.LSTM(4, 8, num_layers=2, proj_size=3), nn.GRU(4, 8), nn.RNN(4, 8), nn.LSTMCell(4, 8)]
)
def test_recurrent_matrices_go_to_adamw(lstm: nn.Module) -> None:
    assert muon_names(module(rnn=lstm)) == set()


def test_a_tied_head_is_an_embedding() -> None:
    model = Gpt(tied=True)
    assert "lm_head.weight" not in routes(model)
    assert reason(model, "wte.weight") == "embedding (Embedding), tied"
    assert muon_names(model) == muon_names(Gpt())


def test_a_head_that_is_named_first_stays_tied_to_its_embedding() -> None:
    """`named_parameters` knows the weight as the head's."""
    head, tokens = linear(8, 32), nn.Embedding(32, 8)
    tokens.weight = head.weight
    model = module(decoder=head, tokens=tokens)
    assert reason(model, "decoder.weight") == "embedding (Embedding), tied"


def test_a_shared_hidden_matrix_goes_to_muon_once() -> None:
    shared = linear(8, 8)
    model = module(first=shared, second=shared, third=linear(8, 8))
    model.third.weight = shared.weight
    assert muon_names(model) == {"first.weight"}


def test_one_module_under_two_names_is_a_head_where_one_of_them_is() -> None:
    shared = linear(8, 8)
    assert reason(module(mixer=shared, lm_head=shared), "mixer.weight") == "output head lm_head, tied"


@pytest.mark.parametrize("head", [None, "hidden", object()], ids=["none", "another", "no module"])
def test_get_output_embeddings_is_believed(head: Any) -> None:
    expected = {"unembed.weight"} if head == "hidden" else {"hidden.weight", "unembed.weight"}
    assert muon_names(HuggingFace(head)) == expected


@pytest.mark.parametrize("value", [None, "fc"])
def test_get_output_embeddings_that_is_no_method(value: Any) -> None:
    model = module(fc=linear())
    model.get_output_embeddings = value
    assert muon_names(model) == {"fc.weight"}


# ---- frozen, tagged, partitioned ------------------------------------------------------------------------


def test_frozen_parameters_have_no_route() -> None:
    model = module(a=linear(bias=True), b=linear())
    model.a.weight.requires_grad_(False)
    assert list(routes(model)) == ["a.bias", "b.weight"]


def test_a_model_without_parameters() -> None:
    assert routes(nn.ReLU()) == {}


@pytest.mark.parametrize(("name", "shape"), [("norm.weight", r"\[8\]"), ("empty.weight", r"\[4, 0\]")])
def test_muon_on_what_is_no_matrix_is_refused_by_name(name: str, shape: str) -> None:
    model = module(norm=nn.LayerNorm(8), empty=nn.Linear(0, 4))
    model.get_parameter(name).use_muon = True
    with pytest.raises(ValueError, match=rf"{name}: use_muon = True.*{shape}"):
        route(model)


def test_adamw_may_be_asked_for_anything() -> None:
    model = module(norm=nn.LayerNorm(8), conv=nn.Conv1d(4, 8, 3))
    for param in model.parameters():
        param.use_muon = False
    assert muon_names(model) == set()


@pytest.mark.parametrize("name", ["head", "classifier.out_proj", "classifier.6"])
def test_more_names_of_heads(name: str) -> None:
    """Of vision transformers, RoBERTa and VGG."""
    model: nn.Module = linear()
    for part in reversed(name.split(".")):
        model = module(**{part: model})
    assert muon_names(model) == set()


def test_only_the_last_layer_of_a_classifier_is_a_head() -> None:
    """As in VGG and AlexNet."""
    model = module(classifier=nn.Sequential(linear(), nn.ReLU(), linear(16, 4)))
    assert muon_names(model) == {"classifier.0.weight"}


def test_an_empty_matrix_does_not_go_to_muon() -> None:
    model = module(adapter=Projector(0, 4))
    assert muon_names(model) == set()
