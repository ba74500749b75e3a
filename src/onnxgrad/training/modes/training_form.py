"""The form of a prepared graph that trains: statistics of the batch, and dropout."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import Any, NoReturn

import numpy as np
import onnx_ir as ir

from onnxgrad.checks import check_choice
from onnxgrad.errors import argument, named, printable
from onnxgrad.graph.emit import Emit
from onnxgrad.operators import made_by, marks, operator_of
from onnxgrad.operators.attributes import float_attribute, int_attribute
from onnxgrad.operators.shapes import dims, rank, static
from onnxgrad.parallel.collectives import all_reduce
from onnxgrad.parallel.process_groups import Part
from onnxgrad.reporting import logger
from onnxgrad.training.modes.dropouts import (
    describe_node,
    dropout_sites,
    emitter_inside,
    replace_node,
    walk_with_outer_nodes,
    write_dropouts,
)
from onnxgrad.training.parameters.flow import reads_of_values, source_of

BATCH_NORM = ("frozen", "train")


def training_form(
    op: Emit,
    *,
    batch_norm: str,
    dropout: Mapping[str, float],
    draw: ir.Value | None,
    seed: int,
    across: Part | None = None,
    samples: bool = False,
) -> dict[ir.Value, ir.Value]:
    """Rewrite a prepared graph, in place, so that it normalizes and drops elements as in training.

    Masks of dropout are a function of `seed`, `draw`, the index of the dropout and the position in
    the tensor: a resumed run draws the same masks.

    Args:
        op: writes into the graph, before anything else is added to it.
        batch_norm: "frozen": every BatchNormalization normalizes by its stored statistics, also a
            node exported in training mode; a node whose statistics are computed stays unchanged.
            "train": by the statistics of the batch, as `torch.nn.BatchNorm2d` in training mode. The
            running statistics become `momentum * old + (1 - momentum) * batch`, the variance of the
            batch with the divisor n - 1 instead of n; they are float32 if the file has them in half
            precision.
            A batch with one value per channel fails when the model runs (the node is named
            "BatchNormalization ... needs more than one value per channel"), as it does in PyTorch.
        dropout: `{pattern: probability}`. A pattern is the name of a node or of its output, or a
            wildcard of `fnmatch` for several. Where it matches Dropout nodes, it sets their
            probability, 0 to switch them off; else dropout is inserted after the matching float
            outputs. Later patterns override earlier ones. Dropout nodes in inference mode are there
            to be matched only if the graph was prepared with `keep_dropout`.
        draw: number of the draw, such as the number of the micro-batch: one integer, or one float
            that holds an integer. May be None if no dropout is active.
        seed: any integer.
        across: the part of this process, if the statistics are taken over the rows of all
            processes.
        samples: whether Dropout nodes in inference mode drop elements, too, with the ratio that
            they state.

    Returns:
        `{statistic: its new value}`: the running means and variances, which became inputs of the
        graph, named as the tensors in the file.

    Raises:
        ValueError: a pattern without a match, a probability outside of [0, 1), a Dropout node whose
            settings are computed, dropout in the body of a Loop or Scan, or no `draw`. For "train":
            no BatchNormalization, one in a subgraph, or statistics that are computed, or merged
            with another tensor (see `separate_statistics`).
    """
    check_choice("batch_norm", batch_norm, BATCH_NORM)
    write_dropouts(op, dropout_sites(op.graph, dropout, samples), draw, seed)
    return (
        _use_batch_statistics(op, across) if batch_norm == "train" else _use_stored_statistics(op)
    )


# -- BatchNormalization with stored statistics or statistics of the batch --------------------------

_HALF = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_MEAN, _VARIANCE = 3, 4  # operands
_COPIES = frozenset({"Identity", "Cast"})


def _use_stored_statistics(op: Emit) -> dict[ir.Value, ir.Value]:
    """Let each BatchNormalization normalize by its stored statistics; return {}, no new values."""
    for node, _ in walk_with_outer_nodes(op.graph):
        if not _is_batch_norm(node) or not int_attribute(node, "training_mode"):
            continue
        if None in (_initializer_of(node.inputs[_MEAN]), _initializer_of(node.inputs[_VARIANCE])):
            continue
        inner = emitter_inside(op, node.graph)
        with inner.at(node):
            attributes = {"epsilon": float_attribute(node, "epsilon")}
            y = inner.emit("BatchNormalization", node.inputs, attributes, fresh=True)
            _copy_node_name(y, node)
            replace_node(inner, node, [y, *(v for v in node.inputs[_MEAN:] if v is not None)])
    return {}


def _use_batch_statistics(op: Emit, across: Part | None) -> dict[ir.Value, ir.Value]:
    """Let each BatchNormalization use statistics of the batch; return new running statistics.

    The result is `{statistic: its new value}`. A node may use statistics that another node has
    updated: then it updates the new values, as a module of PyTorch does that is called twice.
    `across`: as in `training_form`.
    """
    nodes = [
        (node, around) for node, around in walk_with_outer_nodes(op.graph) if _is_batch_norm(node)
    ]
    if not nodes:
        raise ValueError(
            f"{argument('batch_norm', 'train')} needs a BatchNormalization, and the model has "
            "none: exporters and optimizers fold it into the Conv or Gemm before it. Insert it "
            f"again by {named('insert_batch_norm')}; or export the model again without that, "
            "torch.onnx.export(..., training=torch.onnx.TrainingMode.TRAINING) or, with "
            f"dynamo=True, optimize=False; or use {argument('batch_norm', 'frozen')}"
        )
    pairs: list[tuple[ir.Value, ir.Value]] = []
    for node, around in nodes:
        if around:
            outer = describe_node(around[-1])
            reason = f"the node is in a subgraph of {outer}, which returns no new statistics"
            _refuse_statistics(node, reason)
        pairs.append((_running_statistic(node, _MEAN), _running_statistic(node, _VARIANCE)))
    latest = {value: value for pair in pairs for value in pair}
    for (node, _), (mean, variance) in zip(nodes, pairs, strict=True):
        shape = dims(node.inputs[0])
        if shape is not None and static(shape[2:]) == (1,) * len(shape[2:]):
            op.graph.meta[marks.ONE_VALUE_NODE] = describe_node(node)
        with op.at(node):
            y, *new = _write_batch_norm(op, node, latest[mean], latest[variance], across)
            replace_node(op, node, [y, *new])
        latest[mean], latest[variance] = new
    for value in latest:
        op.graph.initializers.pop(str(value.name))
        op.graph.inputs.append(value)
    return latest


def _is_batch_norm(node: ir.Node) -> bool:
    """Return whether `node` is a BatchNormalization of ONNX."""
    return not node.domain and node.op_type == "BatchNormalization"


def _refuse_statistics(node: ir.Node, reason: str) -> NoReturn:
    """Raise `ValueError`: the running statistics of `node` cannot change, because of `reason`."""
    raise ValueError(
        f"the running statistics of {describe_node(node)} cannot be updated: {reason}. Use "
        f"{argument('batch_norm', 'frozen')}"
    )


def _copy_node_name(y: ir.Value, node: ir.Node) -> None:
    """Give the node that computes `y` the name of `node`."""
    new = y.producer()
    assert new is not None
    new.name = node.name


def _initializer_of(value: ir.Value | None) -> ir.Value | None:
    """Return the initializer of which `value` is a copy or a cast; None for other values."""
    source = None if value is None else source_of(value, _COPIES)
    return source if source is not None and source.is_initializer() else None


def _running_statistic(node: ir.Node, operand: int) -> ir.Value:
    """Return the initializer of a running mean or variance of `node`, converted to float32.

    Raises:
        ValueError: the statistics are computed, or the tensor is used for something else too.
    """
    read = node.inputs[operand]
    assert read is not None
    value = _initializer_of(read)
    if value is None:
        _refuse_statistics(node, f"{read.name!r} is no constant, but computed by a node or fed")
    for user, index in reads_of_values([value], _COPIES):
        if user.op_type not in _COPIES and not (_is_batch_norm(user) and index == operand):
            raise ValueError(
                f"{value.name!r} is a running statistic of {describe_node(node)}, and "
                f"{describe_node(user)} uses it for something else: an exporter merged tensors of "
                "equal values. Separate them by onnxgrad.graph.separate_merged(model), or export "
                "the model again with training=torch.onnx.TrainingMode.TRAINING or, with "
                "dynamo=True, optimize=False"
            )
    if value.dtype in _HALF and value.const_value is not None:
        wide = value.const_value.numpy().astype(np.float32)
        value.const_value, value.dtype = ir.tensor(wide, name=value.name), ir.DataType.FLOAT
    return value


def _write_batch_norm(
    op: Emit, node: ir.Node, mean: ir.Value, variance: ir.Value, across: Part | None
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Return the normalized data, the new running mean and the new running variance of `node`.

    For the variance, BatchNormalization divides by n where PyTorch divides by n - 1, and its
    attribute `momentum`, c, is a float32: 0.9 is 0.89999998 there. Nodes behind it therefore
    combine the statistics of the batch, which it returns for c = 0, with the old statistics:
    c old + (1 - c) batch, with the c that the exporter had.
    """
    x, scale, bias = node.inputs[:3]
    assert x is not None
    wide = ir.DataType.DOUBLE if x.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT
    momentum = float(str(np.float32(float_attribute(node, "momentum"))))
    if momentum == 1.0:
        logger.warning("momentum is 1: %s does not change its statistics", describe_node(node))
    old = [op.Cast(v, to=wide) for v in (mean, variance)]
    operands = [op.Cast(v, to=wide) for v in (x, scale, bias)]
    epsilon = float_attribute(node, "epsilon")
    if across is not None:
        y, *batch = normalized_across(op, operands, epsilon, across)
    else:
        unbiased = _unbiased_variance_ratio(op, node, wide)
        # copies: onnxruntime writes the statistics of the batch over the operands
        operands += [op.Sum(v) for v in old]
        attributes = {"epsilon": epsilon, "momentum": 0.0, "training_mode": 1}
        y, *batch = op.emit_many("BatchNormalization", operands, attributes, 3, fresh=True)
        for value in batch:
            value.shape = mean.shape
        batch[1] = batch[1] / unbiased
    _copy_node_name(y, node)
    new = (
        op.set_type_like(op.Cast(momentum * before + (1.0 - momentum) * now, to=v.dtype), v)
        for before, now, v in zip(old, batch, (mean, variance), strict=True)
    )
    return op.Cast(y, to=x.dtype), *new


def _unbiased_variance_ratio(op: Emit, node: ir.Node, dtype: ir.DataType) -> float | ir.Value:
    """Return (n - 1) / n for n values per channel; the graph fails when it runs with n = 1."""
    x, reason = node.inputs[0], f"{describe_node(node)} needs more than one value per channel"
    assert x is not None
    shape = dims(x)
    lengths = None if shape is None else shape[:1] + shape[2:]
    static_lengths = static(lengths)
    if static_lengths is not None:
        n = prod(static_lengths)
        if n < 2:
            raise ValueError(
                f"{reason} to train, and its input has the shape {list(shape or ())}: export the "
                f"model for larger batches, or use {argument('batch_norm', 'frozen')}"
            )
        return (n - 1) / n
    if shape is None or lengths is None:
        # fresh: another Size node of x, of a dropout, may come later in the graph
        size = op.emit("Size", [x], {}, fresh=True)
        count = op.Reshape(size / op.Size(node.inputs[_MEAN]), [1])
    else:
        count = op.const([prod(d for d in lengths if isinstance(d, int))])
        for axis, d in enumerate(shape):
            if axis != 1 and not isinstance(d, int):
                count = _axis_length(op, x, axis, d) * count
    # onnx has no assertion: where n is 1, the index is out of bounds, and the Gather has a name
    one = op.Gather([1], op.Cast(op.Equal(count, [1]), to=ir.DataType.INT64))
    one.producer().name = reason
    return op.Cast(count - one, to=dtype) / op.Cast(count, to=dtype)


def _axis_length(op: Emit, x: ir.Value, axis: int, symbol: str | None) -> ir.Value:
    """Return the length of the axis `axis` of `x`, as a value of the graph.

    A graph input with the dimension `symbol` tells the length, so that layers share the node.
    """
    axes = ((v, i) for v in op.graph.inputs for i, d in enumerate(dims(v) or ()) if d == symbol)
    value, i = next(axes, (x, axis)) if symbol is not None else (x, axis)
    return op.Shape(value, start=i, end=i + 1)


# -- statistics of the rows of all processes -------------------------------------------------------


def normalized_across(
    op: Any, operands: Sequence[ir.Value], epsilon: float, part: Part
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Return normalized data, and mean and unbiased variance (C,), over the rows of all processes.

    Each process sends the number, the mean and the sum of squared deviations of its values, in its
    row of a sum over the processes. They are combined as in Chan, Golub and LeVeque,
    Algorithms for Computing the Sample Variance (1983), which loses no digits where a mean is far
    from zero.

    Args:
        op: the emitter.
        operands: x (N, C, ...), scale and bias (C,).
        epsilon: added to the variance, which is biased there.
        part: the part of this process.

    Raises:
        ValueError: the rank of x is unknown.
    """
    x, scale, bias = operands
    count = rank(x)
    if count is None:
        raise ValueError(
            f"sync_batch_norm: the rank of {printable(x.name)}, which a BatchNormalization reads, "
            "is unknown: declare the shapes of the model's inputs, or leave out sync_batch_norm"
        )
    axes = [axis for axis in range(count) if axis != 1]
    assert x.dtype is not None
    with op:
        mean = op.ReduceMean(x, axes)
        squares = op.ReduceSum((x - mean) * (x - mean), axes)
        channels = op.Shape(scale)
        own, deviations = (op.Reshape(v, op.Concat([1], channels, axis=0)) for v in (mean, squares))
        size = op.Div(op.Size(x), op.Size(scale))
        count = op.Cast(op.Reshape(size, [1, 1]), to=x.dtype)
        row = np.zeros((part.size, 1), x.dtype.numpy())
        row[part.rank] = 1
        sent = [op.Mul(op.const(row), v) for v in (count, own, deviations)]
        sent[0].shape = ir.Shape([part.size, 1])
        for value in sent[1:]:
            value.shape = ir.Shape([part.size, *(dims(scale) or (None,))])
        counts, means, squares = (all_reduce(op, v) for v in sent)
        total = op.ReduceSum(counts, [0], keepdims=0)
        middle = op.ReduceSum(counts * means, [0], keepdims=0) / total
        apart = means - middle
        summed = op.ReduceSum(squares + counts * apart * apart, [0], keepdims=0)
        over = op.Concat(channels, np.ones(len(axes) - 1, np.int64), axis=0)
        scaled = scale / op.Sqrt(summed / total + epsilon)
        y = (x - op.Reshape(middle, over)) * op.Reshape(scaled, over) + op.Reshape(bias, over)
        variance = summed / (total - 1.0)
    y = op.copy_of(op.set_type_like(y, x))
    return y, op.set_type_like(middle, scale), op.set_type_like(variance, scale)


# -- frozen BatchNormalization as part of the convolution before it --------------------------------

_ROWS = 16  # of a batch, for which the size of images is compared with the size of weights


def fold_normalizations(
    op: Emit, trained: Collection[ir.Value], kept: Collection[ir.Value]
) -> None:
    """Replace each Conv with a BatchNormalization in inference form behind it by one Conv.

    With f = s / sqrt(v + e), f (x * w + c - m) + b is x * (f w) + (b + f (c - m)): the step does
    once with the weight, in both directions, the arithmetic of every pixel.

    Args:
        op: writes into a prepared graph.
        trained: the weights that are trained: the weight of the convolution must be among them.
        kept: values that must not change.
    """
    for node in list(op.graph):
        if not _is_batch_norm(node) or operator_of(node).of_user:
            continue
        x = node.inputs[0]
        conv = made_by(x, "Conv")
        if conv is None or conv.graph is not node.graph:
            continue
        if _can_fold(node, conv, trained) and not {x, *node.outputs} & {*kept, *op.graph.outputs}:
            with op.at(node):
                replace_node(op, node, [_fold_into_conv(op, node, conv)])


def _can_fold(node: ir.Node, conv: ir.Node, trained: Collection[ir.Value]) -> bool:
    """Return whether only the normalization reads the convolution, whose weight is small."""
    w = conv.inputs[1]
    if w not in trained or len(conv.outputs[0].uses()) > 1 or len(node.outputs) > 1:
        return False
    dtypes = {v.dtype for v in (*conv.inputs, *node.inputs) if v is not None}
    shape, pixels = static(dims(w)), static((dims(conv.outputs[0]) or (None,) * 3)[2:])
    training = int_attribute(node, "training_mode")
    if training or len(dtypes) > 1 or shape is None or pixels is None:
        return False
    return _ROWS * prod(pixels) >= prod(shape[1:])


def _fold_into_conv(op: Emit, node: ir.Node, conv: ir.Node) -> ir.Value:
    """Return the result of one Conv in place of `conv` and the BatchNormalization `node`."""
    _, scale, shift, mean, variance = node.inputs
    x, w, bias = (*conv.inputs, None)[:3]
    assert w is not None
    epsilon = float_attribute(node, "epsilon")
    factor = op.Div(scale, op.Sqrt(op.Add(variance, epsilon)))
    per_row = op.Reshape(factor, [-1, *[1] * (len(dims(w) or ()) - 1)])
    center = mean if bias is None else op.Sub(mean, bias)
    attributes = {a.name: a.value for a in conv.attributes.values()}
    weight = op.set_type_like(op.Mul(w, per_row), w)
    y = op.Conv(x, weight, op.Sub(shift, op.Mul(center, factor)), **attributes)
    return op.set_type_like(y, node.outputs[0])
