"""One comparison of gradients with central differences, by one runtime in one precision."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf, isnan, nan
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.autodiff.check.runtimes import (
    Accuracy,
    Feed,
    NoKernelError,
    OriginalModel,
    RunModel,
    load_on_either,
    load_on_onnxruntime,
    load_on_reference,
)
from onnxgrad.autodiff.derivative_builder import Builder
from onnxgrad.autodiff.reverse import sweep
from onnxgrad.errors import printable
from onnxgrad.model.convert import convert_precision
from onnxgrad.operators.shapes import Dims, dims
from onnxgrad.reporting import html_table

_ROUNDING = 1e-5  # of the sum of outputs: smaller differences may be rounding errors
_EPS32 = float(np.finfo(np.float32).eps)  # precision of the constants that `prepare` folds
_INEXACT = 1e-5  # outputs that differ more in float64 come from an approximating kernel
_LARGEST_GROUP = 8  # most inputs and weights with one joint direction
_UNLIKE = 100  # most that a gradient of a joint direction is larger than another
_STEPS = (1e-3, 1e-4, 1e-5, 1e-6, 1e-7)


@dataclass(frozen=True)
class CheckMethod:
    """How gradients are checked: a runtime, a precision, the step sizes and the tolerance."""

    name: str
    load: Callable[[ModelProto], RunModel]
    dtype: Any
    rtol: float
    steps: tuple[float, ...]  # a smaller step may avoid a kink that lies within a larger one
    max_order: int = 2

    def convert(self, proto: ModelProto) -> ModelProto:
        """Return the model `proto` in the precision of this method, float64 or float32."""
        return convert_precision(proto, ir.DataType.DOUBLE) if self.dtype is np.float64 else proto


METHODS = (
    CheckMethod("float64 on onnxruntime", load_on_onnxruntime, np.float64, 1e-6, _STEPS),
    CheckMethod("float64 on onnx.reference", load_on_reference, np.float64, 1e-6, _STEPS),
    CheckMethod(
        "float32 on onnxruntime", load_on_onnxruntime, np.float32, 2e-2, (1e-1, 1e-2, 1e-3)
    ),
)
COARSE = replace(
    METHODS[-1], load=load_on_either, name="float32", rtol=Accuracy.differences, max_order=1
)


@dataclass(frozen=True)
class CheckedModel:
    """A model, the inputs and weights to check, and the point at which their gradients are
    checked.
    """

    original: ModelProto  # the user's model
    primal: ModelProto  # the prepared model, with the weights as inputs
    point: Feed
    wrt: list[str]
    weights: Sequence[str]
    values: list[np.ndarray]  # float outputs of the user's model at `point`
    accuracy: Accuracy  # of the kernels that compute `values`
    rtol: float | None
    order: int
    seed: int
    separately: bool = True  # a direction for each input and weight, or for several together
    deadline: float = inf  # of `time.monotonic`, after which no further direction is begun

    def rtol_of(self, method: CheckMethod) -> float:
        """Return the largest relative error of a derivative that counts as right for `method`."""
        rtol = method.rtol if self.rtol is None else self.rtol
        return max(rtol, self.accuracy.differences) if method is COARSE else rtol


def compare_by_method(method: CheckMethod, problem: CheckedModel, original: bool) -> GradientReport:
    """Return the report of comparing gradients with differences of the user's model (if `original`)
    or of the prepared model.

    Raises:
        NoKernelError: the runtime cannot run the model in this precision, or not precisely.
        ValueError: the outputs of the model are random.
    """
    rng = np.random.default_rng(problem.seed)
    primal = method.convert(problem.primal)
    builder = Builder(primal, [], problem.wrt, own=True)
    dtypes = {str(x.name): x.dtype.numpy() for x in builder.graph.inputs if x.dtype is not None}
    point = {n: x.astype(dtypes[n]) for n, x in problem.point.items() if n in dtypes}
    function: RunModel
    if original:
        function = OriginalModel(method.convert(problem.original), method.load, problem.weights)
    else:
        function = method.load(primal)
    precise = original and method.dtype is np.float64
    outputs = _deterministic_outputs(function, point, problem, precise)
    rows: list[GradientRow] = []
    unchecked: list[str] = []
    last = min(problem.order, method.max_order)
    for order in range(1, last + 1):
        seeds = builder.add_cotangents()
        reached = sweep(builder.op, seeds, builder.wrt)
        proto = builder.build_model([(f"{x.name}_grad", g) for x, g in reached.items()])
        wrt = [str(x.name) for x in builder.wrt]
        drawn = [(y, _random_normal_like(rng, y)) for y in outputs]
        factors = [np.where(np.isfinite(y), u, 0).astype(y.dtype) for y, u in drawn]
        pairs = zip(seeds.values(), factors, strict=True)
        cotangents = {str(g.name): _fix_empty_rank(u, dims(g)) for g, u in pairs}
        run, n = load_on_either(proto, method.load), len(seeds)
        results = run(point | cotangents)
        if order == 1:
            values = results[:n]
            rows.append(_compare_outputs(values, problem.values, problem.accuracy.outputs))
            if precise and _INEXACT < _compare_outputs(values, outputs, _INEXACT).error < 1e-2:
                raise NoKernelError("a kernel of the model rounds to float32")
        gradients = dict(zip((str(x.name) for x in reached), results[n:], strict=True))
        weighted = _WeightedSum(function, point, outputs, factors, gradients)
        vs = {name: _random_normal_like(rng, point[name]) for name in wrt}
        compared, left_out = _compare_directions(method, weighted, vs, problem, order)
        rows += compared
        unchecked += left_out
        if order < last:
            names = [str(g.name) for g in builder.graph.outputs[len(builder.kept) :]]
            builder = Builder(proto, [], [*wrt, *cotangents], names, own=True)
            point, outputs = point | cotangents, results[n:]
            function = partial(_outputs_from_index, n, run)
    return GradientReport(tuple(rows), method.name, tuple(dict.fromkeys(unchecked)))


def _deterministic_outputs(
    function: RunModel, point: Feed, problem: CheckedModel, precise: bool
) -> list[np.ndarray]:
    """Return the outputs at `point`; raise if two runs differ, or if `precise` and the outputs are
    not of float64 precision.
    """
    outputs, again = function(point), function(point)
    if not all(np.array_equal(a, b, equal_nan=True) for a, b in zip(again, outputs, strict=True)):
        raise ValueError("different outputs in two runs: remove the nodes that draw random numbers")
    if precise:
        if any(y.dtype != np.float64 for y in outputs):
            raise NoKernelError("outputs of the model are not float64, though its inputs are")
        if not _compare_outputs(outputs, problem.values, problem.accuracy.outputs).ok:
            raise NoKernelError("outputs in float64 differ from the outputs of the original model")
    return outputs


def _outputs_from_index(n: int, function: RunModel, feed: Feed) -> list[np.ndarray]:
    return function(feed)[n:]


def _fix_empty_rank(u: np.ndarray, shape: Dims | None) -> np.ndarray:
    """Return `u`; if `u` is empty and its rank is wrong, return an empty array of the rank of
    `shape`.

    onnxruntime may return the stack of a Loop that runs zero times with too few axes.
    """
    if u.size or shape is None or len(shape) == u.ndim:
        return u
    return np.zeros([0, *(d if isinstance(d, int) else 0 for d in shape[1:])], u.dtype)


@dataclass(frozen=True)
class _WeightedSum:
    """The scalar function sum(u y) of a model's outputs y at a point, with factors u, and its
    gradients.
    """

    function: RunModel
    point: Feed
    outputs: Sequence[np.ndarray]
    factors: Sequence[np.ndarray]
    gradients: Mapping[str, np.ndarray]

    def __call__(self, moved: Feed) -> float:
        outputs = self.function({**self.point, **moved})
        return sum(_finite_dot(u, y) for u, y in zip(self.factors, outputs, strict=True))

    @property
    def absolute_sum(self) -> float:
        """Return sum(|u y|), which bounds the rounding errors of sum(u y)."""
        return sum(
            _finite_dot(abs(u), abs(y)) for u, y in zip(self.factors, self.outputs, strict=True)
        )

    @np.errstate(invalid="ignore")
    def changes_along(self, vs: Feed, h: float) -> tuple[float, float]:
        """Return the change of the function over a step of `h` along the directions `vs`: by
        differences, and according to the gradient.

        `vs` are directions by name, which are moved along together. The third and fourth orders of
        the differences cancel. A variable that the model stores in float32 moves by rounded steps,
        and both results are for rounded steps.
        """
        rounded = getattr(self.function, "round_as_stored", lambda name, x: x)
        by_differences = by_gradient = 0.0
        for size, share in ((h, -1 / 6), (h / 2, 8 / 6)):
            ahead, back = (
                {n: rounded(n, np.asarray(self.point[n] + s * v)) for n, v in vs.items()}
                for s in (size, -size)
            )
            by_differences += share * (self(ahead) - self(back))
            for n in vs.keys() & self.gradients.keys():
                # an infinite element does not move: its gradient must be zero
                still = 2 * size * vs[n]
                moved = np.where(np.isfinite(self.point[n]), ahead[n] - back[n], still)
                by_gradient += share * float(np.vdot(self.gradients[n], moved))
        return by_differences, by_gradient


def _compare_directions(
    method: CheckMethod, f: _WeightedSum, vs: Feed, problem: CheckedModel, order: int
) -> tuple[list[GradientRow], list[str]]:
    """Return the comparisons along the directions `vs`, and the names left out as the time budget
    was used up.
    """
    rows: list[GradientRow] = []
    unchecked: list[str] = []
    # the tolerance of float32 would hide one wrong gradient of a group
    alone = problem.separately or method.dtype is np.float32
    groups = [[n] for n in vs] if alone else group_by_size(vs, f.gradients)
    for group in groups:  # grows while it is read
        if time.monotonic() > problem.deadline and rows:
            unchecked += group
            continue
        row = _compare_along(method, f, {n: vs[n] for n in group}, problem.rtol_of(method), order)
        if row.ok or len(group) == 1:
            rows.append(row)
            continue
        # each name by itself, to find the wrong gradient, or the kink within the steps
        at = groups.index(group) + 1
        groups[at:at] = [[n] for n in group]
    place = {n: i for i, n in enumerate(vs)}
    rows.sort(key=lambda row: place[row.names[0]])
    return rows, sorted(unchecked, key=place.__getitem__)


def group_by_size(names: Iterable[str], gradients: Mapping[str, np.ndarray]) -> list[list[str]]:
    """Return groups of names whose gradients are of similar size, the largest gradients first.

    The derivative along a joint direction is a sum over a group. None of its terms is expected
    below 1/100 of the largest one, so that it is not lost among the others. Gradients that are
    zero, or absent, form one group, and each gradient that is not finite a group by itself.

    Examples:
        >>> import numpy as np
        >>> sizes = {"a": 1.0, "b": 50.0, "c": 1e-4, "d": 0.0, "e": 2.0}
        >>> group_by_size([*sizes, "f"], {n: np.array([g]) for n, g in sizes.items()})
        [['b', 'e', 'a'], ['c'], ['d', 'f']]
    """
    norms = {n: float(np.linalg.norm(gradients.get(n, np.zeros(1)))) for n in names}
    groups: list[list[str]] = []
    for name in sorted(norms, key=lambda n: -norms[n] if np.isfinite(norms[n]) else -np.inf):
        size = norms[name]
        first = norms[groups[-1][0]] if groups else np.nan
        alike = np.isfinite(size) and (size > 0) == (first > 0) and size * _UNLIKE >= first
        if alike and np.isfinite(first) and len(groups[-1]) < _LARGEST_GROUP:
            groups[-1].append(name)
        else:
            groups.append([name])
    return groups


def _compare_along(
    method: CheckMethod, f: _WeightedSum, vs: Feed, rtol: float, order: int
) -> GradientRow:
    """Return the comparison of two derivatives of `f` along the directions `vs`, for the step size
    at which they agree best.

    The error is infinite if a gradient has not as many elements as its input or weight.
    """
    names = tuple(vs)
    name = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
    if any(n in f.gradients and f.gradients[n].size != v.size for n, v in vs.items()):
        return GradientRow(name, nan, nan, inf, rtol, order, names)
    floor = _ROUNDING * f.absolute_sum + float(np.finfo(method.dtype).eps) / (
        method.steps[0] * method.rtol
    )
    for n in names:
        terms = np.abs(vs[n] * f.gradients.get(n, 0.0))  # which may cancel in their sum
        floor += _EPS32 / method.rtol * float(terms.sum(where=np.isfinite(terms)))
    tried: list[tuple[float, float, float]] = []
    for h in method.steps:
        expected, computed = np.divide(f.changes_along(vs, h), h).tolist()
        scale = max(abs(computed), abs(expected)) + floor
        tried.append((abs(computed - expected) / scale if scale else 0.0, expected, computed))
        if tried[-1][0] < 0.1 * method.rtol:  # a smaller step is not needed
            break
    finite = [row for row in tried if np.isfinite(row[0])]
    error, expected, computed = min(finite or tried[:1])
    return GradientRow(name, expected, computed, error, rtol, order, names)


def _random_normal_like(rng: np.random.Generator, like: np.ndarray) -> np.ndarray:
    return np.asarray(rng.standard_normal(np.shape(like))).astype(like.dtype)


def _finite_dot(u: np.ndarray, y: np.ndarray) -> float:
    """Return sum(u y) over the nonzero u, as y may be infinite where u is 0; NaN if shapes
    differ.
    """
    if u.shape != y.shape:
        return nan
    counted = u != 0
    return float(np.dot(u[counted], y[counted]))


def _compare_outputs(
    computed: list[np.ndarray], expected: list[np.ndarray], rtol: float
) -> GradientRow:
    """Return the comparison of outputs: their largest difference, relative to the largest finite
    output.

    Infinity counts as the largest number of float32, which some kernels return in place of it. The
    error is infinite if an output has another number of elements.
    """
    if [y.size for y in computed] != [y.size for y in expected]:
        return GradientRow("(outputs)", nan, nan, inf, rtol)
    largest = float(np.finfo(np.float32).max)
    a, b = (
        np.clip(np.concatenate([np.ravel(y).astype(np.float64) for y in ys]), -largest, largest)
        for ys in (computed, expected)
    )
    if not a.size:
        return GradientRow("(outputs)", 0.0, 0.0, 0.0, rtol)
    off = np.where(np.isnan(a) | np.isnan(b), inf, np.abs(a - b))
    worst = int(np.argmax(off))
    error = float(off[worst] / (np.abs(b).max(where=np.abs(b) < largest, initial=0.0) or 1.0))
    return GradientRow("(outputs)", float(b[worst]), float(a[worst]), error, rtol)


_LISTED = 8  # names that a message lists


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
        >>> from onnxgrad.graph import GradientRow
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
        """Whether every error is within its tolerance; names in `unchecked` have no error."""
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
        """Return the report's last line: ok or wrong, the joint directions, and the names not
        compared.
        """
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
