# SPDX-License-Identifier: Apache-2.0
"""How exact deepspeed-muon is, as tables: against the oracle, across shardings, beside stock and torch.optim.Muon.

The oracle is that of the tests, which shares no code with the package.
"""

import statistics
import sys
import textwrap
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks import report
from deepspeed.muon.kernels.selection import choose, unavailable_kernels
from deepspeed.muon.math.newton_schulz import DTYPES, SIMPLE, method_of, orthogonalize, schedule

sys.path[1:1] = [str(report.ROOT / folder) for folder in ("tests/unit/ops/muon", "examples/pretrain_gpt")]

from helpers import oracles  # noqa: E402
from helpers.distributed import run, shutdown  # noqa: E402
from helpers.models import MODELS, train_engine  # noqa: E402
from helpers.parity import SHAPES, STEPS, oracle  # noqa: E402
from helpers.training import PARAMS, ds_config, fp32_weights, make_engine, train, train_on_gradients  # noqa: E402

Rows = Iterator[dict[str, str]]
RANKS = {1: "1 rank", 2: "2 ranks", 3: "3 ranks", 4: "4 ranks"}

INTRODUCTION = """\
Training on any number of ranks equals training in one process, up to rounding. The *oracle* below is that one process:
it holds every matrix whole, computes Newton-Schulz in float64, and shares no code with the package.
"""

# ---- on the ranks ---------------------------------------------------------------------------------------------

SETTINGS = {"lr": 0.02, "adam_lr": 1e-3, "momentum": 0.9, "eps": 1e-8}
"""Of both; stock knows no ns_dtype. Without weight decay."""


def weights_of(who: str, stage: int, clip: float) -> dict[str, Tensor]:
    """Return the weights after training with stock's Muon (Newton-Schulz in bf16) or ours (in fp32)."""
    import deepspeed.muon

    method = {"ns_dtype": "fp32"} if who == "ours" else {"ns_method": "standard"}
    zero = {"reduce_scatter": False} if who == "stock" and stage == 3 else {}
    config = ds_config(stage=stage, clip=clip, optimizer={"type": "Muon", "params": SETTINGS | method}, zero=zero)
    net = MODELS["mlp"]()
    if who == "stock":
        deepspeed.muon.uninstall()
    try:
        engine = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)[0]
        assert type(engine.basic_optimizer).__module__.startswith("deepspeed.muon") is (who == "ours")
        train_engine(engine, STEPS)
        weights = fp32_weights(engine)
        engine.destroy()
    finally:
        deepspeed.muon.install()
    return weights


def state_bytes(stage: int) -> tuple[int, int, int]:
    """Return (bytes of Muon's state, elements of the partition, elements of the matrices) of a bf16 model."""
    optimizer = {"type": "Muon", "params": {key: value for key, value in PARAMS.items() if key != "ns_dtype"}}
    engine = make_engine(MODELS["gpt"](), ds_config(stage=stage, dtype="bf16", optimizer=optimizer))
    muon = engine.basic_optimizer
    tensors = [tensor for partition in muon.partitions for tensor in partition.tensors]
    states = [value for tensor in tensors for value in muon.state[tensor].values() if torch.is_tensor(value)]
    nbytes = sum(value.untyped_storage().nbytes() for value in states if value.ndim)
    elements = sum(spec.numel for spec in muon.specs.values() if spec.use_muon)
    engine.destroy()
    return nbytes, sum(tensor.numel() for tensor in tensors), elements


# ---- tables ---------------------------------------------------------------------------------------------------


def parity() -> Rows:
    """Error against the oracle, relative to the change of the weights: fp32, 5 steps, accumulation 4, clipping 1.0"""
    reference = oracle("mlp", 1.0)
    for stage in range(4):
        settings: dict[str, Any] = {"stage": stage, "accumulation": 4, "clip": 1.0, "offload": stage > 0}
        row = {"stage": f"{stage}{', CPU offload' * (stage > 0)}"}
        for world, column in RANKS.items():
            weights = run(train, world, model="mlp", steps=STEPS, **settings)[0]
            errors = (oracles.change_error(reference.initial[n], weights[n], w) for n, w in reference.weights.items())
            row[column] = f"{max(errors):.1e}"
        yield row


def update_error(update: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """Return the largest difference between the updates of a matrix, relative to the norm of its reference."""
    return max(float((update[key] - reference[key]).norm() / reference[key].norm()) for key in reference)


def invariance() -> Rows:
    """Relative difference of the update between stages and world sizes for the same gradients, without clipping"""

    def update(world: int, stage: int, **more: Any) -> dict[str, Tensor]:
        return run(train_on_gradients, world, shapes=SHAPES, steps=3, stage=stage, clip=0.0, **more)[0]

    base = update(1, 0)
    for stage in range(4):
        row = {RANKS[world]: f"{update_error(update(world, stage), base):.1e}" for world in (1, 2, 4)}
        yield {"stage": str(stage)} | row
    control = update_error(update(1, 0, ulp=True), base)
    yield {"stage": "control: gradients moved by one ulp", "1 rank": f"{control:.1e}"}


def changes(reference: Any, weights: dict[str, Tensor], kind: str) -> tuple[list[float], float]:
    """Of all parameters of a kind: norms of the change relative to the oracle's, and the least cosine with it."""
    triples = [(reference.initial[n], weights[n], w) for n, w in reference.weights.items() if n.endswith(kind)]
    norms = [float((weight - initial).norm() / (wanted - initial).norm()) for initial, weight, wanted in triples]
    return norms, min(oracles.change_cosine(*triple) for triple in triples)


def clipping() -> Rows:
    """Gradient clipping off and at DeepSpeed's default: change after 5 steps, relative to the oracle's, 2 ranks"""
    for clip in (0.0, 1.0):
        net, common = MODELS["mlp"](), {"lr": 0.02, "adam_lr": 1e-3, "momentum": 0.9, "betas": (0.9, 0.95)}
        config = oracles.OracleConfig(**common, clip=clip)
        reference = oracles.train_oracle(net, net.batch, STEPS, oracles.route(net), config)
        for stage in (1, 2, 3):
            row = {"gradient_clipping": f"{clip:g}" if clip else "off", "stage": str(stage)}
            for who in ("stock", "ours"):
                weights = run(weights_of, 2, timeout=500, who=who, stage=stage, clip=clip)[0]
                for half, kind in {"Muon": "weight", "AdamW": "bias"}.items():
                    norms, cosine = changes(reference, weights, kind)
                    row[f"{who}: {half} weights"] = f"{statistics.fmean(norms):.3f} x, cosine {cosine:.4f}"
            yield row


def matrices() -> Iterator[tuple[str, Tensor]]:
    """Matrices whose singular values lie differently, and gradients of the example at its third step."""
    import data
    from model import GPT, GPTConfig

    for rows, cols in ((192, 192), (192, 768), (512, 2048), (2048, 512)):
        torch.manual_seed(0)
        u, _, v = torch.linalg.svd(gaussian := torch.randn(rows, cols), full_matrices=False)
        yield "Gaussian", gaussian
        yield "singular values 1 to 1e-5", u @ torch.diag(torch.logspace(0, -5, min(rows, cols))) @ v
        yield "rank 8", torch.randn(rows, 8) @ torch.randn(8, cols)
    torch.manual_seed(0)
    model, corpus = GPT(GPTConfig()), data.load_corpus()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(3):
        optimizer.zero_grad()
        model(*data.windows(corpus.train, data.train_offsets(corpus, 0, step, 8, 192), 192)).backward()
        optimizer.step()
    for name in ("blocks.1.attn.query", "blocks.1.up", "blocks.1.proj"):
        yield f"gradient of {name}", model.get_submodule(name).weight.grad.clone()


def iteration() -> Rows:
    """Error of Newton-Schulz of bf16 matrices by dtype of its products, relative to fp64.

    Where a CPU has no instructions for a dtype, its products are plain PyTorch's, which are less exact in bf16. Stock's
    gram runs in fp16, as it does on GPUs.
    """
    from deepspeed.runtime.zero.muon import original_muon
    from torch.optim._muon import _zeropower_via_newtonschulz as of_torch

    of_stock = original_muon.zeropower_via_gram_newtonschulz
    stock, kernels = getattr(of_stock, "__wrapped__", of_stock), choose(unavailable_kernels("auto", ["cpu"]))
    in_fp16 = mock.patch.object(original_muon, "ns_compute_dtype", lambda *_: torch.float16)
    for kind, matrix in matrices():
        half = matrix.bfloat16()
        exact = oracles.newton_schulz_fp64(half)
        results = {"torch.optim.Muon, bf16": of_torch(half.clone(), SIMPLE, 5, 1e-7)}
        with in_fp16:
            results["stock's gram, fp16"] = stock(half.clone(), steps=5)
        row = {"shape": "{} x {}".format(*half.shape), "input": kind}
        for dtype in ("bf16", "fp16", "fp32"):
            method = method_of(*half.shape, "auto", schedule("simple"), dtype)
            given = half.float()[None]  # a result in bf16 would show the rounding of the wire
            own = orthogonalize(given, schedule("simple"), method, DTYPES[dtype], kernels=kernels)[0]
            results[f"ours, {dtype}"] = own
            row["method"] = method
        errors = {name: float((result.double() - exact).norm() / exact.norm()) for name, result in results.items()}
        yield row | {name: f"{error:.4f}" if error > 1e-4 else f"{error:.0e}" for name, error in errors.items()}


def training_by_dtype() -> Rows:
    """Training with Newton-Schulz in each dtype and a bf16 exchange, against the fp64 oracle, 2 ranks"""
    reference = oracle("narrow", 1.0)
    for dtype in ("bf16", "fp16", "fp32"):
        optimizer = {"type": "Muon", "params": PARAMS | {"ns_dtype": dtype, "wire_dtype": "bf16"}}
        for stage in range(4):
            weights = run(train, 2, model="narrow", steps=STEPS, stage=stage, optimizer=optimizer)[0]
            norms, cosine = changes(reference, weights, "weight")
            row = {"ns_dtype": dtype, "stage": str(stage), "smallest cosine of a change": f"{cosine:.5f}"}
            yield row | {"largest difference of its norm": f"{max(abs(norm - 1) for norm in norms):.2%}"}


def state() -> Rows:
    """Optimizer state of the Muon parameters"""
    for stage, world in ((stage, world) for stage in (1, 2, 3) for world in (2, 4)):
        nbytes, padded, elements = zip(*run(state_bytes, world, stage=stage), strict=True)
        row = {"stage": str(stage), "ranks": str(world), "bytes per parameter": f"{sum(nbytes) / elements[0]:.3f}"}
        yield row | {"of that padding": f"{4 * (sum(padded) - elements[0]) / elements[0]:.3f}"}


def exactness() -> str:
    """Errors against oracles, stock and torch; writes docs/evidence/exactness.md."""
    parts = [f"# Exactness\n\n{INTRODUCTION}\n{report.one_line()}"]
    for rows in (parity, invariance, clipping, iteration, training_by_dtype, state):
        title, *notes = (" ".join(text.split()) for text in (rows.__doc__ or "").split("\n\n"))
        filled = (textwrap.fill(note, 120) for note in notes)
        parts.append("\n\n".join([f"## {title.rstrip('.')}", *filled, report.table(list(rows()))]))
        print(parts[-1], flush=True)
    shutdown()
    (report.ROOT / "docs" / "evidence" / "exactness.md").write_text("\n\n".join(parts) + "\n")
    return "written: docs/evidence/exactness.md"
