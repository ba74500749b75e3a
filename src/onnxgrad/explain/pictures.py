"""Plots of an attribution of one row: a heat map of an image, colored text, or bars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = "RdBu_r"  # red is positive
_CHARACTERS_PER_LINE = 60


def show_image(attribution: Any, image: Any = None, axes: Axes | None = None) -> Axes:
    """Draw an attribution as a heat map, red where it is positive and blue where it is negative.

    Args:
        attribution: attribution of one row, (height, width), or (channels, height, width), which is
            summed over the channels. It may be smaller than the image, as by `grad_cam`.
        image: (height, width), (1, height, width) or (3, height, width), in any units: it is drawn
            in gray below.
        axes: axes to draw on; None: the axes of a new figure.

    Returns:
        The axes.

    Raises:
        ValueError: an array of other axes, or one that is not finite.

    Examples:
        >>> import matplotlib.pyplot as plt, numpy as np, onnxgrad as og
        >>> axes = og.explain.show_image(np.float32([[[0, 1], [-2, 0]]]), np.zeros((3, 8, 8)))
        >>> axes.images[1].get_clim()
        (-2.0, 2.0)
        >>> plt.close(axes.figure)
    """
    heat = _image_without_channels("attribution", attribution, np.sum)
    axes = _axes_or_new(axes)
    height, width = heat.shape
    if image is not None:
        gray = _image_without_channels("image", image, np.mean)
        height, width = gray.shape
        axes.imshow(gray, cmap="gray", extent=(0, width, height, 0))
    limit = float(np.abs(heat).max()) or 1.0
    axes.imshow(
        heat, cmap=_COLORS, vmin=-limit, vmax=limit, extent=(0, width, height, 0),
        alpha=0.6 if image is not None else 1.0, interpolation="bilinear",
    )  # fmt: skip
    axes.set_axis_off()
    return axes


def show_text(tokens: Sequence[str], attribution: Any, axes: Axes | None = None) -> Axes:
    """Write tokens on colored ground, red where the attribution is positive, blue where negative.

    Args:
        tokens: one text a token.
        attribution: attribution of one row, a number for each token, or (tokens, features), which
            is summed over the features, as an attribution to an embedding.
        axes: axes to draw on; None: the axes of a new figure.

    Returns:
        The axes.

    Raises:
        ValueError: another number of tokens, or an array that is not finite.

    Examples:
        >>> import matplotlib.pyplot as plt, onnxgrad as og
        >>> axes = og.explain.show_text(["not", "bad"], [-1.0, 0.5])
        >>> [text.get_text() for text in axes.texts]
        ['not', 'bad']
        >>> plt.close(axes.figure)
    """
    import matplotlib

    numbers = _attribution_per_name(tokens, attribution)
    axes, colors = _axes_or_new(axes), matplotlib.colormaps[_COLORS]
    limit, column, line = float(np.abs(numbers).max(initial=0)) or 1.0, 0, 0
    for token, number in zip(tokens, numbers, strict=True):
        if column and column + len(token) > _CHARACTERS_PER_LINE:
            column, line = 0, line + 1
        ground = {"facecolor": colors(0.5 + number / limit / 3), "edgecolor": "none", "pad": 2}
        axes.text(column, -line, token, family="monospace", bbox=ground)
        column += len(token) + 1
    axes.set(xlim=(0, _CHARACTERS_PER_LINE), ylim=(-line - 1, 1))
    axes.set_axis_off()
    return axes


def show_table(names: Sequence[str], attribution: Any, axes: Axes | None = None) -> Axes:
    """Draw the attributions to the columns of a table as bars, the greatest on top.

    Args:
        names: names of the columns.
        attribution: attribution of one row, a number for each column, or (columns, features), which
            is summed over the features.
        axes: axes to draw on; None: the axes of a new figure.

    Returns:
        The axes.

    Raises:
        ValueError: another number of columns, or an array that is not finite.

    Examples:
        >>> import matplotlib.pyplot as plt, onnxgrad as og
        >>> axes = og.explain.show_table(["age", "income"], [0.2, -1.0])
        >>> [float(bar.get_width()) for bar in axes.patches]
        [0.2, -1.0]
        >>> plt.close(axes.figure)
    """
    numbers = _attribution_per_name(names, attribution)
    axes, order = _axes_or_new(axes), np.argsort(np.abs(numbers), kind="stable")
    bars = numbers[order].tolist()
    positions = list(range(len(bars)))
    axes.barh(positions, bars, color=["tab:red" if b > 0 else "tab:blue" for b in bars])
    axes.set_yticks(positions, [str(names[i]) for i in order])
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_xlabel("attribution")
    return axes


def _axes_or_new(axes: Axes | None) -> Axes:
    """Return matplotlib's `axes`, or the axes of a new figure if it is None."""
    from matplotlib import pyplot

    return pyplot.subplots(layout="constrained")[1] if axes is None else axes


def _image_without_channels(what: str, array: Any, reduce: Any) -> np.ndarray:
    """Return an image as (height, width); `reduce`, np.sum or np.mean, joins its channels."""
    plane = _finite_array(what, array)
    if plane.ndim == 3 and plane.shape[0] <= 4:
        plane = reduce(plane, axis=0)
    if plane.ndim != 2:
        raise ValueError(
            f"the {what} has the shape {list(plane.shape)}: give the {what} of one row, of shape "
            "(height, width) or (channels, height, width)"
        )
    return plane


def _attribution_per_name(names: Sequence[str], attribution: Any) -> np.ndarray:
    """Return an attribution of one row as a vector with one number per name."""
    numbers = _finite_array("attribution", attribution)
    if numbers.ndim == 2:
        numbers = numbers.sum(axis=1)
    if numbers.shape != (len(names),):
        raise ValueError(
            f"{len(names)} names, and an attribution of shape {list(numbers.shape)}: give the "
            "attribution of one row, with a number for each name"
        )
    return numbers


def _finite_array(what: str, array: Any) -> np.ndarray:
    """Return `array` as float64; raise `ValueError` if an element is NaN or infinite."""
    numbers = np.asarray(array, np.float64)
    if not np.isfinite(numbers).all():
        raise ValueError(
            f"the {what} holds NaN or infinity, which has no color: replace these elements"
        )
    return numbers
