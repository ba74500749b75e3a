"""Types of outputs for which the schema of the operator allows only one."""

from __future__ import annotations

import onnx_ir as ir
from onnx import defs

_DTYPES = {
    "tensor(float)": ir.DataType.FLOAT,
    "tensor(int64)": ir.DataType.INT64,
    "tensor(string)": ir.DataType.STRING,
}


def complete_types(node: ir.Node) -> bool:
    """Set the types that onnx did not infer, in place; return whether there was one.

    onnx does not infer those of several operators of `ai.onnx.ml`, and of none that reads the
    result of an operator of another domain.
    """
    if all(y.type is not None for y in node.outputs) or not defs.has(node.op_type, node.domain):
        return False
    changed = False
    outputs = defs.get_schema(node.op_type, domain=node.domain).outputs
    for y, formal in zip(node.outputs, outputs, strict=False):
        allowed = {_DTYPES.get(name) for name in formal.types}
        dtype = allowed.pop() if len(allowed) == 1 else None
        if y.type is None and dtype is not None:
            y.type, changed = ir.TensorType(dtype), True
    return changed
