"""Corrections for nodes whose shapes onnx infers wrongly; what they compute stays the same."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.emit import Emit
from onnxgrad.graph.inference.by_onnx import infer_node
from onnxgrad.graph.output_shapes import einsum_shape
from onnxgrad.graph.shapes import Dims, constant, dims, static
from onnxgrad.graph.traversal import all_nodes, subgraphs

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


def drop_windows(graph: ir.Graph) -> bool:
    """Cut the end of pools in `ceil_mode`, in place; return whether any was cut.

    A window that would start in the end padding is not computed, but onnx before opset 22 counts it
    in the shape. Where less padding is not enough, the elements that no window reads are cut off.
    """
    changed = False
    for node in list(all_nodes(graph)):
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
        if any(y.uses() or y.is_graph_output() for y in node.outputs[1:]) and (needed < 0).any():
            continue  # their indices are positions in the whole input
        if (dropped | (beyond % strides == 0)).all():
            node.attributes["ceil_mode"] = ir.AttrInt64("ceil_mode", 0)
        else:
            pads = [*begin.tolist(), *np.where(dropped, np.maximum(needed, 0), end).tolist()]
            node.attributes["pads"] = ir.AttrInt64s("pads", pads)
            if any(unread := np.where(dropped, np.minimum(needed, 0), 0)):
                _cut_end(graph, node, unread)
        changed = True
    return changed


def _cut_end(graph: ir.Graph, pool: ir.Node, ends: np.ndarray) -> None:
    """Let `pool` read its input without the last elements along each axis, -1 for one element."""
    assert isinstance(pool.graph, ir.Graph)
    main = Emit(graph)
    op = main if pool.graph is graph else Emit(pool.graph, outer=main)
    axes = np.flatnonzero(ends)
    with op.at(pool):
        x = op.Slice(pool.inputs[0], [0] * len(axes), ends[axes], axes + 2)
    pool.replace_input_with(0, x)


def corrected(graph: ir.Graph, opset: int) -> set[ir.Node]:
    """Correct shapes that onnx infers wrongly, in place; return the nodes that it gets wrong.

    The shapes that follow from them are inferred anew, node by node, so that one pass finds all.
    """
    wrong: set[ir.Node] = set()
    changed: set[ir.Value] = set()
    nodes = list(all_nodes(graph))
    for node in nodes:
        follows = not changed.isdisjoint(node.inputs)
        if follows:
            for y in node.outputs:
                y.shape = None
            infer_node(node, opset)
            changed.update(node.outputs)
        inferred = dims(node.outputs[0]) if node.outputs else None
        if node.op_type not in _RIGHT or node.domain not in ("", _HIDDEN):
            continue
        right = None if inferred is None else _RIGHT[node.op_type](node, inferred)
        if right != inferred:
            wrong.add(node)
            changed.update(node.outputs)
            for y in node.outputs:
                y.shape = None if right is None else ir.Shape(right)
    if wrong:
        for y in (y for node in nodes if any(subgraphs(node)) for y in node.outputs):
            y.shape = None
    return wrong


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


def _attention(node: ir.Node, inferred: Dims) -> Dims:
    """Correct the width of packed heads of a symbolic length: onnx takes it for 0."""
    return tuple(None if d == 0 else d for d in inferred)


_RIGHT = {"Attention": _attention, "DFT": _dft, "Einsum": _einsum}


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
