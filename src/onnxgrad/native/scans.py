"""Move nodes out of the body of a Scan: one node before it computes all iterations at once.

A node costs about a microsecond, as much as the arithmetic on a few thousand elements. In the
backward pass of a recurrent layer, most nodes compute slopes of gates from scanned values alone.
For larger states, the forward Scan computes the slopes, and returns them instead of the gates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import onnx_ir as ir

from onnxgrad.graph.emit import Emit
from onnxgrad.graph.rewrite import rewrites
from onnxgrad.graph.traversal import subgraphs
from onnxgrad.operators import ELEMENTWISE, made_by
from onnxgrad.operators.shapes import dims, rank

LOOPS = "native.loops"  # the group of rewrites that take nodes out of the bodies of Scans
# Elements of a carried state in one iteration of a Scan, up to which nodes move out of its body.
# With 1 << 11 instead, a step of an LSTM of 64 rows and 256 units takes 1.13 times as long on one
# thread, one of 16 rows and 96 units 1.04 times.
MOST_SCANNED_ELEMENTS = 1 << 15
MOST_GATES = 4  # elements of a value that joins gates and moves, as a multiple of the state's
# Elements of a carried state from which the forward Scan computes slopes. With 0 instead, a step of
# an LSTM of 16 rows and 96 units takes 1.04 times as long on one thread, one of 16 rows and 16
# units 1.13 times.
LEAST_STATE_ELEMENTS = 1 << 11
MOST_MOVED_NODES = 64  # nodes between two Scans, up to which the first one computes them


@rewrites(*ELEMENTWISE, "Concat", "Split", group=LOOPS)
def moved_before_scan(op, node):
    """Move a node of scanned inputs and loop-invariant values from the body before the Scan."""
    scan = LoopBody.enclosing(op)
    if scan is None or not scan.can_move_before(node):
        return None
    attributes = {name: a.value for name, a in node.attributes.items()}
    if node.op_type in ("Concat", "Split") and (axis := attributes.get("axis", 0)) >= 0:
        attributes["axis"] = axis + 1
    operands = [None if x is None else scan.value_before_scan(x) for x in node.inputs]
    stacks = scan.op.emit_many(node.op_type, operands, attributes, len(node.outputs))
    return [scan.add_scanned(y, stack) for y, stack in zip(node.outputs, stacks, strict=True)]


@rewrites(*ELEMENTWISE, "Concat", "Split", group=LOOPS)
def moved_into_scan(op, node):
    """Move a node that reads stacks of a Scan into the body of this Scan, if only other Scans need
    its results.

    The forward Scan of an LSTM then returns the slopes of gates instead of the gates, so that they
    are never in memory together, and computes the slopes while the gates are in the cache.
    """
    scan = LoopBody.returning(op, node)
    if scan is None or scan.state_size < LEAST_STATE_ELEMENTS or not scan.can_move_inside(node):
        return None
    attributes = {name: a.value for name, a in node.attributes.items()}
    if node.op_type in ("Concat", "Split") and (axis := attributes.get("axis", 0)) >= 0:
        attributes["axis"] = axis - 1
    operands = [scan.value_in_body(x) for x in node.inputs]
    results = scan.equal_results(node, operands, attributes)
    with op.at(scan.node), Emit(scan.body, outer=op) as inner:
        if results is None:
            results = inner.emit_many(node.op_type, operands, attributes, len(node.outputs))
            for y, result in zip(node.outputs, results, strict=True):
                result.type, result.shape = y.type, ir.Shape((dims(y) or ())[1:])
        pairs = zip(node.outputs, results, strict=True)
        return [scan.add_returned(inner, y, result) for y, result in pairs]


@rewrites("Mul", group=LOOPS)
def merged_scan_factors(op, node):
    """Rewrite (x a) b as x (a b), and compute a b of scanned a, b before the Scan."""
    scan = LoopBody.enclosing(op)
    outer = None if scan is None else scan.scanned_factor(node)
    inner = None if scan is None or outer is None else scan.scanned_factor_read_once(outer[0])
    if scan is None or outer is None or inner is None:
        return None
    (_, b), (x, a) = outer, inner
    return [op.Mul(x, scan.add_scanned(b, scan.op.Mul(scan.stacks[a], scan.stacks[b])))]


@rewrites("Add", group=LOOPS)
def merged_complement(op, node):
    """Rewrite x + -(x a) as x (1 - a), and compute 1 - a of a scanned a before the Scan."""
    if (scan := LoopBody.enclosing(op)) is None:
        return None
    for x, negated in (node.inputs, node.inputs[::-1]):
        inner = made_by(negated, "Neg")
        pair = scan.scanned_factor_of(inner.inputs[0]) if inner is not None else None
        if pair is not None and pair[0] is x:
            a = pair[1]
            return [op.Mul(x, scan.add_scanned(a, scan.op.Sub(1.0, scan.stacks[a])))]
    return None


@rewrites("Concat", group=LOOPS)
def merged_scan_products(op, node):
    """Rewrite Concat(x a, y b) as Concat(x, y) c, with the scanned c = Concat(a, b)."""
    scan, y, axis = LoopBody.enclosing(op), node.outputs[0], node.attributes["axis"].as_int()
    if scan is None or axis < 0 or not scan.is_small(y):
        return None
    pairs = [pair for x in node.inputs if (pair := scan.scanned_factor_read_once(x)) is not None]
    if len(pairs) < len(node.inputs):
        return None
    factor = scan.op.Concat(*(scan.stacks[k] for _, k in pairs), axis=axis + 1)
    whole = op.set_type_like(op.Concat(*(x for x, _ in pairs), axis=axis), y)
    return [op.Mul(whole, scan.add_scanned(y, factor))]


@rewrites("Concat", group=LOOPS)
def flattened_concat(op, node):
    """Rewrite Concat(Concat(x, y), z) as Concat(x, y, z) in the body of a Scan."""
    axis = node.attributes["axis"].value
    for i, part in enumerate(node.inputs):
        inner = made_by(part, "Concat") if op.outer and len(part.uses()) == 1 else None
        if inner is not None and inner.attributes["axis"].value == axis:
            parts = [*node.inputs[:i], *inner.inputs, *node.inputs[i + 1 :]]
            return [op.Concat(*parts, axis=axis)]
    return None


@rewrites("Scan", group=LOOPS)
def without_unread_inputs(op, node):
    """Remove scanned inputs that the Scan's body does not read, but at least one input stays."""
    scan = LoopBody(op, node)
    read = {x: stack for x, stack in scan.stacks.items() if x.uses()}
    read = read or dict(list(scan.stacks.items())[:1])
    if not scan.is_simple or len(read) == len(scan.stacks):
        return None
    scan.set_scanned(read)
    return list(node.outputs)


@rewrites("Scan", group=LOOPS)
def without_unread_outputs(op, node):
    """Remove the scan outputs of a Scan that no node reads."""
    first, count = LoopBody(op, node).states, len(node.outputs)
    for y in reversed(node.outputs[first:]):
        if not y.uses() and not y.is_graph_output():
            _remove_scan_output(op, node, first, y)
    return list(node.outputs) if len(node.outputs) < count else None


def _remove_scan_output(op: Emit, node: ir.Node, first: int, unread: ir.Value) -> None:
    """Remove a scan output of `node`; its last output moves there, unless the graph returns it."""
    i, end, (body,), last = unread.index(), len(node.outputs) - 1, subgraphs(node), node.outputs[-1]
    assert i is not None
    if i < end and last.is_graph_output():
        return
    for name in ("scan_output_axes", "scan_output_directions"):
        if name in node.attributes:
            numbers = list(node.attributes[name].as_ints())
            numbers[i - first] = numbers[-1]
            node.attributes.add(ir.AttrInt64s(name, numbers[:-1]))
    if i < end:
        ir.convenience.replace_all_uses_with(last, op.set_type_like(unread, last))
        body.outputs[i] = body.outputs[end]
    del body.outputs[end]
    node.resize_outputs(end)


class LoopBody:
    """A Scan node with its body, whose nodes may move in front of the Scan.

    Attributes:
        op: writes nodes before the Scan.
        node: the Scan.
        body: its body.
        states: number of its states.
        stacks: for each scanned input of the body the values of all iterations, [T, ...].
    """

    def __init__(self, op: Emit, node: ir.Node) -> None:
        self.op, self.node = op, node
        (self.body,) = subgraphs(node)
        self.states = len(node.inputs) - node.attributes["num_scan_inputs"].as_int()
        pairs = list(zip(self.body.inputs, node.inputs, strict=True))[self.states :]
        self.stacks = {x: stack for x, stack in pairs if stack is not None}

    @staticmethod
    def enclosing(op: Emit) -> LoopBody | None:
        """Return the simple Scan in whose body `op` writes nodes; None outside of such a Scan."""
        outer = op.outer
        node = None if outer is None else outer.place
        if node is None or node.op_type != "Scan" or node.domain:
            return None
        assert isinstance(outer, Emit)
        scan = LoopBody(outer, node)
        return scan if scan.is_simple else None

    @property
    def is_simple(self) -> bool:
        """Whether the Scan slices all scanned inputs along axis 0, all in the same direction."""
        get = self.node.attributes.get_ints
        one_way = len(set(get("scan_input_directions", ()))) < 2
        return one_way and not any(get("scan_input_axes", ()))

    @staticmethod
    def returning(op: Emit, node: ir.Node) -> LoopBody | None:
        """Return the Scan whose stacks `node` reads; None unless it is one Scan in the graph of
        `node` that stacks all results along axis 0, in the same direction.
        """
        producers = {x.producer() for x in node.inputs if x is not None}
        scans = [n for n in producers if n is not None and (n.op_type, n.domain) == ("Scan", "")]
        if len(scans) != 1 or scans[0].graph is not node.graph:
            return None
        get = scans[0].attributes.get_ints
        one_way = len(set(get("scan_output_directions", ()))) < 2
        return LoopBody(op, scans[0]) if one_way and not any(get("scan_output_axes", ())) else None

    @property
    def returned(self) -> dict[ir.Value, ir.Value]:
        """For each stack that the Scan returns, the value of the body that it stacks."""
        pairs = zip(self.node.outputs, self.body.outputs, strict=True)
        return dict(list(pairs)[self.states :])

    def value_in_body(self, x: ir.Value | None) -> ir.Value | None:
        """Return `x` for a node in the body: the value that the output `x` of the Scan has there,
        or `x` itself.
        """
        if x is None or x.producer() is not self.node:
            return x
        value = self.body.outputs[self.node.outputs.index(x)]
        copied = made_by(value, "Identity")
        return value if copied is None or copied.graph is not self.body else copied.inputs[0]

    def equal_results(
        self, node: ir.Node, operands: Sequence[Any], attributes: Mapping[str, Any]
    ) -> Sequence[ir.Value] | None:
        """Return the results of the node in the body that computes what `node` would compute from
        `operands`; None if there is no such node.
        """
        for other in (use.node for x in operands if x is not None for use in x.uses()):
            if other.graph is not self.body or other.op_type != node.op_type:
                continue
            own = {name: a.value for name, a in other.attributes.items()}
            if own == attributes and list(other.inputs) == operands:
                return other.outputs if len(other.outputs) == len(node.outputs) else None
        return None

    def set_scanned(self, stacks: dict[ir.Value, ir.Value]) -> None:
        """Set the scanned inputs: {input of the body: stack of its values in all iterations}."""
        self.stacks = stacks
        inputs = [*self.node.inputs[: self.states], *stacks.values()]
        self.body.inputs[:] = [*list(self.body.inputs)[: self.states], *stacks]
        self.node.resize_inputs(len(inputs))
        for i, x in enumerate(inputs):
            self.node.replace_input_with(i, x)
        attributes = self.node.attributes
        backward = attributes.get_ints("scan_input_directions", (0,))[0]
        attributes.pop("scan_input_axes", None)
        attributes.add(ir.AttrInt64("num_scan_inputs", len(stacks)))
        attributes.add(ir.AttrInt64s("scan_input_directions", [backward] * len(stacks)))

    def add_scanned(self, like: ir.Value, stack: ir.Value) -> ir.Value:
        """Return a new scanned input of the body, typed like `like`, with the values `stack`."""
        length = (dims(next(iter(self.stacks.values()))) or (None,))[0]
        stack.type, stack.shape = like.type, ir.Shape([length, *(dims(like) or ())])
        x = ir.Value(name=self.op.name("scanned"), type=like.type, shape=like.shape)
        self.set_scanned(self.stacks | {x: stack})
        return x

    def add_returned(self, inner: Emit, like: ir.Value, value: ir.Value) -> ir.Value:
        """Return the stack of `value`, typed like `like`: a new output of the Scan, unless there is
        one. `inner` writes nodes in the body.
        """
        for stack, stacked in self.returned.items():
            if stacked is value:
                return stack
        if value.is_graph_output() or value in self.body.inputs:
            value = inner.copy_of(value)
        node = self.node
        for name in ("scan_output_axes", "scan_output_directions"):
            if numbers := node.attributes.get_ints(name, ()):
                node.attributes.add(ir.AttrInt64s(name, [*numbers, numbers[0]]))
        self.body.outputs.append(value)
        node.resize_outputs(len(node.outputs) + 1)
        stack = node.outputs[-1]
        stack.name, stack.type, stack.shape = self.op.name(str(value.name)), like.type, like.shape
        return stack

    # -- nodes that can move --------------------------------------------------------------------

    def can_move_before(self, node: ir.Node) -> bool:
        """Return whether `node` can run before the Scan, as it reads scanned and fixed values."""
        operands = [x for x in node.inputs if x is not None]
        scanned = [x for x in operands if x in self.stacks]
        fixed = [x for x in operands if x not in self.stacks]
        if not scanned or not all(map(self.is_loop_invariant, fixed)):
            return False
        if any(y.is_graph_output() or not self.is_small(y) for y in node.outputs):
            return False
        if node.op_type == "Concat":
            return not fixed
        if node.op_type == "Split":
            return scanned == [node.inputs[0]]
        n = rank(node.outputs[0]) or 0
        low = all((m := rank(x)) is not None and m <= n for x in fixed)
        return low and all(rank(x) == n for x in scanned)

    def is_loop_invariant(self, x: ir.Value) -> bool:
        """Return whether `x` is equal in all iterations: a constant, or from outside the body."""
        return x.is_initializer() or x.graph is not self.body

    def value_before_scan(self, x: ir.Value) -> ir.Value:
        """Return `x` for a node before the Scan: its stack, a constant, or an outer value."""
        if x.is_initializer() and x.graph is self.body and x.const_value is not None:
            return self.op.const(x.const_value.numpy())
        return self.stacks.get(x, x)

    def scanned_factor_read_once(self, y: ir.Value | None) -> tuple[ir.Value, ir.Value] | None:
        """Return (x, scanned k) if `y` = x k has a single reader; None otherwise."""
        once = y is not None and len(y.uses()) == 1 and not y.is_graph_output()
        return self.scanned_factor_of(y) if once else None

    def scanned_factor_of(self, y: ir.Value | None) -> tuple[ir.Value, ir.Value] | None:
        """Return (x, scanned k) if `y` = x k, else None."""
        node = made_by(y, "Mul")
        return None if node is None or node.graph is not self.body else self.scanned_factor(node)

    def scanned_factor(self, node: ir.Node) -> tuple[ir.Value, ir.Value] | None:
        """Return (x, k) if `node` is x k of equal shapes and only k is scanned; else None."""
        a, b = node.inputs
        for x, k in ((a, b), (b, a)):
            if k in self.stacks and x is not None and x not in self.stacks:
                same = dims(x) == dims(node.outputs[0]) == dims(k)
                return (x, k) if same and self.is_small(x) else None
        return None

    def can_move_inside(self, node: ir.Node) -> bool:
        """Return whether `node`, and all nodes between its results and other Scans, can run in the
        body: they read stacks that the Scan returns, and values computed before the Scan.
        """
        seen, waiting = set[tuple[ir.Node, bool]](), [(node, True)]
        while waiting:
            one, with_readers = waiting.pop()
            if one is self.node or (with_readers and one.op_type == "Scan"):
                continue
            if (one, with_readers) in seen:
                continue
            operands = self._operands_inside(one)
            if operands is None or len(seen) == MOST_MOVED_NODES:
                return False
            seen.add((one, with_readers))
            waiting += ((maker, False) for maker in operands)
            if with_readers:
                waiting += ((use.node, True) for y in one.outputs for use in y.uses())
        return True

    def _operands_inside(self, node: ir.Node) -> list[ir.Node] | None:
        """Return the nodes whose results `node` would read in the body; None if it cannot run there
        whatever they are.
        """
        n, same_graph = rank(node.outputs[0]), node.graph is self.node.graph
        if n is None or not same_graph or any(y.is_graph_output() for y in node.outputs):
            return None
        if node.op_type in ("Concat", "Split"):
            if node.attributes.get_int("axis", 0) % n == 0:
                return None
        elif node.op_type not in ELEMENTWISE:
            return None
        found = []
        for x in node.inputs:
            m, maker = rank(x), None if x is None else x.producer()
            if x is None or (m is not None and m < n and self._is_known_before(x)):
                continue
            if m != n or maker is None:
                return None
            found.append(maker)
        return found

    def _is_known_before(self, x: ir.Value) -> bool:
        """Return whether `x` is computed before the Scan runs."""
        maker = x.producer()
        with self.op.at(self.node) as op:
            return maker is None or op.precedes(maker)

    @property
    def state_size(self) -> int:
        """The number of elements of the largest carried state; 0 if none is known."""
        sizes = [self._element_count(x) or 0 for x in self.body.inputs[: self.states]]
        return max(sizes, default=0)

    def is_small(self, value: ir.Value, most: int = MOST_SCANNED_ELEMENTS) -> bool:
        """Return whether `value` has at most `most` elements, taking symbols as the batch size.

        A value that joins gates may have several times as many elements: `MOST_GATES` times the
        elements of a carried state, if the state has at most `most`.
        """
        size = self._element_count(value)
        if size is None or size <= most:
            return size is not None
        return self.state_size <= most and size <= MOST_GATES * self.state_size

    def _element_count(self, value: ir.Value) -> int | None:
        """Return the number of elements of `value` in a batch of the usual size, if it is known."""
        shape = dims(value)
        if shape is None or None in shape:
            return None
        rows = self.op.target.rows
        return prod(d if isinstance(d, int) else rows for d in shape)
