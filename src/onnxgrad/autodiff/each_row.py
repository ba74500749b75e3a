"""Jacobians of each row with respect to weights: a `Scan` over the rows.

A weight is the same for all rows, so that its gradient is a sum over them, which one sweep cannot
take apart. The body of the `Scan` is the model of the Jacobians of a single row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.autodiff.row_proofs import UnprovenRows, require_apart
from onnxgrad.autodiff.sheet import Sheet
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.tidy import drop_unused, move_out
from onnxgrad.graph.traversal import all_names
from onnxgrad.model import weights as constants
from onnxgrad.model.convert import to_ir, to_proto
from onnxgrad.model.feeds import inputs_without_default
from onnxgrad.operators.shapes import Dim, dims, rank


def jacobians_of_rows(
    sheet: Sheet, proof: bool, of_one: Callable[[ModelProto], ModelProto]
) -> ModelProto:
    """Return the model of the Jacobians of each row with respect to weights and inputs.

    `of_one` returns the model of the Jacobians of a model of one row. With `proof`, raise unless
    rows do not mix.
    """
    length = _row_count(sheet)
    data = [x for x in sheet.graph.inputs if x not in sheet.wrt or x in sheet.inputs]
    rowed = {str(x.name): x for x in data if _has_rows(x, length)}
    missing = [x.name for x in (sheet.inputs if rowed else data) if x.name not in rowed]
    if missing or not rowed:
        raise ValueError(
            f"the inputs {missing} have no rows: do not differentiate by them, or use batched=False"
        )
    if proof and length != 1:  # a single row cannot mix
        _prove_rows_apart(sheet, data, rowed)
    model = to_ir(of_one(_of_one_row(sheet.origin, rowed)))
    body = model.graph
    graph = ir.Graph([], [], nodes=[], opset_imports=dict(body.opset_imports), name=body.name)
    op = Emit(graph, all_names(body))
    rows, count = _inputs_outside(op, body, rowed)
    for value in list(body.initializers.values()):
        graph.register_initializer(body.initializers.pop(str(value.name)))
    names = [str(y.name) for y in body.outputs]
    move_out(body, op)
    Emit(body, outer=op).give(list(body.outputs))
    drop_unused(body)
    attributes = {"body": body, "num_scan_inputs": len(rows)}
    stacked = op.emit_many("Scan", rows, attributes, outputs=len(names))
    of_inputs = {
        f"{y.name}_{x.name}_jacobian": (rank(y) or 0)
        for y in sheet.differentiated
        for x in sheet.inputs
    }
    for name, v, y in zip(names, stacked, body.outputs, strict=True):
        if not isinstance(length, int):  # without rows, the Scan had one
            v = op.Slice(v, [0], count, [0])
        ones = [0, of_inputs[name]] if name in of_inputs else [0]
        kept = [d for i, d in enumerate(dims(y) or ()) if i not in ones]
        y.name = op.name(f"{name}_row")  # names are unique in a graph and its bodies
        result = op.Squeeze(v, [1 + i for i in ones])
        result.name, result.type = name, y.type
        result.shape = None if rank(y) is None else ir.Shape([length, *kept])
        graph.outputs.append(result)
    model = ir.Model(graph, ir_version=model.ir_version, functions=list(model.functions.values()))
    constants.note_constants(model, sheet.origin)
    return to_proto(model)


def _row_count(sheet: Sheet) -> Dim:
    """Return the number of rows of the outputs; raise if one has none, or another number."""
    lengths = {str(y.name): (dims(y) or (None,))[0] for y in sheet.kept}
    first = str(sheet.differentiated[0].name)
    length = lengths[first]
    if length is None:
        raise ValueError(
            f"the rows of {first!r} are not known: declare the shapes of the inputs in the model, "
            "or use batched=False"
        )
    if others := [name for name, d in lengths.items() if d is None or d != length]:
        raise ValueError(
            f"the outputs {others} do not have the rows of {first!r}: name the `outputs` to keep, "
            "or use batched=False"
        )
    return length


def _has_rows(x: ir.Value, length: Dim) -> bool:
    """Return whether the first axis of an input is the rows: of any symbol, if theirs is one."""
    shape = dims(x)
    if not shape:
        return False
    return shape[0] == length if isinstance(length, int) else not isinstance(shape[0], int)


def _prove_rows_apart(sheet: Sheet, data: Collection[ir.Value], rowed: Collection[str]) -> None:
    """Raise unless row i of each output depends on row i of the inputs only."""
    if unknown := [x.name for x in data if dims(x) is None]:
        raise ValueError(f"the ranks of the inputs {unknown} are unknown: declare their shapes")
    model = sheet.model.clone()
    model.graph.outputs[:] = [
        y for y in model.graph.outputs if y.name in {k.name for k in sheet.kept}
    ]
    axes = {str(x.name): 0 if x.name in rowed else None for x in data}
    try:
        require_apart(model, axes, {str(x.name): tuple(dims(x) or ()) for x in data})
    except UnprovenRows as e:
        raise ValueError(
            f'{e}: use batched=False, or batched="unchecked" if you know that row i of the output '
            "depends on row i of the inputs only"
        ) from None


def _of_one_row(origin: ModelProto, rowed: Collection[str]) -> ModelProto:
    """Return the model of one row; inputs with a default keep their rows."""
    one = ModelProto()
    one.CopyFrom(origin)
    del one.graph.value_info[:]
    for x in inputs_without_default(one):
        if x.name in rowed:
            x.type.tensor_type.shape.dim[0].Clear()
            x.type.tensor_type.shape.dim[0].dim_value = 1
    for y in one.graph.output:
        if y.type.HasField("tensor_type"):
            y.type.tensor_type.ClearField("shape")
    return one


def _inputs_outside(
    op: Emit, body: ir.Graph, rowed: dict[str, ir.Value]
) -> tuple[list[ir.Value], ir.Value]:
    """Give the graph of `op` the inputs of the body; return their rows, and how many, [1].

    The rows, for a `Scan`, are at least one: onnxruntime has no Scan of no iterations.
    """
    rows = []
    for x in list(body.inputs):
        default = body.initializers.pop(str(x.name), None)
        if str(x.name) not in rowed:
            body.inputs.remove(whole := x)
        else:
            shape = x.shape if default else rowed[str(x.name)].shape
            whole = ir.Value(name=x.name, type=x.type, shape=shape, const_value=x.const_value)
            x.name, x.const_value = op.name(f"{x.name}_row"), None
            rows.append(whole)
        op.graph.inputs.append(whole)
        if default:
            op.graph.initializers.add(whole)
    count = op.Shape(next(x for x in rows if not x.is_initializer()), start=0, end=1)
    missing = op.Max(op.Sub([1], count), [0])
    for i, x in enumerate(rows):
        if x.is_initializer():  # a default, whose one row is repeated for all
            ones = [1] * ((rank(x) or 1) - 1)
            rows[i] = op.set_type_like(op.Expand(x, op.vector(count, *ones)), x)
    return [op.Unsqueeze(_with_missing_rows(op, x, missing), [1]) for x in rows], count


def _with_missing_rows(op: Emit, x: ir.Value, missing: ir.Value) -> ir.Value:
    """Return `x` with so many rows of zeros more, if its number of rows is not static."""
    if isinstance((dims(x) or (None,))[0], int):
        return x
    shape = op.Concat(missing, op.Shape(x, start=1), axis=0)
    return op.Concat(x, op.Expand(op.const(0, x.dtype), shape), axis=0)
