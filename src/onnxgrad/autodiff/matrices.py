"""Jacobians and Hessians, written into a `Sheet` in reverse or in forward mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.autodiff.reverse import sweep
from onnxgrad.autodiff.sheet import Derivatives, Result, Sheet
from onnxgrad.errors import unknown
from onnxgrad.operators.shapes import dims, rank, static

_MODES = ("auto", "forward", "reverse")


class Forward:
    """The forward mode of a sheet: its gradients, differentiated with respect to the cotangents.

    `sheet` is one of the given one and its gradients, with the same outputs.
    """

    def __init__(self, first: Sheet) -> None:
        cotangents = first.cotangents()
        self.sheet, self._gradients = with_gradients(first, cotangents, keep=False)
        inputs = {x.name: x for x in self.sheet.graph.inputs}
        opened = (inputs[g.name] for g in cotangents.values())
        self._output_of = dict(zip(opened, self.sheet.differentiated, strict=True))
        self.sheet.dummies |= self._output_of

    def push_tangents(self, tangents: Derivatives) -> dict[ir.Value, ir.Value]:
        """Return the tangents of the outputs that depend on the keys of `tangents`."""
        seeds = {self._gradients[x]: v for x, v in tangents.items()}
        pushed = sweep(self.sheet.op, seeds, self._output_of)
        return {self._output_of[cotangent]: v for cotangent, v in pushed.items()}

    def jacobian_columns(self, x: ir.Value, batched: bool) -> dict[ir.Value, ir.Value]:
        """Return for each output its Jacobian with respect to `x`."""
        stacked = self.sheet.map_unit_vectors(
            x, lambda unit: self.push_tangents({x: unit}), batched, axis=-1
        )
        return {y: _reshaped_block(self.sheet, v, y, x, batched) for y, v in stacked.items()}


def jacobians(sheet: Sheet, batched: bool, mode: str) -> ModelProto:
    """Return the model of the Jacobians, in the mode of fewer passes if `mode` is "auto"."""
    if mode not in _MODES:
        raise unknown("mode", mode, _MODES)
    columns, rows = (_total_size(v, batched) for v in (sheet.wrt, sheet.differentiated))
    if mode == "forward" or (mode == "auto" and columns < rows):
        forward = Forward(sheet)
        sheet = forward.sheet
        blocks: dict[ir.Value, dict] = {y: {} for y in sheet.differentiated}
        for x in sheet.wrt:
            for y, block in forward.jacobian_columns(x, batched).items():
                blocks[y][x] = block
    else:
        blocks = {y: row_blocks(sheet, y, batched) for y in sheet.differentiated}
        sheet.drop_unreached(x for row in blocks.values() for x in row)
    return sheet.finish(all_blocks(sheet, blocks, batched, "jacobian"))


def row_blocks(sheet: Sheet, y: ir.Value, batched: bool) -> dict[ir.Value, ir.Value]:
    """Return the Jacobian of `y` with respect to each of `wrt` that it depends on."""

    def write(unit: ir.Value) -> Derivatives:
        return sweep(sheet.op, {y: unit}, sheet.wrt)

    stacked = sheet.map_unit_vectors(y, write, batched, axis=int(batched))
    return {x: _reshaped_block(sheet, v, y, x, batched) for x, v in stacked.items()}


def with_gradients(
    first: Sheet, cotangents: Derivatives, keep: bool = True
) -> tuple[Sheet, dict[ir.Value, ir.Value]]:
    """Return a sheet of the model and its gradients, and `{input or weight: its gradient}`.

    Differentiating once more takes the working dialect, and shapes that emitted nodes may lack.
    With `keep`, the gradients are outputs of the sheet.
    """
    gradients = first.gradients(cotangents)
    results = all_named(first, "grad", first.wrt, gradients)
    sheet = Sheet(first.finish(results), [], [str(x.name) for x in first.wrt], own=True)
    sheet.origin = first.origin
    opened = dict(zip(sheet.wrt, sheet.kept[-len(results) :], strict=True))
    if not keep:
        del sheet.kept[-len(results) :], sheet.differentiated[-len(results) :]
    return sheet, opened


def all_named(
    sheet: Sheet, suffix: str, values: Sequence[ir.Value], derivatives: Derivatives
) -> list[Result]:
    """Return the derivative of each of `values` as `<x>_<suffix>`: zeros if it has none."""
    return [(f"{x.name}_{suffix}", sheet.or_zeros(derivatives, x)) for x in values]


def all_blocks(
    sheet: Sheet, blocks: Mapping[ir.Value, Derivatives], batched: bool, suffix: str
) -> list[Result]:
    """Return the block of every pair y, x as `<y>_<x>_<suffix>`: zeros if it is missing."""
    results = []
    for y, row in blocks.items():
        for x in sheet.wrt:
            block = row.get(x)
            if block is None:
                zero = sheet.op.const(0, y.dtype)
                block = sheet.op.Expand(zero, _block_shape(sheet, y, x, batched))
            name = str(y.name) if x is y else f"{y.name}_{x.name}"
            results.append((f"{name}_{suffix}", block))
    return results


def _block_shape(sheet: Sheet, y: ir.Value, x: ir.Value, batched: bool) -> list[int] | ir.Value:
    """Return the shape of a block, as a list if it is static, else as a tensor."""
    op = sheet.op
    if rank(y) is None or rank(x) is None:
        return op.Concat(op.shape_of(y), op.shape_of(x), axis=0)
    axes = [(y, i) for i in range(rank(y) or 0)]
    axes += [(x, i) for i in range(int(batched), rank(x) or 0)]
    return op.vector(*(op.dim(v, i) for v, i in axes))


def _reshaped_block(sheet: Sheet, v: ir.Value, y: ir.Value, x: ir.Value, batched: bool) -> ir.Value:
    """Return the block `v` of y and x, reshaped to `_block_shape`."""
    block = sheet.op.Reshape(v, _block_shape(sheet, y, x, batched), allowzero=1)
    if rank(y) is not None and rank(x) is not None:
        block.shape = ir.Shape([*(dims(y) or ()), *(dims(x) or ())[int(batched) :]])
    return block


def _total_size(values: Sequence[ir.Value], batched: bool) -> int:
    """Return the number of elements of all `values` (in a row), with symbolic dimensions as one."""
    shapes = [(dims(v) or ())[int(batched) :] for v in values]
    return sum(prod(d for d in shape if isinstance(d, int)) for shape in shapes)


def is_single(y: ir.Value, per_row: bool) -> bool:
    """Return whether `y` is proven to have one element (in each row)."""
    shape = dims(y)
    lengths = None if shape is None else static(shape[int(per_row) :])
    return lengths is not None and prod(lengths) == 1
