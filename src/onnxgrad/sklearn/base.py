"""What the two estimators share: data, the trainer's arguments, and what `fit` leaves behind."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, ClassVar, Self

import numpy as np
from onnx import ModelProto
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import train_test_split
from sklearn.utils import check_array, check_consistent_length, check_random_state, column_or_1d
from sklearn.utils._param_validation import Interval, Options, StrOptions
from sklearn.utils.validation import _check_sample_weight, validate_data

from onnxgrad.data.columns import column_names, is_table, read_names, target_names
from onnxgrad.estimator import NotFittedError
from onnxgrad.model.read import read
from onnxgrad.optimizers.base import Optimizer
from onnxgrad.sklearn.conversion import convert_estimator, holds_text, is_estimator, takes_tables
from onnxgrad.sklearn.front import by_name, takes_raw, text_inputs
from onnxgrad.sklearn.head import Head, read_head
from onnxgrad.sklearn.mlp import mlp
from onnxgrad.sklearn.network import Network, RowPredictor
from onnxgrad.training.batches import Split
from onnxgrad.training.callbacks.early_stopping import EarlyStopping
from onnxgrad.training.callbacks.progress import Progress
from onnxgrad.training.equality import are_surely_equal

_PROBED = 256  # rows for which a model is run to see what it predicts
_MODELS = (ModelProto, bytes, os.PathLike)
_COUNT = Interval(Integral, 1, None, closed="left")
_PASSED = (
    "optimizer learning_rate train freeze clip_norm batch_norm dropout precision device".split()
)


@dataclass(kw_only=True, eq=False, repr=False)
class OnnxEstimator(BaseEstimator):
    """Base of `OnnxClassifier` and `OnnxRegressor`, which differ in their labels."""

    model: Any = field(default=None, kw_only=False)
    hidden_layer_sizes: int | Iterable[int] = (100,)
    activation: str = "relu"
    loss: Any = None
    loss_options: Mapping[str, Any] | None = None
    optimizer: str | Optimizer = "adam"
    learning_rate: Any = None
    max_iter: int = 100
    batch_size: int | str = "auto"
    shuffle: bool = True
    tol: float | None = 1e-4
    n_iter_no_change: int = 10
    early_stopping: bool = False
    validation_fraction: float = 0.1
    train: str | Iterable[str] | None = None
    freeze: str | Iterable[str] = ()
    clip_norm: float | None = None
    batch_norm: str = "frozen"
    dropout: Mapping[str, float] | None = None
    callbacks: Iterable[Any] = ()
    precision: str = "auto"
    device: str = "cpu"
    warm_start: bool = False
    verbose: int = 0
    random_state: Any = None

    _metric_name: ClassVar[str]
    _probes: ClassVar[bool]  # whether a model is run before training, to see what its end computes
    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        "batch_size": [StrOptions({"auto"}), _COUNT],
        "max_iter": [_COUNT],
        "tol": [None, Interval(Real, 0, None, closed="left")],
        "n_iter_no_change": [_COUNT, Options(Real, {np.inf})],
    }

    # -- training -----------------------------------------------------------------------------

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train for at most `max_iter` epochs.

        It begins with the weights of `model`; with `warm_start`, with those of the last call.

        Args:
            X: (rows, features), or what the input of the model takes; for a model of several
                inputs, a table of columns of these names, or a dict. Text and missing values are
                for encoders and imputers in front of what trains, which stay as they are.
            y: labels, (rows,) or (rows, outputs).
            sample_weight: (rows,).

        Raises:
            ValueError: invalid arguments or data.
            NoGradientRule: an operator between the weights and the loss has no rule.
            ConvergenceError: the loss became NaN or infinite.
        """
        self._validate_params()
        going_on = self.warm_start and self._begun
        data = self._check_data(X, y, sample_weight, reset=not going_on)
        if going_on:
            self._renew()
        else:
            self._start(*data)
        split, stopping, patience = None, [], self.n_iter_no_change
        name = f"validation_{self._metric_name}"
        if self.early_stopping:
            split = self._draw_split(data[1])
            stopping = [EarlyStopping(name, patience, min_delta=self.tol or 0.0)]
        elif self.tol is not None and np.isfinite(patience):
            stopping = [EarlyStopping("loss", patience, restore=False, min_delta=self.tol)]
        more = [*stopping, *[Progress()] * bool(self.verbose)]
        rows = None if split is None else len(split.trained)
        self._train(data, more, rows, validation=split, epochs=self.max_iter)
        history = self._network.trainer.history
        self._set_losses([entry["loss"] for entry in history if "loss" in entry])
        scores = [entry[name] for entry in history if name in entry]
        self.validation_scores_ = scores if self.early_stopping else None
        self.best_validation_score_ = max(scores) if self.early_stopping else None
        state = self._network.trainer.state
        ended = any(state.callbacks[c.key]["stopped"] for c in stopping)
        if stopping and not ended and state.stop_reason == "max_iter":
            warnings.warn(
                f"the training has not converged in max_iter={self.max_iter} epochs: raise it, or "
                "pass tol=None to train for that many epochs without this warning",
                ConvergenceWarning,
                stacklevel=2,
            )
        return self

    def _continue(self, X: Any, y: Any, sample_weight: Any, **more: Any) -> Self:
        """Train for one more epoch, as `partial_fit`; `more` is for `_start`, at the first call."""
        self._validate_params()
        if self.early_stopping:
            raise ValueError("partial_fit does not support early_stopping=True")
        first = not self._begun
        data = self._check_data(X, y, sample_weight, reset=first)
        if first:
            self._start(*data, **more)
        else:
            self._follow()
        self._train(data, further=True)
        losses = [] if first else self.loss_curve_
        self._set_losses([*losses, self._network.trainer.history[-1]["loss"]])
        return self

    def _train(
        self,
        data: tuple[Any, np.ndarray, np.ndarray | None],
        callbacks: Iterable[Any] = (),
        rows: int | None = None,
        further: bool = False,
        **options: Any,
    ) -> None:
        """Train on checked data; `rows` of them, if that is not all."""
        X, y, weight = data
        self._network.take_names([*getattr(self, "feature_names_in_", ())], self._target)
        options |= {"batch_size": self._batch_size(rows or len(y)), "shuffle": self.shuffle}
        options |= {"sample_weight": self._sample_weights(y, weight)}
        callbacks = [*self.callbacks, *callbacks]
        self._network.train(further, X, self._encode_labels(y), callbacks, **options)

    def _set_losses(self, losses: list[float]) -> None:
        """Set the attributes that say how training went."""
        self.loss_curve_, self.loss_, self.n_iter_ = losses, losses[-1], len(losses)
        self.best_loss_ = None if self.early_stopping else min(losses)

    def _draw_split(self, y: np.ndarray) -> Split:
        """Return which rows to train on, and which are held out."""
        options = {"random_state": self._rng, "test_size": self.validation_fraction}
        rows = np.arange(len(y))
        split = Split(*train_test_split(rows, stratify=self._strata(y), **options))
        if len(split.held_out) < 2:
            raise ValueError(
                "The validation set is too small. Increase 'validation_fraction' or the size of "
                "your dataset."
            )
        return split

    @property
    def _begun(self) -> bool:
        """Whether there is a model in training."""
        return "_network" in vars(self)

    # -- the model ----------------------------------------------------------------------------

    def _start(self, X: Any, y: Any, weight: Any, **more: Any) -> None:
        """Set up the training of the first model; `more` is what `partial_fit` knows of labels."""
        self._rng = check_random_state(self.random_state)
        self._learn_labels(y, **more)
        if self.model is None:
            features, hidden, dtype = X.shape[1], self.hidden_layer_sizes, X.dtype
            units, classes = self._outputs(y)
            proto = mlp(features, hidden, units, self.activation, self._rng, dtype, classes)
        elif is_estimator(self.model):
            proto = convert_estimator(self.model, X, y, weight)
        else:
            proto = read(self.model)
        name = next(iter(self.loss)) if isinstance(self.loss, Mapping) else None
        head, raw = read_head(proto, name), self.model is not None and takes_raw(proto, X)
        if self.model is not None and (head.shape is None or self._probes):
            first = {n: a[:_PROBED] for n, a in X.items()} if by_name(X) else X[:_PROBED]
            head.probe(RowPredictor(proto, head.tensors, self.device, raw)(first))
        self._agree(head, y)
        self._seed = int(self._rng.randint(2**31 - 1))
        self._network = Network(proto, head, self._arguments(head), raw)

    def _renew(self) -> None:
        """Train the model as it is from now on, with the arguments as they are now."""
        head, raw = self._network.head, self._network.front is not None
        self._network = Network(self.to_onnx(), head, self._arguments(head), raw)

    def _follow(self) -> None:
        """Let the trainer have the arguments as they are now, which `set_params` may have changed.

        Only the learning rate can change without a new optimizer.
        """
        new, old = self._arguments(self._network.head), self._network.arguments
        changed = {name for name in new if not are_surely_equal(new[name], old[name])}
        if changed == {"learning_rate"}:
            old["learning_rate"] = self.learning_rate
            self._network.trainer._change_rate(self.learning_rate)
        elif changed:
            self._renew()

    def _arguments(self, head: Head) -> dict[str, Any]:
        """Return the arguments of the trainer."""
        loss, options, metric = self._objective(head)
        whole = isinstance(loss, (Mapping, *_MODELS)) or hasattr(loss, "write")
        whole = whole or (isinstance(loss, str) and loss.endswith(".onnx"))
        return {
            "loss": loss if whole else {head.target: loss},
            "loss_options": options if whole or not options else {head.target: options},
            **{name: getattr(self, name) for name in _PASSED},
            "metrics": [metric] if self.early_stopping else [],
            "seed": self._seed,
        }

    def to_onnx(self) -> ModelProto:
        """Return the trained model.

        It has the inputs and outputs of the model that training began with.

        Raises:
            NotFittedError: `fit` was not called.
        """
        self._require_fitted()
        return self._network.model

    # -- arguments and data -------------------------------------------------------------------

    def _batch_size(self, rows: int) -> int | None:
        """Return the rows of a batch; None leaves it to a model with a static batch."""
        if self.batch_size == "auto":
            (first, *_) = self._network.trainer._job.proto.graph.input
            static = any(d.dim_value for d in first.type.tensor_type.shape.dim[:1])
            return None if static else min(200, rows)
        return min(int(self.batch_size), rows)

    def _check_data(
        self, X: Any, y: Any, sample_weight: Any, reset: bool
    ) -> tuple[Any, np.ndarray, np.ndarray | None]:
        """Return checked data."""
        if reset:
            self._tables, self._target = takes_tables(self.model), target_names(y) or []
        X = self._check_inputs(X, reset)
        if y is None:
            raise ValueError(
                f"{type(self).__name__} requires y to be passed, but the target y is None"
            )
        finite = "allow-nan" if self._ignores_nan() else True
        y = check_array(y, ensure_2d=False, dtype=None, ensure_all_finite=finite, input_name="y")
        check_consistent_length(next(iter(X.values())) if by_name(X) else X, y)
        if y.ndim == 2 and y.shape[1] == 1:
            y = column_or_1d(y, warn=True)
        y = self._check_labels(y)
        if sample_weight is not None:
            empty = np.zeros((len(y), 1))
            sample_weight = _check_sample_weight(sample_weight, empty, ensure_non_negative=True)
        return X, y, sample_weight

    def _check_inputs(self, X: Any, reset: bool = False) -> Any:
        """Return checked data; a dict, and a table whose columns are inputs, stay as they are."""
        checks: dict[str, Any] = {"dtype": (np.float64, np.float32)}
        if by_name(X) or (not reset and self._is_as_in_fit(X)):
            return X
        X = self._in_order(X)
        if self._tables and is_table(X):
            checks = {"skip_check_array": True}
        elif self.model is not None:
            text = holds_text(X) and (is_estimator(self.model) or text_inputs(read(self.model)))
            dtype = None if text else "numeric"
            checks = {"dtype": dtype, "ensure_all_finite": "allow-nan", "allow_nd": True}
        return validate_data(self, X, reset=reset, **checks)

    def _in_order(self, X: Any) -> Any:
        """Return a table with its columns in the order of an earlier training of the file."""
        names = column_names(X)
        if names is None or self.model is None or is_estimator(self.model):
            return X
        known = self._network.trainer._names if self._begun else read_names(read(self.model))
        order = next(iter(known.columns.values()), names)
        return X[order] if sorted(order) == sorted(names) and order != names else X

    def _is_as_in_fit(self, X: Any) -> bool:
        """Return whether scikit-learn's checks, which take longer than a row, return X itself."""
        if type(X) is not np.ndarray or X.ndim < 2 or not len(X):
            return False
        own = self.model is None
        kind = X.dtype in (np.float32, np.float64) if own else X.dtype.kind in "iuf"
        known = X.shape[1] == getattr(self, "n_features_in_", None)
        known &= (X.ndim == 2 or not own) and not hasattr(self, "feature_names_in_")
        return kind and known and bool(np.isfinite(X).all())

    def _compute(self, X: Any) -> dict[str, np.ndarray]:
        """Return the target of the loss for X, and the labels if the file has them."""
        self._require_fitted()
        return self._network.run(self._check_inputs(X))

    def _require_fitted(self) -> None:
        if not self.__sklearn_is_fitted__():
            raise NotFittedError("nothing was trained yet: call fit first")

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "n_iter_")

    # -- what the two differ in ---------------------------------------------------------------

    def _check_labels(self, y: np.ndarray) -> np.ndarray:
        """Return labels that `fit` takes."""
        raise NotImplementedError

    def _ignores_nan(self) -> bool:
        """Return whether labels may be NaN, which the loss leaves out."""
        return False

    def _learn_labels(self, y: np.ndarray) -> None:
        """Learn what the labels are, before there is a model."""

    def _outputs(self, y: np.ndarray) -> tuple[int, Any]:
        """Return the units of the last layer of a perceptron, and its `classes`."""
        raise NotImplementedError

    def _agree(self, head: Head, y: np.ndarray) -> None:
        """Raise `ValueError` if the labels are not those of the model."""

    def _objective(self, head: Head) -> tuple[Any, Mapping[str, Any] | None, Any]:
        """Return the loss, its options, and the metric of validation data, `_metric_name`."""
        return "squared_error" if self.loss is None else self.loss, self.loss_options, "r2"

    def _encode_labels(self, y: np.ndarray) -> np.ndarray:
        """Return labels as the loss takes them."""
        return self._network.head.as_target(y)

    def _sample_weights(self, y: np.ndarray, weight: np.ndarray | None) -> np.ndarray | None:
        """Return the sample weights, times those of the classes."""
        return weight

    def _strata(self, y: np.ndarray) -> np.ndarray | None:
        """Return the labels whose shares are kept where rows are held out."""
        return None


def other_head(what: str, units: int) -> ValueError:
    """Return the error for labels that a model does not predict."""
    return ValueError(
        f"the model has {what}: give it a new head first, "
        f"onnxgrad.replace_head(model, units={units})"
    )
