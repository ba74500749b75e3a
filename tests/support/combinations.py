"""Combinations of parameters: the chosen ones, and all others in the sweep."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import pytest

from tests.support.running import in_sweep


def parametrize_chosen(names: str, chosen: Sequence[tuple], *values: Iterable[Any]) -> Any:
    """Parametrize by the chosen combinations, and in the sweep by all others of `values`."""
    others = [each for each in product(*values) if each not in chosen]
    return pytest.mark.parametrize(names.split(), [*chosen, *(in_sweep(*c) for c in others)])
