# SPDX-License-Identifier: Apache-2.0
"""Print a hash of the result of each C++ operation, as JSON, to compare builds: ``python -m helpers.bits``."""

import hashlib
import json
from collections.abc import Iterator

import torch
from torch import Tensor

from deepspeed.muon.kernels import cpp_kernels
from deepspeed.muon.kernels.kernel_set import Workspace
from deepspeed.muon.math.newton_schulz import METHODS, orthogonalize, schedule
from helpers.kernels import native_bf16, operands, randn, step

SHAPES = [(2, 130, 66), (2, 66, 130), (1, 200, 1100), (1, 1100, 200)]


def results() -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the result of each operation; Newton-Schulz has all products in one."""
    kernels = cpp_kernels.operations()
    tensors = operands(1000)
    step(kernels, tensors)
    yield from ((f"elementwise {name}", tensor) for name, tensor in tensors.items())
    for dtype in (torch.float32, torch.bfloat16):
        for shape in SHAPES:
            x = randn(*shape, dtype=dtype)
            yield f"normalize {dtype} {shape}", kernels.normalize(x, torch.empty_like(x), 1.0)
            for method in METHODS if dtype == torch.float32 or native_bf16() else ():
                found = orthogonalize(x.clone(), schedule("simple", 5), method, dtype, Workspace(), kernels)
                yield f"{method} {dtype} {shape}", found


def main() -> None:
    hashes = {
        name: hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
        for name, tensor in results()
    }
    print(json.dumps({"table": cpp_kernels.operations().name} | hashes))


if __name__ == "__main__":
    main()
