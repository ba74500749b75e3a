"""A graph, or a function, of a random program while it is written.

Floats are rows of 3 numbers, or 2 such rows. Operators are smooth, so that central differences tell
whether a gradient is right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

ROW, ROWS, SQUARE = (3,), (2, 3), (3, 3)
Value = tuple[str, tuple[int | None, ...]]  # a name and the shape that it has when the model runs


class Scope:
    """A graph or a function that is being written."""

    def __init__(self, writer: Any, parent: Scope | None = None, opset: int = 0):
        self.writer, self.parent, self.rng = writer, parent, writer.rng
        self.opset = opset or (parent.opset if parent else writer.opset)
        self.function = parent is None and bool(opset)  # functions have no initializers
        self.inlined = parent.inlined if parent else self.function
        self.scanned = self.looped = False  # whether this is the body of a Scan, of a Loop
        self.attributes: list[Attribute] = parent.attributes if parent else []
        self.depth = parent.depth + 1 if parent else 0
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[TensorProto] = []
        self.sparse: list[onnx.SparseTensorProto] = []
        self.values: list[Value] = []  # floats that nodes may read
        self.inputs: list[Value] = []
        self.names: set[str] = set()
        self.below: set[str] = set()  # names of the graphs inside

    def name(self) -> str:
        """Return a name that nothing visible has: graphs side by side use the same ones."""
        chain, scope = list[Scope](), self
        while scope is not None:
            chain.append(scope)
            scope = scope.parent
        taken = self.below.union(*(s.names for s in chain))
        stem = str(self.rng.choice(list("abcdefgh")))
        name, i = stem, 0
        while name in taken:
            i += 1
            name = f"{stem}{i}"
        self.names.add(name)
        for s in chain[1:]:
            s.below.add(name)
        return name

    def outer(self) -> list[Value]:
        return self.parent.visible() if self.parent else []

    def visible(self) -> list[Value]:
        return self.values + self.outer()

    def emit(self, op: str, inputs, n: int = 1, domain: str = "", **attributes):
        names = [self.name() for _ in range(n)]
        if not domain and self.writer.alias and not self.depth and not self.inlined:
            domain = "ai.onnx"
        node = helper.make_node(op, list(inputs), names, domain=domain)
        for key, value in attributes.items():
            node.attribute.append(attribute(key, value))
        self.nodes.append(node)
        return names[0] if n == 1 else names

    def add(self, name: str, shape) -> Value:
        self.values.append((name, tuple(shape)))
        return self.values[-1]

    def pick(self, *options):
        return options[self.rng.integers(len(options))]

    def ints(self, *values: int, scalar: bool = False) -> str:
        return self.keep(np.int64(values[0]) if scalar else np.int64(values))

    def keep(self, array: np.ndarray) -> str:
        """Keep integers or booleans in an initializer or a Constant."""
        tensor = numpy_helper.from_array(np.asarray(array), self.name())
        if self.function or self.rng.random() < 0.5:
            self.nodes.append(helper.make_node("Constant", [], [tensor.name], value=tensor))
        else:
            self.initializers.append(tensor)
        return tensor.name

    def array(self, *shape: int) -> np.ndarray:
        size = self.rng.uniform(0.4, 1.1, shape) * self.rng.choice([-1.0, 1.0], shape)
        return size.astype(self.writer.dtype)

    def constant(self, shape, kind: str = "") -> str:
        """Keep floats in one of the ways there are, or in a graph around this one."""
        if not kind:
            kinds = "initializer Constant sparse sparse_value floats above"
            odds = [0.4, 0.2, 0.08, 0.07, 0.1, 0.15]
            kind = str(self.rng.choice(kinds.split(), p=odds))
        if kind.startswith("sparse") and (self.inlined or self.depth):
            kind = "Constant"  # onnxruntime refuses
        if kind == "above" and self.parent is not None:
            return self.parent.constant(shape)
        if kind == "floats" and len(shape) != 1:
            kind = "initializer"
        if kind in ("initializer", "sparse", "above") and self.function:
            kind = "Constant"
        name, array = self.name(), self.array(*shape)
        if kind == "floats":
            numbers = [float(x) for x in array]
            self.nodes.append(helper.make_node("Constant", [], [name], value_floats=numbers))
            return name if self.writer.single else self.emit("Cast", [name], to=self.writer.type)
        if kind == "Constant":
            tensor = numpy_helper.from_array(array, name)
            self.nodes.append(helper.make_node("Constant", [], [name], value=tensor))
        elif kind.startswith("sparse"):
            tensor = self._sparse(array, name)
            if kind == "sparse":
                self.sparse.append(tensor)
            else:
                node = helper.make_node("Constant", [], [name], sparse_value=tensor)
                self.nodes.append(node)
        else:
            self.initializers.append(numpy_helper.from_array(array, name))
        return name

    def _sparse(self, array: np.ndarray, name: str) -> onnx.SparseTensorProto:
        kept = np.sort(self.rng.permutation(array.size)[: max(1, array.size * 2 // 3)])
        index = np.int64(kept)
        if self.rng.random() < 0.4:
            index = np.stack(np.unravel_index(kept, array.shape), axis=1).astype(np.int64)
        values = numpy_helper.from_array(array.ravel()[kept], name)
        return helper.make_sparse_tensor(
            values, numpy_helper.from_array(index, f"{name}_index"), list(array.shape)
        )

    def graph(self, name: str, inputs, outputs) -> onnx.GraphProto:
        made = helper.make_graph(self.nodes, name, inputs, outputs, self.initializers)
        made.sparse_initializer.extend(self.sparse)
        return made

    def info(self, name: str, shape, kind: int = 0) -> onnx.ValueInfoProto:
        """Declare a result: with its shape, with symbols, or without."""
        kind = kind or self.writer.type
        form = self.rng.integers(2 if self.scanned else 3)  # Scan needs a rank
        if form == 2:
            return helper.make_tensor_value_info(name, kind, None)
        # symbols are of this graph alone: two lengths have one symbol only where they are equal
        shape = [f"{name}_{i}" if form == 1 or d is None else d for i, d in enumerate(shape)]
        return helper.make_tensor_value_info(name, kind, shape)


def attribute(name: str, value) -> onnx.AttributeProto:
    if isinstance(value, Attribute):
        made = onnx.AttributeProto(name=name, type=value.type)
        made.ref_attr_name = value.name
        return made
    return helper.make_attribute(name, value)


@dataclass
class Attribute:
    """An attribute of a function: what it is for, and its default."""

    name: str
    use: str
    default: object = None

    @property
    def type(self) -> int:
        return getattr(onnx.AttributeProto, TYPES[self.use])


TYPES = {
    "scale": "FLOAT", "shifts": "FLOATS", "axis": "INT", "flag": "INT", "axes": "INTS",
    "perm": "INTS", "equation": "STRING", "words": "STRINGS", "tensor": "TENSOR",
    "fill": "TENSOR", "branch": "GRAPH",
}  # fmt: skip
