"""BatchNormalization with stored statistics, or with those of the batch."""

from __future__ import annotations

from math import prod
from typing import NoReturn

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import argument
from onnxgrad.graph.emit import Emit
from onnxgrad.operators import marks
from onnxgrad.operators.attributes import float_attribute, int_attribute
from onnxgrad.operators.shapes import dims, static
from onnxgrad.parallel import Part
from onnxgrad.reporting import logger
from onnxgrad.training.modes.replacement import describe, emitter, replace, walk
from onnxgrad.training.modes.synchronization import normalized_across

_HALF = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_MEAN, _VARIANCE = 3, 4  # operands


def freeze(op: Emit) -> dict[ir.Value, ir.Value]:
    """Make every BatchNormalization with stored statistics use them; return no new statistics."""
    for node, _ in walk(op.graph):
        if not _is_batch_norm(node) or not int_attribute(node, "training_mode"):
            continue
        if None in (_initializer_of(node.inputs[_MEAN]), _initializer_of(node.inputs[_VARIANCE])):
            continue
        inner = emitter(op, node.graph)
        with inner.at(node):
            attributes = {"epsilon": float_attribute(node, "epsilon")}
            y = inner.emit("BatchNormalization", node.inputs, attributes, fresh=True)
            _name_like(y, node)
            replace(inner, node, [y, *(v for v in node.inputs[_MEAN:] if v is not None)])
    return {}


def train(op: Emit, across: Part | None = None) -> dict[ir.Value, ir.Value]:
    """Make every BatchNormalization use the statistics of the batch; return the running ones.

    A node may use statistics that another has updated: then it updates the new ones, as a module
    does in PyTorch that is called twice. `across`: as that of `training_form`.
    """
    nodes = [(node, around) for node, around in walk(op.graph) if _is_batch_norm(node)]
    if not nodes:
        raise ValueError(
            f"{argument('batch_norm', 'train')} needs a BatchNormalization, and the model has "
            "none: exporters and optimizers fold it into the Conv or Gemm before it. Export the "
            "model again without that, torch.onnx.export(..., "
            "training=torch.onnx.TrainingMode.TRAINING) or, with "
            f"dynamo=True, optimize=False; or use {argument('batch_norm', 'frozen')}"
        )
    pairs: list[tuple[ir.Value, ir.Value]] = []
    for node, around in nodes:
        if around:
            _refuse(
                node, f"is in a subgraph of {describe(around[-1])}, which does not return new ones"
            )
        pairs.append((_statistic(node, _MEAN), _statistic(node, _VARIANCE)))
    latest = {value: value for pair in pairs for value in pair}
    for (node, _), (mean, variance) in zip(nodes, pairs, strict=True):
        shape = dims(node.inputs[0])
        if shape is not None and static(shape[2:]) == (1,) * len(shape[2:]):
            op.graph.meta[marks.ONE_VALUE_NODE] = describe(node)
        with op.at(node):
            y, *new = _batch_norm(op, node, latest[mean], latest[variance], across)
            replace(op, node, [y, *new])
        latest[mean], latest[variance] = new
    for value in latest:
        op.graph.initializers.pop(str(value.name))
        op.graph.inputs.append(value)
    return latest


def _is_batch_norm(node: ir.Node) -> bool:
    return not node.domain and node.op_type == "BatchNormalization"


def _refuse(node: ir.Node, reason: str) -> NoReturn:
    raise ValueError(
        f"the running statistics of {describe(node)} cannot be updated: it {reason}. Use "
        f"{argument('batch_norm', 'frozen')}"
    )


def _name_like(y: ir.Value, node: ir.Node) -> None:
    new = y.producer()
    assert new is not None
    new.name = node.name


def _initializer_of(value: ir.Value | None) -> ir.Value | None:
    """Return the initializer that `value` is, or a copy or cast of; else None."""
    while value is not None and (node := value.producer()) is not None:
        if node.op_type not in ("Identity", "Cast"):
            return None
        value = node.inputs[0]
    return value if value is not None and value.is_initializer() else None


def _statistic(node: ir.Node, operand: int) -> ir.Value:
    """Return the initializer of a running mean or variance; it is widened to float32.

    Raises:
        ValueError: the statistics are computed, or the tensor is used for something else too.
    """
    read = node.inputs[operand]
    assert read is not None
    value = _initializer_of(read)
    if value is None:
        _refuse(node, f"has statistics that are no constants: {read.name!r} is computed or fed")
    for user, index in _uses(value):
        if not (_is_batch_norm(user) and index == operand):
            raise ValueError(
                f"{value.name!r} is a running statistic of {describe(node)}, and {describe(user)}"
                " uses it for something else: an exporter merged tensors of equal values. Separate"
                " them by separate_merged(model), or export the model again with "
                "training=torch.onnx.TrainingMode.TRAINING or, with dynamo=True, optimize=False"
            )
    if value.dtype in _HALF and value.const_value is not None:
        wide = value.const_value.numpy().astype(np.float32)
        value.const_value, value.dtype = ir.tensor(wide, name=value.name), ir.DataType.FLOAT
    return value


def _uses(value: ir.Value) -> list[tuple[ir.Node, int]]:
    """Return the nodes that read `value`, or a copy or cast of it, and as which operand."""
    users: list[tuple[ir.Node, int]] = []
    for user, index in value.uses():
        copies = user.op_type in ("Identity", "Cast")
        users += _uses(user.outputs[0]) if copies else [(user, index)]
    return users


def _batch_norm(
    op: Emit, node: ir.Node, mean: ir.Value, variance: ir.Value, across: Part | None
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Return y, and the new running mean and variance.

    The operator divides by n for the variance, where PyTorch divides by n - 1, and its attribute
    `momentum` c is a float32: 0.9 is 0.89999998 there. Its statistics of the batch (c = 0) are
    therefore combined here, c old + (1 - c) batch, with the c that the exporter had.
    """
    x, scale, bias = node.inputs[:3]
    assert x is not None
    wide = ir.DataType.DOUBLE if x.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT
    momentum = float(str(np.float32(float_attribute(node, "momentum"))))
    if momentum == 1.0:
        logger.warning("momentum is 1: %s does not change its statistics", describe(node))
    old = [op.Cast(v, to=wide) for v in (mean, variance)]
    operands = [op.Cast(v, to=wide) for v in (x, scale, bias)]
    epsilon = float_attribute(node, "epsilon")
    if across is not None:
        y, *batch = normalized_across(op, operands, epsilon, across)
    else:
        unbiased = _share_of_freedom(op, node, wide)
        # onnxruntime writes the statistics of the batch over the operands, whoever reads these
        operands += [op.Sum(v) for v in old]
        attributes = {"epsilon": epsilon, "momentum": 0.0, "training_mode": 1}
        y, *batch = op.emit_many("BatchNormalization", operands, attributes, 3, fresh=True)
        for value in batch:
            value.shape = mean.shape
        batch[1] = batch[1] / unbiased
    _name_like(y, node)
    new = (
        op.set_type_like(op.Cast(momentum * before + (1.0 - momentum) * now, to=v.dtype), v)
        for before, now, v in zip(old, batch, (mean, variance), strict=True)
    )
    return op.Cast(y, to=x.dtype), *new


def _share_of_freedom(op: Emit, node: ir.Node, dtype: ir.DataType) -> float | ir.Value:
    """Return (n - 1) / n of the n values per channel; a model in which n is 1 fails."""
    x, reason = node.inputs[0], f"{describe(node)} needs more than one value per channel"
    assert x is not None
    shape = dims(x)
    lengths = None if shape is None else shape[:1] + shape[2:]
    static_lengths = static(lengths)
    if static_lengths is not None:
        n = prod(static_lengths)
        if n < 2:
            raise ValueError(f"{reason} to train, and its input has the shape {list(shape or ())}")
        return (n - 1) / n
    if lengths is None:
        # fresh: a dropout behind this node may have written the Size of x
        size = op.emit("Size", [x], {}, fresh=True)
        count = op.Reshape(size / op.Size(node.inputs[_MEAN]), [1])
    else:
        axes = {axis: d for axis, d in enumerate(shape or ()) if axis != 1}
        count = op.const([prod(d for d in axes.values() if isinstance(d, int))])
        for axis, d in axes.items():
            if not isinstance(d, int):
                count = _length(op, x, axis, d) * count
    # onnx has no assertion: where n is 1, the index is out of bounds, and the node has a name
    one = op.Gather([1], op.Cast(op.Equal(count, [1]), to=ir.DataType.INT64))
    one.producer().name = reason
    return op.Cast(count - one, to=dtype) / op.Cast(count, to=dtype)


def _length(op: Emit, x: ir.Value, axis: int, symbol: str | None) -> ir.Value:
    """Return the length of an axis of `x`, from an input that has it too: layers share it then."""
    axes = ((v, i) for v in op.graph.inputs for i, d in enumerate(dims(v) or ()) if d == symbol)
    value, i = next(axes, (x, axis)) if symbol is not None else (x, axis)
    return op.Shape(value, start=i, end=i + 1)
