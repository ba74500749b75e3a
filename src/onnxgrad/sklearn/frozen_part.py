"""`FrozenPart`: the encoders, imputers and scalers of a pipeline, in front of the trained layers.

They turn text and missing values into numbers, and do not train. They run once on the data; the
rest of the model trains on their outputs, and its weights go into the whole model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import ModelProto, TensorProto, ValueInfoProto

from onnxgrad.data.arrays import fit_shape
from onnxgrad.data.columns import is_table
from onnxgrad.data.field import Field
from onnxgrad.model.feeds import inputs_without_default, names_without_default, session_dtype
from onnxgrad.model.surgery import select_model_inputs_outputs
from onnxgrad.model.traversal import all_nodes
from onnxgrad.model.weights import constant_refs, replace_constants
from onnxgrad.runtime.device import CPU
from onnxgrad.runtime.session import session
from onnxgrad.training.parameters.choice import choose_weights
from onnxgrad.training.parameters.equal_constants import separate_merged


class FrozenPart:
    """A model cut in two: a frozen part before the trained layers, and the rest, which trains.

    Args:
        proto: the whole model.
        target: the tensor that the loss reads.
        arguments: the arguments of the trainer: `train` and `freeze` choose the weights.

    Attributes:
        whole: the whole model.
        cuts: names of the tensors that the frozen part computes and the rest reads.
        trained: names of the weights that train.
        part: the model that computes the cuts.
        rest: the model that computes the target from the cuts, without labels.

    Raises:
        ValueError: a layer that trains reads text, or weights are inside of a local function.
    """

    def __init__(self, proto: ModelProto, target: str, arguments: Mapping[str, Any]) -> None:
        self.whole = proto = separate_merged(proto)
        self.trained = choose_weights(proto, arguments["train"], arguments["freeze"])
        self.cuts = _tensors_before_trained_layers(proto, target, set(self.trained))
        proto = _infer_types_by_onnxruntime(proto, self.cuts)
        self.part = select_model_inputs_outputs(proto, self.cuts)
        for y in self.part.graph.output:
            if y.type.tensor_type.elem_type == TensorProto.STRING:
                raise ValueError(
                    f"a node with weights that train reads the text {y.name!r}: put an encoder "
                    "in front of it, or freeze these weights"
                )
        self.rest = select_model_inputs_outputs(proto, [target], self.cuts)
        kept = {ref.name for ref in constant_refs(self.rest)}
        if lost := [name for name in self.trained if name not in kept]:
            raise ValueError(
                f"the weights {lost} are inside of a local function, or of nodes without names: "
                "name the nodes, or pass data without text and missing values"
            )

    def merge(self, trained: ModelProto) -> ModelProto:
        """Return the whole model, whose trained constants come from the trained rest `trained`."""
        new = {ref.name: ref.array() for ref in constant_refs(trained)}
        changed = {
            ref.name: new[ref.name]
            for ref in constant_refs(self.whole)
            if ref.name in new and not np.array_equal(new[ref.name], ref.array())
        }
        return replace_constants(self.whole, changed)


def is_input_dict(X: Any) -> bool:
    """Return whether X is a dict {input: array}, and not a sparse matrix that is a Mapping."""
    return isinstance(X, Mapping) and not hasattr(X, "toarray")


def needs_frozen_part(proto: ModelProto, X: Any) -> bool:
    """Return whether the model reads text or imputes missing values, or X holds NaN: then its first
    part is frozen.
    """
    if text_inputs(proto) or any(node.op_type == "Imputer" for node in proto.graph.node):
        return True
    for part in X.values() if is_input_dict(X) else [X]:
        columns = [part[name] for name in part.columns] if is_table(part) else [part]
        arrays = [np.asarray(column) for column in columns]
        if any(a.dtype.kind == "f" and bool(np.isnan(a).any()) for a in arrays):
            return True
    return False


def text_inputs(proto: ModelProto) -> list[str]:
    """Return the names of a model's string inputs."""
    inputs = inputs_without_default(proto)
    return [x.name for x in inputs if x.type.tensor_type.elem_type == TensorProto.STRING]


def array_with_text_or_nan(field: Field, values: Any) -> np.ndarray:
    """Return `values` in the dtype and shape of a model input, where text and NaN are allowed."""
    array = np.asarray(values)
    if field.dtype == object:
        array = np.array([str(v) for v in array.ravel().tolist()], object).reshape(array.shape)
    return fit_shape(array.astype(field.dtype), field.shape, field.name, reshape=True)


def _infer_types_by_onnxruntime(proto: ModelProto, names: Sequence[str]) -> ModelProto:
    """Return the model with the types of the tensors `names`, inferred by onnxruntime.

    onnx does not infer the types of most operators of `ai.onnx.ml`.
    """
    typed, ran = deepcopy(proto), deepcopy(proto)
    del ran.graph.output[:]
    ran.graph.output.extend(ValueInfoProto(name=name) for name in names)
    stated = {v.name for v in (*proto.graph.value_info, *proto.graph.input, *proto.graph.output)}
    for y in session(ran, CPU, work=0.0).get_outputs():
        if y.name not in stated and (dtype := session_dtype(y.type)):
            shape = ir.Shape(y.shape) if y.shape else None  # none where the rank is unknown
            value = ir.Value(name=y.name, type=ir.TensorType(dtype), shape=shape)
            typed.graph.value_info.append(ir.to_proto(value))
    return typed


def _tensors_before_trained_layers(proto: ModelProto, target: str, trained: set[str]) -> list[str]:
    """Return the names of the tensors that frozen layers compute and trained layers read.

    They depend on data and not on trained weights; a node that has such weights, or depends on
    them, reads them.
    """
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
        raise ValueError(
            f"the tensor {target!r} that the loss reads depends on no weight that trains: choose "
            "other weights with `train` and `freeze`"
        )
    cuts: dict[str, None] = {}
    waiting = [target]
    for name in waiting:  # the loop appends to it
        for source in reads.get(name, ()):
            if source in behind and source not in waiting:
                waiting.append(source)
            elif source in data and source not in behind:
                cuts[source] = None
    return list(cuts)
