"""Nodes whose shapes onnx infers wrongly, written so that it does not; they compute the same."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.shapes import Dims, constant, dims, einsum_shape, static

_HIDDEN = "onnxgrad.hidden"  # a domain that onnx knows nothing about


def spell_out(nodes: Iterable[ir.Node]) -> None:
    """State what onnx infers wrong shapes from: the default of STFT's `onesided`, which it takes
    for 0, and the padding of a ConvTranspose with `auto_pad` and `output_padding`.
    """
    for node in nodes:
        if (node.domain, node.op_type) == ("", "STFT"):
            node.attributes.setdefault("onesided", ir.AttrInt64("onesided", 1))
        elif (node.domain, node.op_type) == ("", "ConvTranspose"):
            _state_padding(node)


def _state_padding(node: ir.Node) -> None:
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


def drop_windows(nodes: Iterable[ir.Node]) -> bool:
    """Cut padding of pools in which a window would start beyond x: there is none, but before
    opset 22 onnx counts it. Tell whether any was cut.
    """
    found = False
    for node in nodes:
        get, shape = node.attributes.get_ints, dims(node.inputs[0]) if node.inputs else None
        lengths = None if shape is None else static(shape[2:])
        pool = not node.domain and node.op_type in ("AveragePool", "LpPool", "MaxPool")
        if not pool or lengths is None or not node.attributes.get_int("ceil_mode", 0):
            continue
        n = len(lengths)
        kernel, strides, dilations = (
            np.array(get(name, (1,) * n)) for name in ("kernel_shape", "strides", "dilations")
        )
        begin, end = np.array(get("pads", (0,) * 2 * n)).reshape(2, n)
        beyond = np.array(lengths) + begin + end - (kernel - 1) * dilations - 1
        dropped = -(-beyond // strides) * strides >= np.array(lengths) + begin
        if node.attributes.get_string("auto_pad", "NOTSET") != "NOTSET" or not dropped.any():
            continue
        left = end - beyond % strides  # the padding that the other windows need
        if (dropped | (beyond % strides == 0)).all():
            node.attributes["ceil_mode"] = ir.AttrInt64("ceil_mode", 0)
        elif (left[dropped] >= 0).all():
            pads = [*begin.tolist(), *np.where(dropped, left, end).tolist()]
            node.attributes["pads"] = ir.AttrInt64s("pads", pads)
        else:
            continue
        found = True
    return found


def wrongly_inferred(graph: ir.Graph, known: Collection[ir.Node]) -> ir.Node | None:
    """Return the first node, not among `known`, of which onnx inferred a wrong shape, after writing
    the right one and forgetting all that follows; or None.
    """
    nodes = list(ir.traversal.RecursiveGraphIterator(graph))
    for i, node in enumerate(nodes):
        if node.domain or node.op_type not in _RIGHT or node in known:
            continue
        found = dims(node.outputs[0])
        right = None if found is None else _RIGHT[node.op_type](node, found)
        if right == found:
            continue
        for later in (*(n for n in nodes[:i] if _holds_graph(n)), *nodes[i + 1 :]):
            for value in later.outputs:
                value.shape = None
        node.outputs[0].shape = None if right is None else ir.Shape(right)
        return node
    return None


def _of_einsum(node: ir.Node, found: Dims) -> Dims | None:
    """Of the lengths that an index has in several operands, onnx takes the first 1 or symbol."""
    equation = node.attributes.get_string("equation", "")
    right = einsum_shape([dims(x) for x in node.inputs], equation)
    if right is None:
        return None
    pairs = zip(found, right, strict=True)  # a length that somebody has declared is kept
    return tuple(d if r is None and isinstance(d, int) and d > 1 else r for d, r in pairs)


def _of_dft(node: ir.Node, found: Dims) -> Dims:
    """Where the length of the transform is known only at run time, onnx keeps that of the input."""
    length = node.inputs[1] if len(node.inputs) > 1 else None
    if length is None or constant(length) is not None:
        return found
    axes: Collection[int] = range(len(found))
    if len(node.inputs) < 3:
        axes = {
            node.attributes.get_int("axis", 1) % len(found),
            len(found) - 2,
        }  # by default one of these
    elif (axis := constant(node.inputs[2])) is not None:
        axes = {int(axis) % len(found)}
    return tuple(None if i in axes else d for i, d in enumerate(found))


_RIGHT = {"DFT": _of_dft, "Einsum": _of_einsum}


def _holds_graph(node: ir.Node) -> bool:
    return any(a.type == ir.AttributeType.GRAPH for a in node.attributes.values())


@contextmanager
def hiding(model: ir.Model, nodes: Collection[ir.Node]) -> Iterator[None]:
    """Keep onnx from inferring the shapes of `nodes`, in a domain that it does not know."""
    nested = _HIDDEN in model.opset_imports
    model.opset_imports[_HIDDEN] = 1
    for node in nodes:
        node.domain = _HIDDEN
    yield
    for node in nodes:
        node.domain = ""
    if not nested:
        del model.opset_imports[_HIDDEN]
