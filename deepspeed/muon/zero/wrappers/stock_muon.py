# SPDX-License-Identifier: Apache-2.0
"""Keeps stages 1 and 2 from running stock DeepSpeed's own Muon on top of this one.

Stock runs it where a parameter is tagged ``use_muon`` and the name of the optimizer's class contains "muon". It asks
for both while it builds the flat gradient of a partition, and nowhere else. Stage 3 and ``BF16_Optimizer`` ask for the
class itself.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed.muon.matrices.routing import TAG


def keep_clear_of_stocks_muon(wrapper: Any) -> None:
    """Hide the tags, whoever set them, while a ``DeepSpeedZeroOptimizer`` builds a flat gradient."""
    flatten = wrapper.get_flat_partition

    @functools.wraps(flatten)
    def of_gradients(tensor_list: list[Any], *args: Any, **kwargs: Any) -> Any:
        with _without_tags(tensor_list):
            return flatten(tensor_list, *args, **kwargs)

    wrapper.get_flat_partition = of_gradients
    wrapper._is_muon_group = lambda tensor_list: False


@contextmanager
def _without_tags(params: Iterable[Any]) -> Iterator[None]:
    hidden = [(param, param.__dict__.pop(TAG)) for param in params if TAG in param.__dict__]
    try:
        yield
    finally:
        for param, tag in hidden:
            setattr(param, TAG, tag)
