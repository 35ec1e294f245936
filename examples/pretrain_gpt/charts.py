# SPDX-License-Identifier: Apache-2.0
"""The charts of the experiments."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from runs import Run, Runs
from variants import WATCH

if TYPE_CHECKING:
    from experiments import Judged

COLORS = {"AdamW": "tab:gray", "Muon": "tab:red"}
VERDICT_COLORS = {"better": "tab:green", "worse": "tab:red", "no gain shown": "tab:blue", "one seed only": "0.6"}
#: Variants are drawn in a panel of their own if they are this many times farther away than the others are apart.
FAR = 3.0


def _draw_variant(axes: Axes, place: int, name: str, judged: Judged) -> None:
    """Draw a dot per seed, and the mean with its interval; of Muon the distances of its seeds from their mean."""
    difference, dots = judged.difference, judged.difference.pairs
    color = VERDICT_COLORS[difference.verdict]
    if name == "Muon":
        color, dots = "black", [loss - fmean(judged.losses) for loss in judged.losses]
    axes.plot(dots, [place] * len(dots), "o", color=color, alpha=0.5, markersize=5, markeredgewidth=0)
    axes.plot([difference.low, difference.high], [place] * 2, color=color, linewidth=2)
    axes.plot(difference.mean, place, "|", color=color, markersize=13, markeredgewidth=2)


def plot_rules(judged: Mapping[str, Judged], path: Path) -> None:
    """Draw the differences of every variant to Muon, the best on top; those far away get a panel at the right."""
    order = sorted(judged, key=lambda name: judged[name].difference.mean)
    means = [judged[name].difference.mean for name in order]
    gaps = [after - before for before, after in itertools.pairwise(means)]
    cut = gaps.index(max(gaps)) + 1
    near, far = order[:cut], order[cut:]
    if "Muon" not in near or max(gaps) < FAR * (means[cut - 1] - means[0]):
        near, far = order, []
    ratios = [5, 1] if far else [1]
    size = {"figsize": (9, 1.4 + 0.3 * len(order)), "layout": "constrained"}
    figure, panels = plt.subplots(1, len(ratios), sharey=True, width_ratios=ratios, squeeze=False, **size)
    for axes, names in zip(panels[0], (near, far), strict=False):
        for name in names:
            _draw_variant(axes, order.index(name), name, judged[name])
        axes.grid(alpha=0.3)
    panels[0][0].axvline(0, color="black", linewidth=1, linestyle=":")
    panels[0][0].set_yticks(range(len(order)), order)
    panels[0][0].invert_yaxis()
    panels[0][0].set_xlabel("final held-out loss less plain Muon's with the same seed (nats per byte); left is better")
    if far:
        panels[0][1].margins(x=0.4)
        panels[0][1].set_xlabel("far away")
    used = [word for word in VERDICT_COLORS if any(one.difference.verdict == word for one in judged.values())]
    handles = [plt.Line2D([], [], color=VERDICT_COLORS[word], marker="o", label=word) for word in used]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot_widths(losses: Mapping[str, Mapping[int, float]], shares: Mapping[int, float], path: Path) -> None:
    """Draw final losses by width, and the share of AdamW's steps after which Muon reaches AdamW's final loss."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for name, by_width in losses.items():
        left.plot(list(by_width), list(by_width.values()), "o-", color=COLORS[name], label=name)
    left.set_ylabel("final held-out loss (nats per byte)")
    left.legend(frameon=False)
    right.plot(list(shares), [100 * share for share in shares.values()], "o-", color=COLORS["Muon"])
    right.set_ylabel("steps of Muon to AdamW's\nfinal loss, % of AdamW's")
    right.set_ylim(0, 100)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(shares), [str(width) for width in shares])
        axes.minorticks_off()
        axes.set_xlabel("width (4 layers)")
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot_clip(runs: Runs, pairs: Mapping[float, list[Run]], path: Path) -> None:
    """Draw each layer's largest logit and the held-out loss over steps: a column per rate, a color per threshold."""
    size = {"figsize": (3.4 * len(pairs), 5), "sharex": True, "sharey": "row", "layout": "constrained"}
    figure, panels = plt.subplots(2, len(pairs), squeeze=False, **size)
    for (rate, pair), (logits, losses) in zip(pairs.items(), panels.T, strict=True):
        for run, color in zip(pair, ("tab:gray", "tab:red"), strict=True):
            label = "not clipped" if run.tau == WATCH else f"QK-clip, tau {run.tau:g}"
            for number, values in enumerate(runs.logits(run).values()):
                logits.plot(*values, color=color, linewidth=1, alpha=0.8, label=None if number else label)
            rows = runs.evaluations(run)
            losses.plot([row.step for row in rows], [row.held_out for row in rows], ".-", color=color)
        logits.set_title(f"rate {pair[0].lr:g} ({rate:g} x the best)", fontsize=10)
        logits.set_yscale("log")
        losses.set_xlabel("step")
        losses.set_ylim(top=4)  # the first evaluations are far above
        logits.grid(alpha=0.3)
        losses.grid(alpha=0.3)
    panels[0][0].set_ylabel("largest attention logit\n(a line per layer)")
    panels[1][0].set_ylabel("held-out loss (nats per byte)")
    panels[0][0].legend(frameon=False)
    figure.savefig(path, dpi=95)
    plt.close(figure)
