"""Which nodes of a forward pass may run again, and how many bytes their results take."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from math import ceil, prod

import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.graph.inference.infer import infer
from onnxgrad.graph.traversal import all_nodes, subgraphs
from onnxgrad.model.convert import to_ir
from onnxgrad.operators import CHEAP, RANDOM, VIEWS, operator_of
from onnxgrad.operators.shapes import Dims, dims, is_stated

_SAME_SIZE = (VIEWS - {"Shape", "Size"}) | {"Cast", "Transpose"}
LENGTH = 32  # assumed for symbolic dimensions when sizes are compared

# recompute -> which nodes of the forward pass the backward pass may compute again
RECOMPUTE: dict[str, Callable[[ir.Node], bool]] = {
    "none": lambda node: node.op_type in VIEWS,
    "cheap": lambda node: node.op_type in CHEAP,
    "all": lambda node: True,
}


def is_repeatable(node: ir.Node) -> bool:
    """Return whether `node` computes the same when it runs again: it draws no random numbers.

    Of onnxruntime's own operators, those that have a rule here are known to draw none.
    """
    inner = (n for g in subgraphs(node) for n in all_nodes(g))
    return all(_draws_nothing(n) for n in (node, *inner))


def _draws_nothing(node: ir.Node) -> bool:
    if not node.domain:
        return node.op_type not in RANDOM
    operator = operator_of(node)
    return node.domain == "com.microsoft" and operator.rule is not None and not operator.of_user


class Sizes:
    """The sizes of values in bytes, with all symbolic dimensions of inputs set to `length`."""

    def __init__(self, joint: ModelProto, length: int) -> None:
        self.joint, self.length = joint, length

    def __getitem__(self, value: ir.Value) -> int:
        """Return the bytes of a value of the joint graph."""
        source = value if _is_named(dims(value)) else self._inferred[str(value.name)]
        return ceil(_elements(source, self.length) * source.dtype.itemsize) if source.dtype else 0

    def rank(self, value: ir.Value) -> int | None:
        """Return the rank of `value`, which with a Squeeze may depend on the lengths."""
        shape = dims(self._inferred[str(value.name)])
        return None if shape is None else len(shape)

    @cached_property
    def _inferred(self) -> dict[str, ir.Value]:
        """Copies of all values, with the shapes that follow from the static shapes of inputs."""
        model = to_ir(self.joint)
        for x in model.graph.inputs:
            if (shape := dims(x)) is not None:
                x.shape = ir.Shape([d if isinstance(d, int) else self.length for d in shape])
        for node in model.graph:
            for y in node.outputs:
                y.shape = None
        infer(model)
        return {str(y.name): y for node in model.graph for y in node.outputs}


def _is_named(shape: Dims | None) -> bool:
    """Return whether every dimension is static, or a symbol of an input."""
    return shape is not None and all(
        isinstance(d, int) or (is_stated(d) and str(d).isidentifier()) for d in shape
    )


def _elements(value: ir.Value, length: int) -> int:
    node, shape = value.producer(), dims(value)
    if not _is_named(shape) and node is not None and node.op_type in _SAME_SIZE:
        assert node.inputs[0] is not None
        return _elements(node.inputs[0], length)
    lengths = (length,) * 3 if shape is None else shape
    return prod(d if isinstance(d, int) else length for d in lengths)
