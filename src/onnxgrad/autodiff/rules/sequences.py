"""Sequences and Optionals: the gradient of a sequence is the sequence of the gradients."""

from __future__ import annotations

import numpy as np

from onnxgrad.autodiff.registry import rule
from onnxgrad.graph import sequence_nodes
from onnxgrad.operators.attributes import int_attribute
from onnxgrad.operators.shapes import dims


@rule("SequenceConstruct")
def construct(op, node, g):
    """s = [a, b, ...]:  da, db, ... = the elements of ds."""
    return [op.set_type_like(op.SequenceAt(g, np.int64(i)), x) for i, x in enumerate(node.inputs)]


@rule("SequenceAt")
def at(op, node, g):
    """y = s[i]:  ds = zeros with dy at i."""
    s, i = node.inputs
    return sequence_nodes.scatter_element(op, g, i, s), None


@rule("SequenceInsert")
def insert(op, node, g):
    """y = s with x inserted at i:  dx = dy[i],  ds = dy without dy[i]."""
    s, x, i = (*node.inputs, None)[:3]
    if i is None:
        i = op.const(np.int64(-1))
    elif (array := op.known_value(i)) is not None:  # below zero: from the end of the shorter s
        index = int(array.reshape(()))
        i = op.const(np.int64(index if index >= 0 else index - 1))
    else:
        i = op.Where(op.Less(i, op.const(0, i.dtype)), op.Sub(i, op.const(1, i.dtype)), i)
    return (
        op.set_type_like(op.SequenceErase(g, i), s),
        op.set_type_like(op.SequenceAt(g, i), x),
        None,
    )


@rule("SequenceErase")
def erase(op, node, g):
    """y = s without s[i]:  ds = dy with zeros inserted at i."""
    s, i = (*node.inputs, None)[:2]
    i = op.const(np.int64(-1)) if i is None else i
    zeros = op.zeros_like(sequence_nodes.element(op, s, i))
    return op.set_type_like(
        sequence_nodes.insert(op, g, zeros, sequence_nodes.erased_position(op, i, g)), s
    ), None


@rule("SplitToSequence")
def split(op, node, g):
    """s = x split along an axis:  dx = the elements of ds, concatenated."""
    x, lengths = (*node.inputs, None)[:2]
    axis = int_attribute(node, "axis")
    new = int(lengths is None and not int_attribute(node, "keepdims"))
    shape = dims(x)
    if shape is not None and isinstance(shape[axis], int) and shape[axis] > 0:
        return op.set_type_like(op.ConcatFromSequence(g, axis=axis, new_axis=new), x), None
    empty = op.Slice(op.zeros_like(x), [0], [0], [axis])  # s may have no element
    if new:
        g = sequence_nodes.mapped(op, lambda inner, v: inner.Unsqueeze(v, [axis]), g)
    joined = op.SequenceInsert(g, empty, np.int64(0))
    return op.set_type_like(op.ConcatFromSequence(joined, axis=axis), x), None


@rule("ConcatFromSequence")
def concat(op, node, g):
    """y = the elements of s, concatenated:  ds = dy split as s was."""
    [s] = node.inputs
    axis = int_attribute(node, "axis")
    if int_attribute(node, "new_axis"):
        return (op.set_type_like(op.SplitToSequence(g, axis=axis, keepdims=0), s),)
    length = sequence_nodes.common_length(s, axis)
    if length is None:
        limits = {"start": axis} if axis == -1 else {"start": axis, "end": axis + 1}
        columns = sequence_nodes.stacked(op, lambda inner, v: inner.Shape(v, **limits), s)
        lengths = op.Reshape(columns, [-1])
    else:
        lengths = np.int64(length)
    return (op.set_type_like(op.SplitToSequence(g, lengths, axis=axis), s),)
