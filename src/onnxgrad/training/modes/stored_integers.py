"""Quantized weights: as floats that nodes round, which train, and as the integers of a file.

A weight that trains is a float tensor; a QuantizeLinear and a DequantizeLinear behind it round it.
A stored weight is the tensor of integers that the QuantizeLinear computes.
"""

from __future__ import annotations

from collections import ChainMap, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto, numpy_helper

from onnxgrad.model import external
from onnxgrad.model.constants import FLOATS, normalize_domain
from onnxgrad.model.notes import fine_tuned_tensors
from onnxgrad.model.opsets import min_ir_version
from onnxgrad.model.scopes import unquantized_name, unused_name
from onnxgrad.model.traversal import (
    all_graphs,
    declared_names,
    keep_only,
    names_read_by,
    names_read_in_graph,
    subgraphs,
    value_names,
)
from onnxgrad.operators import REORDERS, VIEWS, operator_of
from onnxgrad.training.parameters.equal_constants import add_copy

_DOMAINS = ("", "com.microsoft")
# operators that may stand between a weight and its QuantizeLinear
_MOVES = REORDERS | VIEWS | {"Cast"}

# types of integers that stand for a weight or, as INT32, for a bias
_STORED = frozenset(
    TensorProto.DataType.Value(name) for name in "INT4 UINT4 INT8 UINT8 INT16 UINT16 INT32".split()
)


@dataclass
class RoundedWeight:
    """A float weight, and the QuantizeLinear behind it that rounds it.

    Attributes:
        graph: the graph with the node.
        node: the QuantizeLinear.
        moves: the nodes between weight and QuantizeLinear, which move the elements of the weight,
            in their order.
        constants: the constants that `node` and `moves` read, by name.
        weight: the name of the weight.
    """

    graph: GraphProto
    node: NodeProto
    moves: list[NodeProto]
    constants: dict[str, TensorProto]
    weight: str

    @property
    def moved_names(self) -> list[str]:
        """The names of the moved copies of the weight, which the nodes `moves` compute."""
        return [y for node in self.moves for y in node.output]


def is_operator(node: NodeProto, op_type: str) -> bool:
    """Return whether `node` is the operator `op_type` of ONNX or of onnxruntime."""
    return node.op_type == op_type and normalize_domain(node.domain) in _DOMAINS


def rounded_float_weights(proto: ModelProto) -> list[RoundedWeight]:
    """Return the float weights of `proto` that a QuantizeLinear rounds, in subgraphs too.

    Weights of adapters, which are merged later, are left out.
    """
    if not any(is_operator(n, "QuantizeLinear") for g in all_graphs(proto.graph) for n in g.node):
        return []
    adapters = set(fine_tuned_tensors(proto))
    found = _rounded_weights_in_graph(proto.graph, ChainMap())
    return [pair for pair in found if pair.weight not in adapters]


def _rounded_weights_in_graph(
    graph: GraphProto, outer: ChainMap[str, TensorProto]
) -> Iterator[RoundedWeight]:
    """Yield the rounded weights of a graph and its subgraphs; `outer` are outer constants."""
    scope = outer.new_child({t.name: t for t in graph.initializer})
    makers: dict[str, NodeProto] = {}
    readers = readers_of(graph)
    for node in graph.node:
        if node.op_type == "Constant" and not normalize_domain(node.domain):
            scope.update((node.output[0], a.t) for a in node.attribute if a.name == "value")
        makers |= dict.fromkeys(node.output, node)
        for inner in subgraphs(node):
            yield from _rounded_weights_in_graph(inner, scope)
        users = readers[node.output[0]] if is_operator(node, "QuantizeLinear") else []
        if users and all(u and is_operator(u, "DequantizeLinear") for u in users):
            traced = _trace_to_constant(node, makers, scope)
            if traced is not None:
                yield RoundedWeight(graph, node, *traced)


def _trace_to_constant(
    node: NodeProto, makers: Mapping[str, NodeProto], scope: Mapping[str, TensorProto]
) -> tuple[list[NodeProto], dict[str, TensorProto], str] | None:
    """Return (nodes that move a constant to `node`, constants that the nodes read, its name).

    None if `node` rounds no constant. The constants are all constants that these nodes read.
    `makers` has the node that computes each value, and `scope` the constants of the graphs.
    """
    path = [node]
    while (name := path[0].input[0]) not in scope:
        maker = makers.get(name)
        if maker is None or normalize_domain(maker.domain) or maker.op_type not in _MOVES:
            return None
        path.insert(0, maker)
    moved_names = {y for n in path[:-1] for y in n.output}
    read = dict.fromkeys(x for n in path for x in n.input if x)
    if any(x not in scope and x not in moved_names for x in read):
        return None
    return path[:-1], {x: scope[x] for x in read if x in scope}, name


def readers_of(graph: GraphProto) -> Mapping[str, list[NodeProto | None]]:
    """Return the nodes that read each value, `{value name: nodes}`.

    None stands for a read in a subgraph of a node, and for an output of the graph.
    """
    readers: dict[str, list[NodeProto | None]] = defaultdict(list)
    for node in graph.node:
        for name in dict.fromkeys(names_read_by(node)):
            readers[name].append(node if name in node.input else None)
    for name in declared_names(graph.output):
        readers[name].append(None)
    return readers


# -- from rounded floats to integers -----------------------------------------------------------


def store_integers(proto: ModelProto, values: Mapping[str, np.ndarray]) -> ModelProto:
    """Store rounded float weights of `proto` as integers, in place; return `proto`.

    onnxruntime computes the integers.

    Args:
        proto: the model.
        values: the elements of initializers that lack their elements, by name.
    """
    found = rounded_float_weights(proto)
    leave_room_for_biases(proto.graph, [pair.node for pair in found])
    for pair in found:
        tensor = _quantized_tensor(pair, values, proto.opset_import)
        pair.graph.node.remove(pair.node)
        pair.graph.initializer.append(tensor)
        _remove_entry(pair.graph.value_info, tensor.name)
    if found:
        rounded = {name for pair in found for name in (*pair.constants, *pair.moved_names)}
        _remove_unread_constants(proto, rounded - names_read_in_graph(proto.graph))
    return proto


def _remove_entry(entries: Any, name: str) -> None:
    """Remove the element called `name` from a repeated field of a graph, such as `initializer`."""
    keep_only(entries, lambda entry: entry.name != name)


def _remove_unread_constants(proto: ModelProto, unread: set[str]) -> None:
    """Remove the constants called `unread`, and the nodes that only move them, in place."""
    before: set[str] = set()  # names that the removed nodes read
    for graph in all_graphs(proto.graph) if unread else ():
        assert isinstance(graph, GraphProto)
        gone = [n for n in graph.node if n.output and unread.issuperset(n.output)]
        before.update(name for node in gone for name in node.input)
        keep_only(graph.node, lambda n: not n.output or not unread.issuperset(n.output))
        for entries in (graph.initializer, graph.input, graph.value_info):
            keep_only(entries, lambda entry: entry.name not in unread)
        keep_only(graph.quantization_annotation, lambda a: a.tensor_name not in unread)
    if left := before - names_read_in_graph(proto.graph):
        _remove_unread_constants(proto, left)


def _quantized_tensor(
    pair: RoundedWeight, values: Mapping[str, np.ndarray], opsets: Iterable[OperatorSetIdProto]
) -> TensorProto:
    """Return the integers to which a weight is rounded, as onnxruntime computes them.

    `values` has the elements of initializers that lack their elements.
    """
    constants = dict(pair.constants)
    for name, tensor in pair.constants.items():
        if external.lacks_elements(tensor):
            constants[name] = numpy_helper.from_array(np.asarray(values[name], order="C"))
    # numpy lacks integers of 4 bits: they are read as floats, which are as exact
    taken = {*constants, *pair.moved_names, *pair.node.output}
    one, steps = unused_name("one", taken), unused_name("steps", taken)
    constants[one] = numpy_helper.from_array(np.ones((), np.float32))
    back = NodeProto(op_type="DequantizeLinear", domain=pair.node.domain, output=[steps])
    back.input.extend([pair.node.output[0], one])
    floats = compute_constant(opsets, constants, [*pair.moves, pair.node, back])
    dtype = ir.DataType(integer_type(pair.node, pair.constants))
    integers = ir.tensor(floats.astype(dtype.numpy()), dtype=dtype, name=pair.node.output[0])
    return ir.to_proto(integers)


def compute_constant(
    opsets: Iterable[OperatorSetIdProto],
    constants: Mapping[str, TensorProto],
    nodes: Sequence[NodeProto],
) -> np.ndarray:
    """Return the float array that the last of `nodes` computes from constants, in onnxruntime."""
    model = ModelProto(opset_import=opsets)
    model.ir_version = min_ir_version(list(opsets))
    model.graph.name = "constants"
    for name, tensor in constants.items():
        add_copy(model.graph.initializer, tensor, name)
    model.graph.node.extend(nodes)
    output = model.graph.output.add(name=nodes[-1].output[0])
    output.type.tensor_type.elem_type = constants[nodes[-1].input[1]].data_type
    import onnxruntime as ort  # imported here, as the table of weights needs no session

    from onnxgrad.runtime.device import Device
    from onnxgrad.runtime.session import load_session

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    return load_session(model, options, providers=Device.of("cpu").providers).run(None, {})[0]


def integer_type(node: NodeProto, constants: Mapping[str, TensorProto]) -> int:
    """Return the data type of the integers to which a QuantizeLinear rounds."""
    zero = constants.get(node.input[2]) if len(node.input) > 2 else None
    if zero is not None:
        return zero.data_type
    stated = {a.name: a.i for a in node.attribute}.get("output_dtype", 0)
    return stated or TensorProto.UINT8


# -- from integers to rounded floats -----------------------------------------------------------


@dataclass
class StoredWeight:
    """A weight that the file stores as integers, which DequantizeLinear nodes turn into floats.

    Attributes:
        tensor: the integers.
        users: the DequantizeLinear nodes, which have the same operands.
        scale: the scale of the integers.
        zero: the zero point of the integers; None without a zero point.
        weight: the name that the weight gets as floats.
    """

    tensor: TensorProto
    users: list[NodeProto]
    scale: TensorProto
    zero: TensorProto | None
    weight: str


def stored_weights(proto: ModelProto) -> list[StoredWeight]:
    """Return the weights that the main graph stores as integers and that can train as floats."""
    graph = proto.graph
    scope = {t.name: t for t in graph.initializer}
    readers, taken, found = readers_of(graph), set(value_names(graph)), []
    for tensor in graph.initializer:
        users = [u for u in readers[tensor.name] if u and is_operator(u, "DequantizeLinear")]
        if not users or len(users) < len(readers[tensor.name]) or tensor.data_type not in _STORED:
            continue
        operands = {tuple(user.input[1:]) for user in users}
        if len(operands) > 1 or any(user.input[0] != tensor.name for user in users):
            continue
        [scale, *zero] = operands.pop()
        if scale not in scope or any(name and name not in scope for name in zero):
            continue
        weight = users[0].output[0]
        if tensor.data_type != TensorProto.INT32:
            base = unquantized_name(tensor.name)
            weight = base if base not in taken else unused_name(f"{base}.float", taken)
        elif len(users) > 1 or None in readers[weight]:
            continue
        zeros = [scope[name] for name in zero if name]
        entry = StoredWeight(tensor, users, scope[scale], zeros[0] if zeros else None, weight)
        taken.add(weight)
        found.append(entry)
    return found


def store_floats(
    proto: ModelProto, chosen: Collection[str], originals: Mapping[str, TensorProto]
) -> ModelProto:
    """Return a copy of `proto` in which `chosen` integers are floats, rounded by a QuantizeLinear.

    Args:
        proto: the model.
        chosen: the names of the tensors of integers.
        originals: the floats before rounding, by the names that weights get; other weights get the
            floats that the integers stand for, scale times (integer - zero point).
    """
    # a protobuf message frees no memory of initializers that are removed
    model = external.copy_without_elements(proto, lambda tensor: tensor.name in chosen)
    graph, integers = model.graph, {t.name: t for t in proto.graph.initializer}
    for entry in stored_weights(model):
        name, user = entry.tensor.name, entry.users[0]
        if name not in chosen:
            continue
        floats = originals.get(entry.weight)
        if floats is None:
            tensors = (integers[name], entry.scale, entry.zero)
            constants = {t.name: t for t in tensors if t is not None}
            floats = ir.to_proto(ir.tensor(compute_constant(model.opset_import, constants, [user])))
        if entry.tensor.data_type == TensorProto.INT32:  # a bias, which onnxruntime rounds itself
            graph.node.remove(user)
        else:
            position = next(i for i, n in enumerate(graph.node) if n.output == user.output)
            graph.node.insert(position, _quantize_node(graph, entry))
        add_copy(graph.initializer, floats, entry.weight)
        _remove_entry(graph.initializer, name)
        _remove_entry(graph.input, name)
    initializers = {t.name for t in graph.initializer}
    _remove_unread_constants(
        model, initializers & (names_read_in_graph(proto.graph) - names_read_in_graph(graph))
    )
    return model


def _quantize_node(graph: GraphProto, entry: StoredWeight) -> NodeProto:
    """Return a new QuantizeLinear that rounds the weight `entry` in floats."""
    user, zero = entry.users[0], entry.zero
    if zero is None:  # the type of the zero point decides the type of the integers
        zero = graph.initializer.add(data_type=entry.tensor.data_type, dims=entry.scale.dims)
        zero.name = unused_name(f"{entry.weight}_zero_point", set(value_names(graph)))
        zero.raw_data = bytes(external.nbytes(zero))
    node = NodeProto(op_type="QuantizeLinear", domain=user.domain, output=[entry.tensor.name])
    node.input.extend([entry.weight, entry.scale.name, zero.name])
    node.attribute.extend(a for a in user.attribute if a.name in ("axis", "block_size"))
    return node


# -- scales of weights that leave room for biases --------------------------------------------------

_FACTOR_AND_BIAS = "fb"  # the last operands of products such as Conv and Gemm
_LARGEST = 1.0001 / np.iinfo(np.int32).max  # onnxruntime.quantization leaves this room


def leave_room_for_biases(graph: GraphProto, weights: Iterable[NodeProto]) -> None:
    """Enlarge scales of weights, in place, where a bias would not fit integers of 32 bits.

    onnxruntime stores a bias as multiples of the scale of the data times the scale of the weight.
    `weights` are the QuantizeLinear nodes behind weights.
    """
    held = {t.name: t for t in graph.initializer if t.data_type in FLOATS}
    restored = [node for node in graph.node if node.op_type == "DequantizeLinear"]
    makers = {y: node for node in restored for y in node.output}
    rounded = {node.output[0] for node in weights}
    for node in graph.node:
        if normalize_domain(node.domain) or not operator_of(node).roles.endswith(_FACTOR_AND_BIAS):
            continue
        data, weight = (makers.get(name) for name in (*node.input, "", "")[:2])
        if len(node.input) < 3 or data is None or weight is None or weight.input[0] not in rounded:
            continue
        operands = node.input[2], data.input[1], weight.input[1]
        if held.keys() >= {*operands}:
            bias, of_data, of_weight = (held[name] for name in operands)
            if not any(map(external.lacks_elements, (bias, of_data, of_weight))):
                _enlarge_scale_for_bias(of_weight, bias, of_data)


def _enlarge_scale_for_bias(scale: TensorProto, bias: TensorProto, of_data: TensorProto) -> None:
    """Enlarge the scale of one weight if its bias would not fit integers of 32 bits."""
    now = external.tensor_to_array(scale).astype(np.float64)
    steps = np.abs(external.tensor_to_array(bias).astype(np.float64)) * _LARGEST
    least = steps / external.tensor_to_array(of_data).astype(np.float64)
    if now.shape != least.shape:
        if now.size != 1:
            return  # a scale for each block: onnxruntime has no kernel of integers for blocks
        least = least.max(initial=0.0)
    if (now < least).any():
        dtype = ir.DataType(scale.data_type).numpy()
        enlarged = np.maximum(now, least).astype(dtype).reshape(tuple(scale.dims))
        scale.CopyFrom(ir.to_proto(ir.tensor(enlarged, name=scale.name)))
