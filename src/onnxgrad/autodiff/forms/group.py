"""The group of rewrites that run after the sweep, and what several of them ask."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnxgrad.operators import made_by

GRADIENT = "gradient"


def is_own(op: Any, v: ir.Value, op_type: str) -> bool:
    """Return whether a node of a standard operator computes `v`, and the package wrote it."""
    node = made_by(v, op_type)
    return node is not None and op.is_own(node)


def read_once(v: ir.Value) -> bool:
    """Return whether exactly one node reads `v`, and it is no output of its graph."""
    return len(list(v.uses())) == 1 and not v.is_graph_output()


def is_zero(op: Any, v: ir.Value | None) -> bool:
    """Return whether `v` are zeros, expanded to a shape."""
    node = made_by(v, "Expand")
    return node is not None and op.is_all(node.inputs[0], 0)
