"""Where lowerings are kept: from an operator to the function that rewrites it."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from onnxgrad.graph.emit import Emit

Lowering = Callable[[Emit, ir.Node], "list[ir.Value] | None"]
LOWERINGS: dict[tuple[str, str], Lowering] = {}
ON_DEMAND: dict[
    tuple[str, str], Lowering
] = {}  # where a gradient arrives only: they slow the forward


def lowering(
    op_type: str, domain: str = "", on_demand: bool = False
) -> Callable[[Lowering], Lowering]:
    """Register the function below as the lowering of an operator.

    It takes the emitter and the node, and returns the values that take the place of the node's
    outputs, or None to leave it as it is. With `on_demand`, `prepare` leaves the node to the sweep.
    """

    def register(function: Lowering) -> Lowering:
        (ON_DEMAND if on_demand else LOWERINGS)[domain, op_type] = function
        return function

    return register
