"""`OnnxRegressor`: an ONNX model as a regressor of scikit-learn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import numpy as np
from sklearn.base import RegressorMixin

from onnxgrad.sklearn.base import OnnxEstimator, other_head
from onnxgrad.sklearn.head import Head


class OnnxRegressor(RegressorMixin, OnnxEstimator):
    """A regressor with the interface of scikit-learn, which trains an ONNX model.

    It trains by `onnxgrad.Trainer`, for one target, (rows,), or several, (rows, targets).

    Args:
        model: path, model or serialized model, or a model of scikit-learn, as in `OnnxClassifier`.
            None: a multi-layer perceptron like `MLPRegressor`, with the output "prediction".
        hidden_layer_sizes: units of the hidden layers of the perceptron.
        activation: "relu", "tanh", "logistic" or "identity", of its hidden layers.
        loss: as in `Trainer`; None: the squared error.
        loss_options: options of a loss that is a name; with `ignore_nan`, labels may be NaN.
        optimizer: name or optimizer of onnxgrad.
        learning_rate: number or schedule. None: the default of the optimizer, as in `Trainer`.
        max_iter: largest number of epochs.
        batch_size: rows of a step; "auto" is 200, or all rows if they are fewer.
        shuffle: whether the rows are ordered anew for every epoch.
        tol: the least improvement that counts. None: train for `max_iter` epochs.
        n_iter_no_change: epochs in a row without improvement of the loss after which training ends;
            with `early_stopping`, of R² of validation data. `numpy.inf` for no limit.
        early_stopping: hold out rows for validation, and keep the weights of the best epoch.
        validation_fraction: share of the rows that are held out.
        train: names and patterns of the tensors that train; None: see `onnxgrad.trainable`.
        freeze: names and patterns of the tensors that do not train.
        clip_norm: largest norm of all gradients together.
        batch_norm: "frozen" or "train", as in `Trainer`.
        dropout: `{pattern: p}`, as in `Trainer`.
        callbacks: callbacks of onnxgrad.
        precision: precision of a model with floats of 16 bits, as in `Trainer`.
        device: "cpu", "cuda" or "cuda:1".
        warm_start: whether `fit` begins with the weights of the last call.
        verbose: 1 shows the progress.
        random_state: seed or `RandomState` of initial weights, the order of rows, dropout and the
            rows held out.

    Attributes:
        n_features_in_: number of columns of X.
        feature_names_in_: names of the columns, if X was a table with names.
        loss_curve_: mean training loss of each epoch.
        loss_: training loss of the last epoch.
        best_loss_: lowest training loss of an epoch; None with `early_stopping`.
        validation_scores_: R² of the rows held out after each epoch; None without them.
        best_validation_score_: highest R² of the rows held out.
        n_iter_: number of epochs.

    Examples:
        >>> import numpy as np
        >>> from onnxgrad.sklearn import OnnxRegressor
        >>> X = np.random.default_rng(0).normal(size=(200, 2))
        >>> model = OnnxRegressor(learning_rate=0.01, random_state=0, tol=None)
        >>> model.fit(X, X[:, 0] - X[:, 1]).score(X, X[:, 0] - X[:, 1]) > 0.99
        True
    """

    _metric_name, _probes_model = "r2", False

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train for one epoch, continuing with the weights and optimizer state of the last call.

        Args:
            X: as in `fit`.
            y: as in `fit`.
            sample_weight: as in `fit`.

        Raises:
            ValueError: as `fit`; or `early_stopping=True`.
        """
        return self._train_one_epoch(X, y, sample_weight)

    def predict(self, X: Any) -> np.ndarray:
        """Return the predictions for X, in the shape of the labels that `fit` got.

        Args:
            X: as in `fit`.

        Raises:
            NotFittedError: `fit` was not called.
        """
        values = self._compute_outputs(X)[self._network.head.target]
        return (
            values.reshape(len(values))
            if self._is_one_target and values.size == len(values)
            else values
        )

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def _check_labels(self, y: np.ndarray) -> np.ndarray:
        return y if y.dtype.kind == "f" else y.astype(np.float64)

    def _allows_nan_labels(self) -> bool:
        losses = self.loss.values() if isinstance(self.loss, Mapping) else [self.loss]
        options = dict(self.loss_options or {})
        each = [options, *(given for given in options.values() if isinstance(given, Mapping))]
        return any(given.get("ignore_nan") for given in each) or any(
            getattr(loss, "ignore_nan", False) for loss in losses
        )

    def _store_label_attributes(self, y: np.ndarray) -> tuple[int, Any]:
        self._is_one_target = y.ndim == 1
        return 1 if y.ndim == 1 else y.shape[1], None

    def _check_head(self, head: Head, y: np.ndarray) -> None:
        shape = y.shape[1:] or (1,)
        if (head.shape or (1,)) != shape:
            what = f"predictions of the shape {head.shape} for each row, and y {shape}"
            raise other_head(what, shape[-1])
