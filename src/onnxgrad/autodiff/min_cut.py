"""The cheapest values to keep, so that others can be computed from them: a minimum cut.

Ford & Fulkerson's augmenting paths (1956, "Maximal flow through a network"), the shortest first. A
general solver looks at the whole network for each path; here a path is sought from one demand on,
and what was found to lead nowhere is not looked at again.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import pairwise
from math import inf
from typing import Any, TypeAlias

Value: TypeAlias = Hashable
Place: TypeAlias = tuple[Value, bool]  # to have the value, or, True, to make it


def cheapest(
    demands: Iterable[Value],
    price: Callable[[Any], float],
    made_of: Callable[[Any], Sequence[Value] | None],
) -> set[Value]:
    """Return the values to keep, of the lowest total price, from which all `demands` can be had.

    `made_of` gives what a value is computed from, all of which it takes, or None where it cannot be
    computed again. Among the cheapest, those nearest to the demands are chosen.
    """
    network = _Network(price, made_of)
    for demand in demands:
        while (found := network.path((demand, False))) is not None:
            network.push(found)
    dead = network.dead
    return {value for value, making in dead if not making and (value, True) not in dead}


class _Network:
    """Flow from demands to what cannot be made; to have a value at all lets its price pass."""

    def __init__(self, price: Callable, made_of: Callable) -> None:
        self.price, self.made_of = price, made_of
        self.paid: dict[Value, float] = defaultdict(float)  # flow from having to making
        self.passed: dict[Value, dict[Value, float]] = defaultdict(lambda: defaultdict(float))
        self.dead: set[Place] = set()  # from where no flow can pass any more

    def path(self, start: Place) -> list[Place] | None:
        """Return a shortest way on which more can flow, or None if there is none."""
        if start in self.dead:
            return None
        came = {start: start}
        queue = deque([start])
        while queue:
            at = queue.popleft()
            if at[1] and self.made_of(at[0]) is None:
                found = [at]
                while found[-1] != start:
                    found.append(came[found[-1]])
                return found[::-1]
            for following in self._neighbours(*at):
                if following not in came and following not in self.dead:
                    came[following] = at
                    queue.append(following)
        self.dead.update(came)
        return None

    def push(self, path: list[Place]) -> None:
        """Let as much flow along `path` as can."""
        more = min(self._room(*step) for step in pairwise(path))
        for (a, making), (b, _) in pairwise(path):
            if a == b:
                self.paid[a] += -more if making else more
            elif making:
                self.passed[b][a] += more
            else:
                self.passed[a][b] -= more

    def _neighbours(self, value: Value, making: bool) -> Iterator[Place]:
        if making:
            yield from ((x, False) for x in self.made_of(value) or ())
            if self.paid[value]:
                yield value, False
        else:
            if self.paid[value] < self.price(value):
                yield value, True
            yield from ((y, True) for y, flow in self.passed[value].items() if flow)

    def _room(self, a: Place, b: Place) -> float:
        (value, making), (other, _) = a, b
        if value == other:
            return self.paid[value] if making else self.price(value) - self.paid[value]
        return inf if making else self.passed[value][other]
