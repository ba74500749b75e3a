"""A check that a score depends differentiably on the values to which it is attributed."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxgrad.autodiff.derivative import path_ends, smooth_values
from onnxgrad.graph.traversal import dependents


def require_differentiable(graph: ir.Graph, wrt: Sequence[ir.Value], y: ir.Value) -> None:
    """Raise unless `y` depends differentiably on every value of `wrt`, and say what ends paths."""
    for x in wrt:
        if y in smooth_values(graph, [x]):
            continue
        if y not in dependents(graph, [x]):
            raise ValueError(
                f"{y.name!r} does not depend on {x.name!r}: its attributions would all be zero; "
                f"leave {x.name!r} out of `wrt`"
            )
        raise ValueError(
            f"no differentiable path from {x.name!r} to {y.name!r}: every attribution would be "
            f"zero. {path_ends(graph, [x], [y])}. Name as `output` a value in "
            "front of it, as the scores before an ArgMax, or use `occlusion`, which needs no "
            "gradient"
        )
