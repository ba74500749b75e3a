"""The types and shapes of the outputs of a node, from its operator, operands and attributes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import onnx_ir as ir

from onnxgrad.errors import ModelError
from onnxgrad.graph import sequences
from onnxgrad.graph.axes import axes_named_by
from onnxgrad.graph.operators import BOOLEAN, ELEMENTWISE, INT64, UNARY
from onnxgrad.graph.shapes import (
    Dim,
    Dims,
    broadcast,
    broadcast_dim,
    coefficient,
    constant,
    dims,
    einsum_terms,
    static,
)
from onnxgrad.limits import limit

_BROADCASTS = ELEMENTWISE - UNARY  # their shape is the broadcast shape of all operands
_OUTPUT_DTYPE = dict.fromkeys(INT64, ir.DataType.INT64) | dict.fromkeys(BOOLEAN, ir.DataType.BOOL)


def output_types(
    op_type: str, operands: Sequence, attributes: dict, outputs: int
) -> Sequence[ir.TypeProtocol | None]:
    """Return the types of the outputs of a node; None for a type that is not known.

    Nodes with a subgraph have the types of its outputs; the others have outputs of one type, but
    for the indices of a TopK.
    """
    subgraph = attributes.get("body", attributes.get("then_branch"))
    if subgraph is not None:  # the first output of the body of a Loop is its condition
        return [y.type for y in subgraph.outputs[op_type == "Loop" :]]
    if op_type in sequences.OPERATORS:
        return [sequences.output_type(op_type, operands, attributes)]
    dtype = _dtype(op_type, operands, attributes)
    types = [None if dtype is None else ir.TensorType(dtype) for _ in range(outputs)]
    if op_type == "TopK" and outputs == 2:
        types[1] = ir.TensorType(ir.DataType.INT64)
    return types


def _dtype(op_type: str, operands: Sequence, attributes: dict) -> ir.DataType | None:
    """Return the dtype that the operator sets, else that of the first tensor operand."""
    if op_type == "Cast":
        return ir.DataType(attributes["to"])
    if op_type in _OUTPUT_DTYPE:
        return _OUTPUT_DTYPE[op_type]
    typed = operands[1:] if op_type == "Where" else operands  # the condition is bool
    return next((v.dtype for v in typed if v is not None and v.dtype), None)


def output_shape(op_type: str, inputs: Sequence, attributes: Mapping[str, Any]) -> Dims | None:
    """Return the shape of the first output of a node, or of its elements if it is a sequence.

    Covers operators that gradients consist of, and those for which onnx infers no symbols. None is
    an unknown rank, and as a dimension an unknown length. Operands that do not fit are an error.
    """
    try:
        if op_type in sequences.OPERATORS:
            return sequences.output_shape(op_type, inputs, attributes)
        return _output_shape(op_type, inputs, attributes)
    except (IndexError, ZeroDivisionError, ValueError) as e:
        shapes = [dims(v) for v in inputs]
        raise ModelError(
            f"operands of shapes {shapes} do not fit {op_type} or its attributes: correct the node"
        ) from e


def _output_shape(op_type: str, inputs: Sequence, attributes: Mapping[str, Any]) -> Dims | None:
    shapes = [None if v is None else dims(v) for v in inputs]
    if op_type in _BROADCASTS:
        return broadcast(*(s for v, s in zip(inputs, shapes, strict=True) if v is not None))
    if op_type == "Einsum":
        return einsum_shape(shapes, attributes.get("equation", ""))
    if op_type == "Size":
        return ()
    first = shapes[0] if shapes else None
    if first is None:
        return None
    if op_type in UNARY or op_type in ("ScatterElements", "ScatterND"):
        return first
    if op_type == "Shape":
        return (len(first[attributes.get("start", 0) : attributes.get("end")]),)
    if op_type == "GatherElements":
        return shapes[1]
    if op_type == "Expand":
        target = constant(inputs[1])
        return None if target is None else broadcast(first, tuple(target.tolist()))
    if op_type == "Concat":
        return _concatenated(shapes, attributes.get("axis", 0))
    if op_type == "MatMul":
        second = shapes[1]
        if second is None or len(first) < 2 or len(second) < 2:
            return None
        batch = broadcast(first[:-2], second[:-2])
        return None if batch is None else (*batch, first[-2], second[-1])
    if op_type == "Transpose":
        return tuple(first[i] for i in attributes.get("perm", range(len(first))[::-1]))
    if op_type == "Gemm":
        a, b = first, shapes[1]
        if b is None or len(a) != 2 or len(b) != 2:
            return None
        return a[1 if attributes.get("transA") else 0], b[0 if attributes.get("transB") else 1]
    if op_type in ("Unsqueeze", "Squeeze") or op_type.startswith("Reduce"):
        return _with_axes(op_type, first, inputs, attributes)
    if op_type == "Reshape":
        target, length = constant(inputs[1]), static(shapes[1])
        if target is None:
            return None if length is None or length[0] > limit("rank") else (None,) * length[0]
        return reshaped(first, target.tolist(), attributes)
    if op_type == "Resize":
        return _resized(first, inputs, attributes)
    return None


def _concatenated(shapes: Sequence[Dims | None], axis: int) -> Dims | None:
    """Return the shape of a Concat; along the other axes, all operands have the same length."""
    ranked = [shape for shape in shapes if shape is not None]
    result = [
        next((d for d in column if d is not None), None) for column in zip(*ranked, strict=True)
    ]
    lengths = static(tuple(shape[axis] for shape in ranked))
    result[axis] = sum(lengths) if lengths is not None and len(ranked) == len(shapes) else None
    return tuple(result)


def einsum_shape(shapes: Sequence[Dims | None], equation: str) -> Dims | None:
    """Return the shape of an Einsum; axes with the same index, or in an ellipsis, broadcast."""
    terms, output = einsum_terms(equation)
    lengths: dict[str, list[Dim]] = {}
    ellipses: list[Dims | None] = []
    for shape, term in zip(shapes, terms, strict=False):
        head, dots, tail = term.partition("...")
        ends: Dims = (None,) * len(head + tail)
        if shape is not None:
            end = len(shape) - len(tail)
            ends = shape[: len(head)] + shape[end:]
        if dots:
            ellipses.append(None if shape is None else shape[len(head) : end])
        for index, d in zip(head + tail, ends, strict=False):
            lengths.setdefault(index, []).append(d)
    head, dots, tail = output.partition("...")
    middle = broadcast(*ellipses) if dots else ()
    if middle is None:
        return None
    before, after = ([broadcast_dim(lengths.get(i, [None])) for i in part] for part in (head, tail))
    return (*before, *middle, *after)


def _resized(shape: Dims, inputs: Sequence, attributes: Mapping[str, Any]) -> Dims:
    """Return the shape after a Resize: axes of constant scale 1 keep their length."""
    scales = constant(inputs[2]) if len(inputs) > 2 else None
    axes = axes_named_by("Resize", inputs, attributes) or ()
    result = [None if i in axes else d for i, d in enumerate(shape)]
    if scales is not None and len(scales) == len(axes):
        for axis, scale in zip(axes, scales, strict=True):
            result[axis] = shape[axis] if scale == 1 else None
    return tuple(result)


def _with_axes(
    op_type: str, shape: Dims, inputs: Sequence, attributes: Mapping[str, Any]
) -> Dims | None:
    """Return the shape after an Unsqueeze, Squeeze or reduction, as far as its axes are known."""
    named = axes_named_by(op_type, inputs, attributes)
    if named is None:
        keeps = op_type.startswith("Reduce") and attributes.get("keepdims", 1)
        return (None,) * len(shape) if keeps else None
    if op_type == "Unsqueeze":
        old = iter(shape)
        return tuple(1 if i in named else next(old) for i in range(len(shape) + len(named)))
    if op_type != "Squeeze" and attributes.get("keepdims", 1):
        return tuple(1 if i in named else d for i, d in enumerate(shape))
    return tuple(d for i, d in enumerate(shape) if i not in named)


def reshaped(shape: Dims | None, target: Sequence[Dim], attributes: Mapping[str, Any]) -> Dims:
    """Return the shape after a Reshape; a length -1 is inferred, perhaps as a symbol."""
    result = list(target)
    if shape is None:
        return tuple(None if d in (0, -1) else d for d in result)
    if not attributes.get("allowzero"):
        result = [shape[i] if d == 0 else d for i, d in enumerate(result)]
    if -1 not in result:
        return tuple(result)
    before, after = list(shape), [d for d in result if d != -1]
    for d in list(after):
        if d is not None and d in before:
            before.remove(d)
            after.remove(d)
    sizes = [d for d in before if isinstance(d, int)]
    symbols = [d for d in before if not isinstance(d, int)]
    inferred: Dim = None
    if all(isinstance(d, int) and d > 0 for d in after):
        times, symbol = coefficient(symbols[0]) if symbols and symbols[0] else (1, None)
        factor, remainder = divmod(prod(sizes) * times, prod(after))  # type: ignore[arg-type]
        if remainder == 0 and not symbols:
            inferred = factor
        elif remainder == 0 and len(symbols) == 1 and symbol is not None:
            inferred = symbol if factor == 1 else f"{factor}*{symbol}"
    return tuple(inferred if d == -1 else d for d in result)
