"""`check_gradient`: the gradient against central differences, in float64 where a runtime can."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
from onnx import ModelProto

from onnxgrad.autodiff.check.comparison import (
    COARSE,
    METHODS,
    CheckedModel,
    CheckMethod,
    GradientReport,
    compare_by_method,
)
from onnxgrad.autodiff.check.runtimes import (
    Feed,
    NoKernelError,
    kernel_accuracy,
    load_on_either,
    load_on_onnxruntime,
)
from onnxgrad.autodiff.derivative import make_weights_inputs
from onnxgrad.autodiff.derivative_builder import Builder
from onnxgrad.autodiff.primal.prepare import prepare
from onnxgrad.autodiff.reverse import sweep
from onnxgrad.errors import argument, unknown
from onnxgrad.model import weights as constants
from onnxgrad.model.convert import to_proto
from onnxgrad.model.feeds import random_feed
from onnxgrad.model.opsets import newest_ir_version
from onnxgrad.model.read import ModelLike, read, require_unique_names
from onnxgrad.operators.shapes import is_real

Names = Sequence[str] | None
_MOST_DIRECTIONS = 16  # up to so many inputs and weights, each has a separate direction


def check_gradient(
    model: ModelLike,
    inputs: Sequence[str] | Mapping[str, Any] | None = None,
    weights: Sequence[str] | None = None,
    rtol: float | None = None,
    order: int = 1,
    feed: Mapping[str, Any] | None = None,
    random_state: int | None = 0,
    *,
    separately: bool | None = None,
    budget_seconds: float | None = None,
) -> GradientReport:
    """Compare the gradient of a model with central differences along random directions.

    For f = sum(u y) over the outputs y, with random factors u, and for every input and weight x,
    the derivative of f along a random direction v according to the gradient is compared with
    `(4 D(h/2) - D(h)) / 3`, `D(h) = (f(x + h v) - f(x - h v)) / 2h` (Richardson 1911). `model`
    itself computes f. The derivative with respect to an x without a gradient must be zero.

    In float64, of more than 16 inputs and weights up to 8 with gradients of similar size change
    together: a wrong gradient of one shows if its error is more than about 800 `rtol`. Where a
    group differs, each of its members is compared by itself.

    Args:
        model: model, serialized model or path; never modified.
        inputs: names of the inputs to check, or `{input: array}`, as in `feed`; None: every float
            input, except the scales and regions of a Resize.
        weights: names of the weights to check; None: every one that is trained by default.
        rtol: largest relative error; None: 1e-6 in float64, 0.02 in float32.
        order: 1, or 2 to check also the gradient of the gradient, in further rows, where f is
            computed by the gradient model.
        feed: where to check, `{input: array}`; missing inputs are drawn by `random_feed`.
        random_state: seed of feed, factors and directions; None draws a new one.
        separately: whether each has its own direction; None: if they are at most 16.
        budget_seconds: no further direction is begun after this time, but one always runs; what
            was left out is `unchecked` in the report.

    Raises:
        ValueError: an unknown name, an invalid order or budget, nothing to check, random outputs.
        ModelError: `model` cannot be read.
        NoGradientRule: an operator on a path has no rule.
        RuntimeError: no runtime computes the model, or its gradient, as where inputs in `feed`
            share a symbolic dimension and differ in that length.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2] x) => (float[N,2] y) <float[2] w = {2.0, 3.0}> { y = Mul(x, w) }''')
        >>> report = og.check_gradient(model)
        >>> report.ok, [row.name for row in report.rows]
        (True, ['(outputs)', 'x', 'w'])
    """
    if order not in (1, 2):
        raise ValueError(f"order must be 1 or 2, not {order!r}")
    if budget_seconds is not None and not budget_seconds > 0:
        raise ValueError(f"{argument('budget_seconds', budget_seconds)} must be above 0")
    deadline = inf if budget_seconds is None else time.monotonic() + budget_seconds
    seed = int(np.random.default_rng(random_state).integers(1 << 32))
    problem = _prepare_problem(read(model), inputs, weights, feed or {}, rtol, order, seed)
    alone = len(problem.wrt) <= _MOST_DIRECTIONS if separately is None else separately
    problem = replace(problem, separately=alone, deadline=deadline)
    return _require_runnable_gradient(problem, _best_method_report(problem))


def _prepare_problem(
    proto: ModelProto, inputs: Any, weights: Names, feed: Any, rtol: Any, order: int, seed: int
) -> CheckedModel:
    """Prepare the model, choose the inputs and weights to check, and draw the point."""
    if isinstance(inputs, Mapping):
        inputs, feed = list(inputs), {**feed, **inputs}
    for kind, names in (("input", inputs), ("weight", weights)):
        require_unique_names(kind, [] if names is None else names)
    refs = {ref.name: ref for ref in constants.constant_refs(proto)}
    if weights is None:
        weights = [name for name, ref in refs.items() if ref.default]
    prepared = prepare(proto, on_demand=True)  # the fused kernels compute in float32 only
    graph = prepared.graph
    point = random_feed(graph.inputs, batch=3, empty_dimension=2, random_state=seed)
    for name in (*feed, *(inputs or ())):
        if name not in point:
            raise unknown("input", name, point)
    point |= {name: np.asarray(array, point[name].dtype) for name, array in feed.items()}
    if inputs is None:
        floats = (x for x in graph.inputs if is_real(x) and not constants.feeds_settings_only(x))
        inputs = [str(x.name) for x in floats]
    wrt = [*inputs, *weights]
    if not wrt or not any(map(is_real, graph.outputs)):
        raise ValueError("no float among `inputs` and `weights`, or no float output: none to check")
    original = ModelProto()
    original.CopyFrom(proto)
    original.ir_version = min(proto.ir_version, newest_ir_version())
    values = load_on_either(original)(point)
    make_weights_inputs(proto, graph, weights)
    point |= {name: refs[name].array() for name in weights}
    primal, allowed = to_proto(prepared), kernel_accuracy(proto)
    return CheckedModel(original, primal, point, wrt, weights, values, allowed, rtol, order, seed)


def _best_method_report(problem: CheckedModel) -> GradientReport:
    """Return the first report whose gradients are right, or the most accurate of all reports.

    If no runtime computes the user's model in float64, it is compared in float32 first. If that
    agrees, the prepared model, which consists of fewer operators, is compared in float64.
    """
    float64 = [method for method in METHODS if method.dtype is np.float64]
    reports = _method_reports(problem, float64, original=True)
    if reports:
        return _choose_best_report(reports)
    coarse = _method_reports(problem, [COARSE], original=True)
    fine = _method_reports(problem, METHODS, original=False)
    if not fine and not coarse:
        return compare_by_method(COARSE, problem, original=True)  # raises the error of the runtime
    if not fine or (coarse and not coarse[-1].ok):
        return _choose_best_report(coarse)
    best = _choose_best_report(fine)
    return replace(best, computed=f"{best.computed}; the model itself, float32")


def _require_runnable_gradient(problem: CheckedModel, report: GradientReport) -> GradientReport:
    """Return `report`; raise if its gradients are right, but onnxruntime runs only the model and
    not the gradient.

    The comparison runs in float64, and perhaps on another runtime.
    """
    if not report.ok:
        return report
    builder = Builder(problem.primal, [], problem.wrt, own=True)
    reached = sweep(builder.op, builder.add_cotangents(ones=True), builder.wrt)
    gradient = builder.build_model([(f"{x.name}_grad", g) for x, g in reached.items()])
    error = _run_error(gradient, problem.point)
    if error is not None and _run_error(problem.original, problem.point) is None:
        raise NoKernelError(f"onnxruntime runs the model, but not its gradient: {error}") from error
    return report


def _run_error(proto: ModelProto, feed: Feed) -> NoKernelError | None:
    """Return the error of running the model `proto` on onnxruntime; None if it runs."""
    try:
        load_on_onnxruntime(proto)(feed)
    except NoKernelError as e:
        return e
    return None


def _choose_best_report(reports: list[GradientReport]) -> GradientReport:
    return min(reports, key=lambda r: (not r.ok, not r.rows[0].ok, r.max_error))


def _method_reports(
    problem: CheckedModel, methods: Sequence[CheckMethod], original: bool
) -> list[GradientReport]:
    """Return a report for each method that can run the model, up to the first report that is ok.

    Some float64 kernels round to float32 inside, so after one that disagrees the next is tried;
    but float32 is tried only if no float64 method computes the outputs. See `compare_by_method` for
    `original`.
    """
    reports: list[GradientReport] = []
    for method in methods:
        if method.dtype is np.float32 and any(report.rows[0].ok for report in reports):
            break
        try:
            reports.append(compare_by_method(method, problem, original))
        except NoKernelError:
            continue
        if reports[-1].ok or reports[-1].unchecked:
            break
    return reports
