"""Models as functions of arrays: on onnxruntime, or on `onnx.reference` where it has no kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx import ModelProto
from onnx.reference import ReferenceEvaluator

from onnxgrad.autodiff.check.reference_operators import OPERATORS_IN_FLOAT64
from onnxgrad.errors import PrintableError
from onnxgrad.model.convert import is_non_tensor
from onnxgrad.model.weights import constant_refs, replace_constants
from onnxgrad.operators import operator_of
from onnxgrad.runtime.device import CPU
from onnxgrad.runtime.session import load_session

Feed = dict[str, np.ndarray]
RunModel = Callable[[Feed], list[np.ndarray]]  # the float outputs of a model


@dataclass(frozen=True)
class Accuracy:
    """The relative accuracy of outputs in float32, and of their central differences."""

    outputs: float = 1e-3
    differences: float = 5e-2


def kernel_accuracy(proto: ModelProto) -> Accuracy:
    """Return the accuracy of the least accurate kernel that `proto` runs on.

    The kernel of SVMClassifier stops within 0.005 of the probabilities.
    """
    rough = any(node.op_type == "SVMClassifier" for node in proto.graph.node)
    return Accuracy(outputs=6e-3, differences=0.5) if rough else Accuracy()


class NoKernelError(PrintableError, RuntimeError):
    """Raised where a runtime cannot run a model in the wanted precision."""


def load_on_onnxruntime(proto: ModelProto) -> RunModel:
    """Return the function that runs `proto` on onnxruntime, from inputs to its float outputs."""
    try:
        session = load_session(proto, providers=CPU.providers)
    except Exception as e:  # onnxruntime's errors have no common base
        raise NoKernelError(f"onnxruntime cannot load the model: {e}") from e
    inputs = (*session.get_inputs(), *session.get_overridable_initializers())
    names, outputs = {x.name for x in inputs}, _float_output_names(proto)

    def run(feed: Feed) -> list[np.ndarray]:
        try:
            return session.run(outputs, {n: x for n, x in feed.items() if n in names})
        except Exception as e:  # some kernels refuse a dtype only when they run
            raise NoKernelError(f"onnxruntime cannot run the model: {e}") from e

    return run


def load_on_reference(proto: ModelProto) -> RunModel:
    """Return the function that runs `proto` on `onnx.reference`, from inputs to its float
    outputs.
    """
    outputs = _float_output_names(proto)
    rounded = next(
        (n.op_type for n in proto.graph.node if "float32_in_reference" in operator_of(n).traits),
        None,
    )
    try:
        evaluator = ReferenceEvaluator(proto, new_ops=OPERATORS_IN_FLOAT64)
    except Exception as e:  # onnx.reference's errors have no common base
        raise NoKernelError(f"onnx.reference cannot load the model: {e}") from e

    def run(feed: Feed) -> list[np.ndarray]:
        if rounded and any(x.dtype == np.float64 for x in feed.values()):
            raise NoKernelError(f"onnx.reference computes operator {rounded} in float32")
        try:
            return list(evaluator.run(outputs, feed))
        except Exception as e:  # operators written in Python raise anything
            raise NoKernelError(f"onnx.reference cannot run the model: {e}") from e

    return run


def load_on_either(proto: ModelProto, *first: Callable[[ModelProto], RunModel]) -> RunModel:
    """Return the function that runs `proto` on the runtime of `first`, or on the other runtime if
    that fails.

    Called where none runs `proto`, it raises the error of the first.
    """
    runtimes = dict.fromkeys((*first, load_on_onnxruntime, load_on_reference))
    chosen: list[RunModel] = []

    def run(feed: Feed) -> list[np.ndarray]:
        if chosen:
            return chosen[0](feed)
        errors = []
        for load in runtimes:
            try:
                function = load(proto)
                results = function(feed)
            except NoKernelError as e:
                errors.append(e)
            else:
                chosen.append(function)
                return results
        raise errors[0]

    return run


def _float_output_names(proto: ModelProto) -> list[str]:
    """Return the names of the outputs of `proto` that are float tensors."""
    tensors = [y for y in proto.graph.output if not is_non_tensor(y)]
    return [
        y.name for y in tensors if ir.DataType(y.type.tensor_type.elem_type).is_floating_point()
    ]


class OriginalModel:
    """The float outputs of a model as a function of its inputs and weights.

    No node is rewritten. Initializers become inputs. Other weights, such as attributes, are written
    into the model, which takes a new session for every value. `load` returns the function that runs
    a model.
    """

    def __init__(
        self, proto: ModelProto, load: Callable[[ModelProto], RunModel], weights: Sequence[str]
    ) -> None:
        self._proto, self._load = proto, load
        self._weights = {s.name: s.array() for s in constant_refs(self._proto) if s.name in weights}
        self._inputs = {x.name for x in proto.graph.input}
        fed = [t.name for t in proto.graph.initializer if t.name in self._weights]
        self._function, self._fed = load(_declare_as_inputs(self._proto, fed)), set(fed)

    def __call__(self, values: Feed) -> list[np.ndarray]:
        """Return the float outputs; a weight that `values` lacks has its value in the model."""
        feed = {name: x for name, x in values.items() if name in self._inputs}
        weights = {name: values.get(name, array) for name, array in self._weights.items()}
        changed = {
            name: array
            for name, array in weights.items()
            if not np.array_equal(array, self._weights[name], equal_nan=True)
        }
        if changed.keys() <= self._fed:
            return self._function(feed | {name: weights[name] for name in self._fed})
        return self._load(replace_constants(self._proto, changed))(feed)

    def round_as_stored(self, name: str, x: np.ndarray) -> np.ndarray:
        """Return `x` rounded to the dtype in which the model stores it: attributes are float32."""
        weight = self._weights.get(name)
        return x if weight is None else x.astype(weight.dtype).astype(x.dtype)


def _declare_as_inputs(proto: ModelProto, names: Sequence[str]) -> ModelProto:
    """Return a copy of `proto` that declares the initializers `names` as inputs, so that they can
    be fed.

    All else is as in the file; onnx_ir would not keep bodies that return their inputs.
    """
    copy = ModelProto()
    copy.CopyFrom(proto)
    copy.ir_version = max(copy.ir_version, 4)
    declared = {x.name for x in copy.graph.input}
    for tensor in copy.graph.initializer:
        if tensor.name in names and tensor.name not in declared:
            kind = ir.TensorType(ir.DataType(tensor.data_type))
            value = ir.Value(name=tensor.name, type=kind, shape=ir.Shape(tensor.dims))
            copy.graph.input.append(ir.serde.serialize_value(value))
    return copy
