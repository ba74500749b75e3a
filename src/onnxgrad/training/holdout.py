"""What a training reads from its data before it begins: held-out rows, and facts of labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from onnxgrad.data.arrays import to_numbers
from onnxgrad.training.batches import ArraySource, BatchSource


def held_out_share(source: BatchSource, share: float, seed: int) -> tuple[ArraySource, ArraySource]:
    """Return the rows to train on, and the share of them that is held out, drawn by `seed`.

    Raises:
        ValueError: the share leaves one of both empty, or the data are not arrays in memory.
    """
    if not isinstance(source, ArraySource):
        raise ValueError(
            "validation=<share> needs arrays or tables in memory: pass other validation data"
        )
    count = round(source.rows * share)
    if not 0 < share < 1 or count in (0, source.rows):
        raise ValueError(
            f"validation={share!r} of {source.rows} rows leaves a part empty: pass a share above 0 "
            "and below 1, or (X, y)"
        )
    order = np.random.default_rng([seed, 1]).permutation(source.rows)
    return source.take(np.sort(order[count:])), source.take(np.sort(order[:count]))


def label_shapes(y: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of labels by input, as far as they are arrays."""
    labels = y if isinstance(y, Mapping) else {"label": y}
    return {str(k): tuple(np.shape(v)) for k, v in labels.items() if hasattr(v, "shape")}


def balanced(y: Any, ignored: int | None = None) -> dict[int, float]:
    """Return weights of classes, inversely proportional to their frequencies in `y`.

    The weight of a class is n / (k n_c) for n labels of k classes, n_c of them of class c, as
    scikit-learn's `class_weight="balanced"`. Labels below 0, and those that are `ignored`, do not
    count.

    Raises:
        ValueError: the labels are no array of class indices.
    """
    if y is None or isinstance(y, Mapping):
        raise ValueError("class_weight='balanced' needs one array of labels: pass the weights")
    labels = to_numbers("y", y)
    if labels.dtype.kind not in "iu":
        raise ValueError(f"class_weight='balanced' needs class indices, not {labels.dtype}")
    classes, counts = np.unique(labels[(labels >= 0) & (labels != ignored)], return_counts=True)
    weights = counts.sum() / (len(classes) * counts)
    return dict(zip(classes.tolist(), weights.tolist(), strict=True))
