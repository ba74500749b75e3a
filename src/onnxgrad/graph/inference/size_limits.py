"""Errors for results that would be too large, before their elements are computed."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import onnx_ir as ir

from onnxgrad.graph.shapes import dims, static
from onnxgrad.limits import check_limit, limit


def check_constants(nodes: Iterable[ir.Node]) -> None:
    """Raise an error if nodes compute a large result from smaller constants alone.

    onnxruntime would compute it when it loads the model.

    Raises:
        ModelError: it names the node.
    """
    sizes: dict[ir.Value, int] = {}  # element counts of computed constants
    for node in nodes:
        inputs = [x for x in node.inputs if x is not None]
        counts = [sizes.get(x) if x in sizes else _size_of_constant(x) for x in inputs]
        constants = [n for n in counts if n is not None]
        if not inputs or len(constants) < len(counts):
            continue
        for y in node.outputs:
            shape = static(dims(y))
            if shape is None:
                continue
            sizes[y] = prod(shape)
            if sizes[y] > max(limit("constant_elements"), sum(constants)):
                what = f"{node.op_type} (node {node.name!r}, output {y.name!r})"
                check_limit("constant_elements", sizes[y], f"{what} computes a large constant")


def _size_of_constant(x: ir.Value) -> int | None:
    if x.const_value is None or x.is_graph_input():
        return None
    return x.const_value.size
