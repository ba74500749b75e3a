"""Losses outside of the model: small graphs of a prediction and a label.

A loss writes itself and its gradient by the prediction into any graph, or into two models of its
own, which `loss_gradient` and `loss_scores` run. The formulas are those of `onnxgrad.losses`, but
for the square, which is halved here, and for `NegLogLearningLoss`, which takes raw scores.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from math import log, log1p
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from onnx import ModelProto

from onnxgrad.autodiff.reverse import sweep
from onnxgrad.data.arrays import shape_mismatch
from onnxgrad.data.fields import Field
from onnxgrad.errors import unknown
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.inference.infer import infer
from onnxgrad.graph.shapes import dims, rank
from onnxgrad.losses import formulas
from onnxgrad.losses.in_graph import info_of, label_input
from onnxgrad.model.draft import Draft, Shape
from onnxgrad.runtime.small_models import SmallFunctions
from onnxgrad.runtime.values import FLOATS, fit, owned, shape_of, to_numpy

EXPECTED, PREDICTED, LOSS, GRADIENT = "X1", "X2", "Y", "Y_grad"  # as in `onnxgrad.functions`


class BaseLearningLoss(SmallFunctions):
    """What every loss offers; one of your own writes `loss`, and `label` if it takes class numbers.

    `loss` and `gradient` are called inside of `with op:`, so that `a * b` writes a node.
    """

    def loss(self, op: Any, prediction: ir.Value, label: ir.Value) -> ir.Value:
        """Write the loss of every element (of the prediction's shape), or of every row."""
        raise NotImplementedError

    def gradient(self, op: Any, prediction: ir.Value, label: ir.Value) -> ir.Value:
        """Write d loss / d prediction, of the prediction's shape: by the sweep, unless overridden.

        Raises:
            ValueError: the loss does not depend on the prediction.
            NoGradientRule: it uses an operator without a rule.
        """
        loss = self.loss(op, prediction, label)
        found = sweep(op, {loss: op.ones_like(loss)}, [prediction])
        if prediction not in found:
            raise ValueError(f"the loss {self} does not depend on {prediction.name!r}")
        return found[prediction]

    def label(self, op: Any, prediction: ir.Value, name: str) -> ir.Value:
        """Return the label input, not yet added to the graph: by default like the prediction."""
        return label_input(op, prediction, formulas.LossSpec(self.loss), name, {})

    def facts(self, prediction: ir.Value) -> dict[str, Any]:
        """Return what a trainer has to check of labels, by the keys of `losses.METADATA`.

        `classes` (their number, where labels are class numbers), `ignore_index`, `loss` (a key of
        `losses.LABELS`), and `threshold` of the prediction between two classes.
        """
        return {}

    def rows_and_gradient(
        self, op: Any, prediction: ir.Value, label: ir.Value, weight: ir.Value | None = None
    ) -> tuple[ir.Value, ir.Value]:
        """Write the losses of the rows, (N, 1), and the gradient of their sum.

        Row weights, (N,) or (N, 1), multiply both.
        """
        if label.shape is None:
            label = op.Reshape(label, op.Shape(prediction))  # or (N,) and (N, 1) become (N, N)
        loss = self.loss(op, prediction, label)
        if rank(loss) is None and rank(prediction) is not None:
            infer(ir.Model(op.graph, ir_version=8))
        rows = formulas.row_sums(op, loss)
        gradient = self.gradient(op, prediction, label)
        if weight is None:
            return rows, gradient
        column, n = op.Reshape(weight, [-1, 1]), rank(prediction)
        if n is None:
            scaled = op.Reshape(op.Reshape(gradient, [0, -1]) * column, op.Shape(prediction))
        else:
            scaled = gradient * op.Reshape(weight, [-1] + [1] * (n - 1))
        return rows * column, op.set_type_like(scaled, prediction)

    def build_onnx_function(
        self,
        opset: int | None = None,
        device: str | None = None,
        weight_name: str | None = None,
        dtype: Any = np.float32,
        shape: Shape = ("N", "k"),
    ) -> BaseLearningLoss:
        """Write the models that `loss_gradient` and `loss_scores` run; returns `self`.

        `loss_grad_onnx_` has the inputs X1 (expected), X2 (predicted) and the row weights, and the
        outputs Y, the summed loss, a scalar, and Y_grad, its gradient with respect to X2.
        `loss_score_onnx_` has the same inputs and the output Y, the loss of every row, (N, 1).
        Row weights that are not fed are ones.

        Args:
            opset: of the models, 14 to 26; None is 18.
            device: "cpu", "cuda" or "cuda:1", a GPU by its number; None is "cpu".
            weight_name: name of an input of row weights, (N,); None for none.
            dtype: numpy dtype of the prediction.
            shape: shape of the prediction, with strings for unknown lengths.

        Raises:
            ValueError: a dtype, opset or name that cannot be, or a loss that needs another shape.
            ProviderError: the installed onnxruntime has none for `device`.
        """
        options = {"opset": opset, "dtype": dtype, "weight_name": weight_name, "shape": shape}
        self._keep(
            device,
            loss_grad_onnx_=loss_onnx(self, {LOSS: "sum", GRADIENT: "gradient"}, **options),
            loss_score_onnx_=loss_onnx(self, {LOSS: "rows"}, **options),
        )
        return self

    def loss_gradient(self, expected: Any, predicted: Any, weight: Any = None) -> tuple[Any, Any]:
        """Return the summed loss, a scalar, and its gradient by the prediction, of its shape.

        Args:
            expected: labels, an array or OrtValue; (N,) is (N, 1).
            predicted: predictions, an array or OrtValue. What is returned is of the same kind.
            weight: row weights, (N,) or (N, 1), or None.

        Raises:
            EvaluationError: `build_onnx_function` was not called.
            ValueError: shapes that do not belong together, or labels that cannot be; rows named.
        """
        feed = self._feed("loss_grad_onnx_", expected, predicted, weight)
        binds = isinstance(predicted, ort.OrtValue)
        loss, gradient = self._run("loss_grad_onnx_", feed, binds)
        if len(shape_of(predicted)) == 1:  # computed as (N, 1)
            flat = to_numpy(gradient).reshape(-1)
            gradient = owned(flat, self._device) if binds else flat
        return loss, gradient

    def loss_scores(self, expected: Any, predicted: Any, weight: Any = None) -> Any:
        """Return the weighted loss of every row, (N, 1); all else is as in `loss_gradient`."""
        feed = self._feed("loss_score_onnx_", expected, predicted, weight)
        return self._run("loss_score_onnx_", feed, isinstance(predicted, ort.OrtValue))[0]

    def _feed(self, name: str, expected: Any, predicted: Any, weight: Any) -> dict[str, Any]:
        """Return the checked inputs of a model, those that fit as they were given."""
        running, shape = self._session(name), shape_of(predicted)
        given = next(x for x in running.get_inputs() if x.name == PREDICTED)
        if not shape or 0 in shape:
            raise ValueError(f"'predicted' must have rows; its shape is {shape}")
        if len(shape) == 1 and len(given.shape) == 2:
            shape = (*shape, 1)
        if mismatch := shape_mismatch(shape, given.shape):
            rebuild = "build the loss for it by build_onnx_function(shape=...)"
            raise ValueError(f"'predicted' {mismatch}; {rebuild}")
        dtype = FLOATS[given.type]
        like = ir.Value(name=PREDICTED, type=ir.TensorType(dtype), shape=ir.Shape(shape))
        feed = {PREDICTED: fit(predicted, shape, dtype.numpy())}
        fields = {EXPECTED: _field(self, like)}
        values = {EXPECTED: expected}
        if weight is not None:
            optional = running.get_overridable_initializers()
            if not optional:
                raise ValueError("built without row weights: build_onnx_function(weight_name=...)")
            fields[optional[0].name] = Field("weight", dtype.numpy(), (None,))
            values[optional[0].name] = weight
        for key, value in values.items():
            array = fields[key].check(to_numpy(value))
            if len(array) != shape[0]:
                name = fields[key].name
                raise ValueError(f"{name!r} has {len(array)} rows, 'predicted' has {shape[0]}")
            feed[key] = fit(value, array.shape, array.dtype, array)
        return feed

    @staticmethod
    def select(class_name: Any, **options: Any) -> BaseLearningLoss:
        """Return the loss for an instance, a class, a name, or a function `(op, f, y)`.

        Names: those of the classes here, `square_error`, `squared_error`, `square`, `l2`;
        `absolute_error`, `absolute`, `l1`; `elastic_error`, `elastic`; `log`, `neglog`, `neg_log`,
        `logloss`, all four `NegLogLearningLoss`; and what else `onnxgrad.losses.LOSSES` has.

        Raises:
            ValueError: an unknown name or option, or options beside an instance.
        """
        if isinstance(class_name, BaseLearningLoss):
            if options:
                raise ValueError(f"{class_name} has its options: {list(options)} go with a name")
            return class_name
        made = _CLASSES.get(class_name) if isinstance(class_name, str) else class_name
        if not (isinstance(made, type) and issubclass(made, BaseLearningLoss)):
            if not callable(class_name) and class_name not in _FUNCTIONS:
                raise unknown("loss", class_name, [*_CLASSES, *_FUNCTIONS])
            formulas.loss_spec(class_name, None, options)
            return FunctionLearningLoss(class_name, options or None)
        valid = list(inspect.signature(made).parameters)
        for name in options:
            if name not in valid:
                raise unknown(f"option of loss {class_name!r}", name, valid)
        return made(**options)


class SquareLearningLoss(BaseLearningLoss):
    """(f - y)^2 / 2, with the gradient f - y, as scikit-learn's `MLPRegressor`."""

    def loss(self, op: Any, prediction: ir.Value, label: ir.Value) -> ir.Value:
        """Write (f - y)^2 / 2."""
        return 0.5 * formulas.squared_error(op, prediction, label)

    def gradient(self, op: Any, prediction: ir.Value, label: ir.Value) -> ir.Value:
        """Write f - y, which is one node, where the sweep writes f/2 - y/2 twice."""
        return op.set_type_like(op.Sub(prediction, label), prediction)


class AbsoluteLearningLoss(BaseLearningLoss):
    """|f - y|, with the gradient sign(f - y), zero where they are equal."""

    def loss(self, op: Any, prediction: ir.Value, label: ir.Value) -> ir.Value:
        """Write |f - y|."""
        return formulas.absolute_error(op, prediction, label)


class ElasticLearningLoss(BaseLearningLoss):
    """a |f - y| + b (f - y)^2, with the gradient a sign(f - y) + 2 b (f - y).

    Args:
        l1_weight: a.
        l2_weight: b.
    """

    def __init__(self, l1_weight: float = 0.5, l2_weight: float = 0.5) -> None:
        self.l1_weight = l1_weight
        self.l2_weight = l2_weight

    def loss(self, op: Any, prediction: ir.Value, label: ir.Value) -> ir.Value:
        """Write a |f - y| + b (f - y)^2."""
        return formulas.elastic(op, prediction, label, self.l1_weight, self.l2_weight)


class NegLogLearningLoss(BaseLearningLoss):
    """-log of the probability of the label, from raw scores; the gradient is p - y.

    The probability is clipped to [eps, 1 - eps] in the loss, not in the gradient, so that a row
    that is badly wrong goes on to pull. -log p is computed as softplus(-f), or by log-softmax,
    which neither overflow nor lose digits (Goodfellow et al. 2016, "Deep Learning", 6.2.2).

    Args:
        eps: from 0, no clipping, to below 0.5.
        probability_function: "sigmoid": scores (N, 1) of class 1, int64 labels 0 and 1, (N, 1).
            "softmax": scores (N, k) of k classes, int64 labels 0 to k - 1, (N,).
    """

    def __init__(self, eps: float = 1e-5, probability_function: str = "sigmoid") -> None:
        self.eps = eps
        self.probability_function = probability_function

    def loss(self, op: Any, prediction: ir.Value, label: ir.Value) -> ir.Value:
        """Write -log p[y]: for a sigmoid of every element, for a softmax of every row.

        Raises:
            ValueError: an unknown probability function, or eps that is no small probability.
        """
        if not 0 <= self.eps < 0.5:
            raise ValueError(f"eps must be at least 0 and below 0.5, not {self.eps!r}")
        if self._softmax():
            logs = op.LogSoftmax(prediction, axis=1)
            minus = -op.GatherElements(logs, op.Unsqueeze(label, [1]), axis=1)
        else:
            minus = formulas.softplus(op, op.Where(op.Equal(label, 1), -prediction, prediction))
        if not self.eps:
            return minus
        return op.Clip(minus, -log1p(-self.eps), -log(self.eps))

    def gradient(self, op: Any, prediction: ir.Value, label: ir.Value) -> ir.Value:
        """Write p - y, of probabilities that are not clipped."""
        if self._softmax():
            p, at = op.Softmax(prediction, axis=1), op.Unsqueeze(label, [1])
            made = op.ScatterElements(p, at, op.GatherElements(p, at, axis=1) - 1.0, axis=1)
        else:
            made = op.Sigmoid(prediction) - op.Cast(label, to=prediction.dtype)
        return op.set_type_like(made, prediction)

    def label(self, op: Any, prediction: ir.Value, name: str) -> ir.Value:
        """Return the label input, int64: (N, 1) as the scores, or (N,) of a softmax."""
        if self._softmax():
            return label_input(op, prediction, formulas.LOSSES["cross_entropy"], name, {})
        made = super().label(op, prediction, name)
        made.dtype = ir.DataType.INT64
        return made

    def facts(self, prediction: ir.Value) -> dict[str, Any]:
        """Return the number of classes, and for two the threshold between them."""
        if self._softmax():
            return {"classes": (dims(prediction) or (None, None))[1]}
        return {"classes": 2, "threshold": 0.0}

    def _softmax(self) -> bool:
        kind, valid = self.probability_function, ("sigmoid", "softmax")
        if kind not in valid:
            raise unknown("probability_function", kind, valid)
        return kind == "softmax"


class FunctionLearningLoss(BaseLearningLoss):
    """A loss of `onnxgrad.losses`, or a function of your own; the gradient is that of the sweep.

    Args:
        function: a key of `onnxgrad.losses.LOSSES`, or `(op, prediction, label, **options)` that
            writes the loss of every element or row.
        options: its options.
    """

    def __init__(self, function: Any, options: Mapping[str, Any] | None = None) -> None:
        self.function = function
        self.options = options

    def loss(self, op: Any, prediction: ir.Value, label: ir.Value) -> ir.Value:
        """Write the loss."""
        return self._kind().function(op, prediction, label, **(self.options or {}))

    def label(self, op: Any, prediction: ir.Value, name: str) -> ir.Value:
        """Return the label input that `add_loss_output` has for this loss."""
        return label_input(op, prediction, self._kind(), name, self.options or {})

    def facts(self, prediction: ir.Value) -> dict[str, Any]:
        """Return what `add_loss_output` notes about this loss."""
        return info_of(self._kind(), prediction, self.options or {})

    def _kind(self) -> formulas.LossSpec:
        return formulas.loss_spec(self.function, "sum", self.options or {})


_ALIASES: dict[type[BaseLearningLoss], tuple[str, ...]] = {
    SquareLearningLoss: ("squared_error", "square_error", "square", "l2"),
    AbsoluteLearningLoss: ("absolute_error", "absolute", "l1"),
    ElasticLearningLoss: ("elastic", "elastic_error"),
    NegLogLearningLoss: ("log", "neglog", "neg_log", "logloss"),
}
_CLASSES = {name: k for k, names in _ALIASES.items() for name in (*names, k.__name__)}
_FUNCTIONS = [name for name in formulas.LOSSES if name not in _CLASSES]


def loss_onnx(
    loss: BaseLearningLoss,
    outputs: Mapping[str, str],
    opset: int | None = None,
    dtype: Any = np.float32,
    weight_name: str | None = None,
    shape: Shape = ("N", "k"),
    scale: float = 1.0,
) -> ModelProto:
    """Return the model of a loss, of the inputs X1 (expected), X2 (predicted) and row weights.

    Args:
        loss: the loss.
        outputs: `{name: what}`, what is "sum", a scalar; "mean", that divided by the number of
            elements; "rows", (N, 1); or "gradient" of the sum, of the shape of X2.
        opset: 14 to 26; None is 18.
        dtype: numpy dtype of the prediction.
        weight_name: name of an input of row weights; ones when it is not fed. None for none.
        shape: shape of the prediction.
        scale: a number that multiplies everything.
    """
    draft = Draft(type(loss).__name__, opset, dtype)
    op, kind = draft.op, ir.TensorType(draft.dtype)
    predicted = ir.Value(name=PREDICTED, type=kind, shape=ir.Shape(shape))
    expected = loss.label(op, predicted, EXPECTED)
    draft.add(expected)
    draft.add(predicted)
    weight = None if weight_name is None else draft.input(weight_name, (None,), default=1.0)
    with op:
        rows, gradient = loss.rows_and_gradient(op, predicted, expected, weight)
        if scale != 1:
            rows, gradient = rows * scale, gradient * scale
        summed = op.ReduceSum(rows, keepdims=0)
        made = {"sum": summed, "rows": rows, "gradient": gradient}
        if "mean" in outputs.values():
            made["mean"] = summed / op.Cast(op.Size(predicted), to=draft.dtype)
        return draft.model({name: made[what] for name, what in outputs.items()})


def _field(loss: BaseLearningLoss, prediction: ir.Value) -> Field:
    """Return the check of the labels that go with a prediction of known shape."""
    label = loss.label(Emit(ir.Graph([], [], nodes=[])), prediction, "expected")
    facts, shape = loss.facts(prediction), dims(label)
    assert label.dtype is not None
    return Field(
        "expected",
        label.dtype.numpy(),
        None if shape is None else (None, *shape[1:]),
        classes=facts.get("classes"),
        ignored=facts.get("ignore_index"),
        allowed=formulas.LABELS.get(facts.get("loss", "")),
    )
