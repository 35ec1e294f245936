# SPDX-License-Identifier: Apache-2.0
"""NorMuon's second moments, which belong to whole matrices: each is with the owner of its matrix."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from deepspeed.muon.exchange.exchange import Exchange
from deepspeed.muon.exchange.partition import Partition
from deepspeed.muon.log import logger
from deepspeed.muon.plan.plan import Plan

#: The key under which a saved group holds those of all matrices, by name.
SAVED = "second_moments"


class SecondMoments:
    """fp32, one number per output, by the name of the matrix. ``is_used``: without NorMuon there are none."""

    def __init__(self, is_used: bool) -> None:
        self.is_used = is_used
        #: Those of the matrices that this rank owns; from a load to the next binding, of all.
        self.held: dict[str, Tensor] = {}
        self._outputs: list[tuple[Exchange, dict[str, int]]] = []

    def bind(self, bound: Iterable[tuple[Partition, Plan, Exchange]]) -> None:
        """Keep those of the matrices that this rank owns now; zeros where there are none yet."""
        found: dict[str, Tensor] = {}
        self._outputs.clear()
        for partition, plan, exchange in bound if self.is_used else ():
            outputs = {item.name: item.outputs for item in partition.blocks}
            self._outputs.append((exchange, outputs))
            for name in (name for bucket in plan.buckets for batch in bucket.batches for name in batch.names):
                moment = self.held.get(name)
                if moment is None or moment.numel() != outputs[name]:
                    moment = torch.zeros(outputs[name], dtype=torch.float32, device=exchange.device)
                found[name] = moment.to(exchange.device)
        self.held = found

    def of(self, names: Sequence[str]) -> list[Tensor]:
        """Those of matrices that this rank owns; none without NorMuon."""
        return [self.held[name] for name in names] if self.is_used else []

    @contextmanager
    def whole(self) -> Iterator[None]:
        """While entered, this rank holds those of all matrices. Entered by all ranks together."""
        own = self.held
        found = [exchange.collect(own, outputs) for exchange, outputs in self._outputs]
        self.held = {name: moment for moments in found for name, moment in moments.items()} if found else own
        try:
            yield
        finally:
            self.held = own

    def save(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The state dict of an optimizer, whose first Muon group holds the second moments of all matrices.

        Raises:
            RuntimeError: other ranks have some of them.
        """
        if not (self.held or self._outputs):
            return state_dict
        if missing := {name for _, outputs in self._outputs for name in outputs} - self.held.keys():
            raise RuntimeError(
                f"state_dict of a sharded MuonWithAuxAdam with NorMuon: {len(missing)} of its second moments are on "
                "other ranks; save with engine.save_checkpoint, or call it on all ranks within optimizer.whole_state()"
            )
        groups = list(state_dict["param_groups"])
        first = next(index for index, group in enumerate(groups) if group["use_muon"])
        groups[first] = groups[first] | {SAVED: dict(self.held)}
        return {**state_dict, "param_groups": groups}

    def load(self, groups: Iterable[dict[str, Any]], is_logging: bool) -> None:
        """Take them out of saved groups. ``is_logging``: warn where only one of the two runs has NorMuon."""
        found = {name: moment for group in groups for name, moment in group.pop(SAVED, {}).items()}
        if is_logging and found and not self.is_used:
            logger.warning("deepspeed-muon: the checkpoint's run had normuon, this one goes on without it")
        if is_logging and self.is_used and not found:
            logger.warning("deepspeed-muon: the checkpoint has no second moments of NorMuon; they start at zero")
        self.held = found if self.is_used else {}
