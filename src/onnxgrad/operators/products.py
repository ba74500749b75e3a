"""Products of matrices: MatMul, Gemm, Einsum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onnxgrad.operators.axes import Place
from onnxgrad.operators.records import declare_operators
from onnxgrad.operators.shapes import (
    Dim,
    Dims,
    broadcast,
    broadcast_dim,
    dims,
    einsum_terms,
    rank,
)


def shape_of_matmul(inputs: Sequence, _attributes: Mapping[str, Any]) -> Dims | None:
    """Return the shape of a product of matrices, whose axes in front broadcast."""
    a, b = dims(inputs[0]), dims(inputs[1])
    if a is None or b is None or len(a) < 2 or len(b) < 2:
        return None
    batch = broadcast(a[:-2], b[:-2])
    return None if batch is None else (*batch, a[-2], b[-1])


def _axis_of_matmul(node: Any, operand: int, axis: int) -> Place:
    width, ranks = rank(node.outputs[0]), [rank(x) or 0 for x in node.inputs]
    from_end = axis - ranks[operand]
    contracted = from_end == (-1, -2)[operand]
    return None if width is None or min(ranks) < 2 or contracted else width + from_end


def shape_of_gemm(inputs: Sequence, attributes: Mapping[str, Any]) -> Dims | None:
    """Return the shape of a product of two matrices, each of which may be transposed."""
    a, b = dims(inputs[0]), dims(inputs[1])
    if a is None or b is None or len(a) != 2 or len(b) != 2:
        return None
    return a[1 if attributes.get("transA") else 0], b[0 if attributes.get("transB") else 1]


def _axis_of_gemm(node: Any, operand: int, axis: int) -> Place:
    if operand == 2:
        return axis + 2 - len(node.inputs[2].shape)
    turned = node.attributes.get_int(("transA", "transB")[operand], 0)
    return operand if axis == (operand != turned) else None


def einsum_shape(shapes: Sequence[Dims | None], equation: str) -> Dims | None:
    """Return the shape of an Einsum; axes with the same index, or in an ellipsis, broadcast."""
    terms, output = einsum_terms(equation)
    lengths: dict[str, list[Dim]] = {}
    ellipses: list[Dims | None] = []
    for shape, term in zip(shapes, terms, strict=False):
        head, dots, tail = term.partition("...")
        ends: Dims = (None,) * len(head + tail)
        if shape is not None:
            end = len(shape) - len(tail)
            ends = shape[: len(head)] + shape[end:]
        if dots:
            ellipses.append(None if shape is None else shape[len(head) : end])
        for index, d in zip(head + tail, ends, strict=False):
            lengths.setdefault(index, []).append(d)
    head, dots, tail = output.partition("...")
    middle = broadcast(*ellipses) if dots else ()
    if middle is None:
        return None
    before, after = ([broadcast_dim(lengths.get(i, [None])) for i in part] for part in (head, tail))
    return (*before, *middle, *after)


def _shape_of_einsum(inputs: Sequence, attributes: Mapping[str, Any]) -> Dims | None:
    return einsum_shape([*map(dims, inputs)], attributes.get("equation", ""))


def _axis_of_einsum(node: Any, operand: int, axis: int) -> Place:
    terms, output = einsum_terms(node.attributes.get_string("equation", ""))
    if "." in "".join((*terms, output)):
        return None
    letter = terms[operand][axis]
    diagonal = any(term.count(letter) > 1 for term in terms)
    return None if diagonal or letter not in output else output.index(letter)


declare_operators("MatMul", roles="f", shape=shape_of_matmul, axes=_axis_of_matmul)
declare_operators("Gemm", roles="ffb", shape=shape_of_gemm, axes=_axis_of_gemm)
declare_operators("Einsum", roles="f", shape=_shape_of_einsum, axes=_axis_of_einsum)
declare_operators("QLinearConv QLinearMatMul ConvInteger MatMulInteger", roles="q")
declare_operators("SwiGLU", roles="f")
