"""`check_gradient`: the gradient against central differences, in float64 where it can be run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf, nan
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.autodiff.check.model_as_given import ModelAsGiven, in_precision
from onnxgrad.autodiff.check.report import GradientReport, GradientRow
from onnxgrad.autodiff.check.runtimes import (
    Feed,
    Function,
    NoKernelError,
    on_either,
    on_onnxruntime,
    on_reference,
)
from onnxgrad.autodiff.derivative import as_inputs
from onnxgrad.autodiff.primal.prepare import prepare
from onnxgrad.autodiff.reverse import sweep
from onnxgrad.errors import unknown
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.shapes import Dims, dims, is_real
from onnxgrad.graph.tidy import tidy
from onnxgrad.model import weights as constants
from onnxgrad.model.convert import to_ir, to_proto
from onnxgrad.model.feeds import random_feed
from onnxgrad.model.read import ModelLike, read

_FLOOR = 1e-5  # of the outputs' size: smaller differences are rounding
_RTOL_OF_VALUES = 1e-3  # between the model as it is and the model in another precision
_EPS32 = float(np.finfo(np.float32).eps)  # what `prepare` computes in advance is of float32
_ROUGH = 1e-5  # between them in float64, where a kernel approximates: quantiles, probabilities
_RTOL_OF_SVM = 6e-3  # onnxruntime works out probabilities of an SVMClassifier to within 0.005


def check_gradient(
    model: ModelLike,
    inputs: Sequence[str] | None = None,
    weights: Sequence[str] | None = None,
    rtol: float | None = None,
    order: int = 1,
    feed: Mapping[str, Any] | None = None,
    random_state: int | None = 0,
) -> GradientReport:
    """Compare the gradient of a model with central differences along random directions.

    For every input and weight x, with random factors u of the outputs y and a random direction v,
    the derivative of f = sum(u y) along v that follows from the gradient is compared with
    `(4 D(h/2) - D(h)) / 3`, `D(h) = (f(x + h v) - f(x - h v)) / 2h` (Richardson 1911). f is
    computed by `model` itself, with the values of x written to where it keeps them. An x that no
    gradient is computed for must have derivative zero. All is computed in float64, by onnxruntime,
    or by `onnx.reference` where onnxruntime lacks a kernel. Where neither runs `model` in float64,
    its differences in float32 must agree with the gradient within 5 %, and the report shows those
    of what `model` is rewritten to, in float64. The first row of the report compares the outputs
    that the gradient model starts from with those of `model`.

    Args:
        model: model, serialized model or path; never modified.
        inputs: names of the inputs to check; None: every float input, but for the scales and
            regions of a Resize.
        weights: names of the weights to check; None: every one that is trained by default.
        rtol: largest relative error; None: 1e-6 in float64, 0.02 in float32.
        order: 1, or 2 to check the gradient of the gradient too, whose rows follow those of the
            gradient: there, f is computed by the gradient model.
        feed: where to check, `{input: array}`; inputs that it lacks are drawn by `random_feed`.
        random_state: seed of feed and directions; None draws a new one.

    Raises:
        ValueError: an unknown name, a wrong order, nothing to check, or a model whose outputs are
            random.
        ModelError: `model` cannot be read.
        NoGradientRule: an operator on the way has no rule.
    """
    if order not in (1, 2):
        raise ValueError(f"order must be 1 or 2, not {order!r}")
    seed = int(np.random.default_rng(random_state).integers(1 << 32))
    proto = read(model)
    sites = {site.name: site for site in constants.constant_refs(proto)}
    if weights is None:
        weights = [name for name, site in sites.items() if site.default]
    prepared = prepare(proto, on_demand=True)  # the kernels know float32 only
    point = random_feed(prepared.graph.inputs, batch=3, empty_dimension=2, random_state=seed)
    for name in (*(feed or ()), *(inputs or ())):
        if name not in point:
            raise unknown("input", name, point)
    point |= {n: np.asarray(array, point[n].dtype) for n, array in (feed or {}).items()}
    if inputs is None:
        floats = (x for x in prepared.graph.inputs if is_real(x) and not constants.is_setting(x))
        inputs = [str(x.name) for x in floats]
    if not [*inputs, *weights] or not any(map(is_real, prepared.graph.outputs)):
        raise ValueError("there is no float input or weight, or no float output, to check")
    values = _values(proto, point)
    svm = any(node.op_type == "SVMClassifier" for node in proto.graph.node)
    close = _RTOL_OF_SVM if svm else _RTOL_OF_VALUES

    as_inputs(proto, prepared.graph, weights)
    point |= {name: sites[name].array() for name in weights}
    primal = to_proto(prepared)
    wrt = [*inputs, *weights]
    return _judge(_Problem(proto, primal, point, wrt, weights, values, close, rtol, order, seed))


def _judge(problem: _Problem) -> GradientReport:
    """Return the first report that is ok, else the best one.

    Where no runtime computes the model itself in float64, it is compared in float32 first; if that
    agrees, what `prepare` makes of it, which consists of fewer operators, is compared in float64.
    """
    reports = _reports(problem, [way for way in _WAYS if way.dtype is np.float64], True)
    if reports:
        return _best(reports)
    coarse, fine = _reports(problem, [_COARSE], True), _reports(problem, _WAYS, False)
    if not fine or (coarse and not coarse[-1].ok):
        return _best(coarse)
    best = _best(fine)
    return replace(best, computed=f"{best.computed}; the model itself, float32")


def _best(reports: list[GradientReport]) -> GradientReport:
    return min(reports, key=lambda r: (not r.ok, not r.rows[0].ok, r.max_error))


def _reports(problem: _Problem, ways: Sequence[_Way], given: bool) -> list[GradientReport]:
    """Return the reports of the ways that can be gone, up to the first that is ok.

    Some float64 kernels round to float32 inside, so one that disagrees is not the last word; but
    float32 itself is only asked where float64 cannot be had. `given`: f is the model as it is.
    """
    reports: list[GradientReport] = []
    for way in ways:
        if way.dtype is np.float32 and any(report.rows[0].ok for report in reports):
            break
        try:
            reports.append(_compare(way, problem, given))
        except NoKernelError:
            continue
        if reports[-1].ok:
            break
    return reports


# -- where and how precisely it is computed ---------------------------------------------------


def _values(proto: ModelProto, point: Feed) -> list[np.ndarray]:
    """Return the outputs of a model as the user gave it."""
    made = ModelProto()
    made.CopyFrom(proto)
    made.ir_version = min(made.ir_version, 13)  # onnxruntime refuses later ones unread
    return on_either(made)(point)


@dataclass(frozen=True)
class _Way:
    name: str
    load: Callable[[ModelProto], Function]
    dtype: Any
    rtol: float
    steps: tuple[float, ...]  # a kink that lies within one step does not within a smaller one

    def convert(self, proto: ModelProto) -> ModelProto:
        """Return `proto` in the precision of this way."""
        return in_precision(proto, ir.DataType.DOUBLE) if self.dtype is np.float64 else proto

    def either(self, proto: ModelProto) -> Function:
        """Return the function that runs `proto` on this runtime, or else on the other one."""
        other = on_onnxruntime if self.load is on_reference else on_reference
        return on_either(proto, self.load, other)


_STEPS = (1e-3, 1e-4, 1e-5, 1e-6)
_WAYS = (
    _Way("float64 on onnxruntime", on_onnxruntime, np.float64, 1e-6, _STEPS),
    _Way("float64 on onnx.reference", on_reference, np.float64, 1e-6, _STEPS),
    _Way("float32 on onnxruntime", on_onnxruntime, np.float32, 2e-2, (1e-1, 1e-2, 1e-3)),
)
_COARSE = replace(_WAYS[-1], load=on_either, name="float32", rtol=5e-2)
_COARSE_SVM = 0.5  # differences of probabilities that are within 0.005


# -- the comparison ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Problem:
    given: ModelProto  # as the user has it
    primal: ModelProto  # in the working dialect, the weights as inputs
    point: Feed
    wrt: list[str]
    weights: Sequence[str]
    values: list[np.ndarray]  # of the float outputs of the model as it is, at `point`
    rtol_of_values: float
    rtol: float | None
    order: int
    seed: int


class _Gradient:
    """The gradient model: `seeds` names what arrives at the outputs, `outputs` what comes back.

    `model` is in the working dialect, and written to.
    """

    def __init__(self, model: ir.Model, wrt: list[str]) -> None:
        graph, op = model.graph, Emit(model.graph)
        inputs = {str(x.name): x for x in graph.inputs}
        seeds = {y: _seed(op, y) for y in graph.outputs if is_real(y)}
        self.seeds = {str(g.name): dims(g) for g in seeds.values()}
        graph.inputs.extend(seeds.values())
        gradients = sweep(op, seeds, [inputs[name] for name in wrt])
        protected = set(graph.inputs)
        gs = [op.name_output(g, f"{x.name}_grad", x, protected) for x, g in gradients.items()]
        graph.outputs[:] = [*gs, *seeds]
        self.outputs = [str(x.name) for x in gradients]
        tidy(model)
        self.with_outputs = to_proto(model)

    @property
    def alone(self) -> ModelProto:
        """The model of the gradients alone."""
        model = ModelProto()
        model.CopyFrom(self.with_outputs)
        del model.graph.output[len(self.outputs) :]
        return model


def _seed(op: Emit, y: ir.Value) -> ir.Value:
    return ir.Value(name=op.name(f"{y.name}_grad"), type=y.type, shape=y.shape)


def _compare(way: _Way, problem: _Problem, as_given: bool) -> GradientReport:
    rng = np.random.default_rng(problem.seed)
    primal = way.convert(problem.primal)
    model = to_ir(primal)
    kinds = {x.name: x.dtype for x in model.graph.inputs if x.dtype is not None}
    point = {n: x.astype(kinds[n].numpy()) for n, x in problem.point.items() if n in kinds}
    function: Function
    if as_given:
        function = ModelAsGiven(way.convert(problem.given), way.load, problem.weights)
    else:
        function = way.load(primal)
    outputs = function(point)
    again = function(point)
    if not all(np.array_equal(a, b, equal_nan=True) for a, b in zip(again, outputs, strict=True)):
        raise ValueError("two runs differ: a model whose outputs are random cannot be checked")
    if as_given and way.dtype is np.float64:
        if any(y.dtype != np.float64 for y in outputs):
            raise NoKernelError("a part of the model does not compute in float64")
        if not _row_of_values(outputs, problem.values, problem.rtol_of_values).ok:
            raise NoKernelError("in float64, the outputs are not those of the model")
    rows: list[GradientRow] = []
    wrt = problem.wrt
    orders = 1 if way is _COARSE else problem.order
    for order in range(1, orders + 1):
        gradient = _Gradient(model, wrt)
        factors = [np.where(np.isfinite(y), _normal(rng, y), 0).astype(y.dtype) for y in outputs]
        pairs = zip(gradient.seeds.items(), factors, strict=True)
        fed = {name: _of_rank(u, shape) for (name, shape), u in pairs}
        run, n = way.either(gradient.with_outputs), len(gradient.outputs)
        computed = run(point | fed)
        arrays = dict(zip(gradient.outputs, computed[:n], strict=True))
        if order == 1:
            values = computed[n:]
            rows.append(_row_of_values(values, problem.values, problem.rtol_of_values))
            precise = as_given and way.dtype is np.float64
            if precise and _ROUGH < _row_of_values(values, outputs, _ROUGH).error < 1e-2:
                raise NoKernelError("a kernel approximates")
        at = _At(function, point, outputs, factors, arrays)
        rtol = way.rtol if problem.rtol is None else problem.rtol
        if way is _COARSE:
            rtol = max(rtol, _COARSE_SVM if problem.rtol_of_values == _RTOL_OF_SVM else way.rtol)
        rows += [_row(way, at, name, _normal(rng, point[name]), rtol, order) for name in wrt]
        if order < orders:
            wrt, point, outputs = [*wrt, *fed], point | fed, computed[:n]
            model = prepare(gradient.alone, own=True)
            function = partial(_first, n, run)
    return GradientReport(tuple(rows), way.name)


def _first(n: int, function: Function, feed: Feed) -> list[np.ndarray]:
    return function(feed)[:n]


def _of_rank(u: np.ndarray, shape: Dims | None) -> np.ndarray:
    """Return `u`; where a Loop made no turn, onnxruntime may return a stack without its axes."""
    if u.size or shape is None or len(shape) == u.ndim:
        return u
    return np.zeros([0, *(d if isinstance(d, int) else 0 for d in shape[1:])], u.dtype)


@dataclass(frozen=True)
class _At:
    """A function at a point: sum(u y), u the factors of its outputs y, and its gradients."""

    function: Function
    point: Feed
    outputs: Sequence[np.ndarray]
    factors: Sequence[np.ndarray]
    gradients: Mapping[str, np.ndarray]

    def __call__(self, name: str, x: np.ndarray) -> float:
        """Return sum(u y) with another value of one variable."""
        found = self.function({**self.point, name: x})
        return sum(_dot(u, y) for u, y in zip(self.factors, found, strict=True))

    @property
    def size(self) -> float:
        """Return sum(|u y|), of which differences are small parts."""
        return sum(
            _dot(np.abs(u), np.abs(y)) for u, y in zip(self.factors, self.outputs, strict=True)
        )

    @np.errstate(invalid="ignore")
    def difference(self, name: str, v: np.ndarray) -> tuple[float, float]:
        """Return the derivative along v, of which the third and fourth orders cancel, and what the
        gradient says that it is, for the steps that the function could really take.
        """
        x, g = self.point[name], self.gradients.get(name)
        held = getattr(self.function, "held", lambda name, x: x)
        expected = found = 0.0
        for step, share in ((v, -1 / 6), (v / 2, 8 / 6)):
            ahead, behind = (held(name, np.asarray(x + s)) for s in (step, -step))
            expected += share * (self(name, ahead) - self(name, behind))
            if g is not None:  # what is infinite does not move: its gradient must be zero
                moved = np.where(np.isfinite(x), ahead - behind, 2 * step)
                found += share * float(np.vdot(g, moved))
        return expected, found


def _row(way: _Way, at: _At, name: str, v: np.ndarray, rtol: float, order: int) -> GradientRow:
    """Return the comparison along v, by the step that agrees best."""
    floor = _FLOOR * at.size + float(np.finfo(way.dtype).eps) / (way.steps[0] * way.rtol)
    terms = np.abs(v * at.gradients.get(name, 0.0))  # their sum may be far smaller than they are
    floor += _EPS32 / way.rtol * float(terms.sum(where=np.isfinite(terms)))
    tried: list[tuple[float, float, float]] = []
    for h in way.steps:
        expected, found = np.divide(at.difference(name, h * v), h).tolist()
        tried.append((_error(found, expected, floor), expected, found))
        if tried[-1][0] < 1e-3 * way.rtol:  # no other step could tell more
            break
    finite = [row for row in tried if np.isfinite(row[0])]
    error, expected, found = min(finite or tried[:1])
    return GradientRow(name, expected, found, error, rtol, order)


def _normal(rng: np.random.Generator, like: np.ndarray) -> np.ndarray:
    return np.asarray(rng.standard_normal(np.shape(like))).astype(like.dtype)


def _dot(u: np.ndarray, y: np.ndarray) -> float:
    """Return sum(u y), for infinite y where u is zero too; NaN where y has another shape."""
    if u.shape != y.shape:
        return nan
    counted = u != 0
    return float(np.dot(u[counted], y[counted]))


def _error(found: float, expected: float, floor: float) -> float:
    scale = max(abs(found), abs(expected)) + floor
    return abs(found - expected) / scale if scale else 0.0


def _row_of_values(found: list[np.ndarray], expected: list[np.ndarray], rtol: float) -> GradientRow:
    """Compare the largest difference with the largest finite number.

    Infinity agrees with the largest number of float32, which some kernels write in its place.
    """
    most = float(np.finfo(np.float32).max)
    a, b = (
        np.clip(np.concatenate([np.ravel(y).astype(np.float64) for y in ys]), -most, most)
        for ys in (found, expected)
    )
    if not a.size:
        return GradientRow("(outputs)", 0.0, 0.0, 0.0, rtol)
    off = np.where(np.isnan(a) | np.isnan(b), inf, np.abs(a - b))
    worst = int(np.argmax(off))
    error = float(off[worst] / (np.abs(b).max(where=np.abs(b) < most, initial=0.0) or 1.0))
    return GradientRow("(outputs)", float(b[worst]), float(a[worst]), error, rtol)
