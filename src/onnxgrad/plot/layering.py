"""Layers of a graph for a picture: each group has rows of items, folded groups and bends.

Sugiyama, Tagawa & Toda 1981, "Methods for visual understanding of hierarchical system structures":
rows by longest paths, bends where an arrow passes a row, and an order in each row by barycenters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

from onnxgrad.plot.scene import ROOT, Arrow, Cell, Scene

T = TypeVar("T")
_SWEEPS = 4
_NEAR = 8  # rows: a longer arrow bends only so far from its ends, so that bends grow as arrows do


@dataclass
class Rows:
    """The rows of one group, from above.

    Attributes:
        rows: cells of each row, from left to right.
        links: pairs of a cell and one in a later row; those between forward and backward pass are
            not among them.
        right: cells of the backward pass, which stand to the right of the others.
    """

    rows: list[list[Cell]] = field(default_factory=list)
    links: list[tuple[Cell, Cell]] = field(default_factory=list)
    right: set[Cell] = field(default_factory=set)

    def neighbors(self) -> tuple[dict[Cell, list[Cell]], dict[Cell, list[Cell]]]:
        """Return the cells that are linked to each one from above, and from below."""
        above, below = defaultdict(list), defaultdict(list)
        for a, b in self.links:
            above[b].append(a)
            below[a].append(b)
        return above, below


class Layered:
    """The rows of all groups of a scene, and the way of each arrow.

    Attributes:
        scene: the scene.
        groups: `{id: rows}`.
        ways: for each arrow, the bends on its way, in the groups around its ends; in no order, as
            an arrow goes up or down all the way. A long one is straight in its middle.
    """

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.groups: dict[int, Rows] = {}
        self.ways: list[list[int]] = [[] for _ in scene.arrows]
        self._bends = 0
        self._neighbors: dict[int, list[int]] = defaultdict(list)
        for arrow in scene.arrows:
            self._neighbors[arrow.source].append(arrow.target)
            self._neighbors[arrow.target].append(arrow.source)
        children: dict[int, list[Cell]] = defaultdict(list)
        self._inside: dict[Cell, list[int]] = defaultdict(list)  # the items in a cell of the root
        for item in scene.items:
            children[item.group].append(("item", item.id))
            self._inside[scene.outermost(item.id)].append(item.id)
        for g in scene.groups[1:]:
            children[g.parent].append(("group", g.id))
        lifted: dict[int, dict[tuple[Cell, Cell], list[int]]] = defaultdict(dict)
        self._passing: dict[int, dict[tuple[int, Cell, bool], list[int]]] = defaultdict(dict)
        for i, arrow in enumerate(scene.arrows):
            paths = [scene.path(j) for j in (arrow.source, arrow.target)]
            depth, pair = _lift(paths, arrow)
            if pair[0] == pair[1]:
                continue
            lifted[paths[0][depth]].setdefault(pair, []).append(i)
            if depth == ROOT and self._is_backward(pair[0]) != self._is_backward(pair[1]):
                continue
            for path, end, enters in zip(paths, (arrow.source, arrow.target), (0, 1), strict=True):
                inner: list[Cell] = [("group", n) for n in path[depth + 2 :]]
                for n, cell in zip(path[depth + 1 :], [*inner, ("item", end)], strict=False):
                    key = (arrow.source, cell, bool(enters))
                    self._passing[n].setdefault(key, []).append(i)
        for n in range(len(scene.groups)):
            self.groups[n] = self._rows(n, children[n], lifted[n])

    def _rows(
        self, group: int, cells: list[Cell], pairs: dict[tuple[Cell, Cell], list[int]]
    ) -> Rows:
        made = Rows(right={cell for cell in cells if group == ROOT and self._is_backward(cell)})
        drawn = [p for p in pairs if (p[0] in made.right) == (p[1] in made.right)]
        upward = self.scene.groups[group].kind == "backward"
        constraints = self._constraints(drawn, cells, made.right)
        row = _longest(cells, [(b, a, n) if upward else (a, b, n) for a, b, n in constraints])
        last = max(row.values(), default=-1)
        for a, b in drawn:
            way = self._way(a, b, row)
            made.links += list(pairwise(way))
            self._pass(pairs[a, b], way[1:-1])
            if a in made.right:
                made.right.update(way)
        for (_, cell, enters), arrows in self._passing[group].items():
            r = row[cell]
            passed = range(r - 1, -1, -1) if enters != upward else range(r + 1, last + 1)
            way = [cell, *(self._bend(n, row) for n in _near_ends(passed))]
            links = list(pairwise(way))
            made.links += [(b, a) for a, b in links] if enters != upward else links
            self._pass(arrows, way[1:])
        made.rows = [[] for _ in range(last + 1)]
        for cell, r in row.items():
            made.rows[r].append(cell)
        made.rows = [cells for cells in made.rows if cells]
        _order(made)
        return made

    def _pass(self, arrows: list[int], bends: list[Cell]) -> None:
        for arrow in arrows:
            self.ways[arrow] += [n for _, n in bends]

    def _bend(self, row: int, rows: dict[Cell, int]) -> Cell:
        cell: Cell = ("bend", self._bends)
        self._bends += 1
        rows[cell] = row
        return cell

    def _is_backward(self, cell: Cell) -> bool:
        kind, i = cell
        if kind == "group":
            return self.scene.groups[i].kind == "backward"
        item = self.scene.items[i]
        if item.kind == "node":
            return "backward" in item.marks
        near = self._neighbors[item.id]  # an input or output of the backward pass only
        return bool(near) and all("backward" in self.scene.items[j].marks for j in near)

    def _constraints(
        self, drawn: list[tuple[Cell, Cell]], cells: list[Cell], right: set[Cell]
    ) -> list[tuple[Cell, Cell, int]]:
        """Return triples (a, b, n): b is at least n rows below a.

        The backward pass goes up, each node not above the one that it differentiates, and above
        what follows that one.
        """
        if not right:
            return [(a, b, 1) for a, b in drawn]
        found = [(b, a, 1) if a in right else (a, b, 1) for a, b in drawn]
        serving: dict[Cell, list[Cell]] = defaultdict(list)
        items = self.scene.items
        inside = {i: cell for cell in cells for i in self._inside[cell]}
        of = {items[i].first: c for i, c in inside.items() if "backward" not in items[i].marks}
        for cell in right:
            for i in self._inside[cell]:
                if (primal := items[i].primal) and primal in of:
                    serving[of[primal]].append(cell)
        found += [(a, b, 0) for a, group in serving.items() for b in dict.fromkeys(group)]
        for a, b in drawn:
            if a not in right:
                found += [(c, b, 1) for c in dict.fromkeys(serving.get(a, ()))]
        return found

    def _way(self, a: Cell, b: Cell, row: dict[Cell, int]) -> list[Cell]:
        """Return the cells from the upper to the lower of `a` and `b`, with bends between them."""
        if row[a] > row[b]:
            a, b = b, a
        return [a, *(self._bend(r, row) for r in _near_ends(range(row[a] + 1, row[b]))), b]


def _near_ends(rows: range) -> list[int]:
    """Return the rows in which an arrow that passes `rows` bends."""
    return [*rows] if len(rows) <= 2 * _NEAR else [*rows[:_NEAR], *rows[-_NEAR:]]


def _lift(paths: list[tuple[int, ...]], arrow: Arrow) -> tuple[int, tuple[Cell, Cell]]:
    """Return the depth of the innermost group around both ends, and the cells there with these.

    `paths` are the groups around each end, from the root.
    """
    depth = 0
    while all(depth + 1 < len(p) for p in paths) and paths[0][depth + 1] == paths[1][depth + 1]:
        depth += 1
    cells: list[Cell] = [
        ("group", path[depth + 1]) if depth + 1 < len(path) else ("item", i)
        for path, i in zip(paths, (arrow.source, arrow.target), strict=True)
    ]
    return depth, (cells[0], cells[1])


def _longest(cells: list[Cell], constraints: Iterable[tuple[Cell, Cell, int]]) -> dict[Cell, int]:
    """Return the row of each cell; constraints that would close a circle are dropped."""
    after: dict[Cell, list[tuple[Cell, int]]] = defaultdict(list)
    for a, b, n in constraints:
        after[a].append((b, n))
    order, kept = topological_order(cells, after)
    row = dict.fromkeys(cells, 0)
    for a in order:
        for b, n in kept[a]:
            row[b] = max(row[b], row[a] + n)
    entered = {b for edges in kept.values() for b, _ in edges}
    for a in reversed(order):  # inputs go down to what reads them
        if a not in entered and kept[a]:
            row[a] = max(0, min(row[b] - n for b, n in kept[a]))
    return row


def topological_order(
    cells: Iterable[T], after: Mapping[T, list[tuple[T, int]]]
) -> tuple[list[T], dict[T, list[tuple[T, int]]]]:
    """Return the cells in topological order, and `after` without the edges that close circles."""
    kept: dict[T, list[tuple[T, int]]] = defaultdict(list)
    state: dict[T, int] = {}  # 1: on the path, 2: done
    order: list[T] = []
    for start in cells:
        if start in state:
            continue
        state[start] = 1
        stack = [(start, iter(after[start]))]
        while stack:
            cell, edges = stack[-1]
            for b, n in edges:
                if state.get(b) == 1:
                    continue  # back to the path
                kept[cell].append((b, n))
                if b not in state:
                    state[b] = 1
                    stack.append((b, iter(after[b])))
                    break
            else:
                state[cell] = 2
                order.append(cell)
                stack.pop()
    return order[::-1], kept


def _order(made: Rows) -> None:
    """Order each row by the mean position of its neighbors, sweeping down and up."""
    above, below = made.neighbors()
    position = {cell: i for row in made.rows for i, cell in enumerate(row)}
    for sweep in range(2 * _SWEEPS):
        neighbors = below if sweep % 2 else above
        for row in reversed(made.rows) if sweep % 2 else made.rows:
            means = {
                cell: sum(position[n] for n in near) / len(near)
                if (near := neighbors[cell])
                else position[cell]
                for cell in row
            }
            row.sort(key=lambda cell: (cell in made.right, means[cell]))
            position.update((cell, i) for i, cell in enumerate(row))
