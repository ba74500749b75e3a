"""Raw data: a frozen part in front of a model turns text and missing values into numbers.

Encoders, imputers and scalers of a pipeline do not train. They run once on the data, and training
goes on with what they compute; the whole file gets the weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import ModelProto, TensorProto, ValueInfoProto

from onnxgrad.data.arrays import fit_shape
from onnxgrad.data.columns import is_table
from onnxgrad.data.fields import Field
from onnxgrad.model.feeds import inputs_without_default, names_without_default
from onnxgrad.model.surgery import select_model_inputs_outputs
from onnxgrad.model.traversal import all_nodes
from onnxgrad.model.weights import constant_refs, replace
from onnxgrad.runtime.session import loaded
from onnxgrad.sklearn.arguments import by_name
from onnxgrad.training.parameters.choice import choose_weights
from onnxgrad.training.parameters.equal_constants import separate_merged

_KINDS = {
    "tensor(float)": TensorProto.FLOAT,
    "tensor(double)": TensorProto.DOUBLE,
    "tensor(float16)": TensorProto.FLOAT16,
    "tensor(int64)": TensorProto.INT64,
    "tensor(int32)": TensorProto.INT32,
    "tensor(bool)": TensorProto.BOOL,
    "tensor(string)": TensorProto.STRING,
}


class Front:
    """The part of a model in front of what trains, and the rest.

    Args:
        proto: the whole model.
        target: the tensor that the loss reads.
        arguments: those of the trainer: `train` and `freeze` choose what trains.

    Attributes:
        cuts: the tensors that the part computes and the rest reads.
        trained: names of the tensors that train.
        rest: the model behind the cuts, without labels.

    Raises:
        ValueError: text goes into what trains, or a local function has what trains.
    """

    def __init__(self, proto: ModelProto, target: str, arguments: Mapping[str, Any]) -> None:
        self.whole, self.target = (proto := separate_merged(proto)), target
        self.trained = choose_weights(proto, arguments["train"], arguments["freeze"])
        self.cuts = _cuts(proto, target, set(self.trained))
        proto = _typed(proto, self.cuts)
        self.part = select_model_inputs_outputs(proto, self.cuts)
        for y in self.part.graph.output:
            if y.type.tensor_type.elem_type == TensorProto.STRING:
                raise ValueError(f"what trains reads the text {y.name!r}: encode it in front")
        self.rest = select_model_inputs_outputs(proto, [target], self.cuts)
        own = {ref.name for ref in constant_refs(self.rest)}
        if lost := [name for name in self.trained if name not in own]:
            raise ValueError(
                f"{lost} are inside of a local function, or of nodes without names: name the "
                "nodes, or pass data without text and missing values"
            )

    def merged(self, trained: ModelProto) -> ModelProto:
        """Return the whole model with the constants of the trained rest."""
        new = {ref.name: ref.array() for ref in constant_refs(trained)}
        changed = {
            ref.name: new[ref.name]
            for ref in constant_refs(self.whole)
            if ref.name in new and not np.array_equal(new[ref.name], ref.array())
        }
        return replace(self.whole, changed)


def takes_raw(proto: ModelProto, X: Any) -> bool:
    """Return whether a model takes text or fills in missing values, or the data lack values."""
    if text_inputs(proto) or any(node.op_type == "Imputer" for node in proto.graph.node):
        return True
    if by_name(X):
        return any(_has_missing(values) for values in X.values())
    return _has_missing(X)


def text_inputs(proto: ModelProto) -> list[str]:
    """Return the names of the inputs that hold text."""
    inputs = inputs_without_default(proto)
    return [x.name for x in inputs if x.type.tensor_type.elem_type == TensorProto.STRING]


def raw_fed(fields: Sequence[Field], X: Any) -> dict[str, np.ndarray]:
    """Return data by input, as they are but for dtype and shape: with text, and NaN."""
    if len(fields) == 1 and not by_name(X):
        columns: Any = {fields[0].name: X}
    elif by_name(X) or is_table(X):
        columns = X
    else:
        names = [field.name for field in fields]
        raise ValueError(f"the model has the inputs {names}: pass a table of these columns")
    fed = {}
    for field in fields:
        array = np.asarray(columns[field.name])
        if field.dtype == object:
            array = np.array([str(v) for v in array.ravel().tolist()], object).reshape(array.shape)
        fed[field.name] = fit_shape(array.astype(field.dtype), field.shape, field.name, True)
    return fed


def _has_missing(X: Any) -> bool:
    """Return whether an array, or a column of a table, holds NaN."""
    columns = [X[name] for name in X.columns] if is_table(X) else [X]
    arrays = [np.asarray(column) for column in columns]
    return any(a.dtype.kind == "f" and bool(np.isnan(a).any()) for a in arrays)


def _typed(proto: ModelProto, names: Sequence[str]) -> ModelProto:
    """Return the model with the types of these tensors, as onnxruntime infers them.

    onnx does not infer those of most operators of `ai.onnx.ml`.
    """
    typed, ran = ModelProto(), ModelProto()
    typed.CopyFrom(proto)
    ran.CopyFrom(proto)
    del ran.graph.output[:]
    ran.graph.output.extend(ValueInfoProto(name=name) for name in names)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    stated = {v.name for v in (*proto.graph.value_info, *proto.graph.input, *proto.graph.output)}
    for y in loaded(ran, options).get_outputs():
        if y.name not in stated:
            tensor = typed.graph.value_info.add(name=y.name).type.tensor_type
            tensor.elem_type = _KINDS[y.type]
            for d in y.shape:  # none where the rank is unknown
                key = "dim_value" if isinstance(d, int) else "dim_param"
                tensor.shape.dim.add(**({} if d is None else {key: d}))
    return typed


def _cuts(proto: ModelProto, target: str, trained: set[str]) -> list[str]:
    """Return the tensors, computed from data without what trains, that what trains reads."""
    refs = [ref for ref in constant_refs(proto) if ref.name in trained]
    behind = {ref.graph_name or ref.name for ref in refs if ref.node is None}
    holders = {y for ref in refs if ref.node is not None for y in ref.node.output}
    data = set(names_without_default(proto))
    reads: dict[str, list[str]] = {}
    for node in proto.graph.node:
        inner = list(all_nodes([node]))
        read = [name for n in inner for name in n.input]
        if not behind.isdisjoint(read) or any(not holders.isdisjoint(n.output) for n in inner):
            behind.update(node.output)
        if not data.isdisjoint(read):
            data.update(node.output)
        reads.update(dict.fromkeys(node.output, read))
    if target not in behind:
        raise ValueError(f"nothing that trains is in front of {target!r}")
    cuts: dict[str, None] = {}
    waiting = [target]
    for name in waiting:  # the loop appends to it
        for source in reads.get(name, ()):
            if source in behind and source not in waiting:
                waiting.append(source)
            elif source in data and source not in behind:
                cuts[source] = None
    return list(cuts)
