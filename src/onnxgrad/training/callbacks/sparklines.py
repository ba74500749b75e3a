"""Small curves: as characters of a terminal, and as the points of an SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

_BLOCKS = "▁▂▃▄▅▆▇█"

_KEPT = 4096  # losses


class StepLosses:
    """The mean losses of rows between the calls of `on_step_end`."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self.begin()

    def begin(self) -> None:
        """Begin an epoch, whose sums begin at zero."""
        self._sum, self._rows = 0.0, 0

    def add(self, progress: Any) -> tuple[float, int] | None:
        """Return the mean loss and the rows since the last call; None without any."""
        if progress.rows <= self._rows or not math.isfinite(progress.loss):
            return None
        total, rows = progress.loss * progress.rows, progress.rows - self._rows
        loss = (total - self._sum) / rows
        self._sum, self._rows = total, progress.rows
        self.values.append(loss)
        if len(self.values) > _KEPT:
            self.values = binned(self.values, _KEPT // 2)
        return loss, rows


def sparkline(values: Sequence[float], width: int) -> str:
    """Return the finite values as at most `width` characters, the lowest ▁ and the highest █.

    More values than that are means of equally many neighbors. A constant is a line in the middle.
    """
    finite = [v for v in values if math.isfinite(v)]
    if not finite or width < 1:
        return ""
    means = binned(finite, width)
    low, high = min(means), max(means)
    if high == low:
        return _BLOCKS[3] * len(means)
    top = len(_BLOCKS) - 1
    return "".join(_BLOCKS[round((v - low) / (high - low) * top)] for v in means)


def binned(values: Sequence[float], most: int) -> list[float]:
    """Return the values, or at most `most` means of neighbors."""
    if len(values) <= most:
        return list(values)
    edges = [round(i * len(values) / most) for i in range(most + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges) if b > a]


def points(values: Sequence[float | None], width: float, height: float, margin: float = 2.0) -> str:
    """Return the `points` of a polyline of SVG through the finite values, from left to right.

    The y axis is from the smallest to the largest value; that of a constant is in the middle.
    """
    pairs = [(i, v) for i, v in enumerate(values) if v is not None and math.isfinite(v)]
    if not pairs:
        return ""
    low, high = min(v for _, v in pairs), max(v for _, v in pairs)
    scale, last = (high - low) or 1.0, max(1, len(values) - 1)
    inner = height - 2 * margin

    def y(value: float) -> float:
        return margin + inner * (0.5 if high == low else 1 - (value - low) / scale)

    return " ".join(f"{width * i / last:.2f},{y(v):.2f}" for i, v in pairs)
