"""How operators take the axis of members: one node for K copies of it.

A rule takes the `MemberAxis` and a node, and returns the new outputs, or None to write the node
once for each member.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.autodiff.members.axis import MemberAxis
from onnxgrad.operators import ELEMENTWISE, OPERATORS, UNARY, add_facts, operator_of
from onnxgrad.operators.attributes import float_attribute, int_attribute, string_attribute
from onnxgrad.operators.axes import named_axes
from onnxgrad.operators.rule_nodes import attributes_of
from onnxgrad.operators.shapes import constant, dims, einsum_terms, rank

Outputs = list[ir.Value] | None

# onnxruntime has kernels for few ranks, or few axes
_LIMITED = {"MeanVarianceNormalization", "Resize", "ReverseSequence"}
_NAMES_AXES = {name for (_, name), operator in OPERATORS.items() if operator.naming is not None}


def _of(*op_types: str) -> Callable[[Any], Any]:
    """Register the decorated function as the rule of operators."""

    def register(function: Callable[[MemberAxis, Any], Outputs]) -> Any:
        for op_type in op_types:
            add_facts("", op_type, members=function)
        return function

    return register


def _write(m: MemberAxis, node: Any, inputs: list, **changed: Any) -> list[ir.Value]:
    """Write the node with other inputs and attributes; its outputs get the leading axis."""
    attributes = attributes_of(node) | changed
    outputs = m.op.emit_many(node.op_type, inputs, attributes, outputs=len(node.outputs))
    return [m.typed(y, old) for y, old in zip(outputs, node.outputs, strict=True)]


def _only_first(m: MemberAxis, node: Any) -> bool:
    """Return whether all members have the same operands behind the first."""
    return not any(x in m for x in node.inputs[1:])


@_of(*ELEMENTWISE)
def _elementwise(m: MemberAxis, node: Any) -> Outputs:
    n = rank(node.outputs[0])
    if n is None or any(x is not None and rank(x) is None for x in node.inputs):
        return None
    if node.op_type not in UNARY:
        return _write(m, node, [m.aligned(x, n) for x in node.inputs])
    first, *rest = node.inputs
    if node.op_type not in ("CastLike", "PRelu") and any(x in m for x in rest):
        return None
    others = [None if x is None else m.aligned(x, n) for x in rest]
    return _write(m, node, [m.expanded(first), *others])


# -- axes that have names -----------------------------------------------------------------------


@_of(*(_NAMES_AXES - _LIMITED), "Trilu")
def _along(m: MemberAxis, node: Any) -> Outputs:
    """Write an operator along axes of its first operand, those that it names or the last ones."""
    first, *rest = node.inputs
    return _shifted(m, node, [m.of(first), *rest]) if _only_first(m, node) else None


def _shifted(m: MemberAxis, node: Any, inputs: list) -> Outputs:
    """Write the node with other inputs, and each axis that it names one further behind."""
    naming, named = operator_of(node).naming, named_axes(node)
    if naming is None:
        return _write(m, node, inputs)
    if not named:
        return None
    shifted = [a + 1 for a in named]
    value = {"axis": shifted[0], "perm": [0, *shifted]}.get(naming.attribute, shifted)
    if naming.operand is None:
        return _write(m, node, inputs, **{naming.attribute: value})
    inputs += [None] * (naming.operand + 1 - len(inputs))
    inputs[naming.operand] = np.array(value)
    return _write(m, node, inputs)


@_of("Pad")
def _pad(m: MemberAxis, node: Any) -> Outputs:
    """Write lengths for all axes: onnxruntime drops `axes` where it moves a Transpose behind."""
    (x, pads, *value), axes, n = node.inputs[:3], named_axes(node), rank(node.inputs[0])
    known = constant(pads)
    if known is None or axes is None or n is None:
        return _along(m, node)
    lengths = np.zeros((2, n + 1), np.int64)
    lengths[:, [a + 1 for a in axes]] = known.reshape(2, -1)
    return _write(m, node, [m.of(x), lengths.ravel(), *value]) if _only_first(m, node) else None


@_of("Concat", "GatherElements", "ScatterElements")
def _expanded_along(m: MemberAxis, node: Any) -> Outputs:
    return _shifted(m, node, [m.expanded(x) for x in node.inputs])


@_of("Gather")
def _gather(m: MemberAxis, node: Any) -> Outputs:
    data, indices = node.inputs
    if indices in m:
        first = data not in m and named_axes(node) == [0]
        return _write(m, node, [data, m.of(indices)], axis=0) if first else None
    return _along(m, node)


# -- products -----------------------------------------------------------------------------------


@_of("MatMul")
def _matmul(m: MemberAxis, node: Any) -> Outputs:
    a, b = node.inputs
    if (rank(a) or 0) < 2 or (rank(b) or 0) < 2:
        return None
    return [m.typed(_product(m, a, b, m.of(a), m.of(b)), node.outputs[0])]


def _product(m: MemberAxis, a: ir.Value, b: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
    """Return the products of `x` and `y`, which replace `a` and `b`.

    A matrix on the right becomes K products of as many rows as possible.
    """
    op, n, width = m.op, rank(a) or 0, rank(b) or 0
    if b not in m and width == 2:
        return op.MatMul(x, y)
    if width == 2 and n > 2:
        inner, lead = op.dim(y, 2), [m.count] if a in m else []
        rows = [op.dim(x, i + len(lead)) for i in range(n - 1)]
        flat = op.Reshape(x, op.vector(*lead, -1, op.dim(y, 1)))
        flat.type, flat.shape = a.type, ir.Shape([*lead, None, (dims(a) or ())[-1]])
        return op.Reshape(op.MatMul(flat, y), op.vector(m.count, *rows, inner))
    both = max(n, width)
    return op.MatMul(m.aligned(a, both), m.aligned(b, both))


@_of("Gemm")
def _gemm(m: MemberAxis, node: Any) -> Outputs:
    op, (a, b, c) = m.op, (*node.inputs, None)[:3]
    alpha, beta = (float_attribute(node, name) for name in ("alpha", "beta"))
    x, y = (
        op.mT(m.of(v)) if int_attribute(node, name) else m.of(v)
        for v, name in ((a, "transA"), (b, "transB"))
    )
    result = m.typed(op.MatMul(x, y), node.outputs[0])
    if alpha != 1:
        result = m.typed(result * alpha, node.outputs[0])
    if c is not None and beta != 0:
        added = m.aligned(c, 2)
        result = m.typed(result + (added if beta == 1 else added * beta), node.outputs[0])
    return [result]


@_of("Einsum")
def _einsum(m: MemberAxis, node: Any) -> Outputs:
    terms, output = einsum_terms(string_attribute(node, "equation"))
    used = "".join((*terms, output))
    letter = next((c for c in "zyxwvutsrqponmlkjihgfedcba" if c not in used), None)
    if "." in used or letter is None:
        return None
    pairs = zip(terms, node.inputs, strict=True)
    new = [f"{letter}{t}" if x in m else t for t, x in pairs]
    equation = f"{','.join(new)}->{letter}{output}"
    return _write(m, node, m.all_of(node.inputs), equation=equation)


# -- shapes -------------------------------------------------------------------------------------


@_of("Shape")
def _shape(m: MemberAxis, node: Any) -> Outputs:
    """Write the shape of a member; no member has another."""
    n = rank(node.inputs[0])
    if n is None:
        return None
    stated = int_attribute(node, "start"), node.attributes.get_int("end", None)
    start, end, _ = slice(*stated).indices(n)
    new = m.op.Shape(m.of(node.inputs[0]), start=start + 1, end=end + 1)
    return [m.share(node.outputs[0], new)]


@_of("Size")
def _size(m: MemberAxis, node: Any) -> Outputs:
    new = m.op.ReduceProd(m.op.Shape(m.of(node.inputs[0]), start=1), keepdims=0)
    return [m.share(node.outputs[0], new)]


@_of("Flatten")
def _flatten(m: MemberAxis, node: Any) -> Outputs:
    x, n = node.inputs[0], rank(node.inputs[0])
    if not n or int_attribute(node, "axis") % n != 1:
        return None
    rest = m.op.numel(m.of(x), 2)
    y = m.op.Reshape(m.of(x), m.op.vector(m.count, -1, rest))
    return [m.typed(y, node.outputs[0])]


@_of("Expand", "Reshape", "Tile")
def _per_axis(m: MemberAxis, node: Any) -> Outputs:
    """Write an operator whose second operand has a number for each axis, and one more in front."""
    (x, numbers), n = node.inputs, rank(node.outputs[0])
    if numbers in m:
        return None
    new, front, known = m.of(x), [1 if node.op_type == "Tile" else m.count], constant(numbers)
    if node.op_type == "Expand":
        length = (dims(numbers) or (None,))[0]
        if n is None or not isinstance(length, int):
            return None
        new, front = m.aligned(x, n), front + [1] * (n - length)
    # a 0 of a Reshape stands for the length of the same axis, which has moved as far as the 0
    target = m.op.Concat(front, numbers, axis=0) if known is None else [*front, *map(int, known)]
    return _write(m, node, [new, target])


# -- layers -------------------------------------------------------------------------------------


@_of("AveragePool", "Conv", "ConvTranspose", "DepthToSpace", "GlobalAveragePool", "GlobalLpPool")
@_of("GlobalMaxPool", "InstanceNormalization", "LRN", "LpPool", "MaxPool", "SpaceToDepth")
def _by_rows(m: MemberAxis, node: Any) -> Outputs:
    """Write an operator on images of all members as one on more images."""
    x, y = node.inputs[0], node.outputs[0]
    if not _only_first(m, node) or len(node.outputs) != 1 or rank(x) is None or rank(y) is None:
        return None
    op, new = m.op, m.of(x)
    lengths = [op.dim(new, i) for i in range(2, 1 + (rank(x) or 0))]
    merged = op.Reshape(new, op.vector(-1, *lengths))
    merged.type, merged.shape = x.type, ir.Shape([None, *(dims(x) or ())[1:]])
    result = op.emit(node.op_type, [merged, *node.inputs[1:]], attributes_of(node))
    result.type, result.shape = y.type, ir.Shape([None, *(dims(y) or ())[1:]])
    lengths = [op.dim(result, i) for i in range(1, rank(y) or 0)]
    return [m.typed(op.Reshape(result, op.vector(m.count, -1, *lengths)), y)]


@_of("LayerNormalization", "RMSNormalization")
def _layer_norm(m: MemberAxis, node: Any) -> Outputs:
    """Write a normalization over the last axes: the scale and bias of a member come behind it."""
    x, scale, bias = (*node.inputs, None)[:3]
    y, n = node.outputs[0], rank(node.inputs[0])
    if not n or x not in m or any(v.uses() or v.is_graph_output() for v in node.outputs[1:]):
        return None
    op, axis = m.op, int_attribute(node, "axis") % n
    behind, inputs = scale in m or bias in m, [m.of(x), *node.inputs[1:]]
    if behind:
        one = op.const(1.0, scale.dtype)
        inputs[1:] = [op.set_type_like(op.Expand(one, m.shape(scale)), scale)]
    new = m.typed(op.emit(node.op_type, inputs, attributes_of(node) | {"axis": axis + 1}), y)
    if behind:
        new = m.typed(op.Mul(new, m.aligned(scale, n)), y)
        new = new if bias is None else m.typed(op.Add(new, m.aligned(bias, n)), y)
    return [new, *node.outputs[1:]]


@_of("BatchNormalization")
def _batch_norm(m: MemberAxis, node: Any) -> Outputs:
    """Write a normalization of more channels, those of all members."""
    (x, *operands), n, op = node.inputs, rank(node.inputs[0]), m.op
    if n is None or n < 2:
        return None
    turned = op.Transpose(m.expanded(x), perm=[1, 0, *range(2, n + 1)])  # (N, members, C, ...)
    lengths = [op.dim(turned, i) for i in range(3, n + 1)]
    merged = op.Reshape(turned, op.vector(op.dim(turned, 0), -1, *lengths))
    merged.type, merged.shape = x.type, ir.Shape([(dims(x) or ())[0], None, *(dims(x) or ())[2:]])
    flat = [op.Reshape(m.expanded(v), [-1]) for v in operands]
    outputs = op.emit_many(
        node.op_type, [merged, *flat], attributes_of(node), len(node.outputs), fresh=True
    )
    y, *statistics = outputs
    y.type = x.type
    y = op.Reshape(y, op.vector(op.dim(turned, 0), m.count, -1, *lengths))
    y.type, y.shape = x.type, turned.shape
    new = [op.Transpose(y, perm=[1, 0, *range(2, n + 1)])]
    new += [op.Reshape(v, [m.count, -1]) for v in statistics]
    return [m.typed(v, old) for v, old in zip(new, node.outputs, strict=True)]
