# SPDX-License-Identifier: Apache-2.0
"""bf16 with fp32 gradient accumulation: stage 1, and pipelines without ZeRO."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate

from deepspeed.muon.exchange.groups import Agreed, agreed
from deepspeed.muon.zero.wrappers.flat import Flat, FlatGroup
from deepspeed.muon.zero.wrappers.grad_norm import is_valid


class Bf16(Flat):
    """``BF16_Optimizer``."""

    MODULE, CLASS = "deepspeed.runtime.bf16_optimizer", "BF16_Optimizer"
    REPLACED = ("load_state_dict", "state_dict", "_load_universal_checkpoint")

    def groups(self) -> Iterator[FlatGroup]:
        """Parameters lie one after the other."""
        wrapper = self.wrapper
        for params, flat, partition in zip(
            wrapper.bf16_groups, wrapper.bf16_groups_flat, wrapper.fp32_groups_flat_partition, strict=True
        ):
            starts = list(accumulate((param.numel() for param in params), initial=0))
            yield params, starts[:-1], flat, partition

    def watch_gradients(self) -> Callable[[], Agreed]:
        """Return a look at the norm of all ranks, which the wrapper keeps."""
        return lambda: agreed(is_valid(self.wrapper._global_grad_norm), is_common=True)

    def open_states(self) -> None:
        """``zero_to_fp32`` takes a file without this key for no ZeRO checkpoint; the layout is stage 1's."""
        super().open_states()
        self.replace("state_dict", lambda state_dict: {"zero_stage": 1, **state_dict()})
