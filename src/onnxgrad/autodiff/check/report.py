"""The result of `check_gradient`: a row per comparison."""

from __future__ import annotations

from dataclasses import dataclass
from math import isnan

import numpy as np

from onnxgrad.errors import printable


@dataclass(frozen=True)
class GradientRow:
    """One comparison: a derivative along a random direction, or the value of the outputs."""

    name: str
    expected: float
    found: float
    error: float  # relative
    rtol: float
    order: int = 1

    @property
    def undefined(self) -> bool:
        """Tell whether the function is NaN beside the point, as x^b is for x < 0 when b moves."""
        return isnan(self.expected) and isnan(self.error)

    @property
    def ok(self) -> bool:
        """Tell whether the error is within the tolerance, or nothing can be said."""
        return self.undefined or self.error <= self.rtol


@dataclass(frozen=True)
class GradientReport:
    """What `check_gradient` found; `print` shows it as a table."""

    rows: tuple[GradientRow, ...]
    computed: str  # precision and runtime

    @property
    def ok(self) -> bool:
        """Tell whether every error is within its tolerance."""
        return all(row.ok for row in self.rows)

    @property
    def max_error(self) -> float:
        """The largest relative error of a derivative; NaN where a gradient is NaN."""
        errors = [row.error for row in self.rows[1:] if not row.undefined]
        return float(np.max(errors, initial=0.0))

    def __str__(self) -> str:
        names = [printable(row.name) for row in self.rows]
        width = max(map(len, names))
        lines = [f"{'':{width}}  {'expected':>14}  {'found':>14}  {'error':>9}"]
        for i, (name, row) in enumerate(zip(names, self.rows, strict=True)):
            if row.order > 1 and self.rows[i - 1].order == 1:
                lines.append("second order")
            numbers = f"{row.expected:14.7g}  {row.found:14.7g}  {row.error:9.2g}"
            mark = "  (undefined)" if row.undefined else "" if row.ok else "  <-- wrong"
            lines.append(f"{name:{width}}  {numbers}{mark}")
        return "\n".join([*lines, f"{'ok' if self.ok else 'WRONG'}, {self.computed}"])
