"""Results that would be too large: refused before anything computes their shapes or elements."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import onnx_ir as ir

from onnxgrad.graph.operators import ELEMENTWISE
from onnxgrad.graph.shapes import dims, static
from onnxgrad.limits import check_limit, limit


def check_ranks(nodes: Iterable[ir.Node]) -> None:
    """Raise for a chain of Unsqueezes that adds more axes than tensors may have.

    Raises:
        ModelError: naming the result.
    """
    axes: dict[ir.Value, int] = {}
    for node in nodes:
        added = node.op_type == "Unsqueeze"
        if node.domain or not (added or node.op_type in ELEMENTWISE):
            continue
        n = max((axes.get(x, 0) for x in node.inputs if x is not None), default=0) + added
        if n:
            axes[node.outputs[0]] = n
        check_limit("rank", n, f"result {node.outputs[0].name!r} has too many axes")


def check_constants(nodes: Iterable[ir.Node]) -> None:
    """Raise for a result that the runtime would compute from smaller constants when it loads.

    Raises:
        ModelError: naming the node.
    """
    sizes: dict[ir.Value, int] = {}  # of constants
    for node in nodes:
        inputs = [x for x in node.inputs if x is not None]
        read = [sizes.get(x) if x in sizes else _size_of_constant(x) for x in inputs]
        known = [n for n in read if n is not None]
        if not inputs or len(known) < len(read):
            continue
        for y in node.outputs:
            shape = static(dims(y))
            if shape is None:
                continue
            sizes[y] = prod(shape)
            if sizes[y] > max(limit("constant_elements"), sum(known)):
                what = f"{node.op_type} (node {node.name!r}, output {y.name!r})"
                check_limit("constant_elements", sizes[y], f"{what} computes a large constant")


def _size_of_constant(x: ir.Value) -> int | None:
    if x.const_value is None or x.is_graph_input():
        return None
    return x.const_value.size
