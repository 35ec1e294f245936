# SPDX-License-Identifier: Apache-2.0
"""Which parameter goes to Muon and which to AdamW, on small models built like those of well-known libraries."""

from collections.abc import Callable
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from deepspeed.muon.routing import HEAD_NAMES, Block, MatrixSpec, route

WIDTH = 8


def module(**children: nn.Module) -> nn.Module:
    """A module with these children and nothing else."""
    parent = nn.Module()
    for name, child in children.items():
        parent.add_module(name, child)
    return parent


def linear(inputs: int = WIDTH, outputs: int = 2 * WIDTH, bias: bool = False) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias)


def routes(model: nn.Module) -> dict[str, MatrixSpec]:
    """Specs by name, after the checks that hold for every model."""
    specs = route(model)
    trainable = {name: param for name, param in model.named_parameters() if param.requires_grad}
    assert list(specs) == list(trainable.values()), "every trainable parameter once, in the model's order"
    for name, param in trainable.items():
        spec = specs[param]
        assert spec.name == name
        assert spec.shape == tuple(getattr(param, "ds_shape", param.shape))
        assert spec.reason
        assert covered(spec) == (list(range(spec.numel)) if spec.use_muon else [])
    assert not any(hasattr(param, "use_muon") for param in model.parameters())
    return {spec.name: spec for spec in specs.values()}


def covered(spec: MatrixSpec) -> list[int]:
    """Elements of the blocks, sorted, with repetitions."""
    return sorted(
        block.offset + i * block.stride + j
        for block in spec.blocks
        for i in range(block.rows)
        for j in range(block.cols)
    )


def muon_names(model: nn.Module) -> set[str]:
    return {name for name, spec in routes(model).items() if spec.use_muon}


def reason(model: nn.Module, name: str) -> str:
    """Why `name` goes to AdamW."""
    spec = routes(model)[name]
    assert not spec.use_muon, spec.reason
    return spec.reason


# ---- modules of foreign libraries -----------------------------------------------------------------------


class Conv1D(nn.Module):
    """Like Hugging Face's of GPT-2: a linear layer whose weight is [in, out]."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))


class Projector(nn.Module):
    """Linear by its attributes, like quantized and parallel layers of several libraries."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.in_features, self.out_features = inputs, outputs
        self.weight = nn.Parameter(torch.randn(outputs, inputs))


class ColumnParallelLinear(nn.Module):
    """Linear by the name of its class, like Megatron's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(12, 8))


class TokenMixingLinear(nn.Module):
    """Linear by the name of its class, with a weight that has a name of embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.token_weight = nn.Parameter(torch.randn(12, 8))


class VocabParallelEmbedding(nn.Module):
    """An embedding by the name of its class, like Megatron's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(30, 8))


class Mixer(nn.Module):
    """Holds a matrix, and nothing says what for."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, 8))


class Swiglu(nn.Module):
    """Llama's MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = linear(), linear(), linear(2 * WIDTH, WIDTH)


class BertLayer(nn.Module):
    """Nested modules called `output`, with a Linear called `dense`."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = module(
            self=module(query=linear(), key=linear(), value=linear()),
            output=module(dense=linear(), LayerNorm=nn.LayerNorm(WIDTH)),
        )
        self.intermediate = module(dense=linear())
        self.output = module(dense=linear(2 * WIDTH, WIDTH), LayerNorm=nn.LayerNorm(WIDTH))


class Gpt(nn.Module):
    """With positions as a parameter of its own."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.wte = nn.Embedding(32, WIDTH)
        self.wpe = nn.Parameter(torch.randn(16, WIDTH))
        self.h = nn.ModuleList(
            module(ln=nn.LayerNorm(WIDTH), attn=linear(WIDTH, 3 * WIDTH, bias=True), mlp=linear(bias=True))
            for _ in range(2)
        )
        self.lm_head = linear(WIDTH, 32)
        if tied:
            self.lm_head.weight = self.wte.weight


class HuggingFace(nn.Module):
    """Names its head itself; the head may be None, a module, or something that is no module."""

    def __init__(self, head: Any = "unembed") -> None:
        super().__init__()
        self.hidden = linear()
        self.unembed = linear(WIDTH, 32, bias=True)
        self._head = getattr(self, head) if isinstance(head, str) else head

    def get_output_embeddings(self) -> Any:
        return self._head


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
    "conv1d": (lambda: module(conv=nn.Conv1d(4, 8, 3)), "conv.weight", "more than two"),
    "conv2d": (lambda: module(conv=nn.Conv2d(4, 8, 3)), "conv.weight", "more than two"),
    "bilinear": (lambda: module(mix=nn.Bilinear(4, 5, 6)), "mix.weight", "more than two"),
    "3-D experts": (lambda: nn.ParameterDict({"w": torch.randn(2, 8, 8)}), "w", "more than two"),
    "row": (lambda: module(shared_expert_gate=linear(8, 1)), "shared_expert_gate.weight", "vector"),
    "column": (lambda: module(up=linear(1, 8)), "up.weight", "vector"),
    "embedding": (lambda: module(tokens=nn.Embedding(9, 8)), "tokens.weight", "embedding (Embedding)"),
    "embedding bag": (lambda: module(tokens=nn.EmbeddingBag(9, 8)), "tokens.weight", "embedding (EmbeddingBag)"),
    "parallel embedding": (lambda: module(words=VocabParallelEmbedding()), "words.weight", "embedding (Vocab"),
    "positions": (Gpt, "wpe", "embedding by its name wpe"),
    "class token": (lambda: nn.ParameterDict({"pos_embed": torch.randn(4, 8)}), "pos_embed", "embedding by its name"),
    "lstm": (lambda: module(rnn=nn.LSTM(4, 8)), "rnn.weight_ih_l0", "LSTM is not known to be linear"),
    "unknown": (lambda: module(mixer=Mixer()), "mixer.table", "Mixer is not known to be linear; set use_muon = True"),
    "top-level output": (lambda: module(output=linear()), "output.weight", "output head output"),
    "hugging face head": (HuggingFace, "unembed.weight", "output head (get_output_embeddings)"),
    "mixtral": (lambda: moe("experts", gate=linear(8, 2)), "block.gate.weight", "MoE router"),
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


@pytest.mark.parametrize("tag", [True, False, 1, 0])
def test_a_tag_wins_over_the_rules_and_is_removed(tag: Any) -> None:
    model = module(fc=linear(), tokens=nn.Embedding(9, 8), mixer=Mixer())
    for param in model.parameters():
        param.use_muon = tag
    specs = routes(model)
    assert all(spec.use_muon is bool(tag) for spec in specs.values())
    assert {spec.reason for spec in specs.values()} == {f"use_muon = {bool(tag)} set by the user"}


def test_tags_are_removed_from_frozen_and_tied_parameters_too() -> None:
    model = Gpt(tied=True)
    model.wte.weight.use_muon = True
    model.wpe.use_muon = True
    model.wpe.requires_grad_(False)
    assert "wte.weight" in muon_names(model)


def test_after_the_tags_are_gone_the_rules_decide() -> None:
    model = module(fc=linear())
    model.fc.weight.use_muon = False
    assert muon_names(model) == set()
    assert muon_names(model) == {"fc.weight"}


@pytest.mark.parametrize(("name", "shape"), [("norm.weight", r"\[8\]"), ("conv.weight", r"\[8, 4, 3\]")])
def test_muon_on_what_is_no_matrix_is_refused_by_name(name: str, shape: str) -> None:
    model = module(norm=nn.LayerNorm(8), conv=nn.Conv1d(4, 8, 3))
    model.get_parameter(name).use_muon = True
    with pytest.raises(ValueError, match=rf"{name}: use_muon = True.*{shape}"):
        route(model)


def test_adamw_may_be_asked_for_anything() -> None:
    model = module(norm=nn.LayerNorm(8), conv=nn.Conv1d(4, 8, 3))
    for param in model.parameters():
        param.use_muon = False
    assert muon_names(model) == set()


def test_the_shape_before_stage_3_partitioned_counts() -> None:
    """Under `zero.Init` the data is empty and `ds_shape` holds the shape."""
    model = module(fc=linear(bias=True), head=module(lm_head=linear()), row=linear(8, 1), conv=nn.Conv2d(4, 8, 3))
    for param in model.parameters():
        param.ds_shape = param.shape
        param.data = torch.empty(0)
    specs = routes(model)
    assert {name for name, spec in specs.items() if spec.use_muon} == {"fc.weight"}
    assert specs["fc.weight"].shape == (16, 8)
    assert specs["fc.weight"].blocks == (Block(0, 16, 8, 8),)
    assert specs["fc.weight"].numel == 128
    assert specs["conv.weight"].numel == 8 * 4 * 9
    assert "more than two" in specs["conv.weight"].reason


def test_muon_is_refused_by_the_shape_before_stage_3() -> None:
    model = module(norm=nn.LayerNorm(8))
    weight: Any = model.norm.weight
    weight.ds_shape, weight.data, weight.use_muon = weight.shape, torch.empty(0), True
    with pytest.raises(ValueError, match=r"norm\.weight"):
        route(model)


@pytest.mark.parametrize("name", ["head", "classifier.out_proj", "classifier.6"])
def test_more_names_of_heads(name: str) -> None:
    """Of vision transformers, RoBERTa and VGG."""
    model: nn.Module = linear()
    for part in reversed(name.split(".")):
        model = module(**{part: model})
    assert muon_names(model) == set()


def test_an_empty_matrix_does_not_go_to_muon() -> None:
    model = module(adapter=Projector(0, 4))
    assert muon_names(model) == set()


# ---- dataclasses ----------------------------------------------------------------------------------------


def test_specs_and_blocks_are_frozen() -> None:
    spec = routes(module(fc=linear()))["fc.weight"]
    for holder, name in ((spec, "use_muon"), (spec, "reason"), (spec.blocks[0], "rows")):
        with pytest.raises(FrozenInstanceError):
            setattr(holder, name, None)
    assert hash(spec) == hash(MatrixSpec(spec.name, spec.shape, True, spec.reason, (Block(0, 16, 8, 8),)))


@pytest.mark.parametrize(("shape", "numel"), [((), 1), ((7,), 7), ((3, 5), 15), ((2, 3, 4), 24), ((0, 3), 0)])
def test_numel(shape: tuple[int, ...], numel: int) -> None:
    assert MatrixSpec("x", shape, False, "").numel == numel
    assert Block(3, 4, 5, 9).numel == 20


# ---- runs -----------------------------------------------------------------------------------------------


@st.composite
def blocks(draw: st.DrawFn) -> tuple[Block, int]:
    """A rectangle of a parameter, and the parameter's number of elements."""
    height, width = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    kind = draw(st.sampled_from(["rows", "columns", "any"]))
    top, left = (draw(st.integers(0, size - 1)) for size in (height, width))
    rows, cols = draw(st.integers(1, height - top)), draw(st.integers(1, width - left))
    if kind == "rows":
        left, cols = 0, width
    if kind == "columns":
        top, rows = 0, height
    return Block(top * width + left, rows, cols, width), height * width


def brute_force(block: Block, start: int, stop: int) -> dict[int, int]:
    """Element of the parameter -> element of the block, inside start .. stop."""
    place = {
        block.offset + i * block.stride + j: i * block.cols + j for i in range(block.rows) for j in range(block.cols)
    }
    return {element: at for element, at in place.items() if start <= element < stop}


@settings(max_examples=500, deadline=None)
@given(blocks(), st.data())
def test_runs_against_brute_force(case: tuple[Block, int], data: st.DataObject) -> None:
    block, numel = case
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    runs = list(block.runs(start, stop))
    listed = [(element + k, at + k) for element, at, length in runs for k in range(length)]
    assert dict(listed) == brute_force(block, start, stop)
    assert len(listed) == len(dict(listed)), "no element twice"
    assert all(length > 0 for *_, length in runs)
    assert runs == sorted(runs)


@settings(max_examples=200, deadline=None)
@given(blocks(), st.data())
def test_runs_of_consecutive_ranges_cover_the_block_once(case: tuple[Block, int], data: st.DataObject) -> None:
    """Partitions of the ranks: their runs together are the block."""
    block, numel = case
    span = data.draw(st.integers(1, numel))
    listed = [
        at + k
        for start in range(0, numel, span)
        for _, at, length in block.runs(start, min(start + span, numel))
        for k in range(length)
    ]
    assert listed == list(range(block.numel))


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 20))
def test_runs_of_whole_rows_are_one(rows: int, cols: int, offset: int) -> None:
    block = Block(offset, rows, cols, cols)
    assert list(block.runs(0, 10**6)) == [(offset, 0, rows * cols)]
    assert list(block.runs(offset, offset)) == []


@pytest.mark.parametrize(("start", "stop"), [(0, 3), (17, 100), (5, 5), (6, 8)])
def test_runs_outside_the_block_are_none(start: int, stop: int) -> None:
    """Columns 3 .. 5 of rows 0 .. 2 of a matrix of 5 columns: elements 3, 4, 8, 9, 13, 14."""
    assert list(Block(3, 3, 2, 5).runs(start, stop)) == []


def test_runs_of_columns_by_hand() -> None:
    block = Block(3, 3, 2, 5)
    assert list(block.runs(0, 15)) == [(3, 0, 2), (8, 2, 2), (13, 4, 2)]
    assert list(block.runs(4, 14)) == [(4, 1, 1), (8, 2, 2), (13, 4, 1)]


def test_a_block_is_what_slicing_gives() -> None:
    matrix = torch.arange(6 * 7)
    columns = Block(2, 6, 3, 7)
    piece = torch.full((columns.numel,), -1)
    for element, at, length in columns.runs(0, 42):
        piece[at : at + length] = matrix[element : element + length]
    expected: Tensor = matrix.view(6, 7)[:, 2:5]
    assert torch.equal(piece.view(6, 3), expected)
