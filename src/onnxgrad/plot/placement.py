"""Coordinates of the cells of a layered graph. `view.html` places cells in the same way."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise

from onnxgrad.plot.layering import Layered
from onnxgrad.plot.scene import ROOT, Cell, Item

GAP, DOWN, PAD, HEAD = 14.0, 30.0, 12.0, 20.0  # pixels: between cells, rows; in frames; their title
LINE, LETTER = 14.0, 6.2  # pixels of a line, and of a character of 11 px
_ROUNDS = 4


@dataclass
class Box:
    """A rectangle; x and y are those of its upper left corner, in pixels."""

    x: float
    y: float
    width: float
    height: float


class Placed:
    """The boxes of items, groups and bends; `folded` groups are drawn as one box."""

    def __init__(self, layered: Layered, folded: Collection[int]) -> None:
        self.layered, self.folded = layered, folded
        self.boxes: dict[Cell, Box] = {}
        whole = self._group(ROOT)
        self.width, self.height = whole.width, whole.height
        self._shift(ROOT, 0.0, 0.0)

    def _size(self, cell: Cell) -> Box:
        kind, i = cell
        if kind == "bend":
            return Box(0, 0, 2, 0)
        if kind == "item":
            item = self.layered.scene.items[i]
            return Box(0, 0, item_width(item), LINE * (1 + len(item.lines)) + 10)
        if i in self.folded:
            return Box(0, 0, LETTER * (len(self.layered.scene.groups[i].title) + 6) + 24, 34)
        return self._group(i)

    def _group(self, group: int) -> Box:
        """Place the cells of a group relative to its corner, and return its size."""
        made = self.layered.groups[group]
        sizes = {cell: self._size(cell) for row in made.rows for cell in row}
        above, below = made.neighbors()
        center: dict[Cell, float] = {}
        edge = 0.0  # between forward and backward pass
        for right in (False, True):
            rows = [[c for c in row if (c in made.right) == right] for row in made.rows]
            self._across(rows, sizes, above, below, center)
            mine = [c for row in rows for c in row]
            left = min((center[c] - sizes[c].width / 2 for c in mine), default=0.0)
            for c in mine:
                center[c] += edge - left
            edge = 4 * GAP + max((center[c] + sizes[c].width / 2 for c in mine), default=0.0)
        head = PAD + HEAD if group != ROOT else PAD
        y = head
        for row in made.rows:
            height = max(sizes[c].height for c in row)
            for c in row:
                size = sizes[c]
                x = PAD + center[c] - size.width / 2
                self.boxes[c] = Box(x, y + (height - size.height) / 2, size.width, size.height)
            y += height + DOWN
        width = max((self.boxes[c].x + sizes[c].width for c in sizes), default=0.0) + PAD
        title = LETTER * (len(self.layered.scene.groups[group].title) + 6) + 2 * PAD
        return Box(0, 0, max(width, title), y - DOWN + PAD if sizes else head)

    def _across(self, rows, sizes, above, below, center) -> None:
        """Set the centers of cells, near those of their neighbors and without overlap."""
        for row in rows:
            x = 0.0
            for c in row:
                center[c] = x + sizes[c].width / 2
                x += sizes[c].width + GAP
        for n in range(_ROUNDS):
            near = below if n % 2 else above
            for row in reversed(rows) if n % 2 else rows:
                wished = [
                    sum(center[m] for m in near[c]) / len(near[c]) if near[c] else center[c]
                    for c in row
                ]
                gaps = [(sizes[a].width + sizes[b].width) / 2 + GAP for a, b in pairwise(row)]
                center.update(zip(row, spread(wished, gaps), strict=True))

    def _shift(self, group: int, x: float, y: float) -> None:
        for row in self.layered.groups[group].rows:
            for cell in row:
                box = self.boxes[cell]
                box.x, box.y = box.x + x, box.y + y
                if cell[0] == "group" and cell[1] not in self.folded:
                    self._shift(cell[1], box.x, box.y)


def item_width(item: Item) -> float:
    """Return the width of the box of an item."""
    return LETTER * max(map(len, [item.title, *item.lines])) + 20


def spread(wished: list[float], gaps: list[float]) -> list[float]:
    """Return the positions nearest to `wished`, by squares, that are at least `gaps` apart.

    Pools adjacent violators: Barlow et al. 1972, "Statistical inference under order restrictions".
    """
    offsets = [0.0]
    for gap in gaps:
        offsets.append(offsets[-1] + gap)
    pools: list[list[float]] = []  # sum, count
    for wish, offset in zip(wished, offsets, strict=False):
        pools.append([wish - offset, 1])
        while len(pools) > 1 and pools[-2][0] / pools[-2][1] > pools[-1][0] / pools[-1][1]:
            total, count = pools.pop()
            pools[-1][0] += total
            pools[-1][1] += count
    means = [total / count for total, count in pools for _ in range(int(count))]
    return [mean + offset for mean, offset in zip(means, offsets, strict=False)]
