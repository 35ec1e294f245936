# SPDX-License-Identifier: Apache-2.0
"""Observe the queries and keys of attention layers while a model trains, without changing the model.

While the forward of an attention module runs, a ``TorchFunctionMode`` intercepts calls of
``torch.nn.functional.scaled_dot_product_attention`` and of flash-attn's operators, however they were imported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.bias import CausalBias, CausalVariant
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from deepspeed.muon.errors import UnsupportedError
from deepspeed.muon.kernels.kernel_set import fixed_numerics
from deepspeed.muon.qk_clip.logits import Visible, largest_logits
from deepspeed.muon.qk_clip.query_keys import Attention

Seen = tuple[Tensor, Tensor, float, Visible]
"""(queries, keys, scale of their products, which keys a query sees); tensors are ``[batch, heads, tokens, width]``."""


class AttentionWatch:
    """The hooks in a model that record the largest attention logit of every head since the last :meth:`clear`.

    They ignore forwards in evaluation mode or without gradients. Of the two forwards that gradient checkpointing runs,
    they record only one.

    Args:
        attentions: {attention module: its heads}.
        mode: how logits are computed; see :func:`deepspeed.muon.qk_clip.logits.largest_logits`.
        steps_done: function that returns the number of steps done, which decides which queries mode ``sampled`` takes.
    """

    def __init__(self, attentions: Mapping[nn.Module, Attention], mode: str, steps_done: Callable[[], int]) -> None:
        self._attentions, self._mode, self._steps_done = attentions, mode, steps_done
        #: Layer name -> largest logit of each head of this rank, fp32 ``[heads]``.
        self.largest: dict[str, Tensor] = {}
        #: Names of layers whose forward ran but called no known attention function.
        self.missed: set[str] = set()
        self._running: list[_AttentionCalls | None] = []
        self._number: int | None = None
        #: Module -> how many of its forwards were recorded and not yet recomputed during backward. If the first forward
        #: ran without gradients (``use_reentrant=True``), the recomputation is recorded instead.
        self._watched_forwards: Counter[nn.Module] = Counter()
        #: Handles of the hooks in the model, for :func:`remove_hooks`.
        self.hooks = [
            hook
            for module in attentions
            for hook in (
                module.register_forward_pre_hook(self._enter, prepend=True),
                module.register_forward_hook(self._leave, always_call=True),
            )
        ]

    def __reduce__(self) -> tuple[Any, ...]:
        return AttentionWatch, ({}, self._mode, int)  # a copied or pickled model has the hooks, but is not watched

    def clear(self) -> None:
        """Forget all recorded logits. Call it only while no forward runs."""
        self.largest.clear()
        self.missed.clear()
        self._watched_forwards.clear()
        self._number = None
        while self._running:  # forwards that a KeyboardInterrupt ended before their hooks could run
            if (calls := self._running.pop()) is not None:
                calls.__exit__(None, None, None)

    def _enter(self, module: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():
            return
        counts = module.training and torch.is_grad_enabled() and module in self._attentions
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
        layer = self._attentions[module]
        if not calls.seen and output is not None:  # a forward that raised has no output
            self.missed.add(layer.name)
        for query, key, scale, visible in calls.seen:
            if query.size(1) != len(layer.local_heads):
                raise UnsupportedError(
                    f"qk_clip: the attention of {layer.name} was called with {query.size(1)} query heads, but its "
                    f"weights have {len(layer.local_heads)}; remove qk_clip, which cannot act on this layer"
                )
            kind = query.device.type
            dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
            with fixed_numerics(), torch.no_grad():  # under autocast, products of fp32 tensors would be 16-bit
                if self._number is None:
                    self._number = self._steps_done()  # once per step: it may have to be copied from an accelerator
                largest = largest_logits(query.to(dtype), key.to(dtype), scale, visible, self._mode, self._number)
            before = self.largest.get(layer.name)
            self.largest[layer.name] = largest if before is None else torch.maximum(before, largest)


def remove_hooks(hooks: Iterable[RemovableHandle]) -> None:
    """Remove hooks from the modules that have them; a second call does nothing."""
    for hook in hooks:
        hook.remove()


class _AttentionCalls(TorchFunctionMode):
    """The torch function mode that records, in ``seen``, queries, keys and masks of attention calls made within it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Seen] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read = None
        if func is F.scaled_dot_product_attention:
            read = _read_sdpa
        elif isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            read = _OPERATORS.get(str(func).removesuffix(".default"))
        if read is not None:
            self.seen.append(read(*args, **kwargs))
        return func(*args, **kwargs)


def _read_sdpa(
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
            f"qk_clip: scaled_dot_product_attention got queries of shape {list(query.shape)}; pass [batch, heads, "
            "tokens, width], so that qk_clip can tell the heads apart, or remove qk_clip"
        )
    visible = Visible(attn_mask, is_causal)
    if isinstance(attn_mask, CausalBias):
        ends_last = attn_mask.variant == CausalVariant.LOWER_RIGHT
        visible = Visible(is_causal=True, shift=attn_mask.seq_len_kv - attn_mask.seq_len_q if ends_last else 0)
    return query.detach(), key.detach(), _scale(scale, query), visible


def _read_flash(
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
    """Return (queries, keys, scale, :class:`Visible`) of a call of flash-attn, given the arguments of the call.

    ``q`` and ``k`` are ``[batch, tokens, heads, width]``; the returned tensors are ``[batch, heads, tokens, width]``.
    """
    # As in flash-attn, the last query has the position of the last key.
    visible = Visible(is_causal=causal, shift=k.size(1) - q.size(1), window=(window_size_left, window_size_right))
    return q.detach().transpose(1, 2), k.detach().transpose(1, 2), _scale(softmax_scale, q), visible


def _read_packed_flash(
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
    """Return (queries, keys, scale, :class:`Visible`) of a call of flash-attn's varlen function, given its arguments.

    ``q`` and ``k`` are concatenated sequences, ``[all tokens, heads, width]``; the returned tensors are ``[1, heads,
    all tokens, width]``. Raise UnsupportedError if queries and keys differ in number.
    """
    if q.size(0) != k.size(0):
        raise UnsupportedError(
            f"qk_clip: flash-attn's varlen function got {q.size(0)} queries and {k.size(0)} keys; qk_clip supports "
            "only equal numbers, so remove qk_clip"
        )
    tokens = torch.arange(q.size(0), dtype=torch.int64, device=q.device)
    documents = torch.bucketize(tokens, cu_seqlens_q.to(tokens.dtype), right=True)
    visible = Visible(is_causal=causal, window=(window_size_left, window_size_right), documents=(documents, documents))
    return q.detach().transpose(0, 1)[None], k.detach().transpose(0, 1)[None], _scale(softmax_scale, q), visible


def _scale(scale: float | None, query: Tensor) -> float:
    return query.size(-1) ** -0.5 if scale is None else float(scale)


#: Operator of flash-attn 2 -> function that reads its arguments.
_OPERATORS: dict[str, Callable[..., Seen]] = {
    "flash_attn._flash_attn_forward": _read_flash,
    "flash_attn._flash_attn_varlen_forward": _read_packed_flash,
}
