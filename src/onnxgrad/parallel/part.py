"""The part of each batch that one process computes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """Part `rank` of `size` parts of the rows, whose numbers of rows differ by one at most."""

    rank: int
    size: int

    def rows(self, count: int) -> slice:
        """Return the rows of this part of a batch of `count` rows; there may be none."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def count(self, count: int) -> int:
        """Return how many rows `fed` takes of a batch of `count` rows."""
        return len(range(count)[self.fed(count)])

    def fed(self, count: int) -> slice:
        """Return these rows, or one other row if there are none: a model needs at least one."""
        own = self.rows(count)
        first = min(own.start, count - 1)
        return slice(first, max(own.stop, first + 1))
