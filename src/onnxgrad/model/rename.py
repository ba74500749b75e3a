"""New names for the values and nodes of a model.

Names have scopes: a subgraph sees those of the graphs that enclose it, a local function only its
own. Every new name is unique in the whole model.
"""

from __future__ import annotations

import json
from collections import ChainMap, Counter
from collections.abc import Callable, Iterable, Iterator
from hashlib import sha256
from itertools import chain, count
from typing import Any

from onnx import (
    AttributeProto,
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
)

from onnxgrad.errors import ModelError, unknown
from onnxgrad.model.constants import ConstantRef, GraphLike
from onnxgrad.model.notes import rename_notes
from onnxgrad.model.read import ModelLike, read
from onnxgrad.model.traversal import names, subgraphs
from onnxgrad.model.weights import METADATA, SPARSE, constant_refs
from onnxgrad.reporting import level_of, logger, reporting

# (graph, "input" | "initializer" | "result" | "node", old name) -> new name
Choose = Callable[[GraphLike, str, str], str]
Scope = ChainMap[str, str]

_LOSS = "onnxgrad.loss"  # metadata of `add_loss_output`: names of label and prediction, and more
_PREFIXES = {"input": "r", "initializer": "i", "result": "r", "node": "n"}


def onnx_rename_names(onx: ModelLike, strategy: str = "simple", verbose: int = 0) -> ModelProto:
    """Return `onx` with short names: results `r0, r1...`, initializers `i0...`, nodes `n0...`.

    The inputs and outputs of the model and of its local functions keep their names. Unnamed nodes
    stay unnamed.

    Args:
        onx: model, serialized model or path; never modified.
        strategy: "simple" counts. "type" uses a digest of the operator and its attributes, or of
            the values of an initializer, in place of the number, shortened while it is unique:
            `r0_4F` (0 for the first output of the node), `i_A3`, `n_4F`; equal ones get a numeric
            suffix, `r0_4F_2`. Such names do not change when other operators are added.
        verbose: 1 reports the number of new names through `logging`, to stderr where it is not
            configured; 2 every name.

    Raises:
        ValueError: an unknown strategy.
        ModelError: `onx` cannot be read.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2] x) => (float[N,2] y)
        ...     <float[2] scale = {2.0, 3.0}> { scaled = Mul(x, scale)  y = Exp(scaled) }''')
        >>> for node in og.onnx_rename_names(model).graph.node:
        ...     print(node.op_type, node.input, "->", node.output)
        Mul ['x', 'i0'] -> ['r0']
        Exp ['r0'] -> ['y']
    """
    if strategy not in _STRATEGIES:
        raise unknown("strategy", strategy, _STRATEGIES)
    naming = _STRATEGIES[strategy]
    model = _copy(onx)
    kept = {v.name for v in (*model.graph.input, *model.graph.output)}
    renamed: list[tuple[str, str]] = []
    _rename_model(model, kept, naming(model.graph, kept, renamed))
    for function in model.functions:
        kept = {*function.input, *function.output}
        _rename_function(function, naming(function, kept, renamed))
    _report(renamed, verbose)
    return model


def onnx_rename_weights(onx: ModelLike) -> ModelProto:
    """Return `onx` with its weights named `I0_<name>, I1_<name>...`, in graph order.

    Their alphabetical order is then that of the graph: the numbers are padded with zeros to the
    same length. Weights are what `get_train_initializer` lists. Those that are attributes of nodes,
    or outputs of local functions, keep their names. An output of the model that is a weight keeps
    its name, too: an `Identity` node copies the weight to it.

    Args:
        onx: model, serialized model or path; never modified.

    Raises:
        ModelError: `onx` cannot be read.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2] x) => (float[N,2] y) <float[2] w = {2.0, 3.0}> { y = Mul(x, w) }''')
        >>> list(og.get_train_initializer(og.onnx_rename_weights(model)))
        ['I0_w']
    """
    model = _copy(onx)
    weights = [ref for ref in constant_refs(model) if ref.default and not _keeps_name(ref)]
    taken, digits = set(names(model.graph)), len(str(len(weights) - 1))
    chosen = {}
    for i, ref in enumerate(weights):
        name = base = f"I{i:0{digits}d}_{ref.name}"
        number = 0
        while name in taken:
            number += 1
            name = f"{base}_{number}"
        chosen[id(ref.graph), ref.graph_name] = name  # `weights` keeps the graphs alive

    def choose(graph: GraphLike, kind: str, name: str) -> str:
        return name if kind == "node" else chosen.get((id(graph), name), name)

    _rename_model(model, (), choose)
    for function in model.functions:
        _rename_function(function, choose)
    outputs = {new: old for (graph, old), new in chosen.items() if graph == id(model.graph)}
    for output in model.graph.output:
        if output.name in outputs:
            node = model.graph.node.add(op_type="Identity", input=[output.name])
            output.name = outputs[output.name]
            node.output.append(output.name)
    return model


def _copy(onx: ModelLike) -> ModelProto:
    model = ModelProto()
    model.CopyFrom(read(onx))
    if model.training_info:
        raise ModelError("names in the training_info of a model are not supported: remove it")
    return model


def _keeps_name(ref: ConstantRef) -> bool:
    ml = ref.node is not None and ref.node.domain == "ai.onnx.ml"
    returned = ref.function is not None and ref.graph_name in ref.function.output
    return ml or returned or ref.attribute is not None


def _numbered(graph: GraphLike, kept: Iterable[str], renamed: list[tuple[str, str]]) -> Choose:
    """Return the function that chooses names by the strategy "simple".

    It adds the pairs of old and new names to `renamed`, and chooses none that is `kept`.
    """
    counts: Counter[str] = Counter()
    taken = set(kept)

    def choose(graph: GraphLike, kind: str, old: str) -> str:
        prefix = _PREFIXES[kind]
        while (name := f"{prefix}{counts[prefix]}") in taken:
            counts[prefix] += 1
        counts[prefix] += 1
        renamed.append((old, name))
        return name

    return choose


def _digested(graph: GraphLike, kept: Iterable[str], renamed: list[tuple[str, str]]) -> Choose:
    """Return the function that chooses names by the strategy "type", as `_numbered`."""
    described = {(id(owner), *key): entry for owner, *key, entry in _described(graph)}
    taken = dict.fromkeys(kept, "")  # name -> digest

    def choose(graph: GraphLike, kind: str, old: str) -> str:
        _, prefix, digest = described.get((id(graph), kind, old), (graph, _PREFIXES[kind], "0" * 8))
        names = (f"{prefix}_{digest[:length]}" for length in range(2, len(digest) + 1, 2))
        base = next(name for name in names if taken.get(name, digest) == digest)
        numbered = (f"{base}_{i}" for i in count(2))
        name = next(name for name in chain([base], numbered) if name not in taken)
        taken[name] = digest
        renamed.append((old, name))
        return name

    return choose


def _described(graph: GraphLike) -> Iterator[tuple[Any, str, str, tuple]]:
    """Yield graph, kind, name and (graph, prefix, digest) for the values and nodes of `graph`.

    The graph is repeated in the last so that it stays alive: its id is a key.
    """
    if isinstance(graph, GraphProto):
        for tensor in (*graph.initializer, *(s.values for s in graph.sparse_initializer)):
            values = TensorProto()
            values.CopyFrom(tensor)
            for field in ("name", "doc_string", "external_data"):  # files are not read
                values.ClearField(field)
            yield graph, "initializer", tensor.name, (graph, "i", _digest(values))
    for node in graph.node:
        operator = NodeProto(domain=node.domain, op_type=node.op_type)
        graphs = (AttributeProto.GRAPH, AttributeProto.GRAPHS)  # which contain names
        operator.attribute.extend(a for a in node.attribute if a.type not in graphs)
        digest = _digest(operator)
        yield graph, "node", node.name, (graph, "n", digest)
        for i, name in enumerate(node.output):
            yield graph, "result", name, (graph, f"r{i}", digest)
        for inner in subgraphs(node):
            yield from _described(inner)


def _digest(content: TensorProto | NodeProto) -> str:
    return sha256(content.SerializeToString(deterministic=True)).hexdigest().upper()


_STRATEGIES = {"simple": _numbered, "type": _digested}


def _report(renamed: list[tuple[str, str]], verbose: int) -> None:
    if not verbose:
        return
    with reporting(level_of(verbose)):
        for old, new in renamed:
            logger.debug("%s is renamed to %s", old, new)
        logger.info("%d names changed", len(renamed))


def _rename_model(model: ModelProto, kept: Iterable[str], choose: Choose) -> None:
    """Rename the values and nodes of the graph of `model`, in place, also in its metadata."""
    scope: Scope = ChainMap({name: name for name in kept})
    inside: dict[str, str] = {}  # of subgraphs, too; the names in notes are unique in the model

    def choose_and_keep(graph: GraphLike, kind: str, old: str) -> str:
        new = choose(graph, kind, old)
        if kind != "node":
            inside.setdefault(old, new)
        return new

    _rename_graph(model.graph, scope, choose_and_keep)
    rename_notes(model, {**inside, **scope})
    for entry in model.metadata_props:
        if entry.key in (METADATA, SPARSE):
            entry.value = json.dumps([scope.get(name, name) for name in json.loads(entry.value)])
        elif entry.key == _LOSS:
            loss = json.loads(entry.value)
            values = {k: scope.get(v, v) for k, v in loss.items() if k in ("label", "prediction")}
            entry.value = json.dumps(loss | values)


def _rename_function(function: FunctionProto, choose: Choose) -> None:
    """Rename the values of `function`, except its inputs and outputs."""
    scope: Scope = ChainMap({name: name for name in (*function.input, *function.output)})
    results = (("result", y) for node in function.node for y in node.output)
    _declare(function, results, scope, choose)
    _rename_nodes(function, function.node, scope, choose)
    _rename_types(function, scope)


def _rename_graph(graph: GraphProto, scope: Scope, choose: Choose) -> None:
    """Rename the values of `graph`; the first map of `scope` receives their new names."""
    _declare(graph, _declared(graph), scope, choose)
    for value in (
        *graph.input,
        *graph.initializer,
        *(sparse.values for sparse in graph.sparse_initializer),
        *graph.output,
    ):
        value.name = scope.get(value.name, value.name)
    _rename_nodes(graph, graph.node, scope, choose)
    _rename_types(graph, scope)
    _remove(graph.quantization_annotation, lambda annotation: annotation.tensor_name not in scope)
    for annotation in graph.quantization_annotation:
        annotation.tensor_name = scope[annotation.tensor_name]
        for parameter in annotation.quant_parameter_tensor_names:
            parameter.value = scope.get(parameter.value, parameter.value)


def _declared(graph: GraphProto) -> Iterator[tuple[str, str]]:
    """Yield the kind and the name of the values that `graph` defines."""
    yield from (("input", x.name) for x in graph.input)
    yield from (("initializer", t.name) for t in graph.initializer)
    yield from (("initializer", s.values.name) for s in graph.sparse_initializer)
    yield from (("result", name) for node in graph.node for name in node.output)


def _declare(
    graph: GraphLike, values: Iterable[tuple[str, str]], scope: Scope, choose: Choose
) -> None:
    """Choose new names for the values that `graph` defines."""
    own = scope.maps[0]
    for kind, name in values:
        if name and name not in own:
            own[name] = choose(graph, kind, name)


def _rename_nodes(
    graph: GraphLike, nodes: Iterable[NodeProto], scope: Scope, choose: Choose
) -> None:
    for node in nodes:
        for field in (node.input, node.output):
            field[:] = [scope[name] if name else "" for name in field]
        for configuration in node.device_configurations:
            for spec in configuration.sharding_spec:
                spec.tensor_name = scope.get(spec.tensor_name, spec.tensor_name)
        if node.name:
            node.name = choose(graph, "node", node.name)
        for inner in subgraphs(node):
            _rename_graph(inner, scope.new_child(), choose)


def _rename_types(graph: GraphLike, scope: Scope) -> None:
    """Rename the values whose types `graph` declares."""
    _remove(graph.value_info, lambda value: value.name not in scope)
    for value in graph.value_info:
        value.name = scope[value.name]


def _remove(entries, is_stale: Callable[[Any], bool]) -> None:
    """Remove entries about values that do not exist: another value may get such a name now."""
    kept = [entry for entry in entries if not is_stale(entry)]
    if len(kept) < len(entries):
        del entries[:]
        entries.extend(kept)
