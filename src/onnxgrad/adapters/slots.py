"""Adapters that are inputs of a file: by the note of `adapter_inputs`, or found in the graph.

Other tools (Olive, the builder of onnxruntime-genai) write `y = x W + x A B`, where A and B are
inputs, with or without a default, or tensors called lora_A and lora_B.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto

from onnxgrad.adapters.graph import remove
from onnxgrad.adapters.uses import Target, attributes, targets
from onnxgrad.model.constants import FLOATS, standard
from onnxgrad.model.notes import INPUTS, read_adapters, read_note, write_note
from onnxgrad.model.traversal import all_nodes, graphs_of, names_in
from onnxgrad.model.weights import constant_refs
from onnxgrad.operators import ELEMENTWISE, REORDERS

_IN_PLACE = (ELEMENTWISE & REORDERS) | {"Dropout"}  # keep each element, and cast it at most


@dataclass(frozen=True)
class Slot:
    """The inputs for the adapter beside one weight.

    Attributes:
        tensors: names of A and B.
        base: the product of data and weight, to which the adapter is added.
        output: the sum of base and adapter.
        layout: where another tool wrote the file: which of the two are "transposed" there, their
            "dtypes", and the "scale" by which its own nodes multiply their product.
        inputs: whether they are inputs of the file, and no constants.
        values: A and B, if the file has them and they are no zeros.
    """

    tensors: tuple[str, str]
    base: str = ""
    output: str = ""
    layout: dict[str, Any] = field(default_factory=dict)
    inputs: bool = True
    values: tuple[np.ndarray, np.ndarray] | None = None

    def place(self, target: Target) -> Target:
        """Return `target` with its use where the file adds the adapter: also behind a bias."""
        if not self.output:
            return target
        use = target.uses[0]
        node = next(n for n in use.graph.node if self.output in n.output)
        return replace(target, uses=[replace(use, node=node)])


def taken_slots(proto: ModelProto) -> tuple[ModelProto, dict[str, Slot]]:
    """Remove the inputs for adapters from `proto`, in place.

    Returns:
        `proto`, and the removed inputs, by the names of their weights.
    """
    noted = read_note(proto, INPUTS)
    if noted:
        bases = [use["base"] for note in noted for use in note["uses"]]
        slots = {n["weight"]: Slot((n["tensors"][0], n["tensors"][1])) for n in noted}
    else:
        slots = _find_slots(proto)
        bases = [slot.base for slot in slots.values()]
    if slots:
        remove(proto, bases, [name for slot in slots.values() for name in slot.tensors])
        write_note(proto, INPUTS, [])
    return proto, slots


def _find_slots(proto: ModelProto) -> dict[str, Slot]:
    """Return the inputs for adapters that another tool wrote, by the names of their weights.

    A weight with several uses has no slot: each use may have another adapter.
    """
    search = _Search(proto)
    found = {} if not search.factors else {slot.base: (x, slot) for x, slot in search.slots()}
    if not found:
        return {}
    slots = {}
    for name, target in targets(proto).items():
        for use in target.uses if len(target.uses) == 1 else ():
            base = use.node.output[0]
            x, slot = found.get(base) or found.get(search.behind_bias(base)) or ("", None)
            if slot and search.source(x) == search.source(use.x) and not target.reason:
                slots[name] = slot
    return slots


class _Search:
    """Finds x A B in a model without local functions.

    Attributes:
        factors: {name: dtype} of values that can be A or B: float inputs, and constants whose
            name has "lora" in it.
    """

    def __init__(self, proto: ModelProto) -> None:
        self.proto = proto
        self.refs = {ref.graph_name: ref for ref in constant_refs(proto)}
        self.nodes: dict[str, NodeProto] = {}
        self.reads = Counter[str]()
        for graph in graphs_of(proto):
            self.reads.update(names_in(graph.output))
        for node in all_nodes(proto.graph.node):
            self.nodes.update(dict.fromkeys(node.output, node))
            self.reads.update(node.input)
        inputs = {x.name: x.type.tensor_type.elem_type for x in proto.graph.input}
        self.factors = {name: dtype for name, dtype in inputs.items() if dtype in FLOATS}
        self.inputs = set(inputs)
        self.factors |= {
            name: ref.read().data_type
            for name, ref in self.refs.items()
            if "lora" in name.lower() and ref.graph is proto.graph and ref.node is None
        }
        for name in (name for note in read_adapters(proto) for name in note["tensors"]):
            self.factors.pop(name, None)

    def slots(self) -> Iterator[tuple[str, Slot]]:
        """Yield the data and the factors of each x A B that is added to a value."""
        for node in all_nodes(self.proto.graph.node):
            for i in range(2) if _is_standard(node, "Add") else ():
                base, second = node.input[1 - i], self.product(node.input[i])
                first = second and self.product(second[0])
                if not (first and second and self.reads[base] == 1 and base in self.nodes):
                    continue
                (x, a, flip_a, scale_a), (_, b, flip_b, scale_b) = first, second
                if a == b or self.reads[a] != 1 or self.reads[b] != 1:
                    continue
                layout = {
                    "transposed": [flip_a, flip_b],
                    "dtypes": [self.factors[a], self.factors[b]],
                    "scale": scale_a * scale_b,
                }
                inputs = {a, b} <= self.inputs
                values = self.values(a, b)
                yield x, Slot((a, b), base, node.output[0], layout, inputs, values)

    def values(self, a: str, b: str) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the stored A and B; None for inputs without default, or if one is zero."""
        if a not in self.refs or b not in self.refs:
            return None
        pair = self.refs[a].array(), self.refs[b].array()
        return pair if pair[0].any() and pair[1].any() else None

    def product(self, name: str) -> tuple[str, str, bool, float] | None:
        """Return x, A, whether A is transposed, and the factor, if `name` is factor x A."""
        scale = 1.0
        while (node := self.nodes.get(name)) is not None and self.reads[name] == 1:
            options = attributes(node)
            if _is_standard(node, *_IN_PLACE):
                name = node.input[0]
            elif _is_standard(node, "Mul") and (number := self.number(node)):
                name, scale = number[0], scale * number[1]
            elif _is_standard(node, "MatMul") or (
                _is_standard(node, "Gemm") and len(node.input) < 3
            ):
                factor = self.factor(node.input[1])
                if factor is None or options.get("transA"):
                    return None
                flips = factor[1] != bool(options.get("transB"))
                return node.input[0], factor[0], flips, scale * options.get("alpha", 1.0)
            else:
                return None
        return None

    def factor(self, name: str) -> tuple[str, bool] | None:
        """Return the input that reaches a product as `name`, and whether it is transposed."""
        flips = False
        while name not in self.factors:
            node = self.nodes.get(name)
            if node is None or not _is_standard(node, "Transpose", "Cast", "Identity"):
                return None
            flips ^= node.op_type == "Transpose"
            name = node.input[0]
        return name, flips

    def number(self, node: NodeProto) -> tuple[str, float] | None:
        """Return the operand that a Mul scales, and the number, if the other one is a constant."""
        for i, name in enumerate(node.input):
            if name in self.refs and math.prod(self.refs[name].read().dims) == 1:
                return node.input[1 - i], float(self.refs[name].array().reshape(()))
        return None

    def source(self, name: str) -> str:
        """Return the value of which `name` is a copy, perhaps in another dtype."""
        while (node := self.nodes.get(name)) is not None and _is_standard(node, *_IN_PLACE):
            name = node.input[0]
        return name

    def behind_bias(self, name: str) -> str:
        """Return the sum of `name` and a constant, if no other node reads `name`, or ""."""
        for node in all_nodes(self.proto.graph.node) if self.reads[name] == 1 else ():
            if _is_standard(node, "Add") and name in node.input and {*node.input} & {*self.refs}:
                return str(node.output[0])
        return ""


def _is_standard(node: NodeProto, *op_types: str) -> bool:
    """Return whether `node` is one of these standard operators."""
    return node.op_type in op_types and standard(node.domain) == ""
