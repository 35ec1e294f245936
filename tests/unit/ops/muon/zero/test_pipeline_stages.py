# SPDX-License-Identifier: Apache-2.0
"""What the stages of a pipeline have to agree on: bad steps, options, methods, checkpoints, refusals."""

import re
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed.muon.seam import replace
from deepspeed.muon.zero.wrappers.stage12 import with_norms_of_all_stages
from helpers.distributed import run
from helpers.logs import logged
from helpers.models import fused_parts
from helpers.oracles import Part, route, train_oracle
from helpers.parity import STEPS
from helpers.pipelines import (
    ADAM,
    PRECISIONS,
    SHARED,
    Whole,
    assert_equal,
    everything,
    make_pipeline,
    pipeline_config,
    shares,
    train_pipeline,
)
from helpers.racing import races
from helpers.training import ORACLE, PARAMS, make_engine


def muon(**params: Any) -> dict[str, Any]:
    return {"type": "Muon", "params": PARAMS | params}


# ---- steps that are skipped -----------------------------------------------------------------------------------


def step_badly(name: str, bad_rank: int, **config: Any) -> tuple[list[str], list[bool], int, int]:
    """Two steps in which one rank's gradient is infinite: what they change, which steps move weights, what is said."""
    with logged() as said:
        engine = make_engine(make_pipeline(name, 2), pipeline_config(2, **config))
        factor = 1.0
        next(engine.module.parameters()).register_hook(lambda grad: grad * factor)
        seen = [everything(engine)]
        for step in range(4):
            factor = float("inf") if step in (1, 2) and dist.get_rank() == bad_rank else 1.0
            engine.train_batch(shares(name, engine, step))
            seen.append(everything(engine))
        changed = [key for key, value in seen[1].items() if not torch.equal(value, seen[3][key])]
        moved = [any(not torch.equal(a[key], b[key]) for key in a) for a, b in pairwise(seen)]
        skipped = engine.skipped_steps
        engine.destroy()
    return changed, moved, skipped, len([line for line in said if "is not finite" in line])


UNCHECKED = {"dtype": "bf16", "bf16": {"enabled": True, "check_grad_overflow": False}}
"""Here DeepSpeed goes on, and the optimizer itself skips each group."""


@pytest.mark.sample(2)
@pytest.mark.parametrize("bad_rank", [0, 3])
@pytest.mark.parametrize("precision", [*PRECISIONS, "unchecked"])
def test_a_bad_gradient_of_one_stage_skips_the_step_of_all(precision: str, bad_rank: int) -> None:
    """Where DeepSpeed does not say so itself, rank 0 does, once for each step."""
    config = PRECISIONS.get(precision, UNCHECKED)
    for name in ("tied", "late"):
        ranks = run(step_badly, 4, name=name, bad_rank=bad_rank, **config)
        assert [(changed, moved) for changed, moved, *_ in ranks] == [([], [True, False, False, True])] * 4
        assert len({skipped for _, _, skipped, _ in ranks}) == 1
        assert [said for *_, said in ranks] == [2 * (precision in ("BF16_Optimizer", "unchecked")), 0, 0, 0]


# ---- what the config asks for ---------------------------------------------------------------------------------


def head_parts(name: str) -> dict[str, list[Part]]:
    """One matrix for each head of the fused queries, keys and values: 6 rows each."""
    named = {key: param for key, param in Whole(name).named_parameters() if "qkv" in key}
    return {key: list(torch.arange(param.numel()).view(param.shape).split(6)) for key, param in named.items()}


def split_parts(name: str) -> dict[str, list[Part]]:
    """The same for one block only, which the second stage has; the other's queries, keys and values are three."""
    heads = {key: parts for key, parts in head_parts(name).items() if key.startswith("4.")}
    return fused_parts(Whole(name)) | heads


BLOCKS = {"per_head_muon": (True, head_parts), "muon_split": ({r"^4\.qkv": [6] * 6}, split_parts)}


@pytest.mark.parametrize("key", BLOCKS)
def test_blocks_of_a_stage_train_as_matrices_of_their_own(key: str) -> None:
    """The first stage has no attention and nothing that is split."""
    value, parts = BLOCKS[key]
    net = Whole("late")
    expected = train_oracle(net, net.batch, STEPS, route(net, ADAM["late"]), ORACLE, parts=parts("late"))
    assert_equal(run(train_pipeline, 4, name="late", optimizer=muon(**{key: value})), expected)


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
    first, second = run(built, 2, optimizer=muon(muon_include=["^1\\.table"], muon_exclude=["^3\\."]))
    assert first == ["1.table.weight"]
    assert second == [f"4.{name}.weight" for name in ("qkv", "proj", "up", "down")]


def test_a_pipeline_without_a_matrix_for_muon_is_left_to_adamw() -> None:
    """The first stage of this model never has one; of the second they are frozen, or excluded on purpose."""
    assert run(built, 2, frozen=r"[34]\.") == [[], []]
    assert run(built, 2, optimizer=muon(muon_exclude=[r"^[34]\."])) == [[], []]


OPTIONS = {
    "muon_exclude": (["nowhere"], "muon_exclude: 'nowhere' matches none of the"),
    "muon_split": ({"^5": [4, 15]}, "muon_split: '^5' has no effect, because what it matches"),
}


@pytest.mark.parametrize("key", OPTIONS)
def test_an_option_that_no_stage_follows_is_refused_on_all_ranks(key: str) -> None:
    value, text = OPTIONS[key]
    for kind, found in run(built, 2, optimizer=muon(**{key: value})):
        assert kind == "MuonConfigError"
        assert f"stage 1: optimizer.params.{text}" in found
        assert "stage 0: optimizer.params" in found


def test_heads_without_attention_are_refused() -> None:
    for kind, found in run(built, 2, name="mlp", optimizer=muon(per_head_muon=True)):
        assert kind == "MuonConfigError" and "no parameter that goes to Muon has the name of an attention" in found


def test_ranks_of_one_stage_that_differ_are_named() -> None:
    for kind, text in run(built, 4, tag="3.up.weight"):
        assert kind == "DisagreementError"
        assert text.startswith("ranks [3] do not send the same parameters to Muon as rank 2")


def test_a_tied_layer_stays_with_adamw() -> None:
    """Its copies are equal only as long as their updates are."""
    for kind, text in run(built, 2, name="tied", optimizer=muon(muon_include=["tied"])):
        assert kind == "ValueError"
        assert text.startswith(
            f"{SHARED}: Muon cannot update it (muon_include 'tied'), because several pipeline stages have copies"
        )


def tied_linear() -> list[tuple[str, str]]:
    """Routes of a layer that is an embedding on one stage and linear on the other, and of the last layer's matrices."""
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    from deepspeed.muon.matrices.routing import route as decide

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


def started(name: str, **config: Any) -> tuple[list[str], list[dict[str, Any]]]:
    """What `initialize` logs on this rank, and the choice of the Muon half."""
    with logged() as lines:
        engine = make_engine(make_pipeline(name, 2), pipeline_config(2, **config))
    choices = [group["ns_choice"] for group in engine.basic_optimizer.param_groups if group["use_muon"]]
    engine.destroy()
    return lines, choices


def test_each_stage_has_its_lines_of_log() -> None:
    """Of its parameters, and, if it has matrices, of its step."""
    found = [lines for lines, _ in run(started, 4, name="late")]
    updated, run_as = (
        [[line for line in lines if words in line] for lines in found] for words in ("AdamW updates", "MB per step")
    )
    assert [len(lines) for lines in updated] == [1, 0, 1, 0] and [len(lines) for lines in run_as] == [0, 0, 1, 0]
    assert "stage 1 of 2 of the pipeline: Muon updates 0 matrices" in updated[0][0]
    assert "stage 2 of 2 of the pipeline: Muon updates 12 matrices" in updated[2][0] and "2 ranks" in updated[2][0]
    assert run_as[2][0].startswith("deepspeed-muon: stage 2 of 2 of the pipeline: rank 2 sends ")


def started_after_a_race(name: str, **config: Any) -> tuple[list[str], list[dict[str, Any]]]:
    with races():
        return started(name, **config)


def test_one_choice_is_made_for_the_shapes_of_all_stages() -> None:
    """Also where one stage has no matrix, and where a method is fixed on the stage that has."""
    for name, shapes in {"late": 2, "mlp": 4}.items():
        for method in ("auto", "gram"):
            ranks = run(started_after_a_race, 2, name=name, optimizer=muon(ns_method=method))
            found = [choice for _, choices in ranks for choice in choices]
            assert all(choice == found[0] for choice in found) and len(found[0]["shapes"]) == shapes


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
