"""Jacobians and Hessians, written into a `Sheet` in reverse or in forward mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.autodiff.sheet import Result, Sheet
from onnxgrad.graph.shapes import dims, rank, static

Gradients = Mapping[ir.Value, ir.Value]  # from a value to a derivative of it


class Forward:
    """The forward mode of a sheet: its gradients, differentiated with respect to the cotangents.

    Attributes:
        sheet: a sheet with gradients, made from the given one.
        wrt: the inputs and weights in that sheet.
        outputs: the differentiated outputs in that sheet.
    """

    def __init__(self, first: Sheet) -> None:
        seeds = [(y, first.input_like(y, "grad")) for y in first.differentiated]
        gradients = first.gradients(seeds, first.wrt)
        first.drop_unreached(gradients)
        results = [(f"{x.name}_grad", g) for x, g in gradients.items()]
        self.sheet, opened = reopened(first, results)
        inputs = {x.name: x for x in self.sheet.graph.inputs}
        self.wrt = [inputs[x.name] for x in first.wrt]
        del self.sheet.kept[len(self.sheet.kept) - len(opened) :]
        self._gradients = dict(zip((inputs[x.name] for x in gradients), opened, strict=True))
        kept = {y.name: y for y in self.sheet.kept}
        self.outputs = [kept[y.name] for y in first.differentiated]
        cotangents = [inputs[str(g.name)] for _, g in seeds]
        self._output_of = dict(zip(cotangents, self.outputs, strict=True))
        for cotangent, y in self._output_of.items():
            self.sheet.remove_at_end(cotangent, y)

    def push(self, tangents: Gradients) -> dict[ir.Value, ir.Value]:
        """Return the tangents of the outputs that depend on the keys of `tangents`."""
        seeds = [(self._gradients[x], v) for x, v in tangents.items() if x in self._gradients]
        pushed = self.sheet.gradients(seeds, list(self._output_of))
        return {self._output_of[cotangent]: v for cotangent, v in pushed.items()}

    def columns(self, x: ir.Value, batched: bool) -> dict[ir.Value, ir.Value]:
        """Return for each output its Jacobian with respect to `x`."""
        stacked = self.sheet.loop(x, lambda unit: self.push({x: unit}), batched, axis=-1)
        return {y: _shaped(self.sheet, v, y, x, batched) for y, v in stacked.items()}


def jacobians_by_columns(first: Sheet, batched: bool) -> ModelProto:
    """Return the model of the Jacobians, in forward mode."""
    forward = Forward(first)
    columns = {x: forward.columns(x, batched) for x in forward.wrt}
    jacobians = {y: {x: c[y] for x, c in columns.items() if y in c} for y in forward.outputs}
    sheet = forward.sheet
    return sheet.finish(all_blocks(sheet, jacobians, forward.wrt, batched, "jacobian"))


def jacobians_by_rows(sheet: Sheet, batched: bool) -> ModelProto:
    """Return the model of the Jacobians, in reverse mode."""
    jacobians = {y: row_blocks(sheet, y, sheet.wrt, batched) for y in sheet.differentiated}
    sheet.drop_unreached(x for row in jacobians.values() for x in row)
    return sheet.finish(all_blocks(sheet, jacobians, sheet.wrt, batched, "jacobian"))


def row_blocks(
    sheet: Sheet, y: ir.Value, wrt: Sequence[ir.Value], batched: bool
) -> dict[ir.Value, ir.Value]:
    """Return the Jacobian of `y` with respect to each of `wrt` that it depends on."""
    stacked = sheet.loop(
        y, lambda unit: sheet.gradients([(y, unit)], wrt), batched, axis=int(batched)
    )
    return {x: _shaped(sheet, v, y, x, batched) for x, v in stacked.items()}


def with_gradients(first: Sheet, per_row: bool = False) -> tuple[Sheet, dict[ir.Value, ir.Value]]:
    """Return a sheet that has the gradients as outputs, and `{input or weight: its gradient}`.

    The cotangent of a single output of one element (in each row) is one; otherwise the cotangents
    are inputs.
    """
    outputs = first.differentiated
    alone = len(outputs) == 1 and is_single(outputs[0], per_row)
    seeds = [(y, first.op.ones_like(y) if alone else first.input_like(y, "grad")) for y in outputs]
    gradients = first.gradients(seeds, first.wrt)
    first.drop_unreached(gradients)
    sheet, opened = reopened(first, all_named(first, "grad", first.wrt, gradients))
    inputs = {x.name: x for x in sheet.graph.inputs}
    return sheet, {inputs[x.name]: g for x, g in zip(first.wrt, opened, strict=True)}


def reopened(first: Sheet, results: Sequence[Result]) -> tuple[Sheet, list[ir.Value]]:
    """Finish a sheet, and return a new one of the resulting model, and `results` in it.

    Differentiating once more takes the working dialect, and shapes that emitted nodes may lack.
    """
    sheet = Sheet(first.finish(results), [], [])
    sheet.origin = first.origin
    return sheet, sheet.kept[len(sheet.kept) - len(results) :]


def all_named(
    sheet: Sheet, suffix: str, values: Sequence[ir.Value], derivatives: Gradients
) -> list[Result]:
    """Return the derivative of each of `values` as `<x>_<suffix>`: zeros if it has none."""
    results = []
    for x in values:
        v = derivatives[x] if x in derivatives else sheet.op.zeros_like(x)
        results.append((f"{x.name}_{suffix}", sheet.op.set_type_like(v, x)))
    return results


def all_blocks(
    sheet: Sheet,
    blocks: Mapping[ir.Value, Gradients],
    wrt: Sequence[ir.Value],
    batched: bool,
    suffix: str,
) -> list[Result]:
    """Return the block of every pair y, x as `<y>_<x>_<suffix>`: zeros if it is missing."""
    results = []
    for y, row in blocks.items():
        for x in wrt:
            block = row.get(x)
            if block is None:
                shape = _shape(sheet, y, x, batched)
                assert y.dtype is not None
                zero = ir.tensor(np.zeros(1, y.dtype.numpy()))
                block = sheet.op.ConstantOfShape(shape, value=zero)
                block.dtype = y.dtype
            name = str(y.name) if x is y else f"{y.name}_{x.name}"
            results.append((f"{name}_{suffix}", block))
    return results


def _shape(sheet: Sheet, y: ir.Value, x: ir.Value, batched: bool) -> list[int] | ir.Value:
    """Return the shape of a block, as a list if it is static, else as a tensor."""
    op = sheet.op
    if rank(y) is None or rank(x) is None:
        return op.Concat(op.shape_of(y), op.shape_of(x), axis=0)
    axes = [(y, i) for i in range(rank(y) or 0)]
    axes += [(x, i) for i in range(int(batched), rank(x) or 0)]
    return op.vector(*(op.dim(v, i) for v, i in axes))


def _shaped(sheet: Sheet, v: ir.Value, y: ir.Value, x: ir.Value, batched: bool) -> ir.Value:
    """Return the block `v` of y and x, reshaped to `_shape`."""
    block = sheet.op.Reshape(v, _shape(sheet, y, x, batched), allowzero=1)
    if rank(y) is not None and rank(x) is not None:
        block.shape = ir.Shape([*(dims(y) or ()), *(dims(x) or ())[int(batched) :]])
    return block


def total_size(values: Sequence[ir.Value], batched: bool) -> int:
    """Return the number of elements of all `values` (in a row), with symbolic dimensions as one."""
    shapes = [(dims(v) or ())[int(batched) :] for v in values]
    return sum(prod(d for d in shape if isinstance(d, int)) for shape in shapes)


def is_single(y: ir.Value, per_row: bool) -> bool:
    """Return whether `y` is proven to have one element (in each row)."""
    shape = dims(y)
    lengths = None if shape is None else static(shape[int(per_row) :])
    return lengths is not None and prod(lengths) == 1
