"""Operators that lay out elements anew: views, copies, concatenations, slices, pads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.checks import current_limit
from onnxgrad.operators.attributes import int_attribute, string_attribute
from onnxgrad.operators.axes import (
    OutputAxes,
    OutputAxis,
    axes_named_by,
    axis_before_matrices,
    axis_unless_named,
    broadcast_axis,
    first_axis_only,
    named_axes,
    only_first_operand,
    reshaped_axis,
)
from onnxgrad.operators.member_forms import shift_all_operands, shift_named_axes, write_each_member
from onnxgrad.operators.outputs import DimArray, none_if_unknown, shape_of_first, type_of_first
from onnxgrad.operators.records import ListedAxes, declare_operators, lowering, member_form, rule
from onnxgrad.operators.rule_nodes import attributes_of, positions_of, wide_dtype
from onnxgrad.operators.shapes import (
    Dim,
    Dims,
    broadcast,
    coefficient,
    constant,
    dims,
    equal,
    known_shape,
    rank,
    static,
)

Attributes = Mapping[str, Any]

# -- views ----------------------------------------------------------------------------------------


def reshaped_dims(shape: Dims | None, target: Sequence[Dim], attributes: Attributes) -> Dims:
    """Return the shape after a Reshape; a length -1 is inferred, perhaps as a symbol."""
    result = list(target)
    if shape is None:
        return tuple(None if d in (0, -1) else d for d in result)
    if not attributes.get("allowzero"):
        result = [shape[i] if d == 0 else d for i, d in enumerate(result)]
    if -1 not in result:
        return tuple(result)
    before, after = list(shape), [d for d in result if d != -1]
    for d in list(after):
        if d is not None and d in before:
            before.remove(d)
            after.remove(d)
    sizes = [d for d in before if isinstance(d, int)]
    symbols = [d for d in before if not isinstance(d, int)]
    inferred: Dim = None
    if all(isinstance(d, int) and d > 0 for d in after):
        times, symbol = coefficient(symbols[0]) if symbols and symbols[0] else (1, None)
        factor, remainder = divmod(prod(sizes) * times, prod(after))  # type: ignore[arg-type]
        if remainder == 0 and not symbols:
            inferred = factor
        elif remainder == 0 and len(symbols) == 1 and symbol is not None:
            inferred = symbol if factor == 1 else f"{factor}*{symbol}"
    return tuple(inferred if d == -1 else d for d in result)


def _shape_of_reshape(inputs: Sequence, attributes: Attributes) -> Dims | None:
    shape, target = known_shape(inputs[0]), constant(inputs[1])
    length = static(dims(inputs[1]))
    if target is None:
        return None if length is None or length[0] > current_limit("rank") else (None,) * length[0]
    return reshaped_dims(shape, target.tolist(), attributes)


def _shape_after_reshape(node: ir.Node, operands: Sequence[DimArray | None]) -> Dims | None:
    if operands[1] is None:
        return None
    return reshaped_dims(dims(node.inputs[0]), tuple(operands[1].flat), attributes_of(node))


@none_if_unknown
def _elements_after_reshape(node: ir.Node, x: DimArray, *_: DimArray | None) -> DimArray | None:
    shape = static(dims(node.outputs[0]))
    return None if shape is None else x.reshape(shape)


def _shape_of_squeeze(inputs: Sequence, attributes: Attributes) -> Dims | None:
    shape, named = dims(inputs[0]), axes_named_by("Squeeze", inputs, attributes)
    if shape is None or named is None:
        return None
    return tuple(d for i, d in enumerate(shape) if i not in named)


@only_first_operand
def _axis_after_squeeze(node: Any, _operand: int, axis: int) -> OutputAxes:
    named = named_axes(node)
    if named is None:
        return reshaped_axis(node, 0, axis)
    return None if axis in named else axis - sum(a < axis for a in {*named})


def _shape_of_unsqueeze(inputs: Sequence, attributes: Attributes) -> Dims | None:
    shape, named = dims(inputs[0]), axes_named_by("Unsqueeze", inputs, attributes)
    if shape is None or named is None:
        return None
    old = iter(shape)
    return tuple(1 if i in named else next(old) for i in range(len(shape) + len(named)))


@only_first_operand
def _axis_after_unsqueeze(node: Any, _operand: int, axis: int) -> OutputAxes:
    new = named_axes(node)
    if new is None:
        return reshaped_axis(node, 0, axis)
    return [i for i in range(len(node.inputs[0].shape) + len(new)) if i not in new][axis]


_AXES = ListedAxes("axes", 1)

_VIEW = "view cheap moves reorders"

declare_operators("Reshape Squeeze Unsqueeze", _VIEW, elements=_elements_after_reshape, roles="xl")
declare_operators("Flatten Reshape", _VIEW, axes=reshaped_axis)
declare_operators("Reshape", shape=_shape_of_reshape, lengths=_shape_after_reshape, settings=(1,))
declare_operators("Squeeze", shape=_shape_of_squeeze, naming=_AXES, axes=_axis_after_squeeze)
declare_operators("Unsqueeze", shape=_shape_of_unsqueeze, naming=_AXES, axes=_axis_after_unsqueeze)
declare_operators(
    "Identity",
    "elementwise view cheap moves reorders sequences never_fails",
    shape=shape_of_first,
    result_type=type_of_first,
    elements=none_if_unknown(lambda node, x: x),
    axes=broadcast_axis,
)

# -- transposed, repeated and joined elements -----------------------------------------------------


def _shape_of_transpose(inputs: Sequence, attributes: Attributes) -> Dims:
    shape = known_shape(inputs[0])
    return tuple(shape[i] for i in attributes.get("perm", range(len(shape))[::-1]))


def _shape_of_expand(inputs: Sequence, _attributes: Attributes) -> Dims | None:
    shape, target = dims(inputs[0]), constant(inputs[1])
    return None if shape is None or target is None else broadcast(shape, tuple(target.tolist()))


def _shape_after_expand(node: ir.Node, operands: Sequence[DimArray | None]) -> Dims | None:
    wanted = nonnegative_lengths(operands[1])
    return None if wanted is None else broadcast(dims(node.inputs[0]), wanted)


def nonnegative_lengths(elements: DimArray | None) -> Dims | None:
    """Return the elements of a shape operand as a shape; None if an element is negative, which only
    a node that never runs has.
    """
    if elements is None or any(isinstance(d, int) and d < 0 for d in elements.flat):
        return None
    return tuple(elements.flat)


@only_first_operand
def _axis_after_tile(node: Any, _operand: int, axis: int) -> OutputAxis:
    repeats = constant(node.inputs[1])
    return axis if repeats is not None and repeats[axis] == 1 else None


def _shape_of_concat(inputs: Sequence, attributes: Attributes) -> Dims | None:
    """Return the shape of a Concat; along all other axes, the operands have the same length."""
    shapes, axis = [dims(v) for v in inputs], attributes.get("axis", 0)
    if not shapes or shapes[0] is None:
        return None
    ranked = [shape for shape in shapes if shape is not None]
    result = [
        next((d for d in column if d is not None), None) for column in zip(*ranked, strict=True)
    ]
    lengths = static(tuple(shape[axis] for shape in ranked))
    result[axis] = sum(lengths) if lengths is not None and len(ranked) == len(shapes) else None
    return tuple(result)


def _axis_after_reverse_sequence(node: Any, operand: int, axis: int) -> OutputAxis:
    return int_attribute(node, "batch_axis") if operand else axis_unless_named(node, 0, axis)


FIRST = ListedAxes("axis", default=lambda *_: [0])
_PERM = ListedAxes("perm", default=lambda n, *_: range(n)[::-1])

declare_operators(
    "DepthToSpace SpaceToDepth",
    "cheap moves reorders aligned",
    axes=only_first_operand(first_axis_only),
)
declare_operators(
    "Transpose",
    "cheap moves reorders never_fails",
    shape=_shape_of_transpose,
    naming=_PERM,
    axes=only_first_operand(lambda node, _, axis: (named_axes(node) or []).index(axis)),
    elements=none_if_unknown(lambda node, x: x.transpose(named_axes(node))),
)
declare_operators(
    "Expand",
    "cheap moves reorders",
    shape=_shape_of_expand,
    lengths=_shape_after_expand,
    axes=only_first_operand(broadcast_axis),
    roles="xl",
    settings=(1,),
)
declare_operators(
    "Tile", "cheap moves reorders aligned", axes=_axis_after_tile, roles="xl", settings=(1,)
)
declare_operators(
    "Concat",
    "cheap reorders aligned",
    shape=_shape_of_concat,
    elements=none_if_unknown(
        lambda node, *parts: np.concatenate(parts, int_attribute(node, "axis"))
    ),
    naming=FIRST,
    axes=axis_unless_named,
    members=shift_all_operands,
    straight_through=(),
)
declare_operators(
    "ReverseSequence",
    "moves reorders",
    naming=ListedAxes("time_axis", default=lambda *_: [0]),
    axes=_axis_after_reverse_sequence,
    members=write_each_member,
    roles="xl",
)

# -- slices and pads ------------------------------------------------------------------------------


_BEYOND_ANY_LENGTH = 10**9


def _default_slice_axes(
    _rank: int, inputs: Sequence, _attributes: Attributes
) -> Sequence[int] | None:
    """Return the default axes of a Slice: the first axes, as many as `starts` has elements."""
    count = static(dims(inputs[1]))
    return None if count is None else range(*count)


def _shape_of_slice(inputs: Sequence, _attributes: Attributes) -> Dims | None:
    """Return the shape of a Slice with constant bounds and steps of one; None if a length is
    unknown.

    An end beyond any length, such as the 10^9 of tf2onnx, keeps the symbol of an axis.
    """
    if len(inputs) < 3:  # before opset 10, bounds are attributes
        return None
    shape, given = dims(inputs[0]), [v for v in inputs[1:] if v is not None]
    known = [array.tolist() for v in given if (array := constant(v)) is not None]
    if shape is None or len(known) < len(given) or (len(inputs) > 3 and inputs[3] is None):
        return None
    starts, ends, *more = known
    axes = more[0] if more else range(len(starts))
    steps = more[1] if len(more) > 1 else [1] * len(starts)
    result = list(shape)
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        length = result[axis]
        if step != 1:
            return None
        if isinstance(length, int):
            result[axis] = len(range(*slice(start, end).indices(length)))
        elif start != 0 or end < _BEYOND_ANY_LENGTH:
            return None
    return tuple(result)


def _axis_after_slice(node: Any, operand: int, axis: int) -> OutputAxis:
    named = named_axes(node)
    if named is None or axis not in named:
        return None if named is None else axis
    starts, steps = constant(node.inputs[1]), (*node.inputs, None, None)[4]
    step, k = constant(steps), named.index(axis)
    has_steps_of_one = steps is None or (step is not None and step[k] == 1)
    return axis if starts is not None and starts[k] == 0 and has_steps_of_one else None


def _elements_after_slice(
    _node: ir.Node,
    x: DimArray,
    starts: DimArray,
    ends: DimArray,
    axes: DimArray | None = None,
    steps: DimArray | None = None,
) -> DimArray | None:
    axes = np.arange(len(starts)) if axes is None else axes
    steps = np.ones(len(starts), np.int64) if steps is None else steps
    place = [slice(None)] * x.ndim
    for axis, *bounds in zip(axes, starts, ends, steps, strict=True):
        if not all(isinstance(n, int | np.integer) for n in (axis, *bounds)):
            return None
        place[axis] = slice(*map(int, bounds))
    return x[tuple(place)]


@only_first_operand
def _axis_after_pad(node: Any, _operand: int, axis: int) -> OutputAxis:
    named, pads = named_axes(node), constant(node.inputs[1])
    if named is None or axis not in named:
        return None if named is None else axis
    return None if pads is None or pads[named.index(axis) :: len(named)].any() else axis


declare_operators(
    "Slice",
    "cheap moves selects aligned",
    naming=ListedAxes("axes", 3, _default_slice_axes),
    shape=_shape_of_slice,
    axes=only_first_operand(_axis_after_slice),
    elements=none_if_unknown(_elements_after_slice),
    roles="xl",
    settings=(1, 2, 3, 4),
)
declare_operators(
    "Split",
    "cheap moves selects aligned",
    naming=FIRST,
    axes=only_first_operand(axis_unless_named),
    roles="xl",
    settings=(1,),
)
declare_operators(
    "Pad",
    "cheap aligned",
    naming=ListedAxes("axes", 3, lambda n, *_: range(n)),
    axes=_axis_after_pad,
    straight_through=(0, 2),
    roles="xl",
    settings=(1,),
)
declare_operators(
    "Trilu", "unary cheap sums", axes=axis_before_matrices, members=shift_named_axes, roles="xl"
)


# -- gradients -------------------------------------------------------------------------------------


@rule("Identity", "Optional", "OptionalGetElement")
def identity(op, node, g):
    """y = x:  dx = g."""
    return (g,)


@rule("Reshape", "Flatten", "Squeeze", "Unsqueeze")
def reshape(op, node, g):
    """y = x in another shape:  dx = g in the shape of x."""
    return (op.reshape_like(g, node.inputs[0]),)


@rule("Transpose")
def transpose(op, node, g):
    """y = x with its axes permuted:  dx = g with its axes permuted back."""
    perm = node.attributes.get_ints("perm", None)
    if perm is None:  # the default reverses the axes, and is its own inverse
        return (op.Transpose(g),)
    return (op.Transpose(g, perm=[list(perm).index(i) for i in range(len(perm))]),)


@rule("Expand")
def expand(op, node, g):
    """y = x repeated:  dx = g summed over the repeats."""
    return (op.sum_to(g, node.inputs[0]),)


@rule("Concat")
def concat(op, node, g):
    """y = [a, b, ...]:  da, db, ... = the parts of g."""
    axis = int_attribute(node, "axis")
    if len(node.inputs) == 1:
        return (g,)
    lengths = op.vector(*(op.dim(x, axis) for x in node.inputs))
    return op.emit_many("Split", [g, lengths], {"axis": axis}, outputs=len(node.inputs))


@rule("Split")
def split(op, node, *gs):
    """[a, b, ...] = x:  dx = [da, db, ...]."""
    parts = [
        op.set_type_like(op.Expand(op.const(0.0, y.dtype), op.shape_of(y)), y) if g is None else g
        for y, g in zip(node.outputs, gs, strict=True)
    ]
    return (op.Concat(*parts, axis=int_attribute(node, "axis")),)


@rule("Slice")
def slice_(op, node, g):
    """y = x[start:end:step]:  dx = zeros with g in that slice."""
    pads = _pads_of_slice_adjoint(op, node, g)
    return (scatter_moved(op, node, g) if pads is None else op.Pad(g, pads),)


def _pads_of_slice_adjoint(op, node, g):
    """Return the padding that is the adjoint of a Slice of step one, or None if it is dynamic."""
    x, first, *others = node.inputs
    shape, count = dims(x), static(dims(first))
    starts, ends, axes, steps = (op.known_value(v) for v in (first, *others, None, None)[:4])
    dynamic = any(v is not None and op.known_value(v) is None for v in others[1:])
    if shape is None or dynamic or (steps is not None and np.any(steps != 1)) or count is None:
        return None
    begin, end = [0] * len(shape), [0] * len(shape)
    for i, axis in enumerate(range(*count) if axes is None else axes.tolist()):
        n = shape[axis]
        lo, hi = (None if v is None else int(v[i]) for v in (starts, ends))
        if isinstance(n, int) and lo is not None and hi is not None:
            lo, hi, _ = slice(lo, hi).indices(n)
            begin[axis], end[axis] = min(lo, hi), n - hi
        elif hi is not None and hi >= 2**31 - 1:  # an end beyond any length: up to the last element
            begin[axis] = op.dim(x, axis) - op.dim(g, axis)
        elif lo == 0:
            end[axis] = op.dim(x, axis) - op.dim(g, axis)
        else:
            return None
    return op.vector(*begin, *end)


@rule("Pad")
def pad(op, node, g):
    """y = x with a border of v:  dx = g without the border,  dv = sum of g over the border."""
    x, pads, value, axes = (*node.inputs, None, None)[:4]
    if string_attribute(node, "mode") != "constant":
        return scatter_moved(op, node, g, pads, None, axes), None, None
    dx = op.Pad(g, -pads, None, axes)  # negative pads crop
    if value is None:
        return dx, None, None
    border = op.Pad(op.zeros_like(x), pads, 1.0, axes)
    return dx, None, op.reshape_like(op.ReduceSum(g * border, keepdims=0), value)


def scatter_moved(op, node, g, *operands):
    """Return the gradient of the first input of a node that moves its elements, as a Gather or Pad
    does: g added at their positions.

    The node is applied to the positions 0, ..., n-1 of its input, and g is added at the positions
    that it returns. That is right for all attributes and for dynamic indices. `operands` replace
    the other inputs of the node.
    """
    x, *rest = node.inputs
    inputs = [positions_of(op, x), *(operands or rest)]
    positions = op.emit(node.op_type, inputs, attributes_of(node), domain=node.domain)
    return scatter_flat(op, x, positions, g)


def scatter_flat(op, x, positions, g):
    """Return zeros of the shape of `x` with `g` added at flat `positions`.

    Not by ScatterND: onnxruntime's threads overwrite each other's sums in it.
    """
    shape = static(dims(x))
    n = op.Reshape(op.Size(x), [1]) if shape is None else [prod(shape)]
    dtype = wide_dtype(x.dtype)
    flat = op.ScatterElements(
        op.Expand(op.const(0.0, dtype), n),
        op.Reshape(positions, [-1]),
        op.Reshape(op.Cast(g, to=dtype), [-1]),
        axis=0,
        reduction="add",
    )
    return op.reshape_like(op.Cast(flat, to=x.dtype), x)


@rule("Tile")
def tile(op, node, g):
    """y = x repeated along its axes:  dx = sum of g over the repeats."""
    x, repeats = node.inputs
    static_repeats, n = op.known_value(repeats), rank(x)
    if static_repeats is not None and n is not None:
        shape, axes = [], []
        for axis, times in enumerate(static_repeats.tolist()):
            if times != 1:  # insert an axis of the repeats before each repeated axis
                axes.append(len(shape))
                shape.append(times)
            shape.append(op.dim(x, axis))
        if not axes:
            return g, None
        shape = op.vector(*shape)
    else:
        pairs = [op.Unsqueeze(v, [1]) for v in (repeats, op.shape_of(x))]
        shape = op.Reshape(op.Concat(*pairs, axis=1), [-1])
        axes = op.Range(np.int64(0), op.Size(shape), np.int64(2))
    return op.ReduceSum(op.Reshape(g, shape, allowzero=1), axes, keepdims=0), None


@rule("Trilu", "ReverseSequence")
def trilu_or_reverse(op, node, g):
    """y = A x, A = AT a mask (Trilu) or a reversal (ReverseSequence):  dx = A g."""
    return op.emit(node.op_type, [g, *node.inputs[1:]], attributes_of(node)), None


@rule("CenterCropPad")
def center_crop_pad(op, node, g):
    """y = x cropped or padded with zeros about its center:  dx = g padded or cropped back.

    Both round the center in the same direction, so that each is the adjoint of the other.
    """
    shape, axes = op.shape_of(node.inputs[0]), node.attributes.get_ints("axes", None)
    if axes is not None:
        shape = op.Gather(shape, list(axes), axis=0)
    return op.CenterCropPad(g, shape, **attributes_of(node)), None


@rule("DepthToSpace")
def depth_to_space(op, node, g):
    """y = x with blocks of channels laid out in space:  dx = g with these blocks moved back."""
    (x,), b = node.inputs, int_attribute(node, "blocksize")
    if string_attribute(node, "mode") == "DCR":
        return (op.set_type_like(op.SpaceToDepth(g, blocksize=b), x),)
    lengths = [op.dim(g, 0), op.dim(g, 1), op.dim(x, 2), b, op.dim(x, 3), b]
    blocks = op.Reshape(g, op.vector(*lengths), allowzero=1)
    return (op.reshape_like(op.Transpose(blocks, perm=[0, 1, 3, 5, 2, 4]), x),)


@rule("SpaceToDepth")
def space_to_depth(op, node, g):
    """y = x with blocks of space laid out as channels:  dx = g with these blocks moved back."""
    return (op.set_type_like(op.DepthToSpace(g, **attributes_of(node)), node.inputs[0]),)


@lowering("Identity", "Cast", "Reshape", "Dropout")
def remove_no_operation(op: Any, node: Any) -> list[ir.Value] | None:
    """Return the input of an Identity, or of a Cast, Reshape or Dropout that changes nothing; None
    to keep the node, as for an output of the graph.
    """
    x, (y, *others) = node.inputs[0], node.outputs
    training = node.inputs[2] if node.op_type == "Dropout" and len(node.inputs) > 2 else None
    trains = op.known_value(training)
    same = {
        "Identity": True,
        "Cast": x.dtype is not None and x.dtype == y.dtype,
        "Reshape": equal(dims(x), dims(y)),
        "Dropout": not others and (training is None or (trains is not None and not trains)),
    }[node.op_type]
    return [x] if same and y not in op.graph.outputs else None


# -- members ---------------------------------------------------------------------------------------


@member_form("Pad")
def write_pad_for_members(m, node):
    """Write one Pad for all members of a `TrainerStack`, with pads for all axes instead
    of `axes`.
    """
    (x, pads, *value), axes, n = node.inputs[:3], named_axes(node), rank(node.inputs[0])
    known = constant(pads)
    if known is None or axes is None or n is None:
        return shift_named_axes(m, node)
    lengths = np.zeros((2, n + 1), np.int64)
    lengths[:, [a + 1 for a in axes]] = known.reshape(2, -1)
    if not m.shares_operands(node.inputs[1:]):
        return None
    return m.write_node(node, [m.value_for(x), lengths.ravel(), *value])


@member_form("Flatten")
def write_flatten_for_members(m, node):
    """Write one Reshape in place of the Flatten of all members of a `TrainerStack`; None if `axis`
    is not 1.
    """
    x, n = node.inputs[0], rank(node.inputs[0])
    if not n or int_attribute(node, "axis") % n != 1:
        return None
    new = m.value_for(x)
    front, behind = (dims(x) or (None,))[0], m.op.numel(new, 2)
    y = m.op.Reshape(new, m.shape_in_front([front if isinstance(front, int) else -1, behind]))
    return [m.set_member_type(y, node.outputs[0])]


@member_form("Expand", "Reshape", "Tile")
def write_reshape_for_members(m, node):
    """Write one Expand, Reshape or Tile for all members of a `TrainerStack`, with a number for the
    axis of members in front.
    """
    (x, numbers), n = node.inputs, rank(node.outputs[0])
    if numbers in m:
        return None
    new, known = m.value_for(x), constant(numbers)
    front = [1]
    if node.op_type == "Expand":
        length = (dims(numbers) or (None,))[0]
        if n is None or not isinstance(length, int):
            return None
        new, front = m.aligned_value(x, n), front + [1] * (n - length)
    # a 0 of a Reshape stands for the length of the same axis, which has moved as far as the 0
    if node.op_type == "Reshape" and known is not None:
        target = m.shape_in_front([*map(int, known)])
    else:
        first = m.op.vector(m.count) if node.op_type == "Reshape" else front
        target = (
            m.op.Concat(first, numbers, axis=0) if known is None else [*front, *map(int, known)]
        )
    return m.write_node(node, [new, target])
