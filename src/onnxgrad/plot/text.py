"""A model as text: its inputs, constants and indented nodes, or its graph in the DOT language."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import groupby
from math import prod

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, numpy_helper

from onnxgrad.errors import printable
from onnxgrad.model.read import ModelLike, read
from onnxgrad.model.traversal import all_nodes
from onnxgrad.plot import parts
from onnxgrad.plot.scene import ROOT, Scene

_COLORS = [  # pattern of a line, and the color of its first group
    (re.compile(r" *(opset|function|return)\b"), "2"),  # dim
    (re.compile(r" *(input):"), "34"),  # blue
    (re.compile(r" *(output):"), "32"),  # green
    (re.compile(r" *(init):"), "33"),  # yellow
    (re.compile(r"(\S.*)/\.\.\. \d+ node"), "1;35"),  # a module, bold magenta
    (re.compile(r" *([\w.]+)\("), "1;36"),  # an operator, bold cyan
]
_DEEPEST = 24  # steps to the right: deep networks stay readable
_LONGEST_LINE = 60  # characters of a line in a box of `to_dot`
_DOT_STYLES = {
    "input": "shape=box color=red",
    "output": "shape=box color=green",
    "node": 'shape=box style="filled,rounded" color=orange',
}
_DOT_KEYWORDS = {"digraph", "edge", "graph", "node", "strict", "subgraph"}


def onnx_simple_text_plot(
    model: ModelLike, *, indent: bool = True, depth: int | None = None, color: bool = False
) -> str:
    """Return the graph of `model` as text, one line per node, in the order of the file.

    A node is indented by one step more than the least indented node whose results it reads. Its
    subgraphs (branches, loop bodies) follow it.

    Args:
        model: model, serialized model or path.
        indent: False starts all nodes of a graph in the same column.
        depth: how many parts of the path of a module count. Consecutive nodes of one module are
            one line, with their number, their operators and the values that other lines read.
            Exporters write the paths into names or metadata of nodes. None: a line for each node.
        color: whether to color operators and kinds of lines, by the codes of ANSI terminals.

    Raises:
        ValueError: `depth` is below 1.
        ModelError: `model` cannot be read.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]> f (float[N,2] x) => (float[N,2] y)
        ...     <float[2] w = {2.0, 3.0}> { s = Mul(x, w) y = Exp(s) }''')
        >>> print(og.plot.onnx_simple_text_plot(model))
        opset: domain='' version=20
        input: name='x' type=dtype('float32') shape=('N', 2)
        init: name='w' type=dtype('float32') shape=(2,) -- array([2., 3.], dtype=float32)
        Mul(x, w) -> s
          Exp(s) -> y
        output: name='y' type=dtype('float32') shape=('N', 2)
    """
    if depth is not None and depth < 1:
        raise ValueError(f"depth must be at least 1, not {depth}")
    proto = read(model)
    lines = [*_opset_lines(proto), *_graph_lines(proto.graph, indent, depth=depth)]
    for function in proto.functions:
        lines.append(f"function: {function.domain}.{function.name}({', '.join(function.input)})")
        lines += _node_lines(function.node, indent, "  ")
        lines.append(f"  return {', '.join(function.output)}")
    return "\n".join(_color_line(printable(line)) if color else printable(line) for line in lines)


def onnx_text_plot_io(model: ModelLike) -> str:
    """Return the opsets, the inputs, the constants and the outputs of `model` as text.

    Args:
        model: model, serialized model or path.

    Raises:
        ModelError: `model` cannot be read.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]> f (float[N] x) => (float[N] y) {y = Exp(x)}
        ... ''')
        >>> print(og.plot.onnx_text_plot_io(model))
        opset: domain='' version=20
        input: name='x' type=dtype('float32') shape=('N',)
        output: name='y' type=dtype('float32') shape=('N',)
    """
    proto = read(model)
    lines = [*_opset_lines(proto), *_value_lines("input", proto.graph.input)]
    lines += map(_constant_line, proto.graph.initializer)
    return "\n".join(map(printable, [*lines, *_value_lines("output", proto.graph.output)]))


def _opset_lines(proto: ModelProto) -> list[str]:
    return [f"opset: domain={o.domain!r} version={o.version}" for o in proto.opset_import]


def _graph_lines(
    graph: GraphProto, indent: bool, margin: str = "", depth: int | None = None
) -> Iterator[str]:
    yield from _value_lines(f"{margin}input", graph.input)
    for tensor in graph.initializer:
        line = margin + _constant_line(tensor)
        if prod(tensor.dims) <= parts.MOST_ELEMENTS:
            line += " -- " + " ".join(repr(numpy_helper.to_array(tensor).ravel()).split())
        yield line
    yield from (
        _node_lines(graph.node, indent, margin) if depth is None else _module_lines(graph, depth)
    )
    yield from _value_lines(f"{margin}output", graph.output)


def _node_lines(nodes, indent: bool, margin: str) -> Iterator[str]:
    depth: dict[str, int] = {}
    for node in nodes:
        steps = min((depth[name] + 1 for name in node.input if name in depth), default=0)
        depth.update(dict.fromkeys(node.output, steps))
        here = margin + "  " * min(steps, _DEEPEST) * indent
        arguments = ", ".join([*node.input, *parts.attribute_texts(node)])
        yield f"{here}{parts.operator_name(node)}({arguments}) -> {', '.join(node.output)}"
        for name, graph in parts.named_subgraphs(node):
            yield f"{here}  {name}:"
            yield from _graph_lines(graph, indent, f"{here}    ")


def _module_lines(graph: GraphProto, depth: int) -> Iterator[str]:
    """Yield a line for consecutive nodes of one module, and for each node outside of modules."""

    def module_prefix(node: NodeProto) -> str:
        return ".".join(parts.module_path(node).split(".")[:depth])

    runs = [(path, list(nodes)) for path, nodes in groupby(graph.node, module_prefix)]
    readers: dict[str, set[int]] = defaultdict(set)  # runs that read each value
    for i, (_, nodes) in enumerate(runs):
        for node in all_nodes(nodes):
            for x in node.input:
                readers[x].add(i)
    returned = {y.name for y in graph.output}
    for i, (path, nodes) in enumerate(runs):
        if not path:
            yield from _node_lines(nodes, False, "")
            continue
        operators = ", ".join(parts.operator_count_texts(Counter(node.op_type for node in nodes)))
        results = [y for node in nodes for y in node.output if y in returned or readers[y] - {i}]
        count = f"{len(nodes)} nodes" if len(nodes) > 1 else "1 node"
        yield f"{path}/... {count} ({operators}) -> {', '.join(results)}"


def _color_line(line: str) -> str:
    """Return a line of text whose operator, or kind such as "input", is colored by ANSI codes."""
    for pattern, code in _COLORS:
        if (match := pattern.match(line)) is not None:
            a, b = match.span(1)
            return f"{line[:a]}\x1b[{code}m{line[a:b]}\x1b[0m{line[b:]}"
    return line


def _constant_line(tensor: TensorProto) -> str:
    return f"init: name={tensor.name!r} {parts.tensor_type_text(tensor.data_type, tensor.dims)}"


def _value_lines(what: str, values: Iterable[ValueInfoProto]) -> Iterator[str]:
    for value in values:
        kind, tensor = value.type.WhichOneof("value"), value.type.tensor_type
        text = parts.tensor_type_text(tensor.elem_type, parts.declared_shape(tensor))
        if kind not in (None, "tensor_type"):
            text = f"type={kind.removesuffix('_type')}"
        yield f"{what}: name={value.name!r} {text}"


def to_dot(model: ModelLike) -> str:
    """Return the graph of `model` in the DOT language, for Graphviz and other viewers.

    Inputs are red, outputs green, nodes orange and rounded. A node shows its name, its attributes,
    its constant operands and its results, with dtypes and shapes, and the elements of constants up
    to 10. Modules, branches, loop bodies and local functions are clusters.

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
    scene = Scene(model)
    words = _unique_dot_ids(item.title for item in scene.items)
    members: dict[int, list[str]] = defaultdict(list)
    for item, word in zip(scene.items, words, strict=True):
        style, label = _DOT_STYLES[item.kind], _dot_label(item.details)
        members[item.group].append(f'{word} [{style} label="{label}" fontsize=10];')
    values: dict[int, set[str]] = defaultdict(set)
    for arrow in scene.arrows:
        values[arrow.source].add(arrow.text)
    lines = ["digraph {", "  orientation=portrait;", "  ranksep=0.25;", "  nodesep=0.05;"]
    lines += _cluster_lines(scene, ROOT, members, "  ")
    # at the end: an edge in a cluster would move the boxes at both its ends into that cluster
    for arrow in scene.arrows:
        several = len(values[arrow.source]) > 1  # results: which of them is it?
        label = f' [label="{_dot_label([arrow.text])}" fontsize=8]' if several else ""
        lines.append(f"  {words[arrow.source]} -> {words[arrow.target]}{label};")
    return "\n".join([*lines, "}\n"])


def _cluster_lines(
    scene: Scene, group: int, members: dict[int, list[str]], margin: str
) -> Iterator[str]:
    """Yield the DOT lines of a group: its boxes, and a cluster for each group in it."""
    yield from (margin + line for line in members[group])
    for inner in scene.groups:
        if inner.parent == group:
            yield f"{margin}subgraph cluster_{inner.id} {{"
            yield f'{margin}  label="{_dot_label([inner.title])}";'
            yield from _cluster_lines(scene, inner.id, members, margin + "  ")
            yield f"{margin}}}"


def _dot_label(lines: Iterable[str]) -> str:
    """Return lines as the text of a quoted DOT label: escaped, and long lines shortened.

    Only edges have `->`, so that programs which read line by line find them.
    """
    lines = (line.replace("->", "→") for line in lines)
    short = (s if len(s) <= _LONGEST_LINE else f"{s[: _LONGEST_LINE - 3]}..." for s in lines)
    text = (line.replace("\\", r"\\").replace('"', r"\"").replace("&", "&amp;") for line in short)
    return r"\n".join(text)


def _unique_dot_ids(titles: Iterable[str]) -> list[str]:
    """Return an unquoted DOT identifier for each title, all distinct."""
    found: dict[str, int] = {}  # {identifier: how many began with it}
    for title in titles:
        word = re.sub(r"\W", "_", title, flags=re.ASCII)
        if not word or word[0].isdigit() or word.lower() in _DOT_KEYWORDS:
            word = f"_{word}"
        identifier = word
        while identifier in found:
            found[word] += 1
            identifier = f"{word}_{found[word]}"
        found[identifier] = 0
    return list(found)
