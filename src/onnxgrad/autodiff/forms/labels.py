"""Losses that read one class of each row: the gradients of their LogSoftmax."""

from __future__ import annotations

from onnxgrad.autodiff.forms.group import GRADIENT, is_zero
from onnxgrad.graph.rewrite import rewrites
from onnxgrad.operators import made_by
from onnxgrad.operators.attributes import int_attribute, string_attribute
from onnxgrad.operators.shapes import dims, equal, rank


@rewrites("Sub", group=GRADIENT)
def scatter_into_softmax(op, node):
    """g - e^y sum(g) = scatter(-e^y sum(u), i, u), where g is zeros with u added at i.

    This is the gradient of a LogSoftmax, i the index of the label of each row.
    """
    g, product = node.inputs[0], made_by(node.inputs[1], "Mul")
    label = _label(op, g) if product else None
    if product is None or label is None:
        return None
    (i, u, axis), factors = label, product.inputs
    for shares, total in (factors, factors[::-1]):
        # not broadcast: rules write operands of one shape, and a stack adds an axis to some
        one_shape = equal(dims(shares), dims(g)) or (op.is_own(node) and rank(shares) == rank(g))
        if one_shape and _is_sum(op, total, g, axis):
            others = op.Mul(shares, op.Neg(op.ReduceSum(u, [axis], keepdims=1)))
            return [op.ScatterElements(others, i, u, axis=axis, reduction="add")]
    return None


def _label(op, g):
    """Return i, u and an axis if `g` is zeros with u added at the indices i along that axis."""
    node, n = made_by(g, "ScatterElements"), rank(g)
    if node is None or n is None:
        return None
    (zeros, i, u), axis = node.inputs, int_attribute(node, "axis") % n
    if not is_zero(op, zeros):
        return None
    rows, labels = list(dims(g) or ()), list(dims(i) or (None,) * n)
    rows[axis] = labels[axis] = 1  # a label for every row: the others have their sum, too
    added = string_attribute(node, "reduction") == "add"
    return (i, u, axis) if added and equal(tuple(rows), tuple(labels)) else None


def _is_sum(op, total, g, axis):
    """Return whether `total` is the sum of `g` along an axis, which is kept."""
    node = made_by(total, "ReduceSum")
    if node is None or node.inputs[0] is not g:
        return False
    axes = op.known_value(node.inputs[1]) if len(node.inputs) > 1 else None
    kept = bool(int_attribute(node, "keepdims"))
    return kept and axes is not None and [int(a) % len(dims(g) or ()) for a in axes] == [axis]
