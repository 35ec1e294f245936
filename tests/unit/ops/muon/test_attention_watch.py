# SPDX-License-Identifier: Apache-2.0
"""Which forwards count, which functions are seen, and what QK-clip refuses."""

import copy
import gc
import math
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, library, nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.utils.checkpoint import checkpoint

from deepspeed.muon import MuonConfigError, MuonWithAuxAdam, UnsupportedError
from deepspeed.muon.qk_clip import logits, watch
from deepspeed.muon.qk_clip.clip import QKClip
from deepspeed.muon.qk_clip.logits import Visible
from helpers.language_models import IDS, SMALL


class Attention(nn.Module):
    """Two heads; `way` of attention."""

    def __init__(self, way: str = "sdpa") -> None:
        super().__init__()
        self.num_heads, self.way = 2, way
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, hidden: Tensor) -> Tensor:
        """(batch, time, 8) to the same."""
        query, key, value = (p(hidden).unflatten(-1, (2, 4)) for p in (self.q_proj, self.k_proj, self.v_proj))
        if self.way == "flash":
            return Flash.apply(query, key, value, None).flatten(-2)
        if self.way == "packed":
            lengths = torch.tensor([0, 3, hidden.size(1)], dtype=torch.int32)
            return Flash.apply(query[0], key[0], value[0], lengths).flatten(-2)[None]
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        if self.way == "own":
            return ((query @ key.mT).softmax(-1) @ value).transpose(1, 2).flatten(-2)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(-2)


class Flash(torch.autograd.Function):
    """Calls flash-attn's operators as flash-attn does."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None) -> Tensor:
        if lengths is None:
            return torch.ops.flash_attn._flash_attn_forward(q, k, v, 0.0, 0.5, causal=True)
        return torch.ops.flash_attn._flash_attn_varlen_forward(q, k, v, lengths, lengths, 9, 9, 0.0, 0.5, causal=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return gradient, gradient, gradient, None


@pytest.fixture(scope="module", autouse=True)
def operators() -> Iterator[None]:
    """Stand-ins for the operators of flash-attn 2."""
    registered = library.Library("flash_attn", "DEF")
    head, tail = "Tensor q, Tensor k, Tensor v", "float dropout_p, float softmax_scale, bool causal) -> Tensor"
    packed = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, int max_seqlen_q, int max_seqlen_k"
    registered.define(f"_flash_attn_forward({head}, {tail}")
    registered.define(f"_flash_attn_varlen_forward({head}, {packed}, {tail}")
    for name in ("_flash_attn_forward", "_flash_attn_varlen_forward"):
        registered.impl(name, lambda q, *others: q.clone(), "CPU")
    yield
    registered._destroy()


def clip_of(net: nn.Module, **options: Any) -> tuple[MuonWithAuxAdam, QKClip]:
    optimizer = MuonWithAuxAdam(net.parameters(), model=net, lr=0.0, qk_clip=options)
    assert optimizer.qk_clip is not None
    return optimizer, optimizer.qk_clip


def expected(net: Attention, lengths: tuple[int, ...], *batches: Tensor) -> Any:
    """The largest logits of both heads in all micro-batches; causal, within each of the sequences."""
    found = [-math.inf, -math.inf]
    for head in range(2):
        rows = slice(4 * head, 4 * head + 4)
        for part in (part for hidden in batches for sample in hidden for part in sample.split(lengths)):
            products = net.q_proj(part)[:, rows] @ net.k_proj(part)[:, rows].T * 0.5
            seen = torch.ones_like(products).tril().bool()
            found[head] = max(found[head], products[seen].max().item())
    return pytest.approx(found)


@pytest.mark.parametrize(("way", "lengths"), [("sdpa", (7,)), ("flash", (7,)), ("packed", (3, 4))])
def test_every_way_of_attention_is_seen(way: str, lengths: tuple[int, ...]) -> None:
    net = Attention(way)
    _, clip = clip_of(net)
    batches = [scale * torch.randn(1, 7, 8) for scale in (1.0, 0.1)]
    for hidden in batches:
        net(hidden).sum().backward()
    assert clip.watch.largest[""].tolist() == expected(net, lengths, *batches)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_logits_are_those_of_its_dtype_whatever_their_size(dtype: torch.dtype) -> None:
    """Before they are scaled, these exceed the range of fp16, which attention itself does not notice."""
    net = Attention()
    _, clip = clip_of(net)
    torch.nn.init.constant_(net.q_proj.weight, 40.0)
    torch.nn.init.constant_(net.k_proj.weight, 40.0)
    hidden = torch.ones(1, 3, 8)
    with torch.autocast("cpu", dtype=dtype):
        net(hidden)
    assert clip.watch.largest[""].tolist() == pytest.approx(expected(net, (3,), hidden).expected, rel=0.01)
    assert clip.watch.largest[""].max() > torch.finfo(torch.float16).max


def test_only_training_forwards_of_the_model_itself_count() -> None:
    net = Attention()
    optimizer, clip = clip_of(net)
    hidden = torch.randn(2, 5, 8)
    with torch.no_grad():
        net(hidden)
    net.eval()(hidden)
    net.train()
    copy.deepcopy(net)(hidden)
    pickle.loads(pickle.dumps(net))(hidden)
    assert not clip.watch.largest
    with pytest.raises(UnsupportedError, match="no attention layer ran in training mode"):
        optimizer.step()


def test_hooks_leave_with_the_optimizer_and_survive_an_error() -> None:
    net = Attention()
    optimizer, clip = clip_of(net)
    with pytest.raises(RuntimeError):
        net(torch.randn(2, 5, 9))
    net(torch.randn(2, 5, 8)).sum().backward()
    assert clip.watch.largest
    optimizer.step()
    del optimizer
    net(torch.randn(2, 5, 8)).sum().backward()
    assert clip.watch.largest, "a watch that outlives its optimizer lets the model run"
    del clip
    gc.collect()
    assert not net._forward_hooks and not net._forward_pre_hooks


def test_a_step_leaves_a_forward_that_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch calls no hooks then, as in a notebook, where training goes on afterwards."""
    net = Attention()
    optimizer, clip = clip_of(net)

    def interrupt(hidden: Tensor) -> Tensor:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(net.v_proj, "forward", interrupt)
        net(torch.randn(2, 5, 8))
    assert len(torch.overrides._get_current_function_mode_stack()) == 1
    net(torch.randn(2, 5, 8)).sum().backward()
    assert clip.watch.largest
    optimizer.step()
    assert not torch.overrides._get_current_function_mode_stack()


def test_attention_of_its_own_is_refused_at_the_step() -> None:
    net = nn.Sequential(Attention(), Attention("own"))
    optimizer, _ = clip_of(net)
    net(torch.randn(2, 5, 8)).sum().backward()
    with pytest.raises(UnsupportedError, match="the logits of 1 cannot be observed"):
        optimizer.step()


def test_a_layer_that_does_not_run_is_left_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    net = nn.ModuleList([Attention(), Attention()])
    optimizer, _ = clip_of(net, tau=1e-3)
    before = copy.deepcopy(net.state_dict())
    for _ in range(2):
        net[0](torch.randn(2, 5, 8)).sum().backward()
        optimizer.step()
    assert len([r for r in caplog.records if "saw no attention call in 1 layer(s)" in r.getMessage()]) == 1
    changed = {name for name, value in net.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {f"0.{p}_proj.{kind}" for p in "qk" for kind in ("weight", "bias")}


@pytest.mark.parametrize("value", [math.nan, 1e30])
def test_a_forward_that_is_not_finite_is_a_skipped_step_like_any_other(value: float) -> None:
    """Every logit of its layers is NaN, or overflows."""
    net = nn.Sequential(Attention(), Attention())
    optimizer, clip = clip_of(net, tau=1e-3)
    before = copy.deepcopy(net.state_dict())
    hidden = torch.randn(2, 5, 8)
    net(hidden.index_fill(1, torch.tensor([0]), value)).sum().backward()
    optimizer.step()
    assert all(torch.equal(weight, before[name]) for name, weight in net.state_dict().items())
    assert clip.largest == {"0": math.inf, "1": math.inf}
    optimizer.zero_grad()
    net(hidden).sum().backward()
    optimizer.step()
    assert not torch.equal(net[1].q_proj.weight, before["1.q_proj.weight"])


def refused(net: nn.Module, match: str, params: Any = None) -> None:
    with pytest.raises(MuonConfigError, match=match):
        MuonWithAuxAdam(params or net.parameters(), model=net, lr=0.0, qk_clip={})


def test_what_cannot_be_scaled_is_refused_by_name() -> None:
    qwen3 = transformers.Qwen3Config(**SMALL, num_attention_heads=3, num_key_value_heads=1, head_dim=4, **IDS)
    refused(transformers.Qwen3ForCausalLM(qwen3), r"model\.layers\.0\.self_attn: q_norm normalizes queries or keys")
    refused(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), "found no softmax attention in the model")
    net, frozen = Attention(), r"k_proj\.weight is frozen, but other queries or keys of the layer are trained"
    refused(net, frozen, params=[*net.q_proj.parameters(), *net.v_proj.parameters()])
    net.k_proj.requires_grad_(False)
    refused(net, frozen)
    net = Attention()
    net.q_proj.lora_A = nn.Linear(8, 2, bias=False)
    refused(net, r"q_proj\.lora_A\.weight changes the outputs of q_proj, as an adapter does")
    net = Attention()
    net.num_heads = 3
    refused(net, "the 8 outputs of q_proj cannot be divided into attention heads")
    del net.num_heads
    refused(net, "neither an attribute of the attention module nor")
    net = nn.ModuleList([Attention(), Attention()])
    net[1].q_proj = net[0].q_proj
    refused(net, "attention layers that share weights")
    no_names = "attention layers: 1: the names of its projections do not tell which are queries"
    net[1].to_q, net[1].to_k = nn.Linear(8, 8), nn.Linear(8, 8)
    del net[1].q_proj, net[1].k_proj
    refused(net, no_names)
    net[1].requires_grad_(False)
    clip_of(net)  # only what is trained must be scaled
    refused(nn.ModuleList([Attention(), nn.MultiheadAttention(8, 2)]), no_names[:53])


@pytest.mark.parametrize(("make", "shift"), [(causal_lower_right, 2), (causal_upper_left, 0)])
def test_torchs_causal_biases_are_understood(make: Any, shift: int) -> None:
    """With more keys than queries, as with a cache."""
    _, _, _, visible = watch._read_sdpa(*(torch.randn(1, 2, n, 4) for n in (3, 5, 5)), attn_mask=make(3, 5))
    assert visible == Visible(is_causal=True, shift=shift)


@pytest.mark.parametrize("reentrant", [(True, True), (False, False), (False, True)])
def test_checkpointed_attention_is_watched_once(reentrant: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """In each of two micro-batches, though its forward runs twice."""
    calls: list[int] = []
    original = watch.largest_logits

    def counted(*args: Any) -> Tensor:
        calls.append(args[-1])
        return original(*args)

    monkeypatch.setattr(watch, "largest_logits", counted)
    net = Attention()
    optimizer, clip = clip_of(net)
    batches = [scale * torch.randn(2, 5, 8) for scale in (0.5, 1.0)]
    for hidden, kind in zip(batches, reentrant, strict=True):
        checkpoint(net, hidden.requires_grad_(), use_reentrant=kind).sum().backward()
    assert len(calls) == 2
    assert clip.watch.largest[""].tolist() == expected(net, (5,), *batches)
    optimizer.step()
    assert not clip.watch.largest
    net(batches[0]).sum().backward()
    assert len(calls) == 3


def test_a_step_without_attention_scales_nothing_after_a_first_one_with_it() -> None:
    net = Attention()
    optimizer, clip = clip_of(net, tau=1e-3)
    with pytest.raises(UnsupportedError, match="no attention layer ran"):
        optimizer.step()
    net(torch.randn(1, 5, 8)).sum().backward()
    optimizer.step()
    before = net.q_proj.weight.detach().clone()
    optimizer.zero_grad()
    optimizer.step()
    assert torch.equal(net.q_proj.weight, before)
    assert not clip.largest


def test_the_number_of_the_step_is_read_once_per_step() -> None:
    net, reads = Attention(), []
    optimizer, clip = clip_of(net, logits="sampled")
    clip.watch._steps_done = lambda: reads.append(0) or len(reads)
    for count in (1, 2):
        for _ in range(3):
            net(torch.randn(1, 5, 8)).sum().backward()
        assert len(reads) == count
        optimizer.step()


def test_long_sequences_are_sampled_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key = torch.randn(1, 2, 64, 4), torch.randn(1, 2, 64, 4)
    found = {
        mode: logits.largest_logits(query, key, 1.0, logits.Visible(), mode, 3) for mode in ("exact", "sampled", "auto")
    }
    assert torch.equal(found["auto"], found["exact"])
    assert not torch.equal(found["sampled"], found["exact"])
    monkeypatch.setattr(logits, "MAX_EXACT", 2 * 64 * 64 - 1)
    assert torch.equal(logits.largest_logits(query, key, 1.0, logits.Visible(), "auto", 3), found["sampled"])
