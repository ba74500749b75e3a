"""Losses outside of the model: classes that write a loss of a prediction and a label.

A loss writes itself and its gradient w.r.t. the prediction into any graph, or into two models,
which `loss_gradient` and `loss_scores` run. The formulas are the formulas of `losses.formulas`,
except that the square is halved, and that `NegLogLearningLoss` takes logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import log, log1p
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from onnxgrad.autodiff.reverse import sweep
from onnxgrad.checks import check_choice
from onnxgrad.compat.small_models import SmallFunctions, build_small_model, select_object
from onnxgrad.data.arrays import shape_mismatch
from onnxgrad.data.field import Field
from onnxgrad.errors import unknown
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.infer import infer
from onnxgrad.losses import formulas
from onnxgrad.losses.applied_to import decide_options
from onnxgrad.losses.in_graph import make_label_input
from onnxgrad.losses.info import LossInfo
from onnxgrad.losses.output_terms import OutputTerms, formula_terms, widen_label
from onnxgrad.losses.spec import (
    CLASS_INDICES,
    LIKE_PREDICTION,
    LabelKind,
    LossSpec,
    Terms,
    softplus,
    widen_to_float32,
)
from onnxgrad.model.draft import Draft, Shape
from onnxgrad.operators.shapes import dims, rank
from onnxgrad.runtime.values import (
    FLOATS,
    copy_to_ortvalue,
    fit_shape_and_dtype,
    shape_of,
    to_numpy,
)

EXPECTED, PREDICTED, LOSS, GRADIENT = "X1", "X2", "Y", "Y_grad"  # names of inputs and outputs
Quantities = Mapping[str, str]


class BaseLearningLoss(SmallFunctions):
    """Base class of losses outside of the model: functions of a prediction and a label.

    A new loss overrides `loss`, and for class indices `label` and `info`, too. `loss` and
    `gradient` are called inside of `with op:`, so that `a * b` writes a node.

    Examples:
        >>> import numpy as np, onnxgrad as og
        >>> class PseudoHuber(og.compat.BaseLearningLoss):
        ...     def loss(self, op, prediction, label):
        ...         d = prediction - label
        ...         return op.Sqrt(1.0 + d * d) - 1.0
        >>> pseudo_huber = PseudoHuber().build_onnx_function(dtype=np.float64)
        >>> loss, gradient = pseudo_huber.loss_gradient(np.zeros(2), np.array([0.75, 0]))
        >>> print(loss.round(2), gradient.round(2))  # sqrt(1 + d^2) - 1, d / sqrt(1 + d^2)
        0.25 [0.6 0. ]
    """

    def loss(self, op: Any, prediction: ir.Value, label: ir.Value) -> ir.Value:
        """Write the loss of each element, in the prediction's shape, or the loss of each row."""
        raise NotImplementedError

    def gradient(self, op: Any, prediction: ir.Value, label: ir.Value) -> ir.Value:
        """Write d loss / d prediction; by default, differentiate the graph of `loss`.

        Raises:
            ValueError: the loss does not depend on the prediction.
            NoGradientRule: the loss uses an operator without a rule.
        """
        loss = self.loss(op, prediction, label)
        gradients = sweep(op, {loss: op.ones_like(loss)}, [prediction])
        if prediction not in gradients:
            raise ValueError(
                f"the loss {self} does not depend on the prediction {prediction.name!r}: use "
                "`prediction` in the method `loss`"
            )
        return gradients[prediction]

    def label(self, op: Any, prediction: ir.Value, name: str) -> ir.Value:
        """Return a new `ir.Value` for the labels, which the caller adds to the graph's inputs.

        By default, it has the shape and dtype of the prediction.
        """
        return make_label_input(op, prediction, LIKE_PREDICTION, type(self).__name__, name)

    def info(self, prediction: ir.Value) -> LossInfo:
        """Return limits of the labels' values, such as a class count; by default no limits."""
        return LossInfo()

    def output_terms(self, op: Any, prediction: ir.Value, label_name: str) -> OutputTerms:
        """Write the loss for a `Trainer`, and its gradient if the class overrides `gradient`."""
        label = self.label(op, prediction, label_name)
        widen_label(label)
        value, expected = widen_to_float32(op, prediction), label
        if label.shape is None:  # else (N,) and (N, 1) would broadcast to (N, N)
            expected = op.Reshape(label, op.Shape(value))
        terms, written = Terms(self.loss(op, value, expected)), None
        if type(self).gradient is not BaseLearningLoss.gradient:
            written = value, self.gradient(op, value, expected)
        return OutputTerms(label, terms, self.info(prediction), written)

    def rows_and_gradient(
        self, op: Any, prediction: ir.Value, label: ir.Value, weight: ir.Value | None = None
    ) -> tuple[ir.Value, ir.Value]:
        """Write the losses of the rows, (N, 1), and the gradient of their sum.

        Sample weights, (N,) or (N, 1), multiply both.
        """
        if label.shape is None:
            label = op.Reshape(label, op.Shape(prediction))  # else (N, N)
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
        """Write the models that `loss_gradient` and `loss_scores` run; return `self`.

        `loss_grad_onnx_` has the inputs X1 (expected), X2 (predicted) and the sample weights, ones
        by default, and the outputs Y, the summed loss, a scalar, and Y_grad, its gradient w.r.t.
        X2. `loss_score_onnx_` has the same inputs and the output Y, the loss of every row, (N, 1).

        Args:
            opset: opset of the models, 14 or newer; None is 18.
            device: "cpu", "cuda" or "cuda:1", a GPU by its number; None is "cpu".
            weight_name: name of an input of sample weights, (N,); None for no such input.
            dtype: numpy dtype of the prediction.
            shape: shape of the prediction, with strings for symbolic dimensions.

        Raises:
            ValueError: an invalid dtype, opset or name, or a loss that needs another shape.
            ProviderError: the installed onnxruntime has no provider for `device`.
        """
        build = partial(
            build_small_model,
            write_loss_outputs,
            opset,
            dtype,
            loss=self,
            weight_name=weight_name,
            shape=shape,
        )
        self._store_models(
            device,
            loss_grad_onnx_=build(quantities={LOSS: "sum", GRADIENT: "gradient"}),
            loss_score_onnx_=build(quantities={LOSS: "rows"}),
        )
        return self

    def loss_gradient(self, expected: Any, predicted: Any, weight: Any = None) -> tuple[Any, Any]:
        """Return the summed loss, a scalar, and its gradient w.r.t. the prediction.

        Args:
            expected: labels, an array or OrtValue; (N,) stands for (N, 1).
            predicted: predictions, an array or OrtValue; the results are of the same type.
            weight: sample weights, (N,) or (N, 1), or None.

        Raises:
            EvaluationError: `build_onnx_function` was not called.
            ValueError: shapes that do not fit, or labels that the loss does not allow; the message
                names rows.
        """
        loss, gradient = self._run_loss_model("loss_grad_onnx_", expected, predicted, weight)
        if len(shape_of(predicted)) == 1:  # the model computes with (N, 1)
            flat = to_numpy(gradient).reshape(-1)
            gradient = (
                copy_to_ortvalue(flat, self._device)
                if isinstance(predicted, ort.OrtValue)
                else flat
            )
        return loss, gradient

    def loss_scores(self, expected: Any, predicted: Any, weight: Any = None) -> Any:
        """Return the weighted loss of every row, (N, 1); arguments as for `loss_gradient`."""
        return self._run_loss_model("loss_score_onnx_", expected, predicted, weight)[0]

    def _run_loss_model(self, name: str, expected: Any, predicted: Any, weight: Any) -> list[Any]:
        """Check labels and predictions, run the loss model in the attribute `name`, and return its
        outputs.
        """
        feed = checked_feed(self, self._model_session(name), expected, predicted, weight)
        return self._run_model(name, feed, isinstance(predicted, ort.OrtValue))

    @staticmethod
    def select(class_name: Any, **options: Any) -> BaseLearningLoss:
        """Return the loss that `class_name` is or names: an instance, a class, a name, or a
        function `(op, f, y)`.

        Names: the names of the classes; `square_error`, `squared_error`, `square`, `l2`;
        `absolute_error`, `absolute`, `l1`; `elastic_error`, `elastic`; `log`, `neglog`, `neg_log`,
        `logloss` for `NegLogLearningLoss`; and other keys of `onnxgrad.losses.LOSSES`.

        Raises:
            ValueError: an unknown name or option, or options together with an instance.
        """
        selected = select_object(BaseLearningLoss, "loss", class_name, _CLASSES, options)
        if selected is not None:
            return selected
        if not callable(class_name) and class_name not in _FUNCTIONS:
            raise unknown("loss", class_name, [*_CLASSES, *_FUNCTIONS])
        formulas.loss_spec(class_name, None, options)
        return FunctionLearningLoss(class_name, options or None)


def write_loss_outputs(
    draft: Draft,
    loss: Any,
    quantities: Quantities,
    weight_name: str | None = None,
    shape: Shape = ("N", "k"),
    scale: float = 1.0,
) -> dict[str, ir.Value]:
    """Write the outputs of a model that computes a loss of X1 (labels), X2 (predictions) and row
    weights.

    Args:
        draft: the model, which gets the name of the class of the loss.
        loss: a `BaseLearningLoss`.
        quantities: `{output: quantity}`, where the quantity is "sum", a scalar; "mean", the sum
            divided by the number of elements; "rows", (N, 1); or "gradient" of the sum w.r.t. X2.
        weight_name: name of an input of sample weights, ones by default; None for no such input.
        shape: shape of X2.
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
    """Return {input: array} for a model of `write_loss_outputs`, after checks of labels and
    predictions.

    Raises:
        ValueError: arrays that do not fit the model or each other, or labels that the loss does not
            allow; the message names rows.
    """
    declared = next(x for x in session.get_inputs() if x.name == PREDICTED)
    shape = _check_prediction_shape(declared.shape, shape_of(predicted))
    dtype = FLOATS[declared.type]
    prediction = ir.Value(name=PREDICTED, type=ir.TensorType(dtype), shape=ir.Shape(shape))
    feed = {PREDICTED: fit_shape_and_dtype(predicted, shape, dtype.numpy())}
    fields = {EXPECTED: _label_field(loss, prediction)}
    values = {EXPECTED: expected}
    if weight is not None:
        optional = session.get_overridable_initializers()
        if not optional:
            raise ValueError(
                "the loss was built without sample weights: call build_onnx_function("
                "weight_name=...)"
            )
        fields[optional[0].name] = Field("weight", dtype.numpy(), (None,))
        values[optional[0].name] = weight
    for key, value in values.items():
        array = fields[key].check(to_numpy(value))
        if len(array) != shape[0]:
            name = fields[key].name
            raise ValueError(
                f"{name!r} has {len(array)} rows, and 'predicted' has {shape[0]}: pass the same "
                "number of rows"
            )
        feed[key] = fit_shape_and_dtype(value, array.shape, array.dtype, array)
    return feed


def _check_prediction_shape(declared: list[int | str], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a prediction as the loss model takes it: (N,) becomes (N, 1)
    for rank 2.
    """
    if not shape or 0 in shape:
        raise ValueError(f"'predicted' has the shape {shape}: pass at least one row")
    if len(shape) == 1 and len(declared) == 2:
        shape = (*shape, 1)
    if mismatch := shape_mismatch(shape, declared):
        rebuild = "build the loss for it by build_onnx_function(shape=...)"
        raise ValueError(f"the array 'predicted' {mismatch}; {rebuild}")
    return shape


def _label_field(loss: Any, prediction: ir.Value) -> Field:
    """Return the `Field` that checks the dtype, shape and range of labels for a
    prediction's shape.
    """
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


class SquareLearningLoss(BaseLearningLoss):
    """(f - y)^2 / 2 of the prediction f and the label y, with gradient f - y, as in `MLPRegressor`.

    Examples:
        >>> import numpy as np, onnxgrad as og
        >>> loss = og.compat.SquareLearningLoss().build_onnx_function()
        >>> summed, gradient = loss.loss_gradient(np.float32([1, 2]), np.float32([1, 5]))
        >>> print(summed, gradient)
        4.5 [0. 3.]
    """

    def loss(self, op: Any, prediction: ir.Value, label: ir.Value) -> ir.Value:
        """Write (f - y)^2 / 2 for the prediction f and the label y."""
        return 0.5 * formulas.squared_error(op, prediction, label)

    def gradient(self, op: Any, prediction: ir.Value, label: ir.Value) -> ir.Value:
        """Write f - y, prediction minus label, as one node; differentiation would write f/2 - y/2
        twice.
        """
        return op.set_type_like(op.Sub(prediction, label), prediction)


class AbsoluteLearningLoss(BaseLearningLoss):
    """|f - y| of the prediction f and the label y, with gradient sign(f - y), zero where f = y.

    Examples:
        >>> import numpy as np, onnxgrad as og
        >>> loss = og.compat.AbsoluteLearningLoss().build_onnx_function()
        >>> summed, gradient = loss.loss_gradient(np.float32([1, 2]), np.float32([1, 5]))
        >>> print(summed, gradient)
        3.0 [0. 1.]
    """

    def loss(self, op: Any, prediction: ir.Value, label: ir.Value) -> ir.Value:
        """Write |f - y| for the prediction f and the label y."""
        return formulas.absolute_error(op, prediction, label)


@dataclass(eq=False, repr=False)
class ElasticLearningLoss(BaseLearningLoss):
    """l1_weight |f - y| + l2_weight (f - y)^2 of the prediction f and the label y.

    Its gradient is l1_weight sign(f - y) + 2 l2_weight (f - y).

    Args:
        l1_weight: factor of the absolute error.
        l2_weight: factor of the squared error.

    Examples:
        >>> import numpy as np, onnxgrad as og
        >>> loss = og.compat.ElasticLearningLoss(l1_weight=1, l2_weight=0.5).build_onnx_function()
        >>> summed, gradient = loss.loss_gradient(np.float32([1, 2]), np.float32([1, 5]))
        >>> print(summed, gradient)
        7.5 [0. 4.]
    """

    l1_weight: float = 0.5
    l2_weight: float = 0.5

    def loss(self, op: Any, prediction: ir.Value, label: ir.Value) -> ir.Value:
        """Write l1_weight |f - y| + l2_weight (f - y)^2 for the prediction f and the label y."""
        return formulas.elastic(op, prediction, label, self.l1_weight, self.l2_weight)


@dataclass(eq=False, repr=False)
class NegLogLearningLoss(BaseLearningLoss):
    """-log of the probability p of the label y, computed from logits; the gradient is p - y.

    The probability is clipped to [eps, 1 - eps] in the loss, not in the gradient, so that rows
    beyond eps still train. -log p is computed as softplus(-f) or by log-softmax, which neither
    overflow nor lose digits (Goodfellow et al. 2016, "Deep Learning", 6.2.2).

    Args:
        eps: distance of clipped probabilities from 0 and 1, at least 0 (no clipping), below 0.5.
        probability_function: "sigmoid": logits (N, 1) of class 1, int64 labels 0 and 1, (N, 1).
            "softmax": logits (N, k) of k classes, int64 labels 0 to k - 1, (N,).

    Examples:
        >>> import numpy as np, onnxgrad as og
        >>> loss = og.compat.NegLogLearningLoss(probability_function="softmax")
        >>> loss = loss.build_onnx_function()
        >>> summed, gradient = loss.loss_gradient([1, 0], np.zeros((2, 2), np.float32))
        >>> print(summed.round(4), gradient.tolist())  # 2 log(2), p - y
        1.3863 [[0.5, -0.5], [-0.5, 0.5]]
    """

    eps: float = 1e-5
    probability_function: str = "sigmoid"

    def loss(self, op: Any, prediction: ir.Value, label: ir.Value) -> ir.Value:
        """Write -log of the label's probability: of every element for a sigmoid, of every row for a
        softmax.
        """
        if not 0 <= self.eps < 0.5:
            raise ValueError(f"eps must be at least 0 and below 0.5, not {self.eps!r}")
        if self._uses_softmax():
            log_p = op.LogSoftmax(prediction, axis=1)
            loss = -op.GatherElements(log_p, op.Unsqueeze(label, [1]), axis=1)
        else:
            loss = softplus(op, op.Where(op.Equal(label, 1), -prediction, prediction))
        return op.Clip(loss, -log1p(-self.eps), -log(self.eps)) if self.eps else loss

    def gradient(self, op: Any, prediction: ir.Value, label: ir.Value) -> ir.Value:
        """Write the gradient w.r.t. the logits: the unclipped probabilities minus the (one-hot)
        labels.
        """
        if self._uses_softmax():
            p, index = op.Softmax(prediction, axis=1), op.Unsqueeze(label, [1])
            gradient = op.GatherElements(p, index, axis=1) - 1.0
            gradient = op.ScatterElements(p, index, gradient, axis=1)
        else:
            gradient = op.Sigmoid(prediction) - op.Cast(label, to=prediction.dtype)
        return op.set_type_like(gradient, prediction)

    def label(self, op: Any, prediction: ir.Value, name: str) -> ir.Value:
        """Return the int64 label input: in the shape of the logits, or (N,) for a softmax."""
        return make_label_input(op, prediction, self._label_kind(), type(self).__name__, name)

    def info(self, prediction: ir.Value) -> LossInfo:
        """Return the class count of the labels and, for a sigmoid, the threshold of class 1."""
        classes = self._label_kind().classes(dims(prediction))
        return LossInfo(classes=classes, threshold=None if self._uses_softmax() else 0.0)

    def _label_kind(self) -> LabelKind:
        """Return the `LabelKind` of this loss: class indices, or 0 and 1 for a sigmoid."""
        if self._uses_softmax():
            return CLASS_INDICES
        return LabelKind(ir.DataType.INT64, classes=lambda prediction: 2)

    def _uses_softmax(self) -> bool:
        choices = ("sigmoid", "softmax")
        return check_choice("probability_function", self.probability_function, choices) == "softmax"


@dataclass(eq=False, repr=False)
class FunctionLearningLoss(BaseLearningLoss):
    """A loss of `onnxgrad.losses.LOSSES`, or a user's function, differentiated automatically.

    Args:
        function: a key of `onnxgrad.losses.LOSSES`, or `(op, prediction, label, **options)` that
            writes the loss of every element or row.
        options: options of the function.

    Examples:
        >>> import numpy as np
        >>> from onnxgrad.compat import FunctionLearningLoss
        >>> loss = FunctionLearningLoss("huber", {"delta": 2}).build_onnx_function()
        >>> summed, gradient = loss.loss_gradient(np.float32([1, 2]), np.float32([2, 5]))
        >>> print(summed, gradient)
        4.5 [1. 2.]
    """

    function: Any
    options: Mapping[str, Any] | None = None

    def loss(self, op: Any, prediction: ir.Value, label: ir.Value) -> ir.Value:
        """Write the loss of each element or row by the formula of `function`.

        Raises:
            ValueError: the prediction is an input whose number of classes is unknown: then labels
                out of range would add nothing to the loss.
        """
        spec = self.spec(prediction)
        classes = spec.label_kind.classes(dims(prediction))
        if prediction.producer() is None and isinstance(classes, str):
            raise ValueError(
                f"{spec.name!r} needs a known number of classes: give the axis of the classes a "
                "length, as by build_onnx_function(shape=('N', 5))"
            )
        return spec.losses(op, prediction, label)

    def label(self, op: Any, prediction: ir.Value, name: str) -> ir.Value:
        """Return the label input that `add_loss_output` would add for this loss."""
        spec = self.spec(prediction)
        return make_label_input(op, prediction, spec.label_kind, spec.name, name)

    def info(self, prediction: ir.Value) -> LossInfo:
        """Return the limits of labels that `add_loss_output` would store for this loss."""
        return LossInfo.of(self.spec(prediction), prediction)

    def output_terms(self, op: Any, prediction: ir.Value, label_name: str) -> OutputTerms:
        """Write the loss as a `Trainer` writes it for the loss named `function`."""
        return formula_terms(op, self.spec(), prediction, label_name)

    def spec(self, prediction: ir.Value | None = None) -> LossSpec:
        """Return the `LossSpec` of `function`; options that are not set follow from the graph of
        `prediction`.
        """
        spec = formulas.loss_spec(self.function, "sum", self.options or {})
        return spec if prediction is None else decide_options(spec, prediction, otherwise=1)


_ALIASES: dict[type[BaseLearningLoss], tuple[str, ...]] = {
    SquareLearningLoss: ("squared_error", "square_error", "square", "l2"),
    AbsoluteLearningLoss: ("absolute_error", "absolute", "l1"),
    ElasticLearningLoss: ("elastic", "elastic_error"),
    NegLogLearningLoss: ("log", "neglog", "neg_log", "logloss"),
}
_CLASSES = {name: loss for loss, names in _ALIASES.items() for name in (*names, loss.__name__)}
_FUNCTIONS = [name for name in formulas.LOSSES if name not in _CLASSES]
