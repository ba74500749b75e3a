"""The weighted sum of the terms of a loss, and the sum of the weights.

The sum of the weights is computed from labels and sample weights alone, so that it is cheap without
the forward pass. The number of terms is therefore taken from the shape of the labels; where the
losses are not proven to have this shape, they are reshaped to it, which fails when the model runs
if the shapes differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.emit import Emit
from onnxgrad.graph.infer import infer
from onnxgrad.losses.spec import Terms, widen_to_float32
from onnxgrad.operators.shapes import dims, rank

Extents = list[int | ir.Value]


def sum_and_count(
    op: Any, terms: Terms, label: ir.Value, weight: ir.Value | None = None
) -> tuple[ir.Value, ir.Value]:
    """Write two scalars: the weighted sum of losses, sum(w l), and the sum of weights, sum(w), in
    the losses' dtype.

    Args:
        op: emitter of the graph.
        terms: the terms.
        label: the label from which the terms are computed.
        weight: sample weights: (N,), or with as many axes as the losses, to whose shape they are
            broadcast; they multiply `terms.weights`.

    Raises:
        ValueError: there is not one term for every row or element of the label.
    """
    losses, w = terms.losses, terms.weights
    if rank(losses) is None:
        losses, label = _infer_ranks(op, losses, label, [] if weight is None else [weight])
    shape, dtype = dims(losses), losses.dtype
    assert shape is not None
    assert dtype is not None
    if not shape and dims(label) == () and w is None and weight is None:
        return losses, op.const(1.0, dtype)  # a prediction of rank 0 has one loss
    if not shape:
        raise ValueError(
            "a loss must have one number for every element or row, not one for all: leave out "
            "the last mean or sum"
        )
    # whether the weights are not broadcast to the losses
    of_weights = None if w is None else dims(w)
    covers = of_weights is not None and len(of_weights) == len(shape)
    covers = covers and all(a != 1 or d == 1 for a, d in zip(of_weights or (), shape, strict=True))
    if not covers:
        losses, extents, every = _loss_shape_from_label(op, losses, label)
        # one Size node in place of the nodes for the shape
        if every and w is None and weight is None:
            return op.ReduceSum(losses, keepdims=0), op.Cast(op.Size(label), to=dtype)
        target = op.vector(*extents)
    else:
        target = op.Shape(w)
    if weight is not None:
        weight = op.Cast(weight, to=dtype)
        if rank(weight) == 1:
            weight = op.Reshape(weight, [-1] + [1] * (len(shape) - 1))
        else:
            weight, covers = broadcast_weights(op, weight, target, losses), True
        w = weight if w is None else w * weight
    if w is None:
        total = op.ReduceSum(losses, keepdims=0)
        if isinstance(target, list):
            return total, op.const(np.asarray(np.prod(target), dtype.numpy()))
        return total, op.Cast(op.ReduceProd(target, keepdims=0), to=dtype)
    count = op.ReduceSum(w if covers else op.Expand(w, target), keepdims=0)
    return op.ReduceSum(losses * w, keepdims=0), count


def sum_without_label(
    op: Any, losses: ir.Value, weight: ir.Value | None, labels: Sequence[ir.Value]
) -> tuple[ir.Value, ir.Value]:
    """Write two scalars: the weighted sum of losses of rows or elements, and the sum of weights.

    `losses` have a known rank. The sum of the weights is computed from inputs of the graph and
    labels, where they are proven to have the lengths of `losses`.
    """
    losses, axes = widen_to_float32(op, losses), range(len(dims(losses) or ()))
    if weight is None:
        return op.ReduceSum(losses, keepdims=0), element_count(op, losses, axes, losses, labels)
    weight = op.Cast(weight, to=losses.dtype)
    shape, rows = dims(losses) or (), (dims(weight) or (None,))[0]
    at = shape.index(rows) if rows is not None and rows in shape else 0
    others = [i for i in axes if i != at]
    column = op.Reshape(weight, [-1 if i == at else 1 for i in axes])
    count = op.ReduceSum(weight, keepdims=0)
    if others:
        count = count * element_count(op, losses, others, losses, labels)
    return op.ReduceSum(losses * column, keepdims=0), count


def element_count(
    op: Any, x: ir.Value, axes: Iterable[int], like: ir.Value, labels: Iterable[ir.Value]
) -> ir.Value:
    """Write the product of the lengths of `x` along `axes`, in the dtype of `like`.

    A symbolic length is read from an input that has it, so that `x` need not be computed.
    """
    lengths = {i: (dims(x) or (None,))[i] for i in axes}
    inputs = [*labels, *op.graph.inputs]
    count = op.const(float(prod(d for d in lengths.values() if isinstance(d, int))), like.dtype)
    for i, d in lengths.items():
        if not isinstance(d, int):
            have_it = ((v, j) for v in inputs for j, e in enumerate(dims(v) or ()) if e == d)
            source, axis = next(have_it, (x, i)) if d is not None else (x, i)
            length = op.Squeeze(op.Shape(source, start=axis, end=axis + 1), [0])
            count = count * op.Cast(length, to=like.dtype)
    return count


def broadcast_weights(op: Any, weight: ir.Value, shape: Any, like: ir.Value) -> ir.Value:
    """Write sample weights broadcast to the shape of `like`; a Reshape fails if they do not fit."""
    # fresh: written even if symbolic shapes are equal
    every = op.emit("Expand", [weight, shape], {}, fresh=True)
    return op.set_type_like(op.emit("Reshape", [every, shape], {}, fresh=True), like)


def scale_rows(op: Any, x: ir.Value, weight: ir.Value) -> ir.Value:
    """Write `x` times sample weights: `weight` (N,) multiplies rows, a `weight` of more axes
    multiplies elements.
    """
    weight, n = op.Cast(weight, to=x.dtype), rank(x)
    if rank(weight) != 1:
        return op.set_type_like(x * broadcast_weights(op, weight, op.Shape(x), x), x)
    if n is None:
        flat = op.Reshape(x, [0, -1]) * op.Reshape(weight, [-1, 1])
        return op.set_type_like(op.Reshape(flat, op.Shape(x)), x)
    return op.set_type_like(x * op.Reshape(weight, [-1] + [1] * (n - 1)), x)


def with_known_rank(op: Emit, value: ir.Value) -> ir.Value:
    """Return `value`, whose shape is inferred from the whole graph if its rank is unknown."""
    if rank(value) is None:
        infer(ir.Model(op.graph, ir_version=8))
    return value


def _infer_ranks(
    op: Emit, losses: ir.Value, label: ir.Value, inputs: list[ir.Value]
) -> tuple[ir.Value, ir.Value]:
    """Return losses and label of known rank: inferred, or reshaped to (N, elements of a row)."""
    count = len(op.graph.inputs)
    op.graph.inputs.extend(v for v in (label, *inputs) if v.producer() is None)
    infer(ir.Model(op.graph, ir_version=8))
    del op.graph.inputs[count:]
    if rank(losses) is not None:
        return losses, label
    flat = []
    for v in (losses, label):
        v = v if rank(v) is not None else op.Reshape(v, [0, -1])
        v.shape = v.shape or ir.Shape([None, None])
        flat.append(v)
    return flat[0], flat[1]


def _loss_shape_from_label(
    op: Any, losses: ir.Value, label: ir.Value
) -> tuple[ir.Value, Extents, bool]:
    """Return (losses, their shape as computed from the label, whether there is one loss for each
    label).

    The axes of the losses are some axes of the label, in their order, and axes of length 1.
    """
    shape, of_label = dims(losses), dims(label)
    assert shape is not None
    if of_label is None:
        of_label = (None,) * len(shape)  # the prediction has an unknown rank
    message = (
        f"the loss has the shape {shape}, and its label {of_label}: it must have one number for "
        "every element or row"
    )
    if isinstance(shape[0], int) and of_label[0] not in (None, shape[0]):
        raise ValueError(message)
    extents: Extents = []
    rest = [i for i, d in enumerate(of_label) if d != 1]
    proven, every = True, True
    for d in shape:
        if d == 1:
            extents.append(1)
            continue
        equal = next((i for i in rest if of_label[i] == d is not None), None)
        axis = equal if equal is not None else rest[0] if rest else None
        if axis is None:
            raise ValueError(message)
        every = every and rest.index(axis) == 0
        rest = rest[rest.index(axis) + 1 :]
        extents.append(d if isinstance(d, int) else op.dim(label, axis))
        proven = proven and (equal is not None or isinstance(d, int))
    if not proven:
        # not a Concat of one length: onnxruntime would take it as -1, which fits every shape
        whole = len(of_label) == len(shape) and 1 not in shape
        losses = op.Reshape(losses, op.Shape(label) if whole else op.vector(*extents))
        losses.shape = ir.Shape(shape)
    return losses, extents, every and not rest
