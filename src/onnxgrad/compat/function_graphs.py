"""Small models by name: losses, penalties and updates, the parts of a training loop.

The formulas of losses are those of `learning_losses`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.autodiff.forms import finish
from onnxgrad.autodiff.reverse import sweep
from onnxgrad.compat.learning_losses import (
    AbsoluteLearningLoss,
    ElasticLearningLoss,
    FunctionLearningLoss,
    NegLogLearningLoss,
)
from onnxgrad.compat.learning_penalties import weight_names
from onnxgrad.compat.loss_models import GRADIENT, LOSS, loss_onnx
from onnxgrad.errors import check_options, unknown
from onnxgrad.losses.penalties import weight_penalty
from onnxgrad.model.draft import Draft, Shape
from onnxgrad.schedules.epochwise import axpy, axpyw, axpyw2

_BOTH = {LOSS: "sum", GRADIENT: "gradient"}


def function_onnx_graph(
    name: str,
    target_opset: int | None = None,
    dtype: Any = np.float32,
    weight_name: str | None = None,
    **kwargs: Any,
) -> ModelProto:
    """Return a small model by name; `get_supported_functions` describes them.

    An input of any shape is declared without a shape: onnxruntime runs such a model, `onnx.checker`
    rejects it. The option `shape` declares one.

    Args:
        name: a key of `get_supported_functions()`.
        target_opset: 14 to 26; None is 18.
        dtype: numpy dtype of the floats.
        weight_name: for losses, the name of an input of sample weights, (N,), ones by default; None
            for none.
        **kwargs: options of the function.

    Raises:
        ValueError: an unknown name or option, sample weights for a function that is not a loss, or
            an invalid opset or dtype.

    Examples:
        >>> import numpy as np, onnxgrad as og, onnxruntime as ort
        >>> model = og.function_onnx_graph("axpy", shape=[2])
        >>> session = ort.InferenceSession(model.SerializeToString())
        >>> feed = {"X1": [1, 2], "X2": [5, 5], "alpha": [-0.5]}
        >>> session.run(["Y"], {name: np.float32(x) for name, x in feed.items()})
        [array([4.5, 4. ], dtype=float32)]
    """
    if name not in _FUNCTIONS:
        raise unknown("function", name, _FUNCTIONS)
    function = _FUNCTIONS[name]
    options = dict(kwargs) if weight_name is None else {"weight_name": weight_name, **kwargs}
    check_options(f"option of function {name!r}", options, function, skip=2)
    return function(target_opset, dtype, **options)


def get_supported_functions() -> dict[str, str]:
    """Return `{name: description}` of the models of `function_onnx_graph`.

    Examples:
        >>> import onnxgrad as og
        >>> og.get_supported_functions()["copy"]
        'Y = X, of any shape (or of `shape`).'
    """
    return {name: inspect.getdoc(function) or "" for name, function in _FUNCTIONS.items()}


def copy(opset: int | None, dtype: Any, shape: Shape | None = None) -> ModelProto:
    """Y = X, of any shape (or of `shape`)."""
    draft = Draft("copy", opset, dtype)
    return draft.model({"Y": draft.input("X", shape)})


def zero(opset: int | None, dtype: Any, shape: Shape | None = None) -> ModelProto:
    """Y = zeros like X, also where X is NaN, of any shape (or of `shape`)."""
    draft = Draft("zero", opset, dtype)
    x = draft.input("X", shape)
    return draft.model({"Y": draft.op.zeros_like(x)})


def linear_regression(opset: int | None, dtype: Any) -> ModelProto:
    """Y = X A + B, X (N, d), A (d, k), B of a shape that broadcasts to (N, k), such as (1, k)."""
    draft = Draft("linear_regression", opset, dtype)
    op = draft.op
    x, a = draft.input("X", ("N", "d")), draft.input("A", ("d", "k"))
    b = draft.input("B", (None, None))
    with op:
        return draft.model({"Y": op.MatMul(x, a) + b})


def square_error(
    opset: int | None, dtype: Any, weight_name: str | None = None, multiply: float = 2
) -> ModelProto:
    """Y = sum of w (X1 - X2)^2 multiply / 2, a scalar."""
    return _square({LOSS: "sum"}, opset, dtype, weight_name, multiply)


def grad_square_error(
    opset: int | None, dtype: Any, weight_name: str | None = None, multiply: float = 2
) -> ModelProto:
    """Y_grad = multiply w (X2 - X1), the gradient of `square_error` with respect to X2."""
    return _square({GRADIENT: "gradient"}, opset, dtype, weight_name, multiply)


def grad_loss_square_error(
    opset: int | None, dtype: Any, weight_name: str | None = None, multiply: float = 2
) -> ModelProto:
    """Y = `square_error`, Y_grad = its gradient with respect to X2."""
    return _square(_BOTH, opset, dtype, weight_name, multiply)


def reduce_mean_square(opset: int | None, dtype: Any, weight_name: str | None = None) -> ModelProto:
    """Y = sum of w (X1 - X2)^2, divided by the number of elements, a scalar."""
    return _square({LOSS: "mean"}, opset, dtype, weight_name, 2)


def _square(
    outputs: Mapping[str, str], opset: int | None, dtype: Any, weight: str | None, multiply: float
) -> ModelProto:
    loss = FunctionLearningLoss("squared_error")
    return loss_onnx(loss, outputs, opset, dtype, weight, scale=multiply / 2)


def absolute_error(opset: int | None, dtype: Any, weight_name: str | None = None) -> ModelProto:
    """Y = sum of w |X1 - X2|, a scalar."""
    return loss_onnx(AbsoluteLearningLoss(), {LOSS: "sum"}, opset, dtype, weight_name)


def grad_loss_absolute_error(
    opset: int | None, dtype: Any, weight_name: str | None = None
) -> ModelProto:
    """Y = `absolute_error`, Y_grad = w sign(X2 - X1), its gradient with respect to X2."""
    return loss_onnx(AbsoluteLearningLoss(), _BOTH, opset, dtype, weight_name)


def elastic_error(
    opset: int | None,
    dtype: Any,
    weight_name: str | None = None,
    l1_weight: float = 0.01,
    l2_weight: float = 0.01,
) -> ModelProto:
    """Y = sum of w (l1_weight |X1 - X2| + l2_weight (X1 - X2)^2), a scalar."""
    loss = ElasticLearningLoss(l1_weight, l2_weight)
    return loss_onnx(loss, {LOSS: "sum"}, opset, dtype, weight_name)


def grad_loss_elastic_error(
    opset: int | None,
    dtype: Any,
    weight_name: str | None = None,
    l1_weight: float = 0.01,
    l2_weight: float = 0.01,
) -> ModelProto:
    """Y = `elastic_error`, Y_grad = w (l1_weight sign(d) + 2 l2_weight d), d = X2 - X1."""
    return loss_onnx(ElasticLearningLoss(l1_weight, l2_weight), _BOTH, opset, dtype, weight_name)


def grad_sigmoid_neg_log_loss_error(
    opset: int | None, dtype: Any, weight_name: str | None = None, eps: float = 1e-5
) -> ModelProto:
    """Y = sum of w times -log of the probability of the int64 label X1, 0 or 1, clipped to
    [eps, 1 - eps], where class 1 has the probability sigmoid(X2); Y_grad = w (sigmoid(X2) - X1).
    """
    return loss_onnx(NegLogLearningLoss(eps), _BOTH, opset, dtype, weight_name)


def grad_softmax_neg_log_loss_error(
    opset: int | None, dtype: Any, weight_name: str | None = None, eps: float = 1e-5
) -> ModelProto:
    """Y = sum of w times -log of the probability of the int64 label X1 (N,), clipped to
    [eps, 1 - eps], the classes of X2 (N, k) having the probabilities softmax(X2); Y_grad = its
    gradient with respect to X2.
    """
    return loss_onnx(NegLogLearningLoss(eps, "softmax"), _BOTH, opset, dtype, weight_name)


def grad_penalty_elastic_error(
    opset: int | None,
    dtype: Any,
    l1_weight: float = 0.01,
    l2_weight: float = 0.01,
    shape: Shape | None = None,
) -> ModelProto:
    """Y = l1_weight |X| + l2_weight X^2, summed, a scalar; Y_grad = its gradient."""
    draft = Draft("grad_penalty_elastic_error", opset, dtype)
    op, x = draft.op, draft.input("X", shape)
    with op:
        summed, gradient = _penalty(op, x, l1_weight, l2_weight)
        return draft.model({LOSS: op.Reshape(summed, []), GRADIENT: gradient}, finish)


def update_penalty_elastic_error(
    opset: int | None, dtype: Any, l1: float = 1e-4, l2: float = 1e-4, shape: Shape | None = None
) -> ModelProto:
    """Y = X - (l1 sign(X) + 2 l2 X): a weight after a gradient step on its penalty."""
    draft = Draft("update_penalty_elastic_error", opset, dtype)
    op, x = draft.op, draft.input("X", shape)
    with op:
        return draft.model({"Y": op.set_type_like(x - _penalty(op, x, l1, l2)[1], x)}, finish)


def n_penalty_elastic_error(
    opset: int | None,
    dtype: Any,
    l1_weight: float = 0.01,
    l2_weight: float = 0.01,
    n_tensors: int = 1,
    loss_shape: Shape | None = None,
    weight_name: str | None = None,
) -> ModelProto:
    """Y = loss + l1_weight |W| + l2_weight W^2, summed over the weights W0, W1, ... of any shape.

    The inputs are the loss, one number of any shape (or of `loss_shape`), and the weights; Y is a
    scalar. `weight_name` has no effect: sample weights are part of the loss.
    """
    draft = Draft("n_penalty_elastic_error", opset, dtype)
    op, loss = draft.op, draft.input("loss", loss_shape)
    weights = [draft.input(name) for name in weight_names(n_tensors)]
    with op:
        terms = [weight_penalty(op, w, l1_weight, l2_weight) for w in weights]
        return draft.model(
            {"Y": op.Reshape(op.total(terms) + op.Reshape(loss, [1, 1]), [])}, finish
        )


def _penalty(op: Any, x: ir.Value, l1: float, l2: float) -> tuple[ir.Value, ir.Value]:
    """Return the penalty of a weight, (1, 1), and its gradient."""
    summed = weight_penalty(op, x, l1, l2)
    return summed, sweep(op, {summed: op.ones_like(summed)}, [x])[x]


_FUNCTIONS: dict[str, Callable[..., ModelProto]] = {
    function.__name__: function
    for function in (
        absolute_error,
        axpy,
        axpyw,
        axpyw2,
        copy,
        elastic_error,
        grad_loss_absolute_error,
        grad_loss_elastic_error,
        grad_loss_square_error,
        grad_penalty_elastic_error,
        grad_sigmoid_neg_log_loss_error,
        grad_softmax_neg_log_loss_error,
        grad_square_error,
        linear_regression,
        n_penalty_elastic_error,
        reduce_mean_square,
        square_error,
        update_penalty_elastic_error,
        zero,
    )
}
