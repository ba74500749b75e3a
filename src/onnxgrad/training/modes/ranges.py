"""Learned ranges: scales of quantization that train, written into a model and out of it.

Learned step size quantization (Esser et al. 2020, arXiv:1902.08153), but for how a scale stays
positive: s = s0 (1 + elu(c)), s0 the scale in the file. The change c, a number, trains. It begins
at zero, and has the gradient g (dL/ds) / s0, g = 1 / sqrt(N Q). As long as s is s0 or larger, a
step of gradient descent changes s as in the paper, and Adam changes s by a share of s0; below, the
change is s / s0 times as large, to first order. s is never less than s0 / 1024. N is the count of
the elements of a weight that have the scale, or of the elements of an activation in one row; Q is
the largest integer above the zero point.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from fnmatch import fnmatchcase
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper

from onnxgrad.errors import argument
from onnxgrad.graph.emit import Emit
from onnxgrad.model import external
from onnxgrad.model.constants import FLOATS, opset_versions
from onnxgrad.model.notes import RANGES, read_metadata, write_metadata
from onnxgrad.model.traversal import all_graphs, all_nodes, keep_only, value_names
from onnxgrad.training.modes.stored_integers import (
    compute_constant,
    integer_type,
    is_operator,
    rounded_float_weights,
)

_LEAST = 2.0**-10  # the least share of the scale in the file


def with_trained_scales(proto: ModelProto, frozen: list[str]) -> tuple[ModelProto, list[str]]:
    """Return a copy of `proto` with quantization scales that train, and the names of new weights.

    The new weights are the changes c of scales. `frozen` are names and patterns of scales that
    stay.

    Raises:
        ValueError: there is no QuantizeLinear with a constant scale in the main graph.
    """
    model = deepcopy(proto)
    found = _quantize_nodes_by_scale(model)
    chosen = {s: n for s, n in found.items() if not any(fnmatchcase(s, p) for p in frozen)}
    if not chosen:
        reason = "onnxgrad.quantize gives a model scales"
        if found:
            reason = f"{argument('freeze')} names the scales of all nodes, take one out"
        raise ValueError(
            f"{argument('train_ranges', True)}: no QuantizeLinear with a constant scale has a range"
            f" to train: {reason}"
        )
    weights = {pair.node.output[0]: pair for pair in rounded_float_weights(model)}
    held = {t.name: t for t in model.graph.initializer}
    writer, notes = _ScaleWriter(model), []
    for scale, nodes in chosen.items():
        pair, scales, count = weights.get(nodes[0].output[0]), prod(held[scale].dims), None
        if pair is not None:
            count = max(1, prod(pair.constants[pair.weight].dims) // max(1, scales))
        notes.append(writer.write(held[scale], nodes[0], count, _integer_range(nodes[0], held)))
    write_metadata(model, RANGES, notes)
    return model, [note["change"] for note in notes]


def _quantize_nodes_by_scale(model: ModelProto) -> dict[str, list[NodeProto]]:
    """Return the QuantizeLinear nodes with a constant scale, `{name of the scale: nodes}`."""
    inputs = {x.name for x in model.graph.input}
    scales = {t.name for t in model.graph.initializer if t.data_type in FLOATS} - inputs
    found: dict[str, list[NodeProto]] = {}
    for node in model.graph.node:
        if is_operator(node, "QuantizeLinear") and node.input[1] in scales:
            found.setdefault(node.input[1], []).append(node)
    return found


def _integer_range(node: NodeProto, held: Mapping[str, TensorProto]) -> float:
    """Return the largest integer of a QuantizeLinear minus the node's least zero point."""
    zero = held.get(node.input[2]) if len(node.input) > 2 else None
    dtype = ir.DataType(integer_type(node, held)).numpy()
    if not np.issubdtype(dtype, np.integer) and "int" not in dtype.name:
        return float(ml_dtypes.finfo(dtype).max)
    zeros = np.zeros(1) if zero is None else external.tensor_to_array(zero).astype(np.int64)
    return max(1.0, float(ml_dtypes.iinfo(dtype).max) - float(zeros.min()))


class _ScaleWriter:
    """Writes the nodes that compute trained scales into a model, in place."""

    def __init__(self, model: ModelProto) -> None:
        self.model = model
        opset = opset_versions(model.opset_import).get("", 0)
        taken = {*value_names(model.graph), *(t.name for t in model.graph.initializer)}
        self.op = Emit(ir.Graph([], [], nodes=[], opset_imports={"": opset}), taken)

    def write(
        self, scale: TensorProto, node: NodeProto, count: int | None, largest: float
    ) -> dict[str, Any]:
        """Write the nodes that compute a trained scale before `node`; return a record of names.

        The record goes into the metadata, where `with_learned_scales` reads it.

        Args:
            scale: the scale in the file.
            node: the first QuantizeLinear that reads the scale.
            count: N, the count of the elements with the scale; None: of the elements of one row of
                the rounded tensor.
            largest: Q, the largest integer above the zero point.
        """
        op, before, dtype = self.op, len(self.op.written), ir.DataType(scale.data_type)
        change = self.op.name(f"{scale.name}.change")
        zeros = np.zeros(tuple(scale.dims), dtype.numpy())
        self.model.graph.initializer.append(ir.to_proto(ir.tensor(zeros, name=change)))
        kind, shape = ir.TensorType(dtype), ir.Shape(list(scale.dims))
        s, c = (ir.Value(name=name, type=kind, shape=shape) for name in (scale.name, change))
        with op:
            one, least = (self._constant_node(np.asarray(v, dtype.numpy())) for v in (1, _LEAST))
            grown = op.emit("Max", [op.Add(op.emit("Elu", [c], {}, fresh=True), one), least], {})
            now = op.emit("Mul", [grown, s], {}, fresh=True)
            fixed = op.copy_of(c)
            now.name, fixed.name = (op.name(f"{scale.name}.{n}") for n in ("now", "fixed"))
            factor = op.Div(self._gradient_factor(node.input[0], count, largest, dtype), s)
            learned = op.emit("Add", [now, op.Mul(op.Sub(c, fixed), factor)], {}, fresh=True)
            learned.name = op.name(f"{scale.name}.learned")
        _rename_operands(self.model, scale.name, str(learned.name))
        written = [ir.to_proto(n) for n in op.written[before:]]
        position = list(self.model.graph.node).index(node)
        for new in reversed(written):
            new.ClearField("name")
            self.model.graph.node.insert(position, new)
        nodes, stopped = [new.output[0] for new in written], [now.name, fixed.name]
        note = {"scale": scale.name, "change": change, "learned": learned.name}
        return note | {"stopped": stopped, "nodes": nodes, "ends": 1 + nodes.index(now.name)}

    def _gradient_factor(
        self, x: str, count: int | None, largest: float, dtype: ir.DataType
    ) -> ir.Value:
        """Return the factor 1 / sqrt(`count` * `largest`) of a scale's gradient, as a scalar.

        Without `count`, N is the count of the elements of one row of the tensor `x`.
        """
        op = self.op
        if count is not None:
            factor = self._constant_node(np.asarray((count * largest) ** -0.5, np.float32))
            return op.Cast(factor, to=dtype)  # in a model that computes in float32, not rounded
        value = ir.Value(name=x, type=ir.TensorType(dtype))
        rows = op.Gather(op.Shape(value), self._constant_node(np.asarray(0, np.int64)))
        each = op.Cast(op.Div(op.Size(value), rows), to=ir.DataType.FLOAT)
        product = op.Mul(each, self._constant_node(np.asarray(largest, np.float32)))
        return op.Cast(op.Reciprocal(op.Sqrt(product)), to=dtype)

    def _constant_node(self, array: np.ndarray) -> ir.Value:
        """Return the result of a new Constant node; an initializer would be taken for a weight."""
        y = self.op.emit("Constant", [], {"value": ir.tensor(array)}, fresh=True)
        y.type, y.shape = ir.TensorType(ir.DataType.from_numpy(array.dtype)), ir.Shape([])
        return y


def _rename_operands(model: ModelProto, old: str, new: str) -> None:
    """Let all nodes that read the value `old` read the value `new`."""
    for node in all_nodes(model.graph.node):
        if old in node.input:
            node.input[:] = [new if name == old else name for name in node.input]


def with_learned_scales(proto: ModelProto, values: Mapping[str, np.ndarray]) -> ModelProto:
    """Replace the nodes that compute trained scales by constants with the learned scales, in place.

    `with_trained_scales` has written the nodes. Return the model. `values` has the elements of
    initializers that lack their elements.
    """
    notes = read_metadata(proto, RANGES)
    if not notes:
        return proto
    held = {t.name: t for t in proto.graph.initializer}
    makers = {y: node for node in proto.graph.node for y in node.output}
    for note in notes:
        scale, change = held[note["scale"]], held[note["change"]]
        given = change
        if external.lacks_elements(change):
            given = numpy_helper.from_array(np.asarray(values[change.name], order="C"))
        nodes = [makers[name] for name in note["nodes"][: note["ends"]]]
        constants = {scale.name: scale, change.name: given}
        learned = compute_constant(proto.opset_import, constants, nodes)
        scale.CopyFrom(ir.to_proto(ir.tensor(learned, name=scale.name)))
        _rename_operands(proto, note["learned"], scale.name)
    gone = {name for note in notes for name in note["nodes"]}
    changes = {note["change"] for note in notes}
    keep_only(proto.graph.node, lambda node: node.output[0] not in gone)
    keep_only(proto.graph.initializer, lambda t: t.name not in changes)
    for graph in all_graphs(proto.graph):
        keep_only(graph.value_info, lambda v: v.name not in gone)
    write_metadata(proto, RANGES, [])
    return proto
