# SPDX-License-Identifier: Apache-2.0
"""Find the matrices that have no gradient in a step.

ZeRO gives zeros where a parameter took no part in the loss. The momentum then only decays, and Newton-Schulz of it is
as large as ever, so the matrix would move at full speed for as long as fp32 can store its momentum. A matrix whose
whole gradient is exactly zero is left alone instead, as torch's optimizers leave alone a parameter without ``grad``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from deepspeed.muon.exchange.exchange import Exchange, grids
from deepspeed.muon.exchange.partition import Partition
from deepspeed.muon.plan.plan import Plan, Run

#: Elements of each run that are looked at first. Nearly every gradient has one among them that is not zero; only
#: runs without any are read as a whole.
PROBES = 16


class GradientProbe:
    """Looks at the gradients of one partition.

    Args:
        partition: on several ranks, the ranks that hold parts of its matrices.
        plan: of the partition.
        exchange: among these ranks.
    """

    def __init__(self, partition: Partition, plan: Plan, exchange: Exchange) -> None:
        self._exchange = exchange
        #: The same matrices in the same order on all ranks.
        self._matrices = list(dict.fromkeys(item.matrix for item in partition.blocks))
        # Ranks that hold a matrix whole have the same gradient.
        self._is_shared = exchange.group is not None and any(
            len(item.parts) > 1 or item.shard.placement.copies == 1 for item in partition.blocks
        )
        runs: dict[int, list[Run]] = defaultdict(list)
        for bucket in plan.buckets:
            for run in bucket.runs:
                runs[run.tensor].append(run)
        self._runs = [
            (index, of_tensor, _positions(of_tensor, partition.tensors[index].device))
            for index, of_tensor in runs.items()
        ]

    def absent(self, tensors: Sequence[Tensor]) -> frozenset[str]:
        """Return the names of the matrices whose gradient is zero on all ranks; a collective of a sharded partition.

        Args:
            tensors: of the partition, with their gradients. One without a gradient counts as zero.
        """
        present = self._local(tensors)
        if self._is_shared:
            flags = torch.tensor(
                [name in present for name in self._matrices], dtype=torch.uint8, device=self._exchange.device
            )
            found = self._exchange.largest(flags, self._matrices).tolist()
            return frozenset(name for name, is_present in zip(self._matrices, found, strict=True) if not is_present)
        return frozenset(name for name in self._matrices if name not in present)

    def _local(self, tensors: Sequence[Tensor]) -> set[str]:
        """Return the names of the matrices of which this rank holds an element of the gradient that is not zero."""
        grads = {index: grad.contiguous() for index, _, _ in self._runs if (grad := tensors[index].grad) is not None}
        probed = [(index, runs, positions) for index, runs, positions in self._runs if index in grads]
        if not probed:
            return set()
        values = torch.cat([grads[index].view(-1)[positions] for index, _, positions in probed])
        flags: Iterator[bool] = iter(values.ne(0).any(dim=1).tolist())  # one copy to the host
        silent: list[tuple[Run, Tensor]] = []
        present: set[str] = set()
        for index, runs, _ in probed:
            for run in runs:
                if next(flags):
                    present.add(run.matrix)
                else:
                    silent.append((run, grads[index]))
        silent = [(run, grad) for run, grad in silent if run.matrix not in present]
        if silent:
            whole = torch.stack([grids(grad, run.copy).any() for run, grad in silent]).tolist()  # one copy, too
            present.update(run.matrix for (run, _), is_present in zip(silent, whole, strict=True) if is_present)
        return present


def _positions(runs: Sequence[Run], device: torch.device) -> Tensor:
    """Return indices of elements spread over each run, ``[runs, PROBES]``, int64."""
    index = [
        [
            run.copy.start + element // run.copy.cols * run.copy.pitch + element % run.copy.cols
            for element in ((2 * probe + 1) * run.copy.numel // (2 * PROBES) for probe in range(PROBES))
        ]
        for run in runs
    ]
    return torch.tensor(index, dtype=torch.int64, device=device)
