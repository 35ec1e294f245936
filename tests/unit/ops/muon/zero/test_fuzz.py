# SPDX-License-Identifier: Apache-2.0
"""Random configs: each trains as the oracle does, or is refused in words that name the key, or by stock itself."""

import json
import os
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from helpers.distributed import run
from helpers.fuzz import STOCKS, Case, sample

CONFIGS = int(os.environ.get("FUZZ", "100"))
"""How many, in full runs; `make fuzz N=2000` sets it."""
STEPS = 2
WIDTHS = (6, 9, 7, 5)
#: Stock's own refusals: a pattern for the error, and the configs (and their section `zero`) to which stock may say it.
STOCK_ERRORS: list[tuple[str, Callable[[dict[str, Any], dict[str, Any]], bool]]] = [
    (
        "AssertionError: pre-scale gradients is not yet supported with ZeRO-[123] with reduce scatter enabled",
        lambda config, zero: bool(
            config.get("prescale_gradients") and zero["stage"] > 0 and zero.get("reduce_scatter", True)
        ),
    ),
    (
        "ValidationError: .*compute_grad_norm=false is supported only with ZeRO Stage 1 or 2",
        lambda config, zero: zero.get("compute_grad_norm") is False and zero["stage"] in (0, 3),
    ),
    (
        "ValueError: zero_optimization.compute_grad_norm=false (requires gradient_clipping=0|does not support)",
        lambda config, zero: (
            zero.get("compute_grad_norm") is False
            and bool(
                config["clip"] or zero.get("offload_optimizer", {}).get("device") == "cpu" or "data_types" in config
            )
        ),
    ),
    (
        "AssertionError: Bf16_master_weights_and_grads is only supported with ZeRO Stage 1, 2, or 3",
        lambda config, zero: "bf16" in config and zero["stage"] == 0,
    ),
    (
        "ValueError: gradient_allreduce_op='sum' is not supported with Ze(RO stage 3|nFlow)",
        lambda config, zero: config.get("gradient_allreduce_op") == "sum" and (zero["stage"] == 3 or "zenflow" in zero),
    ),
    (
        "ValidationError: .*Partial offloading only supported for ZeRO Stage 3",
        lambda config, zero: zero.get("offload_optimizer", {}).get("ratio") == 0.5 and zero["stage"] < 3,
    ),
    ("DeepSpeedConfigError: MiCS ZeRO-3 sharding has been removed", lambda config, zero: "mics_shard_size" in zero),
    (
        "NotImplementedError: unsupported mix of model_dtype=torch.b?float16 and grad_accum_dtype=torch.float32",
        lambda config, zero: config["dtype"] != "fp32" and zero["stage"] == 0 and "data_types" in config,
    ),
    (
        "ValidationError: .*(sub_group_size|reduce_bucket_size|overlap_com|stage|offload_)",
        lambda config, zero: any(section.items() <= zero.items() for section in STOCKS),
    ),
]
TRAINS, OURS, BY_STOCK = "trains as the oracle", "refused by us, naming the key", "refused by stock"


# ---- on the ranks -----------------------------------------------------------------------------------------


def attempt(config: dict[str, Any]) -> str:
    """What is wrong with the weights after training, nothing, or the error of `deepspeed.initialize`."""
    import copy

    import torch

    from helpers import fuzz
    from helpers.models import Mlp
    from helpers.training import ds_config, fp32_weights, make_engine, train_through_skips

    section = copy.deepcopy(config)
    optimizer = {"type": section.pop("type", "Muon"), "params": section.pop("params")}
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[config["dtype"]]
    net = Mlp(WIDTHS).to(dtype).float()
    initial = {name: p.detach().clone() for name, p in net.named_parameters()}
    try:
        engine = make_engine(net, ds_config(**section, stage=section["zero"]["stage"], optimizer=optimizer))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    try:
        train_through_skips(engine, STEPS)
        weights, ranks = fp32_weights(engine), engine.world_size
    finally:
        engine.destroy()
    expected = fuzz.train(Mlp(WIDTHS).to(dtype), STEPS, config, ranks)
    found = [fuzz.difference(name, config, initial[name], weights[name], expected[name]) for name in expected]
    return "; ".join(filter(None, found))


def attempt_all(configs: list[dict[str, Any]]) -> list[str]:
    """The results of :func:`attempt`, with the error where training itself fails."""
    import logging
    import traceback
    import warnings

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    results = []
    for config in configs:
        try:
            results.append(attempt(config))
        except Exception:
            results.append("raised while training: " + traceback.format_exc()[-1500:])
    logging.disable(logging.NOTSET)
    return results


# ---- here -------------------------------------------------------------------------------------------------


def outcome(case: Case, text: str) -> str:
    """One of the three outcomes, or what is wrong."""
    if case["wrong"] and re.match("(MuonConfigError|UnsupportedError): ", text):
        if any(name in text for name in case["wrong"]):
            return OURS
    elif not case["wrong"] and not case["stock"] and not text:
        return TRAINS
    config = case["config"]
    if any(re.match(pattern, text, re.DOTALL) and applies(config, config["zero"]) for pattern, applies in STOCK_ERRORS):
        return BY_STOCK
    return f"expected {case['wrong'] or 'training'}, got {text or 'training'}"


def judged(cases: list[Case], world: int, timeout: float) -> list[str]:
    """The outcome of every case on `world` ranks, which must agree."""
    by_rank = run(attempt_all, world, timeout=timeout, configs=[case["config"] for case in cases])
    return [
        outcome(case, next(filter(None, texts), ""))
        for case, texts in zip(cases, zip(*by_rank, strict=True), strict=True)
    ]


def check(cases: list[Case], world: int, timeout: float) -> Counter[str]:
    """Fail with the failing configs as JSON; else the counts by outcome."""
    outcomes = judged(cases, world, timeout)
    failed = [(case, text) for case, text in zip(cases, outcomes, strict=True) if text.startswith("expected")]
    lines = [f"{text}\n  {json.dumps(case['config'])}" for case, text in failed[:20]]
    assert not failed, f"{len(failed)} of {len(cases)} on {world} ranks:\n" + "\n".join(lines)
    return Counter(outcomes)


@pytest.mark.time_limit(1500)
@pytest.mark.parametrize("count", [20, pytest.param(CONFIGS, marks=pytest.mark.full)])
def test_every_config_trains_or_is_refused_in_words_that_help(count: int, record_property: Any) -> None:
    cases = sample(count)
    counts = check(cases, 1, timeout=1400)
    right = [case for case in cases if not case["wrong"] and not case["stock"]]
    check(right[: max(4, count // 20)], 2, timeout=600)
    record_property("summary", f"fuzz, {count} configs: " + ", ".join(f"{n} {o}" for o, n in counts.most_common()))
    assert counts[TRAINS] >= 0.2 * count, counts
    assert count < 100 or counts.keys() == {TRAINS, OURS, BY_STOCK}
