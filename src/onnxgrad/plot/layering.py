"""Layers of a graph for a picture: each group has rows of items, folded groups and bends.

Sugiyama, Tagawa & Toda 1981, "Methods for visual understanding of hierarchical system structures":
rows by longest paths, bends where an arrow passes a row, and an order in each row by barycenters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from onnxgrad.plot.scene import ROOT, Arrow, Cell, Scene

_SWEEPS = 4
_NEAR = 8  # rows at each end of a longer arrow that get bends: their count grows as the arrows'

Edges = Mapping[Cell, list[tuple[Cell, int]]]  # {cell: (cell below, least number of rows between)}


@dataclass
class BoxRows:
    """The rows of boxes in one group of a picture, from top to bottom.

    Attributes:
        rows: cells of each row, from left to right.
        links: pairs of a cell and one in a later row; no pair of forward and backward pass.
        right: cells of the backward pass, which stand to the right of the forward pass.
    """

    rows: list[list[Cell]] = field(default_factory=list)
    links: list[tuple[Cell, Cell]] = field(default_factory=list)
    right: set[Cell] = field(default_factory=set)

    def neighbors(self) -> tuple[dict[Cell, list[Cell]], dict[Cell, list[Cell]]]:
        """Return two dicts: for each cell (item, group or bend), the linked cells above it, and
        below it.
        """
        above, below = defaultdict(list), defaultdict(list)
        for a, b in self.links:
            above[b].append(a)
            below[a].append(b)
        return above, below

    def sort_rows(self) -> None:
        """Order each row by the mean position of each cell's neighbors, sweeping down and up."""
        above, below = self.neighbors()
        position = {cell: i for row in self.rows for i, cell in enumerate(row)}
        for sweep in range(2 * _SWEEPS):
            neighbors = below if sweep % 2 else above
            for row in reversed(self.rows) if sweep % 2 else self.rows:
                means = {
                    cell: mean_neighbor_position(cell, neighbors[cell], position) for cell in row
                }
                row.sort(key=lambda cell: (cell in self.right, means[cell]))
                position.update((cell, i) for i, cell in enumerate(row))


class LayeredScene:
    """The rows of boxes of all groups of a scene, and the bends of each arrow.

    Attributes:
        scene: the scene.
        groups: `{id: rows}`.
        arrow_bends: for each arrow, the bends on its way, in the groups around its ends; in no
            order, as an arrow goes up or down all the way. A long arrow is straight in its middle.
    """

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.groups: dict[int, BoxRows] = {}
        self.arrow_bends: list[list[int]] = [[] for _ in scene.arrows]
        self._bends = 0
        self._neighbors: dict[int, list[int]] = defaultdict(list)
        for arrow in scene.arrows:
            self._neighbors[arrow.source].append(arrow.target)
            self._neighbors[arrow.target].append(arrow.source)
        children: dict[int, list[Cell]] = defaultdict(list)
        self._inside: dict[Cell, list[int]] = defaultdict(list)  # the items in a cell of the root
        for item in scene.items:
            children[item.group].append(("item", item.id))
            self._inside[scene.root_cell(item.id)].append(item.id)
        for g in scene.groups[1:]:
            children[g.parent].append(("group", g.id))
        lifted: dict[int, dict[tuple[Cell, Cell], list[int]]] = defaultdict(dict)
        self._passing: dict[int, dict[tuple[int, Cell, bool], list[int]]] = defaultdict(dict)
        for i, arrow in enumerate(scene.arrows):
            paths = [scene.groups_around(j) for j in (arrow.source, arrow.target)]
            depth, pair = _common_group_of_ends(paths, arrow)
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
            self.groups[n] = self._rows_of_group(n, children[n], lifted[n])

    def _rows_of_group(
        self, group: int, cells: list[Cell], pairs: dict[tuple[Cell, Cell], list[int]]
    ) -> BoxRows:
        """Return the `BoxRows` of a group; `pairs` maps pairs of linked cells (items or groups) to
        indices of arrows.
        """
        found = BoxRows(right={cell for cell in cells if group == ROOT and self._is_backward(cell)})
        drawn = [p for p in pairs if (p[0] in found.right) == (p[1] in found.right)]
        upward = self.scene.groups[group].kind == "backward"
        constraints = self._row_constraints(drawn, cells, found.right)
        row = _rows_by_longest_path(
            cells, [(b, a, n) if upward else (a, b, n) for a, b, n in constraints]
        )
        last = max(row.values(), default=-1)
        for a, b in drawn:
            top, end = sorted((a, b), key=row.__getitem__)
            bends = self._add_bends(range(row[top] + 1, row[end]), row, pairs[a, b])
            found.links += pairwise([top, *bends, end])
            if a in found.right:
                found.right.update(bends)
        for (_, cell, enters), arrows in self._passing[group].items():
            from_above = enters != upward
            passed = range(row[cell] - 1, -1, -1) if from_above else range(row[cell] + 1, last + 1)
            links = pairwise([cell, *self._add_bends(passed, row, arrows)])
            found.links += [(b, a) for a, b in links] if from_above else links
        found.rows = [[] for _ in range(last + 1)]
        for cell, r in row.items():
            found.rows[r].append(cell)
        found.rows = [cells for cells in found.rows if cells]
        found.sort_rows()
        return found

    def _add_bends(self, passed: range, row: dict[Cell, int], arrows: list[int]) -> list[Cell]:
        """Add bends of `arrows` in the rows `passed`, or, of many, in the first and last few."""
        near = passed if len(passed) <= 2 * _NEAR else [*passed[:_NEAR], *passed[-_NEAR:]]
        bends = range(self._bends, self._bends + len(near))
        self._bends += len(near)
        for arrow in arrows:
            self.arrow_bends[arrow] += bends
        cells: list[Cell] = [("bend", n) for n in bends]
        row.update(zip(cells, near, strict=True))
        return cells

    def _is_backward(self, cell: Cell) -> bool:
        kind, i = cell
        if kind == "group":
            return self.scene.groups[i].kind == "backward"
        item = self.scene.items[i]
        if item.kind == "node":
            return "backward" in item.marks
        near = self._neighbors[item.id]  # an input or output of the backward pass only
        return bool(near) and all("backward" in self.scene.items[j].marks for j in near)

    def _row_constraints(
        self, drawn: list[tuple[Cell, Cell]], cells: list[Cell], right: set[Cell]
    ) -> list[tuple[Cell, Cell, int]]:
        """Return triples (a, b, n): the cell (item or group) b must be at least n rows below the
        cell a.

        The backward pass goes up, each node not above the one that it differentiates, and above
        the nodes that follow that one.
        """
        if not right:
            return [(a, b, 1) for a, b in drawn]
        found = [(b, a, 1) if a in right else (a, b, 1) for a, b in drawn]
        serving: dict[Cell, list[Cell]] = defaultdict(list)
        items = self.scene.items
        inside = {i: cell for cell in cells for i in self._inside[cell]}
        primal_cells = {
            items[i].first: cell for i, cell in inside.items() if "backward" not in items[i].marks
        }
        for cell in right:
            for i in self._inside[cell]:
                if (primal := items[i].primal) and primal in primal_cells:
                    serving[primal_cells[primal]].append(cell)
        found += [(a, b, 0) for a, group in serving.items() for b in dict.fromkeys(group)]
        for a, b in drawn:
            if a not in right:
                found += [(c, b, 1) for c in dict.fromkeys(serving.get(a, ()))]
        return found


def mean_neighbor_position(
    cell: Cell, neighbors: list[Cell], position: Mapping[Cell, float]
) -> float:
    """Return the mean position of the cells linked to a cell; the cell's position if none
    is linked.
    """
    return sum(position[n] for n in neighbors) / len(neighbors) if neighbors else position[cell]


def _common_group_of_ends(
    paths: list[tuple[int, ...]], arrow: Arrow
) -> tuple[int, tuple[Cell, Cell]]:
    """Return the depth of the innermost group around an arrow, and the two cells of this group at
    its ends.

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


def _rows_by_longest_path(
    cells: list[Cell], constraints: Iterable[tuple[Cell, Cell, int]]
) -> dict[Cell, int]:
    """Return {cell (item or group): index of its row}; constraints that would close a cycle are
    dropped.
    """
    below: dict[Cell, list[tuple[Cell, int]]] = defaultdict(list)
    for a, b, n in constraints:
        below[a].append((b, n))
    order, kept = _topological_order(cells, below)
    row = dict.fromkeys(cells, 0)
    for a in order:
        for b, n in kept[a]:
            row[b] = max(row[b], row[a] + n)
    entered = {b for edges in kept.values() for b, _ in edges}
    for a in reversed(order):  # an input goes down to the first of its readers
        if a not in entered and kept[a]:
            row[a] = max(0, min(row[b] - n for b, n in kept[a]))
    return row


def _topological_order(cells: Iterable[Cell], below: Edges) -> tuple[list[Cell], Edges]:
    """Return the `cells` (items and groups) in topological order, and `below` without edges that
    close cycles.
    """
    kept: dict[Cell, list[tuple[Cell, int]]] = defaultdict(list)
    done: dict[Cell, bool] = {}  # False: on the path
    order: list[Cell] = []
    for start in cells:
        if start in done:
            continue
        done[start] = False
        stack = [(start, iter(below[start]))]
        while stack:
            cell, edges = stack[-1]
            for b, n in edges:
                if done.get(b) is False:
                    continue  # the edge closes a circle
                kept[cell].append((b, n))
                if b not in done:
                    done[b] = False
                    stack.append((b, iter(below[b])))
                    break
            else:
                done[cell] = True
                order.append(cell)
                stack.pop()
    return order[::-1], kept
