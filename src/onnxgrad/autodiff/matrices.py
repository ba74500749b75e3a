"""Jacobians and Hessians, written into a `Builder` in reverse or in forward mode, and row by row.

A weight is the same for all rows, so that its gradient is a sum over them, which one sweep cannot
take apart. Jacobians of each row with respect to weights are a `Scan` over the rows, whose body is
the model of the Jacobians of a single row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import prod

import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.autodiff.derivative_builder import Builder, Derivatives, Result
from onnxgrad.autodiff.reverse import sweep
from onnxgrad.autodiff.row_proofs import UnprovenRows, require_independent_rows
from onnxgrad.errors import unknown
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.tidy import drop_unused, move_out_of_body, take_apart
from onnxgrad.graph.traversal import all_names
from onnxgrad.model import weights as constants
from onnxgrad.model.convert import to_ir, to_proto_and_free
from onnxgrad.model.feeds import inputs_without_default
from onnxgrad.operators.shapes import Dim, dims, rank, static

_MODES = ("auto", "forward", "reverse")


class ForwardMode:
    """Forward-mode derivatives: the gradients of a model, differentiated w.r.t. their cotangents.

    `builder` holds the model of the first builder and its gradients, with the same outputs.
    """

    def __init__(self, first: Builder) -> None:
        cotangents = first.add_cotangents()
        self.builder, self._gradients = gradient_builder(first, cotangents, keep=False)
        inputs = {x.name: x for x in self.builder.graph.inputs}
        opened = (inputs[g.name] for g in cotangents.values())
        self._output_of = dict(zip(opened, self.builder.differentiated, strict=True))
        self.builder.dummies |= self._output_of

    def push_tangents(self, tangents: Derivatives) -> dict[ir.Value, ir.Value]:
        """Return `{output: its tangent}` from `tangents`, `{input or weight: its tangent}`."""
        seeds = {self._gradients[x]: v for x, v in tangents.items()}
        pushed = sweep(self.builder.op, seeds, self._output_of)
        return {self._output_of[cotangent]: v for cotangent, v in pushed.items()}

    def jacobian_columns(self, x: ir.Value, batched: bool) -> dict[ir.Value, ir.Value]:
        """Return `{output: its Jacobian w.r.t. x}`, computed column by column."""
        stacked = self.builder.map_unit_vectors(
            x, lambda unit: self.push_tangents({x: unit}), batched, axis=-1
        )
        return {y: _reshaped_jacobian(self.builder, v, y, x, batched) for y, v in stacked.items()}


def jacobians(builder: Builder, batched: bool, mode: str) -> ModelProto:
    """Return the model of all Jacobians, by forward or reverse mode; "auto" takes the mode of fewer
    passes.
    """
    if mode not in _MODES:
        raise unknown("mode", mode, _MODES)
    columns, rows = (_element_count(v, batched) for v in (builder.wrt, builder.differentiated))
    if mode == "forward" or (mode == "auto" and columns < rows):
        forward = ForwardMode(builder)
        builder = forward.builder
        blocks: dict[ir.Value, dict] = {y: {} for y in builder.differentiated}
        for x in builder.wrt:
            for y, block in forward.jacobian_columns(x, batched).items():
                blocks[y][x] = block
    else:
        blocks = {y: jacobian_of(builder, y, batched) for y in builder.differentiated}
        builder.drop_unreached(x for row in blocks.values() for x in row)
    return builder.build_model(named_blocks(builder, blocks, batched, "jacobian"))


def jacobian_of(builder: Builder, y: ir.Value, batched: bool) -> dict[ir.Value, ir.Value]:
    """Return `{x: the Jacobian of y w.r.t. x}` for the inputs and weights x that `y` depends on."""

    def write_row(unit: ir.Value) -> Derivatives:
        return sweep(builder.op, {y: unit}, builder.wrt)

    stacked = builder.map_unit_vectors(y, write_row, batched, axis=int(batched))
    return {x: _reshaped_jacobian(builder, v, y, x, batched) for x, v in stacked.items()}


def gradient_builder(
    first: Builder, cotangents: Derivatives, keep: bool = True
) -> tuple[Builder, dict[ir.Value, ir.Value]]:
    """Return a builder for the model with its gradients, and `{input or weight: its gradient}`.

    Differentiating once more takes the working dialect, and shapes that emitted nodes may lack.
    With `keep`, the gradients are outputs of the builder.
    """
    gradients = first.write_gradients(cotangents)
    model, n = first.build_with_derivatives("grad", first.wrt, gradients), len(first.wrt)
    builder = Builder(model, [], [str(x.name) for x in first.wrt], own=True)
    builder.origin = first.origin
    opened = dict(zip(builder.wrt, builder.kept[-n:], strict=True))
    if not keep:
        del builder.kept[-n:], builder.differentiated[-n:]
    return builder, opened


def named_blocks(
    builder: Builder, blocks: Mapping[ir.Value, Derivatives], batched: bool, suffix: str
) -> list[Result]:
    """Return pairs (`<y>_<x>_<suffix>`, derivative of y w.r.t. x) for all y and x; zeros if y does
    not depend on x.
    """
    results = []
    for y, row in blocks.items():
        for x in builder.wrt:
            block = row.get(x)
            if block is None:
                zero = builder.op.const(0, y.dtype)
                block = builder.op.Expand(zero, _jacobian_shape(builder, y, x, batched))
            name = str(y.name) if x is y else f"{y.name}_{x.name}"
            results.append((f"{name}_{suffix}", block))
    return results


def _jacobian_shape(
    builder: Builder, y: ir.Value, x: ir.Value, batched: bool
) -> list[int] | ir.Value:
    """Return the shape of the derivative of y w.r.t. x: a list if it is static, else a tensor."""
    op = builder.op
    if rank(y) is None or rank(x) is None:
        return op.Concat(op.shape_of(y), op.shape_of(x), axis=0)
    axes = [(y, i) for i in range(rank(y) or 0)]
    axes += [(x, i) for i in range(int(batched), rank(x) or 0)]
    return op.vector(*(op.dim(v, i) for v, i in axes))


def _reshaped_jacobian(
    builder: Builder, v: ir.Value, y: ir.Value, x: ir.Value, batched: bool
) -> ir.Value:
    """Return `v`, the derivative of y w.r.t. x, reshaped to `_jacobian_shape`."""
    block = builder.op.Reshape(v, _jacobian_shape(builder, y, x, batched), allowzero=1)
    if rank(y) is not None and rank(x) is not None:
        block.shape = ir.Shape([*(dims(y) or ()), *(dims(x) or ())[int(batched) :]])
    return block


def _element_count(values: Sequence[ir.Value], batched: bool) -> int:
    """Return the number of elements of all `values` (in a row), with symbolic dimensions as 1."""
    shapes = [(dims(v) or ())[int(batched) :] for v in values]
    return sum(prod(d for d in shape if isinstance(d, int)) for shape in shapes)


def has_one_element(y: ir.Value, per_row: bool) -> bool:
    """Return whether `y` is proven to have one element (in each row)."""
    shape = dims(y)
    lengths = None if shape is None else static(shape[int(per_row) :])
    return lengths is not None and prod(lengths) == 1


# -- Jacobians of each row with respect to weights ------------------------------------------------


def jacobians_of_rows(
    builder: Builder, proof: bool, of_one: Callable[[ModelProto], ModelProto]
) -> ModelProto:
    """Return the model of the Jacobians of each row with respect to weights and inputs.

    `of_one` returns the model of the Jacobians of a model of one row. With `proof`, raise unless
    rows do not mix.
    """
    length = _common_row_count(builder)
    data = [x for x in builder.graph.inputs if x not in builder.wrt or x in builder.inputs]
    rowed = {str(x.name): x for x in data if _begins_with_rows(x, length)}
    missing = [x.name for x in (builder.inputs if rowed else data) if x.name not in rowed]
    if missing or not rowed:
        raise ValueError(
            f"the inputs {missing} have no rows: do not differentiate by them, or use batched=False"
        )
    if proof and length != 1:  # a single row cannot mix
        _prove_rows_unmixed(builder, data, rowed)
    model = to_ir(of_one(_model_of_one_row(builder.origin, rowed)))
    body = model.graph
    graph = ir.Graph([], [], nodes=[], opset_imports=dict(body.opset_imports), name=body.name)
    op = Emit(graph, all_names(body))
    rows, count = _make_body_inputs_outer(op, body, rowed)
    for value in list(body.initializers.values()):
        graph.register_initializer(body.initializers.pop(str(value.name)))
    names = [str(y.name) for y in body.outputs]
    move_out_of_body(body, op)
    Emit(body, outer=op).give(list(body.outputs))
    drop_unused(body)
    attributes = {"body": body, "num_scan_inputs": len(rows)}
    stacked = op.emit_many("Scan", rows, attributes, outputs=len(names))
    of_inputs = {
        f"{y.name}_{x.name}_jacobian": (rank(y) or 0)
        for y in builder.differentiated
        for x in builder.inputs
    }
    for name, v, y in zip(names, stacked, body.outputs, strict=True):
        if not isinstance(length, int):  # for data without rows, the Scan had one row
            v = op.Slice(v, [0], count, [0])
        ones = [0, of_inputs[name]] if name in of_inputs else [0]
        kept = [d for i, d in enumerate(dims(y) or ()) if i not in ones]
        y.name = op.name(f"{name}_row")  # names are unique in a graph and its bodies
        result = op.Squeeze(v, [1 + i for i in ones])
        result.name, result.type = name, y.type
        result.shape = None if rank(y) is None else ir.Shape([length, *kept])
        graph.outputs.append(result)
    model = ir.Model(graph, ir_version=model.ir_version, functions=list(model.functions.values()))
    constants.record_constants(model, builder.origin)
    return to_proto_and_free(model)


def _common_row_count(builder: Builder) -> Dim:
    """Return the number of rows of all outputs; raise if an output has no rows, or their numbers
    differ.
    """
    lengths = {str(y.name): (dims(y) or (None,))[0] for y in builder.kept}
    first = str(builder.differentiated[0].name)
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


def _begins_with_rows(x: ir.Value, length: Dim) -> bool:
    """Return whether the first axis of an input has the outputs' number of rows, `length`, or any
    symbol if `length` is a symbol.
    """
    shape = dims(x)
    if not shape:
        return False
    return shape[0] == length if isinstance(length, int) else not isinstance(shape[0], int)


def _prove_rows_unmixed(
    builder: Builder, data: Collection[ir.Value], rowed: Collection[str]
) -> None:
    """Raise unless row i of each output depends on row i of the inputs only."""
    if unknown := [x.name for x in data if dims(x) is None]:
        raise ValueError(f"the ranks of the inputs {unknown} are unknown: declare their shapes")
    model = builder.model.clone()
    model.graph.outputs[:] = [
        y for y in model.graph.outputs if y.name in {k.name for k in builder.kept}
    ]
    axes = {str(x.name): 0 if x.name in rowed else None for x in data}
    try:
        require_independent_rows(model, axes, {str(x.name): tuple(dims(x) or ()) for x in data})
    except UnprovenRows as e:
        raise ValueError(
            f'{e}: use batched=False, or batched="unchecked" if you know that row i of the output '
            "depends on row i of the inputs only"
        ) from None
    finally:
        take_apart(model.graph)


def _model_of_one_row(origin: ModelProto, rowed: Collection[str]) -> ModelProto:
    """Return `origin` with inputs of one row; inputs with a default are not changed."""
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


def _make_body_inputs_outer(
    op: Emit, body: ir.Graph, rowed: dict[str, ir.Value]
) -> tuple[list[ir.Value], ir.Value]:
    """Move the inputs of the body to the graph of `op`; return the values whose rows a Scan reads,
    and the count of rows, of shape [1].

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
        if x.is_initializer():  # a default of one row, repeated for all rows
            ones = [1] * ((rank(x) or 1) - 1)
            rows[i] = op.set_type_like(op.Expand(x, op.vector(count, *ones)), x)
    return [op.Unsqueeze(_pad_missing_rows(op, x, missing), [1]) for x in rows], count


def _pad_missing_rows(op: Emit, x: ir.Value, missing: ir.Value) -> ir.Value:
    """Return `x` with `missing` rows of zeros behind it; `x` itself if its number of rows is
    static.
    """
    if isinstance((dims(x) or (None,))[0], int):
        return x
    shape = op.Concat(missing, op.Shape(x, start=1), axis=0)
    return op.Concat(x, op.Expand(op.const(0, x.dtype), shape), axis=0)
