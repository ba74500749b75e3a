"""Facts of labels that a training reads before it begins: their shapes, and class weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx import ModelProto

from onnxgrad.data.arrays import to_numbers
from onnxgrad.data.class_numbers import class_numbers, key
from onnxgrad.errors import argument, unknown
from onnxgrad.runtime.values import shape_of
from onnxgrad.training.data import Dataset


def label_shapes(data: Dataset, proto: ModelProto) -> dict[str, tuple[int, ...]]:
    """Return the shapes of labels by input or output, as far as they are arrays or lists.

    Those of a list of batches are of the first one. In a dict of inputs and labels, the latter are
    called "label", or as an output of the model.
    """
    labels = data.first_labels
    if labels is None:
        return {}
    if isinstance(labels, Mapping) and labels is not data.y:
        outputs = [y.name for y in proto.graph.output]
        names = {"label", *outputs, *(f"label_{name}" for name in outputs)}
        names -= {x.name for x in proto.graph.input}
        labels = {name: array for name, array in labels.items() if name in names}
    named = labels if isinstance(labels, Mapping) else {"label": labels}
    shapes = {str(name): _shape(array) for name, array in named.items()}
    return {name: shape for name, shape in shapes.items() if shape is not None}


def _shape(array: Any) -> tuple[int, ...] | None:
    """Return the shape of an array or of a list of rows; None for names of columns."""
    if isinstance(array, (list, tuple)) and array and not isinstance(array[0], str):
        return len(array), *np.shape(array[0])
    return tuple(shape_of(array)) if hasattr(array, "shape") else None


def weights_by_number(weights: Any, classes: Sequence[Any]) -> Any:
    """Return weights of classes by their numbers; names stand for their places in `classes`.

    Raises:
        ValueError: a name that is none of the classes.
    """
    if not isinstance(weights, Mapping):
        return weights
    index = {key(label): number for number, label in enumerate(classes)}
    named = bool(classes) and not isinstance(classes[0], str)
    numbered = {}
    for label, weight in weights.items():
        if isinstance(weight, Mapping):  # of an output
            numbered[label] = weights_by_number(weight, classes)
        elif named or (isinstance(label, str) and index):
            if key(label) not in index:
                raise unknown(f"class ({argument('class_weight')})", key(label), [*index])
            numbered[index[key(label)]] = weight
        else:
            numbered[label] = weight
    return numbered


def balanced_weights(
    y: Any, ignored: int | None = None, classes: Sequence[Any] = ()
) -> dict[int, float]:
    """Return weights of classes, inversely proportional to their frequencies in `y`.

    The weight of a class is n / (k n_c) for n labels of k classes, n_c of them of class c, as
    scikit-learn's `class_weight="balanced"`. Labels below 0, and those that are `ignored`, do not
    count. `classes` are what names may stand for.

    Raises:
        ValueError: the labels are no array of class indices.
    """
    given = argument("class_weight", "balanced")
    if y is None or isinstance(y, Mapping):
        raise ValueError(f"{given} needs one array of labels: pass the weights")
    labels = to_numbers("y", class_numbers(y, classes))
    if labels.dtype.kind not in "iu":
        raise ValueError(f"{given} needs class indices, not {labels.dtype}")
    every, counts = np.unique(labels[(labels >= 0) & (labels != ignored)], return_counts=True)
    weights = counts.sum() / (len(every) * counts)
    return dict(zip(every.tolist(), weights.tolist(), strict=True))
