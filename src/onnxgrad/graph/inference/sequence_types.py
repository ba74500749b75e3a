"""The types of sequences and Optionals in a graph, and the shapes of their elements.

onnx_ir merges what onnx infers by dtype alone, which makes tensors of sequences, and onnx knows
little of the elements of a sequence that a Loop hands on.
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
    """Correct types and shapes, in place; tell whether onnx has to infer what follows from them."""
    changed = False
    for node in graph:
        changed |= _start_states(node)
        for held in subgraphs(node):
            changed |= correct_types(held)
        if node.domain:
            continue
        if node.op_type in OPERATORS:
            changed |= _correct(node)
        elif node.op_type == "If":
            branches = [held.outputs for held in subgraphs(node)]
            for y, *inner in zip(node.outputs, *branches, strict=True):
                known = next((v.type for v in inner if v.type is not None), None)
                if not isinstance(known, ir.TensorType | None):
                    changed |= _state(y, known, joined(inner))
        elif node.op_type == "Loop":
            for _, state, end, result in states(node):
                if not isinstance(state.type, ir.TensorType | None):
                    changed |= _state(end, state.type, None) | _state(result, state.type, None)
    return changed


def _correct(node: ir.Node) -> bool:
    [y] = node.outputs
    attributes = {a.name: a.value for a in node.attributes.values()}
    if node.op_type == "SequenceEmpty":  # say the default, which a change of precision would miss
        node.attributes.setdefault("dtype", ir.AttrInt64("dtype", ir.DataType.FLOAT))
    kind = output_type(node.op_type, node.inputs, attributes)
    if node.op_type == "Identity" and isinstance(kind, ir.TensorType | None):
        return False
    first = node.inputs[0] if node.inputs else None
    hands_on = node.op_type in ("Identity", "SequenceErase")
    nothing = hands_on and first is not None and is_empty(first)
    note_empty(y, nothing or node.op_type == "SequenceEmpty")
    return _state(y, kind, output_shape(node.op_type, node.inputs, attributes))


def _start_states(node: ir.Node) -> bool:
    """Give the states of a Loop that are no tensors the types that they start with."""
    changed = False
    for start, state, _, _ in states(node):
        if start is not None and not isinstance(start.type, ir.TensorType | None):
            changed |= _state(state, start.type, None)
            note_empty(state, is_empty(start) and not changes(state))
    return changed


def _state(value: ir.Value, kind: ir.TypeProtocol | None, shape: Dims | None) -> bool:
    """State type and shape of `value`; tell whether that is news."""
    changed = kind is not None and value.type != kind
    if changed:
        value.type = kind
    known = dims(value)
    if shape is None:
        return changed
    if known is None or len(known) != len(shape):
        known = (None,) * len(shape)
        changed = True
    pairs = enumerate(zip(known, shape, strict=True))
    merged = [
        k if is_stated(k) else d if is_stated(d) else _unknown(value, i) for i, (k, d) in pairs
    ]
    value.shape = ir.Shape(merged)
    return changed or any(k != m for k, m in zip(known, merged, strict=True) if m is not None)


def _unknown(value: ir.Value, axis: int) -> str | None:
    """Return what stands for a length: onnx calls that of all elements of a sequence the same."""
    return f"unk__{value.name}_{axis}" if isinstance(value.type, ir.TensorType) else None
