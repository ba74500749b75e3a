"""Weights of classes in a loss: given by names or indices of classes, or balanced by labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onnxgrad.checks import check_choice
from onnxgrad.data.class_numbers import mask_labels_outside
from onnxgrad.errors import argument, named
from onnxgrad.losses.info import LossInfo
from onnxgrad.losses.objectives import takes_class_weight
from onnxgrad.training.batches import BatchSource


def balanced_outputs(weight: Any, loss: Any) -> list[str] | None:
    """Return the names of the outputs for which `class_weight` is "balanced".

    The list is empty if `class_weight` is "balanced" for all outputs. None: for no output.

    Args:
        weight: the argument `class_weight` of a trainer.
        loss: its argument `loss`.

    Raises:
        ValueError: another text than "balanced", or no loss takes weights of classes.
    """
    if isinstance(weight, str):
        check_choice("class_weight", weight, ["balanced"])
        if not isinstance(loss, Mapping):
            return []
        if outputs := [name for name in loss if takes_class_weight(loss[name])]:
            return outputs
        given = named("class_weight")
        raise ValueError(f"{given} has no effect, as no label is a class: leave out {given}")
    by_output = weight if isinstance(weight, Mapping) else {}
    outputs = [name for name, value in by_output.items() if isinstance(value, str)]
    for name in outputs:
        check_choice(f"class_weight[{name!r}]", weight[name], ["balanced"])
    return outputs or None


def all_class_weights(weight: Any, loss: Any, balanced: dict[str, Any] | None) -> Any:
    """Return the argument `class_weight` of a trainer, with "balanced" replaced by weights.

    Args:
        weight: the argument `class_weight`.
        loss: the argument `loss`; if it is by output, the result is, too.
        balanced: the weights that `balanced_class_weights` returned.
    """
    if balanced_outputs(weight, loss) is None:
        return weight
    if not isinstance(loss, Mapping):
        return next(iter((balanced or {}).values()), None)
    given = {} if isinstance(weight, str) else weight
    return {name: v for name, v in given.items() if not isinstance(v, str)} | (balanced or {})


def balanced_class_weights(
    source: BatchSource, labels: Mapping[str, LossInfo], outputs: Sequence[str]
) -> dict[str, dict[int, float]]:
    """Return class weights that are inversely proportional to the frequencies of classes.

    The weight of a class is n / (k n_c) for n labels of k classes, n_c of them of class c, as
    scikit-learn's `class_weight="balanced"`. Labels that are ignored or NaN do not count.

    Args:
        source: the batches to train on; all their labels are read.
        labels: the facts of the loss, by label input.
        outputs: the result of `balanced_outputs`.

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
        raise ValueError(
            f"{given} needs a loss whose labels are class indices: pass such a loss, or leave out "
            f"{named('class_weight')}"
        )
    counts: dict[str, Counter[int]] = {name: Counter() for name in infos}
    for piece in source.label_batches():
        for name, info in infos.items():
            array = np.asarray(piece[name])
            counted = array[(array != info.ignore_index) & (array == array)]  # NaN is no label
            values, repeats = np.unique(counted, return_counts=True)
            if mask_labels_outside(values).any():
                raise ValueError(
                    f"{given} needs class indices in the label {name!r}, whole numbers from 0: "
                    "pass the weights of classes"
                )
            counts[name].update(dict(zip(map(int, values.tolist()), repeats.tolist(), strict=True)))
    return {
        str(infos[name].prediction): {
            c: own.total() / (len(own) * n) for c, n in sorted(own.items())
        }
        for name, own in counts.items()
    }
