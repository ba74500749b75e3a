"""Shapes as tuples: an int is a static length, a string a symbolic dimension, None unknown.

Two dimensions are proven equal if they are the same int or the same symbol; two unknown ones never
are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

Dim = int | str | None
Dims = tuple[Dim, ...]


class UnknownShapeError(ValueError):
    """The error for a shape that is needed and not known."""


def is_real(value: ir.Value) -> bool:
    """Return whether `value` is a tensor of floats of at least 16 bits, which has a gradient."""
    return isinstance(value.type, ir.TensorType) and has_reals(value)


def has_reals(value: ir.Value) -> bool:
    """Return whether `value` is a tensor, or a sequence of tensors, of floats of at least
    16 bits.
    """
    if isinstance(value.type, ir.OptionalType):
        return False
    dtype = value.dtype
    return dtype is not None and dtype.is_floating_point() and dtype.bitwidth >= 16


def dims(value: ir.Value | None) -> Dims | None:
    """Return the dimensions of `value`, or None if its rank is unknown."""
    shape = None if value is None else value.shape
    if shape is None:
        return None
    return tuple([d if isinstance(d, int) else d.value for d in shape.dims])


def known_shape(value: ir.Value | None) -> Dims:
    """Return the dimensions of `value`.

    Raises:
        UnknownShapeError: its rank is unknown, or it is an operand that is left out.
    """
    shape = dims(value)
    if shape is None:
        what = "an operand that is left out" if value is None else repr(value.name)
        raise UnknownShapeError(f"the rank of {what} is unknown: state its shape in the model")
    return shape


def shape_text(shape: Dims | None) -> str:
    """Return a shape for messages, with a question mark for each length that is not static."""
    shown = ["?" if not isinstance(d, int) else str(d) for d in shape or ()]
    return f"({shown[0]},)" if len(shown) == 1 else f"({', '.join(shown)})"


def rank(value: ir.Value | None) -> int | None:
    """Return the number of axes of `value`, or None if it is unknown."""
    return None if value is None or value.shape is None else len(value.shape)


def static(shape: Dims | None) -> tuple[int, ...] | None:
    """Return `shape` if all lengths are known ints, else None."""
    if shape is None:
        return None
    lengths = tuple(d for d in shape if isinstance(d, int))
    return lengths if len(lengths) == len(shape) else None


def volume(shape: Dims) -> tuple[int, tuple[str, ...]] | None:
    """Return the product of static lengths, and the symbolic dimensions; None if any is unknown."""
    if None in shape:
        return None
    symbols = sorted(d for d in shape if isinstance(d, str))
    return math.prod(d for d in shape if isinstance(d, int)), tuple(symbols)


def coefficient(symbol: str) -> tuple[int, str]:
    """Return the factor and the symbol of a dimension: `(8, "N")` of `"8*N"`, and `(1, "N")` of
    `"N"`.
    """
    match = re.fullmatch(r"(\d+)\*(\w+)", symbol)
    return (1, symbol) if match is None else (int(match[1]), match[2])


def equal(a: Dims | None, b: Dims | None) -> bool:
    """Return whether `a` and `b` are proven to be the same shape, which unknown shapes and lengths
    never are.
    """
    return a is not None and a == b and None not in a


def is_stated(d: Dim) -> bool:
    """Return whether a dimension is a length, or a symbol that the model states (not an `unk__0`
    that inference made up).
    """
    return isinstance(d, int) or (d is not None and not d.startswith("unk__"))


def broadcast(*shapes: Dims | None) -> Dims | None:
    """Return the broadcast shape: None if a rank is unknown, with None for unknown dimensions."""
    ranked = [s for s in shapes if s is not None]
    if len(ranked) != len(shapes):
        return None
    if ranked and ranked.count(ranked[0]) == len(ranked) and None not in ranked[0]:
        return ranked[0]
    width = max(map(len, ranked), default=0)
    padded = [(1,) * (width - len(s)) + s for s in ranked]
    return tuple(broadcast_dim(column) for column in zip(*padded, strict=True))


def broadcast_dim(column: Sequence[Dim]) -> Dim:
    """Return the length to which lengths broadcast; None if it is unknown."""
    others = {d for d in column if d != 1}
    if not others:
        return 1
    sizes = [d for d in others if isinstance(d, int)]
    if sizes:  # a symbol broadcast with a length above 1 is that length or 1
        return sizes[0]
    return others.pop() if len(others) == 1 else None


def constant(v: ir.Value | None) -> np.ndarray | None:
    """Return the array of a constant `v`, or None if its value is known only at run time."""
    if v is None or v.const_value is None or v.is_graph_input():
        return None
    return v.const_value.numpy()


def einsum_terms(equation: str) -> tuple[list[str], str]:
    """Return the indices of each operand of an Einsum, and of its explicit or implicit output."""
    left, arrow, output = equation.replace(" ", "").partition("->")
    if not arrow:
        once = sorted(c for c in set(left) if c.isalpha() and left.count(c) == 1)
        output = ("..." if "..." in left else "") + "".join(once)
    return left.split(","), output


def count_bias_additions(node: ir.Node, index: int, lengths_of: Callable) -> int:
    """Return the multiply-adds of operand `index`, a bias: one for each element of the result."""
    present = len(node.inputs) > index and node.inputs[index] is not None
    return math.prod(lengths_of(node.outputs[0])) if present else 0


def optional_content(kind: ir.TypeProtocol | None) -> ir.TypeProtocol | None:
    """Return the type of the content if `kind` is an Optional type, else `kind`."""
    return kind.elem_type if isinstance(kind, ir.OptionalType) else kind
