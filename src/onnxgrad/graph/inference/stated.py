"""The shapes that a model states of its results, and how far they can be believed.

Many files state those of the example that was exported, after their inputs were given a symbolic
batch: a gradient built on a length that the model does not keep would be wrong in silence. What
inference proves comes first. Of the rest, only symbols of inputs are believed, where the rank is
proven; and of outputs all but the length of a batch. Nothing at all is believed in a model of which
one statement is proven wrong.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from onnxgrad.graph.shapes import Dims, dims, is_stated, rank


def forget_stated(graph: ir.Graph) -> dict[ir.Value, Dims]:
    """Forget the shapes of the results of nodes; return those of the main graph.

    Of the results of operators that inference does not know, the rank stays, and of the outputs of
    the main graph all that is credible.
    """
    stated = {}
    batched = any(not isinstance(d, int) for x in graph.inputs for d in (dims(x) or ())[:1])
    for node in graph.all_nodes():
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


def complete_stated(graph: ir.Graph, stated: Mapping[ir.Value, Dims]) -> bool:
    """Fill in lengths that inference left open; tell whether to infer once more."""
    symbols = {d for x in graph.inputs for d in dims(x) or () if isinstance(d, str)}
    if any(_contradict(dims(y), shape, symbols) for y, shape in stated.items()):
        results = [y for y in graph.outputs if y.producer() is not None]
        for y in results:
            y.shape = None
        return bool(results)
    news = False
    for y, shape in stated.items():
        proven = dims(y)
        if proven is None:
            continue
        pairs = zip(proven, shape, strict=True)
        merged = [d if d in symbols and not is_stated(p) else p for p, d in pairs]
        if tuple(merged) != proven:
            y.shape, news = ir.Shape(merged), True
    return news


def _contradict(proven: Dims | None, stated: Dims, symbols: set[str]) -> bool:
    """Tell whether two shapes of one value cannot both hold for every length of the inputs."""
    if proven is None:
        return False
    known = [
        (p, d)
        for p, d in zip(proven, stated, strict=False)
        if all(isinstance(v, int) or v in symbols for v in (p, d))
    ]
    return len(proven) != len(stated) or any(p != d for p, d in known)
