# SPDX-License-Identifier: Apache-2.0
"""A momentum in bf16: its step, its bytes, training against the fp32 oracle, the same bits whatever the sharding."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed.muon import MuonWithAuxAdam
from deepspeed.muon.kernels.rounding import key_of, noise, round_
from helpers.distributed import run
from helpers.engine_state import MUON, local_states, state_sizes
from helpers.models import MODELS, full_weights, train_engine
from helpers.oracles import change_cosine, change_error
from helpers.parity import oracle
from helpers.refusals import NVME, attempt
from helpers.training import BF16_MOMENTUM, BF16_OPTIMIZER, PARAMS, FixedGradients, ds_config, fp32_weights, make_engine

# ---- one step ---------------------------------------------------------------------------------------------


def plain_optimizer(momentum_dtype: str) -> tuple[Any, MuonWithAuxAdam]:
    net = MODELS["mlp"]()
    return net, MuonWithAuxAdam(net.parameters(), model=net, **PARAMS, momentum_dtype=momentum_dtype)


def plain_step(net: Any, optimizer: MuonWithAuxAdam, step: int) -> None:
    optimizer.zero_grad()
    net(*net.batch(step)).backward()
    optimizer.step()


def test_the_bits_are_those_of_name_step_and_element() -> None:
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


def test_plain_pytorch_resumes_exactly_and_casts_once(caplog: pytest.LogCaptureFixture) -> None:
    net, optimizer = plain_optimizer("bf16")
    for step in range(2):
        plain_step(net, optimizer, step)
    saved = copy.deepcopy({"model": net.state_dict(), "optimizer": optimizer.state_dict()})
    moments = [saved["optimizer"]["state"][index]["momentum_buffer"] for index in range(5)]
    assert {moment.dtype for moment in moments} == {torch.bfloat16}
    random = torch.get_rng_state()
    plain_step(net, optimizer, 2)
    assert torch.get_rng_state().equal(random), "torch's generator is the user's"
    again, resumed = plain_optimizer("bf16")
    again.load_state_dict(saved["model"])
    taken = copy.deepcopy(saved["optimizer"])
    resumed.load_state_dict(taken)
    first = resumed.state[resumed.param_groups[0]["params"][0]]["momentum_buffer"]
    assert first.data_ptr() == taken["state"][0]["momentum_buffer"].data_ptr(), "an fp32 copy was made on the way"
    assert "momentum" not in caplog.text
    plain_step(again, resumed, 2)
    assert all(a.equal(b) for a, b in zip(net.parameters(), again.parameters(), strict=True))
    _, wide = plain_optimizer("fp32")
    wide.load_state_dict(saved["optimizer"])
    assert "the checkpoint's momentum is bfloat16 and goes on in float32" in caplog.text
    for index, tensor in enumerate(wide.param_groups[0]["params"]):
        loaded = wide.state[tensor]["momentum_buffer"]
        assert loaded.dtype == torch.float32 and loaded.equal(moments[index].float())


# ---- under ZeRO -------------------------------------------------------------------------------------------


def momenta(engine: Any) -> dict[str, tuple[int, Tensor]]:
    """By name the first element that this rank holds and the momentum from there on.

    Read off the layout, without DeepSpeed's functions, which give fp32.
    """
    held = {}
    for partition in engine.basic_optimizer.partitions:
        for shard in partition.shards:
            start, stop = shard.placement.held(partition.rank, 0, shard.spec.numel)
            if start < stop:
                buffer = engine.basic_optimizer.state[partition.tensors[shard.tensor]]["momentum_buffer"]
                position = shard.placement.position(start)
                held[shard.spec.name] = start, buffer.view(-1)[position : position + stop - start].clone()
    return held


def train_all(cases: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
    """Master weights of the small model after five steps of each case."""
    results = []
    for case in cases:
        engine = make_engine(MODELS["mlp"](), ds_config(**case, optimizer=BF16_MOMENTUM))
        train_engine(engine, 5)
        results.append(fp32_weights(engine))
        assert {e["momentum_buffer"].dtype for e in local_states(engine) if sorted(e) == MUON} == {torch.bfloat16}
        engine.destroy()
    return results


@pytest.mark.parametrize("world", [1, 2, 3])
def test_training_equals_the_oracle(world: int) -> None:
    """The oracle's momentum is fp64. Rounding moves five steps by 4 % of the change at most; bf16 as in parity."""
    cases: list[dict[str, Any]] = [{"stage": stage} for stage in (1, 2, 3)]
    if world == 2:
        cases += [{"stage": 0}, BF16_OPTIMIZER, *({"stage": stage, "dtype": "bf16"} for stage in (0, 1, 2, 3))]
        cases += [{"stage": stage, "offload": True} for stage in (1, 2, 3)]
    references = {dtype: oracle("mlp", 1.0, dtype) for dtype in ("fp32", "bf16")}
    worst = 0.0
    for results in run(train_all, world, cases=cases):
        for case, weights in zip(cases, results, strict=True):
            reference = references[case.get("dtype", "fp32")]
            for key, expected in reference.weights.items():
                initial = reference.initial[key]
                if "dtype" in case and case["dtype"] == "bf16":
                    assert change_cosine(initial, weights[key], expected) >= 0.9, (case, key)
                else:
                    worst = max(worst, change_error(initial, weights[key], expected))
    print(f"world {world}: {worst:.1e}")
    assert worst <= 0.04


def momenta_of_given_gradients(cases: list[dict[str, Any]]) -> list[dict[str, tuple[int, Tensor]]]:
    """After four steps without clipping, whose norm is a sum over ranks."""
    results = []
    for case in cases:
        net = FixedGradients([(24, 40), (33, 65), (24, 40)])
        engine = make_engine(net, ds_config(clip=0.0, optimizer=BF16_MOMENTUM, **case))
        for step in range(4):
            engine.backward(engine(net.gradients(step)))
            engine.step()
        results.append(momenta(engine))
        engine.destroy()
    return results


def test_the_same_gradients_make_the_same_momentum_whatever_the_sharding() -> None:
    """Bit for bit: the random bits of an element are those of its parameter, its index and the step."""
    cases: list[dict[str, Any]] = [{"stage": stage} for stage in (0, 1, 2, 3)]
    cases += [{"stage": 3, "zero": {"sub_group_size": 100}}, {"stage": 2, "zero": {"round_robin_gradients": True}}]
    base = run(momenta_of_given_gradients, 1, cases=cases[:1])[0][0]
    for world in (1, 2, 4):
        for results in run(momenta_of_given_gradients, world, cases=cases):
            for case, got in zip(cases, results, strict=True):
                assert got or world > 1
                for name, (start, values) in got.items():
                    assert values.equal(base[name][1][start : start + len(values)]), (world, case, name)


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.full)])
def test_muon_keeps_two_bytes_per_parameter(world: int) -> None:
    cases = [{"stage": s, "dtype": d, "optimizer": BF16_MOMENTUM} for s in (1, 2, 3) for d in ("fp32", "bf16")]
    for case, *ranks in zip(cases, *run(state_sizes, world, cases=cases), strict=True):
        used, flat, tensors = (sum(column) for column in zip(*ranks, strict=True))
        assert used == 2 * flat + 4 * tensors, case


# ---- states by name ---------------------------------------------------------------------------------------


def set_by_name(cases: list[dict[str, Any]]) -> list[str]:
    """What goes wrong when the momentum is written by name and read back.

    Of an even model: at stage 3 DeepSpeed writes no parameter whose size the ranks do not divide, with any optimizer.
    """
    from deepspeed.utils import safe_get_full_optimizer_state, safe_set_full_optimizer_state

    found = []
    for case in cases:
        engine = make_engine(MODELS["wide"](), ds_config(**case, optimizer=BF16_MOMENTUM))
        train_engine(engine, 1)
        for param, spec in engine.basic_optimizer.specs.items():
            if spec.use_muon:
                value = torch.randn(spec.shape, generator=torch.Generator().manual_seed(spec.numel))
                safe_set_full_optimizer_state(param, value, "momentum_buffer")
                got = safe_get_full_optimizer_state(param, "momentum_buffer")
                if got.dtype != torch.float32 or not got.equal(value.bfloat16().float()):
                    found.append(f"{case} {spec.name} {got.dtype}")
        kept = {e["momentum_buffer"].dtype for e in local_states(engine) if "momentum_buffer" in e}
        found += [] if kept == {torch.bfloat16} else [f"{case} {kept}"]
        weights = full_weights(engine.module)
        train_engine(engine, 1, first_step=1)
        found += [] if all(w.isfinite().all() for w in weights.values()) else [f"{case} not finite"]
        engine.destroy()
    return found


def test_the_momentum_is_read_and_written_by_name() -> None:
    """As fp32; what is written is rounded to nearest."""
    cases: list[dict[str, Any]] = [{"stage": s, "dtype": d} for s in (1, 2, 3) for d in ("fp32", "bf16")]
    cases += [BF16_OPTIMIZER, *({"stage": stage, "offload": True} for stage in (1, 2, 3))]
    assert run(set_by_name, 2, cases=cases) == [[], []]


# ---- refused ----------------------------------------------------------------------------------------------


def refuse_on_nvme() -> list[Any]:
    """With the config's optimizer, and with one that the script has built."""
    import deepspeed

    zero = {"offload_optimizer": NVME}
    net = MODELS["mlp"]()
    own = MuonWithAuxAdam(net.parameters(), model=net, **BF16_MOMENTUM["params"])
    config = ds_config(stage=3, zero=zero)
    del config["optimizer"]
    return [
        attempt(lambda: make_engine(MODELS["mlp"](), ds_config(stage=3, zero=zero, optimizer=BF16_MOMENTUM))),
        attempt(lambda: deepspeed.initialize(model=net, config=config, optimizer=own)[0]),
    ]


def test_refused_on_nvme() -> None:
    for kind, text, _ in run(refuse_on_nvme, 1)[0]:
        assert kind == "UnsupportedError"
        assert (
            'optimizer.params.momentum_dtype: DeepSpeed swaps optimizer states to NVMe in fp32; set it to "fp32"'
            in text
        )
