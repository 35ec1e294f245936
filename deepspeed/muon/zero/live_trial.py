# SPDX-License-Identifier: Apache-2.0
"""``ds_muon report --live``: train briefly on all ranks, compare ZeRO stages 1 to 3 with one process, and time them."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cache, partial
from importlib import import_module
from typing import Any

import deepspeed.comm as comm
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from deepspeed.muon.exchange.consensus import Facts, gathered, with_type
from deepspeed.muon.optimizer import MuonWithAuxAdam

WIDTH, LAYERS, VOCABULARY = 1024, 2, 512
#: Sequences in one rank's batch, and tokens in each; steps in a training.
ROWS, TOKENS, STEPS = 4, 16, 3
#: Newton-Schulz's dtype, method and kernels, and the dtype that the ranks send, are the defaults.
PARAMS: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
CLIP = 1.0
#: The largest allowed relative difference between a weight's change on all ranks and in one process. The changes are
#: not equal, because ranks add gradients in another order. For a wrong update the difference is near 1.
TOLERANCE = 0.05
STAGES = (1, 2, 3)
#: Dtype of Newton-Schulz -> {parameter name: weight after training in one process, on the CPU}.
Expected = Callable[[str], dict[str, Tensor]]


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


def batch(step_number: int, rank: int) -> Tensor:
    """Return the token numbers on which a rank trains in a step, int64 ``[ROWS, TOKENS]``, the same in every run."""
    generator = torch.Generator().manual_seed(1000 * step_number + rank)
    return torch.randint(VOCABULARY, (ROWS, TOKENS), generator=generator, dtype=torch.int64, device="cpu")


def run_trial(local: Facts) -> Facts | None:
    """Train at each ZeRO stage of :data:`STAGES`, on all ranks; a collective.

    Return on rank 0 {"trial": the result of :func:`train_all_stages`, "ranks": a list of each rank's ``local``}. Return
    ``None`` on other ranks. ``local``: facts about this rank that the report compares between ranks, such as versions.
    """
    is_joined = torch.distributed.is_initialized()
    result = {"trial": train_all_stages(), "ranks": gathered(local)}
    is_first = torch.distributed.get_rank() == 0  # train_all_stages has joined the ranks
    if not is_joined:
        torch.distributed.destroy_process_group()  # the one that train_all_stages has made
    return result if is_first else None


def train_all_stages() -> list[Facts]:
    """Train a small model at each ZeRO stage of :data:`STAGES`, on all ranks; a collective.

    Return a dict for each stage, with these keys:
        stage: the ZeRO stage.
        problem: an error message, or that weights differ from training in one process; ``None`` without a problem.
        error: norm(trained - expected) / norm(expected - initial), the largest over all parameters and ranks.
        step_ms: the median time of a step in milliseconds, on the slowest rank.
    """
    comm.init_distributed(timeout=timedelta(seconds=120))  # of a collective
    torch.manual_seed(0)  # the same weights on all ranks
    model = Model()
    expected = cache(partial(_train_in_one_process, model, torch.distributed.get_world_size()))
    return [{"stage": stage, **_of_all_ranks(stage, model, expected)} for stage in STAGES]


def _train_in_one_process(model: nn.Module, world_size: int, dtype: str) -> dict[str, Tensor]:
    """Train a copy of ``model`` in this process only, on the batches of all ranks, with Newton-Schulz in ``dtype``.

    Return {parameter name: trained weight, on the CPU}.
    """
    device = get_accelerator().current_device_name()
    model = copy.deepcopy(model).to(device)
    optimizer = MuonWithAuxAdam(model.named_parameters(), model=model, ns_dtype=dtype, wire_dtype="bf16", **PARAMS)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(torch.cat([batch(step, rank) for rank in range(world_size)]).to(device)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    return {name: param.detach().cpu() for name, param in model.named_parameters()}


def _of_all_ranks(stage: int, model: nn.Module, expected: Expected) -> Facts:
    """Train a copy of ``model`` at ZeRO ``stage`` on all ranks; a collective.

    Return ``problem`` (of all ranks), ``error`` and ``step_ms`` (the largest), as :func:`train_all_stages` describes.
    """
    try:
        of_rank = _train(stage, model, expected)
    except Exception as error:  # it is reported, and other stages may still work
        of_rank = {"problem": with_type(error)}
    by_rank = gathered(of_rank)
    problems = [f"rank {rank}: {one['problem']}" for rank, one in enumerate(by_rank) if one["problem"]]
    slowest = {key: max(one.get(key, 0.0) for one in by_rank) for key in ("error", "step_ms")}
    return {"problem": "; ".join(problems[:4]) or None, **slowest}


def _train(stage: int, model: nn.Module, expected: Expected) -> Facts:
    """Train a copy of ``model`` at ZeRO ``stage`` in a new engine; a collective.

    Return this rank's ``problem``, ``error`` and ``step_ms``, as :func:`train_all_stages` describes them.
    """
    trained = copy.deepcopy(model)
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "Muon", "params": PARAMS},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = import_module("deepspeed").initialize(
        model=trained, config=config, model_parameters=trained.parameters()
    )
    try:
        optimizer = engine.basic_optimizer
        if not isinstance(optimizer, MuonWithAuxAdam):
            return {"problem": f"{type(optimizer).__name__} runs instead of deepspeed-muon"}
        seconds = statistics.median(_step_seconds(engine, step) for step in range(STEPS))
        error = max(_relative_errors(trained, model, expected(optimizer.ns_dtype)))
    finally:
        engine.destroy()
    problem = None if error <= TOLERANCE else f"weights changed differently than in one process, by {error:.1%}"
    return {"problem": problem, "error": error, "step_ms": 1e3 * seconds}


def _step_seconds(engine: Any, step_number: int) -> float:
    engine.backward(engine(batch(step_number, engine.global_rank).to(engine.device)))
    get_accelerator().synchronize()
    began = time.perf_counter()
    engine.step()
    get_accelerator().synchronize()
    return time.perf_counter() - began


def _relative_errors(trained: nn.Module, model: nn.Module, expected: dict[str, Tensor]) -> Iterator[float]:
    """Yield norm(trained - expected) / norm(expected - initial) for each parameter; a collective at ZeRO stage 3.

    ``model``: has the initial weights. ``expected``: {parameter name: weight}.
    """
    from deepspeed.runtime.zero import GatheredParameters

    initial = dict(model.named_parameters())
    for name, param in trained.named_parameters():
        with GatheredParameters([param]):
            weight = param.detach().cpu().float()
        yield float((weight - expected[name]).norm() / (expected[name] - initial[name].detach()).norm())
