# SPDX-License-Identifier: Apache-2.0
"""The parameter groups of a saved optimizer: whether they are divided as in this run, and which settings go on."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from deepspeed.muon.log import logger
from deepspeed.muon.math.choice import unknown, unknown_methods
from deepspeed.muon.second_moments import SAVED

Groups = Sequence[Mapping[str, Any]]
#: Keys of a group that a load does not change: its ratio to the schedule, and how ZeRO finds its experts' ranks.
OWN = ("lr_ratio", "name", "moe")
LOAD = 'load it with "checkpoint": {"load_universal": true} in ds_config.json, without a tag'
WEIGHTS_ALONE = (
    "its weights alone with load_module_only=True and load_optimizer_states=False; DeepSpeed converts at stages 1 to 3 "
    "only"
)


def saved_groups(saved: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the parameter groups in a file written by one of DeepSpeed's wrappers or by its converter."""
    inner = saved.get("optimizer_state_dict", saved)
    return inner["param_groups"] if "param_groups" in inner else inner["base_optimizer_state"]["param_groups"]


def kinds(groups: Groups) -> list[bool | None]:
    """Return for each group whether Muon updates it; ``None`` in files of other optimizers."""
    return [group.get("use_muon") for group in groups]


def matrices(optimizer: Any) -> set[str]:
    """Return the names of the parameters that go to Muon."""
    return {spec.name for spec in optimizer.specs.values() if spec.use_muon}


def fused(optimizer: Any) -> list[str]:
    """Return the names of the parameters that ``muon_fused`` cuts."""
    return [spec.name for spec in optimizer.specs.values() if spec.split_by == "muon_fused"]


def blocks(optimizer: Any) -> dict[str, str]:
    """Return for each parameter that is several matrices, by name, a hash of where they lie in it."""
    cut = [spec for spec in optimizer.specs.values() if len(spec.blocks) > 1]
    return {s.name: short_hash(str([(b.offset, b.rows, b.cols, b.bands) for b in s.blocks]), 8) for s in cut}


def short_hash(text: str, digits: int) -> str:
    """Return the first hexadecimal digits of a text's SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:digits]


def muon_facts(optimizer: Any) -> dict[str, str]:
    """Return the parameters that go to Muon, in a pipeline of all stages, by name, and their :func:`blocks`, if any."""
    if optimizer.context.muon_of_all_stages is not None:
        return optimizer.context.muon_of_all_stages
    return dict.fromkeys(sorted(matrices(optimizer)), "") | blocks(optimizer)


def conversion(folder: Path, stages: Collection[int], option: str = "") -> str:
    """Tell how a checkpoint comes to fit another layout. ``stages``: those of the two runs."""
    if 0 in stages:
        return f"load it as it was saved, or {WEIGHTS_ALONE}"
    options = f"{option}--input_folder {folder} --output_folder {folder}_universal"
    return f"convert it with python -m deepspeed.checkpoint.ds_to_universal {options}, then {LOAD}"


def check_groups(optimizer: Any, groups: Groups) -> None:
    """Raise ValueError if :func:`routing_difference` finds one; warn about parameters that this run cuts otherwise."""
    if text := routing_difference(optimizer, groups):
        raise ValueError(text)
    ours = blocks(optimizer)
    stated = [group["blocks"] for group in groups if "blocks" in group]
    # A checkpoint without blocks was saved by a version that did not cut fused weights.
    theirs = stated[0] if stated else {name: ours[name] for name in ours.keys() - set(fused(optimizer))}
    if other := sorted(name for name in matrices(optimizer) if ours.get(name) != theirs.get(name)):
        logger.warning(
            "deepspeed-muon: %d parameters are cut into other matrices than in the run that was saved, first %s; "
            'muon_fused, muon_split and per_head_muon as there ("muon_fused": "whole" if it knew no such key) go on '
            "with the same updates",
            len(other),
            other[0],
        )


def routing_difference(
    optimizer: Any, groups: Groups, folder: Path = Path("CHECKPOINT/TAG"), stages: Collection[int] = ()
) -> str | None:
    """Return a message if saved groups differ in kind, name unknown methods, or give Muon other parameters.

    ``folder`` of the checkpoint and the ``stages`` of both runs decide the cure that the message names.
    """
    saved, current = kinds(groups), kinds(optimizer.param_groups)
    theirs = {name for group in groups for name in group.get("matrices", ())}
    ours, of_all_stages = matrices(optimizer), optimizer.context.muon_of_all_stages
    is_of_all_stages = of_all_stages is not None and theirs == of_all_stages.keys()
    if is_of_all_stages or (saved == current and theirs == ours):
        strange = [text for group in groups for text in unknown_methods(group.get("ns_methods", {}))]
        strange += [text for group in groups if "ns_choice" in group for text in unknown(group["ns_choice"])]
        names = ", ".join(dict.fromkeys(strange))
        return f"it was saved with dtypes or methods that this deepspeed-muon lacks: {names}" if strange else None
    if None in saved:
        cure = conversion(folder, stages, "--inject_missing_state ")
        return f"another optimizer saved it; if that was AdamW, {cure}"
    if True in saved and not theirs:
        convert = f"run ds_muon import --from {folder} --to {folder}_universal, then {LOAD}"
        return f"stock's Muon saved it; {convert if 0 not in stages else 'load ' + WEIGHTS_ALONE}"
    words = {True: "Muon", False: "AdamW"}
    return (
        "it was saved with another division into Muon and AdamW; restore the model, its parameter groups, "
        f"muon_include, muon_exclude and param.use_muon: Muon has {sorted(theirs - ours)[:4]} in the checkpoint only "
        f"and {sorted(ours - theirs)[:4]} here only; the groups are {[words[bool(kind)] for kind in saved]} there and "
        f"{[words[bool(kind)] for kind in current]} here"
    )


def settings_of(current: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the saved settings of a group, which win as with any optimizer of torch; warn where the config differs.

    The warning leaves out learning rates, which a schedule changes. Their ratio is the config's: a schedule is built
    from the config too. What was chosen for this machine is no setting.
    """
    if (ratio := saved.get("lr_ratio", current.get("lr_ratio"))) != current.get("lr_ratio"):
        change = f"lr_ratio = {current['lr_ratio']} from the config; the checkpoint has {ratio}"
        logger.warning("deepspeed-muon: group %s goes on with %s", current.get("name"), change)
    settings = {key: value for key, value in saved.items() if key not in (*OWN, "params", "matrices", "blocks")}
    silent = {"lr", "initial_lr", "ns_choice", "ns_methods", "owner_counts", SAVED}
    if current.get("use_muon"):  # schedulers of torch cycle the betas of every group; Muon's have no effect
        silent.add("betas")
    for key, value in settings.items():
        if key in current and key not in silent and value != current[key]:
            change = f"{key} = {value} from the checkpoint; the config has {current[key]}"
            logger.warning("deepspeed-muon: group %s goes on with %s", current.get("name"), change)
    return {key: value for key, value in current.items() if key != "params"} | settings
