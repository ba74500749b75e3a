"""Packs: many small models side by side in one, which is differentiated, inferred and run once.

Every part keeps its own inputs, outputs and cotangents, under names with its prefix, and is judged
by itself: against its own central differences, relative to its own outputs. Where a pack fails, its
parts run singly, so that the message names those that are wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto

from onnxgrad import DerivativeOptions, onnx_derivative
from onnxgrad.autodiff.check.runtimes import (
    NoKernelError,
    load_on_either,
    load_on_onnxruntime,
    load_on_reference,
)
from onnxgrad.autodiff.primal.prepare import prepare
from onnxgrad.model.convert import convert_precision, to_proto
from onnxgrad.model.weights import feeds_settings_only
from onnxgrad.operators import OPERATORS
from tests.support.members import assert_own_results, stack_members
from tests.support.stated_shapes import all_values, assert_one_length_per_symbol, claims_and_shapes

Feed = dict[str, np.ndarray]
FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE)
EPS32 = float(np.finfo(np.float32).eps)


@dataclass(frozen=True)
class Part:
    """A model of a pack, where it is evaluated, and the inputs that its gradient is checked for."""

    name: str
    model: onnx.ModelProto
    feed: Feed
    variables: tuple[str, ...]


@dataclass(frozen=True)
class Runtime:
    """Where packs run, in which precision, and the tolerance and steps of differences there."""

    load: Callable
    dtype: type
    rtol: float
    steps: tuple[float, ...]  # a smaller step may avoid a kink that lies within a larger one
    load_gradient: Callable | None = None  # where the gradient runs, if elsewhere


STEPS = (1e-3, 1e-4, 1e-5, 1e-6, 1e-7)
RUNTIMES = {
    "float64": Runtime(load_on_onnxruntime, np.float64, 1e-6, STEPS),
    "reference": Runtime(load_on_reference, np.float64, 1e-6, STEPS),
    "mixed": Runtime(load_on_reference, np.float64, 1e-6, STEPS, load_on_onnxruntime),
    "float32": Runtime(load_on_onnxruntime, np.float32, 2e-2, (1e-1, 1e-2, 1e-3)),
}


def side_by_side(models: Sequence[onnx.ModelProto]) -> onnx.ModelProto:
    """Return one model of all; the names in the model i begin with `r<i>_`."""
    whole = onnx.ModelProto()
    whole.CopyFrom(models[0])
    for field in ("node", "input", "output", "initializer", "value_info"):
        whole.graph.ClearField(field)
    for i, model in enumerate(models):
        assert [*model.opset_import] == [*models[0].opset_import]
        own = onnx.GraphProto()
        own.CopyFrom(model.graph)
        _prefix_names(own, f"r{i}_")
        for field in ("node", "input", "output", "initializer", "value_info"):
            getattr(whole.graph, field).extend(getattr(own, field))
    return whole


def _prefix_names(graph: onnx.GraphProto, prefix: str) -> None:
    """Let the names of all values, nodes and symbolic lengths begin with a prefix."""
    for node in graph.node:
        node.name = node.name and prefix + node.name
        for names in (node.input, node.output):
            names[:] = [prefix + name if name else "" for name in names]
        for attribute in node.attribute:
            for body in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else ())):
                _prefix_names(body, prefix)
    for value in (*graph.input, *graph.output, *graph.value_info):
        for d in value.type.tensor_type.shape.dim:
            if d.dim_param:
                d.dim_param = prefix + d.dim_param
    for named in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
        named.name = prefix + named.name


class Pack:
    """Parts of the same opset, of which a runtime has all kernels."""

    def __init__(self, parts: Sequence[Part], runtime: str) -> None:
        self.parts, self.runtime = parts, RUNTIMES[runtime]
        self.load_on_onnxruntime = self.runtime.load is load_on_onnxruntime
        self.model = side_by_side([part.model for part in parts])
        if self.runtime.dtype is np.float64:
            self.model = convert_precision(self.model, ir.DataType.DOUBLE)
        self.dtypes = {
            x.name: onnx.helper.tensor_dtype_to_np_dtype(x.type.tensor_type.elem_type)
            for x in self.model.graph.input
        }
        self.feed = {
            f"r{i}_{name}": np.asarray(a, self.dtypes[f"r{i}_{name}"])
            for i, part in enumerate(parts)
            for name, a in part.feed.items()
        }
        self.function = self.runtime.load(self.model)
        self.outputs = self._float_names(self.model)

    @staticmethod
    def _float_names(model: onnx.ModelProto) -> list[str]:
        """Return the names of the outputs that runtimes return."""
        return [y.name for y in model.graph.output if y.type.tensor_type.elem_type in FLOATS]

    @cached_property
    def gradient(self) -> onnx.ModelProto:
        return onnx_derivative(self.model, weights=[], options=DerivativeOptions.KeepOutputs)

    @cached_property
    def prepared(self) -> ir.Model:
        return prepare(self.model)

    @cached_property
    def primal(self) -> onnx.ModelProto:
        return to_proto(self.prepared)

    @cached_property
    def settings(self) -> set[str]:
        """The inputs that are only scales and the like."""
        return {str(x.name) for x in self.prepared.graph.inputs if feeds_settings_only(x)}

    def inferred(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """Return a model in the precision for which onnxruntime has all kernels."""
        return model if self.load_on_onnxruntime else convert_precision(model, ir.DataType.FLOAT)

    # -- gradients --------------------------------------------------------------------------------

    def check_gradients(self) -> Iterator[str]:
        """Yield what is wrong of outputs and gradients, one line for each variable of a part."""
        rng = np.random.default_rng(0)
        ys = dict(zip(self.outputs, self.function(self.feed), strict=True))
        factors = {
            name: np.where(np.abs(y) < 1e30, rng.standard_normal(np.shape(y)), 0).astype(y.dtype)
            for name, y in ys.items()
        }
        cotangents = {f"{name}_grad": u for name, u in factors.items()}
        names = self._float_names(self.gradient)
        run = load_on_either(self.gradient, self.runtime.load_gradient or self.runtime.load)
        results = dict(zip(names, run(self.feed | cotangents), strict=True))
        sums = [Objective(f"r{i}_", factors, ys) for i in range(len(self.parts))]
        for part, f in zip(self.parts, sums, strict=True):
            yield from (f"{part.name}: {line}" for line in f.different_outputs(results))
            for name in part.variables:
                g, x = results.get(f"{f.prefix}{name}_grad"), self.feed[f.prefix + name]
                if g is not None and (g.shape, g.dtype) != (x.shape, x.dtype):
                    yield f"{part.name}: gradient of {name} is {g.dtype}{g.shape}"
                    return
        for k in range(max(len(part.variables) for part in self.parts)):
            moved = {
                f: f"{f.prefix}{part.variables[k]}"
                for part, f in zip(self.parts, sums, strict=True)
                if k < len(part.variables) and f"{f.prefix}{part.variables[k]}" not in self.settings
            }
            vs = {x: rng.standard_normal(self.feed[x].shape) for x in moved.values()}
            gradients = {x: results.get(f"{x}_grad", np.zeros_like(vs[x])) for x in vs}
            errors = self._compare(moved, vs, gradients)
            names_of = {f: part.name for part, f in zip(self.parts, sums, strict=True)}
            for f, (error, expected, computed) in errors.items():
                undefined = np.isnan(expected) and np.isnan(error)  # as x^b for x < 0
                if not (undefined or error <= self.runtime.rtol):
                    yield (
                        f"{names_of[f]}: {moved[f].removeprefix(f.prefix)} has the derivative "
                        f"{computed:.7g}, expected {expected:.7g}"
                    )

    def operators_without_gradient(self) -> Iterator[str]:
        """Yield which operators of the gradient cannot be differentiated again."""
        for key in sorted({(node.domain, node.op_type) for node in self.gradient.graph.node}):
            if not OPERATORS[key].is_covered:
                yield f"{', '.join(part.name for part in self.parts)}: {key} has no gradient"

    def _compare(self, moved: dict, vs: Feed, gradients: Feed) -> dict:
        """Return the relative error and both derivatives along `vs`, of the best step of each."""
        tried: dict[Objective, list] = {f: [] for f in moved}
        pending = dict(moved)
        for h in self.runtime.steps:
            points = {
                s: {x: np.asarray(self.feed[x] + s * vs[x], self.feed[x].dtype) for x in vs}
                for s in (h, -h, h / 2, -h / 2)
            }
            ys = {
                s: dict(zip(self.outputs, self.function(self.feed | point), strict=True))
                for s, point in points.items()
            }
            for f, x in list(pending.items()):
                error = self._error(f, x, h, ys, points, vs[x], gradients[x])
                tried[f].append(error)
                if error[0] < 0.1 * self.runtime.rtol:
                    del pending[f]
            if not pending:
                break
        best = {}
        for f, errors in tried.items():
            finite = [e for e in errors if np.isfinite(e[0])]
            best[f] = min(finite or errors[:1])
        return best

    @np.errstate(invalid="ignore")
    def _error(self, f, x: str, h: float, ys: dict, points: dict, v, g) -> tuple:
        """Return relative error, derivative by differences (Richardson 1911), and by gradient."""
        expected = computed = 0.0
        for s, share in ((h, -1 / 6), (h / 2, 8 / 6)):
            expected += share * (f(ys[s]) - f(ys[-s]))
            # an infinite element does not move: its gradient must be zero
            step = np.where(np.isfinite(self.feed[x]), points[s][x] - points[-s][x], 2 * s * v)
            computed += share * float(np.vdot(g.astype(np.float64), step))
        expected, computed = expected / h, computed / h
        method = self.runtime
        floor = 1e-5 * f.size + np.finfo(method.dtype).eps / (method.steps[0] * method.rtol)
        terms = np.abs(v * g)  # which may cancel in their sum; some constants are of float32
        floor += EPS32 / method.rtol * float(terms.sum(where=np.isfinite(terms)))
        scale = max(abs(computed), abs(expected)) + floor
        return abs(computed - expected) / scale, expected, computed

    # -- shapes and members -----------------------------------------------------------------------

    def check_shapes(self, primal: onnx.ModelProto, gradient: bool = True) -> None:
        """Check what the prepared model and its gradient state of the shapes of their values."""
        primal = self.inferred(primal)
        values = all_values(primal, self.feed)
        assert_one_length_per_symbol(*claims_and_shapes(primal, values, self.feed))
        if gradient:
            zeros = {f"{name}_grad": np.zeros(values[name].shape) for name in self.outputs}
            model, feed = self.inferred(self.gradient), self.feed | zeros
            assert_one_length_per_symbol(*claims_and_shapes(model, all_values(model, feed), feed))

    def check_members(self, prepared: ir.Model) -> None:
        """Check that with a leading axis of members, each gets its own result."""
        names = [f"r{i}_{name}" for i, part in enumerate(self.parts) for name in part.variables]
        many, one = self.inferred(stack_members(prepared, names)), self.inferred(self.model)
        assert_own_results(many, one, names, self.feed)


class Objective:
    """The scalar function sum(u y) of the outputs of one part, with factors u."""

    def __init__(self, prefix: str, factors: Feed, ys: Feed) -> None:
        self.prefix, self.ys = prefix, {n: y for n, y in ys.items() if n.startswith(prefix)}
        self.factors = {n: factors[n] for n in self.ys}
        self.size = sum(dot_of(np.abs(u), np.abs(self.ys[n])) for n, u in self.factors.items())

    def __call__(self, ys: Feed) -> float:
        return sum(dot_of(u, ys[n]) for n, u in self.factors.items())

    def different_outputs(self, results: Feed) -> Iterator[str]:
        """Yield which outputs of the gradient model are not those of the model."""
        for name, y in self.ys.items():
            found = results[name]
            scale = np.abs(y).max(where=np.isfinite(y), initial=0.0) or 1.0
            if found.shape != y.shape:
                yield f"{name} has the shape {found.shape}, expected {y.shape}"
            elif not np.allclose(found, y, rtol=1e-4, atol=1e-5 * scale, equal_nan=True):
                yield f"{name} is {found}, expected {y}"


def dot_of(u: np.ndarray, y: np.ndarray) -> float:
    """Return sum(u y) over nonzero u; NaN if a step changes the shape."""
    if u.shape != y.shape:
        return np.nan
    counted = u != 0
    return float(np.dot(u[counted].astype(np.float64), y[counted].astype(np.float64)))


def failures(parts: Sequence[Part], check: Callable[[Sequence[Part]], Iterable[str]]) -> list[str]:
    """Return what is wrong with each part, singly where all together fail in any way.

    Of parts that no runtime computes together, each half is checked by itself.
    """
    try:
        together = list(check(parts))
    except NoKernelError as error:
        if len(parts) > 1:
            halves = parts[: len(parts) // 2], parts[len(parts) // 2 :]
            return [line for half in halves for line in failures(half, check)]
        together = [_line(parts, error)]
    except Exception as error:  # of any kind: it fails the test
        together = [_line(parts, error)]
    if not together or len(parts) == 1:
        return together
    singly = [line for part in parts for line in failures([part], check)]
    return singly or [f"all together, and no part singly: {line}" for line in together]


def gradients_on(*runtimes: str) -> Callable[[Sequence[Part]], list[str]]:
    """Return the check of gradients: of many parts on the first runtime, of one on any."""

    def check(parts: Sequence[Part]) -> list[str]:
        for runtime in runtimes:
            try:
                return list(Pack(parts, runtime).check_gradients())
            except NoKernelError:
                if len(parts) > 1 or runtime == runtimes[-1]:
                    raise
        return []

    return check


def _line(parts: Sequence[Part], error: Exception) -> str:
    return f"{', '.join(part.name for part in parts)}: {type(error).__name__}: {error}"
