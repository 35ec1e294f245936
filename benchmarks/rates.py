# SPDX-License-Identifier: Apache-2.0
"""How time is taken, and what the machine can do: products, bytes copied and bytes sent per second.

A rate is that of one rank while all ranks of the job do the same at the same time. It is the best that was seen, so
that a floor computed from it is one; of copies the median, as a rank that is alone with the memory is faster.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from benchmarks import ranks

Call = Callable[[], object]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
#: (batch, rows, inner, columns) of the products that are tried, and more of them for an accelerator.
PRODUCTS = (
    (4, 256, 256, 256),
    (16, 512, 512, 2048),
    (16, 512, 512, 512),
    (4, 1024, 1024, 1024),
    (2, 1024, 1024, 4096),
    (1, *[2048] * 3),
)
LARGE_PRODUCTS = ((4, 4096, 4096, 4096), (4, 2048, 2048, 8192), (1, 8192, 8192, 8192))
#: Seconds beyond which a product is not tried.
LONGEST = 0.5
#: Bytes of each of the two tensors of a copy, several times a cache; that a rank sends in one all-to-all.
COPY_BYTES, MESSAGES = 2**27, (2**20, 2**22, 2**24)


def seconds(call: Call, device: str = "cpu") -> float:
    """Of one call, between two moments at which the device is idle."""
    synchronize = torch.cuda.synchronize if device != "cpu" else lambda: None
    synchronize()
    begin = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - begin


def alternate(
    calls: Mapping[str, Call], device: str = "cpu", rounds: int = 12, limit: float = 60, prepare: Call = lambda: None
) -> dict[str, list[float]]:
    """Seconds of each candidate's calls, one more than rounds, in turn: A B C A B C, so that all meet the same drift.

    No round begins after `limit` seconds, in which the first, which may compile, is not counted; what needs a quarter
    of them for a call is called twice only. `prepare` runs before every call and is not timed.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    begin = time.perf_counter()
    for number in range(rounds + 1):
        if number == 1:
            begin = time.perf_counter()
        for name, call in calls.items():
            if number < 2 or times[name][-1] < limit / 4:
                prepare()
                times[name].append(seconds(call, device))
        if number and time.perf_counter() - begin > limit:
            break
    return times


def repeat(call: Call, budget: float, device: str) -> list[float]:
    """Seconds of the calls that fit into a budget, after one that is not counted."""
    return alternate({"": call}, device, 10**6, budget)[""][1:]


def summary(times: list[float]) -> dict[str, float]:
    """Milliseconds, median and extremes, and how many."""
    spread = {"median": statistics.median(times), "fastest": min(times), "slowest": max(times)}
    return {f"{name} ms": 1e3 * value for name, value in spread.items()} | {"calls": len(times)}


@dataclasses.dataclass(frozen=True)
class Rates:
    """Of one rank, in operations and bytes per second.

    `bf16`, `fp32`, `fp16`: of products into a preallocated result; a multiply-add is two operations. `copy`: bytes
    read and written. `network`: bytes sent to others in an all-to-all; infinite for one rank.
    """

    bf16: float
    fp32: float
    fp16: float
    copy: float
    network: float = float("inf")

    def best(self, other: "Rates") -> "Rates":
        """The better of two measurements, rate by rate: something else may have run during one of them."""
        return Rates(*map(max, dataclasses.astuple(self), dataclasses.astuple(other)))

    def __str__(self) -> str:
        text = f"Per rank: bf16 products {self.bf16 / 1e12:.3f} TFLOP/s, fp32 {self.fp32 / 1e12:.3f}, "
        text += f"fp16 {self.fp16 / 1e12:.3f}"
        text += f", copy {self.copy / 1e9:.1f} GB/s read and written"
        return text + (f", network {self.network / 1e9:.2f} GB/s sent." if self.network < float("inf") else ".")


def measure(world: int = 1, threads: int = 1, device: str = "cpu") -> Rates:
    """The rates of one rank of this many, the mean of all; some ten seconds."""
    found = ranks.run(rank, {"device": device}, world, 180, threads, device, {"DS_MUON_AUTOLOAD": "0"})
    return Rates(*map(statistics.fmean, zip(*found, strict=True)))


def rank(device: str) -> list[float]:
    """All rates of this rank."""
    with ranks.joined():
        rates = []
        for dtype in DTYPES.values():
            dist.barrier()
            rates.append(product_rate(dtype, device))
        source, target = (torch.ones(COPY_BYTES // 4, device=device) for _ in range(2))
        dist.barrier()
        spent = statistics.median(repeat(lambda: target.copy_(source), 0.5, device))
        return [*rates, 2 * COPY_BYTES / spent, network_rate(device)]


def product_rate(dtype: torch.dtype, device: str) -> float:
    """Operations per second of batched products, the best of several shapes; of the small one in an emulated dtype."""
    rates: list[float] = []
    for batch, rows, inner, cols in PRODUCTS if device == "cpu" else PRODUCTS + LARGE_PRODUCTS:
        if rates and 2 * batch * rows * inner * cols / rates[0] > LONGEST:
            break
        a, b = (torch.randn(batch, *size, device=device).to(dtype) for size in ((rows, inner), (inner, cols)))
        out = torch.empty(batch, rows, cols, device=device, dtype=dtype)
        spent = min(repeat(lambda: torch.bmm(a, b, out=out), 0.25, device))
        rates.append(2 * batch * rows * inner * cols / spent)
    return max(rates)


def network_rate(device: str) -> float:
    """Bytes that this rank sends to others per second of an all-to-all of large messages."""
    world, rates = dist.get_world_size(), [float("inf")] * (dist.get_world_size() == 1)
    for size in MESSAGES if world > 1 else ():
        sent = torch.ones(size // 2 // world * world, dtype=torch.bfloat16, device=device)
        received, times = torch.empty_like(sent), []
        for _ in range(12):
            dist.barrier()
            times.append(seconds(lambda: dist.all_to_all_single(received, sent), device))
        rates.append(2 * sent.numel() * (world - 1) / world / min(times[2:]))
    return max(rates)
