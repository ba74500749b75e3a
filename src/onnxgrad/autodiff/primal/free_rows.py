"""A model of a fixed batch as a model of any number of rows, where operators treat each by itself.

Exporters write the batch of their example, often 1, into shapes: of inputs, Reshapes, initial
states and tokens that are joined to each row. `free_rows` follows the axis of the rows through the
graph, rewrites what states their number, and lets the row proofs decide whether the result computes
each row as before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import islice
from math import prod

import numpy as np
import onnx_ir as ir

from onnxgrad.autodiff.row_sums import NotASum, assumed_lengths, require_sums
from onnxgrad.errors import ModelError
from onnxgrad.graph.axes import follow, named_axes
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.inference.infer import infer
from onnxgrad.graph.inference.sizes import fold_sizes
from onnxgrad.graph.shapes import constant, dims, static
from onnxgrad.graph.traversal import all_nodes, nodes_behind, reads

_TRIED = 16  # choices of the axes of the inputs
VISITS_PER_NODE = 20  # visits of a node, on average, until the search gives up
_STATES = {"GRU": (5,), "LSTM": (5, 6), "RNN": (5,)}  # operands that each row has one of

Axes = dict[str, int | None]
Places = dict[ir.Value, tuple[int, int]]


def stated_rows(model: ir.Model, symbol: str, stated: Mapping[str, int | None]) -> int | None:
    """Return the number of rows that a prepared model takes: 1, or that of all inputs; None: any.

    The arguments are those of `free_rows`.
    """
    shapes = [dims(x) or () for x in model.graph.inputs]
    if any(symbol in shape for shape in shapes):
        return None  # it takes any number: an axis of length 1 is another, as of a state
    open_inputs = [x for x in model.graph.inputs if x.name not in stated]
    firsts = {(dims(x) or (None,))[0] for x in open_inputs}
    one = 1 if 1 in firsts else firsts.pop() if len(firsts) == 1 else None
    return one if isinstance(one, int) and one > 0 else None


def free_rows(
    model: ir.Model, symbol: str, stated: Mapping[str, int | None], count: int = 1
) -> ir.Model | None:
    """Return a copy of a prepared model that takes any number of rows.

    None if no choice of axes is proven: row i of each output must depend on row i of the inputs
    only.

    Args:
        model: a prepared model, which stays as it is.
        symbol: the name of the number of rows in shapes.
        stated: the axis of the rows of inputs, where it is known; None for an input without rows.
        count: the number of rows that the model takes: `stated_rows`.
    """
    for axes in islice(_choices(model.graph, stated, count), _TRIED):
        copy = model.clone()
        try:
            rows = _Rows(copy.graph, axes, count)
            rows.find()
            rows.write()
            _declare(copy, symbol, axes)
            _require_apart(copy, axes)
        except (NotASum, ModelError):
            continue
        return copy
    return None


def _choices(graph: ir.Graph, stated: Mapping[str, int | None], count: int) -> Iterator[Axes]:
    """Yield axes of the rows, the likeliest first: of each input the first of length `count`."""
    names, each = [], []
    for x in graph.inputs:
        shape = dims(x) or ()
        ones: list[int | None] = [i for i, d in enumerate(shape) if d == count]
        if len(shape) == 1 and x.dtype is not None and not x.dtype.is_floating_point():
            ones = [*ones, None]  # a sample rate, or the like
        names.append(str(x.name))
        each.append([stated[names[-1]]] if names[-1] in stated else ones or [None])
    waiting = [(0, (0,) * len(each), 0)]  # sum of the indices, indices, the first that may grow
    while waiting:
        total, choice, first = heappop(waiting)
        yield {n: ones[i] for n, ones, i in zip(names, each, choice, strict=True)}
        for k in range(first, len(each)):
            if choice[k] + 1 < len(each[k]):
                heappush(waiting, (total + 1, (*choice[:k], choice[k] + 1, *choice[k + 1 :]), k))


def _declare(model: ir.Model, symbol: str, axes: Axes) -> None:
    """Name the rows of the inputs, and infer all shapes anew."""
    for node in all_nodes(model.graph):
        for y in node.outputs:
            y.shape = None
    for x in model.graph.inputs:
        if (axis := axes[str(x.name)]) is not None:
            shape = list(dims(x) or ())
            shape[axis] = symbol
            x.shape = ir.Shape(shape)
    fold_sizes(model.graph, infer(model))


def _require_apart(model: ir.Model, axes: Axes) -> None:
    """Raise `NotASum` unless the sum of each output is proven to be a sum over rows."""
    copy = model.clone()
    op = Emit(copy.graph)
    sums = [op.ReduceSum(_real(op, y), keepdims=0) for y in copy.graph.outputs]
    require_sums(copy, axes, assumed_lengths(copy.graph.inputs), sums)


def _real(op: Emit, y: ir.Value) -> ir.Value:
    """Return a value as floats, of which a sum is a sum over rows."""
    real = y.dtype is not None and y.dtype.is_floating_point()
    return y if real else op.Cast(y, to=ir.DataType.FLOAT)


class _Rows:
    """Where the rows are in the values of a graph of `count` rows; all shapes are those of these.

    - `axes`: the axis of the rows of each value that depends on them.
    - `outer`: how often the rows follow each other along it, if not once: a Reshape turns
      [T, N, D] into [T N, D].
    """

    def __init__(self, graph: ir.Graph, axes: Axes, count: int) -> None:
        self.graph, self.op, self.count = graph, Emit(graph), count
        inputs = {x: axes[str(x.name)] for x in graph.inputs}
        self.axes = {x: axis for x, axis in inputs.items() if axis is not None}
        self.outer = dict.fromkeys(self.axes, 1)

    # -- where they are ---------------------------------------------------------------------------

    def find(self) -> None:
        """Follow the rows; raise `NotASum` if a node mixes them, or may do so.

        A Reshape of one row may be one of several of all rows: the likeliest is tried first.
        """
        needed = nodes_behind(self.graph.outputs)
        nodes = [node for node in self.graph if node in needed and not _is_size(node)]
        left: list[tuple[int, Iterator[Places]]] = []
        at, steps = 0, VISITS_PER_NODE * len(nodes)
        while at < len(nodes):
            node, steps = nodes[at], steps - 1
            if self.axes.keys().isdisjoint(reads(node)):
                at += 1
                continue
            options = iter(self._options(node))
            left.append((at, options))
            while (places := next(options, None)) is None:
                left.pop()
                if not left or steps <= 0:
                    raise NotASum(f"{node.op_type} (output {node.outputs[0].name!r}) may mix rows")
                before, options = left[-1]
                self._forget(nodes[before : at + 1])
                at = before
            self.axes |= {y: axis for y, (axis, _) in places.items()}
            self.outer |= {y: outer for y, (_, outer) in places.items()}
            at += 1
        if not self.axes.keys() >= {*self.graph.outputs}:
            raise NotASum("an output does not depend on the rows")

    def _forget(self, nodes: Sequence[ir.Node]) -> None:
        for y in (y for node in nodes for y in node.outputs):
            self.axes.pop(y, None)
            self.outer.pop(y, None)

    def _options(self, node: ir.Node) -> list[Places]:
        """Return where the rows of the outputs may be; none where a node mixes them."""
        x, y = node.inputs[0], node.outputs[0]
        if x is not None and self._reshapes(node):
            before, after = dims(x), dims(y)
            front = None if before is None else static(before[: self.axes[x]])
            if before is None or after is None or front is None:
                return []
            found = _places(prod(front) * self.outer[x], before, after, self.axes[x], self.count)
            return [{y: place} for place in found]
        operands = [x for x in node.inputs if x is not None and x in self.axes]
        outer = {self.outer[x] for x in operands}
        lengths = {shape[self.axes[x]] for x in operands if (shape := dims(x))}
        places: Places = {}
        for y, place in zip(node.outputs, follow(node, self.axes), strict=True):
            own = list(dims(y) or ())
            if isinstance(place, int) and own and not isinstance(own[place], int):
                own[place] = next(iter(lengths))  # which inference did not find
                y.shape = ir.Shape(own)
            if isinstance(place, int) and len(outer) == 1 and own and own[place] in lengths:
                places[y] = place, min(outer)
            elif y.uses() or y.is_graph_output() or y is node.outputs[0]:
                return []
        return [places]

    def _reshapes(self, node: ir.Node) -> bool:
        """Return whether a node reshapes, or takes the only row out of its axis."""
        x = node.inputs[0]
        if node.domain or x not in self.axes:
            return False
        if node.op_type in ("Reshape", "Flatten"):
            return True
        if self.count > 1:
            return False
        named, axis, shape = named_axes(node) or [], self.axes[x], dims(x) or ()
        if node.op_type == "Squeeze":
            return axis in named
        if node.op_type == "Unsqueeze":  # of what a Squeeze has joined with another axis
            return shape[axis] != 1 and min(named, default=axis + 1) <= axis
        index = constant(node.inputs[1]) if node.op_type == "Gather" else None
        return axis in named and index is not None and index.shape == () and index in (0, -1)

    # -- what states that there is one ------------------------------------------------------------

    def write(self) -> None:
        """Rewrite the nodes that hold for one row only."""
        for node in list(self.graph):
            if node.outputs[0] not in self.axes:
                continue
            if self._reshapes(node):
                self._reshape(node)
            elif node.op_type in ("Resize", "Slice"):
                self._name_other_axes(node)
            elif node.op_type == "Concat":
                alone = [i for i, x in enumerate(node.inputs) if x not in self.axes]
                self._repeat(node, alone, self.axes[node.outputs[0]])
            elif (states := _STATES.get(node.op_type)) is not None:
                given = [i for i in states if i < len(node.inputs) and node.inputs[i]]
                alone = [i for i in given if node.inputs[i] not in self.axes]
                self._repeat(node, alone, 0 if node.attributes.get_int("layout", 0) else 1)

    def _name_other_axes(self, node: ir.Node) -> None:
        """Let a Resize to stated sizes, or a Slice that keeps the row, name the other axes only."""
        x = node.inputs[0]
        assert x is not None
        named, axis = named_axes(node) or [], self.axes[x]
        kept = [i for i, a in enumerate(named) if a != axis]
        if len(kept) == len(named):
            return
        if node.op_type == "Resize":
            sizes = constant(node.inputs[3]) if len(node.inputs) > 3 else None
            if sizes is not None:
                node.attributes["axes"] = ir.AttrInt64s("axes", [named[i] for i in kept])
                node.replace_input_with(3, self.op.const(sizes[kept]))
            return
        with self.op.at(node):
            given = [v for v in (*node.inputs[1:3], *node.inputs[4:5]) if v is not None]
            starts, ends, *steps = (self.op.Gather(v, np.array(kept)) for v in given)
            axes = np.array([named[i] for i in kept], np.asarray(constant(given[0])).dtype)
            new = self.op.set_type_like(
                self.op.Slice(x, starts, ends, axes, *steps), node.outputs[0]
            )
        self._replace(node, new)

    def _repeat(self, node: ir.Node, operands: Sequence[int], axis: int) -> None:
        """Repeat operands that each row has one of, but which are stated once, for one row."""
        of = next(x for x in node.inputs if x is not None and x in self.axes)
        for i in operands:
            x = self._of_one_row(node.inputs[i], axis)
            if x is None:
                raise NotASum(f"{node.op_type}: operand {i} is not that of one row")
            ones = [1] * len(dims(x) or ())
            with self.op.at(node):
                target = self.op.vector(*ones[:axis], self._rows(of), *ones[axis + 1 :])
                repeated = self.op.set_type_like(self.op.Expand(x, target), x)
            node.replace_input_with(i, repeated)

    def _of_one_row(self, x: ir.Value | None, axis: int) -> ir.Value | None:
        """Return what all rows have the same; None if they differ, or it is not known."""
        shape = dims(x)
        if x is None or shape is None or shape[axis] != self.count:
            return None
        if self.count == 1:
            return x
        node, lengths = x.producer(), static(shape)
        expanded = node is not None and node.op_type == "Expand" and lengths is not None
        array = constant(node.inputs[0] if node is not None and expanded else x)
        if array is not None and lengths is not None:
            array = np.broadcast_to(array, lengths)
        one = None if array is None else array.take([0], axis)
        return self.op.const(one) if one is not None and np.all(array == one) else None

    def _rows(self, x: ir.Value) -> ir.Value:
        """Return the length of the axis of the rows at run time, int64 [1]."""
        axis = self.axes[x]
        return self.op.Shape(x, start=axis, end=axis + 1)

    def _reshape(self, node: ir.Node) -> None:
        """Write a Reshape of all rows for that of one."""
        with self.op.at(node):
            new = self.op.Reshape(node.inputs[0], self._target(node))
            new = self.op.set_type_like(new, node.outputs[0])
        self._replace(node, new)

    def _replace(self, node: ir.Node, new: ir.Value) -> None:
        """Let a value, which gets the name, stand for the output of a node, which is removed."""
        y = node.outputs[0]
        new.name, y.name = y.name, self.op.name(str(y.name))
        self.axes[new], self.outer[new] = self.axes[y], self.outer[y]
        ir.convenience.replace_all_uses_with(y, new, replace_graph_outputs=True)
        self.graph.remove(node, safe=True)

    def _target(self, node: ir.Node) -> list[int] | ir.Value:
        """Return the shape of all rows, for the node that has that of one."""
        x, y = node.inputs[0], node.outputs[0]
        assert x is not None
        place, before, after = self.axes[y], dims(x) or (), dims(y) or ()
        stated = constant(node.inputs[1]) if node.op_type == "Reshape" else None
        target: list[int | ir.Value] = [d if isinstance(d, int) else -1 for d in after]
        if stated is not None and not node.attributes.get_int("allowzero", 0):
            target = [int(n) if n < 1 else d for n, d in zip(stated, target, strict=True)]
        target[place] = -1
        if target.count(-1) > 1:  # lengths that are not known
            own, length = before[self.axes[x]], after[place]
            if not isinstance(own, int) or not isinstance(length, int):
                raise NotASum(f"{node.op_type} (output {y.name!r}) has an unknown shape")
            rows = self._rows(x)
            target[place] = rows if own == length else rows * length / own
        if target.count(-1) > 1:
            if node.op_type != "Reshape":
                raise NotASum(f"{node.op_type} (output {y.name!r}) has an unknown shape")
            given = node.inputs[1]
            target = [
                t if i == place or t != -1 else self.op.Slice(given, [i], [i + 1])
                for i, t in enumerate(target)
            ]
        return self.op.vector(*target)


def _is_size(node: ir.Node) -> bool:
    return node.op_type in ("Shape", "Size") and not node.domain


def _places(
    front: int, before: Sequence, after: Sequence, axis: int, count: int
) -> list[tuple[int, int]]:
    """Return where rows may go that have `front` elements before them, the likeliest first.

    A place is an axis, and how often the rows follow each other along it. An axis of the length
    `count` is likely, best the same as before. Otherwise the rows are joined with what is behind
    them, as the heads of an attention that get an axis; or with what is before them, as steps of a
    sequence.
    """
    found = []
    for i, d in enumerate(after):
        lengths = static(tuple(after[:i]))
        if not lengths and i:
            break
        outer, rest = divmod(front, prod(lengths or ()))
        joined = isinstance(d, int) and outer and d % (outer * count) == 0
        if not rest and (outer == 1 or joined):
            behind = d != count and (outer == 1) == (len(after) < len(before))
            found.append(((d != count, behind, i != axis, i), (i, outer)))
    return [place for _, place in sorted(found)]


def add_row_axes(graph: ir.Graph, indices: Iterable[int], exempt: Collection[str]) -> None:
    """Give outputs of a model of one row that lack the axis of the rows one, in place.

    These are outputs of static shapes in which no length is 1; `indices` are those to look at.
    """
    own = [dims(x) for x in graph.inputs if x.name not in exempt]
    if not any(shape and shape[0] == 1 for shape in own):
        return
    op = Emit(graph)
    for i in indices:
        y = graph.outputs[i]
        shape = static(dims(y))
        if shape is not None and 1 not in shape and y.dtype is not None:
            z = op.Unsqueeze(y, [0])
            z.type, z.shape, z.name = y.type, ir.Shape((1, *shape)), y.name
            y.name = op.name(f"{y.name}_of_one_row")
            graph.outputs[i] = z
