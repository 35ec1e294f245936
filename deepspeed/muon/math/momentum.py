# SPDX-License-Identifier: Apache-2.0
"""The momentum as it is kept: in the tensor's dtype, which is fp32 under ZeRO, in bf16, or in int8."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepspeed.muon.kernels.codes import BLOCK, blocks_of, decode, encode
from deepspeed.muon.log import logger

#: The momentum in a state, and its two parts in int8, where it is no tensor of its own.
MOMENTUM, CODES, ABSMAX = "momentum_buffer", "momentum_codes", "momentum_absmax"
#: The key under which a saved group says that its momentum was kept in int8.
SAVED = "momentum_dtype"
#: Blocks that are converted at a time.
CHUNK = 2**14
State = dict[str, Any]


class Fragment(NamedTuple):
    """Elements of one parameter that lie together in a tensor: ``first`` is the index of their first in it."""

    name: str
    first: int
    position: int
    numel: int


class Blocks:
    """Where the blocks of a tensor's momentum in int8 lie: they begin anew with each parameter.

    So a parameter's momentum does not depend on its neighbours' or on padding, which may hold anything.
    """

    def __init__(self, fragments: Iterable[Fragment]) -> None:
        self.fragments = sorted(fragments, key=lambda fragment: fragment.position)
        self._positions = [fragment.position for fragment in self.fragments]
        counts = [blocks_of(fragment.numel) for fragment in self.fragments]
        self._ends = list(accumulate(counts, initial=0))
        self.count = self._ends[-1]

    def parts(self, state: State) -> Iterator[tuple[Fragment, Tensor, Tensor]]:
        """Each fragment with its codes and the magnitudes of its blocks, which are views of the state."""
        codes = state[CODES].view(-1)
        for fragment, (start, end) in zip(self.fragments, pairwise(self._ends), strict=True):
            yield fragment, codes[fragment.position :][: fragment.numel], state[ABSMAX][start:end]

    def around(self, state: State, start: int, numel: int) -> tuple[Fragment, Tensor, Tensor, int]:
        """Of elements of one fragment: it, codes, magnitudes of their blocks, how many elements lie before in these."""
        at = bisect_right(self._positions, start) - 1
        block, skipped = divmod(start - self._positions[at], BLOCK)
        first = self._ends[at] + block
        absmax = state[ABSMAX][first : first + blocks_of(skipped + numel)]
        return self.fragments[at], state[CODES].view(-1)[start : start + numel], absmax, skipped

    def read(self, state: State, start: int, stop: int, device: torch.device) -> Tensor:
        """Elements ``start`` to ``stop`` of the tensor in fp32 on a device; zeros between the fragments."""
        return self.read_into(torch.zeros(stop - start, dtype=torch.float32, device=device), state, start)

    def read_into(self, result: Tensor, state: State, start: int = 0) -> Tensor:
        """Write the elements from ``start`` on to the fragments' places in ``result``, fp32, and return it."""
        stop = start + result.numel()
        for fragment, codes, absmax in self.parts(state):
            low, high = max(start, fragment.position), min(stop, fragment.position + fragment.numel)
            for first in range(low, high, CHUNK * BLOCK):
                end = min(high, first + CHUNK * BLOCK)
                block, skipped = divmod(first - fragment.position, BLOCK)
                magnitudes = absmax[block : block + blocks_of(skipped + end - first)]
                wide = torch.empty(magnitudes.numel() * BLOCK, dtype=torch.float32, device=codes.device)
                here = slice(first - fragment.position, end - fragment.position)
                result[first - start : end - start] = decode(codes[here], magnitudes, skipped, wide)
        return result

    def write(self, state: State, start: int, values: Tensor) -> None:
        """Round ``values``, 1-D, to nearest, for the elements from ``start`` on: whole fragments, and between them."""
        stop = start + values.numel()
        for fragment, codes, absmax in self.parts(state):
            if fragment.position + fragment.numel <= start or stop <= fragment.position:
                continue
            assert start <= fragment.position and fragment.position + fragment.numel <= stop, "a part of a parameter"
            given = values[fragment.position - start :][: fragment.numel]
            for block in range(0, absmax.numel(), CHUNK):
                magnitudes, part = absmax[block : block + CHUNK], slice(block * BLOCK, (block + CHUNK) * BLOCK)
                wide = torch.zeros(magnitudes.numel() * BLOCK, dtype=torch.float32, device=codes.device)
                wide[: codes[part].numel()] = given[part]
                encode(wide, codes[part], magnitudes, 0.5)


def whole(tensor: Tensor) -> Blocks:
    """The blocks of a tensor that is one parameter."""
    return Blocks([Fragment("", 0, 0, tensor.numel())])


@dataclass(frozen=True)
class Held:
    """Hides a momentum from ``Optimizer.load_state_dict``, which would cast a bare tensor."""

    tensor: Tensor
    dtype: torch.dtype


def state_of(state: State, tensor: Tensor, momentum_dtype: str, blocks: Callable[[Tensor], Blocks]) -> State:
    """``state`` with a momentum for the tensor, and ``step``, fp32 on the CPU; zeros at first.

    The momentum is ``momentum_buffer`` of the tensor's shape or, in int8, ``momentum_codes`` of that shape and
    ``momentum_absmax``, fp32, one per block.
    """
    if MOMENTUM not in state and CODES not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
        dtype = kept_dtype(tensor, momentum_dtype)
        if dtype == torch.int8:
            state |= _codes(tensor.shape, blocks(tensor), tensor.device)
        else:
            state[MOMENTUM] = torch.zeros_like(tensor, dtype=dtype, requires_grad=False)
    return state


def _codes(shape: torch.Size, blocks: Blocks, device: torch.device) -> State:
    return {
        CODES: torch.zeros(shape, dtype=torch.int8, device=device),
        ABSMAX: torch.zeros(blocks.count, dtype=torch.float32, device=device),
    }


def kept_dtype(tensor: Tensor, momentum_dtype: str) -> torch.dtype:
    """The dtype of a tensor's momentum."""
    return {"bf16": torch.bfloat16, "int8": torch.int8}.get(momentum_dtype, tensor.dtype)


def export(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Hook after ``state_dict``: a momentum in int8 is saved in fp32, in the optimizer's ``host_zeros``, from which a
    load makes the same codes. So every reader of a checkpoint finds the momentum of the whole tensor.
    """
    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    state = dict(state_dict["state"])
    for index, entry in state.items():
        if CODES in entry:
            values = optimizer.blocks_of(tensors[index]).read_into(optimizer.host_zeros(entry[CODES].numel()), entry)
            kept = {key: value for key, value in entry.items() if key not in (CODES, ABSMAX)}
            state[index] = kept | {MOMENTUM: values.view(entry[CODES].shape)}
    is_int8 = optimizer.config.momentum_dtype == "int8"
    groups = [
        group | {SAVED: "int8"} if is_int8 and group["use_muon"] else group for group in state_dict["param_groups"]
    ]
    return {**state_dict, "state": state, "param_groups": groups}


def hold(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Hook before ``load_state_dict``: keep every momentum as it was saved."""
    groups = [dict(group) for group in state_dict["param_groups"]]
    from_int8 = {index for group in groups if group.pop(SAVED, None) == "int8" for index in group["params"]}

    def held(index: Any, entry: Mapping[str, Any]) -> Mapping[str, Any]:
        if MOMENTUM not in entry:
            return entry
        saved = entry[MOMENTUM]
        return {**entry, MOMENTUM: Held(saved, torch.int8 if index in from_int8 else saved.dtype)}

    state = {index: held(index, entry) for index, entry in state_dict["state"].items()}
    return {**state_dict, "state": state, "param_groups": groups}


def settle(optimizer: Any) -> None:
    """Hook after loading: cast every momentum to the config's dtype, on its tensor's device; warn if it changes.

    One without elements stays: it lies in a file of its own.
    """
    changes = set()
    for tensor, state in optimizer.state.items():
        if MOMENTUM not in state:
            continue
        loaded = state.pop(MOMENTUM)
        held = loaded if isinstance(loaded, Held) else Held(loaded, loaded.dtype)
        dtype = kept_dtype(tensor, optimizer.config.momentum_dtype)
        if held.dtype != dtype:
            changes.add((held.dtype, dtype))
        if dtype == torch.int8 and held.tensor.numel():
            blocks = optimizer.blocks_of(tensor)
            state |= _codes(held.tensor.shape, blocks, tensor.device)  # the tensor itself may lie on NVMe
            blocks.write(state, 0, held.tensor.reshape(-1))
        else:
            kept = torch.float32 if dtype == torch.int8 else dtype
            state[MOMENTUM] = held.tensor.to(dtype=kept, device=tensor.device)
    for saved, dtype in changes:
        logger.warning(
            "deepspeed-muon: the checkpoint's momentum is %s and goes on in %s, by optimizer.params.momentum_dtype",
            *(str(kind).removeprefix("torch.") for kind in (saved, dtype)),
        )
