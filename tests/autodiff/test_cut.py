"""What is worth keeping: against every choice there is, on small networks."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from onnxgrad.autodiff.cuts import cheapest_values


def suffices(kept, demands, made_of) -> bool:
    """Tell whether all demands can be had from `kept`."""

    def had(value) -> bool:
        operands = made_of[value]
        return value in kept or (operands is not None and all(map(had, operands)))

    return all(map(had, demands))


@pytest.mark.parametrize("seed", range(60))
def test_no_choice_is_cheaper(seed):
    rng = np.random.default_rng(seed)
    n = 9
    made_of = {}
    for i in range(n):
        before = [j for j in range(i) if rng.random() < 0.4]
        made_of[i] = None if rng.random() < 0.35 else before
    price = {i: int(rng.integers(0, 9)) for i in range(n)}
    demands = [i for i in range(n) if rng.random() < 0.4]
    found = cheapest_values(demands, price.__getitem__, made_of.__getitem__)
    choices = [set(c) for size in range(n + 1) for c in combinations(range(n), size)]
    best = min(sum(price[i] for i in c) for c in choices if suffices(c, demands, made_of))
    assert suffices(found, demands, made_of)
    assert sum(price[i] for i in found) == best


def test_of_equal_ones_the_nearest_is_kept():
    made_of = {"a": None, "b": ["a"], "c": ["b"]}
    assert cheapest_values(["c"], lambda value: 4, made_of.__getitem__) == {"c"}
