"""Coordinates of the boxes and arrows of a layered graph, which SVG files and figures draw.

`view.html` has the same placement in JavaScript: its reader folds any set of groups, and each set
moves the boxes around it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from onnxgrad.autodiff.partition import Partition
from onnxgrad.model.read import ModelLike
from onnxgrad.plot.layering import LayeredScene, mean_neighbor_position
from onnxgrad.plot.scene import ROOT, Cell, Scene

GAP, DOWN, PAD, HEAD = 14.0, 30.0, 12.0, 20.0  # pixels between boxes, rows; in frames, titles
LINE, LETTER = 14.0, 6.2  # pixels of a line, and of a character of 11 px
TITLE = 15.0  # pixels from the upper edge of a box or frame to the baseline of its title
_ROUNDS = 4

Point = tuple[float, float]


@dataclass
class Box:
    """A rectangle in pixels: its upper left corner, width and height."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True)
class Curve:
    """The points of an arrow in a picture, and the values that the arrow stands for.

    Attributes:
        points: its start, then two control points and the end of each cubic Bezier curve.
        across: whether it leads from the forward to the backward pass, or back.
        texts: names and types of the values that have this way.
    """

    points: tuple[Point, ...]
    across: bool
    texts: list[str]


class PlacedScene:
    """A picture's boxes of items, groups and bends; groups in `folded` are drawn as
    single boxes.
    """

    def __init__(self, layered: LayeredScene, folded: set[int]) -> None:
        self.layered, self.scene, self.folded = layered, layered.scene, folded
        self.boxes: dict[Cell, Box] = {}
        self.width, self.height = self._place_group(ROOT)
        self._move_cells(ROOT, 0.0, 0.0)

    def drawn_cells(self, group: int = ROOT) -> Iterator[tuple[Cell, Box]]:
        """Yield (cell, box) for each item and group; a group comes before its items."""
        for row in self.layered.groups[group].rows:
            for cell in row:
                if cell[0] != "bend":
                    yield cell, self.boxes[cell]
                if cell[0] == "group" and cell[1] not in self.folded:
                    yield from self.drawn_cells(cell[1])

    def curves(self) -> list[Curve]:
        """Return the curves of the arrows between boxes; arrows with equal points are merged."""
        found: dict[tuple[Point, ...], Curve] = {}
        right = self.layered.groups[ROOT].right
        for arrow, way in zip(self.scene.arrows, self.layered.arrow_bends, strict=True):
            ends = (arrow.source, arrow.target)
            a, b = map(self._visible_box, ends)
            if a is b:
                continue
            across = len({self.scene.root_cell(item) in right for item in ends}) > 1
            bends = [box for n in way if (box := self.boxes.get(("bend", n)))]
            points = _sideways_arrow_points(a, b) if across else _vertical_arrow_points(a, bends, b)
            found.setdefault(points, Curve(points, across, [])).texts.append(arrow.text)
        return list(found.values())

    def _visible_box(self, item: int) -> Box:
        """Return the box that shows an item: the outermost folded group's, or the item's."""
        folded = (("group", g) for g in self.scene.groups_around(item) if g in self.folded)
        return self.boxes[next(folded, ("item", item))]

    def _cell_size(self, cell: Cell) -> tuple[float, float]:
        kind, i = cell
        if kind == "bend":
            return 2, 0
        if kind == "group" and i not in self.folded:
            return self._place_group(i)
        return item_size(self.scene, i) if kind == "item" else folded_size(self.scene, i)

    def _place_group(self, group: int) -> tuple[float, float]:
        """Compute the boxes of the items and groups in a group, relative to its corner; return its
        width and height.
        """
        layers = self.layered.groups[group]
        sizes = {cell: self._cell_size(cell) for row in layers.rows for cell in row}
        above, below = layers.neighbors()
        center: dict[Cell, float] = {}
        edge = 0.0  # between forward and backward pass
        for right in (False, True):
            rows = [[c for c in row if (c in layers.right) == right] for row in layers.rows]
            _center_rows(rows, sizes, above, below, center)
            side = [c for row in rows for c in row]
            left = min((center[c] - sizes[c][0] / 2 for c in side), default=0.0)
            for c in side:
                center[c] += edge - left
            edge = 4 * GAP + max((center[c] + sizes[c][0] / 2 for c in side), default=0.0)
        head = PAD + HEAD if group != ROOT else PAD
        y = head
        for row in layers.rows:
            highest = max(sizes[c][1] for c in row)
            for c in row:
                width, height = sizes[c]
                x = PAD + center[c] - width / 2
                self.boxes[c] = Box(x, y + (highest - height) / 2, width, height)
            y += highest + DOWN
        right_edge = max((self.boxes[c].x + sizes[c][0] for c in sizes), default=0.0) + PAD
        least = title_width(self.scene, group)
        return max(right_edge, least), y - DOWN + PAD if sizes else head

    def _move_cells(self, group: int, x: float, y: float) -> None:
        """Move the boxes in a group, which are relative to the group's corner, so that the corner
        is (x, y).
        """
        for row in self.layered.groups[group].rows:
            for cell in row:
                box = self.boxes[cell]
                box.x, box.y = box.x + x, box.y + y
                if cell[0] == "group" and cell[1] not in self.folded:
                    self._move_cells(cell[1], box.x, box.y)


def lay_out_model(model: ModelLike | Partition, fold: bool | None) -> PlacedScene:
    """Return the laid-out picture of a model; `fold` says whether modules are single boxes, as in
    `to_svg`.
    """
    scene = Scene(model)
    return PlacedScene(LayeredScene(scene), scene.folded_groups(fold))


def item_size(scene: Scene, item: int) -> tuple[float, float]:
    """Return width and height of the box of an item."""
    shown = scene.items[item]
    width = LETTER * max(map(len, [shown.title, *shown.lines])) + 20
    return width, LINE * (1 + len(shown.lines)) + 10


def folded_size(scene: Scene, group: int) -> tuple[float, float]:
    """Return width and height of the box of a folded group."""
    return LETTER * len(scene.groups[group].folded_title) + 24, 34


def title_width(scene: Scene, group: int) -> float:
    """Return the least width of a group's frame, so that the title fits."""
    return LETTER * (len(scene.groups[group].title) + 6) + 2 * PAD


def _center_rows(rows, sizes, above, below, center) -> None:
    """Set the horizontal centers of boxes in rows, near their linked boxes, without overlap."""
    for row in rows:
        x = 0.0
        for c in row:
            center[c] = x + sizes[c][0] / 2
            x += sizes[c][0] + GAP
    for n in range(_ROUNDS):
        near = below if n % 2 else above
        for row in reversed(rows) if n % 2 else rows:
            wished = [mean_neighbor_position(c, near[c], center) for c in row]
            gaps = [(sizes[a][0] + sizes[b][0]) / 2 + GAP for a, b in pairwise(row)]
            center.update(zip(row, spread_positions(wished, gaps), strict=True))


def spread_positions(wished: list[float], gaps: list[float]) -> list[float]:
    """Return positions nearest to `wished`, by least squares, that are at least `gaps` apart.

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


def _vertical_arrow_points(a: Box, bends: list[Box], b: Box) -> tuple[Point, ...]:
    """Return the points of an arrow from the box `a` through `bends` to `b`, above or below it."""
    down = a.y < b.y
    bends = sorted(bends, key=lambda bend: bend.y, reverse=not down)
    ends = [(a.x + a.width / 2, a.y + a.height if down else a.y)]
    ends += [(bend.x + bend.width / 2, bend.y) for bend in bends]
    ends.append((b.x + b.width / 2, b.y if down else b.y + b.height))
    points = [ends[0]]
    for (x, y), (u, v) in pairwise(ends):
        points += [(x, (y + v) / 2), (u, (y + v) / 2), (u, v)]
    return tuple(points)


def _sideways_arrow_points(a: Box, b: Box) -> tuple[Point, ...]:
    """Return the points of an arrow from the side of the box `a` to the facing side of `b`."""
    right = a.x < b.x
    x, y = a.x + a.width * right, a.y + a.height / 2
    u, v = b.x + b.width * (not right), b.y + b.height / 2
    return (x, y), ((x + u) / 2, y), ((x + u) / 2, v), (u, v)
