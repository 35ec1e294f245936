# SPDX-License-Identifier: Apache-2.0
"""``ds_muon plot``: draw a picture of the values that a run has written with DeepSpeed's monitor."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from deepspeed.muon.errors import RecordsError
from deepspeed.muon.monitor.read_records import Records, Values, read
from deepspeed.muon.monitor.step_stats import CAUTIOUS, CHANGE, ERROR, LOGIT, RANK

#: Colours that readers who confuse red and green can tell apart (Okabe and Ito).
MUON, ADAMW, ORANGE, SKY, GREEN, GREY = "#0072B2", "#D55E00", "#E69F00", "#56B4E9", "#009E73", "#d0d0d0"
#: The phases of a step, in the order in which they are stacked: (recorded value, name in the legend, colour).
PHASES = (
    ("newton_schulz_ms", "Newton-Schulz", MUON),
    ("exchange_ms", "exchange, wait", ADAMW),
    ("prepare_ms", "prepare", SKY),
    ("apply_ms", "apply", GREEN),
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
    "legend.frameon": False,
    "legend.fontsize": 6.5,
    "legend.borderpad": 0,
    "legend.handlelength": 1.2,
    "legend.handletextpad": 0.5,
}
#: In inches: width of the figure, height of a panel, of one row of a heat map, of the largest heat map.
WIDTH, HEIGHT, ROW, MAX_HEIGHT = 11.0, 2.0, 0.14, 10.0
DPI = 90
#: A heat map with more rows than this names only the first row of each layer; a legend names this many layers.
MAX_NAMED_ROWS, MAX_NAMED_LAYERS = 60, 8
#: Function of (axes of a panel, records) that draws the panel.
Draw = Callable[[Any, Records], None]


def plot(folder: Path, target: Path | None = None) -> dict[str, Any]:
    """Draw what a training run has written to ``folder`` with DeepSpeed's monitor, and save the picture as a PNG file.

    ``target``: the PNG file; by default ``muon.png`` in ``folder``.

    Returns:
        {"file": path of the picture, "panels": list of panel titles, "records": number of records}

    Raises:
        RecordsError: there are no records, matplotlib is not installed, or the file cannot be written.
    """
    records, target = read(folder), target or folder / "muon.png"
    try:
        import matplotlib
    except ImportError:
        raise RecordsError(
            'ds_muon plot needs matplotlib, which is not installed; pip install "deepspeed-muon[plot]"'
        ) from None
    with matplotlib.rc_context(STYLE):
        figure, titles = draw(records, folder)
        try:
            figure.savefig(target, format="png", dpi=DPI)
        except OSError as error:
            raise RecordsError(
                f"cannot write {target}: {error.strerror or error}; choose another path with --out"
            ) from None
    return {"file": str(target), "panels": titles, "records": len(records.samples)}


def draw(records: Records, folder: Path) -> tuple[Any, list[str]]:
    """Draw one panel for each measure in ``records``. Return (:class:`matplotlib.figure.Figure`, list of panel titles).

    The figure's heading names ``folder``.
    """
    from matplotlib.figure import Figure

    rows = [
        (height, panels[first : first + 2]) for height, panels in _panels(records) for first in range(0, len(panels), 2)
    ]
    heights = [height for height, _ in rows]
    figure = Figure(figsize=(WIDTH, sum(heights) + 0.5), layout="constrained")
    grid = figure.add_gridspec(len(rows), 2, height_ratios=heights)
    samples = records.samples
    limits = samples[0] - _margin(samples), samples[-1] + _margin(samples)
    for row, (_, panels) in enumerate(rows):
        for column, (title, panel) in enumerate(panels):
            axes = figure.add_subplot(grid[row, column] if len(panels) == 2 else grid[row, :])
            axes.set_title(title, loc="left")
            panel(axes, records)
            axes.set_xlim(*limits)  # one scale for all, as heat maps have it
            axes.xaxis.set_major_formatter(_thousands)
            if row == len(rows) - 1:
                axes.set_xlabel("training samples")
    first, last = _thousands(samples[0]), _thousands(samples[-1])
    name = folder.absolute().name
    figure.suptitle(f"{name}: {len(samples)} records of Muon, {first} to {last} samples", fontsize=11)
    return figure, [title for _, panels in rows for title, _ in panels]


def _panels(records: Records) -> list[tuple[float, list[tuple[str, Draw]]]]:
    """Return groups of panels: [(height of a panel in inches, [(title, function that draws it), ...]), ...]."""
    values, layers = records.values, records.layers
    curves: list[tuple[Any, str, Draw]] = [
        ("loss" in values, "Training loss", _loss),
        ("grad_norm" in values, "Gradient norm, before clipping", _grad_norm),
        (_halves(values, "lr"), "Learning rate", partial(_by_half, measure="lr", unit="per step")),
        (
            _halves(values, "update_rms"),
            "Size of the update, RMS",
            partial(_by_half, measure="update_rms", unit="per unit of learning rate"),
        ),
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
    count = max(len(layers[CHANGE]), len(layers[CAUTIOUS]))
    groups = (HEIGHT, curves), (min(MAX_HEIGHT, max(HEIGHT, 0.8 + ROW * count)), maps), (HEIGHT, samples)
    return [(height, [(title, panel) for found, title, panel in panels if found]) for height, panels in groups]


def _margin(samples: Sequence[int]) -> float:
    """Return the margin of the x axis: half the mean distance between ``samples``, the positions of the records."""
    return (samples[-1] - samples[0]) / (2 * max(1, len(samples) - 1)) or samples[0] / 2


def _thousands(value: float, _: Any = None) -> str:
    """Format ``value`` as the label of a tick, for matplotlib: ``1.2k`` for 1200."""
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.4g}{name}"
    return f"{value:.4g}"


def _line(axes: Any, values: Values, **style: Any) -> None:
    axes.plot([*values], [*values.values()], **{"marker": "o" if len(values) == 1 else None} | style)


def _legend(axes: Any, **order: Any) -> None:
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), **order)


def _plain_ticks(axis: Any) -> None:
    """Put ticks of a logarithmic axis at 1, 2 and 5 in each decade, labelled with plain numbers."""
    from matplotlib.ticker import LogLocator

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter("")


# ---- curves -----------------------------------------------------------------------------------------------------


def _loss(axes: Any, records: Records) -> None:
    """Draw the training loss: every value and, if there are at least 40 values, a running mean."""
    loss = records.values["loss"]
    window = len(loss) // 20
    _line(axes, loss, color=MUON, alpha=0.35 if window > 1 else 1.0, linewidth=1)
    if window > 1:
        at, value = [*loss], [*loss.values()]
        means = {at[i]: statistics.fmean(value[i + 1 - window : i + 1]) for i in range(window - 1, len(value))}
        _line(axes, means, color=MUON, label=f"mean of {window}")
        _legend(axes)


def _grad_norm(axes: Any, records: Records) -> None:
    _line(axes, records.values["grad_norm"], color=MUON)
    axes.set_yscale("log")
    _plain_ticks(axes.yaxis)


def _halves(values: Mapping[str, Values], measure: str) -> dict[str, Values]:
    """Return {"muon": series, "adamw": series} of a ``measure``; those of ``lr`` are ``lr_muon`` and ``lr_adamw``.

    A series that ``values`` lacks is left out.
    """
    return {half: values[f"{measure}_{half}"] for half in ("muon", "adamw") if f"{measure}_{half}" in values}


def _by_half(axes: Any, records: Records, measure: str, unit: str) -> None:
    styles = {
        "muon": {"label": "Muon", "color": MUON},
        "adamw": {"label": "AdamW", "color": ADAMW, "linestyle": "--"},
    }
    for half, values in _halves(records.values, measure).items():
        _line(axes, values, **styles[half])
    axes.set_ylim(bottom=0)
    axes.set_ylabel(unit)
    _legend(axes)


# ---- layers -----------------------------------------------------------------------------------------------------


def _change(axes: Any, records: Records) -> None:
    """Draw a heat map of how much each matrix changes in a step: norm of the change divided by norm of the weights."""
    rows = records.layers[CHANGE]
    sizes = sorted(value for values in rows.values() for value in values.values() if value > 0) or [1.0]
    low, high = sizes[len(sizes) // 100], sizes[-1 - len(sizes) // 100]  # outliers must not use up the scale
    colors = {"cmap": "viridis", "norm": "log", "vmin": low, "vmax": max(high, 1.01 * low)}
    bar = _heat_map(axes, rows, colors, "change of one step / weight")
    _plain_ticks(bar.ax.yaxis)


def _cautious(axes: Any, records: Records) -> None:
    """Draw a heat map of the share of each matrix's weights that decay under cautious weight decay."""
    rows = records.layers[CAUTIOUS]
    away = max(0.02, *(abs(value - 0.5) for values in rows.values() for value in values.values()))
    colors = {"cmap": "RdBu_r", "vmin": 0.5 - away, "vmax": 0.5 + away}
    _heat_map(axes, rows, colors, "share; 0.5: signs are independent", named=not records.layers[CHANGE])


def _heat_map(axes: Any, rows: Mapping[str, Values], colors: dict[str, Any], label: str, named: bool = True) -> Any:
    """Draw a heat map with one row of cells for each name in ``rows``. Return its colour bar.

    ``colors``: arguments of ``pcolormesh``. ``label``: text at the colour bar. ``named``: whether to label the rows.
    """
    names, at = [*rows], sorted({samples for values in rows.values() for samples in values})
    between = [(a + b) / 2 for a, b in itertools.pairwise(at)]
    edges = [at[0] - _margin(at), *between, at[-1] + _margin(at)]
    cells = [[rows[name].get(samples, math.nan) for samples in at] for name in names]
    image = axes.pcolormesh(edges, range(len(names) + 1), cells, **colors)
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.set_facecolor("#e5e5e5")
    are_few = len(names) <= MAX_NAMED_ROWS
    firsts = [i for i, name in enumerate(names) if not i or _layer(name) != _layer(names[i - 1])]
    for first in firsts[1:]:
        axes.axhline(first, color="white", linewidth=1.2 if are_few else 0.4)
    shown = range(len(names)) if are_few else firsts[:: 1 + len(firsts) // MAX_NAMED_ROWS]
    texts = [(names[i] if are_few else _layer(names[i])) if named else "" for i in shown]
    axes.set_yticks([i + 0.5 for i in shown], texts, fontsize=7)
    axes.tick_params(axis="y", length=0)
    bar = axes.figure.colorbar(image, cax=axes.inset_axes((1.02, 0.0, 0.05, 1.0)), label=label)
    bar.ax.tick_params(labelsize=7)
    return bar


def _layer(name: str) -> str:
    """Return the part of a name up to its first number: ``blocks.0`` for ``blocks.0.attn.query``."""
    found = re.match(r".*?\d+", name)
    return found[0] if found else name


def _by_layer(axes: Any, rows: Mapping[str, Values], **style: Any) -> None:
    """Draw one curve for each name in ``rows``. Colours go from dark (first layer) to light (last layer)."""
    from matplotlib import colormaps

    layers = [*dict.fromkeys(map(_layer, rows))]
    last = max(1, len(layers) - 1)
    color = {layer: colormaps["viridis"](0.92 * depth / last) for depth, layer in enumerate(layers)}
    unnamed = {layers[round(i * (len(layers) - 1) / (MAX_NAMED_LAYERS - 1))] for i in range(MAX_NAMED_LAYERS)}
    for name, values in rows.items():
        layer = _layer(name)
        _line(axes, values, color=color[layer], label=layer if layer in unnamed else None, **style)
        unnamed.discard(layer)
    _legend(axes)


def _logits(axes: Any, records: Records) -> None:
    _by_layer(axes, records.layers[LOGIT], linewidth=1.2)
    axes.set_ylabel("logit")


def _errors(axes: Any, records: Records) -> None:
    _sampled(axes, records.layers[ERROR], max, "RMS of s² - 1 (0: orthogonal)")
    axes.set_ylim(bottom=0)


def _ranks(axes: Any, records: Records) -> None:
    _sampled(axes, records.layers[RANK], min, "singular values that count")
    axes.set_yscale("log")
    _plain_ticks(axes.yaxis)


def _sampled(axes: Any, rows: Mapping[str, Values], worst: Callable, label: str) -> None:
    """Draw a dot for each value in ``rows``, {name of a matrix: its series}, and write the name at the worst dot.

    ``worst``: ``min`` or ``max``, which finds the worst value. ``label``: title of the y axis.
    """
    _by_layer(axes, rows, linestyle="", marker="o", markersize=4)
    value, at, name = worst((value, at, name) for name, values in rows.items() for at, value in values.items())
    align, shift = ("right", -6) if at > sum(axes.get_xlim()) / 2 else ("left", 6)
    axes.annotate(name, (at, value), (shift, 0), textcoords="offset points", fontsize=7, ha=align, va="center")
    axes.set_ylabel(label)


# ---- time -------------------------------------------------------------------------------------------------------


def _phases(axes: Any, records: Records) -> None:
    """Draw the time of each phase of a step, stacked. The legend has median times. Rare slow steps are cut off."""
    at, values = records.samples, records.values
    series = {name: [values.get(name, {}).get(samples, 0.0) for samples in at] for name in ("step_ms", *values)}
    parts = {text: series.get(name, [0.0] * len(at)) for name, text, _ in PHASES}
    sums = [*map(sum, zip(*parts.values(), strict=True))]
    parts["rest of step"] = [max(0.0, step - spent) for step, spent in zip(series["step_ms"], sums, strict=True)]
    labels = [f"{text}\n{statistics.median(times):.3g} ms" for text, times in parts.items()]
    axes.stackplot(at, *parts.values(), labels=labels, colors=[*(color for *_, color in PHASES), GREY])
    _legend(axes, reverse=True)
    totals = sorted(map(sum, zip(*parts.values(), strict=True)))
    axes.set_ylim(0, 1.2 * totals[int(0.95 * (len(totals) - 1))] or 1.0)
    axes.set_ylabel("milliseconds")
