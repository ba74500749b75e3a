"""`OrtGradientForwardBackwardOptimizer`: trains a model whose loss is outside of it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import onnxruntime as ort
from onnx import ModelProto

from onnxgrad.errors import unknown
from onnxgrad.files import write_models
from onnxgrad.graph import weights as constants
from onnxgrad.graph.read import ModelLike, read, to_ir
from onnxgrad.learning_losses import BaseLearningLoss
from onnxgrad.optimizers import Optimizer
from onnxgrad.penalties import BaseLearningPenalty
from onnxgrad.schedules import BaseLearningRate
from onnxgrad.small import owned, to_numpy
from onnxgrad.training.data import Fields, is_iterable_of_batches
from onnxgrad.training.estimator import Selected
from onnxgrad.training.graphs import Graphs, training_graphs
from onnxgrad.training.objective import LossOutside, loss_outside, predicted
from onnxgrad.training.runner import ROWS, pieces
from onnxgrad.training.session import session, work
from onnxgrad.training.trainer import Trainer

State = Mapping[str, Any]


class OrtGradientForwardBackwardOptimizer(Trainer):
    """Trains the weights of a model that predicts; loss and penalty are objects beside it.

    What is minimized is the sum over the rows of w l(f, y), w the row's weight, plus the penalties
    of the weights; the learning rate applies to its gradient divided by the rows of the batch. As
    in `OrtGradientOptimizer`, forward, loss, backward and update are one model, of which one call
    of onnxruntime runs many batches. `score` makes it an estimator for `GridSearchCV`.

    Args:
        model_onnx: model, serialized model or path, with one float output, of one row or more
            numbers for each row of the input (`select_model_inputs_outputs` keeps one).
        weights_to_train: names of float constants of the model. None: those that play
            the role of a weight, see `trainable`; a warning names what is uncertain.
        loss_output_name: name of the loss in the saved graphs.
        max_iter: epochs; in each, every row is drawn once, the last batch may be shorter.
        training_optimizer_name: "SGDOptimizer", "momentum", "nesterov", "adam", "adamw", or an
            optimizer of `onnxgrad` such as `adam(b1=0.8)`.
        batch_size: rows of a batch.
        learning_rate: name, number or `BaseLearningRate`; `LearningRateSGDNesterov` brings its own
            momentum, and goes with "SGDOptimizer" only.
        device: "cpu" or "cuda".
        warm_start: `fit` goes on from the last `fit`, slots and step number included; the slots
            are empty again for another optimizer, and when weights are added.
        verbose: 1 reports every epoch through `logging`.
        validation_every: epochs between two validations, or below 1 a share of `max_iter`.
        learning_loss: name, function or `BaseLearningLoss` (see `BaseLearningLoss.select`).
        enable_logging: reports through `logging`, every call of the runtime at level DEBUG.
        weight_name: name of the row weights in the saved graphs; None leaves them out there.
        learning_penalty: None, a name, number, `BaseLearningPenalty`, or `{weight: penalty}`.
        exc: whether NaN or infinity raises; else it warns, and `fit` ends.
        random_state: seed of the order of rows and of `weight_init`; None draws a new one.
        weight_init: "model" starts from the model's weights. "glorot" (Glorot & Bengio 2010,
            uniform) and "normal" (standard normal) draw those of two axes or more anew.

    Attributes:
        train_losses_: mean loss of a row, per epoch, the penalty of each batch included.
        validation_losses_: the same for the validation rows, per validation.
        trained_coef_: `{name: OrtValue}`, the trained weights.
        n_iter_: epochs done.
        learning_rate_: the rate of the last epoch.
        feature_names_in_: the columns, if `fit` got a table of which they have names.
    """

    learning_loss = Selected(BaseLearningLoss.select)
    learning_penalty = Selected(BaseLearningPenalty.select)

    def __init__(
        self,
        model_onnx: ModelLike,
        weights_to_train: Sequence[str] | None = None,
        loss_output_name: str = "loss",
        max_iter: int = 100,
        training_optimizer_name: str | Optimizer = "SGDOptimizer",
        batch_size: int = 10,
        learning_rate: str | float | BaseLearningRate = "SGD",
        device: str = "cpu",
        warm_start: bool = False,
        verbose: int = 0,
        validation_every: int | float = 0.1,
        learning_loss: Any = "square_error",
        enable_logging: bool = False,
        weight_name: str | None = None,
        learning_penalty: Any = None,
        exc: bool = True,
        random_state: int | None = None,
        weight_init: str = "model",
    ) -> None:
        self.model_onnx = model_onnx
        self.weights_to_train = weights_to_train
        self.loss_output_name = loss_output_name
        self.max_iter = max_iter
        self.training_optimizer_name = training_optimizer_name
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.device = device
        self.warm_start = warm_start
        self.verbose = verbose
        self.validation_every = validation_every
        self.learning_loss = learning_loss
        self.enable_logging = enable_logging
        self.weight_name = weight_name
        self.learning_penalty = learning_penalty
        self.exc = exc
        self.random_state = random_state
        self.weight_init = weight_init

    def _objective(self, proto: ModelProto, weights: Sequence[str], weighted: bool) -> LossOutside:
        loss = BaseLearningLoss.select(self.learning_loss)
        penalty = BaseLearningPenalty.select(self.learning_penalty)
        name = self.weight_name
        if name is None and weighted:
            name = "weight"
        return loss_outside(proto, weights, loss, penalty, self.loss_output_name, name)

    def _check_names(self, names: Sequence[str]) -> None:
        BaseLearningPenalty.select(self.learning_penalty).check(names)

    # -- predictions --------------------------------------------------------------------------

    def losses(self, X: Any, y: Any = None, sample_weight: Any = None) -> np.ndarray:
        """Return the loss of every row, times its weight, in the order of the rows: (rows,).

        Arguments and errors are those of `fit`. Penalties, which are of weights and not of rows,
        are left out.
        """
        self._check_columns(X)
        weighted = sample_weight is not None or is_iterable_of_batches(X, y)
        objective = self._objective(self.get_trained_onnx(), [], weighted)
        fields = Fields(objective.data, objective.row_weight, objective.facts)
        if sample_weight is None:
            arrays = fields.gathered(X, y)
        else:
            arrays = fields.arrays(X, y, sample_weight)
        each, model = work(objective.model.graph), objective.compute(objective.losses)
        return self._run(model, each, fields, arrays)

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """Return the negative mean of `losses`: higher is better.

        With row weights, that is the sum of w l divided by the number of rows, as in
        `train_losses_`, and not by the sum of the weights.
        """
        return -float(self.losses(X, y, sample_weight).mean(dtype=np.float64))

    def predict(self, X: Any) -> np.ndarray:
        """Return what the trained model computes for `X`, an array or a dict of arrays.

        One column is returned flat, (rows,), if the labels of `fit` were.

        Raises:
            ValueError: data that the inputs do not take, or nothing was trained.
        """
        self._check_columns(X)
        proto = self.get_trained_onnx()
        objective = self._objective(proto, [], False)
        fields = Fields(objective.data, objective.row_weight, objective.facts)
        each = work(objective.model.graph)
        made = self._run(proto, each, fields, fields.inputs(X), predicted(proto))
        return made[:, 0] if self._flat and made.shape[1:] == (1,) else made

    def _run(
        self,
        model: ModelProto,
        each: float,
        fields: Fields,
        arrays: dict[str, np.ndarray],
        output: str | None = None,
    ) -> np.ndarray:
        """Return an output of `model`, which does `each` multiply-adds per row, for all rows."""
        size = fields.fixed_rows or ROWS
        running = session(model, self.device, each * size)
        wanted = None if output is None else [output]
        return np.concatenate([running.run(wanted, part)[0] for part, _ in pieces(arrays, size)])

    # -- state --------------------------------------------------------------------------------

    @property
    def trained_coef_(self) -> dict[str, ort.OrtValue]:
        """The trained weights, `{name: OrtValue}`."""
        return self.get_state()

    def get_state(self, kind: Any = "weight") -> Any:
        """Return a copy of what was trained, by the name of the weight.

        Args:
            kind: "weight": `{name: OrtValue}`. "grad": what the optimizer keeps of the gradients,
                `{name: {slot: OrtValue}}`. A list of kinds: a list of these.

        Raises:
            ValueError: nothing was trained, or another kind.
        """
        if not isinstance(kind, str):
            return [self.get_state(k) for k in kind]
        trained = self._trained()
        if _known_kind(kind) == "weight":
            return {name: owned(array, self.device) for name, array in trained.items()}
        return {
            name: {slot: owned(a, self.device) for slot, a in self._slots.get(name, {}).items()}
            for name in trained
        }

    def get_full_state(self, kind: Any = "weight") -> Any:
        """Return `get_state` for all inputs of training, in their order; None for data."""
        if not isinstance(kind, str):
            return [self.get_full_state(k) for k in kind]
        state = self.get_state(kind)
        return dict.fromkeys(self._data_names()) | state

    def set_state(self, state: Any, kind: Any = "weight", zero: bool = False) -> Self:
        """Set what `get_state` returns; with `warm_start` the next `fit` goes on from it.

        Args:
            state: `{name: array or OrtValue}`, or for the kind "grad" `{name: {slot: array or
                OrtValue}}`; None stands for what is not set, such as data. For a list of kinds, a
                list of these.
            kind: "weight", "grad", or a list of them.
            zero: set zeros in place of the values given. Where no slot is left but zeros, the steps
                are counted anew, too.

        Raises:
            ValueError: a kind, weight or slot that is not known, or an array of another shape.
        """
        several = not isinstance(kind, str)
        pairs = list(zip(kind, state, strict=True)) if several else [(kind, state)]
        checked = [(k, self._check_state(k, given, zero)) for k, given in pairs]
        self._start()
        for k, new in checked:
            if k == "weight":
                self._coef |= new
            else:
                self._set_slots(new, zero)
        return self

    def _check_state(self, kind: str, state: State, zero: bool) -> dict[str, Any]:
        """Return copies of what is given, as arrays."""
        _known_kind(kind)
        if not isinstance(state, Mapping):
            raise ValueError(f"a state is a dict by name, not {type(state).__name__}")
        given = {name: value for name, value in state.items() if value is not None}
        if kind == "weight":
            new = self._check_weights({name: to_numpy(value) for name, value in given.items()})
            return {name: np.zeros_like(a) if zero else a for name, a in new.items()}
        known, valid = self._known(), self._select_optimizer(self._check()).slots
        for name, slots in given.items():
            if name not in known:
                raise unknown("weight", name, known)
            for slot in () if zero else slots:
                if slot not in valid:
                    raise unknown(f"slot of {name!r}", slot, valid)
        if zero:
            return {name: dict.fromkeys(valid, np.zeros_like(known[name])) for name in given}
        made: dict[str, dict[str, np.ndarray]] = {}
        for slot in valid:
            arrays = {name: to_numpy(s[slot]) for name, s in given.items() if slot in s}
            for name, array in self._check_weights(arrays).items():
                made.setdefault(name, {})[slot] = array
        return made

    def _set_slots(self, new: dict[str, dict[str, np.ndarray]], zero: bool) -> None:
        optimizer = self._select_optimizer(self._check())
        if optimizer != self._optimizer or (zero and new.keys() >= self._slots.keys()):
            self._slots, self.n_steps_, self._optimizer = {}, 0, optimizer
        for name in self._names():  # those not given start at zero
            self._slots.setdefault(name, {})
        for name, slots in new.items():
            self._slots[name] = self._slots.get(name, {}) | slots

    def _data_names(self) -> list[str]:
        graph = to_ir(read(self.model_onnx)).graph
        return [str(x.name) for x in graph.inputs if x.name not in graph.initializers]

    # -- graphs -------------------------------------------------------------------------------

    def save_onnx_graph(self, folder: str | os.PathLike | type[bytes]) -> dict[str, Any]:
        """Save the graphs that make up the training, before or after `fit`.

        Args:
            folder: where to, created where it is missing; `bytes` saves nothing.

        Returns:
            Paths, or with `bytes` serialized models, in nested dictionaries: `model_onnx`;
            `learning_rate`: `axpy_onnx_`, or `axpyw_onnx_` with momentum; `learning_loss`:
            `loss_grad_onnx_`, `loss_score_onnx_`; `learning_penalty`: `penalty_onnx_`,
            `penalty_grad_onnx_` where there is one; `zero_onnx_`; `train_function_`: the graphs of
            `OrtGradientForwardBackward`; `epoch_onnx_`, which is all of that in one, and the model
            that training runs.
        """
        return write_models(self._graphs(), folder)

    def _graphs(self) -> Graphs:
        rate = self._check()
        optimizer, proto = self._select_optimizer(rate), read(self.model_onnx)
        if hasattr(self, "_coef"):
            proto = constants.replace(proto, self._coef)
        names = self._names()
        self._check_names(names)
        objective = self._objective(proto, names, False)
        loss = BaseLearningLoss.select(self.learning_loss)
        penalty = BaseLearningPenalty.select(self.learning_penalty)
        return training_graphs(proto, objective, optimizer, rate, loss, penalty)


def _known_kind(kind: str) -> str:
    if kind not in ("weight", "grad"):
        raise unknown("kind of state", kind, ["weight", "grad"])
    return kind
