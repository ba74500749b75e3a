"""The elements of short vectors of lengths, from which shapes are computed."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.output_shapes import reshaped
from onnxgrad.graph.shapes import Dim, Dims, broadcast, coefficient, dims, static

INTEGERS = (ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL)
_MOST = 1024  # elements of a vector

Elements = np.ndarray  # of objects: int, bool, a symbolic dimension, or None if unknown


def evaluated(node: ir.Node, elements: Mapping[ir.Value, Elements]) -> Elements | None:
    """Return the elements of the result, of rank 0 or 1; None if none can be told."""
    if len(node.outputs) != 1 or (function := _EVALUATED.get(node.op_type)) is None:
        return None
    if node.op_type in ("Shape", "Size"):
        return function(node)
    operands = [None if x is None else _elements(x, elements) for x in node.inputs]
    if any(v is None and x is not None for v, x in zip(operands, node.inputs, strict=True)):
        return None
    try:
        result = function(node, *operands)
    except (IndexError, ValueError, TypeError, ZeroDivisionError):  # the node would fail as well
        return None
    if result is None or result.ndim > 1 or result.size > _MOST:
        return None
    bits = 32 if node.outputs[0].dtype == ir.DataType.INT32 else 64
    limit = 1 << (bits - 1)
    beyond = any(isinstance(e, int) and not -limit <= e < limit for e in result.flat)
    return None if beyond or (result.size and all(e is None for e in result.flat)) else result


def shape_by_elements(node: ir.Node, elements: Mapping[ir.Value, Elements]) -> Dims | None:
    """Return the shape of the result, if the elements of an operand are its lengths."""
    at = {"ConstantOfShape": 0, "Expand": 1, "Reshape": 1, "Range": 1}.get(node.op_type)
    target = None if at is None else node.inputs[at]
    found = None if target is None else _elements(target, elements)
    if found is None:
        return None
    first, wanted = dims(node.inputs[0]), tuple(found.flat)
    if node.op_type == "Reshape":
        return reshaped(first, wanted, {a.name: a.value for a in node.attributes.values()})
    if node.op_type == "Range":
        known = [_elements(x, elements) for x in (node.inputs[0], node.inputs[2]) if x is not None]
        if [None if v is None else v.tolist() for v in known] != [0, 1]:
            return None
    if any(isinstance(d, int) and d < 0 for d in wanted):
        return None
    return broadcast(first, wanted) if node.op_type == "Expand" else wanted


def _elements(x: ir.Value, elements: Mapping[ir.Value, Elements]) -> Elements | None:
    """Return the elements of an operand; each is unknown where only their number is known."""
    if x in elements:
        return elements[x]
    if x.dtype not in INTEGERS:
        return None
    tensor = None if x.is_graph_input() else ir.convenience.get_const_tensor(x)
    shape = static(dims(x)) if tensor is None else tensor.shape.numpy()
    if shape is None or len(shape) > 1 or prod(shape) > _MOST:
        return None
    return np.full(shape, None) if tensor is None else tensor.numpy().astype(object)


def _shape(node: ir.Node) -> Elements | None:
    shape = dims(node.inputs[0])
    if shape is None:
        return None
    start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", None)
    return np.array(shape[start:end], object)


def _size(node: ir.Node) -> Elements | None:
    shape = dims(node.inputs[0])
    return None if shape is None else _product(shape)


def _product(shape: Iterable[Dim]) -> Elements:
    result: Dim = 1
    for d in shape:
        result = _times(result, d)
    return np.array(result, object)


def _times(a: Dim, b: Dim) -> Dim:
    """Return the product of two lengths: `"8*N"` of 8 and `"N"`."""
    if isinstance(a, int) and isinstance(b, int):
        return a * b
    if isinstance(a, int) and isinstance(b, str):
        a, b = b, a
    if not isinstance(a, str) or not isinstance(b, int) or b < 1:
        return None
    times, symbol = coefficient(a)
    return a if b == 1 else f"{b * times}*{symbol}"


def _numbers(function: Callable[..., Any]) -> Callable[..., Elements]:
    """Return an elementwise function of numbers: None where an operand is no number."""

    def one(*operands: Any) -> Any:
        return function(*operands) if all(isinstance(v, int) for v in operands) else None

    return _each(one)


def _each(function: Callable[..., Any]) -> Callable[..., Elements]:
    """Return an elementwise function of operands that broadcast."""
    vectorized = np.vectorize(function, [object])
    return lambda node, *operands: vectorized(*operands)


def _divided(a: int, b: int) -> int | None:
    return None if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _equal(a: Any, b: Any) -> bool | None:
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    lengths = [v for v in (a, b) if isinstance(v, str)]
    negative = any(isinstance(v, int) and v < 0 for v in (a, b))
    return False if lengths and negative else None  # no length is negative


def _gather(node: ir.Node, x: Elements, i: Elements) -> Elements | None:
    if x.ndim != 1 or not all(isinstance(e, int) for e in i.flat):
        return None
    picked = [x[int(e)] for e in i.flat]
    return np.array(picked, object).reshape(i.shape)


def _slice(node: ir.Node, x: Elements, *bounds: Elements | None) -> Elements | None:
    if x.ndim != 1 or any(b is not None and not isinstance(b[0], int) for b in bounds):
        return None
    start, end, _, step = (*(None if b is None else int(b[0]) for b in bounds), None, None)[:4]
    return x[slice(start, end, step)]


def _cast(node: ir.Node, x: Elements, like: Elements | None = None) -> Elements | None:
    if node.outputs[0].dtype == ir.DataType.BOOL:
        return _numbers(bool)(node, x)
    return x if node.outputs[0].dtype in INTEGERS else None


def _view(node: ir.Node, x: Elements, *_: Elements | None) -> Elements | None:
    shape = static(dims(node.outputs[0]))
    return None if shape is None else x.reshape(shape)


def _filled(node: ir.Node, shape: Elements) -> Elements | None:
    value = node.attributes.get_tensor("value", None)
    if value is None or value.dtype not in INTEGERS or shape.shape != (1,) or shape[0] > _MOST:
        return None
    return np.array(value.numpy().tolist() * shape[0], object)


def _range(node: ir.Node, start: Elements, end: Elements, step: Elements) -> Elements | None:
    numbers = range(*(int(v.item()) for v in (start, end, step)))
    return np.array(numbers, object) if len(numbers) <= _MOST else None


def _reduce_prod(node: ir.Node, x: Elements, axes: Elements | None = None) -> Elements:
    if node.attributes.get_int("noop_with_empty_axes", 0) and (axes is None or not axes.size):
        return x
    result = _product(x.flat)
    return result.reshape(1) if node.attributes.get_int("keepdims", 1) and x.ndim else result


_EVALUATED: dict[str, Callable[..., Elements | None]] = {
    "Shape": _shape,
    "Size": _size,
    "Identity": lambda node, x: x,
    "Cast": _cast,
    "Gather": _gather,
    "Slice": _slice,
    "Concat": lambda node, *parts: np.concatenate(parts),
    **dict.fromkeys(("Reshape", "Squeeze", "Unsqueeze"), _view),
    "ConstantOfShape": _filled,
    "Range": _range,
    "ReduceProd": _reduce_prod,
    "Add": _numbers(lambda a, b: a + b),
    "Sub": _numbers(lambda a, b: a - b),
    "Mul": _each(_times),
    "Div": _numbers(_divided),
    "Mod": _numbers(lambda a, b: None if b == 0 or a < 0 or b < 0 else a % b),
    "CastLike": _cast,
    "Equal": _each(_equal),
    "Greater": _numbers(operator.gt),
    "GreaterOrEqual": _numbers(operator.ge),
    "Less": _numbers(operator.lt),
    "LessOrEqual": _numbers(operator.le),
    "And": _numbers(lambda a, b: bool(a and b)),
    "Or": _numbers(lambda a, b: bool(a or b)),
    "Not": _numbers(operator.not_),
    "Where": _each(lambda c, a, b: None if c is None else a if c else b),
}
