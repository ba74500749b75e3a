"""The axis of the classes of a prediction: that which the last linear operator before it writes.

MatMul, Gemm and recurrent operators write features along the last axis, Conv along axis 1. From
there, the axis is followed to the prediction through operators that keep or move it, and refused
where a Reshape is not proven to keep it, or where two branches disagree.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from onnxgrad.errors import argument, printable
from onnxgrad.graph.traversal import dependents, nodes_behind, reads, subgraphs
from onnxgrad.operators import ELEMENTWISE, OF_SHAPES, UNARY, VIEWS
from onnxgrad.operators.attributes import int_attribute, string_attribute
from onnxgrad.operators.axes import places
from onnxgrad.operators.shapes import dims, einsum_terms, rank

# An axis; None if no linear operator precedes the value; or why it cannot be decided.
Answer = int | str | None

_PRODUCTS = {"MatMul": 1, "Gemm": 1, "MatMulInteger": 1, "QLinearMatMul": 3}  # where weights are
_LINEAR = frozenset("Conv ConvTranspose LSTM GRU RNN Einsum Gather".split()) | {*_PRODUCTS}
_SOFTMAX = frozenset("Softmax LogSoftmax Hardmax".split())
_KEEPS = UNARY - {"CumSum", "CumProd"} - _SOFTMAX | frozenset(
    "AveragePool GlobalAveragePool GlobalMaxPool GroupNormalization LRN LpNormalization MaxPool "
    "DepthToSpace MeanVarianceNormalization Pad Resize RMSNormalization Slice Split Tile "
    "QuantizeLinear DequantizeLinear DynamicQuantizeLinear".split()
)
_REDUCES = frozenset("ReduceMean ReduceSum ReduceMax ReduceMin ReduceLogSumExp ReduceL2".split())
_FIRST = _KEEPS | VIEWS | _REDUCES | {"Transpose", "Expand"}  # the axis is one of the first operand


def class_axis(prediction: ir.Value, otherwise: int | None = None) -> int:
    """Return the axis of the classes of `prediction`, counted from the first.

    Of two axes, it is the second. Otherwise it is the axis of a Softmax or LogSoftmax, or else that
    along which the last linear operator writes its features.

    Args:
        prediction: a value of a graph whose shapes are inferred.
        otherwise: the answer if no linear operator precedes the prediction; None raises an error.

    Raises:
        ValueError: the graph does not decide it.
    """
    n = rank(prediction)
    if n is None or n < 2:
        raise ValueError(
            f"{prediction.name!r} has no axis of classes: its shape is {_shape(prediction)}"
        )
    answer: Answer = 1 if n == 2 else _Walk(prediction).answers.get(prediction)
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


def _text(node: ir.Node) -> str:
    return f"{node.op_type} (node {node.name!r})"


class _Walk:
    """What is known of the values behind a prediction.

    Attributes:
        data: those that depend on an input other than a weight, and not only on its shape. Weights
            are inputs with an initial value.
        linear: those behind an operator that may be linear in data.
        answers: the axis of each result.
    """

    def __init__(self, prediction: ir.Value) -> None:
        behind, last = nodes_behind([prediction]), prediction.producer()
        nodes = [node for node in (last and last.graph) or () if node in behind]
        of_values = [node for node in nodes if node.op_type not in OF_SHAPES]
        read = (x for node in nodes for x in reads(node))
        inputs = (x for x in read if x.producer() is None and x.const_value is None)
        self.data = dependents(of_values, inputs)
        self.linear = dependents(of_values, self._linear_results(of_values))
        self.answers: dict[ir.Value, Answer] = {}
        for node in nodes:
            for y in node.outputs:
                self.answers[y] = self._answer(node, y)

    def _linear_results(self, nodes: list[ir.Node]) -> Iterator[ir.Value]:
        for node in nodes:
            may_be_linear = node.domain or node.op_type in _LINEAR or any(subgraphs(node))
            if may_be_linear and not self.data.isdisjoint(reads(node)):
                yield from node.outputs

    def _answer(self, node: ir.Node, x: ir.Value) -> Answer:
        """Return the axis of the result `x`, from those of operands or of what `node` writes."""
        if operands := self._looks_through(node):
            axes = {v: a for v in operands if (a := self.answers.get(v)) is not None}
            moved = {
                a if isinstance(a, str) else _axis_after(node, v, x, a) for v, a in axes.items()
            }
            reasons = [a for a in moved if isinstance(a, str)]
            if reasons or not moved:
                return reasons[0] if reasons else None
            first, *others = sorted(a for a in moved if isinstance(a, int))
            return f"the operands of {_text(node)} disagree" if others else first
        if (node.domain, node.op_type) == ("com.microsoft", "MatMulNBits"):
            n = rank(x)
            return f"the rank of {x.name!r} is unknown" if n is None else n - 1
        own = None if node.domain else self._own_axis(node, x)
        return f"{_text(node)} computes it" if own is None and x in self.linear else own

    def _looks_through(self, node: ir.Node) -> list[ir.Value]:
        """Return the operands of which the result of `node` may have the axis of the classes."""
        inputs = [v for v in node.inputs if v is not None]
        if node.domain:
            return []
        if node.op_type == "Where":
            return inputs[1:]
        if node.op_type == "Concat" or node.op_type in ELEMENTWISE - UNARY:
            return [v for v in inputs if dims(v) != ()] or inputs  # a scale has no axis
        is_selection = node.op_type == "Gather" and inputs[0] in self.data
        return inputs[:1] if node.op_type in _FIRST or is_selection else []

    def _own_axis(self, node: ir.Node, x: ir.Value) -> Answer:
        """Return the axis that a linear operator or a Softmax writes; None for other operators."""
        n, first = rank(x), (*node.inputs, None)[0]
        if node.op_type in ("Conv", "ConvTranspose"):
            return 1
        if n is None:
            return f"the rank of {x.name!r} is unknown"
        if node.op_type in _SOFTMAX:
            return int_attribute(node, "axis") % n
        if node.op_type in ("LSTM", "GRU", "RNN"):
            return n - 1
        if x not in self.data:
            return None
        if node.op_type == "Einsum":
            return self._new_axis(node)
        if node.op_type in _PRODUCTS:
            # weights in front may mix positions instead of features
            second = node.inputs[_PRODUCTS[node.op_type]]
            if second in self.data or 1 in (rank(first), rank(second)):
                return f"{_text(node)} has no matrix of weights as its second operand"
            return n - 1
        if node.op_type == "Gather":  # an embedding: logits from a table
            is_matrix = rank(first) == 2 and int_attribute(node, "axis") == 0
            return n - 1 if is_matrix else f"{_text(node)} computes it"
        return None

    def _new_axis(self, node: ir.Node) -> Answer:
        """Return the axis of the only index that data do not have, of the output of an Einsum."""
        terms, output = einsum_terms(string_attribute(node, "equation"))
        operands = zip(terms, node.inputs, strict=True)
        of_data = "".join(term for term, v in operands if v in self.data)
        new = [i for i, index in enumerate(output) if index not in of_data]
        if len(new) != 1 or "." in output[: new[0]]:
            return f"{_text(node)} does not write one new axis"
        return new[0]


def _axis_after(node: ir.Node, x: ir.Value, y: ir.Value, axis: int) -> Answer:
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
        return f"{_text(node)} removes it"
    return f"{_text(node)} reshapes {_shape(x)} to {_shape(y)}"
