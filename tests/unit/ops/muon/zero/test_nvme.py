# SPDX-License-Identifier: Apache-2.0
"""Optimizer states and parameters on NVMe at stage 3: the same training, what lies where, what it needs."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from deepspeed.muon.zero.refusals import buffers_needed, swap_threshold
from helpers.engine_state import differing, named_states
from helpers.models import train_engine
from helpers.nvme import Wide, files_of, nvme_config, nvme_engine, run, weights_of
from helpers.training import MOMENTA, PARAMS, make_engine, with_params

pytestmark = pytest.mark.time_limit(1200)  # with the time that building async_io may take
ON_CPU = {"device": "cpu"}
SWAPPED: list[dict[str, Any]] = [
    {},
    {"pipelined": True},
    {"params": "cpu"},
    {"params": "nvme", "pipelined": True},
]
MIB = 2**20


def never_called(*_: Any, **__: Any) -> Any:
    raise AssertionError("stock's muon_update was called")


def train_all(cases: list[dict[str, Any]], folder: str, steps: int = 2, **config: Any) -> list[Any]:
    """Losses; model's and master weights and states, of each case."""
    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deepspeed.runtime.zero.muon.original_muon.muon_update", never_called)
        for index, case in enumerate(cases):
            engine = nvme_engine(folder=f"{folder}/{index}", **config, **case)
            losses = train_engine(engine, steps)
            results.append((losses, weights_of(engine) | named_states(engine)))
            engine.destroy()
    return results


CLIPPED = with_params(qk_clip={"tau": 0.02, "logits": "sampled"})
ON_NVME_TOO = [ON_CPU, *SWAPPED, ON_CPU | {"params": "nvme"}]
STAYING = [ON_CPU, {"stays": True}, {"stays": True, "pipelined": True}]
#: Engines that train alike, the first of them without NVMe, and the settings of all.
ALIKE: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "cpu": (ON_NVME_TOO, {"accumulation": 2}),
    "cpu, bf16": (ON_NVME_TOO, {"accumulation": 2, "dtype": "bf16"}),
    # Without clipping: DeepSpeed adds up the norm in another order under offload, to the CPU as well.
    "no offload": ([{"device": "none"}, {}, {"pipelined": True}], {"accumulation": 2, "clip": 0.0}),
    "int8, bf16": (STAYING, {"dtype": "bf16", "optimizer": MOMENTA["int8"], "steps": 3}),
    "bf16": (STAYING, {"optimizer": MOMENTA["bf16"], "steps": 3}),
    "bf16, bf16": (STAYING, {"dtype": "bf16", "optimizer": MOMENTA["bf16"], "steps": 3}),
    "QK-clip, plain": ([ON_CPU, {}], {"optimizer": CLIPPED, "attention": True, "steps": 3}),
    "no gradient, plain": ([ON_CPU, {}], {"unused": True}),
    "int8": (STAYING, {"optimizer": MOMENTA["int8"], "steps": 3}),
    "QK-clip": ([ON_CPU, {"pipelined": True}], {"optimizer": CLIPPED, "attention": True, "steps": 3}),
    "no gradient": ([ON_CPU, {"pipelined": True}], {"unused": True}),
}
OFTEN = ("int8", "QK-clip", "no gradient")


@pytest.mark.parametrize(
    "title", [pytest.param(title, marks=[pytest.mark.full] * (title not in OFTEN)) for title in ALIKE]
)
def test_training_equals_that_in_memory(title: str, tmp_path: Path) -> None:
    """Parameters without a gradient get none of another tensor; a momentum that is rounded stays in memory."""
    cases, settings = ALIKE[title]
    for (losses, wanted), *others in run(train_all, 2, cases=cases, folder=str(tmp_path), **settings):
        assert len(set(losses)) == len(losses)
        for case, (got_losses, got) in zip(cases[1:], others, strict=True):
            assert got_losses == losses, case
            assert differing(got, wanted) == [], case


# ---- what lies where --------------------------------------------------------------------------------------


def sizes_in_memory(engine: Any) -> list[dict[str, int]]:
    """Elements in memory between steps, by sub-group: of the weights, "", and of each state."""
    state = engine.basic_optimizer.state
    flats = engine.optimizer.fp32_partitioned_groups_flat
    return [{"": p.numel()} | {k: v.numel() for k, v in state[p].items() if k != "step"} for p in flats]


def look(cases: list[dict[str, Any]], folder: str) -> list[Any]:
    """What lies in memory and in files at first and after a step."""
    results = []
    for index, case in enumerate(cases):
        engine = nvme_engine(folder=f"{folder}/{index}", **case)
        names = [p.ds_id for p in engine.optimizer.fp32_partitioned_groups_flat]
        moments = []
        for steps in (0, 1):
            train_engine(engine, steps)
            moments.append((sizes_in_memory(engine), files_of(f"{folder}/{index}", dist.get_rank())))
        results.append((names, moments))
        engine.destroy()
    return results


def test_what_lies_in_files(tmp_path: Path) -> None:
    """Sub-groups up, down, the narrow ones; tokens, the biases. Only the momentum stays, where it is asked to."""
    cases = [{"pipelined": False, "stays": False}, {"pipelined": True, "stays": True}]
    for case, (names, moments) in zip(cases, run(look, 2, cases=cases, folder=str(tmp_path))[1], strict=True):
        up, down, _, tokens, _ = names
        momentum = 262_144 if case["stays"] else 0
        files = [up, down, tokens, f"exp_avg-{tokens}", f"exp_avg_sq-{tokens}"]
        files += [] if case["stays"] else [f"momentum_buffer-{up}", f"momentum_buffer-{down}"]
        for sizes, found in moments:
            assert found == dict.fromkeys(files, MIB), case
            assert sizes == [
                {"": 0, "momentum_buffer": momentum},
                {"": 0, "momentum_buffer": momentum},
                {"": 6288, "momentum_buffer": 6288},
                {"": 0, "exp_avg": 0, "exp_avg_sq": 0},
                {"": 786, "exp_avg": 786, "exp_avg_sq": 786},
            ], case


# ---- what it needs of the config and of the machine ----------------------------------------------------------

ALL_MUON = {"type": "Muon", "params": PARAMS | {"muon_include": "tokens"}}
READ, WRITE = {"pipeline_read": True}, {"pipeline_write": True}
#: settings, offload_optimizer, the least buffer_count. The sub-groups are up, down and tokens of Wide, or their halves.
COUNTS: list[tuple[dict[str, Any], dict[str, Any], int]] = [
    ({}, {}, 4),
    ({}, READ, 7),
    ({}, WRITE, 7),
    ({}, READ | WRITE, 10),
    ({"stays": True}, {}, 4),
    ({"stays": True}, READ | WRITE, 8),
    ({"sub_group": 10**9}, READ | WRITE, 7),
    ({"optimizer": ALL_MUON}, {}, 3),
    ({"optimizer": ALL_MUON, "stays": True}, {}, 2),
    ({"optimizer": ALL_MUON}, READ | WRITE, 9),
]


def attempt(folder: str, offload: dict[str, Any], **config: Any) -> str | None:
    """What initialize, or two steps, come to; `None` if they go well."""
    settings = nvme_config(folder, **config)
    settings["zero_optimization"]["offload_optimizer"] |= offload
    try:
        engine = make_engine(Wide(), settings)
    except ValueError as error:
        return str(error)
    try:
        train_engine(engine, 2)
    except AssertionError as error:
        return f"stock: {error}"
    engine.destroy()
    return None


def count(folder: str, offload: dict[str, Any], needed: int, **config: Any) -> list[str | None]:
    """With one buffer less than needed; with as many; and with one less where nobody checks."""
    few, enough = ({**offload, "buffer_count": number} for number in (needed - 1, needed))
    results = [attempt(folder, few, **config), attempt(folder, enough, **config)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deepspeed.muon.zero.patches.check_nvme", lambda *_: None)
        return [*results, attempt(folder, few, **config)]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("settings", "offload", "needed"), COUNTS, ids=str)
def test_the_least_buffer_count_works(
    settings: dict[str, Any], offload: dict[str, Any], needed: int, tmp_path: Path
) -> None:
    few, enough, unchecked = run(count, 1, folder=str(tmp_path), offload=offload, needed=needed, **settings)[0]
    assert f"buffer_count: got {needed - 1}; write {needed} or more" in few and few.count("\n") == 1
    assert enough is None
    assert unchecked is not None and unchecked.startswith("stock: ")


def what_is_wrong(folder: str, patches: dict[str, Any], params: dict[str, Any], **offload: Any) -> str | None:
    """What initialize says with parts of the machine replaced; `patches` holds what each returns."""
    with pytest.MonkeyPatch.context() as patch:
        for target, value in patches.items():
            patch.setattr(target, lambda *_, value=value, **__: value)
        settings = nvme_config(folder)
        settings["zero_optimization"]["offload_optimizer"] |= offload
        if params:
            settings["zero_optimization"]["offload_param"] = {"device": "nvme", "nvme_path": folder} | params
        try:
            make_engine(Wide(), settings).destroy()
        except ValueError as error:
            return str(error)
    return None


def all_that_is_wrong(folder: str) -> dict[str, str | None]:
    return {
        name: what_is_wrong(folder, patches, params, **offload) for name, (patches, params, offload, _) in WRONG.items()
    }


LIBRARY = {"deepspeed.ops.op_builder.AsyncIOBuilder.is_compatible": False}
LIMITED = {"deepspeed.muon.zero.refusals._may_lock": False, "resource.getrlimit": (2**20, 2**20)}
#: what is replaced, offload_param, offload_optimizer, words
WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], list[str]]] = {
    "library": (LIBRARY, {}, {}, ["cannot build async_io here; install libaio", "libaio-dev"]),
    "path": (
        {},
        {},
        {"nvme_path": "/proc/nvme"},
        ["offload_optimizer.nvme_path: no file can be written to /proc/nvme"],
    ),
    "lock": (LIMITED, {}, {}, ["the buffers lock 8,388,608 bytes", "limit of this process is 1,048,576", "ulimit -l"]),
    "size": ({}, {"buffer_size": 524_287}, {}, ["offload_param.buffer_size: got 524287; write 524288 or more"]),
    "several": (LIBRARY | LIMITED, {}, {"buffer_count": 0}, ["libaio", "write 4 or more", "ulimit"]),
}


def test_what_cannot_work_is_said_at_initialize(tmp_path: Path) -> None:
    found = run(all_that_is_wrong, 1, folder=str(tmp_path))[0]
    for name, text in found.items():
        assert text is not None and text.startswith("offload to NVMe cannot work as configured:"), name
        assert [word for word in WRONG[name][3] if word not in text] == []
        assert text.count("\n") == (3 if name == "several" else 1)


def test_blocks_larger_than_a_mebibyte_raise_the_size_of_what_is_swapped() -> None:
    section = SimpleNamespace(pipeline_read=False, pipeline_write=False)
    zero = SimpleNamespace(offload_optimizer=section, save_muon_momentum_buffer_in_memory=False)
    sizes = [({"use_muon": True}, [2**19]), ({"use_muon": False}, [2**18])]
    for block, bytes_, needed in ((2**10, 2**20, 4), (2**20, 2**20, 4), (2**21, 2**21, 3), (2**22, 2**22, 1)):
        config = SimpleNamespace(aio_config={"block_size": block}, zero_config=zero)
        assert swap_threshold(config) == bytes_ and buffers_needed(config, sizes) == needed
