# SPDX-License-Identifier: Apache-2.0
"""What the stages of a pipeline have to agree on: bad steps, options, methods, checkpoints, refusals."""

import logging
import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed.muon.zero.wrappers.adapter import replace
from deepspeed.muon.zero.wrappers.stage12 import with_norms_of_all_stages
from helpers.distributed import run
from helpers.engine_state import differing, snapshot
from helpers.logs import logged
from helpers.models import train_engine
from helpers.pipelines import SHARED, make_pipeline, pipeline_config
from helpers.training import FP32_GRADIENTS, make_engine, with_params

# ---- steps that are skipped -----------------------------------------------------------------------------------


def step_badly(bad_rank: int, **config: Any) -> tuple[list[str], int]:
    """What two steps change in which one rank's gradient is infinite, and how often the log says so."""
    with logged() as said:
        engine = make_engine(make_pipeline("late", 2), pipeline_config(2, **config))
        train_engine(engine, 1)
        before = snapshot(engine)
        hook = next(engine.module.parameters()).register_hook(
            lambda grad: grad * (float("inf") if dist.get_rank() == bad_rank else 1.0)
        )
        for step in (1, 2):
            train_engine(engine, 1, step)
        hook.remove()
        changed = differing(before, snapshot(engine))
        engine.destroy()
    return changed, len([line for line in said if "is not finite" in line])


@pytest.mark.sample(2)
@pytest.mark.parametrize("bad_rank", [0, 3])
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
def test_a_bad_gradient_of_one_stage_skips_the_step_of_all(config: dict[str, Any], lines: int, bad_rank: int) -> None:
    """Also of the first, which has no matrix for Muon. Where DeepSpeed does not say so, rank 0 does, once a step."""
    assert run(step_badly, 4, bad_rank=bad_rank, **config) == [([], lines), ([], 0), ([], 0), ([], 0)]


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
    first, second = run(built, 2, optimizer=with_params(muon_include=["^1\\.table"], muon_exclude=["^3\\."]))
    assert first == ["1.table.weight"]
    assert second == [f"4.{name}.weight" for name in ("qkv", "proj", "up", "down")]


def test_a_pipeline_without_a_matrix_for_muon_is_left_to_adamw() -> None:
    """The first stage of this model never has one; of the second they are frozen, or excluded on purpose."""
    assert run(built, 2, frozen=r"[34]\.") == [[], []]
    assert run(built, 2, optimizer=with_params(muon_exclude=[r"^[34]\."])) == [[], []]


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


@pytest.mark.parametrize("kind", REFUSED)
def test_what_no_stage_can_follow_is_refused_on_all_ranks(kind: str) -> None:
    world, config, name, texts = REFUSED[kind]
    for error, found in run(built, world, **config):
        assert error == name
        assert all(text in found for text in texts), found


def tied_linear() -> list[tuple[str, str]]:
    """Routes of a layer that is an embedding on one stage and linear on the other, and of the last layer's matrices."""
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    from deepspeed.muon.model.routing import route as decide

    specs = [TiedLayerSpec("e", nn.Embedding, 9, 8), LayerSpec(nn.Linear, 8, 8), LayerSpec(nn.Linear, 8, 8)]
    last = TiedLayerSpec("e", nn.Linear, 8, 9, bias=False)
    net = PipelineModule([*specs, last], num_stages=2, partition_method="uniform")
    found = [(spec.name, spec.reason) for spec in decide(net).values() if len(spec.shape) == 2]
    for layers in ([*specs[1:], nn.Tanh()], [nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))]):
        net = PipelineModule(layers, num_stages=1)
        found += [(spec.name, spec.reason) for spec in decide(net).values() if len(spec.shape) == 2]
    return found


def test_the_outer_layers_of_a_pipeline_are_known_by_their_place() -> None:
    """The head is the last layer's only matrix; without names, and whatever follows that has no parameters."""
    first, second = run(tied_linear, 2)
    hidden, head = "hidden matrix of Linear", "output head, the only matrix of the pipeline's last layer"
    alone = [("0.weight", hidden), ("1.weight", head), ("0.0.weight", hidden), ("0.1.weight", hidden)]
    assert first == [("tied_modules.e.weight", "embedding (Embedding)"), ("1.weight", hidden), *alone]
    assert second == [("tied_modules.e.weight", "tied layer of a pipeline"), ("2.weight", hidden), *alone]


# ---- log and methods ------------------------------------------------------------------------------------------


def started(name: str) -> list[str]:
    """What `initialize` logs on this rank."""
    with logged(logging.DEBUG) as lines:
        make_engine(make_pipeline(name, 2), pipeline_config(2)).destroy()
    return lines


def test_each_stage_has_its_lines_of_log() -> None:
    """Of its parameters, and, if it has matrices, of its step."""
    found = run(started, 4, name="late")
    updated, run_as = (
        [[line for line in lines if words in line] for lines in found] for words in ("AdamW updates", "MB per step")
    )
    assert [len(lines) for lines in updated] == [1, 0, 1, 0] and [len(lines) for lines in run_as] == [0, 0, 1, 0]
    assert "stage 1 of 2 of the pipeline: Muon updates 0 matrices" in updated[0][0]
    assert "stage 2 of 2 of the pipeline: Muon updates 12 matrices" in updated[2][0] and "2 ranks" in updated[2][0]
    assert run_as[2][0].startswith("deepspeed-muon: stage 2 of 2 of the pipeline: rank 2 sends ")


# ---- norms ----------------------------------------------------------------------------------------------------


class Wrapper:
    """Stands for a stage with one group of norm 3."""

    device, cpu_offload = torch.device("cpu"), False

    def __init__(self, others: list[float]) -> None:
        self.optimizer = nn.Module()
        self.optimizer.param_groups = [{}]
        self.others = others

    def scaled_global_norm(self) -> Tensor:
        return torch.tensor(3.0)

    def get_grad_norm_direct(self, gradients: list[Tensor], params: list[Tensor]) -> Tensor:
        assert gradients == params == []
        return torch.tensor(self.others.pop(0))


@pytest.mark.parametrize(("others", "norm"), [([4.0], 5.0), ([4.0, 12.0], 13.0), ([-1.0], float("inf")), ([], 3.0)])
def test_norms_of_groups_that_other_stages_have_count(others: list[float], norm: float) -> None:
    wrapper = Wrapper(list(others))
    if others:
        replace(wrapper, "scaled_global_norm", partial(with_norms_of_all_stages, wrapper, len(others)))
    assert float(wrapper.scaled_global_norm()) == norm
    assert wrapper.others == []
