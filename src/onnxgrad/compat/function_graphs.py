"""`function_onnx_graph`: small models of losses, penalties and updates, by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.autodiff.reverse import sweep
from onnxgrad.compat.learning_losses import (
    GRADIENT,
    LOSS,
    AbsoluteLearningLoss,
    ElasticLearningLoss,
    FunctionLearningLoss,
    NegLogLearningLoss,
    write_loss_outputs,
)
from onnxgrad.compat.learning_penalties import weight_names
from onnxgrad.compat.learning_rates import axpy, axpyw, axpyw2
from onnxgrad.compat.small_models import build_small_model
from onnxgrad.errors import check_options, unknown
from onnxgrad.losses.in_graph import weight_penalty
from onnxgrad.model.draft import Draft, Shape

Values = dict[str, ir.Value]
_SQUARE = FunctionLearningLoss("squared_error")
_SUM, _GRADIENT = {LOSS: "sum"}, {GRADIENT: "gradient"}
_BOTH = _SUM | _GRADIENT
_functions: dict[str, Callable[..., Values]] = {f.__name__: f for f in (axpy, axpyw, axpyw2)}


def _register_small_model(write: Callable[..., Values]) -> Callable[..., Values]:
    """Register the writer of a small model, for `function_onnx_graph` to find by its name."""
    _functions[write.__name__] = write
    return write


def function_onnx_graph(
    name: str,
    target_opset: int | None = None,
    dtype: Any = np.float32,
    weight_name: str | None = None,
    **kwargs: Any,
) -> ModelProto:
    """Return the small ONNX model `name`, such as a loss: see `get_supported_functions`.

    An input of any shape is declared without a shape: onnxruntime runs such a model, and
    `onnx.checker` rejects it. The option `shape` declares a shape.

    Args:
        name: a key of `get_supported_functions()`.
        target_opset: 14 or newer; None is 18.
        dtype: numpy dtype of the floats.
        weight_name: for losses, the name of an input of sample weights, (N,), ones by default; None
            for no such input.
        **kwargs: options of the function.

    Raises:
        ValueError: an unknown name or option, sample weights for a function that is not a loss, or
            an invalid opset or dtype.

    Examples:
        >>> import numpy as np, onnxgrad as og, onnxruntime as ort
        >>> model = og.compat.function_onnx_graph("axpy", shape=[2])
        >>> session = ort.InferenceSession(model.SerializeToString())
        >>> feed = {"X1": [1, 2], "X2": [5, 5], "alpha": [-0.5]}
        >>> session.run(["Y"], {name: np.float32(x) for name, x in feed.items()})
        [array([4.5, 4. ], dtype=float32)]
    """
    supported = dict(sorted(_functions.items()))
    if name not in supported:
        raise unknown("function", name, supported)
    options = dict(kwargs) if weight_name is None else {"weight_name": weight_name, **kwargs}
    check_options(f"option of function {name!r}", options, supported[name], skip=1)
    return build_small_model(supported[name], target_opset, dtype, **options)


def get_supported_functions() -> dict[str, str]:
    """Return `{name: description}` of the small models that `function_onnx_graph` writes.

    Examples:
        >>> import onnxgrad as og
        >>> og.compat.get_supported_functions()["copy"]
        'Y = X, of any shape (or of `shape`).'
    """
    return {name: inspect.getdoc(write) or "" for name, write in sorted(_functions.items())}


@_register_small_model
def copy(draft: Draft, shape: Shape | None = None) -> Values:
    """Y = X, of any shape (or of `shape`)."""
    return {"Y": draft.input("X", shape)}


@_register_small_model
def zero(draft: Draft, shape: Shape | None = None) -> Values:
    """Y = zeros like X, also where X is NaN, of any shape (or of `shape`)."""
    return {"Y": draft.op.zeros_like(draft.input("X", shape))}


@_register_small_model
def linear_regression(draft: Draft) -> Values:
    """Y = X A + B, X (N, d), A (d, k), B of a shape that broadcasts to (N, k), such as (1, k)."""
    x, a = draft.input("X", ("N", "d")), draft.input("A", ("d", "k"))
    return {"Y": draft.op.MatMul(x, a) + draft.input("B", (None, None))}


@_register_small_model
def square_error(draft: Draft, weight_name: str | None = None, multiply: float = 2) -> Values:
    """Y = sum of w (X1 - X2)^2 multiply / 2, a scalar."""
    return write_loss_outputs(draft, _SQUARE, _SUM, weight_name, scale=multiply / 2)


@_register_small_model
def grad_square_error(draft: Draft, weight_name: str | None = None, multiply: float = 2) -> Values:
    """Y_grad = multiply w (X2 - X1), the gradient of `square_error` w.r.t. X2."""
    return write_loss_outputs(draft, _SQUARE, _GRADIENT, weight_name, scale=multiply / 2)


@_register_small_model
def grad_loss_square_error(
    draft: Draft, weight_name: str | None = None, multiply: float = 2
) -> Values:
    """Y = `square_error`, Y_grad = its gradient w.r.t. X2."""
    return write_loss_outputs(draft, _SQUARE, _BOTH, weight_name, scale=multiply / 2)


@_register_small_model
def reduce_mean_square(draft: Draft, weight_name: str | None = None) -> Values:
    """Y = sum of w (X1 - X2)^2, divided by the number of elements, a scalar."""
    return write_loss_outputs(draft, _SQUARE, {LOSS: "mean"}, weight_name)


@_register_small_model
def absolute_error(draft: Draft, weight_name: str | None = None) -> Values:
    """Y = sum of w |X1 - X2|, a scalar."""
    return write_loss_outputs(draft, AbsoluteLearningLoss(), _SUM, weight_name)


@_register_small_model
def grad_loss_absolute_error(draft: Draft, weight_name: str | None = None) -> Values:
    """Y = `absolute_error`, Y_grad = w sign(X2 - X1), its gradient w.r.t. X2."""
    return write_loss_outputs(draft, AbsoluteLearningLoss(), _BOTH, weight_name)


@_register_small_model
def elastic_error(
    draft: Draft, weight_name: str | None = None, l1_weight: float = 0.01, l2_weight: float = 0.01
) -> Values:
    """Y = sum of w (l1_weight |X1 - X2| + l2_weight (X1 - X2)^2), a scalar."""
    loss = ElasticLearningLoss(l1_weight, l2_weight)
    return write_loss_outputs(draft, loss, _SUM, weight_name)


@_register_small_model
def grad_loss_elastic_error(
    draft: Draft, weight_name: str | None = None, l1_weight: float = 0.01, l2_weight: float = 0.01
) -> Values:
    """Y = `elastic_error`, Y_grad = w (l1_weight sign(d) + 2 l2_weight d), d = X2 - X1."""
    return write_loss_outputs(draft, ElasticLearningLoss(l1_weight, l2_weight), _BOTH, weight_name)


@_register_small_model
def grad_sigmoid_neg_log_loss_error(
    draft: Draft, weight_name: str | None = None, eps: float = 1e-5
) -> Values:
    """Y = sum of w times -log of the probability of the int64 label X1, 0 or 1, clipped to
    [eps, 1 - eps], where class 1 has the probability sigmoid(X2); Y_grad = w (sigmoid(X2) - X1).
    """
    return write_loss_outputs(draft, NegLogLearningLoss(eps), _BOTH, weight_name)


@_register_small_model
def grad_softmax_neg_log_loss_error(
    draft: Draft, weight_name: str | None = None, eps: float = 1e-5
) -> Values:
    """Y = sum of w times -log of the probability of the int64 label X1 (N,), clipped to
    [eps, 1 - eps], where the classes of X2 (N, k) have the probabilities softmax(X2); Y_grad = its
    gradient w.r.t. X2.
    """
    return write_loss_outputs(draft, NegLogLearningLoss(eps, "softmax"), _BOTH, weight_name)


@_register_small_model
def grad_penalty_elastic_error(
    draft: Draft, l1_weight: float = 0.01, l2_weight: float = 0.01, shape: Shape | None = None
) -> Values:
    """Y = l1_weight |X| + l2_weight X^2, summed, a scalar; Y_grad = its gradient."""
    _, summed, gradient = _penalty_and_gradient(draft, l1_weight, l2_weight, shape)
    return {LOSS: draft.op.Reshape(summed, []), GRADIENT: gradient}


@_register_small_model
def update_penalty_elastic_error(
    draft: Draft, l1: float = 1e-4, l2: float = 1e-4, shape: Shape | None = None
) -> Values:
    """Y = X - (l1 sign(X) + 2 l2 X): a weight after a gradient step on its penalty."""
    x, _, gradient = _penalty_and_gradient(draft, l1, l2, shape)
    return {"Y": draft.op.set_type_like(x - gradient, x)}


def _penalty_and_gradient(
    draft: Draft, l1: float, l2: float, shape: Shape | None
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Return (input X, its elastic penalty of shape (1, 1), the gradient w.r.t. X)."""
    op, x = draft.op, draft.input("X", shape)
    summed = weight_penalty(op, x, l1, l2)
    return x, summed, sweep(op, {summed: op.ones_like(summed)}, [x])[x]


@_register_small_model
def n_penalty_elastic_error(
    draft: Draft,
    l1_weight: float = 0.01,
    l2_weight: float = 0.01,
    n_tensors: int = 1,
    loss_shape: Shape | None = None,
    weight_name: str | None = None,
) -> Values:
    """Y = loss + l1_weight |W| + l2_weight W^2, summed over the weights W0, W1, ... of any shape.

    The inputs are the loss, one number of any shape (or of `loss_shape`), and the weights; Y is a
    scalar. `weight_name` has no effect: sample weights are part of the loss.
    """
    op, loss = draft.op, draft.input("loss", loss_shape)
    weights = [draft.input(name) for name in weight_names(n_tensors)]
    terms = [weight_penalty(op, w, l1_weight, l2_weight) for w in weights]
    return {"Y": op.Reshape(op.total(terms) + op.Reshape(loss, [1, 1]), [])}
