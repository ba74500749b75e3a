"""Types and shapes of sequences and Optionals.

onnx_ir stores the shape of the elements of a sequence as the shape of the sequence, and the shape
of the content of an Optional as that of the Optional: None if their ranks differ or are not known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from onnxgrad.errors import ModelError
from onnxgrad.operators.axes import broadcast_axis
from onnxgrad.operators.elements import of_known
from onnxgrad.operators.records import declare_operators
from onnxgrad.operators.shapes import Dims, constant, dims, is_stated

Operands = Sequence[ir.Value | None]
Attributes = Mapping[str, Any]
_EMPTY = "onnxgrad.empty"  # `meta` key of a sequence that is empty


def is_sequence(value: ir.Value) -> bool:
    """Return whether `value` is a sequence, or an Optional of one."""
    return isinstance(content(value.type), ir.SequenceType)


def content(kind: ir.TypeProtocol | None) -> ir.TypeProtocol | None:
    """Return the type of the content if `kind` is an Optional type; any other type as it is."""
    return kind.elem_type if isinstance(kind, ir.OptionalType) else kind


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


# -- types and shapes -----------------------------------------------------------------------------


def _first_type(operands: Operands) -> ir.TypeProtocol | None:
    return operands[0].type if operands and operands[0] is not None else None


def _type_of_sequence(operands: Operands, _attributes: Attributes) -> ir.TypeProtocol | None:
    """Return the type of a sequence of tensors of the dtype of the first operand."""
    first = _first_type(operands)
    return None if first is None else ir.SequenceType(ir.TensorType(first.dtype))


def _type_of_element(operands: Operands, _attributes: Attributes) -> ir.TypeProtocol | None:
    first = _first_type(operands)
    return None if first is None else ir.TensorType(first.dtype)


def _type_of_empty(_operands: Operands, attributes: Attributes) -> ir.TypeProtocol:
    return ir.SequenceType(ir.TensorType(ir.DataType(attributes.get("dtype", 1))))


def _type_of_optional(operands: Operands, attributes: Attributes) -> ir.TypeProtocol | None:
    first, stated = _first_type(operands), attributes.get("type")
    if first is None:
        return None if stated is None else ir.OptionalType(stated.type)
    return ir.OptionalType(first)


def _shape_of_elements(operands: Operands, _attributes: Attributes) -> Dims | None:
    """Return the shape of the first operand, or of its elements if it is a sequence."""
    return dims(operands[0]) if operands else None


def _shape_of_constructed(operands: Operands, _attributes: Attributes) -> Dims | None:
    return joined(operands) if operands and operands[0] is not None else None


def _shape_of_insert(operands: Operands, _attributes: Attributes) -> Dims | None:
    return joined(operands[:2]) if operands and operands[0] is not None else None


def _shape_of_split(operands: Operands, attributes: Attributes) -> Dims | None:
    """Return the shape of the elements of a SplitToSequence."""
    shape = dims(operands[0])
    if shape is None:
        return None
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


def _shape_of_concatenated(operands: Operands, attributes: Attributes) -> Dims | None:
    """Return the shape of a ConcatFromSequence."""
    shape, new = dims(operands[0]), int(attributes.get("new_axis", 0))
    if shape is None:
        return None
    if not shape and not new:
        raise ModelError(
            "ConcatFromSequence of tensors without axes: set new_axis=1, or Unsqueeze the elements"
        )
    axis = int(attributes.get("axis", 0)) % (len(shape) + new)
    return (*shape[:axis], None, *shape[axis + 1 - new :])


def _content_type(operands: Operands, _attributes: Attributes) -> ir.TypeProtocol | None:
    return content(_first_type(operands))


def _same_type(operands: Operands, _attributes: Attributes) -> ir.TypeProtocol | None:
    return _first_type(operands)


declare_operators(
    "ConcatFromSequence SequenceAt SequenceConstruct SplitToSequence", "packs sequences"
)
declare_operators("SequenceLength", "shape int64")
declare_operators("SequenceEmpty", "shape sequences", result_type=_type_of_empty)
declare_operators("SequenceErase SequenceInsert Optional OptionalGetElement", "sequences")
declare_operators("SequenceConstruct SplitToSequence", result_type=_type_of_sequence)
declare_operators("SequenceAt ConcatFromSequence", result_type=_type_of_element)
declare_operators("SequenceErase SequenceInsert", result_type=_same_type)
declare_operators("Optional", result_type=_type_of_optional)
declare_operators("OptionalGetElement", result_type=_content_type)
declare_operators("Optional OptionalGetElement SequenceAt SequenceErase", shape=_shape_of_elements)
declare_operators("SequenceConstruct", shape=_shape_of_constructed)
declare_operators("SequenceInsert", shape=_shape_of_insert)
declare_operators("SplitToSequence", shape=_shape_of_split)
declare_operators("ConcatFromSequence", shape=_shape_of_concatenated)
declare_operators(
    "Identity",
    "elementwise view cheap reorders sequences",
    result_type=_same_type,
    shape=_shape_of_elements,
    elements=of_known(lambda node, x: x),
    axes=broadcast_axis,
)
