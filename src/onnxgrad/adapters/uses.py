"""Find the nodes that multiply data by a weight, beside which adapters can be put."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import GraphProto, ModelProto, NodeProto, TensorProto

from onnxgrad.model.constants import FLOATS, ConstantRef, normalize_domain
from onnxgrad.model.traversal import all_nodes, direct_value_names, subgraphs
from onnxgrad.model.weights import constant_refs
from onnxgrad.training.parameters.flow import MOVES, operand_role

LINEAR, LEFT, EMBEDDING, CONV = "linear", "left", "embedding", "conv"
_QUANTIZED = (
    TensorProto.INT8, TensorProto.UINT8, TensorProto.INT4, TensorProto.UINT4,
    TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E5M2,
)  # fmt: skip
_MICROSOFT = "com.microsoft"
_PRODUCTS = (("", "MatMul"), (_MICROSOFT, "FusedMatMul"), (_MICROSOFT, "TransposeMatMul"))
_NBITS = "MatMulNBits"
# products of integers, and the nodes that turn their results into floats
_FLOAT_RESULTS = {"MatMulInteger": ("Cast", "Mul"), "QLinearMatMul": ("DequantizeLinear",)}
_SCALES = ("Mul", "Div")
_AFFINE = (*_SCALES, "Add", "Sub")

ValueKey = tuple[int, str]  # the id of the graph that defines a value, and its name there
# (graph, node or None for an output of the graph, operand index)
Reader = tuple[GraphProto, NodeProto | None, int]


@dataclass(frozen=True)
class WeightUse:
    """A use of a weight by a layer: the node that multiplies data by the weight, or looks up rows
    of the weight.

    Attributes:
        graph: the graph of the node.
        node: the node that computes the product, or its last scaling, if integers are multiplied.
        form: LINEAR `x @ M`, LEFT `M @ x`, EMBEDDING `M[x]` or CONV.
        x: name of the data.
        perm: order of the axes of the weight in M.
        shape: shape of M.
        dtype: dtype of the product.
        flips: whether the data are transposed before.
        factor: number by which the product is multiplied.
    """

    graph: GraphProto
    node: NodeProto
    form: str
    x: str
    perm: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: ir.DataType
    flips: bool = False
    factor: float = 1.0

    @property
    def group(self) -> int:
        """The count of groups of the convolution; 1 for other operators."""
        return int(attribute_values(self.node).get("group", 1))


@dataclass
class AdapterTarget:
    """A constant that may get an adapter, with the layers that read it, or the reason why it cannot
    have an adapter.

    Attributes:
        ref: the constant.
        uses: the nodes beside which its adapter is put.
        reason: why it cannot have an adapter; "" if it can.
        quantized: whether it holds integers.
        missed: whether a layer multiplies by it, and yet it cannot have an adapter.
    """

    ref: ConstantRef
    uses: list[WeightUse] = field(default_factory=list)
    reason: str = ""
    quantized: bool = False
    missed: bool = False


@dataclass(frozen=True)
class _MovedWeight:
    """A weight after nodes that transpose, reshape, cast or dequantize it, as the next node reads
    it.

    Attributes:
        key: the value that the node reads.
        shape: shape before axes were reordered.
        perm: order of the axes in the value.
        dtype: dtype of the value.
        quantized: whether the weight is stored as integers.
        scaled: whether a DequantizeLinear, Mul or Div has applied the scale of the integers.
    """

    key: ValueKey
    shape: tuple[int, ...]
    perm: tuple[int, ...]
    dtype: int
    quantized: bool
    scaled: bool = False

    @property
    def shape_at_use(self) -> tuple[int, ...]:
        """The shape of the weight as the node that uses the weight reads it."""
        return tuple(self.shape[i] for i in self.perm)


def find_targets(proto: ModelProto) -> dict[str, AdapterTarget]:
    """Return `{name: AdapterTarget}` of the float and quantized constants of a model whose local
    functions are inlined.
    """
    search = _UseSearch(proto)
    found: dict[str, AdapterTarget] = {}
    for ref in search.refs:
        dtype = search.dtypes[ref.graph_name]
        if dtype in FLOATS or dtype in _QUANTIZED:
            target = search.examine_constant(ref)
            if dtype in FLOATS or target.quantized:
                found[ref.name] = target
    return found


def attribute_values(node: NodeProto) -> dict[str, Any]:
    """Return `{name: Python value}` of the attributes of `node`."""
    return {a.name: ir.serde.deserialize_attribute(a).value for a in node.attribute}


def readers_by_value(graph: GraphProto) -> dict[ValueKey, list[Reader]]:
    """Return for each value of a graph and its subgraphs the places (graph, node, operand index)
    that read the value.
    """
    table: dict[ValueKey, list[Reader]] = defaultdict(list)

    def record_reads(graph: GraphProto, outer: list[tuple[int, set[str]]]) -> None:
        scopes = [*outer, (id(graph), set(direct_value_names(graph)))]

        def value_key(name: str) -> ValueKey:
            return next((g for g, own in scopes[::-1] if name in own), 0), name

        for node in graph.node:
            for index, name in enumerate(node.input):
                if name:
                    table[value_key(name)].append((graph, node, index))
            for inner in subgraphs(node):
                record_reads(inner, scopes)
        for y in graph.output:
            table[value_key(y.name)].append((graph, None, 0))

    record_reads(graph, [])
    return table


class _UseSearch:
    """A search for the layers that read constants, in a model without local functions.

    Attributes:
        refs: the constants; they keep the graphs alive, and so their ids unique.
        readers: the operands that read each value.
        constants: the constants by their names in their graphs.
        fixed: names of values that are computed from constants alone.
        dtypes: dtypes of the constants by their names in their graphs.
    """

    def __init__(self, proto: ModelProto) -> None:
        self.refs = list(constant_refs(proto))
        self.readers = readers_by_value(proto.graph)
        self.constants = {ref.graph_name: ref for ref in self.refs}
        self.dtypes = {ref.graph_name: ref.read().data_type for ref in self.refs}
        self.fixed = set(self.constants)
        for node in all_nodes(proto.graph.node):
            if node.input and self.fixed.issuperset(node.input) and not any(subgraphs(node)):
                self.fixed.update(node.output)

    def examine_constant(self, ref: ConstantRef) -> AdapterTarget:
        """Return the `AdapterTarget` of a constant: the layers that read it, or the reason why it
        cannot have an adapter.
        """
        target = AdapterTarget(ref)
        tensor = ref.read()
        if ref.is_sparse or ref.function is not None or ref.attribute is not None:
            kind = "a sparse tensor" if ref.is_sparse else "part of a local function"
            target.reason = f"it is {kind}"
            return target
        shape = tuple(tensor.dims)
        key, stored = (id(ref.graph), ref.graph_name), tensor.data_type
        start = _MovedWeight(key, shape, tuple(range(len(shape))), stored, False)
        for path, (graph, node, index) in self._operands_with_weight(start):
            use = node and self._find_use_at_node(path, graph, node, index)
            rows = isinstance(use, WeightUse) and use.form == EMBEDDING
            if isinstance(use, WeightUse) and not path.scaled and (path.quantized or rows):
                use = self._use_at_scale_node(use) if stored not in FLOATS else use
                if not use.dtype.is_floating_point():
                    use = f"the result of {_node_title(use.node)} stays in integers"
            if isinstance(use, WeightUse) and use.x in self.constants:
                use = f"{_node_title(use.node)} multiplies it by another constant"
            if isinstance(use, WeightUse):
                target.uses.append(use)
            else:
                target.reason = use or "it is an output of a graph"
                target.missed |= len(shape) > 1 and self._is_layer_weight(path.key)
            by_integers = node is not None and node.op_type in (_NBITS, *_FLOAT_RESULTS)
            target.quantized |= path.quantized or (by_integers and isinstance(use, WeightUse))
            # quantized even if no adapter fits
            target.quantized |= stored not in FLOATS and len(shape) > 1
        if len(shape) < 2 and not target.quantized:
            target.reason = f"it has the shape {list(shape)}, an adapter needs a matrix"
        elif not target.uses and not target.reason:
            target.reason = "nothing reads it"
        elif not target.reason:
            target.reason = _reason_against_shared_adapter(target.uses)
        return target

    def _is_layer_weight(self, key: ValueKey) -> bool:
        """Return whether a layer multiplies data by the constant `key`, directly or after a Concat
        with other constants.
        """
        waiting = [key]
        for name in waiting:  # the loop appends to `waiting`
            for graph, node, index in self.readers.get(name, ()):
                scales = node is not None and (
                    node.op_type == "DequantizeLinear" or (node.op_type == _NBITS and index > 1)
                )
                if node is not None and not scales and operand_role(node, index) in ("f", "q"):
                    return True
                if node is not None and node.op_type in MOVES | {"Concat"}:
                    waiting += [(id(graph), y) for y in node.output if y in self.fixed]
        return False

    def _operands_with_weight(self, start: _MovedWeight) -> Iterator[tuple[_MovedWeight, Reader]]:
        """Yield each operand that reads a weight, directly or after nodes that transpose, reshape,
        cast or dequantize the weight.
        """
        waiting = [start]
        for path in waiting:  # the loop appends to `waiting`
            for reader in self.readers.get(path.key, ()):
                graph, node, index = reader
                if node is None or normalize_domain(node.domain) not in ("", _MICROSOFT):
                    yield path, reader
                    continue
                onward = replace(path, key=(id(graph), node.output[0]))
                if path.quantized and node.op_type in _AFFINE and self.fixed.issuperset(node.input):
                    scaled = path.scaled or node.op_type in _SCALES
                    waiting.append(replace(onward, scaled=scaled))
                    continue
                if index:
                    yield path, reader
                    continue
                options = attribute_values(node)
                if node.op_type == "Transpose":
                    order = options.get("perm", range(len(path.perm))[::-1])
                    waiting.append(replace(onward, perm=tuple(path.perm[i] for i in order)))
                elif node.op_type == "Cast":
                    quantized = path.quantized or path.dtype not in FLOATS
                    waiting.append(replace(onward, dtype=options["to"], quantized=quantized))
                elif (
                    node.op_type == "Reshape" and path.quantized and node.input[1] in self.constants
                ):
                    sizes = self.constants[node.input[1]].array()
                    sizes = np.empty(path.shape_at_use, bool).reshape(
                        np.where(sizes, sizes, path.shape_at_use[0])
                    )
                    axes = tuple(range(sizes.ndim))
                    waiting.append(replace(onward, shape=sizes.shape, perm=axes))
                elif node.op_type == "Identity":
                    waiting.append(onward)
                elif node.op_type == "DequantizeLinear":
                    dtype = self._dequantized_dtype(node)
                    waiting.append(replace(onward, dtype=dtype, quantized=True, scaled=True))
                else:
                    yield path, reader

    def _dequantized_dtype(self, node: NodeProto) -> ir.DataType:
        """Return the float dtype of a DequantizeLinear's result."""
        stated = attribute_values(node).get("output_dtype")
        return ir.DataType(stated or self.dtypes.get(node.input[1], TensorProto.FLOAT))

    def _find_use_at_node(
        self, path: _MovedWeight, graph: GraphProto, node: NodeProto, index: int
    ) -> WeightUse | str:
        """Return the `WeightUse` of a weight by `node`, or the reason why the weight cannot have an
        adapter there.
        """
        kind, options = (normalize_domain(node.domain), node.op_type), attribute_values(node)
        dtype, shape = ir.DataType(path.dtype), path.shape
        if kind == (_MICROSOFT, _NBITS) and index == 1:
            scales = ir.DataType(self.dtypes.get(node.input[2], TensorProto.FLOAT))
            size = (int(options["K"]), int(options["N"]))
            return WeightUse(graph, node, LINEAR, node.input[0], (0, 1), size, scales)
        used = path.shape_at_use
        x = (*node.input, "")[1 - index % 2]
        use = WeightUse(graph, node, LINEAR, x, path.perm, used, dtype)
        if len(shape) > 1 and index < 2 and (kind in _PRODUCTS or kind == ("", "Gemm")):
            return _use_by_matrix_product(use, index, options)
        if (
            not kind[0]
            and kind[1] in _FLOAT_RESULTS
            and index == 1 + 2 * (node.op_type == "QLinearMatMul")
        ):
            return _use_by_integer_product(use)
        if len(shape) > 2 and index == 1 and kind == ("", "Conv"):
            return replace(use, form=CONV)
        if kind == ("", "Gather") and index == 0:
            if len(shape) == 2 and options.get("axis", 0) in (0, -2):
                return replace(use, form=EMBEDDING)
            return f"{_node_title(node)} does not look up rows of a matrix"
        if node.op_type in ("FusedGemm", "FusedConv", "NhwcFusedConv", "GemmFastGelu"):
            return (
                f"{_node_title(node)} applies an activation, too: use the file before it was "
                "optimized"
            )
        if node.op_type == "QuantizeLinear":
            return (
                f"{_node_title(node)} rounds it when the model runs: add adapters to the file with "
                "integers that a Trainer of this model saves"
            )
        return (
            f"{_node_title(node)} reads it, and adapters are put beside MatMul, Gemm, Conv and "
            "Gather, where data are multiplied by a weight or look up its rows"
        )

    def _use_at_scale_node(self, use: WeightUse) -> WeightUse:
        """Return `use` with the node that multiplies the integer product by its scale in place of
        the product's node.
        """
        rows, node, dtype, factors = use.form == EMBEDDING, use.node, use.dtype, self.fixed
        if rows:
            gathers = (
                n for n in use.graph.node if n.op_type == "Gather" and n.input[0] in self.fixed
            )
            factors = self.fixed.union(n.output[0] for n in gathers)
        while use.form != CONV and node.op_type not in _SCALES:
            after = _only_reading_node(use.graph, node)
            if after is None:
                break
            others = set(after.input) - {node.output[0]}
            scales = after.op_type in (_AFFINE if rows else _SCALES)
            if rows and after.op_type == "DequantizeLinear":
                node, dtype = after, self._dequantized_dtype(after)
                break
            if rows and after.op_type == "Cast":
                dtype = ir.DataType(attribute_values(after)["to"])
            elif not scales or not others or not others <= factors:
                break
            node = after
        return replace(use, node=node, dtype=dtype)


def _reason_against_shared_adapter(uses: list[WeightUse]) -> str:
    """Return the reason why the layers that read a weight cannot share an adapter; "" if they can
    share it.
    """
    first = uses[0]
    for use in uses[1:]:
        same = use.perm == first.perm and (use.form == CONV) == (first.form == CONV)
        swapped = CONV not in (use.form, first.form) and use.perm == _swap_last_axes(first.perm)
        if not (same or swapped) or use.group != first.group or use.dtype != first.dtype:
            return f"{_node_title(first.node)} and {_node_title(use.node)} use it in different ways"
    return ""


def _only_reading_node(graph: GraphProto, node: NodeProto) -> NodeProto | None:
    """Return the only node of `graph` that reads the result of `node`; None if several nodes read
    it.
    """
    readers = [n for n in graph.node if node.output[0] in n.input]
    return readers[0] if len(readers) == 1 else None


def _use_by_integer_product(use: WeightUse) -> WeightUse | str:
    """Return the `WeightUse` of a weight in an integer product whose data were floats, or the
    reason why the weight cannot have an adapter.

    Returns the reason if there are no such data or result.
    """
    before = {name: n for n in use.graph.node for name in n.output}.get(use.node.input[0])
    if before is None or before.op_type not in ("DynamicQuantizeLinear", "QuantizeLinear"):
        return f"the data of {_node_title(use.node)} are integers already: use the QDQ format"
    node = use.node
    for op_type in _FLOAT_RESULTS[use.node.op_type]:
        after = _only_reading_node(use.graph, node)
        if after is None or after.op_type != op_type:
            return f"the result of {_node_title(use.node)} stays in integers: use the QDQ format"
        node = after
    makers = {name: n.op_type for n in use.graph.node for name in n.output}
    dynamic = before.op_type == "DynamicQuantizeLinear"
    if dynamic and "Mul" not in {makers.get(name) for name in node.input}:
        return (
            f"two nodes multiply the result of {_node_title(use.node)} by its scales: use the QDQ "
            "format"
        )
    return replace(use, node=node, x=before.input[0], dtype=ir.DataType.FLOAT)


def _use_by_matrix_product(use: WeightUse, index: int, options: dict[str, Any]) -> WeightUse | str:
    """Return the `WeightUse` of a weight that is operand `index` of a MatMul or Gemm, or the reason
    why it cannot have an adapter.
    """
    flips = bool(options.get("transB" if index else "transA"))
    if flips:
        use = replace(use, perm=_swap_last_axes(use.perm), shape=_swap_last_axes(use.shape))
    flips = bool(options.get("transA" if index else "transB"))
    if options.get("transBatchA") or options.get("transBatchB"):
        return f"{_node_title(use.node)} transposes batches"
    if flips and use.node.op_type != "Gemm":
        return f"{_node_title(use.node)} transposes its data"
    factor = float(options.get("alpha", 1.0))
    return replace(use, form=LINEAR if index else LEFT, flips=flips, factor=factor)


def _swap_last_axes(axes: tuple[int, ...]) -> tuple[int, ...]:
    return (*axes[:-2], axes[-1], axes[-2])


def _node_title(node: NodeProto) -> str:
    return f"{node.op_type} {node.name or node.output[0]!r}"
