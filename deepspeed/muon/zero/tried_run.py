# SPDX-License-Identifier: Apache-2.0
"""What runs in a process that ``ds_muon try`` has started: change the optimizer and its learning rate, record N steps.

``ds_muon try`` runs the user's script for a few steps with AdamW, and with Muon at several rates, and compares the
losses. Each run is a *variant*. Nothing happens unless the environment variable :data:`VARIABLE` names a file. The
user's script is not changed; DeepSpeed is patched where it reads the config, builds the optimizer and takes a step.
"""

from __future__ import annotations

import atexit
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from deepspeed.muon.errors import SettingsError
from deepspeed.muon.exchange.consensus import summed
from deepspeed.muon.optimizer import MuonWithAuxAdam
from deepspeed.muon.zero.wrappers.adapter import Seam

#: Environment variable with the path of the variant's JSON file. Its name begins with ``PYTHON``, because DeepSpeed's
#: launcher passes such variables to other nodes.
VARIABLE = "PYTHON_DS_MUON_TRY"
#: Settings of AdamW that Muon takes over from an optimizer that the script has built.
TAKEN = ("lr", "betas", "eps", "weight_decay")
_ENGINE = "deepspeed.runtime.engine"


def replacements() -> dict[Seam, Callable]:
    """Return {DeepSpeed's attribute: its replacement} if ``ds_muon try`` has started this process, otherwise ``{}``."""
    file = os.environ.get(VARIABLE)
    if not file:
        return {}
    try:
        variant = json.loads(Path(file).read_text())
    except OSError as error:  # the other ranks would wait for this one in the record's collectives
        raise SystemExit(f"ds_muon try: cannot read {file}: {error.strerror}; all nodes must share --out") from None
    run = TriedRun(variant)
    return {
        Seam("deepspeed.runtime.config", "DeepSpeedConfig._initialize_params"): run.read_config,
        Seam(_ENGINE, "DeepSpeedEngine._configure_optimizer"): run.configure_optimizer,
        Seam(_ENGINE, "DeepSpeedEngine.backward"): run.backward,
        Seam(_ENGINE, "DeepSpeedEngine._take_model_step"): run.take_step,
    }


class TriedRun:
    """Run one variant of ``ds_muon try`` in this process: patch DeepSpeed as ``variant`` says, and record every step.

    ``variant``, which ``ds_muon try`` has written as JSON::

        muon: whether to train with Muon instead of AdamW
        changes: ds_config sections to replace, if ``muon``
        factor: number that multiplies the learning rate in every step
        seed: number that ``deepspeed_muon.py`` adds to the seed in each torch.manual_seed call of the script
        steps: end the run after this many steps, or earlier if the loss is not finite
        records: file to which rank 0 writes one line of JSON per step

    The first line of ``records`` holds the ds_config that DeepSpeed has read. When this class ends the run, it writes
    a last line: ``{"end": "done"}`` or ``{"end": "diverged"}``.
    """

    def __init__(self, variant: Mapping[str, Any]) -> None:
        self._variant = variant
        #: Engine -> the sum of the losses since its last step, and -> the optimizer that the script has built.
        self._losses: WeakKeyDictionary[Any, Tensor] = WeakKeyDictionary()
        self._clients: WeakKeyDictionary[Any, torch.optim.Optimizer] = WeakKeyDictionary()
        #: The engine that is recorded: the first one that takes a step.
        self._engine: Any = None
        self._steps, self._is_over = 0, False

    def read_config(self, original: Callable, config: Any, param_dict: dict[str, Any]) -> None:
        """Replace ``DeepSpeedConfig._initialize_params``: if the variant uses Muon, apply its ``changes`` first.

        A ds_config without an optimizer stays as it is.
        """
        if self._variant["muon"] and param_dict.get("optimizer"):
            param_dict = {**param_dict, **self._variant["changes"]}
        original(config, param_dict)

    def configure_optimizer(self, original: Callable, engine: Any, client: Any, parameters: Any) -> None:
        """Replace ``DeepSpeedEngine._configure_optimizer``: choose the optimizer, and multiply its learning rates.

        The rates are multiplied by the variant's ``factor`` before each step of the optimizer, and restored after it.

        If the script passes its own AdamW, ``client``, and the variant uses Muon, the engine gets a MuonWithAuxAdam
        with AdamW's settings. Both then share their parameter groups, so that a schedule on either works. Raise
        SettingsError if the variant uses Muon and the script passes an optimizer other than AdamW or Adam.
        """
        factor = self._variant["factor"]
        if client is not None:
            client = client if isinstance(client, torch.optim.Optimizer) else client(parameters)
            self._clients[engine] = client
        if client is not None and self._variant["muon"]:
            original(engine, lambda _: _muon_like(client, engine.module), parameters)
            _share_groups(client, engine.basic_optimizer)
        else:
            original(engine, client, parameters)
        optimizer, before = getattr(engine, "basic_optimizer", None), list[Any]()
        if optimizer is None or factor == 1.0:  # None: an engine that only evaluates
            return

        def multiply(*_: Any) -> None:
            before[:] = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * factor

        def restore(*_: Any) -> None:
            for group, rate in zip(optimizer.param_groups, before, strict=True):
                group["lr"] = rate

        optimizer.register_step_pre_hook(multiply)
        optimizer.register_step_post_hook(restore)

    def backward(self, original: Callable, engine: Any, *args: Any, **kwargs: Any) -> Any:
        """Replace ``DeepSpeedEngine.backward``: add the loss that it returns to the sum for the current step.

        The returned loss is already divided by the number of micro-batches, so that the sum is their mean.
        """
        loss = original(engine, *args, **kwargs)
        self._losses[engine] = self._losses.get(engine, 0.0) + loss.detach().float()
        return loss

    def take_step(self, original: Callable, engine: Any, *args: Any, **kwargs: Any) -> None:
        """Replace ``DeepSpeedEngine._take_model_step``: call it, and write the step's record; a collective.

        End the run on all ranks, with exit status 0, after the variant's last step or a loss that is not finite.
        """
        if self._is_over:  # the script has caught SystemExit
            os._exit(0)
        if self._engine is None:
            self._begin(engine)
        if engine is not self._engine:
            original(engine, *args, **kwargs)
            return
        rate = engine.get_lr()[0]
        original(engine, *args, **kwargs)
        self._steps += 1
        loss, peak = self._of_all_ranks(engine)
        record = {"step": self._steps, "loss": loss, "seconds": time.perf_counter()}
        self._write(record | {"lr": float(rate) * self._variant["factor"], "peak": peak})
        is_finite = abs(loss) < float("inf")
        if self._steps >= self._variant["steps"] or not is_finite:
            self._write({"end": "done" if is_finite else "diverged"})
            self._is_over = True
            torch.distributed.barrier()
            atexit.register(_leave_group)
            raise SystemExit(0)

    def _begin(self, engine: Any) -> None:
        """Record this engine from now on: check that its run starts at step 0, and write the first line of the records.

        Raise SettingsError if the script has loaded a checkpoint, or uses Muon in a variant that needs AdamW.
        """
        self._engine = engine
        if engine.global_steps:
            raise SettingsError(
                f"ds_muon try: the script has loaded a checkpoint of step {engine.global_steps}, but each variant must "
                "start at step 0; write {variant} into the command where it names the folder of checkpoints"
            )
        client, config = self._clients.get(engine), dict(engine._config._param_dict)
        if isinstance(engine.basic_optimizer, MuonWithAuxAdam) and not self._variant["muon"]:
            raise SettingsError("ds_muon try: the run has Muon already; pass a ds_config whose optimizer is AdamW")
        if client is not None:
            # Trainer sets weight_decay in its groups only, and to 0 in that of the norms and biases. The groups' lr is
            # what the schedule has made of it by now.
            largest = max(client.param_groups, key=_elements)
            params = {key: largest[key] for key in TAKEN if key in largest} | {"lr": client.defaults["lr"]}
            config["optimizer"] = {"type": type(client).__name__, "params": params}
        self._write({"config": config, "built_by_script": client is not None})

    def _of_all_ranks(self, engine: Any) -> tuple[float, int]:
        """Return (mean loss over the ranks that have one, largest peak memory of a rank in bytes); a collective.

        The memory is the accelerator's. Raise SettingsError if no rank has a loss.
        """
        loss = self._losses.pop(engine, None)
        rank = torch.distributed.get_rank()
        rows = torch.zeros(torch.distributed.get_world_size(), 3, dtype=torch.float64, device="cpu")
        if loss is not None:  # only the last pipeline stage has one
            rows[rank, 0], rows[rank, 1] = float(loss), 1.0
        rows[rank, 2] = get_accelerator().max_memory_allocated()
        losses, counts, peaks = summed(rows).cpu().unbind(1)
        if not counts.sum():
            raise SettingsError(
                "ds_muon try: the loss of a step is unknown, because the script calls loss.backward(); call "
                "engine.backward(loss)"
            )
        return float(losses.sum() / counts.sum()), int(peaks.max())

    def _write(self, record: Mapping[str, Any]) -> None:
        if torch.distributed.get_rank() == 0:
            with Path(self._variant["records"]).open("a") as file:
                file.write(json.dumps(record, default=str) + "\n")


def _muon_like(client: torch.optim.Optimizer, model: torch.nn.Module) -> MuonWithAuxAdam:
    """Return a MuonWithAuxAdam with the parameter groups and settings of the script's AdamW, ``client``.

    Raise SettingsError if ``client`` is another optimizer.
    """
    if "adam" not in type(client).__name__.lower() or "betas" not in client.defaults:
        raise SettingsError(f"ds_muon try: the script passes {type(client).__name__}, but only AdamW can be compared")
    groups = [{key: group[key] for key in ("params", *TAKEN) if key in group} for group in client.param_groups]
    for group, theirs in zip(groups, client.param_groups, strict=True):
        group["lr"] = float(theirs.get("initial_lr", theirs["lr"]))  # a schedule may have begun with another rate
    return MuonWithAuxAdam(groups, model=model, **{key: client.defaults[key] for key in TAKEN})


def _elements(group: Mapping[str, Any]) -> int:
    return sum(param.numel() for param in group["params"])


def _share_groups(client: torch.optim.Optimizer, muon: MuonWithAuxAdam) -> None:
    """Let a schedule set the rates of both optimizers, whether the script builds it on ``client`` or on ``muon``.

    ``client``: the AdamW that the script has built. ``muon``: the optimizer that the engine uses in its place.
    """
    for group, theirs in zip(muon.given.param_groups, client.param_groups, strict=True):
        for key in theirs.keys() - {"params"}:  # a schedule may keep values of its own there
            group[key] = theirs[key]
    client.param_groups = muon.given.param_groups


def _leave_group() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
