"""The axis of the classes of a prediction: that which the last linear operator before it writes.

MatMul, Gemm and recurrent operators write features along the last axis, Conv along axis 1. From
there, the axis is followed to the prediction through operators that keep or move it, and refused
where a Reshape is not proven to keep it, or where two branches disagree.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx_ir as ir

from onnxgrad.errors import argument, printable
from onnxgrad.graph.axes import places
from onnxgrad.graph.operators import ELEMENTWISE, OF_SHAPES, UNARY, VIEWS
from onnxgrad.graph.shapes import dims, einsum_terms, rank
from onnxgrad.graph.traversal import nodes_behind, reads, subgraphs

# An axis; None if no linear operator precedes the value; or why it cannot be decided.
Answer = int | str | None

_LINEAR = frozenset("Conv ConvTranspose LSTM GRU RNN MatMul Gemm Einsum Gather".split())
_SOFTMAX = frozenset("Softmax LogSoftmax Hardmax".split())
_KEEPS = UNARY - {"CumSum", "CumProd"} - _SOFTMAX | frozenset(
    "AveragePool GlobalAveragePool GlobalMaxPool GroupNormalization LRN LpNormalization MaxPool "
    "DepthToSpace MeanVarianceNormalization Pad Resize RMSNormalization Slice Split Tile".split()
)
_REDUCES = frozenset("ReduceMean ReduceSum ReduceMax ReduceMin ReduceLogSumExp ReduceL2".split())


def class_axis(prediction: ir.Value, otherwise: int | None = None) -> int:
    """Return the axis of the classes of `prediction`, counted from the first.

    Of two axes, it is the second. Otherwise it is the axis of a Softmax or LogSoftmax, or else that
    along which the last linear operator writes its features.

    Args:
        prediction: a value of a graph whose shapes are inferred.
        otherwise: the answer if no linear operator precedes the prediction; None raises an error.

    Raises:
        ValueError: the graph does not decide it.

    Examples:
        >>> import onnx_ir as ir
        >>> from onnxgrad import Emit
        >>> floats = ir.TensorType(ir.DataType.FLOAT)
        >>> x = ir.Value(name="x", type=floats, shape=ir.Shape(["N", 8, "T"]))
        >>> w = ir.Value(name="w", type=floats, shape=ir.Shape([5, 8, 1]), const_value=ir.tensor(
        ...     [[[0.0]] * 8] * 5))
        >>> op = Emit(ir.Graph([x], [], nodes=[], opset_imports={"": 20}))
        >>> y = op.Conv(x, w)
        >>> y.shape = ir.Shape(["N", 5, "T"])
        >>> class_axis(y), class_axis(op.Transpose(y, perm=[0, 2, 1]))
        (1, 2)
    """
    n = rank(prediction)
    if n is None or n < 2:
        raise ValueError(
            f"{prediction.name!r} has no axis of classes: its shape is {_shape(prediction)}"
        )
    answer: Answer = 1 if n == 2 else _followed(prediction)
    if answer is None:
        answer = "no linear operator precedes it" if otherwise is None else otherwise
    if isinstance(answer, str):
        raise ValueError(
            f"cannot decide which axis of {prediction.name!r}, {_shape(prediction)}, is that of "
            f"the classes: {answer}; say it with {argument('loss_options.axis')}, as "
            f"{argument('loss_options.axis', 1)} or {argument('loss_options.axis', -1)}"
        )
    return answer


def _shape(x: ir.Value) -> str:
    return printable(dims(x))


def _shown(node: ir.Node) -> str:
    return f"{node.op_type} (node {node.name!r})"


@dataclass
class _Walk:
    """What is known of the values of a graph, from the first node on.

    Attributes:
        data: those that depend on an input other than a weight, and not only on its shape.
        linear: those behind an operator that may be linear in data.
        answers: the axis of each.
    """

    data: set[ir.Value] = field(default_factory=set)
    linear: set[ir.Value] = field(default_factory=set)
    answers: dict[ir.Value, Answer] = field(default_factory=dict)

    def visit(self, node: ir.Node) -> None:
        """Add the results of `node`."""
        read = reads(node)
        if node.op_type not in OF_SHAPES and any(map(self.has_data, read)):
            self.data.update(node.outputs)
            may_be_linear = node.domain or node.op_type in _LINEAR or any(subgraphs(node))
            if may_be_linear or not self.linear.isdisjoint(read):
                self.linear.update(node.outputs)
        for y in node.outputs:
            self.answers[y] = _answer(node, y, self)

    def has_data(self, x: ir.Value | None) -> bool:
        """Return whether `x` depends on data; weights are inputs with an initial value."""
        is_input = x is not None and x.producer() is None and x.const_value is None
        return x in self.data or is_input


def _followed(value: ir.Value) -> Answer:
    """Return the answer for `value`, from those of the values before it."""
    walk, last = _Walk(), value.producer()
    behind = nodes_behind([value])
    for node in () if last is None or last.graph is None else last.graph:
        if node in behind:
            walk.visit(node)
    return walk.answers.get(value)


def _looked_through(node: ir.Node, walk: _Walk) -> list[ir.Value]:
    """Return the operands of which the result of `node` may have the axis of the classes."""
    if node.domain:
        return []
    inputs = [v for v in node.inputs if v is not None]
    if node.op_type == "Where":
        return inputs[1:]
    if node.op_type == "Concat" or (node.op_type in ELEMENTWISE and node.op_type not in UNARY):
        return inputs
    first = _KEEPS | VIEWS | _REDUCES | {"Transpose", "Expand"}
    if node.op_type in first or (node.op_type == "Gather" and walk.has_data(inputs[0])):
        return inputs[:1]
    return []


def _answer(node: ir.Node, x: ir.Value, walk: _Walk) -> Answer:
    """Return the axis of `x`, a result of `node`, from those of operands or of what it writes."""
    if operands := _looked_through(node, walk):
        axes = {v: a for v in operands if (a := walk.answers.get(v)) is not None}
        moved = {a if isinstance(a, str) else axis_after(node, v, x, a) for v, a in axes.items()}
        reasons = [a for a in moved if isinstance(a, str)]
        if reasons or not moved:
            return reasons[0] if reasons else None
        first, *others = sorted(a for a in moved if isinstance(a, int))
        return f"the operands of {_shown(node)} disagree" if others else first
    if not node.domain and (written := _written(node, x, walk)) is not None:
        return written
    return f"{_shown(node)} computes it" if x in walk.linear else None


def _written(node: ir.Node, x: ir.Value, walk: _Walk) -> Answer:
    """Return the axis that a linear operator, or a Softmax, writes; None for other operators."""
    n, (first, second) = rank(x), (*node.inputs, None, None)[:2]
    if node.op_type in ("Conv", "ConvTranspose"):
        return 1
    if n is None:
        return f"the rank of {x.name!r} is unknown"
    if node.op_type in _SOFTMAX:
        return node.attributes.get_int("axis", -1) % n
    if node.op_type in ("LSTM", "GRU", "RNN"):
        return n - 1
    if node.op_type == "Einsum" and walk.has_data(x):
        return _of_einsum(node, walk)
    if node.op_type in ("MatMul", "Gemm") and walk.has_data(x):
        # weights in front may mix positions instead of features
        if walk.has_data(second) or 1 in (rank(first), rank(second)):
            return f"{_shown(node)} has no matrix of weights as its second operand"
        return n - 1
    if node.op_type == "Gather" and walk.has_data(x):  # an embedding: logits from a table
        matrix = rank(first) == 2 and node.attributes.get_int("axis", 0) == 0
        return n - 1 if matrix else f"{_shown(node)} computes it"
    return None


def _of_einsum(node: ir.Node, walk: _Walk) -> Answer:
    """Return the axis of the only index that data do not have."""
    terms, output = einsum_terms(node.attributes.get_string("equation", ""))
    operands = zip(terms, node.inputs, strict=True)
    of_data = "".join(term for term, v in operands if walk.has_data(v))
    new = [i for i, index in enumerate(output) if index not in of_data]
    if len(new) != 1 or "." in output[: new[0]]:
        return f"{_shown(node)} does not write one new axis"
    return new[0]


def axis_after(node: ir.Node, x: ir.Value, y: ir.Value, axis: int) -> Answer:
    """Return the axis of the output `y` of `node` that is `axis` of its operand `x`."""
    before, after = dims(x), dims(y)
    if before is None or after is None:
        return f"the rank of {(x if before is None else y).name!r} is unknown"
    place = places(node, list(node.inputs).index(x), axis)[list(node.outputs).index(y)]
    if isinstance(place, int):
        return place
    if len(before) == len(after) and node.op_type in _KEEPS | {"Concat", "Gather"}:
        return axis  # also where they mix or select classes
    if node.op_type in _REDUCES | {"Squeeze"}:
        return f"{_shown(node)} removes it"
    return f"{_shown(node)} reshapes {_shape(x)} to {_shape(y)}"
