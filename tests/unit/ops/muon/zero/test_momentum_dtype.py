# SPDX-License-Identifier: Apache-2.0
"""A momentum in bf16 or int8, and masters in bf16: a step, bytes, what sharding changes, small updates."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed.muon import MuonWithAuxAdam
from deepspeed.muon.kernels.rounding import BLOCK, block_count, encode, key_of, noise, round_
from helpers.distributed import run
from helpers.engine_state import INT8, flat_tensors, kept_dtypes, local_states, named_states
from helpers.models import MODELS, full_weights, train_engine
from helpers.refusals import NVME, attempt
from helpers.training import (
    BF16_MASTERS,
    BF16_OPTIMIZER,
    MOMENTA,
    PARAMS,
    FixedGradients,
    ds_config,
    make_engine,
    train_on_gradients,
    with_params,
)

ROUNDED = ["bf16", "int8"]
KEPT = {"bf16": torch.bfloat16, "int8": torch.int8}

# ---- one step ---------------------------------------------------------------------------------------------


def plain_optimizer(momentum_dtype: str) -> tuple[Any, MuonWithAuxAdam]:
    net = MODELS["mlp"]()
    return net, MuonWithAuxAdam(net.parameters(), model=net, **PARAMS, momentum_dtype=momentum_dtype)


def plain_step(net: Any, optimizer: MuonWithAuxAdam, step: int) -> None:
    optimizer.zero_grad()
    net(*net.batch(step)).backward()
    optimizer.step()


def test_the_bits_of_bf16_are_those_of_name_step_and_element() -> None:
    net, optimizer = plain_optimizer("bf16")
    for step in (1, 2, 3):
        state = {p: optimizer.state[p]["momentum_buffer"].clone() for p in net.parameters() if p.ndim == 2 and step > 1}
        plain_step(net, optimizer, step)
        for name, param in net.named_parameters():
            if param.ndim == 2:
                before = state.get(param, torch.zeros_like(param)).view(-1)
                wide = before.float().lerp(param.grad.view(-1), 1 - PARAMS["momentum"])
                bits, spare = torch.empty(2, param.numel(), dtype=torch.int32)
                expected = torch.empty_like(wide, dtype=torch.bfloat16)
                round_(expected, wide, noise(bits, spare, key_of(name, step), 0), spare)
                assert optimizer.state[param]["momentum_buffer"].view(-1).equal(expected), (step, name)


def test_the_bits_of_int8_are_those_of_name_step_and_element() -> None:
    net, optimizer = plain_optimizer("int8")
    plain_step(net, optimizer, 1)
    for name, param in net.named_parameters():
        if param.ndim == 2:
            state = optimizer.state[param]
            assert sorted(state) == INT8 and state["momentum_codes"].shape == param.shape
            wide, numel = torch.zeros(block_count(param.numel()) * BLOCK), param.numel()
            wide[:numel] = (1 - PARAMS["momentum"]) * param.grad.view(-1)
            bits, spare = torch.empty(2, wide.numel(), dtype=torch.int32)
            uniform = (noise(bits, spare, key_of(name, 1), 0) | 1) / 2**16
            codes, absmax = torch.empty(numel, dtype=torch.int8), torch.empty(block_count(numel))
            encode(wide, codes, absmax, uniform)
            assert state["momentum_codes"].view(-1).equal(codes) and state["momentum_absmax"].equal(absmax), name


@pytest.mark.parametrize("cut", [{"sizes": [50, 30]}, {"sizes": [70, 90], "axis": 1}], ids=["rows", "columns"])
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_the_momentum_in_int8_of_a_matrix_does_not_depend_on_its_neighbours(kernels: str, cut: dict[str, Any]) -> None:
    """Each piece has blocks of its own, so another matrix's huge gradient in one parameter costs it no precision."""
    found = []
    for factor in (1.0, 1000.0):
        net = FixedGradients([(80, 160)])
        options = {"ns_dtype": "fp32", "kernels": kernels, "momentum_dtype": "int8", "muon_split": {"layers": cut}}
        optimizer = MuonWithAuxAdam(net.parameters(), model=net, lr=0.1, **options)
        size, axis = cut["sizes"][0], cut.get("axis", 0)
        for step in range(3):
            optimizer.zero_grad()
            net(net.gradients(step)).backward()
            net.layers[0].weight.grad.narrow(axis, size, net.layers[0].weight.size(axis) - size).mul_(factor)
            optimizer.step()
        weight = net.layers[0].weight
        found.append((optimizer.read_state(weight, "momentum_buffer").view(80, 160), weight.detach()))
    for one, other in zip(*found, strict=True):
        assert one.narrow(axis, 0, size).equal(other.narrow(axis, 0, size)) and not one.equal(other)


@pytest.mark.parametrize("momentum_dtype", ROUNDED)
def test_plain_pytorch_resumes_exactly_and_casts_once(momentum_dtype: str, caplog: pytest.LogCaptureFixture) -> None:
    net, optimizer = plain_optimizer(momentum_dtype)
    for step in range(2):
        plain_step(net, optimizer, step)
    saved = copy.deepcopy({"model": net.state_dict(), "optimizer": optimizer.state_dict()})
    moments = [saved["optimizer"]["state"][index]["momentum_buffer"] for index in range(5)]
    assert {moment.dtype for moment in moments} == {torch.bfloat16 if momentum_dtype == "bf16" else torch.float32}
    random = torch.get_rng_state()
    plain_step(net, optimizer, 2)
    assert torch.get_rng_state().equal(random), "torch's generator is the user's"
    again, resumed = plain_optimizer(momentum_dtype)
    again.load_state_dict(saved["model"])
    taken = copy.deepcopy(saved["optimizer"])
    resumed.load_state_dict(taken)
    if momentum_dtype == "bf16":
        first = resumed.state[resumed.param_groups[0]["params"][0]]["momentum_buffer"]
        assert first.data_ptr() == taken["state"][0]["momentum_buffer"].data_ptr(), "an fp32 copy was made on the way"
    assert "momentum" not in caplog.text
    plain_step(again, resumed, 2)
    assert all(a.equal(b) for a, b in zip(net.parameters(), again.parameters(), strict=True))
    _, wide = plain_optimizer("fp32")
    wide.load_state_dict(saved["optimizer"])
    assert (
        f"the checkpoint's momentum is {KEPT[momentum_dtype]}; converted to float32".replace("torch.", "")
        in caplog.text
    )
    assert not any("momentum_dtype" in group for group in wide.param_groups)
    for index, tensor in enumerate(wide.param_groups[0]["params"]):
        loaded = wide.state[tensor]["momentum_buffer"]
        assert loaded.dtype == torch.float32 and loaded.equal(moments[index].float())


# ---- under ZeRO -------------------------------------------------------------------------------------------


FIXED = [(24, 40), (33, 65), (24, 40)]


def momenta(cases: list[dict[str, Any]], momentum_dtype: str) -> list[dict[str, Tensor]]:
    """The momenta after four steps on fixed gradients, without clipping, whose norm is a sum over ranks."""
    results = []
    for case in cases:
        net = FixedGradients(FIXED)
        engine = make_engine(net, ds_config(clip=0.0, optimizer=MOMENTA[momentum_dtype], **case))
        for step in range(4):
            engine.backward(engine(net.gradients(step)))
            engine.step()
        results.append(named_states(engine))
        engine.destroy()
    return results


@pytest.mark.parametrize("worlds", [(2,), pytest.param((1, 4), marks=pytest.mark.full)])
def test_sharding_changes_a_momentum_in_int8_by_less_than_its_rounding(worlds: tuple[int, ...]) -> None:
    """The magnitudes of blocks follow the shards.

    What a step loses is at most a unit of the codes, of which the next one keeps 0.9. The units of all blocks are at
    most that of the largest gradient, which averages do not exceed.
    """
    cases: list[dict[str, Any]] = [{"stage": stage} for stage in (0, 1, 2, 3)]
    cases += [{"stage": 3, "zero": {"sub_group_size": 100}}, {"stage": 2, "zero": {"round_robin_gradients": True}}]
    base = run(momenta, 1, cases=cases[:1], momentum_dtype="fp32")[0][0]
    net = FixedGradients(FIXED)
    largest = max(float(gradient.abs().max()) for step in range(4) for gradient in net.gradients(step))
    found = [got for world in worlds for got in run(momenta, world, cases=cases, momentum_dtype="int8")[0]]
    units = [float((got[name] - base[name]).abs().max()) / largest * 127 for got in found for name in base]
    assert 0.1 < max(units) <= 1 + 0.9 + 0.9**2 + 0.9**3


# ---- states by name ---------------------------------------------------------------------------------------


def set_by_name(cases: list[dict[str, Any]], momentum_dtype: str) -> list[str]:
    """What goes wrong when the momentum is written by name and read back.

    Of an even model: at stage 3 DeepSpeed writes no parameter whose size the ranks do not divide, with any optimizer.
    """
    from deepspeed.utils import safe_get_full_optimizer_state, safe_set_full_optimizer_state

    found = []
    for case in cases:
        engine = make_engine(MODELS["wide"](), ds_config(**case, optimizer=MOMENTA[momentum_dtype]))
        train_engine(engine, 1)
        for param, spec in engine.basic_optimizer.specs.items():
            if spec.use_muon:
                value = torch.randn(spec.shape, generator=torch.Generator().manual_seed(spec.numel))
                safe_set_full_optimizer_state(param, value, "momentum_buffer")
                got = safe_get_full_optimizer_state(param, "momentum_buffer")
                if momentum_dtype == "bf16":
                    is_right = got.equal(value.bfloat16().float())
                else:  # half a unit away at most, and again as it is now
                    is_right = float((got - value).abs().max()) <= 0.501 / 127 * float(value.abs().max())
                    safe_set_full_optimizer_state(param, got, "momentum_buffer")
                    is_right &= got.equal(safe_get_full_optimizer_state(param, "momentum_buffer"))
                if got.dtype != torch.float32 or not is_right:
                    found.append(f"{case} {spec.name} {got.dtype}")
            else:
                safe_set_full_optimizer_state(param, torch.full(spec.shape, 0.5), "exp_avg_sq")
                if not safe_get_full_optimizer_state(param, "exp_avg_sq").eq(0.5).all():
                    found.append(f"{case} {spec.name}")
        kept = kept_dtypes(local_states(engine))
        found += [] if kept == {KEPT[momentum_dtype]} else [f"{case} {kept}"]
        weights = full_weights(engine.module)
        train_engine(engine, 1, first_step=1)
        found += [] if all(w.isfinite().all() for w in weights.values()) else [f"{case} not finite"]
        engine.destroy()
    return found


@pytest.mark.parametrize("momentum_dtype", ROUNDED)
def test_the_momentum_is_read_and_written_by_name(momentum_dtype: str) -> None:
    """As fp32; what is written is rounded to nearest."""
    cases: list[dict[str, Any]] = [{"stage": 0}, {"stage": 0, "dtype": "bf16"}, {"stage": 2}, {"stage": 3}]
    cases += [BF16_OPTIMIZER, {"stage": 3, "offload": True}]
    assert run(set_by_name, 2, cases=cases, momentum_dtype=momentum_dtype) == [[], []]


# ---- refused ----------------------------------------------------------------------------------------------


def refuse_on_nvme() -> list[Any]:
    """With the config's optimizer, and with one that the script has built, for each dtype."""
    import deepspeed

    zero, found = {"offload_optimizer": NVME}, []
    for optimizer in (MOMENTA[momentum_dtype] for momentum_dtype in ROUNDED):
        net = MODELS["mlp"]()
        config = ds_config(stage=3, zero=zero, optimizer=optimizer)
        own = MuonWithAuxAdam(net.parameters(), model=net, **optimizer["params"])
        without = {key: value for key, value in config.items() if key != "optimizer"}
        given = {"model": net, "config": without, "optimizer": own}
        found += [
            attempt(partial(make_engine, MODELS["mlp"](), config)),
            attempt(lambda given=given: deepspeed.initialize(**given)[0]),
        ]
    return found


def test_refused_on_nvme_unless_it_stays_in_memory() -> None:
    for kind, text, _ in run(refuse_on_nvme, 1)[0]:
        assert kind == "UnsupportedError" and "optimizer.params.momentum_dtype" in text
        assert "save_muon_momentum_buffer_in_memory" in text


def test_blocks_of_one_parameter_are_rounded_each_by_its_own_numbers() -> None:
    """Equal gradients in two blocks: equal draws would make the same errors in both."""
    net = nn.Sequential(nn.Linear(64, 8, bias=False))
    optimizer = MuonWithAuxAdam(
        net.parameters(), model=net, lr=0.1, momentum_dtype="bf16", muon_split={"0.weight": [4, 4]}
    )
    half = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    net[0].weight.grad = torch.cat([half, half])
    optimizer.step()
    first, second = optimizer.state[net[0].weight]["momentum_buffer"].float().view(2, 4, 64)
    assert torch.isclose(first, second, rtol=2**-7, atol=0).all()
    assert 0.1 < (first == second).float().mean() < 0.9


# ---- masters in bf16 ----------------------------------------------------------------------------------------


def dtypes_of_a_step() -> set[torch.dtype]:
    """Of the flat tensors and their states, after a step at each stage; the count of steps apart."""
    found = set()
    for stage in (1, 2, 3):
        engine = make_engine(MODELS["mlp"](), ds_config(stage=stage, **BF16_MASTERS))
        train_engine(engine, 1)
        tensors = flat_tensors(engine)
        found |= {tensor.dtype for tensor in tensors}
        found |= {v.dtype for tensor in tensors for v in engine.basic_optimizer.state[tensor].values() if v.ndim}
        engine.destroy()
    return found


def test_nothing_is_kept_in_fp32() -> None:
    assert run(dtypes_of_a_step, 2)[0] == {torch.bfloat16}


@pytest.mark.parametrize("half", ["muon", "adamw"])
def test_updates_below_half_a_unit_are_not_lost(half: str) -> None:
    """To nearest, hardly a weight would change: an update is some 2^-13 of a weight. In all they are right to some per
    cent.
    """
    params = with_params(
        lr=2e-3, adam_lr=1e-4, weight_decay=0.0, muon_exclude="layers" if half == "adamw" else [], ns_dtype="fp32"
    )
    job: dict[str, Any] = {"shapes": [(256, 240)], "steps": 4, "stage": 2, "clip": 0.0, "optimizer": params}
    (weight,) = FixedGradients(job["shapes"]).parameters()
    first = weight.detach().bfloat16().float() - weight.detach()  # an engine's weights are rounded at its start
    got, expected = (
        next(iter(run(train_on_gradients, 1, **job, **dtypes)[0].values())) - first
        for dtypes in (BF16_MASTERS, {"dtype": "bf16"})
    )
    share = float((got.double() * expected.double()).sum() / expected.double().square().sum())
    assert share == pytest.approx(1.0, abs=0.1)
    assert 0.0 < float((got != 0).float().mean()) < 0.5, "the updates are not small"
