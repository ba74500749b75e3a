"""Products of matrices in the form that onnxruntime's kernel computes fastest."""

from __future__ import annotations

import onnx_ir as ir

from onnxgrad.graph.rewrite import rewrites
from onnxgrad.graph.shapes import coefficient, dims
from onnxgrad.native.phases import NODES

# Rows and columns of aT b from which a transposed copy of a pays: the kernel transposes a anew for
# every 128 columns. Measured with 1 thread: 0.73-0.88 of the time of these products, 0.93-0.96 of a
# step of an MLP; no difference for encoders, whose products have fewer rows or columns.
LEAST_LENGTH = 512
_COPIED = 1 << 25  # bytes of a copy, at most
_PLAIN = {"transB": 0, "alpha": 1.0, "beta": 1.0}


@rewrites("Gemm", group=NODES)
def transposed_operand(op, node):
    """aT b, the gradient of a weight, reads a transposed copy of a.

    onnxruntime would fuse a Transpose of two axes back into the Gemm.
    """
    if not _is_wide(node) or _bytes(node.inputs[0], op.target.rows) > _COPIED:
        return None
    a, b = node.inputs
    rows = op.dim(a, 1)
    copy = op.Transpose(op.Reshape(a, [1, -1, rows]), perm=[0, 2, 1])
    return [op.Gemm(op.Reshape(copy, [rows, -1]), b)]


def _bytes(a: ir.Value | None, rows: int) -> int:
    """Return the bytes of a matrix of float32 whose first axis is, or multiplies, the rows."""
    first, columns = dims(a) or (1, 1)
    if not isinstance(first, int):
        first = rows * (1 if first is None else coefficient(first)[0])
    return 4 * first * (columns if isinstance(columns, int) else 1)


def _is_wide(node: ir.Node) -> bool:
    """Return whether `node` is the product aT b, in float32, with many rows and columns."""
    if len(node.inputs) != 2 or node.outputs[0].dtype != ir.DataType.FLOAT:
        return False
    attributes = _PLAIN | {name: a.value for name, a in node.attributes.items()}
    columns = [(dims(v) or (0, 0))[1] for v in node.inputs]
    many = all(isinstance(length, int) and length >= LEAST_LENGTH for length in columns)
    return many and attributes == _PLAIN | {"transA": 1}
