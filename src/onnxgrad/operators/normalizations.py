"""Operators that normalize along axes: Softmax and its losses, normalizations of layers."""

from __future__ import annotations

from math import inf, prod
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.operators.attributes import (
    float_attribute,
    int_attribute,
    ints_attribute,
    string_attribute,
)
from onnxgrad.operators.axes import (
    OutputAxes,
    OutputAxis,
    axis_unless_named,
    first_axis_only,
    named_axes,
    only_first_operand,
)
from onnxgrad.operators.layouts import scatter_flat
from onnxgrad.operators.member_forms import join_rows, write_each_member
from onnxgrad.operators.outputs import shape_of_first
from onnxgrad.operators.records import (
    PIECEWISE,
    ListedAxes,
    declare_operators,
    lowering,
    member_form,
    rule,
)
from onnxgrad.operators.rule_nodes import attributes_of, cast_to_inputs, cast_to_wide, node_output
from onnxgrad.operators.shapes import dims, rank, static


def _axis_before_normalized(node: Any, _operand: int, axis: int) -> OutputAxis:
    named = named_axes(node)
    return None if named is None or axis >= named[0] else axis


def _axis_unless_channels(node: Any, _operand: int, axis: int) -> OutputAxis:
    return None if axis == 1 or node.attributes.get_int("training_mode", 0) else axis


def _axis_after_loss(node: Any, operand: int, axis: int) -> OutputAxes:
    # axis 1 of the scores is the axis of classes; labels lack it, and class weights have only this
    if operand > 1 or (operand, axis) == (0, 1):
        return None
    loss = axis - 1 if operand == 0 and axis > 1 else axis
    scores = axis + 1 if operand == 1 and axis > 0 else axis
    reduced = node.attributes.get_string("reduction", "mean") != "none"
    return (None if reduced else loss, scores)[: len(node.outputs)]


LAST = ListedAxes("axis", default=lambda *_: [-1])
_CENTERED = ListedAxes("axes", default=lambda *_: [0, 2, 3])
_unless_named = only_first_operand(axis_unless_named)
_but_channels = only_first_operand(_axis_unless_channels)
_ALONG_LAST: dict[str, Any] = {"naming": LAST, "axes": _unless_named}
_FROM_AXIS: dict[str, Any] = {"naming": LAST, "axes": only_first_operand(_axis_before_normalized)}
_SOFTMAX: dict[str, Any] = _ALONG_LAST | {"traits": "unary transcendental distribution"}
_LAYER: dict[str, Any] = {"traits": "unary normalizes", "shape": shape_of_first}

declare_operators("LogSoftmax", **_SOFTMAX, shape=shape_of_first, value_range=(-inf, 0.0))
declare_operators("Softmax", **_SOFTMAX, shape=shape_of_first, value_range=(0.0, 1.0))
declare_operators(
    "Hardmax", "unary distribution", **_ALONG_LAST, value_range=(0.0, 1.0), no_gradient=PIECEWISE
)
declare_operators("LpNormalization", "unary normalizes aligned", **_ALONG_LAST)
declare_operators("LRN", "unary aligned", axes=_but_channels)
declare_operators(
    "MeanVarianceNormalization",
    "normalizes aligned",
    naming=_CENTERED,
    axes=_unless_named,
    members=write_each_member,
)
declare_operators("BatchNormalization", **_LAYER, axes=_but_channels, roles="xsor")
declare_operators(
    "GroupNormalization InstanceNormalization",
    **_LAYER,
    axes=only_first_operand(first_axis_only),
    roles="xso",
)
declare_operators("LayerNormalization", **_LAYER, **_FROM_AXIS, roles="xso")
declare_operators("RMSNormalization", "normalizes aligned", **_FROM_AXIS, roles="xs")
declare_operators(
    "NegativeLogLikelihoodLoss SoftmaxCrossEntropyLoss", axes=_axis_after_loss, roles="c"
)

_EPSILON = 1e-9  # MeanVarianceNormalization adds it to the standard deviation


# -- softmax, and losses of its logarithm ---------------------------------------------------------


@rule("Softmax")
def softmax(op, node, g):
    """y = softmax(x):  dx = y (g - sum(g y)), the sum over the softmax axis.

    y is NaN in rows where all of x is -inf. If the model replaces such rows by means of a Where, as
    exported attention does for rows that are masked out completely, dx is 0 there.
    """
    (y,), axis = node.outputs, int_attribute(node, "axis")
    # 0 * NaN is NaN. A guard of each Softmax would cost two nodes of the size of y, and the zeros
    # of g do not say whether a Where made them: Clip and Dropout make zeros, too.
    if _is_read_by_where(y):
        y = op.Where(op.IsNaN(y), 0.0, y)
    return (y * (g - op.ReduceSum(g * y, [axis], keepdims=1)),)


def _is_read_by_where(y: ir.Value) -> bool:
    """Return whether a Where reads the result of a Softmax, directly or through a Cast."""
    consumers = [consumer for consumer, _ in y.uses()]
    casts = [consumer for consumer in consumers if consumer.op_type == "Cast"]
    consumers += [consumer for cast in casts for consumer, _ in cast.outputs[0].uses()]
    return any(consumer.op_type == "Where" for consumer in consumers)


@rule("LogSoftmax")
def log_softmax(op, node, g):
    """y = log softmax(x):  dx = g - e^y sum(g), the sum over the softmax axis."""
    (y,), axis = node.outputs, int_attribute(node, "axis")
    return (g - op.Exp(y) * op.ReduceSum(g, [axis], keepdims=1),)


@rule("NegativeLogLikelihoodLoss")
def negative_log_likelihood(op, node, g):
    """y = -w_t x_t, or their sum:  dx_t = -g w_t,  dw_t = -g x_t, 0 where t is ignored;
    y = -sum w_t x_t / sum w_t:  dx_t = -g w_t / sum w_t,  dw_t = -g (x_t + y) / sum w_t.

    t is the label. If all labels are ignored, the mean is NaN and its gradient 0, as in PyTorch.
    """
    x, g = cast_to_wide(op, node.inputs[0], g)
    t, share, dweights = _label_loss_gradients(op, node, g, x)
    zeros = op.Expand(op.const(0.0, x.dtype), op.shape_of(x))
    dx = op.set_type_like(op.ScatterElements(zeros, t, -share, axis=1), x)
    return cast_to_inputs(op, [dx, None, dweights], node.inputs)


@rule("SoftmaxCrossEntropyLoss")
def softmax_cross_entropy(op, node, g, g_log=None):
    """y = NegativeLogLikelihoodLoss(f), f = log softmax x:  dx = e^f s, minus s at t, s = -df_t;
    from the output f:  dx += gf - e^f sum(gf), sums over the classes.
    """
    scores = node.inputs[0]
    log = op.set_type_like(node_output(op, node, 1, scores.dtype), scores)
    log, g, gf = cast_to_wide(op, log, g, g_log)
    terms, dweights = [], None
    if g is not None:
        t, share, dweights = _label_loss_gradients(op, node, g, log)
        others = op.Exp(log) * share
        terms.append(op.ScatterElements(others, t, -share, axis=1, reduction="add"))
    if gf is not None:
        terms.append(gf - op.Exp(log) * op.ReduceSum(gf, [1], keepdims=1))
    return cast_to_inputs(op, [op.total(terms), None, dweights], node.inputs)


def _label_loss_gradients(op, node, g, x):
    """Return the labels, the gradient of each label's loss, and the gradient of the class weights.

    The labels have an axis for the classes, and are 0 where ignored. The loss of a label is minus
    its log likelihood. The gradient of the weights is None without weights.
    """
    _, labels, weights = (*node.inputs, None)[:3]
    reduction = string_attribute(node, "reduction")
    ignored = node.attributes.get_int("ignore_index", None)
    t, kept = op.Unsqueeze(op.Cast(labels, to=ir.DataType.INT64), [1]), None
    if ignored is not None:
        kept = op.Not(op.Equal(t, np.int64(ignored)))
        t = op.Where(kept, t, np.int64(0))

    def zero_ignored(v):
        return v if kept is None else op.Where(kept, v, 0.0)

    of_class = None if weights is None else op.Gather(cast_to_wide(op, x, weights)[1], t)
    g = op.Unsqueeze(g, [1]) if reduction == "none" else op.Expand(g, op.shape_of(t))
    if reduction == "mean" and kept is None and of_class is None:
        g = g / op.Cast(op.Size(t), to=g.dtype)
    elif reduction == "mean":
        counted = zero_ignored(op.ones_like(g) if of_class is None else of_class)
        g = g / op.ReduceSum(counted, keepdims=0)
    if of_class is None:
        return t, zero_ignored(g), None
    loss = -op.GatherElements(x, t, axis=1)
    if reduction == "mean":
        loss = loss - op.Cast(node.outputs[0], to=x.dtype)
    return t, zero_ignored(g * of_class), scatter_flat(op, weights, t, zero_ignored(g * loss))


# -- axes: a list, or an int64 value if the rank is dynamic --------------------------------------


def trailing_axes(op, x, axis: int):
    """Return the axes of x from `axis` to the last."""
    n = rank(x)
    if n is None and axis >= 0:
        return op.Range(np.int64(axis), op.Size(op.Shape(x)), np.int64(1))
    return list(range(axis if axis < 0 else axis - (n or 0), 0))


def _axes_except_channels(op, x):
    """Return all axes of x except the axis of channels, the second."""
    spatial = trailing_axes(op, x, 2)
    return [0, *spatial] if isinstance(spatial, list) else op.Concat([0], spatial, axis=0)


def _channel_view(op, v, x):
    """Return v (C) with axes of length one after it, to broadcast along the channels of x."""
    n = rank(x)
    if n is None:
        last = op.Size(op.Shape(x)) - np.int64(1)
        return op.Unsqueeze(v, op.Range(np.int64(1), last, np.int64(1)))
    return op.Unsqueeze(v, list(range(1, n - 1))) if n > 2 else v


def _element_count_along(op, x, axes):
    """Return the number of elements of x along `axes`: a float, or a scalar of the dtype of x."""
    shape = dims(x)
    lengths = None if shape is None else static(tuple(shape[i] for i in axes))
    if lengths is not None:
        return float(prod(lengths))
    return op.Cast(op.ReduceProd(op.Gather(op.Shape(x), axes), keepdims=0), to=x.dtype)


def _mean_along(op, v, axes):
    return v if axes == [] else op.ReduceMean(v, axes, keepdims=1)  # to ReduceMean, [] means all


def _standardize_along(op, x, axes, epsilon: float):
    """Return n = (x - m) / r and 1 / r, m the mean, r = sqrt(variance + epsilon)."""
    centered = x - _mean_along(op, x, axes)
    inverse = op.Reciprocal(op.Sqrt(_mean_along(op, centered * centered, axes) + epsilon))
    return centered * inverse, inverse


def _standardized_gradient(op, h, n, inverse, axes):
    """Return the gradient w.r.t. x, (h - mean h - n mean(h n)) / r, h the gradient w.r.t. n.

    Ba, Kiros & Hinton 2016, arXiv:1607.06450.
    """
    return (h - _mean_along(op, h, axes) - n * _mean_along(op, h * n, axes)) * inverse


@rule("LayerNormalization")
def layer_normalization(op, node, g, g_mean=None, g_inverse=None):
    """y = s n + b, n = (x - m) / r:  dx = (h - mean h - n mean(h n)) / r, h = s g,  ds = g n,
    db = g;  from the outputs m and 1 / r:  dx += gm / N - gr n / (N r^2).

    m is the mean and r = sqrt(variance + epsilon) of the N elements from `axis` on.
    """
    axes = trailing_axes(op, node.inputs[0], int_attribute(node, "axis"))
    x, scale, bias, g, gm, gr = cast_to_wide(op, *(*node.inputs, None)[:3], g, g_mean, g_inverse)
    n, inverse = _standardized_and_inverse_std(op, node, x, axes)
    terms, dscale, dbias = [], None, None
    if g is not None:
        terms.append(_standardized_gradient(op, g * scale, n, inverse, axes))
        dscale = op.sum_to(g * n, scale)
        dbias = None if bias is None else op.sum_to(g, bias)
    if gm is not None:
        terms.append(op.expand_to(gm / _element_count_along(op, x, axes), x))
    if gr is not None:
        terms.append(-(gr * (inverse * inverse) / _element_count_along(op, x, axes)) * n)
    return cast_to_inputs(op, [op.total(terms), dscale, dbias], node.inputs)


def _standardized_and_inverse_std(op, node, x, axes):
    """Return n and 1 / r, from the outputs mean and 1 / r of the node if they are precise enough.

    For float64 the kernel of onnxruntime returns them in float32.
    """
    full = int_attribute(node, "stash_type") == ir.DataType.FLOAT
    if x.dtype == ir.DataType.DOUBLE or not full:
        return _standardize_along(op, x, axes, float_attribute(node, "epsilon"))
    mean, inverse = (node_output(op, node, i, ir.DataType.FLOAT) for i in (1, 2))
    shape = dims(x)
    if shape is not None:
        mean.shape = inverse.shape = ir.Shape([*shape[: axes[0]], *[1] * len(axes)])
    return (x - mean) * inverse, inverse


@rule("RMSNormalization")
def rms_normalization(op, node, g):
    """y = s n, n = x / r:  dx = (h - n mean(h n)) / r, h = s g,  ds = g n.

    r = sqrt(mean square + epsilon), over the axes from `axis` on.
    Zhang & Sennrich 2019, arXiv:1910.07467.
    """
    axes = trailing_axes(op, node.inputs[0], int_attribute(node, "axis"))
    x, scale, g = cast_to_wide(op, *node.inputs, g)
    inverse = op.Reciprocal(
        op.Sqrt(_mean_along(op, x * x, axes) + float_attribute(node, "epsilon"))
    )
    n, h = x * inverse, g * scale
    dx = (h - n * _mean_along(op, h * n, axes)) * inverse
    return cast_to_inputs(op, [dx, op.sum_to(g * n, scale)], node.inputs)


@rule("InstanceNormalization")
def instance_normalization(op, node, g):
    """y = s n + b, n = (x - m) / r:  dx = (h - mean h - n mean(h n)) / r, h = s g,
    ds = sum g n,  db = sum g.

    Means are over the spatial axes, sums over those and the batch.
    Ulyanov, Vedaldi & Lempitsky 2016, arXiv:1607.08022.
    """
    x, scale, bias, g = cast_to_wide(op, *node.inputs, g)
    axes = trailing_axes(op, x, 2)
    n, inverse = _standardize_along(op, x, axes, float_attribute(node, "epsilon"))
    dx = _standardized_gradient(op, g * _channel_view(op, scale, x), n, inverse, axes)
    sums = _channel_gradients(op, g, n, _axes_except_channels(op, x), scale, bias)
    return cast_to_inputs(op, [dx, *sums], node.inputs)


def _channel_gradients(op, g, n, axes, scale, bias):
    """Return the gradients of scale and bias (C): the sums of g n and of g over `axes`."""
    dscale, dbias = (op.ReduceSum(v, axes, keepdims=0) for v in (g * n, g))
    return op.reshape_like(dscale, scale), op.reshape_like(dbias, bias)


@lowering("GroupNormalization")
def group_normalization(op, node):
    """y = s n + b, n standardized in every group of channels; s and b (C), up to opset 20 (groups).

    onnxruntime has no kernel and rewrites it too. Without a `stash_type`, float64 is computed in
    float64, not in the float32 of the specification. Wu & He 2018, arXiv:1803.08494.
    """
    x, scale, bias = node.inputs
    if x.dtype is None:
        return None
    stash = node.attributes.get_int("stash_type", 0)
    rows = op.Cast(x, to=ir.DataType(stash)) if stash else cast_to_wide(op, x)[0]
    rows = op.Reshape(rows, [0, int_attribute(node, "num_groups"), -1])
    n = op.Cast(_standardize_along(op, rows, [-1], float_attribute(node, "epsilon"))[0], to=x.dtype)
    channels = op.Reshape(n, op.Concat([0], op.shape_of(scale), [-1], axis=0))
    return [op.reshape_like(channels * op.Unsqueeze(scale, [1]) + op.Unsqueeze(bias, [1]), x)]


@rule("MeanVarianceNormalization")
def mean_variance_normalization(op, node, g):
    """y = (x - m) / (r + e):  dx = (g - mean g) / (r + e) - y mean(g y) / r.

    r is the standard deviation. Where r = 0, the last term is 0 (and onnxruntime's y is NaN).
    """
    axes = list(ints_attribute(node, "axes"))
    x, g = cast_to_wide(op, node.inputs[0], g)
    centered = x - _mean_along(op, x, axes)
    r = op.Sqrt(_mean_along(op, centered * centered, axes))
    inverse = op.Reciprocal(r + _EPSILON)
    y = centered * inverse
    slope = _mean_along(op, g * y, axes) / op.Where(op.Equal(r, 0.0), 1.0, r)
    return cast_to_inputs(op, [(g - _mean_along(op, g, axes)) * inverse - y * slope], node.inputs)


@rule("LpNormalization")
def lp_normalization(op, node, g):
    """y = x / |x|:  dx = (g - y sum(g y)) / |x| for p = 2, (g - sign(x) sum(g y)) / |x| for p = 1.

    Where |x| = 0, y is 0, and so is dx.
    """
    axis, p = int_attribute(node, "axis"), int_attribute(node, "p")
    x, g, y = cast_to_wide(op, node.inputs[0], g, node.outputs[0])
    norm = (op.ReduceL1 if p == 1 else op.ReduceL2)(x, [axis], keepdims=1)
    positive = op.Greater(norm, 0.0)
    inverse = op.Where(positive, op.Reciprocal(op.Where(positive, norm, 1.0)), 0.0)
    along = op.ReduceSum(g * y, [axis], keepdims=1)
    return cast_to_inputs(op, [(g - (op.Sign(x) if p == 1 else y) * along) * inverse], node.inputs)


@rule("LRN")
def local_response_normalization(op, node, g):
    """y_c = x_c / z_c^b, z_c = k + a / n sum x_i^2 over the n channels i around c:
    dx_i = g_i / z_i^b - 2 a b / n x_i sum g_c x_c / z_c^(b+1) over the c whose windows have i.

    If n is even, the window has one channel more after c than before it. Krizhevsky et al. 2012
    (AlexNet).
    """
    alpha, beta, bias = (float_attribute(node, name) for name in ("alpha", "beta", "bias"))
    size = int_attribute(node, "size")
    before, after = (size - 1) // 2, size // 2
    x, g = cast_to_wide(op, node.inputs[0], g)
    z = bias + alpha / size * _channel_window_sums(op, x * x, before, after)
    direct = g * op.Pow(z, -beta)
    around = _channel_window_sums(op, direct * x / z, after, before)
    return cast_to_inputs(op, [direct - 2 * alpha * beta / size * x * around], node.inputs)


def _channel_window_sums(op, x, before: int, after: int):
    """Return, for each channel, the sum from `before` channels before it to `after` after it."""
    padded, last = op.Pad(x, [before, after], None, [1]), before + after
    ends = [i - last if i < last else 2**63 - 1 for i in range(last + 1)]
    return op.total(
        [op.set_type_like(op.Slice(padded, [i], [e], [1]), x) for i, e in enumerate(ends)]
    )


@rule("BatchNormalization")
def batch_normalization(op, node, g, g_mean=None, g_variance=None):
    """y = s n + b, n = (x - m) / r, r = sqrt(v + e):  ds = sum g n,  db = sum g,  dx = g s / r,
    dm = -s db / r,  dv = -s ds / (2 r^2), sums over all axes but the channels.

    Ioffe & Szegedy 2015, arXiv:1502.03167.
    """
    x, scale, bias, mean, variance, *gs = cast_to_wide(op, *node.inputs, g, g_mean, g_variance)
    axes = _axes_except_channels(op, x)
    if int_attribute(node, "training_mode"):
        return cast_to_inputs(
            op, _training_mode_gradients(op, node, axes, x, scale, bias, *gs), node.inputs
        )
    g, inverse = gs[0], op.Reciprocal(op.Sqrt(variance + float_attribute(node, "epsilon")))
    slope = scale * inverse
    n = (x - _channel_view(op, mean, x)) * _channel_view(op, inverse, x)
    ds, db = _channel_gradients(op, g, n, axes, scale, bias)
    dx = g * _channel_view(op, slope, x)
    return cast_to_inputs(op, [dx, ds, db, -slope * db, -0.5 * slope * inverse * ds], node.inputs)


def _training_mode_gradients(op, node, axes, x, scale, bias, g, g_mean, g_variance):
    """Gradients in training mode, m and v being mean and variance of the N elements of a channel:
    dx = s (g - db / N - n ds / N) / r;  from the running outputs  m' = c m_in + (1 - c) m,
    v' = c v_in + (1 - c) v, c the momentum:  dm_in = c gm,  dv_in = c gv,
    dx += (1 - c) (gm + 2 (x - m) gv) / N.
    """
    momentum, count = float_attribute(node, "momentum"), _element_count_along(op, x, axes)
    n, inverse = _standardize_along(op, x, axes, float_attribute(node, "epsilon"))
    terms, others = [], dict.fromkeys(("scale", "bias", "mean", "variance"))
    if g is not None:
        others["scale"], others["bias"] = ds, db = _channel_gradients(op, g, n, axes, scale, bias)
        inner = g - _channel_view(op, db / count, x) - n * _channel_view(op, ds / count, x)
        terms.append(inner * (_channel_view(op, scale, x) * inverse))
    if g_mean is not None:
        others["mean"] = momentum * g_mean
        terms.append(op.expand_to(_channel_view(op, (1.0 - momentum) * g_mean / count, x), x))
    if g_variance is not None:
        others["variance"] = momentum * g_variance
        each = _channel_view(op, 2.0 * (1.0 - momentum) * g_variance / count, x)
        terms.append((x - _mean_along(op, x, axes)) * each)
    return op.total(terms), *others.values()


@rule("Dropout")
def dropout(op, node, g, g_mask=None):
    """y = x mask / (1 - p) in training:  dx = g mask / (1 - p),  dp = sum(g y) / (1 - p);  else
    y = x:  dx = g.

    The mask is the result of the forward pass, and a constant.
    """
    ratio, training = (*node.inputs, None, None)[1:3]
    if training is None or (op.known_value(training) is not None and not op.known_value(training)):
        return g, None
    one = op.const(1.0, g.dtype)
    kept = 1.0 - (op.const(0.5, g.dtype) if ratio is None else op.Cast(ratio, to=g.dtype))
    mask = node_output(op, node, 1, ir.DataType.BOOL)
    scale = op.Where(training, one / kept, one)
    dx = op.Where(mask, g * scale, 0.0)
    if ratio is None:
        return (dx,)
    dratio = op.Where(training, op.ReduceSum(g * node.outputs[0], keepdims=0) / kept, 0.0)
    return dx, op.reshape_like(op.Cast(dratio, to=ratio.dtype), ratio)


# -- members ---------------------------------------------------------------------------------------


@member_form("LayerNormalization", "RMSNormalization")
def write_layer_normalization_for_members(m, node):
    """Write one normalization over the last axes for all members of a `TrainerStack`, then multiply
    by the scales and add the biases of the members.
    """
    x, scale, bias = (*node.inputs, None)[:3]
    y, n = node.outputs[0], rank(node.inputs[0])
    if not n or x not in m or any(v.uses() or v.is_graph_output() for v in node.outputs[1:]):
        return None
    op, axis = m.op, int_attribute(node, "axis") % n
    behind, inputs = scale in m or bias in m, [m.value_for(x), *node.inputs[1:]]
    if behind:
        one = op.const(1.0, scale.dtype)
        inputs[1:] = [op.set_type_like(op.Expand(one, m.member_shape(scale)), scale)]
    new = m.set_member_type(
        op.emit(node.op_type, inputs, attributes_of(node) | {"axis": axis + 1}), y
    )
    if behind:
        new = m.set_member_type(op.Mul(new, m.aligned_value(scale, n)), y)
        new = new if bias is None else m.set_member_type(op.Add(new, m.aligned_value(bias, n)), y)
    return [new, *node.outputs[1:]]


@member_form("BatchNormalization")
def write_batch_normalization_for_members(m, node):
    """Write one BatchNormalization for all members of a `TrainerStack`, over the channels
    of all.
    """
    (x, *operands), n, op = node.inputs, rank(node.inputs[0]), m.op
    if n is None or n < 2:
        return None
    if m.shares_operands(operands) and not node.attributes.get_int("training_mode", 0):
        return join_rows(m, node)
    # (members, N, C, ...) -> (N, members, C, ...)
    turned = op.Transpose(m.expanded_value(x), perm=[1, 0, *range(2, n + 1)])
    lengths = [op.dim(turned, i) for i in range(3, n + 1)]
    merged = op.Reshape(turned, op.vector(op.dim(turned, 0), -1, *lengths))
    merged.type, merged.shape = x.type, ir.Shape([(dims(x) or ())[0], None, *(dims(x) or ())[2:]])
    flat = [op.Reshape(m.expanded_value(v), [-1]) for v in operands]
    y, *statistics = op.emit_many(
        node.op_type, [merged, *flat], attributes_of(node), len(node.outputs), fresh=True
    )
    y.type = x.type
    y = op.Reshape(y, op.vector(op.dim(turned, 0), m.count, -1, *lengths))
    y.type, y.shape = x.type, turned.shape
    new = [op.Transpose(y, perm=[1, 0, *range(2, n + 1)])]
    new += [op.Reshape(v, op.vector(m.count, -1)) for v in statistics]
    return [m.set_member_type(v, old) for v, old in zip(new, node.outputs, strict=True)]
