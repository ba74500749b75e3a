"""`add_head`: a linear layer on the features that a model computes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.errors import argument, named, unknown
from onnxgrad.finetune.head_activation import ACTIVATIONS, write_activation
from onnxgrad.finetune.heads import HeadRequest, find_layer
from onnxgrad.finetune.layers import add_initializer
from onnxgrad.finetune.new_weights import fresh_weights
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.infer import infer
from onnxgrad.graph.tidy import tidy
from onnxgrad.losses.value_range import value_range
from onnxgrad.model.convert import to_ir, to_proto
from onnxgrad.model.local_functions import inline_functions
from onnxgrad.model.read import ModelLike, read
from onnxgrad.operators.shapes import dims

POOLS = ("mean", "first", "image")


def add_head(
    model: ModelLike,
    units: int | Sequence[str] | Sequence[int] | None,
    at: str | None = None,
    name: str = "head",
    *,
    pool: str | None = None,
    mask: str | None = None,
    activation: str | None = None,
    cosine: bool = False,
    seed: int = 0,
) -> ModelProto:
    """Return `model` with a new linear layer on the features that it computes.

    For encoders of texts, images or sounds, which end without a layer that `replace_head` could
    replace. The only output is y = activation(pool(features) W + b), called `logits`, or
    `probabilities` with an activation. W is drawn as by `replace_head`, and b is zero. What the
    features do not need is removed; inputs are kept if they are still used. With `cosine`, the
    output is called `cosines`; without units, it is pool(features), called `features`.

    Args:
        model: model, serialized model or path; never modified.
        units: number of units; or the classes, all strings or all ints, which are stored as
            metadata, `onnxgrad.classes`. None: no layer, only `pool`.
        at: the value that holds the features, on its last axis. None: the output of `model`, if it
            has only one.
        name: the new tensors are `<name>.weight` and `<name>.bias`; a numeric suffix is added if
            the model has a value of that name.
        pool: "mean" or "first" of the positions of features (N, T, features); "image", the mean of
            each map of features (N, features, H, W). None: a result for each row, or position.
        mask: for `pool="mean"`, the input or value of `model`, of shape (N, T), that is 0 for
            positions that do not count, such as "attention_mask".
        activation: "softmax", "log_softmax" or "sigmoid"; None: scores.
        cosine: whether y is the cosine between the features and each column of W, the center of a
            class, for the losses "arcface" and "cosface"; there is no b.
        seed: of the new weights.

    Raises:
        ValueError: no such value, one of unknown width or that is not float, or an invalid
            argument.
        ModelError: `model` cannot be read.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> encoder = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,T,2] x) => (float[N,T,3] y) <float[2,3] w = {1, 2, 3, 4, 5, 6}> {
        ...     y = MatMul(x, w) }''')
        >>> classifier = og.add_head(encoder, units=5, pool="mean")
        >>> [node.op_type for node in classifier.graph.node], classifier.graph.output[0].name
        (['MatMul', 'ReduceMean', 'MatMul', 'Add'], 'logits')
    """
    _check_arguments(units, pool, activation, cosine)
    request = None if units is None else HeadRequest(units, name, activation, seed)
    if mask is not None and pool != "mean":
        given, needed = argument("mask", mask), argument("pool", "mean")
        raise ValueError(f"{given} needs {needed}, not {pool!r}: pass {needed}, or no mask")
    return _append_head(inline_functions(read(model)), request, at, pool, mask, cosine)


def _check_arguments(units: object, pool: str | None, activation: str | None, cosine: bool) -> None:
    """Raise `ValueError` for arguments of `add_head` that cannot be combined."""
    if activation == "same":
        raise unknown("activation", activation, [*ACTIVATIONS, "None"])
    if activation is not None and (cosine or units is None):
        other = argument("cosine", True) if cosine else argument("units", None)
        raise ValueError(
            f"{other} returns no scores for an activation: pass {argument('activation', None)}"
        )
    if units is None and (pool is None or cosine):
        raise ValueError(
            f"{argument('units', None)} pools features without a layer: pass {argument('pool')} "
            "alone"
        )
    if pool is not None and pool not in POOLS:
        raise unknown("pool", pool, [*POOLS, "None"])


def _append_head(
    proto: ModelProto,
    request: HeadRequest | None,
    at: str | None,
    pool: str | None,
    mask: str | None,
    cosine: bool,
) -> ModelProto:
    """Return `proto` with the linear layer that `request` describes behind its features; see
    `add_head` for the other arguments.
    """
    changed = to_ir(proto)
    infer(changed)
    graph = changed.graph
    if at is None and len(graph.outputs) > 1:
        names = [y.name for y in graph.outputs]
        raise ValueError(
            f"the model has the outputs {names}: name the features with {argument('at')}"
        )
    if at is None:
        _refuse_predictions_as_features(graph, proto)
    op = Emit(graph)
    x = _check_features(_value_by_name(graph, at or str(graph.outputs[0].name)), pool)
    weights = [] if request is None else _add_random_weights(op, x, pool, request, not cosine)
    pooled = _pool_features(op, x, pool, None if mask is None else _value_by_name(graph, mask))
    shape = dims(x) or ()
    if request is None:
        y = op.copy_of(pooled)
        width = (shape[1 if pool == "image" else 2],) if shape else (None,)
    else:
        y, width = _write_linear_layer(op, pooled, weights), (request.units,)
    y.type, y.shape = x.type, ir.Shape([*(shape[:1] if pool else shape[:-1]), *width])
    label = "features" if request is None else "cosines" if cosine else "logits"
    if request is not None and request.activation is not None:
        y, label = write_activation(op, ACTIVATIONS[request.activation], y, -1), "probabilities"
    graph.outputs.clear()
    y.name = op.name(label)
    graph.outputs.append(y)
    tidy(changed)
    graph.inputs[:] = [v for v in graph.inputs if v.uses()]
    made = to_proto(changed)
    if request is None:
        made.ir_version = proto.ir_version
        return made
    tensors = [str(v.name) for v in weights]
    return request.finish_model(made, tensors, labeled=False, origin=proto)


def _write_linear_layer(op: Emit, x: ir.Value, weights: Sequence[ir.Value]) -> ir.Value:
    """Write a linear layer x W + b; without b, the cosines between x and the columns of W."""
    if len(weights) == 2:
        return op.emit("Add", [op.MatMul(x, weights[0]), weights[1]], {}, fresh=True)
    with op:
        tiny = 1e-12  # as torch.nn.functional.normalize
        x, w = (
            v / op.Max(_write_reduction(op, "ReduceL2", v, [axis], keepdims=1), tiny)
            for v, axis in ((x, -1), (weights[0], 0))
        )
        return op.emit("MatMul", [x, w], {}, fresh=True)


def _refuse_predictions_as_features(graph: ir.Graph, proto: ModelProto) -> None:
    """Raise `ValueError` if the only output of the model holds probabilities or class indices, and
    no features.
    """
    y = graph.outputs[0]
    counts = y.dtype is not None and y.dtype.is_integer()
    if not counts and value_range(y) != (0.0, 1.0):
        return
    try:
        features = argument("at", find_layer(graph, proto, None, None).x.name)
    except ValueError:  # no layer could be replaced
        if counts:
            return
        features = argument("at")
    raise ValueError(
        f"{y.name!r} holds {'integers' if counts else 'probabilities'}: {named('replace_head')} "
        f"replaces the layer that computes them; or name the features with {features}"
    )


def _value_by_name(graph: ir.Graph, name: str) -> ir.Value:
    values = ir.convenience.create_value_mapping(graph, include_subgraphs=False)
    if name not in values:
        raise unknown("value of the model", name, [*(str(y.name) for y in graph.outputs), *values])
    return values[name]


def _check_features(x: ir.Value, pool: str | None) -> ir.Value:
    """Return the value `x`; raise `ValueError` if a head cannot take it as features.

    Raises:
        ValueError: `x` is not float, or of another rank than `pool` needs.
    """
    shape, wanted = dims(x), {"mean": 3, "first": 3, "image": 4}.get(pool or "")
    if x.dtype is None or not x.dtype.is_floating_point():
        raise ValueError(
            f"{x.name!r} holds {x.dtype}, no floats: name other features with {argument('at')}"
        )
    if wanted and shape is not None and len(shape) != wanted:
        given = argument("pool", pool)
        raise ValueError(
            f"{given} needs {wanted} axes, and {x.name!r} has the shape {list(shape)}: choose "
            f"another {argument('pool')}, or name other features with {argument('at')}"
        )
    return x


def _pool_features(op: Emit, x: ir.Value, pool: str | None, mask: ir.Value | None) -> ir.Value:
    """Write the pooling of the features `x` to one vector for each row, and return the result;
    `pool=None` returns `x`.
    """
    if pool == "first":
        return op.Gather(x, np.int64(0), axis=1)
    if pool == "image":
        return _write_reduction(op, "ReduceMean", x, [2, 3])
    if pool is None:
        return x
    if mask is None:
        return _write_reduction(op, "ReduceMean", x, [1])
    with op:
        counted = op.Reshape(op.Cast(mask, to=x.dtype), [0, 0, 1])
        total = _write_reduction(op, "ReduceSum", x * counted, [1])
        return total / op.Max(_write_reduction(op, "ReduceSum", counted, [1]), 1.0)


def _write_reduction(
    op: Emit, kind: str, x: ir.Value, axes: list[int], keepdims: int = 0
) -> ir.Value:
    """Write a reduction of `x` over `axes`, such as ReduceMean, in the form that the opset has;
    return the result.
    """
    if op.opset < (13 if kind == "ReduceSum" else 18):
        return op.emit(kind, [x], {"axes": axes, "keepdims": keepdims})
    return op.emit(kind, [x, axes], {"keepdims": keepdims})


def _add_random_weights(
    op: Emit, x: ir.Value, pool: str | None, request: HeadRequest, bias: bool
) -> list[ir.Value]:
    """Add and return new initializers: weights of shape (features, units), and a bias of zeros if
    `bias` is true.

    Raises:
        ValueError: the number of features is unknown.
    """
    shape = dims(x) or ()
    width = shape[1 if pool == "image" else -1] if len(shape) > 1 else None
    if not isinstance(width, int) or x.dtype is None:
        raise ValueError(
            f"{x.name!r} has the shape {list(shape)}: a head needs rows, and to know the number of "
            "features. Declare the shape in value_info, or name other features with "
            f"{argument('at')}"
        )
    weights = fresh_weights((request.units, width), "linear", request.seed)
    made = [add_initializer(op, np.ascontiguousarray(weights.T), x.dtype, f"{request.name}.weight")]
    if bias:
        made.append(add_initializer(op, np.zeros(request.units), x.dtype, f"{request.name}.bias"))
    return made
