"""The check of inputs whose elements are indices into a tensor of static length.

For an index out of range, onnxruntime raises without naming the row, or reads other memory on some
devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.graph.traversal import subgraphs
from onnxgrad.operators import ARITHMETIC, OF_SHAPES, REORDERS, SELECTS
from onnxgrad.operators.shapes import constant, dims, static
from onnxgrad.runtime.device import CPU
from onnxgrad.runtime.predictor import Predictor
from onnxgrad.runtime.session import load_session

_MOVES = REORDERS | SELECTS
_COMPUTES = ARITHMETIC | OF_SHAPES | {"Where"}  # operators that compute lengths and positions

_NUMBERS = frozenset(
    ir.DataType[name]
    for name in "BOOL INT8 INT16 INT32 INT64 UINT8 UINT16 UINT32 UINT64 FLOAT DOUBLE".split()
)
_EXACT = (ir.DataType.INT32, ir.DataType.INT64, ir.DataType.FLOAT, ir.DataType.DOUBLE)
_CLASS_LOSSES = ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")
_LARGE = 100_000  # elements of a constant above which it does not hold positions


@dataclass(frozen=True)
class IndexedTable:
    """A tensor of the model, such as an embedding table, into which an input holds indices; the
    lengths of its axes are static.

    - `name`: name of the tensor; `lengths`: lengths of the axes for the numbers of an index.
    - `negative`: whether -1 is the last entry; `ignored`: an index that selects nothing.
    - `selection`: which elements of the input are used as indices, None for all.
    """

    name: str
    lengths: tuple[int, ...]
    negative: bool = True
    ignored: int | None = None
    selection: IndexSelection | None = None

    def __str__(self) -> str:
        n = self.lengths[0]
        first = -n if self.negative else 0
        ends = f"from {first} to {n - 1}"
        if len(self.lengths) > 1:
            ends = f"within its shape {list(self.lengths)}"
        return f"indices into {self.name!r}, of length {n}, {ends}"

    def mask_outside(self, array: np.ndarray, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return a mask of the elements of the input's array that are indices out of range of the
        tensor.

        `arrays` has the arrays of all inputs, by name.
        """
        array = np.trunc(array) if array.dtype.kind == "f" else array  # as a Cast does
        if self.selection is None:
            return self._out_of_range_mask(array, self.lengths[0])
        wrong = np.zeros(array.size, bool)
        positions = self.selection.selected_positions(array, arrays)
        if positions is None:  # the run of the whole model will raise
            return wrong.reshape(array.shape)
        flat, several = array.reshape(-1), len(self.lengths) > 1
        for i, length in enumerate(self.lengths):
            read = positions[..., i] if several else positions
            wrong[read[self._out_of_range_mask(flat[read], length)]] = True
        return wrong.reshape(array.shape)

    def _out_of_range_mask(self, values: np.ndarray, length: int) -> np.ndarray:
        wrong = (values < (-length if self.negative else 0)) | (values >= length)
        return wrong if self.ignored is None else wrong & (values != self.ignored)


class IndexSelection:
    """A part of the model that selects, from the elements of an input, the elements that are used
    as indices.

    Where the input declares a number of rows, `rows`, the part runs on as many rows at a time.
    """

    def __init__(self, proto: ModelProto, source: str, rows: int | None) -> None:
        self.proto, self.source, self.rows = proto, source, rows

    @cached_property
    def _index_predictor(self) -> Predictor:
        return Predictor(load_session(self.proto, providers=CPU.providers))

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_index_predictor"}

    def selected_positions(
        self, array: np.ndarray, arrays: Mapping[str, np.ndarray]
    ) -> np.ndarray | None:
        """Return the flat positions, in the input's array, of the elements that are used as
        indices; None if the nodes fail.
        """
        fed = {**arrays, self.source: np.arange(array.size).reshape(array.shape)}
        predictor, size = self._index_predictor, self.rows
        try:
            if size is None:
                return predictor.compute(fed)[0]
            pieces = [
                predictor.compute({n: fed[n][i : i + size] for n in predictor.inputs})[0]
                for i in range(0, len(array), size)
            ]
            return np.concatenate(pieces)
        except Exception:  # errors of several types, which the run of the whole model raises again
            return None


TablesByInput = dict[str, tuple[IndexedTable, ...]]


def indexed_tables(graph: ir.Graph, inputs: Sequence[ir.Value]) -> TablesByInput:
    """Return {input: tensors of static length into which the input's elements are indices}.

    Indices that are computed from elements of an input are left out.
    """
    by_input = {
        str(x.name): tuple(_find_indexed_tensors(graph, x)) for x in inputs if x.dtype in _NUMBERS
    }
    return {name: found for name, found in by_input.items() if found}


def _find_indexed_tensors(graph: ir.Graph, x: ir.Value) -> Iterator[IndexedTable]:
    """Yield the tensors into which elements of the input `x` are indices."""
    yielded: list[IndexedTable] = []
    for index, node, operand, whole in _nodes_reading_elements(x):
        table = _indexed_table(node, operand)
        if table is None or (whole and table in yielded):
            continue
        if not whole or len(table.lengths) > 1:
            selection = _index_selection(graph, x, index)
            if selection is None:
                continue
            table = replace(table, selection=selection)
        yielded.append(table)
        yield table


def _nodes_reading_elements(x: ir.Value) -> Iterator[tuple[ir.Value, ir.Node, int, bool]]:
    """Yield (value, node, operand index, whether the value has all elements of `x`) for each node
    that reads elements of `x`.
    """
    reached: dict[ir.Value, bool] = {x: True}
    waiting = [x]
    for v in waiting:  # the loop appends to the list
        for node, operand in v.uses():
            yield v, node, operand, reached[v]
            for y, whole in _outputs_with_moved_elements(node, operand):
                if y not in reached:
                    reached[y] = reached[v] and whole
                    waiting.append(y)


def _outputs_with_moved_elements(node: ir.Node, operand: int) -> Iterator[tuple[ir.Value, bool]]:
    """Yield (output, whether it has all elements of the operand) for a node that only moves
    elements.
    """
    if node.domain:
        return
    if node.op_type in _MOVES and (operand == 0 or node.op_type == "Concat"):
        if node.op_type != "Cast" or node.outputs[0].dtype in _EXACT:
            yield from ((y, node.op_type in REORDERS) for y in node.outputs)
    elif node.op_type in ("Loop", "Scan"):
        for body in subgraphs(node):
            if operand < len(body.inputs) and (node.op_type == "Scan" or operand > 1):
                yield body.inputs[operand], True


def _indexed_table(node: ir.Node, operand: int) -> IndexedTable | None:
    """Return the tensor into which an operand of a node holds indices; None if the operand holds no
    indices.
    """
    kind, size = node.op_type, node.attributes.get_int
    if node.domain or not node.inputs:
        return None
    if kind == "OneHot" and operand == 0:
        depth = constant(node.inputs[1])
        name = f"the depth of {node.op_type} {node.name or node.outputs[0].name}"
        return None if depth is None else IndexedTable(name, (int(depth.item()),))
    data, shape = node.inputs[0], dims(node.inputs[0])
    if operand != 1 or data is None or not shape:
        return None
    if kind in ("Gather", "GatherElements", "ScatterElements"):
        lengths = shape[size("axis", 0) % len(shape) :][:1]
    elif kind in ("GatherND", "ScatterND"):
        count = (dims(node.inputs[1]) or (None,))[-1]
        first = size("batch_dims", 0)
        lengths = shape[first : first + count] if isinstance(count, int) else ()
    elif kind in _CLASS_LOSSES:
        lengths = shape[1:2]
    else:
        return None
    static_lengths = static(lengths)
    if not static_lengths:
        return None
    if kind in _CLASS_LOSSES:
        ignored = node.attributes.get("ignore_index")
        return IndexedTable(
            _indexed_tensor_name(data),
            static_lengths,
            False,
            None if ignored is None else ignored.as_int(),
        )
    return IndexedTable(_indexed_tensor_name(data), static_lengths)


def _indexed_tensor_name(data: ir.Value) -> str:
    """Return the name of a tensor; for a cast or transposed copy of a weight, the name of the
    weight.
    """
    v = data
    while (node := v.producer()) is not None and node.op_type in ("Cast", "Identity", "Transpose"):
        if node.inputs[0] is None:
            break
        v = node.inputs[0]
    return str((v if v.producer() is None else data).name)


def _index_selection(graph: ir.Graph, x: ir.Value, index: ir.Value) -> IndexSelection | None:
    """Return the part of the graph that selects the elements `index` of `x`; None if `index` holds
    newly computed numbers.
    """
    path: list[ir.Node] = []
    on_path, v = {x, index}, index
    while v is not x:
        node = v.producer()
        if node is None or node.graph is not graph or node.op_type == "Concat":
            return None
        path.append(node)
        assert node.inputs[0] is not None
        on_path.add(v := node.inputs[0])
    nodes, values = set(path), {x}
    waiting = [v for node in path for v in node.inputs[1:] if v is not None]
    while waiting:
        v = waiting.pop()
        node = v.producer()
        if v in on_path or (v.const_value is not None and v.const_value.size > _LARGE):
            return None
        if node is None:
            values.add(v)
        elif node not in nodes:
            if node.domain or node.op_type not in _MOVES | _COMPUTES:
                return None
            nodes.add(node)
            shape = node.op_type in ("Shape", "Size")
            waiting += [u for u in node.inputs if u is not None and not (shape and u in on_path)]
    rows = (dims(x) or (None,))[0]
    inputs = [v for v in values if v.const_value is None]
    proto = _index_position_model(graph, x, index, path, sorted(inputs, key=lambda v: str(v.name)))
    return IndexSelection(proto, str(x.name), rows if isinstance(rows, int) and rows > 0 else None)


def _index_position_model(
    graph: ir.Graph, x: ir.Value, index: ir.Value, path: list[ir.Node], inputs: list[ir.Value]
) -> ModelProto:
    """Return a model that, fed with the positions of the elements of `x`, computes the positions of
    the elements in `index`.
    """
    part = ir.convenience.extract(graph, inputs, [index])
    moved = {y.name for node in path for y in node.outputs}
    for node in part:
        for y in node.outputs:  # types and shapes were inferred for elements, not for positions
            y.type = y.shape = None
        if node.op_type == "Cast" and node.outputs[0].name in moved:
            node.op_type = "Identity"
            node.attributes.clear()
    for v in (*part.inputs, *part.outputs):
        v.shape = None
        if v.name in (x.name, index.name):
            v.type = ir.TensorType(ir.DataType.INT64)  # `v.dtype` would change `graph`, too
    return ir.to_proto(ir.Model(part, ir_version=8))
