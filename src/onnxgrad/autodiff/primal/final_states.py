"""The last output of a recurrent layer, read from its final state.

Classifiers of sequences read Y[T - 1] only, which is Y_h. Of that, the gradient is no stack of
zeros with one matrix in it, which a loop over time would add in every step.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxgrad.graph.emit import Emit
from onnxgrad.graph.rewrite import rewrites
from onnxgrad.operators import RECURRENT
from onnxgrad.operators.attributes import int_attribute, string_attribute
from onnxgrad.operators.axes import named_axes
from onnxgrad.operators.recurrent import sequence_lengths
from onnxgrad.operators.rule_nodes import node_output
from onnxgrad.operators.shapes import constant, dims, rank

FINAL_STATES = "final states"
_FAR = (1 << 31) - 1  # an end of a slice from which it means the end of the axis


@rewrites("Gather", group=FINAL_STATES)
def read_final_state(op: Emit, node: ir.Node) -> list[ir.Value] | None:
    """Rewrite the last time step Y[T - 1] of a recurrent layer (or Y[0], reversed) as Y_h."""
    (x, i), axes = node.inputs, named_axes(node)
    index, shape = constant(i), dims(x)
    if index is None or index.size != 1 or index.ndim > 1 or not axes or shape is None:
        return None
    (axis,), number = axes, int(index.item())
    length = shape[axis]
    if isinstance(length, int) and number == length - 1:
        number = -1
    state = _match_final_state(op, x, axis, number)
    if state is None:
        return None
    return [state if index.ndim == 0 else op.Unsqueeze(state, [axis])]


@rewrites("Slice", group=FINAL_STATES)
def slice_final_state(op: Emit, node: ir.Node) -> list[ir.Value] | None:
    """Rewrite the slice Y[T - 1 :] of a recurrent layer as Y_h with an axis of length 1."""
    x, *others = node.inputs
    start, end, _, step = map(constant, (*others, None, None)[:4])
    axes = named_axes(node) or []
    numbers = [None if a is None or a.size != 1 else int(a.item()) for a in (start, end, step)]
    if (
        len(axes) != 1
        or numbers[0] != -1
        or (numbers[1] or 0) < _FAR
        or numbers[2] not in (None, 1)
    ):
        return None
    state = _match_final_state(op, x, axes[0], -1)
    return None if state is None else [op.Unsqueeze(state, axes)]


def _match_final_state(op: Emit, v: ir.Value | None, axis: int, number: int) -> ir.Value | None:
    """Return the final state of a recurrent layer if it equals `v` at index `number` of `axis`;
    else None.
    """
    node = None if v is None else v.producer()
    if node is None or node.domain or v is not node.outputs[0]:
        return None
    if node.op_type in RECURRENT:
        return _final_state_of_layer(op, node, axis, number)
    named, x = named_axes(node), node.inputs[0]
    if node.op_type not in ("Transpose", "Squeeze") or named is None:
        return None
    kept = named
    if node.op_type == "Squeeze":
        kept = [a for a in range(rank(x) or 0) if a not in named]
    state = _match_final_state(op, x, kept[axis], number)
    if state is None:
        return None
    rest = [a - (a > kept[axis]) for a in named if a != kept[axis]]
    if node.op_type == "Squeeze":
        return op.Squeeze(state, rest)
    return state if rest == sorted(rest) else op.Transpose(state, perm=rest)


def _final_state_of_layer(op: Emit, node: ir.Node, axis: int, number: int) -> ir.Value | None:
    """Return the output Y_h of a recurrent layer if it equals Y at index `number` of the time
    axis.
    """
    y, end = node.outputs[0], {"forward": -1, "reverse": 0}.get(string_attribute(node, "direction"))
    if axis != int_attribute(node, "layout") or number != end:
        return None
    shape = dims(y)
    if shape is None or y.dtype is None or sequence_lengths(node) is not None:
        return None  # with lengths of sequences, Y is zero beyond their ends
    state = node_output(op, node, 1, y.dtype)
    state.shape = ir.Shape([*shape[:axis], *shape[axis + 1 :]])
    return state
