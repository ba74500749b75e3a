"""The types of sequences and Optionals in a graph, and the shapes of their elements.

onnx_ir copies only the dtype of the types that onnx infers, which turns sequences into tensors, and
onnx does not infer the elements of a sequence that is the state of a Loop.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxgrad.graph.inference.loop_states import changes, states
from onnxgrad.graph.sequences import (
    OPERATORS,
    is_empty,
    joined,
    note_empty,
    output_shape,
    output_type,
)
from onnxgrad.graph.shapes import Dims, dims, is_stated
from onnxgrad.graph.traversal import subgraphs


def correct_types(graph: ir.Graph) -> bool:
    """Correct types and shapes in place; return whether any changed, to infer what follows."""
    changed = False
    for node in graph:
        changed |= _set_states(node)
        for subgraph in subgraphs(node):
            changed |= correct_types(subgraph)
        if node.domain:
            continue
        if node.op_type in OPERATORS:
            changed |= _correct(node)
        elif node.op_type == "If":
            branches = [branch.outputs for branch in subgraphs(node)]
            for y, *inner in zip(node.outputs, *branches, strict=True):
                value_type = next((v.type for v in inner if v.type is not None), None)
                if not isinstance(value_type, ir.TensorType | None):
                    changed |= _set(y, value_type, joined(inner))
        elif node.op_type == "Loop":
            for _, state, end, result in states(node):
                if not isinstance(state.type, ir.TensorType | None):
                    changed |= _set(end, state.type, None) | _set(result, state.type, None)
    return changed


def _correct(node: ir.Node) -> bool:
    [y] = node.outputs
    attributes = {a.name: a.value for a in node.attributes.values()}
    if node.op_type == "SequenceEmpty":  # write the default, so that `set_precision` converts it
        node.attributes.setdefault("dtype", ir.AttrInt64("dtype", ir.DataType.FLOAT))
    value_type = output_type(node.op_type, node.inputs, attributes)
    if node.op_type == "Identity" and isinstance(value_type, ir.TensorType | None):
        return False
    first = node.inputs[0] if node.inputs else None
    adds_none = node.op_type in ("Identity", "SequenceErase")
    stays_empty = adds_none and first is not None and is_empty(first)
    note_empty(y, stays_empty or node.op_type == "SequenceEmpty")
    return _set(y, value_type, output_shape(node.op_type, node.inputs, attributes))


def _set_states(node: ir.Node) -> bool:
    """Set the types of the states of a Loop, except tensors, to those of their initial values."""
    changed = False
    for start, state, _, _ in states(node):
        if start is not None and not isinstance(start.type, ir.TensorType | None):
            changed |= _set(state, start.type, None)
            note_empty(state, is_empty(start) and not changes(state))
    return changed


def _set(value: ir.Value, value_type: ir.TypeProtocol | None, shape: Dims | None) -> bool:
    """Set the type of `value`, and its unknown dimensions; return whether any changed."""
    changed = value_type is not None and value.type != value_type
    if changed:
        value.type = value_type
    current = dims(value)
    if shape is None:
        return changed
    if current is None or len(current) != len(shape):
        current = (None,) * len(shape)
        changed = True
    pairs = enumerate(zip(current, shape, strict=True))
    merged = [
        c if is_stated(c) else d if is_stated(d) else _unknown(value, i) for i, (c, d) in pairs
    ]
    value.shape = ir.Shape(merged)
    return changed or any(c != m for c, m in zip(current, merged, strict=True) if m is not None)


def _unknown(value: ir.Value, axis: int) -> str | None:
    """Return a symbol for an unknown length of a tensor; None for elements, which may differ."""
    return f"unk__{value.name}_{axis}" if isinstance(value.type, ir.TensorType) else None
