"""The node cases that the onnx package ships, and how their gradient is judged.

Nothing here is shared with `check_gradient`: the model runs as it is, in its own precision.
"""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, numpy_helper
from onnx.backend.test.case import node as node_cases
from onnx.reference import ReferenceEvaluator

from onnxgrad import onnx_derivative
from onnxgrad.operators import OPERATORS, Operator

PREVIEW = {"ai.onnx.preview", "ai.onnx.preview.training"}
FLOATS = {TensorProto.FLOAT, TensorProto.DOUBLE}
NEWEST = 26  # opset that onnxruntime 1.31 loads
# patterns of names, and why
NOT_RUN = {
    "test_scan_sum": "of opset 8, refused: onnx converts it into another function",
    "mod_float_edge_cases_fmod_0": "by numbers near zero: a jump lies within every step",
    "dequantizelinear_float4e2m1": "onnxruntime has no kernel for this type",
    "dequantizelinear_(u?int[24]|e4m3fn.*|e5m2)-fed": "numpy arrays of this type cannot be fed",
}
NOT_IN_FLOAT32 = {"^test_softmax_large_number": "a step that float32 resolves at 10000 is too long"}
Feed = dict[str, np.ndarray]
Function = Callable[[Feed], list[np.ndarray]]

# float operands that are no variables: they say which elements are read, or are compared
NO_VARIABLE = {
    "Resize": ("roi", "scales"),
    "Upsample": ("scales",),
    "OneHot": ("indices", "depth"),
    "MaxRoiPool": ("rois",),
    "CastLike": ("like",),
    "Dropout": ("r",),  # the probability of a draw
}


@dataclass
class ShippedCase:
    """A case and its operands; `frozen`: those that are no variables are constants."""

    name: str
    model: onnx.ModelProto
    arrays: Feed
    frozen: bool

    @property
    def id(self) -> str:
        return f"{self.name}-{'frozen' if self.frozen else 'fed'}"

    @property
    def node(self) -> onnx.NodeProto:
        return self.model.graph.node[0]

    @property
    def variables(self) -> list[str]:
        """The float inputs that the gradient is checked for."""
        return [n for n, a in self.arrays.items() if _varies(self.node, n, a)]

    @cached_property
    def forward(self) -> tuple[Function, bool]:
        """The function of the model, and whether onnxruntime computes it."""
        try:
            function = _on_onnxruntime(self.model)
            function(self.arrays)
            return function, True
        except Exception:  # no kernel: the errors have no common base
            return _on_reference(self.model), False


def _varies(node: onnx.NodeProto, name: str, a: np.ndarray) -> bool:
    return a.dtype in (np.float32, np.float64) and name not in NO_VARIABLE.get(node.op_type, ())


def module_names() -> list[str]:
    """Return the modules of the onnx package that make cases, of one operator each."""
    [folder] = node_cases.__path__
    files = [path.relative_to(folder) for path in sorted(Path(folder).rglob("*.py"))]
    return [".".join(file.with_suffix("").parts) for file in files if not file.name.startswith("_")]


@cache
def raw_cases(module: str) -> list:
    """Return all cases that a module makes: when it is imported, as the package loads them."""
    made = node_cases._NodeTestCases  # what `load_model_tests` returns
    before = len(made)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module(f"{node_cases.__name__}.{module}")
    return made[before:]


def cases_of(module: str, frozen: bool) -> list[ShippedCase]:
    """Return the cases of one differentiable operator, not of its function body, that have floats
    of 32 or 64 bits among operands and results.
    """
    return [made for case in raw_cases(module) for made in _made(case, frozen)]


def but_for(chosen: Iterable[ShippedCase], *excepted: dict[str, str]) -> list[ShippedCase]:
    patterns = [p for patterns in excepted for p in patterns]
    return [c for c in chosen if not any(re.search(p, c.id) for p in patterns)]


def is_differentiable(node: onnx.NodeProto) -> bool:
    operator = OPERATORS.get((node.domain, node.op_type), Operator())
    return not operator.no_gradient and node.domain not in PREVIEW


def _made(case, frozen: bool) -> Iterator[ShippedCase]:
    graph = case.model.graph
    tensors = [v.type.HasField("tensor_type") for v in (*graph.input, *graph.output)]
    if "_expanded" in case.name or len(graph.node) != 1 or not all(tensors):
        return
    types = [{v.type.tensor_type.elem_type for v in vs} for vs in (graph.input, graph.output)]
    if any(FLOATS.isdisjoint(of) for of in types) or not is_differentiable(graph.node[0]):
        return
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    [node] = model.graph.node
    names = [x.name for x in graph.input]
    arrays = dict(zip(names, map(_array, case.data_sets[0][0]), strict=True))
    _stamp(model)
    if node.op_type == "Dropout" and len(names) > 1:  # the same numbers for every run
        kept = [a for a in node.attribute if a.name != "seed"]
        del node.attribute[:]
        node.attribute.extend([*kept, onnx.helper.make_attribute("seed", 1)])
    made = ShippedCase(case.name, model, _moved(node, arrays), frozen)
    if frozen:
        _freeze(model, {n: a for n, a in made.arrays.items() if n not in made.variables})
    if made.variables:
        yield made


def _array(a) -> np.ndarray:
    return numpy_helper.to_array(a) if isinstance(a, TensorProto) else np.asarray(a)


def _stamp(model: onnx.ModelProto) -> None:
    """Declare the newest versions that onnxruntime loads, where the model needs no newer ones."""
    model.ir_version = min(model.ir_version, 13)
    for opset in model.opset_import:
        if opset.domain == "" and all(_is_known(n) for n in model.graph.node):
            opset.version = min(opset.version, NEWEST)


def _is_known(node: onnx.NodeProto) -> bool:
    if node.domain or not onnx.defs.has(node.op_type, NEWEST):
        return bool(node.domain)
    known = onnx.defs.get_schema(node.op_type, NEWEST).attributes.keys()
    return {a.name for a in node.attribute} <= known


def _moved(node: onnx.NodeProto, arrays: Feed) -> Feed:
    """Move the variables away from kinks and ties, toward the inside of the domain, and out of
    what is not finite.
    """
    rng, side = np.random.default_rng(0), -1 if node.op_type in ("Acos", "Asin", "Atanh") else 1
    made = dict(arrays)
    for name, a in arrays.items():
        if _varies(node, name, a):
            finite = np.where(np.isfinite(a), a, 0.5)
            made[name] = np.asarray(finite + side * 0.01 * (1 + rng.random(a.shape)), a.dtype)
    return made


def _freeze(model: onnx.ModelProto, arrays: Feed) -> None:
    kept = [x for x in model.graph.input if x.name not in arrays]
    types = {x.name: x.type.tensor_type.elem_type for x in model.graph.input}
    del model.graph.input[:]
    model.graph.input.extend(kept)
    for name, a in arrays.items():
        tensor = numpy_helper.from_array(a, name)
        assert tensor.data_type == types[name], name
        model.graph.initializer.append(tensor)


# -- running -------------------------------------------------------------------------------------


def _on_onnxruntime(model: onnx.ModelProto) -> Function:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    data, taken = model.SerializeToString(), {x.name for x in model.graph.input}
    draws = any(n.op_type == "Dropout" for n in model.graph.node)

    def load() -> ort.InferenceSession:
        return ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])

    session = load()

    def run(feed: Feed) -> list[np.ndarray]:
        fed = {n: a for n, a in feed.items() if n in taken}
        return (load() if draws else session).run(None, fed)  # a session draws new numbers each run

    return run


def _on_reference(model: onnx.ModelProto) -> Function:
    evaluator, taken = ReferenceEvaluator(model), {x.name for x in model.graph.input}
    return lambda feed: evaluator.run(None, {n: a for n, a in feed.items() if n in taken})


# -- the judgment ------------------------------------------------------------------------------


def relative_errors(case: ShippedCase) -> dict[str, float]:
    """Return for every variable the relative error of its gradient along a random direction.

    The gradient is run by onnxruntime; f = sum(u y), u random, zero where y is not finite.
    """
    rng, function = np.random.default_rng(1), case.forward[0]
    outputs = {
        y.name: a for y, a in zip(case.model.graph.output, function(case.arrays), strict=True)
    }
    factors = {
        n: np.asarray(np.where(np.abs(y) < 1e30, rng.standard_normal(y.shape), 0), y.dtype)
        for n, y in outputs.items()
        if np.issubdtype(y.dtype, np.floating)
    }
    size = sum(dot_of_finite(np.abs(u), np.abs(outputs[n])) for n, u in factors.items())
    model = onnx_derivative(case.model, weights=[])
    found = _on_onnxruntime(model)(case.arrays | {f"{n}_grad": u for n, u in factors.items()})

    def objective(values: Feed) -> float:
        ys = dict(zip(outputs, function(values), strict=True))
        return sum(dot_of_finite(u, ys[n]) for n, u in factors.items())

    gradients = dict(zip((y.name for y in model.graph.output), found, strict=True))
    result = {}
    for name in case.variables:
        x = case.arrays[name]
        gradient = gradients.get(f"{name}_grad", np.zeros_like(x))  # without a path to an output
        v = rng.standard_normal(gradient.shape)
        slope, floor = float(np.sum(gradient.astype(np.float64) * v)), 1e-3 * size + 1e-4
        assert (gradient.dtype, gradient.shape) == (x.dtype, x.shape)
        slopes = [_difference(objective, case.arrays, name, v, h) for h in STEPS]
        scales = [max(abs(slope), abs(s)) + floor for s in slopes]
        result[name] = min(
            [abs(slope - s) / scale for s, scale in zip(slopes, scales, strict=True) if s == s],
            default=np.inf,
        )
    return result


STEPS = (1e-1, 3e-2, 1e-2, 3e-3, 1e-3, 3e-4)  # beyond a kink, and too small for the precision


def dot_of_finite(u: np.ndarray, y: np.ndarray) -> float:
    if u.shape != y.shape:  # a step that changes the number of elements
        return np.nan
    counted = u != 0
    return float(np.sum(u[counted].astype(np.float64) * y[counted].astype(np.float64)))


def _difference(objective, point: Feed, name: str, v: np.ndarray, h: float) -> float:
    """Return the derivative along v, from four points (Richardson 1911)."""

    def at(step: float) -> float:
        return objective(point | {name: np.asarray(point[name] + step * v, point[name].dtype)})

    return (8 * (at(h / 2) - at(-h / 2)) - (at(h) - at(-h))) / (6 * h)
