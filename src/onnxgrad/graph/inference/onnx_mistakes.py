"""Corrections for nodes whose shapes onnx infers wrongly; what they compute stays the same."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

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


def correct(node: ir.Node, known: Dims | None) -> None:
    """Remove what onnx infers wrongly of the shape of the first output of `node`.

    Of an index of an Einsum with several lengths, onnx uses the first, even if it is 1 or a symbol;
    the width of packed heads of an Attention is 0 if it is a symbol, and a DFT whose length is no
    constant keeps a symbolic length of its input. The indices of a MaxPool have the shape of its
    values. `known` is the shape of the output before.
    """
    y, shape = node.outputs[0], dims(node.outputs[0])
    if node.op_type == "Einsum":
        y.shape = None if known is None else ir.Shape(known)
    elif node.op_type == "MaxPool":
        for indices in node.outputs[1:]:
            indices.shape = y.shape
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
