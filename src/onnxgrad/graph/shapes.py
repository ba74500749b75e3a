"""Shapes as tuples: an int is known, a string is a symbol, None is unknown.

Two dimensions are proven equal when they are the same int or the same symbol; two unknown
ones never are.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

Dim = int | str | None
Dims = tuple[Dim, ...]

_ELEMENTWISE = frozenset(
    "Abs Add And Cast Ceil Cos Cosh Div Equal Erf Exp Floor Gelu Greater GreaterOrEqual Identity "
    "IsInf IsNaN Less LessOrEqual Log LogSoftmax Max Min Mul Neg Not Or Pow Reciprocal Relu "
    "Sigmoid Sign Sin Sinh Softmax Softplus Sqrt Sub Sum Tan Tanh Where".split()
)
_LIKE_FIRST = frozenset(
    "BatchNormalization Celu Clip Dropout Elu HardSigmoid HardSwish InstanceNormalization "
    "LayerNormalization LeakyRelu PRelu Selu Shrink Softsign ThresholdedRelu".split()
)

# Exporters write these for "I do not know": the same text twice does not mean the same size.
_PLACEHOLDERS = {"", "?", "-1", "None", "none", "unk", "unknown"}


def dims(value: ir.Value | None) -> Dims | None:
    """Return the dimensions of `value`, or None when even its rank is unknown."""
    if value is None or value.shape is None:
        return None
    return tuple(d if isinstance(d, int) else d.value for d in value.shape)


def rank(value: ir.Value | None) -> int | None:
    """Return the number of axes of `value`, or None when it is unknown."""
    return None if value is None or value.shape is None else len(value.shape)


def static(shape: Dims | None) -> tuple[int, ...] | None:
    """Return `shape` when every dimension is an int, else None."""
    if shape is None:
        return None
    known = tuple(d for d in shape if isinstance(d, int))
    return known if len(known) == len(shape) else None


def equal(a: Dims | None, b: Dims | None) -> bool:
    """Tell whether `a` and `b` are proven to be the same shape."""
    return a is not None and a == b and None not in a


def broadcast(*shapes: Dims | None) -> Dims | None:
    """Return the shape of an elementwise result; a dimension that cannot be told is None."""
    known = [s for s in shapes if s is not None]
    if len(known) != len(shapes):
        return None
    if len(set(known)) == 1 and None not in known[0]:
        return known[0]
    width = max(map(len, known), default=0)
    padded = [(1,) * (width - len(s)) + s for s in known]
    return tuple(_broadcast_dim(column) for column in zip(*padded, strict=True))


def _broadcast_dim(column: Sequence[Dim]) -> Dim:
    others = {d for d in column if d != 1}
    if not others:
        return 1
    sizes = [d for d in others if isinstance(d, int)]
    if sizes:  # a symbol beside a size above one is that size, or one
        return sizes[0]
    return others.pop() if len(others) == 1 else None


def constant(v: ir.Value | None) -> np.ndarray | None:
    """Return the array that `v` always holds, or None when it is known only at run time."""
    if v is None or v.const_value is None or v.is_graph_input():
        return None
    return v.const_value.numpy()


def output_shape(op_type: str, inputs: Sequence, attributes: Mapping[str, Any]) -> Dims | None:
    """Return the shape of the first output of a node, as far as it follows from symbols.

    Knows the operators that onnx's own inference gives up on, or that gradients consist of.
    """
    known = [None if v is None else dims(v) for v in inputs]
    if op_type in _ELEMENTWISE:
        return broadcast(*(k for v, k in zip(inputs, known, strict=True) if v is not None))
    first = known[0] if known else None
    if first is None:
        return None
    if op_type in _LIKE_FIRST:
        return first
    if op_type == "MatMul":
        second = known[1]
        if second is None or len(first) < 2 or len(second) < 2:
            return None
        batch = broadcast(first[:-2], second[:-2])
        return None if batch is None else (*batch, first[-2], second[-1])
    if op_type == "Transpose":
        return tuple(first[i] for i in attributes.get("perm", range(len(first))[::-1]))
    if op_type == "Gemm":
        a, b = first, known[1]
        if b is None or len(a) != 2 or len(b) != 2:
            return None
        return a[1 if attributes.get("transA") else 0], b[0 if attributes.get("transB") else 1]
    if op_type in ("Unsqueeze", "Squeeze") or op_type.startswith("Reduce"):
        return _with_axes(op_type, first, inputs, attributes)
    if op_type == "Reshape":
        target = constant(inputs[1])
        return None if target is None else _reshaped(first, target.tolist(), attributes)
    return None


def _with_axes(
    op_type: str, shape: Dims, inputs: Sequence, attributes: Mapping[str, Any]
) -> Dims | None:
    """Return the shape after axes were added, taken away or reduced, when they are known now."""
    given = inputs[1] if len(inputs) > 1 else None
    axes = constant(given)
    if axes is None or axes.size == 0:
        return None
    n = len(shape) + (axes.size if op_type == "Unsqueeze" else 0)
    named = {int(a) % n for a in axes}
    if op_type == "Unsqueeze":
        old = iter(shape)
        return tuple(1 if i in named else next(old) for i in range(n))
    if op_type != "Squeeze" and attributes.get("keepdims", 1):
        return tuple(1 if i in named else d for i, d in enumerate(shape))
    return tuple(d for i, d in enumerate(shape) if i not in named)


def _reshaped(shape: Dims, target: list[int], attributes: Mapping[str, Any]) -> Dims:
    """Return the shape after a Reshape; an axis of length -1 may be found to be a symbol."""
    made: list[Dim] = list(target)
    if not attributes.get("allowzero"):
        made = [shape[i] if d == 0 else d for i, d in enumerate(made)]
    if -1 not in made:
        return tuple(made)
    given, wanted = list(shape), [d for d in made if d != -1]
    for d in list(wanted):
        if d is not None and d in given:
            given.remove(d)
            wanted.remove(d)
    sizes = [d for d in given if isinstance(d, int)]
    symbols = [d for d in given if not isinstance(d, int)]
    rest: Dim = None
    if all(isinstance(d, int) and d > 0 for d in wanted):
        factor, remainder = divmod(prod(sizes), prod(wanted))  # type: ignore[arg-type]
        if remainder == 0 and not symbols:
            rest = factor
        elif remainder == 0 and len(symbols) == 1 and symbols[0] is not None:
            rest = symbols[0] if factor == 1 else f"{factor}*{symbols[0]}"
    return tuple(rest if d == -1 else d for d in made)


def infer(model: ir.Model) -> None:
    """Fill in types and shapes of `model` in place, after giving each unnamed input axis a symbol.

    The symbols are unique to their axis, so nothing is assumed that the model does not state.
    """
    declared = {y: dims(y) for y in model.graph.outputs if y.producer() is not None}
    for y in declared:  # exporters write wrong ones, or symbols that hide what they equal
        y.shape = None
    _name_axes(model.graph)
    _infer_with_onnx(model)
    if _refine(model.graph):
        _infer_with_onnx(model)
        _refine(model.graph)
    for y, shape in declared.items():
        _complete(y, shape)


def name_rows(graph: ir.Graph, symbol: str) -> None:
    """Give the first axis of all inputs one symbol, where its length is not fixed."""
    firsts = {shape[0] for x in graph.inputs if (shape := dims(x))}
    rows = {d for d in firsts if isinstance(d, str) and d not in _PLACEHOLDERS}
    for value in _values(graph):
        shape = dims(value)
        if shape and not rows.isdisjoint(shape):
            value.shape = ir.Shape([symbol if d in rows else d for d in shape])
    for x in graph.inputs:
        shape = dims(x)
        if shape and not isinstance(shape[0], int):
            x.shape = ir.Shape([symbol, *shape[1:]])


def _name_axes(graph: ir.Graph) -> None:
    taken = {d for v in _values(graph) for d in dims(v) or () if isinstance(d, str)}
    fresh = (f"dim_{i}" for i in count() if f"dim_{i}" not in taken)
    inputs = set(graph.inputs)
    for value in _values(graph):
        shape = dims(value)
        if static(shape) is not None or shape is None:
            continue
        named = [None if d in _PLACEHOLDERS else d for d in shape]
        if value in inputs:
            named = [next(fresh) if d is None else d for d in named]
        value.shape = ir.Shape(named)


def _complete(value: ir.Value, declared: Dims | None) -> None:
    """Fill in from its declaration what could not be inferred of the shape of `value`."""
    shape = dims(value)
    if declared is not None and (shape is None or len(shape) == len(declared)):
        known = shape or (None,) * len(declared)
        named = [None if d in _PLACEHOLDERS else d for d in declared]
        value.shape = ir.Shape([k if _stated(k) else d for k, d in zip(known, named, strict=True)])


def _infer_with_onnx(model: ir.Model) -> None:
    log = logging.getLogger("onnx_ir.passes.common.shape_inference")
    previous, log.level = log.level, logging.CRITICAL  # where it fails, run-time forms are used
    try:
        ShapeInferencePass(check_type=False, strict_mode=False)(model)
    finally:
        log.setLevel(previous)


def _refine(graph: ir.Graph) -> bool:
    """Replace symbols that onnx made up by those they are proven equal to; tell whether any was."""
    found = False
    for node in graph:
        shape = dims(node.outputs[0])
        if node.domain or (shape is not None and all(_stated(d) for d in shape)):
            continue
        attributes = {a.name: a.value for a in node.attributes.values()}
        better = output_shape(node.op_type, node.inputs, attributes)
        if better is not None and len(shape or better) == len(better):
            known = shape or (None,) * len(better)
            pairs = zip(known, better, strict=True)
            merged = [d if b is None or _stated(d) else b for d, b in pairs]
            found |= tuple(merged) != shape
            node.outputs[0].shape = ir.Shape(merged)
    return found


def _stated(d: Dim) -> bool:
    return isinstance(d, int) or (d is not None and not d.startswith("unk__"))


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    for node in graph:
        yield from node.outputs
