# SPDX-License-Identifier: Apache-2.0
"""AutoEP: the experts of a transformers model, spread over ranks, train as if they were all in one place."""

from typing import Any

from deepspeed.muon import MuonWithAuxAdam
from deepspeed.muon.errors import UnsupportedError
from helpers.distributed import run
from helpers.experts import Mixtral, autoep
from helpers.models import train_engine
from helpers.training import PARAMS, make_engine
from helpers.transformers_models import needs_stacks

pytestmark = needs_stacks  # as AutoEP's presets


def routes(include: list[str] | None = None) -> dict[str, tuple[bool, str, str]]:
    """Where each parameter goes, why, and how it was split."""
    optimizer = {"type": "Muon", "params": PARAMS | ({"muon_exclude": include} if include else {})}
    engine = make_engine(Mixtral(), autoep(2, 2, optimizer=optimizer))
    found = {s.name: (s.use_muon, s.reason, s.split) for s in engine.basic_optimizer.specs.values()}
    engine.destroy()
    return found


def test_the_router_goes_to_adamw_and_experts_to_muon_one_by_one() -> None:
    found = run(routes, 2)[0]
    prefix = "model.layers.1.mlp."
    assert found[f"{prefix}router.gate.weight"] == (False, "MoE router, tied", "")  # stock keeps its old name beside
    for name, size in (("w1", "10 x 12"), ("w2", "12 x 10"), ("w3", "10 x 12")):
        reason = "stack of 2 matrices of GroupedExperts"
        assert found[f"{prefix}experts.{name}"] == (True, reason, f"2 of {size}")


def test_patterns_may_name_parameters_that_stock_has_put_in() -> None:
    found = run(routes, 2, include=[r"experts\.w3$"])[0]
    assert [name for name, (use_muon, *_) in found.items() if "experts" in name and not use_muon] == [
        f"model.layers.{layer}.mlp.experts.w3" for layer in (0, 1)
    ]


def train_with_given(kind: str) -> str | None:
    """Train two steps with an optimizer of the script's; what is refused."""
    net, config = Mixtral(), autoep(2, 2)
    params = config.pop("optimizer")["params"]

    def build(parameters: Any) -> MuonWithAuxAdam:
        return MuonWithAuxAdam(parameters, model=net, **params)

    given = build(net.parameters()) if kind == "built before" else build
    try:
        engine = make_engine(net, config, optimizer=given, model_parameters=list(net.parameters()))
    except UnsupportedError as error:
        return str(error)
    train_engine(engine, 2)
    engine.destroy()
    return None


def test_an_optimizer_of_the_script() -> None:
    assert run(train_with_given, 2, kind="function") == [None, None]
    for text in run(train_with_given, 2, kind="built before"):
        assert text is not None and "DeepSpeed replaced parameters" in text


# ---- beside AutoTP ------------------------------------------------------------------------------------------------
