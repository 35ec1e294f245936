# SPDX-License-Identifier: Apache-2.0
"""Jobs for the NVMe tests: a model with sub-groups above and below the size that is swapped, configs, and engines."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers import distributed
from helpers.engine_state import master_weights
from helpers.extensions import ASYNC_IO
from helpers.models import GLOBAL_BATCH, full_weights, initialize_, squares, without_head_
from helpers.training import ds_config, make_engine

SUB_GROUP = 200_000
"""Elements per rank that close a sub-group: at 2 ranks each large tensor of the model is one, the small ones share."""


class Wide(nn.Module):
    """An embedding and two matrices of 2 MiB in fp32, large enough for DeepSpeed to swap, then small ones."""

    def __init__(self, seed: int = 0, unused: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(1024, 512)
        self.up = nn.Linear(512, 1024)
        self.down = nn.Linear(1024, 512)
        self.narrow = nn.Linear(512, 24)
        self.last = nn.Linear(24, 12)
        if unused:  # the first shares the small matrices' sub-group, which it fills, the second is alone
            self.unused = nn.ModuleList(nn.Linear(512, 1024, bias=False) for _ in range(2))
            self.spare = nn.Embedding(1024, 512)  # follows the biases in their sub-group
        initialize_(self, seed)
        without_head_(self)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        hidden = torch.tanh(self.down(torch.tanh(self.up(self.tokens(inputs)))))
        return squares(self.last(torch.tanh(self.narrow(hidden))), targets)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 + step)
        inputs = torch.randint(1024, (GLOBAL_BATCH,), generator=generator)
        return inputs, 4 * torch.randn(GLOBAL_BATCH, 12, generator=generator)


class WideAttention(Wide):
    """A Wide model with attention among the samples of a micro-batch instead of the two matrices."""

    def __init__(self, seed: int = 0, unused: bool = False) -> None:
        super().__init__(seed, unused)
        del self.up, self.down
        self.heads, self.qkv = 4, nn.Linear(512, 1536)
        initialize_(self, seed)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        hidden = self.tokens(inputs)
        query, key, value = self.qkv(hidden).view(-1, 3, self.heads, 128).permute(1, 2, 0, 3)[:, None]
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(hidden.shape)
        return squares(self.last(torch.tanh(self.narrow(hidden + mixed))), targets)


def run(fn: Callable[..., Any], world_size: int, fresh: bool = False, **kwargs: Any) -> list[Any]:
    """Call `distributed.run` with DeepSpeed's async_io or, where it cannot be built, a replacement."""
    return distributed.run(job, world_size, fresh=fresh, task=fn, arguments=kwargs)


def job(task: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    with nullcontext() if ASYNC_IO else instead_of_async_io():
        return task(**arguments)


def nvme_config(
    folder: str,
    pipelined: bool = False,
    params: str = "none",
    stays: bool = False,
    device: str = "nvme",
    sub_group: int = SUB_GROUP,
    **extra: Any,
) -> dict[str, Any]:
    """Return a ds_config at stage 3; `params`: device for parameters; `stays`: keep the momentum in memory."""
    optimizer: dict[str, Any] = {"device": device}
    if device == "nvme":
        optimizer |= {"nvme_path": folder, "buffer_count": 12 if pipelined else 4}
        optimizer |= {"pipeline_read": True, "pipeline_write": True} if pipelined else {}
    zero: dict[str, Any] = {"sub_group_size": sub_group, "offload_optimizer": optimizer}
    if params != "none":
        zero["offload_param"] = {"device": params}
    if params == "nvme":
        zero["offload_param"] |= {"nvme_path": folder, "max_in_cpu": 0, "buffer_size": 300_000, "buffer_count": 6}
    if stays:
        zero["save_muon_momentum_buffer_in_memory"] = True
    return ds_config(stage=3, zero=zero, **extra)


def nvme_engine(seed: int = 0, unused: bool = False, attention: bool = False, **config: Any) -> Any:
    return make_engine((WideAttention if attention else Wide)(seed, unused), nvme_config(**config))


def files_of(folder: str, rank: int) -> dict[str, int]:
    """Return "state-subgroup" -> bytes of a rank's swap files (state "" for weights), without gradients."""
    files = (Path(folder) / "zero_stage_3" / "optimizer" / f"rank{rank}").glob("*.tensor.swp")
    return {file.name.removesuffix(".tensor.swp"): file.stat().st_size for file in files if "gradient" not in file.name}


def weights_of(engine: Any) -> dict[str, Tensor]:
    masters = {f"{name} master": weight for name, weight in master_weights(engine).items()}
    return full_weights(engine.module) | masters


# ---- instead of DeepSpeed's async_io --------------------------------------------------------------------------
# NVMe tests then need neither libaio nor minutes of compiling. Reads and writes happen only when `wait` is called.


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).numpy())


class Handle:
    """The methods of an `aio_handle` that DeepSpeed's swappers call."""

    def __init__(self, **settings: Any) -> None:
        self._locked: list[tuple[int, int]] = []
        self._submitted: list[tuple[Callable[[Tensor, str], None], Tensor, str]] = []

    def new_cpu_locked_tensor(self, numel: int, example: Tensor) -> Tensor:
        """Return a buffer with arbitrary contents, here with all bits set: NaN in floating point."""
        buffer = torch.empty(numel, dtype=example.dtype)
        buffer.view(torch.uint8).fill_(255)
        self._locked.append((buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes))
        return buffer

    def free_cpu_locked_tensor(self, buffer: Tensor) -> bool:
        before = len(self._locked)
        self._locked = [place for place in self._locked if place[0] != buffer.data_ptr()]
        return len(self._locked) < before

    def is_pinned(self, tensor: Tensor) -> bool:
        return any(start <= tensor.data_ptr() < stop for start, stop in self._locked)

    def async_pread(self, tensor: Tensor, path: str, offset: int) -> int:
        return self._submit(_read, tensor, path, offset)

    def async_pwrite(self, tensor: Tensor, path: str, offset: int) -> int:
        return self._submit(_write, tensor, path, offset)

    def wait(self) -> int:
        """Carry out all submitted reads and writes; return their number."""
        submitted, self._submitted = self._submitted, []
        for act, tensor, path in submitted:
            act(tensor, path)
        return len(submitted)

    def _submit(self, act: Callable[[Tensor, str], None], tensor: Tensor, path: str, offset: int) -> int:
        assert offset == 0 and tensor.is_contiguous()
        self._submitted.append((act, tensor, path))
        return 0


def _read(tensor: Tensor, path: str) -> None:
    with Path(path).open("rb") as file:
        assert file.readinto(_bytes(tensor)) == tensor.nbytes and not file.read(1), f"{path} has another size"


def _write(tensor: Tensor, path: str) -> None:
    Path(path).write_bytes(_bytes(tensor))


@contextmanager
def instead_of_async_io() -> Iterator[None]:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AsyncIOBuilder, "load", lambda self, verbose=True: SimpleNamespace(aio_handle=Handle))
        patch.setattr(AsyncIOBuilder, "is_compatible", lambda self, verbose=False: True)
        yield
