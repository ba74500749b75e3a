"""Types and shapes of the values of a graph: by onnx, and by records where onnx infers nothing.

Many files state the shapes of the example that was exported, although their inputs have a symbolic
batch: a gradient that relies on a wrong length would be wrong silently. Inferred dimensions take
precedence. Beyond them, only stated symbols of inputs are used, if the rank was inferred, and for
outputs of the model all dimensions but a static batch. If their rank was not inferred, neither is a
symbolic batch: a Squeeze without axes removes one row. If inference contradicts one stated shape,
none is used.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from itertools import count
from math import prod

import onnx_ir as ir

from onnxgrad.checks import check_limit, current_limit
from onnxgrad.errors import ModelError
from onnxgrad.graph.by_onnx import complete_shape
from onnxgrad.graph.traversal import all_nodes, nodes_after, subgraphs
from onnxgrad.graph.walk import Walk
from onnxgrad.operators import marks
from onnxgrad.operators.shapes import Dim, Dims, dims, is_stated, rank, shape_text, static
from onnxgrad.reporting import warn_once

# Exporters write these for an unknown length: the same text twice does not mean the same length.
_PLACEHOLDERS = {"", "?", "-1", "None", "none", "unk", "unknown"}


def infer(
    model: ir.Model,
    trust_branches: bool = True,
    confirm: Callable[[ir.Value, Dims], Dims] | None = None,
    walk: Walk | None = None,
) -> Walk:
    """Set types and shapes of the values of `model`, in place; return the `Walk`, which a later
    call can continue.

    First, each input axis without a length or name gets its own symbol, so that no two lengths are
    assumed to be equal unless the model states it.

    Args:
        model: the model.
        trust_branches: whether to use the declared shapes of outputs that depend on an If, Loop or
            Scan. Exporters that trace a model declare the shape of the one branch they have traced.
        confirm: returns what holds of the declared shape of an output whose shape is not inferred.
        walk: the walk of an earlier call: only nodes that have changed since are inferred again.

    Raises:
        ModelError: a tensor has too many axes, or more elements than 64 bits count, or a constant
            too many: see `limits`.
    """
    inputs = {d for x in model.graph.inputs for d in dims(x) or ()}
    results = [y for y in model.graph.outputs if y.producer() is not None]
    declared = {y: _drop_repeated_symbols(y, inputs) for y in results}
    # declared shapes may be wrong, or may have symbols for lengths that can be inferred
    for y in declared:
        y.shape = None
    nodes = all_nodes(model.graph)
    _remove_declared_shapes(n for n in nodes if walk is None or not walk.has_inferred(n))
    _name_input_axes(model.graph)
    is_first, walk = walk is None, walk or Walk(model.graph, model.functions)
    walk.infer(model.graph)
    if is_first:
        _check_element_counts([*model.graph.inputs, *(y for node in nodes for y in node.outputs)])
    _check_constant_folding(nodes)
    branching = [] if trust_branches else [n for n in nodes if any(subgraphs(n))]
    untrusted = {y for n in branching for y in n.outputs}
    if untrusted:
        untrusted.update(y for n in nodes_after(nodes, untrusted) for y in n.outputs)
    is_read = False
    for y, shape in declared.items():
        if shape is not None and y not in untrusted and _extends_shape(shape, dims(y)):
            shape = shape if confirm is None else confirm(y, shape)
            complete_shape(
                y, tuple(None if d in _PLACEHOLDERS or not is_stated(d) else d for d in shape)
            )
            is_read |= bool(y.uses())
    if is_read:  # nodes read the completed value: their shapes may follow from it
        walk.infer(model.graph)
    return walk


def name_rows(graph: ir.Graph, symbol: str, exempt: Collection[str] | None = None) -> None:
    """Name the first axis of inputs `symbol`, except where its length is static.

    None for `exempt`: of all inputs, whatever they state. Otherwise not of the inputs with these
    names, and where inputs state different symbols, only the inputs that state none.
    """
    inputs = [x for x in graph.inputs if dims(x) and x.name not in (exempt or ())]
    firsts = {x: (dims(x) or (None,))[0] for x in inputs}
    rows = {d for d in firsts.values() if isinstance(d, str) and d not in _PLACEHOLDERS}
    if exempt is not None and len(rows) > 1:
        firsts, rows = {x: d for x, d in firsts.items() if d not in rows}, set()
    for value in _inputs_and_results(graph):
        shape = dims(value)
        if shape and not rows.isdisjoint(shape):
            value.shape = ir.Shape([symbol if d in rows else d for d in shape])
    graph.meta[marks.ROW_SYMBOLS] = sorted(rows)
    for x, first in firsts.items():
        if not isinstance(first, int):
            x.shape = ir.Shape([symbol, *(dims(x) or ())[1:]])


def record_scan_ranks(nodes: Iterable[ir.Node]) -> None:
    """Record the declared ranks of the outputs of the bodies of Scan nodes, for inference."""
    for node in nodes:
        if (node.domain, node.op_type) == ("", "Scan"):
            body = node.attributes["body"].as_graph()
            body.meta[marks.DECLARED_RANKS] = [rank(y) for y in body.outputs]


def _remove_declared_shapes(nodes: Iterable[ir.Node]) -> None:
    """Remove the declared shapes of inputs and outputs of subgraphs: exporters write wrong ones."""
    for node in nodes:
        vectors = [x for graph in subgraphs(node) for x in graph.inputs[:2] if dims(x) == (1,)]
        for graph in subgraphs(node):
            for value in (*graph.inputs, *graph.outputs):
                value.shape = None
        if (node.domain, node.op_type) == ("", "Loop"):
            inputs = node.attributes["body"].as_graph().inputs
            for x, dtype in zip(inputs, (ir.DataType.INT64, ir.DataType.BOOL), strict=False):
                x.shape, x.dtype = ir.Shape((1,) if x in vectors else ()), dtype


def _name_input_axes(graph: ir.Graph) -> None:
    """Give each input axis without a length or name its own symbol, and drop placeholders."""
    shapes = {v: shape for v in _inputs_and_results(graph) if (shape := dims(v)) is not None}
    symbols = {d for shape in shapes.values() for d in shape}
    fresh = (f"dim_{i}" for i in count() if f"dim_{i}" not in symbols)
    inputs = set(graph.inputs)
    for value, shape in shapes.items():
        if static(shape) is not None:
            continue
        if value in inputs and not isinstance(value.type, ir.TensorType):
            value.shape = ir.Shape([d if isinstance(d, int) else None for d in shape])
            continue  # the elements of a sequence may differ in their symbolic dimensions
        named = [None if d in _PLACEHOLDERS else d for d in shape]
        if value in inputs:
            named = [next(fresh) if d is None else d for d in named]
        value.shape = ir.Shape(named)


def _check_element_counts(values: Iterable[ir.Value]) -> None:
    """Raise a ModelError if the number of elements of a value does not fit into 64 bits."""
    for value in values:
        shape = dims(value) or ()
        if prod(d for d in shape if isinstance(d, int)) >= 1 << 63:
            node = value.producer()
            by = "" if node is None else f", the output of {node.op_type} (node {node.name!r}),"
            raise ModelError(
                f"{value.name!r}{by} has the shape {shape_text(shape)}, of more elements than 64 "
                "bits count: correct the shapes of the model"
            )


def _check_constant_folding(nodes: Iterable[ir.Node]) -> None:
    """Raise a ModelError if nodes compute a large tensor from small constants, as onnxruntime would
    when it loads the model.
    """
    sizes: dict[ir.Value, int] = {}  # element counts of constants, also of computed ones
    for node in nodes:
        inputs = [x for x in node.inputs if x is not None]
        for x in inputs:
            if x.const_value is not None and not x.is_graph_input():
                sizes.setdefault(x, x.const_value.size)
        if not inputs or any(x not in sizes for x in inputs):
            continue
        for y in node.outputs:
            shape = static(dims(y))
            if shape is None:
                continue
            sizes[y] = prod(shape)
            if sizes[y] > max(current_limit("constant_elements"), sum(sizes[x] for x in inputs)):
                what = f"{node.op_type} (node {node.name!r}, output {y.name!r})"
                check_limit("constant_elements", sizes[y], f"{what} computes a large constant")


def _drop_repeated_symbols(y: ir.Value, inputs: Container[Dim]) -> Dims | None:
    """Return the declared shape of an output, without symbols that no input has and that several
    axes share.

    Exporters use one symbol for lengths that differ.
    """
    shape = dims(y) or ()
    repeated = {d for d in shape if isinstance(d, str) and is_stated(d) and shape.count(d) > 1}
    repeated = {d for d in repeated if d not in inputs and d not in _PLACEHOLDERS}
    if not repeated:
        return dims(y)
    lengths = ", ".join(sorted(map(repr, repeated)))
    warn_once(
        f"the output {y.name!r} states the length {lengths} for several axes, which no input has: "
        "the length is ignored; to state it, name each axis differently"
    )
    return tuple(None if d in repeated else d for d in shape)


def _extends_shape(declared: Dims, inferred: Dims | None) -> bool:
    """Return whether a declared shape has dimensions that the inferred shape lacks, and the same
    rank.
    """
    if inferred is None or len(inferred) != len(declared):
        return inferred is None
    pairs = zip(declared, inferred, strict=True)
    return any(d is not None and not is_stated(i) for d, i in pairs)


def _inputs_and_results(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    for node in graph:
        yield from node.outputs


def infer_file(
    model: ir.Model,
    trust_branches: bool = True,
    confirm: Callable[[ir.Value, Dims], Dims] | None = None,
) -> Walk:
    """Infer types and shapes as `infer` does, for a model from a file, whose stated shapes may be
    wrong.
    """
    stated = _remove_stated_shapes(model.graph)

    def confirm_and_store(y: ir.Value, shape: Dims) -> Dims:
        if confirm is not None:
            stated[y] = shape = confirm(y, shape)
        return shape

    walk = infer(model, trust_branches, confirm_and_store)
    if _complete_by_stated_symbols(model.graph, stated):
        infer(model, trust_branches, walk=walk)
    return walk


def _remove_stated_shapes(graph: ir.Graph) -> dict[ir.Value, Dims]:
    """Remove the shapes of the results of nodes, in place; return the removed shapes of values of
    `graph`.

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


def _complete_by_stated_symbols(graph: ir.Graph, stated: Mapping[ir.Value, Dims]) -> bool:
    """Set dimensions that were not inferred to the symbols that the model states; return whether to
    infer again.

    Inference runs again if a node reads a dimension that has changed. If a stated shape is
    contradicted, the shapes of the outputs of the graph are removed instead.
    """
    named = (d for x in graph.inputs for d in dims(x) or ())
    symbols = {d for d in named if isinstance(d, str) and is_stated(d)}
    inferred = {y: (known, shape) for y, shape in stated.items() if (known := dims(y)) is not None}

    def is_decisive(p: Dim, d: Dim) -> bool:
        return all(isinstance(length, int) or length in symbols for length in (p, d))

    wrong = {y: both for y, both in inferred.items() if _shapes_contradict(*both, is_decisive)}
    if wrong:
        _warn_of_wrong_shapes(wrong)
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


def _warn_of_wrong_shapes(wrong: Mapping[ir.Value, tuple[Dims, Dims]]) -> None:
    """Warn of values whose stated rank or length is wrong, not only the symbol of a length."""
    listed = [
        f"of {y.name!r} {shape_text(shape)}, not {shape_text(proven)}"
        for y, (proven, shape) in wrong.items()
        if _shapes_contradict(proven, shape, lambda _, d: isinstance(d, int))
    ]
    if listed:
        more = f", and of {len(listed) - 3} more values others" if len(listed) > 3 else ""
        warn_once(
            "the file states shapes that its nodes do not compute, which are ignored: "
            f"{'; '.join(listed[:3])}{more}"
        )


def _has_no_inferred_rank(y: ir.Value) -> bool:
    """Return whether the rank of `y` cannot be inferred: an operand of its node has an unknown
    rank.
    """
    node = y.producer()
    return node is not None and any(x is not None and rank(x) is None for x in node.inputs)


def _shapes_contradict(proven: Dims, stated: Dims, is_decisive: Callable[[Dim, Dim], bool]) -> bool:
    """Return whether two shapes differ in rank, or in two dimensions that cannot be equal by
    `is_decisive`.
    """
    pairs = zip(proven, stated, strict=False)
    return len(proven) != len(stated) or any(p != d and is_decisive(p, d) for p, d in pairs)
