"""Copy the nodes of a second model into a graph, with that model's weights as constants."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.autodiff.primal.free_rows import fixed_row_count, free_rows
from onnxgrad.autodiff.primal.prepare import prepare
from onnxgrad.errors import ModelError, printable
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.precision import HALVES
from onnxgrad.graph.traversal import all_nodes
from onnxgrad.losses.in_graph import choose_output
from onnxgrad.model.convert import convert_precision, to_proto
from onnxgrad.model.local_functions import inline_functions, raise_opset
from onnxgrad.model.opsets import opset_has_node, upgrade_opset
from onnxgrad.model.read import ModelLike, read
from onnxgrad.model.surgery import get_onnx_opset, select_model_inputs_outputs
from onnxgrad.operators.shapes import Dim, Dims, dims

_LARGE = 1 << 16  # bytes of a constant that copies of a model share


def cut_to_float_output(model: ModelLike, output: str | None, argument: str) -> ModelProto:
    """Return the part of `model` that computes the tensor `output`, by default its only float
    output.

    Raises:
        ValueError: there is no such tensor, or several; the message names the `argument`.
    """
    proto = read(model)
    return cut_to_outputs(proto, [choose_output(proto, output, f"say which one with {argument}=")])


def cut_to_outputs(proto: ModelProto, names: Sequence[str]) -> ModelProto:
    """Return the part of a model that computes the tensors `names`.

    If the model takes one row, and its rows are proven to be independent, the part takes any
    number of rows.
    """
    part = select_model_inputs_outputs(raise_opset(proto), outputs=names)
    model, taken = (
        prepare(part),
        {d for x in part.graph.input for d in dims(ir.from_proto(x)) or ()},
    )
    symbol = next(s for i in count() if (s := f"rows_{i}") not in taken)
    if fixed_row_count(model, symbol, {}) != 1:
        return part
    freed = free_rows(model, symbol, {})
    return part if freed is None else to_proto(freed)


def write_model(
    op: Emit,
    proto: ModelProto,
    values: Mapping[str, ir.Value],
    what: str,
    shared: dict[str, ir.Value] | None = None,
) -> tuple[list[ir.Value], list[ir.Value]]:
    """Write the nodes of a model at the end of the graph of `op`, with new names.

    Args:
        op: emitter of the main graph, which is prepared.
        proto: a model of `cut_to_outputs`.
        values: values of the graph for inputs of the model, by the names of the inputs.
        what: name of the model in messages, such as "the teacher".
        shared: the large constants of an earlier copy of the model in this graph, by their names in
            the model, which this copy reads, too; its other large constants are added.

    Returns:
        The outputs of the model, and new values for its other inputs, which are not yet inputs of
        the graph.

    Raises:
        ValueError: a value that does not fit its input.
        ModelError: the model cannot be written in the opset of the graph.
    """
    proto, values = _cast_16_bit_model_to_float32(op, proto, values)
    prefix = op.name("model") + "/"
    stated = _convert_to_opset(_declare_input_shapes(proto, values, prefix, what), op.opset, what)
    model = prepare(stated, outputs=[y.name for y in stated.graph.output])
    _check_operators_in_opset(model, op.opset, what)
    symbols = {d for v in values.values() for d in dims(v) or () if isinstance(d, str)}
    _rename_values(model.graph, op.name, symbols, prefix)
    return _move_nodes(op, model, values, {} if shared is None else shared)


def _cast_16_bit_model_to_float32(
    op: Emit, proto: ModelProto, values: Mapping[str, ir.Value]
) -> tuple[ModelProto, Mapping[str, ir.Value]]:
    """Return (model, values) cast to float32 if an input of 16 bits would get a float32 value, else
    both unchanged.
    """
    kinds = {x.name: x.type.tensor_type.elem_type for x in proto.graph.input}
    widens = (v.dtype == ir.DataType.FLOAT and kinds.get(n) in HALVES for n, v in values.items())
    if not any(widens):
        return proto, values
    wide = {n: op.Cast(v, to=ir.DataType.FLOAT) for n, v in values.items() if v.dtype in HALVES}
    return convert_precision(proto, ir.DataType.FLOAT, HALVES), {**values, **wide}


def _declare_input_shapes(
    proto: ModelProto, values: Mapping[str, ir.Value], prefix: str, what: str
) -> ModelProto:
    """Return a copy of the model whose inputs have the shapes of `values`; its other symbolic
    dimensions get a prefix.

    The symbols of an input with a value are replaced in inputs without a value, too.
    """
    stated = ModelProto()
    stated.CopyFrom(proto)
    del stated.graph.value_info[:]
    for y in stated.graph.output:
        y.type.tensor_type.ClearField("shape")
    lengths: dict[str, Dim] = {}
    inputs = [ir.from_proto(x) for x in stated.graph.input]
    given = [x for x in inputs if x.name in values]
    fixed = {x.name: _input_shape_from_value(x, values[x.name], lengths, what) for x in given}
    for info, x in zip(stated.graph.input, inputs, strict=True):
        declared = dims(x)
        known = [lengths.get(d) if isinstance(d, str) else d for d in declared or ()]
        shape = fixed.get(x.name, None if declared is None else known)
        if shape is not None:
            pairs = zip(shape, declared or shape, strict=True)
            named = [prefix + own if d is None and isinstance(own, str) else d for d, own in pairs]
            x.shape = ir.Shape(named)
        info.CopyFrom(ir.to_proto(x))
    return stated


def _input_shape_from_value(
    x: ir.Value, value: ir.Value, lengths: dict[str, Dim], what: str
) -> Dims | None:
    """Return the shape of input `x` when `value` is fed to it, and store the lengths of its
    symbolic dimensions in `lengths`.
    """
    declared, shape = dims(x), dims(value)
    where = f"input {printable(x.name)!r} of {what}"
    if value.dtype != x.dtype:
        raise ValueError(
            f"{value.name!r} holds {value.dtype}, and {where} takes {x.dtype}: convert one of the "
            "models"
        )
    if shape is None and declared is not None:
        return tuple(d if isinstance(d, int) else None for d in declared)
    if shape is None or declared is None:
        return shape
    if not shapes_may_be_equal(shape, declared):
        raise ValueError(
            f"{value.name!r} has the shape {shape}, and {where} takes {[*declared]}: choose "
            "another tensor"
        )
    for a, b in zip(shape, declared, strict=True):
        if isinstance(b, str) and a is not None:
            before = lengths.setdefault(b, a)
            if isinstance(before, int) and isinstance(a, int) and before != a:
                raise ValueError(
                    f"{where} has the dimension {b!r}, which is {before} in one value that is fed "
                    f"and {a} in {value.name!r}: feed values of equal lengths"
                )
            lengths[b] = before if isinstance(before, int) else a
    return tuple(b if isinstance(b, int) else a for a, b in zip(shape, declared, strict=True))


def shapes_may_be_equal(a: Dims | None, b: Dims | None) -> bool:
    """Return whether two shapes may be equal: no static dimensions differ."""
    if a is None or b is None:
        return True
    return len(a) == len(b) and not any(
        isinstance(x, int) and isinstance(y, int) and x != y for x, y in zip(a, b, strict=True)
    )


def _convert_to_opset(proto: ModelProto, opset: int, what: str) -> ModelProto:
    """Return the model converted to the version `opset`, which may be newer or older."""
    proto = inline_functions(proto)
    version = get_onnx_opset(proto)
    if version == opset:
        return proto
    try:
        if proto.functions:
            raise ModelError("it has local functions with gradient rules")
        return upgrade_opset(proto, version, opset)
    except ModelError as e:
        raise ModelError(_opset_error(what, version, opset, str(e))) from e


def _check_operators_in_opset(model: ir.Model, opset: int, what: str) -> None:
    """Raise `ModelError` for operators that the version `opset` lacks, and for local functions."""
    for node in all_nodes(model.graph):
        if not opset_has_node(node, opset):
            reason = f"{node.op_type} is newer"
            raise ModelError(_opset_error(what, model.opset_imports[""], opset, reason))
    if model.functions:
        raise ModelError(
            f"{what} has local functions with gradient rules, which cannot be copied: export it "
            "without these functions"
        )


def _opset_error(what: str, version: int, opset: int, reason: str) -> str:
    """Return the error text for a model that cannot be written in an opset."""
    return (
        f"{what}, of opset {version}, cannot be written in opset {opset} of the trained model "
        f"({reason}): convert one of them by onnx.version_converter"
    )


def _rename_values(
    graph: ir.Graph, name: Callable[[str], str], symbols: set[str], prefix: str
) -> None:
    """Rename all values except the inputs, and all symbolic dimensions not in `symbols`.

    The graph to which they are moved may use the old names.
    """

    def prefix_symbol(d: Dim) -> Dim:
        if not isinstance(d, str) or d in symbols or d.startswith(prefix):
            return d
        return f"unk__{prefix}{d}" if d.startswith("unk__") else prefix + d

    inner = [x for subgraph in graph.subgraphs() for x in subgraph.inputs]
    results = [y for node in all_nodes(graph) for y in node.outputs]
    for value in (*graph.inputs, *inner, *results):
        if (shape := dims(value)) is not None:
            value.shape = ir.Shape(map(prefix_symbol, shape))
    constants = [x for subgraph in graph.subgraphs() for x in subgraph.initializers.values()]
    for value in (*inner, *results, *constants):
        if value.name:
            value.name = name(value.name)


def _move_nodes(
    op: Emit, model: ir.Model, values: Mapping[str, ir.Value], shared: dict[str, ir.Value]
) -> tuple[list[ir.Value], list[ir.Value]]:
    """Move the nodes of a model to the graph of `op`; return the model's outputs, and new values
    for inputs that are not in `values`.
    """
    graph, outputs = model.graph, list(model.graph.outputs)
    inputs, nodes = list(graph.inputs), list(graph)
    initializers = list(graph.initializers.values())
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
        if (equal := _equal_constant(value, shared)) is not None:
            ir.convenience.replace_all_uses_with(value, equal)
            continue
        value.name = op.name(str(value.name))
        op.graph.register_initializer(value)
    for node in nodes:
        node.name = None  # the graph gives the node a new name
        op.graph.append(node)
    for domain, version in model.opset_imports.items():
        op.graph.opset_imports.setdefault(domain, version)
    return outputs, others


def _equal_constant(value: ir.Value, shared: dict[str, ir.Value]) -> ir.Value | None:
    """Return the large constant of `shared` that has the name and the elements of `value`; without
    one, add `value` to `shared`.
    """
    tensor, known = value.const_value, shared.setdefault(str(value.name), value).const_value
    if tensor is None or known is None or known is tensor or tensor.nbytes <= _LARGE:
        return None
    is_equal = known.dtype == tensor.dtype and np.array_equal(known.numpy(), tensor.numpy())
    return shared[str(value.name)] if is_equal else None
