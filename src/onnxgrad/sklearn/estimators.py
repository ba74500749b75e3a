"""`OnnxClassifier` and `OnnxRegressor`: ONNX models as estimators of scikit-learn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from scipy.special import expit, softmax
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils import compute_sample_weight
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets, type_of_target

from onnxgrad.data.class_numbers import ClassNames
from onnxgrad.losses.spec import ALIASES, LOSSES, LossSpec
from onnxgrad.metrics.foreign import FunctionMetric
from onnxgrad.sklearn.base import OnnxEstimator, head_mismatch_error
from onnxgrad.sklearn.head import Head


def _has_probabilities(self: Any) -> bool:
    """Return whether the estimator's loss defines probabilities, for `predict_proba`."""
    if self._has_network:
        return self._network.from_logits is not None
    spec = _loss_spec(self.loss)
    return self.loss is None or (spec is not None and "from_logits" in spec.all_options)


def _predicts_scores(self: Any) -> bool:
    """Return whether the estimator's network computes scores, not probabilities."""
    return self._has_network and self._network.from_logits is not False


@dataclass(kw_only=True, eq=False, repr=False)
class OnnxClassifier(ClassifierMixin, OnnxEstimator):
    """A classifier with the interface of scikit-learn, which trains an ONNX model.

    It trains by `onnxgrad.Trainer`. Labels are numbers or text, of two or more classes; or the
    indicators of several labels a row, (rows, labels). The model that `to_onnx` returns predicts
    the same labels.

    Args:
        model: path, model or serialized model. If the file stores labels, as files of skl2onnx do,
            y must have no other labels. A model of scikit-learn is converted by skl2onnx: if it is
            fitted, training begins with its weights; otherwise it is fitted first. `clone`, and so
            a grid search, makes a fitted model unfitted, unless it is in a
            `sklearn.frozen.FrozenEstimator`. None: a multi-layer perceptron like `MLPClassifier`,
            in the dtype of X, with the outputs "label" and "probabilities".
        hidden_layer_sizes: units of the hidden layers of the perceptron.
        activation: "relu", "tanh", "logistic" or "identity", of its hidden layers.
        loss: as in `Trainer`. None: the cross entropy, of scores or of probabilities, whichever
            the graph computes.
        loss_options: options of a loss that is a name.
        optimizer: name or optimizer of onnxgrad.
        learning_rate: number or schedule. None: the default of the optimizer, as in `Trainer`.
        max_iter: largest number of epochs.
        batch_size: rows of a step; "auto" is 200, or all rows if they are fewer.
        shuffle: whether the rows are ordered anew for every epoch.
        tol: the least improvement that counts. None: train for `max_iter` epochs.
        n_iter_no_change: epochs in a row without improvement of the loss after which training ends;
            with `early_stopping`, of the accuracy of validation data. `numpy.inf` for no limit.
        early_stopping: hold out rows for validation, and keep the weights of the best epoch.
        validation_fraction: share of the rows that are held out.
        class_weight: `{label: weight}`, or "balanced"; they multiply the sample weights.
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
        classes_: labels, in the order of the columns of `predict_proba`.
        n_features_in_: number of columns of X.
        feature_names_in_: names of the columns, if X was a table with names.
        loss_curve_: mean training loss of each epoch.
        loss_: training loss of the last epoch.
        best_loss_: lowest training loss of an epoch; None with `early_stopping`.
        validation_scores_: accuracy of the rows held out after each epoch; None without them.
        best_validation_score_: highest accuracy of the rows held out.
        n_iter_: number of epochs.

    Examples:
        >>> import numpy as np
        >>> from onnxgrad.sklearn import OnnxClassifier
        >>> X = np.random.default_rng(0).normal(size=(200, 2))
        >>> y = np.where(X[:, 0] > X[:, 1], "low", "high")
        >>> clf = OnnxClassifier(random_state=0, tol=None).fit(X, y)
        >>> clf.predict([[3.0, 0.0]]), clf.score(X, y) > 0.95
        (array(['low'], dtype='<U4'), True)
    """

    class_weight: Any = None

    _metric_name, _probes_model = "accuracy", True

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:
        """Train for one epoch, continuing with the weights and optimizer state of the last call.

        Args:
            X: as in `fit`.
            y: as in `fit`.
            classes: the labels of all classes, at the first call; None if y has all of them.
            sample_weight: as in `fit`.

        Raises:
            ValueError: as `fit`; labels that are not in `classes`; or `early_stopping=True`.
        """
        if isinstance(self.class_weight, str):
            raise ValueError(
                f"class_weight={self.class_weight!r} is not supported by partial_fit, which does "
                "not see all labels: pass {class: weight}, as compute_class_weight returns"
            )
        if classes is not None and self._has_network and not np.isin(classes, self.classes_).all():
            raise ValueError(
                f"classes={list(classes)}, and the first call of partial_fit had the classes "
                f"{np.sort(self.classes_).tolist()}: pass these"
            )
        return self._train_one_epoch(X, y, sample_weight, classes=classes)

    # -- predictions --------------------------------------------------------------------------

    def predict(self, X: Any) -> np.ndarray:
        """Return the predicted labels, (rows,); for multilabel data 0 and 1, (rows, labels).

        Args:
            X: as in `fit`.

        Raises:
            NotFittedError: `fit` was not called.
        """
        computed, head = self._compute_outputs(X), self._network.head
        if head.label is not None:
            labels = computed[head.label]
            return (
                labels if self._is_multilabel else self.classes_[head.class_indices(labels.ravel())]
            )
        values = computed[head.target]
        threshold = 0.5 if self._network.from_logits is False else 0.0
        if self._is_multilabel:
            return (values > threshold).astype(np.int64)
        if head.column_count == 1:
            return self.classes_[(values.reshape(len(values)) > threshold).astype(np.int64)]
        return self.classes_[values.reshape(len(values), -1).argmax(axis=1)]

    @available_if(_has_probabilities)
    def predict_proba(self, X: Any) -> np.ndarray:
        """Return class probabilities (rows, classes), in the order of `classes_`.

        Args:
            X: as in `fit`.

        Raises:
            NotFittedError: `fit` was not called.
        """
        values = self._scores_by_class(X)
        shares = values.shape[1] > 1 and not (self._is_multilabel or self._network.head.one_vs_rest)
        p = values
        if self._network.from_logits:
            p = softmax(values, axis=1) if shares else expit(values)
        if shares or self._is_multilabel:
            return p
        return np.hstack([1 - p, p]) if p.shape[1] == 1 else p / p.sum(axis=1, keepdims=True)

    @available_if(_has_probabilities)
    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Return the logarithms of the probabilities of the classes.

        Args:
            X: as in `fit`.

        Raises:
            NotFittedError: `fit` was not called.
        """
        with np.errstate(divide="ignore"):
            return np.log(self.predict_proba(X))

    @available_if(_predicts_scores)
    def decision_function(self, X: Any) -> np.ndarray:
        """Return class scores, (rows, classes), or (rows,) for two classes.

        Only for models that compute scores, not probabilities.

        Args:
            X: as in `fit`.
        """
        values = self._scores_by_class(X)
        if self._is_multilabel or values.shape[1] > 2:
            return values
        return values[:, -1] - values[:, 0] if values.shape[1] == 2 else values[:, 0]

    def _scores_by_class(self, X: Any) -> np.ndarray:
        """Return the scores or probabilities for X, with columns in the order of `classes_`."""
        computed, head = self._compute_outputs(X), self._network.head
        values = computed[head.target].reshape(len(computed[head.target]), -1)
        if not head.flipped:
            return values
        if values.shape[1] == 2:
            return values[:, ::-1]
        return -values if self._network.from_logits is not False else 1 - values

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_label = True
        return tags

    # -- labels -------------------------------------------------------------------------------

    def _check_labels(self, y: np.ndarray) -> np.ndarray:
        check_classification_targets(y)
        if y.ndim > 1 and type_of_target(y) != "multilabel-indicator":
            raise ValueError(f"Unknown label type: {type_of_target(y)}")
        return y

    def _store_label_attributes(self, y: np.ndarray, classes: Any = None) -> tuple[int, Any]:
        self._is_multilabel = y.ndim > 1
        if self._is_multilabel:
            self.classes_ = np.arange(y.shape[1])
            return y.shape[1], []
        self.classes_ = classes = np.unique(y if classes is None else classes)
        if len(classes) < 2:
            raise ValueError(
                "a classifier needs labels of at least 2 classes, and y has one class, "
                f"{classes.tolist()}"
            )
        whole = classes.dtype.kind in "iub" or (
            classes.dtype.kind == "f" and (classes == classes.astype(np.int64)).all()
        )
        names = classes.astype(np.int64) if whole else [str(c) for c in classes]
        return (1 if len(classes) == 2 else len(classes)), list(names)

    def _check_labels_fit_outputs(self, head: Head, y: np.ndarray) -> None:
        new, columns = self.classes_, head.column_count
        if self._is_multilabel:
            if columns != len(new):
                raise head_mismatch_error(
                    f"{columns} outputs, and y has {len(new)} labels per row", len(new)
                )
            return
        units = max(columns, 2)
        if head.classes is None:
            if len(new) == units:
                return
            if new.dtype.kind not in "iu" or new.min() < 0 or new.max() >= units:
                what = f"{columns} outputs, for {units} classes, and y has {len(new)} classes"
                raise head_mismatch_error(what, len(new))
            self.classes_ = np.arange(units)
        elif self.model is not None:
            stored, text = head.classes, head.classes.dtype.kind == "U"
            if text != (new.dtype.kind in "UO") or not np.isin(new, stored).all():
                what = f"the classes {stored.tolist()}, and y has {new.tolist()}"
                raise head_mismatch_error(what, len(new))
            self.classes_ = stored.astype(new.dtype if new.dtype.kind != "U" else stored.dtype)

    def _loss_or_default(self, head: Head) -> Any:
        """Return the argument `loss`; if it is None, a cross entropy that fits the head."""
        binary = self._is_multilabel or head.column_count == 1 or head.one_vs_rest
        default = "binary_cross_entropy" if binary else "cross_entropy"
        return default if self.loss is None else self.loss

    def _loss_and_metric(self, head: Head) -> tuple[Any, Mapping[str, Any] | None, Any]:
        loss, options, metric = self._loss_or_default(head), self.loss_options, "accuracy"
        spec = _loss_spec(loss)
        left_open = spec and "from_logits" in {*spec.all_options} - {*(options or {})}
        # The graph of a model that no activation ends does not say what its columns are: they are
        # probabilities if their sum was 1, and scores if a support vector machine has two of them.
        if (
            left_open
            and not head.has_activation
            and (head.sums_to_one or (head.flipped and head.column_count == 2))
        ):
            options = {**(options or {}), "from_logits": not head.sums_to_one}
        if self._is_multilabel or head.column_count == 1 or self._loss_reads_class_indices(head):
            return loss, options, metric
        return loss, options, FunctionMetric(_one_hot_accuracy, metric, True)

    def _loss_reads_class_indices(self, head: Head) -> bool:
        """Return whether the loss reads labels as class indices, not as one number per output
        column.
        """
        loss = self._loss_or_default(head)
        spec = _loss_spec(next(iter(loss.values())) if isinstance(loss, Mapping) else loss)
        return spec is None or spec.label_kind.dtype is not None

    def _encode_labels(self, y: np.ndarray) -> np.ndarray:
        head = self._network.head
        if self._is_multilabel:
            return head.reshape_as_target(y.astype(np.float64))
        y = y.astype(self.classes_.dtype) if y.dtype.kind == "b" else y
        index, wrong = ClassNames(self.classes_.tolist()).encode_labels(y)
        if wrong.any():
            raise ValueError(
                f"y has the labels {np.unique(y[wrong]).tolist()}, which are not among the "
                f"classes {self.classes_.tolist()}: pass all classes to fit, or to the first "
                "partial_fit"
            )
        if head.flipped:
            index = 1 - index
        if self._loss_reads_class_indices(head):
            return index
        if head.column_count == 1:
            return head.reshape_as_target(index.astype(np.float64))
        return head.reshape_as_target(np.eye(head.column_count)[index])

    def _sample_weights(self, y: np.ndarray, weight: np.ndarray | None) -> np.ndarray | None:
        if self.class_weight is None:
            return weight
        class_weights = compute_sample_weight(self.class_weight, y)
        return class_weights if weight is None else class_weights * weight


def _loss_spec(loss: Any) -> LossSpec | None:
    """Return `loss` if it is a `LossSpec`, or the `LossSpec` that `LOSSES` has of this name; else
    None.
    """
    if isinstance(loss, LossSpec):
        return loss
    return LOSSES.get(ALIASES.get(loss, loss)) if isinstance(loss, str) else None


def _one_hot_accuracy(prediction: Any, label: Any, sample_weight: Any = None) -> float:
    hits = prediction.argmax(axis=-1) == label.argmax(axis=-1)
    return float(np.average(hits, weights=None if sample_weight is None else sample_weight.ravel()))


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

    def _check_labels_fit_outputs(self, head: Head, y: np.ndarray) -> None:
        shape = y.shape[1:] or (1,)
        if (head.shape or (1,)) != shape:
            what = f"predictions of the shape {head.shape} for each row, and y has {shape}"
            raise head_mismatch_error(what, shape[-1])
