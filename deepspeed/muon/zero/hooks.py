# SPDX-License-Identifier: Apache-2.0
"""Monkey-patches that are applied to DeepSpeed at import, and taken out again.

What is replaced later, for an engine with this Muon, its adapter declares; all of it is checked at activation.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from packaging.version import Version
from torch import nn
from torch.utils.file_baton import FileBaton

from deepspeed.muon.config.messages import FILLED_BY
from deepspeed.muon.config.schema import parse
from deepspeed.muon.errors import CallOrderError, MuonConfigError, SeamError, UnsupportedError
from deepspeed.muon.kernels.build_lock import wait_for_torch
from deepspeed.muon.log import logger
from deepspeed.muon.optimizer import MuonWithAuxAdam
from deepspeed.muon.param_groups import check_patterns
from deepspeed.muon.patch import Seam, replace, replaced
from deepspeed.muon.version import TESTED_DEEPSPEED
from deepspeed.muon.zero.bind import agree_on_settings, bind_engine
from deepspeed.muon.zero.checkpoint import save_load, universal
from deepspeed.muon.zero.lr_scheduler import check_schedule, configure_scheduler, scheduler_from_config
from deepspeed.muon.zero.monitor import take_step
from deepspeed.muon.zero.nvme import check_nvme
from deepspeed.muon.zero.refusals import ON_GPUS, refuse_engine, refuse_unsupported, renames_parameters
from deepspeed.muon.zero.tp_ranks import note_tp_rank
from deepspeed.muon.zero.wrappers import ADAPTERS
from deepspeed.muon.zero.wrappers.experts import refuse_replaced, with_names

#: Values of ``optimizer.type`` in ds_config.json, in lower case. Stock cannot resolve the second.
TYPES = ("muon", "muonwithauxadam")


def is_muon(optimizer_name: str | None) -> bool:
    """Return whether ``optimizer.type`` means deepspeed-muon, in any case."""
    return (optimizer_name or "").lower() in TYPES


def _read_config(original: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
    """``DeepSpeedConfig.__init__``: refuse a wrong config before anything is allocated."""
    original(self, *args, **kwargs)
    if is_muon(self.optimizer_name):
        self.optimizer_name = TYPES[0]
        # zero.Init reads the config before Hugging Face's integration has filled it in; initialize reads it again.
        self.optimizer_params = clipped_once(self.optimizer_params, self.gradient_clipping, self.global_rank == 0)
        params = (self.optimizer_params or {}).items()
        settings = parse({key: value for key, value in params if not (key in FILLED_BY and value == "auto")})
        refuse_unsupported(self, settings)
    _keep_user_tags()


def clipped_once(params: Mapping[str, Any] | None, gradient_clipping: Any, is_logging_rank: bool = True) -> Any:
    """Return ``optimizer.params`` without ``max_grad_norm`` where ``gradient_clipping`` is set, which clips."""
    if not params or "max_grad_norm" not in params or not gradient_clipping:
        return params
    if is_logging_rank:
        logger.warning(
            f"deepspeed-muon: optimizer.params.max_grad_norm {params['max_grad_norm']} is dropped, because "
            f"gradient_clipping {gradient_clipping} clips"
        )
    return {key: value for key, value in params.items() if key != "max_grad_norm"}


def _keep_user_tags() -> None:
    """Stop ``deepspeed.initialize`` from overwriting ``use_muon`` on parameters; check patterns against names there.

    Done when a config is read and not at installation, because the hook on the engine fires before
    ``deepspeed/__init__.py`` defines the function.
    """
    deepspeed = sys.modules["deepspeed"]
    flags = getattr(deepspeed, "set_optimizer_flags", None)
    if flags is None or getattr(flags, "keeps_user_tags", False):
        return

    def keep(original: Callable, config_class: Any, model: Any) -> None:
        if not is_muon(config_class.optimizer_name):
            original(config_class, model)
        elif _is_trained(model) and not renames_parameters(config_class):  # else the optimizer checks the new names
            check_patterns(model, parse(config_class.optimizer_params))

    _undo.append(replace(deepspeed, "set_optimizer_flags", keep))
    deepspeed.set_optimizer_flags.keeps_user_tags = True


def _configure_basic_optimizer(original: Callable, self: Any, model_parameters: Any) -> Any:
    """``DeepSpeedEngine._configure_basic_optimizer``: build ours where the config asks for Muon."""
    if not is_muon(self.optimizer_name()):
        return original(self, model_parameters)
    if not _is_trained(self.module) and not self.zero_optimization():
        # Such as DPO's reference model, to which tools pass the same config. ZeRO, which tools switch off for such a
        # model, fails with any optimizer, and ours says why.
        logger.info("deepspeed-muon: no parameter of this model is trained; its AdamW has nothing to do")
        return torch.optim.AdamW(model_parameters)
    refuse_engine(self)
    note_tp_rank(self)
    optimizer = MuonWithAuxAdam(model_parameters, model=self.module, **(self.optimizer_params() or {}))
    _check(self, optimizer)
    return optimizer


def _is_trained(model: nn.Module) -> bool:
    return any(param.requires_grad for param in model.parameters())


def _configure_optimizer(original: Callable, self: Any, client_optimizer: Any, model_parameters: Any) -> Any:
    """``DeepSpeedEngine._configure_optimizer``: bind ours to the layout that the wrapper has made."""
    if client_optimizer is None:
        if is_muon(self.optimizer_name()) and self.has_moe_layers:
            model_parameters = with_names(model_parameters)
    elif isinstance(client_optimizer, tuple(self._supported_optims())):
        _check_client(self, client_optimizer)
    else:
        client_optimizer = functools.partial(_called, self, client_optimizer)
    if is_muon(self.optimizer_name()) or isinstance(client_optimizer, MuonWithAuxAdam):
        _import_stocks_muon()
    result = original(self, client_optimizer, model_parameters)
    if isinstance(self.basic_optimizer, MuonWithAuxAdam):
        bind_engine(self)
    return result


def _import_stocks_muon() -> None:
    """Import stock's Muon, as ZeRO does to know its type, without the second that its compiler takes to import.

    Its functions are compiled at their first call.
    """

    def compile_at_first_call(compile: Callable, *args: Any, **options: Any) -> Callable:
        if options or len(args) != 1:
            return compile(*args, **options)
        compiled = functools.cache(lambda: compile(*args))
        return functools.wraps(args[0])(lambda *args, **kwargs: compiled()(*args, **kwargs))

    with replaced(torch, compile=compile_at_first_call), suppress(ImportError):
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")


def _called(engine: Any, build: Callable, model_parameters: Any) -> Any:
    """Call a script's function that builds the optimizer, and check the result at once."""
    note_tp_rank(engine)
    optimizer = build(model_parameters)
    _check_client(engine, optimizer)
    return optimizer


def _check_client(engine: Any, optimizer: Any) -> None:
    """Check an optimizer that the script has built, whose settings are not in the config."""
    if not isinstance(optimizer, MuonWithAuxAdam):
        _refuse_another(engine, type(optimizer))
        return
    refuse_unsupported(engine._config, optimizer.config)
    refuse_engine(engine)
    refuse_replaced(optimizer)
    _check(engine, optimizer)
    engine._config.zero_force_ds_cpu_optimizer = False


def _refuse_another(engine: Any, kind: type) -> None:
    """Refuse an optimizer that would train instead of the config's Muon; warn of a Muon that knows nothing of ZeRO."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    if is_muon(engine._config.optimizer_name):  # engine.optimizer_name() is the class of the script's
        raise MuonConfigError(
            f"optimizer.type: Muon, but the script passes {name} to deepspeed.initialize, which would train instead; "
            "remove optimizer= from the call and pass model_parameters=model.parameters(), or remove the section "
            "optimizer from the config"
        )
    is_muon_by_name = "muon" in kind.__name__.lower() and not kind.__module__.startswith("deepspeed.")
    if is_muon_by_name and engine.zero_optimization() and engine.global_rank == 0:
        logger.warning(
            "deepspeed-muon: the script passes another Muon, %s. ZeRO gives it flat vectors instead of matrices, "
            'which it may not orthogonalize; pass no optimizer, and set optimizer.type to "Muon" in ds_config.json',
            name,
        )


def _check(engine: Any, optimizer: MuonWithAuxAdam) -> None:
    """Refuse or change what must be refused or changed before ZeRO allocates."""
    settings = engine._config.zero_config
    if settings.elastic_checkpoint and engine.zero_optimization_stage() in (1, 2):
        settings.elastic_checkpoint = False  # DeepSpeed cannot load AdamW's either
        if engine.global_rank == 0:
            logger.warning(
                "deepspeed-muon: zero_optimization.elastic_checkpoint has no effect, because it cannot store two kinds "
                "of optimizer state; resume on another number of ranks by universal checkpoints"
            )
    check_schedule(engine, optimizer)
    check_nvme(engine, optimizer)
    agree_on_settings(engine, optimizer)


def _compile(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """``DeepSpeedEngine.compile``: refuse DeepCompile, which takes the gradients past the optimizer."""
    if self.is_deepcompile_enabled():
        raise UnsupportedError(f"compile.deepcompile: DeepCompile {ON_GPUS}")
    return original(self, *args, **kwargs)


def _get_optimizer_param(original: Callable, self: Any, name: str) -> list[Any]:
    """Return one value per group of the user's, for ``get_lr`` and ``get_mom``."""
    return [group.get(name, 0.0) for group in self.basic_optimizer.given.param_groups]


def _note_backward(original: Callable, self: Any) -> None:
    """``DeepSpeedEngine._backward_prologue``, which every backward calls."""
    # Gradients can be computed while master weights and optimizer states are away, and into nothing else.
    if moved := [kind for kind in self.muon_adapter.moved_states if kind not in ("hp_params", "optim_states")]:
        raise CallOrderError(f"backward() after offload_states(): {_AWAY.format(', '.join(moved))}")
    self.muon_adapter.has_backward = True
    original(self)


def _step(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """``DeepSpeedEngine.step``: refuse a step for which there are no gradients, or no states."""
    adapter = self.muon_adapter
    if adapter.moved_states:
        raise CallOrderError(f"step() after offload_states(): {_AWAY.format(', '.join(adapter.moved_states))}")
    # A script may write gradients itself.
    if not adapter.has_backward and all(param.grad is None for param in self.module.parameters()):
        raise CallOrderError(
            "step() without a backward since the last step(): there is no gradient to step with; call "
            "engine.backward(loss) once before each engine.step(), with gradient accumulation too"
        )
    adapter.has_backward = False
    return original(self, *args, **kwargs)


def _with_muon(function: Callable) -> Callable:
    """Let ``function(original, engine, ...)`` apply to engines with this Muon; for others call the original."""

    @functools.wraps(function)
    def call(original: Callable, engine: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(getattr(engine, "basic_optimizer", None), MuonWithAuxAdam):
            return function(original, engine, *args, **kwargs)
        return original(engine, *args, **kwargs)

    return call


_AWAY = "{} are away; call engine.reload_states() first"
_ENGINE = "deepspeed.runtime.engine"
#: What is replaced at activation, and by what.
REPLACEMENTS: dict[Seam, Callable] = {
    Seam(_ENGINE, "DeepSpeedEngine._configure_basic_optimizer"): _configure_basic_optimizer,
    Seam(_ENGINE, "DeepSpeedEngine._configure_optimizer"): _configure_optimizer,
    Seam(_ENGINE, "DeepSpeedEngine._configure_lr_scheduler"): _with_muon(configure_scheduler),
    Seam(_ENGINE, "DeepSpeedEngine._scheduler_from_config"): _with_muon(scheduler_from_config),
    Seam(_ENGINE, "DeepSpeedEngine._backward_prologue"): _with_muon(_note_backward),
    Seam(_ENGINE, "DeepSpeedEngine.step"): _with_muon(_step),
    Seam(_ENGINE, "DeepSpeedEngine._take_model_step"): _with_muon(take_step),
    Seam(_ENGINE, "DeepSpeedEngine._get_optimizer_param"): _with_muon(_get_optimizer_param),
    Seam(_ENGINE, "DeepSpeedEngine.compile"): _with_muon(_compile),
    Seam(_ENGINE, "DeepSpeedEngine.save_checkpoint"): _with_muon(save_load.save_checkpoint),
    Seam(_ENGINE, "DeepSpeedEngine.load_checkpoint"): _with_muon(save_load.load_checkpoint),
    Seam("deepspeed.runtime.config", "DeepSpeedConfig.__init__"): _read_config,
}
_SUPPORTED = Seam("deepspeed.runtime.zero.utils", "ZERO_SUPPORTED_OPTIMIZERS")
#: Everything of DeepSpeed that is replaced or extended.
SEAMS: tuple[Seam, ...] = (
    *(*REPLACEMENTS, _SUPPORTED),
    *(seam for adapter in ADAPTERS.values() for seam in adapter.seams()),
    *(*save_load.SEAMS, *universal.SEAMS),
)

_undo: list[Callable[[], None]] = []


def install() -> None:
    """Make ``"type": "Muon"`` mean deepspeed-muon. Does nothing the second time.

    Raises:
        SeamError: this DeepSpeed lacks something that deepspeed-muon replaces; nothing has been changed.
    """
    version = importlib.import_module("deepspeed.git_version_info").version  # deepspeed.__version__ is not set yet
    oldest, newest = TESTED_DEEPSPEED
    if missing := [str(seam) for seam in SEAMS if not seam.exists()]:
        raise SeamError(
            f"DeepSpeed {version} has no {', '.join(missing)}, where deepspeed-muon hooks in; tested versions are "
            f"{oldest} to {newest}"
        )
    if _undo:
        return
    if not is_tested(version):
        logger.warning(f"deepspeed-muon was tested on DeepSpeed {oldest} to {newest}, this is {version}")
    for seam, function in REPLACEMENTS.items():
        owner, name = seam.find()
        _undo.append(replace(owner, name, function))
    _undo.append(replace(FileBaton, "wait", wait_for_torch))
    _list_op()
    supported = importlib.import_module(_SUPPORTED.module).ZERO_SUPPORTED_OPTIMIZERS
    supported.append(MuonWithAuxAdam)
    _undo.append(functools.partial(supported.remove, MuonWithAuxAdam))


def uninstall() -> None:
    """Restore stock DeepSpeed. Engines that exist keep their optimizer."""
    while _undo:
        _undo.pop()()


def activate() -> None:
    """:func:`install`; where a seam is missing, let only a run that asks for Muon fail."""
    try:
        install()
    except SeamError as error:
        logger.error("deepspeed-muon is not active: %s", error)
        message = str(error)

        def refuse(original: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
            if is_muon(getattr(kwargs.get("config_class"), "optimizer_name", None)):
                raise SeamError(message)
            original(self, *args, **kwargs)

        _undo.append(replace(importlib.import_module(_ENGINE).DeepSpeedEngine, "__init__", refuse))


def seam_states() -> dict[str, str]:
    """Return for each seam ``missing`` or ``present``. After :func:`install`: ``in use``, or ``ready`` where an engine
    with Muon, a save or a load is going to replace it.
    """
    states = {str(seam): "present" if seam.exists() else "missing" for seam in SEAMS}
    if _undo and "missing" not in states.values():
        in_use = {*REPLACEMENTS, _SUPPORTED}
        return {str(seam): "in use" if seam in in_use else "ready" for seam in SEAMS}
    return states


def is_tested(version: str) -> bool:
    """Return whether this version of DeepSpeed lies in the tested range."""
    oldest, newest = map(Version, TESTED_DEEPSPEED)
    return oldest <= Version(Version(version).base_version) <= newest


def _list_op() -> None:
    """Let ``ds_report`` list csrc/muon among DeepSpeed's own operations."""
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    from deepspeed.muon.kernels.builder import MuonBuilder

    builder = MuonBuilder()
    found = importlib.util.find_spec(builder.absolute_name()) is not None
    for names, value in ((ALL_OPS, builder), (installed_ops, found)):
        names[builder.NAME] = value
        _undo.append(functools.partial(names.pop, builder.NAME))
