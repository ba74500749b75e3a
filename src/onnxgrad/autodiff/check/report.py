"""The result of `check_gradient`: one row for each comparison."""

from __future__ import annotations

from dataclasses import dataclass
from math import isnan

import numpy as np

from onnxgrad.errors import printable
from onnxgrad.reporting import html_table

_LISTED = 8  # names in a message


@dataclass(frozen=True)
class GradientRow:
    """One comparison: a derivative along a random direction, or the value of the outputs.

    Attributes:
        name: input or weight that changes along the direction.
        expected: the derivative by central differences.
        found: the derivative by the gradient model.
        error: their relative difference.
        rtol: the largest error that is ok.
        order: 1 for the gradient, 2 for the gradient of the gradient.
        names: all that change along the direction, if they are several.

    Examples:
        >>> from onnxgrad import GradientRow
        >>> GradientRow("x", expected=2.0, found=2.1, error=0.05, rtol=1e-6).ok
        False
    """

    name: str
    expected: float
    found: float
    error: float
    rtol: float
    order: int = 1
    names: tuple[str, ...] = ()

    @property
    def undefined(self) -> bool:
        """Whether the function is NaN next to the point, as x^b for x < 0 when b changes."""
        return isnan(self.expected) and isnan(self.error)

    @property
    def ok(self) -> bool:
        """Whether the error is within the tolerance, or the differences are undefined."""
        return self.undefined or self.error <= self.rtol


@dataclass(frozen=True)
class GradientReport:
    """The comparisons of `check_gradient`; `print` shows them as a table.

    Attributes:
        rows: one for the outputs, then one for each input and weight, or for several together.
        computed: precision and runtime.
        unchecked: inputs and weights that were not compared, as the budget was used up.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> report = og.check_gradient(onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[2] x) => (float[2] y) { y = Sin(x) }'''))
        >>> report.ok, report.max_error < 1e-6, report.computed
        (True, True, 'float64 on onnxruntime')
    """

    rows: tuple[GradientRow, ...]
    computed: str
    unchecked: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every error is within its tolerance; `unchecked` are not judged."""
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
        return "\n".join([*lines, self._verdict_line()])

    def _verdict_line(self) -> str:
        """Return the last line: ok or wrong, the joint directions, and the names not compared."""
        text = f"{'ok' if self.ok else 'WRONG'}, {self.computed}"
        if groups := [row for row in self.rows if len(row.names) > 1]:
            count = sum(len(row.names) for row in groups)
            text += f"; {count} in {len(groups)} joint directions: separately=True checks each"
        if self.unchecked:
            listed = ", ".join(map(printable, self.unchecked[:_LISTED]))
            more = f" and {len(self.unchecked) - _LISTED} more"
            text += f"; NOT CHECKED, as the budget was used up: {listed}"
            text += more if len(self.unchecked) > _LISTED else ""
        return text

    def _repr_html_(self) -> str:
        rows = [
            (row.name, row.order, f"{row.expected:.7g}", f"{row.found:.7g}", f"{row.error:.2g}",
             "undefined" if row.undefined else "ok" if row.ok else "WRONG")
            for row in self.rows
        ]  # fmt: skip
        head = ("", "order", "expected", "found", "error", "")
        return html_table(head, rows, [self._verdict_line()])
