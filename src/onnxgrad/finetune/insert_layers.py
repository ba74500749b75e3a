"""`insert_batch_norm`, `insert_dropout`: layers that change nothing yet, behind the nodes that
patterns choose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from sys import maxsize
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.adapters.insertion import copy_inlined
from onnxgrad.checks import check_count
from onnxgrad.errors import ModelError, argument, escaping, join_first, node_text
from onnxgrad.finetune.layers import data_values, is_product
from onnxgrad.graph.infer import infer
from onnxgrad.model import external
from onnxgrad.model.constants import opset_versions
from onnxgrad.model.convert import to_ir
from onnxgrad.model.node_inserter import NodeInserter
from onnxgrad.model.notes import DROPOUT, read_metadata, write_metadata
from onnxgrad.model.read import ModelLike
from onnxgrad.model.surgery import select_model_inputs_outputs
from onnxgrad.model.traversal import model_graphs
from onnxgrad.operators import operator_of
from onnxgrad.operators.axes import shared_output_axes
from onnxgrad.operators.shapes import dims, is_real, rank
from onnxgrad.quantization.quantize import calibration_feeds, refuse_quantized_model
from onnxgrad.reporting import logger
from onnxgrad.runtime.predictor import Predictor
from onnxgrad.training.modes.dropouts import values_by_pattern, walk_with_outer_nodes
from onnxgrad.training.parameters.choice import list_patterns

EPSILON, MOMENTUM = 1e-5, 0.9  # of a new BatchNormalization; PyTorch's momentum of 0.1 is 0.9 here
_OLDEST_OPSET = 7  # before it, an attribute tells the mode of BatchNormalization and Dropout
_RATIO_OPERAND_OPSET = 12  # from it on, the ratio of a Dropout is an operand
_LISTED = 4  # most reasons in a message


class _Place(NamedTuple):
    """A float value of a model, with the nodes around its subgraph, outermost first."""

    value: ir.Value
    node: ir.Node
    around: tuple[ir.Node, ...]


class Statistics(NamedTuple):
    """The mean and the variance of each channel of a value."""

    mean: np.ndarray
    variance: np.ndarray


@escaping()
def insert_batch_norm(
    model: ModelLike, after: str | Iterable[str], data: Any = None, *, batch_size: int = 32
) -> ModelProto:
    """Return `model` with BatchNormalization nodes behind the nodes that the patterns match.

    The outputs stay the same, up to rounding: scale and bias undo the stored mean and variance.
    `Trainer(batch_norm="train")` trains them as `torch.nn.BatchNorm2d` in training mode, and
    `onnxgrad.graph.fold_batch_norm` makes them part of the layers again. Exporters fold them in a
    file for inference, which then trains without any.

    A new node takes over the name of the output that it reads, whose new name ends with
    "before_batch_norm"; its tensors are `<output>.batch_norm.weight`, `.bias`, `.running_mean` and
    `.running_var`. Local functions are inlined.

    Args:
        model: model of floats, serialized model or path; never modified.
        after: operators as "Conv", which stand for all their nodes, names of nodes or outputs, and
            patterns of `fnmatch`. Where a pattern matches several values, it leaves out values
            without channels on axis 1, and values that are normalized already.
        data: rows as for `Trainer.predict`, of which the statistics are taken: so the first steps
            of a training normalize about as the file does. None: mean 0 and variance 1.
        batch_size: rows of one call of the runtime, of data that are not batches already.

    Raises:
        ValueError: a pattern that matches no value that can be normalized: the message has the
            reasons; data that the inputs do not accept.
        ModelError: a model that is unreadable, quantized, or of an opset before 7.

    Examples:
        >>> import numpy as np, onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2] x) => (float[N,2] y) <float[2,2] w = {1.0, 2.0, 3.0, 4.0}> {
        ...     h = MatMul(x, w)  y = Relu(h) }''')
        >>> X = np.random.default_rng(0).normal(size=(100, 2)).astype(np.float32)
        >>> normalized = og.insert_batch_norm(model, after="MatMul", data=X)
        >>> [node.op_type for node in normalized.graph.node]
        ['MatMul', 'BatchNormalization', 'Relu']
        >>> trainer = og.Trainer(normalized, "squared_error", batch_norm="train").fit(X, X)
        >>> [node.op_type for node in og.graph.fold_batch_norm(trainer.model).graph.node]
        ['MatMul', 'Add', 'Relu']
    """
    check_count("batch_size", batch_size)
    proto = copy_inlined(model)
    refuse_quantized_model(proto, "insert BatchNormalization into the float model")
    require_opset(proto)
    graph = inferred_graph(proto)
    axes = _channel_axes(graph)
    chosen = _choose_places(graph, after, lambda place: _reason_against_batch_norm(place, axes))
    names = [str(place.value.name) for place in chosen]
    measured = {} if data is None else _measure_statistics(proto, names, data, batch_size)
    inserter = NodeInserter(proto)
    for place in chosen:
        tensors = _add_batch_norm_tensors(inserter, place.value, measured)
        write = partial(_write_batch_norm, inserter, tensors)
        _insert_behind(inserter, place, "before_batch_norm", write)
    return proto


@escaping()
def insert_dropout(model: ModelLike, after: str | Iterable[str], rate: float) -> ModelProto:
    """Return `model` with Dropout nodes behind the nodes that the patterns match.

    The nodes are in inference mode: the file computes the same as before. `Trainer` trains with
    them by default, `Trainer(dropout={...})` overrides the rate, and `predict_samples` draws
    predictions with them.

    A new node takes over the name of the output that it reads, whose new name ends with
    "before_dropout". Local functions are inlined.

    Args:
        model: model, serialized model or path; never modified.
        after: operators as "Relu", which stand for all their nodes, names of nodes or outputs, and
            patterns of `fnmatch`. Where a pattern matches several values, it leaves out values that
            do not depend on the inputs, and values with a Dropout.
        rate: the probability, in [0, 1), with which an element becomes zero; the others are divided
            by 1 - rate.

    Raises:
        ValueError: a pattern that matches no value that can have a Dropout: the message has the
            reasons; an invalid rate.
        ModelError: a model that is unreadable, or of an opset before 7.

    Examples:
        >>> import numpy as np, onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2] x) => (float[N,2] y) <float[2,2] w = {1.0, 2.0, 3.0, 4.0}> {
        ...     h = Relu(x)  y = MatMul(h, w) }''')
        >>> dropping = og.insert_dropout(model, after="Relu", rate=0.1)
        >>> [node.op_type for node in dropping.graph.node]
        ['Relu', 'Constant', 'Dropout', 'MatMul']
        >>> og.predict_samples(dropping, np.float32([[1, 2]]), 50).std.round(1).shape
        (1, 2)
    """
    if not 0 <= rate < 1:
        raise ValueError(f"{argument('rate', rate)}: give a probability in [0, 1)")
    proto = copy_inlined(model)
    opset = require_opset(proto)
    graph = inferred_graph(proto)
    data = data_values(graph)
    chosen = _choose_places(graph, after, lambda place: _reason_against_dropout(place, data))
    inserter, rate = NodeInserter(proto), float(rate)

    def write_dropout(x: ir.Value) -> ir.Value:
        if opset < _RATIO_OPERAND_OPSET:
            return inserter.emit("Dropout", x, ratio=rate)
        return inserter.emit("Dropout", x, inserter.write_scalar(rate, ir.DataType.FLOAT))

    for place in chosen:
        _insert_behind(inserter, place, "before_dropout", write_dropout)
    notes = [{"output": str(place.value.name), "ratio": rate} for place in chosen]
    write_metadata(proto, DROPOUT, [*read_metadata(proto, DROPOUT), *notes])
    return proto


def _write_batch_norm(inserter: NodeInserter, tensors: Sequence[ir.Value], x: ir.Value) -> ir.Value:
    """Write a BatchNormalization of `x` with these scale, bias, mean and variance; return its
    output.
    """
    options = {"epsilon": EPSILON, "momentum": MOMENTUM}
    return inserter.emit("BatchNormalization", x, *tensors, **options)


def _add_batch_norm_tensors(
    inserter: NodeInserter, value: ir.Value, measured: Mapping[str, Statistics]
) -> list[ir.Value]:
    """Add scale, bias, mean and variance of the BatchNormalization behind `value`, which is the
    identity; return them.

    Statistics that `measured` lacks are mean 0 and variance 1. All have the dtype of the value, as
    onnxruntime fuses no nodes of different dtypes.

    Raises:
        ValueError: a statistic is beyond the range of the dtype.
    """
    name, dtype, shape = str(value.name), value.dtype, dims(value) or ()
    assert dtype is not None
    assert isinstance(shape[1], int)
    unit = Statistics(np.zeros(shape[1]), np.ones(shape[1]))
    with np.errstate(over="ignore"):
        mean, variance = (a.astype(dtype.numpy()) for a in measured.get(name, unit))
    if not np.isfinite(variance.astype(np.float64)).all():
        raise ValueError(
            f"the variance of {name!r} is beyond the range of {dtype}: scale the data, or leave it "
            f"out of {argument('after')}"
        )
    scale = np.sqrt(variance.astype(np.float64) + np.float32(EPSILON))
    arrays = scale.astype(dtype.numpy()), mean, mean, variance
    parts = "weight", "bias", "running_mean", "running_var"
    return [
        inserter.add_tensor(inserter.free_name(f"{name}.batch_norm.{part}"), array)
        for part, array in zip(parts, arrays, strict=True)
    ]


def _insert_behind(
    inserter: NodeInserter, place: _Place, suffix: str, write: Callable[[ir.Value], ir.Value]
) -> None:
    """Insert the nodes that `write` writes behind a value, whose new name ends with `suffix`.

    Branches may have values of one name: the node of the value is of the same operator.
    """
    name, op_type = str(place.value.name), place.node.op_type
    graph, node = next(
        (graph, node)
        for graph in model_graphs(inserter.model)
        for node in graph.node
        if name in node.output and node.op_type == op_type
    )
    old = ir.val(inserter.free_name(f"{name}.{suffix}"), place.value.dtype, place.value.shape)
    inserter.replace_result(graph, node, old, write, list(node.output).index(name))


def require_opset(proto: ModelProto) -> int:
    """Return the opset of the standard operators.

    Raises:
        ModelError: the opset is older than 7.
    """
    opset = opset_versions(proto.opset_import).get("", 0)
    if opset < _OLDEST_OPSET:
        raise ModelError(
            f"the model has opset {opset} of the standard operators, and layers can be inserted "
            f"from opset {_OLDEST_OPSET} on: export it at a newer opset, or convert it by "
            "onnx.version_converter"
        )
    return opset


def inferred_graph(proto: ModelProto) -> ir.Graph:
    """Return the graph of a model in onnx_ir, with inferred types and shapes."""
    model = to_ir(external.copy_without_data(proto))
    infer(model)
    return model.graph


# -- which values ----------------------------------------------------------------------------------


def _choose_places(
    graph: ir.Graph, after: str | Iterable[str], reason_against: Callable[[_Place], str]
) -> list[_Place]:
    """Return the values that patterns match and that can have a new layer, in graph order.

    Raises:
        ValueError: a pattern that matches no such value.
    """
    walked = list(walk_with_outer_nodes(graph))
    nodes, outer = [node for node, _ in walked], dict(walked)
    chosen: dict[ir.Value, _Place] = {}
    for pattern in list_patterns(after):
        of_type = [node.outputs[0] for node in nodes if node.op_type == pattern]
        values = of_type or values_by_pattern(nodes, pattern, argument("after"))
        found = [_Place(y, node, outer[node]) for y in values if (node := y.producer())]
        reasons = {place: reason_against(place) for place in found}
        possible = {place.value: place for place, reason in reasons.items() if not reason}
        told = [f"{node_text(p.node)}: {reason}" for p, reason in reasons.items() if reason]
        if not possible:
            raise ValueError(
                f"no layer can be inserted behind {pattern!r} ({argument('after')}): "
                f"{join_first(told, _LISTED, '; ')}"
            )
        for line in told:
            logger.info("no layer is inserted behind %s", line)
        chosen |= possible
    if not chosen:
        raise ValueError(f"{argument('after', [])} names no node: pass names or patterns")
    return [chosen[y] for node in nodes for y in node.outputs if y in chosen]


def _reason_against_dropout(place: _Place, data: set[ir.Value]) -> str:
    """Return the reason why no Dropout can be inserted behind a value; "" if it can be."""
    loops = [node for node in place.around if node.op_type in ("Loop", "Scan")]
    if loops:
        return f"it is in the body of {node_text(loops[-1])}, where all iterations have one mask"
    if not is_real(place.value):
        return f"it holds {place.value.dtype}, no floats"
    if not place.around and place.value not in data:
        return "it does not depend on the inputs of the model"
    return _reason_of_neighbor(place, "Dropout")


def _reason_against_batch_norm(place: _Place, axes: Mapping[ir.Value, int]) -> str:
    """Return the reason why no BatchNormalization can be inserted behind a value; "" if it can be.

    Args:
        place: the value.
        axes: the axis of the channels of values.
    """
    value, shape = place.value, dims(place.value)
    if place.around:
        return f"it is in a subgraph of {node_text(place.around[-1])}, which updates no statistics"
    if not is_real(value):
        return f"it holds {value.dtype}, no floats"
    if shape is None or len(shape) < 2 or not isinstance(shape[1], int):
        known = "unknown" if shape is None else list(shape)
        return f"its shape is {known}, and axis 1 must be channels whose number is known"
    if axes.get(value, 1) != 1:
        return (
            f"its channels are on axis {axes[value]} of {list(shape)}, and BatchNormalization "
            "takes them on axis 1: name a value of the shape (rows, channels, ...)"
        )
    return _reason_of_neighbor(place, "BatchNormalization")


def _reason_of_neighbor(place: _Place, op_type: str) -> str:
    """Return that a value has a node of `op_type` already; "" if it has none."""
    readers = [node for node, i in place.value.uses() if i == 0]
    if any(n.op_type == op_type and not n.domain for n in (place.node, *readers)):
        return f"it has a {op_type} already"
    return ""


def _channel_axes(graph: ir.Graph) -> dict[ir.Value, int]:
    """Return the axis of the channels of the values that depend on a layer, where it is known.

    A layer writes its units on the axis 1 of a convolution, and on the last axis of a product with
    weights on its right; further nodes keep or move this axis.
    """
    data, axes = data_values(graph), dict[ir.Value, int]()
    for node in graph:
        y, known = node.outputs[0], {x for x in node.inputs if x in axes}
        if "convolution" in operator_of(node).traits:
            axes[y] = 1
        elif is_product(node) and len(node.inputs) > 1 and (n := rank(y)) is not None:
            left, right = (x in data for x in node.inputs[:2])
            if left != right:
                axes[y] = n - 1 if left else n - 2
        elif known:
            for result, axis in zip(node.outputs, shared_output_axes(node, axes), strict=True):
                if isinstance(axis, int):
                    axes[result] = axis
    return axes


# -- statistics ------------------------------------------------------------------------------------


def _measure_statistics(
    proto: ModelProto, names: Sequence[str], data: Any, batch_size: int
) -> dict[str, Statistics]:
    """Return the mean and variance of each channel of values, over all rows of `data`, by name.

    Batches are combined as in Chan, Golub and LeVeque, Algorithms for Computing the Sample Variance
    (1983); the variance has the divisor n - 1, as running statistics have.

    Raises:
        ValueError: the inputs do not accept the data, or a value is not finite.
    """
    part = select_model_inputs_outputs(proto, outputs=names)
    predictor = Predictor(part, fixed_rows=0)
    totals: dict[str, tuple[int, Any, Any]] = dict.fromkeys(names, (0, 0.0, 0.0))
    for feed in calibration_feeds(part, data, batch_size, maxsize):
        for name, array in zip(names, predictor.run(feed, names), strict=True):
            values = np.moveaxis(np.asarray(array, np.float64), 1, 0)
            values = values.reshape(len(values), -1)
            count, mean, squares = totals[name]
            more, own = values.shape[1], values.mean(1)
            apart, together = own - mean, count + more
            squares = squares + np.square(values - own[:, None]).sum(1)
            squares = squares + apart**2 * (count * more / together)
            totals[name] = together, mean + apart * (more / together), squares
    for name, (_, mean, squares) in totals.items():
        if not np.isfinite(mean + squares).all():
            raise ValueError(
                f"{name!r} has values that are not finite for these data: pass other rows, or leave"
                f" it out of {argument('after')}"
            )
    return {
        name: Statistics(mean, squares / max(1, count - 1))
        for name, (count, mean, squares) in totals.items()
    }
