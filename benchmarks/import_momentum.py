# SPDX-License-Identifier: Apache-2.0
"""What Muon's momentum should start from where AdamW's run goes on with Muon: the first moment, or zero.

    python benchmarks/import_momentum.py

The GPT of examples/pretrain_gpt, smaller, in fp32 on one process: AdamW with warm-up, then Muon at a constant rate
with AdamW's half going on. Writes the held-out losses as CSV and Markdown under benchmarks/results.
"""

import copy
import csv
import sys
from pathlib import Path
from statistics import mean

import torch
from torch import nn
from torch.optim import Optimizer

import machine

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "pretrain_gpt"))

from data import Corpus, held_out_offsets, load_corpus, train_offsets, windows
from model import GPT, GPTConfig

CONFIG = GPTConfig(layers=3, width=128, heads=4, context=96)
BATCH, BEFORE, AFTER, WARMUP = 16, 120, 80, 12
"""Sequences of a step; steps of AdamW, of Muon, and of AdamW's warm-up."""
ADAM_RATE, MUON_RATES, SEEDS = 2e-3, (2e-3, 1.6e-2), (0, 1, 2)
EVALUATED = (1, 10, 20, 40, 80)
"""Steps after the change."""
STARTS = ("first_moment", "zero")


def take_step(model: nn.Module, optimizer: Optimizer, corpus: Corpus, seed: int, step: int) -> None:
    inputs = windows(corpus.train, train_offsets(corpus, seed, step, BATCH, CONFIG.context), CONFIG.context)
    model(*inputs).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def evaluate(model: nn.Module, corpus: Corpus) -> float:
    offsets = held_out_offsets(corpus, 4 * BATCH, CONFIG.context).reshape(4, BATCH)
    return mean(model(*windows(corpus.held_out, part, CONFIG.context)).item() for part in offsets)


def train_adamw(corpus: Corpus, seed: int) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(seed)
    model = GPT(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=ADAM_RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    for step in range(BEFORE):
        optimizer.param_groups[0]["lr"] = ADAM_RATE * min(1.0, (step + 1) / WARMUP)
        take_step(model, optimizer, corpus, seed, step)
    return model, optimizer


def go_on(corpus: Corpus, seed: int, model: nn.Module, adamw: Optimizer, rate: float, start: str) -> list[float]:
    """Held-out losses of a copy of the model at EVALUATED steps of Muon."""
    from deepspeed.muon import MuonWithAuxAdam

    twin = copy.deepcopy(model)
    settings = {"lr": rate, "adam_lr": ADAM_RATE, "betas": (0.9, 0.95), "eps": 1e-8}
    muon = MuonWithAuxAdam(twin.parameters(), model=twin, adjust_lr_fn="match_rms_adamw", **settings)
    for ours, theirs in zip(twin.parameters(), model.parameters(), strict=True):
        saved = {key: value.clone() for key, value in adamw.state[theirs].items()}
        if muon.specs[ours].use_muon:
            moment = saved["exp_avg"] if start == "first_moment" else torch.zeros_like(ours)
            saved = {"step": saved["step"], "momentum_buffer": moment}
        muon.state[ours] = saved
    losses = []
    for step in range(AFTER):
        take_step(twin, muon, corpus, seed, BEFORE + step)
        if step + 1 in EVALUATED:
            losses.append(evaluate(twin, corpus))
    return losses


def write(runs: dict[tuple[float, str, int], list[float]]) -> str:
    """The CSV of all runs and the table of means, which is returned."""
    path = machine.RESULTS / f"import-momentum-{machine.slug()}"
    with path.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["muon_lr", "start", "seed", *EVALUATED])
        writer.writerows([*case, *losses] for case, losses in runs.items())
    rows = [["steps after the change", *map(str, EVALUATED)]]
    for rate in MUON_RATES:
        for start in STARTS:
            columns = zip(*(runs[rate, start, seed] for seed in SEEDS), strict=True)
            rows.append([f"Muon at {rate:g}, {start.replace('_', ' ')}", *(f"{mean(c):.3f}" for c in columns)])
    title = (
        f"Held-out loss after {BEFORE} steps of AdamW at {ADAM_RATE:g} and some of Muon, mean of {len(SEEDS)} seeds."
    )
    text = f"# Where Muon's momentum starts\n\n{title}\n{machine.one_line()}.\n\n{machine.markdown_table(rows)}\n"
    path.with_suffix(".md").write_text(text)
    return text


def main() -> None:
    """Every seed, rate and start."""
    torch.set_num_threads(machine.cores())
    corpus, runs = load_corpus(), {}
    for seed in SEEDS:
        model, adamw = train_adamw(corpus, seed)
        for rate in MUON_RATES:
            for start in STARTS:
                runs[rate, start, seed] = go_on(corpus, seed, model, adamw, rate, start)
                print(f"seed {seed}, Muon at {rate:g}, {start}: {runs[rate, start, seed]}", flush=True)
    print(write(runs))


if __name__ == "__main__":
    main()
