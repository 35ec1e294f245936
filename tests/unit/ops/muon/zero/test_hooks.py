# SPDX-License-Identifier: Apache-2.0
"""How the package gets into DeepSpeed, what it says, what it leaves alone and how it leaves."""

import functools
import importlib
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from packaging.requirements import Requirement
from torch import Tensor

import deepspeed
import deepspeed.muon
from deepspeed.muon import MuonWithAuxAdam, SeamError
from deepspeed.muon.log import log_if_slow
from deepspeed.muon.version import TESTED_DEEPSPEED as TESTED
from deepspeed.muon.zero import hooks
from helpers.distributed import RankError, run
from helpers.logs import logged, logged_at_start
from helpers.models import Mlp, TinyGpt, train_engine
from helpers.paths import ROOT, TESTS
from helpers.racing import races
from helpers.training import ds_config, fp32_weights, make_engine, train

REQUIREMENTS = ROOT / "requirements" / "requirements.txt"
ACTIVE = """
import deepspeed, deepspeed.runtime.zero.utils as utils, sys
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine

def seams():
    engine = [DeepSpeedEngine._configure_basic_optimizer, DeepSpeedEngine._configure_optimizer]
    return [*engine, DeepSpeedConfig.__init__, deepspeed.set_optimizer_flags]

def ours():
    types = [t.__module__ for t in utils.ZERO_SUPPORTED_OPTIMIZERS]
    patched = sum(hasattr(f, "__wrapped__") for f in seams())
    return patched, [name for name in types if name.startswith("deepspeed.muon")]

def read_config():
    DeepSpeedConfig({"train_batch_size": 1, "optimizer": {"type": "Muon", "params": {"lr": 0.1}}})

ON, OFF = (3, ["deepspeed.muon.optimizer"]), (0, [])
"""


def python(folder: Path, script: str, **env: str) -> str:
    """What a script writes to stderr in a process that starts in `folder`."""
    unset = {name: value for name, value in os.environ.items() if "AUTOLOAD" not in name}
    env = unset | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"} | env
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize("order", [pytest.param("import torch", marks=pytest.mark.full), "import deepspeed"])
def test_importing_deepspeed_is_enough(order: str, tmp_path: Path) -> None:
    first = "import sys, torch; assert 'deepspeed' not in sys.modules\n" if order == "import torch" else order + "\n"
    python(tmp_path, first + ACTIVE + "assert 'deepspeed.muon' in sys.modules and ours() == ON, ours()")


STOCK_THEN_OURS = """
assert ours() == OFF and "deepspeed.muon" not in sys.modules
read_config()
assert ours() == OFF
import os, torch, torch.utils.cpp_extension as cpp
torch.compile = torch.jit.script = cpp.load = cpp.load_inline = None
before = set(sys.modules); import deepspeed.muon
more = set(sys.modules) - before
assert ours() == ON and not more & {"deepspeed.runtime.zero.muon.original_muon", "torch._dynamo", "triton"}, more
assert not os.path.exists(os.environ["TORCH_EXTENSIONS_DIR"])
read_config()
assert ours() == (4, ON[1])
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("switch", ["DS_MUON_AUTOLOAD", "TORCH_DEVICE_BACKEND_AUTOLOAD"])
def test_switched_off_until_imported(switch: str, tmp_path: Path) -> None:
    """Stock is untouched, an import activates, compiles nothing and loads no compiler."""
    python(tmp_path, ACTIVE + STOCK_THEN_OURS, TORCH_EXTENSIONS_DIR=str(tmp_path / "extensions"), **{switch: "0"})


WITHOUT_A_SEAM = """
del DeepSpeedEngine._scheduler_from_config
import deepspeed.muon
assert ours()[1] == []
"""


@pytest.mark.full
def test_a_missing_seam_does_not_fail_the_import(tmp_path: Path) -> None:
    """Runs without Muon must go on."""
    assert "_scheduler_from_config" in python(tmp_path, ACTIVE + WITHOUT_A_SEAM, DS_MUON_AUTOLOAD="0")


UNINSTALL = """
def state(): return seams(), list(utils.ZERO_SUPPORTED_OPTIMIZERS)
original = state()
from deepspeed.muon import install, uninstall
for _ in range(2):
    install(); install(); read_config(); read_config()
    assert ours() == (4, ON[1])
    assert [f.__wrapped__ for f in seams()] == original[0]
    uninstall()
    assert all(a is b for one, other in zip(original, state(), strict=True) for a, b in zip(one, other, strict=True))
    uninstall()
"""


def test_uninstall_gives_stock_back_and_install_works_again(tmp_path: Path) -> None:
    python(tmp_path, ACTIVE + UNINSTALL, DS_MUON_AUTOLOAD="0")


BROKEN = """
import sys
sys.modules["deepspeed.muon"] = None
import torch, deepspeed_muon
deepspeed_muon.autoload()  # the second time
assert sum("deepspeed_muon" in type(finder).__module__ for finder in sys.meta_path) == 1
"""


def test_autoload_never_raises(tmp_path: Path) -> None:
    stderr = python(tmp_path, BROKEN + ACTIVE + "deepspeed_muon.autoload(); assert ours() == OFF")
    assert stderr.count("deepspeed-muon is not active: ModuleNotFoundError: import of deepspeed.muon halted") == 2


LOOKED_FOR = """
import importlib.abc, importlib.util, sys, torch

class Curious(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "deepspeed.runtime.config":
            sys.meta_path.remove(self)
            assert "deepspeed.runtime.engine" not in sys.modules
            spec = importlib.util.find_spec("deepspeed.runtime.engine")
            assert spec.loader.is_package(spec.name) is False

sys.meta_path.insert(0, Curious())
"""


@pytest.mark.full
def test_looking_for_the_engine_does_not_use_up_the_hook(tmp_path: Path) -> None:
    """Another import hook may ask for the engine's spec before anybody imports it."""
    left = "assert not [f for f in sys.meta_path if type(f).__module__ == 'deepspeed_muon'], 'the hook is still there'"
    python(tmp_path, LOOKED_FOR + ACTIVE + "assert ours() == ON, ours()\n" + left)


def another_version(folder: Path, **edits: tuple[str, str]) -> dict[str, str]:
    """The environment of processes in which DeepSpeed is a copy, mostly of links, that calls itself 0.20.0.

    `edits`: what is replaced in a module of deepspeed.runtime, and by what.
    """
    source, copy = Path(deepspeed.__file__).parent, folder / "deepspeed"
    for part in (".", "runtime"):
        (copy / part).mkdir()
        for path in (source / part).iterdir():
            if path.name not in ("runtime", "__pycache__"):
                (copy / part / path.name).symlink_to(path)
    version = ("git_version_info_installed.py", deepspeed.__version__, "0.20.0")
    for name, old, new in (version, *((f"runtime/{module}.py", *edit) for module, edit in edits.items())):
        text = (source / name).read_text()
        assert old in text
        (copy / name).unlink()
        (copy / name).write_text(text.replace(old, new))
    return {"PYTHONPATH": os.pathsep.join((str(folder), str(TESTS)))}


def train_again_installed() -> tuple[str, list[str], str, str]:
    """DeepSpeed's version, the warnings and errors of an installation, and what a step of Muon and of AdamW gives."""
    hooks.uninstall()
    with logged(logging.WARNING) as said:
        hooks.activate()
    adamw = {"type": "AdamW", "params": {"torch_adam": True}}
    muon, other = (outcome(lambda chosen=chosen: take_a_step(optimizer=chosen)) for chosen in ({"type": "Muon"}, adamw))
    return deepspeed.__version__, said, muon, other


def take_a_step(**config: Any) -> str:
    """The module of the basic optimizer's class, which has changed the weights."""
    net = Mlp()
    before = [p.detach().clone() for p in net.parameters()]
    engine = deepspeed.initialize(model=net, config=ds_config(**config), model_parameters=net.parameters())[0]
    train_engine(engine, 1)
    assert not any(p.equal(old) for p, old in zip(net.parameters(), before, strict=True))
    return type(engine.basic_optimizer).__module__


@pytest.mark.full
def test_a_later_version_that_has_all_seams_trains_with_one_warning(tmp_path: Path) -> None:
    env = another_version(tmp_path)
    ((version, said, muon, other),) = run(train_again_installed, 1, fresh=True, restart=True, env=env)
    assert version == "0.20.0"
    (text,) = said
    assert text.startswith("deepspeed-muon was tested on DeepSpeed {} to {}, this is 0.20.0; ".format(*TESTED))
    assert muon == "deepspeed.muon.optimizer" and other.startswith("torch.optim")


def test_a_later_version_that_lacks_a_seam_fails_runs_with_muon_by_its_name(tmp_path: Path) -> None:
    env = another_version(tmp_path, engine=("_scheduler_from_config", "_schedule_of_config"))
    ((version, said, muon, other),) = run(train_again_installed, 1, fresh=True, restart=True, env=env)
    lacks = "DeepSpeed 0.20.0 has no deepspeed.runtime.engine.DeepSpeedEngine._scheduler_from_config, which"
    assert version == "0.20.0" and len(said) == 1 and said[0].startswith(f"deepspeed-muon is not active: {lacks}")
    assert muon.startswith(f"SeamError: {lacks}") and other.startswith("torch.optim")


def test_a_tested_version_gets_no_warning() -> None:
    version, said, *_ = run(train_again_installed, 1)[0]
    assert version == deepspeed.__version__ and said == []


def test_pip_leaves_later_versions_of_deepspeed_alone() -> None:
    """Which of them work, the seams decide."""
    (needed,) = [line for line in REQUIREMENTS.read_text().splitlines() if line.startswith("deepspeed")]
    allowed = Requirement(needed.partition("#")[0]).specifier
    assert all(allowed.contains(version) for version in (*TESTED, "0.20.0", "0.99.9"))
    assert not any(allowed.contains(version) for version in ("0.19.6", "1.0.0"))


def without_seam(module: str, path: str) -> dict[str, str]:
    """What the ways in do while a seam is missing."""
    *parts, name = path.split(".")
    owner = functools.reduce(getattr, parts, importlib.import_module(module))
    hooks.uninstall()
    seam, results = getattr(owner, name), {}
    delattr(owner, name)
    try:
        for what, call in (("install", hooks.install), ("activate", hooks.activate), ("again", hooks.install)):
            results[what] = outcome(call)
        results["muon"] = outcome(lambda: build(optimizer={"type": "Muon"}))
        setattr(owner, name, seam)  # stock itself needs it
        results["adamw"] = outcome(lambda: build(optimizer={"type": "AdamW", "params": {"torch_adam": True}}))
    finally:
        setattr(owner, name, seam)
        hooks.uninstall()
        hooks.install()
    return results


def outcome(call: Any) -> str:
    """The error's type and text, or the result."""
    try:
        return str(call())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def build(**config: Any) -> str:
    """The module of the basic optimizer's class."""
    net = Mlp()
    engine = deepspeed.initialize(model=net, config=ds_config(**config), model_parameters=net.parameters())[0]
    return type(engine.basic_optimizer).__module__


#: One is replaced at activation, one for an engine with Muon, one during a load.
REPLACED = (next(iter(hooks.REPLACEMENTS)), *hooks.universal.SEAMS, hooks.save_load.SEAMS[-1])


@pytest.mark.parametrize(("module", "path"), REPLACED)
def test_a_missing_seam_fails_runs_with_muon_only(module: str, path: str) -> None:
    results = run(without_seam, 1, module=module, path=path)[0]
    for refused in ("install", "again", "muon"):
        assert results[refused].startswith("SeamError: DeepSpeed ") and f"{module}.{path}" in results[refused]
    assert results["activate"] == "None"
    assert results["adamw"].startswith("torch.optim")
    assert run(build, 1) == ["deepspeed.muon.optimizer"]


def test_a_missing_module_is_a_missing_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed.runtime.zero.utils", None)
    with pytest.raises(SeamError, match="ZERO_SUPPORTED_OPTIMIZERS"):
        hooks.install()


@pytest.mark.sample(4)
@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("name", ["Muon", "muon", "MUON", "MuonWithAuxAdam"])
def test_names_of_the_optimizer(name: str, stage: int) -> None:
    assert run(build, 1, stage=stage, optimizer={"type": name}) == ["deepspeed.muon.optimizer"]


def routes_with_tags(stage: int) -> tuple[dict[str, tuple[bool, str]], set[str], set[str]]:
    """Routes by name, the parameters in Muon's groups, and those that carry a true tag; all carry one."""
    net = TinyGpt()
    net.tokens.weight.use_muon, net.blocks[0].up.weight.use_muon = True, False
    net.blocks[1].down.weight.requires_grad_(False)
    engine = make_engine(net, ds_config(stage=stage))
    names, groups = {p: name for name, p in net.named_parameters()}, engine.basic_optimizer.param_groups
    params = [group["params"] for group in groups] if stage == 0 else engine.optimizer.bit16_groups
    muon = {names[p] for group, held in zip(groups, params, strict=True) if group["use_muon"] for p in held}
    routes = {spec.name: (spec.use_muon, spec.reason) for spec in engine.basic_optimizer.specs.values()}
    return routes, muon, {name for p, name in names.items() if p.use_muon}


@pytest.mark.parametrize("stage", [0, 2])
def test_the_users_tags_win_and_all_parameters_carry_one(stage: int) -> None:
    routes, muon, tagged = run(routes_with_tags, 1, stage=stage)[0]
    assert routes["tokens.weight"] == (True, "use_muon = True set by the user")
    assert routes["blocks.0.up.weight"] == (False, "use_muon = False set by the user")
    assert muon == tagged == {name for name, (use_muon, _) in routes.items() if use_muon}


def tags_of_engines(stages: tuple[int, ...]) -> list[dict[str, bool]]:
    """What a model's parameters carry after a step of several engines, the user changing a tag after the first."""
    net, found = TinyGpt(), []
    net.tokens.weight.use_muon = True
    for index, stage in enumerate(stages):
        engine = make_engine(net, ds_config(stage=stage))
        train_engine(engine, 1)
        engine.destroy()
        found.append({name: p.use_muon for name, p in net.named_parameters()})
        if index == 0:
            net.blocks[0].up.weight.use_muon = False
    return found


def test_a_second_engine_keeps_the_users_tags() -> None:
    first, second, third = run(tags_of_engines, 1, stages=(2, 0, 1))[0]
    assert first["tokens.weight"] and first["blocks.0.up.weight"]
    assert second == first | {"blocks.0.up.weight": False} == third


def train_without_stock_muon(tagged: bool, **config: Any) -> tuple[str, dict[str, Tensor]]:
    """The wrapper, and the weights after two steps, with stock's Muon raising wherever it is named.

    `tagged`: the user tags parameters before and between the steps too.
    """
    importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    refuse = Mock(side_effect=AssertionError("stock's muon_update was called"))
    net = Mlp()
    for p in net.parameters() if tagged else ():
        p.use_muon = p.ndim == 2
    with pytest.MonkeyPatch.context() as patch:
        for module in [m for m in list(sys.modules.values()) if "muon_update" in getattr(m, "__dict__", {})]:
            patch.setattr(module, "muon_update", refuse)
        engine = make_engine(net, ds_config(**config))
        assert all(p.use_muon is (getattr(p, "ds_shape", p.shape)[1:] != ()) for p in net.parameters())
        train_engine(engine, 1)
        for p in net.parameters() if tagged else ():
            p.use_muon = getattr(p, "ds_shape", p.shape)[1:] != ()
        train_engine(engine, 1, first_step=1)
        assert refuse.call_count == 0
        return type(engine.optimizer).__name__, fp32_weights(engine)


BF16 = {"stage": 1, "dtype": "bf16", "data_types": {"grad_accum_dtype": "fp32"}}
WRAPPERS = {
    0: ("MuonWithAuxAdam", "FP16_UnfusedOptimizer"),
    1: "DeepSpeedZeroOptimizer",
    2: "DeepSpeedZeroOptimizer",
    3: "DeepSpeedZeroOptimizer_Stage3",
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("tagged", [False, True])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("case", [0, 1, 2, 3, "BF16_Optimizer"])
def test_stocks_muon_never_runs(case: int | str, dtype: str, offload: bool, tagged: bool) -> None:
    """The weights are those of a run in which nobody could run it."""
    if (case == 0 and offload) or (case == "BF16_Optimizer" and dtype == "fp32"):
        pytest.skip("there is no such wrapper")
    config = BF16 if case == "BF16_Optimizer" else {"stage": case, "dtype": dtype}
    results = run(train_without_stock_muon, 2, tagged=tagged, offload=offload, **config)
    expected = run(train, 2, model="mlp", steps=2, offload=offload, **config)[0]
    for wrapper, weights in results:
        assert (case == "BF16_Optimizer" and not offload) or wrapper in WRAPPERS[config["stage"]]
        assert weights.keys() == expected.keys() and all(weights[name].equal(expected[name]) for name in weights)


def train_as_client(steps: int, **config: Any) -> dict[str, Tensor]:
    """As `train`, with the optimizer given to `deepspeed.initialize`."""
    net, settings = Mlp(), ds_config(**config)
    optimizer = MuonWithAuxAdam(net.parameters(), model=net, **settings.pop("optimizer")["params"])
    engine = make_engine(net, settings, optimizer=optimizer)
    train_engine(engine, steps)
    return fp32_weights(engine)


@pytest.mark.sample(4)
@pytest.mark.parametrize(("stage", "offload"), [(0, False), *((s, o) for s in (1, 2, 3) for o in (False, True))])
def test_a_client_optimizer_trains_as_the_config_does(stage: int, offload: bool) -> None:
    config = {"stage": stage, "offload": offload, "dtype": "bf16" if stage == 0 else "fp32"}
    expected = run(train, 2, model="mlp", steps=3, **config)
    for weights, wanted in zip(run(train_as_client, 2, steps=3, **config), expected, strict=True):
        assert weights.keys() == wanted.keys()
        assert max(float((weights[name] - wanted[name]).abs().max()) for name in wanted) == 0


def test_three_lines_of_log_on_rank_0() -> None:
    """What is updated, by how much, and how a step runs."""
    lines, silent = run(logged_at_start, 2, stage=3, widths=(512, 512, 512))
    assert [level for level, _ in lines] == ["INFO"] * 3 and silent == []
    assert lines[0][1] == (
        f"deepspeed-muon {deepspeed.muon.__version__}: Muon updates 2 matrices (524,288 parameters), "
        "AdamW updates 2 tensors (1,024 parameters), on 2 ranks"
    )
    assert lines[1][1] == (
        "deepspeed-muon: the update of layers.1.weight [512, 512] has RMS 0.0442 x lr, by adjust_lr_fn original = "
        "sqrt(max(1, rows / cols)) (stock Muon's, because of adam_lr, momentum)"
    )
    assert lines[2][1].startswith(
        "deepspeed-muon: rank 0 sends 1.0 MB per step in fp32, and all ranks send 0.0 MB to balance the owners; kernels"
    )
    assert "; Newton-Schulz on cpu in fp32, 1 of 1 shapes by " in lines[2][1]


def initialized(stage: int) -> tuple[list[float], list[str], float]:
    """Processor seconds of three starts, the first one cold; whether torch compiles; what stock's Muon computes."""
    with races():
        seconds = []
        for _ in range(3):
            began = time.process_time()
            engine = make_engine(Mlp(), ds_config(stage=stage))
            seconds.append(time.process_time() - began)
            engine.destroy()
    loaded = [name for name in sys.modules if name.startswith("torch._inductor.compile_fx")]
    from deepspeed.runtime.zero.muon import original_muon

    with torch.compiler.set_stance("force_eager"):
        result = original_muon.zeropower_via_newtonschulz5(torch.eye(8), steps=5)
    return seconds, loaded, float(result.diagonal().mean())


@pytest.mark.sample(1)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_small_model_starts_in_half_a_second_of_a_processor(stage: int) -> None:
    """ZeRO imports stock's Muon, whose decorators would load torch's compiler: a second of every start."""
    ((seconds, loaded, diagonal),) = run(initialized, 1, fresh=True, restart=True, stage=stage)
    assert loaded == []
    assert max(seconds) < 0.5, seconds  # not by the clock, which other processes move
    assert 0.5 < diagonal < 1.5, "stock's Muon works nevertheless"


def test_what_takes_long_at_the_start_is_told() -> None:
    for waiting, rank, expected in ((0.0, True, 0), (0.06, True, 1), (0.06, False, 0)):
        with pytest.MonkeyPatch.context() as patch, logged() as said:
            patch.setattr("deepspeed.muon.log.SLOW", 0.05)
            with log_if_slow("planning the exchange", rank):
                time.sleep(waiting)
        assert len(said) == expected
        assert all(line == "deepspeed-muon: planning the exchange took 0.1 s" for line in said)


def test_no_matrix_for_muon_is_a_warning_with_the_reasons() -> None:
    logged, silent = run(logged_at_start, 2, tag=False)
    assert silent == []
    text = "deepspeed-muon: AdamW updates all parameters; no matrix goes to Muon: use_muon = False set by the user"
    assert logged == [("WARNING", text)]


def test_small_sub_groups_are_a_warning_with_the_size_that_helps() -> None:
    warning = run(logged_at_start, 2, stage=3, zero={"sub_group_size": 50})[0][3]
    assert warning[0] == "WARNING" and "sub_group_size splits the matrices into 5 sub-groups" in warning[1]
    size = int(warning[1].rpartition("write ")[2].split()[0])
    for enough, lines in ((size // 2, 4), (size, 3)):
        assert len(run(logged_at_start, 2, stage=3, zero={"sub_group_size": enough})[0]) == lines


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_parameter_groups_of_the_user_are_no_sub_groups(stage: int) -> None:
    assert [level for level, _ in run(logged_at_start, 2, stage=stage, groups=3)[0]] == ["INFO"] * 3


UNTESTED = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}


def warnings_of(kind: str, stage: int) -> list[str]:
    """What is logged while DeepSpeed takes an optimizer of the script, of a class with this name."""
    net = Mlp((6, 9, 5))
    optimizer = type(kind, (torch.optim.SGD,), {})(net.parameters(), lr=0.1)
    config = {key: value for key, value in ds_config(stage=stage).items() if key != "optimizer"}
    with logged(logging.WARNING) as said:
        engine = deepspeed.initialize(model=net, optimizer=optimizer, config=config | UNTESTED)[0]
        train_engine(engine, 1)
        engine.destroy()
    return said


@pytest.mark.parametrize(("kind", "stage"), [("MuonClip", 2), ("MuonClip", 0), ("Plain", 2)])
def test_another_muon_of_the_script_is_a_warning_under_zero(kind: str, stage: int) -> None:
    first, second = run(warnings_of, 2, kind=kind, stage=stage)
    assert second == []
    if (kind, stage) == ("MuonClip", 2):
        assert len(first) == 1 and "another Muon, " in first[0] and ".MuonClip. ZeRO gives it flat vectors" in first[0]
    else:
        assert first == []


def passed_beside(name: str, is_called: bool, stage: int) -> str:
    """What comes of an AdamW of the script's beside a config that names an optimizer, if ZeRO is not reached."""
    net = Mlp((6, 9, 5))
    script = (lambda params: torch.optim.AdamW(params, lr=0.1)) if is_called else torch.optim.AdamW(net.parameters())
    config = ds_config(stage=stage, optimizer={"type": name, "params": {"lr": 0.1}}) | UNTESTED
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deepspeed.DeepSpeedEngine, "_configure_zero_optimizer", Mock(side_effect=AssertionError("ZeRO")))
        given = {"model_parameters": net.parameters(), "optimizer": script, "config": config}
        return outcome(lambda: type(deepspeed.initialize(model=net, **given)[0].basic_optimizer).__name__)


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("is_called", [False, True], ids=["built", "called"])
@pytest.mark.parametrize("name", ["Muon", "MuonWithAuxAdam"])
def test_another_optimizer_of_the_script_is_refused(name: str, is_called: bool, stage: int) -> None:
    """It would train instead of the config's Muon."""
    message = (
        "MuonConfigError: optimizer.type: Muon, but the script passes torch.optim.adamw.AdamW to deepspeed.initialize, "
        "which would be used instead; remove optimizer= from the call and pass model_parameters=model.parameters(), or "
        "remove the section optimizer from the config"
    )
    assert run(passed_beside, 2, name=name, is_called=is_called, stage=stage) == [message] * 2


@pytest.mark.parametrize("is_called", [False, True], ids=["built", "called"])
def test_another_optimizer_of_the_script_trains_where_the_config_names_no_muon(is_called: bool) -> None:
    assert run(passed_beside, 1, name="AdamW", is_called=is_called, stage=0) == ["AdamW"]


# ---- a model of which nothing is trained ------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"dtype": "bf16"}], ids=["fp32", "bf16"])
def test_a_frozen_model_is_served_without_zero(settings: dict[str, Any]) -> None:
    """As the reference of DPO, to which tools hand the whole config with the stage set to 0."""
    ((kind, same, text),) = run(evaluate_frozen, 1, stage=0, **settings)
    assert kind == "torch.optim.adamw" and same
    assert text == "deepspeed-muon: this model has no trainable parameters, so its AdamW has nothing to update"


def test_a_frozen_model_is_refused_under_zero() -> None:
    """Where AdamW fails too, without saying why."""
    with pytest.raises(RankError, match=r"optimizer\.type: Muon, but no parameter of the model is trained"):
        run(evaluate_frozen, 1, stage=2)
    with pytest.raises(RankError, match="IndexError"):
        run(evaluate_frozen, 1, stage=2, optimizer={"type": "AdamW", "params": {"torch_adam": True}})


def evaluate_frozen(**config: Any) -> tuple[str, bool, str]:
    """The optimizer's module, whether the engine evaluates as the model, and what was logged last."""
    net = Mlp((6, 9, 5)).requires_grad_(False)
    settings = ds_config(**({"optimizer": {"type": "Muon", "params": {"muon_exclude": "nothing"}}} | config))
    with logged() as said:
        engine = deepspeed.initialize(model=net, config=settings)[0]
    engine.eval()
    batch = [torch.randn(4, size, dtype=next(net.parameters()).dtype) for size in (6, 5)]
    return type(engine.basic_optimizer).__module__, torch.equal(engine(*batch), net(*batch)), (said or [""])[-1]
