"""Which values to save so that others can be recomputed from them: a minimum cut.

Ford & Fulkerson's augmenting paths (1956, "Maximal flow through a network"), shortest first. A
general solver searches the whole network for each path; here, each search starts from one demand,
and network nodes from which no more flow can pass are never visited again.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import pairwise
from math import inf
from typing import Any, TypeAlias

Value: TypeAlias = Hashable
# Every value is two nodes of the network: (value, False) where it is needed, and (value, True)
# where it is computed. The edge between them has the value's price as its capacity.
NetworkNode: TypeAlias = tuple[Value, bool]


def cheapest(
    demands: Iterable[Value],
    price: Callable[[Any], float],
    made_of: Callable[[Any], Sequence[Value] | None],
) -> set[Value]:
    """Return the values of the lowest total price from which all `demands` can be computed.

    `made_of` returns the values that are needed to compute a value, or None if it cannot be
    computed again. Of several cheapest sets, the one nearest to the demands is returned.
    """
    network = _Network(price, made_of)
    for demand in demands:
        while (path := network.path((demand, False))) is not None:
            network.push(path)
    exhausted = network.exhausted
    return {
        value for value, computed in exhausted if not computed and (value, True) not in exhausted
    }


class _Network:
    """Flow from the demands to values that cannot be computed again."""

    def __init__(self, price: Callable, made_of: Callable) -> None:
        self.price, self.made_of = price, made_of
        self.paid: dict[Value, float] = defaultdict(float)  # flow from (v, False) to (v, True)
        # passed[x][y]: flow from (y, True) to (x, False), for x in made_of(y)
        self.passed: dict[Value, dict[Value, float]] = defaultdict(lambda: defaultdict(float))
        self.exhausted: set[NetworkNode] = set()  # nodes from which no more flow can pass

    def path(self, start: NetworkNode) -> list[NetworkNode] | None:
        """Return a shortest augmenting path from `start`, or None if there is none."""
        if start in self.exhausted:
            return None
        previous = {start: start}
        queue = deque([start])
        while queue:
            node = queue.popleft()
            value, computed = node
            if computed and self.made_of(value) is None:
                path = [node]
                while path[-1] != start:
                    path.append(previous[path[-1]])
                return path[::-1]
            for following in self._neighbours(value, computed):
                if following not in previous and following not in self.exhausted:
                    previous[following] = node
                    queue.append(following)
        self.exhausted.update(previous)
        return None

    def push(self, path: list[NetworkNode]) -> None:
        """Send as much flow along `path` as its capacity allows."""
        more = min(self._capacity(*edge) for edge in pairwise(path))
        for (a, computed), (b, _) in pairwise(path):
            if a == b:
                self.paid[a] += -more if computed else more
            elif computed:
                self.passed[b][a] += more
            else:
                self.passed[a][b] -= more

    def _neighbours(self, value: Value, computed: bool) -> Iterator[NetworkNode]:
        if computed:
            yield from ((x, False) for x in self.made_of(value) or ())
            if self.paid[value]:
                yield value, False
        else:
            if self.paid[value] < self.price(value):
                yield value, True
            yield from ((y, True) for y, flow in self.passed[value].items() if flow)

    def _capacity(self, a: NetworkNode, b: NetworkNode) -> float:
        """Return how much more flow can pass from `a` to `b`."""
        (value, computed), (other, _) = a, b
        if value == other:
            return self.paid[value] if computed else self.price(value) - self.paid[value]
        return inf if computed else self.passed[value][other]
