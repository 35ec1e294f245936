# SPDX-License-Identifier: Apache-2.0
"""``ds_muon plot``: one picture of what a run has written."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from deepspeed.muon.cli.written import Values, Written, read
from deepspeed.muon.errors import RecordsError
from deepspeed.muon.step_stats import CAUTIOUS, CHANGE, ERROR, LOGIT, RANK

#: Colours that are told apart without red and green (Okabe and Ito).
MUON, ADAMW, GREY, ORANGE, SKY, PINK = "#0072B2", "#D55E00", "#8c8c8c", "#E69F00", "#56B4E9", "#CC79A7"
#: The phases of a step from the bottom up: name of the value, what it is called, colour.
PHASES = (
    ("newton_schulz_ms", "Newton-Schulz", MUON),
    ("exchange_ms", "exchange, wait", ADAMW),
    ("prepare_ms", "prepare", SKY),
    ("apply_ms", "apply", "#009E73"),
    ("adamw_ms", "AdamW", ORANGE),
)
STYLE: Any = {
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
}
#: Inches: of the figure, of a panel, of a row of a heat map, of the largest heat map.
WIDTH, HEIGHT, ROW, TALLEST = 11.0, 2.0, 0.14, 10.0
#: Of the width of a panel, what stands beside it: a legend or a scale of colours.
SIDE, DPI = 0.23, 90
#: So many rows of a heat map each have their name; of more the first of each layer has.
NAMED = 60
#: Draws into the axes of a panel, and beside them.
Draw = Callable[[Any, Any, Written], None]


def plot(folder: Path, target: Path | None = None) -> dict[str, Any]:
    """Draw the records in ``folder`` to a PNG file, by default ``muon.png`` there.

    Returns:
        ``file``, the titles of its ``panels``, and the number of ``records``.

    Raises:
        RecordsError: no records, no matplotlib, or a file that cannot be written.
    """
    written, target = read(folder), target or folder / "muon.png"
    try:
        import matplotlib
    except ImportError:
        raise RecordsError('matplotlib is not installed; pip install "deepspeed-muon[plot]"') from None
    with matplotlib.rc_context(STYLE):
        figure, titles = draw(written, folder)
        try:
            figure.savefig(target, format="png", dpi=DPI)
        except OSError as error:
            raise RecordsError(f"--out {target}: {error.strerror or error}") from None
    return {"file": str(target), "panels": titles, "records": len(written.samples)}


def draw(written: Written, folder: Path) -> tuple[Any, list[str]]:
    """A figure (:class:`matplotlib.figure.Figure`) with a panel for each measure that has values, and their titles."""
    from matplotlib.figure import Figure

    rows = [(height, pair) for height, panels in _panels(written) for pair in _pairs(panels)]
    heights = [height for height, _ in rows]
    figure = Figure(figsize=(WIDTH, sum(heights) + 0.5), layout="constrained")
    grid = figure.add_gridspec(len(rows), 4, height_ratios=heights, width_ratios=[1.0, SIDE, 1.0, SIDE])
    titles: list[str] = []
    samples = written.samples
    step = (samples[-1] - samples[0]) / (2 * max(1, len(samples) - 1)) or samples[0] / 2
    for row, (_, pair) in enumerate(rows):
        for column, (title, panel) in enumerate(pair):
            last = 2 if len(pair) == 1 else 2 * column
            axes, side = (figure.add_subplot(grid[row, cells]) for cells in (slice(2 * column, last + 1), last + 1))
            side.axis("off")
            axes.set_title(title, loc="left")
            panel(axes, side, written)
            axes.set_xlim(samples[0] - step, samples[-1] + step)  # one scale for all, as heat maps have it
            axes.xaxis.set_major_formatter(_samples)
            if row == len(rows) - 1:
                axes.set_xlabel("training samples")
            titles.append(title)
    figure.suptitle(
        f"{folder.absolute().name}: {len(samples)} records of Muon, "
        f"{_samples(samples[0])} to {_samples(samples[-1])} samples",
        fontsize=11,
    )
    return figure, titles


def _panels(written: Written) -> list[tuple[float, list[tuple[str, Draw]]]]:
    """Groups of panels with the height of each of their rows."""
    values, layers = written.values, written.layers
    count = max(len(layers[CHANGE]), len(layers[CAUTIOUS]))
    rates = partial(_halves, measure="lr", unit="per step")
    sizes = partial(_halves, measure="update_rms", unit="per unit of learning rate")
    curves: list[tuple[Any, str, Draw]] = [
        ("loss" in values, "Training loss", _loss),
        ("grad_norm" in values, "Gradient norm, before clipping", _grad_norm),
        (_has(values, "lr"), "Learning rate", rates),
        (_has(values, "update_rms"), "Size of the update, RMS", sizes),
    ]
    maps: list[tuple[Any, str, Draw]] = [
        (layers[CHANGE], "Update / weight in one step, RMS", _change),
        (layers[CAUTIOUS], "Share of weights that decay (cautious)", _cautious),
    ]
    samples: list[tuple[Any, str, Draw]] = [
        (layers[LOGIT], "Largest attention logit of each layer", _logits),
        (layers[ERROR], "Newton-Schulz: distance from orthogonal", _errors),
        (layers[RANK], "Input of Newton-Schulz: effective rank", _ranks),
        (any(name in values for name, *_ in PHASES), "Time of the optimizer step on rank 0, and medians", _phases),
    ]
    # Every row of a heat map has room for a name.
    tall = min(TALLEST, max(HEIGHT, 0.8 + ROW * count))
    groups = ((HEIGHT, curves), (tall, maps), (HEIGHT, samples))
    return [(height, [(title, panel) for there, title, panel in panels if there]) for height, panels in groups]


def _has(values: Mapping[str, Values], measure: str) -> bool:
    return f"{measure}_muon" in values or f"{measure}_adamw" in values


def _pairs(panels: Sequence[Any]) -> list[Sequence[Any]]:
    return [panels[i : i + 2] for i in range(0, len(panels), 2)]


def _samples(value: float, _: Any = None) -> str:
    """1200 as 1.2k."""
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.4g}{name}"
    return f"{value:.4g}"


# ---- curves -----------------------------------------------------------------------------------------------------


def _line(axes: Any, values: Values, **style: Any) -> None:
    axes.plot([*values], [*values.values()], marker="o" if len(values) == 1 else None, **style)


def _loss(axes: Any, side: Any, written: Written) -> None:
    """Every value, and a running mean where there are many."""
    loss = written.values["loss"]
    window = len(loss) // 20
    _line(axes, loss, color=MUON, alpha=0.35 if window > 1 else 1.0, linewidth=1)
    if window > 1:
        at, value = [*loss], [*loss.values()]
        means = {at[i]: statistics.fmean(value[i + 1 - window : i + 1]) for i in range(window - 1, len(value))}
        _line(axes, means, color=MUON, label=f"mean of {window}")
        handles, labels = axes.get_legend_handles_labels()
        _beside(side, handles, labels)


def _grad_norm(axes: Any, side: Any, written: Written) -> None:
    _line(axes, written.values["grad_norm"], color=MUON)
    axes.set_yscale("log")
    _plain_ticks(axes.yaxis)


def _halves(axes: Any, side: Any, written: Written, measure: str, unit: str) -> None:
    """Muon's and AdamW's curve."""
    values = written.values
    for half, name, color, dash in (("muon", "Muon", MUON, "-"), ("adamw", "AdamW", ADAMW, "--")):
        if f"{measure}_{half}" in values:
            _line(axes, values[f"{measure}_{half}"], label=name, color=color, linestyle=dash)
    axes.set_ylim(bottom=0)
    axes.set_ylabel(unit)
    handles, labels = axes.get_legend_handles_labels()
    _beside(side, handles, labels)


def _beside(side: Any, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """A legend."""
    legend = side.legend(
        handles,
        labels,
        frameon=False,
        fontsize=6.5,
        loc="upper left",
        borderaxespad=0,
        borderpad=0,
        handlelength=1.2,
        handletextpad=0.5,
    )
    legend.set_in_layout(False)


def _plain_ticks(axis: Any) -> None:
    """Ticks of a logarithmic axis at 1, 2 and 5, as plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


# ---- layers -----------------------------------------------------------------------------------------------------


def _change(axes: Any, side: Any, written: Written) -> None:
    """On a logarithmic scale of colours, as layers may differ by orders of magnitude."""
    from matplotlib.colors import LogNorm

    rows = written.layers[CHANGE]
    sizes = sorted(value for values in rows.values() for value in values.values() if value > 0) or [1.0]
    low, high = sizes[len(sizes) // 100], sizes[-1 - len(sizes) // 100]  # a few outliers keep the rest apart
    bar = _heat_map(axes, side, rows, "viridis", LogNorm(low, max(high, 1.01 * low)), "change of one step / weight")
    _plain_ticks(bar.ax.yaxis)


def _cautious(axes: Any, side: Any, written: Written) -> None:
    """Around one half, where signs of weights and updates are independent."""
    from matplotlib.colors import Normalize

    rows = written.layers[CAUTIOUS]
    away = max(0.02, *(abs(value - 0.5) for values in rows.values() for value in values.values()))
    label = "share; 0.5: signs are independent"
    _heat_map(axes, side, rows, "RdBu_r", Normalize(0.5 - away, 0.5 + away), label, named=not written.layers[CHANGE])


def _heat_map(
    axes: Any, side: Any, rows: Mapping[str, Values], colors: str, norm: Any, label: str, named: bool = True
) -> Any:
    """Layers from top to bottom, samples from left to right, a line between layers; returns the scale of colours."""
    names, at = [*rows], sorted({samples for values in rows.values() for samples in values})
    between = [(a + b) / 2 for a, b in itertools.pairwise(at)] or [at[0] / 2]
    edges = [2 * at[0] - between[0], *between[: len(at) - 1], 2 * at[-1] - between[-1]]
    cells = [[rows[name].get(samples, math.nan) for samples in at] for name in names]
    image = axes.pcolormesh(edges, range(len(names) + 1), cells, cmap=colors, norm=norm)
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.set_facecolor("#e5e5e5")
    firsts = [i for i, name in enumerate(names) if not i or _layer(name) != _layer(names[i - 1])]
    for first in firsts[1:]:
        axes.axhline(first, color="white", linewidth=1.2 if len(names) <= NAMED else 0.4)
    shown = range(len(names)) if len(names) <= NAMED else firsts[:: 1 + len(firsts) // NAMED]
    texts = [names[i] if len(names) <= NAMED else _layer(names[i]) for i in shown] if named else []
    axes.set_yticks([i + 0.5 for i in shown], texts or [""] * len(shown), fontsize=7)
    axes.tick_params(axis="y", length=0)
    inside = side.inset_axes([0.0, 0.0, 0.2, 1.0])
    inside.set_in_layout(False)
    bar = axes.figure.colorbar(image, cax=inside, label=label)
    inside.tick_params(labelsize=7)
    return bar


def _layer(name: str) -> str:
    """What stands before the name's second part: ``blocks.0`` of ``blocks.0.attn.query``."""
    found = re.match(r".*?\d+", name)
    return found[0] if found else name


def _colors(names: Sequence[str]) -> dict[str, Any]:
    """By name a colour by depth, from dark for the first layer to light for the last."""
    from matplotlib import colormaps

    layers = [*dict.fromkeys(map(_layer, names))]
    depth = {layer: 0.92 * i / max(1, len(layers) - 1) for i, layer in enumerate(layers)}
    return {name: colormaps["viridis"](depth[_layer(name)]) for name in names}


def _legend(side: Any, names: Sequence[str]) -> None:
    """The colours of layers, of a few where there are many."""
    from matplotlib.lines import Line2D

    colors = {_layer(name): color for name, color in _colors(names).items()}
    layers = [*colors]
    shown = layers if len(layers) <= 8 else [layers[round(i * (len(layers) - 1) / 7)] for i in range(8)]
    _beside(side, [Line2D([], [], color=colors[one], marker="o", linestyle="", markersize=4) for one in shown], shown)


def _logits(axes: Any, side: Any, written: Written) -> None:
    rows = written.layers[LOGIT]
    colors = _colors([*rows])
    for name, values in rows.items():
        _line(axes, values, color=colors[name], linewidth=1.2)
    axes.set_ylabel("logit")
    _legend(side, [*rows])


def _errors(axes: Any, side: Any, written: Written) -> None:
    _sampled(axes, side, written.layers[ERROR], max, "RMS of s² - 1 (0: orthogonal)")
    axes.set_ylim(bottom=0)


def _ranks(axes: Any, side: Any, written: Written) -> None:
    _sampled(axes, side, written.layers[RANK], min, "singular values that count")
    axes.set_yscale("log")
    _plain_ticks(axes.yaxis)


def _sampled(axes: Any, side: Any, rows: Mapping[str, Values], worst: Callable, label: str) -> None:
    """A dot per record, each of another matrix; the worst is named."""
    colors = _colors([*rows])
    for name, values in rows.items():
        axes.scatter([*values], [*values.values()], color=colors[name], s=16)
    value, at, name = worst((value, at, name) for name, values in rows.items() for at, value in values.items())
    middle = sum(axes.get_xlim()) / 2
    align, shift = ("right", -6) if at > middle else ("left", 6)
    axes.annotate(name, (at, value), (shift, 0), textcoords="offset points", fontsize=7, ha=align, va="center")
    axes.set_ylabel(label)
    _legend(side, [*rows])


# ---- time -------------------------------------------------------------------------------------------------------


def _phases(axes: Any, side: Any, written: Written) -> None:
    """Stacked, with what is left of the step on top; the legend tells medians. The slowest may leave the panel."""
    values = written.values
    at = written.samples
    stacks = {name: [values.get(name, {}).get(samples, 0.0) for samples in at] for name, *_ in PHASES}
    whole = [values.get("step_ms", {}).get(samples, 0.0) for samples in at]
    rest = [max(0.0, step - sum(parts)) for step, *parts in zip(whole, *stacks.values(), strict=True)]
    parts = [(stacks[name], text, color) for name, text, color in PHASES] + [(rest, "rest of step", "#d0d0d0")]
    axes.stackplot(at, [times for times, *_ in parts], colors=[color for *_, color in parts])
    labels = [f"{text}\n{statistics.median(times):.3g} ms" for times, text, _ in parts]
    _beside(side, axes.collections[::-1], labels[::-1])
    totals = sorted(map(sum, zip(*(times for times, *_ in parts), strict=True)))
    axes.set_ylim(0, 1.2 * totals[int(0.95 * (len(totals) - 1))] or 1.0)
    axes.set_ylabel("milliseconds")
