# SPDX-License-Identifier: Apache-2.0
"""The optimizer's gradient averages after steps at a learning rate of zero, by definition, and training from there."""

import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from helpers.models import MODELS
from helpers.oracles import adam_update, clipped, gradients_of, muon_update, route
from helpers.training import ORACLE


@dataclass
class Resting:
    """Averages of gradients (`first`) and of their squares (`second`), by name, in fp64, at constant weights."""

    model: nn.Module
    first: dict[str, Tensor] = field(default_factory=dict)
    second: dict[str, Tensor] = field(default_factory=dict)

    def observe(self, steps: int, clip: float, decay: dict[str, float], beta2: float) -> None:
        """Average clipped gradients over ``steps`` batches; ``decay``: parameter name -> decay of the first average."""
        params = dict(self.model.named_parameters())
        for step in range(steps):
            gradients, _ = clipped(gradients_of(self.model(*self.model.batch(step)), params), clip)
            for name, gradient in gradients.items():
                mu = decay[name]
                self.first[name] = mu * self.first.get(name, 0 * gradient) + (1 - mu) * gradient
                self.second[name] = beta2 * self.second.get(name, 0 * gradient) + (1 - beta2) * gradient.square()

    def go_on(self, steps: int, first_step: int, count: int) -> dict[str, Tensor]:
        """Train ``steps`` steps from these averages and return the weights; AdamW has counted ``count`` before."""
        model, routing = copy.deepcopy(self.model), route(self.model)
        params = dict(model.named_parameters())
        for step in range(first_step, first_step + steps):
            count += 1
            gradients, _ = clipped(gradients_of(model(*model.batch(step)), params), ORACLE.clip)
            with torch.no_grad():
                for name, param in params.items():
                    if routing[name] == "muon":
                        muon_update(param, gradients[name], self.first[name], ORACLE.lr, ORACLE)
                    else:
                        moments = self.first[name], self.second[name]
                        adam_update(param, gradients[name], *moments, count, ORACLE.adam_lr, ORACLE)
        return {name: param.detach().clone() for name, param in params.items()}


def resting(clip: float, muon: float, beta1: float) -> Resting:
    """Return the averages of the small model after three steps; ``muon`` and ``beta1``: decays of the first average."""
    result = Resting(MODELS["mlp"]().double())
    result.observe(
        3, clip, {name: muon if kind == "muon" else beta1 for name, kind in route(result.model).items()}, 0.95
    )
    return result
