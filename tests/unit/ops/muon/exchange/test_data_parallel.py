# SPDX-License-Identifier: Apache-2.0
"""PyTorch without DeepSpeed's engine: DDP's ranks share the work and get the same bits; FSDP is refused."""

import math
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from deepspeed.muon import MuonWithAuxAdam, UnsupportedError
from deepspeed.muon import step as module
from deepspeed.muon.exchange import plan as planning
from helpers.distributed import Pool, run
from helpers.engine_state import differing
from helpers.models import MODELS, make_batch
from helpers.parity import STEPS
from helpers.training import PARAMS


def build(model: str = "broad", wrap: str = "ddp", **params: Any) -> tuple[nn.Module, MuonWithAuxAdam]:
    net: nn.Module = MODELS[model]()
    net = DistributedDataParallel(net) if wrap != "bare" else net
    net = torch.compile(net, backend="eager") if wrap == "compiled" else net
    return net, MuonWithAuxAdam(net.parameters(), model=net, **PARAMS | params)


def inner(net: nn.Module) -> Any:
    net = getattr(net, "_orig_mod", net)
    return net.module if isinstance(net, DistributedDataParallel) else net


def one_step(net: nn.Module, optimizer: MuonWithAuxAdam, step: int, accumulation: int = 1, factor: float = 1.0) -> None:
    """With gradients that DDP averages at the last micro-step."""
    optimizer.zero_grad()
    for micro in range(accumulation):
        share = make_batch(inner(net), step, micro, dist.get_rank(), dist.get_world_size(), accumulation)
        with nullcontext() if micro == accumulation - 1 else net.no_sync():
            (net(*share) * factor / accumulation).backward()
    optimizer.step()


def held(net: nn.Module, optimizer: MuonWithAuxAdam) -> dict[str, Tensor]:
    """Weights and states of this rank."""
    weights = {name: param.detach().clone() for name, param in inner(net).named_parameters()}
    states = [value for state in optimizer.state.values() for value in state.values()]
    return weights | {f"state {index}": value.clone() for index, value in enumerate(states)}


def trained(share: bool = True, steps: int = STEPS, accumulation: int = 1, **settings: Any) -> dict[str, Any]:
    """What this rank holds after some steps, and how many matrices it has orthogonalized."""
    done, originals = [], (module.orthogonalize,)

    def counted(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        done.append(x.size(0))
        return originals[0](x, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "orthogonalize", counted)
        if not share:
            patch.setattr(planning, "is_worth_sharing", lambda *args: False)
        net, optimizer = build(**settings)
        for step in range(steps):
            one_step(net, optimizer, step, accumulation)
    return {"held": held(net, optimizer), "done": sum(done)}


@pytest.mark.sample(2)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("wrap", ["ddp", "compiled"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_ranks_share_the_work_and_get_the_same_bits(wrap: str, world: int, accumulation: int) -> None:
    shared = run(trained, world, wrap=wrap, accumulation=accumulation)
    repeated = run(trained, world, share=False, wrap=wrap, accumulation=accumulation)
    assert [rank["done"] for rank in repeated] == [5 * STEPS] * world
    assert sum(rank["done"] for rank in shared) == 5 * STEPS
    for rank in shared:
        assert differing(rank["held"], repeated[0]["held"]) == []


def train_through(bad: bool) -> dict[str, Tensor]:
    """Good steps, and between them one whose loss is not a number on one rank."""
    net, optimizer = build()
    one_step(net, optimizer, 0)
    if bad:
        before = held(net, optimizer)
        one_step(net, optimizer, 1, factor=math.nan if dist.get_rank() == 1 else 1.0)
        assert differing(before, held(net, optimizer)) == []
    one_step(net, optimizer, 2)
    return held(net, optimizer)


def test_a_bad_step_leaves_no_trace() -> None:
    for got, expected in zip(run(train_through, 2, bad=True), run(train_through, 2, bad=False), strict=True):
        assert differing(got, expected) == []


def around_a_save(folder: str, normuon: bool, loads: bool) -> dict[str, Tensor]:
    """Save between two steps, or load in another run; one rank writes the file."""
    net, optimizer = build(normuon=normuon)
    for step in (9,) if loads else (0, 1):
        one_step(net, optimizer, step)
    if loads:
        saved = torch.load(f"{folder}/saved.pt")
        inner(net).load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    else:
        with pytest.raises(RuntimeError, match="second moments of") if normuon else nullcontext():
            optimizer.state_dict()  # a part of them
        with optimizer.whole_state():
            saved = {"model": inner(net).state_dict(), "optimizer": optimizer.state_dict()}
        if dist.get_rank() == 0:
            torch.save(saved, f"{folder}/saved.pt")
    one_step(net, optimizer, 2)
    return held(net, optimizer)


@pytest.mark.parametrize("normuon", [pytest.param(False, marks=pytest.mark.full), True])
def test_resume_is_exact(normuon: bool, tmp_path: Path) -> None:
    """NorMuon's moments are with the owners."""
    run_of = {"folder": str(tmp_path), "normuon": normuon}
    pairs = zip(*(run(around_a_save, 2, loads=loads, **run_of) for loads in (False, True)), strict=True)
    assert all(differing(got, expected) == [] for got, expected in pairs)


def disagree() -> str:
    net, optimizer = build(momentum=0.9 if dist.get_rank() else 0.8)
    with pytest.raises(RuntimeError) as error:
        one_step(net, optimizer, 0)
    return str(error.value)


def test_ranks_that_disagree_are_told() -> None:
    assert len(told := set(run(disagree, 2))) == 1 and "in settings, kernels, parameters or" in told.pop()


def load_on_rank_0(settings: dict[str, Any]) -> str:
    """The error of the step after one rank alone has loaded a state, whose run had other settings."""
    net, optimizer = build(**settings)
    one_step(net, optimizer, 0)
    saved = optimizer.state_dict()
    net, optimizer = build()
    for step in range(2):
        one_step(net, optimizer, step)
    if dist.get_rank() == 0:
        optimizer.load_state_dict(saved)
    with pytest.raises(RuntimeError) as error:
        one_step(net, optimizer, 2)
    return str(error.value)


@pytest.mark.parametrize(
    "settings", [{}, {"ns_method": "gram"}, pytest.param({"ns_dtype": "bf16"}, marks=pytest.mark.full)]
)
def test_a_state_that_one_rank_loads_is_noticed(settings: dict[str, Any]) -> None:
    """Also where only the number of steps differs, and after the first step."""
    assert all("loaded state; build it identically" in text for text in run(load_on_rank_0, 2, settings=settings))


def share_in_a_part() -> bool:
    """Ranks 0 and 1 of three train; the other one does nothing."""
    group, shares = dist.new_group([0, 1]), False
    if dist.get_rank() < 2:
        net = DistributedDataParallel(MODELS["broad"](), process_group=group)
        optimizer = MuonWithAuxAdam(net.parameters(), model=net, **PARAMS)
        for _ in range(2):
            net(*make_batch(net.module, 0, 0, dist.get_rank(), 2, 1)).backward()
            optimizer.step()
        shares = any(plan.sent_elements for plan in optimizer.plans)
    dist.barrier()
    return shares


def test_a_part_of_the_world_shares_the_work() -> None:
    """Their process group is DDP's own."""
    assert run(share_in_a_part, 3) == [True, True, False]


def train_with_torch_only() -> bool:
    """As a user's script does, in torch's own process group; return whether the ranks share work and agree."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = DistributedDataParallel(nn.Sequential(*(nn.Linear(320, 320) for _ in range(4))))
    optimizer = MuonWithAuxAdam(net.parameters(), model=net, lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.randn(8, 320)).square().mean().backward()
        optimizer.step()
    sums: list[Any] = [None] * 2
    dist.all_gather_object(sums, sum(param.double().sum().item() for param in net.parameters()))
    dist.destroy_process_group()
    return sums[0] == sums[1] and any(plan.sent_elements for plan in optimizer.plans)


@pytest.mark.full
def test_a_script_needs_nothing_of_deepspeed() -> None:
    with closing(Pool(2, timeout=None)) as pool:
        assert pool.run(train_with_torch_only, {}, timeout=240) == [True, True]  # it may build DeepSpeed's shm op


# ---- FSDP ---------------------------------------------------------------------------------------------------


def refused() -> list[str]:
    """The errors for a model in FSDP's first form, with and without the original parameters, and in its second."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    wrap = partial(FullyShardedDataParallel, device_id=torch.device("cpu"))
    nets = [wrap(MODELS["wide"](), use_orig_params=original) for original in (True, False)]
    fully_shard(second := MODELS["wide"]())
    texts = []
    for net in (*nets, second):
        with pytest.raises(UnsupportedError) as error:
            MuonWithAuxAdam(net.parameters(), model=net, **PARAMS)
        texts.append(str(error.value))
    return texts


def test_fsdp_is_refused_in_words_that_name_stage_3() -> None:
    for texts in run(refused, 2, fresh=True):
        for text, name in zip(texts, ("FullySharded", "FullySharded", "fully_shard"), strict=True):
            assert f"but {name}" in text and '"zero_optimization": {"stage": 3}' in text
