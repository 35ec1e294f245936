# SPDX-License-Identifier: Apache-2.0
"""How exact deepspeed-muon is, as tables: against the oracle, across shardings, beside stock and torch.optim.Muon.

Writes docs/exactness.md. Needs the test folder, whose oracle shares no code with the package.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[1:1] = [str(ROOT / "tests/unit/ops/muon"), str(ROOT / "examples/pretrain_gpt")]

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.optim._muon import _zeropower_via_newtonschulz as torch_iteration  # noqa: E402

import data  # noqa: E402
import exactness_jobs as jobs  # noqa: E402
import machine  # noqa: E402
from deepspeed.muon.kernels import selection  # noqa: E402
from deepspeed.muon.math.choice import choose_method  # noqa: E402
from deepspeed.muon.math.coefficients import SIMPLE, schedule  # noqa: E402
from deepspeed.muon.math.newton_schulz import orthogonalize  # noqa: E402
from helpers.distributed import run, shutdown  # noqa: E402
from helpers.models import MODELS  # noqa: E402
from helpers.oracles import OracleConfig, change_cosine, change_error, newton_schulz_fp64, route, train_oracle  # noqa: E402
from helpers.parity import SHAPES, oracle, update_error  # noqa: E402
from helpers.training import PARAMS, train, train_on_gradients  # noqa: E402
from model import GPT, GPTConfig  # noqa: E402

STEPS = 5
KERNELS = selection.choose(selection.missing("auto", ["cpu"]))
Table = list[list[str]]


def parity() -> Table:
    """Largest error of any parameter, of its change, by stage and world size."""
    rows = [["stage", "1 rank", "2 ranks", "3 ranks", "4 ranks"]]
    reference = oracle("mlp", 1.0)
    for stage in range(4):
        settings: dict[str, Any] = {"stage": stage, "accumulation": 4, "clip": 1.0, "offload": stage > 0}
        row = [f"{stage}{', CPU offload' if stage else ''}"]
        for world in (1, 2, 3, 4):
            weights = run(train, world, model="mlp", steps=STEPS, **settings)[0]
            errors = (change_error(reference.initial[n], weights[n], w) for n, w in reference.weights.items())
            row.append(f"{max(errors):.1e}")
        rows.append(row)
    return rows


def invariance() -> Table:
    """The update from given gradients, against stage 0 on one rank, beside a control."""
    rows = [["stage", "1 rank", "2 ranks", "4 ranks"]]
    base = run(train_on_gradients, 1, shapes=SHAPES, steps=3, stage=0)[0]
    for stage in range(4):
        errors = [
            update_error(run(train_on_gradients, w, shapes=SHAPES, steps=3, stage=stage)[0], base) for w in (1, 2, 4)
        ]
        rows.append([str(stage), *(f"{error:.1e}" for error in errors)])
    control = update_error(run(train_on_gradients, 1, shapes=SHAPES, steps=3, stage=0, ulp=True)[0], base)
    return [*rows, ["control: gradients moved by one ulp", f"{control:.1e}", "", ""]]


def clipping() -> Table:
    """Norm of the change relative to the oracle's, and the smallest cosine, of Muon's and AdamW's weights."""
    rows = [
        [
            "gradient_clipping",
            "stage",
            "stock: Muon weights",
            "stock: AdamW weights",
            "ours: Muon weights",
            "ours: AdamW weights",
        ]
    ]
    for clip in (0.0, 1.0):
        model = MODELS["mlp"]()
        config = OracleConfig(lr=0.02, adam_lr=1e-3, momentum=0.9, betas=(0.9, 0.95), clip=clip)
        reference = train_oracle(model, model.batch, STEPS, route(model), config)
        for stage in (1, 2, 3):
            cells = []
            for job in (jobs.stock, jobs.ours):
                weights = run(job, 2, timeout=500, model="mlp", steps=STEPS, stage=stage, clip=clip)[0]
                cells += [_change(reference, weights, kind) for kind in ("weight", "bias")]
            rows.append([f"{clip:g}" if clip else "off", str(stage), *cells])
    return rows


def _change(reference: Any, weights: dict[str, Tensor], kind: str) -> str:
    names = [name for name in reference.weights if name.endswith(kind)]
    ratios, cosines = [], []
    for name in names:
        initial, wanted = reference.initial[name], reference.weights[name]
        ratios.append(float((weights[name] - initial).norm() / (wanted - initial).norm()))
        cosines.append(change_cosine(initial, weights[name], wanted))
    return f"{mean(ratios):.3f} x, cosine {min(cosines):.4f}"


def spectra(rows: int, cols: int) -> Iterator[tuple[str, Tensor]]:
    """Matrices whose singular values lie differently."""
    torch.manual_seed(0)
    gaussian = torch.randn(rows, cols)
    u, _, v = torch.linalg.svd(gaussian, full_matrices=False)
    yield "Gaussian", gaussian
    yield "singular values 1 to 1e-5", u @ torch.diag(torch.logspace(0, -5, min(rows, cols))) @ v
    yield "rank 8", torch.randn(rows, 8) @ torch.randn(8, cols)


def recorded() -> Iterator[tuple[str, Tensor]]:
    """Gradients of the example's model at its third step, of one matrix of each shape."""
    torch.manual_seed(0)
    model, corpus = GPT(GPTConfig()), data.load_corpus()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(3):
        optimizer.zero_grad()
        offsets = data.train_offsets(corpus, 0, step, 8, 192)
        model(*data.windows(corpus.train, offsets, 192)).backward()
        optimizer.step()
    for name in ("blocks.1.attn.query", "blocks.1.up", "blocks.1.proj"):
        yield f"gradient of {name}", model.get_submodule(name).weight.grad.clone()


def iteration() -> Table:
    """Error of the bf16 iteration to fp64, beside torch.optim.Muon's on the same bf16 input."""
    rows = [["shape", "input", "method", "torch.optim.Muon", "ours", "ratio"]]
    cases = [
        (kind, matrix)
        for shape in ((192, 192), (192, 768), (512, 2048), (2048, 512))
        for kind, matrix in spectra(*shape)
    ]
    for kind, matrix in cases + list(recorded()):
        half = matrix.bfloat16()
        exact = newton_schulz_fp64(half)
        method = choose_method(*half.shape, "auto", "cpu bf16")
        result = orthogonalize(half.clone()[None], schedule("simple"), method, kernels=KERNELS)[0]
        errors = [
            float((x.double() - exact).norm() / exact.norm()) for x in (torch_iteration(half, SIMPLE, 5, 1e-7), result)
        ]
        rows.append(
            [
                f"{half.shape[0]} x {half.shape[1]}",
                kind,
                method,
                *(f"{e:.4f}" for e in errors),
                f"{errors[1] / errors[0]:.2f}",
            ]
        )
    return rows


def bf16_training() -> Table:
    """fp32 training with Newton-Schulz and exchange in bf16, at least four samples per column."""
    rows = [["stage", "smallest cosine of a change", "largest difference of its norm"]]
    reference = oracle("narrow", 1.0)
    optimizer = {"type": "Muon", "params": PARAMS | {"ns_dtype": "bf16"}}
    for stage in range(4):
        weights = run(train, 2, model="narrow", steps=STEPS, stage=stage, optimizer=optimizer)[0]
        triples = [(reference.initial[n], weights[n], w) for n, w in reference.weights.items() if n.endswith("weight")]
        norms = [abs(float((w - i).norm() / (r - i).norm()) - 1) for i, w, r in triples]
        rows.append([str(stage), f"{min(change_cosine(*t) for t in triples):.5f}", f"{max(norms):.2%}"])
    return rows


def state() -> Table:
    """Bytes of optimizer state per Muon parameter, summed over ranks, bf16 model."""
    rows = [["stage", "ranks", "bytes per parameter", "of that padding"]]
    for stage in (1, 2, 3):
        for world in (2, 4):
            ranks = run(jobs.state_bytes, world, stage=stage)
            elements = ranks[0]["elements"]
            padding = 4 * (sum(r["partition"] for r in ranks) - elements)
            total = sum(r["bytes"] for r in ranks)
            rows.append([str(stage), str(world), f"{total / elements:.3f}", f"{padding / elements:.3f}"])
    return rows


SECTIONS: tuple[tuple[str, Callable[[], Table]], ...] = (
    ("Against the oracle: fp32, 5 steps, accumulation 4, gradient_clipping 1.0, error relative to the change", parity),
    ("The same gradients at every stage and world size: difference of the update, relative to its norm", invariance),
    ("DeepSpeed's default clipping: the change after 5 steps, relative to the oracle's, 2 ranks", clipping),
    ("The bf16 iteration: error to fp64", iteration),
    ("Newton-Schulz and exchange in bf16: training against the fp64 oracle, 2 ranks", bf16_training),
    ("Optimizer state of the Muon half", state),
)


def main() -> None:
    """Print every table and write them to docs/exactness.md."""
    parts = [f"# Exactness\n\n{machine.one_line()}\n"]
    for title, table in SECTIONS:
        parts.append(f"## {title}\n\n{machine.markdown_table(table())}\n")
        print(parts[-1], flush=True)
    (ROOT / "docs/exactness.md").write_text("\n".join(parts))
    shutdown()


if __name__ == "__main__":
    main()
