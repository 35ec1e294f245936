# SPDX-License-Identifier: Apache-2.0
"""NorMuon's second moments, which belong to whole matrices: each is with the owner of its matrix."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from deepspeed.muon.exchange.exchange import Exchange
from deepspeed.muon.log import logger

#: The key under which a saved group holds the second moments of all matrices, by name.
SAVED = "second_moments"


class SecondMoments:
    """fp32, one number per output, by the name of the matrix. ``is_used``: without NorMuon there are none."""

    def __init__(self, is_used: bool) -> None:
        self.is_used = is_used
        #: Second moments of the matrices that this rank owns; between a load and the next binding, of all matrices.
        self.by_name: dict[str, Tensor] = {}
        self._outputs: list[tuple[Exchange, dict[str, int]]] = []

    def bind(self, steps: Iterable[Any]) -> None:
        """Keep those of the matrices that this rank owns in these partition steps; zeros where there are none yet."""
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

    def of(self, names: Sequence[str]) -> list[Tensor]:
        """Return those of matrices that this rank owns; none without NorMuon."""
        return [self.by_name[name] for name in names] if self.is_used else []

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Hold the second moments of all matrices for as long as the context lasts. Entered by all ranks together."""
        owned = self.by_name
        found = [exchange.collect(owned, outputs) for exchange, outputs in self._outputs]
        self.by_name = {name: moment for moments in found for name, moment in moments.items()} if found else owned
        try:
            yield
        finally:
            self.by_name = owned

    def save(self, groups: Sequence[dict[str, Any]]) -> None:
        """Put the second moments of all matrices into the first Muon group of a state dict.

        Raises:
            RuntimeError: other ranks have some of them.
        """
        if not (self.by_name or self._outputs):
            return
        if missing := {name for _, outputs in self._outputs for name in outputs} - self.by_name.keys():
            raise RuntimeError(
                f"state_dict of a sharded MuonWithAuxAdam with NorMuon: {len(missing)} of its second moments are on "
                "other ranks; save with engine.save_checkpoint, or call it on all ranks within optimizer.whole_state()"
            )
        next(group for group in groups if group["use_muon"])[SAVED] = dict(self.by_name)

    def load(self, groups: Iterable[dict[str, Any]], is_logging: bool) -> None:
        """Take them out of saved groups. ``is_logging``: warn where only one of the two runs has NorMuon."""
        found = {name: moment for group in groups for name, moment in group.pop(SAVED, {}).items()}
        if is_logging and found and not self.is_used:
            logger.warning("deepspeed-muon: the checkpoint's run had normuon, this one goes on without it")
        if is_logging and self.is_used and not found:
            logger.warning("deepspeed-muon: the checkpoint has no second moments of NorMuon; they start at zero")
        self.by_name = found if self.is_used else {}
