# SPDX-License-Identifier: Apache-2.0
"""What offload to NVMe needs of a config and of the machine, said before anything is allocated."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deepspeed.muon.zero.nvme import buffers_needed, threshold
from helpers.models import train_engine
from helpers.nvme import Wide, nvme_config, run
from helpers.training import PARAMS, make_engine

pytestmark = pytest.mark.time_limit(1200)
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

ALWAYS = (0, 3, 5, 7)
"""Those that are not left to the full suite."""


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
        patch.setattr("deepspeed.muon.zero.hooks.check_nvme", lambda *_: None)
        return [*results, attempt(folder, few, **config)]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("settings", "offload", "needed"),
    [pytest.param(*case, marks=[pytest.mark.full] * (index not in ALWAYS)) for index, case in enumerate(COUNTS)],
    ids=str,
)
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


LIBRARY = {"deepspeed.ops.op_builder.AsyncIOBuilder.is_compatible": False}
LIMITED = {"deepspeed.muon.zero.nvme._may_lock": False, "resource.getrlimit": (2**20, 2**20)}
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


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_work_is_said_at_initialize(name: str, tmp_path: Path) -> None:
    patches, params, offload, words = WRONG[name]
    text = run(what_is_wrong, 1, folder=str(tmp_path), patches=patches, params=params, **offload)[0]
    assert text is not None and text.startswith("offload to NVMe cannot work as configured:")
    assert [word for word in words if word not in text] == []
    assert text.count("\n") == (3 if name == "several" else 1)


def test_blocks_larger_than_a_mebibyte_raise_the_size_of_what_is_swapped() -> None:
    section = SimpleNamespace(pipeline_read=False, pipeline_write=False)
    zero = SimpleNamespace(offload_optimizer=section, save_muon_momentum_buffer_in_memory=False)
    sizes = [({"use_muon": True}, [2**19]), ({"use_muon": False}, [2**18])]
    for block, bytes_, needed in ((2**10, 2**20, 4), (2**20, 2**20, 4), (2**21, 2**21, 3), (2**22, 2**22, 1)):
        config = SimpleNamespace(aio_config={"block_size": block}, zero_config=zero)
        assert threshold(config) == bytes_ and buffers_needed(config, sizes) == needed
