"""What is removed before a model is handed out."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass


def tidy(model: ir.Model) -> None:
    """Remove, in place, the nodes and constants that no output needs."""
    RemoveUnusedNodesPass()(model)
