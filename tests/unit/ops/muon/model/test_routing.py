# SPDX-License-Identifier: Apache-2.0
"""Which parameter goes to Muon and which to AdamW, on small models built like those of well-known libraries."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.muon.layout import Block
from deepspeed.muon.model.output_heads import NAMES
from deepspeed.muon.model.routing import route
from helpers.foreign_models import WIDTH, Gpt, Swiglu, linear, module, nested, of_class, routes
from helpers.models import Conv1D


def moe(experts: str, **routers: nn.Module) -> nn.Module:
    return module(block=module(**routers, **{experts: nn.ModuleList([Swiglu(), Swiglu()])}))


def giving(head: Any) -> nn.Module:
    """A model whose `get_output_embeddings` returns `head(model)`, or is `head` itself where that is no function."""
    model = module(hidden=linear(WIDTH, WIDTH), project=linear(WIDTH, WIDTH, bias=True))
    model.get_output_embeddings = partial(head, model) if callable(head) else head
    return model


def tied(**children: nn.Module) -> nn.Module:
    """A model whose children share the weight of the first one."""
    first, *others = children.values()
    for other in others:
        other.weight = first.weight
    return module(**children)


BERT = module(
    attention=module(
        self=module(query=linear(), key=linear(), value=linear()),
        output=module(dense=linear(), LayerNorm=nn.LayerNorm(WIDTH)),
    ),
    intermediate=module(dense=linear()),
    output=module(dense=linear(2 * WIDTH, WIDTH), LayerNorm=nn.LayerNorm(WIDTH)),
)
GLU = "mlp.gate_proj mlp.up_proj mlp.down_proj"
MOE = " ".join(f"block.{{0}}.{i}.{part}_proj" for i in (0, 1) for part in ("gate", "up", "down"))
SHARED = linear(8, 8)
#: Model and the names of its parameters that go to Muon, without ".weight".
HIDDEN: dict[str, tuple[nn.Module, str]] = {
    "linear": (module(up=linear(bias=True)), "up"),
    "sequential": (nn.Sequential(linear(), nn.ReLU(), linear(16, 4)), "0"),
    "no parameters": (nn.ReLU(), ""),
    "gpt": (Gpt(), "h.0.attn h.0.mlp h.1.attn h.1.mlp"),
    "tied gpt": (Gpt(tied=True), "h.0.attn h.0.mlp h.1.attn h.1.mlp"),
    "glu": (module(mlp=Swiglu()), GLU),
    "gate of an mlp": (module(mlp=module(gate=linear(), up=linear())), "mlp.gate mlp.up"),
    "bert": (
        BERT,
        "attention.self.query attention.self.key attention.self.value attention.output.dense intermediate.dense "
        "output.dense",
    ),
    "nested output": (module(block=module(output=linear())), "block.output"),
    "attention": (module(attn=nn.MultiheadAttention(WIDTH, 2)), "attn.in_proj_weight attn.out_proj"),
    "attention with other keys": (
        module(attn=nn.MultiheadAttention(WIDTH, 2, kdim=6, vdim=4)),
        "attn.q_proj_weight attn.k_proj_weight attn.v_proj_weight attn.out_proj",
    ),
    "encoder layer": (
        nn.TransformerEncoderLayer(WIDTH, 2, 16),
        "self_attn.in_proj_weight self_attn.out_proj linear1 linear2",
    ),
    "hugging face conv1d": (module(c_attn=Conv1D(8, 24)), "c_attn"),
    "in_features and out_features": (module(down=of_class("Projector", in_features=8, out_features=12)), "down"),
    "parallel linear": (module(qkv=of_class("ColumnParallelLinear")), "qkv"),
    "token mixing": (module(mix=of_class("TokenMixingLinear", "token_weight")), "mix.token_weight"),
    "a linear with the name of an embedding": (module(patch_embed=linear()), "patch_embed"),
    "a subclass of linear": (module(fc=type("Special", (nn.Linear,), {})(8, 4)), "fc"),
    "gate_proj beside experts": (module(gate_proj=linear(), experts=nn.ModuleList([nn.ReLU()])), "gate_proj"),
    "experts": (moe("experts", gate=linear(8, 2)), MOE.format("experts")),
    "deepspeed's experts": (moe("deepspeed_moe", gate=linear(8, 2)), MOE.format("deepspeed_moe")),
    "recurrent": (
        nn.ModuleList([nn.LSTM(4, 8, num_layers=2, proj_size=3), nn.GRU(4, 8), nn.RNN(4, 8), nn.LSTMCell(4, 8)]),
        "",
    ),
    "names that contain a head's": (
        module(lm_head_norm=linear(), my_score=linear(), classifiers=linear(), outputs=linear()),
        "lm_head_norm my_score classifiers outputs",
    ),
    "head of a vision transformer": (nested("head", linear()), ""),
    "head of RoBERTa": (nested("classifier.out_proj", linear()), ""),
    "head of VGG": (module(classifier=nn.Sequential(linear(), nn.ReLU(), linear(16, 4))), "classifier.0"),
    "a hidden matrix that is shared": (tied(first=SHARED, second=SHARED, third=linear(8, 8)), "first"),
    "get_output_embeddings: none": (giving(lambda model: None), "hidden project"),
    "get_output_embeddings: another": (giving(lambda model: model.hidden), "project"),
    "get_output_embeddings is None": (giving(None), "hidden project"),
    "wrapped": (module(_orig_mod=module(head=linear(), body=linear())), "_orig_mod.body"),
    "no elements": (module(adapter=nn.Linear(0, 4)), ""),
}


@pytest.mark.parametrize(("model", "expected"), HIDDEN.values(), ids=HIDDEN)
def test_hidden_matrices_go_to_muon(model: nn.Module, expected: str) -> None:
    names = {name.removesuffix(".weight") for name, spec in routes(model).items() if spec.use_muon}
    assert names == set(expected.split())


def test_the_model_may_be_one_matrix() -> None:
    spec = routes(linear(bias=True))["weight"]
    assert (spec.use_muon, spec.reason, spec.blocks) == (True, "hidden matrix of Linear", (Block(0, 16, 8, 8),))


#: Model, the name of one of its parameters and why it goes to AdamW.
ADAMW: dict[str, tuple[nn.Module, str, str]] = {
    "bias": (module(fc=linear(bias=True)), "fc.bias", "1-D"),
    "layer norm": (module(norm=nn.LayerNorm(8)), "norm.weight", "1-D"),
    "scalar": (nn.ParameterDict({"s": nn.Parameter(torch.tensor(1.0))}), "s", "0-D"),
    "conv1d": (module(conv=nn.Conv1d(4, 8, 3)), "conv.weight", "convolution (Conv1d)"),
    "conv2d": (module(conv=nn.Conv2d(4, 8, 3)), "conv.weight", "convolution (Conv2d)"),
    "bilinear": (module(mix=nn.Bilinear(4, 5, 6)), "mix.weight", "more than two"),
    "3-D experts": (nn.ParameterDict({"w": torch.randn(2, 8, 8)}), "w", "more than two"),
    "row": (module(shared_expert_gate=linear(8, 1)), "shared_expert_gate.weight", "vector"),
    "column": (module(up=linear(1, 8)), "up.weight", "vector"),
    "embedding": (module(tokens=nn.Embedding(9, 8)), "tokens.weight", "embedding (Embedding)"),
    "embedding bag": (module(tokens=nn.EmbeddingBag(9, 8)), "tokens.weight", "embedding (EmbeddingBag)"),
    "parallel embedding": (module(words=of_class("VocabParallelEmbedding")), "words.weight", "embedding (Vocab"),
    "positions": (Gpt(), "wpe", "embedding by its name wpe"),
    "class token": (nn.ParameterDict({"pos_embed": torch.randn(4, 8)}), "pos_embed", "embedding by its name"),
    "tied head": (Gpt(tied=True), "wte.weight", "embedding (Embedding), tied"),
    "head tied to an embedding that comes later": (
        tied(decoder=linear(8, 32), tokens=nn.Embedding(32, 8)),
        "decoder.weight",
        "embedding (Embedding), tied",
    ),
    "one module under two names": (module(mixer=SHARED, lm_head=SHARED), "mixer.weight", "output head lm_head, tied"),
    "lstm": (module(rnn=nn.LSTM(4, 8)), "rnn.weight_ih_l0", "LSTM is not a known linear module"),
    "unknown": (module(mixer=of_class("Mixer")), "mixer.weight", "Mixer is not a known linear module; for Muon set"),
    "top-level output": (module(output=linear()), "output.weight", "output head output"),
    "hugging face head": (
        giving(lambda model: model.project),
        "project.weight",
        "output head (get_output_embeddings)",
    ),
    "mixtral": (moe("experts", gate=linear(8, 2)), "block.gate.weight", "MoE router"),
    "residual": (moe("experts", coefficient=linear(8, 2)), "block.coefficient.weight", "mixture of a residual MoE"),
    "switch": (moe("mlps", router=module(proj=linear(8, 2))), "block.router.proj.weight", "MoE router"),
    "router": (moe("mlps", my_router=linear(8, 2)), "block.my_router.weight", "MoE router"),
    "router by its class": (module(mlp=of_class("TopKRouter")), "mlp.weight", "MoE router"),
    "deepseek gate": (module(mlp=module(gate=of_class("MoEGate"))), "mlp.gate.weight", "MoE router"),
    "deepspeed moe": (nested("deepspeed_moe.gate.wg", linear(8, 2)), "deepspeed_moe.gate.wg.weight", "MoE router"),
}
for name in sorted(NAMES):
    ADAMW[f"{name} of a model"] = (module(**{name: linear()}), f"{name}.weight", f"output head {name}")
    ADAMW[f"{name} inside"] = (nested(f"a.b.{name}", linear()), f"a.b.{name}.weight", f"output head {name}")


@pytest.mark.parametrize(("model", "name", "reason"), ADAMW.values(), ids=ADAMW)
def test_the_rest_goes_to_adamw_with_a_reason(model: nn.Module, name: str, reason: str) -> None:
    spec = routes(model)[name]
    assert not spec.use_muon and reason in spec.reason


def test_frozen_parameters_have_no_route() -> None:
    model = module(a=linear(bias=True), b=linear())
    model.a.weight.requires_grad_(False)
    assert list(routes(model)) == ["a.bias", "b.weight"]


@pytest.mark.parametrize(("name", "shape"), [("norm.weight", r"\[8\]"), ("empty.weight", r"\[4, 0\]")])
def test_muon_on_what_is_no_matrix_is_refused_by_name(name: str, shape: str) -> None:
    model = module(norm=nn.LayerNorm(8), empty=nn.Linear(0, 4))
    model.get_parameter(name).use_muon = True
    with pytest.raises(ValueError, match=rf"{name}: use_muon = True.*{shape}"):
        route(model)


def test_the_shape_before_stage_3_partitioned_counts() -> None:
    """Under `zero.Init` the data is empty and `ds_shape` has the shape."""
    model = module(fc=linear(bias=True), head=module(lm_head=linear()), row=linear(8, 1), conv=nn.Conv2d(4, 8, 3))
    for param in model.parameters():
        param.ds_shape, param.data = param.shape, torch.empty(0)
    specs = routes(model)
    assert {name for name, spec in specs.items() if spec.use_muon} == {"fc.weight"}
    assert (specs["fc.weight"].shape, specs["fc.weight"].blocks) == ((16, 8), (Block(0, 16, 8, 8),))
    assert specs["conv.weight"].numel == 8 * 4 * 9 and "convolution" in specs["conv.weight"].reason
    model.fc.bias.use_muon = True
    with pytest.raises(ValueError, match=r"fc\.bias: use_muon = True.*\[16\]"):
        route(model)
