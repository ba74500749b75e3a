"""The registry of lowerings: tables from operators to the functions that rewrite them."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from onnxgrad.graph.emit import Emit

Lowering = Callable[[Emit, ir.Node], "list[ir.Value] | None"]
LOWERINGS: dict[tuple[str, str], Lowering] = {}
# applied by the sweep to nodes that have a cotangent only, as they slow down the forward pass
ON_DEMAND: dict[tuple[str, str], Lowering] = {}


def lowering(
    op_type: str, domain: str = "", on_demand: bool = False
) -> Callable[[Lowering], Lowering]:
    """Register the decorated function as the lowering of an operator of the package.

    `onnxgrad.lowering` is that of users.
    """

    def register(function: Lowering) -> Lowering:
        (ON_DEMAND if on_demand else LOWERINGS)[domain, op_type] = function
        return function

    return register
