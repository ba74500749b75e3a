"""The inference form of a model: BatchNormalization and Dropout as in `module.eval()`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from copy import deepcopy

import numpy as np
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper

from onnxgrad.data.columns import Names
from onnxgrad.errors import ModelError, printable
from onnxgrad.model.constants import normalize_domain, opset_versions
from onnxgrad.model.traversal import (
    GraphLike,
    all_graphs,
    all_nodes,
    declared_names,
    keep_only,
    names_read_in_graph,
)
from onnxgrad.model.weights import empty_weight_names, replace_constants
from onnxgrad.operators import operator_of
from onnxgrad.training.modes.ranges import with_learned_scales
from onnxgrad.training.modes.stored_integers import store_integers

_LAST_IS_TEST = 6  # opset: until then, the attribute `is_test` tells the mode
_RUNNING = {1: 3, 2: 4}  # output of a BatchNormalization: the operand that it updates


def names_of_training_nodes(proto: ModelProto) -> list[str]:
    """Return the names of the nodes in training mode; an unnamed node has its first output's name.

    In training mode are BatchNormalization nodes that normalize by the statistics of the batch, and
    Dropout nodes that drop elements, or whose mode is computed, also in subgraphs and local
    functions.
    """
    return [name for name, _ in _training_node_types(proto)]


def warn_of_stale_statistics(proto: ModelProto) -> None:
    """Warn of BatchNormalization in training mode, whose running statistics do not change."""
    stale = [name for name, op in _training_node_types(proto) if op == "BatchNormalization"]
    if stale:
        warnings.warn(
            f"the running statistics of {', '.join(map(printable, stale))} keep the values of the "
            'file: Trainer(model, loss, batch_norm="train") updates them',
            stacklevel=5,
        )


def inference_form(proto: ModelProto) -> ModelProto:
    """Return `proto` with BatchNormalization and Dropout in inference mode.

    All other parts of the file stay, byte for byte. BatchNormalization uses its stored statistics,
    also for its outputs of statistics.
    Dropout keeps its ratio, for `predict_samples`, and loses the input `training_mode`, which is
    removed if it is a constant that no other node reads. A model without nodes in training mode is
    returned itself.

    Raises:
        ModelError: a BatchNormalization before opset 14 returns statistics of the batch, and they
            are used.
    """
    if not names_of_training_nodes(proto):
        return proto
    model = deepcopy(proto)
    for holder, opset in _graphs_with_opset(model):
        read = names_read_in_graph(holder)
        dropped: set[str] = set()  # names that a node no longer reads or writes
        for node, graph in _training_nodes(holder, opset):
            if node.op_type == "BatchNormalization":
                dropped |= _keep_statistics(node, graph, opset, read)
            else:
                dropped |= _stop_dropout(node, opset)
        _remove_constants_and_shapes(
            holder, dropped - names_read_in_graph(holder) - set(declared_names(holder.input))
        )
    return model


def export_model(proto: ModelProto, values: Mapping[str, np.ndarray], names: Names) -> ModelProto:
    """Return a trained model in its inference form, with the trained `values` of its constants.

    Its metadata have the `names` of columns and classes. Weights that QuantizeLinear nodes round
    are stored as integers. Initializers whose elements `proto` lacks, other than quantized weights,
    do not get their values: see `fill_weights`.
    """
    empty = empty_weight_names(proto)
    held = {name: array for name, array in values.items() if name not in empty}
    result = with_learned_scales(inference_form(replace_constants(proto, held)), values)
    result = store_integers(result, values)
    names.write_metadata(result)
    return result


def _training_node_types(proto: ModelProto) -> list[tuple[str, str]]:
    """Return (name, operator) for each node of a model that is in training mode.

    An unnamed node has the name of its first output.
    """
    nodes = (node for holder in _graphs_with_opset(proto) for node, _ in _training_nodes(*holder))
    return [(node.name or node.output[0], node.op_type) for node in nodes]


def _graphs_with_opset(proto: ModelProto) -> Iterator[tuple[GraphLike, int]]:
    """Yield (graph, opset version) for the main graph and each local function."""
    yield proto.graph, opset_versions(proto.opset_import).get("", 0)
    yield from ((f, opset_versions(f.opset_import).get("", 0)) for f in proto.functions)


def _training_nodes(holder: GraphLike, opset: int) -> list[tuple[NodeProto, GraphLike]]:
    """Return (node, its graph) for each node in training mode of `holder` and its subgraphs."""
    off = _names_of_false_constants(holder)
    nodes = ((node, graph) for graph in all_graphs(holder) for node in graph.node)
    return [(node, graph) for node, graph in nodes if _is_training_node(node, opset, off)]


def _is_training_node(node: NodeProto, opset: int, off: set[str]) -> bool:
    """Return whether `node` is in training mode; `off` names the boolean constants with False."""
    domain = normalize_domain(node.domain)
    attributes = {a.name: a for a in node.attribute}
    if not domain and node.op_type in ("BatchNormalization", "Dropout") and opset <= _LAST_IS_TEST:
        return "is_test" not in attributes or not attributes["is_test"].i
    if not domain and node.op_type == "BatchNormalization":
        mode = attributes.get("training_mode")
        return any(node.output[1:]) or (mode is not None and bool(mode.i or mode.ref_attr_name))
    index = operator_of(node).ratio_operand
    mode_name = "" if index is None else (*node.input, *[""] * 5)[index + 1]
    return bool(mode_name) and mode_name not in off


def _names_of_false_constants(holder: GraphLike) -> set[str]:
    """Return the names of the boolean constants of `holder` and its subgraphs that are False."""
    graphs = [g for g in all_graphs(holder) if isinstance(g, GraphProto)]
    tensors = [(t.name, t) for graph in graphs for t in graph.initializer]
    for node in all_nodes(holder.node):
        if node.op_type == "Constant" and not normalize_domain(node.domain):
            tensors += [(node.output[0], a.t) for a in node.attribute if a.name == "value"]
    booleans = [(name, t) for name, t in tensors if t.data_type == TensorProto.BOOL]
    false = {name for name, t in booleans if not numpy_helper.to_array(t).any()}
    return false - set(declared_names(holder.input))  # defaults, which may be overridden


def _keep_statistics(node: NodeProto, graph: GraphLike, opset: int, read: set[str]) -> set[str]:
    """Put a BatchNormalization into inference mode; return the names of its removed outputs."""
    keep_only(node.attribute, lambda a: a.name != "training_mode")
    if opset <= _LAST_IS_TEST:
        _set_is_test(node)
    lost = node.output[1:]
    del node.output[1:]
    position = next(i for i, n in enumerate(graph.node, 1) if n.output[:1] == node.output)
    for i, name in enumerate(lost, 1):
        if name not in read or name == node.input[_RUNNING.get(i, 0)]:
            continue
        if i not in _RUNNING:
            raise ModelError(
                f"BatchNormalization {node.name!r} (output {node.output[0]!r}): a node or an output"
                f" of the model reads {name!r}, a statistic of the batch, which does not exist when"
                " the model predicts: export the model for inference"
            )
        copy = NodeProto(op_type="Identity", input=[node.input[_RUNNING[i]]], output=[name])
        graph.node.insert(position, copy)
    return {*lost} - read


def _stop_dropout(node: NodeProto, opset: int) -> set[str]:
    """Put a Dropout into inference mode; return the names of its removed inputs."""
    if opset <= _LAST_IS_TEST and not node.domain:
        _set_is_test(node)
        return set()
    index = operator_of(node).ratio_operand
    assert index is not None
    lost = set(node.input[index + 1 :])
    del node.input[index + 1 :]
    while node.input and not node.input[-1]:
        del node.input[-1]
    return lost


def _set_is_test(node: NodeProto) -> None:
    """Put a node of an opset before 7 into inference mode, by its attribute `is_test`."""
    keep_only(node.attribute, lambda a: a.name != "is_test")
    node.attribute.add(name="is_test", type=AttributeProto.INT, i=1)


def _remove_constants_and_shapes(holder: GraphLike, dropped: set[str]) -> None:
    """Remove the constants called `dropped`, and the shapes declared for them, from all graphs."""
    # inner graphs first: `keep_only` copies the nodes that it keeps, and their subgraphs
    for graph in list(all_graphs(holder))[::-1]:
        keep_only(graph.node, lambda n: n.op_type != "Constant" or n.output[0] not in dropped)
        keep_only(graph.value_info, lambda v: v.name not in dropped)
        if isinstance(graph, GraphProto):
            keep_only(graph.initializer, lambda t: t.name not in dropped)
