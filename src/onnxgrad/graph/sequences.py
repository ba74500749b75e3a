"""Types and shapes of sequences and Optionals.

onnx_ir stores the shape of the elements of a sequence as the shape of the sequence, and the shape
of the content of an Optional as that of the Optional: None if their ranks differ or are not known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from onnxgrad.errors import ModelError
from onnxgrad.graph.shapes import Dims, constant, dims, is_stated

_EMPTY = "onnxgrad.empty"  # `meta` key of a sequence that is empty

OPERATORS = frozenset(
    "SequenceConstruct SequenceEmpty SequenceInsert SequenceErase SequenceAt SplitToSequence "
    "ConcatFromSequence Optional OptionalGetElement Identity".split()
)


def is_sequence(value: ir.Value) -> bool:
    """Return whether `value` is a sequence, or an Optional of one."""
    return isinstance(content(value.type), ir.SequenceType)


def content(kind: ir.TypeProtocol | None) -> ir.TypeProtocol | None:
    """Return the type of the content if `kind` is an Optional type; any other type as it is."""
    return kind.elem_type if isinstance(kind, ir.OptionalType) else kind


def output_type(
    op_type: str, operands: Sequence[ir.Value | None], attributes: Mapping[str, Any]
) -> ir.TypeProtocol | None:
    """Return the type of the output of one of `OPERATORS`; None if it is not known."""
    first = operands[0].type if operands and operands[0] is not None else None
    if op_type == "SequenceEmpty":
        return ir.SequenceType(ir.TensorType(ir.DataType(attributes.get("dtype", 1))))
    if op_type == "Optional" and first is None:
        content_type = attributes.get("type")
        return None if content_type is None else ir.OptionalType(content_type.type)
    if first is None:
        return None
    if op_type in ("SequenceConstruct", "SplitToSequence"):
        return ir.SequenceType(ir.TensorType(first.dtype))
    if op_type in ("SequenceAt", "ConcatFromSequence"):
        return ir.TensorType(first.dtype)
    if op_type == "Optional":
        return ir.OptionalType(first)
    return content(first) if op_type == "OptionalGetElement" else first


def output_shape(
    op_type: str, operands: Sequence[ir.Value | None], attributes: Mapping[str, Any]
) -> Dims | None:
    """Return the shape of the output of one of `OPERATORS`, or of its elements; None if unknown."""
    if not operands or operands[0] is None:
        return None
    shape = dims(operands[0])
    if op_type == "SequenceConstruct":
        return joined(operands)
    if op_type == "SequenceInsert":
        return joined(operands[:2])
    if op_type in ("SplitToSequence", "ConcatFromSequence") and shape is not None:
        return (_split_shape if op_type == "SplitToSequence" else _concat_shape)(
            shape, operands, attributes
        )
    return shape


def joined(values: Sequence[ir.Value | None]) -> Dims | None:
    """Return the dimensions that all of `values` share, None for others; None if ranks differ.

    Empty sequences are ignored, as their elements have no shape.
    """
    shapes = [dims(v) for v in values if v is not None and not is_empty(v)]
    if not shapes or any(s is None or len(s) != len(shapes[0] or ()) for s in shapes):
        return None
    columns = zip(*(s for s in shapes if s is not None), strict=True)
    return tuple(c[0] if len(set(c)) == 1 and is_stated(c[0]) else None for c in columns)


def is_empty(value: ir.Value) -> bool:
    """Return whether `value` is an empty sequence whose element shape is unknown."""
    return value.shape is None and bool(value.meta.get(_EMPTY))


def note_empty(value: ir.Value, empty: bool) -> None:
    """Record whether a sequence is empty: then `joined` ignores the shape of its elements."""
    if empty:
        value.meta[_EMPTY] = True
    else:
        value.meta.pop(_EMPTY, None)


def _split_shape(
    shape: Dims, operands: Sequence[ir.Value | None], attributes: Mapping[str, Any]
) -> Dims | None:
    """Return the shape of the elements of a SplitToSequence of a tensor of shape `shape`."""
    axis = int(attributes.get("axis", 0)) % len(shape)
    split = operands[1] if len(operands) > 1 else None
    if split is None:
        inner = (1,) if attributes.get("keepdims", 1) else ()
        return (*shape[:axis], *inner, *shape[axis + 1 :])
    lengths, n = constant(split), shape[axis]
    length = None
    if lengths is not None and lengths.size and (lengths == lengths.flat[0]).all():
        first = int(lengths.flat[0])
        equal = lengths.ndim > 0 or (isinstance(n, int) and first > 0 and n % first == 0)
        length = first if equal else None
    return (*shape[:axis], length, *shape[axis + 1 :])


def _concat_shape(
    shape: Dims, operands: Sequence[ir.Value | None], attributes: Mapping[str, Any]
) -> Dims | None:
    """Return the shape of a ConcatFromSequence of elements of shape `shape`."""
    new = int(attributes.get("new_axis", 0))
    if not shape and not new:
        raise ModelError(
            "ConcatFromSequence of tensors without axes: set new_axis=1, or Unsqueeze the elements"
        )
    axis = int(attributes.get("axis", 0)) % (len(shape) + new)
    return (*shape[:axis], None, *shape[axis + 1 - new :])
