"""Structural checks of an input model: a broken model is rejected with a message of one line.

Every part is visited once, in the order of the file; only unsorted nodes cost more.

The checker of onnx compares nodes with their operators. It does not check the rest here: it accepts
tensors with more data than their shape says, unknown element types of inputs, calls of functions
with too many operands, and subgraphs of a wrong number of inputs; and it refuses sparse tensors
that onnxruntime runs, with indices of int32 or unsorted indices.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from math import prod
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import (
    AttributeProto,
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    SparseTensorProto,
    TensorProto,
    TypeProto,
    ValueInfoProto,
    checker,
    defs,
    numpy_helper,
)

from onnxgrad.checks import check_limit
from onnxgrad.errors import ModelError, printable
from onnxgrad.model.constants import normalize_domain, opset_versions
from onnxgrad.model.external import nbytes
from onnxgrad.model.notes import CONSTANTS, LOSS
from onnxgrad.model.opsets import operator_schema
from onnxgrad.model.traversal import (
    GraphLike,
    all_graphs,
    all_nodes,
    declared_names,
    names_read_by,
    subgraphs,
)
from onnxgrad.operators import WITH_SUBGRAPHS

_DEEPEST = 30  # levels of nested subgraphs; protobuf does not write more
_USE_NEWEST = "export the model at a version that onnx has, or upgrade onnx"
# entries of the metadata that this package writes, as JSON
_METADATA: Mapping[str, type[list] | type[dict]] = {CONSTANTS: list, LOSS: dict}


def validate(model: ModelProto, promised: Collection[str] = ()) -> bool:
    """Raise `ModelError` if `model` is broken; return whether `repair_model` must correct it.

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
    checked = _CheckResults({_function_key(f): f for f in model.functions})
    if len(checked.functions) < len(model.functions):
        raise ModelError("two local functions of the model have the same name: rename one of them")
    for function in _sort_callees_first(checked.functions):
        _check_function(function, checked)
    graph_checker = _GraphChecker(checked, opset_versions(model.opset_import), None)
    unsorted = bool(graph_checker.check(model.graph, "the graph", promised).late)
    if unsorted:
        _topological_order(model.graph.node)  # raises the error for a cycle
    check_limit("nodes", graph_checker.size, "the model has too many nodes")
    for entry in model.metadata_props:
        if entry.key in _METADATA and not _is_json(entry.value, _METADATA[entry.key]):
            raise ModelError(f"its metadata entry {entry.key!r} is damaged: remove the entry")
    return unsorted or checked.negative


def repair_model(model: ModelProto) -> None:
    """Sort the nodes of the main graph, and turn negative declared lengths into unknown lengths, in
    place.

    The model must have passed `validate`.
    """
    order = _topological_order(model.graph.node)
    if order != list(range(len(order))):
        nodes = [NodeProto.FromString(model.graph.node[i].SerializeToString()) for i in order]
        del model.graph.node[:]
        model.graph.node.extend(nodes)
    for graph in all_graphs(model.graph, *model.functions):
        clear_negative_lengths(graph.value_info)
        if isinstance(graph, GraphProto):
            clear_negative_lengths((*graph.input, *graph.output))


# -- the model -----------------------------------------------------------------------------------


@dataclass
class _CheckResults:
    """The local functions of a model, and the results of checks: the checkers of the functions, and
    whether a length is negative.
    """

    functions: dict[CallKey, FunctionProto]
    checkers: dict[CallKey, _GraphChecker] = field(default_factory=dict)  # of checked functions
    negative: bool = False  # whether a declared length is negative


def _check_versions(model: ModelProto) -> None:
    """Raise `ModelError` if `model` imports an opset or has an IR version that onnx lacks, or
    imports a domain whose name is not UTF-8.
    """
    newest = {domain: last for domain, (_, last) in defs.C.schema_version_map().items()}
    for holder in (model, *model.functions):
        for entry in holder.opset_import:
            if type(entry.domain) is not str:
                raise ModelError(
                    "it imports a domain whose name is not UTF-8: export the model again"
                )
            last = newest.get(normalize_domain(entry.domain))
            if last is not None and not 1 <= entry.version <= last:
                opset = f"opset {entry.version} of the domain {quoted_name(entry.domain)}"
                has = f"onnx {onnx.__version__} has 1 to {last}"
                raise ModelError(f"it imports {opset}, and {has}: {_USE_NEWEST}")
    if not 0 <= model.ir_version <= onnx.IR_VERSION:
        newest_ir = f"the newest of onnx {onnx.__version__} is {onnx.IR_VERSION}: {_USE_NEWEST}"
        raise ModelError(f"its IR version is {model.ir_version}, and {newest_ir}")


def _is_json(text: str, kind: type[list] | type[dict]) -> bool:
    """Return whether `text` is a JSON list of strings, or dict with string keys, as `kind` (list or
    dict) says.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, kind) and all(isinstance(v, str) for v in value)


# -- functions -----------------------------------------------------------------------------------


def _function_key(function: FunctionProto) -> CallKey:
    """Return the key (domain, name, overload) by which nodes call a local function."""
    return normalize_domain(function.domain), function.name, function.overload


def _sort_callees_first(functions: Mapping[CallKey, FunctionProto]) -> list[FunctionProto]:
    """Return the local functions sorted so that each function comes before the functions that call
    it.
    """
    callees = {
        key: [called for node in all_nodes(f.node) if (called := called_key(node)) in functions]
        for key, f in functions.items()
    }
    try:
        return [functions[key] for key in TopologicalSorter(callees).static_order()]
    except CycleError as e:
        keys = reversed(_cycle_from_first(e, functions))
        cycle = " -> ".join(quoted_name(name) for _, name, _ in keys)
        raise ModelError(
            f"its functions call each other without end: {cycle}; break the cycle"
        ) from None


def _check_function(function: FunctionProto, checked: _CheckResults) -> None:
    """Raise `ModelError` if a local function is broken; record its checker in `checked`."""
    subject = f"the function {quoted_name(function.name)}"
    if not function.name:
        raise ModelError("a local function has no name: name the function, or remove it")
    if len(set(function.output)) < len(function.output):
        raise ModelError(f"{subject} has two outputs of the same name: rename one of them")
    own_checker = _GraphChecker(checked, opset_versions(function.opset_import), set())
    own_checker.check(function, subject).refuse_unsorted(subject)
    own_checker.needed = (own_checker.needed or set()) - {a.name for a in function.attribute_proto}
    checked.checkers[_function_key(function)] = own_checker


# -- the order of nodes ---------------------------------------------------------------------------


@dataclass
class _NodeOrder:
    """A record of the values that the nodes of a graph define and read, to find reads of values
    that a later node defines.

    - `nodes`: the nodes.
    - `defined`: the names of the values that are defined so far.
    - `free`: values that the graph does not define, with a node that reads each.
    - `late`: pairs of value and node that reads it before a later node defines it.
    """

    nodes: Sequence[NodeProto]
    defined: dict[str, None]
    free: dict[str, NodeProto] = field(default_factory=dict)
    late: list[tuple[str, NodeProto]] = field(default_factory=list)

    def record_reads(self, node: NodeProto, names: Iterable[str]) -> None:
        """Record the names of the values that `node`, the next node of the graph, reads or its
        subgraphs capture.
        """
        defined = self.defined
        self.late += [(name, node) for name in names if name not in defined and name]

    def record_outputs(self, node: NodeProto) -> None:
        """Record the outputs of `node`, the next node of the graph, as defined values."""
        defined = self.defined
        for name in node.output:
            if name in defined:
                taken = f"{quoted_name(name)}, which is the name of another value"
                raise ModelError(
                    f"{node_title(node)} computes {taken}: rename one of the two values"
                )
            if type(name) is not str:  # protobuf returns bytes for text that is not UTF-8
                raise ModelError(
                    f"{node_title(node)} has a name that is not UTF-8: export the model again"
                )
            if name:
                defined[name] = None

    def finish_reads(self) -> None:
        """After the last node, move reads of values that no node of this graph defines from `late`,
        reads of later nodes, to `free`, reads of outer values.
        """
        for name, reader in self.late:
            if name not in self.defined:
                self.free.setdefault(name, reader)
        self.late = [(name, reader) for name, reader in self.late if name in self.defined]

    def refuse_unsorted(self, what: str) -> None:
        """Raise `ModelError` if a node reads the output of a later node; `what` names the graph in
        the message.
        """
        for name, reader in self.late:
            _topological_order(self.nodes)  # raises the error for a cycle
            early = f"{quoted_name(name)}, which a later node computes"
            raise ModelError(f"{node_title(reader)} in {what} reads {early}: sort the nodes")


def _topological_order(nodes: Sequence[NodeProto]) -> list[int]:
    """Return the indices of `nodes` in an order in which no node reads the output of a later node.

    Raises:
        ModelError: nodes depend on each other; the message names the values of the cycle.
    """
    producers = {y: i for i, node in enumerate(nodes) for y in node.output if y}
    waits = {
        i: {producers[x] for x in names_read_by(n) if x in producers} for i, n in enumerate(nodes)
    }
    sorter, order = TopologicalSorter(waits), list[int]()
    try:
        sorter.prepare()
    except CycleError as e:
        chain = [
            quoted_name(next(filter(None, nodes[i].output))) for i in _cycle_from_first(e, waits)
        ]
        if len(chain) > 12:
            chain = [*chain[:6], f"({len(chain) - 11} more)", *chain[-5:]]
        raise ModelError(
            f"its nodes depend on each other: {' -> '.join(chain)}; break the cycle"
        ) from None
    ready: list[int] = []  # a heap, so that nodes keep their order where they can
    while sorter.is_active():
        for i in sorter.get_ready():
            heapq.heappush(ready, i)
        order.append(heapq.heappop(ready))
        sorter.done(order[-1])
    return order


def _cycle_from_first(error: CycleError, entries: Iterable[Any]) -> list[Any]:
    """Return the cycle that a `CycleError` reports, rotated to begin and end with its entry that
    comes first in `entries`.
    """
    cycle: list[Any] = error.args[1][1:]
    members = set(cycle)
    start = cycle.index(next(entry for entry in entries if entry in members))
    return [*cycle[start:], *cycle[: start + 1]]


# -- graphs --------------------------------------------------------------------------------------


@dataclass
class _GraphChecker:
    """A checker of graphs that use the same opsets: the main graph with its subgraphs, or the body
    of a local function.
    """

    checked: _CheckResults
    opsets: Mapping[str, int]
    needed: set[str] | None  # attributes that nodes require of the function; None: no function
    size: int = 0  # count of nodes, with the nodes of subgraphs and of called functions

    def check(self, graph: GraphLike, subject: str, promised: Collection[str] = ()) -> _NodeOrder:
        """Raise `ModelError` if the main graph or a local function is broken; return the reads and
        definitions of its values.
        """
        order = self._check_graph(graph, 0, subject, None)
        for name, reader in order.free.items():
            if name not in promised:
                raise ModelError(
                    f"{node_title(reader)} reads {quoted_name(name)}, which is no input, no "
                    "constant and no output of a node: add the value, or correct the name"
                )
        return order

    def _check_graph(
        self, graph: GraphLike, depth: int, subject: str, parent: NodeProto | None
    ) -> _NodeOrder:
        """Raise `ModelError` if a graph is broken; `parent` is the node that has the graph as an
        attribute, None if no node has.
        """
        if depth > _DEEPEST:
            raise ModelError(f"subgraphs are nested more than {_DEEPEST} deep: flatten the model")
        order = _NodeOrder(graph.node, self._check_declarations(graph))
        functions, opsets = self.checked.functions, self.opsets
        for node in graph.node:
            function = functions.get(called_key(node)) if functions else None
            check_node(node, opsets.get(normalize_domain(node.domain), 0), function, self.needed)
            self.size += 1 if function is None else self._called_node_count(node)
            order.record_reads(node, node.input)
            for subgraph in subgraphs(node):
                inner = f"the subgraph {quoted_name(subgraph.name)} of {node_title(node)}"
                inner_order = self._check_graph(subgraph, depth + 1, inner, node)
                inner_order.refuse_unsorted(inner)
                order.record_reads(node, inner_order.free)
            order.record_outputs(node)
        order.finish_reads()
        for name in declared_names(graph.output):
            if not name:
                raise ModelError(
                    f"an output of {subject} has no name: name the output, or remove it"
                )
            if name not in order.defined:
                if parent is None:
                    raise ModelError(
                        f"output {quoted_name(name)} of {subject} is not computed: remove it, or "
                        "name a value of the graph"
                    )
                order.free.setdefault(name, parent)
        return order

    def _check_declarations(self, graph: GraphLike) -> dict[str, None]:
        """Check the inputs, constants and declared types of a graph; return the names of the inputs
        and constants.
        """
        defined = _unique_names(declared_names(graph.input), "input")
        if isinstance(graph, GraphProto):
            for tensor in graph.initializer:
                check_tensor(tensor, lambda t=tensor: f"initializer {quoted_name(t.name)}")  # type: ignore
            for sparse in graph.sparse_initializer:
                check_sparse(sparse, f"sparse initializer {quoted_name(sparse.values.name)}")
            constants = (*graph.initializer, *(s.values for s in graph.sparse_initializer))
            defined |= _unique_names(declared_names(constants), "initializer")
            for kind, values in (("input", graph.input), ("output", graph.output)):
                self.checked.negative |= check_values(values, kind)
        self.checked.negative |= check_values(graph.value_info, "the value")
        return defined

    def _called_node_count(self, node: NodeProto) -> int:
        """Return the count of nodes of the local function that `node` calls, after checking that
        the call has the attributes the function requires.
        """
        called = self.checked.checkers[called_key(node)]
        attributes = {a.name: a.ref_attr_name for a in node.attribute}
        for name in called.needed or ():
            if name not in attributes:
                raise ModelError(
                    f"{node_title(node)} lacks the attribute {quoted_name(name)}: add the attribute"
                )
            if attributes[name] and self.needed is not None:
                self.needed.add(attributes[name])
        return called.size


def _unique_names(names: Iterable[str], kind: str) -> dict[str, None]:
    """Return the names of inputs or initializers; raise `ModelError` for an empty, damaged or
    repeated name.
    """
    unique: dict[str, None] = {}
    for name in names:
        if not name or type(name) is not str:
            raise ModelError(
                f"an {kind} has no name, or a name that is not UTF-8: name it, or remove it"
            )
        if name in unique:
            raise ModelError(
                f"{kind} {quoted_name(name)} is declared twice: remove one, or rename it"
            )
        unique[name] = None
    return unique


_TENSORS_AND_GRAPHS = frozenset(  # types of attributes that are checked here, and not by onnx
    AttributeProto.AttributeType.Value(f"{part}{plural}")
    for part in ("TENSOR", "SPARSE_TENSOR", "GRAPH")
    for plural in ("", "S")
)
CallKey = tuple[str, str, str]  # domain, name and overload of a local function

_NO_SCHEMA = "onnxgrad.unknown"  # domain in which onnx checks nodes of operators without a schema
_SHOWN = 100  # characters of a name, or lengths of a shape, in a message
_LONGEST = 400  # characters of a message of onnx
_MOST = (1 << 63) - 1  # the greatest size in bytes
_DTYPES = {d.value for d in ir.DataType if d != ir.DataType.UNDEFINED}
_COMPLEX = (TensorProto.COMPLEX64, TensorProto.COMPLEX128)


def quoted_name(name: str | bytes) -> str:
    """Return a name in quotes for error messages, shortened, with control characters escaped."""
    return repr(name if len(name) <= _SHOWN else f"{name[:_SHOWN]!s}...")


# -- nodes -----------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _required_attributes(domain: str, op_type: str, opset: int) -> frozenset[str] | None:
    """Return the names of the attributes that an operator requires; None if onnx lacks the
    operator.
    """
    schema = operator_schema(op_type, opset, domain)
    if schema is None:
        return None
    return frozenset(name for name, a in schema.attributes.items() if a.required)


@lru_cache(maxsize=256)
def checker_context(domain: str, opset: int) -> checker.C.CheckerContext:
    """Return the checker context with which onnx checks nodes of the domain `domain` at the version
    `opset`.
    """
    context = checker.C.CheckerContext()
    context.ir_version, context.opset_imports = onnx.IR_VERSION, {domain: opset}
    return context


def called_key(node: NodeProto) -> CallKey:
    """Return the key of the local function that `node` calls, if `node` calls a local function."""
    return normalize_domain(node.domain), node.op_type, node.overload


def node_title(node: NodeProto) -> str:
    """Return a text for error messages that names the operator, the name and the first output of
    `node`.
    """
    domain = normalize_domain(node.domain)
    name = f"{domain!s}::{node.op_type!s}" if domain else str(node.op_type)
    output = next((y for y in node.output if y), "")
    plain = name.replace("::", "").replace(".", "").isidentifier()
    operator = name if plain and len(name) < 100 else quoted_name(name)
    return f"{operator} (node {quoted_name(node.name)}, output {quoted_name(output)})"


def check_node(
    node: NodeProto, opset: int, function: FunctionProto | None, needed: set[str] | None
) -> None:
    """Raise `ModelError` unless `node` has the operands and attributes that its operator requires.

    Args:
        node: any node.
        opset: version of the opset of the node's domain; 0 if the model does not import it.
        function: the local function that the node calls; None for an operator.
        needed: a set that gets the attributes which the node requires of the local function around
            it; None: the node is in no local function.
    """
    # protobuf returns bytes for text that is not UTF-8
    texts = (node.op_type, node.domain, *(a.name for a in node.attribute))
    if any(type(text) is not str for text in texts):
        raise ModelError(
            f"{node_title(node)} has text that is not UTF-8: it is damaged, export the model again"
        )
    if not node.output:
        raise ModelError(f"{node_title(node)} has no output: remove the node")
    domain, required = normalize_domain(node.domain), None
    if function is None:
        required = _required_attributes(domain, node.op_type, opset)
        if required is None and opset < 1 and not domain:
            raise ModelError(
                f"{node_title(node)} is of a domain without an opset: import an opset of the domain"
            )
        if required is None and not (node.op_type.isprintable() and domain.isprintable()):
            raise ModelError(f"{node_title(node)} is no operator: correct its op_type or domain")
    else:
        _check_function_call(node, function)
    _check_node_by_onnx(node, *((_NO_SCHEMA, 1) if required is None else (domain, opset)))
    for attribute in node.attribute:
        _check_attribute(attribute, node, required or (), needed)
    if function is None and not domain:
        if node.op_type == "Constant" and not node.attribute:
            raise ModelError(
                f"{node_title(node)} has no value: it is damaged, export the model again"
            )
        if node.op_type in WITH_SUBGRAPHS:
            _check_subgraphs(node, opset)


def _check_function_call(node: NodeProto, function: FunctionProto) -> None:
    """Raise `ModelError` if `node`, a call of `function`, has more inputs or outputs than
    `function` has.
    """
    for kind in ("input", "output"):
        n, most = len(getattr(node, kind)), len(getattr(function, kind))
        if n > most:
            raise ModelError(
                f"{node_title(node)} has {n} {kind}s, and the function that it calls at most "
                f"{most}: correct the call"
            )


def _check_node_by_onnx(node: NodeProto, domain: str, opset: int) -> None:
    """Raise `ModelError` unless the checker of onnx accepts a copy of `node` whose tensor and graph
    attributes are left out.
    """
    bare = NodeProto(op_type=node.op_type, domain=domain, input=node.input, output=node.output)
    for a in node.attribute:
        if a.type in _TENSORS_AND_GRAPHS:  # a reference to an attribute has no tensor and no graph
            bare.attribute.add(name=a.name, type=a.type, ref_attr_name=a.name)
        else:
            bare.attribute.append(a)
    try:
        checker.check_node(bare, checker_context(domain, opset))
    except checker.ValidationError as e:
        found = printable(str(e)[:_LONGEST]).rstrip(".")
        raise ModelError(
            f"{node_title(node)} has operands or attributes that onnx refuses: {found}; correct "
            "the node"
        ) from None


def _check_attribute(
    attribute: AttributeProto, node: NodeProto, required: Collection[str], needed: set[str] | None
) -> None:
    """Raise `ModelError` if an attribute of `node` holds a broken tensor or refers to a function
    attribute in an invalid way.

    See `check_node` for `needed`; `required` are the attributes that the operator requires.
    """
    if attribute.ref_attr_name:
        if needed is None:
            own, other = quoted_name(attribute.name), quoted_name(attribute.ref_attr_name)
            raise ModelError(
                f"the attribute {own} of {node_title(node)} refers to the attribute {other} of a "
                "function, but the node is in no function: write the value of the attribute"
            )
        if attribute.name in required:
            needed.add(attribute.ref_attr_name)
        return
    for tensor in (attribute.t,) if attribute.type == AttributeProto.TENSOR else attribute.tensors:
        check_tensor(tensor, lambda: f"the tensor of {node_title(node)}")
    if attribute.type == AttributeProto.SPARSE_TENSOR:
        check_sparse(attribute.sparse_tensor, f"the sparse tensor of {node_title(node)}")


def _check_subgraphs(node: NodeProto, opset: int) -> None:
    """Raise `ModelError` unless the subgraphs of `node` have as many inputs and outputs as `node`
    requires.
    """
    inputs, outputs = len(node.input), len(node.output)
    counts = (0 if node.op_type == "If" else inputs), outputs + (node.op_type == "Loop")
    if node.op_type == "Scan":
        counts = inputs - (opset < 9), outputs
        scanned = next((a.i for a in node.attribute if a.name == "num_scan_inputs"), 0)
        states = counts[0] - scanned
        if scanned < 1 or states < 0 or states > outputs:
            raise ModelError(
                f"{node_title(node)} has num_scan_inputs={scanned}, which its {inputs} inputs and "
                f"{outputs} outputs do not allow: write the number of scanned inputs"
            )
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH and not attribute.ref_attr_name:
            actual = len(attribute.g.input), len(attribute.g.output)
            if actual != counts:
                has, required = (f"{n} inputs and {m} outputs" for n, m in (actual, counts))
                raise ModelError(
                    f"the subgraph {attribute.name!r} of {node_title(node)} has {has}, and the "
                    f"node requires {required}: change the subgraph or the node"
                )


# -- constants and types --------------------------------------------------------------------------


def _shape_text(dims: Sequence[int]) -> str:
    """Return a text of the shape `dims` for error messages, shortened."""
    lengths = [str(d) for d in dims[:_SHOWN]] + ["..."] * (len(dims) > _SHOWN)
    return f"[{', '.join(lengths)}]"


def check_tensor(tensor: TensorProto, subject: Callable[[], str]) -> None:
    """Raise `ModelError` if the data type, the shape and the count of elements of `tensor` do not
    fit together.

    The message starts with `subject()`, "initializer 'w'". Data in external files are not read.
    """
    kind, dims = tensor.data_type, tensor.dims
    count = prod(dims)
    if kind not in _DTYPES or min(dims, default=0) < 0 or count * 16 > _MOST:
        raise ModelError(
            f"{subject()} has the data type {kind} and the shape {_shape_text(dims)}, which no "
            "tensor has: correct the type and the shape, or export the model again"
        )
    if tensor.data_location == TensorProto.EXTERNAL:
        return
    field, expected = "raw_data", nbytes(tensor)
    if kind == TensorProto.STRING or not tensor.HasField("raw_data"):
        field = onnx.helper.tensor_dtype_to_field(kind)  # noqa: TID251
        if kind == TensorProto.STRING or ir.DataType(kind).bitwidth >= 8:
            expected = count * 2 if kind in _COMPLEX else count
    length = len(getattr(tensor, field))
    if length != expected:
        relation = "fewer" if length < expected else "more"
        raise ModelError(
            f"{subject()} holds {relation} data than its shape {_shape_text(dims)} says "
            f"({length} entries of {field}, not {expected}): it is damaged, export the model again"
        )


# types of indices: the specification says int64, but onnxruntime writes the smallest that fits
_INDEX_TYPES = (TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64)


def check_sparse(sparse: SparseTensorProto, what: str) -> None:
    """Raise `ModelError` if the values, the indices and the shape of a sparse tensor do not fit
    together.

    The tensor must not be too large as a dense tensor, either. The message begins with `what`.
    """
    values, indices, dims = sparse.values, sparse.indices, list(sparse.dims)
    for part, tensor in (("values", values), ("indices", indices)):
        check_tensor(tensor, lambda part=part: f"{what}: the tensor of its {part}")  # type: ignore
        if tensor.data_location == TensorProto.EXTERNAL:
            raise ModelError(
                f"{what} keeps its {part} in an external file: store the tensor as dense"
            )
    count = prod(dims)
    if not dims or min(dims) < 0:
        raise ModelError(
            f"{what} has the shape {_shape_text(dims)}, with a negative length: correct the shape"
        )
    check_limit("dense_elements", count, f"{what} has too many elements for a dense tensor")
    n = values.dims[0] if len(values.dims) == 1 else -1
    if indices.data_type not in _INDEX_TYPES or list(indices.dims) not in ([n], [n, len(dims)]):
        raise ModelError(
            f"{what} has values of shape {_shape_text(values.dims)} and indices of shape "
            f"{_shape_text(indices.dims)}: write values of shape (n,), and integers as indices of "
            "shape (n,) or (n, rank)"
        )
    positions = numpy_helper.to_array(indices)
    ends = np.array([count] if positions.ndim == 1 else dims)
    if ((positions < 0) | (positions >= ends)).any():
        raise ModelError(
            f"{what} has an index outside of its shape {_shape_text(dims)}: correct the indices"
        )


def check_values(values: Iterable[ValueInfoProto], kind: str) -> bool:
    """Raise `ModelError` if a value declares an unknown element type; return whether a declared
    length is negative.
    """
    negative = False
    for value in values:
        tensor = innermost_tensor_type(value.type)
        if tensor.elem_type not in _DTYPES and tensor.elem_type:
            raise ModelError(
                f"{kind} {quoted_name(value.name)} has the unknown element type "
                f"{tensor.elem_type}: use a type of ONNX"
            )
        if tensor.HasField("shape"):
            negative |= any(d.dim_value < 0 for d in tensor.shape.dim)
            check_limit(
                "rank", len(tensor.shape.dim), f"{kind} {quoted_name(value.name)} has too many axes"
            )
    return negative


def clear_negative_lengths(values: Iterable[ValueInfoProto]) -> None:
    """Turn the negative lengths in the declared shapes of `values` into unknown lengths, in
    place.
    """
    for value in values:
        tensor = innermost_tensor_type(value.type)
        for d in tensor.shape.dim if tensor.HasField("shape") else ():
            if d.dim_value < 0:
                d.ClearField("dim_value")


def innermost_tensor_type(kind: TypeProto) -> TypeProto.Tensor | TypeProto.SparseTensor:
    """Return the tensor type of the elements of a sequence, Optional or map type; of a tensor type,
    the tensor type.
    """
    field = kind.WhichOneof("value")
    if field in ("sequence_type", "optional_type"):
        return innermost_tensor_type(getattr(kind, field).elem_type)
    if field == "map_type":
        return innermost_tensor_type(kind.map_type.value_type)
    return kind.sparse_tensor_type if field == "sparse_tensor_type" else kind.tensor_type
