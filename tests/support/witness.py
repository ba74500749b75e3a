"""Central differences of a model as it stands in its file, against its gradient model.

Nothing here comes from the package but `onnx_derivative`: a tensor gets a new value in the protobuf
where it is kept, and onnxruntime runs the file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import onnx
import onnxruntime as ort
from onnx import numpy_helper

from onnxgrad import DerivativeOptions, onnx_derivative
from onnxgrad.graph import get_train_initializer
from tests.support.optimized_models import optimized_model

LEVELS = ("plain", "basic", "extended")  # of `optimized_models`, of which gradients are asked
FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE)


class Unstable(Exception):
    """Central differences of two steps do not agree, or the model computes no finite numbers."""


def unoptimized_session(model: onnx.ModelProto, level=None) -> ort.InferenceSession:
    """Return a session that runs the file as it is, or is optimized up to a level."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = level or ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def loadable_optimized_model(model: onnx.ModelProto, level: str) -> onnx.ModelProto:
    """Return the file that onnxruntime writes, or raise where it does not load the file."""
    written = optimized_model(model, level)
    if level != "plain":
        unoptimized_session(written)
    return written


@dataclass
class Tensor:
    """A float tensor of a file: its name, its elements, and how they are written back."""

    name: str
    elements: np.ndarray  # of a sparse tensor those that are stored
    write: Callable[[np.ndarray], None]
    shape: tuple[int, ...]
    places: np.ndarray | None = None  # flat, of the elements of a sparse tensor

    def part(self, gradient: np.ndarray) -> np.ndarray:
        """Return the gradient of the elements that are stored."""
        flat = gradient.ravel()
        return flat if self.places is None else flat[self.places]


def float_tensors(model: onnx.ModelProto) -> Iterator[Tensor]:
    """Yield the floats that a file holds and that are trained by default.

    A Constant of a single element is a number of the architecture, no weight.
    """
    yield from _graph_tensors(model.graph.initializer, model.graph.sparse_initializer)
    called = {(f.domain, f.name) for f in model.functions}
    yield from _node_tensors(model.graph.node, called)
    for function in model.functions:
        yield from _node_tensors(function.node, called)
        yield from _passed(function.attribute_proto, function.name)


def _passed(attributes, owner: str) -> Iterator[Tensor]:
    for a in attributes:
        if a.type == a.TENSOR and a.t.data_type in FLOATS and int(np.prod(a.t.dims)) > 1:
            yield _dense(a.t, f"{owner}.{a.name}")


def _graph_tensors(initializers, sparse) -> Iterator[Tensor]:
    for t in initializers:
        if t.data_type in FLOATS:
            yield _dense(t, t.name)
    for t in sparse:
        if t.values.data_type in FLOATS:
            yield _sparse(t, t.values.name)


def _node_tensors(nodes, called) -> Iterator[Tensor]:
    for node in nodes:
        if (node.domain, node.op_type) in called:
            yield from _passed(node.attribute, node.output[0])
        for a in node.attribute:
            if node.op_type == "Constant" and not a.ref_attr_name:
                found = list(_constant(a, node.output[0]))
                yield from (t for t in found if int(np.prod(t.shape)) > 1)
            if node.op_type in ("If", "Loop", "Scan") and a.type == a.GRAPH and not a.ref_attr_name:
                yield from _graph_tensors(a.g.initializer, a.g.sparse_initializer)
                yield from _node_tensors(a.g.node, called)


def _constant(a: onnx.AttributeProto, name: str) -> Iterator[Tensor]:
    if a.name == "value" and a.t.data_type in FLOATS:
        yield _dense(a.t, name)
    elif a.name == "sparse_value" and a.sparse_tensor.values.data_type in FLOATS:
        yield _sparse(a.sparse_tensor, name)
    elif a.name == "value_floats":

        def write(array: np.ndarray) -> None:
            a.floats[:] = [float(x) for x in array]

        yield Tensor(name, np.float32(a.floats), write, (len(a.floats),))


def _dense(t: onnx.TensorProto, name: str) -> Tensor:
    array = numpy_helper.to_array(t)
    return Tensor(name, array.ravel(), lambda new: _store(t, new), array.shape)


def _sparse(t: onnx.SparseTensorProto, name: str) -> Tensor:
    places = numpy_helper.to_array(t.indices)
    if places.ndim == 2:
        places = np.ravel_multi_index(tuple(places.T), tuple(t.dims))
    values = numpy_helper.to_array(t.values)
    return Tensor(name, values, lambda new: _store(t.values, new), tuple(t.dims), places)


def _store(t: onnx.TensorProto, array: np.ndarray) -> None:
    for kept in ("float_data", "double_data"):
        t.ClearField(kept)
    t.raw_data = array.tobytes()


@dataclass
class Slot:
    """Something to change: an input, or a tensor of the file."""

    name: str
    direction: np.ndarray
    expected: float | None = None  # by the gradient model; None: it has no such gradient
    steep: float = 0.0  # by central differences


class Differences:
    """The sum of the outputs of a file, weighted by cotangents, as inputs and tensors move."""

    def __init__(self, model: onnx.ModelProto, feed: dict, rng: np.random.Generator):
        self.model, self.feed = model, feed
        self.session = unoptimized_session(model)
        names = {x.name for x in self.session.get_inputs()}
        self.feed = {n: a for n, a in feed.items() if n in names}
        self.outputs = self.session.run(None, self.feed)
        if not all(np.isfinite(y).all() for y in self.outputs if y.dtype.kind == "f"):
            raise Unstable("no finite numbers")
        self.cotangents = [
            rng.normal(size=y.shape).astype(y.dtype) if y.dtype.kind == "f" else None
            for y in self.outputs
        ]
        self.single = single = any(y.dtype == np.float32 for y in self.outputs)
        # powers of two, so that tensors of float32 move by just that much
        self.step, self.tolerance = (2.0**-6, 3e-3) if single else (2.0**-10, 1e-6)

    def value(self, moved: dict[int | str, np.ndarray]) -> float:
        feed, run = dict(self.feed), self.session
        if any(isinstance(key, int) for key in moved):
            model = onnx.ModelProto()
            model.CopyFrom(self.model)
            for i, t in enumerate(float_tensors(model)):
                if i in moved:
                    t.write((t.elements + moved[i]).astype(t.elements.dtype))
            run = unoptimized_session(model)
        for name in feed.keys() & moved.keys():
            feed[name] = np.asarray(feed[name] + moved[name], feed[name].dtype)
        total = 0.0
        for y, c in zip(run.run(None, feed), self.cotangents, strict=True):
            if c is not None:
                if y.shape != c.shape:
                    raise Unstable("the shape of an output changes")
                total += float((y.astype(np.float64) * c).sum())
        return total

    def slope(self, directions: dict[int | str, np.ndarray], h: float) -> float:
        moved = [{k: s * h * d for k, d in directions.items()} for s in (1, -1)]
        return (self.value(moved[0]) - self.value(moved[1])) / (2 * h)

    def confirms(self, expected: float, directions: dict[int | str, np.ndarray]) -> bool:
        """Tell whether the derivative along these directions is about the expected one."""
        error = abs(self.slope(directions, self.step) - expected)
        return error <= 10 * self.tolerance * max(1.0, abs(expected)) / (1 + 9 * self.single)

    def along(self, directions: dict[int | str, np.ndarray]) -> float:
        """Return the derivative along these directions, of fourth order."""
        near, far = self.slope(directions, self.step), self.slope(directions, 2 * self.step)
        if abs(near - far) > (0.1 if self.single else 1e-3) * max(1.0, abs(near)):
            raise Unstable(f"differences of two steps: {near} and {far}")
        return near + (near - far) / 3


def differentiated_name(gradient: str) -> str:
    """Return what a gradient is named after; it has a number where a cotangent has its name."""
    return re.sub(r"_grad(_\d+)?$", "", gradient)


def may_be_gradient(gradient: str, name: str) -> bool:
    """Tell whether a gradient of this name may be that of a tensor of this name."""
    return re.fullmatch(re.escape(name) + r"(_\d+)?", differentiated_name(gradient)) is not None


def mismatches(model: onnx.ModelProto, feed: dict, seed: int = 0, fill: bool = False) -> list[str]:
    """Return what is wrong about the gradients of `model`, each with what it should be."""
    rng = np.random.default_rng(seed)
    file = Differences(model, feed, rng)
    if fill:
        file.cotangents = [None if c is None else np.ones_like(c) for c in file.cotangents]
    flags = DerivativeOptions.KeepOutputs | (DerivativeOptions.FillGrad if fill else 0)
    gradient = onnx_derivative(model, options=DerivativeOptions(flags))
    try:
        run = unoptimized_session(
            gradient, None if seed % 4 else ort.GraphOptimizationLevel.ORT_ENABLE_ALL
        )
    except Exception as error:
        return [f"the gradient model does not load: {str(error)[:300]}"]
    names = [x.name for x in run.get_inputs()]
    count = sum(c is not None for c in file.cotangents)
    fed = dict(file.feed)
    if not fill:
        seeds = [c for c in file.cotangents if c is not None]
        fed |= dict(zip(names[len(names) - count :], seeds, strict=True))
    weights = {n: a for n, (a, _) in get_train_initializer(model).items()}
    fed |= {n: weights[n] for n in names if n not in fed and n in weights}
    fed = {n: a for n, a in fed.items() if n in names}
    if missing := [n for n in names if n not in fed]:
        return [f"the gradient model asks for unknown inputs {missing}"]
    try:
        found = run.run(None, fed)
    except Exception as error:
        return [f"the gradient model does not run: {str(error)[:300]}"]
    kept = found[len(found) - len(file.outputs) :]
    wrong = []
    for i, (a, b) in enumerate(zip(kept, file.outputs, strict=True)):
        if a.shape != b.shape or not np.allclose(a, b, rtol=file.tolerance, atol=file.tolerance):
            wrong.append(f"output {i}: {a} instead of {b}")
    pairs = zip((y.name for y in run.get_outputs()), found[: len(found) - len(kept)], strict=False)
    return wrong + _compare(file, dict(pairs), rng)


def _compare(file: Differences, gradients: dict[str, np.ndarray], rng) -> list[str]:
    """Compare gradients with differences: of all tensors at once, and of each if that is wrong."""
    held: dict[int | str, Tensor] = dict(enumerate(float_tensors(file.model)))
    for name, array in file.feed.items():
        if array.dtype.kind == "f":
            held[name] = Tensor(name, array.ravel(), lambda new: None, array.shape)
    owners: dict[int | str, list[str]] = {
        key: [g for g, a in gradients.items() if may_be_gradient(g, t.name) and a.shape == t.shape]
        for key, t in held.items()
    }
    unclear = {g for g in gradients if sum(g in o for o in owners.values()) > 1}
    sure = {k: o for k, o in owners.items() if len(o) < 2 and not unclear.intersection(o)}
    directions = {}
    for key, t in held.items():
        d = rng.normal(size=t.elements.shape)
        d = np.round(d / max(1e-9, float(np.linalg.norm(d))) * 256) / 256
        shape = file.feed[key].shape if isinstance(key, str) else d.shape
        directions[key] = d.reshape(shape)

    def dot(gradient: str, key) -> float:
        part = held[key].part(gradients[gradient]).astype(np.float64)
        return float((part * directions[key].ravel()).sum())

    def differs(a: float, b: float) -> bool:
        return not abs(a - b) <= file.tolerance * max(1.0, abs(a), abs(b))

    wrong = []
    expected = sum(dot(o[0], k) for k, o in sure.items() if o)
    all_sure = {k: directions[k] for k in sure}
    if sure and not file.confirms(expected, all_sure) and differs(expected, file.along(all_sure)):
        for key, o in sure.items():
            slope = file.along({key: directions[key]})
            if differs(dot(o[0], key) if o else 0.0, slope):
                got = f"{dot(o[0], key):.6g}" if o else "no gradient"
                wrong.append(f"{held[key].name} {held[key].shape}: {got} instead of {slope:.6g}")
        wrong = wrong or ["the sum of all gradients is wrong"]
    return wrong + _match(file, held, owners, set(held) - set(sure), directions, dot, differs)


def _match(file, held, owners, keys, directions, dot, differs) -> list[str]:
    """Find a gradient for each of the tensors that share a name."""
    free = {g for key in keys for g in owners[key]}
    wrong = []
    for key in sorted(keys, key=str):
        slope = file.along({key: directions[key]})
        fitting = [g for g in owners[key] if g in free and not differs(dot(g, key), slope)]
        if fitting:
            free.remove(fitting[0])
        elif differs(slope, 0.0):
            got = [f"{g}: {dot(g, key):.6g}" for g in owners[key]]
            wrong.append(f"{held[key].name} {held[key].shape}: {got} instead of {slope:.6g}")
    return wrong
