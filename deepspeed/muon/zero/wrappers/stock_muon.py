# SPDX-License-Identifier: Apache-2.0
"""Keeps stages 1 and 2 from running stock DeepSpeed's own Muon on top of this one.

Stock runs it where a parameter is tagged ``use_muon`` and the name of the optimizer's class contains "muon". It asks
for both while it builds the flat gradient of a partition, and nowhere else. Stage 3 and ``BF16_Optimizer`` ask for the
class itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed.muon.matrices.routing import TAG


def without_stocks_muon(get_flat_partition: Callable, tensor_list: list[Any], *args: Any, **kwargs: Any) -> Any:
    """A replacement of ``get_flat_partition`` that hides the tags, whoever set them, while it runs."""
    with _without_tags(tensor_list):
        return get_flat_partition(tensor_list, *args, **kwargs)


@contextmanager
def _without_tags(params: Iterable[Any]) -> Iterator[None]:
    hidden = [(param, param.__dict__.pop(TAG)) for param in params if TAG in param.__dict__]
    try:
        yield
    finally:
        for param, tag in hidden:
            setattr(param, TAG, tag)
