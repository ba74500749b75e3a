"""Operators that read or write at indices."""

from __future__ import annotations

from onnxgrad.autodiff.rules.registry import Refused, rule
from onnxgrad.autodiff.rules.shape import moved


@rule("GatherElements")
def gather_elements(op, node, g):
    """y = x[i] along an axis:  dx = zero but for g added at i."""
    return moved(op, node, g), None


@rule("GatherND")
def gather_nd(op, node, g):
    """y = x[i], i a list of places:  dx = zero but for g added at i."""
    return moved(op, node, g), None


@rule("ScatterElements")
def scatter_elements(op, node, g):
    """y = x with u added at i:  dx = g,  du = g[i];  u in place of x at i:  dx = 0 at i."""
    _, i, u = node.inputs
    axis = node.attributes.get_int("axis", 0)
    reduction = node.attributes.get_string("reduction", "none")
    if reduction not in ("none", "add"):
        return Refused(f"reduction={reduction!r} is not covered")
    du = op.GatherElements(g, i, axis=axis)
    return (
        g if reduction == "add" else op.ScatterElements(g, i, op.zeros_like(u), axis=axis),
        None,
        du,
    )


@rule("ScatterND")
def scatter_nd(op, node, g):
    """y = x with u added at i:  dx = g,  du = g[i];  u in place of x at i:  dx = 0 at i."""
    _, i, u = node.inputs
    reduction = node.attributes.get_string("reduction", "none")
    if reduction not in ("none", "add"):
        return Refused(f"reduction={reduction!r} is not covered")
    return (
        g if reduction == "add" else op.ScatterND(g, i, op.zeros_like(u)),
        None,
        op.GatherND(g, i),
    )
