"""Gradients of embeddings on one thread: whole rows are added at once.

ScatterElements takes an index for each element, and 5 to 10 times as long as ScatterND, which takes
one for each row. On several threads ScatterND loses sums where an index occurs twice.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxgrad.graph.emit import Emit
from onnxgrad.graph.rewrite import rewrites
from onnxgrad.graph.shapes import dims, static
from onnxgrad.native.phases import NODES


@rewrites("ScatterElements", group=NODES)
def scattered_rows(op: Emit, node: ir.Node) -> list[ir.Value] | None:
    """ScatterND adds the rows that a ScatterElements adds along the first axis."""
    if op.target.threads != 1 or (rows := _rows(node)) is None:
        return None
    x, _, u = node.inputs
    rows = op.Cast(rows, to=ir.DataType.INT64)
    return [op.ScatterND(x, op.Reshape(rows, [-1, 1]), u, reduction="add")]


def _rows(node: ir.Node) -> ir.Value | None:
    """Return the indices of the rows if `node` adds whole rows in float32, else None."""
    x, indices, u = node.inputs
    reduction, axis = (
        node.attributes.get_string("reduction", "none"),
        node.attributes.get_int("axis", 0),
    )
    expand = None if indices is None else indices.producer()
    if reduction != "add" or axis != 0 or expand is None or expand.op_type != "Expand":
        return None
    rows = expand.inputs[0]
    index, row, update = dims(rows), dims(x), dims(u)
    if x is None or x.dtype != ir.DataType.FLOAT or index is None or row is None or update is None:
        return None
    width = static(row[1:])
    one_each = index[0] == update[0] is not None and index[1:] == (1,) * (len(index) - 1)
    whole = len(index) == len(row) == len(update) and width is not None and width == update[1:]
    return rows if one_each and whole else None
