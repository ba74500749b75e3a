"""What pictures of a graph show: nodes, inputs and outputs as items, in groups, with arrows."""

from __future__ import annotations

from collections import ChainMap, Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod

from onnx import (
    AttributeProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    ValueInfoProto,
    numpy_helper,
)

from onnxgrad.autodiff.partition import Partition
from onnxgrad.errors import ModelError, printable
from onnxgrad.graph.infer import infer
from onnxgrad.graph.traversal import all_nodes
from onnxgrad.model import external
from onnxgrad.model.convert import to_ir
from onnxgrad.model.notes import PRIMAL
from onnxgrad.model.read import ModelLike, read
from onnxgrad.model.traversal import nodes_of
from onnxgrad.plot import parts
from onnxgrad.training.parameters.aliases import module_of

_IN_BOX = 2  # constants in a box
ROOT = 0

Cell = tuple[str, int]  # ("item" | "group" | "bend", id)


@dataclass
class Item:
    """A node, an input or an output.

    Attributes:
        id: its index in `Scene.items`.
        kind: "node", "input" or "output".
        title: the operator, or the name of the value.
        lines: what its box shows below the title.
        tip: what its tooltip shows.
        group: index of its group.
        marks: "weight" (reads a float initializer), "saved" (the backward pass reads its result),
            "recomputed" (of the forward pass, and computed again), "backward".
        primal: the first output of the node that it helps to differentiate; "" for others.
        first: its own first output.
    """

    id: int
    kind: str
    title: str
    lines: list[str]
    tip: list[str]
    group: int
    marks: set[str] = field(default_factory=set)
    primal: str = ""
    first: str = ""


@dataclass
class Group:
    """Items that may be folded into one box: a module, a subgraph, or a local function."""

    id: int
    parent: int
    title: str
    kind: str  # "graph", "module", "backward", "subgraph" or "function"
    path: tuple[int, ...]  # ids of the groups around it, from the root, and its own


@dataclass(frozen=True)
class Arrow:
    """A value on its way from one item to another."""

    source: int
    target: int
    text: str  # name, type and shape of the value


class Scene:
    """The items, groups and arrows of a model; of a `Partition`, those of its joint graph."""

    def __init__(self, model: ModelLike | Partition) -> None:
        self.items: list[Item] = []
        self.groups = [Group(ROOT, -1, "", "graph", (ROOT,))]
        self.arrows: list[Arrow] = []
        saved: set[str] | None = None
        again: set[str] = set()
        if isinstance(model, Partition):
            saved = {tensor.name for tensor in model.saved}
            again = {y for node in model.backward.graph.node for y in node.output}
            model = model.joint
        proto = read(model, broken=True)
        self.types = _types(proto)
        self._modules: dict[tuple[int, str, bool], int] = {}
        self._paths = _paths(proto.graph)
        primals = {y: node for node in proto.graph.node for y in node.output[:1]}
        self._primal_modules = {
            y: module_of(node.name, parts.metadata_of(node)) for y, node in primals.items()
        }
        self._graph(proto.graph, ROOT, ChainMap())
        for function in proto.functions:
            inner = self._group(ROOT, f"{function.domain}.{function.name}", "function")
            inputs = [(name, "") for name in function.input]
            outputs = [(name, "") for name in function.output]
            self._body(inner, inputs, {}, function.node, outputs, ChainMap())
        self._mark(saved, again)

    def path(self, item: int) -> tuple[int, ...]:
        """Return the groups around an item, from the root."""
        return self.groups[self.items[item].group].path

    def outermost(self, item: int) -> Cell:
        """Return the cell of the root in which an item is."""
        path = self.path(item)
        return ("group", path[1]) if path[1:] else ("item", item)

    def _group(self, parent: int, title: str, kind: str) -> int:
        new = len(self.groups)
        path = (*self.groups[parent].path, new)
        self.groups.append(Group(new, parent, printable(title), kind, path))
        return new

    def _item(self, kind: str, title: str, group: int, lines: list[str], tip: list[str]) -> Item:
        below, told = list(map(printable, lines)), list(map(printable, tip))
        item = Item(len(self.items), kind, printable(title), below, told, group)
        self.items.append(item)
        return item

    def _graph(self, graph: GraphProto, group: int, scope: ChainMap[str, object]) -> list[Item]:
        constants: dict[str, list[str]] = {t.name: _tensor(t) for t in graph.initializer}
        for sparse in graph.sparse_initializer:
            text = tensor_type(sparse.values.data_type, sparse.dims)
            constants[sparse.values.name] = [f"sparse {text}", ""]
        inputs = [(x.name, _stated_type(x)) for x in graph.input if x.name not in constants]
        outputs = [(y.name, _stated_type(y)) for y in graph.output]
        return self._body(group, inputs, constants, graph.node, outputs, scope)

    def _body(
        self,
        group: int,
        inputs: list[tuple[str, str]],
        constants: dict[str, list[str]],
        nodes: Iterable[NodeProto],
        outputs: list[tuple[str, str]],
        scope: ChainMap[str, object],
    ) -> list[Item]:
        """Add the items of a graph; return its outputs.

        `scope` has the item that computes each value, or dtype, shape and elements of a constant.
        """
        scope.update(constants)
        for name, text in inputs:
            scope[name] = self._item("input", name, group, [text], [name, text])
        nodes = [node for node in nodes if not _is_constant(node, scope)]
        made = [self._node(node, group, scope) for node in nodes]
        for node, item in zip(nodes, made, strict=True):
            scope.update((y, item) for y in node.output if y)
        for node, item in zip(nodes, made, strict=True):
            self._connect(node, item, group, scope)
        ends = []
        for name, text in outputs:
            end = self._item("output", name, group, [self.types.get(name, text)], [name, text])
            self._read(name, end, scope)
            ends.append(end)
        return ends

    def _node(self, node: NodeProto, group: int, scope: ChainMap[str, object]) -> Item:
        notes = parts.metadata_of(node)
        primal = notes.get(PRIMAL, "")
        path = self._primal_modules.get(primal, "") if primal else module_of(node.name, notes)
        home = self._module(group, path, bool(primal)) if group == ROOT else group
        title = parts.operator_name(node)
        tip = [title, node.name, *parts.attribute_texts(node)]
        item = self._item("node", title, home, [], [line for line in tip if line])
        item.primal, item.first = primal, node.output[0] if node.output else ""
        if primal:
            item.marks.add("backward")
            item.tip.append(f"gradient of the node of {printable(primal)}")
        return item

    def _module(self, group: int, path: str, backward: bool) -> int:
        """Return the group of a module, inside of those that `_paths` says are groups."""
        for i, part in enumerate(self._paths.get(path, ())):
            key = (group, part, backward)
            if key not in self._modules:
                title = f"{part} (backward)" if backward and i == 0 else part
                self._modules[key] = self._group(group, title, "backward" if backward else "module")
            group = self._modules[key]
        return group

    def _connect(
        self, node: NodeProto, item: Item, group: int, scope: ChainMap[str, object]
    ) -> None:
        """Draw the arrows of the operands of `node`, and the items of its subgraphs."""
        for x in filter(None, node.input):
            self._read(x, item, scope)
        for y in filter(None, node.output):
            item.tip.append(printable(f"-> {self._value_text(y)}"))
        for name, graph in parts.graphs_of(node):
            if graph.node or graph.output:
                inner = self._group(item.group, f"{node.op_type}: {name}", "subgraph")
                ends = self._graph(graph, inner, scope.new_child())
                self.arrows += [Arrow(end.id, item.id, end.title) for end in ends]

    def _read(self, name: str, reader: Item, scope: ChainMap[str, object]) -> None:
        source = scope.get(name)
        if isinstance(source, Item):
            self.arrows.append(Arrow(source.id, reader.id, printable(self._value_text(name))))
            return
        if source is None:  # no node computes it: broken models are drawn, too
            reader.tip.append(printable(f"{name}: not computed by any node"))
            return
        assert isinstance(source, list)
        kind, elements = source
        reader.tip.append(printable(f"{name} {kind}{elements and ' = '}{elements}"))
        if kind.startswith(("float", "double", "bfloat")) and not elements:
            reader.marks.add("weight")
        if len(reader.lines) < _IN_BOX:
            short = f"= {elements}" if elements and len(elements) < 24 else kind
            reader.lines.append(printable(f"{_end(name)} {short}"))

    def _value_text(self, name: str) -> str:
        return f"{name} {self.types.get(name, '')}".strip()

    def _mark(self, saved: set[str] | None, again: set[str]) -> None:
        """Mark what follows a node of the backward pass, and what that pass reads of the other."""
        behind = defaultdict(list)
        for arrow in self.arrows:
            behind[arrow.source].append(arrow.target)
        starts = [i.id for i in self.items if "backward" in i.marks or i.title.endswith("YieldOp")]
        waiting = [j for i in starts for j in behind[i]]
        for i in waiting:  # the loop appends to it
            if "backward" not in self.items[i].marks and self.items[i].kind == "node":
                self.items[i].marks.add("backward")
                waiting += behind[i]
        if not starts:
            return
        for arrow in self.arrows:
            source, target = self.items[arrow.source], self.items[arrow.target]
            crosses = "backward" in target.marks and "backward" not in source.marks
            if not crosses or source.kind != "node" or source.title.endswith("YieldOp"):
                continue
            name = arrow.text.partition(" ")[0]
            if saved is None or name in saved:
                source.marks.add("saved")
            elif source.first in again:
                source.marks.add("recomputed")
        for item in self.items:
            if item.kind == "node" and "backward" not in item.marks and item.first in again:
                item.marks.add("recomputed")


def _is_constant(node: NodeProto, scope: ChainMap[str, object]) -> bool:
    """Return whether `node` is shown as a constant of its readers; then `scope` has its value."""
    constant: object = None
    if not node.output:
        return False
    if node.op_type == "Constant" and not node.domain and len(node.attribute) == 1:
        attribute = node.attribute[0]
        is_tensor = attribute.type == AttributeProto.TENSOR
        constant = _tensor(attribute.t) if is_tensor else [parts.attribute_text(attribute), ""]
    elif node.op_type == "Identity" and not node.domain and node.input:
        constant = scope.get(node.input[0])  # exporters name a shared weight again
    if not isinstance(constant, list):
        return False
    scope[node.output[0]] = constant
    return True


def _end(name: str) -> str:
    """Return the last part of a name, which says most."""
    return name if len(name) <= 18 else f"...{name[-15:]}"


def _paths(graph: GraphProto) -> dict[str, list[str]]:
    """Return `{path of a module: the titles of the groups around its nodes}`.

    A group has at least two nodes, and a part that has one group only is joined with it.
    """
    sizes: Counter[tuple[str, ...]] = Counter()
    whole = [tuple(module_of(node.name, parts.metadata_of(node)).split(".")) for node in graph.node]
    for path in whole:
        sizes.update(path[:i] for i in range(1, len(path) + 1))
    found = {}
    for path in set(whole):
        titles: list[str] = []
        start = 0
        for i in range(1, len(path) + 1):
            inner = i < len(path) and sizes[path[: i + 1]] == sizes[path[:i]]
            if not path[0] or sizes[path[:i]] < 2:
                break
            if not inner:
                titles.append(".".join(path[start:i]))
                start = i
        found[".".join(path)] = titles
    return found


def _types(proto: ModelProto) -> dict[str, str]:
    """Return `{value: dtype and shape}`: inferred, or those of the file if it is broken."""
    graphs = [proto.graph, *(a.g for n in nodes_of(proto) for a in n.attribute if a.HasField("g"))]
    stated = {v.name: _stated_type(v) for g in graphs for v in (*g.input, *g.value_info, *g.output)}
    try:
        valid = read(proto)
        model = to_ir(external.without_data(valid))
        external.with_data(model, valid)
        infer(model)
    except ModelError:  # it is broken, or computes with maps
        return stated
    for node in all_nodes(model.graph):
        for y in node.outputs:
            if y.dtype is not None:
                shape = None if y.shape is None else list(y.shape)
                stated[str(y.name)] = tensor_type(int(y.dtype), shape)
    return stated


def tensor_type(data_type: int, shape: Iterable | None) -> str:
    """Return a dtype and a shape as text, such as "float32[N, 2]"."""
    dims = "?" if shape is None else ", ".join(str(d) for d in shape)
    return f"{parts.dtype_name(data_type)}[{dims.replace('None', '?')}]"


def _stated_type(value: ValueInfoProto) -> str:
    return parts.type_text(value, tensor_type)


def _tensor(tensor: TensorProto) -> list[str]:
    kind = tensor_type(tensor.data_type, tensor.dims)
    if prod(tensor.dims) > parts.MOST_ELEMENTS or external.is_external(tensor):
        return [kind, ""]
    return [kind, " ".join(str(numpy_helper.to_array(tensor).tolist()).split())]
