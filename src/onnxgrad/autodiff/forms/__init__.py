"""Cheaper forms of what rules, losses and optimizers write: rewrites that run after the sweep.

Rules write plainly, and do not look at what makes or reads a value. What is faster for one
combination of nodes is a rewrite of the group `GRADIENT`, which `finish` applies. The sizes from
which a form pays stand at the top of `correlation.py`.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxgrad.autodiff.forms import arithmetic, correlation, scatters, transposed
from onnxgrad.autodiff.forms.arithmetic import GRADIENT
from onnxgrad.graph.rewrite import GROUPS, rewrite
from onnxgrad.graph.tidy import drop_unused, tidy

__all__ = ["GRADIENT", "arithmetic", "correlation", "finish", "scatters", "transposed"]


def finish(model: ir.Model) -> None:
    """Remove, in place, what no output needs, and bring the rest into its cheapest form."""
    drop_unused(model.graph)
    rewrite(model.graph, GROUPS[GRADIENT])
    tidy(model)
