"""Small models, written from declared inputs, and estimators that run those that they build."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from onnx import ModelProto
from onnxruntime.capi.onnxruntime_pybind11_state import OrtValue as BoundValue

from onnxgrad.errors import EvaluationError, escaping, printable, printable_lines
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.inference import infer
from onnxgrad.graph.prepare import to_proto
from onnxgrad.graph.shapes import constant
from onnxgrad.graph.tidy import tidy
from onnxgrad.graph.versions import NEWEST_OPSET, WORKING_OPSET
from onnxgrad.runtime.device import CPU, Device
from onnxgrad.runtime.session import session
from onnxgrad.training.estimator import BaseEstimator

OLDEST_OPSET = 14
Shape = Sequence[int | str | None]
FLOATS = {  # what onnxruntime calls them
    "tensor(float16)": ir.DataType.FLOAT16,
    "tensor(bfloat16)": ir.DataType.BFLOAT16,
    "tensor(float)": ir.DataType.FLOAT,
    "tensor(double)": ir.DataType.DOUBLE,
}


class Draft:
    """A small model that is being written, by `op`, on inputs that are declared one by one.

    Args:
        name: name of the graph.
        opset: 14 to 26; None is 18.
        dtype: numpy dtype of the floats.

    Raises:
        ValueError: another opset, or no dtype of floats.
    """

    def __init__(self, name: str, opset: int | None = None, dtype: Any = np.float32) -> None:
        opset = WORKING_OPSET if opset is None else operator.index(opset)
        if not OLDEST_OPSET <= opset <= NEWEST_OPSET:
            raise ValueError(f"opset {opset}: give one from {OLDEST_OPSET} to {NEWEST_OPSET}")
        self.dtype = ir.DataType.from_numpy(np.dtype(dtype))
        if not self.dtype.is_floating_point():
            raise ValueError(f"dtype {np.dtype(dtype)}: give one of floats")
        self.graph = ir.Graph([], [], nodes=[], opset_imports={"": opset}, name=name)
        self.op = Emit(self.graph)
        self._defaults: dict[ir.Value, float] = {}

    def input(
        self, name: str, shape: Shape | None = None, default: float | None = None
    ) -> ir.Value:
        """Return a new input of floats; with a default, of shape (1,), nothing need be fed."""
        value = ir.Value(name=name, type=ir.TensorType(self.dtype))
        value.shape = None if shape is None else ir.Shape(shape)
        self.add(value)
        if default is not None:
            self._defaults[value] = default
        return value

    def add(self, value: ir.Value) -> None:
        """Append an input.

        Raises:
            ValueError: its name is that of another one.
        """
        if value.name in [x.name for x in self.graph.inputs]:
            raise ValueError(f"the name {value.name!r} is taken by another input: give a new one")
        self.op.name(str(value.name))
        self.graph.inputs.append(value)

    def model(self, outputs: Mapping[str, ir.Value]) -> ModelProto:
        """Return the model that computes `outputs`, by name.

        Raises:
            ValueError: an output has the name of an input, or the opset lacks an operator.
        """
        protected = set(self.graph.inputs)
        for name, value in outputs.items():
            named = self.op.name_output(value, name, value, protected)
            if named.name != name:
                raise ValueError(f"the name {name!r} is taken by an output: give the input another")
            self.graph.outputs.append(named)
        model = ir.Model(self.graph, ir_version=8, producer_name="onnxgrad")
        tidy(model)
        infer(model)
        for value, number in self._defaults.items():  # not before: its shape is not that of data
            value.const_value = ir.tensor(np.full(1, number, self.dtype.numpy()), name=value.name)
            self.graph.initializers.add(value)
        opset = self.graph.opset_imports[""]
        if opset < WORKING_OPSET:
            _axes_as_attributes(self.graph)
        proto = to_proto(model)
        try:
            context = onnx.checker.DEFAULT_CONTEXT.__class__()
            context.opset_imports, context.ir_version = {"": opset}, proto.ir_version
            for node in proto.graph.node:
                onnx.checker.check_node(node, context)
        except onnx.checker.ValidationError as e:
            raise ValueError(
                f"{printable(self.graph.name)} cannot be written in opset {opset}, "
                f"use {WORKING_OPSET}: {printable_lines(e)}"
            ) from e
        return proto


def _axes_as_attributes(graph: ir.Graph) -> None:
    """Move the axes of reductions to where they were before opset 18; ReduceSum moved in 13."""
    for node in graph:
        if node.op_type.startswith("Reduce") and node.op_type != "ReduceSum" and node.inputs[1:]:
            axes = constant(node.inputs[1])
            assert axes is not None
            node.resize_inputs(1)
            node.attributes["axes"] = ir.AttrInt64s("axes", axes.tolist())


class SmallFunctions(BaseEstimator):
    """An estimator that keeps small models in attributes and runs them.

    A session is made when a model first runs, and is not pickled. Two are equal if their arguments
    are.
    """

    def _keep(self, device: Any, **models: ModelProto) -> None:
        """Keep `models` as attributes, to run on `device`."""
        self._device = CPU if device is None else Device.of(device).check()
        self._sessions = dict[str, ort.InferenceSession]()
        for name, model in models.items():
            setattr(self, name, model)

    def _session(self, name: str) -> ort.InferenceSession:
        model = getattr(self, name, None)
        if model is None:
            raise EvaluationError(
                f"{type(self).__name__} has no {name}: call build_onnx_function first"
            )
        sessions = self.__dict__.setdefault("_sessions", {})
        if name not in sessions:
            sessions[name] = session(model, self._device, work=0.0)
        return sessions[name]

    @escaping()
    def _run(self, name: str, feed: Mapping[str, Any], as_ortvalues: bool) -> list[Any]:
        """Run a model on numpy arrays and OrtValues alike; returns either."""
        running = self._session(name)
        if not as_ortvalues:
            return running.run(None, {k: to_numpy(v) for k, v in feed.items()})
        binding = running.io_binding()
        held = {
            key: to_ortvalue(value, self._device) for key, value in feed.items()
        }  # until it has run
        for key, value in held.items():
            binding.bind_ortvalue_input(key, value)
        self._device.bind_outputs(binding, [y.name for y in running.get_outputs()])
        running.run_with_iobinding(binding)
        return binding.get_outputs()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_sessions"}

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        assert isinstance(other, SmallFunctions)
        return self.get_params(deep=False) == other.get_params(deep=False)

    def __hash__(self) -> int:
        return hash(type(self))


def wrapped(value: Any) -> Any:
    """Return the OrtValue of a binding (one of its `OrtValueVector`) as that of `onnxruntime`."""
    return ort.OrtValue(value) if isinstance(value, BoundValue) else value


def to_numpy(value: Any) -> np.ndarray:
    """Return an OrtValue, a tensor of torch or anything like an array, as an array."""
    value = wrapped(value)
    if isinstance(value, ort.OrtValue):
        return value.numpy()
    return np.asarray(value.detach().cpu().numpy() if hasattr(value, "detach") else value)


def to_numbers(name: str, given: Any) -> np.ndarray:
    """Return `given` as an array of numbers; Python objects that are numbers are converted.

    Raises:
        ValueError: it is sparse, has masked values, or holds something else than real numbers.
    """
    if hasattr(given, "toarray"):
        raise ValueError(f"{name!r} is sparse, which is not supported: pass its .toarray()")
    if isinstance(given, np.ma.MaskedArray) and np.ma.is_masked(given):
        raise ValueError(f"{name!r} has masked values: fill them, or drop their rows")
    array = to_numpy(given)
    if array.dtype == object and array.ndim:  # a table with columns of several dtypes, for one
        array = _unboxed(name, array)
    if array.dtype.kind in "OSUMmc" or array.dtype.names:  # names: of a structured array
        kind = type(given).__name__ if array.dtype == object else array.dtype
        raise ValueError(f"{name!r} must hold numbers, not {kind}")
    return array


def _unboxed(name: str, array: np.ndarray) -> np.ndarray:
    try:
        made = np.array(array.tolist())
    except ValueError:  # of lists that differ in length
        made = array
    if made.dtype.kind not in "biuf":
        for row, values in enumerate(array.reshape(len(array), -1)):
            for value in values:
                if not isinstance(value, (int, float, np.number, np.bool_)):
                    shown = reprlib.repr(value)
                    raise ValueError(f"{name!r} must hold numbers, not {shown} as in row {row}")
    return made


def to_ortvalue(value: Any, device: Device) -> ort.OrtValue:
    """Return an array or an OrtValue as an OrtValue; on the CPU the memory is shared."""
    if isinstance(value, ort.OrtValue):
        return value
    return device.ortvalue(np.ascontiguousarray(value))


def owned(array: np.ndarray, device: Device) -> ort.OrtValue:
    """Return an array as an OrtValue with memory of its own.

    One of `ortvalue_from_numpy` has the array's memory, and what its `numpy()` returns would not
    keep that alive.
    """
    made = device.empty(array.shape, array.dtype)
    made.update_inplace(np.asarray(array, order="C"))
    return made


def shape_of(value: Any) -> tuple[int, ...]:
    """Return the shape of an array or an OrtValue."""
    return tuple(value.shape() if isinstance(value, ort.OrtValue) else np.shape(value))


def fit(
    value: Any, shape: tuple[int, ...], dtype: np.dtype, array: np.ndarray | None = None
) -> Any:
    """Return `value` in this shape and dtype: itself where it has them, which copies nothing."""
    if isinstance(value, ort.OrtValue) and shape_of(value) == shape:
        kind = FLOATS.get(value.data_type())
        if kind is not None and kind.numpy() == dtype:
            return value
        if value.data_type() == "tensor(int64)" and dtype == np.int64:
            return value
    array = to_numpy(value) if array is None else array
    return array.reshape(shape).astype(dtype, copy=False)
