# SPDX-License-Identifier: Apache-2.0
"""The state of update rules. The owner of a matrix holds its state, so that only saves have to send it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from deepspeed.muon.errors import logger
from deepspeed.muon.exchange.run import Exchange
from deepspeed.muon.math.rules import RULES, Rule, Shape, state_shapes


class OwnerState:
    """The state that update rules keep of the matrices that this rank owns, which means that it orthogonalizes them.

    ``rules``: the update rules in use, which declare their state (:attr:`Rule.STATE`).
    """

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = rules
        self._names = [name for rule in rules for name in rule.STATE]
        #: Name of a state -> name of a matrix -> tensor. Between a load and the next :meth:`bind`: of all matrices.
        self.tensors: dict[str, dict[str, Tensor]] = {}
        #: For each partition, its exchange and name of a state -> name of a matrix -> shape, for all its matrices.
        self._shapes: list[tuple[Exchange, dict[str, dict[str, Shape]]]] = []

    def bind(self, steps: Iterable[Any]) -> None:
        """Keep only the state of matrices that this rank owns under the current plans. Missing state becomes 0.

        Call this after :meth:`load`. ``steps``: the planned :class:`PartitionStep` of each partition.
        """
        loaded, self.tensors = self.tensors, {name: {} for name in self._names}
        self._shapes.clear()
        for step in steps if self._names else ():
            device, shapes = step.exchange.device, dict[str, dict[str, Shape]]()
            for item in step.partition.blocks:
                for name, shape in state_shapes(self._rules, item.shape, item.axis).items():
                    shapes.setdefault(name, {})[item.name] = shape
            self._shapes.append((step.exchange, shapes))
            owned = [one for bucket in step.plan.buckets for batch in bucket.batches for one in batch.names]
            for name, shape_of in shapes.items():
                for matrix in owned:
                    tensor = loaded.get(name, {}).get(matrix)
                    if tensor is None or tensor.shape != shape_of[matrix]:
                        tensor = torch.zeros(shape_of[matrix], dtype=torch.float32, device=device)
                    self.tensors[name][matrix] = tensor.to(device)

    def of(self, matrix: str) -> dict[str, Tensor]:
        """Return {name of a state: tensor} of a matrix that this rank owns; empty if no rule has state."""
        return {name: self.tensors[name][matrix] for name in self._names}

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Return a context in which this rank holds the state of all matrices, as :meth:`save` needs.

        A collective: entering the context collects the state from its owners.
        """
        owned = self.tensors
        if self._shapes:
            self.tensors = {name: {} for name in self._names}
        for exchange, shapes in self._shapes:
            for name, of_matrices in shapes.items():
                self.tensors[name] |= exchange.gather_state(owned[name], of_matrices)
        try:
            yield
        finally:
            self.tensors = owned

    def without_state(self, matrices: Iterable[str]) -> list[str]:
        """Return those of ``matrices`` (names) of which this rank lacks state that a rule declares, sorted."""
        return sorted({one for one in matrices for name in self._names if one not in self.tensors.get(name, {})})

    def __str__(self) -> str:
        """Return the names of the state for messages, such as "second moments"."""
        return _in_words(self._names)

    def save(self, groups: Sequence[dict[str, Any]]) -> None:
        """Store the state of all matrices in the first Muon group of ``groups``; nothing if no rule has state.

        ``groups``: the parameter groups of a state dict. Raise RuntimeError if this rank lacks some, as outside
        :meth:`whole` if several ranks own matrices.
        """
        if missing := self.without_state(
            one for _, shapes in self._shapes for names in shapes.values() for one in names
        ):
            raise RuntimeError(
                f"state_dict: this rank lacks the {self} of {len(missing)} matrices, which other ranks hold; save with "
                "engine.save_checkpoint, or call optimizer.state_dict on all ranks within optimizer.whole_state()"
            )
        for name, of_matrices in self.tensors.items():
            if of_matrices:
                # Every rank's file has all of them, so that a resumed run may have other owners.
                next(group for group in groups if group["use_muon"])[name] = dict(of_matrices)

    def load(self, groups: Sequence[dict[str, Any]], is_logging: bool, not_saved: Collection[str] = ()) -> None:
        """Move the state of all matrices out of a loaded state dict. Call :meth:`bind` afterwards.

        Args:
            groups: the state dict's parameter groups. Their entries with state are removed.
            is_logging: whether to warn if only one of the saved run and this run uses a rule.
            not_saved: names of matrices to ignore: the saved state belongs to another rank's matrix of that name.
        """
        self.tensors = {}
        for kind in RULES:
            saved = {name: _taken(groups, name, not_saved) for name in kind.STATE}
            is_used, was_used = any(isinstance(rule, kind) for rule in self._rules), any(saved.values())
            if is_used:
                self.tensors |= saved
            if is_logging and was_used and not is_used:
                logger.warning(
                    f"deepspeed-muon: the checkpoint was saved with {kind.KEY}, but this run's config does not set it, "
                    f"so the checkpoint's {_in_words(saved)} are ignored; set {kind.KEY} to use them"
                )
            if is_logging and is_used and saved and not was_used:
                logger.warning(
                    f"deepspeed-muon: the checkpoint has no {_in_words(saved)} for {kind.KEY}; they start at zero, as "
                    "in a new run"
                )


def _taken(groups: Iterable[dict[str, Any]], name: str, not_saved: Collection[str]) -> dict[str, Tensor]:
    """Remove the state ``name`` from saved groups, and return {matrix: tensor} without those in ``not_saved``."""
    pairs = (pair for group in groups for pair in group.pop(name, {}).items())
    return {matrix: tensor for matrix, tensor in pairs if matrix not in not_saved}


def _in_words(names: Iterable[str]) -> str:
    return " and ".join(names).replace("_", " ")
