"""`linear_head`: a model of one linear layer, to put behind a backbone that has none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.errors import unknown
from onnxgrad.finetune.activations import ACTIVATIONS, applied
from onnxgrad.finetune.heads import Request
from onnxgrad.finetune.layers import fresh, initializer
from onnxgrad.graph.emit import Emit
from onnxgrad.model.convert import to_proto
from onnxgrad.model.opsets import WORKING_OPSET

_POOLS = {"mean": ["N", "T"], "first": ["N", "T"], "image": ["N"], None: None}


def linear_head(
    features: int,
    units: int | Sequence[str] | Sequence[int],
    *,
    pool: str | None = None,
    mask: str | None = None,
    activation: str | None = "softmax",
    name: str = "head",
    dtype: Any = np.float32,
    seed: int = 0,
) -> ModelProto:
    """Return a model of one linear layer: y = activation(pool(features) W + b).

    Behind a backbone whose output no layer can be replaced, such as an encoder that ends in a
    normalization: `attach(backbone, linear_head(384, 5, pool="mean", mask="attention_mask"))`. Its
    input is `features`, its output `probabilities`, or `scores` without an activation. The weights
    are those of `replace_head`, and the bias is zero.

    Args:
        features: length of the feature axis, the last one; axis 1 for `pool="image"`.
        units: as for `replace_head`.
        pool: "mean" or "first" of the positions of (N, T, features), "image": the mean of each map
            of (N, features, H, W). None: a result for each row, or for each position.
        mask: name of an input (N, T) of integers, for `pool="mean"`: positions with 0 do not count.
        activation: "softmax", "log_softmax", "sigmoid" or None.
        name: the tensors are `<name>.weight` and `<name>.bias`.
        dtype: of the floats.
        seed: of the weights.

    Raises:
        ValueError: an invalid argument.

    Examples:
        >>> from onnxgrad.finetune.linear_head import linear_head
        >>> head = linear_head(4, ["cat", "dog"], pool="mean")
        >>> [node.op_type for node in head.graph.node]
        ['ReduceMean', 'MatMul', 'Add', 'Softmax']
    """
    if pool not in _POOLS:
        raise unknown("pool", pool, [str(p) for p in _POOLS])
    if mask is not None and pool != "mean":
        raise ValueError(f"mask={mask!r} needs pool='mean', not {pool!r}")
    request = Request(units, name, activation, seed)
    if activation == "same":
        raise unknown("activation", activation, [*ACTIVATIONS, "None"])
    floats = ir.DataType.from_numpy(np.dtype(dtype))
    return _written(features, request, pool, mask, floats)


def _written(
    features: int, request: Request, pool: str | None, mask: str | None, floats: ir.DataType
) -> ModelProto:
    """Return the model; the arguments as those of `linear_head`."""
    x = ir.Value(name="features", type=ir.TensorType(floats))
    if (front := _POOLS[pool]) is not None:
        x.shape = ir.Shape([*front, features, *(["H", "W"] if pool == "image" else [])])
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": WORKING_OPSET}, name=request.name)
    op = Emit(graph, names=[str(mask)])
    pooled = _pooled(op, x, pool, mask)
    weights = fresh((request.units, features), "linear", request.seed).T
    w = initializer(op, np.ascontiguousarray(weights), floats, f"{request.name}.weight")
    b = initializer(op, np.zeros(request.units), floats, f"{request.name}.bias")
    y = op.Add(op.MatMul(pooled, w), b)
    if request.activation is not None:
        y = applied(op, ACTIVATIONS[request.activation], y, -1)
    y.name = "scores" if request.activation is None else "probabilities"
    y.type = ir.TensorType(floats)
    graph.outputs.append(y)
    proto = to_proto(ir.Model(graph, ir_version=8, producer_name="onnxgrad"))
    request.note(proto, [str(w.name), str(b.name)], labelled=False)
    return proto


def _pooled(op: Emit, x: ir.Value, pool: str | None, mask: str | None) -> ir.Value:
    """Return one row of features for each row of `x`."""
    if pool == "first":
        return op.Gather(x, np.int64(0), axis=1)
    if pool == "image":
        return op.ReduceMean(x, [2, 3], keepdims=0)
    if pool is None:
        return x
    if mask is None:
        return op.ReduceMean(x, [1], keepdims=0)
    value = ir.Value(name=mask, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(["N", "T"]))
    op.graph.inputs.append(value)
    with op:
        counted = op.Unsqueeze(op.Cast(value, to=x.dtype), [2])
        total = op.ReduceSum(x * counted, [1], keepdims=0)
        return total / op.Max(op.ReduceSum(counted, [1], keepdims=0), 1.0)
