"""Models drawn on matplotlib axes, by Graphviz or, where that is not installed, by matplotlib."""

from __future__ import annotations

import io
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np

from onnxgrad.errors import printable_lines, unknown
from onnxgrad.model.read import ModelLike
from onnxgrad.plot.dot import Box, Drawing, to_dot
from onnxgrad.plot.layering import topological_order
from onnxgrad.reporting import logger

_LARGEST = (40, 200)  # inches: larger pictures are scaled down, as no viewer shows them
_MOST = (3840, 19200)  # pixels
_QUICK = ("-Gnslimit=1", "-Gnslimit1=1")  # a slightly worse layout, in a tenth of the time
PATIENCE = 60  # seconds for Graphviz, whose time grows with the length of the edges
_FONT = 8  # points
_WIDTH, _HEIGHT = 0.6, 1.4  # of a character and of a line, in sizes of the font
_COLORS = {"input": "red", "output": "green", "result": "black", "node": "orange"}


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
        dpi: resolution of the pictures that Graphviz draws, in pixels per inch; they are scaled
            down to at most 3840 by 19200 pixels.
        renderer: "dot": the layout of Graphviz if its program `dot` is installed (such as by
            `apt install graphviz`) and done within a minute, otherwise as "matplotlib";
            "matplotlib": a simpler layout, which needs nothing else and draws no frames around
            branches.
        show: call `matplotlib.pyplot.show()` at the end.
        title: a title, of the figure if there are several models, or a list of one per model.

    Returns:
        The axes: one for one model, else an array with one for each model.

    Raises:
        ValueError: no model, an unknown renderer, a dpi that is not positive, a number of axes or
            titles that is not that of the models, or one title for several models on `ax`.
        ModelError: a model cannot be read.
        RuntimeError: Graphviz fails; the message is its own.

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
    axes = None if new else np.atleast_1d(np.asarray(ax, dtype=object)).ravel()
    figure_title, titles = _titles(title, len(onx), new)
    if axes is not None and len(axes) != len(onx):
        raise ValueError(f"{len(onx)} models, but {len(axes)} axes")
    program = shutil.which("dot") if renderer == "dot" else None
    pictures = [_picture(model, program, dpi) for model in onx]
    return _draw(pictures, axes, figure_title, titles, show)


def _titles(
    title: str | Sequence[str] | None, count: int, new: bool
) -> tuple[str | None, Sequence[str]]:
    """Return the title of the figure, if it has one, and those of the models."""
    if not title:
        return None, [""] * count
    if isinstance(title, str) and count > 1:
        if not new:
            raise ValueError(f"one title for {count} models is that of a new figure: pass ax='new'")
        return title, [""] * count
    titles = [title] if isinstance(title, str) else title
    if len(titles) != count:
        raise ValueError(f"{count} models, but {len(titles)} titles")
    return None, titles


def _draw(
    pictures: Sequence[_Image | _Layers],
    axes: np.ndarray | None,
    figure_title: str | None,
    titles: Sequence[str],
    show: bool,
) -> Any:
    """Draw on the axes, or on those of a new figure, and return them."""
    import matplotlib.pyplot as plt

    if axes is None:
        widths = [p.inches[0] for p in pictures]
        size = (sum(widths), max(p.inches[1] for p in pictures))
        ratios = {"width_ratios": widths}
        figure, grid = plt.subplots(
            1, len(pictures), figsize=size, squeeze=False, gridspec_kw=ratios, layout="constrained"
        )
        if figure_title is not None:
            figure.suptitle(figure_title)
        axes = grid.ravel()
    for picture, axis, text in zip(pictures, axes, titles, strict=True):
        axis.set_axis_off()
        axis.set_title(printable_lines(text))
        picture.draw(axis)
    if show:
        plt.show()
    return axes[0] if len(pictures) == 1 else axes


def _picture(model: ModelLike, program: str | None, dpi: float) -> _Image | _Layers:
    if program is not None:
        try:
            return _Image(model, program, dpi)
        except subprocess.TimeoutExpired:
            logger.warning("Graphviz takes longer than %d s: matplotlib draws", PATIENCE)
    return _Layers(model)


class _Image:
    """The picture that Graphviz draws of a model."""

    def __init__(self, model: ModelLike, program: str, dpi: float) -> None:
        import matplotlib.image

        width, height = (min(i, n / dpi) for i, n in zip(_LARGEST, _MOST, strict=True))
        command = [program, "-Tpng", f"-Gdpi={dpi}", f"-Gsize={width},{height}", *_QUICK]
        graph = to_dot(model).encode()
        done = subprocess.run(command, input=graph, capture_output=True, timeout=PATIENCE)
        if done.returncode:
            text = printable_lines(done.stderr.decode(errors="replace").strip())
            raise RuntimeError(f"{program} failed: {text}")
        self.pixels = matplotlib.image.imread(io.BytesIO(done.stdout))
        self.inches = (self.pixels.shape[1] / dpi, self.pixels.shape[0] / dpi)

    def draw(self, ax: Any) -> None:
        """Show the pixels on `ax`."""
        ax.imshow(self.pixels)
        ax.set_anchor("N")


@dataclass
class _Position:
    """A box and its center."""

    box: Box
    x: float
    y: float

    @property
    def width(self) -> float:
        return max(map(len, self.box.lines)) + 3.0


class _Layers:
    """The boxes of a model in layers, each box one layer above the first box that reads it.

    Units are those of text: characters to the right, lines downwards.
    """

    def __init__(self, model: ModelLike) -> None:
        drawing = Drawing(model)
        self.edges = drawing.edges
        before, after = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
        for a, b in self.edges:
            before[b].append(a)
            after[a].append(b)
        boxes = {box.id: box for box in drawing.frame.all_boxes()}
        self.positions: dict[str, _Position] = {}
        self.lines = 0.0
        for layer in _layers({name: after[name] for name in boxes}):
            self._add_layer([boxes[name] for name in layer], before)
        left = min(p.x - p.width / 2 for p in self.positions.values())
        for p in self.positions.values():
            p.x -= left
        self.columns = max(p.x + p.width / 2 for p in self.positions.values())
        self.inches = (
            min(max(self.columns * _WIDTH * _FONT / 72, 2.0), _LARGEST[0]),
            min(max(self.lines * _HEIGHT * _FONT / 72, 2.0), _LARGEST[1]),
        )

    def _add_layer(self, layer: list[Box], before: dict[str, list[str]]) -> None:
        """Put boxes side by side, ordered by the mean position of the boxes they read."""
        above = {
            box.id: [self.positions[a].x for a in before[box.id] if a in self.positions]
            for box in layer
        }
        middles = {name: sum(xs) / len(xs) if xs else 0.0 for name, xs in above.items()}
        layer.sort(key=lambda box: middles[box.id])
        widths = [_Position(box, 0, 0).width for box in layer]
        x = sum(middles.values()) / len(layer) - sum(widths) / 2
        height = max(len(box.lines) for box in layer)
        for box, width in zip(layer, widths, strict=True):
            self.positions[box.id] = _Position(box, x + width / 2, self.lines + height / 2)
            x += width
        self.lines += height + 2

    def draw(self, ax: Any) -> None:
        """Draw the boxes on `ax`, with a font so small that they fit."""
        points = 72 / ax.figure.dpi  # per pixel
        font = min(
            _FONT,
            ax.bbox.width * points / (_WIDTH * self.columns),
            ax.bbox.height * points / (_HEIGHT * self.lines),
        )
        ax.set(xlim=(0, self.columns), ylim=(self.lines, -0.5))
        for a, b in self.edges:
            start, end = self.positions[a], self.positions[b]
            tip = (end.x, end.y - len(end.box.lines) / 2 - 0.3)
            arrow = {"arrowstyle": "->", "lw": 0.06 * font, "color": "gray"}
            ax.annotate("", tip, (start.x, start.y), arrowprops=arrow, zorder=1)
        for p in self.positions.values():
            style = {
                "boxstyle": "round" if p.box.kind == "node" else "square",
                "facecolor": "orange" if p.box.kind == "node" else "white",
                "edgecolor": _COLORS[p.box.kind],
                "lw": 0.08 * font,
            }
            text = "\n".join(p.box.lines)
            ax.text(
                p.x, p.y, text, ha="center", va="center", fontsize=font, zorder=2, bbox=style,
                family="monospace", parse_math=False,
            )  # fmt: skip


def _layers(after: dict[str, list[str]]) -> list[list[str]]:
    """Return the names in layers, each in the last layer that is above all of its successors.

    Of a circle, the arrow that closes it goes up.
    """
    order, kept = topological_order(after, {a: [(b, 1) for b in after[a]] for a in after})
    height: dict[str, int] = {}
    for name in reversed(order):
        height[name] = max((height[b] + n for b, n in kept[name]), default=0)
    layers: list[list[str]] = [[] for _ in range(max(height.values()) + 1)]
    for name in order:
        layers[-1 - height[name]].append(name)
    return layers
