"""Figures of a report, as SVG in the text of the page, in the colors of the page."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup

SERIES = 6  # colors of lines
_INK, _GRID = "#010203", "#040506"  # stand for colors of the page, which light and dark mode set
_LINES = [f"#0a0b{i:02d}" for i in range(SERIES)]
_LOG = 100  # ratio of the largest to the smallest value from which an axis is logarithmic
_STRETCH = 3  # an axis for all values may be this many times as long as for most
_MARKED = 10  # points of a line outside of the axis that are marked
_ROOM = 0.08  # share of an axis that is free beyond most values
_WIDTH, _HEIGHT, _MARGIN = 100, 32, 2  # of small figures

Lines = Sequence[Sequence[float]]  # the values of each line
Series = tuple[str, Sequence[float], Sequence[float]]  # name, x, y


@dataclass(frozen=True)
class Chart:
    """A figure with its title, and the names of the lines drawn, ordered by color."""

    title: str
    svg: Markup
    names: list[str]
    note: str = ""


def line_chart(title: str, series: Sequence[Series], log: bool = True) -> Chart:
    """Return the line chart of values over steps, without values that are not finite.

    With `log`, the axis of values is logarithmic if these are of several orders of magnitude. Where
    a few values, as in the first epoch, would flatten the line, the axis ends before them; marks
    and the note of the chart say so.
    """
    figure, axes = _new_axes("step")
    kept = [(name, *_finite_points(x, y)) for name, x, y in series]
    every = [v for _, _, y in kept for v in y]
    for color, (_, x, y) in zip(_LINES, kept, strict=False):
        axes.plot(x, y, color=color, linewidth=1.6, marker="." if len(x) <= 40 else None)
    note = ""
    if every and min(every) == max(every):  # else the axis would show rounding errors
        axes.set_ylim(every[0] - abs(every[0] or 1), every[0] + abs(every[0] or 1))
    elif every:
        logarithmic, most = axis_scale_and_range([y for _, _, y in kept], log)
        if logarithmic:
            axes.set_yscale("log")
        if most is not None:
            note = _limit_value_axis(axes, kept, most, logarithmic)
    names = [name for name, _, _ in kept[:SERIES]] if len(kept) > 1 else []
    return Chart(title, _svg_element(figure, title), names, note)


def axis_scale_and_range(lines: Lines, log: bool) -> tuple[bool, tuple[float, float] | None]:
    """Return whether an axis for the values of `lines` is logarithmic, and the range of most
    values.

    The range is None if all values fit: an axis for all is less than `_STRETCH` times as long.
    """
    every = [v for y in lines for v in y]
    most = [v for y in lines for v in _values_without_extremes(y)]
    log = log and min(every) > 0 and max(every) / min(every) >= _LOG
    measure = math.log10 if log else float
    inner = measure(max(most)) - measure(min(most))
    if not 0 < _STRETCH * inner <= measure(max(every)) - measure(min(every)):
        return log, None
    return log and max(most) / min(most) >= _LOG, (min(most), max(most))


def _values_without_extremes(values: Sequence[float]) -> list[float]:
    """Return the values after the first tenth, without the few most extreme values."""
    rest = sorted(values[max(1, len(values) // 10) :] or values)
    extreme = len(rest) // 50
    return rest[extreme : len(rest) - extreme]


def _limit_value_axis(
    axes: Any, lines: Sequence[Series], most: tuple[float, float], log: bool
) -> str:
    """End the value axis a little beyond the range `most`, mark points outside, and return a note
    on them.
    """
    low, high = map(math.log10, most) if log else most
    low, high = low - _ROOM * (high - low), high + _ROOM * (high - low)
    low, high = (10**low, 10**high) if log else (low, high)
    axes.set_ylim(low, high)
    outside = []
    for color, (_, x, y) in zip(_LINES, lines, strict=False):
        beyond = [(a, v) for a, v in zip(x, y, strict=True) if not low <= v <= high]
        outside += beyond
        if len(beyond) <= _MARKED:
            for a, v in beyond:
                mark, edge = ("^", high) if v > high else ("v", low)
                axes.plot(a, edge, mark, color=color, markersize=6, clip_on=False)
    if not outside:
        return ""
    step, value = max(outside, key=lambda point: max(point[1] - high, low - point[1]))
    if len(outside) == 1:
        return f"Outside of the axis: {value:.4g} at step {step:.0f}."
    return (
        f"Outside of the axis: {len(outside)} points, the farthest {value:.4g} at step {step:.0f}."
    )


def scatter_chart(title: str, pairs: Sequence[Sequence[float]]) -> Chart:
    """Return the chart of predictions over labels, with the line of equal values."""
    figure, axes = _new_axes("label", "prediction")
    x, y = _finite_points([p[0] for p in pairs], [p[1] for p in pairs])
    if x:
        ends = [min([*x, *y]), max([*x, *y])]
        axes.plot(ends, ends, color=_GRID, linewidth=1.2)
    size = 4 if len(x) > 100 else 9
    axes.plot(x, y, ".", color=_LINES[0], markersize=size, alpha=0.6)
    return Chart(title, _svg_element(figure, title), [])


def histogram_chart(title: str, histogram: Mapping[str, Any], xlabel: str) -> Chart:
    """Return the bar chart of a histogram."""
    figure, axes = _new_axes(xlabel, "count")
    if histogram["counts"]:
        edges = _bin_edges(histogram)
        axes.stairs(histogram["counts"], edges, fill=True, color=_LINES[0], alpha=0.7)
    return Chart(title, _svg_element(figure, title), [])


def sparkline(values: Sequence[float | None]) -> Markup:
    """Return a small line chart without axes, cut at a few extreme values.

    The y axis is from the smallest to the largest value; a constant is in the middle.
    """
    finite = [v for v in values if v is not None and math.isfinite(v)]
    most = axis_scale_and_range([finite], False)[1] if finite else None
    if most is not None:
        low, high = most
        values = [v if v is None or math.isnan(v) else min(max(v, low), high) for v in values]
    pairs = [(i, v) for i, v in enumerate(values) if v is not None and math.isfinite(v)]
    low, high = min((v for _, v in pairs), default=0), max((v for _, v in pairs), default=0)
    last, inner = max(1, len(values) - 1), _HEIGHT - 2 * _MARGIN
    shares = [0.5 if high == low else 1 - (v - low) / (high - low) for _, v in pairs]
    xs = [_WIDTH * i / last for i, _ in pairs]
    return _small_figure({0: zip(xs, [_MARGIN + inner * share for share in shares], strict=True)})


def histogram_pair(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> Markup:
    """Return a small chart of two histograms as densities, each with the area 1."""
    drawn = {i: h for i, h in enumerate((before, after)) if h and h["counts"]}
    if not drawn:
        return Markup("")
    low, high = min(h["low"] for h in drawn.values()), max(h["high"] for h in drawn.values())
    densities = {}
    for i, h in drawn.items():
        width = (h["high"] - h["low"]) / len(h["counts"]) or 1.0  # a constant is one bar
        densities[i] = np.divide(h["counts"], sum(h["counts"])) / width
    top = max(d.max() for d in densities.values()) or 1.0
    lines = {}
    for i, h in drawn.items():
        xs = (np.repeat(_bin_edges(h), 2) - low) * _WIDTH / ((high - low) or 1.0)
        ys = np.concatenate([[0], np.repeat(densities[i], 2), [0]]) / top
        lines[i] = zip(xs, _HEIGHT - (_HEIGHT - _MARGIN) * ys, strict=True)
    return _small_figure(lines)


def _bin_edges(histogram: Mapping[str, Any]) -> np.ndarray:
    low, high, n = histogram["low"], histogram["high"], len(histogram["counts"])
    return low + (high - low) * np.arange(n + 1) / max(n, 1)


def _small_figure(lines: Mapping[int, Iterable[tuple[float, float]]]) -> Markup:
    """Return the SVG element of a small chart with `lines`, `{index of the color: points}`."""
    frame = '<svg class="small" viewBox="0 0 {} {}" preserveAspectRatio="none" aria-hidden="true">'
    drawn = Markup(frame).format(_WIDTH, _HEIGHT)
    for color, points in lines.items():
        text = " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
        drawn += Markup('<polyline points="{}" class="c{}"/>').format(text, color)
    return drawn + Markup("</svg>")


def _finite_points(x: Sequence[Any], y: Sequence[Any]) -> tuple[list[float], list[float]]:
    pairs = [(a, b) for a, b in zip(x, y, strict=True) if b is not None and math.isfinite(b)]
    return [float(a) for a, _ in pairs], [float(b) for _, b in pairs]


def _new_axes(xlabel: str, ylabel: str = "") -> tuple[Any, Any]:
    # not pyplot, which would keep the figure and start a window system
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(4.6, 2.7), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(xlabel, color=_INK)
    axes.set_ylabel(ylabel, color=_INK)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=xlabel == "step"))
    axes.grid(color=_GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, which="both", length=0, labelsize=9)
    for part in (axes.patch, figure.patch, axes.spines[:]):
        part.set_visible(False)
    return figure, axes


def _svg_element(figure: Any, title: str) -> Markup:
    """Return a matplotlib figure as an SVG element, in the colors of the page."""
    from matplotlib import rc_context

    out = io.StringIO()
    no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "onnxgrad"}):
        figure.savefig(out, format="svg", metadata=no_metadata)
    text = out.getvalue()
    text = text[text.index("<svg") :]
    colors = {_INK: "currentColor", _GRID: "var(--grid)"}
    colors |= {line: f"var(--c{i})" for i, line in enumerate(_LINES)}
    for color, variable in colors.items():
        text = text.replace(color, variable)
    text = re.sub(r' (width|height)="[^"]*"', "", text, count=2)  # of the whole figure
    # nothing refers to these names, and figures share them
    text = re.sub(r' id="[a-z2.]+_\d+"', "", text)
    labeled = Markup('<svg role="img" aria-label="{}" ').format(title)
    return Markup(text).replace(Markup("<svg "), labeled, 1)
