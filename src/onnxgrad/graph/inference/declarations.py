"""The shapes that a model states for its results, used as far as inference does not differ.

Many files state the shapes of the example that was exported, although their inputs have a symbolic
batch: a gradient that relies on a wrong length would be wrong silently. Inferred dimensions take
precedence. Beyond them, only stated symbols of inputs are used, if the rank was inferred, and for
outputs of the model all dimensions but a static batch. If their rank was not inferred, neither is a
symbolic batch: a Squeeze without axes removes one row. If inference contradicts one stated shape,
none is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx_ir as ir

from onnxgrad.graph.inference.infer import infer
from onnxgrad.graph.inference.walk import Walk
from onnxgrad.graph.traversal import all_nodes
from onnxgrad.operators.shapes import Dim, Dims, dims, is_stated, lengths, rank
from onnxgrad.reporting import warn_once


def infer_file(
    model: ir.Model,
    trust_branches: bool = True,
    confirm: Callable[[ir.Value, Dims], Dims] | None = None,
) -> Walk:
    """Infer types and shapes as `infer` does, of a model that may state wrong ones."""
    stated = _forget_stated(model.graph)

    def confirmed(y: ir.Value, shape: Dims) -> Dims:
        if confirm is not None:
            stated[y] = shape = confirm(y, shape)
        return shape

    walk = infer(model, trust_branches, confirmed)
    if _complete_by_stated(model.graph, stated):
        infer(model, trust_branches, walk=walk)
    return walk


def _forget_stated(graph: ir.Graph) -> dict[ir.Value, Dims]:
    """Remove the shapes of the results of nodes, in place; return the shapes of the main graph.

    Results of operators outside the standard domain keep their rank, and outputs of the main graph
    their shape, without the length of axis 0 if the batch is symbolic.
    """
    stated = {}
    batched = any(not isinstance(d, int) for x in graph.inputs for d in (dims(x) or ())[:1])
    for node in all_nodes(graph):
        for y in node.outputs:
            shape = dims(y)
            if shape is not None and node.graph is graph:
                stated[y] = shape
            if y in graph.outputs:
                if shape and isinstance(shape[0], int) and batched:
                    y.shape = ir.Shape([None, *shape[1:]])
                continue
            n = rank(y) if node.domain else None
            y.shape = None if n is None else ir.Shape([None] * n)
    return stated


def _complete_by_stated(graph: ir.Graph, stated: Mapping[ir.Value, Dims]) -> bool:
    """Set dimensions that were not inferred to stated symbols; return whether to infer again.

    Inference runs again if a node reads a dimension that has changed. If a stated shape is
    contradicted, the shapes of the outputs of the graph are removed instead.
    """
    named = (d for x in graph.inputs for d in dims(x) or ())
    symbols = {d for d in named if isinstance(d, str) and is_stated(d)}
    inferred = {y: (known, shape) for y, shape in stated.items() if (known := dims(y)) is not None}

    def is_proof(p: Dim, d: Dim) -> bool:
        return all(isinstance(length, int) or length in symbols for length in (p, d))

    wrong = {y: shapes for y, shapes in inferred.items() if _are_contradictory(*shapes, is_proof)}
    if wrong:
        _warn_of_stated(wrong)
        results = [y for y in graph.outputs if y.producer() is not None]
        for y in results:
            y.shape = None
        return bool(results)
    changed = False
    unproven = [y for y in graph.outputs if _has_no_inferred_rank(y)]
    for y in unproven:
        if (shape := dims(y)) and isinstance(shape[0], str):
            y.shape, changed = ir.Shape([None, *shape[1:]]), changed or bool(y.uses())
    for y, (proven, shape) in inferred.items():
        if y in unproven:
            continue
        pairs = zip(proven, shape, strict=True)
        merged = [d if d in symbols and not is_stated(p) else p for p, d in pairs]
        if tuple(merged) != proven:
            y.shape, changed = ir.Shape(merged), changed or bool(y.uses())
    return changed


def _warn_of_stated(wrong: Mapping[ir.Value, tuple[Dims, Dims]]) -> None:
    """Warn of values whose stated rank or length is wrong, not only the symbol of a length."""
    listed = [
        f"of {y.name!r} {lengths(shape)}, not {lengths(proven)}"
        for y, (proven, shape) in wrong.items()
        if _are_contradictory(proven, shape, lambda _, d: isinstance(d, int))
    ]
    if listed:
        more = f", and of {len(listed) - 3} more values others" if len(listed) > 3 else ""
        warn_once(
            "the file states shapes that its nodes do not compute, which are ignored: "
            f"{'; '.join(listed[:3])}{more}"
        )


def _has_no_inferred_rank(y: ir.Value) -> bool:
    """Return whether only the model states the shape of `y`: an operand of its node has no rank."""
    node = y.producer()
    return node is not None and any(x is not None and rank(x) is None for x in node.inputs)


def _are_contradictory(proven: Dims, stated: Dims, is_proof: Callable[[Dim, Dim], bool]) -> bool:
    """Return whether two shapes differ in rank, or in dimensions whose difference is a proof."""
    pairs = zip(proven, stated, strict=False)
    return len(proven) != len(stated) or any(p != d and is_proof(p, d) for p, d in pairs)
