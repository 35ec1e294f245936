# SPDX-License-Identifier: Apache-2.0
"""What a load accepts and refuses: weights alone, a tag, another order or optimizer, damage that one rank sees."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed.muon.math.momentum_storage import QuantizationBlocks
from deepspeed.muon.zero.wrappers.adapter import patched
from helpers.checkpoints import error_of
from helpers.damaged_checkpoints import attempt_all, save_alone, train_undisturbed, with_adamw_for
from helpers.distributed import run
from helpers.engine_state import differing, master_weights, named_states, snapshot
from helpers.models import MODELS, full_weights, halve, train_engine
from helpers.training import BF16_OPTIMIZER, MOMENTA, ds_config, fresh_engine, make_engine
from helpers.universal import ADAMW, convert

CASES: list[dict[str, Any]] = [
    {"stage": 0},
    {"stage": 0, "dtype": "bf16"},
    {"stage": 2},
    {"stage": 3},
    {"stage": 3, "dtype": "bf16"},
    BF16_OPTIMIZER,
]


def on_first_rank(act: Callable[[], Any]) -> None:
    """Call a function on rank 0, while the others wait."""
    dist.barrier()
    if dist.get_rank() == 0:
        act()
    dist.barrier()


def save_two(case: dict[str, Any], folder: str) -> dict[str, Tensor]:
    """The model's weights at the tag `one`; a later tag `two` is the latest."""
    engine = fresh_engine(0, case)
    train_engine(engine, 2)
    engine.save_checkpoint(folder, tag="one")
    weights = full_weights(engine.module)
    train_engine(engine, 2, first_step=2)
    engine.save_checkpoint(folder, tag="two")
    engine.destroy()
    return weights


FLAGS: list[dict[str, bool]] = [
    {"load_module_only": True},
    {"load_module_only": True, "load_optimizer_states": False},
    {"load_optimizer_states": False},
    {"load_lr_scheduler_states": False},
    {"load_optimizer_states": False, "load_lr_scheduler_states": False},
    {"load_module_strict": False},
    {},
]


def load_by_flags(case: dict[str, Any], folder: str) -> list[tuple[str, list[str], float]]:
    """By flags: the error, the names of weights that are not those of the tag `one`, how far a step from there goes."""
    results = []
    wanted = torch.load(f"{folder}/weights.pt")
    for flags in FLAGS:
        engine = fresh_engine(7, case)
        error, changed, moved = error_of(engine.load_checkpoint, folder, tag="one", **flags), [], 0.0
        if not error:
            changed = differing(full_weights(engine.module), wanted)
            train_engine(engine, 1, first_step=2)
            stepped = full_weights(engine.module)
            moved = sum(float((stepped[name] - wanted[name]).float().norm()) ** 2 for name in wanted) ** 0.5
        results.append((error, changed, moved))
        engine.destroy()
    return results


@pytest.mark.sample(2)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("case", [CASES[3], CASES[0], CASES[2], CASES[4], CASES[5], CASES[1]], ids=str)
def test_every_flag_on_other_numbers_of_ranks(case: dict[str, Any], ranks: int, tmp_path: Path) -> None:
    """Weights alone load wherever DeepSpeed can find them; the rest is refused on all ranks alike.

    At stages 0 and 3 DeepSpeed alone loads nothing, the latest tag's weights, or what the next step undoes.
    """
    torch.save(run(save_two, 2, case=case, folder=str(tmp_path))[0], tmp_path / "weights.pt")
    first, *others = run(load_by_flags, ranks, case=case, folder=str(tmp_path))
    assert all(other == first for other in others)
    for flags, (error, changed, moved) in zip(FLAGS, first, strict=True):
        weights_alone = flags.get("load_module_only") or not flags.get("load_optimizer_states", True)
        if case["stage"] == 0 or ranks == 2 or (weights_alone and (case["stage"] < 3 or ranks == 1)):
            assert (error, changed) == ("", []) and 0 < moved < 0.5, flags
        else:
            assert "saved on 2 ranks" in error, flags


def load_by_tag_and_function(folder: str) -> None:
    engine, called = fresh_engine(7, {"stage": 2}), []
    engine.load_checkpoint(folder, tag="one")
    assert engine.global_steps == 2
    engine.module.layers[0].weight.data = torch.zeros(1, 1)
    engine.load_checkpoint(folder, tag="one", load_module_only=True, custom_load_fn=lambda src, dst: called.append(src))
    assert called
    engine.destroy()


def test_a_tag_needs_no_latest_and_a_function_may_change_shapes(tmp_path: Path) -> None:
    run(save_two, 2, case={"stage": 2}, folder=str(tmp_path))
    (tmp_path / "latest").write_text("")
    run(load_by_tag_and_function, 2, folder=str(tmp_path))


# ---- in another order -----------------------------------------------------------------------------------------


#: Saved as, loaded as.
ORDERED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"stage": 1}, {"stage": 2}),
    *((case, case) for case in ({"stage": 1}, *CASES, {"stage": 2, "dtype": "fp16"})),
]


def ordered_engine(case: dict[str, Any], seed: int, order: int = 1) -> Any:
    """An engine whose parameters come in the model's order, or in reverse (-1)."""
    net = halve(MODELS["mlp"](), seed)
    return make_engine(net, ds_config(**case), model_parameters=list(net.parameters())[::order])


def load_in_both_orders(saved: dict[str, Any], loaded: dict[str, Any], folder: str) -> str:
    """Load in reverse order, which changes nothing, and in the saved order; return the error."""
    engine = ordered_engine(saved, 0)
    train_engine(engine, 2)
    engine.save_checkpoint(folder)
    expected = snapshot(engine)
    engine.destroy()
    engine = ordered_engine(loaded, 7, order=-1)
    before = snapshot(engine)
    error = error_of(engine.load_checkpoint, folder)
    assert differing(before, snapshot(engine)) == []
    engine.destroy()
    engine = ordered_engine(loaded, 7)
    engine.load_checkpoint(folder)
    assert differing(expected, snapshot(engine)) == []
    engine.destroy()
    return error


@pytest.mark.sample(3)
@pytest.mark.parametrize(("saved", "loaded"), ORDERED, ids=str)
def test_another_order_is_found(saved: dict[str, Any], loaded: dict[str, Any], tmp_path: Path) -> None:
    first, second = run(load_in_both_orders, 2, saved=saved, loaded=loaded, folder=str(tmp_path))
    assert first == second and "the order of the parameters differs" in first


# ---- of another optimizer, or another routing -------------------------------------------------------------------


def save_foreign(cases: list[dict[str, Any]], folder: str) -> list[dict[str, Tensor]]:
    """Checkpoints of stock's AdamW, and of another routing; return AdamW's weights by case."""
    import deepspeed

    found = []
    for index, case in enumerate(cases):
        for tag, net, more in (("adamw", MODELS["mlp"](), {"optimizer": ADAMW}), ("routing", with_adamw_for(0), {})):
            engine = deepspeed.initialize(model=net, config=ds_config(**case, **more))[0]
            train_engine(engine, 1)
            engine.save_checkpoint(f"{folder}/{index}", tag=tag)
            found += [full_weights(engine.module)] * (tag == "adamw")
            engine.destroy()
    return found


def load_foreign(
    cases: list[dict[str, Any]], folder: str
) -> list[tuple[list[str], dict[str, Tensor], dict[str, Tensor]]]:
    """By case: the errors of loading both into an engine with a routing of its own, AdamW's weights, and a step on."""
    found = []
    for index, case in enumerate(cases):
        engine = make_engine(halve(with_adamw_for(1), 7), ds_config(**case))
        errors = [error_of(engine.load_checkpoint, f"{folder}/{index}", tag) for tag in ("adamw", "routing")]
        engine.load_checkpoint(f"{folder}/{index}", "adamw", load_module_only=True, load_optimizer_states=False)
        assert engine.global_steps == 0
        loaded = full_weights(engine.module)
        train_engine(engine, 1)
        found.append((errors, loaded, full_weights(engine.module)))
        engine.destroy()
    return found


def test_of_stocks_adamw_only_the_weights_load_and_of_another_routing_nothing(tmp_path: Path) -> None:
    cases = [CASES[0], CASES[1], CASES[5], {"stage": 3, "offload": True}]  # test_damaged_checkpoints has other errors
    saved = run(save_foreign, 2, cases=cases, folder=str(tmp_path))[0]
    for found in run(load_foreign, 2, cases=cases, folder=str(tmp_path)):
        for case, weights, ((adamw, routing), loaded, stepped) in zip(cases, saved, found, strict=True):
            assert "another optimizer saved this checkpoint; if that was AdamW, " in adamw
            assert ("convert it with python -m deepspeed.checkpoint.ds_to_universal" in adamw) == (case["stage"] > 0)
            assert case["stage"] or "or only its weights, with load_module_only=True and load_optimizer_s" in adamw
            assert "['layers.1.weight'] only in the checkpoint and ['layers.0.weight'] only in this run" in routing
            assert differing(loaded, weights) == []
            assert 0 < max(float((stepped[name] - loaded[name]).abs().max()) for name in loaded) < 0.05


# ---- a universal checkpoint, damaged for one rank ----------------------------------------------------------


def save_with_a_rate_of_numpys(folder: str) -> dict[str, Tensor]:
    engine = fresh_engine(0, {"stage": 2})
    train_engine(engine, 1)
    engine.basic_optimizer.param_groups[0]["lr"] = numpy.float64(0.01)
    engine.save_checkpoint(folder, tag="saved")
    found = master_weights(engine) | named_states(engine)
    engine.destroy()
    return found


def load_damaged_and_whole(folder: str) -> tuple[dict[str, Tensor], float]:
    """Load damaged files, which is refused and changes nothing; return what the whole checkpoint gives, and a rate."""
    file = Path(folder, "universal", "zero", "layers.3.weight", "exp_avg.pt")
    whole = file.read_bytes()
    damages: list[Callable[[], Any]] = [
        lambda: file.write_bytes(whole[:-200]),
        lambda: torch.save({"param": torch.zeros(1000)}, file),
        file.unlink,
    ]
    engine = fresh_engine(7, {"stage": 3}, checkpoint={"load_universal": True})
    train_engine(engine, 1)
    before = snapshot(engine)
    for damage in damages:
        on_first_rank(damage)
        assert "layers.3.weight/exp_avg.pt" in error_of(engine.load_checkpoint, folder, tag="universal")
        assert differing(before, snapshot(engine)) == []
        on_first_rank(lambda: file.write_bytes(whole))
    engine.load_checkpoint(folder, tag="universal", load_optimizer_states=False)
    engine.load_checkpoint(folder, tag="universal")
    found = master_weights(engine) | named_states(engine)
    engine.destroy()
    return found, engine.basic_optimizer.param_groups[0]["lr"]


def test_a_damaged_universal_checkpoint_is_refused_on_all_ranks(tmp_path: Path) -> None:
    """Whole, it loads exactly: a rate of numpy's too, and without a file `latest`."""
    saved = run(save_with_a_rate_of_numpys, 2, folder=str(tmp_path))[0]
    convert(tmp_path)
    (tmp_path / "latest").unlink()
    for loaded, rate in run(load_damaged_and_whole, 2, folder=str(tmp_path)):
        assert differing(loaded, saved) == [] and rate == 0.01


# ---- loads map files, read the model's file once, and keep nothing in a mapped file ------------------------------

MAPPED: list[dict[str, Any]] = [
    {"stage": 1},
    {"stage": 2, "dtype": "bf16"},
    {"stage": 2, "offload": True},
    {"stage": 3},
    BF16_OPTIMIZER,
    *({"stage": stage, "optimizer": MOMENTA["int8"]} for stage in (2, 3)),
]


def mapped_file(tensor: Tensor) -> str:
    """Return the name of the checkpoint file that a tensor's memory maps, or nothing."""
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, name = line.split()
        start, end = (int(bound, 16) for bound in span.split("-"))
        if address and start <= address < end:
            return Path(name).name if name.endswith(".pt") else ""
    return ""


def load_each(cases: list[dict[str, Any]], folder: str) -> None:
    for index, case in enumerate(cases):
        engine = fresh_engine(0, case)
        train_engine(engine, 1)
        engine.save_checkpoint(f"{folder}/{index}")
        read, rounded = [], []

        def load(original: Any, file: Any, *args: Any, read: list = read, **options: Any) -> Any:
            read += [] if options.get("mmap") else [Path(file).name]
            return original(file, *args, **options)

        def write(original: Any, *args: Any, rounded: list = rounded) -> None:
            rounded.append(mapped_file(args[-1]))
            original(*args)

        with patched(torch, load=load), patched(QuantizationBlocks, write=write):
            engine.load_checkpoint(f"{folder}/{index}")
        optimizer = engine.basic_optimizer
        tensors = [tensor for partition in optimizer.all_partitions for tensor in partition.tensors]
        tensors += [value for state in optimizer.state.values() for value in state.values()]
        engine.destroy()
        assert len(read) == 1 and read[0].endswith("model_states.pt"), (case, read)
        assert len(tensors) > 4 and not any(map(mapped_file, tensors)), case
        assert bool(rounded) == ("optimizer" in case), case
        assert all(name.endswith("optim_states.pt") for name in rounded), (case, rounded)


def test_loads_map_and_keep_nothing_mapped(tmp_path: Path) -> None:
    """A momentum in int8 is rounded from the mapped file."""
    run(load_each, 2, cases=MAPPED, folder=str(tmp_path))


# ---- damage ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [3, *(pytest.param(stage, marks=pytest.mark.full) for stage in (1, 2))])
def test_damaged_checkpoints(stage: int, tmp_path: Path) -> None:
    run(save_alone, 1, stage=stage, folder=str(tmp_path))
    ranks = run(attempt_all, 2, timeout=240, stage=stage, folder=str(tmp_path))
    assert [one[:2] for one in ranks[0]] == [one[:2] for one in ranks[1]], "the ranks raise different errors"
    assert len(ranks[0]) >= 17
    for title, message, *_ in ranks[0]:
        start = r"the checkpoint checkpoints(/two|/three)? cannot be loaded, and nothing was changed: "
        assert re.match(start, message), (title, message)
        assert len(message) < 700, (title, message)
    undisturbed = run(train_undisturbed, 2, stage=stage, steps=len(ranks[0]))
    for results, losses in zip(ranks, undisturbed, strict=True):
        assert [(title, changed) for title, _, changed, _ in results if changed] == []
        assert [loss for *_, loss in results] == losses
