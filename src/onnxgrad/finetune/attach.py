"""`attach`: join two models to one, outputs of the first feeding inputs of the second."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import onnx_ir as ir
from onnx import ModelProto, defs

from onnxgrad.errors import ModelError, unknown
from onnxgrad.graph.infer import infer
from onnxgrad.graph.traversal import all_names, all_nodes
from onnxgrad.model.convert import is_non_tensor, to_ir, to_proto
from onnxgrad.model.local_functions import inline_functions
from onnxgrad.model.notes import HEAD, LISTS, read_metadata, rename_in_metadata, write_metadata
from onnxgrad.model.opsets import upgrade_opset
from onnxgrad.model.read import ModelLike, read
from onnxgrad.model.scopes import free_name
from onnxgrad.operators.shapes import dims
from onnxgrad.reporting import logger


def attach(
    backbone: ModelLike,
    head: ModelLike,
    mapping: Mapping[str, str] | None = None,
    *,
    prefix: str = "head.",
    rename: Mapping[str, str] | None = None,
) -> ModelProto:
    """Return one model that feeds outputs of `backbone` to inputs of `head`.

    It has the inputs of `backbone`, and the inputs of `head` that nothing feeds; inputs of one
    name, type and shape are one. Shapes are the same if their symbols are, or are joined by
    `mapping`; where one does not state a length, the logger warns that the inputs are one. It has
    the outputs of `head`, and the outputs of `backbone` that feed nothing. The opset is the newer
    one; local functions are inlined. Values and nodes of `head` whose names `backbone` has get the
    prefix; inputs and outputs of the result keep their names.

    Args:
        backbone: model, serialized model or path; never modified.
        head: likewise, such as a small network of your own.
        mapping: `{output of backbone: input of head}`; any value of `backbone` may be named. None:
            an output feeds the input of its name; or the only output feeds the only input that
            `backbone` does not have.
        prefix: of names in `head` that `backbone` has too.
        rename: `{input of head: its name in the result}`. An input that gets the name of one of
            `backbone`, or keeps it, is one with it, whatever the symbols of its shape.

    Raises:
        ValueError: an unknown name, nothing to join, an input fed twice, types or shapes that do
            not fit, or two inputs or outputs of one name that are not the same.
        ModelError: a model cannot be read, or cannot be converted to the opset of the other.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> body = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2] x) => (float[N,2] y) { y = Relu(x) }''')
        >>> head = onnx.parser.parse_model('''
        ...     <ir_version: 8, opset_import: ["": 17]>
        ...     f (float[N,2] x) => (float[N,2] p) { p = Softmax(x) }''')
        >>> for node in og.attach(body, head).graph.node:
        ...     print(node.op_type, node.input, "->", node.output)
        Relu ['x'] -> ['y']
        Softmax ['y'] -> ['p']
    """
    first, second = _convert_to_equal_opsets(read(backbone), read(head))
    for proto in (first, second):
        if lost := [y.name for y in proto.graph.output if is_non_tensor(y)]:
            raise ValueError(
                f"the outputs {lost} are no tensors, which cannot be joined: remove them from the "
                "model"
            )
    below, above = to_ir(first), to_ir(second)
    new_names = _join_graphs(below, above, mapping, prefix, rename or {})
    joined = to_proto(below)
    names = {t.name for t in joined.graph.initializer}
    notes = [ModelProto(metadata_props=proto.metadata_props) for proto in (first, second)]
    for note, new in zip(notes, new_names, strict=True):
        rename_in_metadata(note, new)
    for key in LISTS:
        every = [entry for note in notes for entry in read_metadata(note, key)]
        write_metadata(joined, key, [e for e in every if key != HEAD or e in names])
    return read(joined)


def _join_graphs(
    below: ir.Model,
    above: ir.Model,
    mapping: Mapping[str, str] | None,
    prefix: str,
    rename: Mapping[str, str],
) -> list[dict[str, str]]:
    """Append the graph of the head `above` to the graph of the backbone `below`, in place, joining
    values that `mapping` names.

    Returns:
        For `below` and `above`, the new names of values by the old names.
    """
    before = declared_types(below.graph) | declared_types(above.graph)
    infer(below)
    infer(above)
    pairs = _values_to_join(below.graph, above.graph, mapping)
    fed = {x.name for _, x in pairs}
    chosen = _rename_inputs(above.graph, fed, rename)
    shared = _shared_inputs(below.graph, above.graph, pairs, chosen, before)
    kept = [y for y in below.graph.outputs if y not in [v for v, _ in pairs]]
    for y in above.graph.outputs:
        if y.name in {v.name for v in kept}:
            raise ValueError(
                f"both models have an output {y.name!r}: rename the output in one of the models"
            )
    _rename_clashes(below.graph, above.graph, prefix, fed | {x.name for x, _ in shared})
    joints = [*pairs, *((own, x) for x, own in shared)]
    own = {x: y for y, x in joints}
    new_names = [
        {str(before[v].name): str(own.get(v, v).name) for v in graph_values(graph) if v in before}
        for graph in (below.graph, above.graph)
    ]
    restore_types(before)
    _unify_symbolic_dimensions(before, below.graph, above.graph, joints, prefix)
    _append_graph(below, above, joints, kept)
    if unshaped := [y for y in below.graph.outputs if y.shape is None or y.type is None]:
        stated = declared_types(below.graph)
        infer(below)
        restore_types(stated, unshaped)
    return new_names


def _convert_to_equal_opsets(
    first: ModelProto, second: ModelProto
) -> tuple[ModelProto, ModelProto]:
    """Return copies of both models with inlined local functions, converted to the newer of their
    opsets.

    Raises:
        ModelError: they cannot be converted.
    """
    protos = [inline_functions(proto) for proto in (first, second)]
    versions = [{o.domain: o.version for o in proto.opset_import} for proto in protos]
    target = max(v.get("", 0) for v in versions)
    for i, (proto, version) in enumerate(zip(protos, versions, strict=True)):
        if 0 < version.get("", 0) < target:
            protos[i] = upgrade_opset(proto, version[""], target)
    for domain in versions[0].keys() & versions[1].keys() - {""}:
        a, b = (v[domain] for v in versions)
        used = {n.op_type for p in protos for n in p.graph.node if n.domain == domain}
        changed = [
            t
            for t in sorted(used)
            if _operator_since_version(t, a, domain) != _operator_since_version(t, b, domain)
        ]
        if a != b and changed:
            raise ModelError(
                f"the models import versions {a} and {b} of {domain!r}, which differ in {changed}: "
                "export both models with the same version"
            )
    return protos[0], protos[1]


def _operator_since_version(op_type: str, version: int, domain: str) -> int | None:
    exists = defs.has(op_type, version, domain)
    return defs.get_schema(op_type, version, domain).since_version if exists else None


_ValuePairs = list[tuple[ir.Value, ir.Value]]


def _values_to_join(
    below: ir.Graph, above: ir.Graph, mapping: Mapping[str, str] | None
) -> _ValuePairs:
    """Return the pairs (value of the backbone `below`, input of the head `above` that the value
    feeds).
    """
    inputs = {str(x.name): x for x in above.inputs if x.const_value is None}
    outputs = {str(y.name): y for y in below.outputs}
    if mapping is None:
        mapping = {name: name for name in outputs if name in inputs}
        own = {x.name for x in below.inputs}
        unfed = [name for name in inputs if name not in own or len(inputs) == 1]
        if not mapping and len(unfed) == 1 and len(outputs) == 1:
            mapping = dict(zip(outputs, unfed, strict=True))
    if not mapping:
        raise ValueError(
            f"no output of the backbone, {list(outputs)}, has the name of an input of the head, "
            f"{list(inputs)}: pass mapping={{output: input}}"
        )
    values = ir.convenience.create_value_mapping(below, include_subgraphs=False)
    pairs: _ValuePairs = []
    for name, target in mapping.items():
        if name not in values:
            raise unknown("output of the backbone", name, outputs)
        if target not in inputs:
            raise unknown("input of the head", target, inputs)
        if any(x is inputs[target] for _, x in pairs):
            raise ValueError(
                f"mapping feeds the input {target!r} of the head twice: leave out one of the "
                "outputs"
            )
        _check_dtype_and_shape(values[name], inputs[target])
        pairs.append((values[name], inputs[target]))
    return pairs


def _check_dtype_and_shape(y: ir.Value, x: ir.Value) -> None:
    """Raise `ValueError` if the value `y` of the backbone cannot be fed to the input `x`."""
    if y.dtype is not None and x.dtype is not None and y.dtype != x.dtype:
        raise ValueError(
            f"{y.name!r} holds {y.dtype}, and the input {x.name!r} of the head takes {x.dtype}: "
            "put a Cast in front of the head"
        )
    have, want = dims(y), dims(x)
    if have is None or want is None:
        return
    pairs = zip(have, want, strict=False)
    if len(have) != len(want) or any({type(d) for d in p} == {int} and p[0] != p[1] for p in pairs):
        raise ValueError(
            f"{y.name!r} has the shape {list(have)}, and the input {x.name!r} of the head takes "
            f"{list(want)}: join another value by mapping="
        )


def _rename_inputs(
    graph: ir.Graph, fed: Iterable[str | None], rename: Mapping[str, str]
) -> set[ir.Value]:
    """Rename inputs of the head, in place, by `rename`, `{old name: new name}`; return the renamed
    inputs.

    Raises:
        ValueError: an unknown input, one that is fed, or a name that the head has, or gets twice.
    """
    inputs = {str(x.name): x for x in graph.inputs if x.const_value is None}
    for old, new in rename.items():
        if old not in inputs:
            raise unknown("input of the head (rename=)", old, inputs)
        if old in fed:
            raise ValueError(
                f"rename={{{old!r}: ...}}: mapping feeds the input {old!r}: remove it from rename"
            )
        if not new or (new != old and new in all_names(graph)):
            raise ValueError(
                f"rename={{{old!r}: {new!r}}}: the name is empty or a value of the head: "
                "choose another name"
            )
    if len(set(rename.values())) < len(rename):
        raise ValueError(
            f"rename={dict(rename)}: two inputs would get the same name: choose different names"
        )
    for old, new in rename.items():
        inputs[old].name = new
    return {inputs[old] for old in rename}


def _shared_inputs(
    below: ir.Graph,
    above: ir.Graph,
    fed: _ValuePairs,
    chosen: set[ir.Value],
    before: Mapping[ir.Value, ir.Value],
) -> _ValuePairs:
    """Return the pairs (input of the head, input of the backbone) of equal names, which become one
    input.

    Args:
        below: the backbone.
        above: the head.
        fed: the pairs (value of `below`, input of `above`) to join.
        chosen: inputs of `above` that `rename` names.
        before: shapes and types that the files state.

    Raises:
        ValueError: two inputs have one name, and different types or shapes. Symbols in the shapes
            of `chosen` inputs may differ.
    """
    own = {x.name: x for x in below.inputs}
    targets = [x for _, x in fed]
    pairs = [(x, own[x.name]) for x in above.inputs if x not in targets and x.name in own]
    symbols: dict[Any, Any] = {}
    for y, x in [*fed, *((other, x) for x, other in pairs if x in chosen)]:
        symbols |= zip(dims(x) or (), dims(y) or (), strict=False)
    for x, other in pairs:
        try:
            _check_dtype_and_shape(other, x)
        except ValueError as e:
            raise ValueError(
                f"both models have an input {x.name!r}, and {e}: pass rename={{{x.name!r}: name}}, "
                "with a new name, to keep two inputs"
            ) from None
        if x in chosen:
            continue
        # after inference, all lengths have names: compare the declared shapes
        have, want = (dims(before[v]) for v in (other, x))
        lengths = [(a, symbols.get(b, b)) for a, b in zip(have or (), want or (), strict=False)]
        if any(a != b for a, b in lengths if None not in (a, b)):
            raise ValueError(
                f"both models have an input {x.name!r}, of shape {list(have or ())} and "
                f"{list(want or ())}: pass rename={{{x.name!r}: {x.name!r}}} to make one input of "
                "both, or a new name to keep two inputs"
            )
        if None in (have, want) or any(None in pair for pair in lengths):
            logger.warning(
                "the input %r of both models is one, as no shape says otherwise: pass "
                "rename={%r: name} if they are two",
                x.name,
                x.name,
            )
    return pairs


def _rename_clashes(below: ir.Graph, above: ir.Graph, prefix: str, replaced: Iterable) -> None:
    """Rename the values and nodes of the head `above` that have a name of the backbone `below`, in
    place.

    An input or output of `above` keeps its name: the value of `below` is renamed.
    """
    taken, replaced = all_names(below), set(replaced)
    final = {x.name for x in (*above.inputs, *above.outputs)}
    every = taken | all_names(above)
    renamed = 0
    for value in graph_values(above):
        if value.name not in taken or (value.is_graph_input() and value.name in replaced):
            continue
        if value.name in final and value.graph is above:
            for other in [v for v in graph_values(below) if v.name == value.name]:
                if other.is_graph_input() and other.graph is below:
                    raise ValueError(
                        f"{value.name!r} is an input of the backbone, and an output of the head: "
                        "rename the value in one of the models"
                    )
                other.name = free_name(f"backbone.{value.name}", every)
            continue
        value.name = free_name(f"{prefix}{value.name}", every)
        renamed += 1
    nodes = {str(node.name) for node in all_nodes(below)}
    for node in all_nodes(above):
        if node.name and node.name in nodes:
            node.name = free_name(f"{prefix}{node.name}", nodes)
    if renamed:
        logger.info("%d values of the head got the prefix %r", renamed, prefix)


def _unify_symbolic_dimensions(
    values: Iterable[ir.Value], below: ir.Graph, above: ir.Graph, joints: _ValuePairs, prefix: str
) -> None:
    """Replace symbolic dimensions of the head by the symbols of the backbone that they are joined
    with, in place.
    """
    own = {d for v in values if v.graph is below for d in dims(v) or ()}
    symbols: dict[Any, Any] = {}
    for y, x in joints:
        symbols |= zip(dims(x) or (), dims(y) or (), strict=False)
    for v in values:
        shape = dims(v)
        if v.graph is not above or shape is None:
            continue
        others = {d: f"{prefix}{d}" if d in own else d for d in shape if isinstance(d, str)}
        v.shape = ir.Shape([symbols.get(d, others[d]) if isinstance(d, str) else d for d in shape])


def _append_graph(
    below: ir.Model, above: ir.Model, pairs: _ValuePairs, kept: list[ir.Value]
) -> None:
    """Move the nodes of the head `above` behind the nodes of the backbone `below`, in place."""
    for y, x in pairs:
        ir.convenience.replace_all_uses_with(x, y, replace_graph_outputs=True)
    replaced, outputs = {x for _, x in pairs}, list(above.graph.outputs)
    inputs = [x for x in above.graph.inputs if x not in replaced]
    nodes, initializers = list(above.graph), list(above.graph.initializers.values())
    above.graph.inputs.clear()
    above.graph.outputs.clear()
    above.graph.initializers.clear()
    above.graph.remove(nodes)
    below.graph.inputs.extend(inputs)
    for value in initializers:
        below.graph.register_initializer(value)
    below.graph.extend(nodes)
    below.graph.outputs[:] = [*outputs, *kept]
    for domain, version in above.opset_imports.items():
        imports = below.opset_imports
        imports[domain] = max(version, imports.get(domain, 0))
    for key, text in above.metadata_props.items():
        below.metadata_props.setdefault(key, text)


# -- shapes and types that a file states, restored after shapes were inferred for a decision -----


def declared_types(graph: ir.Graph) -> dict[ir.Value, ir.Value]:
    """Return `{value: copy of its name, shape and type}` for all values of `graph`, to restore them
    after shape inference.
    """
    return {
        v: ir.Value(name=v.name, shape=None if v.shape is None else v.shape.copy(), type=v.type)
        for v in graph_values(graph)
    }


def graph_values(graph: ir.Graph) -> list[ir.Value]:
    """Return the values of `graph`, followed by the inputs and initializers of its subgraphs."""
    results = [y for node in all_nodes(graph) for y in node.outputs]
    inner = [v for g in graph.subgraphs() for v in (*g.inputs, *g.initializers.values())]
    return [*dict.fromkeys([*graph.inputs, *graph.initializers.values(), *results, *inner])]


def restore_types(values: dict[ir.Value, ir.Value], changed: Collection[ir.Value] = ()) -> None:
    """Give values the shapes and types that `declared_types` copied, in place, except for the
    values in `changed`.
    """
    for v, before in values.items():
        if v not in changed:
            v.shape, v.type = before.shape, before.type
