# SPDX-License-Identifier: Apache-2.0
"""Runs whose model, parameter groups, stage, ranks, precision or optimizer change, across a save or in mid-run.

Each is made with deepspeed-muon, which loads by parameter names, and with DeepSpeed's AdamW. `tables` tells what
becomes of both.
"""

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
    """Return an engine; `order`: "swapped": two layers change places; "groups": the opposite order, two groups.

    "all": frozen parameters, too.
    """
    import deepspeed

    net = Layers(**model)
    initialize_(net, seed)
    params: list[Any] = [param for param in net.parameters() if param.requires_grad or order == "all"]
    if order == "swapped":
        params[1:3], params[3:5] = params[3:5], params[1:3]
    if order == "groups":
        params = [{"params": params[:-3:-1]}, {"params": params[-3::-1]}]
    return deepspeed.initialize(model=net, config=ds_config(**config), model_parameters=params)[0]


def states(engine: Any) -> dict[str, Tensor]:
    """Return "parameter.key" -> the whole state of a trained parameter; a collective. State that is missing is zero."""
    from deepspeed.utils import safe_get_full_optimizer_state

    specs = getattr(engine.basic_optimizer, "specs", {})
    found = {}
    for name, param in engine.module.named_parameters():
        if not param.requires_grad:
            continue
        is_muon = param in specs and specs[param].use_muon
        for key in ("momentum_buffer",) if is_muon else ("exp_avg", "exp_avg_sq"):
            if specs or engine.zero_optimization_stage() == 3:
                value = safe_get_full_optimizer_state(param, key).detach().clone()
            else:
                value = _state_of_adamw(engine, param, key)
            found[f"{name}.{key}"] = value
    return found


def _state_of_adamw(engine: Any, param: nn.Parameter, key: str) -> Tensor:
    """Return the whole state of a parameter at stages 0 to 2, where DeepSpeed's getter fails after some loads."""
    states, value = engine.basic_optimizer.state, torch.zeros_like(param, dtype=torch.float32)
    if engine.zero_optimization_stage() == 0:
        masters = dict(zip(engine.module.parameters(), _masters(engine), strict=False))
        return states.get(masters.get(param, param), {}).get(key, value).clone()
    if mapping := getattr(param, "_hp_mapping", None):  # this rank has a part of it
        here = mapping.hp_fragment.data_ptr()
        for flat in engine.optimizer.single_partition_of_fp32_groups:
            first = (here - flat.data_ptr()) // flat.element_size()
            if 0 <= first < flat.numel() and key in states[flat]:
                part, place = mapping.hp_fragment.numel(), mapping.lp_fragment_address.start
                value.view(-1)[place : place + part] = states[flat][key][first : first + part]
    torch.distributed.all_reduce(value)
    return value


def _masters(engine: Any) -> list[Tensor]:
    groups = getattr(engine.optimizer, "fp32_groups", [])
    return [master for group in groups for master in group]


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

    `new`: parameters whose state starts at zero in Muon's run. `saves`, `loads`: settings of one run only. `moves`: the
    (stage, ranks) of the run that loads, from those of the run that saves.
    """

    title: str
    before: dict[str, Any] = {}
    after: dict[str, Any] = {}
    new: tuple[str, ...] = ()
    saves: dict[str, Any] = {}
    loads: dict[str, Any] = {}
    moves: Any = None


FROZEN = {"frozen": ("layers.0", "tokens")}
CHANGES = {
    change.title: change
    for change in (
        Change("nothing"),
        Change("a layer more", {}, {"depth": 3}, ("layers.2.weight", "layers.2.bias")),
        Change("a layer less", {"depth": 3}, {}),
        Change("more rows", {}, {"rows": 17}),
        Change("fewer rows", {"rows": 17}, {}),
        Change("frozen", {}, FROZEN),
        Change("unfrozen", FROZEN, {}, ("layers.0.weight", "layers.0.bias", "tokens.weight")),
        Change("two layers swapped", loads={"order": "swapped"}),
        Change("other groups", loads={"order": "groups"}),
        Change(
            "a matrix to AdamW", new=("layers.1.weight",), loads={"optimizer": with_params(muon_exclude=["layers.1"])}
        ),
        Change("from AdamW", saves={"optimizer": ADAMW}),
        Change("another stage", moves=lambda stage, ranks: ((stage + 1) % 4, ranks)),
        Change("fewer ranks", moves=lambda stage, ranks: (stage, 1)),
        Change("bf16", loads={"dtype": "bf16"}),
    )
}
"""By title."""


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


def outcome(change: Change, stage: int, is_muon: bool, folder: Path) -> str:
    """Return what becomes of the run: "continues", an exception's name, or how many tensors are wrong without one."""
    saved = (stage, 2)
    loaded = change.moves(*saved) if change.moves else saved
    ours = MATCH if is_muon else {"optimizer": ADAMW}
    change = change._replace(saves=ours | change.saves, loads=ours | change.loads)
    if not is_muon and change.title == "from AdamW":  # the way back
        change = change._replace(saves={})
    old, ranks = carry_over(change, saved, loaded, folder)
    if errors := ranks[0].get("errors"):
        names = " or ".join(f"`{error}`" for error in sorted(set(errors) - {""}))
        return names + (" on some ranks, the others wait" if "" in errors else "")
    wrong = surprises(change, ranks[0], old)
    return f"**{len(wrong)} of {len(ranks[0]['loaded'])} tensors wrong, no error**" if wrong else "continues"


# ---- in mid-run -------------------------------------------------------------------------------------------------

EVENTS = ("frozen for two steps", "left out of two steps", "unfrozen after the start")
KINDS = {"layers.0.weight": "matrix", "tokens.weight": "embedding", "layers.0.bias": "bias"}
"""Parameters that an event is about."""


def through(event: str, optimizer: dict[str, Any] | None, stage: int) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Train through an event; return (parameter -> "constant" or "changes" meanwhile, or "never trained", weights)."""
    is_late = event == EVENTS[2]
    engine = build(1, FROZEN if is_late else {}, order="all", stage=stage, optimizer=optimizer)
    train_engine(engine, STEPS)
    seen = [full_weights(engine.module)]
    for is_over in (False, True):
        for name, param in engine.module.named_parameters():
            param.requires_grad_(name not in KINDS or (is_over if event != EVENTS[1] else True))
        engine.module.skipped = {0} if event == EVENTS[1] and not is_over else set()
        train_engine(engine, 2, STEPS + 2 * is_over)
        seen.append(full_weights(engine.module))
    engine.destroy()
    before, during, after = seen
    words = {}
    for name in KINDS:
        is_constant, is_never = during[name].equal(before[name]), after[name].equal(during[name])
        words[name] = "never trained" if is_never else "constant" if is_constant else "changes"
    return words, after


# ---- the page ---------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, dict[str, Any] | None] = {"this Muon": None, "AdamW": ADAMW}


def change_rows(title: str, folder: Path) -> str:
    """Return the lines of the page's first table about a change."""
    lines = []
    for name, section in OPTIMIZERS.items():
        if section and "optimizer" in CHANGES[title].loads:
            continue  # the change is one of Muon's settings
        cells = []
        for stage in range(4):
            (place := folder / f"{name} {stage}").mkdir(parents=True)
            cells.append(outcome(CHANGES[title], stage, section is None, place))
        lines.append(f"| {title} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def event_rows(event: str) -> str:
    """Return the lines of the page's second table about an event."""
    lines = []
    for name, section in OPTIMIZERS.items():
        stages = [run(through, 2, event=event, optimizer=section, stage=stage)[0][0] for stage in range(4)]
        for param, kind in KINDS.items():
            lines.append(f"| {event} | {name}, {kind} | {' | '.join(stage[param] for stage in stages)} |")
    return "\n".join(lines)


def tables(folder: Path) -> tuple[str, str]:
    """Return both tables of the page."""
    changes = [change_rows(title, folder / title) for title in CHANGES]
    heads = (f"| {what} | optimizer | stage 0 | 1 | 2 | 3 |\n|---|---|---|---|---|---|" for what in ("change", "event"))
    bodies = (changes, map(event_rows, EVENTS))
    first, second = ("\n".join([head, *body]) for head, body in zip(heads, bodies, strict=True))
    return first, second
