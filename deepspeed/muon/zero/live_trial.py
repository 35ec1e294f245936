# SPDX-License-Identifier: Apache-2.0
"""``ds_muon report --live``: train briefly on all ranks, compare each ZeRO stage with one process, and time it."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Iterator
from datetime import timedelta
from importlib import import_module
from typing import Any

import deepspeed.comm as comm
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from deepspeed.muon.exchange.groups import gathered
from deepspeed.muon.optimizer import MuonWithAuxAdam
from deepspeed.muon.zero.consensus import Facts, with_type

WIDTH, LAYERS, VOCABULARY = 256, 4, 512
#: Sequences in one rank's batch, and tokens in each.
ROWS, TOKENS = 4, 16
STEPS = 4
#: fp32 throughout, so that a difference from one process is an error and not rounding.
PARAMS = {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-8, "ns_dtype": "fp32", "ns_method": "standard"}
CLIP = 0.5
#: A weight's change may differ from that in one process by this fraction of it, through rounding.
TOLERANCE = 1e-2
#: Time limit of a collective.
TIMEOUT_SECONDS = 120
#: Name in the report -> section ``zero_optimization``.
CASES: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 2, optimizer on the CPU": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "stage 3, optimizer on the CPU": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
}


class Model(nn.Module):
    """A small language model without attention. Its hidden layers have matrices of two shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.up = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(LAYERS))
        self.down = nn.ModuleList(nn.Linear(4 * WIDTH, WIDTH) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        """Return the loss (0-D) of predicting n + 1 from each token number n in ``text``, ``[batch, tokens]``."""
        x = self.tokens(text)
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(nn.functional.gelu(up(self.norm(x))))
        return nn.functional.cross_entropy(self.lm_head(self.norm(x)).flatten(0, 1), (text + 1).flatten() % VOCABULARY)


def batch(step: int, rank: int) -> Tensor:
    """Return the token numbers on which a rank trains in a step, int64 ``[ROWS, TOKENS]``, the same in every run."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(VOCABULARY, (ROWS, TOKENS), generator=generator, dtype=torch.int64, device="cpu")


def run_trial(local: Facts) -> Facts | None:
    """Train a small model in each of :data:`CASES`; a collective.

    Returns:
        ``None`` on other ranks than 0. On rank 0 a dict:

        - ``ranks``: the argument ``local`` of each rank, which may hold any facts about the rank.
        - ``trial``: the result of :func:`train_all_cases`.
    """
    is_joined = torch.distributed.is_initialized()
    trial = train_all_cases()
    ranks = gathered(local)
    is_first = torch.distributed.get_rank() == 0
    if not is_joined:
        torch.distributed.destroy_process_group()  # the one that train_all_cases has made
    return {"ranks": ranks, "trial": trial} if is_first else None


def train_all_cases() -> list[Facts]:
    """Train a small model for :data:`STEPS` steps in each of :data:`CASES`, on all ranks; a collective.

    Returns:
        A dict for each case:

        - ``name``: the case's key in :data:`CASES`.
        - ``problem``: an error, or a difference from training in one process; ``None`` if there is none.
        - ``error``: norm(trained - expected) / norm(expected - initial weight), the largest of all parameters and
          ranks. ``expected`` is the weight after training in one process.
        - ``loss``: [loss of the first step, loss of the last step] on rank 0; ``None`` if rank 0 failed.
        - ``step_ms``: median time of a step on the slowest rank, in milliseconds.
        - ``sent_mb``: megabytes that a rank sends in each step; the maximum over ranks.
    """
    comm.init_distributed(timeout=timedelta(seconds=TIMEOUT_SECONDS))
    torch.manual_seed(0)  # the same weights on all ranks
    model = Model()
    expected = _train_reference(copy.deepcopy(model), torch.distributed.get_world_size())
    return [{"name": name, **_case(zero, model, expected)} for name, zero in CASES.items()]


def _train_reference(model: Model, world_size: int) -> dict[str, Tensor]:
    """Train ``model`` in this process only, on the batches of all ranks; return {parameter name: weight on the CPU}."""
    device = get_accelerator().current_device_name()
    model.to(device)
    optimizer = MuonWithAuxAdam(model.named_parameters(), model=model, **PARAMS)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(torch.cat([batch(step, rank) for rank in range(world_size)]).to(device)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    return {name: param.detach().cpu() for name, param in model.named_parameters()}


def _case(zero: dict[str, Any], model: Model, expected: dict[str, Tensor]) -> Facts:
    try:
        found = _train(zero, model, expected)
    except Exception as error:  # it is reported, and other cases may still work
        found = {"problem": with_type(error)}
    by_rank = gathered(found)
    problems = [f"rank {rank}: {one['problem']}" for rank, one in enumerate(by_rank) if one["problem"]]
    slowest = {key: max(one.get(key, 0.0) for one in by_rank) for key in ("error", "step_ms", "sent_mb")}
    return {"problem": "; ".join(problems[:4]) or None, "loss": by_rank[0].get("loss"), **slowest}


def _train(zero: dict[str, Any], model: Model, expected: dict[str, Tensor]) -> Facts:
    """Train a copy of ``model`` in a new engine, and compare its weights with ``expected``, {parameter name: weight}.

    ``zero``: the section ``zero_optimization``. Return this rank's case of :func:`train_all_cases`, without ``name``.
    """
    trained = copy.deepcopy(model)
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "Muon", "params": PARAMS},
        "zero_optimization": zero,
        "steps_per_print": 10**9,
    }
    initialize = import_module("deepspeed").initialize
    engine, *_ = initialize(model=trained, config=config, model_parameters=trained.parameters())
    try:
        if not isinstance(engine.basic_optimizer, MuonWithAuxAdam):
            return {"problem": f"{type(engine.basic_optimizer).__name__} runs instead of deepspeed-muon"}
        losses, seconds = [], []
        for step in range(STEPS):
            text = batch(step, engine.global_rank).to(engine.device)
            loss = engine(text)
            engine.backward(loss)
            get_accelerator().synchronize()
            began = time.perf_counter()
            engine.step()
            get_accelerator().synchronize()
            seconds.append(time.perf_counter() - began)
            losses.append(float(loss))
        error, optimizer = max(_relative_errors(trained, model, expected)), engine.basic_optimizer
        sent = sum(plan.sent_elements for plan in optimizer.plans) * optimizer.exchange.dtype.itemsize
    finally:
        engine.destroy()
    return {
        "problem": None if error <= TOLERANCE else f"weights changed differently than in one process, by {error:.1%}",
        "error": error,
        "loss": [losses[0], losses[-1]],
        "step_ms": 1e3 * statistics.median(seconds),
        "sent_mb": sent / 1e6,
    }


def _relative_errors(trained: nn.Module, model: Model, expected: dict[str, Tensor]) -> Iterator[float]:
    """Yield for each parameter norm(trained - expected) / norm(expected - initial). ``model`` is the initial model."""
    from deepspeed.runtime.zero import GatheredParameters

    initial = dict(model.named_parameters())
    for name, param in trained.named_parameters():
        with GatheredParameters([param]):
            weight = param.detach().cpu().float()
        change = expected[name] - initial[name].detach()
        yield float((weight - expected[name]).norm() / change.norm())
