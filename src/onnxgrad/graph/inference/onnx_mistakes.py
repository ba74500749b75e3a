"""Corrections for nodes whose shapes onnx infers wrongly; what they compute stays the same."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.emit import Emit
from onnxgrad.operators.shapes import Dims, constant, dims, static


def spell_out(node: ir.Node) -> None:
    """Write out attributes whose defaults onnx misreads, in place.

    They are `onesided` of STFT, whose default onnx takes for 0, and `pads` of a ConvTranspose with
    both `auto_pad` and `output_padding`.
    """
    if node.op_type == "STFT":
        node.attributes.setdefault("onesided", ir.AttrInt64("onesided", 1))
    elif node.op_type == "ConvTranspose":
        _write_pads(node)


def _write_pads(node: ir.Node) -> None:
    get, weight = node.attributes.get_ints, dims(node.inputs[1])
    auto, added = node.attributes.get_string("auto_pad", ""), get("output_padding", ())
    kernel = get("kernel_shape", ()) or (static(weight[2:]) if weight else ())
    if not any(added) or not kernel or "output_shape" in node.attributes or "SAME" not in auto:
        return
    ones = (1,) * len(added)
    sizes = zip(added, kernel, get("strides", ones), get("dilations", ones), strict=True)
    totals = [max(a + (k - 1) * d + 1 - s, 0) for a, k, s, d in sizes]
    less, more = [t // 2 for t in totals], [t - t // 2 for t in totals]
    pads = [*less, *more] if auto == "SAME_UPPER" else [*more, *less]
    node.attributes["pads"] = ir.AttrInt64s("pads", pads)
    del node.attributes["auto_pad"]


def drop_windows(graph: ir.Graph, node: ir.Node) -> ir.Node | None:
    """Cut the end if `node` is a pool in `ceil_mode`, in place; return a node that cuts its input.

    A window that would start in the end padding is not computed, but onnx before opset 22 counts it
    in the shape. Where less padding is not enough, the elements that no window reads are cut off.
    """
    if not node.op_type.endswith("Pool") or not node.attributes.get_int("ceil_mode", 0):
        return None
    get, shape = node.attributes.get_ints, dims(node.inputs[0])
    lengths = None if shape is None else static(shape[2:])
    if lengths is None:
        return None
    n = len(lengths)
    kernel, strides, dilations = (
        np.array(get(name, (1,) * n)) for name in ("kernel_shape", "strides", "dilations")
    )
    begin, end = np.array(get("pads", (0,) * 2 * n)).reshape(2, n)
    beyond = np.array(lengths) + begin + end - (kernel - 1) * dilations - 1
    dropped = -(-beyond // strides) * strides >= np.array(lengths) + begin
    if node.attributes.get_string("auto_pad", "NOTSET") != "NOTSET" or not dropped.any():
        return None
    needed = end - beyond % strides  # the end padding of the windows that remain
    if any(y.uses() or y.is_graph_output() for y in node.outputs[1:]) and (needed < 0).any():
        return None  # their indices are positions in the whole input
    if (dropped | (beyond % strides == 0)).all():
        node.attributes["ceil_mode"] = ir.AttrInt64("ceil_mode", 0)
    else:
        pads = [*begin.tolist(), *np.where(dropped, np.maximum(needed, 0), end).tolist()]
        node.attributes["pads"] = ir.AttrInt64s("pads", pads)
        if any(unread := np.where(dropped, np.minimum(needed, 0), 0)):
            return _cut_end(graph, node, unread)
    return None


def _cut_end(graph: ir.Graph, pool: ir.Node, ends: np.ndarray) -> ir.Node | None:
    """Let `pool` read its input without the last elements along each axis, -1 for one element."""
    assert isinstance(pool.graph, ir.Graph)
    main = Emit(graph)
    op = main if pool.graph is graph else Emit(pool.graph, outer=main)
    axes = np.flatnonzero(ends)
    with op.at(pool):
        x = op.Slice(pool.inputs[0], [0] * len(axes), ends[axes], axes + 2)
    pool.replace_input_with(0, x)
    return x.producer()


def correct(node: ir.Node, known: Dims | None) -> None:
    """Remove what onnx infers wrongly of the shape of the first output of `node`.

    Of an index of an Einsum with several lengths, onnx uses the first, even if it is 1 or a symbol;
    the width of packed heads of an Attention is 0 if it is a symbol, and a DFT whose length is no
    constant keeps a symbolic length of its input. `known` is the shape of the output before.
    """
    y, shape = node.outputs[0], dims(node.outputs[0])
    if node.op_type == "Einsum":
        y.shape = None if known is None else ir.Shape(known)
    elif node.op_type == "Attention" and shape is not None:
        y.shape = ir.Shape([None if d == 0 else d for d in shape])
    elif node.op_type == "DFT" and shape is not None:
        length, axis = (*node.inputs, None, None)[1:3]
        if length is None or constant(length) is not None:
            return
        # without an operand, the axis is the one or the other, depending on the opset
        axes = [node.attributes.get_int("axis", 1), -2] if axis is None else constant(axis)
        named = range(len(shape)) if axes is None else [int(a) % len(shape) for a in np.ravel(axes)]
        y.shape = ir.Shape([None if i in named else d for i, d in enumerate(shape)])
