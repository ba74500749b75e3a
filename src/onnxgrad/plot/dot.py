"""The graph of a model as boxes and arrows, and as text in the DOT language."""

from __future__ import annotations

import re
from collections import ChainMap, Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from math import prod

from onnx import (
    GraphProto,
    NodeProto,
    TensorProto,
    ValueInfoProto,
    numpy_helper,
)

from onnxgrad.errors import printable
from onnxgrad.model.read import ModelLike, read
from onnxgrad.plot import parts

_LONGEST = 60  # characters of an attribute
_STYLES = {
    "input": "shape=box color=red",
    "output": "shape=box color=green",
    "result": "shape=box",
    "node": 'shape=box style="filled,rounded" color=orange',
}
_KEYWORDS = {"digraph", "edge", "graph", "node", "strict", "subgraph"}


@dataclass
class Box:
    """A value or a node."""

    id: str
    kind: str  # a key of `_STYLES`
    lines: list[str]


@dataclass
class Frame:
    """The boxes of a graph, and the frames of its subgraphs."""

    title: str
    boxes: list[Box] = field(default_factory=list)
    inner: list[Frame] = field(default_factory=list)

    def all_boxes(self) -> Iterator[Box]:
        """Yield the boxes of this frame and of those inside."""
        yield from self.boxes
        for frame in self.inner:
            yield from frame.all_boxes()


def to_dot(model: ModelLike) -> str:
    """Return the graph of `model` in the DOT language, for Graphviz and other viewers.

    Inputs are red, outputs green, nodes orange and rounded, with their attributes; constants show
    dtype, shape, and their values up to 10 elements. Branches, loop bodies and local functions are
    clusters.

    Args:
        model: model, serialized model or path.

    Raises:
        ModelError: `model` cannot be read.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]> f (float[N] x) => (float[N] y) {y = Exp(x)}
        ... ''')
        >>> print("".join(line for line in og.plot.to_dot(model).splitlines(True) if "->" in line))
          x -> Exp;
          Exp -> y;
        <BLANKLINE>
    """
    drawing = Drawing(model)
    lines = ["digraph {", "  orientation=portrait;", "  ranksep=0.25;", "  nodesep=0.05;"]
    lines += _frame(drawing.frame, "  ", count())
    # at the end: an edge in a cluster would move the boxes at both its ends into that cluster
    lines += [f"  {a} -> {b};" for a, b in drawing.edges]
    return "\n".join([*lines, "}\n"])


def _frame(frame: Frame, margin: str, numbers: Iterator[int]) -> Iterator[str]:
    for box in frame.boxes:
        yield f'{margin}{box.id} [{_STYLES[box.kind]} label="{_label(box.lines)}" fontsize=10];'
    for inner in frame.inner:
        yield f"{margin}subgraph cluster_{next(numbers)} {{"
        yield f'{margin}  label="{_label([printable(inner.title)])}";'
        yield from _frame(inner, margin + "  ", numbers)
        yield f"{margin}}}"


def _label(lines: Iterable[str]) -> str:
    """Return `lines` as the text of a quoted label, in which `\\` and `&` begin escapes."""
    text = (line.replace("\\", r"\\").replace('"', r"\"").replace("&", "&amp;") for line in lines)
    return r"\n".join(text)


class Drawing:
    """The frame of a model's graph, with those of its local functions, and the arrows."""

    def __init__(self, model: ModelLike) -> None:
        proto = read(model, broken=True)
        self.edges: list[tuple[str, str]] = []  # ids of boxes
        self._ids: set[str] = set()
        self._counts: Counter[str] = Counter()
        self.frame, _ = self._graph("", proto.graph, ChainMap())
        for function in proto.functions:
            frame = Frame(f"{function.domain}.{function.name}")
            inputs = {name: [name] for name in function.input}
            outputs = [(name, [name]) for name in function.output]
            self._body(frame, inputs, {}, function.node, outputs, ChainMap())
            self.frame.inner.append(frame)

    def _graph(
        self, title: str, graph: GraphProto, scope: ChainMap[str, str]
    ) -> tuple[Frame, list[str]]:
        inputs = {x.name: [x.name, *_type(x)] for x in graph.input}
        constants = {t.name: [t.name, *_tensor(t)] for t in graph.initializer}
        for sparse in graph.sparse_initializer:
            kind = f"sparse {_tensor_type(sparse.values.data_type, sparse.dims)}"
            constants[sparse.values.name] = [sparse.values.name, kind]
        for name in inputs.keys() & constants.keys():  # an input with a default
            inputs[name] = constants.pop(name)
        outputs = [(y.name, [y.name, *_type(y)]) for y in graph.output]
        return self._body(Frame(title), inputs, constants, graph.node, outputs, scope)

    def _body(
        self,
        frame: Frame,
        inputs: Mapping[str, list[str]],
        constants: Mapping[str, list[str]],
        nodes: Iterable[NodeProto],
        outputs: list[tuple[str, list[str]]],
        scope: ChainMap[str, str],
    ) -> tuple[Frame, list[str]]:
        """Fill `frame`; return it and the ids of its outputs. `scope`: ids of boxes by value."""
        own = scope.maps[0]
        for name, lines in inputs.items():
            own[name] = self._box(frame, "input", name, lines)
        sources = inputs.keys() | constants.keys()
        results = {y: [y] for node in nodes for y in node.output if y and y not in sources}
        ends, copies = [], []
        for name, lines in outputs:
            ends.append(self._box(frame, "output", name, lines))
            if name in results and name not in own:
                own[name] = ends[-1]
            else:  # an input, a constant or a captured value
                copies.append((name, ends[-1]))
        for name, lines in (*constants.items(), *results.items()):
            if name not in own:
                own[name] = self._box(frame, "result", name, lines)
        for node in nodes:
            self._node(frame, node, scope)
        self.edges += [(self._value(frame, name, scope), end) for name, end in copies]
        return frame, ends

    def _node(self, frame: Frame, node: NodeProto, scope: ChainMap[str, str]) -> None:
        texts = parts.attribute_texts(node)
        short = [t if len(t) <= _LONGEST else f"{t[: _LONGEST - 3]}..." for t in texts]
        name = [f"({node.name})"] if node.name else []
        lines = [parts.operator_name(node), *name, *short]
        box = self._box(frame, "node", node.name or node.op_type, lines)
        self.edges += [(self._value(frame, x, scope), box) for x in node.input if x]
        self.edges += [(box, self._value(frame, y, scope)) for y in node.output if y]
        for title, graph in parts.graphs_of(node):
            inner, ends = self._graph(title, graph, scope.new_child())
            frame.inner.append(inner)
            self.edges += [(end, box) for end in ends]

    def _value(self, frame: Frame, name: str, scope: ChainMap[str, str]) -> str:
        """Return the id of the box of a value."""
        if name not in scope:  # no node computes it: invalid models are drawn, too
            scope[name] = self._box(frame, "result", name, [name])
        return scope[name]

    def _box(self, frame: Frame, kind: str, name: str, lines: list[str]) -> str:
        """Add a box; return its id, an unquoted DOT identifier that no other box has."""
        word = re.sub(r"\W", "_", name, flags=re.ASCII)
        if not word or word[0].isdigit() or word.lower() in _KEYWORDS:
            word = f"_{word}"
        box_id = word
        while box_id in self._ids:
            self._counts[word] += 1
            box_id = f"{word}_{self._counts[word]}"
        self._ids.add(box_id)
        frame.boxes.append(Box(box_id, kind, [printable(line) for line in lines]))
        return box_id


def _type(value: ValueInfoProto) -> list[str]:
    return [text] if (text := parts.type_text(value, _tensor_type)) else []


def _tensor(tensor: TensorProto) -> list[str]:
    kind = [_tensor_type(tensor.data_type, tensor.dims)]
    if prod(tensor.dims) > parts.MOST_ELEMENTS:
        return kind
    return [*kind, " ".join(str(numpy_helper.to_array(tensor)).split())]


def _tensor_type(data_type: int, shape: Iterable[int | str] | None) -> str:
    return f"{parts.dtype_name(data_type)}({'?' if shape is None else tuple(shape)})"
