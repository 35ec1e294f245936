# SPDX-License-Identifier: Apache-2.0
"""Monkey-patches of DeepSpeed. They are applied when ``deepspeed.muon`` is imported, and can be removed again.

The adapters in ``zero/wrappers`` replace further methods of a single engine or ZeRO wrapper.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
from packaging.version import Version
from torch import nn

from deepspeed.muon.config.messages import FILLED_BY, nearest
from deepspeed.muon.config.schema import parse
from deepspeed.muon.errors import MuonConfigError, SeamError, UnsupportedError, logger
from deepspeed.muon.kernels.build_lock import wait_for_torch
from deepspeed.muon.model.param_groups import check_patterns
from deepspeed.muon.optimizer import MuonWithAuxAdam
from deepspeed.muon.version import TESTED_DEEPSPEED
from deepspeed.muon.zero.bind import ADAPTERS, agree_on_settings, bind_engine
from deepspeed.muon.zero.checkpoint import load, save, universal
from deepspeed.muon.zero.engine_step import record_backward, refuse_early_step, take_step
from deepspeed.muon.zero.refusals import (
    ON_GPUS,
    check_nvme,
    check_section,
    refuse_engine,
    refuse_unsupported,
    renames_parameters,
)
from deepspeed.muon.zero.scheduler import check_schedule, configure_scheduler, scheduler_from_config
from deepspeed.muon.zero.tried_run import replacements as of_tried_run
from deepspeed.muon.zero.wrappers.adapter import Seam, has_muon, patch, patched
from deepspeed.muon.zero.wrappers.grids import note_tp_rank, refuse_replaced_parameters, with_group_names

#: Values of ``optimizer.type`` in ds_config.json, in lower case. Stock DeepSpeed refuses the second, so that a machine
#: without this package fails instead of training with DeepSpeed's own Muon.
TYPES = ("muon", "muonwithauxadam")
#: An unknown type counts as a misspelt one if it is at least this similar (0 to 1): ``moun``, but not ``adamuon``.
MISSPELT_TYPE = 0.75


def is_muon(optimizer_name: str | None) -> bool:
    """Return whether ``optimizer.type`` selects deepspeed-muon, ignoring case."""
    return (optimizer_name or "").lower() in TYPES


def _read_config(original: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
    """Replace ``DeepSpeedConfig.__init__``: call the original, then :func:`take_config`."""
    original(self, *args, **kwargs)
    take_config(self)


def take_config(ds_config: Any) -> None:
    """Parse ``optimizer.params`` of a ``DeepSpeedConfig`` for Muon, and store the result in its ``muon_settings``.

    Without Muon, only check that ``optimizer.type`` is not a misspelt "Muon".

    Raises:
        MuonConfigError: a setting is wrong.
        UnsupportedError: deepspeed-muon does not support a setting.
    """
    _refuse_misspelt(ds_config.optimizer_name)
    if is_muon(ds_config.optimizer_name):
        ds_config.optimizer_name = TYPES[0]  # the only spelling that the rest of DeepSpeed knows
        # zero.Init reads the config before Hugging Face's integration has filled it in; initialize reads it again.
        ds_config.optimizer_params = without_double_clipping(
            ds_config.optimizer_params, ds_config.gradient_clipping, ds_config.global_rank == 0
        )
        params = (ds_config.optimizer_params or {}).items()
        ds_config.muon_settings = parse(
            {key: value for key, value in params if not (key in FILLED_BY and value == "auto")}
        )
        refuse_unsupported(ds_config, ds_config.muon_settings)
        check_section(ds_config._param_dict.get("checkpoint"))
    _keep_user_tags()


def _refuse_misspelt(optimizer_name: str | None) -> None:
    """Raise MuonConfigError if ``optimizer.type`` is unknown to DeepSpeed and torch, and is almost "Muon"."""
    name = optimizer_name or ""
    is_known = is_muon(name) or name.lower() in DEEPSPEED_OPTIMIZERS or hasattr(torch.optim, name)
    if not is_known and nearest(name.lower(), TYPES, MISSPELT_TYPE):
        raise MuonConfigError(f'optimizer.type: got {name!r}; did you mean "Muon"?')


def without_double_clipping(
    params: Mapping[str, Any] | None, gradient_clipping: Any, is_logging_rank: bool = True
) -> Any:
    """Return ``optimizer.params``, without ``max_grad_norm`` if ``gradient_clipping`` is set and not 0.

    Both keys clip gradients by their norm. If ``max_grad_norm`` is removed, log a warning on the logging rank.
    """
    if not params or "max_grad_norm" not in params or not gradient_clipping:
        return params
    if is_logging_rank:
        logger.warning(
            f"deepspeed-muon: optimizer.params.max_grad_norm {params['max_grad_norm']} is ignored, because "
            f"gradient_clipping {gradient_clipping} already clips; remove max_grad_norm"
        )
    return {key: value for key, value in params.items() if key != "max_grad_norm"}


def _keep_user_tags() -> None:
    """Patch ``deepspeed.set_optimizer_flags``, which would overwrite the ``use_muon`` tags that the script has set.

    With Muon in the config, the patched function sets no tags. It only checks, with :func:`check_patterns`, that
    patterns such as ``muon_include`` match a parameter.
    """
    # Not in install(), which runs before deepspeed/__init__.py defines the function.
    deepspeed = sys.modules["deepspeed"]
    flags = getattr(deepspeed, "set_optimizer_flags", None)
    if flags is None or getattr(flags, "keeps_user_tags", False):
        return

    def keep(original: Callable, config_class: Any, model: nn.Module) -> None:
        if not is_muon(config_class.optimizer_name):
            original(config_class, model)
        elif _is_trained(model) and not renames_parameters(config_class):  # renamed: the optimizer checks the new names
            check_patterns(model, config_class.muon_settings)

    _undo.append(patch(deepspeed, "set_optimizer_flags", keep))
    deepspeed.set_optimizer_flags.keeps_user_tags = True


def _configure_basic_optimizer(original: Callable, self: Any, model_parameters: Any) -> Any:
    """Replace ``DeepSpeedEngine._configure_basic_optimizer``: build MuonWithAuxAdam if the config asks for Muon."""
    if not is_muon(self.optimizer_name()):
        return original(self, model_parameters)
    if not _is_trained(self.module) and not self.zero_optimization():
        # For example DPO's reference model, to which tools pass the same config with ZeRO switched off. Under ZeRO such
        # a model fails with every optimizer; then MuonWithAuxAdam below explains why.
        logger.info("deepspeed-muon: this model has no trainable parameters, so a step changes nothing")
        return torch.optim.AdamW(model_parameters)
    refuse_engine(self)
    note_tp_rank(self)
    if "auto" in (params := self.optimizer_params() or {}).values():
        parse(params)  # raises: nothing has filled it in
    optimizer = MuonWithAuxAdam(model_parameters, model=self.module, settings=self._config.muon_settings)
    _check_before_zero(self, optimizer)
    return optimizer


def _is_trained(model: nn.Module) -> bool:
    return any(param.requires_grad for param in model.parameters())


def _configure_optimizer(original: Callable, self: Any, client_optimizer: Any, model_parameters: Any) -> Any:
    """Replace ``DeepSpeedEngine._configure_optimizer``: check the script's optimizer, and call the original.

    If the engine's optimizer is a MuonWithAuxAdam, also call :func:`bind_engine`.
    """
    if client_optimizer is None:
        if is_muon(self.optimizer_name()) and self.has_moe_layers:
            model_parameters = with_group_names(model_parameters)
    elif isinstance(client_optimizer, tuple(self._supported_optims())):  # otherwise a function that builds one
        _check_client(self, client_optimizer)
    else:
        client_optimizer = functools.partial(_build_and_check, self, client_optimizer)
    if is_muon(self.optimizer_name()) or isinstance(client_optimizer, MuonWithAuxAdam):
        _import_stocks_muon()
    result = original(self, client_optimizer, model_parameters)
    if isinstance(self.basic_optimizer, MuonWithAuxAdam):
        bind_engine(self)
    return result


def _import_stocks_muon() -> None:
    """Import the module of stock DeepSpeed's Muon before ZeRO does, but without loading torch's compiler.

    Loading the compiler takes a second. It is put off until a function that the module compiles is first called.
    """

    def compile_at_first_call(compile: Callable, *args: Any, **kwargs: Any) -> Callable:
        if kwargs or len(args) != 1:
            return compile(*args, **kwargs)
        compiled = functools.cache(lambda: compile(*args))
        return functools.wraps(args[0])(lambda *args, **kwargs: compiled()(*args, **kwargs))

    with patched(torch, compile=compile_at_first_call), suppress(ImportError):
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")


def _build_and_check(engine: Any, build: Callable, model_parameters: Any) -> Any:
    """Build the optimizer with the script's function ``build``, check it, and return it; a collective."""
    note_tp_rank(engine)
    optimizer = build(model_parameters)
    _check_client(engine, optimizer)
    return optimizer


def _check_client(engine: Any, optimizer: Any) -> None:
    """Raise an error if the script's optimizer does not fit the config, the engine or the other ranks.

    A collective for a MuonWithAuxAdam. An optimizer of another class is refused only if the config names Muon.
    """
    if not isinstance(optimizer, MuonWithAuxAdam):
        _refuse_other_optimizer(engine, type(optimizer))
        return
    refuse_unsupported(engine._config, optimizer.config)
    refuse_engine(engine)
    refuse_replaced_parameters(optimizer)
    _check_before_zero(engine, optimizer)
    engine._config.zero_force_ds_cpu_optimizer = False  # if true, DeepSpeed refuses it with ZeRO-Offload


def _refuse_other_optimizer(engine: Any, optimizer_class: type) -> None:
    """Raise MuonConfigError if the config asks for Muon, but the script passes an optimizer of another class."""
    name = f"{optimizer_class.__module__}.{optimizer_class.__qualname__}"
    if is_muon(engine._config.optimizer_name):  # engine.optimizer_name() is the class of the script's
        raise MuonConfigError(
            f"optimizer.type: Muon, but the script passes {name} to deepspeed.initialize, and DeepSpeed would use "
            "that one; remove optimizer= from the call and pass model_parameters=model.parameters(), or remove the "
            "section optimizer from the config"
        )


def _check_before_zero(engine: Any, optimizer: MuonWithAuxAdam) -> None:
    """Raise an error if the optimizer does not fit the schedule, the NVMe settings or other ranks; a collective."""
    settings = engine._config.zero_config
    if settings.elastic_checkpoint and engine.zero_optimization_stage() in (1, 2):
        settings.elastic_checkpoint = False  # DeepSpeed cannot load AdamW's either
        if engine.global_rank == 0:
            logger.warning(
                "deepspeed-muon: zero_optimization.elastic_checkpoint is ignored, because it cannot store the states "
                "of Muon and AdamW together; to resume on another number of ranks, use universal checkpoints"
            )
    check_schedule(engine, optimizer)
    check_nvme(engine, optimizer)
    agree_on_settings(engine, optimizer)  # ZeRO's constructor calls collectives in the order of the parameters


def _compile(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace ``DeepSpeedEngine.compile``: raise UnsupportedError for DeepCompile, otherwise call the original."""
    if self.is_deepcompile_enabled():  # its gradients would bypass the optimizer
        raise UnsupportedError(f"compile.deepcompile: DeepCompile {ON_GPUS}")
    return original(self, *args, **kwargs)


def _get_optimizer_param(original: Callable, self: Any, name: str) -> list[Any]:
    """Replace ``DeepSpeedEngine._get_optimizer_param``, which ``get_lr`` and ``get_mom`` call.

    Return the setting ``name``, such as ``"lr"``, of each parameter group that the user passed. The optimizer itself
    has split each of these groups into one for Muon and one for AdamW.
    """
    return [group.get(name, 0.0) for group in self.basic_optimizer.given.param_groups]


def _destroy(original: Callable, self: Any) -> None:
    """Replace ``DeepSpeedEngine.destroy``: call the original, then release what it leaves (:meth:`Adapter.release`)."""
    original(self)
    self.muon_adapter.release()


_ENGINE = "deepspeed.runtime.engine"
#: Attribute of DeepSpeed -> the function that replaces it; its first argument is the original.
ALWAYS: dict[Seam, Callable] = {
    Seam(_ENGINE, "DeepSpeedEngine._configure_basic_optimizer"): _configure_basic_optimizer,
    Seam(_ENGINE, "DeepSpeedEngine._configure_optimizer"): _configure_optimizer,
    Seam(_ENGINE, "get_fp32_state_dict_from_zero_checkpoint"): load.fp32_weights,
    Seam("deepspeed.runtime.config", "DeepSpeedConfig.__init__"): _read_config,
}
#: Method of DeepSpeedEngine -> the function that replaces it. An engine without a MuonWithAuxAdam runs the original.
_OF_ENGINES: dict[str, Callable] = {
    "_configure_lr_scheduler": configure_scheduler,
    "_scheduler_from_config": scheduler_from_config,
    "_get_optimizer_param": _get_optimizer_param,
    "compile": _compile,
    "_backward_prologue": record_backward,
    "step": refuse_early_step,
    "_take_model_step": take_step,
    "_configure_checkpointing": save.configure_checkpointing,
    "save_checkpoint": save.save_checkpoint,
    "load_checkpoint": load.load_checkpoint,
    "destroy": _destroy,
}
WITH_MUON = {Seam(_ENGINE, f"DeepSpeedEngine.{name}"): function for name, function in _OF_ENGINES.items()}
REPLACEMENTS = ALWAYS | WITH_MUON
_SUPPORTED = Seam("deepspeed.runtime.zero.utils", "ZERO_SUPPORTED_OPTIMIZERS")
#: Every attribute of DeepSpeed that is replaced or extended, at activation or later.
SEAMS: tuple[Seam, ...] = (
    *(*REPLACEMENTS, _SUPPORTED),
    *(seam for adapter in ADAPTERS.values() for seam in adapter.seams()),
    *universal.SEAMS,
)

#: What undoes each change, in the order of the changes.
_undo: list[Callable[[], None]] = []


def install() -> None:
    """Patch DeepSpeed so that ``"type": "Muon"`` in a ds_config selects deepspeed-muon. A second call does nothing.

    Raises:
        SeamError: this DeepSpeed lacks an attribute that deepspeed-muon replaces. Nothing has been changed.
    """
    version = importlib.import_module("deepspeed.git_version_info").version  # deepspeed.__version__ is not set yet
    oldest, newest = TESTED_DEEPSPEED
    if missing := [str(seam) for seam in SEAMS if not seam.exists()]:
        raise SeamError(
            f"DeepSpeed {version} has no {', '.join(missing)}, which deepspeed-muon replaces; install DeepSpeed "
            f"{oldest} to {newest}, which are tested"
        )
    if _undo:
        return
    if not is_tested(version):
        logger.warning(
            f"deepspeed-muon was tested on DeepSpeed {oldest} to {newest}, but {version} is installed; if training "
            "fails or gives other results, install a tested version"
        )
    for replacements, when in ((ALWAYS, None), (WITH_MUON, has_muon), (of_tried_run(), None)):
        for seam, function in replacements.items():
            owner, name = seam.find()
            _undo.append(patch(owner, name, function, when=when))
    # torch before 2.15 waits forever for the lock file of a process that was killed; the replacement logs which it is.
    with suppress(ImportError):
        _undo.append(patch(importlib.import_module("torch.utils.file_baton").FileBaton, "wait", wait_for_torch))
    supported = importlib.import_module(_SUPPORTED.module_name).ZERO_SUPPORTED_OPTIMIZERS
    supported.append(MuonWithAuxAdam)  # so that ZeRO accepts it without zero_allow_untested_optimizer
    _undo.append(functools.partial(supported.remove, MuonWithAuxAdam))


def uninstall() -> None:
    """Undo :func:`install`, so that new engines use stock DeepSpeed. Engines that exist keep their optimizer."""
    while _undo:
        _undo.pop()()


def activate() -> None:
    """Patch DeepSpeed (:func:`install`). If it lacks a needed attribute, log the SeamError instead of raising it.

    The error is raised later, when an engine whose config asks for Muon is built. Importing the package calls this.
    """
    try:
        install()
    except SeamError as error:
        logger.error("deepspeed-muon is not active: %s", error)
        message = str(error)

        def refuse(original: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
            if is_muon(getattr(kwargs.get("config_class"), "optimizer_name", None)):
                raise SeamError(message)
            original(self, *args, **kwargs)

        _undo.append(patch(importlib.import_module(_ENGINE).DeepSpeedEngine, "__init__", refuse))


def seam_states() -> dict[str, str]:
    """Return {attribute of DeepSpeed that this package replaces: its state}, for all of :data:`SEAMS`.

    - ``"missing"``: this DeepSpeed lacks the attribute.
    - ``"in use"``: the attribute is replaced now.
    - ``"ready"``: it will be replaced for an engine with Muon, or during a save or load.
    - ``"present"``: it is not replaced, because :func:`install` was not called or another attribute is missing.
    """
    states = {str(seam): "present" if seam.exists() else "missing" for seam in SEAMS}
    if _undo and "missing" not in states.values():
        in_use = {*REPLACEMENTS, _SUPPORTED}
        return {str(seam): "in use" if seam in in_use else "ready" for seam in SEAMS}
    return states


def is_tested(version: str) -> bool:
    """Return whether this package was tested with DeepSpeed ``version``, such as ``"0.19.8"``."""
    oldest, newest = map(Version, TESTED_DEEPSPEED)
    return oldest <= Version(Version(version).base_version) <= newest
