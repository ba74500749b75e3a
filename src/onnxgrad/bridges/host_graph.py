"""`HostGraph`: a graph that onnxruntime runs on arrays of the host, with its derived graphs."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.bridges.passes import ModelPasses, build_once
from onnxgrad.data.arrays import shape_mismatch
from onnxgrad.errors import printable_lines
from onnxgrad.graph.infer import infer
from onnxgrad.graph.traversal import all_nodes
from onnxgrad.graph.walk import fold_sizes
from onnxgrad.native import Target, to_native
from onnxgrad.operators.shapes import Dims, dims, static
from onnxgrad.runtime.device import CPU
from onnxgrad.runtime.session import count_multiply_adds, session, thread_count
from onnxgrad.runtime.values import Binding

_FEW_ROWS, _MANY_ROWS = 1, 256  # rows of a call that decide the threads of a session
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class GraphTensor:
    """The name, the numpy dtype and the declared shape of an input or an output of a graph."""

    name: str
    dtype: np.dtype
    shape: Dims | None

    @staticmethod
    def of(value: ir.Value) -> GraphTensor:
        """Return the name, dtype and shape of a value.

        Raises:
            ValueError: the value is no tensor of numbers.
        """
        if not isinstance(value.type, ir.TensorType) or value.dtype in (None, ir.DataType.STRING):
            raise ValueError(
                f"{value.name!r} has the type {value.type}, and no array holds such values: cut "
                "the model by onnxgrad.graph.select_model_inputs_outputs"
            )
        assert value.dtype is not None
        return GraphTensor(str(value.name), value.dtype.numpy(), dims(value))


class SharedSymbols:
    """The symbols that several axes of the inputs share, and the check of their lengths.

    onnxruntime does not compare symbolic dimensions, but gradients rely on equal lengths.

    Args:
        shapes: the declared shape of each input, by name.
    """

    def __init__(self, shapes: Mapping[str, Dims | None]) -> None:
        self._names = list(shapes)
        axes: dict[str, list[tuple[int, int]]] = {}
        for i, shape in enumerate(shapes.values()):
            for axis, d in enumerate(shape or ()):
                if isinstance(d, str):
                    axes.setdefault(d, []).append((i, axis))
        self._places = {symbol: places for symbol, places in axes.items() if len(places) > 1}

    def __bool__(self) -> bool:
        return bool(self._places)

    def check(self, shapes: Sequence[Sequence[int]]) -> None:
        """Raise `ValueError` for a symbol with more than one length in the shapes of the inputs."""
        for symbol, places in self._places.items():
            lengths = [shapes[i][axis] for i, axis in places]
            if len(set(lengths)) > 1:
                where = [f"axis {axis} of {self._names[i]!r}" for i, axis in places]
                listed = ", ".join(f"{n} as {w}" for n, w in zip(lengths, where, strict=True))
                raise ValueError(
                    f"the dimension {symbol!r} has more than one length: {listed}; pass inputs "
                    "in which it has the same length"
                )


class HostGraph:
    """A graph of standard operators on arrays of the host, its sessions and derived graphs.

    Args:
        proto: a prepared model, with all its weights among the inputs.
        recompute: see `partition`.
    """

    def __init__(self, proto: ModelProto, recompute: str) -> None:
        self.passes = ModelPasses(proto, recompute)
        graph = ir.from_proto(proto).graph
        self.inputs = [GraphTensor.of(x) for x in graph.inputs]
        self.outputs = [GraphTensor.of(y) for y in graph.outputs]
        self._shared_symbols = SharedSymbols({x.name: x.shape for x in self.inputs})
        self._work = count_multiply_adds(graph)
        self._bindings: dict[bool, Binding] = {}
        self._output_shapes: dict[Shapes, Shapes] = {}
        self._inferred_shapes: dict[Shapes, list[tuple[int, ...] | None]] = {}
        self._derived: dict[tuple[str, int], Self] = {}
        self._lock = threading.Lock()  # of the bindings, which hold the arrays of one call

    def __reduce__(self) -> tuple[type[Self], tuple[ModelProto, str]]:
        return type(self), (self.passes.proto, self.passes.recompute)  # sessions are built again

    def derived_graph(self, kind: str, proto: ModelProto) -> Self:
        """Return the graph of a model of `passes`, built once; `kind` says which model it is."""
        key = kind, id(proto)  # `passes` keeps the model
        return build_once(self._derived, key, lambda: type(self)(proto, self.passes.recompute))

    # -- shapes -------------------------------------------------------------------------------

    def output_shapes(self, shapes: Shapes) -> Shapes:
        """Return the shapes of the outputs for inputs of the given shapes.

        They are inferred; where inference does not know a length, the model runs on ones.

        Raises:
            ValueError: a shape that does not fit the declared shape of its input.
        """

        def find_shapes() -> Shapes:
            inferred = self.inferred_shapes(shapes)
            known = [shape for shape in inferred if shape is not None]
            if len(known) == len(inferred):
                return tuple(known)
            ones = [
                np.ones(shape, spec.dtype) for spec, shape in zip(self.inputs, shapes, strict=True)
            ]
            return tuple(y.shape for y in self.run(ones))

        return build_once(self._output_shapes, shapes, find_shapes)

    def inferred_shapes(self, shapes: Shapes) -> list[tuple[int, ...] | None]:
        """Return the inferred shape of each output; None if it may depend on values.

        Raises:
            ValueError: a shape that does not fit the declared shape of its input.
        """

        def infer_shapes() -> list[tuple[int, ...] | None]:
            self.check_shapes(shapes)
            model = ir.from_proto(self.passes.proto)
            for node in all_nodes(model.graph):
                for y in node.outputs:
                    y.shape = None
            for x, shape in zip(model.graph.inputs, shapes, strict=True):
                x.shape = ir.Shape(shape)
            fold_sizes(model.graph, infer(model))
            return [None if (d := dims(y)) is None else static(d) for y in model.graph.outputs]

        return build_once(self._inferred_shapes, shapes, infer_shapes)

    def check_shapes(self, shapes: Shapes) -> None:
        """Raise `ValueError` for a shape that does not fit, or a symbol with two lengths."""
        for spec, shape in zip(self.inputs, shapes, strict=True):
            if mismatch := shape_mismatch(shape, spec.shape):
                raise ValueError(f"input {spec.name!r} {mismatch}")
        self._shared_symbols.check(shapes)

    # -- runs ---------------------------------------------------------------------------------

    def run(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the outputs for arrays of the host, as new arrays."""
        feed = self._feed_by_name(arrays)
        binding = self.open_session(tuple(array.shape for array in feed.values()))
        with self._lock:
            results = binding.run(feed, [y.name for y in self.outputs])
        return [result.numpy() for result in results]

    def run_into(self, arrays: Sequence[np.ndarray], places: Sequence[np.ndarray]) -> None:
        """Run the graph on arrays of the host, and write its outputs into `places`.

        Raises:
            RuntimeError: an output has another shape than JAX was told, or an integer that does
                not fit into 32 bits.
        """
        feed = self._feed_by_name(arrays)
        into = {
            spec.name: place
            for spec, place in zip(self.outputs, places, strict=True)
            if place.dtype == spec.dtype and place.flags.c_contiguous and place.flags.aligned
        }
        shapes = tuple(array.shape for array in feed.values())
        binding = self.open_session(shapes)
        with self._lock:
            results = binding.run(feed, [y.name for y in self.outputs], into=into)
            for spec, place, result in zip(self.outputs, places, results, strict=True):
                if spec.name not in into:
                    _copy_checked_integers(spec, result.numpy(), place)

    def _feed_by_name(self, arrays: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """Return arrays by the names of their inputs, contiguous, in the dtypes of the inputs."""
        return {
            spec.name: np.asarray(array, spec.dtype, order="C")
            for spec, array in zip(self.inputs, arrays, strict=True)
        }

    def open_session(self, shapes: Shapes) -> Binding:
        """Return the session for calls with inputs of these shapes: of one thread, or of more."""
        rows = shapes[0][0] if shapes and shapes[0] else 1
        few = thread_count(self._work * rows) == 1
        work = self._work * (_FEW_ROWS if few else _MANY_ROWS)

        def build_binding() -> Binding:
            model = ir.from_proto(self.passes.proto)
            to_native(model.graph, Target.for_step(CPU, work, rows))
            try:
                running = session(ir.to_proto(model), CPU, work)
            except Exception as e:  # onnxruntime's errors have no common base
                raise RuntimeError(
                    f"onnxruntime cannot run the graph in these dtypes: {printable_lines(e)}"
                ) from e
            return Binding(running, CPU)

        return build_once(self._bindings, few, build_binding)


def _copy_checked_integers(spec: GraphTensor, result: np.ndarray, place: np.ndarray) -> None:
    """Copy an output into the memory of JAX, in which integers may have 32 bits."""
    if result.shape != place.shape:
        raise RuntimeError(
            f"output {spec.name!r} has shape {result.shape}, not {place.shape}: its shape depends "
            "on the values of the inputs, which JAX does not allow"
        )
    if result.dtype != place.dtype and result.size and np.issubdtype(result.dtype, np.integer):
        limits = np.iinfo(place.dtype)
        if result.min() < limits.min or result.max() > limits.max:
            raise RuntimeError(
                f"output {spec.name!r} holds integers beyond {place.dtype}: set "
                "jax.config.update('jax_enable_x64', True)"
            )
    np.copyto(place, result, casting="same_kind")
