"""A proof that a loss is a sum over rows: then parts of a batch give parts of its gradient.

Unlike for derivatives by row, all values count here, also those without a gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Literal

import onnx_ir as ir

from onnxgrad.autodiff.batch_axis import Axes
from onnxgrad.autodiff.primal.local_functions import replace_calls
from onnxgrad.errors import printable
from onnxgrad.graph.axes import SUMMED, follow, named_axes, places
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.inference.infer import infer
from onnxgrad.graph.inference.sizes import fold_sizes
from onnxgrad.graph.operators import ARITHMETIC, RANDOM, VIEWS
from onnxgrad.graph.shapes import Dim, Dims, coefficient, dims, is_real, static
from onnxgrad.graph.traversal import all_nodes, nodes_behind, reads, subgraphs

_ROWS = "onnxgrad_batch"  # the symbol of the rows, in all inputs that have them
_SHAPE_OPERAND = {"ConstantOfShape": 0, "Expand": 1, "Reshape": 1}
_OF_SIZES = ARITHMETIC | VIEWS | frozenset(("Cast", "Concat", "Equal", "Gather", "Slice", "Where"))


class NotASum(ValueError):
    """The outputs are not proven to be sums over rows."""


def require_sums(
    model: ir.Model,
    axes: Mapping[str, int | None],
    lengths: Mapping[str, Dims],
    outputs: Sequence[ir.Value],
) -> None:
    """Raise `NotASum` unless `outputs` are sums over rows of terms that depend on this row only.

    The proof holds for any number of rows. The shapes of `model`, and what follows from them, are
    replaced. `axes` has the axis of the rows of each input of data, None for one without rows, and
    `lengths` the shape of each.
    """
    rows = _follow_rows(model, axes, lengths, outputs)
    for y in outputs:
        if y in rows.means:
            raise _mixes(rows.means[y])
        if y not in rows.sums:
            raise NotASum(f"{y.name!r} is no sum over rows")


def assumed_lengths(inputs: Iterable[ir.Value]) -> dict[str, tuple[int, ...]]:
    """Return the declared shapes of inputs, with a number for each symbol.

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


def reduction_over_rows(
    model: ir.Model, axes: Mapping[str, int | None], lengths: Mapping[str, Dims], loss: ir.Value
) -> Literal["sum", "mean"]:
    """Return whether a value is the sum or the mean over rows of terms that depend on one row only.

    The arguments are those of `require_sums`; raise `NotASum` if it is proven to be neither.
    """
    rows = _follow_rows(model, axes, lengths, [loss])
    if loss in rows.sums:
        return "sum"
    if loss in rows.means:
        return "mean"
    raise NotASum(f"{loss.name!r} is neither a sum nor a mean over rows")


def require_apart(
    model: ir.Model, axes: Mapping[str, int | None], lengths: Mapping[str, Dims]
) -> None:
    """Raise `NotASum` unless row i of each output depends on row i of the data only.

    The arguments are those of `require_sums`.
    """
    rows = _follow_rows(model, axes, lengths, model.graph.outputs)
    for y in model.graph.outputs:
        shape = dims(y)
        if not shape:
            raise NotASum(f"the rank of {y.name!r} is {'unknown' if shape is None else 'zero'}")
        if shape[0] != _ROWS or rows.axes.get(y) != 0:
            raise NotASum(
                f"{y.name!r} of shape {printable(shape)} does not have one row for each row of the "
                "inputs along its first axis"
            )


def _follow_rows(
    model: ir.Model,
    axes: Mapping[str, int | None],
    lengths: Mapping[str, Dims],
    outputs: Sequence[ir.Value],
) -> _Rows:
    """Return what the values before `outputs` are to the rows; see `require_sums`."""
    replace_calls(Emit(model.graph), model)
    rows = _Rows(_with_lengths(model, axes, lengths))
    fold_sizes(model.graph, infer(model))
    needed = nodes_behind(outputs)
    for node in model.graph:
        if node in needed:
            rows.visit(node)
    return rows


def _with_lengths(
    model: ir.Model, axes: Mapping[str, int | None], lengths: Mapping[str, Dims]
) -> Axes:
    """Give the inputs of data their shapes, with a symbol for the rows; return their axes."""
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        for y in node.outputs:
            y.shape = None
    rows = {}
    for x in model.graph.inputs:
        if (shape := lengths.get(str(x.name))) is None:
            continue  # a weight
        axis, named = axes[str(x.name)], list(shape)
        if axis is not None:
            rows[x] = axis % len(shape)
            named[rows[x]] = _ROWS
        x.shape = ir.Shape(named)
    return rows


class _Rows:
    """What values are to the rows.

    - `axes`: the axis of the rows of values whose row i depends on row i only.
    - `sums`: sums over rows of such values, times constants.
    - `means`: means over rows of such values, times and plus constants, each with the node that
      is the mean.
    - `counts`: the number of rows times a constant.
    - `outer`: how many times the rows follow each other along that axis, if not once: a Reshape
      turns [T, N, D] into [T N, D]. The length of the axis says how many elements each row has.
    - `sizes`: integers that depend on the number of rows.

    All others do not depend on the batch.
    """

    def __init__(self, axes: Axes) -> None:
        self.axes = axes
        self.outer: dict[ir.Value, int] = {}
        self.sums: set[ir.Value] = set()
        self.means: dict[ir.Value, ir.Node] = {}
        self.counts: set[ir.Value] = set()
        self.sizes: set[ir.Value] = set()

    def visit(self, node: ir.Node) -> None:
        """Follow the rows through a node; raise `NotASum` if it mixes them, or may do so."""
        read, name = reads(node), node.op_type
        if _draws(node):
            raise _mixes(node)
        if not node.domain and name in ("Shape", "Size"):
            self._sized(node)
        elif not self.sizes.isdisjoint(read) and not self._has_shape_operand(node):
            integers = all(not is_real(y) for y in node.outputs)
            if name not in _OF_SIZES or not integers or not self._independent(read):
                raise _mixes(node)
            self.sizes.update(node.outputs)
        elif not self.means.keys().isdisjoint(read):
            self._affine(node)
        elif not self.sums.isdisjoint(read):
            self._linear(node)
        elif self.axes.keys().isdisjoint(read):
            self._made(node)
        elif name == "Reshape" and not node.domain:
            self._reshaped(node)
        else:
            self._by_row(node)

    def _independent(self, read: Sequence[ir.Value]) -> bool:
        known = self.sums, self.means.keys(), self.axes.keys()
        return all(values.isdisjoint(read) for values in known)

    def _has_shape_operand(self, node: ir.Node) -> bool:
        """Return whether sizes that depend on the rows enter only through the shape operand."""
        operand = _SHAPE_OPERAND.get(node.op_type)
        others = [x for i, x in enumerate(node.inputs) if i != operand]
        return operand is not None and not node.domain and self.sizes.isdisjoint(others)

    def _sized(self, node: ir.Node) -> None:
        """A Shape or Size: the number of rows times a constant is a sum over rows."""
        get, shape = node.attributes.get_int, dims(node.inputs[0])
        read = (None,) if shape is None else shape[get("start", 0) : get("end", None)]
        symbols = [d for d in read if not isinstance(d, int)]
        if node.op_type == "Size" and len(symbols) == 1 and _counts_rows(symbols[0]):
            self.sums.add(node.outputs[0])
            self.counts.add(node.outputs[0])
        elif symbols:
            self.sizes.add(node.outputs[0])

    def _linear(self, node: ir.Node) -> None:
        """A node that reads sums: it must be linear in them."""
        name, operands = node.op_type, [x for x in node.inputs if x is not None]
        summed = [x in self.sums for x in operands]
        real, same = is_real(node.outputs[0]), name in VIEWS or name in ("Cast", "Neg")
        linear = (
            (same and summed[0] and _keeps_sums(operands[0], node.outputs[0]))
            or (name in ("Add", "Sub", "Sum") and all(summed))
            or (name == "Mul" and sum(summed) == 1)
            or (name == "Div" and summed == [True, False] and real)
        )
        if node.domain or not self.axes.keys().isdisjoint(operands):
            raise _mixes(node)
        if name == "Div" and all(summed) and operands[1] in self.counts and real:
            self.means |= dict.fromkeys(node.outputs, node)
        elif linear:
            self.sums.update(node.outputs)
            if same and operands[0] in self.counts:
                self.counts.update(node.outputs)
        else:
            raise _mixes(node)

    def _affine(self, node: ir.Node) -> None:
        """A node that reads means: of a mean of terms, it must make the mean of its results."""
        name, operands = node.op_type, [x for x in node.inputs if x is not None]
        averaged = [x in self.means for x in operands]
        same = name in VIEWS or name in ("Cast", "Neg", "Identity")
        affine = (
            (same and averaged[0] and _keeps_sums(operands[0], node.outputs[0]))
            or name in ("Add", "Sub", "Sum")
            or (name == "Mul" and sum(averaged) == 1)
            or (name == "Div" and averaged == [True, False])
        )
        others = [x for x in operands if x not in self.means]
        origin = next(self.means[x] for x in reads(node) if x in self.means)
        if node.domain or not affine or not self._independent(others):
            raise _mixes(origin)
        self.means |= dict.fromkeys(node.outputs, origin)

    def _made(self, node: ir.Node) -> None:
        """A node that does not read the batch: if its result has rows, they must be equal."""
        for y in node.outputs:
            rows = [i for i, d in enumerate(dims(y) or ()) if not isinstance(d, int)]
            if not rows and dims(y) is not None:
                continue
            if not self._has_shape_operand(node) or node.op_type == "Reshape" or len(rows) != 1:
                raise _mixes(node)
            self._place(node, y, rows[0])

    def _by_row(self, node: ir.Node) -> None:
        read = [x for x in reads(node) if x in self.axes]
        layouts = {(self.outer.get(x, 1), (dims(x) or ())[self.axes[x]]) for x in read}
        for y, place in zip(node.outputs, follow(node, self.axes), strict=True):
            if place == SUMMED:
                self.sums.add(y)
            elif (reduction := self._reduction(node)) == "mean":
                self.means[y] = node
            elif reduction == "sum":
                self.sums.add(y)
            elif isinstance(place, int) and len(layouts) == 1 and self._meets_rows(node, y, place):
                ((outer, length),) = layouts
                self._place(node, y, place, outer, length)
            elif y.uses() or y is node.outputs[0]:
                raise _mixes(node)

    def _reduction(self, node: ir.Node) -> str | None:
        """Return "sum" or "mean" for a node that reduces rows, all of which count the same."""
        x = node.inputs[0]
        if node.domain or x not in self.axes:
            return None
        if node.op_type == "ReduceMean":
            return "mean" if self.axes[x] in (named_axes(node) or ()) else None
        if node.op_type not in ("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"):
            return None
        reduction = node.attributes.get_string("reduction", "mean")
        equal = len(node.inputs) < 3 and "ignore_index" not in node.attributes
        return reduction if equal or reduction == "sum" else None

    def _meets_rows(self, node: ir.Node, y: ir.Value, place: int) -> bool:
        """Return whether rows meet nothing but rows: a part of a batch has other positions."""
        k = node.outputs.index(y)
        others = [(i, dims(x)) for i, x in enumerate(node.inputs) if x and x not in self.axes]
        return all(
            shape is not None
            and all(d == 1 or places(node, i, a)[k] != place for a, d in enumerate(shape))
            for i, shape in others
        )

    def _reshaped(self, node: ir.Node) -> None:
        """A Reshape: the lengths before the rows must be the same product as before."""
        x, y = node.inputs[0], node.outputs[0]
        if x not in self.axes:
            raise _mixes(node)
        shape = dims(y) or ()
        rows = [i for i, d in enumerate(shape) if not isinstance(d, int)]
        front = static((dims(x) or ())[: self.axes[x]])
        if len(rows) != 1 or front is None:
            raise _mixes(node)
        times, _ = coefficient(str(shape[rows[0]]))
        before = prod(front) * self.outer.get(x, 1)
        outer, rest = divmod(before, prod(static(shape[: rows[0]]) or ()))
        if rest or times % outer:
            raise _mixes(node)
        self._place(node, y, rows[0], outer)

    def _place(
        self, node: ir.Node, y: ir.Value, axis: int, outer: int = 1, length: Dim = None
    ) -> None:
        """Note where the rows are in `y`; raise unless that axis counts them, and has `length`."""
        shape = dims(y)
        if shape is None or axis >= len(shape) or not _counts_rows(shape[axis]):
            raise _mixes(node)
        if length not in (None, shape[axis]):
            raise _mixes(node)  # some of the rows, which are others in a part of a batch
        self.axes[y], self.outer[y] = axis, outer


def _draws(node: ir.Node) -> bool:
    """Return whether random numbers are drawn, also in a subgraph: others for a part."""
    nodes = (node, *(n for graph in subgraphs(node) for n in all_nodes(graph)))
    random = (n for n in nodes if n.op_type in RANDOM and not n.domain)
    return any(n.op_type != "Dropout" or len(n.inputs) > 2 for n in random)  # 2: in inference mode


def _keeps_sums(x: ir.Value, y: ir.Value) -> bool:
    """Return whether a Cast of `x` to the dtype of `y` is linear: not to bool, nor to integers."""
    if x.dtype == y.dtype:
        return True
    return is_real(y) or not (is_real(x) or ir.DataType.BOOL in (x.dtype, y.dtype))


def _counts_rows(d: object) -> bool:
    return isinstance(d, str) and coefficient(d)[1] == _ROWS


def _mixes(node: ir.Node) -> NotASum:
    y = node.outputs[0]
    return NotASum(
        f"{printable(node.op_type)} (output {y.name!r}, {printable(dims(y))}) mixes the rows of "
        "the batch, or may do so"
    )
