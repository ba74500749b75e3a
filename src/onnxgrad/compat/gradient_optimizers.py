"""The two trainers of the older packages: with the loss in the model's graph, or outside of it.

`OrtGradientOptimizer` trains a model whose own graph computes the loss, and
`OrtGradientForwardBackwardOptimizer` a model whose predictions a loss object reads.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from onnx import ModelProto

from onnxgrad.autodiff.derivative import DerivativeOptions, DerivativeRequest, derivative
from onnxgrad.checks import check_choice
from onnxgrad.compat.forward_backward import OrtGradientForwardBackward
from onnxgrad.compat.function_graphs import function_onnx_graph
from onnxgrad.compat.learning_losses import BaseLearningLoss
from onnxgrad.compat.learning_penalties import BaseLearningPenalty
from onnxgrad.compat.seed_trainer import (
    EstimatorFit,
    FittedValue,
    SeedTrainer,
    SelectedArgument,
    check_state_array,
    source_in_row_order,
)
from onnxgrad.errors import unknown
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.infer import infer
from onnxgrad.losses.in_graph import choose_output
from onnxgrad.losses.objectives import WrittenLoss
from onnxgrad.losses.spec import widen_to_float32
from onnxgrad.losses.vocabulary import OwnGradients, gradient_scaler
from onnxgrad.model.feeds import names_without_default
from onnxgrad.model.opsets import WORKING_OPSET, newest_opset
from onnxgrad.model.read import read
from onnxgrad.model.write import save, write_models
from onnxgrad.operators.shapes import dims
from onnxgrad.runtime.device import Device
from onnxgrad.runtime.session import session
from onnxgrad.runtime.values import copy_to_ortvalue, to_numpy
from onnxgrad.training.data import Dataset, as_dataset
from onnxgrad.training.evaluator import Evaluator
from onnxgrad.training.job import Job
from onnxgrad.training.model_loss import ComputedLoss, write_row_count
from onnxgrad.training.objective import Objective
from onnxgrad.training.recipe import Recipe, build_objective
from onnxgrad.training.step.build import build_epoch, build_step
from onnxgrad.training.step.weight_groups import numpy_dtype


@dataclass(eq=False, repr=False)
class OrtGradientOptimizer(SeedTrainer):
    """Trains the weights of a model whose graph computes the loss, on the ordinary onnxruntime.

    One model computes the gradient of a batch and updates the weights, and one call of onnxruntime
    runs many batches. The learning rate applies to the mean of the rows' gradients: the gradient of
    a loss that is a sum over rows is divided by the number of rows of the batch.

    Args:
        model_onnx: model, serialized model or path, with a loss output (`add_loss_output`).
        weights_to_train: names of float constants of the model, or patterns as "layer4.*", see
            `trainable`. None: the weights that train by default; a warning names uncertain ones.
        loss_output_name: the output that is the loss, of one element; it counts as a sum over rows
            unless `add_loss_output` noted in the model that it is a mean.
        max_iter: epochs; in each, every row is drawn once, the last batch may be shorter.
        training_optimizer_name: "SGDOptimizer", "momentum", "nesterov", "adam", "adamw", or an
            optimizer of `onnxgrad` such as `adam(b1=0.8)`.
        batch_size: rows of a batch; fewer rows of data are one batch.
        learning_rate: name, number or `BaseLearningRate`; `LearningRateSGDNesterov` has its own
            momentum, and requires "SGDOptimizer".
        device: "cpu", "cuda" or "cuda:1", a GPU by its number; "gpu" means "cuda".
        warm_start: `fit` continues with the weights, slots and step number of the last `fit`; the
            slots start empty for another optimizer, and if weights are added.
        verbose: 1 reports every epoch through `logging`, to stderr if it is not configured.
        validation_every: epochs between two validations, or below 1 a share of `max_iter`.
        saved_gradient: path to which `fit` saves the gradient model, with inputs for data and
            weights, the loss and `<weight>_grad` as outputs; the training model that runs is
            saved to the same path with ".training.onnx" appended.
        sample_weight_name: name of the input of sample weights.
        random_state: seed of the order of rows and of `weight_init`; None draws a new one.
        weight_init: "model" starts from the model's weights. "glorot" (Glorot & Bengio 2010,
            uniform) and "normal" (standard normal) initialize weights of rank 2 or more.

    Attributes:
        train_losses_: mean loss of a row, per epoch.
        validation_losses_: mean loss of a validation row, per validation.
        trained_coef_: `{name: array}`, the trained weights.
        n_iter_: number of finished epochs.
        n_steps_: step number of the optimizer: the batches since its slots were empty.
        learning_rate_: the rate of the last epoch.
        stop_reason_: why the last `fit` ended: "max_iter", "callback", "not finite" (the loss, a
            weight or the validation loss), "interrupted" (Ctrl-C), or "error" (any other); None
            while it runs.
        feature_names_in_: the names of the columns of X, if `fit` was called with a table.
        train_session_: an `onnxruntime.InferenceSession` of the gradient model, as
            `saved_gradient` saves it, for one batch.
        input_names_, output_names_: the names of `train_session_`: data, label and weights; the
            loss and the gradients.
        train_function_: the forward and the backward pass of the model
            (`OrtGradientForwardBackward`); its inputs are the inputs of the model, then the
            trained weights.
        cls_type_: the class of `train_function_`.

    A callback of `fit` reads the current values of attributes. Sessions and passes are built when
    they are first read.

    Examples:
        >>> import numpy as np, onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2] x) => (float[N,1] y) <float[2,1] w = {0.0, 0.0}> { y = MatMul(x, w) }
        ... ''')
        >>> X = np.random.default_rng(0).normal(size=(100, 2)).astype(np.float32)
        >>> y = X @ np.float32([[2], [3]])
        >>> trainer = og.compat.OrtGradientOptimizer(
        ...     og.add_loss_output(model), training_optimizer_name="momentum", learning_rate=0.02
        ... )
        >>> trainer.fit(X, y).get_state()["w"].ravel().round(2).tolist()
        [2.0, 3.0]
        >>> trained = trainer.get_trained_onnx(model)
    """

    saved_gradient: str | os.PathLike | None = None
    sample_weight_name: str = "weight"
    random_state: int | None = None
    weight_init: str = "model"

    trained_coef_ = FittedValue(lambda self: self.get_state())
    train_session_ = FittedValue(lambda self: self._cache_result("session", self._gradient_session))
    train_function_ = FittedValue(
        lambda self: self._cache_result("function", self._trained_forward_backward().new_instance)
    )
    input_names_ = FittedValue(lambda self: [x.name for x in self.train_session_.get_inputs()])
    output_names_ = FittedValue(lambda self: [y.name for y in self.train_session_.get_outputs()])

    def _training_loss(self, weighted: bool, weights: Sequence[str] | None = None) -> ComputedLoss:
        return ComputedLoss(self.loss_output_name, self.sample_weight_name, reduction="sum")

    def _save_gradient_model(self, call: EstimatorFit) -> None:
        if self.saved_gradient is not None:
            save(self._gradient_model(call.job.proto, call.state.trained), self.saved_gradient)
            # the model of the runner has operators of onnxruntime
            plain = build_epoch(call.recipe.step(call.recipe.objective(), in_place=False))
            save(plain, f"{os.fspath(self.saved_gradient)}.training.onnx")

    def _gradient_model(self, proto: ModelProto, weights: Sequence[str]) -> ModelProto:
        """Return a model that computes the loss and its gradients w.r.t. `weights`."""
        loss = DerivativeOptions.Loss
        return derivative(proto, DerivativeRequest(weights, [], loss, self.loss_output_name))[0]

    def _gradient_session(self) -> ort.InferenceSession:
        """Return a session that computes the loss and its gradients w.r.t. the trained weights."""
        model = self._gradient_model(read(self.model_onnx), self._trained_weight_names())
        return session(model, Device.of(self.device), work=0.0)

    def get_state(self) -> dict[str, np.ndarray]:
        """Return a copy of the trained weights, `{name: array}`, in the model's shapes and dtypes.

        Raises:
            NotFittedError: nothing was trained.
        """
        return {name: array.copy() for name, array in self._fitted_state().values.weights.items()}

    def set_state(self, state: Mapping[str, np.ndarray], check_trained: bool = False) -> Self:
        """Set weights, `{name: array}`, from which the next `fit` with `warm_start` starts.

        Args:
            state: values of weights, trained or not; other weights are unchanged.
            check_trained: raise for weights that the last `fit` did not train.

        Raises:
            ValueError: a name that no float constant of the model has, or an array of another
                shape; with `check_trained`, a weight that was not trained.
            NotFittedError: `check_trained`, and there was no `fit`.
        """
        weights = self._weight_arrays(state, check_trained)
        fitted = self._state_for_set_state()
        old = fitted.values
        fitted.values = replace(old, weights=old.weights | weights)
        return self


_STATE_KINDS = ("weight", "grad")


@dataclass(eq=False, repr=False)
class OrtGradientForwardBackwardOptimizer(SeedTrainer):
    """Trains the weights of a model that predicts; loss and penalty are separate objects.

    The objective is the sum over rows of w l(f, y), where w is the sample weight, plus the
    penalties of the weights; the learning rate applies to its gradient divided by the number of
    rows of the batch. As in `OrtGradientOptimizer`, one model computes forward pass, loss, backward
    pass and update, and one call of onnxruntime runs many batches. `score` makes the trainer an
    estimator for `GridSearchCV`.

    Args:
        model_onnx: model, serialized model or path, with one float output, (rows,) or (rows, ...)
            (`select_model_inputs_outputs` keeps one of several).
        loss_output_name: name of the loss in the saved graphs.
        learning_loss: name, function or `BaseLearningLoss` (see `BaseLearningLoss.select`).
        enable_logging: as `verbose`, and every call of onnxruntime at level DEBUG.
        weight_name: name of the sample weights in the saved graphs; None: graphs without them.
        learning_penalty: None, a name, number, `BaseLearningPenalty`, or `{weight: penalty}`.
        exc: whether NaN or infinity raises; otherwise `fit` ends with a warning.

    The other arguments, and the other attributes below, are as for `OrtGradientOptimizer`.

    Attributes:
        train_losses_: mean loss of a row, per epoch, the penalty of each batch included.
        trained_coef_: `{name: OrtValue}`, the trained weights.
        train_session_: the model as an `OrtGradientForwardBackward`.
        train_function_: its forward and backward pass, an instance of `cls_type_`.
        input_names_: the inputs of `train_function_.forward`: the inputs of the model, then the
            trained weights.
        output_names_: names of the gradients that `train_function_.backward` returns, one per
            input; None for an input without gradient.
        epoch_onnx_: the model of an epoch, one of the graphs of `save_onnx_graph`. The other graphs
            are `loss_grad_onnx_`, `loss_score_onnx_`, `axpy_onnx_` (`axpyw_onnx_` with momentum),
            `zero_onnx_` and, with a penalty, `penalty_onnx_` and `penalty_grad_onnx_`.

    A callback of `fit` reads the current values of attributes. Sessions and graphs are built when
    they are first read.

    Examples:
        >>> import numpy as np, onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2] x) => (float[N,1] y) <float[2,1] w = {0.0, 0.0}> { y = MatMul(x, w) }
        ... ''')
        >>> X = np.random.default_rng(0).normal(size=(100, 2)).astype(np.float32)
        >>> y = X @ np.float32([[2], [3]])
        >>> trainer = og.compat.OrtGradientForwardBackwardOptimizer(
        ...     model, training_optimizer_name="momentum", learning_rate=0.02
        ... )
        >>> trainer.fit(X, y).predict(np.float32([[1, 1]])).round(2).tolist()
        [[5.0]]
        >>> trainer.score(X, y) > -1e-4
        True
    """

    learning_loss: Any = SelectedArgument(BaseLearningLoss.select, "square_error")  # noqa: RUF009
    enable_logging: bool = False
    weight_name: str | None = None
    learning_penalty: Any = SelectedArgument(BaseLearningPenalty.select, None)  # noqa: RUF009
    exc: bool = True
    random_state: int | None = None
    weight_init: str = "model"

    trained_coef_ = FittedValue(lambda self: self.get_state())
    train_session_ = FittedValue(
        lambda self: self._trained_forward_backward(
            self._training_loss(False).outputs(read(self.model_onnx))
        )
    )
    train_function_ = FittedValue(
        lambda self: self._cache_result("function", self.train_session_.new_instance)
    )
    input_names_ = FittedValue(
        lambda self: [*self.train_session_.input_names, *self.train_session_.weights_to_train]
    )
    output_names_ = FittedValue(
        lambda self: [*map(self.train_session_.partition.gradients.get, self.input_names_)]
    )
    loss_grad_onnx_ = FittedValue(lambda self: self._training_graph("loss_grad_onnx_"))
    loss_score_onnx_ = FittedValue(lambda self: self._training_graph("loss_score_onnx_"))
    axpy_onnx_ = FittedValue(lambda self: self._training_graph("axpy_onnx_"))
    axpyw_onnx_ = FittedValue(lambda self: self._training_graph("axpyw_onnx_"))
    penalty_onnx_ = FittedValue(lambda self: self._training_graph("penalty_onnx_"))
    penalty_grad_onnx_ = FittedValue(lambda self: self._training_graph("penalty_grad_onnx_"))
    zero_onnx_ = FittedValue(lambda self: self._training_graph("zero_onnx_"))
    epoch_onnx_ = FittedValue(lambda self: self._training_graph("epoch_onnx_"))

    def _training_loss(
        self, weighted: bool, weights: Sequence[str] | None = None
    ) -> RowsAndPenalty:
        penalty = BaseLearningPenalty.select(self.learning_penalty)
        if weights is not None:
            penalty.check(weights)
        return RowsAndPenalty(
            BaseLearningLoss.select(self.learning_loss),
            penalty,
            weights or (),
            self.loss_output_name,
            "weight" if self.weight_name is None and weighted else self.weight_name,
        )

    # -- predictions --------------------------------------------------------------------------

    def losses(self, X: Any, y: Any = None, sample_weight: Any = None) -> np.ndarray:
        """Return the loss of every row times the row's sample weight, (rows,).

        SharedArguments and errors are as for `fit`. Penalties are not included.
        """
        data = as_dataset(X, y, sample_weight)
        evaluator = self._trained_evaluator(RowLosses, data.weight_axes > 0)
        (losses,) = evaluator.predict({}, source_in_row_order(data, evaluator.fields)).values()
        return losses

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """Return the negative mean of `losses`: higher is better.

        With sample weights w, the sum of w l is divided by the number of rows, as in
        `train_losses_`, and not by the sum of w.
        """
        return -float(self.losses(X, y, sample_weight).mean(dtype=np.float64))

    def predict(self, X: Any) -> np.ndarray:
        """Return the output of the trained model for `X`: an array, a table, or a dict of arrays.

        A single column is returned with the shape (rows,) if the labels of `fit` had this shape.

        Raises:
            ValueError: data that the inputs do not accept, or nothing was trained.
        """
        evaluator = self._trained_evaluator(Evaluator, False)
        fields = evaluator.fields.without_labels()
        fields.left_out = frozenset()  # labels are refused
        source = source_in_row_order(Dataset(X), fields)
        (predictions,) = evaluator.predict({}, source).values()
        flat = self._state.flat and predictions.shape[1:] == (1,)
        return predictions[:, 0] if flat else predictions

    def _trained_evaluator(self, kind: type[Evaluator], weighted: bool) -> Evaluator:
        """Return an `Evaluator` of the trained model, which reads sample weights if `weighted`."""

        def build_evaluator() -> Evaluator:
            loss, device = self._training_loss(weighted), Device.of(self.device)
            job = Job(self.get_trained_onnx(), loss=loss, device=device)
            return kind(Recipe(job, weight_axes=int(weighted)))

        values = self._fitted_state().values
        return self._cache_result(f"{kind.__name__}, {weighted}", build_evaluator, values)

    # -- state --------------------------------------------------------------------------------

    def get_state(self, kind: Any = "weight") -> Any:
        """Return a copy of the weights, or of the optimizer's slots, by name of the weight.

        Args:
            kind: "weight": `{name: OrtValue}`. "grad": the slots, `{name: {slot: OrtValue}}`. A
                list of kinds: a list of these dicts.

        Raises:
            ValueError: nothing was trained, or an unknown kind.
        """
        if not isinstance(kind, str):
            return [self.get_state(k) for k in kind]
        values, device = self._fitted_state().values, Device.of(self.device).check()
        if check_choice("kind of state", kind, _STATE_KINDS) == "weight":
            return {name: copy_to_ortvalue(array, device) for name, array in values.weights.items()}
        return {
            name: {
                slot: copy_to_ortvalue(a, device) for slot, a in values.slots.get(name, {}).items()
            }
            for name in values.weights
        }

    def get_full_state(self, kind: Any = "weight") -> Any:
        """Return {name: value} of the model's data inputs, whose values are None, and then of
        `get_state`.
        """
        if not isinstance(kind, str):
            return [self.get_full_state(k) for k in kind]
        state = self.get_state(kind)
        return dict.fromkeys(names_without_default(read(self.model_onnx))) | state

    def set_state(
        self, state: Any, kind: Any = "weight", zero: bool = False, check_trained: bool = False
    ) -> Self:
        """Set weights or slots; with `warm_start` the next `fit` continues with these values.

        Args:
            state: `{name: array or OrtValue}`, or for the kind "grad" `{name: {slot: array or
                OrtValue}}`; entries of value None, such as data inputs, are skipped. For a list of
                kinds, a list of these dicts.
            kind: "weight", "grad", or a list of both.
            zero: whether zeros are set instead of the values in `state`. If all slots become zero,
                the step number is reset, too.
            check_trained: raise for weights that the last `fit` did not train.

        Raises:
            ValueError: an unknown kind, weight or slot, or an array of another shape; with
                `check_trained`, a weight that was not trained.
            NotFittedError: `check_trained`, and there was no `fit`.
        """
        several = not isinstance(kind, str)
        pairs = list(zip(kind, state, strict=True)) if several else [(kind, state)]
        checked = [(k, self._arrays_of_state(k, one, zero, check_trained)) for k, one in pairs]
        fitted = self._state_for_set_state()
        for k, new in checked:
            old = fitted.values
            if k == "weight":
                fitted.values = replace(old, weights=old.weights | new)
                continue
            slots, steps, optimizer = old.slots, old.steps, self._learning_rate_and_optimizer()[1]
            if optimizer != fitted.optimizer or (zero and new.keys() >= slots.keys()):
                slots, steps = {}, 0
            unset: dict[str, Any] = {n: {} for n in self._weight_names()}  # slots start at zero
            slots = unset | slots | {n: slots.get(n, {}) | arrays for n, arrays in new.items()}
            fitted.values, fitted.optimizer = replace(old, slots=slots, steps=steps), optimizer
        return self

    def _arrays_of_state(
        self, kind: str, state: Mapping[str, Any], zero: bool, check_trained: bool
    ) -> dict[str, Any]:
        """Return the values of `state` that are not None, as arrays in the shapes of weights or
        slots.
        """
        check_choice("kind of state", kind, _STATE_KINDS)
        if not isinstance(state, Mapping):
            raise ValueError(
                f"the state must be a dict {{weight: value}}, not {type(state).__name__}"
            )
        entries = {name: value for name, value in state.items() if value is not None}
        if kind == "weight":
            arrays = {name: to_numpy(value) for name, value in entries.items()}
            new = self._weight_arrays(arrays, check_trained)
            return {name: np.zeros_like(a) if zero else a for name, a in new.items()}
        weights = self._float_constants(entries, check_trained)
        optimizer = self._learning_rate_and_optimizer()[1]
        checked: dict[str, dict[str, np.ndarray]] = {}
        for name, slots in entries.items():
            w = weights[name]
            of_weight = optimizer.for_weight(name, w.shape)
            shapes = {slot: of_weight.slot_shape(slot, w.shape) for slot in of_weight.slots}
            if zero:
                checked[name] = {slot: np.zeros(shape, w.dtype) for slot, shape in shapes.items()}
            elif slots:
                if strange := [slot for slot in slots if slot not in shapes]:
                    raise unknown(f"slot of {name!r}", strange[0], shapes)
                checked[name] = {
                    slot: check_state_array(name, to_numpy(value), shapes[slot], w.dtype)
                    for slot, value in slots.items()
                }
        return checked

    # -- graphs -------------------------------------------------------------------------------

    def save_onnx_graph(
        self,
        folder: str | os.PathLike | type[bytes],
        prefix: str | None = None,
        suffix: str | None = None,
    ) -> dict[str, Any]:
        """Save the ONNX graphs of the training, before or after `fit`.

        Args:
            folder: the folder of the files, created if it is missing; `bytes` saves no files.
            prefix: prefix of the names of the files, as in `<prefix>model_onnx.onnx`.
            suffix: suffix of the names of the graphs, as in `zero_onnx_<suffix>.onnx`.

        Returns:
            Paths, or with `bytes` serialized models, in nested dictionaries: `model_onnx`;
            `learning_rate`: `axpy_onnx_`, or `axpyw_onnx_` with momentum; `learning_loss`:
            `loss_grad_onnx_`, `loss_score_onnx_`; `learning_penalty`: `penalty_onnx_`,
            `penalty_grad_onnx_` if there is a penalty; `zero_onnx_`; `train_function_`: the graphs
            of `OrtGradientForwardBackward`; `epoch_onnx_`: the model that training runs, which
            combines all other graphs.
        """
        return write_models(self._training_graphs(), folder, prefix, suffix)

    def _training_graphs(self) -> dict[str, Any]:
        """Return {name: ONNX graph} of the graphs that `save_onnx_graph` writes."""
        proto, names = self._model_to_train(vars(self).get("_state")), self._weight_names()
        losses, (rate, optimizer) = (
            self._training_loss(False, names),
            self._learning_rate_and_optimizer(),
        )
        objective = build_objective(Recipe(Job(proto, names, losses)))
        ((output, prediction),) = objective.predictions.items()
        shape = dims(prediction)
        shape = ("N", "k") if shape is None else ("N", *shape[1:])
        dtype = numpy_dtype(prediction)
        opset = max(WORKING_OPSET, min(objective.model.opset_imports[""], newest_opset()))
        step = build_step(objective, optimizer)
        passes = OrtGradientForwardBackward(proto, step.weights, output_names=[output])
        loss, penalty = copy.deepcopy((losses.loss, losses.penalty))
        loss.build_onnx_function(opset, weight_name=objective.row_weight, dtype=dtype, shape=shape)
        return {
            "model_onnx": proto,
            "learning_rate": _models_in_attributes(rate.build_onnx_function(opset, dtype=dtype)),
            "learning_loss": _models_in_attributes(loss),
            "learning_penalty": _models_in_attributes(
                penalty.build_onnx_function(opset, dtype=dtype, names=step.weights)
            ),
            "zero_onnx_": function_onnx_graph("zero", opset, dtype),
            "train_function_": passes.graphs(),
            "epoch_onnx_": build_epoch(step),
        }

    def _training_graph(self, name: str) -> ModelProto:
        """Return the ONNX graph `name`, such as "axpy_onnx_"; `AttributeError` if there is none."""
        graphs = self._cache_result("graphs", self._training_graphs, self._state.values)
        graphs = graphs | graphs["learning_rate"] | graphs["learning_loss"]
        graphs |= graphs["learning_penalty"]
        if name not in graphs:
            raise AttributeError(f"this training has no graph {name}: it has {sorted(graphs)}")
        return graphs[name]


def _models_in_attributes(owner: Any) -> dict[str, ModelProto]:
    """Return {attribute: model} of the attributes of a loss, penalty or learning rate that are ONNX
    models.
    """
    return {name: value for name, value in vars(owner).items() if isinstance(value, ModelProto)}


# -- the loss: losses of rows and a penalty of weights -------------------------------------------


@dataclass
class RowsAndPenalty:
    """The training objective (sum_rows w l + penalty) / rows, with losses l and weights w of rows.

    Attributes:
        loss: writes the losses l of the rows and their gradient.
        penalty: the penalty.
        weights: names of the weights that have the penalty.
        name: name of the loss in the graph.
        weight_name: name of the input of sample weights; None for no such input.
        losses: the losses of the rows, (rows,), after `write`.
    """

    loss: BaseLearningLoss
    penalty: BaseLearningPenalty
    weights: Sequence[str]
    name: str
    weight_name: str | None
    losses: ir.Value | None = field(default=None, init=False)

    def outputs(self, proto: ModelProto) -> list[str]:
        """Return a list of the only float output's name; raise `ValueError` for several or none."""
        remedy = "keep one with select_model_inputs_outputs(model, outputs=[name])"
        return [choose_output(proto, None, remedy)]

    def write(
        self, op: Emit, predictions: Mapping[str, ir.Value], weighted: bool = False
    ) -> WrittenLoss:
        """Write the summed loss and the summed penalty, and the loss's gradient w.r.t. the
        prediction.
        """
        ((name, prediction),) = predictions.items()
        prediction = widen_to_float32(op, prediction)
        label, weight = self.loss.label(op, prediction, "label"), None
        if self.weight_name is not None:  # (N,) or (N, 1)
            weight = ir.Value(name=op.name(self.weight_name), type=prediction.type)
        self._check_loss_per_row(op, prediction, label)
        rows, gradient = self.loss.rows_and_gradient(op, prediction, label, weight)
        sums, self.losses = [op.ReduceSum(rows, keepdims=0)], op.Reshape(rows, [-1])
        sums[0].name = op.name(self.name)
        count = op.Cast(write_row_count(op, op.graph.inputs, label), to=rows.dtype)
        used = {str(w.name): w for w in op.graph.inputs if w.uses()}
        penalties = [
            op.Cast(op.Reshape(term, []), to=rows.dtype)
            for name in self.weights
            if name in used and (term := self.penalty.penalty(op, name, used[name])) is not None
        ]
        gradients: list[OwnGradients | None] = [gradient_scaler([(prediction, gradient)])]
        if penalties:
            sums, gradients = [*sums, op.total(penalties)], [*gradients, None]
        info = replace(self.loss.info(prediction), label=label.name, prediction=name)
        counts, factors, infos = [count] * len(sums), [1.0] * len(sums), {str(label.name): info}
        return WrittenLoss(sums, counts, factors, [label], infos, weight, gradients)

    def _check_loss_per_row(self, op: Emit, prediction: ir.Value, label: ir.Value) -> None:
        """Raise `ValueError` unless the loss has a value per row, as sample weights need."""
        losses = self.loss.loss(op, prediction, label)
        if losses.shape is None:
            infer(ir.Model(op.graph, ir_version=8))
        have, want = ((dims(v) or (None,))[0] for v in (losses, prediction))
        if isinstance(have, int) and have != want:
            raise ValueError(
                f"{self.loss} writes {have} losses for the {want} rows of {prediction.name!r}: it "
                "must write a loss for every element or row"
            )


class RowLosses(Evaluator):
    """An `Evaluator` that returns the loss of each row, (rows,), in place of the model's
    predictions.
    """

    def objective(self) -> Objective:
        """Return an objective whose only prediction is the loss of each row."""
        one = super().objective()
        assert isinstance(self.recipe.loss, RowsAndPenalty)
        assert self.recipe.loss.losses is not None
        return replace(one, predictions={"losses": self.recipe.loss.losses})
