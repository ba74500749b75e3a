"""Corrections for nodes whose shapes onnx infers wrongly; what they compute stays the same."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.shapes import Dims, constant, dims, einsum_shape, static
from onnxgrad.graph.traversal import all_nodes

_HIDDEN = "onnxgrad.hidden"  # a domain without operators, so that onnx infers nothing


def spell_out(nodes: Iterable[ir.Node]) -> None:
    """Write out attributes whose defaults onnx misreads, in place.

    They are `onesided` of STFT, whose default onnx takes for 0, and `pads` of a ConvTranspose with
    both `auto_pad` and `output_padding`.
    """
    for node in nodes:
        if (node.domain, node.op_type) == ("", "STFT"):
            node.attributes.setdefault("onesided", ir.AttrInt64("onesided", 1))
        elif (node.domain, node.op_type) == ("", "ConvTranspose"):
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


def drop_windows(nodes: Iterable[ir.Node]) -> bool:
    """Cut the end padding of pools in `ceil_mode`, in place; return whether any was cut.

    A window that would start in the end padding is not computed, but onnx before opset 22 counts it
    in the shape.
    """
    changed = False
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
        needed = end - beyond % strides  # the end padding of the windows that remain
        if (dropped | (beyond % strides == 0)).all():
            node.attributes["ceil_mode"] = ir.AttrInt64("ceil_mode", 0)
        elif (needed[dropped] >= 0).all():
            pads = [*begin.tolist(), *np.where(dropped, needed, end).tolist()]
            node.attributes["pads"] = ir.AttrInt64s("pads", pads)
        else:
            continue
        changed = True
    return changed


def wrongly_inferred(graph: ir.Graph, corrected: Collection[ir.Node]) -> ir.Node | None:
    """Correct the first wrong shape, and return its node; None if there is none.

    The shapes of all later nodes, and of nodes with a subgraph, are removed, as they may follow
    from it. Nodes in `corrected` are skipped.
    """
    nodes = list(all_nodes(graph))
    for i, node in enumerate(nodes):
        if node.domain or node.op_type not in _RIGHT or node in corrected:
            continue
        inferred = dims(node.outputs[0])
        right = None if inferred is None else _RIGHT[node.op_type](node, inferred)
        if right == inferred:
            continue
        for later in (*(n for n in nodes[:i] if _has_subgraph(n)), *nodes[i + 1 :]):
            for value in later.outputs:
                value.shape = None
        node.outputs[0].shape = None if right is None else ir.Shape(right)
        return node
    return None


def _einsum(node: ir.Node, inferred: Dims) -> Dims | None:
    """Correct an index with several lengths: onnx uses the first, even if it is 1 or a symbol."""
    equation = node.attributes.get_string("equation", "")
    right = einsum_shape([dims(x) for x in node.inputs], equation)
    if right is None:
        return None
    pairs = zip(inferred, right, strict=True)  # a declared length is kept
    return tuple(d if r is None and isinstance(d, int) and d > 1 else r for d, r in pairs)


def _dft(node: ir.Node, inferred: Dims) -> Dims:
    """Correct a transform whose length is no constant: onnx uses that of the input."""
    length = node.inputs[1] if len(node.inputs) > 1 else None
    if length is None or constant(length) is not None:
        return inferred
    axes: Collection[int] = range(len(inferred))
    if len(node.inputs) < 3:
        # the default is the one or the other, depending on the opset
        axes = {node.attributes.get_int("axis", 1) % len(inferred), len(inferred) - 2}
    elif (axis := constant(node.inputs[2])) is not None:
        axes = {int(axis) % len(inferred)}
    return tuple(None if i in axes else d for i, d in enumerate(inferred))


_RIGHT = {"DFT": _dft, "Einsum": _einsum}


def _has_subgraph(node: ir.Node) -> bool:
    return any(a.type == ir.AttributeType.GRAPH for a in node.attributes.values())


@contextmanager
def hiding(model: ir.Model, nodes: Collection[ir.Node]) -> Iterator[None]:
    """Hide `nodes` from shape inference during the block, in a domain that onnx does not know."""
    nested = _HIDDEN in model.opset_imports
    model.opset_imports[_HIDDEN] = 1
    for node in nodes:
        node.domain = _HIDDEN
    yield
    for node in nodes:
        node.domain = ""
    if not nested:
        del model.opset_imports[_HIDDEN]
