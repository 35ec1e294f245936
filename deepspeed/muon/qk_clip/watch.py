# SPDX-License-Identifier: Apache-2.0
"""See the queries and keys of attention layers while a model trains, without a change of the model.

While the forward of an attention module runs, calls of ``torch.nn.functional.scaled_dot_product_attention`` and of
flash-attn's operators are seen, whatever name the caller imported them under.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.bias import CausalBias, CausalVariant
from torch.overrides import TorchFunctionMode

from deepspeed.muon.errors import UnsupportedError
from deepspeed.muon.math.logits import Visible, largest
from deepspeed.muon.matrices.query_keys import Attention
from deepspeed.muon.numerics import fixed_numerics

Seen = tuple[Tensor, Tensor, float, Visible]
"""Queries and keys, ``[batch, heads, tokens, width]``, the scale of their products, and which keys a query sees."""


class AttentionWatch:
    """The largest logit of every head since the last :meth:`clear`.

    Forwards without gradients or in evaluation mode do not count, as in evaluation, generation and reference models.
    Under gradient checkpointing one of the two forwards counts: the first, or the second, during backward, if the first
    ran without gradients (reentrant).

    ``mode``: of :func:`deepspeed.muon.math.logits.largest`. ``step``: return the number of the step, for ``sampled``;
    called once between two calls of :meth:`clear`, because the number may have to be copied from an accelerator.
    """

    def __init__(self, layers: Mapping[nn.Module, Attention], mode: str, step: Callable[[], int]) -> None:
        self._layers, self._mode, self._step = layers, mode, step
        #: By layer, ``[heads]`` of this rank, fp32.
        self.largest: dict[str, Tensor] = {}
        #: Layers whose attention ran, but by none of the known functions.
        self.missed: set[str] = set()
        self._running: list[_AttentionCalls | None] = []
        self._number: int | None = None
        #: By layer, how many of its forwards were watched before backward, and not yet seen again during it.
        self._watched_forwards: Counter[nn.Module] = Counter()
        self._hooks = [
            hook
            for module in layers
            for hook in (
                module.register_forward_pre_hook(self._enter, prepend=True),
                module.register_forward_hook(self._leave, always_call=True),
            )
        ]

    def __reduce__(self) -> tuple[Any, ...]:
        return AttentionWatch, ({}, self._mode, int)  # a copy of the model, or a saved one, is not watched

    def clear(self) -> None:
        """Forget what was seen. Called while no forward runs."""
        self.largest.clear()
        self.missed.clear()
        self._watched_forwards.clear()
        self._number = None
        while self._running:  # an interrupt from the keyboard has ended forwards without their hooks
            if (calls := self._running.pop()) is not None:
                calls.__exit__(None, None, None)

    def close(self) -> None:
        """Stop watching."""
        for hook in self._hooks:
            hook.remove()

    def _enter(self, module: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():
            return
        counts = module.training and torch.is_grad_enabled() and module in self._layers
        if counts and torch._C._current_graph_task_id() != -1:  # backward runs: this forward is a recomputation
            counts = self._watched_forwards[module] == 0
            self._watched_forwards[module] -= not counts
        elif counts:
            self._watched_forwards[module] += 1
        calls = _AttentionCalls() if counts else None
        self._running.append(calls)
        if calls is not None:
            calls.__enter__()

    def _leave(self, module: nn.Module, _: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        calls = self._running.pop()
        if calls is None:
            return
        calls.__exit__(None, None, None)
        layer = self._layers[module]
        if not calls.seen and output is not None:  # a forward that raised has no output
            self.missed.add(layer.name)
        for query, key, scale, visible in calls.seen:
            if query.size(1) != len(layer.local_heads):
                raise UnsupportedError(
                    f"qk_clip: the attention of {layer.name} has {query.size(1)} heads and its weights have "
                    f"{len(layer.local_heads)}"
                )
            kind = query.device.type
            dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
            with fixed_numerics(), torch.no_grad():  # autocast would cast back what is in fp32
                if self._number is None:
                    self._number = self._step()
                found = largest(query.to(dtype), key.to(dtype), scale, visible, self._mode, self._number)
            before = self.largest.get(layer.name)
            self.largest[layer.name] = found if before is None else torch.maximum(before, found)


class _AttentionCalls(TorchFunctionMode):
    """Notes what attention functions are called with."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Seen] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read = None
        if func is F.scaled_dot_product_attention:
            read = _of_torch
        elif isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            read = _OPERATORS.get(str(func).removesuffix(".default"))
        if read is not None:
            self.seen.append(read(*args, **kwargs))
        return func(*args, **kwargs)


def _of_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Seen:
    if query.ndim != 4:
        raise UnsupportedError(
            f"qk_clip: scaled_dot_product_attention got queries {list(query.shape)}; expected [batch, heads, tokens, "
            "width], which tell the heads"
        )
    visible = Visible(attn_mask, is_causal)
    if isinstance(attn_mask, CausalBias):
        ends_last = attn_mask.variant == CausalVariant.LOWER_RIGHT
        visible = Visible(is_causal=True, shift=attn_mask.seq_len_kv - attn_mask.seq_len_q if ends_last else 0)
    return query.detach(), key.detach(), _scale(scale, query), visible


def _of_flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    *_: Any,
    **__: Any,
) -> Seen:
    """Read a call with ``[batch, tokens, heads, width]``; the last query sees the last key."""
    visible = Visible(is_causal=causal, shift=k.size(1) - q.size(1), window=(window_size_left, window_size_right))
    return q.detach().transpose(1, 2), k.detach().transpose(1, 2), _scale(softmax_scale, q), visible


def _of_packed_flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    *_: Any,
    **__: Any,
) -> Seen:
    """Read a call with ``[tokens, heads, width]``: sequences one after the other, as long in queries as in keys."""
    if q.size(0) != k.size(0):
        raise UnsupportedError("qk_clip: flash-attn got packed sequences with other lengths of queries than of keys")
    tokens = torch.arange(q.size(0), dtype=torch.int64, device=q.device)
    documents = torch.bucketize(tokens, cu_seqlens_q.to(tokens.dtype), right=True)
    visible = Visible(is_causal=causal, window=(window_size_left, window_size_right), documents=(documents, documents))
    return q.detach().transpose(0, 1)[None], k.detach().transpose(0, 1)[None], _scale(softmax_scale, q), visible


def _scale(scale: float | None, query: Tensor) -> float:
    return query.size(-1) ** -0.5 if scale is None else float(scale)


#: Operators of flash-attn 2.
_OPERATORS: dict[str, Callable[..., Seen]] = {
    "flash_attn._flash_attn_forward": _of_flash,
    "flash_attn._flash_attn_varlen_forward": _of_packed_flash,
}
