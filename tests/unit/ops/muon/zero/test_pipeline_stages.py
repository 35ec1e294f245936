# SPDX-License-Identifier: Apache-2.0
"""What the stages of a pipeline have to agree on: bad steps, options, methods, checkpoints, refusals."""

import re
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from helpers.distributed import run, run_each
from helpers.engine_state import differing, snapshot
from helpers.logs import logged
from helpers.models import train_engine
from helpers.pipelines import SHARED, make_pipeline, pipeline_config
from helpers.training import FP32_GRADIENTS, make_engine, with_params

# ---- steps that are skipped -----------------------------------------------------------------------------------


def step_badly(**config: Any) -> tuple[list[str], int, int]:
    """What two steps change in which rank 0's gradient is infinite; how often the log says so, and what is updated."""
    with logged() as said:
        engine = make_engine(make_pipeline("late", 2), pipeline_config(2, **config))
        train_engine(engine, 1)
        before = snapshot(engine)
        hook = next(engine.module.parameters()).register_hook(
            lambda grad: grad * (float("inf") if dist.get_rank() == 0 else 1.0)
        )
        for step in (1, 2):
            train_engine(engine, 1, step)
        hook.remove()
        changed = differing(before, snapshot(engine))
        engine.destroy()
    bad, updated = (len([line for line in said if words in line]) for words in ("is not finite", "AdamW updates"))
    return changed, bad, updated


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("config", "lines"),
    [
        ({"dtype": "bf16", **FP32_GRADIENTS}, 2),
        ({"dtype": "bf16", "bf16": {"enabled": True, "check_grad_overflow": False}}, 2),
        ({"dtype": "bf16"}, 0),
        ({}, 0),
    ],
    ids=str,
)
def test_a_bad_gradient_of_one_stage_skips_the_step_of_all(config: dict[str, Any], lines: int) -> None:
    """Of the first, which has no matrix for Muon; the table of settings has the last.

    Where DeepSpeed does not say so, rank 0 does, once a step. At start the first rank of each stage logs what it has.
    """
    assert run(step_badly, 4, **config) == [([], lines, 1), ([], 0, 0), ([], 0, 1), ([], 0, 0)]


# ---- what the config asks for ---------------------------------------------------------------------------------


def built(name: str = "late", stages: int = 2, tag: str = "", frozen: str = "$", **config: Any) -> Any:
    """Type and text of the error of `initialize`, or what goes to Muon. `frozen`: matrices that do not train."""
    try:
        net = make_pipeline(name, stages)
        for key, param in net.named_parameters():
            if key == tag and dist.get_rank() == 3:
                param.use_muon = False
            param.requires_grad_(param.ndim < 2 or re.match(frozen, key) is None)
        engine = make_engine(net, pipeline_config(stages, **config))
        specs = [spec.name for spec in engine.basic_optimizer.specs.values() if spec.use_muon]
        engine.destroy()
        return specs
    except Exception as error:
        return type(error).__name__, str(error)


def test_patterns_act_on_the_stage_that_has_what_they_find() -> None:
    """Without a matrix for Muon all is left to AdamW: the first stage never has one, those of the second are frozen or
    excluded on purpose.
    """
    cases = [
        {"optimizer": with_params(muon_include=["^1\\.table"], muon_exclude=["^3\\."])},
        {"frozen": r"[34]\."},
        {"optimizer": with_params(muon_exclude=[r"^[34]\."])},
    ]
    second = [f"4.{name}.weight" for name in ("qkv", "proj", "up", "down")]
    assert run_each(built, 2, cases) == [[["1.table.weight"], second], [[], []], [[], []]]


REFUSED: dict[str, tuple[int, dict[str, Any], str, list[str]]] = {
    "a pattern": (
        2,
        {"optimizer": with_params(muon_exclude=["nowhere"])},
        "MuonConfigError",
        ["stage 0: optimizer.params", "stage 1: optimizer.params.muon_exclude: 'nowhere' matches none of the"],
    ),
    "a split": (
        2,
        {"optimizer": with_params(muon_split={"^5": [4, 15]})},
        "MuonConfigError",
        ["stage 0: optimizer.params", "stage 1: optimizer.params.muon_split: '^5' has no effect"],
    ),
    "heads": (
        2,
        {"name": "mlp", "optimizer": with_params(per_head_muon=True)},
        "MuonConfigError",
        ["no parameter that goes to Muon has the name of an attention"],
    ),
    "ranks of a stage that differ": (
        4,
        {"tag": "3.up.weight"},
        "DisagreementError",
        ["ranks [3] do not send the same parameters to Muon as rank 2"],
    ),
    "a tied layer": (
        2,
        {"name": "tied", "optimizer": with_params(muon_include=["tied"])},
        "ValueError",
        [f"{SHARED}: Muon cannot update this parameter (muon_include 'tied'), because several pipeline stages"],
    ),
}
"""Name -> (ranks, arguments of `built`, the error that all ranks raise, what it says)."""


@pytest.mark.parametrize("world", [2, 4])
def test_what_no_stage_can_follow_is_refused_on_all_ranks(world: int) -> None:
    rows = [row for row in REFUSED.values() if row[0] == world]
    for (_, _, name, texts), results in zip(rows, run_each(built, world, [row[1] for row in rows]), strict=True):
        for error, found in results:
            assert error == name
            assert all(text in found for text in texts), found


def routes_of_last_layers() -> list[dict[str, bool]]:
    """Whether Muon updates each matrix, where nothing with parameters follows the head, and where the layer has two."""
    from deepspeed.pipe import PipelineModule

    from deepspeed.muon.model.routing import route as decide

    found = []
    for layers in (
        [nn.Linear(8, 8), nn.Linear(8, 8), nn.Tanh()],
        [nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))],
    ):
        specs = decide(PipelineModule(layers, num_stages=1)).values()
        found.append({spec.name: spec.use_muon for spec in specs if len(spec.shape) == 2})
    return found


def test_the_head_is_the_only_matrix_of_the_last_layer_that_has_parameters() -> None:
    head, hidden = {"0.weight": True, "1.weight": False}, {"0.0.weight": True, "0.1.weight": True}
    assert run(routes_of_last_layers, 2) == [[head, hidden]] * 2
