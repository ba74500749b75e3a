"""Structural checks of an input model: a broken one is rejected with a message of one line.

Every part is visited once, in the order of the file; only unsorted nodes cost more.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter

import onnx
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, defs

from onnxgrad.errors import ModelError
from onnxgrad.limits import check_limit
from onnxgrad.model.constants import opset_versions, standard
from onnxgrad.model.notes import CONSTANTS, LOSS
from onnxgrad.model.traversal import all_graphs, all_nodes, subgraphs
from onnxgrad.model.validate.nodes import Key, check_node, key_of, title
from onnxgrad.model.validate.order import Order, cycle_of, sorted_order
from onnxgrad.model.validate.tensors import (
    check_sparse,
    check_tensor,
    check_values,
    forget_negative,
    shown,
)

_DEEPEST = 30  # levels of nested subgraphs; protobuf does not write more
_NEWEST_IR = max(13, onnx.IR_VERSION)
_METADATA = {CONSTANTS: list, LOSS: dict}  # written by us, as JSON


def validate(model: ModelProto, promised: Collection[str] = ()) -> bool:
    """Raise if `model` is broken; return whether `repair` has to correct it.

    Args:
        model: any model.
        promised: names of values that the caller will add to the graph, which may read them.

    Raises:
        ModelError: a cycle, a value that is read but not defined or that is defined twice, tensors
            whose data do not match their shape and type, opsets that onnx does not have, operators
            without the operands or attributes that they require, recursive functions, or more nodes
            than `limits` allows; the message is one line that names the node or value.
    """
    _check_versions(model)
    checked = _Checked({_key(f): f for f in model.functions})
    if len(checked.functions) < len(model.functions):
        raise ModelError("two functions of the model have the same name: rename one")
    for function in _callees_first(checked.functions):
        _check_function(function, checked)
    opsets = opset_versions(model.opset_import)
    size = _Scope(checked, opsets, inside=False).check_graph(model.graph, promised)
    check_limit("nodes", size, "the model has too many nodes")
    for entry in model.metadata_props:
        if entry.key in _METADATA and not _is_json(entry.value, _METADATA[entry.key]):
            raise ModelError(f"its metadata {entry.key!r} is damaged: remove the entry")
    return checked.unsorted or checked.negative


def repair(model: ModelProto) -> None:
    """Sort the nodes of the main graph, and make negative lengths unknown, in place.

    The model has passed `validate`.
    """
    order = sorted_order(model.graph.node)
    if order != list(range(len(order))):
        nodes = [NodeProto.FromString(model.graph.node[i].SerializeToString()) for i in order]
        del model.graph.node[:]
        model.graph.node.extend(nodes)
    for graph in all_graphs(model.graph, *model.functions):
        forget_negative(graph.value_info)
        if isinstance(graph, GraphProto):
            forget_negative((*graph.input, *graph.output))


# -- the model -----------------------------------------------------------------------------------


@dataclass
class _Checked:
    """The functions of a model, and what the checks have learned of it."""

    functions: dict[Key, FunctionProto]
    sizes: dict[Key, int] = field(default_factory=dict)  # nodes, those of called functions included
    needed: dict[Key, frozenset[str]] = field(default_factory=dict)  # attributes calls must set
    unsorted: bool = False
    negative: bool = False


def _check_versions(model: ModelProto) -> None:
    newest = {"": defs.onnx_opset_version()}
    newest |= {domain: last for domain, (_, last) in defs.C.schema_version_map().items()}
    for holder in (model, *model.functions):
        if any(type(entry.domain) is not str for entry in holder.opset_import):
            raise ModelError(
                "it imports a domain that is not UTF-8: it is damaged, export it again"
            )
        for entry in holder.opset_import:
            domain = standard(entry.domain)
            opset = f"opset {entry.version} of the domain {shown(entry.domain)}"
            if entry.version < (domain in newest):
                raise ModelError(f"it imports {opset}: versions start at 1, correct it")
            if entry.version > newest.get(domain, entry.version):
                raise ModelError(
                    f"it imports {opset}, and the newest of onnx {onnx.__version__} is "
                    f"{newest[domain]}: export the model at that, or upgrade onnx"
                )
    if not 0 <= model.ir_version <= _NEWEST_IR:
        raise ModelError(
            f"its IR version is {model.ir_version}, and the newest of onnx {onnx.__version__} is "
            f"{_NEWEST_IR}: export the model at that, or upgrade onnx"
        )


def _is_json(text: str, kind: type) -> bool:
    """Return whether `text` is the JSON of a `kind`, list or dict, of strings."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, kind) and all(isinstance(v, str) for v in value)


# -- functions -----------------------------------------------------------------------------------


def _key(function: FunctionProto) -> Key:
    return standard(function.domain), function.name, function.overload


def _callees_first(functions: Mapping[Key, FunctionProto]) -> list[FunctionProto]:
    """Return the functions sorted so that each comes after those that it calls."""
    numbers = {key: i for i, key in enumerate(functions)}
    callees = {
        numbers[key]: [numbers[k] for n in all_nodes(f.node) if (k := key_of(n)) in functions]
        for key, f in functions.items()
    }
    in_order = list(functions.values())
    try:
        return [in_order[i] for i in TopologicalSorter(callees).static_order()]
    except CycleError as e:
        cycle = " -> ".join(shown(in_order[i].name) for i in reversed(cycle_of(e)))
        raise ModelError(
            f"its functions call each other without end: {cycle}; break the cycle"
        ) from None


def _check_function(function: FunctionProto, checked: _Checked) -> None:
    subject = f"the function {shown(function.name)}"
    key = _key(function)
    if not function.name:
        raise ModelError("a function has no name: name it, or remove it")
    for kind, names in (("input", function.input), ("output", function.output)):
        if len(set(names)) < len(names) or "" in names:
            raise ModelError(f"{subject} has an {kind} twice, or without a name: rename it")
    scope = _Scope(checked, opset_versions(function.opset_import), inside=True)
    order = scope.check_nodes(function.node, dict.fromkeys(function.input), [], subject)
    for name, reader in order.free.items():
        raise ModelError(_undefined(name, reader))
    order.refuse_unsorted(subject)
    for name in function.output:
        if name not in order.defined:
            raise ModelError(f"output {shown(name)} of {subject} is not computed: remove it")
    checked.negative |= check_values(function.value_info, "the value")
    with_default = {a.name for a in function.attribute_proto}
    checked.needed[key] = frozenset(scope.needed - with_default)
    checked.sizes[key] = scope.size


# -- graphs --------------------------------------------------------------------------------------


class _Scope:
    """Checks graphs of the same opsets: the main graph and its subgraphs, or a function body."""

    def __init__(self, checked: _Checked, opsets: Mapping[str, int], inside: bool) -> None:
        self.checked = checked
        self.opsets = opsets
        self.inside = inside  # whether in a function, to whose attributes nodes may refer
        self.needed: set[str] = set()  # attributes that the nodes require of that function
        self.size = 0  # number of nodes, those of subgraphs and called functions included

    def check_graph(self, graph: GraphProto, promised: Collection[str]) -> int:
        """Check the main graph; return its number of nodes, those of called functions included."""
        order = self._check_graph(graph, [], "the graph", None)
        for name, reader in order.free.items():
            if name not in promised:
                raise ModelError(_undefined(name, reader))
        if order.late:
            sorted_order(graph.node)  # raises for a cycle
            self.checked.unsorted = True
        return self.size

    def _check_graph(
        self, graph: GraphProto, outer: list, subject: str, parent: NodeProto | None
    ) -> Order:
        """Check a graph, which is a subgraph of the node `parent` if there is one."""
        defined: dict[str, None] = {}
        for x in graph.input:
            _declare(x.name, "input", defined)
        constants: dict[str, None] = {}
        for tensor in graph.initializer:
            _declare(tensor.name, "initializer", constants)
            check_tensor(tensor, lambda t=tensor: f"initializer {shown(t.name)}")  # type: ignore
        for sparse in graph.sparse_initializer:
            _declare(sparse.values.name, "initializer", constants)
            check_sparse(sparse, f"sparse initializer {shown(sparse.values.name)}")
        for kind, values in (("input", graph.input), ("output", graph.output)):
            self.checked.negative |= check_values(values, kind)
        self.checked.negative |= check_values(graph.value_info, "the value")
        defined |= constants
        order = self.check_nodes(graph.node, defined, outer, subject)
        for y in graph.output:
            if not y.name:
                raise ModelError(f"an output of {subject} has no name: name it, or remove it")
            if y.name not in order.defined:
                if parent is None:
                    raise ModelError(
                        f"output {shown(y.name)} of {subject} is not computed: remove it, or "
                        "name a value of the graph"
                    )
                order.free.setdefault(y.name, parent)
        return order

    def check_nodes(
        self, nodes: Sequence[NodeProto], defined: dict[str, None], outer: list, subject: str
    ) -> Order:
        """Check each node, and that each value is computed once; return the order of the nodes.

        `defined` has the names of the inputs and constants; those of the results are added to it.
        `outer` has one such dict for each enclosing graph.
        """
        if len(outer) > _DEEPEST:
            raise ModelError(f"subgraphs are nested more than {_DEEPEST} deep: flatten the model")
        order = Order(nodes, defined, {})
        functions, opsets = self.checked.functions, self.opsets
        for node in nodes:
            function = functions.get(key_of(node)) if functions else None
            opset = opsets.get(standard(node.domain), 0)
            check_node(node, opset, function, self.inside, self.needed)
            if function is None:
                self.size += 1
            else:
                self._call(node, key_of(node))
            order.read(node, node.input)
            for graph in subgraphs(node):
                inner = f"the subgraph {shown(graph.name)} of {title(node)}"
                inner_order = self._check_graph(graph, [*outer, defined], inner, node)
                inner_order.refuse_unsorted(inner)
                order.read(node, inner_order.free)
            order.write(node)
        order.close()
        return order

    def _call(self, node: NodeProto, key: Key) -> None:
        """Count the nodes of the function that `node` calls, and check its attributes."""
        self.size += self.checked.sizes[key]
        attributes = {a.name: a.ref_attr_name for a in node.attribute}
        for name in self.checked.needed[key]:
            if name not in attributes:
                raise ModelError(f"{title(node)} lacks the attribute {shown(name)}: add it")
            if attributes[name]:
                self.needed.add(attributes[name])


def _declare(name: str, kind: str, names: dict[str, None]) -> None:
    if not name or type(name) is not str:
        raise ModelError(f"an {kind} has no name, or one that is not UTF-8: name it, or remove it")
    if name in names:
        raise ModelError(f"{kind} {shown(name)} is declared twice: remove one, or rename it")
    names[name] = None


def _undefined(name: str, reader: NodeProto) -> str:
    return (
        f"{title(reader)} reads {shown(name)}, which is no input, no constant and no output of a "
        "node: add it, or correct the name"
    )
