# SPDX-License-Identifier: Apache-2.0
"""Puts deepspeed-muon into DeepSpeed's seams, and takes it out again.

The seams: the engine builds its optimizer, wraps it, builds its scheduler, takes a step, saves and loads; ZeRO lists
the optimizer types that it accepts; a config is read; ``deepspeed.initialize`` tags parameters for stock's own Muon.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

from packaging.version import Version

from deepspeed.muon.config.messages import FILLED_BY
from deepspeed.muon.config.schema import parse
from deepspeed.muon.errors import SeamError
from deepspeed.muon.log import logger
from deepspeed.muon.optimizer import MuonWithAuxAdam
from deepspeed.muon.param_groups import check_patterns
from deepspeed.muon.version import TESTED_DEEPSPEED
from deepspeed.muon.zero.bind import agree, bind_engine
from deepspeed.muon.zero.checkpoint.save_load import load_checkpoint, save_checkpoint
from deepspeed.muon.zero.lr_scheduler import check_schedule, configure_scheduler, scheduler_from_config
from deepspeed.muon.zero.monitor import take_step
from deepspeed.muon.zero.nvme import check_nvme
from deepspeed.muon.zero.refusals import refuse_engine, refuse_unsupported, renames_parameters
from deepspeed.muon.zero.wrappers.experts import refuse_replaced, with_names

#: Values of ``optimizer.type`` in ds_config.json, in lower case. Stock cannot resolve the second.
TYPES = ("muon", "muonwithauxadam")

SEAMS = (
    ("deepspeed.runtime.engine", "DeepSpeedEngine._configure_basic_optimizer"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine._configure_optimizer"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine._configure_lr_scheduler"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine._scheduler_from_config"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine._take_model_step"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine.save_checkpoint"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine.load_checkpoint"),
    ("deepspeed.runtime.zero.utils", "ZERO_SUPPORTED_OPTIMIZERS"),
    ("deepspeed.runtime.config", "DeepSpeedConfig.__init__"),
)

_undo: list[Callable[[], None]] = []


def install() -> None:
    """Make ``"type": "Muon"`` mean deepspeed-muon. Does nothing the second time.

    Raises:
        SeamError: this DeepSpeed lacks a seam; nothing has been changed.
    """
    _check_seams()
    if _undo:
        return
    _warn_of_untested_version()
    engine = importlib.import_module("deepspeed.runtime.engine").DeepSpeedEngine
    config = importlib.import_module("deepspeed.runtime.config").DeepSpeedConfig
    supported = importlib.import_module("deepspeed.runtime.zero.utils").ZERO_SUPPORTED_OPTIMIZERS
    _replace(engine, "_configure_basic_optimizer", _configure_basic_optimizer)
    _replace(engine, "_configure_optimizer", _configure_optimizer)
    _replace(engine, "_configure_lr_scheduler", configure_scheduler)
    _replace(engine, "_scheduler_from_config", scheduler_from_config)
    _replace(engine, "_take_model_step", take_step)
    _replace(engine, "save_checkpoint", save_checkpoint)
    _replace(engine, "load_checkpoint", load_checkpoint)
    _replace(config, "__init__", _read_config)
    _list_op()
    supported.append(MuonWithAuxAdam)
    _undo.append(lambda: supported.remove(MuonWithAuxAdam))


def uninstall() -> None:
    """Give stock DeepSpeed back as it was. Engines that exist keep their optimizer."""
    while _undo:
        _undo.pop()()


def activate() -> None:
    """:func:`install`, but where a seam is missing only a run that asks for Muon fails."""
    try:
        install()
    except SeamError as error:
        logger.error("deepspeed-muon is not active: %s", error)
        engine = importlib.import_module("deepspeed.runtime.engine").DeepSpeedEngine
        message = str(error)

        def refuse(original: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
            config = kwargs.get("config_class")
            if is_muon(getattr(config, "optimizer_name", None)):
                raise SeamError(message)
            original(self, *args, **kwargs)

        _replace(engine, "__init__", refuse)


def is_muon(optimizer_name: str | None) -> bool:
    """Whether ``optimizer.type`` means deepspeed-muon, in any case."""
    return (optimizer_name or "").lower() in TYPES


def _check_seams() -> None:
    for module, path in SEAMS:
        try:
            functools.reduce(getattr, path.split("."), importlib.import_module(module))
        except (ImportError, AttributeError):
            raise SeamError(
                f"DeepSpeed {_deepspeed_version()} has no {module}.{path}, where deepspeed-muon hooks in; "
                f"tested versions are {TESTED_DEEPSPEED[0]} to {TESTED_DEEPSPEED[1]}"
            ) from None


def seam_states() -> dict[str, str]:
    """Of each seam: ``missing``, ``present``, or ``in use`` where :func:`install` has put deepspeed-muon there."""
    states = {}
    for module, path in SEAMS:
        try:
            functools.reduce(getattr, path.split("."), importlib.import_module(module))
            states[f"{module}.{path}"] = "present"
        except (ImportError, AttributeError):
            states[f"{module}.{path}"] = "missing"
    is_installed = bool(_undo) and "missing" not in states.values()
    return dict.fromkeys(states, "in use") if is_installed else states


def _warn_of_untested_version() -> None:
    version = _deepspeed_version()
    if not is_tested(version):
        logger.warning("deepspeed-muon was tested on DeepSpeed %s to %s, this is %s", *TESTED_DEEPSPEED, version)


def is_tested(version: str) -> bool:
    """Whether this version of DeepSpeed lies in the tested range."""
    oldest, newest = map(Version, TESTED_DEEPSPEED)
    return oldest <= Version(Version(version).base_version) <= newest


def _deepspeed_version() -> str:
    """``deepspeed.__version__``, which is not set yet when the hook on the engine fires."""
    return importlib.import_module("deepspeed.git_version_info").version


def _replace(owner: Any, name: str, wrapper: Callable) -> None:
    """Set ``owner.name`` to ``wrapper(original, ...)`` until :func:`uninstall`."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(owner, name, replacement)
    _undo.append(lambda: setattr(owner, name, original))


def _read_config(original: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
    """``DeepSpeedConfig.__init__``: refuse a wrong config before anything is allocated."""
    original(self, *args, **kwargs)
    if is_muon(self.optimizer_name):
        self.optimizer_name = TYPES[0]
        # zero.Init reads the config before Hugging Face's integration has filled it in; initialize reads it again.
        parse({key: value for key, value in (self.optimizer_params or {}).items() if not _to_be_filled(key, value)})
        refuse_unsupported(self)
    _keep_user_tags()


def _to_be_filled(key: str, value: Any) -> bool:
    return key in FILLED_BY and value == "auto"


def _list_op() -> None:
    """Let ``ds_report`` list csrc/muon among DeepSpeed's own operations."""
    builder = importlib.import_module("deepspeed.muon.kernels.builder").MuonBuilder()
    listed = importlib.import_module("deepspeed.ops.op_builder.all_ops").ALL_OPS
    installed = importlib.import_module("deepspeed.git_version_info").installed_ops
    listed[builder.NAME] = builder
    installed[builder.NAME] = importlib.util.find_spec(builder.absolute_name()) is not None
    for names in (listed, installed):
        _undo.append(functools.partial(names.pop, builder.NAME))


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
        if is_muon(config_class.optimizer_name):
            if not renames_parameters(config_class):  # else the optimizer checks, which sees the new names
                check_patterns(model, parse(config_class.optimizer_params))
        else:
            original(config_class, model)

    _replace(deepspeed, "set_optimizer_flags", keep)
    deepspeed.set_optimizer_flags.keeps_user_tags = True


def _configure_basic_optimizer(original: Callable, self: Any, model_parameters: Any) -> Any:
    """``DeepSpeedEngine._configure_basic_optimizer``: build ours where the config asks for Muon."""
    if not is_muon(self.optimizer_name()):
        return original(self, model_parameters)
    refuse_engine(self)
    optimizer = MuonWithAuxAdam(model_parameters, model=self.module, **(self.optimizer_params() or {}))
    check_schedule(self, optimizer)
    check_nvme(self, optimizer)
    agree(optimizer)
    return optimizer


def _configure_optimizer(original: Callable, self: Any, client_optimizer: Any, model_parameters: Any) -> Any:
    """``DeepSpeedEngine._configure_optimizer``: bind ours to the layout that the wrapper has made."""
    if client_optimizer is not None and not isinstance(client_optimizer, tuple(self._supported_optims())):
        client_optimizer = client_optimizer(model_parameters)
    if isinstance(client_optimizer, MuonWithAuxAdam):
        refuse_unsupported(self._config, client_optimizer.config.momentum_dtype)
        refuse_engine(self)
        refuse_replaced(client_optimizer)
        check_schedule(self, client_optimizer)
        check_nvme(self, client_optimizer)
        agree(client_optimizer)
        self._config.zero_force_ds_cpu_optimizer = False
    elif client_optimizer is None and is_muon(self.optimizer_name()) and self.has_moe_layers:
        model_parameters = with_names(model_parameters)
    result = original(self, client_optimizer, model_parameters)
    if isinstance(self.basic_optimizer, MuonWithAuxAdam):
        bind_engine(self)
    return result
