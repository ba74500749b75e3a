"""The progress of training in a notebook: a bar, the numbers, and curves of the losses."""

from __future__ import annotations

import time
from collections.abc import Sequence
from html import escape
from typing import Any

from onnxgrad.training.callbacks.sparklines import binned, points

SECONDS = 0.5  # between two drawings
_WIDTH, _HEIGHT, _POINTS = 480, 120, 240
_COLORS = ("#0b7bd4", "#d9730d")  # readable on white and on black


class NotebookView:
    """One output of a notebook cell, which is drawn anew while training runs.

    Each curve has an axis of its own, from its lowest to its highest value.
    """

    def __init__(self) -> None:
        from IPython.display import HTML, display

        self._html = HTML
        self._handle: Any = display(HTML(""), display_id=True)
        self._shown = 0.0

    def show(
        self,
        text: str,
        share: float | None,
        curves: Sequence[tuple[str, Sequence[float]]],
        last: bool = False,
    ) -> None:
        """Draw it, unless that was done a moment ago and this is not the `last` time."""
        now = time.monotonic()
        if self._handle is not None and (last or now - self._shown >= SECONDS):
            self._shown = now
            self._handle.update(self._html(drawn(text, share, curves)))


def drawn(text: str, share: float | None, curves: Sequence[tuple[str, Sequence[float]]]) -> str:
    """Return HTML of a progress bar of a share from 0 to 1, a text, and curves with their names."""
    value = "" if share is None else f' value="{min(1.0, share):.4f}"'
    lines, legend = [], []
    for color, (name, values) in zip(_COLORS, curves, strict=False):
        if not values:
            continue
        line = points(binned(values, _POINTS), _WIDTH, _HEIGHT, 4)
        lines.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
        ends = f"{min(values):.4g} to {max(values):.4g}"
        legend.append(f'<span style="color: {color}">{escape(name)}: {ends}</span>')
    picture = (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" style="display: block; max-width: {_WIDTH}px; '
        f'border-bottom: 1px solid currentColor">{"".join(lines)}</svg>'
        f"<div>{' · '.join(legend)}</div>"
    )
    return (
        f'<div><progress max="1"{value} style="width: 100%; max-width: {_WIDTH}px"></progress>'
        f"<div>{escape(text)}</div>{picture if lines else ''}</div>"
    )
