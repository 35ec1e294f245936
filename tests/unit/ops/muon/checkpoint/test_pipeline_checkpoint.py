# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of pipelines: exact, and refused where they do not fit; and which pipelines are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed import pipe
from helpers.checkpoints import remove_manifests
from helpers.distributed import run
from helpers.pipelines import SHARED, Whole, everything, make_pipeline, pipeline_config, shares
from helpers.training import ds_config, make_engine

# ---- checkpoints ----------------------------------------------------------------------------------------------


def go_on(folder: str, load: bool, name: str = "tied", stages: int = 2, **config: Any) -> Any:
    """Three steps, saved after the first or loaded from there; or the error of the load."""
    try:
        net = make_pipeline(name, stages)
        if load:
            for param in net.parameters():
                param.data.mul_(0.5)
        engine = make_engine(net, pipeline_config(stages, **config))
        if load:
            engine.load_checkpoint(folder)
        else:
            engine.train_batch(shares(engine, 0))
            engine.save_checkpoint(folder)
        for step in (1, 2):
            engine.train_batch(shares(engine, step))
        found = everything(engine)
        engine.destroy()
        return found
    except ValueError as error:
        return str(error)


def test_checkpoints_that_do_not_fit_are_refused_on_all_ranks(tmp_path: Path) -> None:
    run(go_on, 2, folder=str(tmp_path), load=False)
    header = json.loads((tmp_path / "global_step1" / "muon_save.json").read_text())
    names = [of_stage["shapes"].keys() for of_stage in header["structures"]]
    assert names[0] | names[1] == Whole("tied").state_dict().keys() and names[0] & names[1] == {SHARED}
    for text in run(go_on, 2, folder=str(tmp_path), load=True, stages=1):
        assert "2 parts (pipeline stages" in text and "this run has 1" in text
    for text in run(go_on, 4, folder=str(tmp_path), load=True):
        assert "was saved on 1 rank" in text and "ds_to_universal --input_folder" in text
    for text in run(go_on, 2, folder=str(tmp_path), load=True, name="late"):
        assert "cannot be loaded, and nothing was changed" in text
    next(tmp_path.glob("*/layer_03-model_states.pt")).unlink()
    for text in run(go_on, 2, folder=str(tmp_path), load=True):
        assert "layer_03-model_states.pt is missing" in text


def test_a_checkpoint_without_manifests_loads(tmp_path: Path) -> None:
    first = run(go_on, 2, folder=str(tmp_path), load=False)
    remove_manifests(tmp_path)
    second = run(go_on, 2, folder=str(tmp_path), load=True)
    for before, after in zip(first, second, strict=True):
        assert all(torch.equal(value, after[key]) for key, value in before.items())


# ---- refusals -------------------------------------------------------------------------------------------------


def refused(kind: str) -> tuple[str, str]:
    """What is refused of a pipeline on two ranks."""
    stage = 2 if kind == "stage 2" else 1
    layers = [nn.Linear(8, 8) for _ in range(4)]
    try:
        kind_of = pipe.DualPipeVModule if kind == "DualPipeV" else pipe.PipelineModule
        net = kind_of(layers, loss_fn=nn.MSELoss(), num_stages=2)
        make_engine(net, ds_config(stage=stage) | {"train_micro_batch_size_per_gpu": 4})
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


REFUSED = {
    "stage 2": "a pipeline at ZeRO stage 2 or 3",
    "DualPipeV": "DualPipeV, whose ranks hold two stages each",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_refused_of_pipelines(kind: str) -> None:
    if kind == "DualPipeV" and not hasattr(pipe, "DualPipeVModule"):
        pytest.skip("this DeepSpeed does not have it yet")
    for name, text in run(refused, 2, kind=kind):
        assert name == "UnsupportedError", text
        assert REFUSED[kind] in text
