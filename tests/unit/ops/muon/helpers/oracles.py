# SPDX-License-Identifier: Apache-2.0
"""Whole-matrix training in one process, written from the definitions of Muon and AdamW.

It shares no code with the optimizer under test: it takes its gradients from plain autograd on the global
batch and routes parameters by an explicit dict, name -> "muon" or "adam".
"""

import copy
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch
from torch import Tensor, nn

Part = Tensor
"""The elements of a flat parameter that are one matrix: their indices, (rows, columns), int64."""

Coefficients = Sequence[tuple[float, float, float]]
"""(a, b, c) of every iteration of Newton-Schulz."""

Memory = dict[str, Tensor]
"""What a rule keeps of one matrix from step to step."""

QUINTIC: Coefficients = ((3.4445, -4.7750, 2.0315),) * 5

SCALES: dict[str, Callable[[int, int], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "spectral_unclamped": lambda rows, columns: math.sqrt(rows / columns),
    "none": lambda rows, columns: 1.0,
}
"""Factor of the learning rate for a matrix of (rows, columns)."""


def newton_schulz_fp64(matrix: Tensor, coefficients: Coefficients = QUINTIC) -> Tensor:
    """Newton-Schulz iteration aX + (bA + cAA)X, A = XX', from X = matrix / |matrix|, in float64.

    `matrix` (rows, columns) of any floating dtype. The result (rows, columns) is float64, and zero for zero.
    """
    assert matrix.ndim == 2
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.double().T if tall else matrix.double()
    x = x / x.norm().clamp(min=torch.finfo(torch.float64).tiny)
    for a, b, c in coefficients:
        gram = x @ x.T
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.T if tall else x


@dataclass(frozen=True)
class OracleConfig:
    """Hyperparameters; `clip` 0 turns clipping off.

    `before` and `after` change what `orthogonalize` is given and what it returns, as matrices of (outputs, inputs);
    `output_axis` is where the outputs of the weights lie. `observe` sees the model and the batch before an update and
    returns what is done after it. `varying` gives the momentum and the weight decay of a step, counted from 0.
    `gradient_factor` multiplies the gradients before they are clipped. Unless `decoupled`, Adam's decay is one of them.
    """

    lr: float = 0.02
    momentum: float = 0.95
    nesterov: bool = True
    weight_decay: float = 0.0
    cautious: bool = False
    scale: str = "original"
    orthogonalize: Callable[[Tensor], Tensor] = newton_schulz_fp64
    before: Callable[[Tensor], Tensor] = lambda matrix: matrix
    after: Callable[[Tensor, Memory], Tensor] = lambda matrix, memory: matrix
    output_axis: int = 0
    adam_lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    adam_weight_decay: float = 0.0
    decoupled: bool = True
    clip: float = 0.0
    gradient_factor: float = 1.0
    varying: Callable[[int], dict[str, float]] = lambda step: {}
    observe: Callable[[nn.Module, tuple[Tensor, ...]], Callable[[], None]] = lambda model, batch: lambda: None


@dataclass
class OracleResult:
    """Result of an oracle's training.

    By parameter name: first and last weights, momentum (for Adam the first moment) and second moment. By step: loss and
    global gradient norm before clipping.
    """

    initial: dict[str, Tensor]
    weights: dict[str, Tensor]
    momentum: dict[str, Tensor] = field(default_factory=dict)
    second_moment: dict[str, Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


def gradients_of(loss: Tensor, params: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return name -> gradient of the scalar `loss`, zero for parameters that take no part in it."""
    gradients = torch.autograd.grad(loss, list(params.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(params, gradients, strict=True))


def clipped(gradients: dict[str, Tensor], clip: float) -> tuple[dict[str, Tensor], float]:
    """Return (`gradients` divided by max(1, (norm + 1e-6) / clip), as in DeepSpeed; their norm before that)."""
    norm = math.sqrt(sum(gradient.double().square().sum().item() for gradient in gradients.values()))
    divisor = max(1.0, (norm + 1e-6) / clip) if clip > 0 else 1.0
    return {name: gradient / divisor for name, gradient in gradients.items()}, norm


def muon_update(
    weight: Tensor, gradient: Tensor, momentum: Tensor, cfg: OracleConfig, memory: Memory | None = None
) -> None:
    """One step of Muon on `weight` and `momentum` (rows, columns) in place."""
    axes = (1, 0) if cfg.output_axis else (0, 1)
    mu = cfg.momentum
    momentum.copy_(mu * momentum + (1 - mu) * gradient)
    update = (1 - mu) * gradient + mu * momentum if cfg.nesterov else momentum
    direction = cfg.orthogonalize(cfg.before(update.permute(axes)).permute(axes))
    direction = cfg.after(direction.permute(axes), {} if memory is None else memory).permute(axes)
    direction = SCALES[cfg.scale](*weight.shape) * direction.to(weight.dtype)
    decay = cfg.weight_decay * weight
    if cfg.cautious:
        decay = decay * (direction * weight >= 0)
    weight.sub_(cfg.lr * (direction + decay))


def muon_update_of_parts(
    weight: Tensor,
    gradient: Tensor,
    momentum: Tensor,
    cfg: OracleConfig,
    parts: Sequence[Part],
    memories: Sequence[Memory],
) -> None:
    """One step of Muon, in place, on each part of a parameter of any shape as on a matrix of its own."""
    for part, memory in zip(parts, memories, strict=True):
        if not gradient.reshape(-1)[part].any():
            continue
        matrices = [tensor.reshape(-1)[part] for tensor in (weight, gradient, momentum)]
        muon_update(*matrices, cfg, memory)
        weight.reshape(-1)[part] = matrices[0]
        momentum.reshape(-1)[part] = matrices[2]


def adam_update(weight: Tensor, gradient: Tensor, first: Tensor, second: Tensor, count: int, cfg: OracleConfig) -> None:
    """Step number `count` (from 1) of AdamW on `weight` and its moments `first` and `second`, in place."""
    beta1, beta2 = cfg.betas
    decay = cfg.adam_weight_decay if cfg.decoupled else 0.0
    gradient = gradient if cfg.decoupled else gradient + cfg.adam_weight_decay * weight
    first.copy_(beta1 * first + (1 - beta1) * gradient)
    second.copy_(beta2 * second + (1 - beta2) * gradient.square())
    denominator = (second / (1 - beta2**count)).sqrt() + cfg.eps
    weight.mul_(1 - cfg.adam_lr * decay)
    weight.sub_(cfg.adam_lr * first / (1 - beta1**count) / denominator)


def _copies(params: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in params.items()}


def train_oracle(
    model: nn.Module,
    batches: Callable[[int], tuple[Tensor, ...]],
    steps: int,
    routing: dict[str, str],
    cfg: OracleConfig = OracleConfig(),
    special: Mapping[str, OracleConfig] = MappingProxyType({}),
    parts: Mapping[str, Sequence[Part]] = MappingProxyType({}),
    frozen: Callable[[int], Collection[str]] = lambda step: (),
) -> OracleResult:
    """Train a copy of `model` in float64; step `s` of `steps` takes the mean loss `model(*batches(s))`.

    `routing` names exactly the trainable parameters; `special` holds hyperparameters by name, where they differ, and
    `parts` the matrices of parameters that are not one matrix. `frozen` names the parameters that take no gradient in a
    step.
    A parameter without gradient counts as one with a zero gradient, as it does in DeepSpeed's flat buffers. A matrix
    whose gradient is zero is left alone.
    """
    model = copy.deepcopy(model).double()
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    assert routing.keys() == params.keys(), routing.keys() ^ params.keys()
    momentum, second_moment = ({name: torch.zeros_like(p) for name, p in params.items()} for _ in range(2))
    memories: dict[str, list[Memory]] = {name: [{} for _ in parts.get(name, (0,))] for name in params}
    result = OracleResult(_copies(params), {}, momentum, second_moment)
    for step in range(steps):
        loss = model(*batches(step))
        gradients = gradients_of(loss * cfg.gradient_factor, params)
        gradients |= {name: torch.zeros_like(params[name]) for name in frozen(step)}
        gradients, norm = clipped(gradients, cfg.clip)
        result.losses.append(loss.item())
        result.norms.append(norm)
        finish = cfg.observe(model, batches(step))
        with torch.no_grad():
            for name, param in params.items():
                own = special.get(name, cfg)
                own = replace(own, **own.varying(step))
                state = param, gradients[name], momentum[name], own
                if name in parts:
                    muon_update_of_parts(*state, parts[name], memories[name])
                elif routing[name] == "muon":
                    if gradients[name].any():
                        muon_update(*state, memories[name][0])
                else:
                    moments = momentum[name], second_moment[name]
                    adam_update(param, gradients[name], *moments, step + 1, own)
            finish()
    result.weights = _copies(params)
    return result


def route(model: nn.Module, adam: Sequence[str] = ()) -> dict[str, str]:
    """Return name -> "muon" for trainable matrices, except those whose names start with one of `adam`; else "adam"."""
    trainable = {name: param for name, param in model.named_parameters() if param.requires_grad}
    return {
        name: "adam" if param.ndim != 2 or name.startswith(tuple(adam)) else "muon" for name, param in trainable.items()
    }


def change_error(initial: Tensor, weight: Tensor, reference: Tensor) -> float:
    """Return |weight - reference| / |reference - initial|, in float64: the error relative to the expected change.

    If no change is expected, it is 0 or infinite.
    """
    initial, weight, reference = initial.double(), weight.double(), reference.double()
    error, change = (weight - reference).norm().item(), (reference - initial).norm().item()
    return error / change if change else (math.inf if error else 0.0)


def change_cosine(initial: Tensor, weight: Tensor, reference: Tensor) -> float:
    """Return the cosine of the angle between weight - initial and reference - initial, in float64."""
    change, expected = weight.double() - initial.double(), reference.double() - initial.double()
    return ((change * expected).sum() / (change.norm() * expected.norm())).item()
