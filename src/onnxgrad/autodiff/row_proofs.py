"""Proofs about the rows of a batch: one walk through a graph that follows where they are.

The walk answers three questions: whether row i of an output depends on row i of the inputs only
(`require_independent_derivatives` and `require_independent_rows`); whether a loss is a sum or a
mean over rows, so that parts of a batch give parts of its gradient (`require_sums_over_rows`,
`reduction_over_rows`); and where a file of a fixed batch states the number of its rows
(`primal/free_rows.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Literal, NamedTuple

import onnx_ir as ir

from onnxgrad.errors import printable
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.infer import infer
from onnxgrad.graph.traversal import all_nodes, nodes_behind, reads, subgraphs
from onnxgrad.graph.walk import fold_sizes
from onnxgrad.model.local_functions import inline_ruled_calls
from onnxgrad.operators import ARITHMETIC, RANDOM, VIEWS, operator_of
from onnxgrad.operators.axes import SUMMED, named_axes, output_axes, shared_output_axes
from onnxgrad.operators.shapes import Dim, Dims, coefficient, dims, is_real, rank, static

BATCH_SYMBOL = "onnxgrad_batch"  # the length of the row axis in proofs, in all inputs that have one
_LOSSES = ("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss")


class UnprovenRows(ValueError):
    """A proof about rows that failed: a node mixes the rows, or an output is no sum over them."""


class RowState(NamedTuple):
    """How a value depends on the rows of the batch; values without a state do not depend on it.

    Attributes:
        kind: "rows" if row i depends on row i of the inputs only; "sum" for a sum over rows of
            such values, times constants; "count" for a sum that is the number of rows times a
            constant; "mean" for a mean over rows, times and plus constants; "size" for integers
            that depend on the number of rows in any way.
        axis: the axis of the rows.
        outer: how many times the rows follow each other along this axis: a Reshape turns
            [T, N, D] into [T N, D].
        length: the length of this axis; a multiple of the number of rows where each row has
            several elements along it.
        origin: the node that divides a mean by the number of rows.
    """

    kind: Literal["rows", "sum", "count", "mean", "size"]
    axis: int = 0
    outer: int = 1
    length: Dim = None
    origin: ir.Node | None = None


class RowWalk:
    """A walk along the nodes of a graph that finds the `RowState` of each value.

    `states_by_row` and `states_after_reshape` say where nodes that compute each row by itself
    take the rows; `visit` also follows sums, means and sizes, for shapes whose row axes have the
    length `BATCH_SYMBOL`.
    """

    def __init__(self, axes: Mapping[ir.Value, int], length: Dim) -> None:
        self.states = {x: RowState("rows", axis, 1, length) for x, axis in axes.items()}

    # -- the place of the rows --------------------------------------------------------------------

    def states_by_row(self, node: ir.Node) -> list[RowState | None]:
        """Return how each output depends on the rows, a `RowState`; None where the node may mix
        rows.
        """
        rows = {x: s for x in reads(node) if (s := self.states.get(x)) and s.kind == "rows"}
        layout = self.common_layout(list(rows.values()))
        states: list[RowState | None] = []
        axes = shared_output_axes(node, {x: s.axis for x, s in rows.items()})
        for y, axis in zip(node.outputs, axes, strict=True):
            if axis == SUMMED:
                states.append(RowState("sum"))
            elif isinstance(axis, int) and layout and self.has_length(y, axis, layout[1]):
                states.append(RowState("rows", axis, *layout))
            else:
                states.append(None)
        return states

    def common_layout(self, states: Sequence[RowState]) -> tuple[int, Dim] | None:
        """Return (outer, length) of the row axis that all `states` share; None if they differ,
        as the node would mix rows.
        """
        layouts = {(s.outer, s.length) for s in states}
        return layouts.pop() if len(layouts) == 1 else None

    def has_length(self, y: ir.Value, axis: int, length: Dim) -> bool:
        """Return whether an axis of `y` has this length, so that no row is missing or repeated."""
        shape = dims(y)
        return shape is not None and axis < len(shape) and shape[axis] == length

    def elements_per_row(self, length: Dim) -> int | None:
        """Return how many elements of an axis of this length each row has; None if unknown."""
        times, symbol = coefficient(length) if isinstance(length, str) else (0, "")
        return times if symbol == BATCH_SYMBOL else None

    def states_after_reshape(self, node: ir.Node) -> list[RowState]:
        """Return each possible `RowState` of a Reshape's output: row axes with as many elements
        before them.
        """
        x, y = node.inputs[0], node.outputs[0]
        assert x is not None
        state, before, after = self.states[x], dims(x), dims(y)
        front = None if before is None else static(before[: state.axis])
        if front is None or after is None:
            return []
        states = []
        for axis, length in enumerate(after):
            passed = static(after[:axis])
            if passed is None or 0 in passed:
                break
            outer, rest = divmod(prod(front) * state.outer, prod(passed))
            times = self.elements_per_row(length)
            if times is not None and outer and rest == 0 == times % outer:
                states.append(RowState("rows", axis, outer, length))
        return states

    # -- sums, means and sizes --------------------------------------------------------------------

    def visit(self, node: ir.Node) -> None:
        """Record how the outputs of a node depend on the rows; raise if the node may mix rows."""
        kinds = {self.states[x].kind for x in reads(node) if x in self.states}
        if _draws_random_numbers(node):
            raise mixing_error(node)
        if not node.domain and node.op_type in ("Shape", "Size"):
            self._visit_shape_node(node)
        elif "size" in kinds and not self._reads_sizes_as_shape(node):
            integers = all(not is_real(y) for y in node.outputs)
            computes = node.op_type in ARITHMETIC | VIEWS or operator_of(node).elements is not None
            if not (computes and integers and kinds == {"size"}):
                raise mixing_error(node)
            self.states |= dict.fromkeys(node.outputs, RowState("size"))
        elif kinds & {"sum", "count", "mean"}:
            self._visit_linear_node(node)
        elif "rows" not in kinds:
            self._visit_repeating_node(node)
        elif node.op_type == "Reshape" and not node.domain:
            self._visit_reshape_node(node)
        else:
            self._visit_row_wise_node(node)

    def _reads_sizes_as_shape(self, node: ir.Node) -> bool:
        """Return whether a node reads sizes that depend on the rows through its shape operand
        only.
        """
        operator = operator_of(node)
        others = (x for i, x in enumerate(node.inputs) if x and i not in operator.settings)
        states = [self.states.get(x) for x in others]
        # a Range computes
        takes_shape = operator.lengths is not None and node.op_type not in ARITHMETIC
        return takes_shape and not any(s and s.kind == "size" for s in states)

    def _visit_shape_node(self, node: ir.Node) -> None:
        """Record whether a Shape or Size counts the rows (times a constant), or returns other
        sizes.
        """
        get, shape = node.attributes.get_int, dims(node.inputs[0])
        read = (None,) if shape is None else shape[get("start", 0) : get("end", None)]
        symbols = [d for d in read if not isinstance(d, int)]
        counts = len(symbols) == 1 and self.elements_per_row(symbols[0]) is not None
        if symbols:
            counted = node.op_type == "Size" and counts
            self.states[node.outputs[0]] = RowState("count" if counted else "size")

    def _visit_linear_node(self, node: ir.Node) -> None:
        """Visit a node that reads sums or means over rows: it must be linear in sums, affine in
        means.
        """
        name, operands = node.op_type, [x for x in node.inputs if x is not None]
        states = [self.states.get(x) for x in reads(node)]
        mean = next((s for s in states if s and s.kind == "mean"), None)
        totals = ("mean",) if mean else ("sum", "count")
        kinds = [s.kind if (s := self.states.get(x)) else None for x in operands]
        total, real = [kind in totals for kind in kinds], is_real(node.outputs[0])
        keeps = name in VIEWS or name in ("Cast", "Neg")
        linear = (
            (keeps and total[0] and _cast_keeps_sums(operands[0], node.outputs[0]))
            or (name in ("Add", "Sub", "Sum") and (mean is not None or all(total)))
            or (name == "Mul" and sum(total) == 1)
            or (name == "Div" and total == [True, False] and real)
        )
        averages = name == "Div" and all(total) and kinds[1] == "count" and real
        mixed = any(s and s.kind not in (*totals, "size") for s in states)
        if node.domain or mixed or not (linear or averages):
            raise mixing_error(node if mean is None or mean.origin is None else mean.origin)
        state = mean or RowState("sum")
        if averages:
            state = RowState("mean", origin=node)
        elif keeps and kinds[0] == "count":
            state = RowState("count")
        self.states |= dict.fromkeys(node.outputs, state)

    def _visit_repeating_node(self, node: ir.Node) -> None:
        """Visit a node that does not read the batch, but whose outputs may repeat equal rows."""
        for y in node.outputs:
            shape = dims(y)
            symbolic = [i for i, d in enumerate(shape or ()) if not isinstance(d, int)]
            if shape is not None and not symbolic:
                continue
            by_shape = self._reads_sizes_as_shape(node) and node.op_type != "Reshape"
            if shape is None or not by_shape or len(symbolic) != 1:
                raise mixing_error(node)
            length = shape[symbolic[0]]
            if self.elements_per_row(length) is None:
                raise mixing_error(node)
            self.states[y] = RowState("rows", symbolic[0], 1, length)

    def _visit_reshape_node(self, node: ir.Node) -> None:
        """Visit a Reshape of rows, whose output must have a single axis that is not static."""
        x, y = node.inputs[0], node.outputs[0]
        after = self.states_after_reshape(node) if x is not None and self.has_rows(x) else []
        if len(after) != 1 or sum(not isinstance(d, int) for d in dims(y) or ()) != 1:
            raise mixing_error(node)
        self.states[y] = after[0]

    def _visit_row_wise_node(self, node: ir.Node) -> None:
        """Visit a node that computes each row from the same row of its operands, or reduces
        rows.
        """
        for y, state in zip(node.outputs, self.states_by_row(node), strict=True):
            if state is None:
                state = self._reduction_state(node)
            elif state.kind == "rows" and not self._combines_rows_only(node, y, state.axis):
                state = None
            if state is not None:
                self.states[y] = state
            elif y.uses() or y is node.outputs[0]:
                raise mixing_error(node)

    def _reduction_state(self, node: ir.Node) -> RowState | None:
        """Return the state "sum" or "mean" if a node reduces rows of equal weights; None
        otherwise.
        """
        x = node.inputs[0]
        if node.domain or x is None or not self.has_rows(x):
            return None
        if node.op_type == "ReduceMean":
            over_rows = self.states[x].axis in (named_axes(node) or ())
            return RowState("mean", origin=node) if over_rows else None
        if node.op_type not in _LOSSES:
            return None
        reduction = node.attributes.get_string("reduction", "mean")
        equal = len(node.inputs) < 3 and "ignore_index" not in node.attributes
        if reduction == "mean" and equal:
            return RowState("mean", origin=node)
        return RowState("sum") if reduction == "sum" else None

    def _combines_rows_only(self, node: ir.Node, y: ir.Value, axis: int) -> bool:
        """Return whether no operand without rows varies along the row axis of `y`."""
        k = node.outputs.index(y)
        others = [(i, dims(x)) for i, x in enumerate(node.inputs) if x and not self.has_rows(x)]
        return all(
            shape is not None
            and all(d == 1 or output_axes(node, i, a)[k] != axis for a, d in enumerate(shape))
            for i, shape in others
        )

    def has_rows(self, x: ir.Value) -> bool:
        """Return whether row i of a value is known to depend on row i of the inputs only."""
        return (state := self.states.get(x)) is not None and state.kind == "rows"


def mixing_error(node: ir.Node) -> UnprovenRows:
    """Return the error that names a node which mixes the rows of a batch, or may do so."""
    y = node.outputs[0]
    return UnprovenRows(
        f"{printable(node.op_type)} (output {y.name!r}, {printable(dims(y))}) mixes the rows of "
        "the batch, or may do so"
    )


def _draws_random_numbers(node: ir.Node) -> bool:
    """Return whether a node, or a node of its subgraphs, draws random numbers."""
    nodes = (node, *(n for graph in subgraphs(node) for n in all_nodes(graph)))
    random = (n for n in nodes if n.op_type in RANDOM and not n.domain)
    # two inputs: in inference mode
    return any(n.op_type != "Dropout" or len(n.inputs) > 2 for n in random)


def _cast_keeps_sums(x: ir.Value, y: ir.Value) -> bool:
    """Return whether a Cast of `x` to the dtype of `y` is linear, unlike a Cast to bool or
    integers.
    """
    if x.dtype == y.dtype:
        return True
    return is_real(y) or not (is_real(x) or ir.DataType.BOOL in (x.dtype, y.dtype))


# -- proofs for values of a model -----------------------------------------------------------------


def require_sums_over_rows(
    model: ir.Model,
    axes: Mapping[str, int | None],
    lengths: Mapping[str, Dims],
    outputs: Sequence[ir.Value],
) -> None:
    """Raise `UnprovenRows` unless `outputs` are sums over rows of functions of one row each.

    The proof holds for any number of rows. The shapes of `model`, and what follows from them, are
    replaced.

    Args:
        model: the model, in the working dialect.
        axes: the row axis of each input of data, None for an input without rows.
        lengths: the shape of each input of data.
        outputs: values of the graph.
    """
    walk = walk_rows(model, axes, lengths, outputs)
    for y in outputs:
        state = walk.states.get(y)
        if state is not None and state.origin is not None:
            raise mixing_error(state.origin)
        if state is None or state.kind not in ("sum", "count"):
            raise UnprovenRows(f"value {y.name!r} is not proven to be a sum over rows")


def reduction_over_rows(
    model: ir.Model, axes: Mapping[str, int | None], lengths: Mapping[str, Dims], loss: ir.Value
) -> Literal["sum", "mean"]:
    """Return whether a value is the sum or the mean over rows of functions of one row each.

    `require_sums_over_rows` documents the arguments; raise `UnprovenRows` if neither is proven.
    """
    state = walk_rows(model, axes, lengths, [loss]).states.get(loss)
    if state is not None and state.kind in ("sum", "count", "mean"):
        return "mean" if state.kind == "mean" else "sum"
    raise UnprovenRows(f"the loss {loss.name!r} is not proven to be a sum or a mean over rows")


def require_independent_rows(
    model: ir.Model, axes: Mapping[str, int | None], lengths: Mapping[str, Dims]
) -> None:
    """Raise `UnprovenRows` unless row i of each output depends on row i of the data only.

    `require_sums_over_rows` documents the arguments.
    """
    walk = walk_rows(model, axes, lengths, model.graph.outputs)
    for y in model.graph.outputs:
        shape = dims(y)
        if not shape:
            known = "unknown" if shape is None else "zero"
            raise UnprovenRows(f"output {y.name!r} has no axis of rows: its rank is {known}")
        if shape[0] != BATCH_SYMBOL or not walk.has_rows(y) or walk.states[y].axis != 0:
            raise UnprovenRows(
                f"output {y.name!r} of shape {printable(shape)} does not have one row along its "
                "first axis for each row of the inputs"
            )


def assumed_lengths(inputs: Iterable[ir.Value]) -> dict[str, tuple[int, ...]]:
    """Return `{input: declared shape}`, with a number in place of each symbolic dimension.

    The sizes of a graph that has several symbols are rarely inferred, and which rows it mixes does
    not depend on them.
    """
    numbers = dict[object, int]()
    return {
        str(x.name): tuple(
            d if isinstance(d, int) else numbers.setdefault(d, 32 * (len(numbers) + 2))
            for d in dims(x) or ()
        )
        for x in inputs
    }


def walk_rows(
    model: ir.Model,
    axes: Mapping[str, int | None],
    lengths: Mapping[str, Dims],
    outputs: Sequence[ir.Value],
) -> RowWalk:
    """Return the walk through all nodes that `outputs` need; `require_sums_over_rows` documents the
    arguments.
    """
    inline_ruled_calls(Emit(model.graph), model)
    walk = RowWalk(infer_from_rows(model, axes, lengths, BATCH_SYMBOL), BATCH_SYMBOL)
    needed = nodes_behind(outputs)
    for node in model.graph:
        if node in needed:
            walk.visit(node)
    return walk


def infer_from_rows(
    model: ir.Model, axes: Mapping[str, int | None], lengths: Mapping[str, Dims], symbol: str
) -> dict[ir.Value, int]:
    """Infer all shapes from data whose row axes have the length `symbol`; return `{input: row
    axis}`.

    `require_sums_over_rows` documents the arguments. Inputs that `lengths` lacks, the weights, keep
    their shapes.
    """
    for node in all_nodes(model.graph):
        for y in node.outputs:
            y.shape = None
    found = {}
    for x in model.graph.inputs:
        if (lengths_of_input := lengths.get(str(x.name))) is None:
            continue
        axis, shape = axes[str(x.name)], list(lengths_of_input)
        if axis is not None:
            found[x] = axis % len(shape)
            shape[axis] = symbol
        x.shape = ir.Shape(shape)
    fold_sizes(model.graph, infer(model))
    return found


# -- the proof for derivatives by row -------------------------------------------------------------


def require_independent_derivatives(
    graph: ir.Graph, inputs: Sequence[ir.Value], outputs: Sequence[ir.Value], proof: bool
) -> None:
    """Raise unless the derivatives of row i of the outputs w.r.t. all other rows of the inputs are
    zero.

    A value without a gradient, such as a mask, may depend on all rows. Without `proof`, check only
    that all inputs and outputs have the same number of rows.
    """
    for v in (*inputs, *outputs):
        if not rank(v):
            reason = "its rank is unknown" if rank(v) is None else "it is a scalar"
            raise ValueError(
                f"{v.name!r} has no rows ({reason}): choose inputs and outputs that have rows"
            )
    counts = {v: (dims(v) or (None,))[0] for v in (*inputs, *outputs)}
    length = counts[inputs[0]]
    if proof and length != 1:  # a single row cannot mix
        _walk_gradient_paths(graph, inputs, length, outputs)
    for v, count in counts.items():
        if (isinstance(length, int) or isinstance(count, int)) and count != length:
            raise ValueError(
                f"{v.name!r} of shape {dims(v)} and {inputs[0].name!r} of shape "
                f"{dims(inputs[0])} have different numbers of rows: use batched=False"
            )


def _walk_gradient_paths(
    graph: ir.Graph, inputs: Sequence[ir.Value], length: Dim, outputs: Sequence[ir.Value]
) -> None:
    """Follow the rows along all paths of gradients; raise if a node mixes rows, or moves the row
    axis.
    """
    walk, needed = RowWalk(dict.fromkeys(inputs, 0), length), _nodes_with_gradients(graph, outputs)
    for node in graph:
        if node not in needed or walk.states.keys().isdisjoint(reads(node)):
            continue
        for y, state in zip(node.outputs, walk.states_by_row(node), strict=True):
            if y.dtype is not None and not y.dtype.is_floating_point():
                continue
            if state is None or state.kind != "rows":
                raise ValueError(
                    f'{mixing_error(node)}: use batched=False, or batched="unchecked" if you know '
                    "that row i of the output depends on row i of the input only"
                )
            walk.states[y] = state
    for y in outputs:
        if (axis := walk.states.get(y, RowState("rows")).axis) != 0:
            raise ValueError(
                f"the rows of output {y.name!r} are along axis {axis}: transpose it, as batched "
                "derivatives need them along axis 0"
            )


def _nodes_with_gradients(graph: ir.Graph, outputs: Sequence[ir.Value]) -> set[ir.Node]:
    """Return the nodes through which a gradient of the outputs flows."""
    needed, nodes = set(outputs), set()
    for node in reversed(graph):
        if operator_of(node).no_gradient or needed.isdisjoint(node.outputs):
            continue
        nodes.add(node)
        floats = (x for x in reads(node) if x.dtype is None or x.dtype.is_floating_point())
        needed.update(floats)
    return nodes
