"""Products with the Jacobian and the Hessian, and these matrices, as models.

All are compositions of one sweep, which gives J^T u. That is linear in u, so that the gradient of
<J^T u, v> by u is J v (Christianson 1992, IMA J. Numer. Anal. 12(2), for H v; Townsend 2017, "A new
trick for calculating Jacobian vector products"): forward mode without rules of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.autodiff.batch_axis import require_rows
from onnxgrad.autodiff.derivative import garbage_kept
from onnxgrad.autodiff.sheet import Result, Sheet
from onnxgrad.errors import unknown
from onnxgrad.graph.shapes import dims, rank, static
from onnxgrad.model.read import ModelLike

_MODES = ("auto", "forward", "reverse")
_BATCHED = (True, False, "unchecked")


def vjp(
    model: ModelLike,
    weights: Sequence[str] | None = (),
    inputs: Sequence[str] | None = None,
    outputs: Sequence[str] | None = None,
) -> ModelProto:
    """Return the model of the outputs and of vector-Jacobian products J^T u, the gradients.

    Inputs of the result: those of `model`, the weights, then u as `Y_grad` for every float output
    Y, of Y's shape and dtype. Outputs: those of `model`, then `X_grad` and `W_grad` for the inputs
    and weights, of the shape and dtype of X or W; zeros for one that was named and that no output
    depends on. `onnx_derivative` has more options, and leaves the outputs out.

    Args:
        model: model, serialized model or path; never modified.
        weights: names of weights, which become inputs; see `onnx_derivative`. None: every one that
            the outputs depend on; by default none.
        inputs: names of inputs. None: every float input that the outputs depend on.
        outputs: names of the float outputs to differentiate; the result has no others. None: all
            floats, and the others are kept.

    Raises:
        ValueError: an unknown name, one named twice, one of a value that is no float, or no
            differentiable path between any of them.
        ModelError: `model` cannot be read.
        NoGradientRule: an operator on the way has no rule.
    """
    with garbage_kept():
        sheet = Sheet(model, weights, inputs, outputs)
        seeds = [(y, sheet.input_like(y, "grad")) for y in sheet.real]
        found = sheet.pull(seeds, sheet.wanted)
        sheet.settle(found)
        return sheet.finish(_named(sheet, "grad", sheet.wanted, found))


def jvp(
    model: ModelLike,
    weights: Sequence[str] | None = (),
    inputs: Sequence[str] | None = None,
    outputs: Sequence[str] | None = None,
) -> ModelProto:
    """Return the model of the outputs and of Jacobian-vector products J v, their tangents.

    Inputs of the result: those of `model`, the weights, then v as `X_tangent` and `W_tangent` for
    the inputs and weights, of the shape and dtype of X or W. Outputs: those of `model`, then
    `Y_tangent` for every float output Y, of Y's shape and dtype: sum over X of (dY/dX) X_tangent;
    zeros for one that depends on none of them.

    It is the gradient of the gradient by what arrives there (Townsend 2017), of which only the part
    that is J v stays: about as many operations as two forward passes.

    Args:
        model: model, serialized model or path; never modified.
        weights: names of weights, which become inputs; see `onnx_derivative`. None: every one that
            the outputs depend on; by default none.
        inputs: names of inputs. None: every float input that the outputs depend on.
        outputs: names of the float outputs to differentiate; the result has no others. None: all
            floats, and the others are kept.

    Raises:
        ValueError: an unknown name, one named twice, one of a value that is no float, or no
            differentiable path between any of them.
        ModelError: `model` cannot be read.
        NoGradientRule: an operator on the way has no rule, or one that is not linear in the
            gradient that it takes.
    """
    with garbage_kept():
        forward = _Forward(Sheet(model, weights, inputs, outputs))
        sheet = forward.sheet
        vectors = {x: sheet.input_like(x, "tangent") for x in forward.wanted}
        found = forward.push(vectors)
        return sheet.finish(_named(sheet, "tangent", forward.real, found))


def hvp(
    model: ModelLike,
    weights: Sequence[str] | None = (),
    inputs: Sequence[str] | None = None,
    outputs: Sequence[str] | None = None,
) -> ModelProto:
    """Return the model of the outputs, of a gradient, and of Hessian-vector products H v.

    The function is the output, if it is one of a single element such as a loss; otherwise it is the
    sum over the float outputs Y of the elements of `Y_grad Y`, with `Y_grad` fed.

    Inputs of the result: those of `model`, the weights, `Y_grad` unless the output has one element,
    then v as `X_vector` and `W_vector` for the inputs and weights. Outputs: those of `model`, then
    `X_grad` and `W_grad`, then `X_hvp` and `W_hvp`: the rows of X or W in H v, H being the Hessian
    by all of them together. All are of the shape and dtype of X or W; zeros where there is no
    dependence. Reverse mode over reverse mode (Christianson 1992).

    Args:
        model: model, serialized model or path; never modified. With a loss: see `add_loss_output`.
        weights: names of weights, which become inputs; see `onnx_derivative`. None: every one that
            the outputs depend on; by default none. For those of a loss: `weights=None, inputs=[]`.
        inputs: names of inputs. None: every float input that the outputs depend on.
        outputs: names of the float outputs that count; the result has no others. None: all floats,
            and the others are kept.

    Raises:
        ValueError: an unknown name, one named twice, one of a value that is no float, or no
            differentiable path between any of them.
        ModelError: `model` cannot be read.
        NoGradientRule: an operator on the way has no rule.
    """
    with garbage_kept():
        sheet, gradients = _with_gradients(Sheet(model, weights, inputs, outputs))
        vectors = [(g, sheet.input_like(x, "vector")) for x, g in gradients.items()]
        found = sheet.pull(vectors, list(gradients))
        return sheet.finish(_named(sheet, "hvp", list(gradients), found))


def jacobian(
    model: ModelLike,
    weights: Sequence[str] | None = (),
    inputs: Sequence[str] | None = None,
    outputs: Sequence[str] | None = None,
    batched: bool | str = False,
    mode: str = "auto",
) -> ModelProto:
    """Return the model of the outputs and of their Jacobians.

    Inputs of the result: those of `model`, then the weights. Outputs: those of `model`, then, for
    every float output Y and every input or weight X, `Y_X_jacobian` of Y's dtype and of shape
    `(*Y.shape, *X.shape)`: dY/dX. With `batched`, of shape `(N, *Y.shape[1:], *X.shape[1:])`: the
    derivative of each of the N rows of Y by the same row of X. Zeros where there is no dependence.

    What does not depend on the row or column is computed once; the rest is the body of one `Scan`.

    Args:
        model: model, serialized model or path; never modified.
        weights: names of weights, which become inputs; see `onnx_derivative`. None: every one that
            the outputs depend on; by default none.
        inputs: names of inputs. None: every float input that the outputs depend on.
        outputs: names of the float outputs to differentiate; the result has no others. None: all
            floats, and the others are kept.
        batched: True for models whose rows do not mix, which is proven from the graph first.
            "unchecked" leaves out the proof: where rows mix, what comes out is then the sum over
            the rows of Y (in reverse mode) or of X (in forward mode). Only by inputs: of a weight,
            the Jacobian that is not batched has one block for every row of Y.
        mode: "reverse" has one pass for every element of Y (or of its row), "forward" one for every
            element of X; "auto" takes the fewer, as far as they are known, else "reverse".

    Raises:
        ValueError: an unknown name or mode, one named twice, one of a value that is no float, no
            differentiable path between any of them, `batched` with weights, or with rows that mix
            or that may mix.
        ModelError: `model` cannot be read.
        NoGradientRule: an operator on the way has no rule, or in forward mode one that is not
            linear in the gradient that it takes.
    """
    if mode not in _MODES:
        raise unknown("mode", mode, _MODES)
    with garbage_kept():
        sheet, per_row = _open(model, weights, inputs, outputs, batched), bool(batched)
        columns, rows = (_elements(v, per_row) for v in (sheet.wanted, sheet.real))
        if mode == "forward" or (mode == "auto" and columns < rows):
            return _by_columns(sheet, per_row)
        found = {y: _rows(sheet, y, sheet.wanted, per_row) for y in sheet.real}
        sheet.settle(x for row in found.values() for x in row)
        return sheet.finish(_blocks(sheet, found, sheet.wanted, per_row, "jacobian"))


def hessian(
    model: ModelLike,
    weights: Sequence[str] | None = (),
    inputs: Sequence[str] | None = None,
    output: str | None = None,
    batched: bool | str = False,
) -> ModelProto:
    """Return the model of an output of one element, of its gradient and its Hessian.

    Inputs of the result: those of `model`, then the weights. Outputs: the one chosen, Y, then
    `X_grad`, then for every pair of inputs or weights `X_Z_hessian` of shape
    `(*X.shape, *Z.shape)`: the derivative of X_grad by Z; `X_hessian` where Z is X. With `batched`,
    of shape `(N, *X.shape[1:], *Z.shape[1:])`, for an output of one element in each of N rows.
    Zeros where there is no dependence.

    Its rows are Hessian-vector products, one for every element of X (or of its row), in one `Scan`.

    Args:
        model: model, serialized model or path; never modified. With a loss: see `add_loss_output`.
        weights: names of weights, which become inputs; see `onnx_derivative`. None: every one that
            the output depends on; by default none. For those of a loss: `weights=None, inputs=[]`.
        inputs: names of inputs. None: every float input that the output depends on.
        output: name of the output. None: the only one that holds floats.
        batched: see `jacobian`.

    Raises:
        ValueError: an unknown name, one named twice, one of a value that is no float, an output
            that is not known to have one element (in each row), several outputs of which none is
            named, no differentiable path, `batched` with weights, or with rows that mix or that may
            mix.
        ModelError: `model` cannot be read.
        NoGradientRule: an operator on the way has no rule.
    """
    with garbage_kept():
        chosen = None if output is None else [output]
        sheet, per_row = _open(model, weights, inputs, chosen, batched), bool(batched)
        if len(sheet.real) != 1:
            names = [y.name for y in sheet.real]
            raise ValueError(f"the model has the float outputs {names}: name one as `output`")
        (y,) = sheet.real
        sheet.kept, sheet.graph.outputs[:] = [y], [y]
        if not _single(y, per_row):
            raise ValueError(
                f"output {y.name!r} of shape {dims(y)} is not known to have one element"
                f"{' in each row' * per_row}: the Hessian is that of one number; choose or add an "
                "output that is, or take `hvp`, which is fed what the elements count"
            )
        sheet, gradients = _with_gradients(sheet, per_row)
        wanted = list(gradients)
        found = {x: _rows(sheet, g, wanted, per_row) for x, g in gradients.items()}
        return sheet.finish(_blocks(sheet, found, wanted, per_row, "hessian"))


# -- what they are made of --------------------------------------------------------------------


def _open(model, weights, inputs, outputs, batched: bool | str) -> Sheet:
    """Return the sheet of a Jacobian; if it is to be batched, with rows that are known not to mix.

    Raises:
        ValueError: rows that mix, or that may, or weights.
    """
    if batched not in _BATCHED:
        raise unknown("value of `batched`", batched, map(str, _BATCHED))
    sheet = Sheet(model, weights, inputs, outputs, rows=bool(batched))
    if batched and len(sheet.wanted) > len(sheet.inputs):
        names = [w.name for w in sheet.wanted[len(sheet.inputs) :]]
        raise ValueError(
            f"batched derivatives are by inputs, which have rows, not by the weights {names}: "
            "with batched=False, that by a weight has a block for every row of the output"
        )
    if batched:
        require_rows(sheet.graph, sheet.wanted, sheet.real, proof=batched != "unchecked")
    return sheet


class _Forward:
    """The forward mode of a sheet: its gradients, differentiated by what arrives at the outputs.

    Attributes:
        sheet: the sheet with gradients.
        wanted: the inputs and weights there.
        real: the outputs there that are differentiated.
    """

    def __init__(self, first: Sheet) -> None:
        arriving = [(y, first.input_like(y, "grad")) for y in first.real]
        found = first.pull(arriving, first.wanted)
        first.settle(found)
        dummies = [str(g.name) for _, g in arriving]
        self.sheet, made = _reopened(first, [(f"{x.name}_grad", g) for x, g in found.items()])
        named = {x.name: x for x in self.sheet.graph.inputs}
        self.wanted = [named[x.name] for x in first.wanted]
        del self.sheet.kept[len(self.sheet.kept) - len(made) :]
        self._gradients = dict(zip((named[x.name] for x in found), made, strict=True))
        outputs = {y.name: y for y in self.sheet.kept}
        self.real = [outputs[y.name] for y in first.real]
        self._of = {named[d]: y for d, y in zip(dummies, self.real, strict=True)}
        for dummy, y in self._of.items():
            self.sheet.forget(dummy, y)

    def push(self, vectors: dict[ir.Value, ir.Value]) -> dict[ir.Value, ir.Value]:
        """Return the tangents of those outputs that depend on inputs or weights with a vector."""
        seeds = [(self._gradients[x], v) for x, v in vectors.items() if x in self._gradients]
        found = self.sheet.pull(seeds, list(self._of))
        return {self._of[dummy]: v for dummy, v in found.items()}

    def columns(self, x: ir.Value, batched: bool) -> dict[ir.Value, ir.Value]:
        """Return for each output its Jacobian by `x`."""
        made = self.sheet.loop(x, lambda unit: self.push({x: unit}), batched, axis=-1)
        return {y: _shaped(self.sheet, v, y, x, batched) for y, v in made.items()}


def _by_columns(first: Sheet, batched: bool) -> ModelProto:
    """Return the model of the Jacobians, in forward mode."""
    forward = _Forward(first)
    columns = {x: forward.columns(x, batched) for x in forward.wanted}
    found = {y: {x: c[y] for x, c in columns.items() if y in c} for y in forward.real}
    sheet = forward.sheet
    return sheet.finish(_blocks(sheet, found, forward.wanted, batched, "jacobian"))


def _rows(
    sheet: Sheet, y: ir.Value, wrt: Sequence[ir.Value], batched: bool
) -> dict[ir.Value, ir.Value]:
    """Return the Jacobian of `y` by those of `wrt` that it depends on, in reverse mode."""
    made = sheet.loop(y, lambda unit: sheet.pull([(y, unit)], wrt), batched, axis=int(batched))
    return {x: _shaped(sheet, v, y, x, batched) for x, v in made.items()}


def _with_gradients(first: Sheet, per_row: bool = False) -> tuple[Sheet, dict[ir.Value, ir.Value]]:
    """Return the sheet that has gradients as outputs, and `{input or weight: its gradient}`.

    A single output of one element (in each row) counts once; otherwise what it counts is fed.
    """
    alone = len(first.real) == 1 and _single(first.real[0], per_row)
    seeds = [
        (y, first.op.ones_like(y) if alone else first.input_like(y, "grad")) for y in first.real
    ]
    found = first.pull(seeds, first.wanted)
    first.settle(found)
    sheet, made = _reopened(first, _named(first, "grad", first.wanted, found))
    named = {x.name: x for x in sheet.graph.inputs}
    return sheet, {named[x.name]: g for x, g in zip(first.wanted, made, strict=True)}


def _reopened(first: Sheet, made: Sequence[Result]) -> tuple[Sheet, list[ir.Value]]:
    """Return a sheet of the finished first one, and its values that were made.

    The sweep asks for the working dialect and for shapes, which emitted nodes do not always have.
    """
    sheet = Sheet(first.finish(made), [], [])
    sheet.origin = first.origin
    return sheet, sheet.kept[len(sheet.kept) - len(made) :]


def _named(sheet: Sheet, suffix: str, values, found) -> list[Result]:
    """Return `<x>_<suffix>` for all `values`, zeros for those that nothing was found for."""
    made = []
    for x in values:
        v = found[x] if x in found else sheet.op.zeros_like(x)
        made.append((f"{x.name}_{suffix}", sheet.op.set_type_like(v, x)))
    return made


def _blocks(sheet: Sheet, found, wanted, batched: bool, suffix: str) -> list[Result]:
    """Return `<y>_<x>_<suffix>` for all pairs, zeros where nothing was found."""
    made = []
    for y, row in found.items():
        for x in wanted:
            value = row.get(x)
            if value is None:
                shape = _shape(sheet, y, x, batched)
                zero = ir.tensor(np.zeros(1, y.dtype.numpy()))
                value = sheet.op.ConstantOfShape(shape, value=zero)
                value.dtype = y.dtype
            name = str(y.name) if x is y else f"{y.name}_{x.name}"
            made.append((f"{name}_{suffix}", value))
    return made


def _shape(sheet: Sheet, y: ir.Value, x: ir.Value, batched: bool) -> list[int] | ir.Value:
    """Return the shape of a block, as a list or as a tensor known when it runs."""
    op = sheet.op
    if rank(y) is None or rank(x) is None:
        return op.Concat(op.shape_of(y), op.shape_of(x), axis=0)
    axes = [(y, i) for i in range(rank(y) or 0)]
    axes += [(x, i) for i in range(int(batched), rank(x) or 0)]
    return op.vector(*(op.dim(v, i) for v, i in axes))


def _shaped(sheet: Sheet, v: ir.Value, y: ir.Value, x: ir.Value, batched: bool) -> ir.Value:
    """Return a block in its shape."""
    made = sheet.op.Reshape(v, _shape(sheet, y, x, batched), allowzero=1)
    if rank(y) is not None and rank(x) is not None:
        made.shape = ir.Shape([*(dims(y) or ()), *(dims(x) or ())[int(batched) :]])
    return made


def _elements(values: Sequence[ir.Value], batched: bool) -> int:
    """Return how many elements all of them have (in a row), unknown lengths counted as one."""
    shapes = [(dims(v) or ())[int(batched) :] for v in values]
    return sum(prod(d for d in shape if isinstance(d, int)) for shape in shapes)


def _single(y: ir.Value, per_row: bool) -> bool:
    """Tell whether `y` is known to have one element (in each row)."""
    shape = dims(y)
    known = None if shape is None else static(shape[int(per_row) :])
    return known is not None and prod(known) == 1
