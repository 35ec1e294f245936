# SPDX-License-Identifier: Apache-2.0
"""The table of settings: what is trained, in which cases, and what the oracle must know. A feature adds a row.

The modules in contracts/ run over it: training equals the oracle, a resume is exact, a bad step leaves no trace, what
is switched off does not change, and a universal checkpoint continues elsewhere.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

import pytest

from helpers import ways
from helpers.attention import clip_heads, some_tau
from helpers.models import GLOBAL_BATCH, Absent
from helpers.oracles import OracleResult, route, train_oracle
from helpers.parity import AUTOCAST, CELLS, FP16_AUTOCAST, HALVES, STEPS
from helpers.rules import RULES
from helpers.tensor_parallel import SPLIT as SPLIT_SHARDS
from helpers.training import BF16_MASTERS, BF16_OPTIMIZER, FP32_GRADIENTS, ORACLE, with_params
from helpers.ways import Case, Parts, Way

CONTRACTS = ("oracle", "resume", "bad step", "frozen", "universal")
EVERY = {"oracle": 1, "resume": 5, "bad step": 5, "frozen": 8, "universal": 8}
"""By default one of so many rows runs under a contract; full runs take all rows."""


@dataclass(frozen=True)
class Setting:
    """A row of the table.

    Args:
        way: how a rank trains.
        cases: what is trained, with `keys` of optimizer.params; some run by default, all in full runs.
        params: optimizer.params beside the usual ones.
        oracle: settings of the oracle that differ from the usual ones.
        bounds: largest and mean error of a parameter after training in fp32, relative to its change.
        without: contract -> why it is not run.
        moves: where a universal checkpoint is loaded, if not at another stage on 2 or 3 ranks.
        quick: how many cases run by default under each contract.
        near: other rows compare the same path with the oracle by default, so this one does only in full runs.
    """

    way: Way
    cases: list[Case]
    params: dict[str, Any] = field(default_factory=dict)
    oracle: dict[str, Any] = field(default_factory=dict)
    bounds: tuple[float, float] = (1e-3, 1e-3)
    without: dict[str, str] = field(default_factory=dict)
    moves: Case = field(default_factory=dict)
    quick: int = 1
    near: bool = False

    def case(self, index: int) -> Case:
        """Return a case in full: on 2 ranks and clipped at 1 unless it says otherwise, with its section `optimizer`."""
        case = {"world": 2, "clip": 1.0} | self.cases[index]
        return case | {"optimizer": with_params(**self.params | case.pop("keys", {}))}

    def elsewhere(self, case: Case) -> Case:
        """Return where a universal checkpoint of a case is loaded: at another stage, and on other ranks."""
        is_bound = any(key in str(case) for key in ("stages", "gradient_allreduce_op", "compute_grad_norm"))
        stage = {} if is_bound or "stage" not in case else {"stage": {1: 2, 2: 3, 3: 1}[case["stage"]]}
        return case | {"world": {1: 2, 2: 3, 3: 2, 4: 2}[case["world"]]} | stage | self.moves

    def reference(self, case: Case, parts: Parts | None = None, **more: Any) -> OracleResult:
        """Train the oracle in fp64, from weights in the dtype of the case, by its own `parts` or others."""
        net = self.way.whole(case).to(HALVES[case.get("dtype", "fp32")])
        config = replace(ORACLE, clip=case["clip"], gradient_factor=self.way.factor(case), **self.oracle)
        parts, special = self.way.parts(case) if parts is None else parts, self.way.special(case, config)
        routing = route(net, self.way.to_adam(case)) | dict.fromkeys(parts, "muon")
        return train_oracle(net, net.batch, STEPS, routing, config, special=special, parts=parts, **more)


def grid(stages: tuple[int, ...], worlds: tuple[int, ...] = (2,), **more: Any) -> list[Case]:
    """Return a case for each stage and number of ranks."""
    return [{"stage": stage, "world": world, **more} for world in worlds for stage in stages]


FACTORS: dict[str, tuple[Any, ...]] = {
    "stage": (0, 1, 2, 3),
    "world": (1, 2, 3, 4),
    "model": ("wide", "mlp", "gpt", "few"),
    "accumulation": (1, 4),
    "clip": (0.0, 1.0, 0.01),
    "dtype": ("fp32", "bf16", "fp16"),
    "offload": (False, True),
}


def all_pairs() -> list[Case]:
    """Return a deterministic greedy selection of cases that covers every pair of values of every two factors."""
    cases = [dict(zip(FACTORS, values, strict=True)) for values in itertools.product(*FACTORS.values())]
    cases = [case for case in cases if case["stage"] or not case["offload"]]  # offload needs ZeRO
    pairs_of = [{(a, case[a], b, case[b]) for a, b in itertools.combinations(FACTORS, 2)} for case in cases]
    missing, chosen = set().union(*pairs_of), []
    while missing:
        best = max(range(len(cases)), key=lambda index: len(pairs_of[index] & missing))
        missing -= pairs_of[best]
        chosen.append(cases[best])
    return chosen


EPS = 0.05
"""Of AdamW: an epsilon of the size of gradients, so that a loss scale or a count of ranks in them shows."""


def with_clips(clip: float, cases: Iterable[Case]) -> list[Case]:
    """Return the cases without clipping, and clipped at a norm that only some steps exceed."""
    return [case | {"clip": limit} for case in cases for limit in (0.0, clip)]


def precisions(*precisions: str) -> Iterator[Case]:
    """Yield the cells of docs/evidence/support.md's table of stages, precisions and offload, in these precisions."""
    autocast = {"autocast": AUTOCAST, "fp16 autocast": FP16_AUTOCAST}
    for stage, precision, offload in (cell for cell in CELLS if cell[1] in precisions):
        case = {"stage": stage, "model": "wide", "offload": offload != "none"}
        case |= {"zero": {"offload_param": {"device": "cpu"}}} if offload == "both" else {}
        yield case | autocast.get(precision, {"dtype": precision})


ZERO_SETTINGS: list[Case] = [
    {"stage": 2, "zero": {"round_robin_gradients": True}},
    {"stage": 1, "zero": {"round_robin_gradients": True}, "dtype": "bf16"},
    {"stage": 1, "zero": {"reduce_scatter": False}},
    {"stage": 2, "zero": {"overlap_comm": True, "contiguous_gradients": False}},
    {"stage": 3, "zero": {"sub_group_size": 100}},
    {"stage": 3, "zero": {"overlap_comm": True, "offload_param": {"device": "cpu"}}},
    {"stage": 3, "zero": {"stage3_param_persistence_threshold": 0}},
]
WITHOUT_NORMS: list[Case] = [
    {"stage": stage, "clip": 0.0, "zero": {"compute_grad_norm": False, **zero}, **more}
    for stage, zero in ((1, {}), (2, {}), (2, {"contiguous_gradients": False}))
    for more in (
        {},
        {"accumulation": 2},
        {"dtype": "fp16"},
        {"dtype": "bf16"},
        {"dtype": "bf16", "bf16": {"enabled": True, "check_grad_overflow": False}},
    )
]
UNCHECKED: list[Case] = [
    {"stage": stage, "dtype": "bf16", "bf16": {"enabled": True, "check_grad_overflow": False}} for stage in (1, 2, 3)
]
SUMMED: list[Case] = [
    *grid((0, 1, 2), gradient_allreduce_op="sum", accumulation=2),
    {"stage": 2, "offload": True, "gradient_allreduce_op": "sum"},
    {"stage": 0, "dtype": "bf16", "gradient_allreduce_op": "sum"},
    BF16_OPTIMIZER | {"gradient_allreduce_op": "sum"},
]
OFFLOADED = [{"stage": stage, "offload": stage > 0, "accumulation": 2} for stage in (0, 1, 2, 3)]
"""With fused projections, each stage; under ZeRO the optimizer is on the CPU."""
HPZ = {"stage": 3, "world": 4, "zero": {"zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 0}}
MANY_RANKS: list[Case] = [case | {"world": world} for world in (2, 1, 3) for case in OFFLOADED]

DYNAMIC = {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 8, "hysteresis": 1}}
OVERFLOWING: Case = {
    "dtype": "fp16",
    "fp16": {"enabled": True, "initial_scale_power": 24, "loss_scale_window": 2, "hysteresis": 2},
}
"""The loss scale is too large for the first steps and grows again after others."""
WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.02, "warmup_num_steps": 8}}
SPLIT_ABSENT = {"muon_split": Absent.SPLIT}

STATEFUL: list[Case] = [
    *grid((0, 1, 2, 3), (2, 1, 3)),
    *OFFLOADED,
    *grid((0, 1, 2, 3), dtype="bf16"),
    BF16_OPTIMIZER,
    *ZERO_SETTINGS,
    *SUMMED[:3],
]
"""Where optimizer state lies in different ways."""

OPENRLHF: Case = {
    "dtype": "bf16",
    "fp16": {"enabled": False},
    "zero": {
        **dict.fromkeys(("sub_group_size", "stage3_param_persistence_threshold", "reduce_bucket_size"), "auto"),
        "offload_param": {"device": "none"},
        "offload_optimizer": {"device": "none", "pin_memory": True},
        "zero_hpz_partition_size": 1,
    },
    "data_types": {"grad_accum_dtype": None},
    "checkpoint": {"load_universal": False},
    "compile": {"deepcompile": False},
    "tensor_parallel": {"autotp_size": 1},
    "train_batch_size": GLOBAL_BATCH,
}
"""What OpenRLHF's DeepspeedStrategy hands to DeepSpeed for ``--optim muon``; the tool itself needs a GPU."""
IDLE: list[Case] = [
    *({"stage": stage, **OPENRLHF} for stage in (3, 2)),
    {"stage": 2, "zero": {"parameter_alignment": True}},
    {"stage": 1, "prescale_gradients": True, "gradient_predivide_factor": 2.0},
    {"stage": 3, "communication_data_type": "fp32", "zero": {"use_all_reduce_for_fetch_params": True}},
    {"stage": 2, "zero": {"allgather_partitions": False, "use_multi_rank_bucket_allreduce": False}},
    {"stage": 2, "zero_force_ds_cpu_optimizer": True, "offload": True},
    {"stage": 2, "managed_gradient_accumulation": False},
    {"stage": 2, "zero": {"offload_optimizer": {"device": "none", "ratio": 1.0}}},
    {"stage": 2, "hybrid_engine": {"enabled": False}, "compile": {"deepcompile": False}},
    *({"stage": stage, "zero": {"reduce_scatter": False, "contiguous_gradients": False}} for stage in (1, 2, 3)),
]
"""What is not refused, although it has no effect or changes only how DeepSpeed communicates."""

HALF = [
    {"stage": stage, "dtype": dtype} for stage in (0, 1, 2, 3) for dtype in ("bf16", "fp16") if stage or dtype == "bf16"
]
RECOMPUTED = {"pipeline": {"activation_checkpoint_interval": 1, "use_reentrant": False}}
CLIPPED = {"frozen": "the oracle's QK-clip acts on frozen projections too"}
SCALED = {"bad step": "the dynamic loss scale remembers a bad step; test_gradient_scale.py has that"}
GROWN = dict.fromkeys(("oracle", "frozen"), "at stages 1 to 3 DeepSpeed divides by a loss scale that has just grown")
NO_FILES = dict.fromkeys(("resume", "frozen", "universal"), "DeepSpeed cannot load its own checkpoint, with AdamW too")
ONE_STAGE = {"universal": "the converter keeps the second moments of one stage; another test reads the warning"}
NOT_CONVERTED = {"universal": "DeepSpeed's converter does not know deepspeed.moe layers"}
AUTOEP_MOVES = {"universal": "the row AutoEP has it; another test reads the warning about second moments"}
MARKED = {"universal": "DeepSpeed's converter does not know Megatron's marks"}
STAGES_DIFFER = {"universal": "at stage 3 DeepSpeed takes the mean over a sequence's ranks, elsewhere the sum"}
NEOX = {"universal": "the converter refuses copies that differ in the last bit, as those of GPT-NeoX do"}

AUTOTP, MPU = ways.TensorParallel(), ways.Megatron()
SETTINGS: dict[str, Setting] = {
    "ZeRO": Setting(Way(), all_pairs(), quick=4),
    "ZeRO on 1 to 4 ranks": Setting(
        Way(), [case | {"world": world, "accumulation": 4} for world in (1, 2, 3, 4) for case in OFFLOADED], near=True
    ),
    "precision and offload": Setting(Way(), list(precisions("fp32", "bf16", "fp16", "autocast")), quick=2),
    "fp16 autocast": Setting(
        Way(), with_clips(8.0, precisions("fp16 autocast")), {"eps": EPS}, {"eps": EPS}, without=SCALED
    ),
    "fp16 at stage 0": Setting(
        Way(),
        with_clips(8.0, [{"stage": 0, "dtype": "fp16", **scale} for scale in ({}, DYNAMIC)]),
        {"eps": EPS},
        {"eps": EPS},
        without=SCALED,
    ),
    **{
        f"bf16 on the wire, Newton-Schulz in {dtype}": Setting(
            Way(),
            grid((3, 0, 1, 2), model="narrow"),
            {"ns_dtype": dtype, "wire_dtype": "bf16"},
            bounds=(bound, bound),
            near=dtype == "fp16",
        )
        for dtype, bound in (("bf16", 0.045), ("fp16", 0.022), ("fp32", 0.022))
    },
    "BF16_Optimizer": Setting(Way(), [BF16_OPTIMIZER, BF16_OPTIMIZER | {"world": 3, "clip": 0.0}]),
    "bf16 with fp32 gradients": Setting(Way(), grid((2, 3), (3,), dtype="bf16", **FP32_GRADIENTS)),
    "masters in bf16": Setting(
        Way(),
        [
            *grid((1, 2, 3), (1, 2, 3), **BF16_MASTERS),
            {"stage": 1, "accumulation": 4, "zero": {"round_robin_gradients": True}, **BF16_MASTERS},
            {"stage": 2, "zero": {"overlap_comm": True}, "keys": {"momentum_dtype": "int8"}, **BF16_MASTERS},
            {"stage": 2, "gradient_allreduce_op": "sum", **BF16_MASTERS},
            {"stage": 3, "accumulation": 4, "zero": {"sub_group_size": 100}, **BF16_MASTERS},
            {"stage": 3, "zero_init": True, **BF16_MASTERS},
        ],
        moves={"zero_init": False},
    ),
    "ZeRO's settings": Setting(Way(), [case | {"world": 3} for case in ZERO_SETTINGS], quick=2),
    "hpZ": Setting(Way(), [HPZ]),
    "zero.Init": Setting(
        Way(),
        [{"stage": 3, "model": "gpt", "zero_init": True, "offload": offload} for offload in (False, True)],
        moves={"zero_init": False},
    ),
    "without norms": Setting(Way(), WITHOUT_NORMS),
    "bf16 unchecked": Setting(Way(), UNCHECKED),
    "summed gradients": Setting(
        Way(),
        with_clips(30.0, [case | {"world": 3} for case in SUMMED]),
        {"eps": EPS},
        {"eps": EPS},
        moves={"world": 3},
    ),
    "activation checkpointing, compile": Setting(
        ways.AgainOrCompiled(),
        [
            {"stage": stage, "how": how}
            for how in ("DeepSpeed", "torch", "partitioned", "compile")
            for stage in (1, 2, 3)
        ],
        quick=2,
        moves={"how": "torch"},
    ),
    "matrices without gradient": Setting(
        ways.Gone(),
        [
            *grid((0, 1, 2, 3)),
            *OFFLOADED,
            *grid((0, 1, 2, 3), accumulation=2),
            *({"stage": stage, "offload": True} for stage in (2, 3)),
            {"stage": 3, "zero": {"sub_group_size": 1000}},
            {"stage": 2, "zero": {"round_robin_gradients": True}},
            {"stage": 2, "offload": True, "accumulation": 2, "zero": {"round_robin_gradients": True}},
            *grid((0, 3), dtype="bf16"),
            *grid((2, 3), dtype="bf16", accumulation=2, offload=True),
            BF16_OPTIMIZER,
            BF16_OPTIMIZER | {"accumulation": 2},
            {"stage": 2, "keys": {"kernels": "torch"}},
            *grid((1, 3), (4,)),
        ],
        SPLIT_ABSENT,
        quick=2,
    ),
    **{
        f"matrices without gradient, {name}": Setting(
            ways.Gone(), grid((2, 3)), params | SPLIT_ABSENT, oracle, (bound, bound), near=name == "bf16"
        )
        for name, (params, oracle, bound) in {
            "int8": ({"momentum_dtype": "int8"}, {}, 0.1),
            "bf16": ({"momentum_dtype": "bf16"}, {}, 0.03),
            "normuon": ({"normuon": True}, RULES["normuon"][1], 1e-3),
        }.items()
    },
    "matrices without gradient on a rank": Setting(
        ways.Gone(),
        [{"micros": 2, **case} for case in (*grid((0,)), *grid((0,), dtype="bf16"), BF16_OPTIMIZER)],
        SPLIT_ABSENT,
        without={"universal": "DeepSpeed's stages 1 to 3 refuse unlike gradients of ranks"},
    ),
    "tied, frozen, unused": Setting(
        Way(),
        [{"stage": stage, "model": model} for stage in (1, 2, 3) for model in ("frozen", "unused", "tied", "gpt_tied")],
        quick=2,
        without={"frozen": "the row ZeRO has it"},
    ),
    "user's groups": Setting(ways.UserGroups(), grid((0, 1, 2, 3), (2, 1, 3))),
    **{
        f"momentum in {dtype}": Setting(Way(), STATEFUL, {"momentum_dtype": dtype}, bounds=bounds)
        for dtype, bounds in (("bf16", (0.04, 0.02)), ("int8", (0.25, 0.08)))
    },
    **{
        f"momentum in {dtype}, fused projections": Setting(
            Way(), [case | {"model": "gpt"} for case in OFFLOADED], {"momentum_dtype": dtype}, bounds=bounds, near=True
        )
        for dtype, bounds in (("bf16", (0.1, 0.02)), ("int8", (0.3, 0.1)))
    },
    **{
        name: Setting(
            Way(),
            [case | {"model": "gpt"} for case in MANY_RANKS],
            params,
            oracle,
            near=name in ("normuon, slow", "muon_eq, columns", "muon_eq and normuon"),
        )
        for name, (params, oracle) in RULES.items()
    },
    **{
        f"QK-clip, alpha {alpha}": Setting(
            Way(),
            [case | {"model": "gpt"} for case in MANY_RANKS],
            {"qk_clip": {"tau": some_tau(), "alpha": alpha}},
            {"observe": clip_heads(some_tau(), alpha)},
            without=CLIPPED,
            near=alpha == 0.2,
        )
        for alpha in (0.5, 0.2)
    },
    "QK-clip of sampled logits": Setting(
        Way(),
        grid((1, 3, 2, 0), model="gpt"),
        {"qk_clip": {"tau": some_tau(), "logits": "sampled"}},
        without=CLIPPED | {"oracle": "the oracle looks at all logits"},
    ),
    "split by the config": Setting(
        ways.Split(),
        [*grid((0, 1, 2, 3), (2, 1, 3)), *OFFLOADED[1:], *grid((0, 1, 2, 3), **AUTOCAST), HPZ],
        ways.Split.PARAMS,
        quick=2,
    ),
    "heads": Setting(ways.Heads(), grid((0, 1, 2, 3), (2, 1, 3), model="gpt"), {"per_head_muon": True}),
    "fused projections": Setting(ways.Layouts(), grid((0, 1, 2, 3), (2, 1, 3), model="layouts")),
    **{
        f"fused projections, {rule}": Setting(
            ways.Layouts(), grid((2, 3, 0, 1), model="layouts"), *RULES[rule], near=rule != "normuon"
        )
        for rule in ("normuon", "muon_eq, rows", "muon_plus")
    },
    "fused projections as one matrix": Setting(
        ways.Layouts(), grid((1, 2, 3, 0), model="layouts"), {"muon_fused": "whole"}
    ),
    "heads of latent attention": Setting(
        ways.Layouts(), grid((1, 2, 3), (2, 1, 3), model="deepseek_v3"), {"per_head_muon": True}
    ),
    "low-rank factors": Setting(
        ways.Layouts(),
        [
            case | {"keys": {"muon_lora": lora}}
            for case in grid((1, 2, 3), (2, 1, 3), model="adapters")
            for lora in ("B", "both")
        ],
    ),
    "QK-clip in half precision": Setting(
        Way(),
        [{"model": "gpt", **case} for case in (BF16_OPTIMIZER, *HALF)],
        {"qk_clip": {"tau": some_tau()}},
        {"observe": clip_heads(some_tau())},
        without=CLIPPED,
    ),
    "pipeline, QK-clip": Setting(
        ways.Pipeline(),
        [
            {"model": model, "world": 4, **config}
            for config in ({}, RECOMPUTED, {"dtype": "bf16"}, {"dtype": "bf16", **FP32_GRADIENTS})
            for model in ("tied", "late")
        ],
        {"qk_clip": {"tau": 0.4}},
        {"observe": clip_heads(0.4)},
        without=CLIPPED,
        moves={"stages": 1},
    ),
    "AutoTP": Setting(
        AUTOTP,
        [
            *grid((0, 1, 2, 3), (2, 4), model="llama"),
            {"stage": 2, "world": 4, "model": "gated"},
            {"stage": 3, "world": 4, "model": "llama", "offload": True},
        ],
        moves={"tp": 1},
    ),
    "AutoTP on more ranks than heads": Setting(
        AUTOTP,
        grid((2, 0), (4,), model="llama", tp=4),
        without={"universal": "the converter refuses a rank without elements of a parameter"},
    ),
    "AutoTP, heads": Setting(
        AUTOTP, grid((0, 3, 2), (2, 4), model="llama"), {"per_head_muon": True}, moves={"world": 4}
    ),
    "AutoTP, fused": Setting(
        AUTOTP,
        [
            {"stage": stage, "world": world, "model": model, "keys": {"muon_split": SPLIT_SHARDS[model]}}
            for model, stage, world in (
                ("neox", 1, 2),
                ("neox", 3, 4),
                ("gated", 0, 4),
                ("gated", 2, 2),
                ("gated", 3, 4),
            )
        ],
        without=NEOX,
    ),
    "AutoTP, shards": Setting(
        AUTOTP,
        [{"stage": stage, "world": world, "model": "llama"} for stage, world in ((2, 2), (0, 4), (3, 4))],
        {"tp_mode": "shard"},
        moves={"world": 4},
    ),
    "AutoTP, normuon": Setting(AUTOTP, grid((2, 0, 1, 3), model="llama"), *RULES["normuon"], moves={"world": 4}),
    "AutoTP, normuon of shards": Setting(
        AUTOTP,
        grid((2, 0, 1, 3), model="llama"),
        {"normuon": True, "tp_mode": "shard"},
        RULES["normuon"][1],
        moves={"world": 4},
        without={"universal": "the converter keeps one rank's second moments; another test reads the warning"},
        near=True,
    ),
    "AutoTP in bf16": Setting(
        AUTOTP,
        [
            {"stage": 2, "world": 4, "model": "llama", "dtype": "bf16", "keys": {"momentum_dtype": "bf16"}},
            {"stage": 3, "world": 4, "model": "llama", "dtype": "bf16", "offload": True},
            {"stage": 3, "world": 4, "model": "llama", "dtype": "bf16", "keys": {"momentum_dtype": "int8"}},
        ],
        moves={"world": 2},
    ),
    "mpu": Setting(
        MPU,
        [
            *grid((3, 0, 1, 2), (2, 4)),
            *grid((0, 1, 2, 3), (4,), first="data"),
            *({"stages": 2, "world": world} for world in (4, 8)),
            {"stages": 1, "world": 4},
        ],
        without=MARKED,
    ),
    **{
        f"mpu, {name}": Setting(
            MPU, [*grid((2, 3, 0, 1), (2, 4)), {"stages": 2, "world": 4}], params, without=MARKED, near=True
        )
        for name, params in (("heads", {"per_head_muon": True}), ("shards", {"tp_mode": "shard"}))
    },
    "mpu, normuon": Setting(
        MPU, [{"stages": 2, "world": 4}, *grid((0, 1, 2, 3), (4,))], *RULES["normuon"], without=MARKED
    ),
    "mpu in bf16": Setting(
        MPU,
        [
            {"world": 4, "dtype": "bf16", **case}
            for case in (
                {"stage": 2, "keys": {"momentum_dtype": "bf16"}},
                {"stage": 3, "offload": True},
                {"stage": 1, "keys": {"momentum_dtype": "int8"}},
                {"stage": 1, **FP32_GRADIENTS},
                {"stage": 0},
                {"stages": 2},
                {"stages": 2, "offload": True},
                {"stages": 2, **FP32_GRADIENTS},
            )
        ],
        without=MARKED,
        near=True,
    ),
    "pipeline": Setting(
        ways.Pipeline(),
        [{"model": model, "world": world} for model in ("tied", "late", "untied", "mlp") for world in (4, 2)],
        moves={"stages": 1},
    ),
    "pipeline of four stages": Setting(
        ways.Pipeline(),
        [{"model": "tied", "world": 4, "stages": 4}],
        without={"universal": "the converter needs as many layers with files as stages"},
        near=True,
    ),
    "pipeline of four stages, no layer twice": Setting(
        ways.Pipeline(),
        [{"model": "mlp", "world": 4, "stages": 4}],
        without={"frozen": "DeepSpeed has no backward of a stage whose parameters are all frozen"},
        moves={"stages": 2},
    ),
    "pipeline, normuon": Setting(
        ways.Pipeline(),
        [{"model": model, "world": 4} for model in ("tied", "late")],
        *RULES["normuon"],
        without=ONE_STAGE,
        near=True,
    ),
    "pipeline in bf16 without ZeRO": Setting(
        ways.Pipeline(),
        [{"model": model, "world": 4, "dtype": "bf16", "stage": 0} for model in ("tied", "late")],
        without=NO_FILES,
    ),
    "mpu and pipeline in bf16 without ZeRO": Setting(
        MPU, [{"world": 4, "dtype": "bf16", "stages": 2, "stage": 0}], without=NO_FILES, near=True
    ),
    "pipeline under fp16 autocast": Setting(
        ways.Pipeline(),
        [{"model": model, "world": 4, **FP16_AUTOCAST} for model in ("tied", "late")],
        moves={"stages": 1},
        without=SCALED,
    ),
    "pipeline's precision and settings": Setting(
        ways.Pipeline(),
        [
            {"model": model, "world": 4, **config}
            for model in ("tied", "late")
            for config in (
                {"dtype": "bf16"},
                {"dtype": "bf16", **FP32_GRADIENTS},
                {"stage": 0},
                {"dtype": "fp16"},
                {"dtype": "fp16", "stage": 0},
                {"offload": True},
                {"zero": {"round_robin_gradients": True, "contiguous_gradients": False}},
                {"clip": 0.01},
                RECOMPUTED,
                AUTOCAST,
                UNCHECKED[0],
            )
        ],
        moves={"stages": 1, "stage": 1},
    ),
    "experts": Setting(
        ways.Experts(),
        [
            *grid((1, 2), (2, 4)),
            *grid((0,), (4, 2), clip=0.0),  # there DeepSpeed clips by the mean of the ranks' norms
            {"stage": 1, "world": 4, "offload": True, "accumulation": 2},
            {"stage": 2, "world": 4, "offload": True},
            {"stage": 1, "world": 4, "zero": {"round_robin_gradients": True}},
            {"stage": 0, "world": 4, "clip": 0.0, "width": 96},  # ranks that have the same experts share the work
            *({"stage": 2, "world": 4, "how": how} for how in ("unnamed groups", "client", "stock's groups")),
        ],
        without=NOT_CONVERTED,
    ),
    "experts in bf16": Setting(
        ways.Experts(),
        [
            *grid((0, 1, 2), (4,), dtype="bf16", clip=0.0),
            {"stage": 1, "world": 4, "clip": 0.0, "dtype": "bf16", **FP32_GRADIENTS},
        ],
        without=NOT_CONVERTED,
    ),
    "experts, normuon": Setting(ways.Experts(), grid((2, 1), (4,)), *RULES["normuon"], without=NOT_CONVERTED),
    "experts without tokens": Setting(ways.WithoutTokens(), grid((1, 2), (2, 4)), without=NOT_CONVERTED),
    "AutoEP": Setting(
        ways.AutoEp(),
        [{"stage": stage, "world": world, "clip": 1.0 if stage else 0.0} for world in (2, 4) for stage in (2, 3, 0, 1)],
        moves={"world": 4, "ep": 4},
    ),
    "experts with an mpu and in pipelines": Setting(
        ways.ExpertsBeside(),
        [
            {"stages": 2, "world": 4},
            *grid((2, 1), (4,), size=2),
            *grid((0,), (4,), size=2, clip=0.0),
            *grid((1, 2), (4,), size=2, offload=True),
            {"stages": 2, "size": 2, "world": 8},
        ],
        without=NOT_CONVERTED,
    ),
    "AutoEP, an expert on each rank": Setting(
        ways.AutoEp(),
        [{"stage": stage, "world": 4, "experts": 2, "clip": 1.0 if stage else 0.0} for stage in (2, 3, 0, 1)],
        moves={"world": 2},
        near=True,
    ),
    "AutoEP, normuon": Setting(
        ways.AutoEp(), grid((3, 2, 1), (4,)), *RULES["normuon"], without=AUTOEP_MOVES, near=True
    ),
    "AutoEP with AutoTP": Setting(
        ways.AutoEp(),
        [
            {"stage": stage, "world": 4, "tp": 2, "clip": 1.0 if stage else 0.0, "keys": {"tp_mode": mode}}
            for stage in (1, 0, 2, 3)
            for mode in ("whole", "shard")
        ],
        without=AUTOEP_MOVES,
    ),
    "NVMe": Setting(
        ways.Nvme(),
        [
            {"pipelined": True},
            {},
            {"params": "nvme", "pipelined": True},
            {"dtype": "bf16"},
            {"params": "nvme", "pipelined": True, "dtype": "bf16"},
            *({"stays": True, "pipelined": is_pipelined} for is_pipelined in (False, True)),
            {"device": "cpu"},
        ],
    ),
    "an optimizer of the script": Setting(
        ways.ByScript(), [*OFFLOADED, *grid((1, 2, 3)), {"stage": 0, "dtype": "bf16"}]
    ),
    "pipeline, heads and splits": Setting(
        ways.Pipeline(),
        [
            {"model": "late", "world": 4, "keys": keys}
            for keys in ({"per_head_muon": True}, {"muon_split": {r"^4\.qkv": [6] * 6}})
        ],
        moves={"stages": 1},
    ),
    "Ulysses": Setting(
        ways.Ulysses(),
        [
            {"stage": stage, "world": world, "clip": 4.7 if stage < 3 else 2.35, **more}
            for more in ({}, {"keys": {"per_head_muon": True}}, {"dtype": "bf16"})
            for world in (2, 4)
            for stage in (3, 0, 2, 1)
        ],
        without=STAGES_DIFFER,
    ),
    "ALST": Setting(ways.Alst(), grid((2, 3)), without=STAGES_DIFFER),
    "dynamic loss scale and schedule": Setting(
        Way(),
        [{"stage": stage, "scheduler": WARMUP, **OVERFLOWING} for stage in (1, 2, 3, 0)],
        without=SCALED | GROWN,
    ),
    "hybrid engine": Setting(
        ways.Hybrid(),
        [
            *({"stage": stage, "model": model} for model in ("qwen", "opt") for stage in (0, 1, 2, 3)),
            {"stage": 2, "model": "opt", "dtype": "bf16"},
        ],
    ),
    "settings that are not refused": Setting(
        Way(),
        IDLE,
        quick=2,
        without=dict.fromkeys(("resume", "frozen", "universal"), "the settings are about the way of gradients only"),
    ),
    "NVMe, momentum in memory": Setting(
        ways.Nvme(),
        [{"stays": True, "keys": {"momentum_dtype": dtype}} for dtype in ("int8", "bf16")],
        without=dict.fromkeys(("oracle", "frozen"), "test_nvme.py compares it with training in memory"),
        bounds=(0.25, 0.08),
    ),
    "NVMe, dynamic loss scale": Setting(
        ways.Nvme(),
        [OVERFLOWING, OVERFLOWING | {"pipelined": True}],
        without=SCALED | GROWN,
    ),
}


def possible(contract: str, setting: Setting) -> list[int]:
    """Return the numbers of the cases that run under a contract.

    Those that differ from an earlier one only in the number of ranks run only against the oracle.
    """
    found: dict[str, int] = {}
    for index, case in enumerate(() if contract in setting.without else setting.cases):
        if contract != "universal" or case.get("stage", 1) > 0:  # DeepSpeed's converter reads ZeRO's files
            key = str(case if contract == "oracle" else {key: value for key, value in case.items() if key != "world"})
            found.setdefault(key, index)
    return list(found.values())


def cells(contract: str) -> list[Any]:
    """Return (name of a setting, number of a case) for every cell of a contract; most are `full`.

    By default each contract takes other rows and starts at another case, so that together they reach more of them.
    """
    found = []
    for row, (name, setting) in enumerate(SETTINGS.items()):
        chosen, first = possible(contract, setting), CONTRACTS.index(contract)
        is_turn = (row - 2 * first) % EVERY[contract] == 0 and not (setting.near and contract == "oracle")
        turns = range(setting.quick if chosen and is_turn else 0)
        quick = {chosen[(first + turn * len(chosen) // setting.quick) % len(chosen)] for turn in turns}
        for index in chosen:
            text = ", ".join(f"{key} {value}" for key, value in setting.cases[index].items())
            marks = [] if index in quick else [pytest.mark.full]
            if find_spec(setting.way.needs) is None:
                marks.append(pytest.mark.skip(reason=f"{setting.way.needs} is not installed"))
            found.append(pytest.param(name, index, id=f"{name}: {text}", marks=marks))
    return found
