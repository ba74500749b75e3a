"""Which values of a forward pass to keep, when the backward pass may compute others again.

`cheapest_values` is a minimum cut, by Ford and Fulkerson's augmenting paths (1956, "Maximal flow
through a network"), shortest first. A general solver searches the whole network for each path;
here, each search starts from one demand, and network nodes from which no more flow can pass are
never visited again.

`segment_cuts` divides a forward pass into segments. Chen et al. (2016), "Training Deep Nets with
Sublinear Memory Cost", cut a chain of n equal layers into sqrt(n) segments: the values at the cuts
are kept, and the other values of a segment are recomputed when the backward pass comes to it. Here
the cuts minimize, for any graph and any sizes, the bytes at the cuts plus the bytes that the
backward pass reads of the largest segment.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Any, TypeAlias

import numpy as np

# -- a minimum cut -------------------------------------------------------------------------------

Value: TypeAlias = Hashable
# Every value is two nodes of the network: (value, False) where it is needed, and (value, True)
# where it is computed. The edge between them has the value's price as its capacity.
NetworkNode: TypeAlias = tuple[Value, bool]
Capacities: TypeAlias = dict[NetworkNode, dict[NetworkNode, float]]  # of the edges from each node

_HIGHEST = 1e18  # price: the difference of infinite prices would be NaN


def cheapest_values(
    demands: Iterable[Value],
    price: Callable[[Any], float],
    made_of: Callable[[Any], Sequence[Value] | None],
) -> set[Value]:
    """Return the values of the lowest total price from which all values in `demands` can be
    computed.

    `made_of` returns the values that are needed to compute a value, or None if it cannot be
    computed again. Of several cheapest sets, the one nearest to the demands is returned.
    """
    demands = list(demands)
    residual, ends = _flow_network(demands, price, made_of)
    exhausted: set[NetworkNode] = set()  # nodes from which no more flow can pass
    for demand in demands:
        while (path := _augmenting_path(residual, (demand, False), ends, exhausted)) is not None:
            more = min(residual[a][b] for a, b in pairwise(path))
            for a, b in pairwise(path):
                residual[a][b] -= more
                residual[b][a] = residual[b].get(a, 0) + more
    return {
        value for value, computed in exhausted if not computed and (value, True) not in exhausted
    }


def _flow_network(
    demands: Sequence[Value], price: Callable, made_of: Callable
) -> tuple[Capacities, set[NetworkNode]]:
    """Return the edge capacities of the network from `demands` to values that cannot be recomputed.

    The second result are the network nodes of these values.
    """
    capacities: Capacities = {}
    ends, waiting = set[NetworkNode](), list(demands)
    while waiting:
        value = waiting.pop()
        if (value, False) in capacities:
            continue
        operands = made_of(value)
        if operands is None:
            ends.add((value, True))
        capacities[value, False] = {(value, True): min(price(value), _HIGHEST)}
        capacities[value, True] = dict.fromkeys(((x, False) for x in operands or ()), inf)
        waiting += operands or ()
    return capacities, ends


def _augmenting_path(
    residual: Capacities, start: NetworkNode, ends: set[NetworkNode], exhausted: set[NetworkNode]
) -> list[NetworkNode] | None:
    """Return a shortest augmenting path of the flow network from `start`; None if there is no path.

    `residual` is how much more flow can pass along each edge. `exhausted` is extended.
    """
    if start in exhausted:
        return None
    previous, queue = {start: start}, [start]
    for node in queue:  # grows while it is read
        if node in ends:
            path = [node]
            while path[-1] != start:
                path.append(previous[path[-1]])
            return path[::-1]
        for following, capacity in residual[node].items():
            if capacity and following not in previous and following not in exhausted:
                previous[following] = node
                queue.append(following)
    exhausted.update(previous)
    return None


# -- segments --------------------------------------------------------------------------------------

CUTS = 128  # positions among which the cuts are chosen
_LIMITS = 64  # limits of the largest segment that are tried


@dataclass(frozen=True)
class Lifetime:
    """The time of a value in memory: from node number `first`, which computes it, to node number
    `last`, the last reader.

    `read` is whether the backward pass reads it.
    """

    first: int
    last: int
    nbytes: int
    read: bool


def segment_cuts(lifetimes: Sequence[Lifetime], length: int) -> list[int]:
    """Return, in order, the positions behind which to cut a list of `length` nodes into segments.

    The first segment begins at position 0, and the last one ends at `length` - 1.
    """
    ends = np.array([-1, *_candidate_cut_positions(lifetimes, length), length - 1])
    held, crossing = _segment_costs(lifetimes, ends)
    sizes = np.unique(held[np.triu_indices(len(ends), 1)])
    sizes = sizes[np.unique(np.linspace(0, len(sizes) - 1, _LIMITS).astype(int))]
    best, chosen = np.inf, []
    for limit in sizes:
        kept, path = _cheapest_path(np.where(held <= limit, crossing, np.inf))
        if kept + limit < best:
            best, chosen = kept + limit, path
    return [int(ends[i]) for i in chosen]


def _candidate_cut_positions(lifetimes: Sequence[Lifetime], length: int) -> list[int]:
    """Return candidate positions for cuts: of each `length` / `CUTS` nodes, the position that the
    fewest bytes cross.
    """
    changes = np.zeros(length + 1)
    for v in lifetimes:
        changes[v.first] += v.nbytes
        changes[v.last] -= v.nbytes
    crossing = np.cumsum(changes)[: length - 1]
    parts = np.array_split(np.arange(length - 1), min(CUTS, max(1, length - 1)))
    return [int(part[np.argmin(crossing[part])]) for part in parts if len(part)]


def _segment_costs(
    lifetimes: Sequence[Lifetime], ends: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return two matrices of bytes for each pair i, j: of the segment of nodes behind `ends[i]` up
    to `ends[j]`.

    The second matrix counts the results of the segment that later nodes read: the cut keeps them.
    The first matrix counts the other results of the segment that the backward pass reads.
    """
    size = len(ends)
    read, changes = np.zeros(size), np.zeros((2, size + 1, size + 1))
    for v in lifetimes:
        first, last = np.searchsorted(ends, (v.first, v.last))
        read[first] += v.nbytes * v.read
        for of_read in range(1 + v.read):
            changes[of_read, 0, first] += v.nbytes
            changes[of_read, 0, last] -= v.nbytes
            changes[of_read, first, first] -= v.nbytes
            changes[of_read, first, last] += v.nbytes
    crossing, crossing_read = changes.cumsum(axis=1).cumsum(axis=2)[:, :size, :size]
    until = np.cumsum(read)
    return until - until[:, None] - crossing_read, crossing


def _cheapest_path(costs: np.ndarray) -> tuple[float, list[int]]:
    """Return the cost of the cheapest path from the first to the last index, and its inner indices.

    A path goes up; the cost of a step from i to j is `costs[i, j]`.
    """
    total = np.full(len(costs), np.inf)
    total[0], before = 0.0, np.zeros(len(costs), int)
    for j in range(1, len(costs)):
        through = total[:j] + costs[:j, j]
        before[j] = np.argmin(through)
        total[j] = through[before[j]]
    path = [len(costs) - 1]
    while path[-1]:
        path.append(int(before[path[-1]]))
    return float(total[-1]), path[-2:0:-1]
