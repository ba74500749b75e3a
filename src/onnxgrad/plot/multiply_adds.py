"""The multiply-adds of a node: products of two numbers of which one result is the sum."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from math import prod

import onnx_ir as ir

from onnxgrad.graph.traversal import subgraphs
from onnxgrad.operators.shapes import constant, dims, einsum_terms, static

_STANDARD = ("", "ai.onnx", "ai.onnx.ml")


class _UnknownShape(Exception):
    """The shape of an operand or of a result is not static."""


@dataclass
class Work:
    """Counts multiply-adds, and collects what could not be counted."""

    parameters: Collection[ir.Value]  # weights; one that is added counts as a bias
    uncounted: dict[str, None] = field(default_factory=dict)  # sentences, in order

    def of(self, node: ir.Node) -> int:
        """Return the multiply-adds of `node`, those of its subgraphs included.

        The iterations of a Scan count, a Loop of unknown length as one, and the branch of an If
        that has more.
        """
        inner = [sum(map(self.of, graph)) for graph in subgraphs(node)]
        try:
            if inner:
                return self._of_subgraphs(node, inner)
            if (count := _COUNTS.get(node.op_type)) is not None:
                return count(node)
            if node.op_type == "Add" and any(x in self.parameters for x in node.inputs):
                return _numel(node.outputs[0])
        except _UnknownShape:
            self._note(f"{_label(node)}: its shapes are not static")
            return 0
        if node.domain not in _STANDARD:
            self._note(f"{_label(node)}: an operator of {node.domain!r}")
        return 0

    def _of_subgraphs(self, node: ir.Node, inner: list[int]) -> int:
        if node.op_type == "If" or not any(inner):
            return max(inner)
        trips = _trips(node)
        if trips is None:
            self._note(f"{_label(node)}: counted once, as its length is not known")
        return sum(inner) * (1 if trips is None else trips)

    def _note(self, sentence: str) -> None:
        self.uncounted[sentence] = None


def _label(node: ir.Node) -> str:
    return f"{node.op_type} (node {node.name!r})"


def _trips(node: ir.Node) -> int | None:
    if node.op_type == "Loop":
        limit = constant(node.inputs[0])
        return None if limit is None else int(limit.item())
    count = node.attributes.get_int("num_scan_inputs", 0)
    axes = node.attributes.get_ints("scan_input_axes", ()) or [0] * count
    for x, axis in zip(node.inputs[len(node.inputs) - count :], axes, strict=True):
        shape = dims(x)
        if shape is not None and isinstance(length := shape[axis], int):
            return length
    return None


def _shape(value: ir.Value | None) -> tuple[int, ...]:
    shape = static(dims(value))
    if shape is None:
        raise _UnknownShape
    return shape


def _numel(value: ir.Value | None) -> int:
    return prod(_shape(value))


def _bias(node: ir.Node, index: int) -> int:
    """Return one for each element of the result if input `index`, a bias, is present."""
    present = len(node.inputs) > index and node.inputs[index] is not None
    return _numel(node.outputs[0]) if present else 0


def _product(node: ir.Node) -> int:
    return _numel(node.outputs[0]) * _shape(node.inputs[0])[-1]


def _gemm(node: ir.Node) -> int:
    a = _shape(node.inputs[0])
    inner = a[0] if node.attributes.get_int("transA", 0) else a[1]
    return _numel(node.outputs[0]) * inner + _bias(node, 2)


def _convolution(weight: int, bias: int) -> Callable[[ir.Node], int]:
    def count(node: ir.Node) -> int:
        return _numel(node.outputs[0]) * prod(_shape(node.inputs[weight])[1:]) + _bias(node, bias)

    return count


def _transposed_convolution(node: ir.Node) -> int:
    return _numel(node.inputs[0]) * prod(_shape(node.inputs[1])[1:]) + _bias(node, 2)


def _recurrent(node: ir.Node) -> int:
    x = _shape(node.inputs[0])  # two lengths of steps and rows, in either layout
    weights = [v for v in node.inputs[1:4] if v is not None]
    return x[0] * x[1] * sum(map(_numel, weights))


def _einsum(node: ir.Node) -> int:
    terms, result = einsum_terms(node.attributes["equation"].as_string())
    if len(terms) < 2 or "." in "".join([*terms, result]):
        if len(terms) < 2:
            return 0
        raise _UnknownShape
    lengths = {
        letter: length
        for term, x in zip(terms, node.inputs, strict=True)
        for letter, length in zip(term, _shape(x), strict=True)
    }
    return prod(lengths.values()) * (len(terms) - 1)


def _attention(node: ir.Node) -> int:
    """Count both products: of queries with keys, and of their softmax with values."""
    q, k, v = (_shape(x) for x in node.inputs[:3])
    past = node.inputs[4] if len(node.inputs) > 4 else None
    keys = k[-2] + (_shape(past)[-2] if past is not None else 0)
    heads = q[1] if len(q) == 4 else node.attributes.get_int("q_num_heads", 0)
    if len(q) == 4:
        return q[0] * heads * q[-2] * keys * (q[-1] + v[-1])
    wide = v[-1] // node.attributes.get_int("kv_num_heads", 1) * heads
    return q[0] * q[-2] * keys * (q[-1] + wide)


_COUNTS: dict[str, Callable[[ir.Node], int]] = {
    "Attention": _attention,
    "Conv": _convolution(1, 2),
    "ConvInteger": _convolution(1, 4),
    "ConvTranspose": _transposed_convolution,
    "DeformConv": _convolution(1, 3),
    "Einsum": _einsum,
    "FusedConv": _convolution(1, 2),
    "GRU": _recurrent,
    "Gemm": _gemm,
    "LSTM": _recurrent,
    "MatMul": _product,
    "MatMulInteger": _product,
    "QLinearConv": _convolution(3, 8),
    "QLinearMatMul": _product,
    "RNN": _recurrent,
}
