"""Nodes that exchange values with other processes, and the models that run between them.

onnxruntime never runs the nodes AllReduce and Broadcast: `cut_at_exchanges` removes them from the
graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import Any

import onnx_ir as ir
from onnx import ModelProto, NodeProto

from onnxgrad.graph.rewrite import rewrites
from onnxgrad.graph.traversal import reads
from onnxgrad.model.convert import to_proto
from onnxgrad.operators.records import Unsupported, rule
from onnxgrad.operators.shapes import dims, static

DOMAIN = "onnxgrad.parallel"  # domain of AllReduce and Broadcast, which are in no file
MESSAGES = "parallel.messages"  # the group of rewrites by which processes send fewer values


def all_reduce(op: Any, x: ir.Value, ratio: Sequence[ir.Value] = ()) -> ir.Value:
    """Return the sum of `x` over all processes; `x` has the same shape in each process.

    With `ratio`, scalars (r, n) of the dtype of x, the sum is multiplied by r / (sum of n); r is
    the same in all processes. Such a sum has no gradient.
    """
    return op.set_type_like(op.emit("AllReduce", [x, *ratio], {}, domain=DOMAIN), x)


def broadcast(op: Any, x: ir.Value, root: int) -> ir.Value:
    """Return the value of `x` in process `root`; `x` has the same shape and dtype in each
    process.
    """
    return op.set_type_like(op.emit("Broadcast", [x], {"root": root}, domain=DOMAIN), x)


def is_exchange(node: ir.Node) -> bool:
    """Return whether a node is an AllReduce or Broadcast, which exchanges values."""
    return node.domain == DOMAIN


@rule("AllReduce", domain=DOMAIN)
def _gradient_of_all_reduce(op: Any, node: ir.Node, g: ir.Value) -> Any:
    """Return the gradient of AllReduce, y = sum of x over processes: the sum of their dL/dy."""
    if len(node.inputs) > 1:
        return Unsupported("a sum of gradients over processes has no gradient")
    return (all_reduce(op, g),)


@rewrites("Concat", group=MESSAGES)
def _merge_all_reduces(op: Any, node: ir.Node) -> Any:
    """Rewrite a Concat of AllReduces as one AllReduce of a Concat, so that one message is sent.

    Concat_i Reshape(sum_r x_ri) = sum_r Concat_i Reshape(x_ri).
    """
    sums: list[ir.Node] = []
    parts = []
    for v in node.inputs:
        before = v.producer() if v is not None else None
        reshapes = before is not None and before.op_type == "Reshape"
        total = _all_reduce_read_once(before.inputs[0] if before is not None and reshapes else v)
        if v is None or before is None or total is None or len(v.uses()) > 1:
            return None
        sums.append(total)
        x = total.inputs[0]
        parts.append(op.set_type_like(op.Reshape(x, before.inputs[1]), v) if reshapes else x)
    ratio = [v for v in sums[0].inputs[1:] if v is not None]
    if len(sums) < 2 or any(list(s.inputs[1:]) != ratio for s in sums):
        return None
    (y,) = op.copy_node(node, parts)
    return [all_reduce(op, op.set_type_like(y, node.outputs[0]), ratio)]


def _all_reduce_read_once(value: ir.Value | None) -> ir.Node | None:
    """Return the AllReduce that computes `value`, if exactly one node reads `value`; else None."""
    node = None if value is None else value.producer()
    if node is None or (node.domain, node.op_type) != (DOMAIN, "AllReduce"):
        return None
    (y,) = node.outputs
    return node if len(y.uses()) == 1 and not y.is_graph_output() else None


@dataclass(frozen=True)
class Exchange:
    """An AllReduce or Broadcast between processes: the value sent, and the value received.

    Attributes:
        sent: name of the value before the exchange.
        received: name of the value after the exchange.
        root: rank of the process whose value all receive; None if they receive the sum.
        ratio: names of (r, n), by whose ratio r / n the sum is multiplied; n is received in the
            same piece or an earlier one.
        shape: shape of the value; None if it is not static.
        dtype: dtype of the value.
    """

    sent: str
    received: str
    root: int | None
    ratio: tuple[str, ...]
    shape: tuple[int, ...] | None
    dtype: ir.DataType


@dataclass(frozen=True)
class Piece:
    """A part of a model that runs between two exchanges with other processes.

    Attributes:
        model: the model; it may be without nodes.
        exchanges: the exchanges that follow its run.
        last: names of the values that no later piece reads.
    """

    model: ModelProto
    exchanges: list[Exchange]
    last: list[str]


def cut_at_exchanges(model: ir.Model, most: float = inf) -> list[Piece]:
    """Return the pieces of a model between its AllReduces and Broadcasts, in execution order.

    Each node is in the last piece that can compute it, so that few values go from piece to piece:
    the forward pass is in the piece of the gradients, though an earlier piece could compute it.

    Args:
        model: a model without nodes that exchange values in its subgraphs.
        most: the largest number of bytes of a message. A larger message is split into two halves;
            the first half is sent while the nodes in front of the second half run.
    """
    graph = model.graph
    number = _piece_index_by_node(graph)
    for node, i in list(number.items()):
        if (total := _all_reduce_of_divisor(node)) is not None:
            number[total] = min(number[total], i)
    _split_largest_message(number, most)
    last_read: dict[ir.Value, int] = {}
    for node, i in number.items():
        for v in reads(node):
            last_read[v] = max(i, last_read.get(v, 0))
    count = max(number.values(), default=-1) + 1
    for v in graph.outputs:
        last_read[v] = count
    proto = to_proto(model)
    written = dict(zip(graph, proto.graph.node, strict=True))
    pieces = []
    for i in range(count):
        in_piece = [node for node, n in number.items() if n == i]
        nodes = [node for node in in_piece if not is_exchange(node)]
        results = {y: None for node in nodes for y in node.outputs}
        sent = {x for n, at in number.items() if at >= i and is_exchange(n) for x in n.inputs}
        taken = {v: None for node in nodes for v in reads(node) if v not in results}
        given = [y for y in results if last_read.get(y, 0) > i or y in sent]
        part = _extract_model(proto, [written[n] for n in nodes], list(taken), given)
        unread = [str(v.name) for v, n in last_read.items() if n == i]
        exchanges = [_exchange_of_node(n) for n in in_piece if is_exchange(n)]
        pieces.append(Piece(part, exchanges, unread))
    return pieces


def _piece_index_by_node(graph: ir.Graph) -> dict[ir.Node, int]:
    """Return {node: index of its piece}; pieces are few, and nodes are in the latest possible."""
    first: dict[ir.Node, int] = {}
    for node in graph:
        before = [p for v in reads(node) if (p := v.producer()) is not None and p in first]
        first[node] = max((first[p] + is_exchange(p) for p in before), default=0)
    end = max((n + is_exchange(node) for node, n in first.items()), default=0)
    number = {node: end - is_exchange(node) for node in first}
    for node in reversed(list(graph)):
        for v in reads(node):
            before_it = v.producer()
            if before_it in number:
                latest = number[node] - is_exchange(before_it)
                number[before_it] = min(number[before_it], latest)
    return number


def _split_largest_message(number: dict[ir.Node, int], most: float) -> None:
    """Send half of the largest message in a new piece, if the message exceeds `most` bytes.

    The first half are the values that are computed first.
    """
    sizes = {
        n: _value_nbytes(_sent_value(n))
        for n in number
        if is_exchange(n) and "root" not in n.attributes
    }
    of_piece = Counter[int]()
    for node, size in sizes.items():
        of_piece[number[node]] += size
    [(piece, total)] = of_piece.most_common(1) or [(0, 0)]
    if total <= most:
        return
    positions = {y: i for i, node in enumerate(number) for y in node.outputs}
    in_piece = [node for node in sizes if number[node] == piece]
    first, done = set[ir.Node](), 0
    for node in sorted(in_piece, key=lambda node: positions.get(_sent_value(node), 0)):
        if done + sizes[node] / 2 > total / 2:
            break
        first.add(node)
        done += sizes[node]
    if not first:
        return
    waiting = [*first, *(t for n in first if (t := _all_reduce_of_divisor(n)) is not None)]
    while waiting:
        node = waiting.pop()
        first.add(node)
        before = {v.producer() for v in reads(node)} - first
        waiting += [n for n in before if n is not None and number.get(n) == piece]
    for node, i in number.items():
        if i > piece or (i == piece and node not in first):
            number[node] = i + 1


def _sent_value(node: ir.Node) -> ir.Value:
    """Return the value that an AllReduce or Broadcast node sends to other processes."""
    x = node.inputs[0]
    assert x is not None
    return x


def _value_nbytes(value: ir.Value) -> int:
    """Return the size in bytes of a value; 0 if its shape is not static."""
    shape = static(dims(value))
    return 0 if shape is None or value.dtype is None else int(prod(shape) * value.dtype.itemsize)


def _all_reduce_of_divisor(node: ir.Node) -> ir.Node | None:
    """Return the AllReduce that sums n, if `node` is an AllReduce times r / n; else None."""
    if not is_exchange(node) or len(node.inputs) == 1 or node.inputs[2] is None:
        return None
    readers = (reader for reader, _ in node.inputs[2].uses())
    return next(r for r in readers if is_exchange(r) and len(r.inputs) == 1)


def _exchange_of_node(node: ir.Node) -> Exchange:
    """Return the `Exchange` that describes an AllReduce or Broadcast node."""
    x, y, total = _sent_value(node), node.outputs[0], _all_reduce_of_divisor(node)
    assert x.dtype is not None
    root = node.attributes.get_int("root") if "root" in node.attributes else None
    values = () if total is None else (node.inputs[1], total.outputs[0])
    ratio = tuple(str(v.name) for v in values if v is not None)
    return Exchange(str(x.name), str(y.name), root, ratio, static(dims(x)), x.dtype)


def _extract_model(
    whole: ModelProto,
    nodes: Sequence[NodeProto],
    inputs: Sequence[ir.Value],
    outputs: Sequence[ir.Value],
) -> ModelProto:
    """Return a model of `nodes`; `inputs` that are initializers in `whole` become initializers."""
    model = ModelProto(ir_version=whole.ir_version, producer_name="onnxgrad")
    model.opset_import.extend(whole.opset_import)
    graph = model.graph
    graph.name = whole.graph.name
    graph.node.extend(nodes)
    names = {str(v.name) for v in inputs}
    constants = [t for t in whole.graph.initializer if t.name in names]
    graph.initializer.extend(constants)
    sparse = [t for t in whole.graph.sparse_initializer if t.values.name in names]
    graph.sparse_initializer.extend(sparse)
    fixed = {t.name for t in constants} | {t.values.name for t in sparse}
    graph.input.extend(ir.to_proto(v) for v in inputs if v.name not in fixed)
    graph.output.extend(map(ir.to_proto, outputs))
    computed = {name for node in graph.node for name in node.output}
    graph.value_info.extend(v for v in whole.graph.value_info if v.name in computed)
    return model
