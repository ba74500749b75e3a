"""Which values to save so that others can be recomputed from them: a minimum cut.

Ford & Fulkerson's augmenting paths (1956, "Maximal flow through a network"), shortest first. A
general solver searches the whole network for each path; here, each search starts from one demand,
and network nodes from which no more flow can pass are never visited again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import pairwise
from math import inf
from typing import Any, TypeAlias

Value: TypeAlias = Hashable
# Every value is two nodes of the network: (value, False) where it is needed, and (value, True)
# where it is computed. The edge between them has the value's price as its capacity.
NetworkNode: TypeAlias = tuple[Value, bool]
Capacities: TypeAlias = dict[NetworkNode, dict[NetworkNode, float]]  # of the edges from each node

_HIGHEST = 1e18  # price: infinite ones cannot be subtracted from each other


def cheapest(
    demands: Iterable[Value],
    price: Callable[[Any], float],
    made_of: Callable[[Any], Sequence[Value] | None],
) -> set[Value]:
    """Return the values of the lowest total price from which all `demands` can be computed.

    `made_of` returns the values that are needed to compute a value, or None if it cannot be
    computed again. Of several cheapest sets, the one nearest to the demands is returned.
    """
    demands = list(demands)
    residual, ends = _network(demands, price, made_of)
    exhausted: set[NetworkNode] = set()  # nodes from which no more flow can pass
    for demand in demands:
        while (path := _path(residual, (demand, False), ends, exhausted)) is not None:
            more = min(residual[a][b] for a, b in pairwise(path))
            for a, b in pairwise(path):
                residual[a][b] -= more
                residual[b][a] = residual[b].get(a, 0) + more
    return {
        value for value, computed in exhausted if not computed and (value, True) not in exhausted
    }


def _network(
    demands: Sequence[Value], price: Callable, made_of: Callable
) -> tuple[Capacities, set[NetworkNode]]:
    """Return the capacities of the edges from the demands to values that cannot be computed again.

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


def _path(
    residual: Capacities, start: NetworkNode, ends: set[NetworkNode], exhausted: set[NetworkNode]
) -> list[NetworkNode] | None:
    """Return a shortest augmenting path from `start`, or None if there is none.

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
