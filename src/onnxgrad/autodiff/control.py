"""The gradient of operators that hold graphs: If, Loop and Scan.

A body is repeated in the backward pass, from the states that its iteration started with, and its
gradient follows. The forward pass returns these states too: nothing else of a body is kept, but for
its random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnxgrad.autodiff.reverse import dependent, sweep
from onnxgrad.autodiff.rules import HOLDERS
from onnxgrad.errors import NoGradientRule
from onnxgrad.graph.emit import RANDOM, Emit
from onnxgrad.graph.reads import captured, reads
from onnxgrad.graph.shapes import dims, equal
from onnxgrad.graph.tidy import drop_unused

Pairs = list[tuple[ir.Value, ir.Value]]


class _Copy:
    """A copy of a graph that `node` holds, to which its gradient is appended.

    Its inputs are no inputs any more: the backward pass says what they are.
    """

    def __init__(self, op: Emit, node: ir.Node, attribute: str) -> None:
        self.node, self.original = node, node.attributes[attribute].as_graph()
        self.graph = self.original.clone(allow_outer_scope_values=True)
        self.op = Emit(self.graph, outer=op)
        self.inputs, self.outputs = list(self.graph.inputs), list(self.graph.outputs)
        pairs = zip(self.original, self.graph, strict=True)
        self._origins = {c: o for n, m in pairs for o, c in zip(n.outputs, m.outputs, strict=True)}
        self.graph.inputs.clear()
        for value in _named(self.graph, self.inputs):
            value.name = op.name(str(value.name))

    def sweep(
        self, seeds: Iterable[tuple[ir.Value, ir.Value]], wrt: Iterable[ir.Value]
    ) -> dict[ir.Value, ir.Value]:
        """Append the gradient, and return it for those of `wrt` that it reaches."""
        arriving: dict[ir.Value, list[ir.Value]] = {}
        for y, g in seeds:
            arriving.setdefault(y, []).append(g)
        with self.op:
            totals = {y: self.op.total(gs) for y, gs in arriving.items()}
        try:
            return sweep(self.op, totals, wrt)
        except NoGradientRule as e:
            where = f"{self.node.op_type} {self.node.name!r}, output {self.node.outputs[0].name!r}"
            raise NoGradientRule(f"in a graph of {where}: {e}") from e

    def give(self, outputs: Iterable[ir.Value]) -> None:
        """Make these the outputs, and remove what they do not need."""
        self.op.give(outputs)
        drop_unused(self.graph)

    def first(self) -> Emit:
        """Return the emitter, which writes before all other nodes from now on."""
        self.op.before = next(iter(self.graph), None)
        return self.op

    def draws(self) -> list[tuple[ir.Value, ir.Value]]:
        """Take out what is drawn at random: return what stands for it, and the original."""
        found = []
        for node in self.graph.all_nodes():
            if node.op_type in RANDOM and not node.domain:
                if node.graph is not self.graph:
                    raise NoGradientRule(
                        f"{node.op_type} {node.name!r} is in a graph inside of a graph of "
                        f"{self.node.op_type} {self.node.name!r}: its random numbers would be "
                        "drawn anew in the backward pass; draw them outside"
                    )
                found += [(y, self._origins[y]) for y in node.outputs if y.uses()]
        made = []
        for y, original in found:
            placeholder = self.op.like(ir.Value(name=self.op.name(str(y.name))), y)
            ir.convenience.replace_all_uses_with(y, placeholder)
            made.append((placeholder, original))
        drop_unused(self.graph)
        return made


def _named(graph: ir.Graph, inputs: Iterable[ir.Value]) -> Iterable[ir.Value]:
    yield from inputs
    for node in graph.all_nodes():
        yield from (y for y in node.outputs if y.name)


def _hand_out(op: Emit, node: ir.Node, attribute: str, value: ir.Value) -> ir.Value:
    """Make `value` one more output of a graph that `node` holds; return that of the node."""
    graph = node.attributes[attribute].as_graph()
    made = Emit(graph, outer=op).emit("Identity", [value], {}, fresh=True)
    graph.outputs.append(op.like(made, value))
    node.resize_outputs(len(node.outputs) + 1)
    y = node.outputs[-1]
    y.name, y.type = op.name(str(value.name)), value.type
    return y


def _several(made: ir.Value | list[ir.Value]) -> list[ir.Value]:
    return [made] if isinstance(made, ir.Value) else made


# -- If ------------------------------------------------------------------------------------------

_BRANCHES = ("then_branch", "else_branch")


def conditional(op: Emit, node: ir.Node, gs: Sequence, active: Collection[ir.Value]) -> Pairs:
    """y = If(c, f, h):  dx = If(c, f'ᵀ g, h'ᵀ g), for all x that the branches take from around."""
    around = [v for v in captured(node) if v in active]
    copies = [_Copy(op, node, name) for name in _BRANCHES]
    found = []
    for copy in copies:
        pairs = [(y, g) for y, g in zip(copy.outputs, gs, strict=True) if g is not None]
        found.append(copy.sweep([(y, _as(copy.op, g, y)) for y, g in pairs], around))
    reached = [v for v in around if any(v in gradients for gradients in found)]
    if not reached:
        return []
    for copy, gradients, name in zip(copies, found, _BRANCHES, strict=True):
        with copy.op as inner:
            copy.give(gradients[v] if v in gradients else inner.zeros_like(v) for v in reached)
        for drawn, original in copy.draws():
            _keep_drawn(op, node, name, drawn, original)
    held = {name: copy.graph for name, copy in zip(_BRANCHES, copies, strict=True)}
    made = op.emit("If", node.inputs, held, outputs=len(reached), fresh=True)
    return [(v, op.like(dv, v)) for v, dv in zip(reached, _several(made), strict=True)]


def _as(op: Emit, g: ir.Value, y: ir.Value) -> ir.Value:
    """Return `g` with what is known of the shape of `y` in this branch."""
    return g if y.shape is None else op.like(op.emit("Identity", [g], {}, fresh=True), y)


def _keep_drawn(op: Emit, node: ir.Node, name: str, drawn: ir.Value, original: ir.Value) -> None:
    """Let `node` return what one branch has drawn, and nothing instead of it in the other."""
    assert original.dtype is not None
    kept = _hand_out(op, node, name, original)
    [other] = [node.attributes[n].as_graph() for n in _BRANCHES if n != name]
    nothing = op.value(np.zeros((0,) * len(dims(original) or ()), original.dtype.numpy()))
    made = Emit(other, outer=op).emit("Identity", [nothing], {}, fresh=True)
    other.outputs.append(made)
    ir.convenience.replace_all_uses_with(drawn, op.like(kept, original))


# -- Loop and Scan -------------------------------------------------------------------------------


class _Backward:
    """The body of the loop that runs the iterations of `node` in reverse.

    States and elements are those of the copied body's inputs; `state_outputs` and `stacked` are
    its outputs. An element, or a gradient that arrives for a stacked output, is different in each
    iteration: `slices` maps the value in the body to what it is a slice of, and how.
    """

    def __init__(
        self,
        op: Emit,
        node: ir.Node,
        gs: Sequence,
        active: Collection[ir.Value],
        counts: tuple[int, int, int],
    ) -> None:
        """`counts`: inputs of node and body before the states, outputs before those, states."""
        self.op, self.node = op, node
        before, ahead, n = counts
        self.copy = copy = _Copy(op, node, "body")
        operands = node.inputs[-(len(copy.inputs) - before) :] if len(copy.inputs) > before else ()
        self.initial, self.sequences = operands[:n], operands[n:]
        self.states, self.elements = copy.inputs[before:][:n], copy.inputs[before:][n:]
        self.state_outputs, self.stacked = copy.outputs[ahead:][:n], copy.outputs[ahead:][n:]
        self.originals = self.copy.original.inputs[before:][:n]
        self.results, self.result_gs = node.outputs[:n], gs[:n]
        self.stacked_gs = {y: g for y, g in zip(self.stacked, gs[n:], strict=True) if g is not None}
        self.around = [v for v in captured(node) if v in active]
        self.varied = self._varied(active)
        self.carried = self._carried()

    def _varied(self, active: Collection[ir.Value]) -> set[ir.Value]:
        """Return the values of the body that depend on what is asked for, in some iteration."""
        outer = [*self.initial, *self.sequences]
        inner = [*self.states, *self.elements]
        start = {*self.around, *(v for x, v in zip(outer, inner, strict=True) if x in active)}
        while True:
            found, _ = dependent(self.copy.graph, start)
            pairs = zip(self.states, self.state_outputs, strict=True)
            more = {a for a, b in pairs if b in found} - start
            if not more:
                return found
            start |= more

    def _carried(self) -> list[int]:
        """Return the places of the states that have a gradient."""
        carried = {i for i, g in enumerate(self.result_gs) if g is not None}
        while True:
            ends = [*self.stacked_gs, *(self.state_outputs[i] for i in carried)]
            needed = _ancestors(self.copy.graph, ends)
            found = {i for i, a in enumerate(self.states) if a in needed}
            if found <= carried:
                return [i for i in sorted(carried) if self.states[i] in self.varied]
            carried |= found

    def differentiate(self, stacked: Mapping[ir.Value, ir.Value]) -> tuple[list, list, list]:
        """Append the gradient of an iteration, given that of its `stacked` outputs.

        Return three lists of triples: of the states, of the values around and of the elements: what
        it is the gradient of, outside; what comes in, none for elements; and what goes out.
        """
        copy, op = self.copy, self.copy.op
        ds = {i: _new(op, self.state_outputs[i]) for i in self.carried}
        seeds = [(self.state_outputs[i], d) for i, d in ds.items()]
        seeds += [(y, stacked[y]) for y in self.stacked_gs]
        elements = [a for a in self.elements if a in self.varied]
        wrt = [*(self.states[i] for i in self.carried), *elements, *self.around]
        found = copy.sweep(seeds, wrt)
        with op:
            states = []
            for i, d in ds.items():
                a = self.states[i]
                same = equal(dims(a), dims(d))
                went = found[a] if a in found else op.zeros_like(d if same else a)
                states.append((i, d, went))
            sums = []
            for v in self.around:
                if v in found:
                    before = _new(op, v)
                    sums.append((v, before, op.total([before, found[v]])))
            slices = [
                (x, None, found[a])
                for x, a in zip(self.sequences, self.elements, strict=True)
                if a in found
            ]
        return states, sums, slices

    def starts(self, states: list, sums: list) -> list[ir.Value]:
        """Return what the backward pass starts with: the gradients of the results, and zeros."""
        op = self.op
        begin = [self.result_gs[i] for i, *_ in states]
        made = [
            op.zeros_like(self.results[i]) if g is None else g
            for (i, *_), g in zip(states, begin, strict=True)
        ]
        return [*made, *(op.zeros_like(v) for v, *_ in sums)]

    def taped(self, keep: Callable[[ir.Value], ir.Value]) -> dict[ir.Value, ir.Value]:
        """Return the values of the body that the forward pass has to keep, and where."""
        made = {a: keep(o) for a, o in zip(self.states, self.originals, strict=True) if a.uses()}
        return made | {drawn: keep(original) for drawn, original in self.copy.draws()}


def _new(op: Emit, like: ir.Value) -> ir.Value:
    return op.like(ir.Value(name=op.name(f"{like.name}_grad")), like)


def _ancestors(graph: ir.Graph, ends: Iterable[ir.Value]) -> set[ir.Value]:
    """Return the values that `ends` are made of."""
    found = set(ends)
    for node in reversed(graph):
        if not found.isdisjoint(node.outputs):
            found.update(reads(node))
    return found


def loop(op: Emit, node: ir.Node, gs: Sequence, active: Collection[ir.Value]) -> Pairs:
    """a_t+1, z_t = f(a_t, v):  da_t = f_a'ᵀ (da_t+1, dz_t),  dv = Σ f_v'ᵀ (da_t+1, dz_t)."""
    n = max(len(node.inputs) - 2, 0)
    back = _Backward(op, node, gs, active, (2, 1, n))
    step = back.copy.op
    slices = {y: op.like(ir.Value(name=step.name("slice")), y) for y in back.stacked_gs}
    states, sums, _ = back.differentiate(slices)
    if not states and not sums:
        return []
    place = ir.Value(name=step.name("i"), type=_INT64, shape=ir.Shape(()))
    going = ir.Value(name=step.name("going"), type=_BOOL, shape=ir.Shape(()))
    changed = [*states, *sums]
    back.copy.graph.inputs[:] = [place, going, *(before for _, before, _ in changed)]
    back.copy.give([going, *(after for *_, after in changed)])
    trips = op.Squeeze(op.Shape(_hand_out(op, node, "body", back.copy.original.inputs[0])), [0])
    where = {s: back.stacked_gs[y] for y, s in slices.items()}
    _bind(back, place, trips - 1, where)
    held = {"body": back.copy.graph}
    begin = back.starts(states, sums)
    made = op.emit("Loop", [trips, None, *begin], held, len(begin), fresh=True)
    xs = [back.initial[i] for i, *_ in states] + [v for v, *_ in sums]
    return [(x, op.like(dx, x)) for x, dx in zip(xs, _several(made), strict=True)]


_INT64, _BOOL = ir.TensorType(ir.DataType.INT64), ir.TensorType(ir.DataType.BOOL)


def _bind(
    back: _Backward, place: ir.Value, last: ir.Value, where: dict[ir.Value, ir.Value]
) -> None:
    """Write, at the head of the backward body, what an iteration reads; the last one is first."""
    op, copy = back.op, back.copy
    iteration, going = copy.inputs[:2]
    used = {a: o for a, o in zip(back.states, back.originals, strict=True) if a.uses()}
    steady = {a: o for a, o in used.items() if _steady(back, a)}
    where = where | {a: _hand_out(op, back.node, "body", o) for a, o in steady.items()}
    drawn = copy.draws()
    where |= {d: _hand_out(op, back.node, "body", o) for d, o in drawn}
    recorded = _recorded(back, [a for a in used if a not in steady], bool(drawn))
    with copy.first() as inner:
        t = last - place
        t.shape = ir.Shape(())
        replace = ir.convenience.replace_all_uses_with
        replace(iteration, t)
        replace(going, inner.value(np.bool_(True)))
        for value, stack in where.items():
            if value.uses():
                replace(value, inner.like(inner.Gather(stack, t, axis=0), value))
        for value, sequence in recorded.items():
            replace(value, inner.like(inner.SequenceAt(sequence, t), value))


def _steady(back: _Backward, state: ir.Value) -> bool:
    """Tell whether a state is proven to keep its shape."""
    if not isinstance(state.type, ir.TensorType):
        return False
    result = back.state_outputs[back.states.index(state)]
    return equal(dims(state), dims(result))


def _recorded(back: _Backward, states: Sequence[ir.Value], drawn: bool) -> dict[ir.Value, ir.Value]:
    """Run the loop once more, for the sequences of what these states were in each iteration."""
    op, node = back.op, back.node
    if not states:
        return {}
    if drawn or not all(isinstance(a.type, ir.TensorType) for a in states):
        raise NoGradientRule(
            f"Loop {node.name!r} (output {node.outputs[0].name!r}): the backward pass needs what "
            f"{[a.name for a in states]} were in each iteration, sequences or of changing shape "
            "beside random numbers: draw them outside, or stack tensors of one shape"
        )
    copy = _Copy(op, node, "body")
    places = [back.states.index(a) for a in states]
    copy.graph.inputs[:] = copy.inputs
    kept, grown = [], []
    for i in places:
        a = copy.inputs[2 + i]
        of_tensors = ir.SequenceType(ir.TensorType(a.dtype or ir.DataType.FLOAT))
        kept.append(ir.Value(name=op.name(f"{a.name}_all"), type=of_tensors))
        grown.append(copy.op.SequenceInsert(kept[-1], a))
        grown[-1].type = of_tensors
    copy.graph.inputs.extend(kept)
    n = len(back.states)
    copy.give([*copy.outputs[: 1 + n], *grown])
    empty = [op.emit("SequenceEmpty", [], {"dtype": a.dtype}, fresh=True) for a in states]
    for value, like in zip(empty, kept, strict=True):
        value.type = like.type
    operands = [*node.inputs, *empty]
    made = op.emit("Loop", operands, {"body": copy.graph}, outputs=n + len(kept), fresh=True)
    return dict(zip(states, _several(made)[n:], strict=True))


def scan(op: Emit, node: ir.Node, gs: Sequence, active: Collection[ir.Value]) -> Pairs:
    """a_t+1, z_t = f(a_t, x_t, v): as Loop, and dx_t = f_x'ᵀ (da_t+1, dz_t)."""
    get = node.attributes.get_ints
    m = node.attributes.get_int("num_scan_inputs", 0)
    back = _Backward(op, node, gs, active, (0, 0, len(node.inputs) - m))
    graph = back.copy.graph
    in_axes, in_ways = (list(get(f"scan_input_{k}", (0,) * m)) for k in ("axes", "directions"))
    out = len(back.stacked)
    out_axes, out_ways = (list(get(f"scan_output_{k}", (0,) * out)) for k in ("axes", "directions"))
    slices = {y: _new(back.copy.op, y) for y in back.stacked_gs}
    states, sums, elements = back.differentiate(slices)
    if not states and not sums and not elements:
        return []
    changed = [*states, *sums]
    back.copy.give(after for *_, after in (*changed, *elements))

    read: list[tuple[ir.Value, ir.Value, int, int]] = []  # in the body, its stack, axis, direction
    for x, a, axis, way in zip(back.sequences, back.elements, in_axes, in_ways, strict=True):
        read += [(a, x, axis, 1 - way)] if a.uses() else []
    for y, axis, way in zip(back.stacked, out_axes, out_ways, strict=True):
        read += [(slices[y], back.stacked_gs[y], axis, 1 - way)] if y in slices else []

    def keep(value: ir.Value) -> ir.Value:
        for name in ("scan_output_axes", "scan_output_directions"):
            if name in node.attributes:
                node.attributes[name] = ir.AttrInt64s(name, [*get(name, ()), 0])
        return _stacked(op, node, back, _hand_out(op, node, "body", value), value)

    read += [(a, stack, 0, 1) for a, stack in back.taped(keep).items()]
    rows = {x: (axis, way) for x, axis, way in zip(back.sequences, in_axes, in_ways, strict=True)}
    if not read:  # something has to tell how often it runs
        x, (axis, way) = next(iter(rows.items()))
        read.append((back.elements[0], x, axis, way))
    graph.inputs[:] = [*(before for _, before, _ in changed), *(value for value, *_ in read)]
    begin = back.starts(states, sums)
    attributes = {
        "body": graph,
        "num_scan_inputs": len(read),
        "scan_input_axes": [axis for *_, axis, _ in read],
        "scan_input_directions": [way for *_, way in read],
    }
    if elements:
        attributes["scan_output_axes"] = [rows[x][0] for x, *_ in elements]
        attributes["scan_output_directions"] = [1 - rows[x][1] for x, *_ in elements]
    operands = [*begin, *(stack for _, stack, *_ in read)]
    made = op.emit("Scan", operands, attributes, len(changed) + len(elements), fresh=True)
    xs = [back.initial[i] for i, *_ in states] + [x for x, *_ in (*sums, *elements)]
    return [(x, op.like(dx, x)) for x, dx in zip(xs, _several(made), strict=True)]


def _stacked(
    op: Emit, node: ir.Node, back: _Backward, stack: ir.Value, element: ir.Value
) -> ir.Value:
    """State the shape of what a Scan returns of `element`."""
    lengths, inner = dims(back.sequences[0]), dims(element)
    if lengths is not None and inner is not None:
        axes = node.attributes.get_ints("scan_input_axes", (0,))
        stack.shape = ir.Shape([lengths[axes[0]], *inner])
    return stack


HOLDERS.update({"If": conditional, "Loop": loop, "Scan": scan})
