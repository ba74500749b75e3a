"""The cheapest values to keep, so that others can be computed from them: a minimum cut.

Ford & Fulkerson's augmenting paths (1956, "Maximal flow through a network"), the shortest first. A
general solver looks at the whole network for each path; here a path is sought from one demand on,
and what was found to lead nowhere is not looked at again.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import pairwise
from typing import TypeVar

Value = TypeVar("Value", bound=Hashable)


def cheapest(
    demands: Iterable[Value],
    price: Callable[[Value], float],
    made_of: Callable[[Value], Sequence[Value] | None],
) -> set[Value]:
    """Return the values to keep, of the lowest total price, from which all `demands` can be had.

    `made_of` gives what a value is computed from, all of which it takes, or None where it cannot be
    computed again. Among the cheapest, those nearest to the demands are chosen.
    """
    # Each value is an edge of its price, from (value, False), to have it, to (value, True), to
    # make it; that leads on to what it is made of. Flow goes to what cannot be made.
    paid: dict[Value, float] = defaultdict(float)
    passed: dict[Value, dict[Value, float]] = defaultdict(lambda: defaultdict(float))
    dead: set[tuple[Value, bool]] = set()

    def neighbours(value: Value, making: bool) -> Iterable[tuple[Value, bool]]:
        if making:
            yield from ((x, False) for x in made_of(value) or ())
            if paid[value]:
                yield value, False
        else:
            if paid[value] < price(value):
                yield value, True
            yield from ((y, True) for y, flow in passed[value].items() if flow)

    def path(demand: Value) -> list[tuple[Value, bool]] | None:
        start = (demand, False)
        came = {start: start}
        queue = deque([start])
        while queue:
            at = queue.popleft()
            if at[1] and made_of(at[0]) is None:
                found = [at]
                while found[-1] != start:
                    found.append(came[found[-1]])
                return found[::-1]
            for following in neighbours(*at):
                if following not in came and following not in dead:
                    came[following] = at
                    queue.append(following)
        dead.update(came)
        return None

    for demand in demands:
        while (demand, False) not in dead and (found := path(demand)) is not None:
            steps = list(pairwise(found))
            room = min(_room(a, b, price, paid, passed) for a, b in steps)
            for (a, making), (b, _) in steps:
                if a == b:
                    paid[a] += -room if making else room
                elif making:
                    passed[b][a] += room
                else:
                    passed[a][b] -= room
    return {value for value, making in dead if not making and (value, True) not in dead}


def _room(a, b, price, paid, passed) -> float:
    """Return how much more can flow from `a` to `b`."""
    (value, making), (other, _) = a, b
    if value == other:
        return paid[value] if making else price(value) - paid[value]
    return float("inf") if making else passed[value][other]
