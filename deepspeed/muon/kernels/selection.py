# SPDX-License-Identifier: Apache-2.0
"""Choose the kernels and the dtype of Newton-Schulz by the devices of a training run. All ranks use the same ones."""

from __future__ import annotations

from collections.abc import Iterable

from deepspeed.accelerator import get_accelerator

from deepspeed.muon.kernels import cpp_kernels, kernel_set, triton_kernels
from deepspeed.muon.kernels.kernel_set import KernelSet

#: Device types that have fast kernels: C++ and Triton. Others run plain PyTorch.
WITH_FAST_KERNELS = ("cpu", "cuda")
#: Device type -> why its fast kernels cannot be used; ``None`` if they can.
Unavailable = dict[str, str | None]


def unavailable_kernels(setting: str, device_types: Iterable[str]) -> Unavailable:
    """Return {device type: why this process cannot use fast kernels there, or ``None`` if it can}.

    Example: ``{"cpu": None, "cuda": "triton is not installed"}``. For ``cpu`` this builds the C++ kernels if necessary.

    ``setting``: the config key ``optimizer.params.kernels``; for ``torch`` nothing is built or checked.
    ``device_types``: those of all tensors of a step.
    """
    if setting == "torch":
        return dict.fromkeys(device_types, 'optimizer.params.kernels is "torch"')
    return {kind: _reason(kind) for kind in device_types}


def _reason(device_type: str) -> str | None:
    if device_type == "cpu":
        return cpp_kernels.unavailable()
    return triton_kernels.unavailable() if device_type == "cuda" else "only plain PyTorch supports it"


def _is_usable(unavailable: Unavailable, device_type: str) -> bool:
    return device_type in unavailable and unavailable[device_type] is None


def choose(unavailable: Unavailable) -> KernelSet:
    """Return a kernel set with the fastest usable kernels of all devices. A call uses those of its tensors' device.

    ``unavailable``: what :func:`unavailable_kernels` returned.
    """
    kernels = cpp_kernels.operations() if _is_usable(unavailable, "cpu") else kernel_set.TORCH
    return triton_kernels.operations(kernels) if _is_usable(unavailable, "cuda") else kernels


def fast_dtype(device_type: str, unavailable: Unavailable) -> str:
    """Return ``"fp16"``, ``"bf16"`` or ``"fp32"``: the dtype of Newton-Schulz on a device if ``ns_dtype`` is ``auto``.

    It is fp16 on accelerators that support it, because it rounds eight times finer than bf16 at the same speed. It is
    bf16 on a CPU where the C++ kernels multiply bf16 faster than fp32. Otherwise it is fp32. ``unavailable``: what
    :func:`unavailable_kernels` returned.
    """
    # By a rule and not by timing: two starts of one config on one machine have the same bits.
    if device_type == "cpu":
        return cpp_kernels.operations().fast_dtype if _is_usable(unavailable, "cpu") else "fp32"
    accelerator = get_accelerator()
    is_known = accelerator.device_name() == device_type
    return "fp16" if not is_known or accelerator.is_fp16_supported() else "fp32"


def summary(kernels: KernelSet, unavailable: Unavailable) -> str:
    """Return a text about ``kernels`` for the log, such as ``torch (faster kernels are not used; cpu: no compiler)``.

    ``unavailable``: what :func:`unavailable_kernels` returned.
    """
    reasons = [f"{kind}: {reason}" for kind, reason in unavailable.items() if reason]
    return f"{kernels.name} (faster kernels are not used; {'; '.join(reasons)})" if reasons else kernels.name
