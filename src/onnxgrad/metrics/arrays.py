"""Predictions and labels of all shapes, as rows that metrics compare."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from onnxgrad.metrics.base import PredictionInfo


class Rows(NamedTuple):
    """Labelled predictions, one a row; rows with the ignored label are left out.

    Attributes:
        scores: (rows, classes), or (rows,) for scores of one of two classes.
        label: class indices (rows,), or shares of the classes: (rows, classes), or (rows,) with the
            share of the second of two classes.
        weight: sample weights (rows,) in float64, or None.
    """

    scores: np.ndarray
    label: np.ndarray
    weight: np.ndarray | None

    @property
    def true(self) -> np.ndarray:
        """Class indices of the labels; of shares, the largest one's."""
        if self.scores.ndim == 1:
            return (self.label > 0.5).astype(np.int64)
        return self.label.argmax(axis=1) if self.label.ndim == 2 else self.label

    def predicted(self, info: PredictionInfo) -> np.ndarray:
        """Class indices of the predictions."""
        if self.scores.ndim == 1:
            return (self.scores > info.threshold).astype(np.int64)
        return self.scores.argmax(axis=1)


def class_rows(
    name: str,
    info: PredictionInfo,
    prediction: np.ndarray,
    label: np.ndarray,
    weight: np.ndarray | None,
) -> Rows:
    """Return a batch as rows of scores and labels; raise ValueError for what does not fit."""
    prediction = _numeric(name, "prediction", prediction)
    label = _numeric(name, "label", label, info.ignore_nan)
    convert = _of_one_score if info.classes is None else _of_classes
    shape = label.shape
    scores, label = convert(name, info, prediction, label)
    weight = _weight(name, weight, shape, len(scores))
    if label.ndim == 1 and (info.ignore_index is not None or info.ignore_nan):
        keep = ~np.isnan(label) if info.ignore_nan else label != info.ignore_index
        if not keep.all():
            scores, label = scores[keep], label[keep]
            weight = None if weight is None else weight[keep]
    return Rows(scores, _checked(name, info, label), weight)


def _of_classes(
    name: str, info: PredictionInfo, prediction: np.ndarray, label: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return scores (rows, classes), and labels: class indices, or shares of the classes."""
    assert info.classes is not None
    shape, rank = prediction.shape, prediction.ndim
    axis = info.axis + rank if info.axis < 0 else info.axis
    if not 0 < axis < rank or shape[axis] != info.classes:
        raise ValueError(
            f"metric {name!r}: a prediction of shape {shape} has no {info.classes} classes along "
            f"axis {info.axis}"
        )
    scores = np.moveaxis(prediction, axis, -1).reshape(-1, info.classes)
    if label.shape == shape:
        return scores, np.moveaxis(label, axis, -1).reshape(-1, info.classes)
    items = (*shape[:axis], *shape[axis + 1 :])
    if label.shape not in (items, (*items, 1), (*shape[:axis], 1, *shape[axis + 1 :])):
        raise _misfit(name, prediction, label, f"{items} of class indices, or {shape}")
    return scores, label.reshape(-1)


def _of_one_score(
    name: str, info: PredictionInfo, prediction: np.ndarray, label: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the scores of one of two classes and the labels, both (rows,)."""
    if _without_ones(prediction.shape) != _without_ones(label.shape):
        raise _misfit(name, prediction, label, f"{prediction.shape}")
    return prediction.reshape(-1), label.reshape(-1)


def _checked(name: str, info: PredictionInfo, label: np.ndarray) -> np.ndarray:
    """Return valid labels, class indices as int64."""
    in_bounds = bool(((label >= 0) & (label <= 1)).all())
    if info.classes is None:
        if not in_bounds and not (abs(label) == 1).all():
            raise ValueError(
                f"metric {name!r}: labels of two classes are 0 and 1, -1 and 1, or between 0 and "
                f"1, not from {label.min()} to {label.max()}; ignore_index names one to leave out"
            )
        return label
    if label.ndim == 2:
        if not in_bounds:
            raise ValueError(
                f"metric {name!r}: labels that are shares of the classes are from 0 to 1, not from "
                f"{label.min()} to {label.max()}"
            )
        return label
    index = label.astype(np.int64, copy=False)
    if not ((index == label) & (index >= 0) & (index < info.classes)).all():
        raise ValueError(
            f"metric {name!r}: class indices must be integers from 0 to {info.classes - 1}, not "
            f"from {label.min()} to {label.max()}; ignore_index names one to leave out"
        )
    return index


def number_rows(
    name: str,
    info: PredictionInfo,
    prediction: np.ndarray,
    label: np.ndarray,
    weight: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return predictions and labels as float64 (rows, outputs), and the weights.

    These are (rows,), or (rows, outputs) if each label has its own, or some are left out.
    """
    prediction = _numeric(name, "prediction", prediction)
    label = _numeric(name, "label", label, info.ignore_nan)
    if _without_ones(prediction.shape) != _without_ones(label.shape):
        raise _misfit(name, prediction, label, f"{prediction.shape}")
    shape = (len(prediction), int(np.prod(prediction.shape[1:])))
    if weight is not None:
        items = len(label) if np.ndim(weight) == 1 else label.size
        weight = _weight(name, weight, label.shape, items)
        weight = weight if weight is None or items == len(label) else weight.reshape(shape)
    f, y = (array.reshape(shape).astype(np.float64, copy=False) for array in (prediction, label))
    if info.ignore_nan and (nan := np.isnan(y)).any():
        own = np.ones(len(y)) if weight is None else weight
        weight, y = own.reshape(len(y), -1) * ~nan, np.where(nan, 0.0, y)
    return f, y, weight


def _numeric(name: str, what: str, array: np.ndarray, nan: bool = False) -> np.ndarray:
    """Return an array of numbers with rows; raise ValueError for NaN, unless it may have some."""
    array = np.asarray(array)
    if array.dtype.kind == "V":  # bfloat16 and the like of ml_dtypes
        array = array.astype(np.float32)
    if array.dtype.kind not in "biuf" or array.ndim == 0:
        raise ValueError(
            f"metric {name!r}: the {what} must be an array of numbers with rows, not of dtype "
            f"{array.dtype} and shape {array.shape}"
        )
    if array.dtype.kind == "f" and not nan and np.isnan(array).any():
        raise ValueError(f"metric {name!r}: the {what} has NaN")
    return array


def _weight(
    name: str, weight: np.ndarray | None, label: tuple[int, ...], items: int
) -> np.ndarray | None:
    """Return the weight of every item: its own, in the shape of the label, or that of its row."""
    if weight is None:
        return None
    weight, rows = np.asarray(weight, np.float64), label[:1]
    if weight.shape != rows and (weight.shape != label or weight.size != items):
        raise ValueError(
            f"metric {name!r}: weights of {rows[0]} rows have shape {rows}, not {weight.shape}"
        )
    if not ((weight >= 0) & (weight < np.inf)).all():
        raise ValueError(f"metric {name!r}: weights must be finite and 0 or more")
    return weight.ravel().repeat(items // weight.size) if weight.size else weight


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape without the axes of length 1 at its end, the first axis excepted."""
    end = len(shape)
    while end > 1 and shape[end - 1] == 1:
        end -= 1
    return shape[:end]


def _misfit(name: str, prediction: np.ndarray, label: np.ndarray, needs: str) -> ValueError:
    return ValueError(
        f"metric {name!r}: labels of a prediction of shape {prediction.shape} have shape {needs}, "
        f"not {label.shape}"
    )
