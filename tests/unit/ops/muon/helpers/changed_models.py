# SPDX-License-Identifier: Apache-2.0
"""Runs whose model, parameter groups or optimizer change across a save, or in mid-run."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers.distributed import run
from helpers.logs import logged
from helpers.models import GLOBAL_BATCH, full_weights, initialize_, train_engine
from helpers.training import PARAMS, ds_config, fp32_weights, with_params

MATCH = {"checkpoint": {"muon_changed_model": "match"}}
ADAMW = {"type": "AdamW", "params": {"lr": PARAMS["adam_lr"], "weight_decay": 0.1, "torch_adam": True}}
TOKENS, WIDTH = 13, 12
STEPS = 3
"""Steps before the save."""


class Layers(nn.Module):
    """An embedding, `depth` layers with biases and a head; `frozen`: prefixes of the names that do not train."""

    def __init__(
        self,
        rows: int = TOKENS,
        depth: int = 2,
        frozen: tuple[str, ...] = (),
        width: int = WIDTH,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(rows, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.lm_head = nn.Linear(width, TOKENS, bias=False)
        self.register_buffer("scale", torch.ones(()))
        self.skipped: set[int] = set()
        """The layers that the next forward leaves out."""
        initialize_(self, 0)
        for name, param in self.named_parameters():
            param.requires_grad_(not name.startswith(frozen) if frozen else True)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        hidden = self.tokens(inputs) * self.scale.to(self.tokens.weight.dtype)
        for number, layer in enumerate(self.layers):
            if number not in self.skipped:
                hidden = hidden + torch.tanh(layer(hidden))
        return F.cross_entropy(4 * self.lm_head(hidden).double(), targets)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step)
        inputs, targets = (torch.randint(0, TOKENS, (GLOBAL_BATCH,), generator=generator) for _ in range(2))
        return inputs, targets


def build(seed: int, model: dict[str, Any], order: str = "", **config: Any) -> Any:
    """Return an engine; `order`: "swapped": two layers change places; "groups": the opposite order, two groups."""
    import deepspeed

    net = Layers(**model)
    initialize_(net, seed)
    params: list[Any] = [param for param in net.parameters() if param.requires_grad]
    if order == "swapped":
        params[1:3], params[3:5] = params[3:5], params[1:3]
    if order == "groups":
        params = [{"params": params[:-3:-1]}, {"params": params[-3::-1]}]
    return deepspeed.initialize(model=net, config=ds_config(**config), model_parameters=params)[0]


def states(engine: Any) -> dict[str, Tensor]:
    """Return "parameter.key" -> the whole state of a trained parameter; a collective."""
    from deepspeed.utils import safe_get_full_optimizer_state

    specs = getattr(engine.basic_optimizer, "specs", {})
    found = {}
    for name, param in engine.module.named_parameters():
        if not param.requires_grad:
            continue
        is_muon = param in specs and specs[param].use_muon
        for key in ("momentum_buffer",) if is_muon else ("exp_avg", "exp_avg_sq"):
            found[f"{name}.{key}"] = safe_get_full_optimizer_state(param, key).detach().clone()
    return found


def weights(engine: Any) -> dict[str, Tensor]:
    """Return parameter -> its whole weight in fp32, of trained parameters the master weight; a collective."""
    from deepspeed.utils import safe_get_full_fp32_param

    found = {name: weight.float() for name, weight in full_weights(engine.module).items()}
    if engine.zero_optimization_stage() == 0:
        return found | fp32_weights(engine)
    trained = {name: param for name, param in engine.module.named_parameters() if param.requires_grad}
    masters = {name: safe_get_full_fp32_param(param) for name, param in trained.items()}
    return found | {name: master.clone() for name, master in masters.items() if master is not None}


def save(folder: str, model: dict[str, Any], **config: Any) -> dict[str, Tensor]:
    """Train and save; return weights and states by name."""
    engine = build(1, model, **config)
    train_engine(engine, STEPS)
    engine.module.scale.fill_(1.5)
    engine.save_checkpoint(folder)
    found = weights(engine) | states(engine)
    engine.destroy()
    return found


def load(folder: str, model: dict[str, Any], **config: Any) -> dict[str, Any]:
    """Load; return weights and states before, after and two steps later, what was logged, and counters.

    If the load raises, return {"errors": for each rank the name of the exception's class or "", "text": its message}.
    """
    engine = build(2, model, **config)
    initial = weights(engine)
    path, error = "", None
    with logged() as said:
        try:
            path, _ = engine.load_checkpoint(folder)
        except Exception as raised:
            error = raised
    names = [""] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(names, type(error).__name__ if error else "")
    if any(names):
        return {"errors": names, "text": str(error)}
    loaded = weights(engine) | states(engine)
    scale, done = float(engine.module.scale), engine.global_steps
    train_engine(engine, 2, STEPS)
    result = {"initial": initial, "loaded": loaded, "trained": weights(engine), "said": said, "path": path}
    engine.destroy()
    return result | {"scale": scale, "steps": done}


class Change(NamedTuple):
    """What is other in the run that loads. `before`, `after`: its arguments of `Layers`, in the two runs.

    `new`: parameters whose state starts at zero. `saves`, `loads`: settings of one run only.
    """

    before: dict[str, Any] = {}
    after: dict[str, Any] = {}
    new: tuple[str, ...] = ()
    saves: dict[str, Any] = {}
    loads: dict[str, Any] = {}


FROZEN = {"frozen": ("layers.0", "tokens")}
CHANGES = {
    "nothing": Change(),
    "a layer more": Change({}, {"depth": 3}, ("layers.2.weight", "layers.2.bias")),
    "a layer less": Change({"depth": 3}, {}),
    "more rows": Change({}, {"rows": 17}),
    "fewer rows": Change({"rows": 17}, {}),
    "frozen": Change({}, FROZEN),
    "unfrozen": Change(FROZEN, {}, ("layers.0.weight", "layers.0.bias", "tokens.weight")),
    "two layers swapped": Change(loads={"order": "swapped"}),
    "other groups": Change(loads={"order": "groups"}),
    "a matrix to AdamW": Change(new=("layers.1.weight",), loads={"optimizer": with_params(muon_exclude=["layers.1"])}),
    "from AdamW": Change(saves={"optimizer": ADAMW}),
}


def surprises(change: Change, found: dict[str, Any], old: dict[str, Tensor]) -> list[str]:
    """Return what is not as saved, bit for bit, of what both runs have, and what is not new otherwise.

    A momentum of AdamW becomes Muon's. Rows that only one run has are new or dropped.
    """
    wrong = []
    for name, value in found["loaded"].items():
        parameter, _, key = name.rpartition(".")
        is_state = key in ("momentum_buffer", "exp_avg", "exp_avg_sq")
        saved = old.get(name, old.get(f"{parameter}.exp_avg") if key == "momentum_buffer" else None)
        expected = torch.zeros_like(value) if is_state else found["initial"][name].clone()
        if saved is not None and not (is_state and parameter in change.new):
            count = min(expected.numel(), saved.numel())
            expected.view(-1)[:count] = saved.reshape(-1)[:count]
        if not value.equal(expected.view_as(value)):
            wrong.append(name)
    return wrong


def carry_over(change: Change, saved: tuple[int, int], loaded: tuple[int, int], folder: Path) -> tuple[Any, list[Any]]:
    """Save at (stage, ranks), load at another; return (what was saved, what each rank found after the load)."""
    (stage, ranks), (to_stage, to_ranks) = saved, loaded
    old = run(save, ranks, folder=str(folder), model=change.before, **{"stage": stage} | change.saves)[0]
    return old, run(load, to_ranks, folder=str(folder), model=change.after, **{"stage": to_stage} | change.loads)


# ---- in mid-run -------------------------------------------------------------------------------------------------


def through(is_frozen: bool, optimizer: dict[str, Any], stage: int) -> dict[str, Tensor]:
    """Return the weights after a run in which, for two steps, parameters are frozen or a layer is left out."""
    engine = build(1, {}, stage=stage, optimizer=optimizer)
    train_engine(engine, STEPS)
    for is_over in (False, True):
        for name, param in engine.module.named_parameters():
            param.requires_grad_(is_over or not is_frozen or not name.startswith(FROZEN["frozen"]))
        engine.module.skipped = set() if is_frozen or is_over else {0}
        train_engine(engine, 2, STEPS + 2 * is_over)
    weights = full_weights(engine.module)
    engine.destroy()
    return weights
