# SPDX-License-Identifier: Apache-2.0
"""What the machine can do, measured: products per second, bytes copied per second, bytes sent per second.

Every rate is that of one rank while all ranks of the job run the same at the same time. It is the best that was
observed, so that a floor computed from it is one; only of copies the median, because ranks share the memory and one
that is alone for a moment is faster. Started by roofline.measure as `rates.py SETTING_AS_JSON RESULT_FILE`.
"""

import dataclasses
import json
import statistics
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from timing import repeat, seconds

#: (batch, rows, inner, columns) of the products that are tried.
PRODUCTS = (
    (16, 512, 512, 2048),
    (16, 512, 512, 512),
    (4, 1024, 1024, 1024),
    (2, 1024, 1024, 4096),
    (1, 2048, 2048, 2048),
)
LARGE_PRODUCTS = ((4, 4096, 4096, 4096), (4, 2048, 2048, 8192), (1, 8192, 8192, 8192))
#: Bytes of each of the two tensors of a copy: several times a cache.
COPY_BYTES = 2**27
#: Bytes that a rank sends in one all-to-all.
MESSAGES = (2**20, 2**22, 2**24)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclasses.dataclass(frozen=True)
class Rates:
    """Of one rank. Operations and bytes per second.

    ``bf16`` and ``fp32``: of products with a preallocated result, the best of several shapes, each multiply-add two
    operations. ``copy``: bytes read and written where Newton-Schulz runs. ``host_copy``: the same in the host's memory.
    ``network``: bytes sent, the rank's own share of an all-to-all not counted; infinite for one rank. ``link``: between
    the host and the accelerator, one way, from pinned memory; infinite on a CPU.
    """

    bf16: float
    fp32: float
    copy: float
    host_copy: float
    network: float = float("inf")
    link: float = float("inf")

    def best(self, other: "Rates") -> "Rates":
        """The better of two measurements, rate by rate: something else may have run during one of them."""
        mine, theirs = dataclasses.asdict(self), dataclasses.asdict(other)
        return Rates(**{name: max(mine[name], theirs[name]) for name in mine})


def product_rate(dtype: torch.dtype, device: str) -> float:
    """The best rate of batched products with a preallocated result."""
    rates = []
    for batch, rows, inner, cols in PRODUCTS if device == "cpu" else PRODUCTS + LARGE_PRODUCTS:
        a = torch.randn(batch, rows, inner, device=device).to(dtype)
        b = torch.randn(batch, inner, cols, device=device).to(dtype)
        out = torch.empty(batch, rows, cols, device=device, dtype=dtype)
        spent = min(repeat(lambda: torch.bmm(a, b, out=out), 0.25, device))
        rates.append(2 * batch * rows * inner * cols / spent)
    return max(rates)


def copy_rate(device: str) -> float:
    """Bytes read and written per second by a copy between tensors that no cache holds."""
    source, target = (torch.ones(COPY_BYTES // 4, device=device) for _ in range(2))
    return 2 * COPY_BYTES / statistics.median(repeat(lambda: target.copy_(source), 0.5, device))


def link_rate(device: str) -> float:
    """Bytes per second from pinned memory to the accelerator."""
    source, target = torch.ones(COPY_BYTES // 4).pin_memory(), torch.ones(COPY_BYTES // 4, device=device)
    return COPY_BYTES / min(repeat(lambda: target.copy_(source, non_blocking=True), 0.4, device))


def network_rate(device: str) -> float:
    """Bytes that this rank sends to others per second of an all-to-all of large messages in bf16."""
    world = dist.get_world_size()
    if world == 1:
        return float("inf")
    rates = []
    for size in MESSAGES:
        sent = torch.ones(size // 2 // world * world, dtype=torch.bfloat16, device=device)
        received = torch.empty_like(sent)
        times = []
        for _ in range(12):
            dist.barrier()
            times.append(seconds(lambda: dist.all_to_all_single(received, sent), device))
        rates.append(2 * sent.numel() * (world - 1) / world / min(times[2:]))
    return max(rates)


def measure(device: str) -> Rates:
    """All rates of this rank; every rank calls it."""
    rates: dict[str, float] = {}
    for name, dtype in DTYPES.items():
        dist.barrier()
        rates[name] = product_rate(dtype, device)
    dist.barrier()
    rates["copy"] = rates["host_copy"] = copy_rate(device)
    if device != "cpu":
        rates["host_copy"], rates["link"] = copy_rate("cpu"), link_rate(device)
    return Rates(network=network_rate(device), **rates)


def main() -> None:
    """Measure as one rank of the job and write the rates."""
    setting, result = json.loads(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(setting["threads"])
    backend = "gloo" if setting["device"] == "cpu" else "nccl"
    dist.init_process_group(backend, timeout=timedelta(seconds=120))
    result.write_text(json.dumps(dataclasses.asdict(measure(setting["device"]))))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
