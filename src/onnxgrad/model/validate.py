"""Structural checks of an input model: a broken one is rejected with a message of one line.

Every part is visited once, in the order of the file; only unsorted nodes cost more.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Any

import onnx
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, defs

from onnxgrad.errors import ModelError
from onnxgrad.limits import check_limit
from onnxgrad.model.constants import opset_versions, standard
from onnxgrad.model.notes import CONSTANTS, LOSS
from onnxgrad.model.traversal import GraphLike, all_graphs, all_nodes, names_in, reads, subgraphs
from onnxgrad.model.validate_parts import (
    CallKey,
    called_key,
    check_node,
    check_sparse,
    check_tensor,
    check_values,
    forget_negative,
    shown,
    title,
)

_DEEPEST = 30  # levels of nested subgraphs; protobuf does not write more
_USE_NEWEST = "export the model at one it has, or upgrade onnx"
_METADATA: Mapping[str, type[list] | type[dict]] = {CONSTANTS: list, LOSS: dict}  # ours, as JSON


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
    checked = _Checked({_function_key(f): f for f in model.functions})
    if len(checked.functions) < len(model.functions):
        raise ModelError("two functions of the model have the same name: rename one")
    for function in _callees_first(checked.functions):
        _check_function(function, checked)
    scope = _Scope(checked, opset_versions(model.opset_import), None)
    unsorted = bool(scope.check(model.graph, "the graph", promised).late)
    if unsorted:
        _sorted_order(model.graph.node)  # raises for a cycle
    check_limit("nodes", scope.size, "the model has too many nodes")
    for entry in model.metadata_props:
        if entry.key in _METADATA and not _is_json(entry.value, _METADATA[entry.key]):
            raise ModelError(f"its metadata {entry.key!r} is damaged: remove the entry")
    return unsorted or checked.negative


def repair(model: ModelProto) -> None:
    """Sort the nodes of the main graph, and make negative lengths unknown, in place.

    The model has passed `validate`.
    """
    order = _sorted_order(model.graph.node)
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
    """The functions of a model, and the findings of its checks so far."""

    functions: dict[CallKey, FunctionProto]
    scopes: dict[CallKey, _Scope] = field(default_factory=dict)  # of the functions checked so far
    negative: bool = False  # whether a declared length is


def _check_versions(model: ModelProto) -> None:
    """Raise for an opset or IR version that onnx does not have, or a domain that is not text."""
    newest = {domain: last for domain, (_, last) in defs.C.schema_version_map().items()}
    for holder in (model, *model.functions):
        for entry in holder.opset_import:
            if type(entry.domain) is not str:
                raise ModelError("it imports a domain that is not UTF-8: export it again")
            last = newest.get(standard(entry.domain))
            if last is not None and not 1 <= entry.version <= last:
                opset = f"opset {entry.version} of the domain {shown(entry.domain)}"
                has = f"onnx {onnx.__version__} has 1 to {last}"
                raise ModelError(f"it imports {opset}, and {has}: {_USE_NEWEST}")
    if not 0 <= model.ir_version <= onnx.IR_VERSION:
        newest_ir = f"the newest of onnx {onnx.__version__} is {onnx.IR_VERSION}: {_USE_NEWEST}"
        raise ModelError(f"its IR version is {model.ir_version}, and {newest_ir}")


def _is_json(text: str, kind: type[list] | type[dict]) -> bool:
    """Return whether `text` is the JSON of a `kind`, list or dict, of strings."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, kind) and all(isinstance(v, str) for v in value)


# -- functions -----------------------------------------------------------------------------------


def _function_key(function: FunctionProto) -> CallKey:
    return standard(function.domain), function.name, function.overload


def _callees_first(functions: Mapping[CallKey, FunctionProto]) -> list[FunctionProto]:
    """Return the functions sorted so that callees come before their callers."""
    callees = {
        key: [called for node in all_nodes(f.node) if (called := called_key(node)) in functions]
        for key, f in functions.items()
    }
    try:
        return [functions[key] for key in TopologicalSorter(callees).static_order()]
    except CycleError as e:
        keys = reversed(_cycle_from_first(e, functions))
        cycle = " -> ".join(shown(name) for _, name, _ in keys)
        raise ModelError(f"its functions call each other without end: {cycle}; break it") from None


def _check_function(function: FunctionProto, checked: _Checked) -> None:
    subject = f"the function {shown(function.name)}"
    if not function.name:
        raise ModelError("a function has no name: name it, or remove it")
    if len(set(function.output)) < len(function.output):
        raise ModelError(f"{subject} has an output twice: rename it")
    scope = _Scope(checked, opset_versions(function.opset_import), set())
    scope.check(function, subject).refuse_unsorted(subject)
    scope.needed = (scope.needed or set()) - {a.name for a in function.attribute_proto}
    checked.scopes[_function_key(function)] = scope


# -- the order of nodes ---------------------------------------------------------------------------


@dataclass
class _NodeOrder:
    """The values that the nodes of a graph define, read before their definition, or capture."""

    nodes: Sequence[NodeProto]
    defined: dict[str, None]
    # name of a value not defined here -> a node that reads it
    free: dict[str, NodeProto] = field(default_factory=dict)
    late: list[tuple[str, NodeProto]] = field(default_factory=list)  # read before it is defined

    def read(self, node: NodeProto, names: Iterable[str]) -> None:
        """Record values that the next node reads, or that its subgraphs capture."""
        defined = self.defined
        self.late += [(name, node) for name in names if name not in defined and name]

    def write(self, node: NodeProto) -> None:
        """Record the outputs of the next node."""
        defined = self.defined
        for name in node.output:
            if name in defined:
                taken = f"{shown(name)}, which is the name of another value"
                raise ModelError(f"{title(node)} computes {taken}: rename one")
            if type(name) is not str:  # bytes, where it is not UTF-8
                raise ModelError(f"{title(node)} has a name that is not UTF-8: export it again")
            if name:
                defined[name] = None

    def close(self) -> None:
        """Move the values read early that no node defines from `late` to `free`."""
        for name, reader in self.late:
            if name not in self.defined:
                self.free.setdefault(name, reader)
        self.late = [(name, reader) for name, reader in self.late if name in self.defined]

    def refuse_unsorted(self, what: str) -> None:
        """Raise if a node reads the output of a later one."""
        for name, reader in self.late:
            _sorted_order(self.nodes)  # raises for a cycle
            early = f"{shown(name)}, which a later node computes"
            raise ModelError(f"{title(reader)} in {what} reads {early}: sort the nodes")


def _sorted_order(nodes: Sequence[NodeProto]) -> list[int]:
    """Return the indices of `nodes` in an order in which no node reads the output of a later one.

    A cycle is an error that names its values.
    """
    producers = {y: i for i, node in enumerate(nodes) for y in node.output if y}
    waits = {i: {producers[x] for x in reads(n) if x in producers} for i, n in enumerate(nodes)}
    sorter, order = TopologicalSorter(waits), list[int]()
    try:
        sorter.prepare()
    except CycleError as e:
        chain = [shown(next(filter(None, nodes[i].output))) for i in _cycle_from_first(e, waits)]
        if len(chain) > 12:
            chain = [*chain[:6], f"({len(chain) - 11} more)", *chain[-5:]]
        raise ModelError(
            f"its nodes depend on each other: {' -> '.join(chain)}; break the cycle"
        ) from None
    ready: list[int] = []  # a heap: nodes keep their order where they can
    while sorter.is_active():
        for i in sorter.get_ready():
            heapq.heappush(ready, i)
        order.append(heapq.heappop(ready))
        sorter.done(order[-1])
    return order


def _cycle_from_first(error: CycleError, entries: Iterable[Any]) -> list[Any]:
    """Return the entries of a cycle, first and last the one that comes first in `entries`."""
    cycle: list[Any] = error.args[1][1:]
    members = set(cycle)
    start = cycle.index(next(entry for entry in entries if entry in members))
    return [*cycle[start:], *cycle[: start + 1]]


# -- graphs --------------------------------------------------------------------------------------


@dataclass
class _Scope:
    """Checks graphs of the same opsets: the main graph and its subgraphs, or a function body."""

    checked: _Checked
    opsets: Mapping[str, int]
    needed: set[str] | None  # attributes that nodes require of the function; None: in none
    size: int = 0  # number of nodes, with the nodes of subgraphs and of called functions

    def check(self, graph: GraphLike, subject: str, promised: Collection[str] = ()) -> _NodeOrder:
        """Check the main graph or a function; return the order of its nodes."""
        order = self._check_graph(graph, 0, subject, None)
        for name, reader in order.free.items():
            if name not in promised:
                raise ModelError(
                    f"{title(reader)} reads {shown(name)}, which is no input, no constant and no "
                    "output of a node: add it, or correct the name"
                )
        return order

    def _check_graph(
        self, graph: GraphLike, depth: int, subject: str, parent: NodeProto | None
    ) -> _NodeOrder:
        """Check a graph, which is a subgraph of the node `parent` if there is one."""
        if depth > _DEEPEST:
            raise ModelError(f"subgraphs are nested more than {_DEEPEST} deep: flatten the model")
        order = _NodeOrder(graph.node, self._check_declared(graph))
        functions, opsets = self.checked.functions, self.opsets
        for node in graph.node:
            function = functions.get(called_key(node)) if functions else None
            check_node(node, opsets.get(standard(node.domain), 0), function, self.needed)
            self.size += 1 if function is None else self._size_of_call(node)
            order.read(node, node.input)
            for subgraph in subgraphs(node):
                inner = f"the subgraph {shown(subgraph.name)} of {title(node)}"
                inner_order = self._check_graph(subgraph, depth + 1, inner, node)
                inner_order.refuse_unsorted(inner)
                order.read(node, inner_order.free)
            order.write(node)
        order.close()
        for name in names_in(graph.output):
            if not name:
                raise ModelError(f"an output of {subject} has no name: name it, or remove it")
            if name not in order.defined:
                if parent is None:
                    raise ModelError(
                        f"output {shown(name)} of {subject} is not computed: remove it, or "
                        "name a value of the graph"
                    )
                order.free.setdefault(name, parent)
        return order

    def _check_declared(self, graph: GraphLike) -> dict[str, None]:
        """Check inputs, constants and types; return the names of the inputs and constants."""
        defined = _unique_names(names_in(graph.input), "input")
        if isinstance(graph, GraphProto):
            for tensor in graph.initializer:
                check_tensor(tensor, lambda t=tensor: f"initializer {shown(t.name)}")  # type: ignore
            for sparse in graph.sparse_initializer:
                check_sparse(sparse, f"sparse initializer {shown(sparse.values.name)}")
            constants = (*graph.initializer, *(s.values for s in graph.sparse_initializer))
            defined |= _unique_names(names_in(constants), "initializer")
            for kind, values in (("input", graph.input), ("output", graph.output)):
                self.checked.negative |= check_values(values, kind)
        self.checked.negative |= check_values(graph.value_info, "the value")
        return defined

    def _size_of_call(self, node: NodeProto) -> int:
        """Return the number of nodes of a function, after checking the attributes of its call."""
        called = self.checked.scopes[called_key(node)]
        attributes = {a.name: a.ref_attr_name for a in node.attribute}
        for name in called.needed or ():
            if name not in attributes:
                raise ModelError(f"{title(node)} lacks the attribute {shown(name)}: add it")
            if attributes[name] and self.needed is not None:
                self.needed.add(attributes[name])
        return called.size


def _unique_names(names: Iterable[str], kind: str) -> dict[str, None]:
    """Return the names of inputs or initializers, or raise if one is empty, damaged or repeated."""
    unique: dict[str, None] = {}
    for name in names:
        if not name or type(name) is not str:
            raise ModelError(
                f"an {kind} has no name, or one that is not UTF-8: name it, or remove it"
            )
        if name in unique:
            raise ModelError(f"{kind} {shown(name)} is declared twice: remove one, or rename it")
        unique[name] = None
    return unique
