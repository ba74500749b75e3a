"""`OrtGradientForwardBackwardOptimizer`: trains a model whose loss is outside of it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from onnx import ModelProto

from onnxgrad.compat.attributes import Fitted, Selected
from onnxgrad.compat.estimator_state import EstimatorState
from onnxgrad.compat.learning_losses import BaseLearningLoss
from onnxgrad.compat.learning_penalties import BaseLearningPenalty
from onnxgrad.compat.rows_and_penalty import RowLosses, RowsAndPenalty, rows_of
from onnxgrad.compat.seed_trainer import SeedTrainer, fitting_array
from onnxgrad.compat.training_graphs import Graphs, training_graphs
from onnxgrad.errors import unknown
from onnxgrad.model.feeds import names_without_default
from onnxgrad.model.read import read
from onnxgrad.model.write import write_models
from onnxgrad.optimizers import Optimizer
from onnxgrad.runtime.device import Device
from onnxgrad.runtime.values import owned, to_numpy
from onnxgrad.training.data import Dataset, as_dataset
from onnxgrad.training.evaluate import Evaluator
from onnxgrad.training.objective import Plan

State = Mapping[str, Any]
_PIECES = ("learning_rate", "learning_loss", "learning_penalty")


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
        weights_to_train: names of float constants of the model, or patterns as "layer4.*", see
            `trainable`. None: those that train by default; a warning names uncertain ones.
        loss_output_name: name of the loss in the saved graphs.
        max_iter: epochs; in each, every row is drawn once, the last batch may be shorter.
        training_optimizer_name: "SGDOptimizer", "momentum", "nesterov", "adam", "adamw", or an
            optimizer of `onnxgrad` such as `adam(b1=0.8)`.
        batch_size: rows of a batch; fewer rows of data are one batch.
        learning_rate: name, number or `BaseLearningRate`; `LearningRateSGDNesterov` has its own
            momentum, and requires "SGDOptimizer".
        device: "cpu", "cuda" or "cuda:1", a GPU by its number; "gpu" means "cuda".
        warm_start: `fit` continues from the last `fit`, slots and step number included; the slots
            start empty for another optimizer, and when weights are added.
        verbose: 1 reports every epoch through `logging`, to stderr if it is not configured.
        validation_every: epochs between two validations, or below 1 a share of `max_iter`.
        learning_loss: name, function or `BaseLearningLoss` (see `BaseLearningLoss.select`).
        enable_logging: as `verbose`, and every call of onnxruntime at level DEBUG.
        weight_name: name of the sample weights in the saved graphs; None: these have none.
        learning_penalty: None, a name, number, `BaseLearningPenalty`, or `{weight: penalty}`.
        exc: whether NaN or infinity raises; otherwise a warning is issued and `fit` ends.
        random_state: seed of the order of rows and of `weight_init`; None draws a new one.
        weight_init: "model" starts from the model's weights. "glorot" (Glorot & Bengio 2010,
            uniform) and "normal" (standard normal) initialize those of rank 2 or more.

    Attributes:
        train_losses_: mean loss of a row, per epoch, the penalty of each batch included.
        validation_losses_: the same for the validation rows, per validation.
        trained_coef_: `{name: OrtValue}`, the trained weights.
        n_iter_: number of finished epochs.
        n_steps_: step number of the optimizer: the batches since its slots were empty.
        learning_rate_: the rate of the last epoch.
        stop_reason_: why the last `fit` ended: "max_iter", "callback", "not finite" (the loss, a
            weight or the validation loss), "interrupted" (Ctrl-C), or "error" (any other); None
            while it runs.
        feature_names_in_: the names of the columns of X, if `fit` was called with a table.
        train_session_: the model as an `OrtGradientForwardBackward`.
        train_function_: its forward and backward pass, an instance of `cls_type_`.
        input_names_: the inputs of `train_function_.forward`: those of the model, then the trained
            weights.
        output_names_: names of the gradients that `train_function_.backward` returns, one per
            input; None for an input without gradient.
        epoch_onnx_: an epoch, one of the graphs of `save_onnx_graph`. The others are
            `loss_grad_onnx_`, `loss_score_onnx_`, `axpy_onnx_` (`axpyw_onnx_` with momentum),
            `zero_onnx_` and, with a penalty, `penalty_onnx_` and `penalty_grad_onnx_`.

    A callback of `fit` reads their current values. Sessions and graphs are built on demand.

    Examples:
        >>> import numpy as np, onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2] x) => (float[N,1] y) <float[2,1] w = {0.0, 0.0}> { y = MatMul(x, w) }
        ... ''')
        >>> X = np.random.default_rng(0).normal(size=(100, 2)).astype(np.float32)
        >>> y = X @ np.float32([[2], [3]])
        >>> trainer = og.OrtGradientForwardBackwardOptimizer(
        ...     model, training_optimizer_name="momentum", learning_rate=0.02
        ... )
        >>> trainer.fit(X, y).predict(np.float32([[1, 1]])).round(2).tolist()
        [[5.0]]
        >>> trainer.score(X, y) > -1e-4
        True
    """

    learning_loss: Any = Selected(BaseLearningLoss.select, "square_error")  # noqa: RUF009
    enable_logging: bool = False
    weight_name: str | None = None
    learning_penalty: Any = Selected(BaseLearningPenalty.select, None)  # noqa: RUF009
    exc: bool = True
    random_state: int | None = None
    weight_init: str = "model"

    trained_coef_ = Fitted(lambda self: self.get_state())
    train_session_ = Fitted(lambda self: self._passes())
    train_function_ = Fitted(
        lambda self: self._from_cache("function", self.train_session_.new_instance)
    )
    input_names_ = Fitted(
        lambda self: [*self.train_session_.input_names, *self.train_session_.weights_to_train]
    )
    output_names_ = Fitted(
        lambda self: [*map(self.train_session_.partition.gradients.get, self.input_names_)]
    )
    loss_grad_onnx_ = Fitted(lambda self: self._graph("loss_grad_onnx_"))
    loss_score_onnx_ = Fitted(lambda self: self._graph("loss_score_onnx_"))
    axpy_onnx_ = Fitted(lambda self: self._graph("axpy_onnx_"))
    axpyw_onnx_ = Fitted(lambda self: self._graph("axpyw_onnx_"))
    penalty_onnx_ = Fitted(lambda self: self._graph("penalty_onnx_"))
    penalty_grad_onnx_ = Fitted(lambda self: self._graph("penalty_grad_onnx_"))
    zero_onnx_ = Fitted(lambda self: self._graph("zero_onnx_"))
    epoch_onnx_ = Fitted(lambda self: self._graph("epoch_onnx_"))

    def _plan(self, weights: Sequence[str], weighted: bool) -> Plan:
        return Plan(self._loss(weights, weighted))

    def _loss(self, weights: Sequence[str], weighted: bool) -> RowsAndPenalty:
        return RowsAndPenalty(
            BaseLearningLoss.select(self.learning_loss),
            BaseLearningPenalty.select(self.learning_penalty),
            weights,
            self.loss_output_name,
            "weight" if self.weight_name is None and weighted else self.weight_name,
        )

    def _output_names(self) -> list[str]:
        return self._loss([], False).outputs(read(self.model_onnx))

    def _check_names(self, names: Sequence[str]) -> None:
        BaseLearningPenalty.select(self.learning_penalty).check(names)

    # -- predictions --------------------------------------------------------------------------

    def losses(self, X: Any, y: Any = None, sample_weight: Any = None) -> np.ndarray:
        """Return the loss of every row, times its weight, in the order of the rows: (rows,).

        Arguments and errors are those of `fit`. Penalties are not included.
        """
        data = as_dataset(X, y, sample_weight)
        evaluator = self._evaluator(RowLosses, data.weighted)
        (losses,) = evaluator.predict({}, rows_of(data, evaluator.fields)).values()
        return losses

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """Return the negative mean of `losses`: higher is better.

        With sample weights, that mean is the sum of w l divided by the number of rows, as in
        `train_losses_`, and not by the sum of the weights.
        """
        return -float(self.losses(X, y, sample_weight).mean(dtype=np.float64))

    def predict(self, X: Any) -> np.ndarray:
        """Return the output of the trained model for `X`, an array, a table or a dict of them.

        A single column is returned with shape (rows,) if the labels of `fit` had that shape.

        Raises:
            ValueError: data that the inputs do not accept, or nothing was trained.
        """
        evaluator = self._evaluator(Evaluator, False)
        fields = evaluator.fields.without_labels()
        fields.left_out = frozenset()  # labels are refused
        source = rows_of(Dataset(X), fields)
        (predictions,) = evaluator.predict({}, source).values()
        flat = self._state.flat and predictions.shape[1:] == (1,)
        return predictions[:, 0] if flat else predictions

    def _evaluator(self, kind: type[Evaluator], weighted: bool) -> Evaluator:
        """Return what evaluates the trained model."""

        def build() -> Evaluator:
            plan = self._plan([], weighted)
            return kind(self.get_trained_onnx(), [], plan, weighted, self.device, {})

        values = self._fitted_state().values
        return self._from_cache(f"{kind.__name__}, {weighted}", build, values)

    # -- state --------------------------------------------------------------------------------

    def get_state(self, kind: Any = "weight") -> Any:
        """Return a copy of the weights or of the slots of the optimizer, by name.

        Args:
            kind: "weight": `{name: OrtValue}`. "grad": the slots, `{name: {slot: OrtValue}}`. A
                list of kinds: a list of these.

        Raises:
            ValueError: nothing was trained, or an unknown kind.
        """
        if not isinstance(kind, str):
            return [self.get_state(k) for k in kind]
        values, device = self._fitted_state().values, Device.of(self.device).check()
        if _check_kind(kind) == "weight":
            return {name: owned(array, device) for name, array in values.weights.items()}
        return {
            name: {slot: owned(a, device) for slot, a in values.slots.get(name, {}).items()}
            for name in values.weights
        }

    def get_full_state(self, kind: Any = "weight") -> Any:
        """Return `get_state` with the data inputs of the model first, of value None."""
        if not isinstance(kind, str):
            return [self.get_full_state(k) for k in kind]
        state = self.get_state(kind)
        return dict.fromkeys(names_without_default(read(self.model_onnx))) | state

    def set_state(
        self, state: Any, kind: Any = "weight", zero: bool = False, check_trained: bool = False
    ) -> Self:
        """Set what `get_state` returns; with `warm_start` the next `fit` continues from it.

        Args:
            state: `{name: array or OrtValue}`, or for the kind "grad" `{name: {slot: array or
                OrtValue}}`; entries of value None, such as data inputs, are skipped. For a list of
                kinds, a list of these.
            kind: "weight", "grad", or a list of them.
            zero: set zeros instead of the values in `state`. If all slots become zero, the step
                number is reset, too.
            check_trained: raise for weights that the last `fit` did not train.

        Raises:
            ValueError: an unknown kind, weight or slot, or an array of another shape; with
                `check_trained`, a weight that was not trained.
            NotFittedError: `check_trained`, and there was no `fit`.
        """
        several = not isinstance(kind, str)
        pairs = list(zip(kind, state, strict=True)) if several else [(kind, state)]
        checked = [(k, self._check_state(k, one, zero, check_trained)) for k, one in pairs]
        fitted = self._state_to_set()
        for k, new in checked:
            if k == "weight":
                fitted.values = replace(fitted.values, weights=fitted.values.weights | new)
            else:
                self._set_slots(fitted, new, zero)
        return self

    def _check_state(
        self, kind: str, state: State, zero: bool, check_trained: bool
    ) -> dict[str, Any]:
        """Return the entries of `state` that are not None, as arrays."""
        _check_kind(kind)
        if not isinstance(state, Mapping):
            raise ValueError(f"a state is a dict by name, not {type(state).__name__}")
        entries = {name: value for name, value in state.items() if value is not None}
        if kind == "weight":
            arrays = {name: to_numpy(value) for name, value in entries.items()}
            new = self._check_weights(arrays, check_trained)
            return {name: np.zeros_like(a) if zero else a for name, a in new.items()}
        weights, optimizer = self._float_constants(entries, check_trained), self._optimizer()
        checked: dict[str, dict[str, np.ndarray]] = {}
        for name, slots in entries.items():
            w = weights[name]
            own = optimizer.for_weight(name, w.shape)
            shapes = {slot: own.slot_shape(slot, w.shape) for slot in own.slots}
            if zero:
                checked[name] = {slot: np.zeros(shape, w.dtype) for slot, shape in shapes.items()}
            elif slots:
                if strange := [slot for slot in slots if slot not in shapes]:
                    raise unknown(f"slot of {name!r}", strange[0], shapes)
                checked[name] = {
                    slot: fitting_array(name, to_numpy(value), shapes[slot], w.dtype)
                    for slot, value in slots.items()
                }
        return checked

    def _set_slots(
        self, state: EstimatorState, new: dict[str, dict[str, np.ndarray]], zero: bool
    ) -> None:
        optimizer, old = self._optimizer(), state.values
        slots, steps = old.slots, old.steps
        if optimizer != state.optimizer or (zero and new.keys() >= slots.keys()):
            slots, steps = {}, 0
        unset: dict[str, Any] = {name: {} for name in self._names()}  # they start at zero
        slots = unset | slots | {name: slots.get(name, {}) | arrays for name, arrays in new.items()}
        state.values, state.optimizer = replace(old, slots=slots, steps=steps), optimizer

    def _optimizer(self) -> Optimizer:
        return self._rate_and_optimizer()[1]

    # -- graphs -------------------------------------------------------------------------------

    def save_onnx_graph(
        self,
        folder: str | os.PathLike | type[bytes],
        prefix: str | None = None,
        suffix: str | None = None,
    ) -> dict[str, Any]:
        """Save the graphs of the training, before or after `fit`.

        Args:
            folder: where to save, created if it is missing; `bytes` saves nothing.
            prefix: prefix of the names of the files, as in `<prefix>model_onnx.onnx`.
            suffix: what follows the name of the graph, as in `zero_onnx_<suffix>.onnx`.

        Returns:
            Paths, or with `bytes` serialized models, in nested dictionaries: `model_onnx`;
            `learning_rate`: `axpy_onnx_`, or `axpyw_onnx_` with momentum; `learning_loss`:
            `loss_grad_onnx_`, `loss_score_onnx_`; `learning_penalty`: `penalty_onnx_`,
            `penalty_grad_onnx_` if there is a penalty; `zero_onnx_`; `train_function_`: the graphs
            of `OrtGradientForwardBackward`; `epoch_onnx_`: the model that training runs, in which
            all of these are combined.
        """
        return write_models(self._graphs(), folder, prefix, suffix)

    def _graphs(self) -> Graphs:
        proto, names = self._model(vars(self).get("_state")), self._names()
        self._check_names(names)
        return training_graphs(proto, names, self._loss(names, False), *self._rate_and_optimizer())

    def _graph(self, name: str) -> ModelProto:
        graphs = self._from_cache("graphs", self._graphs, self._state.values)
        for group in (graphs, *(graphs[piece] for piece in _PIECES)):
            if name in group:
                return group[name]
        raise AttributeError(f"{name}: there is no such graph for {self}")


def _check_kind(kind: str) -> str:
    if kind not in ("weight", "grad"):
        raise unknown("kind of state", kind, ["weight", "grad"])
    return kind
