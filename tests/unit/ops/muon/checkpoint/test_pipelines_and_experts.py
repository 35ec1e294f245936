# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of pipelines and experts that do not fit, weights alone, and which pipelines are refused.

The table of settings has exact resume and universal checkpoints.
"""

from pathlib import Path

import pytest
from torch import Tensor, nn

from deepspeed import pipe
from deepspeed.muon import UnsupportedError
from helpers.checkpoints import error_of
from helpers.contracts import around_a_move, end_of, find
from helpers.distributed import run
from helpers.engine_state import differing
from helpers.pipelines import make_pipeline, pipeline_config
from helpers.settings import SETTINGS
from helpers.training import ds_config, make_engine

TWO_STAGES = {"name": "pipeline", "index": SETTINGS["pipeline"].cases.index({"model": "tied", "world": 2})}


def error_of_load(folder: str, name: str = "tied", stages: int = 2) -> str:
    engine = make_engine(make_pipeline(name, stages), pipeline_config(stages))
    text = error_of(engine.load_checkpoint, folder)
    engine.destroy()
    return text


def test_checkpoints_that_do_not_fit_are_refused_on_all_ranks(tmp_path: Path) -> None:
    run(end_of, 2, **TWO_STAGES, folder=str(tmp_path), loads=False)
    for text in run(error_of_load, 2, folder=str(tmp_path), stages=1):
        assert "2 parts (pipeline stages" in text and "this run has 1" in text
    for text in run(error_of_load, 4, folder=str(tmp_path)):
        assert "was saved on 1 rank" in text and "ds_to_universal --input_folder" in text
    for text in run(error_of_load, 2, folder=str(tmp_path), name="late"):
        assert "cannot be loaded, and nothing was changed" in text
    next(tmp_path.glob("*/layer_03-model_states.pt")).unlink()
    for text in run(error_of_load, 2, folder=str(tmp_path)):
        assert "layer_03-model_states.pt is missing" in text


def weights_alone(name: str, index: int, folder: str) -> dict[str, Tensor]:
    setting, case = find(name, index, folder)
    with setting.way.engine(case, seed=1) as engine:
        engine.load_checkpoint(folder, tag="saved", load_module_only=True)
        assert not any(state.any() for state in setting.way.states(engine).values())
        return setting.way.apart(engine, setting.way.weights(engine))


@pytest.mark.parametrize(("name", "stage"), [("experts", 2), pytest.param("AutoEP", 3, marks=pytest.mark.full)])
def test_weights_alone_of_experts(name: str, stage: int, tmp_path: Path) -> None:
    index = next(n for n, case in enumerate(SETTINGS[name].cases) if case["stage"] == stage and case["world"] == 4)
    job = {"name": name, "index": index, "folder": str(tmp_path)}
    saved = run(around_a_move, 4, **job, loads=False)
    for (weights, *_), found in zip(saved, run(weights_alone, 4, **job), strict=True):
        assert differing(weights, found) == []


def error_of_pipeline(kind: str, stage: int) -> str:
    net = getattr(pipe, kind)([nn.Linear(8, 8) for _ in range(4)], loss_fn=nn.MSELoss(), num_stages=2)
    with pytest.raises(UnsupportedError) as error:
        make_engine(net, ds_config(stage=stage) | {"train_micro_batch_size_per_gpu": 4})
    return str(error.value)


@pytest.mark.parametrize(
    ("kind", "stage", "words"),
    [
        ("PipelineModule", 2, "a pipeline at ZeRO stage 2 or 3"),
        ("DualPipeVModule", 1, "DualPipeV, whose ranks hold two stages each"),
    ],
)
def test_pipelines_that_are_refused(kind: str, stage: int, words: str) -> None:
    if not hasattr(pipe, kind):
        pytest.skip("this DeepSpeed does not have it yet")
    assert all(words in text for text in run(error_of_pipeline, 2, kind=kind, stage=stage))
