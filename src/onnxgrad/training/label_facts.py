"""Facts of labels that a training reads before it begins: their shapes, and class weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import ModelProto

from onnxgrad.data.class_numbers import key
from onnxgrad.data.columns import column_names
from onnxgrad.errors import argument, unknown
from onnxgrad.losses.info import LossInfo
from onnxgrad.losses.objectives import LABEL
from onnxgrad.training.batches import BatchSource
from onnxgrad.training.data import Dataset, array_shape


def label_shapes(data: Dataset, proto: ModelProto) -> dict[str, tuple[int, ...]]:
    """Return the shapes of labels by input or output, as far as they are known.

    Those of batches are of the first one. Among features, labels are called "label", or as an
    output of the model.
    """
    X, y, _ = data.first
    outputs = [output.name for output in proto.graph.output]
    names = {LABEL, *outputs, *(f"{LABEL}_{name}" for name in outputs)}
    if y is None:
        names -= {x.name for x in proto.graph.input}
        y = {name: X[name] for name in _columns(X) if name in names}
    elif (columns := _columns(y)) and (isinstance(y, Mapping) or {*columns} <= names):
        y = {name: y[name] for name in columns}
    labels = y if isinstance(y, Mapping) else {LABEL: y}
    shapes = {str(name): array_shape(array) for name, array in labels.items()}
    return {name: shape for name, shape in shapes.items() if shape is not None}


def _columns(X: Any) -> list[Any]:
    """Return the names in a dict or in a table; none in an array."""
    return [*X] if isinstance(X, Mapping) else column_names(X) or []


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
        if not np.isscalar(weight) or isinstance(weight, str):  # those of an output
            numbered[label] = weights_by_number(weight, classes)
        elif named or (isinstance(label, str) and index):
            if key(label) not in index:
                raise unknown(f"class ({argument('class_weight')})", key(label), [*index])
            numbered[index[key(label)]] = weight
        else:
            numbered[label] = weight
    return numbered


def balanced_weights(
    source: BatchSource, labels: Mapping[str, LossInfo], outputs: Collection[str] = ()
) -> dict[str, dict[int, float]]:
    """Return weights of classes, inversely proportional to their frequencies in the rows to train.

    The weight of a class is n / (k n_c) for n labels of k classes, n_c of them of class c, as
    scikit-learn's `class_weight="balanced"`. Labels that are ignored or NaN do not count.

    Args:
        source: the batches to train on; of others than arrays, all labels are read.
        labels: what is known of each label.
        outputs: those whose classes are balanced; none for all that have classes.

    Returns:
        `{class: weight}` by output.

    Raises:
        ValueError: no label is a class, or the labels are no class indices.
    """
    given = argument("class_weight", "balanced")
    infos = {
        name: info
        for name, info in labels.items()
        if (info.classes, info.threshold) != (None, None)
        and (not outputs or info.prediction in outputs)
    }
    if not infos or len(infos) < len(outputs):
        raise ValueError(f"{given} needs labels that are numbers of classes: pass the weights")
    counts: dict[str, dict[int, int]] = {name: {} for name in infos}
    for piece in source.label_batches():
        for name, info in infos.items():
            array = np.asarray(piece[name])
            counted = array[(array != info.ignore_index) & (array == array)]  # NaN is no label
            values, numbers = np.unique(counted, return_counts=True)
            if (values < 0).any() or (values != np.trunc(values)).any():
                raise ValueError(f"{given} needs class indices in {name!r}: pass the weights")
            for value, number in zip(values.tolist(), numbers.tolist(), strict=True):
                counts[name][int(value)] = counts[name].get(int(value), 0) + number
    return {
        str(infos[name].prediction): {
            c: sum(own.values()) / (len(own) * n) for c, n in sorted(own.items())
        }
        for name, own in counts.items()
    }
