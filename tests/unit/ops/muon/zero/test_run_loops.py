# SPDX-License-Identifier: Apache-2.0
"""One process with many engines: what they leave behind, what they do to each other, and loops around their steps."""

import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from deepspeed.utils import safe_get_full_fp32_param

import deepspeed
from deepspeed.muon.errors import CallOrderError, CheckpointError
from deepspeed.muon.zero import patches
from helpers.distributed import run
from helpers.engine_state import differing, named_states, snapshot
from helpers.holdings import holdings
from helpers.models import TinyGpt, full_weights, make_batch, train_engine
from helpers.training import ds_config, fresh_engine, with_params

ADAMW: dict[str, Any] = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}

# ---- engine after engine --------------------------------------------------------------------------------------------

COUNTED = (
    *("tensors", "tensor MB", "engines", "optimizers", "global hooks", "hooks"),
    *("threads", "tasks", "groups", "files", "atexit", "handlers"),
)
"""What must not grow with the number of engines."""
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "qk_clip": {"qk_clip": {"tau": 0.01}},
    "int8, normuon": {"momentum_dtype": "int8", "normuon": True},
    "monitor": {"monitor_interval": 1},
}


def replaced_attributes() -> list[Any]:
    """What the seams that are not in use now hold; those at activation stay replaced."""
    found = []
    for seam in patches.SEAMS:
        owner, name = seam.find()
        found.append(vars(owner).get(name))
    return found


def growth(count: int, end: str, stage: int, **config: Any) -> dict[str, int]:
    """What ``count`` engines more add to what two have left in this process."""
    found, model = [], None
    for number in range(count + 2):
        model = model if model and end == "one model" else TinyGpt()
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), config=ds_config(stage=stage, **config)
        )
        train_engine(engine, 2)  # from the second step on DeepSpeed caches what it knows of modules
        if end != "dropped":
            engine.destroy()
        del engine
        if number in (1, count + 1):
            found.append(holdings([model]))
    before, after = found
    return {key: after[key] - before[key] for key in COUNTED}


def compare_growth(end: str, params: dict[str, Any], folder: str, **case: Any) -> list[dict[str, int]]:
    """What engines with Muon add; and, if DeepSpeed does not free the engines, what engines with AdamW add."""
    before, found = replaced_attributes(), []
    if "monitor_interval" in params:
        case["csv_monitor"] = {"enabled": True, "output_path": folder}
    for optimizer in (with_params(**params), *([] if end == "destroyed" else [ADAMW])):
        found.append(growth(end=end, optimizer=optimizer, **case))
    assert all(now is then for now, then in zip(replaced_attributes(), before, strict=True))
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("stage", [3, 0, 1, 2])
@pytest.mark.parametrize("end", ["destroyed", "dropped", "one model"])
def test_engines_leave_nothing_behind_once_destroyed(
    end: str, stage: int, name: str, dtype: str, tmp_path: Any
) -> None:
    """Nor more than AdamW's without ``destroy()``, nor with one model, in which DeepSpeed leaves an engine's hooks."""
    case = {"end": end, "count": 3, "stage": stage, "dtype": dtype, "params": SETTINGS[name], "folder": str(tmp_path)}
    for muon, *adamw in run(compare_growth, 1, **case):
        assert adamw or not any(muon.values()), muon
        for key in COUNTED[2:] if adamw else ():  # an engine with Muon has more tensors
            assert muon[key] <= adamw[0][key], (key, muon, adamw)


# ---- loops around the steps -----------------------------------------------------------------------------------------

OPERATIONS = ("offload", "save", "generate", "reload", "load", "evaluate")
#: Six orders in which each operation directly follows each other one exactly once.
WILLIAMS = tuple(tuple(OPERATIONS[(at + shift) % 6] for at in (0, 1, 5, 2, 4, 3)) for shift in range(6))


class Loop:
    """An engine between two of its steps.

    ``saved`` is the checkpoint to load: of the weights that the engine has.
    """

    def __init__(self, engine: Any, folder: str) -> None:
        self.engine, self.folder, self.is_away, self.saved = engine, folder, False, ""

    def save(self, tag: str = "between") -> None:
        self.engine.save_checkpoint(self.folder, tag=tag)
        self.saved = tag

    def forward(self) -> Any:
        engine = self.engine
        batch = make_batch(engine.module, 99, 0, engine.global_rank, engine.world_size, 1)
        return engine(*batch)

    def generate(self) -> None:
        with torch.no_grad():
            self.forward()

    def evaluate(self) -> None:
        self.engine.eval()
        with torch.no_grad():
            self.forward()
        self.engine.train()

    def offload(self) -> None:
        self.engine.offload_states(pin_memory=False)
        self.is_away = True

    def reload(self) -> None:
        if self.is_away:
            self.engine.reload_states()
        self.is_away = False

    def load(self) -> None:
        if not self.is_away:
            self.engine.load_checkpoint(self.folder, tag=self.saved)
            return
        before = snapshot(self.engine)
        with pytest.raises(CheckpointError, match=re.escape("reload_states() first")):
            self.engine.load_checkpoint(self.folder, tag=self.saved)
        assert differing(before, snapshot(self.engine)) == []

    def step(self, number: int) -> None:
        if self.is_away:
            before = snapshot(self.engine)
            with pytest.raises(CallOrderError, match=re.escape("reload_states() first")):
                self.engine.step()
            assert differing(before, snapshot(self.engine)) == []
            self.reload()
        train_engine(self.engine, 1, first_step=number)
        self.save("after")


def loop_beside_steps(orders: Sequence[Sequence[str]], case: dict[str, Any], folder: str) -> list[str]:
    """The orders after which an engine differs from one that only steps."""
    loop, still, wrong = Loop(fresh_engine(0, case), folder), fresh_engine(0, case), []
    loop.step(0)
    train_engine(still, 1)
    for number, order in enumerate(orders, 1):
        for operation in order:
            getattr(loop, operation)()
        loop.step(number)
        train_engine(still, 1, first_step=number)
        if found := differing(snapshot(loop.engine) | named_states(loop.engine), snapshot(still) | named_states(still)):
            wrong.append(f"{order}: {found}")
            break
    loop.engine.destroy()
    still.destroy()
    return wrong


LOOPS = [
    {"stage": stage, **extra}
    for stage in (3, 1, 2)
    for extra in (
        {"dtype": "bf16"},
        {},
        {"offload": True},
        {"optimizer": with_params(momentum_dtype="int8", normuon=True)},
    )
]


@pytest.mark.parametrize(
    ("case", "orders"),
    [
        (LOOPS[0], WILLIAMS),
        *(pytest.param(case, WILLIAMS, marks=pytest.mark.full) for case in LOOPS[1:]),
        pytest.param(LOOPS[0], tuple(itertools.permutations(OPERATIONS)), marks=pytest.mark.full),
    ],
)
@pytest.mark.time_limit(1200)
def test_a_loop_in_any_order_equals_its_steps(case: dict[str, Any], orders: Any, tmp_path: Path) -> None:
    """Bit by bit. A load or step while states are away is refused and changes nothing."""
    assert run(loop_beside_steps, 2, timeout=1100, case=case, orders=orders, folder=str(tmp_path)) == [[], []]


# ---- several engines ------------------------------------------------------------------------------------------------


def build(name: str, folder: str) -> Any:
    """One of the engines that a run of reinforcement learning has, with weights of its own."""
    qk_clip = with_params(qk_clip={"tau": 0.01}, momentum_dtype="int8")
    records = {"csv_monitor": {"enabled": True, "output_path": folder}}
    settings: dict[str, dict[str, Any]] = {
        "policy": {"stage": 3, "dtype": "bf16", "optimizer": qk_clip},
        "value": {"stage": 2, "optimizer": with_params(monitor_interval=1, normuon=True), **records},
        "reward": {"stage": 1, "dtype": "bf16", "optimizer": ADAMW, "accumulation": 2},
        "reference": {"stage": 3, "dtype": "bf16", "optimizer": {}},
        "whole": {"stage": 0, "optimizer": with_params(ns_method="gram", momentum=0.8)},
    }
    seed = list(settings).index(name)
    net = TinyGpt(seed=seed).requires_grad_(name != "reference")
    config = ds_config(**settings[name])
    if name == "reference":
        del config["optimizer"]
    return deepspeed.initialize(model=net, config=config, model_parameters=trained(net) or None)[0]


def trained(net: Any) -> list[Any]:
    return [param for param in net.parameters() if param.requires_grad]


def alternate(names: Sequence[str], folder: str, destroyed: str = "") -> dict[str, dict[str, torch.Tensor]]:
    """The weights and losses of engines that step in turn; one is destroyed in the middle."""
    torch.nn.functional.linear = zero3_linear_wrap  # as after the first engine at stage 3, for the rest of the process
    engines = {name: build(name, folder) for name in names}
    found: dict[str, dict[str, torch.Tensor]] = {name: {} for name in names}
    for step in range(4):
        for name, engine in engines.items():
            if name == "reference":
                batch = make_batch(engine.module, step, 0, engine.global_rank, engine.world_size, 1)
                with torch.no_grad():
                    losses = [engine(*batch).item()]
            else:
                losses = train_engine(engine, 1, first_step=step)
            found[name][f"losses {step}"] = torch.tensor(losses)
        if step == 1 and destroyed:
            engines.pop(destroyed).destroy()
    for name, engine in engines.items():
        found[name] |= full_weights(engine.module)
        engine.destroy()
    return found


@pytest.mark.parametrize("destroyed", ["policy", pytest.param("whole", marks=pytest.mark.full)])
def test_engines_of_one_process_train_as_each_alone(destroyed: str, tmp_path: Path) -> None:
    """Bit by bit: their losses, and their weights if they live to the end."""
    names, folder = ("policy", "value", "reward", "reference", "whole"), str(tmp_path)
    together = run(alternate, 2, fresh=True, names=names, folder=folder, destroyed=destroyed)
    for name in names:
        for mixed, alone in zip(together, run(alternate, 2, names=[name], folder=folder), strict=True):
            wanted, found = alone[name], mixed[name]
            assert len(found) > 4 or name == destroyed
            assert differing({key: wanted[key] for key in found}, found) == [], name


# ---- ends in mid-run, beside AdamW ----------------------------------------------------------------------------------

OPTIMIZERS = {"Muon": with_params(), "AdamW": ADAMW}
Outcome = dict[str, Any]


def engine_with(optimizer: str, case: dict[str, Any], seed: int = 0) -> Any:
    net = TinyGpt(seed=seed)
    return deepspeed.initialize(
        model=net, config=ds_config(**case, optimizer=OPTIMIZERS[optimizer]), model_parameters=list(net.parameters())
    )[0]


def weights_of(engine: Any) -> dict[str, torch.Tensor]:
    """The model's weights and the master weights, by name."""
    masters = {f"{name} master": safe_get_full_fp32_param(p).clone() for name, p in engine.module.named_parameters()}
    return full_weights(engine.module) | masters


class Stop(Exception):
    """Ends a run."""


def interrupt(engine: Any, where: str) -> None:
    """Raise Stop in the step 2."""

    def stop(*_: Any) -> None:
        raise Stop

    layer = engine.module.blocks[1].up
    batch = make_batch(engine.module, 2, 0, engine.global_rank, engine.world_size, 2)
    hook = layer.register_forward_hook(stop) if where == "forward" else None
    if where == "backward":
        hook = layer.register_full_backward_hook(stop)
    try:
        loss = engine(*batch)
        engine.backward(loss)
        engine.step()
        raise Stop  # between two micro-batches
    finally:
        if hook:
            hook.remove()


def end_early(optimizer: str, where: str, folder: str, **case: Any) -> Outcome:
    """What an exception in a step leaves: the weights, the saved ones, a resumed run, and this run if it goes on."""
    case |= {"accumulation": 2}
    plain, engine = (engine_with(optimizer, case) for _ in range(2))
    for one in (plain, engine):
        train_engine(one, 2)
    with pytest.raises(Stop):
        interrupt(engine, where)
    found: Outcome = {}
    if (where, case["stage"]) != ("backward", 3):  # DeepSpeed then no longer gathers what is in use
        found["weights"] = differing(weights_of(plain), weights_of(engine))
    engine.save_checkpoint(f"{folder}/{optimizer}", tag="stop")
    resumed = engine_with(optimizer, case, seed=5)
    resumed.load_checkpoint(f"{folder}/{optimizer}", tag="stop")
    train_engine(plain, 1, first_step=2)
    train_engine(resumed, 1, first_step=2)
    found["resumed"] = differing(weights_of(plain), weights_of(resumed))
    try:
        engine.load_checkpoint(f"{folder}/{optimizer}", tag="stop")
        train_engine(engine, 1, first_step=2)
        found["loaded into itself"] = differing(weights_of(plain), weights_of(engine))
    except Exception as error:
        found["loaded into itself"] = [type(error).__name__]
    for one in (plain, engine, resumed):
        one.destroy()
    return found


def beside_adamw(**settings: Any) -> list[Outcome]:
    return [end_early(optimizer, **settings) for optimizer in OPTIMIZERS]


CASES = [{"stage": stage, "dtype": dtype} for stage in (3, 1, 2) for dtype in ("bf16", "fp32")]


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("where", ["forward", "backward", "between"])
def test_a_run_ends_early_and_is_saved(where: str, case: dict[str, Any], tmp_path: Path) -> None:
    """The saved weights are those of the last step. A resumed run equals one without the exception, bit by bit, and so
    does this engine once it has loaded the checkpoint, except after half a backward at stages 2 and 3: DeepSpeed then
    fails with any optimizer.
    """
    for muon, adamw in run(beside_adamw, 2, where=where, folder=str(tmp_path), **case):
        again = muon.pop("loaded into itself")
        assert not any(muon.values())
        assert again == (adamw["loaded into itself"] if where == "backward" and case["stage"] > 1 else [])
