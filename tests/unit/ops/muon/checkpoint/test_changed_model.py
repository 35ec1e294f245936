# SPDX-License-Identifier: Apache-2.0
"""Loading by parameter names: what two models share keeps weight and state, the rest is new or dropped, and is listed.

The reference carries weights and states by name in one process, in float64.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepspeed.muon import CheckpointError, MuonConfigError
from deepspeed.muon.zero.checkpoint.changed_model import renames_allowed
from helpers.distributed import run
from helpers.engine_state import named_states
from helpers.logs import logged
from helpers.models import GLOBAL_BATCH, initialize_
from helpers.oracles import adam_update, clipped, gradients_of, muon_update
from helpers.training import BF16_OPTIMIZER, ORACLE, ds_config, fp32_weights, make_engine, with_params

MATCH = {"checkpoint": {"muon_changed_model": "match"}}
RENAMES = {"checkpoint": {"muon_changed_model": {"rename": {r"^layers\.": "blocks."}}}}
TOKENS, WIDTH = 13, 12


class Layers(nn.Module):
    """An embedding, `depth` layers with biases and a head; `frozen`: prefixes of the names that do not train."""

    def __init__(
        self,
        rows: int = TOKENS,
        depth: int = 2,
        frozen: tuple[str, ...] = (),
        stem: str = "layers",
        width: int = WIDTH,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(rows, width)
        self.stem = stem
        setattr(self, stem, nn.ModuleList(nn.Linear(width, width) for _ in range(depth)))
        self.lm_head = nn.Linear(width, TOKENS, bias=False)
        self.register_buffer("scale", torch.ones(()))
        initialize_(self, 0)
        for name, param in self.named_parameters():
            param.requires_grad_(not name.startswith(frozen) if frozen else True)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        hidden = self.tokens(inputs) * self.scale.to(self.tokens.weight.dtype)
        for layer in getattr(self, self.stem):
            hidden = hidden + torch.tanh(layer(hidden))
        return F.cross_entropy(4 * self.lm_head(hidden).double(), targets)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs, targets = (torch.randint(0, TOKENS, (GLOBAL_BATCH,), generator=generator) for _ in range(2))
    return inputs, targets


def train(engine: Any, first: int, steps: int) -> None:
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for step in range(first, first + steps):
        engine.backward(engine(*(part[rank::world] for part in batch(step))))
        engine.step()


def build(seed: int, model: dict[str, Any], reverse: bool = False, **config: Any) -> Any:
    """An engine; with `reverse` the parameters come in the opposite order, in two groups."""
    net = Layers(**model)
    initialize_(net, seed)
    if not reverse:
        return make_engine(net, ds_config(**config))
    params = [param for param in net.parameters() if param.requires_grad][::-1]
    return make_engine(net, ds_config(**config), model_parameters=[{"params": params[:2]}, {"params": params[2:]}])


def save(folder: str, model: dict[str, Any], **config: Any) -> dict[str, Tensor]:
    """Train three steps and save; return weights and states by name."""
    engine = build(1, model, **config)
    train(engine, 0, 3)
    engine.module.scale.fill_(1.5)
    engine.save_checkpoint(folder)
    found = fp32_weights(engine) | named_states(engine)
    engine.destroy()
    return found


def load(folder: str, model: dict[str, Any], steps: int = 2, **config: Any) -> dict[str, Any]:
    """Load by names; return weights and states after the load, weights after more steps, the log and counters."""
    engine = build(2, model, **MATCH | config)
    initial = fp32_weights(engine)
    with logged() as said:
        path, _ = engine.load_checkpoint(folder)
    loaded = fp32_weights(engine) | named_states(engine)
    scale, done = float(engine.module.scale), engine.global_steps
    train(engine, 3, steps)
    result = {"initial": initial, "loaded": loaded, "trained": fp32_weights(engine), "said": said, "path": path}
    engine.destroy()
    return result | {"scale": scale, "steps": done}


def continued(model: dict[str, Any], state: dict[str, Tensor], steps: dict[str, int]) -> dict[str, Tensor]:
    """Two steps from weights, momenta and moments by name, in float64; `steps`: how many each has made."""
    net = Layers(**model).double()
    params = {name: p for name, p in net.named_parameters() if p.requires_grad}
    net.load_state_dict({name: state[name].double() for name, _ in net.named_parameters()}, strict=False)
    net.scale.fill_(1.5)
    state = {name: value.double().clone() for name, value in state.items()}
    for step in range(2):
        gradients, _ = clipped(gradients_of(net(*batch(3 + step)), params), 1.0)
        with torch.no_grad():
            for name, param in params.items():
                if (key := f"{name}.momentum_buffer") in state:
                    muon_update(param, gradients[name], state[key].view_as(param), ORACLE.lr, ORACLE)
                else:
                    moments = (state[f"{name}.{key}"].view_as(param) for key in ("exp_avg", "exp_avg_sq"))
                    adam_update(param, gradients[name], *moments, steps[name] + step + 1, ORACLE.adam_lr, ORACLE)
    return {name: p.detach() for name, p in net.named_parameters()}


#: Change -> (model that is saved, model that loads, names whose state is new, settings that differ in the load).
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any], list[str], dict[str, Any]]] = {
    "a layer more": ({}, {"depth": 3}, ["layers.2.weight", "layers.2.bias"], {}),
    "a layer less": ({"depth": 3}, {}, [], {}),
    "more rows": ({}, {"rows": 17}, [], {}),
    "fewer rows": ({"rows": 17}, {}, [], {}),
    "frozen now": ({}, {"frozen": ("layers.0", "tokens")}, [], {}),
    "thawed": ({"frozen": ("layers.0", "tokens")}, {}, ["layers.0.weight", "layers.0.bias", "tokens.weight"], {}),
    "from Muon to AdamW": ({}, {}, ["layers.1.weight"], {"optimizer": with_params(muon_exclude=["layers.1"])}),
    "another order": ({}, {}, [], {"reverse": True}),
    "other names": ({}, {"stem": "blocks"}, [], RENAMES),
}


def check_loaded(
    found: dict[str, Any], old: dict[str, Tensor], model: dict[str, Any], new: list[str]
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Compare what was loaded with what was saved, bit for bit; return weights and states, and steps, by name."""
    old = {re.sub(r"^layers\.", f"{model.get('stem', 'layers')}.", name): value for name, value in old.items()}
    state, steps = {}, {}
    for name, value in found["loaded"].items():
        parameter = name.rpartition(".")[0] if name.count("momentum_buffer") or "exp_avg" in name else name
        is_state = parameter != name
        expected = found["initial"][name].clone() if not is_state else torch.zeros_like(value)
        steps[parameter] = 0 if parameter in new else 3
        if name in old and not (is_state and parameter in new):
            count = min(expected.numel(), old[name].numel())
            expected.view(-1)[:count] = old[name].reshape(-1)[:count]
        assert value.equal(expected.view_as(value)), name
        state[name] = value
    return state, steps


@pytest.mark.sample(8)
@pytest.mark.parametrize(("saved", "loaded"), [((1, 2), (2, 3)), ((3, 2), (3, 2)), ((0, 2), (1, 2)), ((2, 2), (0, 2))])
@pytest.mark.parametrize("change", CHANGES)
def test_what_both_models_have_goes_on(
    change: str, saved: tuple[int, int], loaded: tuple[int, int], tmp_path: Path
) -> None:
    before, after, new, settings = CHANGES[change]
    (stage, world), (to_stage, to_world) = saved, loaded
    old = run(save, world, folder=str(tmp_path), model=before, stage=stage)[0]
    found = run(load, to_world, folder=str(tmp_path), model=after, stage=to_stage, **settings)[0]
    state, steps = check_loaded(found, old, after, new)
    assert found["scale"] == 1.5 and found["steps"] == 3
    for name, weight in continued(after, state, steps).items():
        if name in found["trained"]:
            change_of = (weight - state[name].double()).norm()
            assert (found["trained"][name].double() - weight).norm() <= 1e-4 * change_of + 1e-9, name


#: (Settings that save, settings that load.)
SETTINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"stage": 1}, {"stage": 3, "dtype": "bf16", "offload": True}),
    ({"stage": 2, "dtype": "fp16"}, {"stage": 1, "dtype": "bf16"}),
    ({"stage": 3, "dtype": "bf16", "offload": True}, {"stage": 2}),
    (BF16_OPTIMIZER, {"stage": 2, "dtype": "fp16", "offload": True}),
    ({"stage": 0}, {"stage": 2, "dtype": "bf16"}),
    ({"stage": 2, "dtype": "bf16"}, {"stage": 0}),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize("change", ["a layer more", "more rows", "from Muon to AdamW"])
@pytest.mark.parametrize(("saved", "loaded"), SETTINGS)
def test_states_go_to_other_precisions_and_in_and_out_of_offload(
    saved: dict[str, Any], loaded: dict[str, Any], change: str, tmp_path: Path
) -> None:
    before, after, new, settings = CHANGES[change]
    old = run(save, 2, folder=str(tmp_path), model=before, **saved)[0]
    found = run(load, 2, folder=str(tmp_path), model=after, **loaded, **settings)[0]
    check_loaded(found, old, after, new)
    assert found["steps"] == 3
    assert all(
        weight.isfinite().all() and not weight.equal(found["loaded"][name]) for name, weight in found["trained"].items()
    )


# ---- what the log says, and what is refused ---------------------------------------------------------------------


def test_the_log_lists_what_became_of_the_parameters(tmp_path: Path) -> None:
    run(save, 2, folder=str(tmp_path), model={"depth": 3, "frozen": ("tokens",)}, stage=2)
    found = run(load, 2, folder=str(tmp_path), model={"frozen": ("layers.0",)}, stage=1)[0]
    text = next(line for line in found["said"] if "was loaded by parameter names" in line)
    assert text.splitlines()[1:] == [
        "  3: weight and state as saved (layers.1.weight, layers.1.bias, lm_head.weight)",
        "  1: state new, weight as saved (tokens.weight)",
        "  2: frozen, weight as saved (layers.0.bias, layers.0.weight)",
        "  2: dropped, not in this model (layers.2.bias, layers.2.weight)",
    ]
    assert found["path"] == str(tmp_path / "global_step3" / "mp_rank_00_model_states.pt")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == [], "the copy is gone"


def refuse(folder: str, model: dict[str, Any], **config: Any) -> tuple[str, bool]:
    """The error of a load, and whether it left weights and states as they were."""
    engine = build(2, model, **MATCH | config)
    train(engine, 0, 1)
    before = fp32_weights(engine) | named_states(engine)
    with pytest.raises(CheckpointError) as error:
        engine.load_checkpoint(folder)
    after = fp32_weights(engine) | named_states(engine)
    engine.destroy()
    return str(error.value), all(after[name].equal(value) for name, value in before.items())


def test_a_matrix_of_another_shape_is_refused(tmp_path: Path) -> None:
    run(save, 1, folder=str(tmp_path), model={}, stage=1)
    error, is_unchanged = run(refuse, 1, folder=str(tmp_path), model={"width": 16}, stage=2)[0]
    assert is_unchanged and "layers.0.weight has shape [12, 12] in the checkpoint and [16, 16] in the model" in error


def test_a_changed_model_is_an_error_unless_the_config_allows_it(tmp_path: Path) -> None:
    run(save, 1, folder=str(tmp_path), model={}, stage=1)
    error, is_unchanged = run(
        refuse, 1, folder=str(tmp_path), model={"depth": 3}, stage=1, checkpoint={"muon_changed_model": "error"}
    )[0]
    assert is_unchanged and '"checkpoint": {"muon_changed_model": "match"}' in error


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"muon_changed_model": "mach"}, 'got \'mach\'; expected "error", "match" or an object such as {"rename":'),
        ({"muon_changed_models": "match"}, "unknown key; did you mean 'muon_changed_model'?"),
        ({"muon_changed_model": {"rename": {"(": ""}}}, "is not a regular expression"),
    ],
)
def test_a_wrong_value_is_refused(section: dict[str, Any], text: str) -> None:
    with pytest.raises(MuonConfigError, match=re.escape(text)):
        renames_allowed(section)
