"""`summary`: a table of the layers of a model, with their parameters and multiply-adds.

A multiply-add is a product that is added to a sum.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from math import ceil, prod

import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.errors import join_first, printable, unknown
from onnxgrad.graph.infer import infer
from onnxgrad.graph.traversal import reads, subgraphs
from onnxgrad.graph.walk import fold_sizes
from onnxgrad.model import external
from onnxgrad.model.convert import to_ir
from onnxgrad.model.feeds import make_defaults_constants
from onnxgrad.model.local_functions import inline_functions, raise_opset
from onnxgrad.model.read import ModelLike
from onnxgrad.operators import VIEWS, operator_of
from onnxgrad.operators.shapes import Dims, UnknownShapeError, constant, dims, static
from onnxgrad.plot.parts import operator_count_texts
from onnxgrad.reporting import html_table
from onnxgrad.training.parameters.aliases import module_of
from onnxgrad.training.parameters.choice import trainable
from onnxgrad.training.parameters.equal_constants import separate_merged

_NUMBERS = {
    "parameters": "parameters",
    "trainable": "trainable",
    "mult-adds": "multiply_adds",
    "act. bytes": "activation_bytes",
}
_ONNX_DOMAINS = ("", "ai.onnx", "ai.onnx.ml")


@dataclass(frozen=True)
class LayerRow:
    """A row of `summary`: the nodes of one module, or one node.

    Attributes:
        name: path of the module, such as "encoder.layer.0"; or name or operator of the node.
        operators: `{operator: count}` of its nodes.
        shapes: shapes of the results that other layers read or the model returns; None where the
            rank is unknown.
        parameters: numbers in its weights. A weight of several layers counts in the first.
        trainable: numbers in its weights that train.
        multiply_adds: one for each product of two numbers in matrix products, convolutions,
            recurrent layers and attention, and one for each element a bias is added to.
        activation_bytes: bytes of all results of its nodes, without views.
        output_bytes: bytes of the results of `shapes`.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]> f (float[3,2] x) => (float[3,1] y)
        ...     <float[2,1] w = {1.0, 2.0}> { y = MatMul(x, w) }''')
        >>> [layer] = og.summary(model)
        >>> layer.shapes, layer.parameters, layer.multiply_adds, layer.output_bytes
        (((3, 1),), 2, 6, 12)
    """

    name: str
    operators: Mapping[str, int]
    shapes: tuple[Dims | None, ...]
    parameters: int
    trainable: int
    multiply_adds: int
    activation_bytes: int
    output_bytes: int


class Summary(list[LayerRow]):
    """The layers of a model, as `summary` returns them; it prints as a table, also in notebooks.

    Attributes:
        lengths: `{symbolic dimension: length}` that shapes and counts assume.
        uncounted: operators and values that the numbers leave out, one sentence each.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20, "acme": 1]>
        ...     f (float[N,2] x) => (float[N,2] z) { y = Exp(x) z = acme.Foo(y) }''')
        >>> table = og.summary(model, lengths={"N": 3})
        >>> table.lengths, table.uncounted[0]
        ({'N': 3}, "Foo (node ''): an operator of 'acme'")
    """

    def __init__(
        self, layers: Iterable[LayerRow], lengths: Mapping[str, int], uncounted: Iterable[str]
    ) -> None:
        super().__init__(layers)
        self.lengths, self.uncounted = dict(lengths), tuple(uncounted)

    def total(self, field: str) -> int:
        """Return the sum of a numeric attribute of `LayerRow`, such as "multiply_adds"."""
        names = [f.name for f in fields(LayerRow) if f.type == "int"]
        if field not in names:
            raise unknown("field", field, names)
        return sum(getattr(layer, field) for layer in self)

    def _table_cells(self) -> list[list[str]]:
        rows = []
        for layer in self:
            operators = join_first(operator_count_texts(layer.operators), 3)
            texts = (layer.name, operators, join_first([*map(_shape_text, layer.shapes)], 2))
            numbers = (getattr(layer, name) for name in _NUMBERS.values())
            rows.append([*map(printable, texts), *(f"{n:,}" if n else "-" for n in numbers)])
        total = ["total", "", "", *(f"{self.total(name):,}" for name in _NUMBERS.values())]
        return [["layer", "operators", "output", *_NUMBERS], *rows, total]

    def _note_lines(self) -> list[str]:
        assumed = ", ".join(f"{printable(name)}={n}" for name, n in self.lengths.items())
        notes = [f"for {assumed}"] if assumed else []
        return [*notes, *(f"not counted: {printable(text)}" for text in self.uncounted)]

    def __str__(self) -> str:
        cells = self._table_cells()
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join(
                text.rjust(width) if i > 2 else text.ljust(width)
                for i, (text, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in cells
        ]
        rule = "-" * max(map(len, lines))
        return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1], *self._note_lines()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head, *rows = self._table_cells()
        return html_table(head, rows, self._note_lines())


def summary(
    model: ModelLike,
    *,
    lengths: Mapping[str, int] | None = None,
    depth: int | None = None,
    by_node: bool = False,
    train: str | Iterable[str] | None = None,
    freeze: str | Iterable[str] = (),
) -> Summary:
    """Return a table of the layers of `model`: shapes, parameters, multiply-adds and activations.

    A layer is a module, whose path PyTorch's and TensorFlow's exporters write into names or
    metadata of its nodes, or a node outside of modules. Nodes that compute from constants only are
    left out. Parameters are the constants that are weights by their role; running statistics and
    constants of formulas are none.

    Args:
        model: model, serialized model or path; not modified.
        lengths: `{symbolic dimension: length}`, such as `{"batch": 8}`; 1 for dimensions that it
            leaves out, which the table states below its last row.
        depth: joins modules whose paths have the first `depth` parts in common; None joins none.
        by_node: a row for each node.
        train, freeze: which parameters train, as in `trainable`.

    Raises:
        ValueError: an unknown symbolic dimension, or a length or depth below 1.
        ModelError: `model` cannot be read.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]> f (float[N,2] x) => (float[N,1] y)
        ...     <float[2,1] w = {1.0, 2.0}> { h = MatMul(x, w) y = Tanh(h) }''')
        >>> print(og.summary(model, lengths={"N": 8}))
        layer   operators  output  parameters  trainable  mult-adds  act. bytes
        -----------------------------------------------------------------------
        MatMul  MatMul     [8, 1]           2          2         16          32
        Tanh    Tanh       [8, 1]           -          -          -          32
        -----------------------------------------------------------------------
        total                               2          2         16          64
        for N=8
    """
    if depth is not None and depth < 1:
        raise ValueError(f"depth must be at least 1, not {depth}")
    proto = separate_merged(model)
    graph, assumed = _static_graph(proto, lengths or {})
    layers: dict[str, list[ir.Node]] = defaultdict(list)
    count: Counter[str] = Counter()
    for node in _nodes_with_varying_results(graph):
        name = "" if by_node else module_of(node.name or "", node.metadata_props)
        if name:
            name = ".".join(name.split(".")[:depth])
        else:
            name = node.name or node.op_type
            count[name] += 1
            name = f"{name}_{count[name]}" if count[name] > 1 else name
        layers[name].append(node)
    return _LayerCounts(graph, trainable(proto, train, freeze)).count_layers(layers, assumed)


def _static_graph(proto: ModelProto, lengths: Mapping[str, int]) -> tuple[ir.Graph, dict[str, int]]:
    """Return (graph with inlined functions and inferred shapes, {symbolic dimension: length})."""
    bare = external.copy_without_data(raise_opset(proto))
    model = to_ir(inline_functions(bare, lifted=True))
    external.restore_data_lazily(model, proto)
    make_defaults_constants(model)
    assumed: dict[str, int] = {}
    every = (d for x in model.graph.inputs for d in dims(x) or ())
    symbols = [d for d in every if isinstance(d, str) and d != "?"]
    for name, length in lengths.items():
        if name not in symbols:
            raise unknown("symbolic dimension", name, dict.fromkeys(symbols))
        if length < 1:
            raise ValueError(f"the length of {name!r} must be at least 1, not {length}")
    for x in model.graph.inputs:
        if (shape := dims(x)) is None:
            continue
        given = (
            d if d not in (None, "", "?") else f"{x.name}.shape[{i}]" for i, d in enumerate(shape)
        )
        x.shape = ir.Shape(
            d if isinstance(d, int) else assumed.setdefault(str(d), lengths.get(str(d), 1))
            for d in given
        )
    for node in model.graph:
        for y in node.outputs:
            y.shape = None
    walk = infer(model)
    fold_sizes(model.graph, walk)  # sizes that exporters compute in front of a Reshape
    infer(model, walk=walk)
    return model.graph, assumed


def _nodes_with_varying_results(graph: ir.Graph) -> list[ir.Node]:
    """Return nodes whose results vary: they depend on an input or draw random numbers."""
    varies: set[ir.Value] = set(graph.inputs)
    nodes = []
    for node in graph:
        values = reads(node)
        if not varies.isdisjoint(values) or (not values and node.op_type != "Constant"):
            varies.update(node.outputs)
            nodes.append(node)
    return nodes


class _LayerCounts:
    """Counts the parameters, multiply-adds and bytes of the layers of a graph."""

    def __init__(self, graph: ir.Graph, tensors: Iterable) -> None:
        values = graph.initializers
        self.sizes = {t.name: t.size for t in tensors if t.is_weight or t.trains}
        self.trained = {t.name for t in tensors if t.trains}
        self.weights: dict[ir.Value, set[str]] = {
            values[name]: {name} for name in self.sizes if name in values
        }
        varying = set(_nodes_with_varying_results(graph))
        for node in graph:  # a value computed from weights, such as a transpose, stands for them
            found = [self.weights[x] for x in reads(node) if x in self.weights]
            if found and node not in varying:
                self.weights |= dict.fromkeys(node.outputs, set().union(*found))
        self.work = MultiplyAddCounter(self.weights.keys())
        self.outputs = set(graph.outputs)
        self.unsized: dict[str, None] = {}

    def count_layers(
        self, layers: Mapping[str, list[ir.Node]], lengths: Mapping[str, int]
    ) -> Summary:
        seen: set[str] = set()
        rows = []
        for name, nodes in layers.items():
            read_here = {x for node in nodes for x in reads(node)}
            own = set().union(*(self.weights.get(x, set()) for x in read_here)) - seen
            seen |= own
            rows.append(self._layer_row(name, nodes, own))
        if left := self.sizes.keys() - seen:
            unread = sum(self.sizes[name] for name in left)
            self.unsized[f"{unread:,} parameters that no layer reads"] = None
        return Summary(rows, lengths, [*self.work.uncounted, *self.unsized])

    def _layer_row(self, name: str, nodes: list[ir.Node], weights: set[str]) -> LayerRow:
        inside = set(nodes)
        results = [
            y for node in nodes for y in node.outputs
            if y in self.outputs or any(use.node not in inside for use in y.uses())
        ] or [nodes[-1].outputs[0]]  # fmt: skip
        computed = [
            y for node in nodes if node.op_type not in VIEWS for y in node.outputs
            if y.uses() or y in self.outputs
        ]  # fmt: skip
        return LayerRow(
            name,
            Counter(node.op_type for node in nodes),
            tuple(map(dims, results)),
            sum(self.sizes[w] for w in weights),
            sum(self.sizes[w] for w in weights & self.trained),
            sum(map(self.work.count_node, nodes)),
            sum(map(self._result_bytes, computed)),
            sum(map(self._result_bytes, results)),
        )

    def _result_bytes(self, value: ir.Value) -> int:
        shape = static(dims(value))
        if shape is None or value.dtype is None:
            self.unsized[f"bytes of {value.name!r}, whose shape or type is not known"] = None
            return 0
        return ceil(prod(shape) * value.dtype.itemsize)


def _shape_text(shape: Dims | None) -> str:
    return "?" if shape is None else f"[{', '.join('?' if d is None else str(d) for d in shape)}]"


@dataclass
class MultiplyAddCounter:
    """Counts multiply-adds, and collects the nodes whose count is unknown."""

    parameters: Collection[ir.Value]  # weights: an Add of a weight counts as a bias
    uncounted: dict[str, None] = field(default_factory=dict)  # sentences, in order

    def count_node(self, node: ir.Node) -> int:
        """Return the count of multiply-adds of `node` and of its subgraphs.

        A Scan counts once per iteration, a Loop of unknown length once, and an If as the branch
        with more multiply-adds.
        """
        inner = [sum(map(self.count_node, graph)) for graph in subgraphs(node)]
        try:
            if inner:
                return self._count_subgraphs(node, inner)
            if (count := operator_of(node).work) is not None:
                return count(node, _static_lengths)
            if node.op_type == "Add" and any(x in self.parameters for x in node.inputs):
                return prod(_static_lengths(node.outputs[0]))
        except UnknownShapeError:
            self._note_uncounted(node, "its shapes are not static")
            return 0
        if node.domain not in _ONNX_DOMAINS:
            self._note_uncounted(node, f"an operator of {node.domain!r}")
        return 0

    def _count_subgraphs(self, node: ir.Node, inner: list[int]) -> int:
        if node.op_type == "If" or not any(inner):
            return max(inner)
        trips = _iteration_count_of_loop(node)
        if trips is None:
            self._note_uncounted(node, "counted once, as its length is not known")
        return sum(inner) * (1 if trips is None else trips)

    def _note_uncounted(self, node: ir.Node, reason: str) -> None:
        self.uncounted[f"{node.op_type} (node {node.name!r}): {reason}"] = None


def _iteration_count_of_loop(node: ir.Node) -> int | None:
    if node.op_type == "Loop":
        limit = constant(node.inputs[0])
        return None if limit is None else int(limit.item())
    count = node.attributes.get_int("num_scan_inputs", 0)
    axes = node.attributes.get_ints("scan_input_axes", ()) or [0] * count
    for x, axis in zip(node.inputs[len(node.inputs) - count :], axes, strict=True):
        shape = dims(x)
        if shape is not None and isinstance(length := shape[axis], int):
            return length
    return None


def _static_lengths(value: ir.Value | None) -> tuple[int, ...]:
    """Return the static shape of a value; raise `UnknownShapeError` if it is None or not static."""
    shape = static(dims(value))
    if shape is None:
        raise UnknownShapeError
    return shape
