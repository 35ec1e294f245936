# SPDX-License-Identifier: Apache-2.0
"""NorMuon's second moments. The owner of a matrix holds its moments, so that only saves have to send them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from deepspeed.muon.errors import logger
from deepspeed.muon.exchange.run import Exchange

#: The key of a saved group under which matrix name -> second moments are stored, for all matrices.
SAVED = "second_moments"


class SecondMoments:
    """NorMuon's second moments of the matrices that this rank owns, which means that it orthogonalizes them.

    ``is_used``: whether NorMuon is on. If it is off, there are no second moments.
    """

    def __init__(self, is_used: bool) -> None:
        self.is_used = is_used
        #: Matrix name -> second moments, fp32 ``[outputs]``. Between a load and the next :meth:`bind`: all matrices.
        self.by_name: dict[str, Tensor] = {}
        #: For each partition, its exchange and matrix name -> number of outputs.
        self._outputs: list[tuple[Exchange, dict[str, int]]] = []

    def bind(self, steps: Iterable[Any]) -> None:
        """Keep only the second moments of matrices that this rank owns under the current plans. Missing ones become 0.

        Call this after :meth:`load`. ``steps``: the planned :class:`PartitionStep` of each partition.
        """
        found: dict[str, Tensor] = {}
        self._outputs.clear()
        for step in steps if self.is_used else ():
            outputs, device = {item.name: item.outputs for item in step.partition.blocks}, step.exchange.device
            self._outputs.append((step.exchange, outputs))
            for name in (name for bucket in step.plan.buckets for batch in bucket.batches for name in batch.names):
                moment = self.by_name.get(name)
                if moment is None or moment.numel() != outputs[name]:
                    moment = torch.zeros(outputs[name], dtype=torch.float32, device=device)
                found[name] = moment.to(device)
        self.by_name = found

    def of_matrices(self, names: Sequence[str]) -> list[Tensor]:
        """Return the second moments of the named matrices, fp32 ``[outputs]`` each: one for each output feature.

        An empty list without NorMuon. This rank must own the matrices.
        """
        return [self.by_name[name] for name in names] if self.is_used else []

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Return a context in which this rank holds the second moments of all matrices, as :meth:`save` needs.

        A collective: entering the context collects the moments from their owners.
        """
        owned = self.by_name
        found = [exchange.gather_vectors(owned, outputs) for exchange, outputs in self._outputs]
        self.by_name = {name: moment for moments in found for name, moment in moments.items()} if found else owned
        try:
            yield
        finally:
            self.by_name = owned

    def save(self, groups: Sequence[dict[str, Any]]) -> None:
        """Store the second moments of all matrices in the first Muon group of ``groups``; nothing if NorMuon is off.

        ``groups``: the parameter groups of a state dict. Raise RuntimeError if this rank lacks some, as outside
        :meth:`whole` if several ranks own matrices.
        """
        if not (self.by_name or self._outputs):
            return
        if missing := {name for _, outputs in self._outputs for name in outputs} - self.by_name.keys():
            raise RuntimeError(
                f"state_dict: this rank lacks NorMuon's second moments of {len(missing)} matrices, which other ranks "
                "hold; save with engine.save_checkpoint, or call optimizer.state_dict on all ranks within "
                "optimizer.whole_state()"
            )
        # Every rank's file has all of them, so that a resumed run may have other owners.
        next(group for group in groups if group["use_muon"])[SAVED] = dict(self.by_name)

    def load(self, groups: Iterable[dict[str, Any]], is_logging: bool, not_saved: Collection[str] = ()) -> None:
        """Move the second moments of all matrices out of a loaded state dict. Call :meth:`bind` afterwards.

        Args:
            groups: the state dict's parameter groups. Their entries with second moments are removed.
            is_logging: whether to warn if only one of the saved run and this run uses NorMuon.
            not_saved: names of matrices to ignore: the saved moments belong to another rank's matrix of that name.
        """
        saved = (pair for group in groups for pair in group.pop(SAVED, {}).items())
        found = {name: moment for name, moment in saved if name not in not_saved}
        if is_logging and found and not self.is_used:
            logger.warning(
                "deepspeed-muon: the checkpoint was saved with normuon, but this run's config does not set it, so "
                "the checkpoint's second moments are ignored; set normuon to true to use them"
            )
        if is_logging and self.is_used and not found:
            logger.warning(
                "deepspeed-muon: the checkpoint has no second moments for normuon; they start at zero, as in a new run"
            )
        self.by_name = found if self.is_used else {}
