"""Other names for the values of a model, which computes the same.

Names have scopes: a branch or a loop body sees those of the graphs around it, a local function
only its own. Every name that is given is unique in the whole model.
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
from onnxgrad.model.constants import ConstantRef, Holder, subgraphs
from onnxgrad.model.normalize import names
from onnxgrad.model.read import ModelLike, read
from onnxgrad.model.weights import METADATA, SPARSE, constant_refs
from onnxgrad.reporting import level_of, logger, reporting

# (graph, "input" | "initializer" | "result" | "node", old name) -> new name
Choose = Callable[[Holder, str, str], str]
Scope = ChainMap[str, str]

_LOSS = "onnxgrad.loss"  # the metadata of `add_loss_output`, which name its label and prediction
_PREFIXES = {"input": "r", "initializer": "i", "result": "r", "node": "n"}


def onnx_rename_names(onx: ModelLike, strategy: str = "simple", verbose: int = 0) -> ModelProto:
    """Return `onx` with short names: results `r0, r1...`, initializers `i0...`, nodes `n0...`.

    The inputs and outputs of the model, and of its local functions, keep their names. Nodes without
    a name get none.

    Args:
        onx: model, serialized model or path; never modified.
        strategy: "simple" counts. "type" has a digest of the operator and its attributes, or of the
            values of an initializer, in place of the number, as short as it can be: `r0_4F` (0 for
            the first output of the node), `i_A3`, `n_4F`; equal ones are numbered, `r0_4F_2`. Such
            names stay the same when other operators are added.
        verbose: 1 reports the number of names through `logging`, to stderr where it is not
            configured; 2 every name.

    Raises:
        ValueError: an unknown strategy.
        ModelError: `onx` cannot be read.
    """
    if strategy not in _STRATEGIES:
        raise unknown("strategy", strategy, _STRATEGIES)
    naming = _STRATEGIES[strategy]
    made = _copy(onx)
    kept = {v.name for v in (*made.graph.input, *made.graph.output)}
    found: list[tuple[str, str]] = []
    _rename_model(made, kept, naming(made.graph, kept, found))
    for function in made.functions:
        kept = {*function.input, *function.output}
        _rename_function(function, naming(function, kept, found))
    _report(found, verbose)
    return made


def onnx_rename_weights(onx: ModelLike) -> ModelProto:
    """Return `onx` with its weights named `I0_<name>, I1_<name>...`, in graph order.

    So their alphabetical order is that of the graph; from eleven weights on, the numbers have as
    many digits as the last one. Weights are what `get_train_initializer` lists. Those that are
    attributes of nodes, or outputs of local functions, keep their names. A weight that is an output
    of the model too is given to it, under the output's name, by an `Identity` node.

    Args:
        onx: model, serialized model or path; never modified.

    Raises:
        ModelError: `onx` cannot be read.
    """
    made = _copy(onx)
    weights = [ref for ref in constant_refs(made) if ref.default and not _keeps_name(ref)]
    taken, digits = set(names(made.graph)), len(str(len(weights) - 1))
    chosen = {}
    for i, ref in enumerate(weights):
        name = base = f"I{i:0{digits}d}_{ref.name}"
        number = 0
        while name in taken:
            number += 1
            name = f"{base}_{number}"
        chosen[id(ref.graph), ref.graph_name] = name  # `weights` keeps the graphs, thus their ids

    def choose(graph: Holder, kind: str, name: str) -> str:
        return name if kind == "node" else chosen.get((id(graph), name), name)

    _rename_model(made, (), choose)
    for function in made.functions:
        _rename_function(function, choose)
    outputs = {new: old for (graph, old), new in chosen.items() if graph == id(made.graph)}
    for output in made.graph.output:
        if output.name in outputs:
            node = made.graph.node.add(op_type="Identity", input=[output.name])
            output.name = outputs[output.name]
            node.output.append(output.name)
    return made


def _copy(onx: ModelLike) -> ModelProto:
    made = ModelProto()
    made.CopyFrom(read(onx))
    if made.training_info:
        raise ModelError("the model holds training_info, whose names are not followed: remove it")
    return made


def _keeps_name(ref: ConstantRef) -> bool:
    ml = ref.node is not None and ref.node.domain == "ai.onnx.ml"
    returned = ref.function is not None and ref.graph_name in ref.function.output
    return ml or returned or ref.attribute is not None


def _numbered(holder: Holder, kept: Iterable[str], found: list[tuple[str, str]]) -> Choose:
    """Return the names of the strategy "simple"; `found` gets every pair of names."""
    counts: Counter[str] = Counter()
    taken = set(kept)

    def choose(graph: Holder, kind: str, old: str) -> str:
        prefix = _PREFIXES[kind]
        while (name := f"{prefix}{counts[prefix]}") in taken:
            counts[prefix] += 1
        counts[prefix] += 1
        found.append((old, name))
        return name

    return choose


def _digested(holder: Holder, kept: Iterable[str], found: list[tuple[str, str]]) -> Choose:
    """Return the names of the strategy "type"; `found` gets every pair of names."""
    described = {(id(place), *key): about for place, *key, about in _described(holder)}
    taken = dict.fromkeys(kept, "")  # name -> digest

    def choose(graph: Holder, kind: str, old: str) -> str:
        _, prefix, digest = described.get((id(graph), kind, old), (graph, _PREFIXES[kind], "0" * 8))
        names = (f"{prefix}_{digest[:length]}" for length in range(2, len(digest) + 1, 2))
        base = next(name for name in names if taken.get(name, digest) == digest)
        numbered = (f"{base}_{i}" for i in count(2))
        name = next(name for name in chain([base], numbered) if name not in taken)
        taken[name] = digest
        found.append((old, name))
        return name

    return choose


def _described(holder: Holder) -> Iterator[tuple[Any, str, str, tuple]]:
    """Yield graph, kind, name and (graph, prefix, digest) for what `holder` gives.

    The graph is repeated so that it is held: its id is a key.
    """
    if isinstance(holder, GraphProto):
        for tensor in (*holder.initializer, *(s.values for s in holder.sparse_initializer)):
            values = TensorProto()
            values.CopyFrom(tensor)
            for field in ("name", "doc_string", "external_data"):  # files are not read for a name
                values.ClearField(field)
            yield holder, "initializer", tensor.name, (holder, "i", _digest(values))
    for node in holder.node:
        operator = NodeProto(domain=node.domain, op_type=node.op_type)
        held = (AttributeProto.GRAPH, AttributeProto.GRAPHS)  # they hold names
        operator.attribute.extend(a for a in node.attribute if a.type not in held)
        digest = _digest(operator)
        yield holder, "node", node.name, (holder, "n", digest)
        for i, name in enumerate(node.output):
            yield holder, "result", name, (holder, f"r{i}", digest)
        for inner in subgraphs(node):
            yield from _described(inner)


def _digest(content: TensorProto | NodeProto) -> str:
    return sha256(content.SerializeToString(deterministic=True)).hexdigest().upper()


_STRATEGIES = {"simple": _numbered, "type": _digested}


def _report(found: list[tuple[str, str]], verbose: int) -> None:
    if not verbose:
        return
    with reporting(level_of(verbose)):
        for old, new in found:
            logger.debug("%s is called %s", old, new)
        logger.info("%d names given", len(found))


def _rename_model(model: ModelProto, kept: Iterable[str], choose: Choose) -> None:
    """Rename what the graph of `model` holds, in place, and in what the metadata say of it."""
    scope: Scope = ChainMap({name: name for name in kept})
    _rename_graph(model.graph, scope, choose)
    for entry in model.metadata_props:
        if entry.key in (METADATA, SPARSE):
            entry.value = json.dumps([scope.get(name, name) for name in json.loads(entry.value)])
        elif entry.key == _LOSS:
            facts = json.loads(entry.value)
            named = {k: scope.get(v, v) for k, v in facts.items() if k in ("label", "prediction")}
            entry.value = json.dumps(facts | named)


def _rename_function(function: FunctionProto, choose: Choose) -> None:
    """Rename the values of `function`, but for its inputs and outputs."""
    scope: Scope = ChainMap({name: name for name in (*function.input, *function.output)})
    results = (("result", y) for node in function.node for y in node.output)
    _declare(function, results, scope, choose)
    _rename_nodes(function, function.node, scope, choose)
    _rename_facts(function, scope)


def _rename_graph(graph: GraphProto, scope: Scope, choose: Choose) -> None:
    """Rename the values of `graph`; the first map of `scope` is for its own."""
    _declare(graph, _declared(graph), scope, choose)
    for named in (
        *graph.input,
        *graph.initializer,
        *(sparse.values for sparse in graph.sparse_initializer),
        *graph.output,
    ):
        named.name = scope.get(named.name, named.name)
    _rename_nodes(graph, graph.node, scope, choose)
    _rename_facts(graph, scope)
    _forget(graph.quantization_annotation, lambda fact: fact.tensor_name not in scope)
    for annotation in graph.quantization_annotation:
        annotation.tensor_name = scope[annotation.tensor_name]
        for parameter in annotation.quant_parameter_tensor_names:
            parameter.value = scope.get(parameter.value, parameter.value)


def _declared(graph: GraphProto) -> Iterator[tuple[str, str]]:
    """Yield kind and name of the values that `graph` gives."""
    yield from (("input", x.name) for x in graph.input)
    yield from (("initializer", t.name) for t in graph.initializer)
    yield from (("initializer", s.values.name) for s in graph.sparse_initializer)
    yield from (("result", name) for node in graph.node for name in node.output)


def _declare(graph: Holder, given: Iterable[tuple[str, str]], scope: Scope, choose: Choose) -> None:
    own = scope.maps[0]
    for kind, name in given:
        if name and name not in own:
            own[name] = choose(graph, kind, name)


def _rename_nodes(graph: Holder, nodes: Iterable[NodeProto], scope: Scope, choose: Choose) -> None:
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


def _rename_facts(holder: Holder, scope: Scope) -> None:
    """Rename the types that `holder` states."""
    _forget(holder.value_info, lambda value: value.name not in scope)
    for value in holder.value_info:
        value.name = scope[value.name]


def _forget(facts, wrong: Callable[[Any], bool]) -> None:
    """Remove facts about values that are not there: one might be given such a name now."""
    kept = [fact for fact in facts if not wrong(fact)]
    if len(kept) < len(facts):
        del facts[:]
        facts.extend(kept)
