# SPDX-License-Identifier: Apache-2.0
"""How the package gets into DeepSpeed, what it says, what it leaves alone and how it leaves."""

import functools
import importlib
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from packaging.requirements import Requirement

import deepspeed
import deepspeed.muon
from deepspeed.muon import SeamError
from deepspeed.muon.version import TESTED_DEEPSPEED as TESTED
from deepspeed.muon.zero import patches
from helpers.distributed import run, run_each
from helpers.logs import logged
from helpers.models import Mlp, TinyGpt, train_engine
from helpers.paths import ROOT
from helpers.ports import free_port
from helpers.training import ds_config, make_engine

REQUIREMENTS = ROOT / "requirements" / "requirements.txt"

# ---- processes ----------------------------------------------------------------------------------------------------

ACTIVE = """
import deepspeed, deepspeed.runtime.zero.utils as utils, sys
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine

sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # it serves inference, and would be compiled

def seams():
    engine = [DeepSpeedEngine._configure_basic_optimizer, DeepSpeedEngine._configure_optimizer]
    return [*engine, DeepSpeedConfig.__init__, deepspeed.set_optimizer_flags]

def ours():
    types = [t.__module__ for t in utils.ZERO_SUPPORTED_OPTIMIZERS]
    patched = sum(hasattr(f, "__wrapped__") for f in seams())
    return patched, [name for name in types if name.startswith("deepspeed.muon")]

def read_config():
    DeepSpeedConfig({"train_batch_size": 1, "optimizer": {"type": "Muon", "params": {"lr": 0.1}}})

ON, OFF, IDLE = (3, ["deepspeed.muon.optimizer"]), (0, []), (1, [])
"""
WITH_OTHERS = """
import torch

read, calls = DeepSpeedConfig.__init__, []

def follow(frame, event, _):
    if event == "call" and "muon" in frame.f_code.co_filename and "site-packages" not in frame.f_code.co_filename:
        calls.append(frame.f_code.co_qualname)

def then_follow(self, *args, **kwargs):
    read(self, *args, **kwargs)
    sys.setprofile(follow)

for kind, stage in ("AdamW", 0), ("AdamW", 3), ("NAdam", 0):
    DeepSpeedConfig.__init__ = then_follow
    net, params = torch.nn.Linear(8, 8), {"torch_adam": True} if kind == "AdamW" else {"lr": 0.1}
    config = {"train_batch_size": 1, "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}
    config["optimizer"] = {"type": kind, "params": params}
    engine = deepspeed.initialize(model=net, config=config, model_parameters=net.parameters())[0]
    for _ in range(2):
        engine.backward(engine(torch.ones(1, 8, device=engine.device)).sum())
        engine.step()
    engine.save_checkpoint("saved")
    engine.load_checkpoint("saved")
    sys.setprofile(None)
    DeepSpeedConfig.__init__ = read
    assert {*calls} <= {"_watch.<locals>.read"} and "deepspeed.muon" not in sys.modules, calls  # another config is read
"""
IMPORTED = """
def state(): return seams(), list(utils.ZERO_SUPPORTED_OPTIMIZERS)
original = state()
assert ours() == OFF and "deepspeed.muon" not in sys.modules
read_config()
assert ours() == OFF
import os, torch, torch.utils.cpp_extension as cpp
compile, script = torch.compile, torch.jit.script
torch.compile = torch.jit.script = cpp.load = cpp.load_inline = None
before = set(sys.modules); import deepspeed.muon
more = set(sys.modules) - before
assert ours() == ON and not more & {"deepspeed.runtime.zero.muon.original_muon", "torch._dynamo", "triton"}, more
assert not os.path.exists(os.environ["TORCH_EXTENSIONS_DIR"])
read_config()
assert ours() == (4, ON[1])
torch.compile, torch.jit.script = compile, script
"""
UNINSTALLED = """
from deepspeed.muon import install, uninstall
uninstall()
for _ in range(2):
    install(); install(); read_config(); read_config()
    assert ours() == (4, ON[1])
    assert [f.__wrapped__ for f in seams()] == original[0]
    uninstall()
    assert all(a is b for one, other in zip(original, state(), strict=True) for a, b in zip(one, other, strict=True))
    uninstall()
"""
STARTED = """
install()
net = torch.nn.Linear(8, 8)
config = {"train_batch_size": 1, "optimizer": {"type": "Muon", "params": {"lr": 0.1, "kernels": "torch"}}}
config["zero_optimization"] = {"stage": 3}
deepspeed.initialize(model=net, config=config, model_parameters=net.parameters())[0].destroy()
assert not [name for name in sys.modules if name.startswith("torch._inductor.compile_fx")]
from deepspeed.runtime.zero.muon import original_muon
with torch.compiler.set_stance("force_eager"):
    result = original_muon.zeropower_via_newtonschulz5(torch.eye(8), steps=5)
assert 0.5 < result.diagonal().mean() < 1.5, "stock's Muon does not work"
"""
BROKEN = """
import importlib.abc, sys

class Broken(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "deepspeed.muon": raise ModuleNotFoundError(f"{name} is broken")

sys.meta_path.insert(0, Broken())
import torch, deepspeed_muon
deepspeed_muon.autoload()  # the second time
assert sum("deepspeed_muon" in type(finder).__module__ for finder in sys.meta_path) == 1
"""
LOOKED_FOR = """
import importlib.abc, importlib.util, sys, torch

class Curious(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "deepspeed.runtime.config_utils":
            sys.meta_path.remove(self)
            assert "deepspeed.runtime.config" not in sys.modules
            spec = importlib.util.find_spec("deepspeed.runtime.config")
            assert spec.loader.is_package(spec.name) is False

sys.meta_path.insert(0, Curious())
"""
IS_ON = "assert ours() == IDLE, ours(); read_config(); assert ours() == (4, ON[1]), ours()"
HAS_NO_HOOK = "; assert not [f for f in sys.meta_path if type(f).__module__ == 'deepspeed_muon'], 'the hook is left'"
IS_BROKEN = """
try: read_config()
except ModuleNotFoundError as error: assert "deepspeed.muon" in str(error)
else: raise AssertionError("stock's Muon would train")
"""


@pytest.mark.parametrize(
    ("first", "then", "switch"),
    [
        pytest.param("", WITH_OTHERS + IS_ON, "", id="other optimizers run nothing of ours, then a config is enough"),
        pytest.param(
            "",
            IMPORTED + UNINSTALLED + STARTED,
            "DS_MUON_AUTOLOAD",
            id="off until imported, then uninstalled, then started",
        ),
        pytest.param(BROKEN, IS_BROKEN, "", id="autoload never raises, but a config that names Muon does"),
        pytest.param(
            LOOKED_FOR,
            IS_ON + HAS_NO_HOOK,
            "",
            id="an import hook that asks for the engine does not use up ours",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_process(first: str, then: str, switch: str, tmp_path: Path) -> None:
    """After its config is read, another optimizer executes nothing of ours. Switched off, stock is untouched.

    An import activates, compiles nothing and loads no compiler; ``uninstall`` gives stock back, ``install`` works
    again. Nor does the start of an engine load a compiler, though ZeRO imports stock's Muon, whose decorators would.
    """
    env = {name: value for name, value in os.environ.items() if "AUTOLOAD" not in name} | (
        {switch: "0"} if switch else {}
    )
    env |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}
    env |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    env |= {"MASTER_PORT": str(free_port())}
    command = [sys.executable, "-c", "\n".join((first, ACTIVE, then))]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "was tested on DeepSpeed" not in done.stderr, "this version is a tested one"


# ---- versions and seams -------------------------------------------------------------------------------------------


def build(**config: Any) -> str:
    """The module of the basic optimizer's class, which has changed the weights."""
    net = Mlp()
    before = [p.detach().clone() for p in net.parameters()]
    engine = deepspeed.initialize(model=net, config=ds_config(**config), model_parameters=net.parameters())[0]
    train_engine(engine, 1)
    assert not any(p.equal(old) for p, old in zip(net.parameters(), before, strict=True))
    return type(engine.basic_optimizer).__module__


def outcome(call: Any) -> str:
    """The error's type and text, or the result."""
    try:
        return str(call())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def built(**config: Any) -> str:
    """What :func:`build` comes to."""
    return outcome(functools.partial(build, **config))


def activate_in(version: str, lacks: tuple[str, str] | None) -> tuple[list[str], dict[str, str]]:
    """What is said where DeepSpeed has this version and may lack a seam, and what comes of three calls."""
    patches.uninstall()
    try:
        with pytest.MonkeyPatch.context() as patch, logged(logging.WARNING) as said:
            patch.setattr("deepspeed.git_version_info.version", version)
            if lacks:
                *parts, name = lacks[1].split(".")
                patch.delattr(functools.reduce(getattr, parts, importlib.import_module(lacks[0])), name)
            patches.activate()
            results = {"muon": built(), "install": outcome(patches.install)}
        adamw = {"type": "AdamW", "params": {"torch_adam": True}}
        return said, results | {"adamw": built(optimizer=adamw)}  # stock itself needs some of the seams
    finally:
        patches.uninstall()
        patches.install()


#: One is replaced at activation, one for an engine with Muon, one during a load.
PATCHED = (next(iter(patches.REPLACEMENTS)), *patches.universal.SEAMS)


@pytest.mark.parametrize("lacks", [None, *PATCHED], ids=str)
def test_a_later_version_trains_with_one_warning_or_fails_runs_with_muon_by_what_it_lacks(lacks: Any) -> None:
    (said,), results = run(activate_in, 1, version="0.20.0", lacks=lacks and tuple(lacks))[0]
    assert results.pop("adamw").startswith("torch.optim")
    if lacks:
        missing = f"DeepSpeed 0.20.0 has no {'.'.join(lacks)}, which"
        assert said.startswith(f"deepspeed-muon is not active: {missing}")
        assert all(text.startswith(f"SeamError: {missing}") for text in results.values())
    else:
        assert said.startswith(
            "deepspeed-muon was tested on DeepSpeed {} to {}, but 0.20.0 is installed; ".format(*TESTED)
        )
        assert results == {"muon": "deepspeed.muon.optimizer", "install": "None"}
    assert run(build, 1) == ["deepspeed.muon.optimizer"]


def test_pip_leaves_later_versions_of_deepspeed_alone() -> None:
    """Which of them work, the seams decide."""
    (needed,) = [line for line in REQUIREMENTS.read_text().splitlines() if line.startswith("deepspeed")]
    allowed = Requirement(needed.partition("#")[0]).specifier
    assert all(allowed.contains(version) for version in (*TESTED, "0.20.0", "0.99.9"))
    assert not any(allowed.contains(version) for version in ("0.19.6", "1.0.0"))


def test_a_missing_module_is_a_missing_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed.runtime.zero.utils", None)
    with pytest.raises(SeamError, match="ZERO_SUPPORTED_OPTIMIZERS"):
        patches.install()


# ---- names, the user's tags, and stock's Muon -----------------------------------------------------------------------


def test_names_of_the_optimizer() -> None:
    names = (("muon", 0), ("MUON", 2), ("MuonWithAuxAdam", 2))
    cases = [{"stage": stage, "optimizer": {"type": name}} for name, stage in names]
    assert run_each(build, 1, cases) == [["deepspeed.muon.optimizer"]] * len(names)


def test_a_misspelt_type_is_answered_with_the_right_one() -> None:
    cases = [{"optimizer": {"type": name, "params": {"lr": 1e-3}}} for name in ("moun", "Muno", "muonn")]
    for (found,) in run_each(built, 1, cases):
        assert found.startswith("MuonConfigError: optimizer.type: ") and '"Muon"' in found


def engines_with_tags(stages: tuple[int, ...]) -> list[tuple[dict[str, tuple[bool, str]], set[str], set[str]]]:
    """Of engines of one model, each after a step: routes by name, the parameters in Muon's groups, and those that carry
    a true tag; all carry one. The user tags some before the first engine, and one after it.
    """
    net, found = TinyGpt(), []
    net.tokens.weight.use_muon, net.blocks[0].up.weight.use_muon = True, False
    net.blocks[1].down.weight.requires_grad_(False)
    for stage in stages:
        engine = make_engine(net, ds_config(stage=stage))
        names, groups = {p: name for name, p in net.named_parameters()}, engine.basic_optimizer.param_groups
        params = [group["params"] for group in groups] if stage == 0 else engine.optimizer.bit16_groups
        muon = {names[p] for group, held in zip(groups, params, strict=True) if group["use_muon"] for p in held}
        routes = {spec.name: (spec.use_muon, spec.reason) for spec in engine.basic_optimizer.specs.values()}
        train_engine(engine, 1)
        engine.destroy()
        found.append((routes, muon, {name for p, name in names.items() if p.use_muon}))
        net.blocks[1].up.weight.use_muon = False
    return found


def test_the_users_tags_win_in_every_engine_and_all_parameters_carry_one() -> None:
    found = run(engines_with_tags, 1, stages=(2, 0, 1))[0]
    first = found[0][0]
    assert first["tokens.weight"] == (True, "use_muon = True set by the user") and first["blocks.1.up.weight"][0]
    assert first["blocks.0.up.weight"] == (False, "use_muon = False set by the user")
    assert [routes for routes, *_ in found[1:]] == [first | {"blocks.1.up.weight": first["blocks.0.up.weight"]}] * 2
    for routes, muon, tagged in found:
        assert muon == tagged == {name for name, (use_muon, _) in routes.items() if use_muon}


# ---- optimizers of the script -------------------------------------------------------------------------------------

UNTESTED = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}


def passed_beside(name: str, is_called: bool, stage: int) -> str:
    """What comes of an AdamW of the script's beside a config that names an optimizer, if ZeRO is not reached."""
    net = Mlp((6, 9, 5))
    script = (lambda params: torch.optim.AdamW(params, lr=0.1)) if is_called else torch.optim.AdamW(net.parameters())
    config = ds_config(stage=stage, optimizer={"type": name, "params": {"lr": 0.1}}) | UNTESTED
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deepspeed.DeepSpeedEngine, "_configure_zero_optimizer", Mock(side_effect=AssertionError("ZeRO")))
        given = {"model_parameters": net.parameters(), "optimizer": script, "config": config}
        return outcome(lambda: type(deepspeed.initialize(model=net, **given)[0].basic_optimizer).__name__)


INSTEAD = "MuonConfigError: optimizer.type: Muon, but the script passes torch.optim.adamw.AdamW"
BESIDE = {("Muon", 2): INSTEAD, ("MuonWithAuxAdam", 0): INSTEAD, ("AdamW", 0): "AdamW"}


@pytest.mark.parametrize("is_called", [False, True], ids=["built", "called"])
def test_another_optimizer_of_the_script_is_refused_beside_muon(is_called: bool) -> None:
    """It would train instead of the config's."""
    cases = [{"name": name, "stage": stage, "is_called": is_called} for name, stage in BESIDE]
    for (text,), expected in zip(run_each(passed_beside, 1, cases), BESIDE.values(), strict=True):
        assert text.startswith(expected)


# ---- a model of which nothing is trained ------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"dtype": "bf16"}], ids=["fp32", "bf16"])
def test_a_frozen_model_is_served_without_zero(settings: dict[str, Any]) -> None:
    """As the reference of DPO, to which tools hand the whole config with the stage set to 0."""
    ((kind, same, text),) = run(evaluate_frozen, 1, stage=0, **settings)
    assert kind == "torch.optim.adamw" and same
    assert text == "deepspeed-muon: this model has no trainable parameters, so a step changes nothing"


def frozen_under_zero() -> str:
    return outcome(functools.partial(evaluate_frozen, stage=2))


def test_a_frozen_model_is_refused_under_zero() -> None:
    (text,) = run(frozen_under_zero, 1)
    assert (
        text.startswith("MuonConfigError: ") and "optimizer.type: Muon, but no parameter of the model is train" in text
    )


def evaluate_frozen(**config: Any) -> tuple[str, bool, str]:
    """The optimizer's module, whether the engine evaluates as the model, and what was logged last."""
    net = Mlp((6, 9, 5)).requires_grad_(False)
    settings = ds_config(optimizer={"type": "Muon", "params": {"muon_exclude": "nothing"}}, **config)
    with logged() as said:
        engine = deepspeed.initialize(model=net, config=settings)[0]
    engine.eval()
    batch = [torch.randn(4, size, dtype=next(net.parameters()).dtype) for size in (6, 5)]
    return type(engine.basic_optimizer).__module__, torch.equal(engine(*batch), net(*batch)), (said or [""])[-1]
