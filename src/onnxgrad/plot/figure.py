"""Figures of matplotlib: models, with the layout of `to_svg`, and loss curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from colorsys import hls_to_rgb
from math import isfinite
from typing import Any

import numpy as np

from onnxgrad.errors import printable_lines, unknown
from onnxgrad.model.read import ModelLike
from onnxgrad.plot.placement import LINE, TITLE, Box, PlacedScene, Point, lay_out_model
from onnxgrad.plot.scene import Item

_PIXELS_PER_INCH = 96  # of the layout, as in SVG
_TITLE_HEIGHT = 40  # pixels of the layout
_LARGEST = (40, 200)  # inches: larger pictures are scaled down, as no viewer shows them
_MOST_PIXELS = (3840, 19200)
_FONT, _SMALL_FONT = 10, 9  # pixels of the layout: letters of a monospace font fit into `LETTER`
_INK, _LINE, _BOX, _EDGE = "#1c2430", "#8a94a3", "#f3f5f8", "#b9c1cc"  # as in `svg.STYLE`
_FRAME, _WEIGHT = (*[0.11] * 3, 0.035), "#e0912f"
_KIND_EDGES = {"input": "#2f7de1", "output": "#1f9d55", "node": _EDGE}


def plot_onnxs(
    *onx: ModelLike,
    ax: Any = None,
    dpi: float = 96,
    renderer: str = "dot",
    show: bool = False,
    title: str | Sequence[str] | None = None,
) -> Any:
    """Draw models side by side, and return the axes.

    Args:
        *onx: models, serialized models or paths.
        ax: axes to draw on, a list or array of them for several models; None or "new" creates a
            figure that is large enough.
        dpi: resolution of a new figure, in pixels per inch; it has at most 3840 by 19200 pixels.
        renderer: "dot" or "matplotlib"; both draw the same, with the layout of `to_svg`. Graphviz
            draws the text of `to_dot`.
        show: call `matplotlib.pyplot.show()` at the end.
        title: a title, of the figure if there are several models, or a list of one per model.

    Returns:
        The axes: one for one model, else an array with one for each model.

    Raises:
        ValueError: no model, an unknown renderer, a dpi that is not positive, a number of axes or
            titles other than the number of models, or one title for several models on `ax`.
        ModelError: a model cannot be read.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]> f (float[N] x) => (float[N] y) {y = Exp(x)}
        ... ''')
        >>> ax = og.plot.plot_onnxs(model, renderer="matplotlib", title="exponential")
        >>> ax.get_title()
        'exponential'
    """
    if not onx:
        raise ValueError("plot_onnxs needs at least one model")
    if renderer not in ("dot", "matplotlib"):
        raise unknown("renderer", renderer, ["dot", "matplotlib"])
    if not (isfinite(dpi) and dpi > 0):
        raise ValueError(f"dpi must be above 0, not {dpi!r}")
    new = ax is None or (isinstance(ax, str) and ax == "new")
    figure_title, titles = _figure_and_model_titles(title, len(onx), new)
    if not new:
        axes = np.atleast_1d(np.asarray(ax, dtype=object)).ravel()
        if len(axes) != len(onx):
            raise ValueError(
                f"ax: pass one of matplotlib's axes for each of {len(onx)} models, not {len(axes)}"
            )
    pictures = [lay_out_model(model, None) for model in onx]
    import matplotlib.pyplot as plt

    if new:
        figure, axes = _new_figure(pictures, dpi, figure_title)
    for picture, axis, text in zip(pictures, axes, titles, strict=True):
        axis.set_axis_off()
        axis.set_title(printable_lines(text))
        axis.set(xlim=(0, picture.width), ylim=(picture.height, 0), aspect="equal", anchor="N")
    if new:  # the layout decides how large the axes are, hence the font
        figure.get_layout_engine().execute(figure)
    for picture, axis in zip(pictures, axes, strict=True):
        _FigureDrawing(picture, axis).draw_picture()
    if show:
        plt.show()
    return axes[0] if len(pictures) == 1 else axes


def plot_history(trainer: Any, ax: Any = None) -> Any:
    """Draw the losses of a training over its epochs with matplotlib, and return the axes.

    These are the curves that `onnxgrad train` writes: the training loss of each epoch, and the
    validation loss if there is one. With evaluations within epochs, the x axis counts steps. Of a
    stack, there is a line for each member.

    Args:
        trainer: a `Trainer` or a `TrainerStack`; or a history, as a checkpoint and `History` have.
        ax: axes to draw on; None creates a figure.

    Raises:
        ValueError: no epoch has ended yet.

    Examples:
        >>> import onnxgrad as og
        >>> history = [{"step": 4, "epoch": 1, "loss": 2.0}, {"step": 8, "epoch": 2, "loss": 1.0}]
        >>> axes = og.plot.plot_history(history)
        >>> axes.get_lines()[0].get_ydata().tolist()
        [2.0, 1.0]
    """
    history: Sequence[Mapping[str, Any]] = getattr(trainer, "history", trainer)
    if not any("loss" in entry for entry in history):
        raise ValueError("no epoch has ended yet: call fit first")
    if ax is None:
        import matplotlib.pyplot as plt

        ax = plt.subplots(layout="constrained")[1]
    from matplotlib.ticker import MaxNLocator

    axis = "epoch" if all("loss" in entry for entry in history) else "step"
    for label, name in (("training", "loss"), ("validation", "validation_loss")):
        entries = [entry for entry in history if name in entry]
        if not entries:
            continue
        losses = np.array([entry[name] for entry in entries])
        first, *members = ax.plot([entry[axis] for entry in entries], losses, marker=".")
        first.set_label(label)
        for line in members:  # in one color
            line.set_color(first.get_color())
    ax.set(xlabel=axis, ylabel="mean loss of a row")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.legend()
    return ax


def _figure_and_model_titles(
    title: str | Sequence[str] | None, count: int, new: bool
) -> tuple[str | None, Sequence[str]]:
    """Return the title of the figure (None if it has none) and a title for each model."""
    if not title:
        return None, [""] * count
    if isinstance(title, str) and count > 1:
        if not new:
            raise ValueError(f"one title for {count} models needs a new figure: pass ax='new'")
        return title, [""] * count
    titles = [title] if isinstance(title, str) else title
    if len(titles) != count:
        raise ValueError(f"title: pass one title for each of {count} models, not {len(titles)}")
    return None, titles


def _new_figure(
    pictures: Sequence[PlacedScene], dpi: float, title: str | None
) -> tuple[Any, np.ndarray]:
    """Return a figure that is large enough for the pictures side by side, and its axes."""
    import matplotlib.pyplot as plt

    widths, height = [p.width for p in pictures], max(p.height for p in pictures)
    inches = np.divide([sum(widths), height + _TITLE_HEIGHT], _PIXELS_PER_INCH)
    size = np.clip(inches, 2, np.minimum(_LARGEST, np.divide(_MOST_PIXELS, dpi)))
    figure, grid = plt.subplots(
        1, len(pictures), figsize=size, dpi=dpi, squeeze=False, layout="constrained",
        gridspec_kw={"width_ratios": widths},
    )  # fmt: skip
    if title is not None:
        figure.suptitle(printable_lines(title))
    return figure, grid.ravel()


class _FigureDrawing:
    """Draws a model on matplotlib axes whose unit is a pixel of the layout."""

    def __init__(self, placed: PlacedScene, ax: Any) -> None:
        self.placed, self.ax = placed, ax
        scale = min(ax.bbox.width / placed.width, ax.bbox.height / placed.height)
        self.points = scale * 72 / ax.figure.dpi  # of a pixel of the picture
        self.hues = placed.scene.gradient_hues()

    def draw_picture(self) -> None:
        """Draw the frames of groups, then the arrows, then the boxes on top."""
        groups = self.placed.scene.groups
        for (kind, i), box in self.placed.drawn_cells():
            if kind == "item":
                self._draw_item(self.placed.scene.items[i], box)
            elif i in self.placed.folded:
                self._draw_rectangle(box, facecolor=_BOX, edgecolor=_LINE, zorder=2)
                self._draw_text(box.x + box.width / 2, box.y + 17, groups[i].folded_title)
            else:
                dashes = "--" if groups[i].kind == "subgraph" else "-"
                self._draw_rectangle(box, facecolor=_FRAME, edgecolor=_EDGE, ls=dashes)
                self._draw_text(box.x + 8, box.y + TITLE - 4, groups[i].title, ha="left")
        for curve in self.placed.curves():
            self._draw_arrow(curve.points, curve.across)

    def _draw_item(self, item: Item, box: Box) -> None:
        style: dict[str, Any] = {"facecolor": _BOX, "edgecolor": _KIND_EDGES[item.kind]}
        if "saved" in item.marks:
            style |= {"edgecolor": "#c2410c", "lw": 2.5}
        if item.id in self.hues:  # with the saturation and the lightness of `to_svg`
            color = hls_to_rgb(self.hues[item.id] / 360, 0.5, 0.65)
            style |= {"facecolor": (*color, 0.3), "edgecolor": color}
        self._draw_rectangle(box, rounded=5 * (item.kind == "node"), zorder=2, **style)
        if "weight" in item.marks:
            bar = Box(box.x + 3, box.y + 4, 3, box.height - 8)
            self._draw_rectangle(bar, facecolor=_WEIGHT, zorder=2, lw=0)
        middle = box.x + box.width / 2
        self._draw_text(middle, box.y + TITLE - 3, item.title)
        for k, line in enumerate(item.lines, 1):
            self._draw_text(middle, box.y + TITLE - 3 + k * LINE, line, size=_SMALL_FONT)

    def _draw_rectangle(self, box: Box, rounded: float = 0, lw: float = 1, **style: Any) -> None:
        from matplotlib.patches import FancyBboxPatch

        shape = f"round,pad=0,rounding_size={rounded}" if rounded else "square,pad=0"
        patch = FancyBboxPatch((box.x, box.y), box.width, box.height, boxstyle=shape, **style)
        patch.set_linewidth(lw * self.points)
        self.ax.add_artist(patch)  # quicker than add_patch, which updates the limits

    def _draw_text(
        self, x: float, y: float, text: str, size: float = _FONT, ha: str = "center"
    ) -> None:
        self.ax.text(
            x, y, text, ha=ha, va="center", fontsize=size * self.points, color=_INK, zorder=3,
            family="monospace", parse_math=False,
        )  # fmt: skip

    def _draw_arrow(self, points: tuple[Point, ...], across: bool) -> None:
        from matplotlib.patches import FancyArrowPatch
        from matplotlib.path import Path

        codes = [Path.MOVETO, *[Path.CURVE4] * (len(points) - 1)]
        arrow = FancyArrowPatch(
            path=Path(points, codes), arrowstyle="-|>", mutation_scale=8 * self.points, color=_LINE,
            lw=self.points, ls="--" if across else "-", zorder=1,
        )  # fmt: skip
        self.ax.add_artist(arrow)
