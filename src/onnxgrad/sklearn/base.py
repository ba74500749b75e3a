"""`OnnxEstimator`, the base of `OnnxClassifier` and `OnnxRegressor`: data, arguments, training."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, ClassVar, Self

import numpy as np
from onnx import ModelProto
from sklearn.base import BaseEstimator, is_classifier
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
from onnxgrad.sklearn.frozen_part import is_input_dict, needs_frozen_part, text_inputs
from onnxgrad.sklearn.head import Head, read_head
from onnxgrad.sklearn.mlp import build_mlp
from onnxgrad.sklearn.network import Network, RowPredictor
from onnxgrad.training.batches import Split
from onnxgrad.training.callbacks.early_stopping import EarlyStopping
from onnxgrad.training.callbacks.progress import Progress
from onnxgrad.training.equality import are_surely_equal

_PROBED_ROWS = 256  # rows on which a model runs before it trains
_MODELS = (ModelProto, bytes, os.PathLike)
_COUNT = Interval(Integral, 1, None, closed="left")
_TRAINER_ARGUMENTS = (
    "optimizer learning_rate train freeze clip_norm batch_norm dropout precision device".split()
)


@dataclass(kw_only=True, eq=False, repr=False)
class OnnxEstimator(BaseEstimator):
    """Base class of `OnnxClassifier` and `OnnxRegressor`, which add methods for their labels."""

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
    _probes_model: ClassVar[bool]  # whether `model` runs on some rows before it trains
    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        "batch_size": [StrOptions({"auto"}), _COUNT],
        "max_iter": [_COUNT],
        "tol": [None, Interval(Real, 0, None, closed="left")],
        "n_iter_no_change": [_COUNT, Options(Real, {np.inf})],
    }

    # -- training -----------------------------------------------------------------------------

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train the network on X and y for at most `max_iter` epochs.

        Training begins with the weights of `model`; with `warm_start`, with the weights that the
        last call trained.

        Args:
            X: (rows, features), or an array of the shape of the model's input; for a model of
                several inputs, a table whose columns have the names of the inputs, or a dict of
                arrays. Text and missing values need encoders and imputers in front of the layers
                that train; these do not change.
            y: labels, (rows,) or (rows, outputs).
            sample_weight: (rows,).

        Raises:
            ValueError: invalid arguments or data.
            NoGradientRule: an operator between the weights and the loss has no rule.
            ConvergenceError: the loss became NaN or infinite.
        """
        self._validate_params()
        warm = self.warm_start and self._has_network
        data = self._check_data(X, y, sample_weight, reset=not warm)
        if warm:
            self._rebuild_network()
        else:
            self._build_network(*data)
        split, stopping, patience = None, [], self.n_iter_no_change
        name = f"validation_{self._metric_name}"
        if self.early_stopping:
            split = self._split_rows_at_random(data[1])
            stopping = [EarlyStopping(name, patience, min_delta=self.tol or 0.0)]
        elif self.tol is not None and np.isfinite(patience):
            stopping = [EarlyStopping("loss", patience, restore=False, min_delta=self.tol)]
        callbacks = [*stopping, *[Progress()] * bool(self.verbose)]
        self._train_network(data, callbacks, validation=split, epochs=self.max_iter)
        history = self._network.trainer.history
        self._store_loss_curve([entry["loss"] for entry in history if "loss" in entry])
        scores = [entry[name] for entry in history if name in entry]
        self.validation_scores_ = scores if self.early_stopping else None
        self.best_validation_score_ = max(scores) if self.early_stopping else None
        if stopping and self._network.trainer.state.stop_reason == "max_iter":
            warnings.warn(
                f"the training has not converged in max_iter={self.max_iter} epochs: raise it, or "
                "pass tol=None to train for that many epochs without this warning",
                ConvergenceWarning,
                stacklevel=2,
            )
        return self

    def _train_one_epoch(self, X: Any, y: Any, sample_weight: Any, **label_options: Any) -> Self:
        """Train for one epoch, as `partial_fit` does; `label_options` are its `classes` in the
        first call.
        """
        self._validate_params()
        if self.early_stopping:
            raise ValueError("partial_fit does not support early_stopping=True: set it to False")
        first = not self._has_network
        data = self._check_data(X, y, sample_weight, reset=first)
        if first:
            self._build_network(*data, **label_options)
        else:
            self._apply_changed_arguments()
        self._train_network(data, further=True)
        losses = [] if first else self.loss_curve_
        self._store_loss_curve([*losses, self._network.trainer.history[-1]["loss"]])
        return self

    def _train_network(
        self,
        data: tuple[Any, np.ndarray, np.ndarray | None],
        callbacks: Iterable[Any] = (),
        further: bool = False,
        **options: Any,
    ) -> None:
        """Train the network on checked (X, y, sample weights), with options of `Trainer.fit`."""
        X, y, weight = data
        self._network.remember_column_names([*getattr(self, "feature_names_in_", ())], self._target)
        split = options.get("validation")
        batch_size = self._batch_size(len(y if split is None else split.trained))
        options |= {"batch_size": batch_size, "shuffle": self.shuffle}
        options |= {"sample_weight": self._sample_weights(y, weight)}
        callbacks = [*self.callbacks, *callbacks]
        self._network.train(further, X, self._encode_labels(y), callbacks, **options)

    def _store_loss_curve(self, losses: list[float]) -> None:
        """Set `loss_curve_`, `loss_`, `n_iter_` and `best_loss_` from the loss of each epoch."""
        self.loss_curve_, self.loss_, self.n_iter_ = losses, losses[-1], len(losses)
        self.best_loss_ = None if self.early_stopping else min(losses)

    def _split_rows_at_random(self, y: np.ndarray) -> Split:
        """Return the indices of the training rows, and of the rows held out for validation."""
        stratify = y if is_classifier(self) and y.ndim == 1 else None
        options = {"random_state": self._rng, "test_size": self.validation_fraction}
        split = Split(*train_test_split(np.arange(len(y)), stratify=stratify, **options))
        if len(split.held_out) < 2:
            raise ValueError(
                f"validation_fraction={self.validation_fraction} of {len(y)} rows holds out "
                f"{len(split.held_out)} of them, too small a number for validation: increase "
                "validation_fraction, or pass more rows"
            )
        return split

    @property
    def _has_network(self) -> bool:
        """Whether training has begun, so that the estimator has a `Network`."""
        return "_network" in vars(self)

    # -- the model ----------------------------------------------------------------------------

    def _build_network(self, X: Any, y: Any, weight: Any, **label_options: Any) -> None:
        """Build the `Network` before the first epoch; `label_options` are the `classes` of
        `partial_fit`.
        """
        self._rng = check_random_state(self.random_state)
        units, classes = self._store_label_attributes(y, **label_options)
        if self.model is None:
            features, hidden, dtype = X.shape[1], self.hidden_layer_sizes, X.dtype
            proto = build_mlp(features, hidden, units, self.activation, self._rng, dtype, classes)
        elif is_estimator(self.model):
            proto = convert_estimator(self.model, X, y, weight)
        else:
            proto = read(self.model)
        name = next(iter(self.loss)) if isinstance(self.loss, Mapping) else None
        head, raw = read_head(proto, name), self.model is not None and needs_frozen_part(proto, X)
        if self.model is not None and (head.shape is None or self._probes_model):
            part = slice(_PROBED_ROWS)
            first = {name: a[part] for name, a in X.items()} if is_input_dict(X) else X[part]
            head.infer_column_layout(
                RowPredictor(proto, head.tensor_names, self.device, raw)(first)
            )
        self._check_labels_fit_outputs(head, y)
        self._seed = int(self._rng.randint(2**31 - 1))
        self._network = Network(proto, head, self._trainer_arguments(head), raw)

    def _rebuild_network(self) -> None:
        """Replace the `Network` by a new `Network` with the trained weights and new arguments."""
        head, raw = self._network.head, self._network.front is not None
        self._network = Network(self.to_onnx(), head, self._trainer_arguments(head), raw)

    def _apply_changed_arguments(self) -> None:
        """Apply arguments that `set_params` has changed to the trainer of the network.

        Only the learning rate can change without a new optimizer.
        """
        new, old = self._trainer_arguments(self._network.head), self._network.arguments
        changed = {name for name in new if not are_surely_equal(new[name], old[name])}
        if changed == {"learning_rate"}:
            old["learning_rate"] = self.learning_rate
            self._network.trainer._change_learning_rate(self.learning_rate)
        elif changed:
            self._rebuild_network()

    def _trainer_arguments(self, head: Head) -> dict[str, Any]:
        """Return the arguments of `Trainer`, from the parameters of the estimator."""
        loss, options, metric = self._loss_and_metric(head)
        whole = isinstance(loss, (Mapping, *_MODELS)) or hasattr(loss, "write")
        whole = whole or (isinstance(loss, str) and loss.endswith(".onnx"))
        return {
            "loss": loss if whole else {head.target: loss},
            "loss_options": options if whole or not options else {head.target: options},
            **{name: getattr(self, name) for name in _TRAINER_ARGUMENTS},
            "metrics": [metric] if self.early_stopping else [],
            "seed": self._seed,
        }

    def to_onnx(self) -> ModelProto:
        """Return the trained network as an ONNX model.

        Its inputs and outputs are the inputs and outputs of `model`.

        Raises:
            NotFittedError: `fit` was not called.
        """
        self._require_fitted()
        return self._network.model

    # -- arguments and data -------------------------------------------------------------------

    def _batch_size(self, rows: int) -> int | None:
        """Return the batch size for `rows` rows; None for a model whose batch size is static."""
        if self.batch_size == "auto":
            (first, *_) = self._network.trainer._job.proto.graph.input
            static = any(d.dim_value for d in first.type.tensor_type.shape.dim[:1])
            return None if static else min(200, rows)
        return min(int(self.batch_size), rows)

    def _check_data(
        self, X: Any, y: Any, sample_weight: Any, reset: bool
    ) -> tuple[Any, np.ndarray, np.ndarray | None]:
        """Return checked (X, y, sample weights); with `reset`, set the attributes on the columns of
        X.
        """
        if reset:
            self._takes_tables, self._target = takes_tables(self.model), target_names(y) or []
        X = self._check_inputs(X, reset)
        if y is None:
            raise ValueError(
                f"{type(self).__name__} requires y to be passed, but the target y is None"
            )
        finite = "allow-nan" if self._allows_nan_labels() else True
        y = check_array(y, ensure_2d=False, dtype=None, ensure_all_finite=finite, input_name="y")
        check_consistent_length(next(iter(X.values())) if is_input_dict(X) else X, y)
        if y.ndim == 2 and y.shape[1] == 1:
            y = column_or_1d(y, warn=True)
        y = self._check_labels(y)
        if sample_weight is not None:
            empty = np.zeros((len(y), 1))
            sample_weight = _check_sample_weight(sample_weight, empty, ensure_non_negative=True)
        return X, y, sample_weight

    def _check_inputs(self, X: Any, reset: bool = False) -> Any:
        """Return X, checked by scikit-learn unless it is a dict or a table of model inputs."""
        checks: dict[str, Any] = {"dtype": (np.float64, np.float32)}
        if is_input_dict(X) or (not reset and self._passes_fast_check(X)):
            return X
        X = self._reorder_columns(X)
        if self._takes_tables and is_table(X):
            checks = {"skip_check_array": True}
        elif self.model is not None:
            text = holds_text(X) and (is_estimator(self.model) or text_inputs(read(self.model)))
            dtype = None if text else "numeric"
            checks = {"dtype": dtype, "ensure_all_finite": "allow-nan", "allow_nd": True}
        return validate_data(self, X, reset=reset, **checks)

    def _reorder_columns(self, X: Any) -> Any:
        """Return X with the columns of a table in the order that the ONNX file's metadata store."""
        names = column_names(X)
        if names is None or self.model is None or is_estimator(self.model):
            return X
        known = self._network.trainer._names if self._has_network else read_names(read(self.model))
        order = next(iter(known.columns.values()), names)
        return X[order] if sorted(order) == sorted(names) and order != names else X

    def _passes_fast_check(self, X: Any) -> bool:
        """Return whether X is a finite array with the columns of `fit`, which slow checks would
        accept.
        """
        if type(X) is not np.ndarray or X.ndim < 2 or not len(X):
            return False
        is_perceptron = self.model is None
        numeric = X.dtype in (np.float32, np.float64) if is_perceptron else X.dtype.kind in "iuf"
        known = X.shape[1] == getattr(self, "n_features_in_", None)
        known &= (X.ndim == 2 or not is_perceptron) and not hasattr(self, "feature_names_in_")
        return numeric and known and bool(np.isfinite(X).all())

    def _compute_outputs(self, X: Any) -> dict[str, np.ndarray]:
        """Return {tensor: values for X} of the tensor that the loss reads, and of the label output
        if it exists.
        """
        self._require_fitted()
        return self._network.run(self._check_inputs(X))

    def _require_fitted(self) -> None:
        if not self.__sklearn_is_fitted__():
            raise NotFittedError("nothing was trained yet: call fit first")

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "n_iter_")

    # -- methods that depend on the kind of labels --------------------------------------------

    def _check_labels(self, y: np.ndarray) -> np.ndarray:
        """Return y in a dtype and shape that `fit` takes, or raise `ValueError`."""
        raise NotImplementedError

    def _allows_nan_labels(self) -> bool:
        """Return whether labels may be NaN, for losses that ignore NaN labels."""
        return False

    def _store_label_attributes(self, y: np.ndarray) -> tuple[int, Any]:
        """Set attributes such as `classes_`; return (outputs of the last layer, classes) for
        `build_mlp`.

        The units are the outputs of the last layer.
        """
        raise NotImplementedError

    def _check_labels_fit_outputs(self, head: Head, y: np.ndarray) -> None:
        """Raise `ValueError` if the labels y do not fit the outputs of the model."""

    def _loss_and_metric(self, head: Head) -> tuple[Any, Mapping[str, Any] | None, Any]:
        """Return (loss, its options, metric of the validation data) for the trainer."""
        return "squared_error" if self.loss is None else self.loss, self.loss_options, "r2"

    def _encode_labels(self, y: np.ndarray) -> np.ndarray:
        """Return the labels y as the loss reads them: class indices, one-hot rows, or numbers like
        the target.
        """
        return self._network.head.reshape_as_target(y)

    def _sample_weights(self, y: np.ndarray, weight: np.ndarray | None) -> np.ndarray | None:
        """Return the sample weights times the class weights; None if there are no weights."""
        return weight


def head_mismatch_error(what: str, units: int) -> ValueError:
    """Return the `ValueError` for labels that do not fit the outputs of a model."""
    return ValueError(
        f"the model has {what}: give it a new head first, "
        f"onnxgrad.replace_head(model, units={units})"
    )
