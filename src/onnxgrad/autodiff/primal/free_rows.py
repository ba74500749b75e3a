"""A model of a fixed batch as a model of any number of rows, where operators treat each by itself.

Exporters write the batch of their example, often 1, into shapes: of inputs, Reshapes, initial
states and tokens that are joined to each row. `free_rows` finds the row axis of each value by the
walk of the row proofs, rewrites the nodes that state the number of rows, and lets the proofs decide
whether the result computes each row as before. Where they fail, a model of one row gets a leading
axis of rows in each value (`row_axis.py`). An If on the row is written as a selection first
(`row_branches.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import islice

import numpy as np
import onnx_ir as ir

from onnxgrad.autodiff.members import UnstackableNode
from onnxgrad.autodiff.primal.row_axis import push_row_axis
from onnxgrad.autodiff.primal.row_branches import select_row_branches
from onnxgrad.autodiff.row_proofs import (
    RowState,
    RowWalk,
    UnprovenRows,
    assumed_lengths,
    infer_from_rows,
    mixing_error,
    walk_rows,
)
from onnxgrad.errors import ModelError
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.tidy import take_apart
from onnxgrad.graph.traversal import nodes_behind, reads
from onnxgrad.operators import RECURRENT, operator_of
from onnxgrad.operators.axes import named_axes
from onnxgrad.operators.shapes import Dim, constant, dims, static
from onnxgrad.reporting import logger

CHOICES_TRIED = 16  # choices of the row axes of the inputs
VISITS_PER_NODE = 20  # visits of a node, on average, until the search gives up

InputAxes = dict[str, int | None]
States = dict[ir.Value, RowState]
_Attempt = Callable[[ir.Model, InputAxes, str], None]


def fixed_row_count(model: ir.Model, symbol: str, stated: Mapping[str, int | None]) -> int | None:
    """Return the number of rows that a prepared model takes, None if it takes any number.

    It is 1 if an input has one row, otherwise the number that all inputs have in common.

    The arguments are the same as of `free_rows`.
    """
    shapes = [dims(x) or () for x in model.graph.inputs]
    if any(symbol in shape for shape in shapes):
        return None  # an axis of length 1 of another input, as of a state, is not the row axis
    open_inputs = [x for x in model.graph.inputs if x.name not in stated]
    firsts = {(dims(x) or (None,))[0] for x in open_inputs}
    one = 1 if 1 in firsts else firsts.pop() if len(firsts) == 1 else None
    return one if isinstance(one, int) and one > 0 else None


def free_rows(
    model: ir.Model, symbol: str, stated: Mapping[str, int | None], count: int = 1
) -> ir.Model | None:
    """Return a copy of a prepared model that takes any number of rows.

    None if row i of each output is not proven to depend on row i of the inputs only, for any choice
    of axes, and a model of one row has a node without a form for an axis of rows in front.

    Args:
        model: a prepared model, which is not changed.
        symbol: the name of the number of rows in shapes.
        stated: the row axis of inputs, where it is known; None for an input without rows.
        count: the number of rows that the model takes: `fixed_row_count`.
    """
    candidates = list(islice(_row_axis_candidates(model.graph, stated, count), CHOICES_TRIED))
    proven: _Attempt = partial(_keep_rows_apart, count=count)
    attempts = [(proven, axes) for axes in candidates]
    if count == 1 and _are_likely_row_axes(model.graph, candidates[0], stated):
        attempts.append((push_row_axis, candidates[0]))
    for free, axes in attempts:
        copy = model.clone()
        try:
            if count == 1:
                rows = (x for x in copy.graph.inputs if axes[str(x.name)] is not None)
                select_row_branches(copy.graph, rows)
            free(copy, axes, symbol)
        except (UnprovenRows, UnstackableNode, ModelError) as error:
            logger.info("rows on the axes %s: %s", axes, error)
            take_apart(copy.graph)
            continue
        return copy
    return None


def _are_likely_row_axes(
    graph: ir.Graph, axes: InputAxes, stated: Mapping[str, int | None]
) -> bool:
    """Return whether each input has its rows on axis 0, on the axis that is stated for it, or is a
    state, which an output of the same shape hands on.
    """
    moved = [x for x in graph.inputs if axes[str(x.name)] and x.name not in stated]
    states = {dims(y) for y in graph.outputs}
    return all(dims(x) in states for x in moved)


def _keep_rows_apart(model: ir.Model, axes: InputAxes, symbol: str, count: int) -> None:
    """Let a model of `count` rows take any number of rows, in place; raise `UnprovenRows` unless
    its nodes are proven to keep the rows apart.
    """
    fixed = FixedRows(model.graph, axes, count)
    fixed.find_rows()
    fixed.rewrite_fixed_nodes()
    shapes = {str(x.name): shape for x in model.graph.inputs if (shape := dims(x))}
    infer_from_rows(model, axes, shapes, symbol)
    copy = model.clone()
    _require_rows_in_outputs(copy, axes)
    take_apart(copy.graph)


def _row_axis_candidates(
    graph: ir.Graph, stated: Mapping[str, int | None], count: int
) -> Iterator[InputAxes]:
    """Yield row axes, the likeliest first: of each input the first axis of length `count`."""
    names, candidates = [], []
    for x in graph.inputs:
        shape = dims(x) or ()
        axes: list[int | None] = [i for i, d in enumerate(shape) if d == count]
        if len(shape) == 1 and x.dtype is not None and not x.dtype.is_floating_point():
            axes = [*axes, None]  # an input without rows, such as a sample rate
        names.append(str(x.name))
        candidates.append([stated[names[-1]]] if names[-1] in stated else axes or [None])
    waiting = [(0, (0,) * len(names), 0)]  # (sum of indices, indices, first index that may grow)
    while waiting:
        total, choice, first = heappop(waiting)
        yield {n: axes[i] for n, axes, i in zip(names, candidates, choice, strict=True)}
        for k in range(first, len(names)):
            if choice[k] + 1 < len(candidates[k]):
                heappush(waiting, (total + 1, (*choice[:k], choice[k] + 1, *choice[k + 1 :]), k))


def _require_rows_in_outputs(model: ir.Model, axes: InputAxes) -> None:
    """Raise `UnprovenRows` unless each output has an axis of rows.

    The shapes of `model` are inferred again, in place.
    """
    outputs = model.graph.outputs
    walk = walk_rows(model, axes, assumed_lengths(model.graph.inputs), outputs)
    if lacking := [y.name for y in outputs if not walk.has_rows(y)]:
        raise UnprovenRows(f"the outputs {lacking} do not depend on the rows of the inputs")


class FixedRows(RowWalk):
    """A walk through a graph whose shapes hold for `count` rows only, which makes them hold for any
    number.
    """

    def __init__(self, graph: ir.Graph, axes: InputAxes, count: int) -> None:
        self.graph, self.op, self.count = graph, Emit(graph), count
        named = {x: axes[str(x.name)] for x in graph.inputs}
        super().__init__({x: axis for x, axis in named.items() if axis is not None}, count)

    # -- the search for the rows ------------------------------------------------------------------

    def find_rows(self) -> None:
        """Find how each value depends on the rows; raise `UnprovenRows` if a node may mix rows.

        The row axis after a Reshape may be one of several: the likeliest is tried first.
        """
        needed = nodes_behind(self.graph.outputs)
        sizes = ("Shape", "Size")
        nodes = [n for n in self.graph if n in needed and (n.domain or n.op_type not in sizes)]
        # (node, number of known states, options left)
        choices: list[tuple[int, int, Iterator[States]]] = []
        at, visits = 0, VISITS_PER_NODE * len(nodes)
        while at < len(nodes):
            visits -= 1
            if not self.states.keys().isdisjoint(reads(nodes[at])):
                refused = nodes[at]
                choices.append((at, len(self.states), iter(self._possible_row_states(refused))))
                while (states := next(choices[-1][2], None)) is None:
                    choices.pop()
                    if not choices or visits <= 0:
                        raise mixing_error(refused)
                    at, known, _ = choices[-1]
                    while len(self.states) > known:
                        self.states.popitem()
                self.states |= states
            at += 1
        if not self.states.keys() >= {*self.graph.outputs}:
            raise UnprovenRows("an output does not depend on the rows of the inputs")

    def _possible_row_states(self, node: ir.Node) -> list[States]:
        """Return the possible states of the node's outputs, the likeliest first; [] if the node
        mixes rows.
        """
        if self._reshapes_rows(node):
            x, y = node.inputs[0], node.outputs[0]
            assert x is not None
            found = [(self._state_sort_key(x, y, s), s) for s in self.states_after_reshape(node)]
            return [{y: state} for _, state in sorted(found, key=lambda pair: pair[0])]
        states: States = {}
        for y, state in zip(node.outputs, self.states_by_row(node), strict=True):
            if state is not None and state.kind == "rows":
                states[y] = state
            elif y.uses() or y.is_graph_output() or y is node.outputs[0]:
                return []
        return [states]

    def _state_sort_key(self, x: ir.Value, y: ir.Value, state: RowState) -> tuple:
        """Return the sort key of a row state after a Reshape: smaller for a likelier axis.

        An axis of the length `count` is likely, best the same as before. Otherwise the rows are
        joined with the axis behind them, as the heads of an attention that get an axis; or with
        the axis before them, as steps of a sequence.
        """
        joined, fewer = state.length != self.count, len(dims(y) or ()) < len(dims(x) or ())
        behind = joined and (state.outer == 1) == fewer
        return joined, behind, state.axis != self.states[x].axis, state.axis

    def common_layout(self, states: Sequence[RowState]) -> tuple[int, Dim] | None:
        """Return (outer, length) of the row axis that all `states` share, where an unknown
        length equals any; else None.
        """
        known = {s.length for s in states if isinstance(s.length, int)}
        length = known.pop() if len(known) == 1 else states[0].length
        filled = [s if isinstance(s.length, int) else s._replace(length=length) for s in states]
        return super().common_layout(filled)

    def has_length(self, y: ir.Value, axis: int, length: Dim) -> bool:
        """Return whether an axis of `y` has the length; an unknown length is set to it."""
        shape = list(dims(y) or ())
        if axis < len(shape) and not isinstance(shape[axis], int):
            shape[axis] = length
            y.shape = ir.Shape(shape)
        return super().has_length(y, axis, length)

    def elements_per_row(self, length: Dim) -> int | None:
        """Return how many elements of an axis of this length each row has; 1 if the length is
        unknown.
        """
        times, rest = divmod(length, self.count) if isinstance(length, int) else (1, 0)
        return None if rest else times

    def _reshapes_rows(self, node: ir.Node) -> bool:
        """Return whether `node` is a Reshape of rows, or removes the row axis of a single row."""
        x = node.inputs[0]
        if node.domain or x not in self.states:
            return False
        if node.op_type in ("Reshape", "Flatten"):
            return True
        if self.count > 1:
            return False
        named, axis, shape = named_axes(node) or [], self.states[x].axis, dims(x) or ()
        if node.op_type == "Squeeze":
            return axis in named
        if node.op_type == "Unsqueeze":  # after a Squeeze that has joined the rows with an axis
            return shape[axis] != 1 and min(named, default=axis + 1) <= axis
        index = constant(node.inputs[1]) if node.op_type == "Gather" else None
        return axis in named and index is not None and index.shape == () and index in (0, -1)

    # -- the nodes that state the number of rows --------------------------------------------------

    def rewrite_fixed_nodes(self) -> None:
        """Rewrite the nodes that are right for `count` rows only, so that they are right for any
        number.
        """
        for node in list(self.graph):
            state = self.states.get(node.outputs[0])
            if state is None:
                continue
            if self._reshapes_rows(node):
                with self.op.at(node):
                    reshaped = self.op.Reshape(node.inputs[0], self._shape_for_any_rows(node))
                self._replace_node(node, reshaped)
            elif node.op_type in ("Resize", "Slice"):
                self._drop_row_axis(node)
            elif node.op_type == "Concat":
                self._repeat_stored_rows(node, range(len(node.inputs)), state.axis)
            elif node.op_type in RECURRENT:
                axis = 0 if node.attributes.get_int("layout", 0) else 1
                initial = [i for i, role in enumerate(operator_of(node).roles) if role == "h"]
                self._repeat_stored_rows(node, initial, axis)

    def _drop_row_axis(self, node: ir.Node) -> None:
        """Drop the row axis from the axes of a Resize to given sizes, or of a Slice."""
        x = node.inputs[0]
        assert x is not None
        named = named_axes(node) or []
        kept = [i for i, a in enumerate(named) if a != self.states[x].axis]
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
            sliced = self.op.Slice(x, starts, ends, axes, *steps)
        self._replace_node(node, sliced)

    def _repeat_stored_rows(self, node: ir.Node, operands: Iterable[int], axis: int) -> None:
        """Replace operands that the file stores for `count` rows by one row, repeated at run
        time.
        """
        rows = next(x for x in node.inputs if x is not None and x in self.states)
        for i in operands:
            x = node.inputs[i] if i < len(node.inputs) else None
            if x is None or x in self.states:
                continue
            one = self._single_row_of_operand(x, axis)
            if one is None:
                raise UnprovenRows(f"{node.op_type}: operand {i}, {x.name!r}, holds different rows")
            ones = [1] * len(dims(one) or ())
            with self.op.at(node):
                target = self.op.vector(*ones[:axis], self._row_length(rows), *ones[axis + 1 :])
                repeated = self.op.set_type_like(self.op.Expand(one, target), one)
            node.replace_input_with(i, repeated)

    def _single_row_of_operand(self, x: ir.Value, axis: int) -> ir.Value | None:
        """Return one row of an operand, if all its rows along `axis` are equal; else None."""
        shape = dims(x)
        if shape is None or shape[axis] != self.count:
            return None
        if self.count == 1:
            return x
        node, lengths = x.producer(), static(shape)
        expanded = node is not None and node.op_type == "Expand" and lengths is not None
        array = constant(node.inputs[0] if node is not None and expanded else x)
        if array is None:
            return None
        array = array if lengths is None else np.broadcast_to(array, lengths)
        one = array.take([0], axis)
        return self.op.const(one) if np.all(array == one) else None

    def _row_length(self, x: ir.Value) -> ir.Value:
        """Return the length of the row axis of `x` at run time, int64 of shape [1]."""
        axis = self.states[x].axis
        return self.op.Shape(x, start=axis, end=axis + 1)

    def _replace_node(self, node: ir.Node, new: ir.Value) -> None:
        """Replace a node by the value `new`, which takes over the name, type and state of its
        output.
        """
        y = node.outputs[0]
        self.op.set_type_like(new, y)
        new.name, y.name = y.name, self.op.name(str(y.name))
        self.states[new] = self.states[y]
        ir.convenience.replace_all_uses_with(y, new, replace_graph_outputs=True)
        self.graph.remove(node, safe=True)

    def _shape_for_any_rows(self, node: ir.Node) -> list[int] | ir.Value:
        """Return the shape operand of a Reshape node for any number of rows."""
        x, y = node.inputs[0], node.outputs[0]
        assert x is not None
        place, before, after = self.states[y].axis, dims(x) or (), dims(y) or ()
        stated = constant(node.inputs[1]) if node.op_type == "Reshape" else None
        target: list[int | ir.Value] = [d if isinstance(d, int) else -1 for d in after]
        if stated is not None and not node.attributes.get_int("allowzero", 0):
            target = [int(n) if n < 1 else d for n, d in zip(stated, target, strict=True)]
        target[place] = -1
        if target.count(-1) == 1:
            return self.op.vector(*target)
        own, length = before[self.states[x].axis], after[place]
        several = target.count(-1) > 2  # a Reshape can infer only one unknown length
        if not (isinstance(own, int) and isinstance(length, int)) or (
            several and node.op_type != "Reshape"
        ):
            raise UnprovenRows(f"{node.op_type} (output {y.name!r}) has axes of unknown length")
        if several:
            given = node.inputs[1]
            target = [
                self.op.Slice(given, [i], [i + 1]) if t == -1 and i != place else t
                for i, t in enumerate(target)
            ]
        rows = self._row_length(x)
        target[place] = rows if own == length else rows * length / own
        return self.op.vector(*target)


def add_row_axes(graph: ir.Graph, indices: Iterable[int], exempt: Collection[str]) -> None:
    """Add a first axis of length 1 to the outputs, of a model of one row, that have no axis of
    rows.

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
