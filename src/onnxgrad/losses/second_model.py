"""The nodes of a second model, copied into a graph; its weights are constants there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.autodiff.primal.local_functions import inlined, raise_opset
from onnxgrad.autodiff.primal.prepare import prepare
from onnxgrad.errors import ModelError, printable
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.shapes import Dim, Dims, dims
from onnxgrad.graph.traversal import all_nodes
from onnxgrad.model.opsets import convert, exists
from onnxgrad.model.read import ModelLike, read
from onnxgrad.model.surgery import get_onnx_opset, select_model_inputs_outputs


def with_output(model: ModelLike, output: str) -> ModelProto:
    """Return the part of `model` that computes the tensor `output`, with names for all axes."""
    proto = read(model)
    return select_model_inputs_outputs(raise_opset(proto), outputs=[output])


def write_model(
    op: Emit, proto: ModelProto, values: Mapping[str, ir.Value], what: str
) -> tuple[ir.Value, list[ir.Value]]:
    """Write the nodes of a model at the end of the graph of `op`, with new names.

    Args:
        op: emitter of the main graph, which is prepared.
        proto: a model of `with_output`.
        values: values of the graph for inputs of the model, by the names of these.
        what: the model, in messages.

    Returns:
        The output of the model, and new values for its other inputs, which are not yet inputs of
        the graph.

    Raises:
        ValueError: a value that does not fit the input it stands for.
        ModelError: the model cannot be written in the opset of the graph.
    """
    prefix = op.name("model") + "/"
    stated = _at_opset(_with_shapes(proto, values, prefix, what), op.opset, what)
    model = prepare(stated, outputs=[stated.graph.output[0].name])
    _check_opset(model, op.opset, what)
    symbols = {d for v in values.values() for d in dims(v) or () if isinstance(d, str)}
    _rename_symbols(model.graph, symbols, prefix)
    return _move(op, model, values)


def _with_shapes(
    proto: ModelProto, values: Mapping[str, ir.Value], prefix: str, what: str
) -> ModelProto:
    """Return a copy whose inputs have the shapes of `values`, other symbols with the prefix.

    An input without a value has a symbol of such an input replaced, too.
    """
    stated = ModelProto()
    stated.CopyFrom(proto)
    del stated.graph.value_info[:]
    for y in stated.graph.output:
        y.type.tensor_type.ClearField("shape")
    lengths: dict[str, Dim] = {}
    fixed = {}
    for x in stated.graph.input:
        if (value := values.get(x.name)) is not None:
            fixed[x.name] = _joined(x, value, lengths, what)
    for x in stated.graph.input:
        shape = x.type.tensor_type.shape
        for i, d in enumerate(shape.dim):
            length = fixed[x.name][i] if x.name in fixed else lengths.get(d.dim_param)
            if isinstance(length, int):
                d.dim_value = length
            elif length is not None:
                d.dim_param = length
            elif d.dim_param:
                d.dim_param = prefix + d.dim_param
    return stated


def _joined(x, value: ir.Value, lengths: dict[str, Dim], what: str) -> Dims:
    """Return the shape of an input that is `value`; `lengths` gets those of its symbols."""
    tensor, shape = x.type.tensor_type, dims(value)
    where = f"input {printable(x.name)!r} of {what}"
    if value.dtype != tensor.elem_type:
        expected = ir.DataType(tensor.elem_type)
        raise ValueError(
            f"{value.name!r} holds {value.dtype}, and {where} takes {expected}: convert one model"
        )
    declared = [d.dim_param or (d.dim_value if d.HasField("dim_value") else None)
                for d in tensor.shape.dim]  # fmt: skip
    if not tensor.HasField("shape"):
        declared = [None] * len(shape or ())
        if shape is not None:
            tensor.shape.SetInParent()
            for _ in shape:
                tensor.shape.dim.add()
    if shape is None:
        return tuple(d if isinstance(d, int) else None for d in declared)
    if len(shape) != len(declared) or any(
        isinstance(a, int) and isinstance(b, int) and a != b
        for a, b in zip(shape, declared, strict=True)
    ):
        raise ValueError(f"{value.name!r} has the shape {shape}, and {where} takes {declared}")
    for a, b in zip(shape, declared, strict=True):
        if isinstance(b, str) and a is not None:
            before = lengths.setdefault(b, a)
            if isinstance(before, int) and isinstance(a, int) and before != a:
                raise ValueError(f"{where}: its symbol {b!r} is {before} and {a}")
            lengths[b] = before if isinstance(before, int) else a
    return tuple(b if isinstance(b, int) else a for a, b in zip(shape, declared, strict=True))


def _at_opset(proto: ModelProto, opset: int, what: str) -> ModelProto:
    """Return the model at another opset, newer or older."""
    proto = inlined(proto)
    version = get_onnx_opset(proto)
    if version == opset:
        return proto
    try:
        if proto.functions:
            raise ModelError("it has local functions with a rule")
        return convert(proto, version, opset)
    except ModelError as e:
        raise ModelError(_other_opset(what, version, opset, str(e))) from e


def _check_opset(model: ir.Model, opset: int, what: str) -> None:
    for node in all_nodes(model.graph):
        if not exists(node, opset):
            reason = f"{node.op_type} is newer"
            raise ModelError(_other_opset(what, model.opset_imports[""], opset, reason))
    if model.functions:
        raise ModelError(f"{what} has local functions with a rule, which cannot be copied")


def _other_opset(what: str, version: int, opset: int, reason: str) -> str:
    return (
        f"{what}, of opset {version}, cannot be written in opset {opset}, that of the trained "
        f"model ({reason}): convert one of them by onnx.version_converter"
    )


def _rename_symbols(graph: ir.Graph, kept: set[str], prefix: str) -> None:
    """Give each symbol that is not in `kept` a name of its own, as another graph may use it."""

    def renamed(d: Dim) -> Dim:
        if not isinstance(d, str) or d in kept or d.startswith(prefix):
            return d
        return f"unk__{prefix}{d}" if d.startswith("unk__") else prefix + d

    for value in _values(graph):
        if (shape := dims(value)) is not None:
            value.shape = ir.Shape([renamed(d) for d in shape])


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    """Yield the inputs and the results of a graph and of its subgraphs."""
    for inner in (graph, *graph.subgraphs()):
        yield from inner.inputs
    for node in all_nodes(graph):
        yield from node.outputs


def _move(
    op: Emit, model: ir.Model, values: Mapping[str, ir.Value]
) -> tuple[ir.Value, list[ir.Value]]:
    """Move the nodes of a model to the graph of `op`; return its output and the other inputs."""
    graph, [output] = model.graph, model.graph.outputs
    inputs, nodes = list(graph.inputs), list(graph)
    initializers = list(graph.initializers.values())
    _rename(graph, inputs, op.name)
    for collection in (graph.inputs, graph.outputs, graph.initializers):
        collection.clear()
    graph.remove(nodes)
    others = []
    for x in inputs:
        if (value := values.get(str(x.name))) is not None:
            ir.convenience.replace_all_uses_with(x, value)
        elif x.uses():
            x.name = op.name(str(x.name))
            others.append(x)
    for value in initializers:
        value.name = op.name(str(value.name))
        op.graph.register_initializer(value)
    for node in nodes:
        node.name = None  # the graph gives a new one
        op.graph.append(node)
    for domain, version in model.opset_imports.items():
        op.graph.opset_imports.setdefault(domain, version)
    return output, others


def _rename(graph: ir.Graph, inputs: list[ir.Value], name: Callable[[str], str]) -> None:
    """Rename all results, and the inputs and initializers of subgraphs."""
    own = set(inputs)
    for value in _values(graph):
        if value not in own and value.name:
            value.name = name(value.name)
    for inner in graph.subgraphs():
        for value in list(inner.initializers.values()):
            value.name = name(str(value.name))
