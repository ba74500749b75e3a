"""The user's model, unchanged, as a function of its inputs and weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.autodiff.check.runtimes import Feed, Function
from onnxgrad.model.weights import constant_refs, replace


class OriginalModel:
    """The float outputs of a model as a function of its inputs and weights.

    No node is rewritten. Initializers become inputs. Other weights, such as attributes, are written
    into the model, which takes a new session for every value. `load` returns the function that runs
    a model.
    """

    def __init__(
        self, proto: ModelProto, load: Callable[[ModelProto], Function], weights: Sequence[str]
    ) -> None:
        self._proto, self._load = proto, load
        self._weights = {s.name: s.array() for s in constant_refs(self._proto) if s.name in weights}
        self._inputs = {x.name for x in proto.graph.input}
        fed = [t.name for t in proto.graph.initializer if t.name in self._weights]
        self._function, self._fed = load(_with_inputs(self._proto, fed)), set(fed)

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
        return self._load(replace(self._proto, changed))(feed)

    def rounded(self, name: str, x: np.ndarray) -> np.ndarray:
        """Return `x` rounded to the dtype in which the model stores it: attributes are float32."""
        weight = self._weights.get(name)
        return x if weight is None else x.astype(weight.dtype).astype(x.dtype)


def _with_inputs(proto: ModelProto, names: Sequence[str]) -> ModelProto:
    """Return `proto` with the named initializers among its inputs, so that they can be fed.

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
