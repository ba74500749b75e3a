"""Small models of a loss outside of the model: written, and fed with checked arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir
import onnxruntime as ort

from onnxgrad.data.arrays import shape_mismatch
from onnxgrad.data.field import Field
from onnxgrad.graph.emit import Emit
from onnxgrad.model.draft import Draft, Shape
from onnxgrad.operators.shapes import dims
from onnxgrad.runtime.values import FLOATS, fit, shape_of, to_numpy

EXPECTED, PREDICTED, LOSS, GRADIENT = "X1", "X2", "Y", "Y_grad"  # names of inputs and outputs
Quantities = Mapping[str, str]


def loss_outputs(
    draft: Draft,
    loss: Any,
    quantities: Quantities,
    weight_name: str | None = None,
    shape: Shape = ("N", "k"),
    scale: float = 1.0,
) -> dict[str, ir.Value]:
    """Write a loss, with inputs X1 (expected), X2 (predicted) and sample weights.

    Args:
        draft: the model, which gets the name of the `BaseLearningLoss`.
        quantities: `{output: quantity}`, where the quantity is "sum", a scalar; "mean", the sum
            divided by the number of elements; "rows", (N, 1); or "gradient" of the sum with respect
            to X2.
        weight_name: name of an input of sample weights, ones by default; None for none.
        scale: factor of all outputs.
    """
    op, draft.graph.name = draft.op, type(loss).__name__
    predicted = ir.Value(name=PREDICTED, type=ir.TensorType(draft.dtype), shape=ir.Shape(shape))
    expected = loss.label(op, predicted, EXPECTED)
    draft.add(expected)
    draft.add(predicted)
    weight = None if weight_name is None else draft.input(weight_name, (None,), default=1.0)
    rows, gradient = loss.rows_and_gradient(op, predicted, expected, weight)
    if scale != 1:
        rows, gradient = rows * scale, gradient * scale
    values = {"sum": op.ReduceSum(rows, keepdims=0), "rows": rows, "gradient": gradient}
    if "mean" in quantities.values():
        values["mean"] = values["sum"] / op.Cast(op.Size(predicted), to=draft.dtype)
    return {name: values[quantity] for name, quantity in quantities.items()}


def checked_feed(
    loss: Any, session: ort.InferenceSession, expected: Any, predicted: Any, weight: Any
) -> dict[str, Any]:
    """Return the inputs of a model of `loss_onnx`; those that fit are passed on without a copy.

    Raises:
        ValueError: arrays that do not fit the model or each other, or labels that the loss does not
            allow; the message names rows.
    """
    declared = next(x for x in session.get_inputs() if x.name == PREDICTED)
    shape = _prediction_shape(declared.shape, shape_of(predicted))
    dtype = FLOATS[declared.type]
    prediction = ir.Value(name=PREDICTED, type=ir.TensorType(dtype), shape=ir.Shape(shape))
    feed = {PREDICTED: fit(predicted, shape, dtype.numpy())}
    fields = {EXPECTED: _label_field(loss, prediction)}
    values = {EXPECTED: expected}
    if weight is not None:
        optional = session.get_overridable_initializers()
        if not optional:
            raise ValueError("built without sample weights: build_onnx_function(weight_name=...)")
        fields[optional[0].name] = Field("weight", dtype.numpy(), (None,))
        values[optional[0].name] = weight
    for key, value in values.items():
        array = fields[key].check(to_numpy(value))
        if len(array) != shape[0]:
            name = fields[key].name
            raise ValueError(f"{name!r} has {len(array)} rows, 'predicted' has {shape[0]}")
        feed[key] = fit(value, array.shape, array.dtype, array)
    return feed


def _prediction_shape(declared: list[int | str], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape in which a prediction is fed: a vector becomes one column."""
    if not shape or 0 in shape:
        raise ValueError(f"'predicted' must have rows; its shape is {shape}")
    if len(shape) == 1 and len(declared) == 2:
        shape = (*shape, 1)
    if mismatch := shape_mismatch(shape, declared):
        rebuild = "build the loss for it by build_onnx_function(shape=...)"
        raise ValueError(f"'predicted' {mismatch}; {rebuild}")
    return shape


def _label_field(loss: Any, prediction: ir.Value) -> Field:
    """Return the check of the labels for a prediction of static shape."""
    label = loss.label(Emit(ir.Graph([], [], nodes=[])), prediction, "expected")
    info, shape = loss.info(prediction), dims(label)
    assert label.dtype is not None
    return Field(
        "expected",
        label.dtype.numpy(),
        None if shape is None else (None, *shape[1:]),
        classes=info.classes,
        ignored=info.ignore_index,
        allowed=info.bounds,
    )
