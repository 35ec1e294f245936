# SPDX-License-Identifier: Apache-2.0
"""Loading by parameter names: what two models share keeps weight and state, the rest is new or dropped, and is listed.

The reference carries weights and states by name in one process, in float64.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed.muon import CheckpointError
from helpers import nvme
from helpers.changed_models import (
    ADAMW,
    CHANGES,
    MATCH,
    STEPS,
    Change,
    Layers,
    build,
    carry_over,
    save,
    states,
    surprises,
    through,
    weights,
)
from helpers.distributed import run
from helpers.engine_state import differing, master_weights, named_states
from helpers.logs import logged
from helpers.models import train_engine
from helpers.oracles import adam_update, clipped, gradients_of, muon_update
from helpers.training import BF16_OPTIMIZER, MOMENTA, ORACLE


def continued(change: Change, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Two steps from weights, momenta and moments by name, in float64; those of new parameters start at step 0."""
    net = Layers(**change.after).double()
    params = {name: p for name, p in net.named_parameters() if p.requires_grad}
    net.load_state_dict({name: state[name].double() for name, _ in net.named_parameters()}, strict=False)
    net.scale.fill_(1.5)
    state = {name: value.double().clone() for name, value in state.items()}
    for step in range(2):
        gradients, _ = clipped(gradients_of(net(*net.batch(STEPS + step)), params), 1.0)
        with torch.no_grad():
            for name, param in params.items():
                if (key := f"{name}.momentum_buffer") in state:
                    muon_update(param, gradients[name], state[key].view_as(param), ORACLE)
                else:
                    moments = (state[f"{name}.{key}"].view_as(param) for key in ("exp_avg", "exp_avg_sq"))
                    made = step + (0 if name in change.new else STEPS)
                    adam_update(param, gradients[name], *moments, made + 1, ORACLE)
    return {name: p.detach() for name, p in net.named_parameters()}


@pytest.mark.sample(8)
@pytest.mark.parametrize(("saved", "loaded"), [((1, 2), (2, 3)), ((3, 2), (3, 1)), ((0, 2), (1, 2)), ((2, 2), (0, 2))])
@pytest.mark.parametrize("title", CHANGES)
def test_what_both_models_have_continues(
    title: str, saved: tuple[int, int], loaded: tuple[int, int], tmp_path: Path
) -> None:
    if title == "from AdamW" and saved[0] == 0:
        pytest.skip("DeepSpeed's AdamW saves no parameter names at stage 0")
    change = CHANGES[title]
    change = change._replace(loads=MATCH | change.loads)
    old, ranks = carry_over(change, saved, loaded, tmp_path)
    found = ranks[0]
    assert "errors" not in found, found
    assert surprises(change, found, old) == []
    assert found["scale"] == 1.5 and found["steps"] == STEPS
    assert Path(found["path"]).parent == tmp_path / "global_step3"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == [], "the copy is gone"
    listed = next(line for line in found["said"] if "was loaded by parameter names" in line)
    dropped = [name for name in old.keys() - found["loaded"].keys() if name.endswith((".weight", ".bias"))]
    assert ("dropped, not in this model" in listed) == bool(dropped) and all(name in listed for name in dropped)
    assert any("3 to 10 times AdamW's learning rate" in line for line in found["said"]) == (title == "from AdamW")
    for name, weight in continued(change, found["loaded"]).items():
        if name in found["trained"]:
            change_of = (weight - found["loaded"][name].double()).norm()
            assert (found["trained"][name].double() - weight).norm() <= 1e-4 * change_of + 1e-9, name


#: (Settings that save, settings that load.)
SETTINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"stage": 1}, {"stage": 3, "dtype": "bf16", "offload": True}),
    ({"stage": 2, "dtype": "fp16"}, {"stage": 1, "dtype": "bf16"}),
    ({"stage": 3, "dtype": "bf16", "offload": True}, {"stage": 2}),
    (BF16_OPTIMIZER, {"stage": 2, "dtype": "fp16", "offload": True}),
    ({"stage": 0}, {"stage": 2, "dtype": "bf16"}),
    ({"stage": 2, "dtype": "bf16"}, {"stage": 0}),
    ({"stage": 3, "optimizer": MOMENTA["int8"]}, {"stage": 1}),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize("title", ["a layer more", "more rows", "a matrix to AdamW"])
@pytest.mark.parametrize(("saved", "loaded"), SETTINGS)
def test_states_go_to_other_precisions_and_in_and_out_of_offload(
    saved: dict[str, Any], loaded: dict[str, Any], title: str, tmp_path: Path
) -> None:
    change = CHANGES[title]
    change = change._replace(saves=saved, loads=MATCH | loaded | change.loads)
    old, ranks = carry_over(change, (2, 2), (2, 2), tmp_path)
    found = ranks[0]
    assert "errors" not in found, found
    assert surprises(change, found, old) == []
    assert found["steps"] == STEPS
    assert all(
        weight.isfinite().all() and not weight.equal(found["loaded"][name]) for name, weight in found["trained"].items()
    )


def wide_states(unused: bool, loads: bool, folder: str, swap: str, **config: Any) -> dict[str, Tensor]:
    """Train a wide model, with or without unused layers, and save, or load what was saved; return all state by name."""
    device = {"device": "cpu"} if config.pop("in_memory", False) else {}
    with logged():
        engine = nvme.nvme_engine(int(loads), unused, folder=f"{folder}/{swap}", **MATCH, **device, **config)
        if loads:
            engine.load_checkpoint(folder)
        else:
            train_engine(engine, 2)
            engine.save_checkpoint(folder)
    found = master_weights(engine) | named_states(engine)
    train_engine(engine, 1)
    engine.destroy()
    return found


@pytest.mark.time_limit(1200)
@pytest.mark.sample(1)
@pytest.mark.parametrize("loader", [{}, {"in_memory": True}], ids=["NVMe", "memory"])
def test_states_on_nvme_are_matched(loader: dict[str, Any], tmp_path: Path) -> None:
    old = nvme.run(wide_states, 2, unused=True, loads=False, folder=str(tmp_path), swap="a")[0]
    new = nvme.run(wide_states, 2, unused=False, loads=True, folder=str(tmp_path), swap="b", **loader)[0]
    assert old.keys() > new.keys() and differing(new, {name: old[name] for name in new}) == []


# ---- beside AdamW -----------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("is_frozen", [True, False])
def test_what_muon_leaves_to_adamw_does_as_deepspeeds_adamw(is_frozen: bool, stage: int) -> None:
    """In mid-run, too. All parameters are left to AdamW, with DeepSpeed's settings."""
    params = ADAMW["params"] | {"betas": [0.9, 0.999], "eps": 1e-8, "muon_exclude": ".*"}
    params.pop("torch_adam")
    ours = run(through, 2, is_frozen=is_frozen, optimizer={"type": "Muon", "params": params}, stage=stage)[0]
    # At stage 3 DeepSpeed's AdamW trains a layer that is left out on its last gradient.
    theirs = run(through, 2, is_frozen=is_frozen, optimizer=ADAMW, stage=min(stage, 2))[0]
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=1e-5, atol=1e-7)


# ---- what the log says, and what is refused ---------------------------------------------------------------------


def refuse(folder: str, model: dict[str, Any], **config: Any) -> tuple[str, bool]:
    """The error of a load, and whether it left weights and states as they were."""
    engine = build(2, model, **MATCH | config)
    train_engine(engine, 1)
    before = weights(engine) | states(engine)
    with pytest.raises(CheckpointError) as error:
        engine.load_checkpoint(folder)
    after = weights(engine) | states(engine)
    engine.destroy()
    return str(error.value), all(after[name].equal(value) for name, value in before.items())


ERROR = {"checkpoint": {"muon_changed_model": "error"}}
#: The stage of the save, the run that loads, and words of the error. At stage 0 DeepSpeed saves states without names.
REFUSED: dict[str, tuple[int, dict[str, Any], list[str]]] = {
    "another shape": (1, {"model": {"width": 16}, "stage": 2}, ["shape [12, 12] in the other run", "layers.0.weight"]),
    "equal sizes in another order": (
        0,
        {"model": {}, "order": "swapped", "stage": 0, **ERROR},
        ["the order of the parameters differs", "layers.1.weight"],
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_does_not_fit_is_refused_and_changes_nothing(kind: str, tmp_path: Path) -> None:
    stage, loader, words = REFUSED[kind]
    run(save, 1, folder=str(tmp_path), model={}, stage=stage)
    error, is_unchanged = run(refuse, 1, folder=str(tmp_path), **loader)[0]
    assert is_unchanged and all(word in error for word in words), error
