"""The class axis of a prediction: the feature axis of the last linear operator that precedes it.

MatMul, Gemm and recurrent operators write features along the last axis, Conv along axis 1, as the
records of operators say. From there, the axis is followed to the prediction through operators that
keep or move it. There is no answer where a Reshape is not proven to keep it, or where two branches
disagree.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from onnxgrad.errors import argument, node_text, printable
from onnxgrad.graph.traversal import dependents, nodes_behind, reads, subgraphs
from onnxgrad.operators import ELEMENTWISE, OF_SHAPES, UNARY, operator_of
from onnxgrad.operators.attributes import int_attribute, string_attribute
from onnxgrad.operators.axes import named_axes, output_axes
from onnxgrad.operators.shapes import dims, einsum_terms, rank

# the class axis; None if no linear operator precedes the value; or the reason, as text, why the
# graph does not decide the axis
Answer = int | str | None


def class_axis(prediction: ir.Value, otherwise: int | None = None) -> int:
    """Return the index, from 0, of the class axis of `prediction`.

    If there are two axes, it is the second. Otherwise it is the axis of a Softmax or LogSoftmax, or
    else the axis along which the last linear operator writes its features.

    Args:
        prediction: a value of a graph whose shapes are inferred.
        otherwise: the answer if no linear operator precedes the prediction; None raises an error.

    Raises:
        ValueError: the graph does not decide the axis.
    """
    n, shape = rank(prediction), printable(dims(prediction))
    if n is None or n < 2:
        raise ValueError(
            f"{prediction.name!r} has the shape {shape}, which has no axis of classes: choose an "
            "output (N, C, ...), or another loss"
        )
    answer: Answer = 1 if n == 2 else _AxisSearch(prediction).answers.get(prediction)
    if answer is None:
        answer = "no linear operator precedes it" if otherwise is None else otherwise
    if isinstance(answer, str):
        raise ValueError(
            f"cannot decide which axis of {prediction.name!r}, of shape {shape}, holds the "
            f"classes: {answer}; name it by {argument('loss_options.axis')}, as "
            f"{argument('loss_options.axis', 1)} or {argument('loss_options.axis', -1)}"
        )
    return answer


class _AxisSearch:
    """Search for the class axis of a prediction through the nodes that compute the prediction.

    Attributes:
        data: values that depend on the elements of an input that is no weight. Weights are inputs
            with an initial value.
        linear: values that depend on the result of an operator that may be linear in data.
        answers: the axis of the classes in the result of each node.
    """

    def __init__(self, prediction: ir.Value) -> None:
        behind, last = nodes_behind([prediction]), prediction.producer()
        nodes = [node for node in (last and last.graph) or () if node in behind]
        of_values = [node for node in nodes if node.op_type not in OF_SHAPES]
        read = (x for node in nodes for x in reads(node))
        inputs = (x for x in read if x.producer() is None and x.const_value is None)
        self.data = dependents(of_values, inputs)
        self.linear = dependents(of_values, self._results_of_linear_nodes(of_values))
        self.answers: dict[ir.Value, Answer] = {}
        for node in nodes:
            for y in node.outputs:
                self.answers[y] = self._class_axis_of_result(node, y)

    def _results_of_linear_nodes(self, nodes: list[ir.Node]) -> Iterator[ir.Value]:
        """Yield the results of nodes that may be linear functions of data, such as products with
        weights.
        """
        for node in nodes:
            operator = operator_of(node)
            is_product = operator.work is not None or operator.lookup_operand is not None
            may_be_linear = is_product or node.domain or any(subgraphs(node))
            if may_be_linear and not self.data.isdisjoint(reads(node)):
                yield from node.outputs

    def _class_axis_of_result(self, node: ir.Node, x: ir.Value) -> Answer:
        """Return the class axis of the result `x` of a node, taken over from the operands, or
        written by the operator.
        """
        if operands := self._operands_passing_class_axis(node):
            axes = {v: a for v in operands if (a := self.answers.get(v)) is not None}
            moved = {
                a if isinstance(a, str) else _output_axis(node, v, x, a) for v, a in axes.items()
            }
            reasons = [a for a in moved if isinstance(a, str)]
            if reasons or not moved:
                return reasons[0] if reasons else None
            first, *others = sorted(a for a in moved if isinstance(a, int))
            return f"the operands of {node_text(node)} disagree" if others else first
        axis = self._class_axis_from_operator(node, x)
        return f"{node_text(node)} computes it" if axis is None and x in self.linear else axis

    def _operands_passing_class_axis(self, node: ir.Node) -> list[ir.Value]:
        """Return the operands of `node` whose class axis becomes the class axis of the result."""
        operator, inputs = operator_of(node), [v for v in node.inputs if v is not None]
        is_table = operator.roles.startswith("t") and inputs[0] not in self.data
        if node.domain or operator.work or is_table or "distribution" in operator.traits:
            return []
        if node.op_type == "Where":
            return inputs[1:]
        if node.op_type == "Concat" or node.op_type in ELEMENTWISE - UNARY:
            return [v for v in inputs if dims(v) != ()] or inputs  # a scalar has no axis
        return inputs[:1] if operator.axes or "aligned" in operator.traits else []

    def _class_axis_from_operator(self, node: ir.Node, x: ir.Value) -> Answer:
        """Return the class axis that a linear operator or Softmax writes in `x`, else None."""
        operator, n, first = operator_of(node), rank(x), (*node.inputs, None)[0]
        weights, axis = operator.features or (0, None)
        if axis == 1:
            return axis
        if n is None:
            is_unknown = node.domain and axis is None
            return None if is_unknown else f"the rank of {x.name!r} is unknown"
        if "distribution" in operator.traits:
            return int_attribute(node, "axis") % n
        if x not in self.data:
            return None
        if axis is not None:
            # if the second operand is no matrix of weights, the first operand may be one, and mix
            # positions
            second = node.inputs[weights]
            if second in self.data or 1 in (rank(first), rank(second)):
                return f"{node_text(node)} has no matrix of weights as its second operand"
            return n - 1
        if node.op_type == "Einsum":
            return self._class_axis_of_einsum(node)
        if node.op_type == "Gather":  # logits from the rows of a table
            is_matrix = rank(first) == 2 and int_attribute(node, "axis") == 0
            return n - 1 if is_matrix else f"{node_text(node)} computes it"
        return None

    def _class_axis_of_einsum(self, node: ir.Node) -> Answer:
        """Return the axis of an Einsum's output whose index occurs in the weights and not in the
        data.
        """
        terms, output = einsum_terms(string_attribute(node, "equation"))
        operands = zip(terms, node.inputs, strict=True)
        of_data = "".join(term for term, v in operands if v in self.data)
        new = [i for i, index in enumerate(output) if index not in of_data]
        if len(new) != 1 or "." in output[: new[0]]:
            return f"{node_text(node)} does not write one new axis"
        return new[0]


def _output_axis(node: ir.Node, x: ir.Value, y: ir.Value, axis: int) -> Answer:
    """Return the axis of the output `y` of `node` that corresponds to `axis` of the operand `x`."""
    before, after = dims(x), dims(y)
    if before is None or after is None:
        return f"the rank of {(x if before is None else y).name!r} is unknown"
    place = output_axes(node, list(node.inputs).index(x), axis)[list(node.outputs).index(y)]
    if isinstance(place, int):
        return place
    traits, named = operator_of(node).traits, named_axes(node) or ()
    if len(before) == len(after) and not traits.isdisjoint(("aligned", "unary")):
        return axis  # also where the node mixes or selects classes
    if axis in named and (len(after) < len(before) or after[axis] == 1):
        return f"{node_text(node)} removes it"
    if "view" not in traits:
        return f"{node_text(node)} computes it"
    return f"{node_text(node)} reshapes {printable(before)} to {printable(after)}"
