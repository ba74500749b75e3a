"""The sweep: reverse mode, from the cotangents of some values to gradients of values before."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence

import onnx_ir as ir

from onnxgrad.autodiff.straight_through import node_description, refuse_quantized
from onnxgrad.errors import NoGradientRule, printable
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.traversal import reads
from onnxgrad.operators import marks, operator_of
from onnxgrad.operators.records import Lowering, Rule, Unsupported, cotangent_limit, remedy_for_node
from onnxgrad.operators.shapes import Dims, dims, is_real
from onnxgrad.reporting import logger


def sweep(
    op: Emit,
    seeds: Mapping[ir.Value, ir.Value],
    wrt: Iterable[ir.Value],
    stop_gradient: Collection[ir.Value] = (),
    straight_through: Mapping[ir.Value, ir.Value] | None = None,
    nodes: Iterable[ir.Node] | None = None,
) -> dict[ir.Value, ir.Value]:
    """Write the gradients of `wrt` into the graph of `op`, and return `{value: its gradient}`.

    A value that is missing in the result has no differentiable path to a seeded value.

    Args:
        op: emitter of the graph that is differentiated.
        seeds: `{value: its cotangent}`, each cotangent of the shape of its value.
        wrt: the values to differentiate with respect to.
        stop_gradient: values that count as constants: their cotangents are dropped.
        straight_through: `{y: x}`: the cotangent of y is added to the cotangent of x.
        nodes: the nodes to differentiate, in topological order; None: all of the graph.

    Raises:
        NoGradientRule: an operator on a path has no rule, its rule does not cover it, or it is
            quantized arithmetic.
    """
    wrt, straight_through = list(wrt), straight_through or {}
    nodes = list(op.graph if nodes is None else nodes)
    refuse_quantized(nodes, wrt, seeds, stop_gradient, straight_through)
    active, walk = dependent_values(nodes, wrt, stop_gradient, straight_through)
    cotangents: dict[ir.Value, list[ir.Value]] = defaultdict(list)  # the terms of each cotangent
    for value, g in seeds.items():
        cotangents[value].append(g)
    with op:
        for node in reversed(walk):
            op.primal = node
            gs: list[ir.Value | None] = []
            for y in node.outputs:
                has_cotangent = y in cotangents and y not in stop_gradient
                if has_cotangent and y in straight_through:
                    cotangents[straight_through[y]].append(op.total(cotangents[y]))
                needed = has_cotangent and y not in straight_through
                gs.append(op.total(cotangents[y]) if needed else None)
            if operator_of(node).no_gradient or not any(g is not None for g in gs):
                continue
            logger.debug("gradient of %s (%s)", node.op_type, node.name)
            for x, dx in _apply_rule(op, node, gs, active, wrt):
                if x is None or dx is None or x not in active:
                    continue
                if isinstance(dx, Unsupported):
                    if (before := x.producer()) and operator_of(before).no_gradient:
                        continue
                    raise _node_error(node, wrt, f"no gradient for input {x.name!r}: {dx.reason}")
                cotangents[x].append(
                    op.set_type_like(dx, x) if dx is not x and dx.shape is None else dx
                )
        op.primal = None
        return {x: op.total(cotangents[x]) for x in wrt if x in cotangents}


def dependent_values(
    nodes: Iterable[ir.Node],
    wrt: Iterable[ir.Value],
    stop_gradient: Collection[ir.Value] = (),
    straight_through: Mapping[ir.Value, ir.Value] | None = None,
) -> tuple[set[ir.Value], list[ir.Node]]:
    """Return the float values that depend on `wrt` (and `wrt`), and the nodes that read any of
    them.

    `nodes` are in topological order, and so are the returned nodes.
    """
    straight_through = straight_through or {}
    active, walk = set(wrt), []
    for node in nodes:
        origins = (straight_through[y] for y in node.outputs if y in straight_through)
        if active.isdisjoint(reads(node)) and active.isdisjoint(origins):
            continue
        walk.append(node)
        floats = (y for y in node.outputs if y.dtype is None or y.dtype.is_floating_point())
        active.update(y for y in floats if y not in stop_gradient)
    return active, walk


def _apply_rule(op: Emit, node: ir.Node, gs: list, active: set[ir.Value], wrt: list[ir.Value]):
    """Apply the rule of `node`; return pairs of an input or a captured value and its gradient."""
    if marks.RULED_AS in node.meta:
        node = node.meta[marks.RULED_AS](node)
        gs = [*gs, *[None] * (len(node.outputs) - len(gs))]
    untyped = _first_untyped_node(node, active)
    operator = operator_of(node)
    if untyped is None and operator.subgraph_rule is not None:
        return operator.subgraph_rule(op, node, gs, active)
    if untyped is None and operator.on_demand and operator.lowering is not None:
        return _differentiate_by_lowering(op, node, operator.lowering, gs, active)
    at = untyped or node
    function = operator_of(at).rule
    if function is None:
        raise _node_error(at, wrt, _missing_rule_message(at))
    if untyped is not None:
        raise _node_error(untyped, wrt, "the type of its output is unknown")
    n = cotangent_limit(function)
    extra = [y.name for y, g in zip(node.outputs[n:], gs[n:], strict=True) if g is not None]
    if extra:
        raise _node_error(node, wrt, f"its rule takes no gradient of its output {extra[0]!r}")
    gradients = function(op, node, *gs[:n])
    if isinstance(gradients, Unsupported):
        raise _node_error(node, wrt, gradients.reason)
    if not isinstance(gradients, (tuple, list)):
        gradients = (gradients,)
    _check_gradients(node, function, gradients)
    for i, dx in enumerate(gradients):
        own = isinstance(dx, ir.Value) and not operator.of_user
        if own and not any(dx is g for g in gs):  # a note on a cotangent would refer to itself
            dx.meta.setdefault(marks.GRADIENT_OF, (node, i, gs))
    return zip(node.inputs, gradients, strict=False)


def _differentiate_by_lowering(
    op: Emit, node: ir.Node, lowering: Lowering, gs: list, active: set[ir.Value]
) -> Iterable[tuple[ir.Value, ir.Value]]:
    """Replace `node` by its lowering; return pairs of a value that it reads and its gradient.

    The fused kernels of RNN, GRU and LSTM keep nothing for the backward pass, so they are lowered
    to a Scan, which is slower. Nodes that need no gradient keep their fused kernels.
    """
    wrt = [x for x in reads(node) if x in active]
    before = Emit(op.graph, outer=op)  # a separate emitter, so that `written` has all new nodes
    with before.at(node):
        outputs = lowering(before, node)
    if outputs is None:
        raise _node_error(node, wrt, "its lowering left it unchanged, and it has no rule")
    for old, new in zip(node.outputs, outputs, strict=True):
        ir.convenience.replace_all_uses_with(old, new)
    seeds = {y: g for y, g in zip(outputs, gs, strict=True) if g is not None}
    return sweep(op, seeds, wrt, nodes=before.written).items()


def _check_gradients(node: ir.Node, function: Rule, gradients: Sequence) -> None:
    """Raise if a rule returned too few or too many gradients, or one whose dtype or shape differs
    from its input.
    """
    where = f"the rule of {printable(node.op_type)} ({function.__module__}.{function.__qualname__})"
    n = len(gradients)
    forgotten = [x for x in node.inputs[n:] if x is not None and is_real(x)]
    if forgotten or any(isinstance(dx, ir.Value) for dx in gradients[len(node.inputs) :]):
        raise ValueError(
            f"{where} returns {n} gradients for {len(node.inputs)} inputs (node {node.name!r}): "
            "return one for each input, None where there is none"
        )
    for i, (x, dx) in enumerate(zip(node.inputs, gradients, strict=False)):
        if x is None or not isinstance(dx, ir.Value):
            continue
        if None not in (x.dtype, dx.dtype) and x.dtype != dx.dtype:
            raise ValueError(
                f"{where} returns a gradient of dtype {dx.dtype} for its input {i}, "
                f"{x.name!r}, which holds {x.dtype}: cast it"
            )
        if _are_unequal_shapes(dims(x), dims(dx)):
            raise ValueError(
                f"{where} returns a gradient of shape {dims(dx)} for its input {i}, {x.name!r}, of "
                f"shape {dims(x)}: undo broadcasting by op.sum_to(g, x)"
            )


def _are_unequal_shapes(a: Dims | None, b: Dims | None) -> bool:
    """Return whether two shapes are proven to differ."""
    if a is None or b is None:
        return False
    static = [(m, n) for m, n in zip(a, b, strict=False) if isinstance(m, int)]
    return len(a) != len(b) or any(isinstance(n, int) and m != n for m, n in static)


def _missing_rule_message(node: ir.Node) -> str:
    """Return the message that `node` has no gradient rule, with the remedies."""
    unranked = [x.name for x in node.inputs if x is not None and x.shape is None]
    domain = f", domain={node.domain!r}" if node.domain else ""
    add = (
        f"add one with @rule({node.op_type!r}{domain}), or name its output in `stop_gradient` of "
        "onnx_derivative"
    )
    if (advice := remedy_for_node(node)) is not None:
        return f"no rule; {advice}; or {add}"
    if unranked:
        return f"no rule while the rank of its input {unranked[0]!r} is unknown; {add}"
    return f"no rule; {add}"


def _first_untyped_node(node: ir.Node, active: set[ir.Value]) -> ir.Node | None:
    """Return the first node before `node` whose output has a gradient but no known dtype; or
    None.
    """
    first: ir.Node | None = None
    at: ir.Node | None = node
    while at is not None:
        untyped = (x.producer() for x in at.inputs if x in active and x and x.dtype is None)
        at = next((producer for producer in untyped if producer is not None), None)
        first = at or first
    return first


def _node_error(node: ir.Node, wrt: list[ir.Value], what: str) -> NoGradientRule:
    path = " -> ".join(map(printable, _names_on_shortest_path(node, wrt)))
    return NoGradientRule(f"{node_description(node)}: {what}. Path: {path}")


def _names_on_shortest_path(node: ir.Node, wrt: list[ir.Value]) -> list[str]:
    """Return the names of the values on a shortest path from a value of `wrt` to `node`."""
    assert isinstance(node.graph, ir.Graph)
    ends, queue, seen = set(wrt), deque([(node, [f"[{node.op_type}]"])]), {node}
    while queue:
        at, path = queue.popleft()
        for x in reads(at):
            if x in ends:
                return [str(x.name), *path]
            producer = x.producer()
            if producer is not None and producer not in seen:
                seen.add(producer)
                queue.append((producer, [str(x.name), *path]))
    return [f"[{node.op_type}]"]
