"""Cheaper forms of the nodes of rules, losses and optimizers: rewrites that run after the sweep.

Rules write plainly, and do not look at producers or readers of a value. A faster form of one
combination of nodes is a rewrite of the group `GRADIENT`, which `finish` applies. The sizes from
which a form pays stand at the top of `convolutions.py`.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxgrad.autodiff.forms import arithmetic, convolutions, scatters
from onnxgrad.autodiff.forms.arithmetic import GRADIENT
from onnxgrad.graph.rewrite import GROUPS, rewrite
from onnxgrad.graph.tidy import drop_unused, tidy

__all__ = ["GRADIENT", "arithmetic", "convolutions", "finish", "scatters"]


def finish(model: ir.Model) -> None:
    """Remove the nodes that no output needs, and rewrite the other nodes in cheaper forms, in
    place.
    """
    drop_unused(model.graph)
    rewrite(model.graph, GROUPS[GRADIENT])
    tidy(model)
