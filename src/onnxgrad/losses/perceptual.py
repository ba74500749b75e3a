"""Perceptual losses: distances between the features of a frozen encoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from onnxgrad.checks import check_choice, check_number
from onnxgrad.errors import unknown
from onnxgrad.losses.embeddings import cosine_of_rows
from onnxgrad.losses.formulas import LOSSES, loss_spec
from onnxgrad.losses.in_graph import choose_output
from onnxgrad.losses.second_model import cut_to_outputs, write_model
from onnxgrad.losses.spec import ALIASES, LIKE_PREDICTION, Formula, LossSpec
from onnxgrad.losses.sums import with_known_rank
from onnxgrad.model.feeds import names_without_default
from onnxgrad.model.read import ModelLike, read
from onnxgrad.operators.shapes import dims

_WHAT = "the encoder"  # in messages


def perceptual_loss(
    encoder: ModelLike,
    features: str | Sequence[str] | Mapping[str, float] | None = None,
    distance: str | Formula = "squared_error",
    loss: str | Formula | None = None,
    factor: float = 1.0,
    preprocess: Callable[[Any, ir.Value], ir.Value] | None = None,
) -> LossSpec:
    """Return l(f, y) + factor sum_k w_k d(e_k(f), e_k(y)), with features e_k of a frozen encoder.

    f is the prediction and y the label, of the same shape. The nodes of the encoder are copied into
    the trained graph, once for f and once for y, with its weights as constants, and its dropouts
    and normalizations compute as its file says. Johnson et al. 2016, "Perceptual Losses for
    Real-Time Style Transfer and Super-Resolution", arXiv:1603.08155.

    Args:
        encoder: model, serialized model or path, of one input; never modified. A file for one row
            takes any number of rows if the graph proves that rows are independent.
        features: the names of outputs of the encoder, or of other float tensors in it; or
            `{name: w_k}`. None: its only float output.
        distance: "squared_error" or "absolute_error", whose mean over the elements of a row is the
            loss of the row; "cosine", 1 - the cosine of both features of the row, as for the
            identity of a face; or a function `(op, e_k(f), e_k(y)) -> losses of rows or elements`.
        loss: l, the name of a loss whose labels have the shape of the prediction, such as
            "absolute_error", or a function `(op, prediction, label) -> losses`. None: no such term.
        factor: the weight of the distances beside `loss`.
        preprocess: function `(op, x) -> input of the encoder`, which writes what lies between f or
            y and the encoder: another scale, size or order of axes.

    Raises:
        ValueError: an unknown name, an encoder of several inputs, or a `loss` of other labels.
        ModelError: `encoder` cannot be read.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> encoder = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     e (float[1,2] x) => (float[1,2] y) { h = Exp(x) y = Tanh(h) }''')
        >>> loss = og.losses.perceptual_loss(encoder, {"h": 0.1, "y": 1.0}, loss="absolute_error")
        >>> loss.name
        'absolute_error + perceptual'
    """
    proto = read(encoder)
    weights = _feature_weights(features)
    if weights is None:
        weights = {choose_output(proto, None, "say which one with features="): 1.0}
    names = [choose_output(proto, name) for name in weights]
    part = cut_to_outputs(proto, names)
    inputs = names_without_default(part)
    if len(inputs) != 1:
        raise ValueError(
            f"the encoder has the inputs {inputs}, and a perceptual loss feeds one: make the other "
            "inputs constants by onnxgrad.graph.add_initializer"
        )
    measure = distance if callable(distance) else _DISTANCES[_distance_name(distance)]
    base = None if loss is None else _base_loss(loss)
    check_number("factor", factor)
    dtype = ir.DataType(part.graph.input[0].type.tensor_type.elem_type)

    def perceptual(op: Any, prediction: ir.Value, label: ir.Value) -> ir.Value:
        shared: dict[str, ir.Value] = {}

        def encode(x: ir.Value) -> list[ir.Value]:
            x = x if preprocess is None else with_known_rank(op, preprocess(op, x))
            return write_model(op, part, {inputs[0]: op.Cast(x, to=dtype)}, _WHAT, shared)[0]

        # the label first: its activations are dead before the prediction's begin
        pairs = list(zip(encode(label), encode(prediction), strict=True))
        terms = [
            (w * factor, measure(op, mine, wanted))
            for w, (wanted, mine) in zip(weights.values(), pairs, strict=True)
        ]
        if base is not None:
            terms.append((1.0, base.losses(op, prediction, label)))
        return op.total(
            [op.Cast(_means_of_rows(op, losses), to=prediction.dtype) * w for w, losses in terms]
        )

    return LossSpec(perceptual, "perceptual" if base is None else f"{base.name} + perceptual")


def _feature_weights(
    features: str | Sequence[str] | Mapping[str, float] | None,
) -> dict[str, float] | None:
    """Return the weight of each feature by name; None if none is named."""
    if features is None:
        return None
    if isinstance(features, Mapping):
        return {name: check_number("features", weight) for name, weight in features.items()}
    return dict.fromkeys([features] if isinstance(features, str) else features, 1.0)


def _distance_name(distance: str) -> str:
    """Return the name of a distance in `_DISTANCES`, of which users may write an alias."""
    return check_choice("distance", ALIASES.get(distance, distance), _DISTANCES)


def _base_loss(loss: str | Formula) -> LossSpec:
    """Return the loss that is added to the distances of features.

    Raises:
        ValueError: an unknown loss, or one whose labels do not have the shape of the prediction.
    """
    spec = loss_spec(ALIASES.get(loss, loss) if isinstance(loss, str) else loss, None, {})
    if spec.label_kind is not LIKE_PREDICTION or spec.activation is not None:
        fit = [name for name, s in LOSSES.items() if s.label_kind is LIKE_PREDICTION]
        raise unknown("loss beside the features", spec.name, fit)
    return spec


def _means_of_rows(op: Any, losses: ir.Value) -> ir.Value:
    """Write the mean over the elements of each row, (N,), of losses of rows or elements."""
    shape = dims(with_known_rank(op, losses))
    if not shape:
        raise ValueError(
            f"a distance of features has the shape {shape}, and needs one number for each row or "
            "element: declare the shapes of the encoder, or leave out the last mean or sum"
        )
    axes = list(range(1, len(shape)))
    return op.ReduceMean(losses, axes, keepdims=0) if axes else losses


_DISTANCES: dict[str, Formula] = {
    **{name: LOSSES[name].formula for name in ("squared_error", "absolute_error")},
    "cosine": lambda op, mine, wanted: 1.0 - cosine_of_rows(op, mine, wanted),
}
