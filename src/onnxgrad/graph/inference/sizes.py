"""Sizes that exporters compute at run time though they follow from the shapes that are inferred."""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.emit import Emit
from onnxgrad.graph.inference.by_onnx import infer_node
from onnxgrad.graph.output_shapes import output_shape
from onnxgrad.graph.shapes import (
    Dim,
    broadcast,
    coefficient,
    constant,
    dims,
    is_stated,
    static,
)
from onnxgrad.graph.traversal import conditional_nodes, subgraphs

_MOST = 1024  # elements of a vector that is written as a constant
_INTEGERS = (ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL)
_BY_ONNX = frozenset(("Gather", "Slice", "Split", "Expand", "Flatten", "Tile"))

Elements = np.ndarray  # of objects: int, bool, a symbolic dimension, or None if unknown


def fold_sizes(graph: ir.Graph) -> None:
    """Write what is computed from static lengths as constants, and complete shapes on the way.

    An exporter writes `view(x.shape[0], 64, 8, 32)` as a chain of Shape, Gather, Unsqueeze and
    Concat. Its result becomes a constant, in which 0 or -1 stands for the symbolic dimension, if it
    is proven that onnxruntime infers the same one. In subgraphs, only conditions of an If become
    constants. The nodes that are no longer needed stay in the graph.
    """
    _fold(Emit(graph), {}, conditional_nodes(graph))


def _fold(op: Emit, elements: dict[ir.Value, Elements], conditional: Container[ir.Node]) -> None:
    """Fold the sizes of the graph of `op`; the constants are not read by nodes in `conditional`.

    Where such a node cannot run, because the condition excludes it, onnxruntime may refuse it.
    """
    for node in list(op.graph):
        for body in subgraphs(node):
            _fold(Emit(body, outer=op), elements, conditional)
        if node.domain:
            continue
        if op.outer is None:
            _complete(node, op.opset)
        result = _evaluated(node, elements)
        if result is not None:
            elements[node.outputs[0]] = result
            _replace(op, node.outputs[0], result, conditional)
        elif op.outer is None and node.op_type in ("Expand", "Reshape", "Range"):
            _shaped(node, elements)
            if node.op_type == "Reshape":
                _fold_target(op, node, elements)


def _complete(node: ir.Node, opset: int) -> None:
    """Set the dimensions of outputs that are unknown, or symbols that onnx generated."""
    if all((shape := dims(y)) is not None and all(map(_is_known, shape)) for y in node.outputs):
        return
    if node.op_type in _BY_ONNX:
        before = [dims(y) for y in node.outputs]
        for y in node.outputs:
            y.shape = None
        infer_node(node, opset)
        for y, shape in zip(node.outputs, before, strict=True):
            y.shape = _merged(dims(y), shape)
        return
    attributes = {a.name: a.value for a in node.attributes.values()}
    y = node.outputs[0]
    y.shape = _merged(output_shape(node.op_type, node.inputs, attributes), dims(y))


def _is_known(d: Dim) -> bool:
    """Return whether `d` is a length, or a multiple of a symbol that onnx did not generate."""
    return is_stated(coefficient(d)[1] if isinstance(d, str) else d)


def _merged(new: Any, old: Any) -> ir.Shape | None:
    if new is None or old is None or len(new) != len(old):
        chosen = old if new is None else new
        return None if chosen is None else ir.Shape(chosen)
    return ir.Shape([o if n is None or _is_known(o) else n for n, o in zip(new, old, strict=True)])


def _replace(op: Emit, y: ir.Value, elements: Elements, conditional: Container[ir.Node]) -> None:
    """Let what reads `y` read a constant, if all elements are numbers."""
    if y.dtype not in _INTEGERS or not all(isinstance(e, int) for e in elements.flat):
        return
    assert y.dtype is not None
    for node, i in list(y.uses()):
        if node.op_type == "If" or (op.outer is None and node not in conditional):
            node.replace_input_with(i, op.const(elements.astype(y.dtype.numpy())))


def _shaped(node: ir.Node, elements: Mapping[ir.Value, Elements]) -> None:
    """Complete the shape of an Expand, Reshape or Range from 0, by the elements of its operand."""
    x, target = node.inputs[:2]
    wanted = None if target is None else elements.get(target)
    if node.op_type == "Range":
        known = [constant(v) for v in (x, node.inputs[2])]
        counts = [None if v is None else v.tolist() for v in known] == [0, 1]
        wanted = wanted.reshape(1) if counts and wanted is not None else None
    if wanted is None or any(d is None or (isinstance(d, int) and d < 1) for d in wanted):
        return
    shape = broadcast(dims(x), tuple(wanted)) if node.op_type == "Expand" else tuple(wanted)
    node.outputs[0].shape = _merged(dims(node.outputs[0]), shape)


def _fold_target(op: Emit, node: ir.Node, elements: Mapping[ir.Value, Elements]) -> None:
    """Write the shape of a Reshape as a constant, if its symbolic dimensions can be inferred."""
    x, target = node.inputs[:2]
    wanted, shape = None if target is None else elements.get(target), dims(x)
    if wanted is None or shape is None or None in wanted or static(tuple(wanted)) is not None:
        return
    if node.attributes.get_int("allowzero", 0) or 0 in wanted:
        return
    numbers = [
        d if isinstance(d, int) else 0 if i < len(shape) and shape[i] == d else -1
        for i, d in enumerate(wanted)
    ]
    if numbers.count(-1) > 1:
        return
    result = output_shape("Reshape", [x, op.const(numbers)], {})
    if result is not None and all(w in (-1, d) for w, d in zip(wanted, result, strict=True)):
        node.replace_input_with(1, op.const(numbers))
        node.outputs[0].shape = ir.Shape(result)


# -- elements of short vectors -------------------------------------------------------------------


def _evaluated(node: ir.Node, elements: Mapping[ir.Value, Elements]) -> Elements | None:
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


def _elements(x: ir.Value, elements: Mapping[ir.Value, Elements]) -> Elements | None:
    if x in elements:
        return elements[x]
    tensor = x.const_value
    if tensor is None or tensor.dtype not in _INTEGERS or tensor.size > _MOST:
        return None
    array = constant(x)
    return None if array is None or array.ndim > 1 else array.astype(object)


def _shape(node: ir.Node) -> Elements | None:
    shape = dims(node.inputs[0])
    if shape is None:
        return None
    start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", None)
    return _vector(d if _is_known(d) else None for d in shape[start:end])


def _size(node: ir.Node) -> Elements | None:
    shape = dims(node.inputs[0])
    return None if shape is None else _product(shape)


def _vector(items: Iterable[Any]) -> Elements:
    listed = list(items)
    result = np.empty(len(listed), object)
    result[:] = listed
    return result


def _scalar(item: Any) -> Elements:
    result = np.empty((), object)
    result[()] = item
    return result


def _product(shape: Iterable[Dim]) -> Elements:
    result: Dim = 1
    for d in shape:
        result = _times(result, d)
    return _scalar(result)


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
    def evaluated(node: ir.Node, *operands: Elements) -> Elements:
        arrays = np.broadcast_arrays(*operands)
        results = [function(*items) for items in zip(*(a.flat for a in arrays), strict=True)]
        return _vector(results).reshape(arrays[0].shape)

    return evaluated


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
    return _vector(picked).reshape(i.shape)


def _slice(node: ir.Node, x: Elements, *bounds: Elements | None) -> Elements | None:
    if x.ndim != 1 or any(b is not None and not isinstance(b[0], int) for b in bounds):
        return None
    start, end, _, step = (*(None if b is None else int(b[0]) for b in bounds), None, None)[:4]
    return x[slice(start, end, step)]


def _cast(node: ir.Node, x: Elements, like: Elements | None = None) -> Elements | None:
    if node.outputs[0].dtype == ir.DataType.BOOL:
        return _numbers(bool)(node, x)
    return x if node.outputs[0].dtype in _INTEGERS else None


def _reshape(node: ir.Node, x: Elements, shape: Elements) -> Elements:
    return x.reshape([int(n) for n in shape])


def _squeeze(node: ir.Node, x: Elements, axes: Elements | None = None) -> Elements:
    return x.reshape(()) if x.size == 1 else x


def _unsqueeze(node: ir.Node, x: Elements, axes: Elements) -> Elements | None:
    return x.reshape(1) if x.ndim == 0 and len(axes) == 1 else None


def _filled(node: ir.Node, shape: Elements) -> Elements | None:
    value = node.attributes.get_tensor("value", None)
    if value is None or value.dtype not in _INTEGERS or shape.shape != (1,) or shape[0] > _MOST:
        return None
    return _vector(value.numpy().tolist() * shape[0])


def _range(node: ir.Node, start: Elements, end: Elements, step: Elements) -> Elements | None:
    numbers = range(*(int(v.item()) for v in (start, end, step)))
    return _vector(numbers) if len(numbers) <= _MOST else None


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
    "Reshape": _reshape,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
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
