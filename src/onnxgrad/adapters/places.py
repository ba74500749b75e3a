"""Find adapters in a model file: inputs that `adapter_inputs` made, or adapters of other tools.

Other tools (Olive, the builder of onnxruntime-genai) write `y = x W + x A B`, where A and B are
inputs, with or without a default, or tensors called lora_A and lora_B.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto

from onnxgrad.adapters.graph import remove_adapters
from onnxgrad.adapters.uses import AdapterTarget, attribute_values, find_targets
from onnxgrad.model.constants import FLOATS, normalize_domain
from onnxgrad.model.notes import INPUTS, read_adapters, read_metadata, write_metadata
from onnxgrad.model.traversal import all_nodes, declared_names, model_graphs
from onnxgrad.model.weights import constant_refs
from onnxgrad.operators import ELEMENTWISE, REORDERS

_COPIES = (ELEMENTWISE & REORDERS) | {"Dropout"}  # operators that keep or cast each element


@dataclass(frozen=True)
class AdapterPlace:
    """The names of an adapter's values in a model file: factors A and B, the layer output without
    adapter, and the sum of both.

    Attributes:
        tensors: names of A and B.
        base: the product of data and weight, to which the adapter is added.
        output: the sum of base and adapter.
        layout: of a file by another tool, which of A and B are "transposed", their "dtypes", and
            the "scale" by which nodes of the file multiply A B; otherwise empty.
        inputs: whether A and B are inputs of the file, and no constants.
        values: A and B, if the file stores both and neither is zero.
    """

    tensors: tuple[str, str]
    base: str = ""
    output: str = ""
    layout: dict[str, Any] = field(default_factory=dict)
    inputs: bool = True
    values: tuple[np.ndarray, np.ndarray] | None = None

    def target_at_sum(self, target: AdapterTarget) -> AdapterTarget:
        """Return a copy of `target` whose adapter is written at the node that computes `output`,
        the sum of the layer output and the old adapter.
        """
        if not self.output:
            return target
        use = target.uses[0]
        node = next(n for n in use.graph.node if self.output in n.output)
        return replace(target, uses=[replace(use, node=node)])


def transpose_pair(
    pair: Iterable[np.ndarray], layout: Mapping[str, Any]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the factors A and B of an adapter, each transposed if `layout["transposed"]` says that
    the file stores it transposed.
    """
    a, b = pair
    flip_a, flip_b = layout.get("transposed", (False, False))
    return a.T if flip_a else a, b.T if flip_b else b


def remove_found_adapters(proto: ModelProto) -> dict[str, AdapterPlace]:
    """Remove adapter inputs, and adapters that other tools wrote, in place; return `{weight name:
    AdapterPlace}` of the removed adapters.
    """
    noted = read_metadata(proto, INPUTS)
    if noted:
        bases = [use["base"] for note in noted for use in note["uses"]]
        places = {n["weight"]: AdapterPlace((n["tensors"][0], n["tensors"][1])) for n in noted}
    else:
        places = _find_foreign_adapters(proto)
        bases = [place.base for place in places.values()]
    if places:
        remove_adapters(proto, bases, [name for place in places.values() for name in place.tensors])
        write_metadata(proto, INPUTS, [])
    return places


def _find_foreign_adapters(proto: ModelProto) -> dict[str, AdapterPlace]:
    """Return `{weight name: AdapterPlace}` of the adapters that other tools wrote into a model, as
    inputs or constants.

    A weight with several uses is left out: each use may have another adapter.
    """
    search = _AdapterSearch(proto)
    found = {place.base: (x, place) for x, place in search.find_sums()} if search.factors else {}
    if not found:
        return {}
    places = {}
    for name, target in find_targets(proto).items():
        for use in target.uses if len(target.uses) == 1 else ():
            base = use.node.output[0]
            x, place = found.get(base) or found.get(search.bias_sum_name(base)) or ("", None)
            if place and search.source_name(x) == search.source_name(use.x) and not target.reason:
                places[name] = place
    return places


class _AdapterSearch:
    """A search for adapters in a model without local functions: sums of a value and a product x A
    B.

    Attributes:
        factors: {name: dtype} of values that can be A or B: float inputs, and constants whose
            name has "lora" in it.
    """

    def __init__(self, proto: ModelProto) -> None:
        self.proto = proto
        self.refs = {ref.graph_name: ref for ref in constant_refs(proto)}
        self.nodes: dict[str, NodeProto] = {}
        self.reads = Counter[str]()
        for graph in model_graphs(proto):
            self.reads.update(declared_names(graph.output))
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

    def find_sums(self) -> Iterator[tuple[str, AdapterPlace]]:
        """Yield (name of the data x, AdapterPlace) for each product x A B that an Add node adds to
        a value.
        """
        for node in all_nodes(self.proto.graph.node):
            for i in range(2) if _is_standard_operator(node, "Add") else ():
                base, second = node.input[1 - i], self.scaled_product(node.input[i])
                first = second and self.scaled_product(second[0])
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
                values = None
                if {a, b} <= self.refs.keys():
                    values = self.refs[a].array(), self.refs[b].array()
                    values = values if values[0].any() and values[1].any() else None
                yield x, AdapterPlace((a, b), base, node.output[0], layout, inputs, values)

    def scaled_product(self, name: str) -> tuple[str, str, bool, float] | None:
        """Return (name of x, name of A, whether A is transposed, c) if the value `name` is c x A
        with a constant number c; else None.
        """
        scale = 1.0
        while (node := self.nodes.get(name)) is not None and self.reads[name] == 1:
            options = attribute_values(node)
            if _is_standard_operator(node, *_COPIES):
                name = node.input[0]
            elif _is_standard_operator(node, "Mul") and (scaled := self.scaled_operand(node)):
                name, scale = scaled[0], scale * scaled[1]
            elif _is_standard_operator(node, "MatMul") or (
                _is_standard_operator(node, "Gemm") and len(node.input) < 3
            ):
                factor = self.trace_factor(node.input[1])
                if factor is None or options.get("transA"):
                    return None
                flips = factor[1] != bool(options.get("transB"))
                return node.input[0], factor[0], flips, scale * options.get("alpha", 1.0)
            else:
                return None
        return None

    def trace_factor(self, name: str) -> tuple[str, bool] | None:
        """Return the name of the factor from which `name` is computed by transposing and casting,
        and whether it is transposed; None if there is no such factor.
        """
        flips = False
        while name not in self.factors:
            node = self.nodes.get(name)
            if node is None or not _is_standard_operator(node, "Transpose", "Cast", "Identity"):
                return None
            flips ^= node.op_type == "Transpose"
            name = node.input[0]
        return name, flips

    def scaled_operand(self, node: NodeProto) -> tuple[str, float] | None:
        """Return (name of the other operand, number) if the Mul `node` multiplies by a constant
        number; else None.
        """
        for i, name in enumerate(node.input):
            if name in self.refs and math.prod(self.refs[name].read().dims) == 1:
                return node.input[1 - i], float(self.refs[name].array().reshape(()))
        return None

    def source_name(self, name: str) -> str:
        """Return the name of the value from which `name` is computed by copies and casts only."""
        while (node := self.nodes.get(name)) is not None and _is_standard_operator(node, *_COPIES):
            name = node.input[0]
        return name

    def bias_sum_name(self, name: str) -> str:
        """Return the name of the sum of `name` and a constant bias; "" if there is no bias or
        another node reads `name`.
        """
        for node in all_nodes(self.proto.graph.node) if self.reads[name] == 1 else ():
            if (
                _is_standard_operator(node, "Add")
                and name in node.input
                and {*node.input} & {*self.refs}
            ):
                return str(node.output[0])
        return ""


def _is_standard_operator(node: NodeProto, *op_types: str) -> bool:
    """Return whether `node` is an operator of the standard ONNX domain with one of the names
    `op_types`.
    """
    return node.op_type in op_types and normalize_domain(node.domain) == ""
