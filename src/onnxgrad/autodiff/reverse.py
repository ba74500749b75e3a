"""The sweep: from gradients of some values to gradients of the values they depend on."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping

import onnx_ir as ir

from onnxgrad.autodiff.primal.lowerings.microsoft import remedy
from onnxgrad.autodiff.quantized import refuse_quantized
from onnxgrad.autodiff.rules import (
    NON_DIFFERENTIABLE,
    RULES,
    SUBGRAPH_RULES,
    Unsupported,
    taken_gradients,
)
from onnxgrad.errors import NoGradientRule, printable
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.traversal import reads
from onnxgrad.reporting import logger


def sweep(
    op: Emit,
    seeds: Mapping[ir.Value, ir.Value],
    wrt: Iterable[ir.Value],
    stops: Collection[ir.Value] = (),
    shortcuts: Mapping[ir.Value, ir.Value] | None = None,
    nodes: Iterable[ir.Node] | None = None,
) -> dict[ir.Value, ir.Value]:
    """Write the gradient of the seeded values, and return it for those of `wrt` that it reaches.

    `seeds` gives for some values the gradient that arrives there, of the same shape. No gradient
    goes back through `stops`; what arrives at a key of `shortcuts` goes to its value as it is. What
    is missing in the result has no differentiable path to a seeded value. `nodes` are those to go
    through, of the graph of `op`; None: all.

    Raises:
        NoGradientRule: a gradient arrives at an operator that has no rule, or at a part of it
            that its rule does not cover; or one computes with what was quantized.
    """
    wrt, shortcuts = list(wrt), shortcuts or {}
    through = list(op.graph if nodes is None else nodes)
    refuse_quantized(through, wrt, seeds, stops, shortcuts)
    active, walk = dependent(through, wrt, stops, shortcuts)
    arriving: dict[ir.Value, list[ir.Value]] = defaultdict(list)
    for value, g in seeds.items():
        arriving[value].append(g)
    with op:
        for node in reversed(walk):
            gs: list[ir.Value | None] = []
            for y in node.outputs:
                arrives = y in arriving and y not in stops
                if arrives and y in shortcuts:
                    arriving[shortcuts[y]].append(op.total(arriving[y]))
                gs.append(op.total(arriving[y]) if arrives and y not in shortcuts else None)
            if (node.domain, node.op_type) in NON_DIFFERENTIABLE or not any(
                g is not None for g in gs
            ):
                continue
            logger.debug("gradient of %s (%s)", node.op_type, node.name)
            for x, dx in _apply(op, node, gs, active, wrt):
                if x is None or dx is None or x not in active:
                    continue
                if isinstance(dx, Unsupported):
                    raise _error(node, wrt, f"no gradient for its input {x.name!r}: {dx.reason}")
                arriving[x].append(
                    op.set_type_like(dx, x) if dx is not x and dx.shape is None else dx
                )
        return {x: op.total(arriving[x]) for x in wrt if x in arriving}


def dependent(
    nodes: Iterable[ir.Node],
    wrt: Iterable[ir.Value],
    stops: Collection[ir.Value] = (),
    shortcuts: Mapping[ir.Value, ir.Value] | None = None,
) -> tuple[set[ir.Value], list[ir.Node]]:
    """Return the floats of `nodes` that depend on `wrt`, and the nodes between."""
    shortcuts = shortcuts or {}
    active, walk = set(wrt), []
    for node in nodes:
        origins = (shortcuts[y] for y in node.outputs if y in shortcuts)
        if active.isdisjoint(reads(node)) and active.isdisjoint(origins):
            continue
        walk.append(node)
        floats = (y for y in node.outputs if y.dtype is None or y.dtype.is_floating_point())
        active.update(y for y in floats if y not in stops)
    return active, walk


def _apply(op: Emit, node: ir.Node, gs: list, active: set[ir.Value], wrt: list[ir.Value]):
    """Return pairs of an operand of `node` and its gradient."""
    lost = _where_types_end(node, active)
    at = lost or node
    if lost is None and not node.domain and node.op_type in SUBGRAPH_RULES:
        return SUBGRAPH_RULES[node.op_type](op, node, gs, active)
    function = RULES.get((at.domain, at.op_type))
    if function is None:
        raise _error(at, wrt, _no_rule(at))
    if lost is not None:
        raise _error(lost, wrt, "the type of its output is not known")
    taken = taken_gradients(function)
    extra = [y.name for y, g in zip(node.outputs[taken:], gs[taken:], strict=True) if g is not None]
    if extra:
        raise _error(node, wrt, f"a gradient arrives at its output {extra[0]!r}, not covered")
    made = function(op, node, *gs[:taken])
    if isinstance(made, Unsupported):
        raise _error(node, wrt, made.reason)
    return zip(node.inputs, made if isinstance(made, (tuple, list)) else (made,), strict=False)


def _no_rule(node: ir.Node) -> str:
    hidden = [x.name for x in node.inputs if x is not None and x.shape is None]
    domain = f", domain={node.domain!r}" if node.domain else ""
    add = f"add one with @rule({node.op_type!r}{domain}), or stop before it"
    if (instead := remedy(node)) is not None:
        return f"no rule; {instead}; or {add}"
    if hidden:
        return f"no rule while the rank of its input {hidden[0]!r} is not known; {add}"
    return f"no rule; {add}"


def _where_types_end(node: ir.Node, active: set[ir.Value]) -> ir.Node | None:
    """Return the node behind an active input of `node` whose type nobody knows, if there is one."""
    found: ir.Node | None = None
    at: ir.Node | None = node
    while at is not None:
        untyped = (x.producer() for x in at.inputs if x in active and x and x.dtype is None)
        at = next((before for before in untyped if before is not None), None)
        found = at or found
    return found


def _error(node: ir.Node, wrt: list[ir.Value], what: str) -> NoGradientRule:
    where = printable(f"{node.domain}::{node.op_type}" if node.domain else node.op_type)
    path = " -> ".join(map(printable, _path(node, wrt)))
    return NoGradientRule(
        f"{where} (node {node.name!r}, output {node.outputs[0].name!r}): {what}. Path: {path}"
    )


def _path(node: ir.Node, wrt: list[ir.Value]) -> list[str]:
    """Return the names on a shortest path from one of `wrt` to `node`."""
    assert isinstance(node.graph, ir.Graph)
    wanted, queue, seen = set(wrt), deque([(node, [f"[{node.op_type}]"])]), {node}
    while queue:
        at, path = queue.popleft()
        for x in reads(at):
            if x in wanted:
                return [str(x.name), *path]
            before = x.producer()
            if before is not None and before not in seen:
                seen.add(before)
                queue.append((before, [str(x.name), *path]))
    return [f"[{node.op_type}]"]
