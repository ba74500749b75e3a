"""Names of values: their scopes, new names, and the names that quantizers give.

A subgraph sees the names of the graphs that enclose it; a local function sees only the names of
its body.
"""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from itertools import count

from onnx import GraphProto, ModelProto

from onnxgrad.model.traversal import (
    GraphLike,
    declared_names,
    declared_values,
    direct_value_names,
    keep_only,
    subgraphs,
    value_names,
)

# (graph, "input" | "initializer" | "result" | "node", old name) -> new name
Choose = Callable[[GraphLike, str, str], str]


# suffixes that the quantizers of onnxruntime add; quantize_dynamic also transposes weights of Gemm
_QUANTIZED = re.compile(
    r"(_Transposed(_\d+)?)?(_DQ)?_(quantized(_\d+)?|QuantizeLinear_Output|[QU]\d+\w*)$"
)


def rename_in_graph(graph: GraphLike, choose: Choose, kept: Iterable[str] = ()) -> dict[str, str]:
    """Rename, in place, the values and nodes of `graph` and its subgraphs, except for the value
    names in `kept`.

    The inputs and outputs of a function must be among `kept`. Return the new names by old names; if
    several values have one old name, this is the new name of the outermost value.
    """
    new_names = {name: name for name in kept}
    _rename_in_scope(graph, ChainMap(dict(new_names)), choose, new_names)
    return new_names


def _rename_in_scope(
    graph: GraphLike, scope: ChainMap[str, str], choose: Choose, new_names: dict[str, str]
) -> None:
    """Rename the values and nodes of `graph` in place, and record the new value names in the first
    map of `scope` and in `new_names`.
    """
    own = scope.maps[0]
    for kind, name in declared_values(graph):
        if name and name not in own:
            own[name] = choose(graph, kind, name)
            new_names.setdefault(name, own[name])
    if isinstance(graph, GraphProto):
        for value in (
            *graph.input,
            *graph.initializer,
            *(sparse.values for sparse in graph.sparse_initializer),
            *graph.output,
        ):
            value.name = scope.get(value.name, value.name)
        keep_only(graph.quantization_annotation, lambda entry: entry.tensor_name in scope)
        for annotation in graph.quantization_annotation:
            annotation.tensor_name = scope[annotation.tensor_name]
            for parameter in annotation.quant_parameter_tensor_names:
                parameter.value = scope.get(parameter.value, parameter.value)
    for node in graph.node:
        for field in (node.input, node.output):
            field[:] = [scope.get(name, name) for name in field]
        for configuration in node.device_configurations:
            for spec in configuration.sharding_spec:
                spec.tensor_name = scope.get(spec.tensor_name, spec.tensor_name)
        if node.name:
            node.name = choose(graph, "node", node.name)
        for inner in subgraphs(node):
            _rename_in_scope(inner, scope.new_child(), choose, new_names)
    # an entry of a value that does not exist goes: another value may get the name
    keep_only(graph.value_info, lambda value: value.name in scope)
    for value in graph.value_info:
        value.name = scope[value.name]


def rename_values(graph: GraphLike, chosen: Mapping[tuple[int, str], str]) -> dict[str, str]:
    """Rename values of `graph` and its subgraphs, in place, as `chosen` says: `{(id of the graph,
    old name): new name}`.

    The outputs of `graph` keep their names: an Identity copies each renamed
    value to its output. Return the new names by old names, as `rename_in_graph`.
    """
    if not chosen:
        return {}
    outputs = declared_names(graph.output)

    def chosen_name(owner: GraphLike, kind: str, name: str) -> str:
        return name if kind == "node" else chosen.get((id(owner), name), name)

    new_names = rename_in_graph(graph, chosen_name)
    if isinstance(graph, GraphProto):
        copied = {old: y.name for y, old in zip(graph.output, outputs, strict=True)}
        for old, new in copied.items():
            if new != old:
                graph.node.add(op_type="Identity", input=[new], output=[old])
        for y, old in zip(graph.output, outputs, strict=True):
            y.name = old
    return new_names


def rename_shadowing_values(model: ModelProto, reserved: Iterable[str] = ()) -> None:
    """Rename, in place, the values of subgraphs whose names a value of an enclosing graph has, too.

    onnxruntime's optimizer writes such names. The new names differ from the names `reserved`.
    """
    for holder in (model.graph, *model.functions):
        taken = {*value_names(holder), *reserved}
        # the list keeps the graphs alive, and so their ids unique
        shadows = list(_shadowing_values(holder, frozenset()))
        rename_values(holder, {(id(g), name): unused_name(name, taken) for g, name in shadows})


def _shadowing_values(graph: GraphLike, outer: Set[str]) -> Iterator[tuple[GraphLike, str]]:
    """Yield pairs (graph, name) of the values in `graph` and its subgraphs whose names an enclosing
    graph uses already.

    They are values of `graph` and its subgraphs; `outer` has the names of enclosing graphs.
    """
    own = [name for name in direct_value_names(graph) if name]
    yield from ((graph, name) for name in own if name in outer)
    visible = outer | set(own)
    for node in graph.node:
        for inner in subgraphs(node):
            yield from _shadowing_values(inner, visible)


def unused_name(name: str, taken: set[str]) -> str:
    """Return `name` with the first numeric suffix that makes it absent from `taken`, and add the
    result to `taken`.
    """
    new = next(n for i in count(1) if (n := f"{name}_{i}") not in taken)
    taken.add(new)
    return new


def free_name(name: str, taken: set[str]) -> str:
    """Return `name`, with a numeric suffix if `taken` has it already, and add the result to
    `taken`.
    """
    if name in taken:
        return unused_name(name, taken)
    taken.add(name)
    return name


def unquantized_name(name: str) -> str:
    """Return the name of a float weight, given the name `name` that a quantizer of onnxruntime made
    of it.

    >>> unquantized_name("query.weight_quantized")
    'query.weight'
    >>> unquantized_name("attn.q_proj.MatMul.weight_Q4")
    'attn.q_proj.MatMul.weight'
    >>> unquantized_name("fc.weight_Transposed_quantized")  # of a Gemm, by quantize_dynamic
    'fc.weight'
    """
    return _QUANTIZED.sub("", name)
