# SPDX-License-Identifier: Apache-2.0
"""Compute under fixed global settings of torch, whatever the training script has set for its model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch


class _Setting(NamedTuple):
    """A global setting of torch that changes results, and the ``value`` that :func:`fixed_numerics` gives to it."""

    read: Callable[[], Any]
    write: Callable[[Any], Any]
    value: Any


def _attribute(owner: Any, name: str, value: Any) -> _Setting:
    return _Setting(partial(getattr, owner, name), partial(setattr, owner, name), value)


def _fp32_precision() -> list[_Setting]:
    """Return torch's settings for the precision of fp32 matrix products, with values that forbid TF32 and bf16."""
    owners = torch.backends.cuda.matmul, torch.backends.mkldnn
    if hasattr(torch.backends, "fp32_precision"):  # torch 2.9: reads and writes may not mix with the older functions
        return [_attribute(getattr(owner, "matmul", owner), "fp32_precision", "ieee") for owner in owners]
    return [_Setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest")]


def _reductions() -> list[_Setting]:
    """Return the settings that decide how 16-bit matrix products are summed, each with torch's default as its value."""
    matmul = torch.backends.cuda.matmul
    found = []
    for dtype in ("bf16", "fp16"):
        name = f"allow_{dtype}_reduced_precision_reduction"
        split_k = f"{name}_split_k"
        if hasattr(matmul, split_k):  # one write sets both, so one read must return both
            read = partial(attrgetter(name, split_k), matmul)
            found.append(_Setting(read, partial(setattr, matmul, name), (True, True)))
        else:
            found.append(_attribute(matmul, name, True))
    if hasattr(matmul, "allow_fp16_accumulation"):
        found.append(_attribute(matmul, "allow_fp16_accumulation", False))
    return found


# Not the default device, because this package names the device of every new tensor.
_SETTINGS = [
    _Setting(torch.get_default_dtype, torch.set_default_dtype, torch.float32),
    *_fp32_precision(),
    *_reductions(),
]


@contextmanager
def fixed_numerics() -> Iterator[None]:
    """Run the ``with`` block under fixed global settings of torch, and restore the script's settings at its end.

    In the block, the default dtype is fp32, fp32 matrix products use neither TF32 nor bf16, 16-bit products are summed
    as torch does by default, and autocast and inference mode are off. Enter ``torch.no_grad`` inside of the block, not
    around it.
    """
    with ExitStack() as stack:
        for setting in _SETTINGS:
            if (before := setting.read()) != setting.value:
                setting.write(setting.value)
                stack.callback(setting.write, before)
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))  # this enables gradients
        # torch.accelerator is new in torch 2.6.
        accelerator = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else torch.device("cuda")
        for kind in {"cpu", accelerator.type if accelerator else "cpu"}:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield
