"""The types and shapes of a graph and its subgraphs, in one walk over its nodes in their order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import count
from typing import Any

import onnx_ir as ir

from onnxgrad.checks import check_limit
from onnxgrad.errors import ModelError
from onnxgrad.graph.by_onnx import (
    complete_shape,
    complete_types,
    correct_shape,
    infer_node,
    write_misread_defaults,
)
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.rewrite import ANY, rewrite
from onnxgrad.graph.traversal import all_nodes, conditional_nodes, subgraphs
from onnxgrad.operators import marks, operator_of
from onnxgrad.operators.outputs import (
    INTEGERS,
    DimArray,
    output_shape,
    output_types,
    result_elements,
    shape_by_elements,
)
from onnxgrad.operators.sequences import is_empty, mark_empty, shared_dims
from onnxgrad.operators.shapes import Dims, dims, is_stated, static


class Walk:
    """Infers the types and shapes of a graph, node by node, by the `Operator` records and by onnx.

    A length that stays unknown becomes a symbol, so that two values which share it are proven to
    have the same. Another walk of the same object infers only nodes that are new, or of which more
    is known than before.

    Attributes:
        elements: of vectors of few numbers or lengths, from which shapes are computed.
    """

    def __init__(self, graph: ir.Graph, functions: dict | None = None) -> None:
        self.main, self.functions = graph, functions or {}
        self.elements: dict[ir.Value, DimArray] = {}
        # `_known_types_and_shapes` of each node, when last inferred
        self._known: dict[ir.Node, list] = {}
        values = (y for node in all_nodes(graph) for y in node.outputs)
        used = {d for y in (*graph.inputs, *values) for d in dims(y) or ()}
        self._symbols = (f"unk__{i}" for i in count() if f"unk__{i}" not in used)
        self._is_in_branch = False  # whether it is in a branch, which may never run

    def infer(self, graph: ir.Graph) -> None:
        """Set types and shapes of the results of `graph` by the types and shapes of its inputs."""
        for x in graph.initializers.values():
            if x.const_value is not None:
                x.type = x.type or ir.TensorType(x.const_value.dtype)
                complete_shape(x, tuple(x.const_value.shape.numpy()))
        for node in graph:
            self._infer_if_changed(node)

    def infer_next(self, _op: Any, node: ir.Node) -> None:
        """Infer the types and shapes of the results of one node, after those of all nodes before
        it.

        It is a rewrite that does not apply. Nodes of subgraphs are inferred by onnx alone, which
        raises no error where a branch would never run.
        """
        if node.graph is self.main:
            self._infer_if_changed(node)
        elif any(y.type is None or y.shape is None for y in node.outputs):
            infer_node(node, self.main.opset_imports, self.elements, self.functions)

    def has_inferred(self, node: ir.Node) -> bool:
        """Return whether `node` was inferred before, even if more is known of its operands now."""
        return node in self._known

    def _known_types_and_shapes(self, node: ir.Node) -> list:
        """Return the types, shapes and known elements of all values that `node` and its subgraphs
        read or write.
        """
        nodes = [node]
        for body in subgraphs(node):
            nodes += all_nodes(body)
        return [
            (
                v,
                v.type,
                None if v.shape is None else v.shape.dims,
                self.elements[v].tolist() if v in self.elements else None,
            )
            for n in nodes
            for v in (*n.inputs, *n.outputs)
            if v is not None
        ]

    def _infer_if_changed(self, node: ir.Node) -> None:
        if node not in self._known or self._known[node] != self._known_types_and_shapes(node):
            self.infer_anew(node)
            self._known[node] = self._known_types_and_shapes(node)

    def infer_anew(self, node: ir.Node) -> None:
        """Infer the types and shapes of the outputs of a node, even if it was inferred before."""
        op_type = "" if node.domain else node.op_type
        if op_type == "If":
            self._infer_branches(node)
        elif op_type == "Loop":
            self._infer_loop(node)
        elif op_type == "Scan":
            self._infer_scan(node)
        elif op_type == "SequenceMap":
            self._infer_map(node)
        elif not (op_type and _infer_sequence_operator(node)):
            for body in subgraphs(node):
                self.infer(body)
            self._infer_tensor_results(node)
        complete_types(node)
        for y in node.outputs:
            shape = dims(y) or ()
            check_limit("rank", len(shape), f"result {y.name!r} has too many axes")
            if None in shape and isinstance(y.type, ir.TensorType):
                y.shape = ir.Shape([next(self._symbols) if d is None else d for d in shape])
        if op_type:
            # the elements may be of an iteration that assumed another shape
            self.elements.pop(node.outputs[0], None)
            found = result_elements(node, self.elements)
            self.elements |= {} if found is None else {node.outputs[0]: found}

    def _infer_tensor_results(self, node: ir.Node) -> None:
        if not node.domain:
            write_misread_defaults(node)
            self._infer_by_operator_records(node)  # first, as it is faster
        if all(y.type is not None and _has_stated_dims(dims(y)) for y in node.outputs):
            return
        known = dims(node.outputs[0])
        infer_node(node, self.main.opset_imports, self.elements, self.functions)
        if not node.domain:
            correct_shape(node, known)
            self._infer_by_operator_records(node)

    def _infer_by_operator_records(self, node: ir.Node) -> None:
        y, attributes = node.outputs[0], {a.name: a.value for a in node.attributes.values()}
        if _has_stated_dims(dims(y)):
            return
        try:
            shape = output_shape(node.op_type, node.inputs, attributes)
        except ModelError:
            if not self._is_in_branch:
                raise
            return
        complete_shape(y, shape)
        complete_shape(y, shape_by_elements(node, self.elements))
        if y.type is None and shape is not None and node.op_type != "CastLike":
            y.type = output_types(node.op_type, node.inputs, attributes, 1)[0]

    def _infer_branches(self, node: ir.Node) -> None:
        before, self._is_in_branch = self._is_in_branch, True
        branches = list(subgraphs(node))
        for branch in branches:
            self.infer(branch)
        self._is_in_branch = before
        for y, *ends in zip(node.outputs, *(b.outputs for b in branches), strict=True):
            known_type = next((v.type for v in ends if v.type is not None), None)
            _set_inferred(y, known_type, shared_dims(ends))

    def _infer_loop(self, node: ir.Node) -> None:
        """Infer a Loop: a state has the shape of its initial value, unless an iteration changes it.

        The shape of a sequence is the shape of its elements. If it is empty initially, they are the
        elements that the first iteration adds.
        """
        body, starts = node.attributes["body"].as_graph(), node.inputs[2:]
        n = len(starts)
        states, ends, results = body.inputs[2:], body.outputs[1 : 1 + n], node.outputs[:n]
        for start, state in zip(starts, states, strict=True):
            if start is not None and start.type is not None:
                state.type = start.type
                mark_empty(state, is_empty(start))
            state.shape = _to_ir_shape(_drop_unk_symbols(dims(start)))
        self.infer(body)
        # a sum, as `any` would stop at the first wrong state
        while sum(map(_correct_state_shape, states, ends)):
            for y in (y for inner in all_nodes(body) for y in inner.outputs):
                y.shape = None
            self.infer(body)
        for state, end, result in zip(states, ends, results, strict=True):
            if not isinstance(state.type, ir.TensorType | None):
                end.type = state.type
            result.type = state.type or end.type or result.type
            result.shape = state.shape
        _set_stacked_results(body.outputs[1 + n :], node.outputs[n:], None, ())

    def _infer_scan(self, node: ir.Node) -> None:
        body = node.attributes["body"].as_graph()
        n = len(node.inputs) - node.attributes["num_scan_inputs"].as_int()
        length = None
        for x, start in zip(body.inputs[:n], node.inputs[:n], strict=False):
            _set_inferred(x, None if start is None else start.type, dims(start))
        axes = node.attributes.get_ints("scan_input_axes", (0,) * len(node.inputs))
        for x, stack, axis in zip(body.inputs[n:], node.inputs[n:], axes, strict=False):
            shape = dims(stack)
            _set_inferred(x, None if stack is None else stack.type, None)
            if shape:
                axis %= len(shape)
                length = shape[axis] if length is None else length
                x.shape = ir.Shape([*shape[:axis], *shape[axis + 1 :]])
        self.infer(body)
        for y, rank in zip(body.outputs, body.meta.get(marks.DECLARED_RANKS, ()), strict=False):
            y.shape = ir.Shape([None] * rank) if y.shape is None and rank is not None else y.shape
        for y, start, end in zip(node.outputs, node.inputs[:n], body.outputs, strict=False):
            _set_inferred(y, end.type, _drop_unk_symbols(dims(end)))
            complete_shape(y, dims(start))
        axes = node.attributes.get_ints("scan_output_axes", ())
        _set_stacked_results(body.outputs[n:], node.outputs[n:], length, axes)

    def _infer_map(self, node: ir.Node) -> None:
        body = node.attributes["body"].as_graph()
        for x, given in zip(body.inputs, node.inputs, strict=True):
            if given is not None and given.type is not None:
                _set_inferred(x, ir.TensorType(given.type.dtype), _drop_unk_symbols(dims(given)))
        self.infer(body)
        for y, end in zip(node.outputs, body.outputs, strict=True):
            kind = None if end.type is None else ir.SequenceType(end.type)
            _set_inferred(y, kind, _drop_unk_symbols(dims(end)))


def _has_stated_dims(shape: Dims | None) -> bool:
    return shape is not None and all(map(is_stated, shape))


def _drop_unk_symbols(shape: Dims | None) -> Dims | None:
    """Return a shape without the symbols that inference made up: another iteration may have another
    length.
    """
    return None if shape is None else tuple(d if is_stated(d) else None for d in shape)


def _to_ir_shape(shape: Dims | None) -> ir.Shape | None:
    return None if shape is None else ir.Shape(shape)


def _set_inferred(value: ir.Value, value_type: ir.TypeProtocol | None, shape: Dims | None) -> None:
    """Set the type of `value`, and its unknown dimensions, to what was inferred."""
    value.type = value_type or value.type
    complete_shape(value, shape)


def _set_stacked_results(
    ends: Iterable[ir.Value],
    stacks: Iterable[ir.Value],
    length: int | str | None,
    axes: Sequence[int],
) -> None:
    """Set the types and shapes of the results of a Loop or Scan that stack a value of each
    iteration.
    """
    for i, (end, stack) in enumerate(zip(ends, stacks, strict=False)):
        shape = _drop_unk_symbols(dims(end))
        if shape is not None:
            axis = (axes[i] if axes else 0) % (len(shape) + 1)
            shape = (*shape[:axis], length, *shape[axis:])
        _set_inferred(stack, end.type, shape)


def _correct_state_shape(state: ir.Value, end: ir.Value) -> bool:
    """Correct the assumed shape of a state of a Loop; return whether it was wrong."""
    assumed, actual = _drop_unk_symbols(dims(state)), _drop_unk_symbols(dims(end))
    if assumed is None:
        if not is_empty(state) or is_empty(end):
            return False
        mark_empty(state, False)
        state.shape = _to_ir_shape(actual)
        return True
    if actual is None or len(actual) != len(assumed):
        state.shape = None
        return True
    proven = tuple(a if a == b else None for a, b in zip(assumed, actual, strict=True))
    state.shape = ir.Shape(proven)
    return proven != assumed


def _infer_sequence_operator(node: ir.Node) -> bool:
    """Infer the type and shape of the result of an operator on sequences or Optionals; return False
    for other nodes.
    """
    if "sequences" not in operator_of(node).traits:
        return False
    [y] = node.outputs
    attributes = {a.name: a.value for a in node.attributes.values()}
    if node.op_type == "SequenceEmpty":  # write the default, so that `set_precision` converts it
        node.attributes.setdefault("dtype", ir.AttrInt64("dtype", ir.DataType.FLOAT))
    value_type = output_types(node.op_type, node.inputs, attributes, 1)[0]
    if node.op_type == "Identity" and isinstance(value_type, ir.TensorType | None):
        return False
    first = node.inputs[0] if node.inputs else None
    adds_none = node.op_type in ("Identity", "SequenceErase")
    stays_empty = adds_none and first is not None and is_empty(first)
    mark_empty(y, stays_empty or node.op_type == "SequenceEmpty")
    _set_inferred(y, value_type, output_shape(node.op_type, node.inputs, attributes))
    return True


def fold_sizes(graph: ir.Graph, walk: Walk) -> None:
    """Replace results that static lengths determine by constants, and infer more shapes by them.

    An exporter writes `view(x.shape[0], 64, 8, 32)` as a chain of Shape, Gather, Unsqueeze and
    Concat. Its result becomes a constant, in which 0 or -1 stands for the symbolic dimension, if it
    is proven that onnxruntime infers the same one. In subgraphs, only conditions of an If become
    constants. The nodes that are no longer needed stay in the graph. `walk` has inferred the graph.
    """
    rewrite(graph, {("", ANY): [partial(fold_node, walk)]})


def fold_node(walk: Walk, op: Emit, node: ir.Node) -> None:
    """Let the readers of the result of `node` read a constant, if all of its elements are known.

    It is a rewrite that does not apply. Nodes in a branch of an If keep reading the result: where
    they cannot run, because the condition excludes it, onnxruntime may refuse the constant.
    """
    if not node.outputs:
        return
    y = node.outputs[0]
    elements = walk.elements.get(y)
    if elements is None:
        if op.outer is None and node.op_type == "Reshape" and not node.domain:
            _fold_reshape_target(op, node, walk.elements)
        return
    if y.dtype not in INTEGERS or not all(isinstance(e, int) for e in elements.flat):
        return
    assert y.dtype is not None
    number = op.const(elements.astype(y.dtype.numpy()))
    for reader, i in list(y.uses()):
        always_runs = op.outer is None and not _is_in_branch(op.graph, reader)
        if reader.op_type == "If" or always_runs:
            reader.replace_input_with(i, number)


def _is_in_branch(graph: ir.Graph, node: ir.Node) -> bool:
    """Return whether `node`, of `graph` or its subgraphs, is in a branch of an If node."""
    return node.graph is not graph and node in conditional_nodes(graph)


def _fold_reshape_target(op: Emit, node: ir.Node, elements: dict[ir.Value, DimArray]) -> None:
    """Write the shape of a Reshape as a constant, if its symbolic dimensions can be inferred."""
    x, target = node.inputs[:2]
    wanted, shape = None if target is None else elements.get(target), dims(x)
    if wanted is None or shape is None or None in wanted or static(tuple(wanted)) is not None:
        return
    if node.attributes.get_int("allowzero", 0) or 0 in wanted:
        return
    numbers = [
        d if isinstance(d, int) else 0 if i < len(shape) and shape[i] == d else -1
        for i, d in enumerate(wanted)
    ]
    if numbers.count(-1) > 1:
        return
    result = output_shape("Reshape", [x, op.const(numbers)], {})
    if result is not None and all(w in (-1, d) for w, d in zip(wanted, result, strict=True)):
        node.replace_input_with(1, op.const(numbers))
        node.outputs[0].shape = ir.Shape(result)
