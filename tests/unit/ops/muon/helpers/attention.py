# SPDX-License-Identifier: Apache-2.0
"""QK-clip for the oracle, written head by head for models whose fused weight is queries, then keys, then values."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers.language_models import Language
from helpers.models import MODELS, Block, shares
from helpers.training import ds_config, make_engine, with_params


def largest_logit(query: Tensor, key: Tensor) -> float:
    """Return the largest causal logit of one head on one sample; `query` and `key` are (time, width)."""
    scale = query.shape[1] ** -0.5
    return max(float((key[: i + 1] @ row).max()) * scale for i, row in enumerate(query))


def logits_of(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[Block, list[float]]:
    """Run the model; return for each of its blocks the largest logit of each head."""
    found: dict[Block, list[float]] = {}

    def note(block: Block, output: Tensor) -> None:
        query, key, _ = output.detach().unflatten(-1, (3, block.heads, -1)).unbind(-3)
        pairs = ([*zip(query[:, :, head], key[:, :, head], strict=True)] for head in range(block.heads))
        found[block] = [max(largest_logit(q, k) for q, k in pair) for pair in pairs]

    blocks = [module for module in model.modules() if isinstance(module, Block)]
    hooks = [block.qkv.register_forward_hook(lambda _, __, out, block=block: note(block, out)) for block in blocks]
    model(*batch)
    for hook in hooks:
        hook.remove()
    return found


def clip_heads(tau: float, alpha: float = 0.5) -> Callable[[nn.Module, tuple[Tensor, ...]], Callable[[], None]]:
    """Return an observer for `OracleConfig.observe` that clips the heads of all blocks with logits above `tau`."""

    def observe(model: nn.Module, batch: tuple[Tensor, ...]) -> Callable[[], None]:
        found = logits_of(model, batch)

        def finish() -> None:
            for block, logits in found.items():
                width = block.qkv.weight.shape[1]
                size = width // block.heads
                for head, logit in enumerate(logits):
                    at, gain = head * size, min(1.0, tau / logit)
                    block.qkv.weight[at : at + size] *= gain**alpha
                    block.qkv.weight[width + at : width + at + size] *= gain ** (1 - alpha)

        return finish

    return observe


def some_tau() -> float:
    """Return a threshold that some heads of an untrained TinyGpt exceed and others do not."""
    net = MODELS["gpt"]().double()
    logits = sorted(logit for heads in logits_of(net, net.batch(0)).values() for logit in heads)
    return logits[len(logits) // 2] - 1e-3


def recorded(model: nn.Module, run_model: Callable[[], Any]) -> dict[nn.Module, tuple[Any, Any]]:
    """Call `run_model()`; return attention module -> (args, kwargs) of its last forward."""
    found: dict[nn.Module, tuple[Any, Any]] = {}
    kinds = [module for module in model.modules() if type(module).__name__.endswith("Attention")]
    hooks = [
        module.register_forward_pre_hook(lambda m, args, kwargs: found.update({m: (args, kwargs)}), with_kwargs=True)
        for module in kinds
    ]
    run_model()
    for hook in hooks:
        hook.remove()
    return found


def head_logits(module: nn.Module, args: Any, kwargs: Any) -> list[float]:
    """Run a causal attention module on the given arguments; return the largest logit of each head."""
    seen: list[tuple[Tensor, Tensor]] = []
    original = F.scaled_dot_product_attention

    def note(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        assert options.get("attn_mask") is not None or options.get("is_causal")
        groups = query.shape[1] // key.shape[1]
        scale = (options.get("scale") or query.shape[-1] ** -0.5) * query.shape[-1] ** 0.5
        seen.append((query * scale, key.repeat_interleave(groups, dim=1)))
        return original(query, key, value, **options)

    with torch.no_grad(), mock.patch.object(F, "scaled_dot_product_attention", note):
        module(*args, **kwargs)
    query, key = seen[0]
    heads = range(query.shape[1])
    return [max(largest_logit(q, k) for q, k in zip(query[:, h], key[:, h], strict=True)) for h in heads]


def logits_around_a_step(kind: str, share: float, zero: int) -> tuple[list[list[float]], list[list[float]], float]:
    """Take a step with learning rate 0 and `qk_clip`, whose threshold is `share` of the model's largest logit.

    Returns (largest logits before the step, the same after it, threshold); logits are [layer][head].
    """
    net = Language(kind)
    inputs = net.batch(0)
    before = {m: head_logits(m, *call) for m, call in recorded(net, lambda: net(*inputs)).items()}
    tau = share * max(max(logits) for logits in before.values())
    still = {"lr": 0.0, "adam_lr": 0.0, "weight_decay": 0.0, "qk_clip": {"tau": tau}}
    engine = make_engine(net, ds_config(stage=zero, optimizer=with_params(**still)))
    engine.backward(engine(*next(shares(engine, 0))))
    calls = recorded(net, lambda: net(*inputs))
    engine.step()
    after = {m: head_logits(m, *call) for m, call in calls.items()}
    engine.destroy()
    return list(before.values()), list(after.values()), tau
