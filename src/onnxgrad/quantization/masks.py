"""Find values that hold attention masks and must stay float: no scale fits mask and scores."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto

from onnxgrad.model import external
from onnxgrad.operators import REORDERS, SELECTS, names_with_trait, operator_of

Range = tuple[float, float]

_LARGEST = 1e6  # the largest absolute value of an activation
_WIDEST = 64  # range of scores: by steps of 8 bits, a Softmax changes by a factor of exp(1/8)
_SUMS = names_with_trait("sums") | REORDERS | SELECTS
_SCALES = {"Mul", "Div"}
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16)


def mask_values(graph: GraphProto, ranges: Mapping[str, Range]) -> set[str]:
    """Return the values that hold masks; nodes that read or write these values stay float.

    1. Values that are not finite, or beyond 1e6.
    2. Scores, values of which a Softmax reads sums, that range over more than 64. Results of a
       product are no sums yet, and are quantized.
    3. Scores that are computed from values of 1 or 2: rows without a masked position have narrow
       ranges.

    Args:
        graph: a model of floats.
        ranges: least and greatest element of each value.
    """
    ends = {**ranges, **_constant_ranges(graph)}
    makers = {name: node for node in graph.node for name in node.output}
    scores = _values_before_softmax(graph, makers)
    found = {
        name for name, (low, high) in ends.items() if not max(-low, high) <= _LARGEST
    }  # or NaN
    for name in scores & ends.keys():
        low, high = ends[name]
        made = name in makers and "quantizable" in operator_of(makers[name]).traits
        if not made and max(high, 0) - min(low, 0) > _WIDEST:  # 0 is an integer of each scale
            found.add(name)
    for node in graph.node:
        summed = node.op_type in _SUMS | _SCALES and not found.isdisjoint(node.input)
        if summed and not scores.isdisjoint(node.output):
            found.update(node.output)
    return found


def _constant_ranges(graph: GraphProto) -> dict[str, Range]:
    """Return the (low, high) ranges of the constants that Add, Mul and similar nodes read."""
    readers = [node for node in graph.node if node.op_type in _SUMS | _SCALES]
    read = {name for node in readers for name in node.input}
    stored = {t.name: t for t in graph.initializer if t.name in read and t.data_type in _FLOATS}
    arrays = {name: external.tensor_to_array(tensor) for name, tensor in stored.items()}
    return {n: (float(np.min(a)), float(np.max(a))) for n, a in arrays.items() if a.size}


def _values_before_softmax(graph: GraphProto, makers: Mapping[str, NodeProto]) -> set[str]:
    """Return the values that reach a Softmax through sums, scalings, moves and selections."""
    pending = [x for node in graph.node if node.op_type == "Softmax" for x in node.input]
    found: set[str] = set()
    while pending:
        name = pending.pop()
        if name not in found and name in makers and makers[name].op_type in _SUMS | _SCALES:
            pending.extend(makers[name].input)
        found.add(name)
    return found
