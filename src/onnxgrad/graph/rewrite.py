"""Rewrites: functions that replace one node by others, applied until none of them applies.

A rewrite is registered for an operator, in a group that says when it runs:

>>> import onnx_ir as ir
>>> from onnxgrad.graph import Emit
>>> @rewrites("Neg", group="doc.example")
... def cancel_double_negation(op, node):
...     # -(-x) = x
...     before = node.inputs[0].producer()
...     return [before.inputs[0]] if before is not None and before.op_type == "Neg" else None
>>> x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([3]))
>>> graph = ir.Graph([x], [], nodes=[], opset_imports={"": 20})
>>> op = Emit(graph)
>>> op.give([op.Tanh(op.Neg(op.Neg(x)))])
>>> rewrite(graph, GROUPS["doc.example"])
True
>>> [node.op_type for node in graph]
['Tanh']
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import onnx_ir as ir

from onnxgrad.graph.emit import Emit
from onnxgrad.graph.tidy import drop_unused, has_name_to_keep, remove_node, replace_value
from onnxgrad.graph.traversal import subgraphs
from onnxgrad.operators import marks

# (op, node) -> one value for each output of the node, or None to keep the node. `op` writes in
# front of the node. None among the values keeps one output, and the node with it. A rewrite that
# changes the node in place returns its outputs.
Rewrite: TypeAlias = Callable[[Emit, ir.Node], "Sequence[ir.Value | None] | None"]
Table: TypeAlias = Mapping[tuple[str, str], Sequence[Rewrite]]  # by domain and operator

GROUPS: dict[str, dict[tuple[str, str], list[Rewrite]]] = defaultdict(lambda: defaultdict(list))
ANY = "*"  # instead of an operator: all operators of a domain
_MOST = 100  # most rewrites for each node, and most rounds: rewrites that undo each other never end


def rewrites(*op_types: str, group: str) -> Callable[[Rewrite], Rewrite]:
    """Register the decorated function as a rewrite in `group`: for the named standard operators, or
    for all.
    """

    def register(function: Rewrite) -> Rewrite:
        for op_type in op_types or (ANY,):
            GROUPS[group]["", op_type].append(function)
        return function

    return register


def rewrite(
    graph: ir.Graph, table: Table, target: Any = None, keep: Collection[str | None] = ()
) -> bool:
    """Apply the rewrites of `table` to the nodes of `graph` and its subgraphs; return whether any
    of them changed a node.

    Nodes are visited in topological order, new ones before the nodes that follow the rewritten one,
    and all of them again until no rewrite applies. A replaced node is removed, and in the end so
    are nodes that no output needs. New values take over the types and shapes of replaced ones.

    Args:
        graph: a graph, which is changed in place.
        table: the rewrites of each operator, tried in their order, after rewrites of all operators.
        target: runtime and device of the result, which rewrites read as `op.target`.
        keep: names of results that keep their names, as graph outputs do.
    """
    op = Emit(graph)
    op.target = target
    applied = False
    for _ in range(_MOST + graph.num_nodes()):
        if not _rewrite_nodes(op, table, keep):
            return applied
        applied = True
        drop_unused(graph, keep)
    raise RuntimeError("rewrites do not end: two of them undo each other, so remove one of them")


def _rewrite_nodes(op: Emit, table: Table, keep: Collection[str | None]) -> int:
    """Try rewrites on each node of the graph of `op`, and on new nodes; return how many nodes were
    rewritten.
    """
    waiting, count = deque(op.graph), 0
    most = _MOST * (1 + len(waiting))
    functions_of: dict[tuple[str, str], Sequence[Rewrite]] = {}  # with those of all operators
    with op:
        while waiting:
            node = waiting.popleft()
            operator = node.domain, node.op_type
            if (functions := functions_of.get(operator)) is None:
                every = table.get((node.domain, ANY), ())
                functions = functions_of[operator] = (*every, *table.get(operator, ()))
            new = _apply_first_rewrite(op, node, functions, keep) if functions else None
            if new is not None:
                waiting.extendleft(reversed(new))
                count += 1
            elif node.attributes.data and node.graph is op.graph:
                for body in list(subgraphs(node)):
                    with op.at(node):  # outside of the body, new nodes stand before it
                        count += _rewrite_nodes(Emit(body, outer=op), table, keep)
            if count > most:
                raise RuntimeError(
                    f"rewrites of {node.op_type} (node {node.name!r}) do not end: drop one of them"
                )
    return count


def _apply_first_rewrite(
    op: Emit, node: ir.Node, functions: Iterable[Rewrite], keep: Collection[str | None]
) -> list[ir.Node] | None:
    """Replace `node` by the first of `functions` that does not return None; return the new nodes,
    or None.
    """
    if node.graph is not op.graph or any(marks.REPLACED in y.meta for y in node.outputs):
        return None  # an earlier rewrite has replaced it
    count = len(op.written)
    op.place, op.primal = node, node.meta.get(marks.PRIMAL)
    for function in functions:
        if (values := function(op, node)) is not None:
            break
    else:
        for unread in op.written[count:][::-1]:  # nodes of a rewrite that then returned None
            remove_node(unread)
        return None
    copies = node.op_type == "Identity" and values[0] is node.inputs[0]
    if copies and has_name_to_keep(node.outputs[0], keep):
        return None  # another copy would be written
    written = op.written[count:]
    for y, old in zip(values, node.outputs, strict=True):
        if y is not None and y is not old:
            if y.producer() in written and None not in (old.type, old.shape):
                op.set_type_like(y, old)
            replace_value(op, old, y, keep)
    if all(marks.REPLACED in old.meta for old in node.outputs):
        remove_node(node)
    return written
