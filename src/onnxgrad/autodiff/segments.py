"""Segments of a forward pass: where to cut it, so that keeping only the cuts saves most memory.

Chen et al. (2016), "Training Deep Nets with Sublinear Memory Cost", cut a chain of n equal layers
into sqrt(n) segments: the values at the cuts are kept, and the others of a segment are recomputed
when the backward pass comes to it. Here the cuts minimize, for any graph and any sizes, the bytes
at the cuts plus those that the backward pass reads of the largest segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CUTS = 128  # positions among which the cuts are chosen
_LIMITS = 64  # sizes of the largest segment that are tried


@dataclass(frozen=True)
class Lifetime:
    """A value by positions of nodes: `first` computes it, and `last` is the last one to read it.

    `read` is whether the backward pass reads it.
    """

    first: int
    last: int
    nbytes: int
    read: bool


def cuts(lifetimes: Sequence[Lifetime], length: int) -> list[int]:
    """Return the positions behind which to cut `length` nodes, in order; empty for no cut.

    The first segment begins at position 0, and the last one ends at `length` - 1.
    """
    ends = np.array([-1, *_candidates(lifetimes, length), length - 1])
    held, crossing = _costs(lifetimes, ends)
    sizes = np.unique(held[np.triu_indices(len(ends), 1)])
    sizes = sizes[np.unique(np.linspace(0, len(sizes) - 1, _LIMITS).astype(int))]
    best, chosen = np.inf, []
    for limit in sizes:
        kept, path = _cheapest(np.where(held <= limit, crossing, np.inf))
        if kept + limit < best:
            best, chosen = kept + limit, path
    return [int(ends[i]) for i in chosen]


def _candidates(lifetimes: Sequence[Lifetime], length: int) -> list[int]:
    """Return positions that few bytes cross, one of every `length` / `CUTS`."""
    changes = np.zeros(length + 1)
    for v in lifetimes:
        changes[v.first] += v.nbytes
        changes[v.last] -= v.nbytes
    crossing = np.cumsum(changes)[: length - 1]
    parts = np.array_split(np.arange(length - 1), min(CUTS, max(1, length - 1)))
    return [int(part[np.argmin(crossing[part])]) for part in parts if len(part)]


def _costs(lifetimes: Sequence[Lifetime], ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return for a segment from behind `ends[i]` to `ends[j]` two numbers of bytes, at [i, j].

    The second are those computed in it that nodes behind it read: the cut keeps them. The first are
    the others that the backward pass reads. What an earlier segment computes is kept already.
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


def _cheapest(costs: np.ndarray) -> tuple[float, list[int]]:
    """Return the cost of the cheapest path from the first to the last index, and what is between.

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
