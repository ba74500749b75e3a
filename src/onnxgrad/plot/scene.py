"""The scene of a model, which all pictures draw: items, groups of items, and arrows."""

from __future__ import annotations

from collections import ChainMap, Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, numpy_helper

from onnxgrad.autodiff.partition import Partition
from onnxgrad.errors import ModelError, printable
from onnxgrad.graph.infer import infer
from onnxgrad.graph.traversal import all_nodes
from onnxgrad.model import external
from onnxgrad.model.convert import to_ir
from onnxgrad.model.notes import PRIMAL
from onnxgrad.model.read import ModelLike, read
from onnxgrad.model.traversal import model_nodes
from onnxgrad.plot import parts

_CONSTANTS_IN_BOX = 2
_MANY_NODES = 200  # in larger models, modules are folded
_READABLE_CELLS = 100  # boxes of the picture of a larger model at first
_GOLDEN_ANGLE = 137.508  # degrees: neighboring hues differ
ROOT = 0

Cell = tuple[str, int]  # ("item" | "group" | "bend", id)


@dataclass
class Item:
    """What a picture draws as one box: a node, an input or an output.

    Attributes:
        id: its index in `Scene.items`.
        kind: "node", "input" or "output".
        title: the operator, or the name of the value.
        lines: lines of its box below the title: constant operands of a node, type of a value.
        details: lines of its tooltip: name, attributes, constant operands, results.
        group: index of its group.
        marks: "weight" (reads a float initializer), "saved" (the backward pass reads its result),
            "recomputed" (of the forward pass, and computed again), "backward".
        primal: first output of the node that this node helps to differentiate; "" if there is none.
        first: first output of this node.
    """

    id: int
    kind: str
    title: str
    lines: list[str]
    details: list[str]
    group: int
    marks: set[str] = field(default_factory=set)
    primal: str = ""
    first: str = ""


@dataclass
class Group:
    """Items that may be folded into one box: a module, a subgraph, or a local function.

    Attributes:
        path: ids of the groups around it, from the root, and its id.
        nodes: number of nodes in it, also in groups inside.
    """

    id: int
    parent: int
    title: str
    kind: str  # "graph", "module", "backward", "subgraph" or "function"
    path: tuple[int, ...]
    nodes: int = 0

    @property
    def folded_title(self) -> str:
        """The title of the group's single box, with the count of nodes in the group."""
        return f"▸ {self.title} ({self.nodes})"


@dataclass(frozen=True)
class Arrow:
    """An edge of the picture: a value from the item that computes it to an item that reads it."""

    source: int
    target: int
    text: str  # name, type and shape of the value


class _DrawnConstant(NamedTuple):
    """The dtype and shape of a constant, and the elements if they are few."""

    kind: str
    elements: str = ""


_Scope = ChainMap[str, Item | _DrawnConstant]  # the item that computes each value, or the constant


class Scene:
    """The items, groups and arrows of a model, or of the joint graph of a `Partition`."""

    def __init__(self, model: ModelLike | Partition) -> None:
        self.items: list[Item] = []
        self.groups = [Group(ROOT, -1, "", "graph", (ROOT,))]
        self.arrows: list[Arrow] = []
        saved: set[str] | None = None
        recomputed: set[str] = set()
        if isinstance(model, Partition):
            saved = {tensor.name for tensor in model.saved}
            recomputed = {y for node in model.backward.graph.node for y in node.output}
            model = model.joint
        proto = read(model, broken=True)
        self._types = _type_text_by_value(proto)
        self._modules: dict[tuple[int, str, bool], int] = {}
        self._module_titles = _module_titles(proto.graph)
        self._primal_modules = {
            y: parts.module_path(node) for node in proto.graph.node for y in node.output[:1]
        }
        self._add_graph(proto.graph, ROOT, ChainMap())
        for function in proto.functions:
            group = self._add_group(ROOT, f"{function.domain}.{function.name}", "function")
            inputs, outputs = ([(x, "") for x in xs] for xs in (function.input, function.output))
            self._add_graph_items(group, inputs, {}, function.node, outputs, ChainMap())
        self._mark_backward_nodes(saved, recomputed)
        nodes = Counter(g for i in self.items if i.kind == "node" for g in self.groups_around(i.id))
        for g in self.groups:
            g.nodes = nodes[g.id]

    def groups_around(self, item: int) -> tuple[int, ...]:
        """Return the ids of the groups around an item, from the root."""
        return self.groups[self.items[item].group].path

    def root_cell(self, item: int) -> Cell:
        """Return the group below the root that holds an item, or the item if it is in no group."""
        path = self.groups_around(item)
        return ("group", path[1]) if path[1:] else ("item", item)

    def folded_groups(self, fold: bool | None) -> set[int]:
        """Return the ids of the modules that are drawn as one box; see `fold` of `to_svg`.

        For `fold=None`, modules of a large model are unfolded, the outermost first, as long as the
        picture stays readable.
        """
        modules = [g for g in self.groups if g.kind in ("module", "backward")]
        if fold is not None:
            return {g.id for g in modules} if fold else set()
        if self.groups[ROOT].nodes <= _MANY_NODES:
            return set()
        cells = Counter([item.group for item in self.items] + [g.parent for g in self.groups])
        folded, visible = {g.id for g in modules}, cells[ROOT]
        for g in sorted(modules, key=lambda g: len(g.path)):
            if g.parent not in folded and visible + cells[g.id] <= _READABLE_CELLS:
                folded.discard(g.id)
                visible += cells[g.id]
        return folded

    def gradient_hues(self) -> dict[int, int]:
        """Return hues in degrees, equal for a node and the nodes that compute its gradient."""
        order = dict.fromkeys(i.primal for i in self.items if i.primal)
        hue = {name: round(k * _GOLDEN_ANGLE) % 360 for k, name in enumerate(reversed(order))}
        names = {i.id: i.primal if "backward" in i.marks else i.first for i in self.items}
        return {i: hue[name] for i, name in names.items() if name in hue}

    def _add_group(self, parent: int, title: str, kind: str) -> int:
        new = len(self.groups)
        path = (*self.groups[parent].path, new)
        self.groups.append(Group(new, parent, printable(title), kind, path))
        return new

    def _add_item(self, kind: str, title: str, group: int, line: str, details: list[str]) -> Item:
        lines, details = ([printable(t) for t in texts if t] for texts in ([line], details))
        item = Item(len(self.items), kind, printable(title), lines, details, group)
        self.items.append(item)
        return item

    def _add_graph(self, graph: GraphProto, group: int, scope: _Scope) -> list[Item]:
        """Add the items of a graph to a group, and return the items of the graph's outputs."""
        constants = {t.name: _read_constant(t) for t in graph.initializer}
        for sparse in graph.sparse_initializer:
            text = _tensor_type_text(sparse.values.data_type, sparse.dims)
            constants[sparse.values.name] = _DrawnConstant(f"sparse {text}")
        inputs = [(x.name, _declared_type(x)) for x in graph.input if x.name not in constants]
        outputs = [(y.name, _declared_type(y)) for y in graph.output]
        return self._add_graph_items(group, inputs, constants, graph.node, outputs, scope)

    def _add_graph_items(
        self,
        group: int,
        inputs: list[tuple[str, str]],
        constants: dict[str, _DrawnConstant],
        nodes: Iterable[NodeProto],
        outputs: list[tuple[str, str]],
        scope: _Scope,
    ) -> list[Item]:
        """Add the items of a graph's or function's inputs, nodes and outputs; return the items of
        the outputs.
        """
        scope.update(constants)
        for name, text in inputs:
            scope[name] = self._add_item("input", name, group, text, [name, text])
        nodes = [node for node in nodes if not _record_constant(node, scope)]
        items = [self._add_node(node, group) for node in nodes]
        for node, item in zip(nodes, items, strict=True):
            scope.update((y, item) for y in node.output if y)
        for node, item in zip(nodes, items, strict=True):
            self._connect_node(node, item, scope)
        ends = []
        for name, text in outputs:
            text = self._types.get(name, text)
            ends.append(self._add_item("output", name, group, text, [name, text]))
            self._connect_value(name, ends[-1], scope)
        return ends

    def _add_node(self, node: NodeProto, group: int) -> Item:
        primal = parts.node_metadata(node).get(PRIMAL, "")
        if group == ROOT:
            module = self._primal_modules.get(primal, "") if primal else parts.module_path(node)
            group = self._module_group(module, bool(primal))
        title = parts.operator_name(node)
        details = [title, node.name, *parts.attribute_texts(node)]
        item = self._add_item("node", title, group, "", details)
        item.primal, item.first = primal, node.output[0] if node.output else ""
        if primal:
            item.marks.add("backward")
            item.details.append(f"gradient of the node of {printable(primal)}")
        return item

    def _module_group(self, module: str, backward: bool) -> int:
        """Return the innermost group of a module, after adding missing groups around it."""
        group = ROOT
        for i, part in enumerate(self._module_titles.get(module, ())):
            key = (group, part, backward)
            if key not in self._modules:
                title = f"{part} (backward)" if backward and i == 0 else part
                kind = "backward" if backward else "module"
                self._modules[key] = self._add_group(group, title, kind)
            group = self._modules[key]
        return group

    def _connect_node(self, node: NodeProto, item: Item, scope: _Scope) -> None:
        """Add arrows to a node from its operands, and add the items of the node's subgraphs."""
        for x in filter(None, node.input):
            self._connect_value(x, item, scope)
        item.details += [printable(f"-> {self._name_with_type(y)}") for y in node.output if y]
        for name, graph in parts.named_subgraphs(node):
            if graph.node or graph.output:
                inner = self._add_group(item.group, f"{node.op_type}: {name}", "subgraph")
                ends = self._add_graph(graph, inner, scope.new_child())
                self.arrows += [Arrow(end.id, item.id, end.title) for end in ends]

    def _connect_value(self, name: str, reader: Item, scope: _Scope) -> None:
        """Add an arrow from a value's item to the item `reader`, or list a constant in the box of
        `reader`.
        """
        source = scope.get(name)
        if isinstance(source, Item):
            self.arrows.append(Arrow(source.id, reader.id, printable(self._name_with_type(name))))
            return
        if source is None:  # no node computes it: broken models are drawn, too
            reader.details.append(printable(f"{name}: not computed by any node"))
            return
        kind, elements = source
        reader.details.append(printable(f"{name} {kind}{elements and ' = '}{elements}"))
        if kind.startswith(("float", "double", "bfloat")) and not elements:
            reader.marks.add("weight")
        if len(reader.lines) < _CONSTANTS_IN_BOX:
            short = f"= {elements}" if elements and len(elements) < 24 else kind
            end = name if len(name) <= 18 else f"...{name[-15:]}"  # the end of a name says most
            reader.lines.append(printable(f"{end} {short}"))

    def _name_with_type(self, name: str) -> str:
        return f"{name} {self._types.get(name, '')}".strip()

    def _mark_backward_nodes(self, saved: set[str] | None, recomputed: set[str]) -> None:
        """Mark the nodes of the backward pass, and the forward nodes whose results the backward
        pass reads.

        `saved` are the values that a `Partition` saves (None: all that the backward pass reads),
        `recomputed` the values that its backward model computes.
        """
        readers = defaultdict(list)
        for arrow in self.arrows:
            readers[arrow.source].append(arrow.target)
        starts = [i.id for i in self.items if "backward" in i.marks or i.title.endswith("YieldOp")]
        waiting = [j for i in starts for j in readers[i]]
        for i in waiting:  # the loop appends to it
            if "backward" not in self.items[i].marks and self.items[i].kind == "node":
                self.items[i].marks.add("backward")
                waiting += readers[i]
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
        for item in self.items:
            if item.kind == "node" and "backward" not in item.marks and item.first in recomputed:
                item.marks.add("recomputed")


def _record_constant(node: NodeProto, scope: _Scope) -> bool:
    """Return whether `node` is a constant, or a copy of a constant; if so, add the constant to
    `scope`.
    """
    constant: Item | _DrawnConstant | None = None
    if not node.output or node.domain:
        return False
    if node.op_type == "Constant" and len(node.attribute) == 1:
        [a] = node.attribute
        constant = (
            _read_constant(a.t) if a.HasField("t") else _DrawnConstant(parts.attribute_text(a))
        )
    elif node.op_type == "Identity" and node.input:
        constant = scope.get(node.input[0])  # exporters give a shared weight a second name
    if not isinstance(constant, _DrawnConstant):
        return False
    scope[node.output[0]] = constant
    return True


def _module_titles(graph: GraphProto) -> dict[str, list[str]]:
    """Return `{path of a module: titles of its groups, from the outermost}`.

    A group has at least two nodes. Parts of a path that hold the same nodes are one group.
    """
    sizes: Counter[tuple[str, ...]] = Counter()
    whole = [tuple(parts.module_path(node).split(".")) for node in graph.node]
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


def _type_text_by_value(proto: ModelProto) -> dict[str, str]:
    """Return {value: text of its dtype and shape}, inferred, or as a broken model's file declares
    them.
    """
    graphs = [
        proto.graph,
        *(a.g for n in model_nodes(proto) for a in n.attribute if a.HasField("g")),
    ]
    stated = {
        v.name: _declared_type(v) for g in graphs for v in (*g.input, *g.value_info, *g.output)
    }
    try:
        valid = read(proto)
        model = to_ir(external.copy_without_data(valid))
        external.restore_data_lazily(model, valid)
        infer(model)
    except ModelError:  # it is broken, or computes with maps
        return stated
    for node in all_nodes(model.graph):
        for y in node.outputs:
            if y.dtype is not None:
                shape = None if y.shape is None else list(y.shape)
                stated[str(y.name)] = _tensor_type_text(int(y.dtype), shape)
    return stated


def _tensor_type_text(data_type: int, shape: Iterable | None) -> str:
    """Return a dtype and a shape as text, such as "float32[N, 2]"."""
    dims = "?" if shape is None else ", ".join(str(d) for d in shape)
    return f"{parts.dtype_name(data_type)}[{dims.replace('None', '?')}]"


def _declared_type(value: ValueInfoProto) -> str:
    return parts.declared_type_text(value, _tensor_type_text)


def _read_constant(tensor: TensorProto) -> _DrawnConstant:
    kind = _tensor_type_text(tensor.data_type, tensor.dims)
    if prod(tensor.dims) > parts.MOST_ELEMENTS or external.is_external(tensor):
        return _DrawnConstant(kind)
    return _DrawnConstant(kind, " ".join(str(numpy_helper.to_array(tensor).tolist()).split()))
