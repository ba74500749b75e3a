"""Normalizations of onnxruntime, as standard operators.

Ba, Kiros & Hinton 2016, arXiv:1607.06450; Zhang & Sennrich 2019, arXiv:1910.07467.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from onnxgrad.operators.attributes import float_attribute, int_attribute, string_attribute
from onnxgrad.operators.microsoft import DOMAIN, contrib_lowering, has_output, shape_of_first_twice
from onnxgrad.operators.normalizations import trailing_axes
from onnxgrad.operators.outputs import shape_of_first
from onnxgrad.operators.records import declare_operators, lowering
from onnxgrad.operators.rule_nodes import optional_inputs, sum_terms
from onnxgrad.operators.shapes import Dims, known_shape, rank

FLOAT, INT32 = ir.DataType.FLOAT, ir.DataType.INT32


declare_operators("LayerNormalization", domain=DOMAIN, roles="xso")


def _shapes_of_norm(inputs: Sequence, attributes: Mapping[str, Any]) -> list[Dims]:
    """Return the shapes of a normalized value and of one statistic for each row."""
    x = known_shape(inputs[0])
    axis = attributes.get("axis", -1) % len(x)
    return [x, (*x[:axis], *[1] * (len(x) - axis))]


declare_operators("SimplifiedLayerNormalization", shape=_shapes_of_norm, roles="xs")


@lowering("SimplifiedLayerNormalization")  # onnxruntime writes it without domain, too
@contrib_lowering("SimplifiedLayerNormalization", shape=_shapes_of_norm, roles="xs")
def simplified_layer_normalization(op: Any, node: Any) -> list[ir.Value]:
    """y = s x / r, r = sqrt(mean square + epsilon) over the axes from `axis` on."""
    x, scale = node.inputs  # onnxruntime has a schema of the operator without domain only
    epsilon, axis = node.attributes.get_float("epsilon", 1e-5), node.attributes.get_int("axis", -1)
    y, inverse = rms_normalized(op, x, scale, epsilon, axis, has_output(node, 1))
    return [y, inverse][: len(node.outputs)]


def _shapes_of_skip_norm(inputs: Sequence, attributes: Mapping[str, Any]) -> list[Dims]:
    """Return the shapes of the normalized sum of operands, of two statistics, and of the sum."""
    x, statistic = _shapes_of_norm(inputs, attributes)
    return [x, statistic, statistic, x]


@contrib_lowering("SkipLayerNormalization", shape=_shapes_of_skip_norm, roles="aasob")
def skip_layer_normalization(op: Any, node: Any) -> list[ir.Value]:
    """y = s (x - m) / r + c, x = a + skip + b, m and r its mean and standard deviation, s and c the
    scale and shift.
    """
    a, skip, scale, shift, bias = optional_inputs(node.inputs, 5)
    x, epsilon = sum_terms(a, skip, bias), float_attribute(node, "epsilon")
    statistics = has_output(node, 1) or has_output(node, 2)
    operands = [v for v in (x, scale, shift) if v is not None]
    count, attributes = 3 if statistics else 1, {"axis": -1, "epsilon": epsilon}
    y, mean, inverse = op.emit_many("LayerNormalization", operands, attributes, count) * (
        3 // count
    )
    if statistics:
        mean.dtype = inverse.dtype = FLOAT
    return [y, mean, inverse, x][: len(node.outputs)]


@contrib_lowering("SkipSimplifiedLayerNormalization", shape=_shapes_of_skip_norm, roles="aasb")
def skip_simplified_layer_normalization(op: Any, node: Any) -> list[ir.Value]:
    """y = s x / r, x = a + skip + b, r = sqrt(mean square + epsilon)."""
    a, skip, scale, bias = optional_inputs(node.inputs, 4)
    x, epsilon = sum_terms(a, skip, bias), float_attribute(node, "epsilon")
    need = has_output(node, 1) or has_output(node, 2)
    y, inverse = rms_normalized(op, x, scale, epsilon, -1, need)
    mean = op.zeros_like(inverse) if has_output(node, 1) else inverse
    return [y, mean, inverse, x][: len(node.outputs)]


@contrib_lowering("GatedRMSNorm", shape=shape_of_first, roles="xsx")
def gated_rms_norm(op: Any, node: Any) -> list[ir.Value] | None:
    """y = s x / r f(z), r = sqrt(mean square + epsilon) over parts of the last axis, each as long
    as s, f the activation of the gate z.
    """
    x, scale, gate = (op.Cast(v, to=FLOAT) if _has_16_bits(v) else v for v in node.inputs)
    epsilon, activation = float_attribute(node, "epsilon"), string_attribute(node, "activation")
    if activation not in ("silu", "swish", "sigmoid"):
        return None
    parts = op.Reshape(x, op.vector(-1, op.dim(scale, 0)))
    normalized, _ = rms_normalized(op, parts, scale, epsilon)
    factor = op.Sigmoid(gate) if activation == "sigmoid" else gate * op.Sigmoid(gate)
    y = op.reshape_like(normalized, x) * factor
    return [op.set_type_like(op.Cast(y, to=node.inputs[0].dtype), node.inputs[0])]


def _has_16_bits(x: ir.Value) -> bool:
    """Return whether `x` has 16 bits, which kernels compute in float32."""
    return x.dtype is not None and x.dtype.bitwidth < 32


def rms_normalized(
    op: Any, x: ir.Value, scale: ir.Value, epsilon: float, axis: int = -1, inverse: bool = False
) -> tuple[ir.Value, ir.Value]:
    """Return s x / r, r = sqrt(mean square + epsilon), and 1 / r in float32 if `inverse` is set."""
    if op.opset >= 23 and not inverse:  # opset 23 added RMSNormalization
        y = op.RMSNormalization(x, scale, axis=axis, epsilon=epsilon)
        return op.set_type_like(y, x), y
    wide = op.Cast(x, to=FLOAT) if _has_16_bits(x) else x
    mean_square = op.ReduceMean(wide * wide, trailing_axes(op, x, axis), keepdims=1)
    inverted = op.Reciprocal(op.Sqrt(mean_square + epsilon))
    normalized = wide * inverted
    y = (op.Cast(normalized, to=scale.dtype) if scale.dtype else normalized) * scale
    return op.set_type_like(y, x), op.Cast(inverted, to=FLOAT)


def _shapes_of_embedding(inputs: Sequence, _attributes: Mapping[str, Any]) -> list[Dims]:
    """Return the shapes of embedded tokens, of the counts of tokens, and of tokens before
    the norm.
    """
    ids = known_shape(inputs[0])
    embedded = (*ids, known_shape(inputs[2])[-1])
    return [embedded, ids[:1], embedded]


@contrib_lowering("EmbedLayerNormalization", shape=_shapes_of_embedding, roles="xxtttsocx")
def embed_layer_normalization(op: Any, node: Any) -> list[ir.Value]:
    """y = s (x - m) / r + c, x the sum of the embeddings of word, position and segment."""
    ids, segment_ids, words, positions, segments, *others = optional_inputs(node.inputs, 9)
    scale, shift, mask, position_ids = others
    rows = op.Slice(positions, [0], op.vector(op.dim(ids, 1)), [0])
    x = op.Gather(words, ids)
    x = x + (rows if position_ids is None else op.Gather(positions, position_ids))
    if segment_ids is not None and segments is not None:
        x = x + op.Gather(segments, segment_ids)
    epsilon = float_attribute(node, "epsilon")
    y = op.LayerNormalization(x, scale, shift, axis=-1, epsilon=epsilon)
    y.dtype = x.dtype = words.dtype
    lengths = y
    if has_output(node, 1) and mask is None:
        lengths = op.Expand(op.Cast(0.0, to=INT32), op.vector(op.dim(ids, 0)))
    elif has_output(node, 1):  # the number of ones in each row
        lengths = op.ReduceSum(op.Cast(op.Equal(mask, 1), to=INT32), [1], keepdims=0)
    return [y, lengths, x][: len(node.outputs)]


@contrib_lowering("GroupNorm", shape=shape_of_first, roles="xso")
@contrib_lowering("SkipGroupNorm", shape=shape_of_first_twice, roles="xsoab")
def group_norm(op: Any, node: Any) -> list[ir.Value] | None:
    """y = f(s (x - m) / r + c), over the channels of a group and all positions (N, H, W, C).

    x = a + skip + b of a SkipGroupNorm, whose second output is x. The activation 1 is SiLU.
    """
    a, scale, shift, skip, bias = optional_inputs(node.inputs, 5)
    if skip is not None and rank(skip) is None:
        return None
    if rank(skip) == 2:  # (N, C): the same at all positions
        skip = op.Unsqueeze(skip, [1, 2])
    x, get = op.set_type_like(sum_terms(a, skip, bias), a), node.attributes
    last = int_attribute(node, "channels_last")
    apart = op.Cast(x if last else op.Transpose(x, perm=[0, 2, 3, 1]), to=FLOAT)
    # (N, H W, groups, channels of one)
    flat = op.Reshape(apart, op.vector(0, -1, op.dim(scale, 0)))
    groups = op.Reshape(flat, [0, 0, get.get_int("groups"), -1])
    centered = groups - op.ReduceMean(groups, [1, 3], keepdims=1)
    variance = op.ReduceMean(centered * centered, [1, 3], keepdims=1)
    normalized = centered / op.Sqrt(variance + float_attribute(node, "epsilon"))
    y = op.reshape_like(normalized, apart) * op.Cast(scale, to=FLOAT) + op.Cast(shift, to=FLOAT)
    if get.get_int("activation", 0):
        y = y * op.Sigmoid(y)
    y = y if last else op.Transpose(y, perm=[0, 3, 1, 2])
    return [op.set_type_like(op.Cast(y, to=x.dtype), x), x][: len(node.outputs)]
